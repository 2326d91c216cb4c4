"""Multiple-choice questions, as a target that is scored and as an in-domain source."""

import random
import string
from collections.abc import Sequence
from typing import Any

import torch

from calm_lightning.data import prompts
from calm_lightning.data.prompts import Prompt
from calm_lightning.data.questions import Question, load_questions
from calm_lightning.data.source import TokenDataModule, listed, split_rows, without_repeats
from calm_lightning.data.tokens import Batches, RenderedRow, plain_ids

SCORINGS = ("letter", "first_token", "text", "text_mean")
PAPER_SIZES = {"train": 2000, "calib": 500, "sel": 500}  # of the 3,000 in calibration_train


def option_ids(
    tokenizer, prompt: Prompt, options: list[str], scoring: str
) -> tuple[list[int], list[list[int]]]:
    """Find each option's tokens where it stands, after the prompt; return prompt ids, option ids.

    Raises:
        ValueError: the option changes the prompt's own tokens, or a letter is not one new token.
    """
    texts = [prompt.text, *(prompt.text + prompt.lead + option for option in options)]
    before, *wholes = plain_ids(tokenizer, texts, prompt.special)
    found = []
    for option, ids in zip(options, wholes, strict=True):
        new = ids[len(before) :]
        whole = ids[: len(before)] == before and new
        if not whole or (scoring == "letter" and len(new) != 1):
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"After {prompt.text[-20:]!r} the option {prompt.lead + option!r} is not "
                f"{'one new token' if scoring == 'letter' else 'made of new tokens'} for the "
                f"tokenizer {name}, but {tokenizer.convert_ids_to_tokens(ids[len(before) - 1 :])}; "
                'use scoring "text", or another form.'
            )
        found.append(new[:1] if scoring == "first_token" else new)
    return before, found


def question_batches(
    rows: list[dict[str, Any]], scoring: str, size: int, rank: int = 0, world_size: int = 1
) -> list[Batches]:
    """Evaluation rows as batches (see DESIGN), one loader per data set: this rank's share."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        keys = ("id", "question", "options", "prompt_ids", "option_ids")
        batch: dict[str, Any] = {key: [row[key] for row in rows] for key in keys}
        batch["answer"] = torch.tensor([row["answer"] for row in rows])
        batch["n_options"] = torch.tensor([len(row["options"]) for row in rows])
        return {"dataset": rows[0]["dataset"], "scoring": scoring, **batch}

    by_dataset: dict[str, list] = {}
    for row in rows:
        by_dataset.setdefault(row["dataset"], []).append(row)
    loaders = []
    for some in by_dataset.values():
        # Rows of one length side by side need little padding; the longest first, so that a batch
        # that does not fit the memory says so at once.
        some.sort(key=lambda row: -len(row["prompt_ids"]))
        loaders.append(Batches(some[rank::world_size], size, collate))
    return loaders


class MCQADataModule(TokenDataModule):
    """Questions from one benchmark or several, mixed by declared counts.

    `benchmarks` names the sets that are tested and how many questions of each (null: all), drawn
    with `seed` from its test split and kept in file order; every benchmark is one dataloader.
    Names: mmlu, medmcqa, openbookqa, arc_easy, arc_challenge, sciq, piqa, calibration, sample, or a
    key of `files`: `{path, question: column, options: column of lists or [columns], answer: column,
    answers: index (from 0) | letter | number (from 1) | text}`. Under `root` a set is
    ROOT/NAME.jsonl or ROOT/NAME/SPLIT.jsonl (.json, .csv, .parquet).

    As a source (fit, validate) it gives the train items of AlpacaDataModule with the right letter
    or option as the response. `fit_benchmarks` names its sets and counts (default: all of the
    same sets); rows with the content of a test question are taken out, so that a set of one file
    is trained on what is not tested. Several sets are interleaved in proportion before the split.

    Rules, each counted in `report` and said in one line per set: repeats (same question, same
    options in any order) and rows with two equal options are left out, and with "first_token" (or
    `distinct_first_token`, to ask the same questions in another way) rows whose options begin with
    the same token. Counts are drawn from what remains, so they are met or refused.
    """

    def __init__(
        self,
        benchmarks: dict[str, int | None],
        scoring: str = "letter",
        files: dict[str, dict[str, Any]] | None = None,
        fit_benchmarks: dict[str, int | None] | None = None,
        distinct_first_token: bool = False,
        chat: bool = False,
        eval_batch_size: int = 16,
        **shared: Any,
    ):
        super().__init__(**shared)
        if scoring not in SCORINGS:
            raise ValueError(f'scoring is "{scoring}"; it is one of {", ".join(SCORINGS)}.')
        for name, count in [*benchmarks.items(), *(fit_benchmarks or {}).items()]:
            if count is not None and count < 1:
                raise ValueError(f"{name}: {count} questions; give at least 1, or null for all.")
        if eval_batch_size < 1:
            raise ValueError(f"eval_batch_size is {eval_batch_size}; it has to be at least 1.")
        self.benchmarks, self.fit_benchmarks = benchmarks, fit_benchmarks
        self.scoring, self.files, self.chat = scoring, files or {}, chat
        self.distinct_first_token = distinct_first_token or scoring == "first_token"
        self.eval_batch_size = eval_batch_size
        # Whose test questions the source must not hold; Shift sets its own target.
        self.held_out: MCQADataModule | None = self
        self._test: list[Question] | None = None
        self._source: dict[str, list[Question]] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the source for "fit" and "validate", the drawn test questions otherwise."""
        super().setup(stage)
        if stage in ("test", "predict", None):
            self.test_questions()

    def prompt(self, question: Question) -> Prompt:
        """Render a question in the form that the scoring reads."""
        if self.scoring == "letter":
            return self._render(prompts.lettered(question.question, list(question.options)))
        return self._render(question.question)

    def answers(self, question: Question) -> list[str]:
        """Return what is scored, or taught, for each option: its letter or its text."""
        if self.scoring == "letter":
            return list(string.ascii_uppercase[: len(question.options)])
        return list(question.options)

    def test_questions(self) -> list[Question]:
        """Return the drawn test questions, benchmark by benchmark, in file order."""
        if self._test is None:
            drawn = []
            for name, count in self.benchmarks.items():
                drawn += self._draw(name, "test", count, without=set())
            self._test = drawn
        return self._test

    def source_questions(self) -> dict[str, list[Question]]:
        """Return the questions of train, calib and sel."""
        if self._source is None:
            held_out = [] if self.held_out is None else self.held_out.test_questions()
            tested = {question.content for question in held_out}
            counts = self.fit_benchmarks or dict.fromkeys(self.benchmarks)
            drawn = {name: self._draw(name, "fit", n, tested) for name, n in counts.items()}
            # By relative position, so that each split holds every set in proportion.
            placed = [
                ((i + 0.5) / len(questions), question)
                for questions in drawn.values()
                for i, question in enumerate(questions)
            ]
            mixed = [question for _, question in sorted(placed, key=lambda pair: pair[0])]
            for question in mixed:
                _need_answer(question)
            mixed, repeated = without_repeats(mixed, lambda question: question.content)
            sizes = self.sizes
            if sizes is None and list(counts) == ["calibration"]:
                sizes = PAPER_SIZES
            self._source = split_rows(mixed, sizes, " + ".join(counts))
            sizes = {name: len(split) for name, split in self._source.items()}
            self.note("source", {"repeated across sets": repeated, **sizes})
        return self._source

    def source_splits(self) -> dict[str, list[RenderedRow]]:
        """Return (prompt, response) of train, calib and sel, and the answers if one token decides.

        Whole texts may share their first token, and are no decision of one.
        """
        decides = self.scoring in ("letter", "first_token")
        return {
            name: [
                (self.prompt(q), self.answers(q)[q.answer], *([self.answers(q)] if decides else []))
                for q in questions
            ]
            for name, questions in self.source_questions().items()
        }

    def val_dataloader(self) -> list[Batches]:
        """Return the first `val_rows` sel questions to be scored, one loader per benchmark."""
        return self._loaders(self.source_questions()["sel"][: self.val_rows])

    def test_dataloader(self) -> list[Batches]:
        """Return the test questions, one loader per benchmark; all of them need an answer."""
        for question in self.test_questions():
            _need_answer(question)
        return self._loaders(self.test_questions())

    def predict_dataloader(self) -> list[Batches]:
        """Return the test questions, one loader per benchmark; answers may be unknown (-1)."""
        return self._loaders(self.test_questions())

    def _render(self, text: str) -> Prompt:
        return prompts.chat(self.take_tokenizer(), text) if self.chat else prompts.question(text)

    def _options(self, question: Question, prompt: Prompt, scoring: str):
        answers = self.answers(question) if scoring == self.scoring else list(question.options)
        try:
            return option_ids(self.take_tokenizer(), prompt, answers, scoring)
        except ValueError as error:
            raise ValueError(f"{question.where}: {error}") from None

    def _row(self, question: Question) -> dict[str, Any]:
        prompt_ids, ids = self._options(question, self.prompt(question), self.scoring)
        return {
            "id": question.id,
            "dataset": question.dataset,
            "question": question.question,
            "options": list(question.options),
            "prompt_ids": torch.tensor(prompt_ids),
            "option_ids": [torch.tensor(option) for option in ids],
            "answer": question.answer,
        }

    def _loaders(self, questions: list[Question]) -> list[Batches]:
        rows = [self._row(question) for question in questions]
        return question_batches(rows, self.scoring, self.eval_batch_size, *self.rank())

    def _draw(self, name: str, end: str, count: int | None, without: set) -> list[Question]:
        """Read one set, leave out what the rules leave out, draw `count`, report all of it."""
        read, where = load_questions(name, end, self.root, self.files)
        rows, repeated = without_repeats(read, lambda question: question.content)
        checks = {
            "equal options": lambda q: len(set(q.options)) < len(q.options),
            "test questions": lambda q: q.content in without,
            "same first token": self._collides,
            "prompt too long": lambda q: end == "fit" and not self.fits(self.prompt(q)),
        }
        report = {"from": where, "rows": len(read), "repeated": repeated, "looked at": 0}
        report |= dict.fromkeys(checks, 0)
        order: Sequence[int] = range(len(rows))
        if count is not None:
            order = random.Random(f"{self.seed}/{name}/{end}").sample(order, len(order))
        drawn: list[int] = []
        # Only as far as needed: "same first token" tokenises every option that it looks at.
        for place in order:
            if len(drawn) == count:
                break
            report["looked at"] += 1
            reason = next((why for why, left_out in checks.items() if left_out(rows[place])), None)
            if reason is None:
                drawn.append(place)
            else:
                report[reason] += 1
        report["used"] = len(drawn)
        if not drawn or (count is not None and len(drawn) < count):
            raise ValueError(
                f"{name}: {count or 'all'} questions are asked for; the largest possible number is "
                f"{len(drawn)} ({listed(report)})."
            )
        self.note(f"{name} ({end})", report)
        return [rows[place] for place in sorted(drawn)]

    def _collides(self, question: Question) -> bool:
        if not self.distinct_first_token:
            return False
        # Also asked of letters: the question alone, as "first_token" would read it.
        _, first = self._options(question, self._render(question.question), "first_token")
        return len({ids[0] for ids in first}) < len(first)


def _need_answer(question: Question) -> None:
    if question.answer < 0:
        raise ValueError(
            f"{question.where}: its answer is not known (-1); such rows can only be predicted."
        )
