"""Manual optimisation: rates by hand, steps that count, one loss scale, exact checkpoints."""

import math
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from calm_lightning.backbone import Backbone
from calm_lightning.bilevel import clamp_
from calm_lightning.optim import warmup_cosine, with_rate


class SteppingModule(LightningModule):
    """A module whose training_step puts gradients into ``.grad`` itself and then steps.

    A subclass loads a `backbone` in `configure_model` and has `lower_lr`, `warmup_fraction` and
    `clip` among its hyperparameters.
    """

    backbone: Backbone | None
    #: what a rule has chosen of it, with the checkpoint; None: nothing, the setting holds
    alpha_chosen: bool | None = None
    _theta_optimizer: OptimizerCallable
    #: the dice of a checkpoint, until training goes on from it
    _rng: dict[str, Tensor] | None = None

    # ---- rates and steps ------------------------------------------------------------------

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def loss_scale(self) -> Tensor | None:
        """Scale of every loss that is differentiated under 16-mixed, (), else None."""
        scaler = self._scaler()
        return None if scaler is None else scaler.scale(torch.ones((), device=self.device))

    def _scale_gradients(self, params: list[Tensor]) -> None:
        """Scale what is unscaled already: a GradScaler's unscaling comes before its every step."""
        scaler = self._scaler()
        for p in params if scaler is not None else ():
            p.grad = None if p.grad is None else scaler.scale(p.grad)

    def configure_optimizers(self):
        """Theta's optimizer (and alpha's, where trained) with warm-up and cosine, kept by hand."""
        optimizers = self.optimizers_with_rates()
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(o, self._rate) for o in optimizers]

    def _rate(self, k: int) -> float:
        """Share of the peak rate in train item k: linear warm-up, then a cosine to 0."""
        total = self.trainer.num_training_batches * (self.trainer.max_epochs or 1)
        if math.isinf(total):  # no loader yet, see on_train_start
            return 1.0
        return warmup_cosine(k, total, round(self.hparams.warmup_fraction * total))

    def on_train_start(self) -> None:
        """Set the rates now that the number of items is known, and the dice where they lay.

        Not through `trainer.estimated_stepping_batches` in `configure_optimizers`: it makes the
        loaders before a checkpoint is read, and Lightning then never gives them their state back.
        """
        if self.trainer.max_epochs in (None, -1):
            raise ValueError("set trainer.max_epochs: the cosine needs the number of iterations")
        if math.isinf(self.trainer.num_training_batches):
            raise ValueError(
                "the train loader has no length, which the cosine needs: give it a __len__ or set "
                "trainer.limit_train_batches"
            )
        if self._rng is not None:
            self._keep_the_settings()
            torch.set_rng_state(self._rng["cpu"].cpu())
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self._rng["cuda"].cpu(), self.device)
            self._rng = None
        for scheduler in self._schedulers():
            groups = scheduler.optimizer.param_groups
            for group, peak in zip(groups, scheduler.base_lrs, strict=True):
                group["lr"] = peak * self._rate(scheduler.last_epoch)

    def _keep_the_settings(self) -> None:
        """What the user says now wins over the rates, decays and betas that a checkpoint holds."""
        schedulers = self._schedulers()
        fresh = self.optimizers_with_rates() if schedulers else []
        for scheduler, optimizer in zip(schedulers, fresh, strict=True):
            groups = scheduler.optimizer.param_groups
            for group, now in zip(groups, optimizer.param_groups, strict=True):
                group |= {k: v for k, v in now.items() if k != "params"}
                group["initial_lr"] = now["lr"]
            scheduler.base_lrs = [group["initial_lr"] for group in groups]

    def _schedulers(self) -> list:
        found = self.lr_schedulers()
        return [] if found is None else found if isinstance(found, list) else [found]

    def optimizers_with_rates(self) -> list[torch.optim.Optimizer]:
        """The optimizers in order of the schedulers; theta's comes first."""
        params = self.backbone.theta()
        return [with_rate(self._theta_optimizer, params, self.hparams.lower_lr, "lower_lr")]

    def step_theta(self) -> None:
        """One step of theta's optimizer along .grad, clamp; counts as trainer.global_step."""
        optimizers = self.optimizers()
        theta_optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
        self._scale_gradients(self.backbone.theta())
        theta_optimizer.step()
        theta_optimizer.zero_grad()
        with torch.no_grad():
            clamp_(self.backbone.theta(), self.hparams.clip)

    def step_schedulers(self) -> None:
        """One step of every schedule, once a train item: Lightning leaves them alone here."""
        with warnings.catch_warnings():
            # of an optimizer whose first step was skipped by the loss scale
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
            for scheduler in self._schedulers():
                scheduler.step()

    # ---- checkpoints ----------------------------------------------------------------------

    def _trained(self) -> set[str]:
        return {name for name, p in self.named_parameters() if p.requires_grad}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was trained; the base model is where it came from."""
        kept = self._trained()
        checkpoint["state_dict"] = {
            name: t for name, t in checkpoint["state_dict"].items() if name in kept
        }
        # dropout of the inner loop goes on where it was
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint["rng"] = rng
        checkpoint["alpha_chosen"] = self.alpha_chosen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model or method, which strict_loading=False would hide."""
        self.configure_model()
        self._rng = checkpoint.get("rng")
        self.alpha_chosen = checkpoint.get("alpha_chosen")
        ours = {name: tuple(p.shape) for name, p in self.named_parameters() if p.requires_grad}
        theirs = {name: tuple(t.shape) for name, t in checkpoint["state_dict"].items()}
        missing, unknown = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
        other = [
            f"{name} {theirs[name]} instead of {shape}"
            for name, shape in ours.items()
            if theirs.get(name, shape) != shape
        ]
        if missing or unknown or other:
            raise ValueError(
                f"the checkpoint does not fit {type(self).__name__}: {len(missing)} tensors "
                f"missing {missing[:2]}, {len(unknown)} unknown {unknown[:2]}, {len(other)} of "
                f"another shape {other[:2]}; use the settings (lora, alpha, model) that it was "
                "trained with"
            )
