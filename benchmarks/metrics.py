"""conf-ECE over 10 million x 4 predictions beside torchmetrics, and how well its interval covers.

    python benchmarks/metrics.py speed [--rows 10000000] [--batch 4096] [--rounds 3]
    python benchmarks/metrics.py coverage [--sets 400]

`speed`: both get the same batches of one stored tensor in one thread. Time is the thread's own CPU
time, updates and compute together, the smallest of the rounds, which take turns: what else runs on
the machine hardly counts. Memory is the growth of the process's peak resident size, each in a
process of its own that already holds the predictions and has made one warm-up update.

`coverage`: how often `bootstrap`'s 95 % interval holds the true ECE of a model whose logits are too
large by a factor, over simulated sets of 300 questions; the truth is its ECE on 2 million.
"""

import argparse
import resource
import time

import torch
from torch.multiprocessing import get_context
from torchmetrics.classification import MulticlassCalibrationError

from calm_lightning.metrics import ClasswiseECE, ConfidenceECE, bootstrap, noise_floor, summary

K, M = 4, 10
METRICS = {
    "torchmetrics": lambda: MulticlassCalibrationError(K, n_bins=M),
    "  no checks": lambda: MulticlassCalibrationError(K, n_bins=M, validate_args=False),
    "ConfidenceECE": lambda: ConfidenceECE(M),
    "ClasswiseECE": lambda: ClasswiseECE(K, M),
}


def predictions(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    probs = torch.empty(rows, K)
    for part in probs.split(4096):  # one softmax of all would set the peak before the metric does
        part.copy_(torch.randn(part.shape, generator=generator).softmax(-1))
    return probs, torch.randint(K, (rows,), generator=generator)


def measure(name: str, probs: torch.Tensor, target: torch.Tensor, batch: int) -> tuple:
    metric, start = METRICS[name](), time.thread_time()
    for p, t in zip(probs.split(batch), target.split(batch), strict=True):
        metric.update(p, t)
    return metric.compute().item(), time.thread_time() - start


def peak_growth(name: str, rows: int, batch: int) -> float:
    """MB by which the peak resident size grows."""
    torch.set_num_threads(1)
    data = predictions(rows)
    measure(name, *(x[:batch] for x in data), batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measure(name, *data, batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def speed(rows: int, batch: int, rounds: int) -> None:
    torch.set_num_threads(1)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_growth, (name, rows, batch)) for name in METRICS}
    data = predictions(rows)
    seconds, value = {name: [] for name in METRICS}, {}
    for _ in range(rounds):
        for name in METRICS:
            value[name], s = measure(name, *data, batch)
            seconds[name].append(s)
    reference = min(seconds["torchmetrics"])
    print(f"{rows:,} x {K} predictions, batches of {batch:,}, M = {M}, one thread")
    print(f"{'':14}{'ECE':>10}{'CPU s':>8}{'ratio':>8}{'extra MB':>10}")
    for name, times in seconds.items():
        ratio = min(times) / reference
        print(f"{name:14}{value[name]:10.6f}{min(times):8.2f}{ratio:8.2f}{memory[name]:10.1f}")


def overconfident(rows: int, factor: float, generator) -> tuple[torch.Tensor, torch.Tensor]:
    z = 1.5 * torch.randn(rows, K, generator=generator)
    target = torch.multinomial(z.softmax(-1), 1, generator=generator).squeeze(1)
    return (factor * z).softmax(-1), target


def coverage(sets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"{sets} sets of 300 x {K}, M = {M}; share of 95 % intervals that hold the truth")
    print(f"{'':10}{'truth':>7}{'mean':>7}{'floor':>7}{'ours':>7}{'width':>7}")
    for factor in (1.0, 1.08, 1.2, 1.3, 1.5, 1.9):
        truth = summary(*overconfident(2_000_000, factor, generator), n_bins=M)
        found = [bootstrap(*overconfident(300, factor, generator), n_bins=M) for _ in range(sets)]
        floor = noise_floor(overconfident(300, factor, generator)[0], n_bins=M)
        for name in ("conf_ece", "cw_ece"):
            value, low, high = torch.tensor([f[name] for f in found], dtype=torch.float64).T
            held = ((low <= truth[name]) & (truth[name] <= high)).double().mean()
            print(
                f"{name:10}{truth[name]:7.4f}{value.mean():7.4f}{floor[name].mean:7.4f}"
                f"{held:7.3f}{(high - low).mean():7.3f}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, options in (
        ("speed", {"rows": 10_000_000, "batch": 4096, "rounds": 3}),
        ("coverage", {"sets": 400}),
    ):
        sub = commands.add_parser(command)
        for option, default in options.items():
            sub.add_argument(f"--{option}", type=int, default=default)
    args = vars(parser.parse_args())
    {"speed": speed, "coverage": coverage}[args.pop("command")](**args)


if __name__ == "__main__":
    main()
