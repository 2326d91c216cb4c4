"""Runs and other models' predictions side by side: calm compare RUN RUN … [--out FOLDER]."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_lightning import figures, metrics, predictions, report
from calm_lightning.data.files import write_whole
from calm_lightning.scoring import Scored


class Compared(NamedTuple):
    """One argument of the comparison: a run folder, or a file of predictions."""

    name: str
    scored: list[Scored]  # without unions
    n_bins: int | None  # None: predictions alone do not say
    served: str | None
    selection: dict[str, Any] | None


def load(path: str | Path) -> Compared:
    """Read a run folder that was tested, or JSON Lines (see `predictions.read`).

    Raises:
        ValueError: no test has been run there, or its rows differ in M; names folder and remedy.
    """
    path = Path(path)
    if not path.is_dir():
        return Compared(path.stem, predictions.read(path), None, None, None)
    kept, summary = path / "test_predictions.jsonl", path / "metrics.json"
    if not (kept.exists() and summary.exists()):
        raise ValueError(f"{path}: no test has been run there; run calm test --run_dir {path}")
    document = json.loads(summary.read_text())
    bins = sorted({row["bins"] for row in document["rows"]})
    if len(bins) > 1:
        raise ValueError(f"{path}: its rows have M = {bins}; test it again with one n_bins")
    run = document["run"]
    scored = predictions.read(kept)
    return Compared(path.resolve().name, scored, bins[0], run.get("served"), run.get("selection"))


def compare(paths: Sequence[str | Path]) -> tuple[list[Scored], str, int, str]:
    """Bring runs together that were tested alike; variants are then named "run: variant".

    Returns:
        every `Scored` with the unions of data sets; the variant that all others are held against
        (what the first run serves); M; and how the runs were chosen.

    Raises:
        ValueError: one run twice; other questions, right answers, M or scoring; says which.
    """
    (path, times), *_ = Counter(Path(path).resolve() for path in paths).most_common(1)
    if times > 1:
        raise ValueError(f"{path} is named twice: name each run or file once.")
    runs = [load(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=str(path)) for run, path in zip(runs, paths, strict=True)]
    known = next((r for r in runs if all(s.dataset for s in r.scored)), runs[0])
    runs = [run._replace(scored=_placed(run, known)) for run in runs]
    n_bins = _same_bins(runs)
    for pair in pairwise(runs):
        _check_same(*pair)
    named: list[Scored] = []
    for run in runs:
        # Runs of one model share their base: once is enough
        seen = [(s[:2], s.probs) for s in named if s.variant.endswith(": base")]
        for s in run.scored:
            if s.variant != "base" or not any(_equal(s, *other) for other in seen):
                named.append(s._replace(variant=_name(run, s.variant)))
    first = runs[0]
    variants = [s.variant for s in first.scored]
    served = first.served if first.served in variants else variants[-1]
    chosen = [f"{r.name}: {report.chosen(r.selection)}" for r in runs if r.selection]
    return predictions.with_unions(named), _name(first, served), n_bins, "\n".join(chosen)


def _name(run: Compared, variant: str) -> str:
    return f"{run.name}: {variant}" if variant else run.name


def _equal(s: Scored, place: tuple[str, str], probs: torch.Tensor) -> bool:
    return s[:2] == place and torch.equal(s.probs, probs)


def _same_bins(runs: list[Compared]) -> int:
    said = {run.n_bins: run.name for run in runs if run.n_bins is not None}
    if len(said) > 1:
        each = ", ".join(f"{name} M = {n_bins}" for n_bins, name in said.items())
        raise ValueError(f"the runs differ in M: {each}; test them with one model.n_bins")
    return next(iter(said), 10)


def _placed(run: Compared, known: Compared) -> list[Scored]:
    """Give predictions that do not say it the data sets (by id) and scoring of a known run."""
    homes: dict[str, str] = {}
    for s in known.scored:
        for question in s.id:
            if homes.setdefault(question, s.dataset) != s.dataset:
                homes[question] = ""  # of two data sets: the row itself has to say which
    placed = []
    for s in run.scored:
        scoring = s.scoring or ",".join(dict.fromkeys(k.scoring for k in known.scored))
        if s.dataset or not known.scored[0].dataset:
            placed.append(s._replace(scoring=scoring))
            continue
        where = [homes.get(question, "") for question in s.id]
        if "" in where:
            raise ValueError(
                f'{run.name}: the id "{s.id[where.index("")]}" names no one question of '
                f'{known.name}; give its rows their "dataset"'
            )
        for dataset in dict.fromkeys(where):
            rows = [i for i, home in enumerate(where) if home == dataset]
            columns = (column[rows] for column in s[4:])
            ids = [s.id[i] for i in rows]
            placed.append(Scored(dataset, scoring, s.variant, ids, *columns))
    return placed


def _check_same(a: Compared, b: Compared) -> None:
    scorings = [sorted({s.scoring for s in run.scored}) for run in (a, b)]
    if scorings[0] != scorings[1]:
        each = " and ".join(", ".join(s) for s in scorings)
        raise ValueError(f"{a.name} and {b.name} differ in scoring: {each}")
    left, right = _questions(a), _questions(b)
    if left.keys() != right.keys():
        only = [len(x.keys() - y.keys()) for x, y in ((left, right), (right, left))]
        raise ValueError(
            f"{a.name} and {b.name} were tested on different questions: {only[0]} are in the first "
            f"alone, {only[1]} in the second alone, {len(left.keys() & right.keys())} in both; "
            "test them on the same data"
        )
    if differ := [question for question in left if left[question] != right[question]]:
        raise ValueError(
            f"{a.name} and {b.name} give the question {'/'.join(differ[0])} other options or "
            "another right one; keep the options in one order"
        )


def _questions(run: Compared) -> dict[tuple[str, str], tuple[int, int]]:
    """(data set, id) -> right option, number of options."""
    return {
        (s.dataset, question): (int(answer), int(k))
        for s in run.scored
        for question, answer, k in zip(s.id, s.answer, s.n_options, strict=True)
    }


def differences(scored: Iterable[Scored], reference: str, n_bins: int) -> list[dict[str, Any]]:
    """Every variant minus the reference, with paired 95 % bootstrap intervals over questions."""
    by_variant = {s.variant: s for s in scored}
    base, rows = by_variant.pop(reference), []
    for variant, s in by_variant.items():
        samples = [(x.confidence, x.correct) for x in (s, base)]
        scores = [metrics.row_scores(x.probs, x.answer) for x in (s, base)]
        found = {
            "conf_ece": metrics.paired_bootstrap(*samples, n_bins),
            "accuracy": metrics.paired_bootstrap_mean(*(x["correct"] for x in scores)),
            "nll": metrics.paired_bootstrap_mean(*(x["nll"] for x in scores)),
            "brier": metrics.paired_bootstrap_mean(*(x["brier"] for x in scores)),
            "auroc": metrics.paired_bootstrap_auroc(*samples),
        }
        for metric, numbers in found.items():
            # AUROC where all answers are right, or all wrong, is no number: null in JSON
            value, low, high = (None if x != x else x for x in numbers)
            rows.append(
                {"dataset": s.dataset, "scoring": s.scoring, "variant": variant}
                | {"minus": reference, "metric": metric, "value": value, "low": low, "high": high}
            )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """The differences of one data set; bold where the interval excludes 0."""
    first = rows[0]
    names = list(dict.fromkeys(row["metric"] for row in rows))
    out = Table(
        "", title=f"minus {report.label(first['minus'])}: {first['dataset']}, {first['scoring']}",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for metric in names:
        out.add_column(report.COLUMNS[metric], justify="right", no_wrap=True)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = []
        for row in (row for row in rows if row["variant"] == variant):
            ends = report.interval(row["low"], row["high"])
            text = f"{report.shown(row['value'])}\n{ends}"
            apart = row["low"] is not None and not row["low"] <= 0 <= row["high"]
            cells.append(Text(text, style="bold" if apart else ""))
        out.add_row(Text(report.label(variant)), *cells)
    return out


def main(args: list[str]) -> None:
    """Print one table a data set and the paired differences; write comparison.json and .png.

    Raises:
        ValueError: see `compare`.
    """
    parser = argparse.ArgumentParser(prog="calm compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or predictions .jsonl")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder to write to")
    given = parser.parse_args(args)
    scored, reference, n_bins, chosen = compare(given.runs)
    rows = report.metric_rows(scored, n_bins)
    console = Console(width=max(120, Console().width))
    report.show(console, rows, report.warnings(scored, rows), chosen)
    given.out.mkdir(parents=True, exist_ok=True)
    found = []
    for group in predictions.widest(scored):
        some = differences(group, reference, n_bins)
        if some:
            console.print(table(some))
        found += some
        figure = figures.comparison(group, n_bins)
        figure.savefig(given.out / f"comparison_{group[0].scoring}.png")
    document = {"schema": 1, "runs": given.runs, "chosen": chosen, "rows": rows}
    text = json.dumps(document | {"differences": found}, indent=1, allow_nan=False)
    write_whole(given.out / "comparison.json", text)
    print(f"calm: {given.out}/ holds comparison.json and the figure")
