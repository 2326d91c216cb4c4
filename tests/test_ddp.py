"""Two processes (gloo, CPU) take the step that one process takes on the same global batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import instructions, make_lm, make_tokenizer, write
from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig

from calm_lightning import AlpacaDataModule, CALMModule, MCQADataModule, Shift


def sgd(params):
    """Plain gradient descent."""
    return torch.optim.SGD(params)


def fit_and_test(devices: int, folder: str, strategy: str) -> None:
    """One run; rank 0 writes what it logged, trained and scored."""
    seed_everything(0, verbose=False)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = make_tokenizer(["Question: is it A?\nAnswer: A"] * 4)
    # SGD: AdamW's first steps are nearly signs, which turn rounding of a tiny gradient into a step
    module = CALMModule(
        model=make_lm(0), tokenizer=tokenizer, lora=lora, lower_lr=0.5, upper_lr=0.5,
        inner_lr=0.5, warmup_fraction=0.0, theta_optimizer=sgd, alpha_optimizer=sgd,
    )  # fmt: skip
    data = Shift(
        AlpacaDataModule(
            f"{folder}/alpaca.jsonl", form="question", batch_size=4, inner_steps=2,
            outer_steps_per_epoch=3, max_length=100,
        ),
        MCQADataModule({"sample": 21}, scoring="text"),
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    logged = {k: v.item() for k, v in trainer.callback_metrics.items()}
    trainer.test(module, data, verbose=False)
    if trainer.is_global_zero:
        trained = [p.detach() for p in module.backbone.theta() + module.alpha.free()]
        scored = [s._asdict() for s in module.scored if s.dataset == "sample"]
        torch.save(
            {"logged": logged, "trained": trained, "scored": scored}, f"{folder}/{devices}.pt"
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_processes_equal_one(tmp_path):
    rows = instructions(40)
    for i, row in enumerate(rows):  # very unequal numbers of supervised tokens
        row["output"] = "yes " * (1 + 7 * (i % 3))
    write(tmp_path / "alpaca.jsonl", rows)
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        done = subprocess.run(
            [sys.executable, __file__, str(devices), str(tmp_path), strategy],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in (1, 2))
    names = ("train/lambda", "train/q_hat", "train/task_loss", "train/entropy")
    for name in (*names, "val/task_loss", "val/entropy"):
        assert one["logged"][name] == pytest.approx(two["logged"][name], abs=1e-5), name
    for a, b in zip(one["trained"], two["trained"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for a, b in zip(one["scored"], two["scored"], strict=True):
        assert a["id"] == b["id"]  # every question once, in the same order
        torch.testing.assert_close(a["probs"], b["probs"], rtol=0, atol=1e-4)
    moved = max(p.abs().max().item() for p in one["trained"] if p.ndim == 1)
    assert moved > 1e-3  # alpha did move


@pytest.mark.slow
def test_the_command_line_on_two_processes_fits_tests_and_reports_once(tmp_path):
    tokenizer = make_tokenizer(["Question: is it A?\nAnswer: A"] * 4)
    make_lm(0).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    found = {}
    for devices in (1, 2):
        command = [
            sys.executable, "-m", "calm_lightning", "fit",
            f"--config={Path(__file__).parents[1] / 'configs' / 'demo.yaml'}",
            "--model.model_name=tiny", "--data.source.max_length=400",
            "--data.source.outer_steps_per_epoch=2", "--data.target.scoring=text",
            "--data.source.near_misses=text", "--data.source.near_miss_rows=4",
            "--data.target.benchmarks={sample: 21}", "--trainer.accelerator=cpu",
            f"--trainer.devices={devices}", "--trainer.strategy=ddp", f"--run_dir=run{devices}",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("run folder:") == 1
        rows = json.loads((tmp_path / f"run{devices}" / "metrics.json").read_text())["rows"]
        found[devices] = {(r["variant"], r["metric"]): (r["value"], r["n"]) for r in rows}
    for key in (("base", "nll"), ("temperature_scaling", "nll"), ("base", "conf_ece")):
        assert found[1][key][0] == pytest.approx(found[2][key][0], abs=1e-3)
        assert found[2][key][1] == 21


if __name__ == "__main__":
    fit_and_test(int(sys.argv[1]), sys.argv[2], sys.argv[3])
