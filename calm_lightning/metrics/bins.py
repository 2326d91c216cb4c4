"""The exact state of M bins, what is read from it, and the checks that all metrics share."""

from typing import NamedTuple

import torch
from torch import Tensor

UNITS = 2**32  # fixed-point steps in a confidence of 1
NO_ROWS = "There are no predictions to measure: give at least one row first."
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def checked(probs: Tensor, target: Tensor, mask: Tensor | None, before: Tensor | None = None):
    """Check the shared arguments; return probs in at least float32 and target in int64.

    before: counts that sum to the rows before these, by which an error counts.
    """
    fits = probs.ndim == 2 and probs.shape[1] >= 2 and target.shape == probs.shape[:1]
    if not (fits and probs.is_floating_point() and target.dtype in _INTEGERS):
        raise ValueError(
            "Give floating-point probs (N, K), K >= 2, and integer target (N,), not "
            f"{probs.dtype} {tuple(probs.shape)} and {target.dtype} {tuple(target.shape)}."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != probs.shape):
        raise ValueError(f"Give a bool mask {tuple(probs.shape)}, not {mask.dtype} {mask.shape}.")
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps)
    probs, target = probs.to(torch.promote_types(probs.dtype, torch.float32)), target.long()
    if len(probs) and not _sound(probs, target, mask, tolerance):
        raise ValueError(_fault(probs, target, mask, tolerance, before))
    return probs, target


def _sound(probs: Tensor, target: Tensor, mask: Tensor | None, tolerance: float) -> bool:
    """Whether every row is right, in few passes and with one wait for the device."""
    # NaN passes through each of these, and compares false.
    ends = [*probs.sum(-1).aminmax(), probs.amin(), *target.aminmax()]
    if mask is not None:
        ends.append(_against(mask, probs, target).any())
    low, high, least, first, last, *against = torch.stack(ends).tolist()
    normal = low >= 1 - tolerance and high <= 1 + tolerance and least >= 0
    return normal and first >= 0 and last < probs.shape[1] and not any(against)


def _against(mask: Tensor, probs: Tensor, target: Tensor) -> Tensor:
    """(N,) bool: the row has under two options, or lacks its target or some probability."""
    no_target = ~mask.gather(1, target.clamp(0, mask.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return no_target | (probs.masked_fill(mask, 0) != 0).any(-1) | (mask.sum(-1) < 2)


def _fault(probs: Tensor, target: Tensor, mask: Tensor | None, tolerance: float, before) -> str:
    """Say what is wrong with the first wrong row."""
    k, total = probs.shape[1], probs.sum(-1).double()  # as `_sound` compares in Python
    unnormalised = (total < 1 - tolerance) | (total > 1 + tolerance) | (probs < 0).any(-1)
    wrong = {
        "a probability or logit is NaN or Inf; leave the row out": ~total.isfinite(),
        f"probabilities must be >= 0 and sum to 1 within {tolerance:g}; normalise them, or give "
        "logits to update_logits": unnormalised,
        f"the target must be in 0..{k - 1}; leave unlabelled rows out": (target < 0)
        | (target >= k),
    }
    if mask is not None:
        reason = "the mask must keep the target, all probability, 2 options or more; mend it"
        wrong[reason] = _against(mask, probs, target)
    i = int(torch.stack(tuple(wrong.values())).any(0).nonzero()[0])
    reason = next(text for text, rows in wrong.items() if rows[i])
    row = i if before is None else int(before.sum()) + i
    return f"Row {row} (sum {total[i]:.6g}, target {target[i]}): {reason}."


def checked_samples(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Check samples `(..., N)`: confidence in [0, 1], bool correct; float64 and bool on the CPU."""
    if confidence.shape != correct.shape or correct.dtype != torch.bool or correct.ndim == 0:
        raise ValueError(
            "Give confidence and bool correct of one shape (N,), not "
            f"{tuple(confidence.shape)} and {correct.dtype} {tuple(correct.shape)}."
        )
    if correct.numel() == 0:
        raise ValueError(NO_ROWS)
    # The largest probability of a bfloat16 row may be a step above 1.
    wrong = ~((confidence >= 0) & (confidence <= 1 + 2**-7))
    if wrong.any():
        *_, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Row {i} has confidence {confidence[wrong][0]:.6g}: give confidences in [0, 1] beside "
            "bool correct, and leave out rows without one."
        )
    return confidence.double().cpu(), correct.cpu()


def bin_index(confidence: Tensor, n_bins: int) -> Tensor:
    """Equal-width bin of each confidence: how many inner edges k/M are <= it, all in float32.

    Left-closed, the last bin closed on both sides: k of n samples fall in min(k * M // n, M - 1).
    Probabilities of any shape, unchecked, to int64 in 0..M-1. ValueError: n_bins below 1.

    >>> bin_index(torch.tensor([0.0, 0.1, 0.3, 0.6, 0.7, 0.99, 1.0]), n_bins=10)
    tensor([0, 1, 3, 6, 7, 9, 9])
    """
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, not {n_bins}.")
    confidence = confidence.float()
    # Only the edge nearest to a confidence can be in doubt, so one comparison decides.
    nearest = (confidence * n_bins).round()
    # By a tensor: CUDA divides by a number through its reciprocal, one float32 step off at times.
    below = confidence < nearest / nearest.new_full((1,), n_bins)
    return nearest.add_(below, alpha=-1).clamp_(0, n_bins - 1).long()


class Reliability(NamedTuple):
    """What M bins hold, `(..., M)`, and overall values, `(...)`; means are NaN without rows."""

    low: Tensor  # (M,), in the bin
    high: Tensor  # (M,), not in it, but for the last
    count: Tensor  # int64
    correct: Tensor  # int64
    confidence_sum: Tensor  # float64, as all below
    accuracy: Tensor
    confidence: Tensor
    mean_accuracy: Tensor  # over all bins
    mean_confidence: Tensor  # over all bins
    ece: Tensor  # sum over bins of count / N |accuracy - confidence|

    def wilson(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Wilson's (1927) score interval of each bin's accuracy, `(..., M)` twice; z 1.96: 95 %.

        Unlike the normal one it stays in [0, 1] and has a width where all rows are right.
        """
        p, spread = self.accuracy, z**2 / self.count
        centre = (p + spread / 2) / (1 + spread)
        half = (p * (1 - p) * spread + spread**2 / 4).sqrt() / (1 + spread)
        return centre - half, centre + half


def _means(bins: Tensor) -> tuple[Tensor, Tensor]:
    count, correct, units = bins
    return correct.double() / count, units.double() / UNITS / count


def read(bins: Tensor) -> Reliability:
    """Make what people read of a state `(3, ..., M)` int64: count, correct, confidence units."""
    if bins[0].max() > 2**30:
        raise ValueError("A bin has over 2**30 rows, its int64 sum may overflow: use more bins.")
    count, correct, units = bins
    edges = torch.arange(count.shape[-1] + 1, dtype=torch.float64) / count.shape[-1]
    # count |accuracy - confidence| = |correct - confidence sum|, in whole units and so exact.
    ece = (correct * UNITS - units).abs().sum(-1).double() / UNITS / count.sum(-1)
    means = *_means(bins), *_means(bins.sum(-1))
    return Reliability(edges[:-1], edges[1:], count, correct, units.double() / UNITS, *means, ece)


def max_calibration_error(r: Reliability) -> Tensor:
    """MCE, the largest |accuracy - confidence| of a bin, `(...)`; NaN without rows.

    Naeini et al. 2015. One row alone in a bin can decide it: read it beside the counts.
    """
    gaps = (r.accuracy - r.confidence).abs().nan_to_num(nan=-1.0).amax(-1)
    return gaps.where(gaps >= 0, torch.nan)


def rms_calibration_error(r: Reliability) -> Tensor:
    """RMSCE, sqrt(sum over bins of count / N (accuracy - confidence)**2), `(...)`.

    Hendrycks et al. 2019. Never below the ECE of the same bins. NaN without rows.
    """
    squares = r.count * (r.accuracy - r.confidence).square()
    return (squares.nansum(-1) / r.count.sum(-1)).sqrt()


def debiased_squared_ece(r: Reliability) -> Tensor:
    """RMSCE**2 less what chance adds, accuracy (1 - accuracy) / (count - 1) a bin, `(...)`.

    Kumar, Liang and Ma 2019, "Verified Uncertainty Calibration". About 0 for a calibrated model at
    any N, so it may well be negative. One row does not tell the variance of its bin's accuracy:
    such a bin adds 0, and its row still counts in N. NaN without rows.
    """
    chance = r.accuracy * (1 - r.accuracy) / (r.count - 1)
    terms = r.count * ((r.accuracy - r.confidence).square() - chance)
    return terms.where(r.count > 1, 0).sum(-1) / r.count.sum(-1)


def bin_sums(confidence: Tensor, correct: Tensor, n_bins: int, counted: Tensor | None = None):
    """Bin the rows of each column: `(N, C)`, or `(N,)` for one, to a state `(3, C, M)` or `(3, M)`.

    counted: like confidence, False where a row does not have that column; None: all have.
    """
    columns = confidence.shape[1:]
    cell = bin_index(confidence, n_bins)
    if columns:
        cell = cell + n_bins * torch.arange(columns[0], device=cell.device)
    counted = torch.ones_like(cell) if counted is None else counted
    units = (confidence * UNITS).round()  # times a power of two: exact in float32 as well
    cell, state = cell.flatten(), cell.new_zeros(3, columns.numel() * n_bins)
    for sums, part in zip(state, (counted, correct, units), strict=True):
        sums.index_add_(0, cell, part.flatten().long())  # integers: exact in any order
    return state.view(3, *columns, n_bins)


def top_label(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Largest probability of checked rows, `(N,)`, and whether the first that has it is right."""
    confidence, choice = probs.max(-1)
    return confidence, choice == target


def class_bins(probs: Tensor, target: Tensor, mask: Tensor | None, n_bins: int) -> Tensor:
    """State `(3, K, M)` of every class's probability of checked rows."""
    is_target = target.unsqueeze(1) == torch.arange(probs.shape[1], device=target.device)
    return bin_sums(probs, is_target, n_bins, mask)


def mean_ece(bins: Tensor) -> Tensor:
    """Mean over the classes that have rows; top-label bins are one class."""
    return read_some(bins).ece.nanmean()


def read_some(bins: Tensor) -> Reliability:
    """`read`, where no rows at all are an error."""
    if not bins.any():
        raise ValueError(NO_ROWS)
    return read(bins)


def confidence_ece(probs: Tensor, target: Tensor, n_bins: int = 10) -> Tensor:
    """conf-ECE (Eq. 13), the calibration error of the largest probability.

    >>> confidence_ece(torch.tensor([[0.05, 0.95], [0.0, 1.0]]), torch.tensor([1, 0]))
    tensor(0.4750, dtype=torch.float64)
    """
    return mean_ece(bin_sums(*top_label(*checked(probs, target, None)), n_bins))


def classwise_ece(
    probs: Tensor, target: Tensor, n_bins: int = 10, mask: Tensor | None = None
) -> Tensor:
    """cw-ECE (Eq. 14), the mean over classes of each class's calibration error.

    Class k is measured on the N_k rows that have it; a class with N_k = 0 is left out.

    >>> probs, target = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]]), torch.tensor([0, 0])
    >>> classwise_ece(probs, target)
    tensor(0.2500, dtype=torch.float64)
    >>> classwise_ece(probs, target, mask=torch.tensor([[True] * 3, [True, True, False]]))
    tensor(0.2917, dtype=torch.float64)
    """
    return mean_ece(class_bins(*checked(probs, target, mask), mask, n_bins))
