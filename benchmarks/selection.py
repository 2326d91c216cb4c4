"""Which rule, without a look at the target, finds a good checkpoint and setting?  docs/selection.md

    python benchmarks/selection.py train --out runs/selection --root DATA --model PATH
    python benchmarks/selection.py probe --out runs/selection --root DATA --model PATH

`train` fits every run of RUNS and keeps theta and alpha at some of its iterations. `probe` scores
each kept state: the targets, and what each rule would look at. Every state and probe has its own
file; what is there is not made again.
"""

import argparse
import json
import os
import re
import string
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from answers import AnswerEntropy, AnswerSource, OptionSource
from lightning.pytorch import Callback, seed_everything
from real_data import build, trainer

from calm_lightning import AlpacaDataModule, CALMModule, FineTuning, MCQADataModule
from calm_lightning import samples as bundled
from calm_lightning.data import prompts
from calm_lightning.data.files import read_rows
from calm_lightning.data.mcqa import option_ids, question_batches
from calm_lightning.data.near_misses import N_WRONG, near_miss_rows
from calm_lightning.scoring import Tally, option_log_probs

K, T, B = 10, 3, 8
SGD = {"class_path": "torch.optim.SGD"}
#: run -> (method, options, iterations kept)
RUNS = {
    "gamma2": (CALMModule, {}, range(2, 11, 2)),
    "gamma.5": (CALMModule, {"gamma": 0.5}, range(2, 11, 2)),
    "fine_tuning": (FineTuning, {"use": "all"}, (5, 10)),
    "adam_metric": (CALMModule, {"barrier_metric": "adam"}, (10,)),
    **{
        f"sgd{lr}": (CALMModule, {"lower_lr": lr, "upper_lr": lr, "optimizer": "sgd"}, (10,))
        for lr in (0.02, 0.1, 0.5)
    },
    "answers": (AnswerEntropy, {}, (4, 10)),
    "answers.5": (AnswerEntropy, {"gamma": 0.5}, (4, 10)),
    "options": (AnswerEntropy, {"score": "sum"}, (10,)),
    "options_uniform": (AnswerEntropy, {"score": "sum", "uniform": True}, (10,)),
}
N_OPEN, N_SAMPLES, N_NEAR = 30, 10, 120


class Keep(Callback):
    """Theta and alpha after some iterations, and what each step logged."""

    def __init__(self, stem: Path, iterations):
        self.stem, self.iterations, self.lines = stem, set(iterations), []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        """Note the step's numbers; keep the state if it is asked for."""
        k = trainer.fit_loop.total_batch_idx + 1
        numbers = {n: float(v) for n, v in trainer.callback_metrics.items()}
        self.lines.append({"k": k, **numbers})
        if k in self.iterations:
            kept = {n: p.detach() for n, p in pl_module.named_parameters() if p.requires_grad}
            save(kept, f"{self.stem}-k{k}.state")

    def on_train_end(self, trainer, pl_module) -> None:
        """Write the numbers: the run is done."""
        Path(f"{self.stem}.json").write_text(json.dumps(self.lines))


def save(what, path: str) -> None:
    """Whole or not at all."""
    torch.save(what, f"{path}.part")
    os.replace(f"{path}.part", path)


def source(args, seed: int, make=AlpacaDataModule) -> AlpacaDataModule:
    """The rows of the real-data check, with more of them kept for choosing."""
    return make(
        root=args.root, form="question", max_chars_prompt=120, max_chars_response=150,
        max_length=128, batch_size=B, inner_steps=T, outer_steps_per_epoch=K, seed=seed,
        sizes={"sel": 300}, by_length=False,
    )  # fmt: skip


def module_of(args, run: str):
    """A run's module, not yet fitted."""
    make, options, _ = RUNS[run]
    options = dict(options)
    if options.pop("optimizer", None) == "sgd":
        options |= {"theta_optimizer": torch.optim.SGD, "alpha_optimizer": torch.optim.SGD}
    return build(make, args.model, options)


def train(args) -> None:
    """Fit every run once for each seed."""
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for run in args.runs:
            stem = args.out / f"{run}-{seed}"
            if Path(f"{stem}.json").exists():
                continue
            seed_everything(seed, verbose=False)
            keep = Keep(stem, RUNS[run][2])
            quiet = trainer(keep)
            make = AlpacaDataModule
            if run.startswith("answers"):
                make = partial(AnswerSource, args.model)
            elif run.startswith("options"):
                make = OptionSource
            quiet.fit(module_of(args, run), source(args, seed, make))
            print(f"{stem.name}: fitted", flush=True)


# ---- probes: what a state is asked -------------------------------------------------------------


def scored(module, loaders) -> dict:
    """{data set: {variant: Scored as a dict}} with alpha dropped and applied, in one pass."""
    tally = Tally()
    variants = {"dropped": None, "applied": module.alpha}
    for loader in loaders:
        for batch in loader:
            found = option_log_probs(module.backbone, batch, variants)
            for name, (log_probs, mass) in found.items():
                tally.add(batch, name, log_probs, mass)
    result: dict = {}
    for s in tally.gather():
        result.setdefault(s.dataset, {})[s.variant] = s._asdict()
    return result


def target(args, module) -> dict:
    """150 questions a set by first token."""
    sets = {"arc_easy": 150, "sciq": 150, "piqa": 100, "sample": 150}
    data = MCQADataModule(sets, scoring="first_token", root=args.root, tokenizer=module.tokenizer)
    data.setup("test")
    return scored(module, data.test_dataloader())


def sel_rows(args, module):
    """The held-out rows of the source, the same for every seed."""
    data = source(args, 0)
    data.tokenizer = module.tokenizer
    return data.source_splits()["sel"]


def near(args, module, scoring: str, n: int) -> dict:
    """Near misses of the source's sel rows."""
    rows, _ = near_miss_rows(sel_rows(args, module), module.tokenizer, scoring, count=n)
    return scored(module, question_batches(rows, scoring, 16))


def own_rows(args, module) -> list:
    """The gold response against three first tokens that the base model itself would write."""
    path = args.out / "own.rows"
    if path.exists():
        return torch.load(path, weights_only=False)
    rows = []
    torch.manual_seed(0)
    for i, (prompt, gold) in enumerate(sel_rows(args, module)[:N_NEAR]):
        ids, (option,) = option_ids(module.tokenizer, prompt, [gold], "first_token")
        with torch.no_grad(), module.backbone.at_theta_0():
            ids = torch.tensor(ids)
            hidden, _ = module.backbone.hidden(ids[None], torch.ones_like(ids)[None])
            p = module.backbone.logits(hidden[0, -1]).float().softmax(-1)
        p[option[0]] = 0  # its *other* answers, drawn without repeats
        wrong = torch.multinomial(p, N_WRONG).tolist()
        options = [option, *([w] for w in wrong)]
        order = torch.randperm(len(options)).tolist()
        rows.append(
            {"id": f"own-{i}", "dataset": "own", "question": prompt.text,
             "options": [module.tokenizer.decode(options[k]) for k in order],
             "prompt_ids": ids, "option_ids": [torch.tensor(options[k]) for k in order],
             "answer": order.index(0)}
        )  # fmt: skip
    save(rows, str(path))
    return rows


def own(args, module) -> dict:
    """The model's own other first tokens as wrong options."""
    return scored(module, question_batches(own_rows(args, module), "first_token", 16))


def normal(text: str) -> str:
    """An answer's first line without case, punctuation and articles."""
    text = text.strip().split("\n")[0].casefold()
    words = re.sub(f"[{re.escape(string.punctuation)}]", " ", text).split()
    return " ".join(w for w in words if w not in ("a", "an", "the"))


@torch.no_grad()
def open_answers(args, module) -> dict:
    """Sampled answers to open questions: modal frequency and whether that answer is right."""
    rows = read_rows(bundled.path("open_questions"))
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:N_OPEN]
    rows = [rows[i] for i in chosen.tolist()]
    texts = [prompts.question(row["question"]).text for row in rows]
    tokenizer, lm = module.tokenizer, module.backbone.lm
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = lm.generate(  # alpha dropped: it moves d by a few hundredths here
        **inputs, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=10,
        num_return_sequences=N_SAMPLES, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    answers = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], True)
    confidence, correct = [], []
    for i, row in enumerate(rows):
        said = [normal(a) for a in answers[i * N_SAMPLES : (i + 1) * N_SAMPLES]]
        modal, times = Counter(said).most_common(1)[0]
        confidence.append(times / N_SAMPLES)
        correct.append(modal in {normal(a) for a in row["answers"]})
    found = {"confidence": torch.tensor(confidence), "correct": torch.tensor(correct)}
    return {"open": {"dropped": found}}


@torch.no_grad()
def tokens(args, module) -> dict:
    """Teacher-forced source tokens of sel: task loss, entropy, confidence and correctness."""
    data = source(args, 0)
    data.tokenizer = module.tokenizer
    result: dict = {}
    for batch in data.token_batches("sel", 64):
        labels = batch["labels"][:, 1:]
        hidden, _ = module.backbone.hidden(batch["input_ids"], batch["attention_mask"])
        gold = labels[labels != -100]
        z = module.backbone.logits(hidden[:, :-1][labels != -100]).float()
        for name, logits in (("dropped", z), ("applied", module.alpha(z))):
            log_p = logits.log_softmax(-1)
            confidence, choice = log_p.max(-1)
            columns = {
                "task_loss": -log_p.gather(1, gold[:, None])[:, 0],
                "entropy": -(log_p.exp() * log_p).sum(-1),
                "confidence": confidence.exp(),
                "correct": choice == gold,
            }
            for key, column in columns.items():
                result.setdefault(name, {}).setdefault(key, []).append(column)
    return {
        "tokens": {v: {k: torch.cat(c) for k, c in found.items()} for v, found in result.items()}
    }


PROBES = {
    "target": target,
    "near_first": lambda args, module: near(args, module, "first_token", N_NEAR),
    "own": own,
    "tokens": tokens,
    "open": open_answers,
    "near_text": lambda args, module: near(args, module, "text_mean", N_NEAR // 3),
}


def probe(args) -> None:
    """Ask every kept state, and the untrained model, what is not known of it yet."""
    states = sorted(args.out.glob("*.state"), key=lambda p: (p.stem.split("-")[1], p.stem))
    states = [args.out / "base-0-k0.state", *states]
    for state in states:
        run, module = state.stem.split("-")[0], None
        for what in args.probes if run in ["base", *args.runs] else []:
            file = state.with_suffix(f".{what}")
            claim = Path(f"{file}.claim")  # two workers share the list
            if file.exists() or claim.exists():
                continue
            claim.touch()
            if module is None:
                module = module_of(args, "gamma2")
                module.configure_model()
                module.eval()
                if run != "base":
                    module.load_state_dict(torch.load(state), strict=False)
            save(PROBES[what](args, module), str(file))
            claim.unlink()
            print(f"{file.name}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "probe"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--root", help="folder with alpaca/, arc_easy/ … instead of the hub")
    parser.add_argument("--runs", nargs="*", default=list(RUNS))
    parser.add_argument("--probes", nargs="*", default=list(PROBES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    {"train": train, "probe": probe}[args.what](args)
