"""Methods to compare CALM with: each states its loss or its step, everything else is shared."""

from typing import Any

from torch import Tensor

from calm_lightning.adjusted import AdjustedModule
from calm_lightning.bilevel import Loss, frozen, put_gradient
from calm_lightning.module import CalibrationModule, Supervised

#: name of a confidence penalty -> form of the loss that is its entropy
PENALTIES = {"self_ce": "self_ce", "exact": "entropy"}


class FineTuning(CalibrationModule):
    """Plain fine-tuning on the source: the control that counts, and what single-level methods are.

    Args:
        use: ``residual``: one theta update a train item, on the rows (and at the rates) of CALM's
            own theta updates. ``all``: one on every micro-batch of the item, so the same source
            tokens as CALM and T + 2 times as many updates (rates change once an item).
        **shared: see `CalibrationModule`.

    Raises:
        ValueError: an unknown `use`.
        FloatingPointError: the loss or its gradient is not finite; names the step.
    """

    variants = {"base": (False, False), "fine_tuning": (True, False)}  # noqa: RUF012
    alpha_in_use = False

    def __init__(self, model_name: str | None = None, *, use: str = "residual", **shared: Any):
        super().__init__(model_name, **shared)
        if use not in ("residual", "all"):
            raise ValueError(f"use must be 'residual' or 'all', not {use!r}")

    def objective(self, micro_batch: dict[str, Tensor], calib: dict[str, Tensor]) -> Loss:
        """What theta descends on a micro-batch: the task loss."""
        return self.loss_over(micro_batch, adjusted=False)

    def micro_batches(self, item: dict[str, Any]) -> list[dict[str, Tensor]]:
        """Those of a train item on which theta steps, in order."""
        residual, *inner = item["train"]
        return [residual] if self.hparams.use == "residual" else [*inner, residual, item["calib"]]

    def descend(self, item: dict[str, Any]) -> Tensor:
        """Take the steps of a train item; return the last loss."""
        for micro_batch in self.micro_batches(item):
            objective = self.objective(micro_batch, item["calib"])
            loss = put_gradient(objective, self.backbone.theta(), self.reduce, self.loss_scale())
            self.step_theta()
        return loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Descend, then the rates of the next item."""
        try:
            loss = self.descend(batch)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {self.global_step}: {error}") from None
        self.step_schedulers()
        self.log("loss", loss, prog_bar=True, logger=False)
        self.log("train/loss", loss)


class Regularization(FineTuning):
    """Fine-tuning with a confidence penalty, CE(y, y_hat) - a H (App. C.2).

    Args:
        weight: a, the weight of the penalty (1e-5 and 1e-6 in the paper); 0 is fine-tuning.
        penalty: ``self_ce``: H = CE(y_hat, y_hat) = -log max p, as the paper writes it;
            ``exact``: Shannon's entropy over the vocabulary.
        split: ``train``: H of the rows of the task loss; ``calib``: of the item's calib rows.
        **shared: see `FineTuning`.

    Raises:
        ValueError: an unknown option.
    """

    variants = {"base": (False, False), "regularization": (True, False)}  # noqa: RUF012

    def __init__(
        self,
        model_name: str | None = None,
        *,
        weight: float = 1e-5,
        penalty: str = "self_ce",
        split: str = "train",
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        _check_penalty(penalty)
        if split not in ("train", "calib"):
            raise ValueError(f"split must be 'train' or 'calib', not {split!r}")

    def objective(self, micro_batch: dict[str, Tensor], calib: dict[str, Tensor]) -> Loss:
        """Task loss less a times the entropy."""
        if self.hparams.split == "train":
            return lambda: (self.task(s) - self.entropy(s) for s in self.supervised(micro_batch))

        def loss():
            yield from (self.task(s) for s in self.supervised(micro_batch))
            yield from (-self.entropy(s) for s in self.supervised(calib))

        return loss

    def task(self, s: Supervised) -> Tensor:
        """CE(y, y_hat), nats per token."""
        return self.nats(s, adjusted=False)

    def entropy(self, s: Supervised) -> Tensor:
        """Weighted entropy, nats per token."""
        form = PENALTIES[self.hparams.penalty]
        return self.hparams.weight * self.nats(s, form, adjusted=False)


class Iterate(FineTuning, AdjustedModule):
    """Both levels in turn and uncoupled: N theta steps an epoch, then one of alpha (App. C.2).

    theta descends the task loss with alpha as it is; in the last item of an epoch alpha takes one
    step on task_weight CE(y, y_hat) - H over the calib rows, with theta as it is. N is the number
    of train items of an epoch (T + 1 times as many with `use: all`, which leaves calib to alpha).

    Args:
        task_weight: weight of CE in alpha's loss (the paper's .9); it reads the labels of calib.
        penalty: H of alpha's loss, see `Regularization`.
        **shared: see `FineTuning` and `AdjustedModule`.

    Raises:
        ValueError: an unknown option.
    """

    variants = {"base": (False, False), "iterate": (True, True)}  # noqa: RUF012
    alpha_in_use = AdjustedModule.alpha_in_use

    def __init__(
        self,
        model_name: str | None = None,
        *,
        task_weight: float = 0.9,
        penalty: str = "self_ce",
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        _check_penalty(penalty)

    def objective(self, micro_batch: dict[str, Tensor], calib: dict[str, Tensor]) -> Loss:
        """The task loss through alpha."""
        return self.loss_over(micro_batch)

    def micro_batches(self, item: dict[str, Any]) -> list[dict[str, Tensor]]:
        """The train rows alone."""
        return [batch for batch in super().micro_batches(item) if batch is not item["calib"]]

    def upper(self, calib: dict[str, Tensor]) -> Loss:
        """What alpha descends."""
        form, weight = PENALTIES[self.hparams.penalty], self.hparams.task_weight
        return lambda: (weight * self.nats(s) - self.nats(s, form) for s in self.supervised(calib))

    def descend(self, item: dict[str, Any]) -> Tensor:
        """Theta's steps, and alpha's where the epoch ends."""
        loss = super().descend(item)
        if self.trainer.is_last_batch:
            with frozen(self.backbone.theta()), self.backbone.without_dropout():
                upper = put_gradient(
                    self.upper(item["calib"]), self.alpha.free(), self.reduce, self.loss_scale()
                )
            self.log("train/upper_loss", upper)
        self.step_alpha()  # without a gradient nothing moves, but torch's schedules want a step
        self.log_dict(self.alpha_range())
        return loss


def _check_penalty(penalty: str) -> None:
    if penalty not in PENALTIES:
        raise ValueError(f"penalty must be one of {', '.join(PENALTIES)}, not {penalty!r}")
