"""An SFT step and an outer iteration on a Llama-7B-shaped model of random weights.

    python benchmarks/gpu.py [--small]

One prepared script for a machine with a GPU: time, peak memory, share of the device's own matmul
rate, with NF4 weights where bitsandbytes is there (else bf16, and it says so), LoRA r = 64, 16 rows
of 512 tokens, V = 32,000 and 128,256. Then whether the device's losses, gradients and metrics are
those of a CPU in float64. It needs torch, transformers, peft and torchmetrics alone. ``--small``
is a few seconds on a CPU and proves that the script runs, nothing else.
"""

import argparse
import time
from importlib.util import find_spec

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from calm_lightning.backbone import Backbone, with_lora
from calm_lightning.bilevel import gradient, outer_step, put_gradient
from calm_lightning.head import Alpha, token_loss
from calm_lightning.metrics import ClasswiseECE, ConfidenceECE

SEVEN_B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


class Losses:
    """Task loss and negative entropy of micro-batches of random tokens, as `outer_step` wants them.

    The second half of a row is its response; `rows` at once through the body.
    """

    def __init__(self, backbone: Backbone, alpha: Alpha, rows: int):
        self.backbone, self.alpha, self.rows = backbone, alpha, rows

    def of(self, ids: torch.Tensor, form: str = "cross_entropy", sign: float = 1.0):
        """Yield chunks of sign x the mean of a `token_loss` form, nats per token."""

        def loss():
            begin = ids.shape[1] // 2
            count = ids[:, begin:].numel()
            for part in ids.split(self.rows):
                hidden, _ = self.backbone.hidden(part, torch.ones_like(part))
                target = part[:, begin:].flatten() if form == "cross_entropy" else None
                total = token_loss(
                    hidden[:, begin - 1 : -1].flatten(0, 1), self.backbone.weight,
                    self.alpha.full(), target, form, bias=self.backbone.bias,
                )  # fmt: skip
                yield sign * total / count

        return loss


def model(vocab: int, small: bool, device: torch.device) -> tuple[Backbone, str]:
    """A random Llama with LoRA, and what its weights are."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, tie_word_embeddings=False, **(SMALL if small else SEVEN_B)
    )
    dtype = torch.float32 if small else torch.bfloat16
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(config, dtype=dtype)
    lm.config.use_cache = False
    held = str(dtype).removeprefix("torch.")
    if find_spec("bitsandbytes") and device.type == "cuda" and not small:
        from transformers.integrations.bitsandbytes import replace_with_bnb_linear

        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )  # fmt: skip
        state = lm.state_dict()
        lm = replace_with_bnb_linear(lm, ["lm_head"], quantization_config=quantization)
        lm.load_state_dict(state, strict=False)
        held = "nf4"
    lora = LoraConfig(r=64, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    lm = with_lora(lm, lora, gradient_checkpointing=not small).to(device)
    lm.train()
    return Backbone(lm), held


def matmul_rate(device: torch.device, small: bool) -> float:
    """FLOP/s of a large bf16 product on this device (float32 where small)."""
    n, dtype = (256, torch.float32) if small else (8192, torch.bfloat16)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    seconds = timed(lambda: a @ b, device, rounds=10)
    return 2 * n**3 / seconds


def timed(call, device: torch.device, rounds: int = 3) -> float:
    """Smallest wall time of a call, after one that warms up."""

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    found = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def peak(device: torch.device) -> str:
    """Peak of the allocator since the last reset, GiB."""
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device.type == "cuda" else "–"


def steps(vocab: int, small: bool, device: torch.device, rate: float, t: int) -> None:
    """One row for fine-tuning, one for CALM."""
    backbone, held = model(vocab, small, device)
    alpha = Alpha(vocab).to(device)
    rows, length, at_once = (2, 16, 2) if small else (16, 512, 4)
    losses = Losses(backbone, alpha, at_once)
    batches = [torch.randint(vocab, (rows, length), device=device) for _ in range(t + 2)]
    theta, free = backbone.theta(), alpha.free()
    sizes = sum(p.numel() for p in backbone.parameters()) if held != "nf4" else 6.7e9

    def sft() -> None:
        put_gradient(losses.of(batches[0]), theta)

    def calm() -> None:
        outer_step(
            theta, free, losses.of(batches[0]), losses.of(batches[1], "entropy", -1.0),
            [losses.of(ids) for ids in batches[2:]], rho=1e-4,
        )  # fmt: skip

    # 2 FLOP a weight and token forward, as many back to the inputs, once more by checkpointing
    token_flops = rows * length * 2 * sizes
    # passes with a backward, and one forward at theta_tilde
    for name, call, passes in (
        ("SFT step", sft, 3),
        (f"outer iteration, T {t}", calm, 3 * (t + 2) + 1),
    ):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(call, device)
        share = passes * token_flops / seconds / rate
        print(f"| {vocab:,} | {held} | {name} | {seconds:.3f} | {peak(device)} | {share:.2f} |")


def same_as_float64(device: torch.device) -> None:
    """Losses and gradients of a small model under each autocast, metrics in each dtype."""
    reference = None
    cpu = torch.device("cpu")
    ids = torch.randint(200, (4, 24), generator=torch.Generator().manual_seed(0))
    for where, dtype in ((cpu, None), (device, torch.float16), (device, torch.bfloat16)):
        backbone, _ = model(200, True, cpu)
        backbone.to(where, torch.float64 if dtype is None else torch.float32)
        alpha = Alpha(200).to(where)
        losses = Losses(backbone, alpha, 2)
        with torch.autocast(where.type, dtype or torch.bfloat16, enabled=dtype is not None):
            found = [
                gradient(losses.of(ids.to(where), form), alpha.free())
                for form in ("cross_entropy", "entropy")
            ]
        flat = torch.cat([t.double().cpu().flatten() for value, g in found for t in (value, *g)])
        if reference is None:
            reference = flat
        else:
            error = float((flat - reference).norm() / reference.norm())
            print(f"losses and alpha's gradients, {dtype} autocast: relative error {error:.1e}")
            assert error < 0.05, error
    logits = 2 * torch.randn(5000, 4, generator=torch.Generator().manual_seed(0))
    answer = torch.randint(4, (5000,), generator=torch.Generator().manual_seed(1))
    for make in (lambda: ConfidenceECE(10), lambda: ClasswiseECE(4, 10)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            values = []
            for z in (logits.to(dtype).double(), logits.to(dtype).to(device)):
                metric = make().to(z.device)
                metric.update_logits(z, answer.to(z.device))
                values.append(float(metric.compute()))
            # a confidence on the border of two bins may fall on either side
            assert abs(values[0] - values[1]) < 1e-3, (dtype, values)
    print("metrics of float16, bfloat16 and float32 logits on the device: as in float64")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--inner_steps", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if device.type == "cpu" and not args.small:
        raise SystemExit("there is no GPU here: run it with --small, or on a machine with one")
    rate = matmul_rate(device, args.small)
    print(f"{name}, torch {torch.__version__}, {rate / 1e12:.2f} TFLOP/s of plain matmul")
    print("\n| V | weights | | s | peak GiB | share of the matmul rate |")
    print("|---|---|---|---:|---:|---:|")
    for vocab in (200, 1000) if args.small else (32_000, 128_256):
        steps(vocab, args.small, device, rate, args.inner_steps)
    same_as_float64(device)
