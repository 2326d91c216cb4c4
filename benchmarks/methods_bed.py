"""Every method of the paper where p(y|x) is known, over several seeds.  docs/methods.md

    python benchmarks/methods_bed.py --out runs/methods_bed

Settings, and whether alpha is applied, are chosen on seed 0 by selection.py's rule on the other
shifted domain, and fixed for the seeds of the table.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from known_truth import CALM, SHARED, K, T, bed, cell, fit_trajectory
from methods import BED, METHODS, OOD, chosen, said, scored

from calm_lightning import CALMModule
from calm_lightning.adjusted import AdjustedModule
from calm_lightning.backbone import load_tokenizer
from calm_lightning.data import known_truth
from calm_lightning.report import COLUMNS


def table(args) -> None:
    """Known truth: every setting on seed 0, chosen by the other shifted domain, then other seeds.

    Which setting, and whether alpha is applied, is fixed on seed 0. Two seeds at a time.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in (0, *args.seeds):
        bed(args.out, seed)
    found = of_seed(args.out, 0, {n: [*range(len(bed_settings(n)))] for n in bed_methods()})
    fixed = {name: chosen(trials, found["base"][0]) for name, trials in found.items()}
    began = time.time()
    settings = {name: [number] for name, (number, *_) in fixed.items()}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(of_seed, args.out, seed, settings) for seed in args.seeds]
        seeds = [job.result() for job in jobs]
    print(f"| {len(args.seeds)} seeds | {' | '.join(COLUMNS.values())} | setting | α | of |")
    print("|---|" + "---:|" * len(COLUMNS) + "---|---|---:|")
    for name, (number, variant, n) in fixed.items():
        rows = [
            s.summary(10)
            for trials in seeds
            for s in scored(trials[name][0], "target")
            if s.variant == variant
        ]
        cells = [cell([row[column] for row in rows]) for column in COLUMNS]
        cells += [said(bed_settings(name)[number])]
        cells += ["applied" if variant == "both" else "dropped", str(n)]
        print(f"| {METHODS[name].title} | {' | '.join(cells)} |")
    print(f"\nseeds {args.seeds}: {time.time() - began:.0f} s")


def bed_methods() -> list[str]:
    """Those that need no options, and rows of one length need no buckets."""
    return [n for n, m in METHODS.items() if {OOD, BED} & {*m.where} and not m.by_length]


def bed_settings(name: str) -> tuple[dict, ...]:
    """METHODS' own, but gamma is another on the bed."""
    return ({}, {"gamma": 0.02}) if name == "calm" else METHODS[name].settings


def of_seed(out: Path, seed: int, settings: dict[str, list[int]]) -> dict[str, list[dict]]:
    """Trials of these settings of each method on one seed's bed."""
    torch.set_num_threads(1)
    folder = bed(out, seed)
    data = known_truth.data(folder, ("target", "other"), tokenizer=load_tokenizer(str(folder)))
    batches = [batch for loader in data.target.test_dataloader() for batch in loader]
    return {
        name: [on_bed(folder, name, bed_settings(name)[i], batches, seed) for i in numbers]
        for name, numbers in settings.items()
    }


def on_bed(folder: Path, name: str, setting: dict, batches: list[dict], seed: int) -> dict:
    """One trial: the other domain as selection, the target."""
    make = METHODS[name].make
    options = SHARED | ({"gamma": 0.05} | CALM if make is CALMModule else {}) | setting
    method, every = METHODS[name], None
    items = method.items(K, T)
    if name == "base":  # the first visit of a run that is not needed
        every, items["outer_steps_per_epoch"] = 1, 1
    points = fit_trajectory(
        folder, make, options, every, batches, seed, epochs=method.epochs, **items
    )
    at = points[0][1]
    uses = {"theta": (True, False), "both": (True, True)}
    if not make.trains_theta:
        del uses["theta"]
    elif not issubclass(make, AdjustedModule):
        del uses["both"]
    kept = {what: [s._asdict() for (d, v), s in at.items() if d == what and v in uses]
            for what in ("target", "other")}  # fmt: skip
    return {"selection": kept["other"], "target": kept["target"], "variants": uses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    table(parser.parse_args())
