"""Temperature and vector scaling: what is fitted, on what, and that it is the optimum."""

import pytest
import torch
from conftest import instructions, mmlu, write
from lightning.pytorch import Trainer
from scipy.optimize import minimize_scalar
from torch.nn import functional as F

from calm_lightning import (
    AlpacaDataModule,
    Alpha,
    MCQADataModule,
    TemperatureScaling,
    VectorScaling,
)
from calm_lightning.head import token_loss
from calm_lightning.posthoc import fit_temperature, fit_vector


@pytest.mark.parametrize("t", [0.5, 1.0, 3.0])
def test_temperature_is_recovered(t):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(20000, 8, generator=g) * 2
    target = torch.distributions.Categorical(logits=z).sample()
    assert fit_temperature(t * z, target, torch.eye(8)) == pytest.approx(t, rel=0.03)


def test_temperature_stays_within_its_bounds():
    z = torch.eye(4)
    assert fit_temperature(z, torch.arange(4), torch.eye(4)) == 0.1  # always right: ever sharper
    assert fit_temperature(z, (torch.arange(4) + 1) % 4, torch.eye(4)) == 10.0
    with pytest.raises(ValueError, match="no calib token"):
        fit_temperature(z[:0], torch.arange(0), torch.eye(4))


def fit(module, data, tmp_path, epochs=1):
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, num_sanity_val_steps=0,
        limit_val_batches=0, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def letters(tmp_path, **options):
    rows = [row | {"answer": i % 4} for i, row in enumerate(mmlu(60))]
    files = {"mine": {"path": write(tmp_path / "mcqa.jsonl", rows), "question": "question",
                      "options": "choices", "answer": "answer"}}  # fmt: skip
    sizes = {"train": 20, "calib": 22, "sel": 5}
    return MCQADataModule(
        {"mine": 12}, files=files, batch_size=4, inner_steps=1, outer_steps_per_epoch=3,
        max_length=128, sizes=sizes, **options,
    )  # fmt: skip


def sharp(lm, factor):
    """The model with logits so much larger: a smaller or larger T is due."""
    lm.get_output_embeddings().weight.data *= factor
    return lm


@pytest.mark.parametrize("factor", [0.2, 1.0])
def test_in_domain_t_is_the_optimum_on_half_of_calib(factor, tiny_lm, tiny_tokenizer, tmp_path):
    module = TemperatureScaling(
        model=sharp(tiny_lm, factor), tokenizer=tiny_tokenizer, over="options"
    )
    data = letters(tmp_path)
    trainer = fit(module, data, tmp_path)
    data.batch_size = 11
    (batch,) = data.token_batches("calib", 11)  # the first half of 22
    ids = [tiny_tokenizer.convert_tokens_to_ids(f"Ġ{c}") for c in "ABCD"]
    with torch.no_grad():
        logits = tiny_lm(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
    labels = batch["labels"][:, 1:]
    at = (labels != -100).int().argmax(1)
    rows = torch.arange(11)
    z = logits[rows, at][:, ids].double()
    answer = torch.tensor([ids.index(int(y)) for y in labels[rows, at]])
    nll = lambda t: float(F.cross_entropy(z / t, answer))  # noqa: E731
    best = minimize_scalar(nll, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-5})
    assert module.temperature == pytest.approx(best.x, rel=2e-3)
    assert abs(module.temperature - 1) > 0.05
    assert 0 < nll(module.temperature) < nll(1.0)
    trainer.test(module, data, verbose=False)
    found = {s.variant: s.probs for s in module.scored if s.dataset == "mine"}
    base, scaled = found["base"], found["temperature_scaling"]
    assert torch.equal(base.argmax(-1), scaled.argmax(-1))
    again = (base.log() / module.temperature).softmax(-1)
    torch.testing.assert_close(scaled, again, rtol=1e-3, atol=1e-5)


def test_out_of_domain_t_is_where_a_scalar_alpha_has_no_slope(tiny_lm, tiny_tokenizer, tmp_path):
    path = write(tmp_path / "alpaca.jsonl", instructions(60))
    data = AlpacaDataModule(
        path, form="question", batch_size=4, inner_steps=0, outer_steps_per_epoch=3, max_length=64
    )
    module = TemperatureScaling(model=sharp(tiny_lm, 0.2), tokenizer=tiny_tokenizer)
    fit(module, data, tmp_path)
    hidden, target = module.seen()
    weight = module.backbone.weight
    slopes = []
    assert 0.1 < module.temperature < 10  # or there is no root
    for d in (1.0, 1 / module.temperature):
        alpha = Alpha(module.backbone.vocab_size, "scalar")
        alpha.delta.data.fill_(d - 1)
        loss = token_loss(hidden, weight, alpha.full(), target)
        slopes.append(float(torch.autograd.grad(loss, alpha.delta)[0]) / len(target))
    assert abs(slopes[1]) < 1e-3 < 0.05 < abs(slopes[0])


def problem(n=400, k=6):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(n, k, generator=g) * 2
    d, l = torch.linspace(0.4, 1.5, k), torch.linspace(-1, 1, k)
    return z, torch.multinomial((d * z + l).softmax(-1), 1, generator=g)[:, 0]


def test_vector_scaling_is_the_optimum():
    z, target = problem()
    z[:, 5], target = z[:, 5] - 3, target.clamp(max=4)  # the last token is never the right one
    delta, l = fit_vector(z, target, torch.eye(6), pull=1.0)
    x = torch.cat([delta, l]).double().requires_grad_()
    scaled = (1 + x[:6]) * z.double() + x[6:]
    loss = F.cross_entropy(scaled, target, reduction="sum") + 0.5 * x.square().sum()
    (slope,) = torch.autograd.grad(loss, x)
    assert slope.abs().max() / len(z) < 1e-3
    t = fit_temperature(z, target, torch.eye(6))
    one = F.cross_entropy(z, target)
    assert F.cross_entropy(scaled.detach(), target) < F.cross_entropy(z / t, target) <= one
    assert -5 < l[5] < 0  # pushed down, not away


def test_vector_scaling_recovers_and_its_limits():
    z, target = problem(n=40000)
    delta, l = fit_vector(z, target, torch.eye(6))
    torch.testing.assert_close(1 + delta, torch.linspace(0.4, 1.5, 6), atol=0.08, rtol=0)
    torch.testing.assert_close(l - l.mean(), torch.linspace(-1, 1, 6), atol=0.08, rtol=0)
    stiff = fit_vector(z[:100], target[:100], torch.eye(6), pull=1e7)
    assert torch.cat(stiff).abs().max() < 1e-3
    twice = fit_vector(
        z[:100], target[:100], torch.eye(6), pull=2.0,
        reduce=lambda tensors: [t.mul_(2) for t in tensors],
    )  # fmt: skip
    alone = fit_vector(z[:100], target[:100], torch.eye(6), pull=1.0)
    torch.testing.assert_close(torch.cat(twice), torch.cat(alone), atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match="no calib token"):
        fit_vector(z[:0], target[:0], torch.eye(6))


def test_vector_scaling_lands_in_alpha(tiny_lm, tiny_tokenizer, tmp_path):
    module = VectorScaling(model=tiny_lm, tokenizer=tiny_tokenizer)
    fit(module, letters(tmp_path), tmp_path)
    hidden, target = module.seen()
    head = (module.backbone.weight,)
    before = token_loss(hidden, *head, None, target)
    assert token_loss(hidden, *head, module.alpha.full(), target) < before
    with pytest.raises(ValueError, match="pull must be positive"):
        VectorScaling(model=tiny_lm, pull=0.0)
