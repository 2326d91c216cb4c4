"""D11 to D14: public bug reports against temperature scaling (reference/metrics.md)."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from calm_lightning.backbone import Backbone
from calm_lightning.posthoc import fit_temperature


def calibrated(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, k, generator=generator)
    return z, torch.multinomial(z.softmax(-1), 1, generator=generator).squeeze(1)


def test_d11_below_chance_and_few_rows_t_stays_positive_and_no_answer_changes():
    z, _ = calibrated(5, 4)
    t = fit_temperature(z, z.argmin(-1), torch.eye(4))
    assert t == 10  # the upper bound: T never turns the ranks round
    assert torch.equal((z / t).argmax(-1), z.argmax(-1))


@torch.no_grad()
def test_d12_a_model_in_training_mode_gives_the_same_finite_t_each_time(tiny_lm):
    # What a fit is given comes from `without_dropout`, in training mode too.
    mlp = tiny_lm.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(0.5))
    tiny_lm.lm_head.requires_grad_(False)
    backbone = Backbone(tiny_lm).train()
    ids = torch.arange(2, 66).view(4, 16)
    found, noisy = [], backbone.hidden(ids, torch.ones_like(ids))[0].flatten(0, 1)
    for _ in range(2):
        with backbone.without_dropout():
            hidden = backbone.hidden(ids, torch.ones_like(ids))[0].flatten(0, 1)
        assert not torch.equal(hidden, noisy)
        target = (
            (backbone.logits(hidden) / 2)
            .softmax(-1)
            .multinomial(1, generator=torch.Generator().manual_seed(0))
        )
        found.append(fit_temperature(hidden, target.squeeze(1), backbone.weight))
    assert found[0] == found[1] == pytest.approx(2, rel=0.3)
    assert fit_temperature(noisy, target.squeeze(1), backbone.weight) != found[0]


@pytest.mark.parametrize("t", [0.5, 3.0])
def test_d13_the_fit_ends_at_the_optimum_and_not_near_its_start(t):
    z, target = calibrated(20_000, 4)
    assert fit_temperature(t * z, target, torch.eye(4)) == pytest.approx(t, rel=0.02)


def test_d14_t_moves_and_lowers_the_nll():
    z, target = calibrated(2000, 4)
    for scale in (0.3, 1.7, 4.0):
        t = fit_temperature(scale * z, target, torch.eye(4))
        assert abs(t - 1) > 0.1
        assert cross_entropy(scale * z / t, target) < cross_entropy(scale * z, target)
