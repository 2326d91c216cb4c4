"""Scores of single rows and what is made of them, and the summary of one evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from calm_lightning.metrics.bins import (
    NO_ROWS,
    bin_index,
    checked,
    checked_samples,
    classwise_ece,
    confidence_ece,
    top_label,
)


def row_scores(probs: Tensor, target: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Score each row, `(N,)`: what the functions below average and the paired bootstraps take.

    correct (bool): the most probable option, the first of equals, is the target. confidence: its
    probability. nll: nats; below 1.2e-38, float32's smallest normal number, a probability counts as
    that, so that one certain mistake costs 87.34 and not infinity. brier: sum of (p - y)**2.

    >>> row_scores(torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([0, 1]))["brier"].tolist()
    [0.125, 2.0]
    """
    probs, target = checked(probs, target, mask)
    if len(probs) == 0:
        raise ValueError(NO_ROWS)
    probs = probs.double()
    confidence, correct = top_label(probs, target)
    of_target = probs.gather(1, target.unsqueeze(1)).squeeze(1)
    return {
        "correct": correct,
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
    scores = row_scores(probs, target, mask)
    confidence, correct = scores["confidence"], scores["correct"]
    once = torch.ones_like(correct, dtype=torch.int64).unsqueeze(0)
    return auroc_of_resamples(confidence, correct, once)[0]


def auroc_of_resamples(confidence: Tensor, correct: Tensor, times: Tensor) -> Tensor:
    """AUROC `(R,)` of R resamples; times `(R, N)`: how often each holds each row."""
    # Not torchmetrics' binary_auroc: where all rows are right or wrong it returns 0 with a warning,
    # it adds up in float32, and one confidence rounded above 1 sends them all through a sigmoid.
    confidence, order = confidence.sort()
    times, correct = times[:, order], correct[order]
    wrong_below = pad(times.masked_fill(correct, 0).cumsum(-1), (1, 0))
    right, level = times[:, correct], confidence[correct]
    # A right row wins against the wrong ones below its level and half of those on it.
    first, last = (torch.searchsorted(confidence, level, right=end) for end in (False, True))
    wins_twice = (right * (wrong_below[:, first] + wrong_below[:, last])).sum(-1)
    return wins_twice.double() / (2 * right.sum(-1) * wrong_below[:, -1])


class BrierParts(NamedTuple):
    """Parts of the binary Brier score: reliability - resolution + uncertainty + within."""

    reliability: float  # sum over bins of n / N (mean confidence - accuracy)**2
    resolution: float  # sum over bins of n / N (accuracy of the bin - of all)**2
    uncertainty: float  # accuracy (1 - accuracy) of all
    within: float  # variance of confidence in the bins less twice its covariance with correct


def brier_parts(confidence: Tensor, correct: Tensor, n_bins: int = 10) -> BrierParts:
    """Split mean (confidence - correct)**2, the Brier score of the top label, into its parts.

    Murphy 1973 for what varies between bins; inside bins the confidence varies too, and without
    Stephenson et al. 2008's two terms for that (`within`) the parts would not add up.

    >>> r, s, u, w = brier_parts(torch.tensor([0.5, 0.75, 1.0]), torch.tensor([False, True, True]))
    >>> round(r - s + u + w, 6) == round((0.5**2 + 0.25**2 + 0) / 3, 6)
    True
    """
    confidence, correct = checked_samples(confidence, correct)
    correct = correct.double()
    cell = bin_index(confidence, n_bins)
    share = cell.bincount(minlength=n_bins).double()
    mean_confidence, mean_correct = (
        (share.new_zeros(n_bins).index_add(0, cell, x) / share).nan_to_num(0)
        for x in (confidence, correct)
    )
    share, base = share / len(cell), correct.mean()
    spread = confidence - mean_confidence[cell]
    within = spread.square() - 2 * spread * (correct - mean_correct[cell])
    parts = (
        share @ (mean_confidence - mean_correct).square(),
        share @ (mean_correct - base).square(),
        base * (1 - base),
        within.mean(),
    )
    return BrierParts(*(part.item() for part in parts))


def tied_means(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Sort samples by confidence; each gets the mean correctness of all that share its confidence.

    That is what any rule that sorts would find on average over all orders of tied rows, so no
    value made of it depends on the order of the rows.
    """
    levels, level, size = confidence.unique(return_inverse=True, return_counts=True)
    right = size.new_zeros(len(levels)).index_add(0, level, correct.long())
    return levels.repeat_interleave(size), (right / size.double()).repeat_interleave(size)


def risk_coverage_area(confidence: Tensor, correct: Tensor) -> float:
    """AURC: share of errors among the n most confident rows, averaged over n = 1..N.

    Geifman and El-Yaniv 2017. Rows of equal confidence count by their mean (`tied_means`).

    >>> risk_coverage_area(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
    0.27777777777777773
    """
    _, right = tied_means(*checked_samples(confidence, correct))
    errors = (1 - right).flip(0).cumsum(0)
    return (errors / torch.arange(1, len(errors) + 1)).mean().item()


def options_mask(probs: Tensor, n_options: Tensor | None) -> Tensor | None:
    """Mask `(N, K)` of rows that have their first n_options `(N,)` options; None: all have K."""
    if n_options is None:
        return None
    columns = torch.arange(probs.shape[-1], device=probs.device)
    if n_options.shape != probs.shape[:1] or (n_options > len(columns)).any():
        raise ValueError("n_options must be from 2 to K for each row of probs (N, K).")
    return columns < n_options.unsqueeze(1)


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
    mask = options_mask(probs, n_options)
    values = {f.__name__: f(probs, target, mask) for f in (accuracy, mean_confidence)}
    values["conf_ece"] = confidence_ece(probs, target, n_bins)
    values["cw_ece"] = classwise_ece(probs, target, n_bins, mask)
    values |= {f.__name__: f(probs, target, mask) for f in (nll, brier, auroc)}
    return {k: float(v) for k, v in (values | {"n": len(probs), "n_bins": n_bins}).items()}
