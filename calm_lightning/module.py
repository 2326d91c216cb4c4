"""What every method shares: the model, its losses and one evaluation; steps.py has the rest."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from calm_lightning.backbone import Backbone, load_lm, load_tokenizer, with_lora
from calm_lightning.bilevel import Loss
from calm_lightning.head import Alpha, token_loss
from calm_lightning.metrics import TokenECE
from calm_lightning.optim import adamw
from calm_lightning.scoring import (
    Scored,
    Tally,
    distributed,
    option_log_probs,
    prediction_rows,
)
from calm_lightning.steps import SteppingModule

if TYPE_CHECKING:  # loaded where it is used, see backbone
    from peft import LoraConfig


class Supervised(NamedTuple):
    """The positions of some rows of a micro-batch at which a token counts."""

    hidden: Tensor  # (N, H) states that predict the tokens
    token: Tensor  # (N,)
    row: Tensor  # (N,) of the micro-batch
    first: Tensor  # (N,) bool: the row's first response token
    count: Tensor  # supervised tokens of the whole micro-batch, over all processes


class CalibrationModule(SteppingModule):
    """A language model with adjusted logits that a method calibrates; not a method itself.

    A method adds a `training_step` over train items {"train": [T + 1 micro-batches], "calib":
    micro-batch} and names in `variants` what its test compares. Tests take batches of questions
    (see `scoring`), score every variant and leave `scored`, one `Scored` a data set and variant.

    Args:
        model_name: hub id, local folder or GGUF file; or give `model`.
        model: a causal LM of your own (trainable parameters = theta), with its `tokenizer`.
        tokenizer: needed with `model` unless the DataModule has one.
        lora: adapters to put on the model; theta is then the adapters alone.
        quantization: weights of the frozen base, e.g. NF4.
        dtype: of weights that are not quantised.
        gradient_checkpointing: less memory for a second forward pass.
        lower_lr: eta_theta, the peak rate of theta's optimizer.
        theta_optimizer: makes theta's optimizer; an lr in it is refused.
        warmup_fraction: share of all steps over which the rates rise; a cosine to 0 follows.
        micro_batch_size: rows whose activations are held at once; same gradients, less memory.
        clip: theta is clamped to [-clip, clip] (App. C.2), or None.
        n_bins: M of conf-ECE and cw-ECE.

    Raises:
        ValueError: not exactly one of `model_name` and `model`; numbers out of range.
    """

    #: name -> (theta trained?, alpha applied?)
    variants: dict[str, tuple[bool, bool]]
    trains_theta = True
    #: whether validation and predictions use alpha
    alpha_in_use = True

    def __init__(
        self,
        model_name: str | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora: "LoraConfig | None" = None,
        quantization: BitsAndBytesConfig | None = None,
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        lower_lr: float = 1e-3,
        theta_optimizer: OptimizerCallable = adamw,
        warmup_fraction: float = 0.4,
        micro_batch_size: int | None = None,
        clip: float | None = 10.0,
        n_bins: int = 10,
    ):
        super().__init__()
        if (model_name is None) == (model is None):
            raise ValueError("give exactly one of model_name and model")
        if not 0 <= warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction is a share of all steps, not {warmup_fraction}")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1 row, not {micro_batch_size}")
        # From here and from the subclass that calls this; objects have no place in a checkpoint.
        made = ["model", "tokenizer", "lora", "quantization", "theta_optimizer", "alpha_optimizer"]
        self.save_hyperparameters(ignore=made)
        self.automatic_optimization = False  # two gradients a step, two optimizers
        self.strict_loading = False  # checkpoints hold what was trained; see on_load_checkpoint
        self.backbone: Backbone | None = None
        self.alpha: Alpha | None = None
        self.scored: list[Scored] = []
        self._tally = Tally()
        self.token_ece = TokenECE(n_bins)  # logged, and no rule to choose by: docs/selection.md
        # In a tuple: Lightning must not see the bare model as a submodule beside the backbone.
        self._given = (model,)
        self._tokenizer, self._lora, self._quantization = tokenizer, lora, quantization
        self._theta_optimizer = theta_optimizer

    # ---- the model ------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer given, else the model's own; DataModules take it from here."""
        if self._tokenizer is None and self.hparams.model_name is not None:
            self._tokenizer = load_tokenizer(self.hparams.model_name)
        return self._tokenizer

    def configure_model(self) -> None:
        """Load the model (never in __init__, so that help and checks stay quick)."""
        if self.backbone is not None:
            return
        h = self.hparams
        (lm,) = self._given
        if lm is None:
            lm = load_lm(h.model_name, dtype=h.dtype, quantization=self._quantization)
        if self.trains_theta:
            lm = with_lora(lm, self._lora, h.gradient_checkpointing)
        else:
            lm.requires_grad_(False)
        # from_pretrained leaves eval mode, and Lightning keeps it: dropout would never be on
        lm.train()
        self.backbone = Backbone(lm, trained=self.trains_theta)
        self.alpha = self.make_alpha().to(self.backbone.device)

    def make_alpha(self) -> Alpha:
        """The adjustments of the logits; here the identity for ever."""
        return Alpha(self.backbone.vocab_size, "scalar").requires_grad_(False)

    def configure_callbacks(self) -> list:
        """Refuse trainers that would change the method; the first hook with a trainer."""
        trainer = self.trainer
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "accumulate_grad_batches would split an outer iteration: leave it at 1 and set "
                "model.micro_batch_size, which gives the same gradients in less memory"
            )
        if trainer.gradient_clip_val:
            raise ValueError(
                "gradient_clip_val would change the direction d_k: remove it (parameters are "
                "clamped by model.clip)"
            )
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"strategy {type(trainer.strategy).__name__} shards or moves parameters, and the "
                "dot products of lambda need whole ones: use one device or ddp"
            )
        if trainer.precision not in ("32-true", "bf16-mixed", "16-mixed", "64-true"):
            raise ValueError(
                f"precision {trainer.precision} would halve the parameters that are trained: use "
                "bf16-mixed, 16-mixed or 32-true"
            )
        return []

    # ---- losses ---------------------------------------------------------------------------

    def supervised(
        self, batch: dict[str, Tensor], *, first_only: bool = False, local: bool = False
    ) -> Iterator[Supervised]:
        """Pass a micro-batch (labels are -100 where nothing counts) through the body, part by part.

        `first_only`: a row's first response token alone; `local`: count this process's alone.
        """
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        first = counted & (counted.cumsum(1) == 1)
        if first_only:
            counted = first
        count = counted.sum()
        if distributed() and not local:
            torch.distributed.all_reduce(count)
        rows = self.hparams.micro_batch_size or len(labels)
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            # theta changes in place within one step; autocast would keep its old bf16 copies
            torch.clear_autocast_cache()
            ids, mask = batch["input_ids"][part], batch["attention_mask"][part]
            hidden, _ = self.backbone.hidden(ids, mask)
            at = row, place = counted[part].nonzero(as_tuple=True)
            token, begins = labels[part][at], first[part][at]
            yield Supervised(hidden[row, place], token, start + row, begins, count)

    def nats(
        self, s: Supervised, form: str = "cross_entropy", *, adjusted=True, support=None
    ) -> Tensor:
        """Sum of `head.token_loss` over these positions / number of supervised tokens, in nats."""
        total = token_loss(
            s.hidden,
            self.backbone.weight,
            self.alpha.full() if adjusted else None,
            s.token if form == "cross_entropy" else None,
            form,
            bias=self.backbone.bias,
            support=support,
            center=self.alpha.center and adjusted,
        )
        return total / s.count

    def loss_over(
        self, batch: dict[str, Tensor], form: str = "cross_entropy", *, local=False, **options: Any
    ) -> Loss:
        """`nats` of a micro-batch, chunk by chunk, as a loss that may be called again."""
        return lambda: (self.nats(s, form, **options) for s in self.supervised(batch, local=local))

    def reduce(self, tensors: list[Tensor]) -> None:
        """Sum over processes, in place, with one all-reduce for the list."""
        if distributed():
            flat = torch.cat([t.flatten() for t in tensors])
            torch.distributed.all_reduce(flat)
            for t, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                t.copy_(summed.view_as(t))

    # ---- evaluation -----------------------------------------------------------------------

    @property
    def candidates(self) -> dict[str, tuple[bool, bool]]:
        """The variants that this module could serve as it is now: all but those of theta_0."""
        return {v: use for v, use in self.variants.items() if use[0] or not self.trains_theta}

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0):
        """Source tokens: task loss and entropy, as served. Questions: kept for conf-ECE."""
        if "labels" in batch:
            for s in self.supervised(batch, local=True):
                for i, form in enumerate(("cross_entropy", "entropy"), 1):
                    self._nats[i] += float(self.nats(s, form, adjusted=self.alpha_in_use) * s.count)
                z = self.backbone.logits(s.hidden).float()
                self.token_ece.update(self.alpha(z) if self.alpha_in_use else z, s.token)
                self._nats[0] += len(s.token)
        else:
            self._score(batch, self.candidates)

    def on_validation_epoch_start(self) -> None:
        """Begin the sums. Not self.log: over processes it weights by truncated integers."""
        self._nats = torch.zeros(3, dtype=torch.float64)  # tokens, nats of task loss, of entropy
        self.token_ece.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the source's losses; accuracy and calibration where there were questions."""
        sums = self._nats.to(self.device, torch.float32)
        self.reduce([sums])
        if sums[0]:
            self.log("val/task_loss", sums[1] / sums[0], sync_dist=True)
            self.log("val/entropy", sums[2] / sums[0], sync_dist=True)
            self.log("val/token_ece", self.token_ece.compute(), sync_dist=True)
        self.scored = self._tally.gather()
        used = {v for v, (_, alpha) in self.candidates.items() if alpha == self.alpha_in_use}
        gaps = [abs(s.overconfidence) for s in self.scored if s.variant in used]
        if gaps:
            self.log("val/gap", max(gaps), sync_dist=True)  # what the choice goes by
        self._log_scored({v: "val" if v in used else f"val/{v}" for v in self.candidates})

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0):
        """Score a batch of questions under every variant."""
        self._score(batch, self.variants)

    def on_test_epoch_end(self) -> None:
        """Gather `scored` over processes; log each metric of all questions as test/<variant>/…."""
        self.scored = self._tally.gather()
        self._log_scored({v: f"test/{v}" for v in self.variants})

    def _log_scored(self, under: dict[str, str]) -> None:
        """Log every metric of all questions, each variant's under its own name."""
        for scored in self.scored:
            if scored.dataset == "all":
                for name, number in scored.summary(self.hparams.n_bins).items():
                    self.log(f"{under[scored.variant]}/{name}", number, sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0):
        """One dict a question, see `scoring.prediction_rows`; with alpha where it is in use."""
        ours = self.alpha if self.alpha_in_use else None
        found = option_log_probs(self.backbone, batch, {"used": ours, "raw": None})
        return prediction_rows(batch, *found["used"], found["raw"][0])

    def _score(self, batch: dict[str, Any], variants: dict[str, tuple[bool, bool]]) -> None:
        for trained in sorted({theta for theta, _ in variants.values()}):
            adjustments = {
                name: self.alpha if applied else None
                for name, (theta, applied) in variants.items()
                if theta == trained
            }
            with nullcontext() if trained else self.backbone.at_theta_0():
                found = option_log_probs(self.backbone, batch, adjustments)
            for name, (log_probs, mass) in found.items():
                self._tally.add(batch, name, log_probs, mass)
