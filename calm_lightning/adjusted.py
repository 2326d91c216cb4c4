"""Methods that train the adjustments alpha = (d, l) of the logits beside theta."""

from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from calm_lightning.decisions import letter_ids
from calm_lightning.head import Alpha
from calm_lightning.module import CalibrationModule
from calm_lightning.optim import adamw_alpha, with_rate


class AdjustedModule(CalibrationModule):
    """Two optimizers, theta's and alpha's; when each steps is for the method to say.

    Args:
        upper_lr: eta_alpha, the peak rate of alpha's optimizer.
        alpha: entries of the adjustments: ``vector``, ``scalar`` or ``options`` (the letters).
        alpha_optimizer: makes alpha's optimizer; an lr in it is refused.
        alpha_at_inference: whether validation and predictions use alpha.
        scale_min: floor of d, or None.
        center: scale z - mean z instead of z, whose offset is arbitrary.
        letters: the options of alpha ``options``.
        **shared: see `CalibrationModule`.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        upper_lr: float = 1e-4,
        alpha: str = "vector",
        alpha_optimizer: OptimizerCallable = adamw_alpha,
        alpha_at_inference: bool = True,
        scale_min: float | None = None,
        center: bool = False,
        letters: str = "ABCD",
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        self._alpha_optimizer = alpha_optimizer
        self._letters: Tensor | None = None

    @property
    def alpha_in_use(self) -> bool:
        """Whether validation and predictions use alpha."""
        chosen = self.alpha_chosen
        return self.hparams.alpha_at_inference if chosen is None else chosen

    def make_alpha(self) -> Alpha:
        """The adjustments that the upper level trains."""
        h = self.hparams
        return Alpha(
            self.backbone.vocab_size,
            h.alpha,
            self.letter_ids() if h.alpha == "options" else None,
            scale_min=h.scale_min,
            clip=h.clip,
            center=h.center,
        )

    def letter_ids(self) -> Tensor:
        """Ids of the letters where the question form asks for them, (C,)."""
        if self._letters is None:
            self._letters = letter_ids(self.tokenizer, self.hparams.letters)
        return self._letters.to(self.backbone.device)  # it may have moved since

    def optimizers_with_rates(self) -> list[torch.optim.Optimizer]:
        """Theta's optimizer, then alpha's."""
        make, alpha = self._alpha_optimizer, self.alpha.free()
        return [
            *super().optimizers_with_rates(),
            with_rate(make, alpha, self.hparams.upper_lr, "upper_lr"),
        ]

    def step_alpha(self) -> None:
        """One step of alpha's optimizer along .grad, then its bounds.

        Lightning counts every LightningOptimizer.step(); through its public inner optimizer
        alpha's step is not counted, so global_step is the number of theta's steps.
        """
        optimizer, scaler = self.optimizers()[1].optimizer, self._scaler()
        gradients = [p.grad for p in self.alpha.free() if p.grad is not None]
        if scaler is None:
            optimizer.step()
        elif gradients:
            # what it finds counts in the update of the scale that follows theta's next step
            self._scale_gradients(self.alpha.free())
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        optimizer.zero_grad()
        if scaler is None or all(g.isfinite().all() for g in gradients):
            self.alpha.project_()  # where no step was taken, not even by rounding

    def alpha_range(self) -> dict[str, Tensor]:
        """How far alpha is from the identity, for the log."""
        d = 1 + self.alpha.delta.detach()
        return {
            "train/d_min": d.min(),
            "train/d_max": d.max(),
            "train/l_max": self.alpha.l.detach().abs().max(),
        }
