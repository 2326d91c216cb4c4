"""Upper objectives where confidence is used: entropy over whole answers, not over the next token.

The base model answers each calib prompt N_ANSWERS times in its own words (no label is needed), and
the upper level raises the entropy of their relative likelihood, softmax over answers of the mean
log-probability of their tokens. Two dead ends beside it: the options of unlabelled questions of
another benchmark, by summed text, made more entropic or pulled to the uniform distribution. At
equal cost: as many rows pass the body as for the token-level entropy. See docs/selection.md.

    python benchmarks/answers.py --out runs/answers      (known truth; SmolLM2: selection.py)
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from calm_lightning import AlpacaDataModule, CALMModule, MCQADataModule
from calm_lightning.backbone import load_lm
from calm_lightning.data.prompts import Prompt
from calm_lightning.data.prompts import question as prompt_of
from calm_lightning.data.tokens import IGNORED, OuterLoader, collate, encode

N_ANSWERS, TRIES, LENGTH = 4, 24, 20  # answers a prompt, draws to find them, tokens at most


class AnswerEntropy(CALMModule):
    """CALM with the entropy over groups of N_ANSWERS answers as its upper loss.

    score: ``mean`` or ``sum`` of an answer's token log-probabilities; uniform: the upper loss is
    KL(uniform || q) but for a constant instead of -H(q).
    """

    def __init__(self, model_name=None, *, score: str = "mean", uniform: bool = False, **shared):
        super().__init__(model_name, **shared)

    def negative_entropy(self, batch: dict[str, Tensor]):
        """Rows come in groups of N_ANSWERS, one prompt each."""

        def loss() -> Iterator[Tensor]:
            labels = batch["labels"][:, 1:]
            counted = labels != -100
            hidden, _ = self.backbone.hidden(batch["input_ids"], batch["attention_mask"])
            z = self.alpha(self.backbone.logits(hidden[:, :-1][counted]).float())
            log_p = z.log_softmax(-1).gather(1, labels[counted][:, None])[:, 0]
            row = counted.nonzero()[:, 0]
            total = log_p.new_zeros(len(labels)).index_add(0, row, log_p)
            if self.hparams.score == "mean":
                total = total / counted.sum(1)
            log_q = total.view(-1, N_ANSWERS).log_softmax(-1)
            p = torch.full_like(log_q, -1 / N_ANSWERS) if self.hparams.uniform else log_q.exp()
            yield (p * log_q).sum(-1).mean()

        return loss


class GroupSource(AlpacaDataModule):
    """Its calib micro-batches hold B / N_ANSWERS prompts with N_ANSWERS answers each."""

    def train_dataloader(self) -> OuterLoader:
        """Train items whose calib rows come in groups."""
        loader = super().train_dataloader()
        return GroupLoader(
            loader.train, self.groups(), self.batch_size, self.inner_steps, len(loader), self.seed,
            loader.pad_id,
        )  # fmt: skip


class AnswerSource(GroupSource):
    """Groups of answers that the model samples to calib prompts."""

    def __init__(self, model: str, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model = model

    def groups(self) -> list:
        """As many as the run reads."""
        needed = self.outer_steps_per_epoch * self.batch_size // N_ANSWERS
        prompts = [prompt for prompt, _ in self.rows("calib").rows][:needed]
        return sampled(self.model, self.take_tokenizer(), prompts, self.max_length, self.seed)


class OptionSource(GroupSource):
    """Groups of the options of OpenBookQA's questions; which one is right is not looked at."""

    def groups(self) -> list:
        """Every question whose options fit."""
        tokenizer, found = self.take_tokenizer(), []
        data = MCQADataModule({"openbookqa": None}, scoring="text", root=self.root)
        for question in data.test_questions():
            p, size = prompt_of(question.question), self.max_length
            rows = [
                encode(tokenizer, p.text, p.lead + option, size, p.special)
                for option in question.options
            ]
            for row in rows:
                row["labels"][-1] = IGNORED  # an option's score is its text's, not its end's
            found.append(rows)
        return found


class GroupLoader(OuterLoader):
    """Train items; calib is a list of groups of rows."""

    def _micro_batch(self, rows, order, number):
        if rows is not self.calib:
            return super()._micro_batch(rows, order, number)
        each = self.batch_size // N_ANSWERS
        groups = [rows[order[number * each + i]] for i in range(each)]
        return collate([row for group in groups for row in group], self.pad_id)


@torch.no_grad()
def sampled(model: str, tokenizer, prompts: list[Prompt], max_length: int, seed: int) -> list:
    """N_ANSWERS distinct first lines for each prompt at temperature 1; prompts with fewer go."""
    lm = load_lm(model, dtype="float32").eval()
    pad = tokenizer.eos_token_id
    groups = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prompt in prompts:
            inputs = tokenizer(prompt.text, return_tensors="pt", add_special_tokens=prompt.special)
            out = lm.generate(
                **inputs, do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=pad,
                num_return_sequences=TRIES,
            )  # fmt: skip
            texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], True)
            lines = dict.fromkeys(text.strip().split("\n")[0].strip() for text in texts)
            lines = [line for line in lines if line][:N_ANSWERS]
            if len(lines) == N_ANSWERS:
                groups.append(
                    [encode(tokenizer, prompt.text, prompt.lead + line, max_length, prompt.special)
                     for line in lines]
                )  # fmt: skip
    print(f"{len(groups)} of {len(prompts)} prompts have {N_ANSWERS} answers", flush=True)
    return groups


def main(args) -> None:
    """Both upper objectives on each seed's bed: conf-ECE of the target at the end and at best."""
    from known_truth import METHODS, bed, fit_trajectory  # which takes no part in selection.py
    from scipy.stats import t as student

    method, options = METHODS["calm"]
    ways = {"next token": (method, {}), "answers": (AnswerEntropy, {})}
    ways |= {f"answers, gamma {g}": (AnswerEntropy, {"gamma": g}) for g in (0.02, 0.2)}
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list] = {}
    for seed in args.seeds:
        for name, (make, changed) in ways.items():
            file = args.out / f"{seed}-{name}.json"
            if not file.exists():
                folder = bed(args.out, seed)
                source = partial(AnswerSource, str(folder)) if make is AnswerEntropy else None
                points = fit_trajectory(
                    folder, make, options | changed, 6, seed=seed, source=source
                )
                along = [{v: s.summary(10) for (_, v), s in at.items()} for _, at in points]
                file.write_text(json.dumps(along))
            along = json.loads(file.read_text())
            end = min(along[-1].values(), key=lambda n: n["conf_ece"])
            best = min(n["conf_ece"] for at in along for n in at.values())
            found.setdefault(name, []).append([end["conf_ece"], best, end["accuracy"]])
    print("| upper objective | conf-ECE at the end | at its best | accuracy | − next token (end) |")
    print("|---|" + "---:|" * 4)
    for name, rows in found.items():
        values = torch.tensor(rows)
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(values.mean(0), values.std(0), strict=True)]
        difference = values[:, 0] - torch.tensor(found["next token"])[:, 0]
        half = student.ppf(0.975, len(rows) - 1) * float(difference.std()) / len(rows) ** 0.5
        cells.append(f"{difference.mean():+.3f} ± {half:.3f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    main(parser.parse_args())
