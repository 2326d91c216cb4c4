"""Scored questions as JSON Lines: what a test keeps, and what any other model or API can bring."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from calm_lightning.data.files import read_rows, write_whole
from calm_lightning.scoring import Scored

KEY = ("dataset", "scoring", "variant")


def read(path: str | Path) -> list[Scored]:
    """Read one `Scored` a data set, scoring and variant, questions in order of id, in that order.

    A row is {"id", "probs": one number an option, "answer": index from 0}, and where known
    "dataset", "scoring" and "variant" ("" stands for what a row does not say) and "option_mass".
    So rows of `calm predict` and of other models can be read as those of a test.

    Raises:
        ValueError: a row that is not such a prediction, or an id twice; names file and row.
    """
    groups: dict[tuple[str, ...], dict[str, dict]] = {}
    for number, row in enumerate(read_rows(path), 1):
        _check(row, f"{path}, row {number}")
        group = groups.setdefault(tuple(row.get(k, "") for k in KEY), {})
        if str(row["id"]) in group:
            raise ValueError(
                f'{path}, row {number}: the id "{row["id"]}" is there already; keep one row a '
                "question, or say dataset or variant in each row."
            )
        group[str(row["id"])] = row
    if not groups:
        raise ValueError(f"{path}: holds no prediction; write one JSON object a line.")
    return [_scored(key, group) for key, group in groups.items()]


def write(path: Path, fresh: Iterable[Scored]) -> list[Scored]:
    """Put scored questions in place of those of the same key; return all that the file holds.

    Unions of data sets are left out here: `with_unions` makes them again.
    """
    old = read(path) if path.exists() else []
    kept = {s[:3]: s for s in old} | {s[:3]: s for s in fresh if s.dataset != "all"}
    lines = []
    for s in kept.values():
        columns = zip(s.id, s.probs, s.answer, s.n_options, s.option_mass, strict=True)
        for question, probs, answer, k, mass in columns:
            row = dict(zip(KEY, s[:3], strict=True)) | {"id": question, "answer": int(answer)}
            row |= {"probs": probs[: int(k)].tolist(), "option_mass": float(mass)}
            # Of other models the mass is not known, and NaN is no JSON
            row = {k: v for k, v in row.items() if v == v}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines))
    return list(kept.values())


def with_unions(scored: Iterable[Scored]) -> list[Scored]:
    """Add the union "all" of each scoring and variant that has several data sets."""
    scored = sorted(scored, key=lambda s: s.dataset)  # one order of questions for every variant
    together: dict[tuple[str, str], list[Scored]] = {}
    for s in scored:
        together.setdefault((s.scoring, s.variant), []).append(s)
    return scored + [_union(parts) for parts in together.values() if len(parts) > 1]


def widest(scored: Iterable[Scored]) -> list[list[Scored]]:
    """For each scoring the variants on most questions: of "all" where there are several sets."""
    groups: dict[tuple[str, str], list[Scored]] = {}
    for s in scored:
        groups.setdefault((s.scoring, s.dataset), []).append(s)
    by_scoring = {scoring: group for (scoring, _), group in groups.items()}
    return list((by_scoring | {s: g for (s, d), g in groups.items() if d == "all"}).values())


def _union(parts: list[Scored]) -> Scored:
    probs = pad_sequence([p for s in parts for p in s.probs], batch_first=True)
    ids = [f"{s.dataset}/{question}" for s in parts for question in s.id]
    columns = [torch.cat(column) for column in zip(*(s[5:] for s in parts), strict=True)]
    return Scored("all", parts[0].scoring, parts[0].variant, ids, probs, *columns)


def _scored(key: tuple[str, ...], group: dict[str, dict]) -> Scored:
    ids = sorted(group)
    rows = [group[i] for i in ids]
    probs = [torch.tensor(row["probs"], dtype=torch.float32) for row in rows]
    return Scored(
        *key,
        ids,
        pad_sequence(probs, batch_first=True),
        torch.tensor([row["answer"] for row in rows]),
        torch.tensor([len(p) for p in probs]),
        torch.tensor([row.get("option_mass", torch.nan) for row in rows]),
    )


def _check(row: dict[str, Any], where: str) -> None:
    if missing := [key for key in ("id", "probs", "answer") if key not in row]:
        raise ValueError(f"{where}: it lacks {', '.join(missing)}; see calm_lightning.predictions.")
    probs, answer = row["probs"], row["answer"]
    numbers = isinstance(probs, list) and all(isinstance(p, int | float) for p in probs)
    if not numbers or len(probs) < 2 or min(probs) < 0 or not abs(sum(probs) - 1) < 1e-3:
        raise ValueError(
            f"{where}: probs must be two or more numbers >= 0 that sum to 1, not {str(probs)[:60]}."
        )
    if type(answer) is not int or not 0 <= answer < len(probs):
        raise ValueError(
            f"{where}: the answer {answer!r} is none of 0..{len(probs) - 1}; it is the index of "
            "the right option, and unlabelled questions are left out."
        )
