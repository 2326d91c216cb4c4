"""What a run reports in numbers and words: metric rows, bins, one table a data set, warnings."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_lightning import metrics
from calm_lightning.data.files import write_whole
from calm_lightning.scoring import Scored
from calm_lightning.selection import LEAST_ACCURACY

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
#: the same for what a page adds below its table, without intervals
MORE = {
    "smooth_ece": "smooth ECE",
    "equal_mass_ece": "equal-mass ECE",
    "least_ece_of_m": "least conf-ECE of M = 5 … 30",
    "most_ece_of_m": "most",
    "mce": "largest gap",
    "rmsce": "RMS gap",
    "risk_coverage_area": "risk–coverage area",
    "reliability": "Brier reliability",
    "resolution": "resolution",
    "option_mass": "option mass",
}
LABELS = {
    "base": "base",
    "calm": "CALM",
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
#: Below it the model mostly goes on in other words than the options. Whole texts are always rare
OPTION_MASS = 0.1


def label(variant: str) -> str:
    """A variant's name in tables and pictures; "run: variant" keeps the run's own name."""
    run, colon, name = variant.rpartition(": ")
    return run + colon + LABELS.get(name, name.replace("_", " "))


def place(variant: str) -> int:
    """Where a variant stands among others: the base, controls, the method."""
    return ORDER.index(variant) if variant in ORDER else len(ORDER)


def shown(value: float | None, digits: int = 3) -> str:
    """A number as tables print it: .583, −.029, 1.192, a dash where there is none."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}f}".replace("-", "−").replace("0.", ".", int(abs(value) < 1))


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    """The ends of an interval in brackets, nothing where there are none."""
    return "" if low is None else f"[{shown(low, digits)}, {shown(high, digits)}]"


# ---- files ----------------------------------------------------------------------------------


def metric_rows(scored: Iterable[Scored], n_bins: int) -> list[dict[str, Any]]:
    """Rows of metrics.json, one a data set, variant and metric, with what is known of each.

    low, high: 95 % bootstrap over questions. floor, floor_p95: mean and 95th percentile of the ECE
    that a perfectly calibrated model with the same confidences shows at this N.
    """
    rows = []
    for s in scored:
        for metric, numbers in _measured(s, n_bins).items():
            key = dict(zip(KEY, (s.dataset, "test", s.scoring, s.variant, metric), strict=True))
            row = {"value": None, "low": None, "high": None, "floor": None} | numbers
            # A NaN (AUROC where all answers are right) is no JSON: null
            row = {k: None if v != v else v for k, v in row.items()}
            rows.append(key | row | {"n": len(s.id), "bins": n_bins})
    return rows


def _measured(s: Scored, n_bins: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for metric, ends in metrics.bootstrap(s.probs, s.answer, s.n_options, n_bins).items():
        found[metric] = dict(zip(("value", "low", "high"), ends, strict=True))
    for metric, floor in metrics.noise_floor(s.probs, s.n_options, n_bins).items():
        found[metric] |= {"floor": floor.mean, "floor_p95": floor.p95}
    samples, top = (s.confidence, s.correct), diagrams(s, n_bins)["top"]
    over_m, parts = metrics.bin_sensitivity(*samples), metrics.brier_parts(*samples, n_bins)
    more = {
        "smooth_ece": metrics.smooth_ece(*samples),
        "equal_mass_ece": metrics.equal_mass_ece(*samples, n_bins),
        "least_ece_of_m": min(over_m.values()),
        "most_ece_of_m": max(over_m.values()),
        "mce": metrics.max_calibration_error(top),
        "rmsce": metrics.rms_calibration_error(top),
        "risk_coverage_area": metrics.risk_coverage_area(*samples),
        "reliability": parts.reliability,
        "resolution": parts.resolution,
        "option_mass": s.option_mass.mean(),
        "chance": (1 / s.n_options).mean(),
    }
    return found | {metric: {"value": float(value)} for metric, value in more.items()}


def write_metrics(path: Path, run: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict]:
    """Put rows into metrics.json, in place of rows of the same key; return all rows in it."""
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    fresh = {tuple(row[k] for k in KEY) for row in rows}
    rows = [r for r in old["rows"] if tuple(r[k] for k in KEY) not in fresh] + rows
    before = old.get("run", {})
    seconds = before.get("seconds", {}) | run.get("seconds", {})
    document = {"schema": 1, "run": before | run | {"seconds": seconds}, "rows": rows}
    write_whole(path, json.dumps(document, indent=1, allow_nan=False))
    return rows


def write_bins(path: Path, scored: Iterable[Scored], n_bins: int) -> None:
    """bins.csv: the counts behind every diagram; kinds "top", "class:k" and "total"."""
    names = "dataset,split,scoring,variant,kind,bin,low,high,count,confidence_sum,correct"
    lines = [] if not path.exists() else list(csv.reader(path.read_text().splitlines()))[1:]
    for s in scored:
        key = [s.dataset, "test", s.scoring, s.variant]
        lines = [line for line in lines if line[:4] != key]
        for kind, r in diagrams(s, n_bins).items():
            for m in range(n_bins):
                cells = (r.low[m], r.high[m], r.count[m], r.confidence_sum[m], r.correct[m])
                lines.append([*key, kind, m, *(f"{float(c):.10g}" for c in cells)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names.split(","), *lines])
    write_whole(path, text.getvalue())


def diagrams(s: Scored, n_bins: int) -> dict[str, metrics.Reliability]:
    """Reliability of the largest probability ("top"), of all classes pooled, of each class."""
    top = metrics.ConfidenceECE(n_bins, **ALONE)
    top.update(s.probs, s.answer)
    each = metrics.ClasswiseECE(s.probs.shape[1], n_bins, **ALONE)
    columns = torch.arange(s.probs.shape[1])
    each.update(s.probs, s.answer, columns < s.n_options[:, None])
    found = {"top": top.reliability(), "total": each.reliability(total=True)}
    classes = each.reliability()
    for k in columns.tolist():
        own = {f: v[k] for f, v in classes._asdict().items() if f not in ("low", "high")}
        found[f"class:{k}"] = classes._replace(**own)
    return found


# ---- tables ---------------------------------------------------------------------------------


def by_variant(rows: list[dict], dataset: str, scoring: str) -> dict[str, dict[str, dict]]:
    """One data set's rows as variant -> metric -> row, the base first."""
    rows = [r for r in rows if (r["dataset"], r["scoring"]) == (dataset, scoring)]
    rows = sorted(rows, key=lambda r: place(r["variant"]))
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        found.setdefault(row["variant"], {})[row["metric"]] = row
    return found


def sizes(numbers: dict[str, dict[str, dict]]) -> list[tuple[int, int]]:
    """The pairs (N, M) that variants were tested with; more than one do not compare."""
    return list(dict.fromkeys((r["n"], r["bins"]) for m in numbers.values() for r in m.values()))


def best(numbers: dict[str, dict[str, dict]]) -> str:
    """The variant of the lowest conf-ECE."""
    return min(numbers, key=lambda variant: numbers[variant]["conf_ece"]["value"])


def table(rows: list[dict], dataset: str, scoring: str, note: str = "") -> Table:
    """One data set's rows within 120 columns: two lines a variant, the lowest conf-ECE in bold.

    Under each value its 95 % interval, under each ECE's heading "floor" its noise floor.
    """
    numbers = by_variant(rows, dataset, scoring)
    pairs = sizes(numbers)
    size = f"N = {pairs[0][0]}, M = {pairs[0][1]}" if len(pairs) == 1 else "N, M differ"
    out = Table(
        "", title=f"{dataset}, {scoring}, {size}", title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for metric, heading in COLUMNS.items():
        out.add_column(heading, justify="right", no_wrap=True)
        if metric.endswith("ece"):
            out.add_column("floor", justify="right", no_wrap=True)
    for variant, found in numbers.items():
        name = label(variant)
        if len(pairs) > 1:
            name += "\nN {n}, M {bins}".format(**found["conf_ece"])
        cells = [name]
        for metric in COLUMNS:
            row = found[metric]
            digits = 2 if (row["high"] or 0) >= 1 else 3
            cells.append(f"{shown(row['value'])}\n{_range(row['low'], row['high'], digits)}")
            if metric.endswith("ece"):
                cells.append(shown(row["floor"]))
        out.add_row(*map(Text, cells), style="bold" if variant == best(numbers) else None)
    out.caption = (
        "under each value its 95 % interval over questions; bold: lowest conf-ECE; floor: the ECE "
        "that a perfectly calibrated model with these confidences shows at this N"
    ) + ("\n" + note if note else "")
    return out


def _range(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None else f"{shown(low, digits)}–{shown(high, digits)}"


def show(
    console: Console,
    rows: list[dict[str, Any]],
    warnings: Mapping[tuple[str, str], list[str]],
    note: str = "",
) -> None:
    """Print a table a data set, and under it what to know before believing it."""
    for dataset, scoring in dict.fromkeys((r["dataset"], r["scoring"]) for r in rows):
        console.print(table(rows, dataset, scoring, note))
        for sentence in warnings.get((dataset, scoring), []):
            console.print(f"! {sentence}", markup=False, highlight=False)
        console.print()


def chosen(selection: dict[str, Any]) -> str:
    """What selection.json says, as a sentence."""
    what, served = (selection.get(key, selection["chosen"]) for key in ("chosen", "served"))
    name, ours = (
        f"{label(c['method'])}, iteration {c['iteration']}, α {c['alpha']}" for c in (what, served)
    )
    if selection["split"] == "none":
        return f"{name}: {selection['rule']}, nothing was chosen"
    beside = "" if served == what else f" (this folder serves the best of its own method: {ours})"
    return (
        f"{name}{beside}; by {selection['rule']} on {selection['split']} among "
        f"{selection['n_candidates']} candidates"
    )


# ---- warnings -------------------------------------------------------------------------------


def warnings(scored: list[Scored], rows: list[dict[str, Any]]) -> dict[tuple[str, str], list]:
    """What a reader should know before believing the numbers, (data set, scoring) -> sentences."""
    found: dict[tuple[str, str], list[str]] = {}
    by_place = {(s.dataset, s.scoring): {} for s in scored}
    for s in scored:
        by_place[s.dataset, s.scoring][s.variant] = s
    for (dataset, scoring), variants in by_place.items():
        every = by_variant(rows, dataset, scoring)
        # Rows of an earlier version have no questions beside them, hence no floor
        numbers = {variant: every[variant] for variant in every if variant in variants}
        found[dataset, scoring] = [
            *_mass_warning(numbers, scoring),
            *_accuracy_warnings(numbers),
            *_size_warnings(numbers, variants),
        ]
    return found


def _mass_warning(numbers: dict[str, dict[str, dict]], scoring: str) -> Iterable[str]:
    masses = {v: found["option_mass"]["value"] for v, found in numbers.items()}
    low = {v: mass for v, mass in masses.items() if mass is not None and mass < OPTION_MASS}
    if low and scoring in ("letter", "first_token"):
        size = " to ".join(dict.fromkeys(shown(end(low.values())) for end in (min, max)))
        yield (
            f"the options hold {size} of the next-token probability, less than "
            f"{shown(OPTION_MASS, 1)}: the model mostly begins its answer otherwise, so these "
            "numbers speak of its choice among the options, not of what it would write"
            + ("; look at the prompt first" if scoring == "letter" else "")
        )


def _accuracy_warnings(numbers: dict[str, dict[str, dict]]) -> Iterable[str]:
    if "base" not in numbers:
        return
    base, chance = numbers["base"]["accuracy"], numbers["base"]["chance"]["value"]
    if base["low"] < chance + AT_CHANCE:
        yield (
            f"at chance: the base model is right in {shown(base['value'])} (95 % interval from "
            f"{shown(base['low'])}), guessing in {shown(chance)}, so a low ECE shows little here"
        )
    for variant, found in numbers.items():
        accuracy = found["accuracy"]["value"]
        if accuracy < LEAST_ACCURACY * base["value"]:
            yield (
                f"{label(variant)} is right in {shown(accuracy)} where the base is in "
                f"{shown(base['value'])}, less than {shown(LEAST_ACCURACY, 1)} of it: a low ECE is "
                "bought with knowledge"
            )


def _size_warnings(numbers: dict[str, dict[str, dict]], scored: dict[str, Scored]) -> Iterable[str]:
    if len(sizes(numbers)) > 1:
        yield "rows of different N or M do not compare: test them again on one set"
        return
    (n, n_bins), first = sizes(numbers)[0], best(numbers)
    below, alike = [], []
    for variant, found in numbers.items():
        ece = found["conf_ece"]
        if ece["value"] < ece["floor_p95"]:
            value, most = shown(ece["value"]), shown(ece["floor_p95"])
            below.append(f"{label(variant)} {value} (up to {most})")
        same = scored[variant].id == scored[first].id
        if variant != first and same:
            pair = [(s.confidence, s.correct) for s in (scored[first], scored[variant])]
            difference, low, high = metrics.paired_bootstrap(*pair, n_bins)
            if low <= 0 <= high:
                alike.append(f"{label(variant)} {shown(difference)} {interval(low, high)}")
    if below:
        yield (
            f"at N = {n} a perfectly calibrated model may show as high a conf-ECE (in more than 5 "
            f"of 100 draws) as {', '.join(below)}"
        )
    if alike:
        yield (
            f"N = {n} is too small to tell the lowest conf-ECE, that of {label(first)}, from "
            f"{'; '.join(alike)}"
        )
