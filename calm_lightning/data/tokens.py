"""Text to tokens: rows, micro-batches, and the endless loader of train items."""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from calm_lightning.data.prompts import Prompt

IGNORED = -100  # the label of a position at which nothing is predicted
POOL = 32  # batches whose rows are sorted by length together
Row = dict[str, list[int]]
Batch = dict[str, Tensor]
RenderedRow = tuple[Prompt, str] | tuple[Prompt, str, list[str]]


def plain_ids(tokenizer, texts: list[str], special: bool = True) -> list[list[int]]:
    """Tokenise texts, with BOS in front if `special` and the tokenizer does so, never with EOS."""
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    if special and bos is not None and tokenizer("a").input_ids[:1] == [bos]:
        ids = [[bos, *row] for row in ids]
    return ids


def in_context(
    tokenizer, prompt: str, continuation: str, special: bool = True
) -> tuple[list[int], int]:
    """Tokenise prompt + continuation as one text; return the ids and where the continuation starts.

    A tokenizer may merge across the border (":" + "A" -> ":A"). The continuation then starts at the
    first id in which the text differs from the prompt alone, i.e. with the merged token.
    """
    ids, alone = plain_ids(tokenizer, [prompt + continuation, prompt], special)
    pairs = enumerate(zip(ids, alone, strict=False))
    return ids, next((i for i, (a, b) in pairs if a != b), min(len(ids), len(alone)))


def encode(tokenizer, prompt: str, response: str, max_length: int, special: bool = True) -> Row:
    """Tokenise one row: labels are -100 on the prompt, the ids on the response and on its EOS.

    The prompt is kept whole; a row longer than `max_length` loses the end of its response, EOS
    included, so that a cut response does not teach to stop there.

    Raises:
        ValueError: the prompt leaves no room for a response token, or there is no EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token to end a response with; set its eos_token."
        )
    ids, start = in_context(tokenizer, prompt, response, special)
    if not 0 < start < max_length:
        raise ValueError(
            f"The prompt {prompt[:60]!r} takes {start} tokens of max_length={max_length}; a row "
            "needs at least one token of prompt and one of response: raise max_length."
        )
    ids = [*ids, tokenizer.eos_token_id][:max_length]
    return {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Pad rows on the right to the longest: input_ids, attention_mask, labels (B, L), all int64.

    Rows that have options also give option_ids (B, K), -100 beyond a row's own.
    """
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), length), pad_id),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
        "labels": torch.full((len(rows), length), IGNORED),
    }
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        batch["input_ids"][i, :n] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, :n] = 1
        batch["labels"][i, :n] = torch.tensor(row["labels"])
    if "option_ids" in rows[0]:
        ids = [torch.tensor(row["option_ids"]) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        batch["option_ids"] = pad(ids, batch_first=True, padding_value=IGNORED)
    return batch


class TokenRows(Sequence):
    """Rendered rows, tokenised when first asked for: a run touches few of Alpaca's 48,002.

    A row is (prompt, response), or (prompt, response, the answers it was chosen from) where the
    first token decides between these; such rows have the first token of each as `option_ids`.
    """

    def __init__(self, rows: list[RenderedRow], tokenizer, max_length: int, name: str):
        self.rows, self.tokenizer, self.max_length, self.name = rows, tokenizer, max_length, name
        self.cut: set[int] = set()  # rows whose response was cut so far
        self._known: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if index not in self._known:
            prompt, response, *answers = self.rows[index]
            text = prompt.lead + response
            row = encode(self.tokenizer, prompt.text, text, self.max_length, prompt.special)
            if row["labels"][-1] != self.tokenizer.eos_token_id:
                if not self.cut:
                    rank_zero_info(
                        f"{self.name}: responses are cut at max_length={self.max_length} tokens; "
                        "the number of rows met so far is in `cut`."
                    )
                self.cut.add(index)
            for answer in answers[0] if answers else ():
                text = prompt.lead + answer
                ids, start = in_context(self.tokenizer, prompt.text, text, prompt.special)
                row.setdefault("option_ids", []).append(ids[start])
            self._known[index] = row
        return self._known[index]


class EndlessShuffle:
    """Position -> row index: one seeded permutation of n rows after another, without end.

    With `length`, the length of a row, batches of `size` positions hold rows of about one length:
    the rows of POOL batches are sorted, and the batches drawn in any order. So every row comes once
    before any comes twice, little is padded, and few rows need to be tokenised ahead. (A batch that
    crosses from one permutation into the next stays as it was drawn.)

    A pure function of (n, seed, position), so that any position can be visited at any time.
    """

    def __init__(
        self,
        n: int,
        seed: Hashable,
        size: int = 1,
        length: Callable[[int], int] | None = None,
    ):
        self.n, self.seed, self.size, self.length = n, seed, size, length
        self._epoch, self._order, self._sorted = -1, [], set()

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.n)
        if epoch != self._epoch:  # only the permutation in use is kept
            order = random.Random(f"{self.seed}/{epoch}").sample(range(self.n), self.n)
            self._epoch, self._order, self._sorted = epoch, order, set()
        if self.length is not None:
            self._sort(place)
        return self._order[place]

    def _sort(self, place: int) -> None:
        """Bring the pool that this place is in into batches of one length, where not yet done."""
        first = -self._epoch * self.n % self.size  # before it ends the batch of the last epoch
        pool = (place - first) // (POOL * self.size)
        whole = (self.n - first) // self.size  # batches that lie in this epoch
        start = first + pool * POOL * self.size
        count = min(POOL, whole - pool * POOL)
        if pool < 0 or count < 1 or pool in self._sorted:
            return
        self._sorted.add(pool)
        rows = sorted(self._order[start : start + count * self.size], key=self.length)
        batches = [rows[i * self.size : (i + 1) * self.size] for i in range(count)]
        random.Random(f"{self.seed}/{self._epoch}/{pool}").shuffle(batches)
        self._order[start : start + count * self.size] = [row for batch in batches for row in batch]


class OuterLoader:
    """The train items of the outer iterations, endless, and resumable at any of them.

    Item k is `{"train": [T + 1 micro-batches, the residual's first], "calib": micro-batch}`, a pure
    function of (seed, k); its residual and calib rows do not depend on T. Lightning takes a loader
    with `state_dict` as resumable, so this is no DataLoader: the state is the next k, and
    iterating yields what is left of the epoch that k is in. Each rank gets its B / world_size
    consecutive rows of every micro-batch, so that all ranks together see what one device would.
    `by_length`: rows of a micro-batch are about as long, see `EndlessShuffle`.
    """

    def __init__(
        self,
        train: Sequence[Row],
        calib: Sequence[Row],
        batch_size: int,
        inner_steps: int,
        length: int,
        seed: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        by_length: bool = False,
    ):
        if batch_size % world_size:
            raise ValueError(
                f"batch_size={batch_size} can not be shared evenly by {world_size} devices; make "
                f"it a multiple of {world_size}."
            )
        for name, rows in (("train", train), ("calib", calib)):
            if not len(rows):
                raise ValueError(f"The {name} split has no rows; give it some in `sizes`.")
        self.train, self.calib = train, calib
        self.batch_size, self.inner_steps, self.length = batch_size, inner_steps, length
        self.pad_id = pad_id
        share = batch_size // world_size
        self._mine = range(rank * share, (rank + 1) * share)
        self._residual_order = self._order(train, f"{seed}/residual", by_length)
        self._inner_order = self._order(train, f"{seed}/inner", by_length)
        self._calib_order = self._order(calib, f"{seed}/calib", by_length)
        self.k = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, k: int) -> dict[str, Any]:
        first = k * self.inner_steps
        inner = [
            self._micro_batch(self.train, self._inner_order, first + t)
            for t in range(self.inner_steps)
        ]
        residual = self._micro_batch(self.train, self._residual_order, k)
        return {
            "train": [residual, *inner],
            "calib": self._micro_batch(self.calib, self._calib_order, k),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        end = (self.k // self.length + 1) * self.length
        while self.k < end:
            self.k += 1  # before the yield: a checkpoint written during item k resumes after it
            yield self[self.k - 1]

    def state_dict(self) -> dict[str, int]:
        """Return the next outer iteration."""
        return {"k": self.k}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the saved outer iteration."""
        self.k = state["k"]

    def _order(self, rows: Sequence[Row], seed: str, by_length: bool) -> EndlessShuffle:
        length = (lambda i: len(rows[i]["input_ids"])) if by_length else None
        return EndlessShuffle(len(rows), seed, self.batch_size, length)

    def _micro_batch(self, rows: Sequence[Row], order: EndlessShuffle, number: int) -> Batch:
        start = number * self.batch_size
        return collate([rows[order[start + i]] for i in self._mine], self.pad_id)


class Batches:
    """A fixed list of rows in batches of `size`, in order.

    No DataLoader: Lightning would give one a DistributedSampler, which repeats rows to even out the
    ranks, and so count some questions twice.
    """

    def __init__(self, rows: Sequence, size: int, collate: Callable[[list], Any]):
        self.rows, self.size, self.collate = rows, size, collate

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.rows), self.size):
            stop = min(start + self.size, len(self.rows))
            yield self.collate([self.rows[i] for i in range(start, stop)])
