"""The bundled sample: well-formed rows, no repeats, no facts shared between tuning and testing."""

import json
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import pytest

from calm_lightning.samples import NAMES, build, path, wordings


def read(name):
    return [json.loads(line) for line in path(name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def mcqa():
    return read("mcqa")


@pytest.fixture(scope="module")
def instructions():
    return read("instructions")


@pytest.fixture(scope="module")
def open_questions():
    return read("open_questions")


def asked_about(row):
    """The words that fill the blanks of a multiple-choice question."""
    for wording in wordings.MCQA[row["subject"]]:
        pattern = re.escape(wording).replace(re.escape("{}"), "(.+?)")
        if found := re.fullmatch(pattern, row["question"]):
            return found.groups()
    raise AssertionError(f"no wording of {row['subject']} fits {row['question']!r}")


def says(text, name):
    """Whether `text` holds `name` as whole words: Tunis is not in Tunisia."""
    return name in text and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="use one of mcqa, instructions, open_questions"):
        path("alpaca")


def test_sizes(mcqa, instructions, open_questions):
    assert 760 <= len(mcqa) <= 840
    assert 1140 <= len(instructions) <= 1260
    assert 760 <= len(open_questions) <= 860
    assert sum(path(name).stat().st_size for name in NAMES) < 600_000


def test_subjects_are_those_promised(mcqa, instructions, open_questions):
    assert Counter(row["subject"] for row in mcqa) == build.MCQA_ROWS
    assert len(instructions) == sum(build.INSTRUCTION_ROWS.values())
    assert Counter(row["subject"] for row in open_questions) == build.OPEN_ROWS


def test_mcqa_rows(mcqa):
    for row in mcqa:
        assert list(row) == ["id", "subject", "question", "choices", "answer"]
        assert 3 <= len(row["choices"]) <= 5
        assert len(set(row["choices"])) == len(row["choices"])
        assert 0 <= row["answer"] < len(row["choices"])
        assert all(choice and choice.isascii() for choice in row["choices"])
    assert len({row["id"] for row in mcqa}) == len(mcqa)
    assert build.distinct_prefix_share(mcqa) >= 0.85


def test_answers_stand_in_every_place_equally_often(mcqa):
    places = Counter(row["answer"] for row in mcqa if len(row["choices"]) == 4)
    assert max(places.values()) - min(places.values()) <= 1


def test_no_question_is_repeated(mcqa, open_questions):
    # The same things asked in another wording would be a repeat too.
    assert len({(row["subject"], asked_about(row)) for row in mcqa}) == len(mcqa)
    questions = [row["question"] for row in mcqa + open_questions]
    assert len(set(questions)) == len(questions)


def test_open_rows(open_questions):
    for row in open_questions:
        assert list(row) == ["id", "subject", "question", "answers"]
        assert row["answers"]
        assert len(set(row["answers"])) == len(row["answers"])
    assert len({row["id"] for row in open_questions}) == len(open_questions)


def test_instruction_rows(instructions):
    for row in instructions:
        assert list(row) == ["instruction", "input", "output"]
        assert row["instruction"]
        assert row["output"]
        assert len(row["output"].split()) < 60
        assert "{" not in row["instruction"] + row["input"], "a wording was left unfilled"
    assert len({(row["instruction"], row["input"]) for row in instructions}) == len(instructions)
    assert 0.25 <= sum(bool(row["input"]) for row in instructions) / len(instructions) <= 0.45


def test_instructions_share_no_fact_with_mcqa(mcqa, instructions):
    assert not set(build.INSTRUCTION_ROWS) & set(build.MCQA_ROWS)
    texts = ["\n".join(row.values()) for row in instructions]
    for row in mcqa:
        answer = row["choices"][row["answer"]]
        naming = [text for text in texts if says(text, answer)]
        for thing in asked_about(row):
            told = [text for text in naming if says(text, thing)]
            assert not told, f"{row['question']} is answered by {told[0]!r}"


def test_files_are_what_build_makes(capsys):
    for package, pin in build.PINS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            # needed to rebuild the sample, not to use it; the dev extra and so CI have both
            pytest.skip(f"{package} is missing")
        if found != pin:
            # another release holds other facts, so other files would be right
            pytest.skip(f"{package} is {found}, not {pin}")
    assert build.main(check=True) == 0, capsys.readouterr().out
