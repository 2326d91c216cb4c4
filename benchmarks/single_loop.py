"""One inner step from a kept theta_tilde instead of T = 20 from theta: time to the chosen state.

    python benchmarks/single_loop.py bed --out runs/single_loop [--seeds 1 2 …]
    python benchmarks/single_loop.py smollm2 --out runs/single_loop --root DATA --model PATH

Each way makes as many outer iterations. Its state and use of alpha are chosen by selection.py's
rule on questions that are not tested (the bed's other domain; the bundled sample); time is
processor time of the train items up to that state. Differences are to T = 20 over seeds (Student's
t), or over questions where there is one seed (paired bootstrap).
"""

import argparse
import time
from pathlib import Path

import torch
from known_truth import METHODS as BED
from known_truth import Trajectory, bed, fit_trajectory
from lightning.pytorch import Callback, seed_everything
from real_data import B, K, build, trainer
from scipy.stats import t as student

from calm_lightning import AlpacaDataModule, CALMModule, MCQADataModule
from calm_lightning.backbone import load_tokenizer
from calm_lightning.data import known_truth
from calm_lightning.metrics import paired_bootstrap
from calm_lightning.predictions import with_unions
from calm_lightning.scoring import Scored
from calm_lightning.selection import candidates, choose

WAYS = {
    "T 20": (20, {}),
    "T 1, warm start": (1, {"warm_start": True}),
    "T 1, from theta": (1, {}),
}
USES = {"theta": (True, False), "both": (True, True)}


class Clock(Callback):
    """Processor seconds of the train items, summed after each."""

    def __init__(self):
        self.sums = [0.0]

    def on_train_batch_start(self, *_) -> None:
        """Begin."""
        self._began = time.process_time()

    def on_train_batch_end(self, *_) -> None:
        """Add; callbacks that score come after this one."""
        self.sums.append(self.sums[-1] + time.process_time() - self._began)


def picked(points, clock: Clock, asked: str, tested: set[str]) -> tuple[Scored, int, float]:
    """The target under the chosen state, its iteration, and the seconds to it."""
    pool = []
    for k, at in points:
        shown = [s for (dataset, _), s in at.items() if dataset == asked]
        uses = {"theta": USES["theta"]} if k == 0 else USES
        pool += [(c, at, v) for c, v in zip(candidates("calm", k, shown, uses), uses, strict=True)]
    best = choose([c for c, *_ in pool])
    at, variant = next((at, v) for c, at, v in pool if c is best)
    target = [s for (dataset, v), s in at.items() if dataset in tested and v == variant]
    return with_unions(target)[-1], best.iteration, clock.sums[best.iteration]


def on_bed(args, seed: int, way: str) -> tuple[Scored, int, float]:
    """One run on a seed's bed."""
    folder, clock = bed(args.out, seed), Clock()
    data = known_truth.data(folder, ("target", "other"), tokenizer=load_tokenizer(str(folder)))
    batches = [batch for loader in data.target.test_dataloader() for batch in loader]
    inner, options = WAYS[way]
    make, shared = BED["calm_weak_barrier"]
    points = fit_trajectory(
        folder, make, shared | options, 6, batches, seed, [clock], inner_steps=inner
    )
    return picked(points, clock, "other", {"target"})


def on_smollm2(args, seed: int, way: str) -> tuple[Scored, int, float]:
    """One run on Alpaca rows; ARC-Easy + SciQ by first token."""
    seed_everything(seed, verbose=False)
    inner, options = WAYS[way]
    module, clock = build(CALMModule, args.model, options), Clock()
    data = AlpacaDataModule(
        root=args.root, form="question", max_chars_prompt=120, max_chars_response=150,
        max_length=128, batch_size=B, inner_steps=inner, outer_steps_per_epoch=K, seed=seed,
        by_length=False,
    )  # fmt: skip
    tested = {"arc_easy": 200, "sciq": 200}
    sets = MCQADataModule(
        {**tested, "sample": 150}, scoring="first_token", root=args.root, tokenizer=module.tokenizer
    )
    batches = [batch for loader in sets.test_dataloader() for batch in loader]
    trajectory = Trajectory(batches, 2)
    trainer(clock, trajectory).fit(module, data)
    return picked(trajectory.points, clock, "sample", set(tested))


def main(args) -> None:
    """A row a way: conf-ECE, accuracy, iteration, seconds, ratio and difference to T = 20."""
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[Scored, int, float]]] = {}
    for seed in args.seeds:
        for way in WAYS:
            file = args.out / f"{args.what}-{seed}-{way}.pt"
            if not file.exists():
                run = {"bed": on_bed, "smollm2": on_smollm2}[args.what]
                scored, k, seconds = run(args, seed, way)
                torch.save((scored._asdict(), k, seconds), f"{file}.part")
                Path(f"{file}.part").rename(file)
                print(f"{file.name}: chosen {k}, {seconds:.0f} s", flush=True)
            kept, k, seconds = torch.load(file, weights_only=False)
            found.setdefault(way, []).append((Scored(**kept), k, seconds))
    print("\n| | conf-ECE | accuracy | chosen | s to it | × T 20 | conf-ECE − T 20 [95 %] |")
    print("|---|" + "---:|" * 6)
    first = found["T 20"]
    for way, rows in found.items():
        numbers = [s.summary(10) for s, *_ in rows]
        ece, accuracy = (
            sum(n[c] for n in numbers) / len(numbers) for c in ("conf_ece", "accuracy")
        )
        seconds = [sum(row[2] for row in of) / len(of) for of in (rows, first)]
        iterations = ", ".join(str(k) for _, k, _ in rows)
        print(
            f"| {way} | {ece:.3f} | {accuracy:.3f} | {iterations} | {seconds[0]:.0f} "
            f"| {seconds[0] / seconds[1]:.2f} | {difference(rows, first)} |"
        )


def difference(rows, first) -> str:
    """Mean of conf-ECE − T 20's with its 95 % interval."""
    if rows is first:
        return "–"
    if len(rows) == 1:
        both = [(s.confidence[None], s.correct[None]) for ((s, *_),) in (rows, first)]
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired_bootstrap(*both))
    eces = [torch.tensor([s.summary(10)["conf_ece"] for s, *_ in of]) for of in (rows, first)]
    d = eces[0] - eces[1]
    half = student.ppf(0.975, len(d) - 1) * float(d.std()) / len(d) ** 0.5
    return f"{d.mean():+.3f} [{d.mean() - half:+.3f}, {d.mean() + half:+.3f}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["bed", "smollm2"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--root", help="folder with alpaca/, arc_easy/ … instead of the hub")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    torch.set_num_threads(1)
    main(parser.parse_args())
