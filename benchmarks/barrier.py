"""The barrier under AdamW: does a step along d_k lower the residual, as BOME's does?

    python benchmarks/barrier.py bed --out runs/barrier           (known truth, five seeds)
    python benchmarks/barrier.py smollm2 --out runs/selection     (runs of selection.py)

Three ways to step: SGD at one rate (BOME-exact), plain AdamW, and AdamW with the dot products of
lambda in its diagonal metric. A step raises q_hat to first order where -<step, g_q> < 0.
"""

import argparse
import json
from pathlib import Path

import torch
from known_truth import METHODS, bed, fit_trajectory
from lightning.pytorch import Callback
from selection_table import REAL, ece, joined, read

from calm_lightning import CALMModule

CALM = METHODS["calm"][1]
PLAIN = {"theta_optimizer": torch.optim.SGD, "alpha_optimizer": torch.optim.SGD}
WAYS = {
    "AdamW": CALM,
    "AdamW, adam metric": CALM | {"barrier_metric": "adam"},
    # seed 0: the rate of .03, .1, .3, 1 whose best conf-ECE along the run is lowest
    "SGD": CALM | PLAIN | {"lower_lr": 0.3, "upper_lr": 0.3},
}


class Steps(Callback):
    """What each step logged."""

    def __init__(self):
        self.lines = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        """Note the step's numbers."""
        self.lines.append({n: float(v) for n, v in trainer.callback_metrics.items()})


def raised(lines: list[dict]) -> float:
    """Share of steps along which q_hat rises to first order."""
    return sum(line["train/residual_descent"] < 0 for line in lines) / len(lines)


def task_loss(lines: list[dict]) -> float:
    """Mean of the last quarter's, nats per token."""
    last = lines[-max(1, len(lines) // 4) :]
    return sum(line["train/task_loss"] for line in last) / len(last)


def on_bed(args) -> None:
    """Each way on each seed; conf-ECE at the end and at its best, the better use of alpha."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list] = {}
    for seed in args.seeds:
        for name, options in WAYS.items():
            file = args.out / f"{seed}-{name}.json"
            if not file.exists():
                steps = Steps()
                points = fit_trajectory(
                    bed(args.out, seed), CALMModule, options, 6, seed=seed, callbacks=[steps]
                )
                along = [
                    {v: s.summary(10) for (d, v), s in at.items() if d == "target"}
                    for _, at in points
                ]
                file.write_text(json.dumps({"steps": steps.lines, "along": along}))
            kept = json.loads(file.read_text())
            ends = kept["along"][-1]
            use = min(ends, key=lambda v: ends[v]["conf_ece"])
            best = min(at[use]["conf_ece"] for at in kept["along"])
            rows.setdefault(name, []).append(
                [raised(kept["steps"]), task_loss(kept["steps"]), ends[use]["conf_ece"], best,
                 ends[use]["accuracy"]]
            )  # fmt: skip
    show(rows, ["conf-ECE at the end", "at its best", "accuracy at the end"])


def on_smollm2(args) -> None:
    """The runs gamma2, adam_metric and sgd… of selection.py."""
    found, rows = read(args.out), {}
    names = {"gamma2": "AdamW", "adam_metric": "AdamW, adam metric"}
    names |= {f"sgd{lr}": f"SGD, rate {lr}" for lr in (0.02, 0.1, 0.5)}
    for run, name in names.items():
        for file in sorted(args.out.glob(f"{run}-*.json")):
            seed, lines = int(file.stem.split("-")[1]), json.loads(file.read_text())
            ends = [c for c in found if (c.run, c.seed, c.k) == (run, seed, 10)]
            if not ends:
                continue
            answers = joined(min(ends, key=lambda c: ece(joined(c, REAL[:2]))), REAL[:2])
            rows.setdefault(name, []).append(
                [raised(lines), task_loss(lines), ece(answers), float(answers[1].double().mean())]
            )
    show(rows, ["conf-ECE at the end", "accuracy at the end"])


def show(rows: dict[str, list], columns: list[str]) -> None:
    """Mean ± standard deviation over seeds."""
    print(f"| | steps that raise q̂ | task loss | {' | '.join(columns)} | seeds |")
    print("|---|" + "---:|" * (3 + len(columns)))
    for name, numbers in rows.items():
        values = torch.tensor(numbers)
        spread = values.std(0) if len(values) > 1 else torch.zeros(values.shape[1])
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(values.mean(0), spread, strict=True)]
        print(f"| {name} | {' | '.join(cells)} | {len(values)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["bed", "smollm2"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    {"bed": on_bed, "smollm2": on_smollm2}[args.what](args)
