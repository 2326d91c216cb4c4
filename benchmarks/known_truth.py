"""CALM beside its controls where p(y|x) is known, and along its iterations.

    python benchmarks/known_truth.py run --out runs/known_truth [--seeds 0 1 …]
    python benchmarks/known_truth.py table --out runs/known_truth

A seed is a bed of its own: world, rows, model, training. Settings were chosen on seed 0. Every
trial is kept in its own file; what is there is not run again.
"""

import argparse
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from peft import LoraConfig

from calm_lightning import CALMModule, FineTuning, TemperatureScaling
from calm_lightning.backbone import load_tokenizer
from calm_lightning.data import known_truth
from calm_lightning.scoring import Scored, Tally, option_log_probs

K, T, B = 60, 3, 32
SHARED = {"lower_lr": 3e-3, "warmup_fraction": 0.1}
CALM = SHARED | {"inner_lr": 0.5, "upper_lr": 2e-2, "scale_min": 0.25}
METHODS = {
    "temperature_scaling": (TemperatureScaling, {}),
    "fine_tuning": (FineTuning, SHARED),
    "fine_tuning_same_tokens": (FineTuning, SHARED | {"use": "all"}),
    "calm": (CALMModule, CALM | {"gamma": 0.05}),
    "calm_weak_barrier": (CALMModule, CALM | {"gamma": 0.02}),  # goes on into underconfidence
}
Points = list[tuple[int, dict[tuple[str, str], Scored]]]


class Trajectory(Callback):
    """Scores batches of questions at the end, and before and after every few train items.

    `points`: (iteration, {(dataset, variant): Scored}); variants: theta (α dropped), both.
    """

    def __init__(self, batches: list[dict], every: int | None):
        self.batches, self.every = batches, every
        self.points: Points = []

    def on_train_start(self, trainer, pl_module) -> None:
        """Iteration 0: do nothing."""
        if self.every:
            self.visit(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """After every `every`-th item but the last."""
        done, total = trainer.fit_loop.total_batch_idx + 1, trainer.num_training_batches
        if self.every and done % self.every == 0 and done < total * trainer.max_epochs:
            self.visit(trainer, pl_module)

    def on_train_end(self, trainer, pl_module) -> None:
        """Temperature scaling fits T only now."""
        self.visit(trainer, pl_module)

    def visit(self, trainer, pl_module) -> None:
        """Score every batch with α dropped and applied."""
        tally, variants = Tally(), {"theta": None, "both": pl_module.alpha}
        with pl_module.backbone.without_dropout():
            for batch in self.batches:
                batch = trainer.strategy.batch_to_device(batch)
                for name, found in option_log_probs(pl_module.backbone, batch, variants).items():
                    tally.add(batch, name, *found)
        scored = {(s.dataset, s.variant): s for s in tally.gather() if s.dataset != "all"}
        self.points.append((trainer.fit_loop.total_batch_idx + 1, scored))


def fit_trajectory(
    folder: Path, method, options: dict, every: int | None, batches=None, seed=0, callbacks=(),
    source=None, epochs=1, **items,
) -> Points:  # fmt: skip
    """Fit a method for K items on a bed's source; score `batches` (the target's) along the way.

    `batches` are of any question loaders: [batch for loader in loaders for batch in loader];
    `source` makes another source of train items than `AlpacaDataModule`, `items` other items.
    """
    seed_everything(seed, verbose=False)
    shared = {"tokenizer": load_tokenizer(str(folder)), "seed": seed, "batch_size": B}
    shared |= {"inner_steps": T, "outer_steps_per_epoch": K, "by_length": False} | items
    data = known_truth.data(folder, **shared)
    if source is not None:
        data.source = source(str(folder / "source.jsonl"), form="question", **shared)
    if batches is None:
        batches = [batch for loader in data.target.test_dataloader() for batch in loader]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if not method.trains_theta:
        lora = None
    trajectory = Trajectory(batches, every)
    trainer = Trainer(
        callbacks=[*callbacks, trajectory], max_epochs=epochs, accelerator="cpu", logger=False,
        limit_val_batches=0, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(method(str(folder), lora=lora, **options), data)
    return trajectory.points


def bed(out: Path, seed: int) -> Path:
    """The folder of a seed's bed, written if need be."""
    folder = out / f"bed-{seed}"
    return folder if folder.exists() else known_truth.write(folder, seed)


def run(args) -> None:
    """Every method on every seed."""
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name, (method, options) in METHODS.items():
            file = args.out / f"{seed}-{name}.pt"
            if file.exists():
                continue
            folder, began = bed(args.out, seed), time.time()
            every = 4 if method is CALMModule else 12
            points = fit_trajectory(folder, method, options, every, seed=seed)
            kept = [(k, {key: s._asdict() for key, s in at.items()}) for k, at in points]
            torch.save(kept, f"{file}.part")
            Path(f"{file}.part").rename(file)
            print(f"{file.name}: {time.time() - began:.0f} s", flush=True)


def load(file: Path) -> Points:
    """A trial's points."""
    kept = torch.load(file, weights_only=True)
    return [(k, {key: Scored(**s) for key, s in at.items()}) for k, at in kept]


COLUMNS = {
    "accuracy": "accuracy", "mean_confidence": "confidence", "conf_ece": "conf-ECE", "nll": "NLL",
    "true_ece": "true conf-ECE", "gap": "E\\|conf − p\\|",
}  # fmt: skip
ROWS = {
    "base": ("calm", "theta", 0),
    "temperature scaling": ("temperature_scaling", "both", -1),
    "fine-tuning, same θ updates": ("fine_tuning", "theta", -1),
    "fine-tuning, same source tokens": ("fine_tuning_same_tokens", "theta", -1),
    "CALM, α dropped": ("calm", "theta", -1),
    "CALM, α applied": ("calm", "both", -1),
    "CALM, γ .02, α dropped": ("calm_weak_barrier", "theta", -1),
    "CALM, γ .02, α applied": ("calm_weak_barrier", "both", -1),
}


def numbers(scored: Scored, folder: Path) -> dict[str, float]:
    """All of COLUMNS."""
    gap, ece = known_truth.true_errors(scored, folder)
    return scored.summary(10) | {"gap": gap, "true_ece": ece}


def cell(values: list[float]) -> str:
    """Mean ± standard deviation."""
    values = torch.tensor(values)
    return f"{values.mean():.3f} ± {values.std():.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def table(args) -> None:
    """Each method at its end, the range over seeds, CALM along its iterations."""
    seeds = [s for s in args.seeds if all((args.out / f"{s}-{m}.pt").exists() for m in METHODS)]
    trials = {(s, m): load(args.out / f"{s}-{m}.pt") for s in seeds for m in METHODS}
    print(f"| {len(seeds)} seeds | {' | '.join(COLUMNS.values())} | lowest, highest conf-ECE |")
    print("|---|" + "---:|" * (len(COLUMNS) + 1))
    for title, (method, variant, at) in ROWS.items():
        found = [
            numbers(trials[s, method][at][1]["target", variant], args.out / f"bed-{s}")
            for s in seeds
        ]
        cells = [cell([n[column] for n in found]) for column in COLUMNS]
        eces = sorted(n["conf_ece"] for n in found)
        print(f"| {title} | {' | '.join(cells)} | {eces[0]:.3f}, {eces[-1]:.3f} |")

    for name in ("calm", "calm_weak_barrier"):
        for variant in ("theta", "both"):
            along([trials[s, name] for s in seeds], f"{name}, {variant}", variant)


def along(trials: list[Points], title: str, variant: str) -> None:
    """One line an iteration, over the seeds."""
    print(f"\n**{title}**\n\n| iteration | conf-ECE | accuracy | confidence | conf < acc |")
    print("|---:|" + "---:|" * 4)
    found = [[at["target", variant].summary(10) for _, at in points] for points in trials]
    iterations = [k for k, _ in trials[0]]
    for i, k in enumerate(iterations):
        at = [summaries[i] for summaries in found]
        cells = [cell([n[c] for n in at]) for c in ("conf_ece", "accuracy", "mean_confidence")]
        under = sum(n["mean_confidence"] < n["accuracy"] for n in at)
        print(f"| {k} | {' | '.join(cells)} | {under} of {len(at)} |")
    best = [min((n["conf_ece"], k) for n, k in zip(f, iterations, strict=True)) for f in found]
    print(f"\nBest in hindsight: {cell([e for e, _ in best])} at {sorted(k for _, k in best)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--out", type=Path, required=True, help="a file a trial, a folder a bed")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(10)))
    args = parser.parse_args()
    {"run": run, "table": table}[args.what](args)
