"""CALM: one training step is one outer iteration of Algorithm 1."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from calm_lightning.adjusted import AdjustedModule
from calm_lightning.bilevel import Loss, inner_product, outer_step

#: name -> (form of the loss, first response position only, over the letters only)
ENTROPIES = {
    "exact": ("entropy", False, False),
    "topk": ("topk", False, False),
    "last_prompt": ("entropy", True, False),
    "options": ("entropy", True, True),
    "self_ce": ("self_ce", False, False),
}


class CALMModule(AdjustedModule):
    """Bilevel calibration: theta keeps the task loss, (theta, alpha) raise entropy (Eq. 8).

    Variants of its test: {theta_0, theta_K} x {alpha_0, alpha_K}.

    An outer iteration costs T inner steps (forward and backward), one forward at theta_tilde, and
    forward and backward for the task loss and for the entropy. T is the number of inner
    micro-batches in the train item, so the DataModule's `inner_steps`.

    Args:
        inner_lr: rho, the step size of the inner loop; None ties it to `lower_lr` (the paper).
        gamma: barrier strength (the paper's .5).
        barrier: ``grad_norm`` (gamma |g_q|^2) or ``residual`` (gamma max(q_hat, 0)).
        barrier_metric: ``euclidean``, or ``adam``: dot products in the optimizers' diagonal metric,
            scaled by their rates, in which AdamW's step keeps the barrier's promise but for its
            momentum and the change of its second moments.
        residual_alpha_grad: ``danskin``, or ``frozen`` (Eq. 12 to the letter).
        entropy: ``exact`` over the vocabulary at response tokens; ``topk`` (20 largest);
            ``last_prompt`` (first response position: no label is used); ``options`` (letters);
            ``self_ce`` (-log max p).
        warm_start: keep theta_tilde between outer iterations instead of beginning at theta; with
            `inner_steps` 1 a single loop. It is in the checkpoint; one copy of theta's size.
        **shared: see `AdjustedModule`; its `letters` serve entropy ``options`` too.

    Raises:
        ValueError: an unknown option.
        FloatingPointError: a loss or gradient is not finite; names the outer iteration and leaves
            theta and alpha as they were before it.
    """

    variants = {  # noqa: RUF012
        "base": (False, False),
        "alpha": (False, True),
        "theta": (True, False),
        "both": (True, True),
    }

    def __init__(
        self,
        model_name: str | None = None,
        *,
        inner_lr: float | None = None,
        gamma: float = 0.5,
        barrier: str = "grad_norm",
        barrier_metric: str = "euclidean",
        residual_alpha_grad: str = "danskin",
        entropy: str = "exact",
        warm_start: bool = False,
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        if entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {', '.join(ENTROPIES)}, not {entropy!r}")
        if barrier_metric not in ("euclidean", "adam"):
            raise ValueError(
                f"barrier_metric must be 'euclidean' or 'adam', not {barrier_metric!r}"
            )
        self._epoch: list[Tensor] = []
        self._surrogate: list[Tensor] | None = None
        self._mean_logit = torch.tensor(torch.nan)  # until an upper loss measures it

    def negative_entropy(self, batch: dict[str, Tensor]) -> Loss:
        """The upper loss on a calib micro-batch; its labels only say where a response is."""
        form, first_only, letters = ENTROPIES[self.hparams.entropy]
        support = self.letter_ids() if letters else None

        def loss() -> Iterator[Tensor]:
            state = 0.0
            for s in self.supervised(batch, first_only=first_only):
                state = state + s.hidden.detach().float().sum(0) / s.count
                yield -self.nats(s, form, support=support)  # -log max p is uncertainty too
            self.reduce([state])
            # logits are affine in h: their mean over positions is the mean state's
            self._mean_logit = self.backbone.logits(state[None]).mean()

        return loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Algorithm 1, lines 3 to 9, for outer iteration k = trainer.global_step."""
        h = self.hparams
        theta, alpha = self.backbone.theta(), self.alpha.free()
        residual, *inner = batch["train"]
        if h.warm_start:
            kept = (
                [p.detach().clone() for p in theta] if self._surrogate is None else self._surrogate
            )
            self._surrogate = [t.to(p) for t, p in zip(kept, theta, strict=True)]
        scale = self.loss_scale()
        try:
            step = outer_step(
                theta,
                alpha,
                self.loss_over(residual),
                self.negative_entropy(batch["calib"]),
                (self.loss_over(micro_batch) for micro_batch in inner),
                rho=h.lower_lr if h.inner_lr is None else h.inner_lr,
                gamma=h.gamma,
                barrier=h.barrier,
                residual_alpha_grad=h.residual_alpha_grad,
                clip=h.clip,
                surrogate=self._surrogate,
                metric=self._adam_metric() if h.barrier_metric == "adam" else None,
                scale=scale,
                reduce=self.reduce,
                quiet=self.backbone.without_dropout,
            )
        except FloatingPointError as error:
            raise FloatingPointError(f"outer iteration {self.global_step}: {error}") from None

        if step.overflow:
            self._surrogate = None  # an infinite step is no place to go on from
        before = [p.detach().clone() for p in theta + alpha]
        self.step_alpha()  # first: after theta's step a loss scale is updated, for both
        self.step_theta()
        self.step_schedulers()

        torch._foreach_sub_(before, [p.detach() for p in theta + alpha])  # - step
        promise = inner_product(before, step.g_q) / inner_product(step.g_q, step.g_q)
        if not step.overflow:
            self._epoch.append(torch.stack([step.task_loss, step.entropy, step.q_hat]))
        shown = {"task_loss": step.task_loss, "entropy": step.entropy}
        shown |= {"lambda": step.lambda_k, "q_hat": step.q_hat}
        self.log_dict(shown, prog_bar=True, logger=False)
        self.log_dict(
            {
                "train/task_loss": step.task_loss,  # nats per token
                "train/entropy": step.entropy,
                "train/lambda": step.lambda_k,
                "train/q_hat": step.q_hat,
                "train/g_q_norm": step.g_q_norm_sq.sqrt(),
                "train/g_q_dot_g_ent": step.g_q_dot_g_ent,
                "train/residual_descent": promise,  # -<step, g_q> / |g_q|^2; < 0: q_hat rises
                "train/mean_logit": self._mean_logit,  # the offset that d scales too
                **self.alpha_range(),
                **({} if scale is None else {"train/loss_scale": scale}),
            }
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep theta_tilde too, where it goes on."""
        super().on_save_checkpoint(checkpoint)
        if self._surrogate is not None:
            checkpoint["surrogate"] = self._surrogate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take theta_tilde up where it was; ValueError where the checkpoint has none."""
        super().on_load_checkpoint(checkpoint)
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        if fitting and self.hparams.warm_start and "surrogate" not in checkpoint:
            raise ValueError(
                "the checkpoint has no surrogate to go on from: set model.warm_start false, as it "
                "was when it was written"
            )
        self._surrogate = checkpoint.get("surrogate") if self.hparams.warm_start else None

    def on_train_epoch_end(self) -> None:
        """Warn of a run that is not doing what it should."""
        if not self._epoch:
            return
        task_loss, entropy, q_hat = torch.stack(self._epoch).mean(0).tolist()
        self._epoch.clear()
        if abs(q_hat) < 1e-4 * task_loss and self.hparams.residual_alpha_grad == "danskin":
            rank_zero_warn(
                f"|q_hat| {abs(q_hat):.1e} is under 1e-4 of the task loss over this epoch: the "
                "inner loop hardly moves theta; raise model.inner_lr"
            )
        if entropy > 0.8 * math.log(self.backbone.vocab_size):
            rank_zero_warn(
                f"entropy {entropy:.2f} is over 0.8 log V: the model is near the uniform one, "
                "which solves Eq. 8 but knows nothing; stop earlier or raise model.gamma"
            )
        floor = self.hparams.scale_min
        if floor is not None and (1 + self.alpha.delta).min() <= floor:
            rank_zero_warn(f"some d is at its floor model.scale_min = {floor}")

    def _adam_metric(self) -> list[Tensor] | None:
        """Rate / (sqrt(v_hat) + eps) of each tensor; None before the first step (no moments)."""
        metric = []
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state = optimizer.state.get(p)
                    if not state or "exp_avg_sq" not in state:
                        return None
                    bias = 1 - group["betas"][1] ** float(state["step"])
                    root = (state["exp_avg_sq"] / bias).sqrt()
                    metric.append(group["lr"] / (root + group["eps"]))
        return metric
