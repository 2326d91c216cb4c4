"""Agreement with other implementations, and properties that hold for any input."""

import itertools

import netcal.metrics
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_metrics import loop_conf_ece, loop_cw_ece, loop_ece
from torchmetrics.functional.classification import binary_calibration_error
from torchmetrics.functional.classification import multiclass_calibration_error as tm_ece

from calm_lightning.metrics import (
    MCE,
    RMSCE,
    ClasswiseECE,
    ConfidenceECE,
    TokenECE,
    bin_index,
    classwise_ece,
    confidence_ece,
    debiased_squared_ece,
    equal_mass_ece,
    max_calibration_error,
    risk_coverage_area,
    rms_calibration_error,
    smooth_ece,
)


def marginal_definition(probs, target, n_bins):
    """p-lambda/verified_calibration, marginal, p = 1: bins (low, high], mean over classes."""
    total = 0.0
    for k in range(probs.shape[1]):
        values = [(p, t == k) for p, t in zip(probs[:, k].tolist(), target.tolist(), strict=True)]
        for m in range(n_bins):
            inside = [(p, y) for p, y in values if m / n_bins < p <= (m + 1) / n_bins]
            total += abs(sum(p - y for p, y in inside)) / len(values)
    return total / probs.shape[1]


def test_1000_random_cases_agree_with_torchmetrics_netcal_and_plain_loops():
    generator, seen = torch.Generator().manual_seed(0), set()
    for case in range(1000):
        k, m = 2 + case % 9, 5 + case // 9 % 26
        n = 20 + case % 31
        logits = 3 * torch.rand(1, generator=generator) * torch.randn(n, k, generator=generator)
        probs = logits.softmax(-1)
        edges = torch.arange(m + 1) / m  # peers differ there: see the tests of our rule
        keep = ((probs.unsqueeze(-1) - edges).abs() > 1e-6).flatten(1).all(-1)
        probs = probs[keep]
        target = torch.multinomial(probs.sqrt(), 1, generator=generator).squeeze(1)
        conf, cw = (f(probs, target, m).item() for f in (confidence_ece, classwise_ece))
        assert conf == pytest.approx(loop_conf_ece(probs, target, m), abs=1e-9)
        assert conf == pytest.approx(tm_ece(probs, target, k, m).item(), abs=1e-6)
        # netcal takes two classes for P(y = 1) against y (D7): give it what it should bin
        pair = probs.max(-1).values, probs.argmax(-1) == target
        given_ = pair if k == 2 else (probs, target)
        peer = netcal.metrics.ECE(m).measure(given_[0].double().numpy(), given_[1].long().numpy())
        assert conf == pytest.approx(peer, abs=1e-6)
        assert cw == pytest.approx(marginal_definition(probs, target, m), abs=1e-9)
        by_class = [
            binary_calibration_error(probs[:, c].contiguous(), target == c, m) for c in range(k)
        ]
        assert cw == pytest.approx(torch.stack(by_class).mean().item(), abs=1e-6)
        seen.add((k, m))
    assert seen == set(itertools.product(range(2, 11), range(5, 31)))


@pytest.mark.parametrize("n_bins", [5, 12, 30])
def test_mce_and_rmsce_agree_with_torchmetrics_and_the_debiased_square_with_a_loop(n_bins):
    generator = torch.Generator().manual_seed(n_bins)
    probs = (2 * torch.randn(90, 3, generator=generator)).softmax(-1)
    target = torch.randint(3, (90,), generator=generator)
    mce, rmsce = MCE(n_bins), RMSCE(n_bins)
    for metric, norm in ((mce, "max"), (rmsce, "l2")):
        metric.update(probs, target)
        peer = tm_ece(probs, target, 3, n_bins, norm=norm).item()
        assert metric.compute().item() == pytest.approx(peer, abs=1e-6)
    r = mce.reliability()
    expected = 0.0
    for m in range(n_bins):
        n = r.count[m].item()
        if n > 1:
            p, gap = r.accuracy[m].item(), (r.accuracy[m] - r.confidence[m]).item()
            expected += n / 90 * (gap**2 - p * (1 - p) / (n - 1))
    assert debiased_squared_ece(r).item() == pytest.approx(expected, abs=1e-12)
    assert (r.count == 1).any() or n_bins < 30  # the guard was needed


def test_readings_of_a_class_without_rows_are_nan_and_of_one_row_finite():
    metric = ClasswiseECE(3)
    mask = torch.tensor([[True, True, False]])
    metric.update(torch.tensor([[0.75, 0.25, 0.0]]), torch.tensor([0]), mask)
    r = metric.reliability()
    for f in (max_calibration_error, rms_calibration_error):
        assert f(r)[:2].tolist() == [0.25, 0.25]
        assert f(r)[2].isnan()
    assert debiased_squared_ece(r)[:2].tolist() == [0, 0]
    assert debiased_squared_ece(r)[2].isnan()


def test_the_debiased_square_of_a_calibrated_model_is_0_on_average_and_the_plug_in_is_not():
    generator = torch.Generator().manual_seed(0)
    plug_in, debiased = [], []
    for _ in range(400):
        p = 0.5 + 0.5 * torch.rand(200, generator=generator)
        right = torch.rand(200, generator=generator) < p
        metric = ConfidenceECE()
        metric.update(torch.stack([p, 1 - p], 1), (~right).long())
        plug_in.append(rms_calibration_error(metric.reliability()) ** 2)
        debiased.append(debiased_squared_ece(metric.reliability()))
    plug_in, debiased = torch.stack(plug_in), torch.stack(debiased)
    error = debiased.std().item() / 20
    assert abs(debiased.mean().item()) < 3 * error
    assert plug_in.mean().item() > 10 * error


def test_wilson_band_solves_its_equation():
    metric = ConfidenceECE(n_bins=4)
    metric.update(
        torch.tensor([[0.9, 0.1]] * 8 + [[0.6, 0.4]] * 5), torch.tensor([0] * 10 + [1] * 3)
    )
    r = metric.reliability()
    low, high = r.wilson(z=2.0)
    assert low[:2].isnan().all()
    assert high[:2].isnan().all()
    for end in (low, high):  # |accuracy - p| = z sqrt(p (1 - p) / n) at both ends
        p, n = end[2:], r.count[2:]
        torch.testing.assert_close(
            (r.accuracy[2:] - p).abs(), 2 * (p * (1 - p) / n).clamp(min=0).sqrt()
        )
    assert (low[2:] < high[2:]).all()
    assert r.accuracy[3] == 1
    assert high[3].item() == pytest.approx(1)  # within [0, 1], and of some width


# The edges


@pytest.mark.parametrize("n_bins", range(5, 31))
def test_bins_are_bucketize_on_float32_edges_at_every_neighbour_of_every_edge(n_bins):
    edges = np.float32(np.arange(n_bins + 1) / n_bins)
    near = [edges]
    for way in (np.float32(-1), np.float32(2)):
        step = edges
        for _ in range(4):
            step = np.nextafter(step, way)
            near.append(step)
    halves = torch.arange(2**14 - 2**10 + 1, dtype=torch.int16)  # float16 from 0 to 1
    grid = torch.cat(
        [
            torch.from_numpy(np.concatenate(near)).clamp(0, 1),
            halves.view(torch.float16).float(),
            torch.arange(2**7 * 127 + 1, dtype=torch.int16).view(torch.bfloat16).float(),
            torch.rand(10_000, generator=torch.Generator().manual_seed(n_bins)),
        ]
    )
    expected = torch.bucketize(grid, torch.from_numpy(edges[1:-1]), right=True)
    assert torch.equal(bin_index(grid, n_bins), expected)
    ours = bin_index(torch.from_numpy(edges), n_bins).tolist()
    assert ours == [min(k, n_bins - 1) for k in range(n_bins + 1)]


def test_peers_known_differences_on_the_edges():
    p = torch.tensor([0.6, 0.7, 0.8])
    probs, target = torch.stack([p, 1 - p], 1), torch.tensor([0, 1, 0])
    ours = confidence_ece(probs, target)
    assert ours.item() == pytest.approx((0.4 + 0.7 + 0.2) / 3, abs=1e-7)  # three bins
    one = torch.tensor([[0.05, 0.95], [0.0, 1.0]]), torch.tensor([1, 0])
    assert tm_ece(*one, 2, 10).item() == pytest.approx(0.525, abs=1e-6)  # torchmetrics#3510
    assert confidence_ece(*one).item() == pytest.approx(0.475, abs=1e-8)
    peer = netcal.metrics.ECE(10).measure(one[0].numpy(), one[1].numpy())
    assert peer == pytest.approx(0.475, abs=1e-6)


# Any input


@st.composite
def answers(draw):
    """Probabilities k/n, many of them on edges and tied, and targets."""
    k, n = draw(st.integers(2, 5)), draw(st.integers(1, 25))
    weight = st.lists(st.integers(0, 10), min_size=k, max_size=k).filter(any)
    weights = torch.tensor(draw(st.lists(weight, min_size=n, max_size=n))).float()
    target = torch.tensor(draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)))
    return weights / weights.sum(-1, keepdim=True), target


tried = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@tried
@given(answers(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_any_order_batching_and_merging_gives_the_same_state(data, n_bins, random):
    probs, target = data
    order = list(range(len(probs)))
    random.shuffle(order)
    probs_, target_ = probs[order], target[order]
    size, cut = random.randint(1, len(order)), random.randint(0, len(order))
    for new in (
        lambda: ConfidenceECE(n_bins, keep_samples=True),
        lambda: ClasswiseECE(probs.shape[1], n_bins),
    ):
        whole, batched, first, second = (new() for _ in range(4))
        whole.update(probs, target)
        for batch in zip(probs_.split(size), target_.split(size), strict=True):
            batched.update(*batch)
        first.update(probs_[:cut], target_[:cut])
        second.update(probs_[cut:], target_[cut:])
        first.merge_state(second)
        for other in (batched, first):
            assert torch.equal(other.bins, whole.bins)
            assert other.compute() == whole.compute()
        assert 0 <= whole.compute() <= 1
        assert (whole.reliability().count.sum(-1) == len(probs)).all()
        if isinstance(whole, ConfidenceECE):
            one, two = (
                torch.stack([m.samples()[0], m.samples()[1].double()]) for m in (whole, first)
            )
            assert sorted(one.T.tolist()) == sorted(two.T.tolist())


@tried
@given(answers(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_values_of_samples_lie_in_0_1_and_do_not_depend_on_order(data, n_bins, random):
    probs, target = data
    confidence, choice = probs.max(-1)
    correct = choice == target
    order = list(range(len(probs)))
    random.shuffle(order)
    for f in (lambda c, r: equal_mass_ece(c, r, n_bins), smooth_ece, risk_coverage_area):
        value = f(confidence, correct)
        assert -1e-12 <= value <= 1 + 1e-9
        assert f(confidence[order], correct[order]) == pytest.approx(value, abs=1e-9)


@tried
@given(answers(), st.integers(1, 30))
def test_both_eces_equal_the_plain_loops_on_the_edges_too(data, n_bins):
    conf, cw = (f(*data, n_bins).item() for f in (confidence_ece, classwise_ece))
    assert conf == pytest.approx(loop_conf_ece(*data, n_bins), abs=1e-9)
    assert cw == pytest.approx(loop_cw_ece(*data, n_bins), abs=1e-9)


# Tokens


def test_token_ece_is_the_conf_ece_of_the_counted_positions():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 20, 50, generator=generator)
    labels = torch.randint(50, (3, 20), generator=generator)
    labels[torch.rand(3, 20, generator=generator) < 0.4] = -100
    tokens, flat = TokenECE(15), TokenECE(15)
    tokens.update(logits, labels)
    flat.update(logits.flatten(0, 1), labels.flatten())
    counted = labels != -100
    plain = ConfidenceECE(15)
    plain.update_logits(logits[counted], labels[counted])
    assert torch.equal(tokens.bins, plain.bins)
    assert torch.equal(flat.bins, plain.bins)
    confidence, choice = logits[counted].softmax(-1).max(-1)
    right = (choice == labels[counted]).tolist()
    expected = loop_ece(list(zip(confidence.double().tolist(), right, strict=True)), 15)
    assert tokens.compute().item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_ece_over_a_large_vocabulary_goes_by_chunks_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(200, 50_000, generator=generator)).to(dtype)  # 3 chunks
    labels = logits.argmax(-1)
    labels[::3] = 7
    tokens = TokenECE()
    tokens.update(logits, labels)
    plain = ConfidenceECE()
    plain.update_logits(logits, labels)
    assert torch.equal(tokens.bins, plain.bins)


def test_token_ece_names_a_bad_position_and_adds_nothing():
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3).long()
    metric = TokenECE()
    metric.update(logits, labels - 100)  # nothing is counted
    assert not metric.bins.any()
    metric.update(logits.masked_fill(torch.arange(5) > 2, -torch.inf), labels)  # banned tokens
    before = metric.bins.clone()
    for place, value in ((0, torch.nan), (0, torch.inf)):
        broken = logits.clone()
        broken[1, 2, place] = value
        with pytest.raises(ValueError, match=r"Position \(1, 2\)"):
            metric.update(broken, labels)
        ignored = labels.clone()
        ignored[1, 2] = -100
        TokenECE().update(broken, ignored)
    for label in (5, -1):
        wrong = labels.clone()
        wrong[0, 1] = label
        with pytest.raises(ValueError, match=rf"Position \(0, 1\) \(label {label}\).*0\.\.4"):
            metric.update(logits, wrong)
    with pytest.raises(ValueError, match="integer labels"):
        metric.update(logits, labels[:, :2])
    with pytest.raises(ValueError, match="integer labels"):
        metric.update(logits, labels.float())
    assert torch.equal(metric.bins, before)
