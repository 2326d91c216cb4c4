"""16-mixed: one scaler for both gradients, all arithmetic on unscaled ones, both step or neither.

Lightning turns 16-mixed into bf16-mixed on a CPU, so its plugin is given here as it is on a GPU,
with a scaler that overflows when the test says so.
"""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from test_calm import calm, lora, source, state, trainer

from calm_lightning import FineTuning, Iterate


class Overflowing(torch.amp.GradScaler):
    """A scale of 2^10; at the given train items it is infinite, as if a gradient had overflowed."""

    def __init__(self, at=(), scale=2.0**10):
        super().__init__("cpu", init_scale=scale, growth_interval=10**6)
        self.at, self.item = set(at), 0

    def scale(self, outputs):
        """A loss scale is asked for as that of 1, once an item."""
        scaled = super().scale(outputs)
        asked = outputs.ndim == 0 and float(outputs) == 1.0
        return scaled * torch.inf if asked and self.item in self.at else scaled


class Watch(Callback):
    """After each item: what is trained, alpha's and theta's moments, the scale."""

    def __init__(self, scaler=None):
        self.scaler, self.seen = scaler, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.scaler is not None:
            self.scaler.item = batch_idx

    def on_train_batch_end(self, trainer, module, *_):
        optimizers = module.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        moments = [
            s.get("exp_avg", s.get("momentum_buffer")).clone()
            for o in optimizers
            for s in o.optimizer.state.values()
            if s
        ]
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        logged = {k: v.item() for k, v in trainer.callback_metrics.items()}
        self.seen.append((state(module), moments, scale, logged))


def fit(module, tmp_path, scaler=None, K=4, **options):
    watch = Watch(scaler)
    if scaler is not None:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer(tmp_path, callbacks=[watch], **options).fit(module, source(tmp_path, K=K))
    return watch.seen


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sgd(params):
    return torch.optim.SGD(params, momentum=0.9)


def test_the_scale_changes_nothing_but_underflow(tiny_lm, tiny_tokenizer, tmp_path):
    """Powers of two are exact, so that only what vanished at a scale of 1 differs."""
    runs = []
    for scale in (1.0, 2.0**10):
        # AdamW's first steps are nearly signs, which turn rounding of a tiny gradient into a step
        rules = {"theta_optimizer": sgd, "alpha_optimizer": sgd}
        module = calm(copy.deepcopy(tiny_lm), tiny_tokenizer, lower_lr=0.1, upper_lr=0.1, **rules)
        runs.append(fit(module, tmp_path, Overflowing(scale=scale)))
    for (_, one, _, logged), (_, two, scale, logged_2) in zip(*runs, strict=True):
        assert scale == logged_2["train/loss_scale"] == 2.0**10
        one, two = (torch.cat([m.flatten() for m in moments]) for moments in (one, two))
        assert (one - two).norm() < 0.02 * one.norm()
        for name in ("train/lambda", "train/task_loss", "train/entropy"):
            assert logged[name] == pytest.approx(logged_2[name], rel=2e-2, abs=1e-4)


def test_lambda_is_that_of_full_precision(tiny_lm, tiny_tokenizer, tmp_path):
    half = fit(calm(copy.deepcopy(tiny_lm), tiny_tokenizer), tmp_path, Overflowing())
    full = fit(calm(tiny_lm, tiny_tokenizer), tmp_path)
    for (_, _, _, a), (_, _, _, b) in zip(half, full, strict=True):
        for name in ("train/lambda", "train/g_q_norm", "train/task_loss", "train/entropy"):
            assert a[name] == pytest.approx(b[name], rel=0.05, abs=1e-3), name


@pytest.mark.parametrize("options", [{}, {"warm_start": True}, {"barrier_metric": "adam"}])
def test_an_overflow_skips_both_optimizers(options, tiny_lm, tiny_tokenizer, tmp_path):
    seen = fit(calm(tiny_lm, tiny_tokenizer, **options), tmp_path, Overflowing(at={1, 3}), K=5)
    for k in range(1, 5):
        (before, moments_before, scale_before, _), (after, moments, scale, _) = seen[k - 1 : k + 1]
        if k in (1, 3):
            assert same(before, after)
            assert same(moments_before, moments)
            assert scale == scale_before / 2  # once, not once an optimizer
        else:
            assert not same(before, after)
            assert not same(moments_before, moments)
            assert scale == scale_before
            assert all(p.isfinite().all() for p in after)


@pytest.mark.parametrize("make", [FineTuning, Iterate])
def test_single_level_methods_skip_too(make, tiny_lm, tiny_tokenizer, tmp_path):
    module = make(model=tiny_lm, tokenizer=tiny_tokenizer, lora=lora())
    seen = fit(module, tmp_path, Overflowing(at={1}))
    assert same(seen[0][0], seen[1][0])
    assert seen[1][2] == seen[0][2] / 2
    assert not same(seen[1][0], seen[2][0])


def test_the_first_item_may_overflow(tiny_lm, tiny_tokenizer, tmp_path):
    """The usual start: a new scaler's 2^16 is found too large; torch's schedules do not mind."""
    module = calm(tiny_lm, tiny_tokenizer)
    module.configure_model()
    before = state(module)
    seen = fit(module, tmp_path, Overflowing(at={0}))
    assert same(before, seen[0][0])
    assert not same(seen[0][0], seen[1][0])


def test_a_loss_that_is_no_number_still_stops(tiny_lm, tiny_tokenizer, tmp_path):
    module = calm(tiny_lm, tiny_tokenizer)
    module.configure_model()
    module.backbone.weight.data[5] = float("nan")
    with pytest.raises(FloatingPointError, match="outer iteration 0: task loss nan"):
        fit(module, tmp_path, Overflowing())
