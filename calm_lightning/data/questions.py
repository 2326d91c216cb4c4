"""Multiple-choice rows as the published sets hold them, read into one shape and checked."""

import ast
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calm_lightning import samples
from calm_lightning.data.files import column, load_rows, read_rows, text_column


@dataclass(frozen=True)
class Question:
    """One question: two or more options, the index of the right one (-1: not known)."""

    id: str
    dataset: str
    question: str
    options: tuple[str, ...]
    answer: int
    where: str

    @property
    def content(self) -> tuple[str, ...]:
        """What makes two rows the same: the question and its options, in whatever order."""
        return (self.question, *sorted(self.options))


class Fields(NamedTuple):
    """What a reader takes out of a row, not yet checked."""

    question: str
    options: list
    answer: int


def read_list(value: Any, where: str, number: int) -> list:
    """Return options given as a list, or as the text of a Python or JSON list of texts."""
    if isinstance(value, str):
        # literal_eval, not a search for quotes, which an apostrophe inside an option would break.
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = None
    if not isinstance(value, (list, tuple)):
        raise ValueError(
            f'{where}, row {number}: its options are not a list; write them as ["...", "..."].'
        )
    return list(value)


def read_index(value: Any, where: str, number: int) -> int:
    """Return an answer given as a number or as the text of one, counted from 0."""
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}, row {number}: the answer {value!r} is no index; it counts options from 0."
        ) from None


def read_label(labels: list[str], key: Any, where: str, number: int) -> int:
    """Return where `key` stands among a row's own labels; an empty key is an unknown answer."""
    if key in ("", None):
        return -1
    if key not in labels:
        raise ValueError(
            f"{where}, row {number}: the answer {key!r} is none of its labels {', '.join(labels)}."
        )
    return labels.index(key)


def _choices(row, where, n) -> Fields:
    options = read_list(column(row, "choices", where, n), where, n)
    answer = read_index(column(row, "answer", where, n), where, n)
    return Fields(text_column(row, "question", where, n), options, answer)


def _labelled(question_key: str) -> Callable[..., Fields]:
    def read(row, where, n) -> Fields:
        choices = column(row, "choices", where, n)
        # Labels are A to E or 1 to 5, row by row: only the row itself says which option "4" is.
        labels = list(choices["label"])
        answer = read_label(labels, column(row, "answerKey", where, n), where, n)
        return Fields(text_column(row, question_key, where, n), list(choices["text"]), answer)

    return read


def _medmcqa(row, where, n) -> Fields:
    options = [column(row, key, where, n) for key in ("opa", "opb", "opc", "opd")]
    answer = read_index(column(row, "cop", where, n), where, n)  # 0 to 3, -1 in the test split
    return Fields(text_column(row, "question", where, n), options, answer)


def _sciq(row, where, n) -> Fields:
    question = text_column(row, "question", where, n)
    keys = ("correct_answer", "distractor1", "distractor2", "distractor3")
    options = [text_column(row, key, where, n) for key in keys]
    # The right answer is always the same column, so the order is drawn, from the row alone: it
    # stays the same whatever else is read. `support` holds the answer and is not shown.
    order = random.Random(json.dumps([question, options])).sample(range(4), 4)
    return Fields(question, [options[i] for i in order], order.index(0))


def _piqa(row, where, n) -> Fields:
    options = [column(row, key, where, n) for key in ("sol1", "sol2")]
    answer = read_index(column(row, "label", where, n), where, n)
    return Fields(text_column(row, "goal", where, n), options, answer)


class Benchmark(NamedTuple):
    """Where a set is on the hub, which splits serve which end (first found), and its reader."""

    hub_id: str
    config: str | None
    fit_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    read: Callable[..., Fields]
    revision: str | None = None


_FIT, _TEST = ("train", "validation", "test"), ("test", "validation")
BENCHMARKS = {
    "mmlu": Benchmark(
        "cais/mmlu", "all", ("auxiliary_train", "validation", "dev", "test"), ("test",), _choices
    ),
    # The test split has no answers.
    "medmcqa": Benchmark(
        "openlifescienceai/medmcqa", None, ("train", "validation"), ("validation",), _medmcqa
    ),
    "openbookqa": Benchmark("allenai/openbookqa", "main", _FIT, _TEST, _labelled("question_stem")),
    "arc_easy": Benchmark("allenai/ai2_arc", "ARC-Easy", _FIT, _TEST, _labelled("question")),
    "arc_challenge": Benchmark(
        "allenai/ai2_arc", "ARC-Challenge", _FIT, _TEST, _labelled("question")
    ),
    "sciq": Benchmark("allenai/sciq", None, _FIT, _TEST, _sciq),
    # The main branch holds a loading script, which datasets >= 4 no longer runs; no test answers.
    "piqa": Benchmark(
        "ybisk/piqa", None, ("train", "validation"), ("validation",), _piqa, "refs/convert/parquet"
    ),
    # The in-domain set of the paper's group.
    "calibration": Benchmark(
        "aaronwzl/mcqa_calibration_dataset", None, ("calibration_train",), ("test_1",), _choices
    ),
}
FILE_KEYS = {"path", "question", "options", "answer", "answers"}
ANSWERS = ("index", "letter", "number", "text")


def _declared(name: str, spec: dict[str, Any]) -> Callable[..., Fields]:
    """Make the reader of a user's own file from its declared columns (see MCQADataModule)."""
    if unknown := spec.keys() - FILE_KEYS:
        raise ValueError(f"files[{name}] has {sorted(unknown)}; its keys are {sorted(FILE_KEYS)}.")
    if missing := {"path", "question", "options"} - spec.keys():
        raise ValueError(f"files[{name}] lacks {sorted(missing)}.")
    kind = spec.get("answers", "index")
    if kind not in ANSWERS:
        raise ValueError(f'files[{name}]: answers is "{kind}"; it is one of {", ".join(ANSWERS)}.')

    def read(row, where, n) -> Fields:
        if isinstance(spec["options"], str):
            options = read_list(column(row, spec["options"], where, n), where, n)
        else:
            options = [column(row, key, where, n) for key in spec["options"]]
            while options and (options[-1] is None or not str(options[-1]).strip()):
                options.pop()  # fewer options than columns: the last cells are blank
        answer = -1
        if "answer" in spec:
            value = column(row, spec["answer"], where, n)
            value = value.strip() if isinstance(value, str) else value
            if kind == "index":
                answer = read_index(value, where, n)
            else:
                labels = {
                    "letter": list(string.ascii_uppercase[: len(options)]),
                    "number": [str(i + 1) for i in range(len(options))],
                    "text": [str(option).strip() for option in options],
                }[kind]
                answer = read_label(labels, value if value is None else str(value), where, n)
        return Fields(text_column(row, spec["question"], where, n), options, answer)

    return read


def load_questions(
    name: str, end: str, root: str | Path | None, files: dict[str, dict[str, Any]]
) -> tuple[list[Question], str]:
    """Read all questions of a benchmark for one end, "fit" or "test"; return them and their source.

    Raises:
        ValueError: an unknown name, or a row that is not a question with at least two non-empty
            options and an answer among them (-1: not known), naming file, row and key.
    """
    if name in files:
        read, where = _declared(name, files[name]), str(files[name]["path"])
        raw = read_rows(where)
    elif name == "sample":
        read, where = _choices, str(samples.path("mcqa"))
        raw = read_rows(where)
    elif name in BENCHMARKS:
        known = BENCHMARKS[name]
        splits = known.fit_splits if end == "fit" else known.test_splits
        raw, where = load_rows(known.hub_id, name, splits, root, known.config, known.revision)
        read = known.read
    else:
        raise ValueError(
            f"There is no benchmark {name}; declare it in files, or use sample, "
            f"{', '.join(BENCHMARKS)}."
        )
    questions = []
    ids: set[str] = set()
    for number, row in enumerate(raw, 1):
        fields = read(row, where, number)
        text, options = fields.question.strip(), [str(option).strip() for option in fields.options]
        if not text or len(options) < 2 or not all(options) or None in fields.options:
            raise ValueError(
                f"{where}, row {number}: a question needs its text and at least two options, none "
                f"empty; here are {fields.question[:60]!r} and {fields.options!r}."
            )
        if not -1 <= fields.answer < len(options):
            raise ValueError(
                f"{where}, row {number}: the answer is option {fields.answer} counted from 0, of "
                f"{len(options)} options; correct the row (-1 stands for an unknown answer)."
            )
        given = row.get("id")
        question_id = f"{name}-{number}" if given is None else str(given)
        if question_id in ids:
            raise ValueError(f'{where}, row {number}: the id "{question_id}" is taken already.')
        ids.add(question_id)
        place = f"{where}, row {number}"
        questions.append(Question(question_id, name, text, tuple(options), fields.answer, place))
    return questions, where
