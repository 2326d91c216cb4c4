"""report.html: one file to send to a colleague. No script, no network, images inside."""

import base64
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calm_lightning import report
from calm_lightning.scoring import Scored

#: (data set, id) -> question, options
Texts = Mapping[tuple[str, str], tuple[str, list[str]]]

# A question may hold any markup: everything is escaped, and the page's own policy runs no script
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(
    run: dict[str, Any],
    rows: list[dict[str, Any]],
    scored: list[Scored],
    warnings: Mapping[tuple[str, str], list[str]],
    images: Mapping[str, bytes],
    texts: Texts,
) -> str:
    """The page of a run as HTML.

    Args:
        run: what metrics.json says of the run; "served" is the variant whose answers are shown.
        rows: of metrics.json.
        scored: every question under every variant, with the unions of data sets.
        warnings: see `report.warnings`.
        images: caption -> PNG; the first stands before the answers, the others after them.
        texts: question and options where they are known.
    """
    sets = [
        {
            "dataset": dataset,
            "scoring": scoring,
            "numbers": report.by_variant(rows, dataset, scoring),
            "warnings": warnings.get((dataset, scoring), []),
        }
        for dataset, scoring in dict.fromkeys((r["dataset"], r["scoring"]) for r in rows)
    ]
    served = [s for s in scored if s.variant == run["served"] and s.dataset != "all"]
    answers = sorted(
        ((float(p), s, i) for s in served for i, p in enumerate(s.confidence)),
        key=lambda a: -a[0],
    )
    wrong = [a for a in answers if not a[1].correct[a[2]]]
    return TEMPLATES.get_template("page.html").render(
        run=run,
        selection=report.chosen(run["selection"]) if run.get("selection") else None,
        sets=sets,
        images=[(caption, _data_uri(image)) for caption, image in images.items()],
        mistakes=[_example(s, i, texts) for _, s, i in wrong[:8]],
        questions=[_example(s, i, texts) for _, s, i in answers[:: max(1, len(answers) // 5)]],
        columns=report.COLUMNS,
        more=report.MORE,
        label=report.label,
        shown=report.shown,
        interval=report.interval,
        best=report.best,
        sizes=report.sizes,
    )


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def _example(s: Scored, i: int, texts: Texts) -> dict[str, Any]:
    """A question with its options, their probabilities, the model's choice and the right one."""
    k = int(s.n_options[i])
    letters = [string.ascii_uppercase[j] if j < 26 else str(j + 1) for j in range(k)]
    question, options = texts.get((s.dataset, s.id[i]), (s.id[i], [f"option {c}" for c in letters]))
    probs = s.probs[i, :k].tolist()
    choice = int(s.probs[i].argmax())
    return {
        "id": s.id[i],
        "dataset": s.dataset,
        "question": question,
        "options": [
            {"text": o, "p": p, "chosen": j == choice, "right": j == int(s.answer[i])}
            for j, (o, p) in enumerate(zip(options, probs, strict=True))
        ],
    }
