"""Reliability diagrams and the comparison of runs, to be read at 100 mm and in grey."""

import io
import string

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from calm_lightning.metrics import Reliability, noise_floor
from calm_lightning.report import diagrams, label, place, shown
from calm_lightning.scoring import Scored

WIDTH = 100 / 25.4  # inches
STYLE = {"font.size": 6.5, "axes.titlesize": 6.5, "hatch.linewidth": 0.6, "axes.linewidth": 0.5}
#: Below the bars, in units of accuracy: how many rows a bin has
STRIP = 0.36
RIGHT, GAP, ROWS = "#a9c4de", "#b3251e", "0.35"
#: One line a model: told apart in grey by dashes and marker
LINES = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (5, 1)), "v"), ((0, (1, 1)), "P")]
INKS = ["#17365c", "#b3251e", "#2f7d4f", "#7a4fa3", "#a86a10", "#444444"]


def reliability(
    scored: list[Scored], n_bins: int, kinds: tuple[str, ...] = ("top", "total", "class")
) -> Figure:
    """Reliability diagrams of one data set: a panel a kind and variant, accuracy over confidence.

    Bars: accuracy; hatched: the gap to the mean confidence; whiskers: 95 % Wilson interval.
    """
    scored = sorted(scored, key=lambda s: place(s.variant))
    drawn = [(s, diagrams(s, n_bins)) for s in scored]
    names = [k for k in drawn[0][1] if k.partition(":")[0] in kinds]
    panels = [[(s, kind, found[kind]) for s, found in drawn if kind in found] for kind in names]
    if len(scored) == 1:
        panels = [[panel for kind in panels for panel in kind]]
    columns = {2: 2, 4: 2}.get(len(scored), min(3, len(panels[0])))
    lines = [line[i : i + columns] for line in panels for i in range(0, len(line), columns)]
    with rc_context(STYLE):
        height = 1.0 + 1.32 * len(lines)
        figure = Figure(figsize=(WIDTH, height), dpi=200)
        axes = figure.subplots(len(lines), columns, squeeze=False, sharex=True, sharey=True)
        # In inches, since the type does not grow with the figure; a layout engine needs seconds
        figure.subplots_adjust(0.09, 0.65 / height, 0.98, 1 - 0.5 / height, 0.12, 0.4)
        for row, line in zip(axes, lines, strict=True):
            for axis in row[len(line) :]:
                axis.set_visible(False)
            for axis, (s, kind, r) in zip(row, line, strict=False):
                _panel(axis, r)
                axis.set_title(
                    f"{label(s.variant)}\n{_kind(kind)}, ECE {shown(float(r.ece))}", pad=4
                )
        for axis in axes[-1]:
            axis.set_xlabel("confidence", labelpad=1)
        for axis in axes[:, 0]:
            axis.set_ylabel("share right", labelpad=1)
        _legend(figure)
        figure.text(0.5, 1 - 0.06 / height, _size(scored[0], n_bins), ha="center", va="top")
    return figure


def _size(s: Scored, n_bins: int) -> str:
    return f"{s.dataset}, {s.scoring}, N = {len(s.id)}, M = {n_bins}"


def _kind(kind: str) -> str:
    name, _, k = kind.partition(":")
    if name == "class":
        letters = string.ascii_uppercase
        return f"option {letters[int(k)] if int(k) < len(letters) else int(k) + 1}"
    return {"top": "top label", "total": "Total"}[name]


def _panel(axis: Axes, r: Reliability) -> None:
    count, accuracy, confidence = r.count.numpy(), r.accuracy.numpy(), r.confidence.numpy()
    edges = [*r.low.tolist(), 1.0]
    axis.stairs(accuracy, edges, fill=True, color=RIGHT)
    gap = {"fc": "none", "ec": GAP, "hatch": "/////", "lw": 0}
    axis.stairs(confidence, edges, baseline=accuracy, fill=True, **gap)
    most = int(count.argmax())
    share = 0.19 * count / max(1, count[most])
    axis.stairs(share - STRIP, edges, baseline=-STRIP, fill=True, color=ROWS)
    axis.text(edges[most] + edges[1] / 2, 0.2 - STRIP, count[most], fontsize=5, ha="center")
    axis.vlines(edges[1:-1], -STRIP, 1, color="white", lw=0.4)
    axis.plot([0, 1], [0, 1], "--", color="0.2", lw=0.6)
    axis.vlines(confidence, *(end.numpy() for end in r.wilson()), color="black", lw=0.7)
    axis.plot(confidence, accuracy, "o", color="black", ms=1.8, clip_on=False)
    axis.axhline(0, color="0.2", lw=0.4)
    axis.set(xlim=(0, 1), ylim=(-STRIP, 1))
    axis.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    axis.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    axis.tick_params(length=2, pad=1.5)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure) -> None:
    handles = [
        Patch(color=RIGHT, label="right"),
        Patch(fc="none", ec=GAP, hatch="/////", lw=0, label="gap to confidence"),
        Line2D([], [], color="black", lw=0.7, marker="|", ms=5, label="95 % (Wilson)"),
        Line2D([], [], color="0.2", lw=0.6, ls="--", label="calibrated"),
        Patch(color=ROWS, label="rows in a bin (the most: number)"),
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=3, fontsize=6, frameon=False,
        columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip


def comparison(scored: list[Scored], n_bins: int) -> Figure:
    """Accuracy over confidence, and the error among the most confident, a line a model."""
    with rc_context(STYLE):
        height = 2.45 + 0.13 * len(scored)
        figure = Figure(figsize=(WIDTH, height), dpi=200)
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(0.1, 1 - 2.1 / height, 0.98, 1 - 0.25 / height, 0.3)
        left.plot([0, 1], [0, 1], color="0.7", lw=0.6)
        for i, s in enumerate(scored):
            dashes, marker = LINES[i % len(LINES)]
            style = {"ls": dashes, "color": INKS[i % len(INKS)], "lw": 0.9}
            r = diagrams(s, n_bins)["top"]
            filled = r.count > 0
            floor = shown(noise_floor(s.probs, s.n_options, n_bins)["conf_ece"].mean)
            name = f"{label(s.variant)}, conf-ECE {shown(float(r.ece))} (floor {floor})"
            points = r.confidence[filled], r.accuracy[filled]
            left.plot(*points, marker=marker, ms=2.5, label=name, clip_on=False, **style)
            wrong = ~s.correct[s.confidence.argsort(descending=True, stable=True)]
            count = torch.arange(1, len(wrong) + 1)
            right.plot(count / len(wrong), wrong.cumsum(0) / count, **style)
        left.set(xlim=(0, 1), ylim=(0, 1))
        right.set(xlim=(0, 1), ylim=(0, None))
        left.set_xlabel("confidence", labelpad=1)
        left.set_ylabel("share right", labelpad=1)
        right.set_xlabel("share of questions, surest first", labelpad=1)
        right.set_ylabel("share of them wrong", labelpad=1)
        for axis in (left, right):
            axis.tick_params(length=2, pad=1.5)
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="lower left", fontsize=6, frameon=False, handlelength=4)
        figure.text(0.5, 1 - 0.06 / height, _size(scored[0], n_bins), ha="center", va="top")
    return figure


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file, at its own resolution."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
