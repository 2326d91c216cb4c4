"""Methods whose targets are accuracies of confidence bins: LabelSmoothing and CFT."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calm_lightning.baselines import FineTuning
from calm_lightning.bilevel import Loss
from calm_lightning.decisions import Bins, DecidingModule
from calm_lightning.metrics import bin_index


def smoothed_cross_entropy(
    log_p: Tensor,  # (N, K)
    answer: Tensor,  # (N,)
    real: Tensor | None,  # (N, K) bool, False beyond a row's own options
    keep: Tensor | float,  # (N,) probability of the answer, 1 - epsilon
) -> Tensor:
    """Sum of -sum_j t_j log p_j in nats; t is `keep` at the answer, the rest shared by the others.

    >>> log_p = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> smoothed_cross_entropy(log_p, torch.tensor([0]), None, torch.tensor([1.0])).exp().item()
    2.0
    """
    right = log_p.gather(1, answer[:, None])[:, 0]
    every = log_p.sum(1) if real is None else log_p.where(real, 0).sum(1)
    others = log_p.shape[1] - 1 if real is None else real.sum(1) - 1
    return -(keep * right + (1 - keep) / others * (every - right)).sum()


def calibration_loss(
    log_p: Tensor,  # (N, K)
    answer: Tensor,  # (N,); the bins know it already
    real: Tensor | None,  # (N, K) bool
    *,
    bins: Bins,
    legacy: bool = False,
) -> Tensor:
    """L_cal of CFT: sum over decisions of |p - t|^2 / n_bin, where p is the distribution among K.

    t is the bin's accuracy at the largest p; the others are a tanh(g p_j) + a, a sum of
    1 - accuracy, with g = ln 3 / (p_(2) (1 - accuracy)). Decisions in a bin that was empty when
    measured count for nothing. ``legacy`` is the published loss: none for the last bin, whose
    decisions are the most confident, and gradients through t.
    """
    p = log_p.softmax(-1)
    with torch.set_grad_enabled(legacy and torch.is_grad_enabled()):
        (top, second), (index, _) = (t.unbind(1) for t in p.topk(2))
        where = bin_index(top.detach(), len(bins.count))
        accuracy = bins.accuracy(top.detach(), unknown=0.0)
        others = torch.ones_like(p, dtype=torch.bool) if real is None else real
        others = others.scatter(1, index[:, None], False)
        rest = 1 - accuracy
        g = math.log(3) / (second * rest).clamp_min(1e-12)
        rise = torch.tanh(g[:, None] * p).where(others, 0)
        a = rest / (rise.sum(1) + others.sum(1))
        t = (a[:, None] * (rise + 1)).where(others, 0).scatter(1, index[:, None], accuracy[:, None])
    weight = torch.where(bins.count > 0, 1 / bins.count.clamp_min(1), 0.0)
    if legacy:
        weight[-1] = 0
    return (weight[where].to(p.dtype) * (p - t).square().sum(1)).sum()


class BinnedFineTuning(DecidingModule, FineTuning):
    """Fine-tuning towards the accuracies of confidence bins, measured on the whole calib split.

    Measured before the first step, with the base model.

    Args:
        over: see `DecidingModule`; ``options`` is the paper's, ``vocabulary`` for free text.
        refresh_bins: measure again in every epoch, with the model as it is (CFT's EM, which its
            published code leaves out).
        **shared: see `DecidingModule` and `FineTuning`.

    Raises:
        ValueError: in fit, a DataModule without a calib split as a whole.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        over: str = "options",
        refresh_bins: bool = False,
        **shared: Any,
    ):
        super().__init__(model_name, over=over, **shared)
        self._bins: tuple[int, Bins] | None = None  # and the epoch they were measured in

    def bins(self) -> Bins:
        """The bins of this epoch, measured where that is not done."""
        # Here and not in on_train_epoch_start, which Lightning skips where an epoch was resumed
        # after its last item.
        refresh = self._bins and self.hparams.refresh_bins and self._bins[0] != self.current_epoch
        if self._bins is None or refresh:
            self._bins = self.current_epoch, self.measure()
        return Bins(*(t.to(self.device) for t in self._bins[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the bins: they are of a model that is gone."""
        super().on_save_checkpoint(checkpoint)
        if self._bins is not None:
            checkpoint["bins"] = (self._bins[0], *self._bins[1])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the bins up."""
        super().on_load_checkpoint(checkpoint)
        if "bins" in checkpoint:
            epoch, *bins = checkpoint["bins"]
            self._bins = epoch, Bins(*bins)


class LabelSmoothing(BinnedFineTuning):
    """Fine-tuning on soft labels: 1 - epsilon for the right option, the rest for the others alike.

    Over options the response tokens after the decision keep their hard labels.

    Args:
        epsilon: for every decision; None: 1 - the accuracy of the bin of the base model's
            confidence in this very decision (App. C.2), 0 where that bin was empty. A bin that is
            right less than one time in K teaches the other options.
        **shared: see `BinnedFineTuning`.

    Raises:
        ValueError: epsilon not in [0, 1].
    """

    variants = {"base": (False, False), "label_smoothing": (True, False)}  # noqa: RUF012

    def __init__(
        self, model_name: str | None = None, *, epsilon: float | None = None, **shared: Any
    ):
        super().__init__(model_name, **shared)
        if epsilon is not None and not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is a share of the label, between 0 and 1, not {epsilon}")

    def objective(self, micro_batch: dict[str, Tensor], calib: dict[str, Tensor]) -> Loss:
        """Cross-entropy against the soft labels, nats per token."""
        h = self.hparams
        known = self._known(micro_batch) if h.epsilon is None else None

        def loss():
            for i, s in enumerate(self.supervised(micro_batch)):
                d = self.decisions(s, micro_batch)
                if known is None:
                    plain = partial(smoothed_cross_entropy, keep=1 - h.epsilon)
                    total = d.total(plain, self.backbone) / s.count
                else:
                    total = d.total(smoothed_cross_entropy, self.backbone, known[i]) / s.count
                if h.over == "options":
                    rest = s._replace(hidden=s.hidden[~s.first], token=s.token[~s.first])
                    total = total + self.nats(rest, adjusted=False)
                yield total

        return loss

    def _known(self, micro_batch: dict[str, Tensor]) -> list[Tensor]:
        """Probability that each answer keeps, in the order of `supervised`."""
        bins = self.bins()
        with self.backbone.at_theta_0():
            found = list(self.confidences(micro_batch))
        return [bins.accuracy(confidence, unknown=1.0) for confidence, _ in found]


class CFT(BinnedFineTuning):
    """Calibration-aware fine-tuning: (1 - a) CE + a c L_cal (App. C.2 and ICML 2025).

    Args:
        weight: a, of the calibration loss; 0 is fine-tuning.
        scale: c, fixed in the paper.
        legacy_skip_last_bin: the published loss, see `calibration_loss`; it leaves confidences of
            .9 and more alone.
        **shared: see `BinnedFineTuning`.

    Raises:
        ValueError: weight not in [0, 1].
    """

    variants = {"base": (False, False), "cft": (True, False)}  # noqa: RUF012

    def __init__(
        self,
        model_name: str | None = None,
        *,
        weight: float = 0.5,
        scale: float = 1e-3,
        legacy_skip_last_bin: bool = False,
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        if not 0 <= weight <= 1:
            raise ValueError(f"weight is a share of the loss, between 0 and 1, not {weight}")

    def objective(self, micro_batch: dict[str, Tensor], calib: dict[str, Tensor]) -> Loss:
        """The two losses on one pass through the body."""
        h = self.hparams
        l_cal = partial(calibration_loss, bins=self.bins(), legacy=h.legacy_skip_last_bin)

        def loss():
            for s in self.supervised(micro_batch):
                total = self.decisions(s, micro_batch).total(l_cal, self.backbone)
                task = self.nats(s, adjusted=False)
                yield (1 - h.weight) * task + h.weight * h.scale * total

        return loss
