"""Time and memory of the adjusted head, of an outer iteration, and how they grow.

    python benchmarks/cost.py head [--rows 2048 --hidden 2048 --vocab 128256]
    python benchmarks/cost.py outer --model PATH
    python benchmarks/cost.py growth --plot docs/growth.png

Everything compared takes turns in one process and one thread; time is its processor time, the
smallest of the rounds, and memory the largest growth of torch's own allocations, by its profiler.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from matplotlib.figure import Figure
from peft import LoraConfig
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from calm_lightning import CALMModule, ConfidenceECE, FineTuning
from calm_lightning.bilevel import frozen, gradient
from calm_lightning.head import adjust, token_loss

MIB = 2**20


class Peak:
    """Context: `mib`, the largest growth of what torch holds."""

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        level = top = 0
        for event in sorted(
            (e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()
        ):
            level += event.nbytes()
            top = max(top, level)
        self.mib = top / MIB


def least_seconds(rounds: int, calls: dict[str, Callable]) -> dict[str, float]:
    """Processor seconds of each call, the smallest of the rounds, in which they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return {name: min(found) for name, found in seconds.items()}


def row(*cells) -> None:
    """One line of Markdown."""
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


# ---- the head ----------------------------------------------------------------------------------


def naive(hidden, weight, delta, l, target) -> torch.Tensor:
    """Cross-entropy, or entropy without a target, over the whole (N, V) matrix by autograd."""
    log_p = adjust((hidden @ weight.T).float(), delta, l).log_softmax(-1)
    if target is not None:
        return F.nll_loss(log_p, target, reduction="sum")
    return -(log_p.exp() * log_p).sum()


def head(args) -> None:
    """Loss and all gradients: naive, ours, and torch's own fused cross-entropy (without alpha)."""
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.rows, args.hidden).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden) / args.hidden**0.5).to(dtype)
    delta, l = (torch.zeros(args.vocab, requires_grad=True) for _ in range(2))
    target = torch.randint(args.vocab, (args.rows,))
    alpha = [hidden, delta, l]
    print(f"\nN {args.rows}, H {args.hidden}, V {args.vocab}, {args.dtype}\n")
    row("", "s", "× naive", "MiB", "× naive")
    row("---", *["---:"] * 4)
    for form, at in (("cross_entropy", target), ("entropy", None)):
        calls = {
            "naive": lambda at=at: torch.autograd.grad(naive(hidden, weight, delta, l, at), alpha),
            "ours": lambda form=form, at=at: torch.autograd.grad(
                token_loss(hidden, weight, (delta, l), at, form), alpha
            ),
        }
        if at is not None and hasattr(F, "linear_cross_entropy"):
            calls["torch linear_cross_entropy, no α"] = lambda at=at: torch.autograd.grad(
                F.linear_cross_entropy(hidden, weight, at, reduction="sum"), [hidden]
            )
            calls["ours, no α"] = lambda form=form, at=at: torch.autograd.grad(
                token_loss(hidden, weight, None, at, form), [hidden]
            )
        memory = {}
        for name, call in calls.items():
            with Peak() as peak:
                call()
            memory[name] = peak.mib
        seconds = least_seconds(args.rounds, calls)
        for name in calls:
            s, m = seconds[name], memory[name]
            row(f"{form}: {name}", f"{s:.2f}", f"{s / seconds['naive']:.2f}",
                f"{m:.0f}", f"{m / memory['naive']:.3f}")  # fmt: skip


# ---- the outer iteration -----------------------------------------------------------------------


def items(vocab: int, n: int, t: int, rows: int, length: int) -> list[dict]:
    """Train items of random tokens; the second half of a row is its response."""

    def micro_batch() -> dict:
        ids = torch.randint(vocab, (rows, length))
        labels = ids.clone()
        labels[:, : length // 2] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    return [
        {"train": [micro_batch() for _ in range(t + 1)], "calib": micro_batch()} for _ in range(n)
    ]


class Alone(Callback):
    """Times whole train items, and after each its passes alone."""

    def __init__(self):
        self.whole, self.passes = [], []

    def on_train_batch_start(self, *_) -> None:
        """The loader has had its turn."""
        self._began = time.process_time()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """The same passes on the same rows, one after another."""
        self.whole.append(time.process_time() - self._began)
        began = time.process_time()
        theta, alpha = module.backbone.theta(), module.alpha.free()
        residual, *inner = batch["train"]
        for micro_batch in inner:
            gradient(module.loss_over(micro_batch), theta)
        with module.backbone.without_dropout():
            with frozen(theta):
                gradient(module.loss_over(residual), alpha)
            gradient(module.loss_over(residual), theta + alpha)
            gradient(module.negative_entropy(batch["calib"]), theta + alpha)
        self.passes.append(time.process_time() - began)


def fit(make, model, data, callbacks=(), **options) -> None:
    """Run a method over given train items."""
    seed_everything(0, verbose=False)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"model_name": model} if isinstance(model, str) else {"model": model}
    trainer = Trainer(
        callbacks=list(callbacks), max_epochs=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(make(lora=lora, **given, **options), DataLoader(data, batch_size=None))


class MemoryOfSteps(Callback):
    """Largest growth of memory over all steps of a run."""

    def on_train_start(self, *_) -> None:
        """The level before the first step."""
        self.peak = Peak().__enter__()

    def on_train_end(self, *_) -> None:
        """Of all steps."""
        self.peak.__exit__(None, None, None)


def memory_of(make, model, data, **options) -> float:
    """MiB above the level before the first step."""
    watch = MemoryOfSteps()
    fit(make, model, data, [watch], **options)
    return watch.peak.mib


def outer(args) -> None:
    """An outer iteration beside its passes alone; its memory beside fine-tuning's."""
    from calm_lightning.backbone import load_lm

    vocab = load_lm(args.model).get_output_embeddings().weight.shape[0]
    t, rows, length = args.inner_steps, args.batch, args.length
    alone = Alone()
    data = items(vocab, args.rounds, t, rows, length)
    fit(CALMModule, args.model, data, [alone], dtype="float32")
    whole, passes = min(alone.whole[1:]), min(alone.passes[1:])
    print(f"\n{args.model}, T {t}, B {rows}, L {length}\n")
    print(f"outer iteration {whole:.2f} s; its {t} + 2 passes and one forward, alone, "
          f"{passes:.2f} s: {whole / passes:.3f}")  # fmt: skip
    memory = {
        make.__name__: memory_of(make, args.model, data[:2], dtype="float32")
        for make in (FineTuning, CALMModule)
    }
    print(f"memory above the level before the first step: CALM {memory['CALMModule']:.0f} MiB, "
          f"fine-tuning {memory['FineTuning']:.0f} MiB: "
          f"{memory['CALMModule'] / memory['FineTuning']:.3f}")  # fmt: skip


# ---- growth ------------------------------------------------------------------------------------

BASE = {"T": 4, "B": 8, "L": 64, "V": 8192}
GROWTH = {
    "T": (1, 2, 4, 8, 16), "B": (2, 4, 8, 16, 32), "L": (16, 32, 64, 128, 256),
    "V": (2048, 8192, 32768, 131072),
}  # fmt: skip


def tiny(vocab: int) -> LlamaForCausalLM:
    """A small Llama of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    lm = LlamaForCausalLM(config)
    lm.get_output_embeddings().requires_grad_(False)
    return lm


def growth(args) -> None:
    """One number at a time is changed; seconds of an outer iteration, MiB of a run of two."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, values in GROWTH.items():
        for value in values:
            at = BASE | {name: value}
            data = items(at["V"], args.rounds, at["T"], at["B"], at["L"])
            alone = Alone()
            fit(CALMModule, tiny(at["V"]), data, [alone])
            mib = memory_of(CALMModule, tiny(at["V"]), data[:2])
            found.setdefault(name, []).append((value, min(alone.whole[1:]), mib))
    for n in (10_000, 30_000, 100_000, 300_000):
        probs, answer = torch.randn(n, 4).softmax(-1), torch.randint(4, (n,))
        metric = ConfidenceECE(10)

        def all_rows(metric=metric, probs=probs, answer=answer):
            for p, a in zip(probs.split(4096), answer.split(4096), strict=True):
                metric.update(p, a)
            metric.compute()

        with Peak() as peak:
            all_rows()
        seconds = least_seconds(args.rounds, {"": all_rows})[""]
        found.setdefault("N(test)", []).append((n, seconds, peak.mib))
    row("", "value", "s", "MiB")
    row("---", *["---:"] * 3)
    for name, points in found.items():
        for value, seconds, mib in points:
            row(name, f"{value:,}", f"{seconds:.3f}", f"{mib:.2f}" if mib < 10 else f"{mib:.0f}")
    if args.plot:
        plot(found, args.plot)


def plot(found: dict, path: Path) -> None:
    """Time and memory, each against one number, both axes from 0."""
    figure = Figure(figsize=(3.0 * len(found), 4.6), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (name, points) in enumerate(found.items()):
        x, seconds, mib = zip(*points, strict=True)
        for axis, y, label, color in (
            (axes[0][column], seconds, "processor s", "#1f5f8b"),
            (axes[1][column], mib, "MiB", "#c1272d"),
        ):
            axis.plot(x, y, "o-", color=color)
            axis.set_xlim(0, None)
            axis.set_ylim(0, 1.15 * max(y))
            axis.grid(alpha=0.25)
            if column == 0:
                axis.set_ylabel(label)
        axes[1][column].set_xlabel(name)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["head", "outer", "growth"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2048, help="head: N")
    parser.add_argument("--hidden", type=int, default=2048, help="head: H")
    parser.add_argument("--vocab", type=int, default=128256, help="head: V")
    parser.add_argument("--dtype", default="float32", help="head: of h and W")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="outer")
    parser.add_argument("--inner_steps", type=int, default=3, help="outer: T")
    parser.add_argument("--batch", type=int, default=8, help="outer: B")
    parser.add_argument("--length", type=int, default=64, help="outer: L")
    parser.add_argument("--plot", type=Path, help="growth: where the picture goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"head": head, "outer": outer, "growth": growth}[args.what](args)
