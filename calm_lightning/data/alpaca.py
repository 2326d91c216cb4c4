"""Alpaca and anything with its columns: instruction, input, output."""

from pathlib import Path
from typing import Any

from calm_lightning import samples
from calm_lightning.data import prompts
from calm_lightning.data.files import SUFFIXES, load_rows, read_rows, text_column
from calm_lightning.data.mcqa import question_batches
from calm_lightning.data.near_misses import near_miss_rows
from calm_lightning.data.prompts import Prompt
from calm_lightning.data.source import TokenDataModule, split_rows, without_repeats
from calm_lightning.data.tokens import Batches

NEAR_MISSES = ("first_token", "text", "text_mean")
FULL_ALPACA = 52_002  # rows of tatsu-lab/alpaca, for which the paper's split is the default


class AlpacaDataModule(TokenDataModule):
    """Instruction rows as a source of train items; loss on the response and its EOS only.

    `source` is a hub id, a local JSON, JSONL, CSV or Parquet file, or "sample" (the bundled
    instruction pairs). With `root`, a hub id X/NAME is read from ROOT/NAME.jsonl or
    ROOT/NAME/train.jsonl (.json, .csv, .parquet) instead.

    Rules, each counted in `report["source"]` and said in one line at setup:
    an `input` that only says there is none (`prompts.is_no_input_marker`) counts as empty; rows
    with an empty output are left out (they teach nothing but to stop at once), and so are exact
    repeats, rows over `max_chars_prompt` (instruction + input) or `max_chars_response` characters
    where these are asked for, and rows whose prompt fills `max_length`. What remains is split in
    file order: sel and calib are the last two tenths (2,000 rows each for the full Alpaca), or
    `sizes`. With `near_misses`, a way of scoring ("first_token", "text", "text_mean"), validation
    also asks for the responses of `near_miss_rows` rows of sel among near misses (see there).
    The other arguments are `TokenDataModule`'s.
    """

    def __init__(
        self,
        source: str = "tatsu-lab/alpaca",
        form: str = "alpaca",
        max_chars_prompt: int | None = None,
        max_chars_response: int | None = None,
        near_misses: str | None = None,
        near_miss_rows: int = 150,
        **shared: Any,
    ):
        super().__init__(**shared)
        if form not in prompts.FORMS:
            raise ValueError(f'form is "{form}"; it is one of {", ".join(prompts.FORMS)}.')
        if near_misses not in (None, *NEAR_MISSES):
            raise ValueError(f"near_misses is {near_misses!r}; it is one of {NEAR_MISSES} or null.")
        if near_miss_rows < 1:
            raise ValueError(f"near_miss_rows is {near_miss_rows}; it has to be at least 1.")
        self.near_misses, self.near_miss_rows = near_misses, near_miss_rows
        self.source, self.form = str(source), form
        self.max_chars_prompt, self.max_chars_response = max_chars_prompt, max_chars_response

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Read the raw rows; return them and where they came from."""
        if self.source == "sample":
            path = samples.path("instructions")
            return read_rows(path), str(path)
        if Path(self.source).suffix in SUFFIXES:
            return read_rows(self.source), self.source
        return load_rows(self.source, self.source.split("/")[-1], ("train",), self.root)

    def source_splits(self) -> dict[str, list[tuple[Prompt, str]]]:
        """Read, clean, count and split the rows: (prompt, response) of train, calib and sel."""
        raw, where = self.read()
        reasons = ("no-input markers", "empty output", "too many characters")
        count = {"rows": len(raw), **dict.fromkeys(reasons, 0)}
        rows = []
        for number, row in enumerate(raw, 1):
            instruction = text_column(row, "instruction", where, number).strip()
            given = row.get("input")
            given = "" if given is None else text_column(row, "input", where, number).strip()
            output = text_column(row, "output", where, number).strip()
            if not instruction:
                raise ValueError(f'{where}, row {number}: "instruction" is empty.')
            if prompts.is_no_input_marker(given):
                given = ""
                count["no-input markers"] += 1
            if not output:
                count["empty output"] += 1
            elif _over(self.max_chars_prompt, instruction, given) or _over(
                self.max_chars_response, output
            ):
                count["too many characters"] += 1
            else:
                rows.append((instruction, given, output))
        rows, count["repeated"] = without_repeats(rows, lambda row: row)

        tokenizer = self.take_tokenizer()
        texts = []
        for instruction, given, output in rows:
            prompt = prompts.instruction(self.form, tokenizer, instruction, given)
            if self.fits(prompt):
                texts.append((prompt, output))
        count["prompt too long"] = len(rows) - len(texts)

        sizes = self.sizes
        if sizes is None and len(raw) == FULL_ALPACA:
            sizes = {"calib": 2000, "sel": 2000}
        splits = split_rows(texts, sizes, where)
        sizes = {name: len(split) for name, split in splits.items()}
        self.note("source", {"from": where, **count, **sizes})
        return splits

    def val_dataloader(self) -> list[Batches]:
        """Return token batches of sel, for the source's own losses, and sel's near misses."""
        loaders = [self.token_batches("sel", self.val_rows)]
        if self.near_misses is not None:
            pairs, tokenizer = self.rows("sel").rows, self.take_tokenizer()
            rows, report = near_miss_rows(
                pairs, tokenizer, self.near_misses, self.seed, self.near_miss_rows
            )
            self.note("near misses of sel", report)
            loaders += question_batches(rows, self.near_misses, self.batch_size, *self.rank())
        return loaders


def _over(limit: int | None, *texts: str) -> bool:
    return limit is not None and sum(map(len, texts)) > limit
