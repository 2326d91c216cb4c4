"""What a run reports: metric rows, bins, one table, reliability diagrams."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

from calm_lightning import metrics
from calm_lightning.scoring import Scored

#: metric -> heading of its column
COLUMNS = {
    "accuracy": "accuracy",
    "mean_confidence": "confidence",
    "conf_ece": "conf-ECE",
    "cw_ece": "cw-ECE",
    "nll": "NLL",
    "brier": "Brier",
    "auroc": "AUROC",
}
LABELS = {
    "base": "base",
    "fine_tuning": "plain fine-tuning",
    "theta": "CALM, α dropped",
    "both": "CALM, α applied",
    "alpha": "CALM's α on the base",
}
ORDER = ["base", "fine_tuning", "fine_tuning_same_tokens", "temperature_scaling", "alpha"]
KEY = ("dataset", "split", "scoring", "variant", "metric")

#: `Scored` is gathered already, and only rank 0 reports: a metric that waited for others would hang
ALONE = {"distributed_available_fn": lambda: False}

#: Data sets on which a small model is no better than guessing look calibrated when it collapses
AT_CHANCE = 0.05


def label(variant: str) -> str:
    """A variant's name in tables and pictures."""
    return LABELS.get(variant, variant.replace("_", " "))


def _place(variant: str) -> int:
    return ORDER.index(variant) if variant in ORDER else len(ORDER)


def metric_rows(scored: Iterable[Scored], n_bins: int, split: str = "test") -> list[dict[str, Any]]:
    """Rows of metrics.json: one a data set, variant and metric; "all" only beside several sets."""
    rows = []
    for s in _worth_showing(scored):
        numbers = s.summary(n_bins) | {"option_mass": float(s.option_mass.mean())}
        n = int(numbers.pop("n"))
        numbers.pop("n_bins")
        numbers["chance"] = float((1 / s.n_options).mean())
        for metric, value in numbers.items():
            rows.append(
                dict(zip(KEY, (s.dataset, split, s.scoring, s.variant, metric), strict=True))
                | {"value": value, "low": None, "high": None, "floor": None, "n": n, "bins": n_bins}
            )
    return rows


def write_metrics(path: Path, run: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict]:
    """Put rows into metrics.json, in place of rows of the same key; return all rows in it."""
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    fresh = {tuple(row[k] for k in KEY) for row in rows}
    rows = [r for r in old["rows"] if tuple(r[k] for k in KEY) not in fresh] + rows
    # A NaN (AUROC where all answers are right) is no JSON: null
    rows = [r | {"value": None if r["value"] != r["value"] else r["value"]} for r in rows]
    before = old.get("run", {})
    seconds = before.get("seconds", {}) | run.get("seconds", {})
    document = {"schema": 1, "run": before | run | {"seconds": seconds}, "rows": rows}
    _write(path, json.dumps(document, indent=1, allow_nan=False))
    return rows


def write_bins(path: Path, scored: Iterable[Scored], n_bins: int, split: str = "test") -> None:
    """bins.csv: the counts behind every diagram; kinds "top", "class:k" and "total"."""
    names = "dataset,split,scoring,variant,kind,bin,low,high,count,confidence_sum,correct"
    lines = [] if not path.exists() else path.read_text().splitlines()[1:]
    for s in _worth_showing(scored):
        key = f"{s.dataset},{split},{s.scoring},{s.variant},"
        lines = [line for line in lines if not line.startswith(key)]
        for kind, r in _diagrams(s, n_bins):
            for m in range(n_bins):
                cells = (r.low[m], r.high[m], r.count[m], r.confidence_sum[m], r.correct[m])
                numbers = ",".join(f"{float(c):.10g}" for c in cells)
                lines.append(f"{key}{kind},{m},{numbers}")
    _write(path, "\n".join([names, *lines]) + "\n")


def _diagrams(s: Scored, n_bins: int) -> Iterable[tuple[str, metrics.Reliability]]:
    columns = torch.arange(s.probs.shape[1])
    yield "top", _top(s, n_bins)
    each = metrics.ClasswiseECE(s.probs.shape[1], n_bins, **ALONE)
    each.update(s.probs, s.answer, columns < s.n_options[:, None])
    classes = each.reliability()
    for k in columns.tolist():
        per_bin = {
            f: getattr(classes, f)[k]
            for f in ("count", "correct", "confidence_sum", "accuracy", "confidence")
        }
        yield f"class:{k}", classes._replace(**per_bin)
    yield "total", each.reliability(total=True)


def _top(s: Scored, n_bins: int) -> metrics.Reliability:
    metric = metrics.ConfidenceECE(n_bins, **ALONE)
    metric.update(s.probs, s.answer)
    return metric.reliability()


def table(rows: list[dict[str, Any]], dataset: str, scoring: str, title: str = "") -> Table:
    """One data set's rows as a table: a line a variant, the best calibrated in bold."""
    chosen = [r for r in rows if (r["dataset"], r["scoring"]) == (dataset, scoring)]
    found: dict[str, dict[str, float]] = {}
    for r in chosen:
        found.setdefault(r["variant"], {})[r["metric"]] = r["value"]
    sizes = {r["variant"]: (r["n"], r["bins"]) for r in chosen}
    several = len(set(sizes.values())) > 1
    n, bins = ("differ", "differ") if several else (chosen[0]["n"], chosen[0]["bins"])
    chance = found[chosen[0]["variant"]].get("chance")
    out = Table(title=title or f"{dataset}, {scoring}, N = {n}, M = {bins}", title_justify="left")
    out.add_column("")
    for heading in (*COLUMNS.values(), "N", "M"):
        out.add_column(heading, justify="right")
    best = min(numbers["conf_ece"] for numbers in found.values())
    for variant in sorted(found, key=_place):
        numbers = found[variant]
        cells = ["–" if numbers[m] is None else f"{numbers[m]:.3f}" for m in COLUMNS]
        style = "bold" if numbers["conf_ece"] == best else None
        out.add_row(label(variant), *cells, *map(str, sizes[variant]), style=style)
    base = found.get("base")
    if base and chance and base["accuracy"] < chance + AT_CHANCE:
        out.caption = "at chance: the base model guesses here, so a low ECE shows little"
    if several:
        out.caption = "rows of different N or M do not compare: test them again on one set"
    return out


def reliability_figure(scored: list[Scored], n_bins: int) -> Figure:
    """Reliability diagrams of the top label, one panel a variant: accuracy over confidence."""
    scored = _worth_showing(scored)
    if any(s.dataset == "all" for s in scored):  # of several data sets only the union
        scored = [s for s in scored if s.dataset == "all"]
    scored = sorted(scored, key=lambda s: _place(s.variant))
    columns = min(3, len(scored))
    lines = -(-len(scored) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axis in axes[len(scored) :]:
        axis.set_visible(False)
    for axis, s in zip(axes, scored, strict=False):
        r = _top(s, n_bins)
        low, count, accuracy, confidence = (
            column.numpy() for column in (r.low, r.count, r.accuracy, r.confidence)
        )
        filled, width = count > 0, 1 / n_bins
        axis.bar(low[filled], accuracy[filled], width * 0.92, align="edge", color="#6f9bcb")
        axis.bar(low + width * 0.46, count / count.sum(), width * 0.4, color="#23415f")
        axis.plot([0, 1], [0, 1], "--", color="0.25", lw=0.9)
        axis.plot(confidence[filled], accuracy[filled], "o", color="#c1272d", ms=3.5)
        axis.set(xlim=(0, 1), ylim=(0, 1))
        axis.set_title(f"{label(s.variant)}\nconf-ECE {float(r.ece):.3f}", fontsize=9)
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accuracy (light), share of questions (dark)", fontsize=9)
    first = scored[0]
    figure.suptitle(
        f"{first.dataset}, {first.scoring}, N = {len(first.id)}, M = {n_bins}", fontsize=10
    )
    return figure


def _worth_showing(scored: Iterable[Scored]) -> list[Scored]:
    """Leave out the union "all" of a single data set."""
    scored = list(scored)
    several = len({s.dataset for s in scored}) > 2
    return [s for s in scored if several or s.dataset != "all"]


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)  # whole or not at all
