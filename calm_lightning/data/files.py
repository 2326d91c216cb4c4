"""Rows from a local file, from a folder that stands in for the hub, or from the hub."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and rename it: whole or not at all."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read JSON Lines, a JSON list of objects, CSV (all cells text) or Parquet; row 1 is the first.

    Raises:
        ValueError: a missing file, an unknown suffix, or a row that is no object, each named.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the name ends in none of {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # comes with datasets; slow to import

        return pyarrow.parquet.read_table(path).to_pylist()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8.") from None
    if path.suffix == ".csv":
        return _read_csv(path, text)
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error}).") from None
    else:
        rows = []
        # Not splitlines(): U+2028 and U+0085 are legal inside a JSON string.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not valid JSON ({error}).") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, row {number}: {str(row)[:60]!r} is not an object; a row is "
                "{column: value, ...}."
            )
    return rows


def _read_csv(path: Path, text: str) -> list[dict[str, Any]]:
    # Not a table reader that guesses types: it turns the answer "NA" into nothing and "01" into 1.
    rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(
                f"{path}, row {number}: its number of cells differs from the header's; quote the "
                "cells that hold commas."
            )
    return rows


def local_file(root: str | Path, name: str, splits: tuple[str, ...]) -> Path:
    """Find the file for a data set under `root`, the folder used instead of the hub.

    The rule, the first that exists: ROOT/NAME.jsonl (.json, .csv, .parquet), which serves every
    split, then ROOT/NAME/SPLIT.jsonl (...) for each of `splits` in turn.

    Raises:
        ValueError: none exists; the message lists every place looked at.
    """
    root = Path(root)
    stems = [root / name, *(root / name / split for split in splits)]
    tried = [stem.with_name(stem.name + suffix) for stem in stems for suffix in SUFFIXES]
    for path in tried:
        if path.is_file():
            return path
    raise ValueError(f"{name}: none of these files exists: {', '.join(map(str, tried))}.")


def load_rows(
    hub_id: str,
    name: str,
    splits: tuple[str, ...],
    root: str | Path | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Read a data set's first available split from `root` if given, else from the hub.

    Returns the rows and where they came from (used in every message about them).

    Raises:
        ValueError: neither can be read; names what was tried and `root` as the remedy.
    """
    if root is not None:
        path = local_file(root, name, splits)
        return read_rows(path), str(path)
    import datasets  # slow to import, and needed for the hub only

    where = ":".join(filter(None, (hub_id, config, splits[0])))
    try:
        rows = datasets.load_dataset(hub_id, config, split=splits[0], revision=revision)
    except Exception as error:  # the hub's client raises a dozen unrelated types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{where} could not be loaded from the hub ({type(error).__name__}: {reason}); give a "
            f"local folder as root=DIR that holds {name}.jsonl or {name}/{splits[0]}.jsonl."
        ) from error
    return list(rows), where


def column(row: dict[str, Any], key: str, where: str, number: int) -> Any:
    """Return `row[key]`, or raise a ValueError that names the file, the row and its columns."""
    if key not in row:
        raise ValueError(
            f'{where}, row {number}: there is no column "{key}"; there are: {", ".join(row)}.'
        )
    return row[key]


def text_column(row: dict[str, Any], key: str, where: str, number: int) -> str:
    """Return a column that has to be text, else raise a ValueError as `column` does."""
    value = column(row, key, where, number)
    if not isinstance(value, str):
        raise ValueError(f'{where}, row {number}: "{key}" is {value!r}; it has to be text.')
    return value
