"""torchmetrics classes over the state of M bins; what they hold does not grow with the rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from calm_lightning.metrics.bins import (
    NO_ROWS,
    UNITS,
    Reliability,
    bin_sums,
    checked,
    class_bins,
    max_calibration_error,
    mean_ece,
    read,
    read_some,
    rms_calibration_error,
    top_label,
)

_TOKEN_CELLS = 2**22  # positions x vocabulary of float32 probabilities held at once, 16 MB


class _Binned(Metric):
    """One summed state, `(3, M)` or `(3, K, M)`: see `bins.read`."""

    full_state_update = False

    def __init__(self, *shape: int, **kwargs: Any):
        # No cache: it is a float, which `.to(torch.bfloat16)` would round.
        super().__init__(compute_with_cache=False, **kwargs)
        if min(shape) < 1:
            raise ValueError(f"n_bins and num_classes must be positive, not {shape}.")
        self.add_state("bins", torch.zeros(3, *shape, dtype=torch.int64), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: str | torch.dtype) -> "_Binned":
        """Keep the integer state, which torchmetrics would turn into floats."""
        return self

    def compute(self) -> Tensor:
        """Calibration error of all rows since reset; ValueError if there was none."""
        return mean_ece(self.bins)

    def reliability(self, total: bool = False) -> Reliability:
        """Bins of all rows since reset, of all processes: call it on each of them.

        total: add up the classes first, `(K, M)` to `(M,)`: the paper's "Total" diagram.
        """
        with self._all_processes():
            bins = self.bins
        return read(bins.sum(1) if total else bins)

    def _all_processes(self):
        return self.sync_context(self.dist_sync_fn, None, True, True, self.distributed_available_fn)


class _OfProbabilities(_Binned):
    # What it does with checked rows is a subclass's `_add(probs, target, mask)`.
    def update(self, probs: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Add `(N, K)` probabilities; errors count rows since reset (`forward`: in the batch)."""
        classwise = self.bins.ndim == 3
        if classwise and probs.shape[1:] != self.bins.shape[1:2]:
            found = f"probs {tuple(probs.shape)} but num_classes = {self.bins.shape[1]}"
            raise ValueError(f"Got {found}: pad with probability 0 and mask the padding.")
        # By classes a row counts up to K times, but it is right in exactly one of them.
        before = self.bins[1 if classwise else 0]
        self._add(*checked(probs, target, mask, before), mask)

    def update_logits(self, logits: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Add `(N, K)` logits: softmax over the row's own options, in float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if mask is not None and mask.dtype == torch.bool and mask.shape == logits.shape:
            logits = logits.masked_fill(~mask, -torch.inf)
        self.update(logits.softmax(-1), target, mask)


class ConfidenceECE(_OfProbabilities):
    """conf-ECE (Eq. 13) over many batches, as `confidence_ece`; `reliability()` is `(M,)`.

    keep_samples: also keep 8 bytes a row, for `samples`.

    >>> metric = ConfidenceECE(n_bins=10)
    >>> metric.update(torch.tensor([[0.95, 0.05]]), torch.tensor([0]))
    >>> metric.update_logits(torch.tensor([[200.0, 0.0]]), torch.tensor([1]))
    >>> metric.compute()
    tensor(0.4750, dtype=torch.float64)
    >>> metric.reliability().count, metric.reliability().mean_confidence
    (tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 2]), tensor(0.9750, dtype=torch.float64))
    """

    def __init__(self, n_bins: int = 10, keep_samples: bool = False, **kwargs: Any):
        super().__init__(n_bins, **kwargs)
        self.keep_samples = keep_samples
        if keep_samples:  # int64, 2 * units + correct: a float would be cast with the model
            self.add_state("kept", [], dist_reduce_fx="cat")

    def _add(self, probs: Tensor, target: Tensor, mask: Tensor | None) -> None:
        confidence, correct = top_label(probs, target)
        # Not in place: a state that Lightning reset under inference_mode would refuse it later.
        self.bins = self.bins + bin_sums(confidence, correct, self.bins.shape[-1])
        if self.keep_samples:
            self.kept.append(2 * (confidence * UNITS).round().long() + correct)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the states; a process without rows takes part with an empty tensor."""
        # torchmetrics would make that one float32, which does not gather with int64.
        if self.keep_samples and len(self.kept) == 0:
            self.kept = [self.bins.new_empty(0)]
        super().sync(*args, **kwargs)

    def samples(self) -> tuple[Tensor, Tensor]:
        """Confidence `(N,)` float64, to 2**-33, and bool correct, of all rows of all processes.

        For the functions of samples, none of which depends on the order. Call it on each process.
        ValueError: no rows, or made without keep_samples=True.
        """
        if not self.keep_samples:
            raise ValueError("No samples were kept: make it with keep_samples=True.")
        with self._all_processes():
            kept = self.kept if isinstance(self.kept, Sequence) else [self.kept]
        if not sum(map(len, kept)):
            raise ValueError(NO_ROWS)
        kept = torch.cat(list(kept))
        return (kept >> 1).double() / UNITS, (kept & 1).bool()


class MCE(ConfidenceECE):
    """Largest calibration error of a bin of the largest probability: `max_calibration_error`."""

    def compute(self) -> Tensor:
        """Over all rows since reset; ValueError if there was none."""
        return max_calibration_error(read_some(self.bins))


class RMSCE(ConfidenceECE):
    """Root mean square calibration error of the largest probability: `rms_calibration_error`."""

    def compute(self) -> Tensor:
        """Over all rows since reset; ValueError if there was none."""
        return rms_calibration_error(read_some(self.bins))


class ClasswiseECE(_OfProbabilities):
    """cw-ECE (Eq. 14) over many batches, as `classwise_ece`; `reliability()` is `(K, M)`.

    >>> metric = ClasswiseECE(num_classes=3)
    >>> metric.update(torch.tensor([[0.5, 0.5, 0], [0.75, 0.25, 0]]), torch.tensor([0, 0]))
    >>> metric.compute(), metric.reliability().ece.tolist()
    (tensor(0.2500, dtype=torch.float64), [0.375, 0.375, 0.0])
    >>> metric.reliability(total=True).count
    tensor([2, 0, 1, 0, 0, 2, 0, 1, 0, 0])
    """

    def __init__(self, num_classes: int, n_bins: int = 10, **kwargs: Any):
        super().__init__(num_classes, n_bins, **kwargs)

    def _add(self, probs: Tensor, target: Tensor, mask: Tensor | None) -> None:
        self.bins = self.bins + class_bins(probs, target, mask, self.bins.shape[-1])


class TokenECE(_Binned):
    """conf-ECE (Eq. 13) of next-token predictions over the vocabulary; `reliability()` is `(M,)`.

    >>> metric = TokenECE()
    >>> metric.update(torch.tensor([[200.0, 0.0], [0.0, 0.0]]), torch.tensor([1, -100]))
    >>> metric.compute(), metric.reliability().count.sum()
    (tensor(1., dtype=torch.float64), tensor(1))
    """

    def __init__(self, n_bins: int = 10, **kwargs: Any):
        super().__init__(n_bins, **kwargs)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits `(..., V)` and the token each position predicts, `(...)`; -100 is left out.

        Hugging Face's labels are the inputs: give `logits[:, :-1]` and `labels[:, 1:]`. The
        softmax is in float32 at least, over chunks of positions: O(chunk * V) memory. ValueError:
        shapes, NaN or +Inf in a row, a label outside 0..V-1; nothing of the batch is added then.
        """
        shape, added = tuple(logits.shape), torch.zeros_like(self.bins)
        integer = not (labels.is_floating_point() or labels.is_complex())
        if logits.ndim < 2 or labels.shape != shape[:-1] or not integer:
            raise ValueError(
                "Give logits (..., V) and integer labels (...), not "
                f"{shape} and {labels.dtype} {tuple(labels.shape)}."
            )
        logits, labels = logits.reshape(-1, shape[-1]), labels.flatten().long()
        positions = (labels != -100).nonzero().squeeze(1)
        for chunk in positions.split(max(1, _TOKEN_CELLS // shape[-1])):
            z, wanted = logits[chunk], labels[chunk]
            p = z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32))
            confidence, correct = top_label(p, wanted)
            bad = ~(confidence >= 0) | (wanted < 0) | (wanted >= shape[-1])
            if bad.any():
                i = int(bad.nonzero()[0])
                where = tuple(int(j) for j in torch.unravel_index(chunk[i], shape[:-1]))
                raise ValueError(
                    f"Position {where} (label {wanted[i]}): labels must be in 0..{shape[-1] - 1} "
                    "or -100, logits neither NaN nor Inf; mend it or set its label to -100."
                )
            added += bin_sums(confidence, correct, added.shape[-1])
        self.bins = self.bins + added
