"""Methods to compare CALM with: one training step each, everything else is shared."""

from typing import Any

import torch

from calm_lightning.bilevel import gradient
from calm_lightning.module import CalibrationModule


class FineTuning(CalibrationModule):
    """Plain fine-tuning on the source: the control that counts.

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

    def __init__(self, model_name: str | None = None, *, use: str = "residual", **shared: Any):
        super().__init__(model_name, **shared)
        if use not in ("residual", "all"):
            raise ValueError(f"use must be 'residual' or 'all', not {use!r}")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Descend the task loss."""
        residual, *inner = batch["train"]
        micro_batches = [residual]
        if self.hparams.use == "all":
            micro_batches = [*inner, residual, batch["calib"]]
        theta = self.backbone.theta()
        for micro_batch in micro_batches:
            loss, grads = gradient(self.loss_over(micro_batch, adjusted=False), theta, self.reduce)
            if not torch.isfinite(torch.stack([loss, *(g.sum() for g in grads)])).all():
                raise FloatingPointError(
                    f"step {self.global_step}: task loss {loss:.4g} or its gradient is not "
                    "finite; theta stays as it was; lower model.lower_lr"
                )
            for p, g in zip(theta, grads, strict=True):
                p.grad = g
            self.step_theta()
        self.step_schedulers()
        self.log("task_loss", loss, prog_bar=True, logger=False)
        self.log("train/task_loss", loss)
