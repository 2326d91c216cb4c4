"""A real aligned model: above chance and overconfident by first token, and CALM moves it."""

import pytest
import torch
from conftest import needs_smollm2, smollm2_gguf
from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig

from calm_lightning import AlpacaDataModule, CALMModule, MCQADataModule, Shift


@needs_smollm2
@pytest.mark.filterwarnings("ignore:.*q_hat:UserWarning")
def test_one_outer_iteration_on_real_weights(tmp_path):
    seed_everything(0, verbose=False)
    module = CALMModule(
        str(smollm2_gguf()), lower_lr=1e-3, upper_lr=1e-2, inner_lr=0.05, gamma=2.0,
        warmup_fraction=0.0,
        lora=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    data = Shift(
        AlpacaDataModule(
            "sample", form="question", batch_size=2, inner_steps=1, outer_steps_per_epoch=1,
            max_length=64,
        ),
        MCQADataModule({"sample": 64}, scoring="first_token"),
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", precision="32-true", logger=False, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    logged = trainer.callback_metrics
    assert 1 < logged["train/task_loss"] < 6  # nats per token
    assert 0 < logged["train/entropy"] < 8
    assert logged["train/lambda"] > 0
    trainer.test(module, data, verbose=False)
    found = {s.variant: s for s in module.scored if s.dataset == "sample"}
    base, both = found["base"].summary(10), found["both"].summary(10)
    assert base["accuracy"] > 0.4  # chance is about .25
    assert base["mean_confidence"] > base["accuracy"] + 0.03
    assert not torch.equal(found["base"].probs, found["both"].probs)
    assert abs(both["nll"] - base["nll"]) < 0.5  # one iteration is a small step
    # The chat model would rather end its turn (mass .016 here), yet far from four random tokens
    assert 4 / 49152 * 20 < found["base"].option_mass.mean() < 1
