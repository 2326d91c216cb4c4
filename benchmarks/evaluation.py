"""Our scoring of multiple-choice questions beside EleutherAI's lm-evaluation-harness.

    pip install -e '.[bench]'
    python benchmarks/evaluation.py --model PATH --root DATA [--questions 500] [--rounds 2]

Both score the same questions of ARC-Easy and SciQ with one model object, in one thread, and must
read the same tokens (asserted, question by question). "text": the sum of the log-probabilities of
an option's tokens; "letter": the log-probability of its letter below the lettered options.

Timed is everything from text to log-probabilities, tokenising included, as CPU time of the process;
ours and the harness take turns, and a ratio is the median over rounds. The harness sorts its
requests by length, groups those that differ in the last token alone (so letters cost it one forward
a question too), and gets `--batch` sequences at a time; ours gets `--batch` questions at a time,
and for texts also as few questions as have that many options together.
"""

import argparse
import logging
import statistics
import time

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from calm_lightning import Backbone, MCQADataModule
from calm_lightning.backbone import load_lm, load_tokenizer
from calm_lightning.scoring import option_log_probs

DATASETS = ("arc_easy", "sciq")
SCORINGS = ("text", "letter")
OPTIONS = 4  # a question of these sets
TIE = 1e-3  # nats: float32 sums in another order differ by about 1e-5


class Ours:
    """This package: one forward of each prompt, options on its cache."""

    def __init__(self, backbone: Backbone, data: MCQADataModule, batch: int):
        self.backbone, self.data, self.batch = backbone, data, batch

    def __call__(self) -> dict[str, torch.Tensor]:
        """Log-probabilities (K,) of each question's options, by its id."""
        self.data.eval_batch_size, found = self.batch, {}
        for loader in self.data.test_dataloader():
            for batch in loader:
                log_probs, _ = option_log_probs(self.backbone, batch, {"base": None})["base"]
                rows = zip(batch["id"], log_probs, batch["n_options"], strict=True)
                found |= {f"{batch['dataset']}/{i}": row[:k] for i, row, k in rows}
        return found


class Harness:
    """`HFLM.loglikelihood` on the same model: a request for each option."""

    def __init__(self, lm: HFLM, data: MCQADataModule):
        self.lm, self.data, self.requests = lm, data, []
        for question in data.test_questions():
            prompt = data.prompt(question)
            for answer in data.answers(question):
                pair = (prompt.text, prompt.lead + answer)
                self.requests.append(Instance("loglikelihood", {}, pair, len(self.requests)))

    def __call__(self) -> dict[str, torch.Tensor]:
        """Log-probabilities (K,) of each question's options, by its id."""
        answers = iter(self.lm.loglikelihood(self.requests, disable_tqdm=True))
        return {
            f"{q.dataset}/{q.id}": torch.tensor([next(answers)[0] for _ in q.options])
            for q in self.data.test_questions()
        }

    def check_tokens(self) -> int:
        """How many pairs there are, all of which read as the tokens that ours reads."""
        self.data.eval_batch_size, ours = len(self.requests), {}
        for loader in self.data.test_dataloader():
            for batch in loader:
                for i, prompt, options in zip(
                    batch["id"], batch["prompt_ids"], batch["option_ids"], strict=True
                ):
                    pairs = [(prompt.tolist(), option.tolist()) for option in options]
                    ours[f"{batch['dataset']}/{i}"] = pairs
        requests = iter(self.requests)
        for question in self.data.test_questions():
            for pair in ours[f"{question.dataset}/{question.id}"]:
                text = next(requests).args
                theirs = self.lm._encode_pair(*text)
                assert theirs == pair, f"{text}: {theirs} in the harness, {pair} in ours"
        return len(self.requests)


def margin(log_probs: torch.Tensor) -> float:
    """How far the first choice is ahead of the second, in nats."""
    first, second = log_probs.topk(2).values
    return float(first - second)


def differences(ours: dict, theirs: dict) -> tuple[list[str], float]:
    """A line for each question with two choices, and the largest |difference| of log-probs."""
    lines, largest = [], 0.0
    for name, a in ours.items():
        b = theirs[name]
        largest = max(largest, float((a - b).abs().max()))
        one, other = int(a.argmax()), int(b.argmax())
        if one != other:
            kind = "a tie" if max(margin(a), margin(b)) < TIE else "not a tie"
            lines.append(
                f"- {name}: option {one} ours, {other} the harness's, {kind}: ahead by "
                f"{margin(a):.2e} and {margin(b):.2e} nats"
            )
    return lines, largest


def compare(backbone: Backbone, tokenizer, args, scoring: str, counts: dict[str, int]) -> list[str]:
    """Run the rounds of one scoring; print its rows, return what the choices differ in."""
    data = MCQADataModule(counts, scoring=scoring, root=args.root, tokenizer=tokenizer)
    lm = HFLM(backbone.lm, tokenizer=tokenizer, batch_size=args.batch, device="cpu")
    assert lm.model is backbone.lm
    harness = Harness(lm, data)
    pairs = harness.check_tokens()
    sizes = [args.batch]
    if scoring == "text":
        sizes.append(max(args.batch // OPTIONS, 1))
    sides = {size: Ours(backbone, data, size) for size in sizes}
    seconds, found = {side: [] for side in (*sides, "harness")}, {}
    for _ in range(args.rounds):
        for side, run in (*sides.items(), ("harness", harness)):
            start = time.process_time()
            found[side] = run()
            seconds[side].append(time.process_time() - start)
    notes = []
    for size in sizes:
        lines, largest = differences(found[size], found["harness"])
        same = len(found[size]) - len(lines)
        pairwise = zip(seconds["harness"], seconds[size], strict=True)
        ratios = [theirs / ours for theirs, ours in pairwise]
        cells = [
            scoring, f"{len(found[size])}", f"{pairs}", f"{size} questions", f"{same}",
            f"{largest:.1e}", f"{statistics.median(seconds[size]):.1f}",
            f"{statistics.median(seconds['harness']):.1f}", f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
        notes += [f"{scoring}, {size} questions a batch:", *lines] if lines else []
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--root", help="folder with arc_easy/ and sciq/ instead of the hub")
    parser.add_argument("--questions", type=int, default=500, help="half of each set")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--scorings", nargs="*", choices=SCORINGS, default=SCORINGS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # that a model object was passed
    tokenizer = load_tokenizer(args.model)
    backbone = Backbone(load_lm(args.model).eval(), trained=False)
    halves = (args.questions - args.questions // 2, args.questions // 2)
    counts = dict(zip(DATASETS, halves, strict=True))
    print(f"{' + '.join(f'{n} of {name}' for name, n in counts.items())}; {args.rounds} rounds.")
    print(f"The harness gets {args.batch} sequences a batch; CPU seconds, ratio harness / ours.\n")
    titles = ("scoring", "questions", "options", "our batch", "same choice", "largest difference",
              "ours, s", "harness, s", "ratio", "each round")  # fmt: skip
    print(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}", flush=True)
    notes = []
    for scoring in args.scorings:
        notes += compare(backbone, tokenizer, args, scoring, counts)
    print("\n" + ("\n".join(notes) or "No choice differs."))


if __name__ == "__main__":
    main()
