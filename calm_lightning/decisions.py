"""Decisions in a micro-batch of tokens: between which tokens, which is right, how sure, how often.

A decision is one next token: among a row's options, at its first response token (in domain), or
among the whole vocabulary, at every response token (free text).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calm_lightning.backbone import Backbone
from calm_lightning.data import prompts
from calm_lightning.data.mcqa import option_ids
from calm_lightning.data.shift import Shift
from calm_lightning.data.source import TokenDataModule
from calm_lightning.metrics import bin_index
from calm_lightning.module import CalibrationModule, Supervised

OVER = ("vocabulary", "options")
CHUNK = 64  # decisions of (CHUNK, V) float32 log-probabilities held at once


def letter_ids(tokenizer, letters: str) -> Tensor:
    """Ids of the letters where the question form asks for them, (C,) int64."""
    _, ids = option_ids(tokenizer, prompts.question("Which?"), list(letters), "letter")
    return torch.tensor([i for (i,) in ids])


class Decisions(NamedTuple):
    """N decisions among K tokens, or among the V of the vocabulary where `ids` is None."""

    hidden: Tensor  # (N, H)
    answer: Tensor  # (N,) index of the right one
    ids: Tensor | None = None  # (N, K)
    real: Tensor | None = None  # (N, K) bool, False beyond a row's own options

    def split(self, size: int = CHUNK) -> Iterator["Decisions"]:
        """Yield them `size` at a time."""
        for start in range(0, max(1, len(self.answer)), size):
            yield Decisions(*(None if t is None else t[start : start + size] for t in self))

    def log_probs(self, backbone: Backbone) -> Tensor:
        """Log-probabilities over the vocabulary, of the K tokens, (N, K); very low if not real."""
        weight, bias = backbone.weight, backbone.bias
        with torch.autocast(weight.device.type, enabled=False):
            z = F.linear(self.hidden.to(weight.dtype), weight, bias)
            log_p = z.to(torch.promote_types(z.dtype, torch.float32)).log_softmax(-1)
        if self.ids is None:
            return log_p
        # not -inf, which times a probability of 0 is no number
        return log_p.gather(1, self.ids).masked_fill(~self.real, torch.finfo(log_p.dtype).min)

    def total(self, loss: Callable[..., Tensor], backbone: Backbone, *columns: Tensor) -> Tensor:
        """Sum of loss(log_probs, answer, real, *columns), with memory for CHUNK decisions alone.

        Log-probabilities are computed again in the backward pass instead of being kept.
        """

        def of(hidden: Tensor, part: "Decisions", *rows: Tensor) -> Tensor:
            log_p = part._replace(hidden=hidden).log_probs(backbone)
            return loss(log_p, part.answer, part.real, *rows)

        parts = zip(self.split(), *(column.split(CHUNK) for column in columns), strict=True)
        return sum(
            checkpoint(of, part.hidden, part, *rows, use_reentrant=False) for part, *rows in parts
        )


class Bins(NamedTuple):
    """How many decisions fell in each confidence bin, and how many of them were right, (M,)."""

    count: Tensor
    right: Tensor

    def accuracy(self, confidence: Tensor, unknown: float) -> Tensor:
        """Accuracy of each confidence's bin, `unknown` where the bin is empty, (N,)."""
        where = bin_index(confidence, len(self.count))
        known = self.right / self.count.clamp_min(1)
        return torch.where(self.count > 0, known, unknown)[where].to(confidence.dtype)


class DecidingModule(CalibrationModule):
    """A method that looks at decisions.

    Args:
        over: ``options``: one decision a row, at its first response token, among the micro-batch's
            ``option_ids`` (B, K; -100 beyond a row's own) or, where it has none, the letters.
            ``vocabulary``: every response token.
        letters: the options of rows that name none.
        **shared: see `CalibrationModule`.

    Raises:
        ValueError: an unknown `over`; in fit, a response that begins with none of its options.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        over: str = "vocabulary",
        letters: str = "ABCD",
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        if over not in OVER:
            raise ValueError(f"over must be one of {', '.join(OVER)}, not {over!r}")
        self._letters: Tensor | None = None

    def decisions(self, s: Supervised, batch: dict[str, Tensor]) -> Decisions:
        """Decisions at these positions; ValueError where a response is none of the options."""
        if self.hparams.over == "vocabulary":
            return Decisions(s.hidden, s.token)
        hidden, token, row = s.hidden[s.first], s.token[s.first], s.row[s.first]
        if "option_ids" in batch:
            ids = batch["option_ids"][row]
        else:
            if self._letters is None:
                self._letters = letter_ids(self.tokenizer, self.hparams.letters)
            ids = self._letters.to(token.device).expand(len(token), -1)
        is_answer = ids == token[:, None]
        if not is_answer.any(1).all():
            wrong = int(token[~is_answer.any(1)][0])
            raise ValueError(
                f"{type(self).__name__} over options: a response begins with "
                f"{self.tokenizer.decode([wrong])!r}, which is none of its row's options (the "
                f"letters {self.hparams.letters}, unless the DataModule names others): use a "
                "multiple-choice source, or model.over vocabulary for free text"
            )
        return Decisions(hidden, is_answer.int().argmax(1), ids.clamp_min(0), ids >= 0)

    @torch.no_grad()
    def confidences(self, batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Largest probability and whether it is the answer's, (N,) each, a body pass at a time."""
        with self.backbone.without_dropout():
            for s in self.supervised(batch, local=True):
                found = [
                    (part.log_probs(self.backbone).softmax(-1).max(-1), part.answer)
                    for part in self.decisions(s, batch).split()
                ]
                yield (
                    torch.cat([top.values for top, _ in found]),
                    torch.cat([top.indices == answer for top, answer in found]),
                )

    def measure(self) -> Bins:
        """Bins of the whole calib split under the model as it is now."""
        sums = torch.zeros(2, self.hparams.n_bins, device=self.device)
        for batch in calib_batches(self):
            for confidence, right in self.confidences(batch):
                where = bin_index(confidence, self.hparams.n_bins)
                sums[0] += where.bincount(minlength=len(sums[0]))
                sums[1] += where[right].bincount(minlength=len(sums[0]))
        self.reduce([sums])
        return Bins(*sums)


def calib_batches(module: CalibrationModule, share: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield the first `share` of the calib split as micro-batches on the device, each rank its own.

    Raises:
        ValueError: the fit has no DataModule with such a split.
    """
    data = module.trainer.datamodule
    source = data.source if isinstance(data, Shift) else data
    if not isinstance(source, TokenDataModule):
        raise ValueError(
            f"{type(module).__name__} reads the calib split as a whole: fit it with an "
            "AlpacaDataModule, an MCQADataModule or another TokenDataModule"
        )
    limit = max(1, int(share * len(source.rows("calib"))))
    with module.trainer.precision_plugin.forward_context():
        for batch in source.token_batches("calib", limit):
            yield module.transfer_batch_to_device(batch, module.device, 0)
