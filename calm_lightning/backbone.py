"""A causal language model made ready: loaded, quantised, given LoRA, split into body and head."""

import hashlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

if TYPE_CHECKING:  # peft loads bitsandbytes, and that all of torch's compiler: `calm --help` waits
    from peft import LoraConfig, PeftModel


class Backbone(nn.Module):
    """Any causal LM as body (ids -> hidden states) and output layer (hidden states -> logits).

    theta is every parameter that requires a gradient: the LoRA tensors, or whatever the user left
    trainable in a model of their own. The output layer itself stays frozen: CALM adjusts it
    through alpha, and the fused head relies on it.

    Args:
        lm: a `PreTrainedModel` or `PeftModel` with `get_output_embeddings()`.
        trained: False where theta stays as it is (post-hoc methods).

    Raises:
        ValueError: no output layer, dropout outside nn.Dropout, nothing or the output layer
            trainable, or logits that are not `output_layer(body(ids))` (soft-capped, scaled).
    """

    def __init__(self, lm: "PreTrainedModel | PeftModel", trained: bool = True):
        from peft import PeftModel

        super().__init__()
        self.lm = lm
        base = lm.get_base_model() if isinstance(lm, PeftModel) else lm
        if base.get_output_embeddings() is None:
            raise ValueError(f"{type(base).__name__} has no output layer: pass a causal LM")
        # Hidden in a tuple: registered twice, the body's tensors would have two names.
        self._parts = (base.base_model, base.get_output_embeddings())
        # transformers renames `past_key_values` to `cache` within version 5
        accepted = inspect.signature(base.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        theta = self.theta()
        if trained and not theta:
            raise ValueError("no parameter requires a gradient: give `lora`, or unfreeze some")
        if any(p is self.weight for p in theta):
            raise ValueError(
                "the output layer (perhaps tied to the embeddings) is trainable: freeze it with "
                "lm.get_output_embeddings().requires_grad_(False)"
            )
        # Not `disable_adapter`: adapters that the user trained before belong to the start
        self._theta_0 = [p.detach().cpu().clone() for p in theta]
        self._check()

    @property
    def weight(self) -> Tensor:
        """Output layer, (V, H)."""
        return self._parts[1].weight

    @property
    def bias(self) -> Tensor | None:
        """Bias of the output layer, (V,)."""
        return getattr(self._parts[1], "bias", None)

    @property
    def vocab_size(self) -> int:
        """Width V of the logits, which may exceed the tokenizer's length."""
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.weight.device

    def theta(self) -> list[nn.Parameter]:
        """The lower-level parameters, in a fixed order."""
        return [p for p in self.lm.parameters() if p.requires_grad]

    def hidden(
        self,
        input_ids: Tensor,  # (B, L)
        attention_mask: Tensor,  # (B, L or past + L)
        cache=None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, object]:
        """Last hidden states (B, L, H) and the key-value cache (None without `use_cache`)."""
        extra = {} if cache is None else {self._cache_name: cache}
        if position_ids is not None:
            extra["position_ids"] = position_ids
        out = self._parts[0](
            input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, **extra
        )
        return out.last_hidden_state, getattr(out, self._cache_name) if use_cache else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Unadjusted logits (N, V) in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._parts[1](hidden.to(self.weight.dtype)).float()

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Switch the nn.Dropout modules off, alone: `eval()` would also end checkpointing."""
        active = [m for m in self.lm.modules() if isinstance(m, nn.Dropout) and m.training]
        for module in active:
            module.training = False
        try:
            yield
        finally:
            for module in active:
                module.training = True

    @contextmanager
    def at_theta_0(self) -> Iterator[None]:
        """The model before training: its saved tensors swapped in (no gradients)."""
        theta = self.theta()
        with torch.no_grad():
            theta_k = [p.clone() for p in theta]
            try:
                for p, saved in zip(theta, self._theta_0, strict=True):
                    p.copy_(saved)
                yield
            finally:
                for p, saved in zip(theta, theta_k, strict=True):
                    p.copy_(saved)

    @torch.no_grad()
    def _check(self) -> None:
        """Compare with the model itself, in training mode with dropout off, as q_hat will be."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        mask = torch.ones_like(ids)
        training = self.lm.training
        self.lm.eval()
        theirs = self.lm(input_ids=ids, attention_mask=mask).logits.float()
        quiet = self.hidden(ids, mask)[0]
        self.lm.train()
        with self.without_dropout():
            same = torch.equal(quiet, self.hidden(ids, mask)[0])
        self.lm.train(training)
        if not same:
            raise ValueError(
                "the model drops out in a way that is no nn.Dropout module, so q_hat would be "
                "noise: set its attention and residual dropout to 0 in the model's config"
            )
        ours = self.logits(quiet)
        if (ours - theirs).abs().max() > 0.05 * theirs.abs().max() + 1e-3:
            raise ValueError(
                "this model's logits are not output_layer(last hidden state) (soft-capped or "
                "scaled?): CALM's adjusted head would not be the model's; use another model"
            )


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """Tokenizer of a hub id, a local folder or a GGUF file."""
    with _named(model_name):
        return AutoTokenizer.from_pretrained(resolve(model_name), trust_remote_code=False)


def load_lm(
    model_name: str, *, dtype: str = "auto", quantization: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """Load a causal LM, all trainable but its output layer.

    Args:
        model_name: hub id, local folder, or GGUF file (converted once, see `resolve`).
        dtype: of the weights that are not quantised: "auto" is what the checkpoint holds.
        quantization: e.g. NF4 with double quantisation.

    Raises:
        FileNotFoundError: a path that holds no model; OSError: a hub id that cannot be reached.
    """
    with _named(model_name):
        lm = AutoModelForCausalLM.from_pretrained(
            resolve(model_name), dtype=dtype, quantization_config=quantization,
            trust_remote_code=False,  # None would ask at the terminal
        )  # fmt: skip
    lm.config.use_cache = False
    lm.get_output_embeddings().requires_grad_(False)
    for layer in lm.modules():
        # bitsandbytes 0.50 repacks NF4 weights in the first forward without gradients where a CPU
        # has AVX512-BF16: from then on evaluation is another model than training, the weights no
        # longer dequantise, and widths have to be multiples of its block
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return lm


@contextmanager
def _named(model_name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(
            f"--model.model_name {model_name} could not be loaded (a hub id needs the hub, a local "
            f"folder its path): {error}"
        ) from error


def with_lora(
    lm: PreTrainedModel, lora: "LoraConfig | None", gradient_checkpointing: bool = False
) -> "PreTrainedModel | PeftModel":
    """Freeze the model and put LoRA on it, where given; switch checkpointing on, where asked.

    Raises:
        ValueError: quantised weights without LoRA.
    """
    if gradient_checkpointing:
        # Non-reentrant, so frozen embeddings need no input gradients (transformers #23170).
        # (transformers renames gradient_ to activation_checkpointing within version 5)
        name = "activation_checkpointing_enable"
        enable = getattr(lm, name, None) or lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if lora is None:
        if getattr(lm, "is_quantized", False):
            raise ValueError("quantised weights cannot be trained: give model.lora as well")
        return lm
    from peft import get_peft_model

    # Not peft's prepare_model_for_kbit_training: it makes a float32 copy of the embeddings.
    lm.requires_grad_(False)
    with torch.random.fork_rng():
        # A function of the global seed alone: methods compared under one seed start alike,
        # whatever drew random numbers before.
        torch.manual_seed(torch.initial_seed())
        return get_peft_model(lm, lora)


def resolve(model_name: str) -> str:
    """Hub ids and model folders as they are; a GGUF file (or its folder) as a converted folder.

    Reading GGUF takes half a minute, so it is done once and kept under `$XDG_CACHE_HOME` (or
    `~/.cache`) in `calm_lightning/<sha256>`.

    Raises:
        FileNotFoundError: a path that looks local and holds no model.
    """
    path = Path(model_name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise FileNotFoundError(
                f"{path} has no config.json and {len(found)} GGUF files: name a model folder or "
                "one .gguf file"
            )
        path = found[0]
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"{path} is no .gguf file: name a model folder or a GGUF file")
        return str(_converted(path))
    if not path.exists() and (model_name.startswith((".", "/", "~")) or model_name.count("/") > 1):
        raise FileNotFoundError(f"there is no model at {path}: check --model.model_name")
    return model_name


def _converted(path: Path) -> Path:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "calm_lightning"
    folder = cache / digest
    if folder.exists():
        return folder
    print(f"converting {path.name} once into {folder} (about half a minute)", file=sys.stderr)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    lm = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers refuses to save a model that came from GGUF; the same weights in a fresh one may
    config = lm.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng():
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(lm.state_dict())
    aside = cache / f"{digest}.{os.getpid()}"
    plain.save_pretrained(aside)
    AutoTokenizer.from_pretrained(**source).save_pretrained(aside)
    try:
        aside.rename(folder)  # whole or not at all
    except OSError:  # another process was first
        shutil.rmtree(aside)
    return folder
