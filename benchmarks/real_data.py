"""CALM beside honest controls on a real aligned model; settings tried, then the real-data check.

    python benchmarks/real_data.py explore --out runs/explore --model PATH
    python benchmarks/real_data.py check --out runs/check --root DATA --model PATH
    python benchmarks/real_data.py table --out runs/check

`explore` trains on the bundled instructions and tests on the bundled questions, one line a
setting. `check` trains on Alpaca (its own template, then the test's form) with three seeds and
tests on real benchmarks. Every trial is kept in its own file; what is there is not run again.
"""

import argparse
import json
import time
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig

from calm_lightning import (
    AlpacaDataModule,
    CALMModule,
    FineTuning,
    MCQADataModule,
    TemperatureScaling,
)

# Chosen on the bundled sample (`explore`), fixed before any benchmark was looked at.
K, T, B = 10, 3, 8
SHARED = {"lower_lr": 1e-3, "warmup_fraction": 0.1}
CALM = {"inner_lr": 0.05, "upper_lr": 1e-2, "gamma": 2.0, "scale_min": 0.25}

SETTINGS = {
    "fine_tuning": (FineTuning, {}),
    "fine_tuning_same_tokens": (FineTuning, {"use": "all"}),
    "temperature_scaling": (TemperatureScaling, {}),
    "gamma 2": (CALMModule, {}),
    "gamma 0.5": (CALMModule, {"gamma": 0.5}),
    "gamma 1": (CALMModule, {"gamma": 1.0}),
    "gamma 4": (CALMModule, {"gamma": 4.0}),
    "last prompt position": (CALMModule, {"entropy": "last_prompt"}),
    "top 20": (CALMModule, {"entropy": "topk"}),
    "adam metric": (CALMModule, {"barrier_metric": "adam"}),
    "scalar alpha": (CALMModule, {"alpha": "scalar"}),
    "alpha still": (CALMModule, {"upper_lr": 1e-6}),
    "center": (CALMModule, {"center": True}),
    "rate 5e-4": (CALMModule, {"lower_lr": 5e-4}),
    "rate 2e-3": (CALMModule, {"lower_lr": 2e-3}),
    "rho 0.5": (CALMModule, {"inner_lr": 0.5}),
    "residual barrier": (CALMModule, {"barrier": "residual"}),
    "self_ce": (CALMModule, {"entropy": "self_ce"}),
    "last prompt, gamma 4": (CALMModule, {"entropy": "last_prompt", "gamma": 4.0}),
}


def build(make, model: str, options: dict):
    """A method's module with the shared rates and LoRA."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    options = SHARED | (CALM if make is CALMModule else {}) | options
    if make is TemperatureScaling:
        options, lora = {}, None
    return make(model, lora=lora, **options)


def trainer() -> Trainer:
    """One device, float32, nothing written."""
    return Trainer(
        max_epochs=1, accelerator="cpu", precision="32-true", logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        limit_val_batches=0,
    )  # fmt: skip


def fit(make, model: str, options: dict, source, seed: int):
    """Train one method for K train items; the module and the seconds it took."""
    seed_everything(seed, verbose=False)
    module, began = build(make, model, options), time.time()
    trainer().fit(module, source)
    return module, time.time() - began


def test(module, target) -> list:
    """Every `Scored` of the module on one target."""
    quiet = trainer()
    quiet.test(module, target, verbose=False)
    return module.scored


def line(name: str, scored) -> dict:
    """Metrics of one `Scored` as a flat dict."""
    numbers = scored.summary(10)
    return {"setting": name, "dataset": scored.dataset, "scoring": scored.scoring,
            "variant": scored.variant} | {k: round(v, 4) for k, v in numbers.items()}  # fmt: skip


def explore(args) -> None:
    """One trial a setting on the bundled sample."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (make, options) in SETTINGS.items():
        file = args.out / f"{name}.json"
        if file.exists() or (args.only and name not in args.only):
            continue
        source = AlpacaDataModule(
            "sample", form=args.form, batch_size=B, inner_steps=T, outer_steps_per_epoch=K,
            max_length=96,
        )  # fmt: skip
        target = MCQADataModule({"sample": 300}, scoring="first_token")
        module, seconds = fit(make, args.model, options, source, 0)
        if name != "fine_tuning":
            module.variants = {k: v for k, v in module.variants.items() if k != "base"}
        rows = [line(name, s) for s in test(module, target) if s.dataset == "all"]
        file.write_text(json.dumps(rows))
        for row in rows:
            print(f"{seconds:4.0f} s", show(row), flush=True)


def show(row: dict) -> str:
    """One row as text."""
    keys = ("accuracy", "mean_confidence", "conf_ece", "cw_ece", "nll", "brier", "auroc")
    return f"{row['setting']:24} {row['variant']:22}" + " ".join(f"{row[k]:.3f}" for k in keys)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["explore"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--form", default="question")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    {"explore": explore}[args.what](args)
