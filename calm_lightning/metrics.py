"""Calibration metrics: functions on torch, one exact bin state, thin torchmetrics classes over it.

Torch and torchmetrics only. Whether numbers are probabilities or logits is the caller's word
(`update`, `update_logits`), never guessed. Binned metrics rest on integer sums per bin, so that no
order, batching, device, number of processes or precision plugin can change a value.

Arguments that functions share; scalars they return are float64 tensors:
    probs: `(N, K)` probabilities, K >= 2. A row sums to 1 within 1e-3 (bfloat16: 2**-7, its step).
    target: `(N,)` integer index of the right option.
    mask: `(N, K)` bool, True where the row has that option; None: every row has K options. A row
        has at least two, its target is one of them, and those it lacks hold probability 0.
A breach is a ValueError of one sentence: the first wrong row, counted from 0, and the remedy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric

_UNITS = 2**32  # fixed-point steps in a confidence of 1
_RESAMPLE_CELLS = 2**22  # resamples x questions held at once, about 70 MB

Interval = tuple[float, float, float]  # model a minus model b, and the ends of its 95 % interval
Scored = tuple[Tensor, Tensor]  # confidence in [0, 1], bool correct; (S, N) for S seeds, or (N,)


def _checked(probs: Tensor, target: Tensor, mask: Tensor | None, first_row: int | Tensor = 0):
    """Check the shared arguments; return probs in at least float32 and target in int64."""
    ints = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    fits = probs.ndim == 2 and probs.shape[1] >= 2 and target.shape == probs.shape[:1]
    if not (fits and probs.is_floating_point() and target.dtype in ints):
        raise ValueError(
            "Give floating-point probs (N, K), K >= 2, and integer target (N,), not "
            f"{probs.dtype} {tuple(probs.shape)} and {target.dtype} {tuple(target.shape)}."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != probs.shape):
        raise ValueError(f"Give a bool mask {tuple(probs.shape)}, not {mask.dtype} {mask.shape}.")
    k, tolerance = probs.shape[1], max(1e-3, torch.finfo(probs.dtype).eps)
    probs, target = probs.to(torch.promote_types(probs.dtype, torch.float32)), target.long()
    total = probs.sum(-1)
    outside = (target < 0) | (target >= k)
    unnormalised = ((total - 1).abs() > tolerance) | (probs < 0).any(-1)
    wrong = {
        "a probability or logit is NaN or Inf; leave the row out": ~total.isfinite(),
        f"probabilities must be >= 0 and sum to 1 within {tolerance:g}; normalise them, or give "
        "logits to update_logits": unnormalised,
        f"the target must be in 0..{k - 1}; leave unlabelled rows out": outside,
    }
    if mask is not None:
        no_target = ~mask.gather(1, target.clamp(0, k - 1).unsqueeze(1)).squeeze(1)
        lost = no_target | (probs.masked_fill(mask, 0) != 0).any(-1) | (mask.sum(-1) < 2)
        wrong["the mask must keep the target, all probability, 2 options or more; mend it"] = lost
    bad = torch.stack(tuple(wrong.values()))
    if bad.any():  # the only wait for the device
        i = int(bad.any(0).nonzero()[0])
        reason = next(text for text, rows in wrong.items() if rows[i])
        raise ValueError(f"Row {first_row + i} (sum {total[i]:.6g}, target {target[i]}): {reason}.")
    return probs, target


def bin_index(confidence: Tensor, n_bins: int) -> Tensor:
    """Equal-width bin of each confidence: how many inner edges k/M are <= it, all in float32.

    Left-closed, the last bin closed on both sides: k of n samples fall in min(k * M // n, M - 1).
    Probabilities of any shape, unchecked, to int64 in 0..M-1. ValueError: n_bins below 1.

    >>> bin_index(torch.tensor([0.0, 0.1, 0.3, 0.6, 0.7, 0.99, 1.0]), n_bins=10)
    tensor([0, 1, 3, 6, 7, 9, 9])
    """
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, not {n_bins}.")
    # float64 first: CUDA divides by a number through its reciprocal, one float32 step off at times.
    edges = torch.arange(1, n_bins, dtype=torch.float64, device=confidence.device) / n_bins
    return torch.bucketize(confidence.float(), edges.float(), right=True)


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


def _means(bins: Tensor) -> tuple[Tensor, Tensor]:
    count, correct, units = bins
    return correct.double() / count, units.double() / _UNITS / count


def _read(bins: Tensor) -> Reliability:
    """Make what people read of a state `(3, ..., M)` int64: count, correct, confidence units."""
    if bins[0].max() > 2**30:
        raise ValueError("A bin has over 2**30 rows, its int64 sum may overflow: use more bins.")
    count, correct, units = bins
    edges = torch.arange(count.shape[-1] + 1, dtype=torch.float64) / count.shape[-1]
    # count |accuracy - confidence| = |correct - confidence sum|, in whole units and so exact.
    ece = (correct * _UNITS - units).abs().sum(-1).double() / _UNITS / count.sum(-1)
    means = *_means(bins), *_means(bins.sum(-1))
    return Reliability(edges[:-1], edges[1:], count, correct, units.double() / _UNITS, *means, ece)


def _bin_sums(confidence: Tensor, correct: Tensor, counted: Tensor, n_bins: int) -> Tensor:
    """Bin the rows of each column: `(N, C)` to a state `(3, C, M)`."""
    columns = confidence.shape[1]
    cell = bin_index(confidence, n_bins)
    cell = (cell + n_bins * torch.arange(columns, device=cell.device)).flatten()
    units = (confidence * _UNITS).round()  # times a power of two: exact in float32 as well
    zeros = cell.new_zeros(columns * n_bins)
    sums = [zeros.index_add(0, cell, x.flatten().long()) for x in (counted, correct, units)]
    return torch.stack(sums).view(3, columns, n_bins)


def _top_bins(probs: Tensor, target: Tensor, mask: Tensor | None, n_bins: int) -> Tensor:
    """State `(3, M)` of the largest probability of checked rows; no use for the mask."""
    confidence, choice = probs.max(-1, keepdim=True)
    hit = choice == target.unsqueeze(1)
    return _bin_sums(confidence, hit, torch.ones_like(choice), n_bins).squeeze(1)


def _class_bins(probs: Tensor, target: Tensor, mask: Tensor | None, n_bins: int) -> Tensor:
    """State `(3, K, M)` of every class's probability of checked rows."""
    mask = torch.ones_like(probs) if mask is None else mask
    return _bin_sums(probs, one_hot(target, probs.shape[1]), mask, n_bins)


def _mean_ece(bins: Tensor) -> Tensor:
    """Mean over the classes that have rows; top-label bins are one class."""
    if not bins.any():
        raise ValueError("There are no predictions to measure: give at least one row first.")
    return _read(bins).ece.nanmean()


def confidence_ece(probs: Tensor, target: Tensor, n_bins: int = 10) -> Tensor:
    """conf-ECE (Eq. 13), the calibration error of the largest probability.

    >>> confidence_ece(torch.tensor([[0.05, 0.95], [0.0, 1.0]]), torch.tensor([1, 0]))
    tensor(0.4750, dtype=torch.float64)
    """
    return _mean_ece(_top_bins(*_checked(probs, target, None), None, n_bins))


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
    return _mean_ece(_class_bins(*_checked(probs, target, mask), mask, n_bins))


class _BinnedMetric(Metric):
    """A torchmetrics class over one summed state, `(3, M)` or `(3, K, M)`: see `_read`."""

    full_state_update = False

    def __init__(self, *shape: int, **kwargs: Any):
        # No cache: it is a float, which `.to(torch.bfloat16)` would round.
        super().__init__(compute_with_cache=False, **kwargs)
        if min(shape) < 1:
            raise ValueError(f"n_bins and num_classes must be positive, not {shape}.")
        self.add_state("bins", torch.zeros(3, *shape, dtype=torch.int64), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: str | torch.dtype) -> "_BinnedMetric":
        """Keep the integer state, which torchmetrics would turn into floats."""
        return self

    def update(self, probs: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Add `(N, K)` probabilities; errors count rows since reset (`forward`: in the batch)."""
        classwise = self.bins.ndim == 3
        if classwise and probs.shape[1:] != self.bins.shape[1:2]:
            found = f"probs {tuple(probs.shape)} but num_classes = {self.bins.shape[1]}"
            raise ValueError(f"Got {found}: pad with probability 0 and mask the padding.")
        # By classes a row counts up to K times, but it is right in exactly one of them.
        first_row = self.bins[1 if classwise else 0].sum()
        probs, target = _checked(probs, target, mask, first_row)
        # Not in place: a state that Lightning reset under inference_mode would refuse it later.
        bin_rows = _class_bins if classwise else _top_bins
        self.bins = self.bins + bin_rows(probs, target, mask, self.bins.shape[-1])

    def update_logits(self, logits: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Add `(N, K)` logits: softmax over the row's own options, in float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if mask is not None and mask.dtype == torch.bool and mask.shape == logits.shape:
            logits = logits.masked_fill(~mask, -torch.inf)
        self.update(logits.softmax(-1), target, mask)

    def compute(self) -> Tensor:
        """Calibration error of all rows since reset; ValueError if there was none."""
        return _mean_ece(self.bins)

    def reliability(self, total: bool = False) -> Reliability:
        """Bins of all rows since reset, of all processes: call it on each of them.

        total: add up the classes first, `(K, M)` to `(M,)`: the paper's "Total" diagram.
        """
        with self.sync_context(self.dist_sync_fn, None, True, True, self.distributed_available_fn):
            bins = self.bins
        return _read(bins.sum(1) if total else bins)


class ConfidenceECE(_BinnedMetric):
    """conf-ECE (Eq. 13) over many batches, as `confidence_ece`; `reliability()` is `(M,)`.

    >>> metric = ConfidenceECE(n_bins=10)
    >>> metric.update(torch.tensor([[0.95, 0.05]]), torch.tensor([0]))
    >>> metric.update_logits(torch.tensor([[200.0, 0.0]]), torch.tensor([1]))
    >>> metric.compute()
    tensor(0.4750, dtype=torch.float64)
    >>> metric.reliability().count, metric.reliability().mean_confidence
    (tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 2]), tensor(0.9750, dtype=torch.float64))
    """

    def __init__(self, n_bins: int = 10, **kwargs: Any):
        super().__init__(n_bins, **kwargs)


class ClasswiseECE(_BinnedMetric):
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


def row_scores(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Score each row, `(N,)`: what the functions below average and the paired bootstraps take.

    correct (bool): the most probable option, the first of equals, is the target. confidence: its
    probability. nll: nats; below 1.2e-38, float32's smallest normal number, a probability counts as
    that, so that one certain mistake costs 87.34 and not infinity. brier: sum of (p - y)**2.

    >>> row_scores(torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([0, 1]))["brier"].tolist()
    [0.125, 2.0]
    """
    probs, target = _checked(probs, target, mask)
    if len(probs) == 0:
        raise ValueError("There are no predictions to measure: give at least one row.")
    probs = probs.double()
    confidence, choice = probs.max(-1)
    of_target = probs.gather(1, target.unsqueeze(1)).squeeze(1)
    return {
        "correct": choice == target,
        "confidence": confidence,
        "nll": -of_target.clamp(min=torch.finfo(torch.float32).tiny).log(),
        "brier": (probs - one_hot(target, probs.shape[1])).square().sum(-1),
    }


def accuracy(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of rows whose most probable option is the target."""
    return row_scores(probs, target, mask)["correct"].double().mean()


def mean_confidence(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the largest probability."""
    return row_scores(probs, target, mask)["confidence"].mean()


def nll(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean negative log-likelihood in nats, at most 87.34 (see `row_scores`).

    >>> nll(torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(1.0397, dtype=torch.float64)
    """
    return row_scores(probs, target, mask)["nll"].mean()


def brier(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Brier score, mean over rows of the sum over options of (p - y)**2, 0 to 2.

    >>> brier(torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.0625, dtype=torch.float64)
    """
    return row_scores(probs, target, mask)["brier"].mean()


def auroc(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """AUROC of confidence against correctness, ties counting half.

    NaN where every row is right or every row is wrong: there is no pair to compare.

    >>> auroc(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.625, 0.375]]), torch.tensor([0, 0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    # Not torchmetrics' binary_auroc: where all rows are right or wrong it returns 0 with a warning,
    # it adds up in float32, and one confidence rounded above 1 sends them all through a sigmoid.
    scores = row_scores(probs, target, mask)
    levels, level = scores["confidence"].unique(return_inverse=True)
    right = level[scores["correct"]].bincount(minlength=len(levels))
    wrong = level[~scores["correct"]].bincount(minlength=len(levels))
    wins_twice = (right * (2 * wrong.cumsum(0) - wrong)).sum()
    return wins_twice.double() / (2 * right.sum() * wrong.sum())


def summary(
    probs: Tensor, target: Tensor, n_options: Tensor | None = None, n_bins: int = 10
) -> dict[str, float]:
    """All metrics of one evaluation as floats; probs are 0 beyond a row's options.

    n_options: `(N,)` integers from 2 to K, how many options a row has; None: K everywhere.

    >>> probs = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.25, 0.25]])
    >>> scores = summary(probs, torch.tensor([0, 1]), n_options=torch.tensor([2, 3]))
    >>> {name: round(value, 4) for name, value in scores.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'accuracy': 0.5, 'mean_confidence': 0.625, 'conf_ece': 0.375, 'cw_ece': 0.2917, 'nll': 0.837,
     'brier': 0.5, 'auroc': 1.0, 'n': 2.0, 'n_bins': 10.0}
    """
    mask, columns = None, torch.arange(probs.shape[-1], device=probs.device)
    if n_options is not None:
        if n_options.shape != target.shape or (n_options > len(columns)).any():
            raise ValueError("n_options must be from 2 to K for each row of probs (N, K).")
        mask = columns < n_options.unsqueeze(1)
    values = {f.__name__: f(probs, target, mask) for f in (accuracy, mean_confidence)}
    values["conf_ece"] = confidence_ece(probs, target, n_bins)
    values["cw_ece"] = classwise_ece(probs, target, n_bins, mask)
    values |= {f.__name__: f(probs, target, mask) for f in (nll, brier, auroc)}
    return {k: float(v) for k, v in (values | {"n": len(probs), "n_bins": n_bins}).items()}


def _paired(a: Tensor, b: Tensor, statistic: Callable, n_resamples: int, seed: int) -> Interval:
    """Bootstrap over N of statistic(mean of a) - statistic(mean of b); a and b: `(N, S, C)`."""
    a, b, n = a.cpu(), b.cpu(), len(a)  # on the CPU one seed gives one interval everywhere
    if n == 0 or n != len(b) or not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"Give finite values of the same questions, not of {n} and {len(b)}.")
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _RESAMPLE_CELLS // n)
    resampled = []
    for start in range(0, n_resamples, step):
        draws = torch.randint(n, (min(step, n_resamples - start), n), generator=generator)
        # How often a resample holds each question turns its means into a matrix product.
        times = torch.zeros(draws.shape, dtype=torch.float64).scatter_(1, draws, 1.0, reduce="add")
        means = ((times @ x.flatten(1) / n).unflatten(1, x.shape[1:]) for x in (a, b))
        resampled.append(statistic(next(means)) - statistic(next(means)))
    low, high = (torch.cat(resampled).quantile(q).item() for q in (0.025, 0.975))
    return (statistic(a.mean(0)) - statistic(b.mean(0))).item(), low, high


def _gaps(confidence: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    """Correct - confidence of each question and seed in the column of its bin: `(N, S, M)`."""
    in_range = ((confidence >= 0) & (confidence <= 1.01)).all()  # bfloat16 may round above 1
    if confidence.shape != correct.shape or correct.dtype != torch.bool or not in_range:
        raise ValueError(
            "Give confidences in [0, 1] and bool correct of one shape, (S, N) or (N,)."
        )
    confidence, correct = torch.atleast_2d(confidence.double(), correct)
    bins = one_hot(bin_index(confidence, n_bins), n_bins)
    return ((correct.double() - confidence).unsqueeze(-1) * bins).transpose(0, 1)


def paired_bootstrap(
    a: Scored, b: Scored, n_bins: int = 10, n_resamples: int = 2000, seed: int = 0
) -> Interval:
    """conf-ECE (Eq. 13) of model a minus that of b with a paired percentile bootstrap.

    Questions are resampled, all seeds of one together; conf-ECE is taken per seed, then averaged.
    Resampling raises a small ECE more than a large one, so the interval leans towards 0: trust it
    on whether there is a difference, not on its size. ValueError: shapes or values do not fit.

    >>> right = torch.arange(100) % 2 == 0
    >>> a, b = (torch.full((100,), 0.75), right), (torch.full((100,), 0.5), right)
    >>> paired_bootstrap(a, b)[0]
    0.25
    """
    a, b = _gaps(*a, n_bins), _gaps(*b, n_bins)
    return _paired(a, b, lambda gaps: gaps.abs().sum(-1).mean(-1), n_resamples, seed)


def paired_bootstrap_mean(a: Tensor, b: Tensor, n_resamples: int = 2000, seed: int = 0) -> Interval:
    """Likewise for the mean of a score a question (correct, nll, brier), `(S, N)` or `(N,)`.

    >>> paired_bootstrap_mean(torch.ones(3, 50), torch.zeros(50))
    (1.0, 1.0, 1.0)
    """
    a, b = (torch.atleast_2d(v).double().T.unsqueeze(-1) for v in (a, b))
    return _paired(a, b, lambda means: means.mean((-2, -1)), n_resamples, seed)
