"""The rules of docs/selection.md compared: rank correlation and regret, on either bed.

    python benchmarks/selection_table.py --out runs/selection [--plot docs/selection.png]

A candidate is a run's state with alpha dropped or applied; iteration 0 and plain fine-tuning are
always among them. A rule is chosen on half A of the target's questions, its regret read on half B.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from calm_lightning.metrics import bin_index
from calm_lightning.scoring import Scored
from calm_lightning.selection import LEAST_ACCURACY  # of iteration 0, the paper's filter

Answers = tuple[torch.Tensor, torch.Tensor]  # confidence, correct

REAL = ("arc_easy", "sciq", "piqa")
SHORT = {"weak barrier": "weak", "fine_tuning": "ft"}


@dataclass
class Candidate:
    """One state with one use of alpha: what the probes found, probe/data set -> Answers."""

    run: str
    seed: int
    k: int
    alpha: str
    found: dict[str, Answers] = field(repr=False)
    task_loss: float = float("nan")
    entropy: float = float("nan")


def ece(answers: Answers) -> float:
    """conf-ECE with M = 10."""
    confidence, correct = answers[0].double(), answers[1].double()
    bins = torch.zeros(10, dtype=torch.float64)
    bins.index_add_(0, bin_index(confidence, 10), correct - confidence)
    return float(bins.abs().sum() / len(confidence))


def gap(answers: Answers) -> float:
    """|mean confidence - accuracy|: one number of N rows, so less noise and no floor."""
    return abs(float(answers[0].double().mean() - answers[1].double().mean()))


def joined(c: Candidate, names, half: int | None = None) -> Answers:
    """Several data sets as one, or one half of their questions."""
    rows = slice(half, None, 1 if half is None else 2)
    parts = [[column[rows] for column in c.found[name]] for name in names]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


# ---- rules -------------------------------------------------------------------------------------


def by(names, score: Callable[[Answers], float]):
    """Lowest score on these questions among candidates with enough accuracy on them."""

    def value(c: Candidate, pool: list[Candidate]) -> float:
        base = next(x for x in pool if x.run == "base")
        least = LEAST_ACCURACY * float(joined(base, names)[1].double().mean())
        answers = joined(c, names)
        return score(answers) if float(answers[1].double().mean()) >= least else float("inf")

    value.needs = names
    return value


def worst(names):
    """Lowest of the largest gap on several question sets, with enough accuracy on all of them."""

    def value(c: Candidate, pool: list[Candidate]) -> float:
        guarded = by(names, gap)(c, pool)
        return guarded if guarded == float("inf") else max(gap(c.found[n]) for n in names)

    value.needs = names
    return value


def bounded(rise: float):
    """The highest entropy among candidates whose source task loss is at most `rise` nats higher."""

    def value(c: Candidate, pool: list[Candidate]) -> float:
        base = next(x for x in pool if x.run == "base")
        return -c.entropy if c.task_loss <= base.task_loss + rise else float("inf")

    value.needs = ()
    return value


def fixed(run: str, k: int):
    """Always this run's iteration k, alpha dropped."""

    def value(c: Candidate, pool: list[Candidate]) -> float:
        return 0.0 if (c.run, c.k, c.alpha) == (run, k, "dropped") else float("inf")

    value.needs = ()
    return value


def rules(target: tuple[str, ...], others: tuple[str, ...], ours: str, last: int) -> dict:
    """Every rule for one target; `others`: labelled benchmarks that are not the target."""
    found = {
        "do nothing": fixed("base", 0),
        "plain fine-tuning, its end": fixed("fine_tuning", last),
        "(c) fixed number": fixed(ours, last),
        "(d) task loss not above base": bounded(0.0),
        "(d) task loss at most .05 above": bounded(0.05),
        "(t) token-level ECE": by(("tokens",), ece),
        "(a) near misses, first token: gap": by(("near_first",), gap),
        "(a) near misses, first token: ECE": by(("near_first",), ece),
        "(a) near misses, text: gap": by(("near_text",), gap),
        "(a) own first tokens: gap": by(("own",), gap),
        "(b) other benchmark: gap": by(others, gap),
        "(b) other benchmark: ECE": by(others, ece),
        "(a + b) worst gap of the two": worst(("near_first", *others)),
        "(e) open answers: gap": by(("open",), gap),
        "half A of the target (a leak)": lambda c, pool: ece(joined(c, target, 0)),
    }
    found["half A of the target (a leak)"].needs = target
    return found


# ---- what a rule is worth ----------------------------------------------------------------------


def report(candidates: list[Candidate], target: tuple[str, ...], others, ours: str) -> list[str]:
    """One line a rule: rank correlation along and across runs, regret on both halves."""
    seeds = sorted({c.seed for c in candidates if c.run != "base"})
    base = [c for c in candidates if c.run == "base"]
    last = max(c.k for c in candidates if c.run == ours)
    pools = {s: base_of(base, s) + [c for c in candidates if c.seed == s and c.run != "base"]
             for s in seeds}  # fmt: skip
    lines = [
        "| rule | ρ along | ρ across | picked conf-ECE A | regret A | regret B | − fine-tuning B "
        "| accuracy B | picks |",
        "|---|" + "---:|" * 7 + "---|",
    ]
    for name, rule in rules(target, others, ours, last).items():
        if any(n not in c.found for n in rule.needs for c in candidates):
            continue
        along, across, rows, picks = [], [], [], []
        for pool in pools.values():
            scores = [rule(c, pool) for c in pool]
            truth = [ece(joined(c, target)) for c in pool]
            across.append(rank(scores, truth))
            for run in {c.run for c in pool} - {"base", "fine_tuning"}:
                some = [i for i, c in enumerate(pool) if c.run in ("base", run)
                        and c.alpha == "dropped"]  # fmt: skip
                along.append(rank([scores[i] for i in some], [truth[i] for i in some]))
            picked = pool[min(range(len(pool)), key=lambda i: (scores[i], pool[i].k))]
            tuned = next(c for c in pool if c.run == "fine_tuning" and c.k == last)
            row = []
            for half in (0, 1):
                fair = [c for c in pool if accuracy(c, target, half)
                        >= LEAST_ACCURACY * accuracy(pool[0], target, half)]  # fmt: skip
                best = min(ece(joined(c, target, half)) for c in fair)
                row.append((ece(joined(picked, target, half)), best))
            rows.append(
                [row[0][0], row[0][0] - row[0][1], row[1][0] - row[1][1],
                 row[1][0] - ece(joined(tuned, target, 1)), accuracy(picked, target, 1)]
            )  # fmt: skip
            picks.append(
                f"{SHORT.get(picked.run, picked.run)}@{picked.k}"
                + ("+α" if picked.alpha == "applied" else "")
            )
        mean = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        shown = [f"{x:+.2f}" if x == x else "–" for x in (nanmean(along), nanmean(across))]
        shown += [f"{x:.3f}" for x in mean[:3]] + [f"{mean[3]:+.3f}", f"{mean[4]:.3f}"]
        lines.append(f"| {name} | {' | '.join(shown)} | {', '.join(picks)} |")
    sizes = [len(pool) for pool in pools.values()]
    lines += [
        "",
        f"{sum(sizes) // len(sizes)} candidates a seed; N of the target "
        f"{len(joined(candidates[0], target)[0])}.",
    ]
    return lines


def base_of(base: list[Candidate], seed: int) -> list[Candidate]:
    """Iteration 0 of a seed: its own, or the one that all seeds share."""
    return [c for c in base if c.seed == seed] or base


def accuracy(c: Candidate, names, half: int | None = None) -> float:
    """Share of right answers."""
    return float(joined(c, names, half)[1].double().mean())


def rank(scores: list[float], truth: list[float]) -> float:
    """Spearman's rho of what the rule says and the target's conf-ECE; NaN for constants."""
    kept = [(s, t) for s, t in zip(scores, truth, strict=True) if s < float("inf")]
    if len({s for s, _ in kept}) < 3:
        return float("nan")
    return float(spearmanr(*zip(*kept, strict=True)).statistic)


def nanmean(values: list[float]) -> float:
    """Mean of those that are numbers."""
    return float(torch.tensor(values, dtype=torch.float64).nanmean())


# ---- reading -----------------------------------------------------------------------------------


def read(out: Path) -> list[Candidate]:
    """Candidates of every state whose target was probed."""
    candidates = []
    for file in sorted(out.glob("*.target")):
        run, seed, k = file.stem.split("-")
        probes = {
            what: torch.load(file.with_suffix(f".{what}"), weights_only=False)
            for what in ("target", "near_first", "near_text", "own", "open", "tokens")
            if file.with_suffix(f".{what}").exists()
        }
        for alpha in ("dropped", "applied"):
            if alpha == "applied" and run in ("base", "fine_tuning"):
                continue
            c = Candidate(run, int(seed), int(k[1:]), alpha, {})
            for what, sets in probes.items():
                if what != "target":  # one set
                    sets = {what: sets.get("all") or next(iter(sets.values()))}
                for name, variants in sets.items():
                    kept = variants.get(alpha, variants.get("dropped"))
                    if "probs" in kept:
                        s = Scored(**kept)
                        c.found[name] = s.confidence, s.correct
                    else:
                        c.found[name] = kept["confidence"], kept["correct"]
                    if what == "tokens":
                        c.task_loss = float(kept["task_loss"].mean())
                        c.entropy = float(kept["entropy"].mean())
            candidates.append(c)
    return candidates


def trajectory(candidates: list[Candidate], run: str, names) -> list[str]:
    """Mean over seeds along one run: the target and each rule's own number, alpha dropped."""
    lines = ["| k | conf-ECE | accuracy | confidence | tokens ECE | near first | near text | own "
             "| open | sample |",
             "|---:|" + "---:|" * 9]  # fmt: skip
    for k in sorted({c.k for c in candidates if c.run in ("base", run)}):
        here = [
            c for c in candidates if c.k == k and c.run in ("base", run) and c.alpha == "dropped"
        ]
        cells = [nanmean([ece(joined(c, names)) for c in here]),
                 nanmean([accuracy(c, names) for c in here]),
                 nanmean([float(joined(c, names)[0].mean()) for c in here])]  # fmt: skip
        for what, score in (("tokens", ece), ("near_first", signed), ("near_text", signed),
                            ("own", signed), ("open", signed), ("sample", signed)):  # fmt: skip
            some = [score(c.found[what]) for c in here if what in c.found]
            cells.append(nanmean(some) if some else float("nan"))
        lines.append(f"| {k} | " + " | ".join(f"{x:.3f}" if x == x else "–" for x in cells) + " |")
    return lines


def plot(candidates: list[Candidate], runs: dict[str, str], names, path: Path) -> None:
    """Target conf-ECE, its accuracy and each rule's number along runs, mean over seeds."""
    figure = Figure(figsize=(3.7 * len(runs), 4.2), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    lines = (
        ("target: conf-ECE", lambda c: ece(joined(c, names)), "-", "#c1272d", 2.4),
        ("target: accuracy", lambda c: accuracy(c, names), "-", "0.55", 1.6),
        ("near misses: |gap|", lambda c: gap(c.found["near_first"]), "--", "#1f5f8b", 1.6),
        ("other benchmark: |gap|", lambda c: gap(c.found["sample"]), "-.", "#3a923a", 1.6),
        ("source tokens: ECE", lambda c: ece(c.found["tokens"]), ":", "#8e44ad", 1.8),
    )
    for axis, (run, title) in zip(axes, runs.items(), strict=True):
        here = [c for c in candidates if c.run in ("base", run) and c.alpha == "dropped"]
        seeds = len({c.seed for c in here if c.run == run})
        steps = sorted(
            k for k, n in Counter(c.k for c in here).items() if k == 0 or n == seeds
        )  # states that every seed has
        for label, value, style, color, width in lines:
            means = [nanmean([value(c) for c in here if c.k == k]) for k in steps]
            axis.plot(steps, means, style, color=color, lw=width, marker="o", ms=3, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("outer iteration")
        axis.set_ylim(0, None)
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def signed(answers: Answers) -> float:
    """Mean confidence - accuracy."""
    return float(answers[0].double().mean() - answers[1].double().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    # the pool that rules choose from; other runs answer other questions
    found = [c for c in read(args.out) if c.run in ("base", "gamma2", "gamma.5", "fine_tuning")]
    if args.plot:
        runs = {"gamma2": "CALM, γ 2", "gamma.5": "CALM, γ .5", "fine_tuning": "plain fine-tuning"}
        plot(found, runs, ("arc_easy", "sciq"), args.plot)
    for run in ("gamma2", "gamma.5", "fine_tuning"):
        print(f"\n**{run}**\n", *trajectory(found, run, ("arc_easy", "sciq")), sep="\n")
    for target in (("arc_easy", "sciq"), ("arc_easy",), ("sciq",), ("piqa",), ("sample",)):
        # what the shipped config chooses by, or all that the target leaves
        others = tuple(n for n in (*REAL, "sample") if n not in target)
        others = ("sample",) if len(target) > 1 else others
        print(f"\n**target {' + '.join(target)}**\n")
        print(*report(found, target, others, "gamma2"), sep="\n")
    print(json.dumps({"candidates": len(found)}))
