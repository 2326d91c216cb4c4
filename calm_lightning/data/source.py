"""What every source of train items shares: its splits, its loaders, its tokenizer."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from calm_lightning.data.prompts import Prompt
from calm_lightning.data.tokens import (
    Batches,
    OuterLoader,
    RenderedRow,
    TokenRows,
    collate,
    plain_ids,
)


def without_repeats(rows: Sequence, key: Callable[[Any], Hashable]) -> tuple[list, int]:
    """Keep the first row of each content; return the kept rows and how many were removed."""
    kept: dict[Hashable, Any] = {}
    for row in rows:
        kept.setdefault(key(row), row)
    return list(kept.values()), len(rows) - len(kept)


def split_rows(rows: list, sizes: dict[str, int] | None, where: str) -> dict[str, list]:
    """Cut rows, in their order, into train, calib and sel: sel is the end, calib what precedes it.

    A size not given is a tenth of the rows for sel and calib, and all that is left for train.

    Raises:
        ValueError: an unknown split, an empty one, or more rows asked for than there are.
    """
    sizes = dict(sizes or {})
    if unknown := sizes.keys() - {"train", "calib", "sel"}:
        raise ValueError(f"sizes names {sorted(unknown)}; the splits are train, calib and sel.")
    n = len(rows)
    sel, calib = sizes.get("sel", n // 10), sizes.get("calib", n // 10)
    train = sizes.get("train", n - calib - sel)
    for name, size in (("sel", sel), ("calib", calib), ("train", train)):
        largest = {"sel": n - 2, "calib": n - sel - 1, "train": n - calib - sel}[name]
        if not 1 <= size <= largest:
            raise ValueError(
                f"{where} has {n} usable rows: {name} can not have {size}; with sel {sel} and "
                f"calib {calib} its largest possible size is {max(largest, 0)} (set `sizes`)."
            )
    return {"train": rows[:train], "calib": rows[n - sel - calib : n - sel], "sel": rows[n - sel :]}


def listed(report: dict[str, Any]) -> str:
    """Write a report in one line, without the reasons for which no row was left out."""
    return ", ".join(f"{key} {value}" for key, value in report.items() if value != 0)


class TokenDataModule(LightningDataModule):
    """A source: train items for the outer iterations, and token batches of calib and sel.

    A subclass reads its rows in `source_splits`. `tokenizer` is given, or taken from the
    LightningModule; it is never changed (padding uses EOS where there is no pad token, and is
    masked). Validation reads the first `val_rows` rows of sel. `by_length`: the rows of a
    micro-batch are about as long, so that little of it is padding; False draws them at random.
    """

    def __init__(
        self,
        tokenizer=None,
        batch_size: int = 16,
        inner_steps: int = 20,
        outer_steps_per_epoch: int = 20,
        max_length: int = 512,
        seed: int = 0,
        root: str | Path | None = None,
        sizes: dict[str, int] | None = None,
        val_rows: int = 64,
        by_length: bool = True,
    ):
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("inner_steps", inner_steps, 0),
            ("outer_steps_per_epoch", outer_steps_per_epoch, 1),
            ("max_length", max_length, 2),
            ("val_rows", val_rows, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it has to be at least {least}.")
        self.tokenizer = tokenizer
        self.batch_size, self.inner_steps = batch_size, inner_steps
        self.outer_steps_per_epoch, self.max_length = outer_steps_per_epoch, max_length
        self.seed, self.root, self.sizes, self.val_rows = seed, root, sizes, val_rows
        self.by_length = by_length
        self.report: dict[str, dict[str, Any]] = {}  # what was read, left out and used
        self._splits: dict[str, TokenRows] | None = None

    def source_splits(self) -> dict[str, list[RenderedRow]]:
        """Read, clean and split the source: rows of train, calib and sel, see `TokenRows`."""
        raise NotImplementedError  # the one thing that every source does in its own way

    def setup(self, stage: str | None = None) -> None:
        """Read the source, unless the stage is "test" or "predict", in which it has no part."""
        self.take_tokenizer()
        if stage in ("fit", "validate", None):
            self.rows("train")

    def take_tokenizer(self):
        """Return the tokenizer given, or the LightningModule's; ValueError where neither is."""
        if self.tokenizer is None and self.trainer is not None:
            self.tokenizer = getattr(self.trainer.lightning_module, "tokenizer", None)
        if self.tokenizer is None:
            raise ValueError(
                f"{type(self).__name__} has no tokenizer: give tokenizer=..., or a LightningModule "
                "that has one."
            )
        return self.tokenizer

    def rows(self, split: str) -> TokenRows:
        """Return the tokenised rows of "train", "calib" or "sel", reading the source if need be."""
        if self._splits is None:
            tokenizer = self.take_tokenizer()
            self._splits = {
                name: TokenRows(rows, tokenizer, self.max_length, name)
                for name, rows in self.source_splits().items()
            }
        return self._splits[split]

    def token_batches(self, split: str, limit: int | None = None) -> Batches:
        """Return this rank's share of a split's first `limit` rows as micro-batches, in order."""
        rank, world_size = self.rank()
        rows, pad_id = self.rows(split), self.pad_id()
        chosen = range(len(rows))[:limit][rank::world_size]
        return Batches(
            chosen, self.batch_size, lambda indices: collate([rows[i] for i in indices], pad_id)
        )

    def train_dataloader(self) -> OuterLoader:
        """Return the loader of train items, at the outer iteration of the trainer's epoch."""
        rank, world_size = self.rank()
        length = self.outer_steps_per_epoch
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        if isinstance(limit, int):
            length = min(length, limit)  # else an epoch would end where a longer one would
        elif limit != 1.0:
            raise ValueError(
                f"limit_train_batches={limit} is a share of an endless loader; set "
                "outer_steps_per_epoch instead."
            )
        loader = OuterLoader(
            self.rows("train"),
            self.rows("calib"),
            self.batch_size,
            self.inner_steps,
            length,
            self.seed,
            self.pad_id(),
            rank,
            world_size,
            self.by_length,
        )
        if self.trainer is not None:
            # A loader asked for again (reload_dataloaders_every_n_epochs, a second fit) goes on.
            loader.k = self.trainer.current_epoch * len(loader)
        return loader

    def note(self, name: str, report: dict[str, Any]) -> None:
        """Keep what was read, left out and used in `report`, and say it in one line."""
        self.report[name] = report
        rank_zero_info(f"{name}: {listed(report)}")

    def fits(self, prompt: Prompt) -> bool:
        """Tell whether a prompt leaves room for a response token within `max_length`."""
        # A token is at least a byte, so that few prompts need to be tokenised to know.
        if len(prompt.text.encode()) + 2 < self.max_length:
            return True
        ids = plain_ids(self.take_tokenizer(), [prompt.text], prompt.special)
        return len(ids[0]) < self.max_length

    def pad_id(self) -> int:
        """Return the id that fills padding: any would do, since padding is always masked."""
        pad = self.take_tokenizer().pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def rank(self) -> tuple[int, int]:
        """Return (rank, world size) of the trainer, or (0, 1) without one."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size
