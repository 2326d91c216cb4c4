"""Every method of the paper under one evaluation, out of domain and in domain.  docs/methods.md

    python benchmarks/methods.py smollm2 --out runs/methods --root DATA --model PATH
    python benchmarks/methods.py table --out runs/methods

`smollm2` runs each setting of each method in a process of its own, whose processor time and peak
memory up to the end of fit are the method's. All read the same K train items (or fewer rows of
them). Settings are chosen by selection.py's rule on rows that are not tested: out of domain the
bundled questions, in domain the sel split. What is there is not run again.
"""

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from real_data import B, K, T, build

from calm_lightning import (
    CFT,
    AlpacaDataModule,
    CALMModule,
    FineTuning,
    Iterate,
    LabelSmoothing,
    MCQADataModule,
    Regularization,
    TemperatureScaling,
    VectorScaling,
)
from calm_lightning.callbacks import PlainProgress
from calm_lightning.metrics import paired_bootstrap
from calm_lightning.predictions import with_unions
from calm_lightning.report import COLUMNS
from calm_lightning.scoring import Scored
from calm_lightning.selection import candidates, choose

OOD, ID, BED = "ood", "id", "bed"  # BED: there alone, see methods_bed.py


@dataclass(frozen=True)
class Method:
    """One row of the table: a class and the settings it may choose from."""

    title: str
    make: type
    settings: tuple[dict, ...] = ({},)
    where: tuple[str, ...] = (OOD, ID)
    epochs: int = 1  # more where a method acts once an epoch
    single_loop: bool = False  # one inner step an item, and more items
    by_length: bool = False  # else rows at random

    def items(self, k: int, t: int) -> dict:
        """Train items of a run that reads as many rows as k items with t inner steps."""
        items = {"by_length": self.by_length, "inner_steps": t}
        if self.single_loop:
            return items | {"inner_steps": 1, "outer_steps_per_epoch": k * (t + 2) // 3}
        return items | {"outer_steps_per_epoch": k // self.epochs}


ALL = {"use": "all"}
VOCABULARY, OPTIONS = {"over": "vocabulary"}, {"over": "options"}
METHODS = {
    "base": Method("base", FineTuning),
    "temperature_scaling": Method("temperature scaling", TemperatureScaling),
    "temperature_scaling_id": Method(
        "temperature scaling, over options", TemperatureScaling, (OPTIONS,), (ID,)
    ),
    "vector_scaling": Method("vector scaling", VectorScaling),
    "fine_tuning": Method("fine-tuning, same θ updates", FineTuning),
    "fine_tuning_same_tokens": Method("fine-tuning, same tokens", FineTuning, (ALL,)),
    "label_smoothing": Method(
        "label smoothing, ε of the bins", LabelSmoothing, (ALL | OPTIONS,), (ID,)
    ),
    "label_smoothing_plain": Method(
        "label smoothing, ε .1", LabelSmoothing, (ALL | VOCABULARY | {"epsilon": 0.1},)
    ),
    "cft": Method(
        "CFT, over options", CFT, (ALL | OPTIONS,), (ID,)
    ),
    "cft_legacy": Method(
        "CFT, the published loss", CFT,
        (ALL | OPTIONS | {"legacy_skip_last_bin": True},), (ID,),
    ),
    "cft_refresh": Method(
        "CFT, bins refreshed (EM)", CFT, (ALL | OPTIONS | {"refresh_bins": True},), (ID,), epochs=5
    ),
    "cft_tokens": Method(
        "CFT, over tokens", CFT, (ALL | VOCABULARY,), (OOD,)
    ),
    "regularization": Method(
        "Regularization as in the paper", Regularization, (ALL | {"weight": 1e-5},)
    ),
    "regularization_train": Method(
        "Regularization, exact H of S_T", Regularization,
        ({"weight": 0.5, "penalty": "exact"},),
    ),
    "regularization_calib": Method(
        "Regularization, exact H of S_V", Regularization,
        tuple({"weight": a, "penalty": "exact", "split": "calib"} for a in (0.1, 0.5)),
    ),
    "iterate": Method(
        "Iterate", Iterate, (ALL | {"upper_lr": 1e-2},), epochs=5
    ),
    "calm": Method("CALM", CALMModule, ({}, {"gamma": 0.5})),
    "calm_scalar": Method("CALM, scalar α", CALMModule, ({"alpha": "scalar"},)),
    "calm_frozen": Method(
        "CALM, Eq. 12 to the letter", CALMModule, ({"residual_alpha_grad": "frozen"},), (OOD,)
    ),
    "calm_residual": Method(
        "CALM, residual barrier", CALMModule, ({"barrier": "residual"},), (BED,)
    ),
    "calm_center": Method("CALM, centred logits", CALMModule, ({"center": True},), (BED,)),
    "calm_last_prompt": Method(
        "CALM, H at the first response token", CALMModule, ({"entropy": "last_prompt"},), (BED,)
    ),
    "calm_self_ce": Method(
        "CALM, −log max p as H", CALMModule, ({"entropy": "self_ce"},), (BED,)
    ),
    "calm_warm_start": Method(
        "CALM, warm start", CALMModule, ({"warm_start": True},),
        single_loop=True,
    ),
    "calm_by_length": Method(
        "CALM, rows by length", CALMModule, where=(OOD,), by_length=True
    ),
}  # fmt: skip


def source(args, where: str, seed: int, items: dict, target: MCQADataModule):
    """Train items: Alpaca, or the questions of the three benchmarks that are not tested."""
    shared = {"root": args.root, "max_length": 128, "batch_size": B, "seed": seed, **items}
    if where == OOD:
        return AlpacaDataModule(
            form="question", max_chars_prompt=120, max_chars_response=150, **shared
        )
    # seed: the order of the items; the rows that are tested are seed 0's for all
    data = MCQADataModule(
        {}, fit_benchmarks=dict.fromkeys(TESTED[ID]), scoring="first_token",
        sizes={"calib": 150, "sel": 150}, val_rows=150, **shared,
    )  # fmt: skip
    data.held_out = target
    return data


TESTED = {
    OOD: {"arc_easy": 200, "sciq": 200, "piqa": 141},  # PIQA: all that have distinct first tokens
    ID: {"arc_easy": 150, "sciq": 200, "piqa": 60},
}


def tested(args, where: str, tokenizer) -> MCQADataModule:
    """The questions of the table, drawn with seed 0."""
    return MCQADataModule(TESTED[where], scoring="first_token", root=args.root, tokenizer=tokenizer)


def asked(trainer, module, loaders) -> list[dict]:
    """Score the module on question loaders."""
    trainer.test(module, dataloaders=loaders, verbose=False)
    return [s._asdict() for s in module.scored]


def trial(args) -> None:
    """Fit one setting of one method and ask it both kinds of questions."""
    where, name, number, seed = args.where, args.method, args.setting, args.seeds[0]
    method = METHODS[name]
    epochs = 0 if name == "base" else method.epochs
    seed_everything(seed, verbose=False)
    module = build(method.make, args.model, method.settings[number])
    target = tested(args, where, module.tokenizer)
    data = source(args, where, seed, method.items(K, T), target)
    data.tokenizer = module.tokenizer
    trainer = Trainer(
        callbacks=[PlainProgress(every=60.0)], max_epochs=epochs, accelerator="cpu",
        precision="32-true", logger=False, enable_model_summary=False, limit_val_batches=0,
        enable_checkpointing=False,
    )  # fmt: skip
    began = time.process_time()
    if epochs:
        trainer.fit(module, data)
    found = {
        "seconds": time.process_time() - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # MiB
        "updates": trainer.global_step,
    }
    if name == "base":
        module.variants = {"base": (False, False)}
    else:
        module.variants = module.candidates
    if where == OOD:
        other = MCQADataModule({"sample": 150}, scoring="first_token", tokenizer=module.tokenizer)
        found["selection"] = asked(trainer, module, other.test_dataloader())
    else:
        found["selection"] = asked(trainer, module, data.val_dataloader())
    found["target"] = asked(trainer, module, target.test_dataloader())
    found["variants"] = module.variants
    torch.save(found, f"{args.file}.part")
    Path(f"{args.file}.part").rename(args.file)


def smollm2(args) -> None:
    """Every trial that is not there, one process after another."""
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.methods or list(METHODS)
    trials = [
        (seed, where, name, number)
        for seed in args.seeds for where in args.domains for name in names
        if where in METHODS[name].where and (name != "base" or seed == args.seeds[0])
        for number in range(len(METHODS[name].settings))
    ]  # fmt: skip
    for done, (seed, where, name, number) in enumerate(trials):
        file = args.out / f"{where}-{seed}-{name}-{number}.pt"
        claim = file.with_suffix(".claim")  # workers share the list
        if file.exists() or claim.exists():
            continue
        claim.touch()
        words = ["trial", "--out", args.out, "--file", file, "--where", where, "--method", name,
                 "--setting", number, "--seeds", seed, "--model", args.model]  # fmt: skip
        words += ["--root", args.root] if args.root else []
        log = file.with_suffix(".log")
        with log.open("w") as out:
            code = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, *map(str, words)], stdout=out, stderr=out
            ).returncode
        claim.unlink()
        if code:
            print(f"{file.name}: failed, see {log}", flush=True)
            continue
        log.unlink()
        found = torch.load(file, weights_only=False)
        print(f"{done + 1} of {len(trials)} {file.name}: {found['seconds']:.0f} s, "
              f"{found['peak']:.0f} MiB", flush=True)  # fmt: skip


# ---- tables ------------------------------------------------------------------------------------


def chosen(trials: list[dict], base: dict) -> tuple[int, str, int]:
    """Setting and variant that selection.py's rule takes, and out of how many candidates."""
    (reference,) = candidates("base", 0, scored(base, "selection"), base["variants"])
    pool = []
    for number, found in enumerate(trials):
        uses = found["variants"]
        if len(uses) > 1:  # a post-hoc method without its alpha is the base
            uses = {v: use for v, use in uses.items() if any(use)}
        shown = candidates(str(number), 1, scored(found, "selection"), uses)
        pool += [(c, number, v) for c, v in zip(shown, uses, strict=True)]
    best = choose([candidate for candidate, *_ in pool], reference)
    return *next(rest for candidate, *rest in pool if candidate is best), len(pool)


def scored(found: dict, what: str) -> list[Scored]:
    """The `Scored` of a trial's questions."""
    return [Scored(**s) for s in found[what]]


def said(setting: dict) -> str:
    """A setting in words: what the methods' titles do not say."""
    shown = {k: v for k, v in setting.items() if k in ("weight", "upper_lr", "gamma")}
    return ", ".join(f"{k} {v:g}" for k, v in shown.items()) or "–"


TITLES = {
    OOD: "out of domain: Alpaca in, chosen by 150 bundled questions",
    ID: "in domain: rows of the same three sets, chosen by 150 rows of sel",
}
CONTROL = "fine_tuning_same_tokens"


def table(args) -> None:
    """Both domains of SmolLM2: each method's chosen setting, its cost, its gap to fine-tuning."""
    for where in args.domains:
        trials = {}
        for name, method in METHODS.items():
            stem = args.out / f"{where}-{args.seeds[0]}-{name}"
            files = [Path(f"{stem}-{number}.pt") for number in range(len(method.settings))]
            if where in method.where and all(file.exists() for file in files):
                trials[name] = [torch.load(file, weights_only=False) for file in files]
        picks = {name: chosen(found, trials["base"][0]) for name, found in trials.items()}
        sets = [*TESTED[where]]
        for title, names in (("all", sets), ("ARC-Easy + SciQ", sets[:2])):
            shown = {
                name: of_sets(trials[name][number], variant, names)
                for name, (number, variant, _) in picks.items()
            }
            n = len(shown["base"].id)
            print(f"\n**{TITLES[where]}; {title}, N = {n}, seed {args.seeds[0]}**\n")
            heads = [*COLUMNS.values(), "conf-ECE − fine-tuning [95 %]", "conf-ECE − CALM [95 %]",
                     "setting", "α", "of", "θ updates", "CPU s", "peak MiB"]  # fmt: skip
            print(f"| | {' | '.join(heads)} |")
            print("|---|" + "---:|" * (len(COLUMNS) + 2) + "---|---|" + "---:|" * 4)
            for name, s in shown.items():
                number, variant, of = picks[name]
                trial, numbers = trials[name][number], s.summary(10)
                cells = [f"{numbers[column]:.3f}" for column in COLUMNS]
                cells += [difference(s, shown.get(other)) for other in (CONTROL, "calm")]
                applied = trial["variants"][variant][1]
                cells += [said(METHODS[name].settings[number])]
                cells += ["applied" if applied else "dropped", str(of), str(trial["updates"])]
                cells += (
                    ["–"] * 2
                    if name == "base"
                    else [f"{trial['seconds']:.0f}", f"{trial['peak']:.0f}"]
                )
                print(f"| {METHODS[name].title} | {' | '.join(cells)} |")


def difference(a: Scored, b: Scored | None) -> str:
    """conf-ECE of a minus b's, with its paired 95 % interval."""
    if b is None or a is b:
        return "–"
    pair = [(s.confidence[None], s.correct[None]) for s in (a, b)]
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired_bootstrap(*pair))


def of_sets(trial: dict, variant: str, names: list[str]) -> Scored:
    """These data sets of a trial's target together."""
    found = [s for s in scored(trial, "target") if s.variant == variant and s.dataset in names]
    return with_unions(found)[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["smollm2", "trial", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--root", help="folder with alpaca/, arc_easy/ … instead of the hub")
    parser.add_argument("--domains", nargs="*", default=[OOD, ID])
    parser.add_argument("--methods", nargs="*", help="these alone")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    for name in ("file", "where", "method", "setting"):  # of one trial, which smollm2 starts
        parser.add_argument(f"--{name}", type=int if name == "setting" else str)
    args = parser.parse_args()
    {"smollm2": smollm2, "trial": trial, "table": table}[args.what](args)
