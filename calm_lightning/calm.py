"""CALM: one training step is one outer iteration of Algorithm 1."""

import math
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from calm_lightning.bilevel import Loss, inner_product, outer_step
from calm_lightning.data import prompts
from calm_lightning.data.mcqa import option_ids
from calm_lightning.head import Alpha
from calm_lightning.module import CalibrationModule
from calm_lightning.optim import adamw_alpha, with_rate

#: name -> (form of the loss, first response position only, over the letters only)
ENTROPIES = {
    "exact": ("entropy", False, False),
    "topk": ("topk", False, False),
    "last_prompt": ("entropy", True, False),
    "options": ("entropy", True, True),
    "self_ce": ("self_ce", False, False),
}


class CALMModule(CalibrationModule):
    """Bilevel calibration: theta keeps the task loss, (theta, alpha) raise entropy (Eq. 8).

    Variants of its test: {theta_0, theta_K} x {alpha_0, alpha_K}.

    An outer iteration costs T inner steps (forward and backward), one forward at theta_tilde, and
    forward and backward for the task loss and for the entropy. T is the number of inner
    micro-batches in the train item, so the DataModule's `inner_steps`.

    Args:
        upper_lr: eta_alpha, the peak rate of alpha's optimizer.
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
        alpha: entries of the adjustments: ``vector``, ``scalar`` or ``options`` (the letters).
        alpha_optimizer: makes alpha's optimizer; an lr in it is refused.
        alpha_at_inference: whether validation and predictions use alpha.
        scale_min: floor of d, or None.
        center: scale z - mean z instead of z, whose offset is arbitrary.
        letters: the options of alpha ``options`` and of entropy ``options``.
        **shared: see `CalibrationModule`.

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
        upper_lr: float = 1e-4,
        inner_lr: float | None = None,
        gamma: float = 0.5,
        barrier: str = "grad_norm",
        barrier_metric: str = "euclidean",
        residual_alpha_grad: str = "danskin",
        entropy: str = "exact",
        alpha: str = "vector",
        alpha_optimizer: OptimizerCallable = adamw_alpha,
        alpha_at_inference: bool = True,
        scale_min: float | None = None,
        center: bool = False,
        letters: str = "ABCD",
        **shared: Any,
    ):
        super().__init__(model_name, **shared)
        if entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {', '.join(ENTROPIES)}, not {entropy!r}")
        if barrier_metric not in ("euclidean", "adam"):
            raise ValueError(
                f"barrier_metric must be 'euclidean' or 'adam', not {barrier_metric!r}"
            )
        self._alpha_optimizer = alpha_optimizer
        self._epoch: list[Tensor] = []
        self._letters: Tensor | None = None

    @property
    def alpha_in_use(self) -> bool:
        """Whether validation and predictions use alpha."""
        return self.hparams.alpha_at_inference

    def make_alpha(self) -> Alpha:
        """The adjustments that the upper level trains."""
        h = self.hparams
        return Alpha(
            self.backbone.vocab_size,
            h.alpha,
            self._letter_ids() if h.alpha == "options" else None,
            scale_min=h.scale_min,
            clip=h.clip,
            center=h.center,
        )

    def _letter_ids(self) -> Tensor:
        """Ids of the letters where the question form asks for them, (C,)."""
        if self._letters is None:
            prompt = prompts.question("Which?")
            _, ids = option_ids(self.tokenizer, prompt, list(self.hparams.letters), "letter")
            self._letters = torch.tensor([i for (i,) in ids])
        return self._letters.to(self.backbone.device)  # it may have moved since

    def optimizers_with_rates(self) -> list[torch.optim.Optimizer]:
        """Theta's optimizer, then alpha's."""
        make, alpha = self._alpha_optimizer, self.alpha.free()
        return [
            *super().optimizers_with_rates(),
            with_rate(make, alpha, self.hparams.upper_lr, "upper_lr"),
        ]

    def negative_entropy(self, batch: dict[str, Tensor]) -> Loss:
        """The upper loss on a calib micro-batch; its labels only say where a response is."""
        form, first_only, letters = ENTROPIES[self.hparams.entropy]
        return self.loss_over(
            batch,
            form,
            sign=-1.0,  # self_ce = -log max p grows with uncertainty too
            first_only=first_only,
            support=self._letter_ids() if letters else None,
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Algorithm 1, lines 3 to 9, for outer iteration k = trainer.global_step."""
        h = self.hparams
        theta, alpha = self.backbone.theta(), self.alpha.free()
        residual, *inner = batch["train"]
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
                metric=self._adam_metric() if h.barrier_metric == "adam" else None,
                reduce=self.reduce,
                quiet=self.backbone.without_dropout,
            )
        except FloatingPointError as error:
            raise FloatingPointError(f"outer iteration {self.global_step}: {error}") from None

        before = [p.detach().clone() for p in theta + alpha]
        # Lightning counts every LightningOptimizer.step(); through its public inner optimizer
        # alpha's step is not counted, so global_step is the number of outer iterations.
        self.step_theta()
        alpha_optimizer = self.optimizers()[1].optimizer
        alpha_optimizer.step()
        alpha_optimizer.zero_grad()
        self.alpha.project_()
        self.step_schedulers()

        torch._foreach_sub_(before, [p.detach() for p in theta + alpha])  # - step
        promise = inner_product(before, step.g_q) / inner_product(step.g_q, step.g_q)
        self._epoch.append(torch.stack([step.task_loss, step.entropy, step.q_hat]))
        shown = {"task_loss": step.task_loss, "entropy": step.entropy}
        shown |= {"lambda": step.lambda_k, "q_hat": step.q_hat}
        self.log_dict(shown, prog_bar=True, logger=False)
        d = 1 + self.alpha.delta.detach()
        self.log_dict(
            {
                "train/task_loss": step.task_loss,  # nats per token
                "train/entropy": step.entropy,
                "train/lambda": step.lambda_k,
                "train/q_hat": step.q_hat,
                "train/g_q_norm": step.g_q_norm_sq.sqrt(),
                "train/g_q_dot_g_ent": step.g_q_dot_g_ent,
                "train/residual_descent": promise,  # -<step, g_q> / |g_q|^2; < 0: q_hat rises
                "train/d_min": d.min(),
                "train/d_max": d.max(),
                "train/l_max": self.alpha.l.detach().abs().max(),
            }
        )

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
