"""What is made of the samples: other estimates, intervals, the noise floor."""

import math

import numpy as np
import pytest
import torch
from test_metrics import CASTS, loop_ece, ragged_rows, rows
from torchmetrics.functional.classification import binary_auroc

from calm_lightning import metrics
from calm_lightning.metrics import (
    ConfidenceECE,
    auroc,
    bin_index,
    bin_sensitivity,
    bootstrap,
    brier_parts,
    classwise_ece,
    confidence_ece,
    cube_root_bins,
    equal_mass_ece,
    noise_floor,
    paired_bootstrap,
    paired_bootstrap_auroc,
    paired_bootstrap_mean,
    risk_coverage_area,
    smooth_ece,
    summary,
)


def samples(n, seed=0, overconfidence=2.0):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(n, generator=generator, dtype=torch.float64)
    correct = torch.rand(n, generator=generator) < truth
    return truth ** (1 / overconfidence), correct


# Kept samples


def test_kept_samples_are_the_rows_and_survive_casts_merging_and_reset():
    probs, target = rows(300, 4)
    confidence, choice = probs.max(-1)
    for cast in CASTS.values():
        metric, other = (ConfidenceECE(keep_samples=True) for _ in range(2))
        for batch in zip(probs[:200].split(64), target[:200].split(64), strict=True):
            metric(*batch)  # forward
            metric = cast(metric)
        other.update(probs[200:], target[200:])
        metric.merge_state(other)
        found = metric.samples()
        assert sorted(found[0].tolist()) == sorted(confidence.double().tolist())  # exact from 2**-8
        assert found[1].sum() == (choice == target).sum()
        assert metric.compute() == confidence_ece(probs, target)
        assert bin_sensitivity(*found, bins=[10])[10] == metric.compute().item()
        metric.reset()
        with pytest.raises(ValueError, match="no predictions"):
            metric.samples()
    assert not hasattr(ConfidenceECE(), "kept")
    with pytest.raises(ValueError, match="keep_samples=True"):
        ConfidenceECE().samples()


# Other estimates of calibration error


def loop_equal_mass(confidence, correct, n_bins):
    pairs = sorted(zip(confidence.tolist(), correct.tolist(), strict=True))
    n_bins = min(n_bins, len(pairs))
    sizes = [len(pairs) // n_bins + (m < len(pairs) % n_bins) for m in range(n_bins)]
    error, start = 0.0, 0
    for size in sizes:
        error += abs(sum(c - r for c, r in pairs[start : start + size]))
        start += size
    assert start == len(pairs)
    return error / len(pairs)


@pytest.mark.parametrize(("n", "n_bins"), [(830, 10), (830, 8), (7, 10), (1, 10), (100, 100)])
def test_d4_equal_mass_bins_hold_every_row(n, n_bins):
    confidence, correct = samples(n)
    expected = loop_equal_mass(confidence, correct, n_bins)
    assert equal_mass_ece(confidence, correct, n_bins) == pytest.approx(expected, abs=1e-12)


def test_equal_mass_ece_of_ties_is_that_of_their_mean_in_any_order():
    confidence = torch.full((100,), 0.75)
    correct = torch.arange(100) < 75
    assert equal_mass_ece(confidence, correct) == pytest.approx(0, abs=1e-12)  # sorted: 1.5 / 4
    assert equal_mass_ece(confidence, correct.roll(31)) == pytest.approx(0, abs=1e-12)


def loop_smooth_ece(confidence, correct, grid=1000):
    """Sums of the Gaussian and its reflections at the middle of each cell; sigma by bisection."""
    c, r = confidence.numpy(), correct.double().numpy()
    t = (np.arange(grid) + 0.5) / grid

    def error(sigma):
        kernel = np.zeros((grid, len(c)))
        for k in range(-2, 3):
            for image in (2 * k + c, 2 * k - c):
                kernel += np.exp(-0.5 * ((t[:, None] - image) / sigma) ** 2)
        kernel /= sigma * math.sqrt(2 * math.pi)
        return np.abs(kernel @ (r - c)).sum() / grid / len(c)

    low, high = 1e-3, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > middle else (low, middle)
    return low


@pytest.mark.parametrize("overconfidence", [0.5, 1.0, 2.0, 8.0])
def test_smooth_ece_agrees_with_a_plain_sum_of_reflected_gaussians(overconfidence):
    pair = samples(150, overconfidence=overconfidence)
    assert smooth_ece(*pair) == pytest.approx(loop_smooth_ece(*pair), abs=1e-4)


def test_smooth_ece_at_its_ends():
    ones, right = torch.ones(10), torch.ones(10).bool()
    assert smooth_ece(ones, right) == pytest.approx(0, abs=1e-12)
    assert smooth_ece(ones, ~right) == pytest.approx(1, abs=1e-9)


def test_sensitivity_is_the_conf_ece_of_each_number_of_bins():
    probs, target = rows(200, 4)
    confidence, choice = probs.max(-1)
    found = bin_sensitivity(confidence, choice == target)
    assert list(found) == list(range(5, 31))
    assert all(v == confidence_ece(probs, target, m).item() for m, v in found.items())
    assert [cube_root_bins(n) for n in (1, 27, 300, 2000)] == [1, 3, 7, 13]


# Brier's parts, risk and coverage


@pytest.mark.parametrize("n_bins", [1, 7, 10, 100])
def test_brier_parts_are_their_definitions_and_add_up(n_bins):
    confidence, correct = samples(400)
    parts = brier_parts(confidence, correct, n_bins)
    total = (confidence - correct.double()).square().mean().item()
    assert parts.reliability - parts.resolution + parts.uncertainty + parts.within == (
        pytest.approx(total, abs=1e-14)
    )
    base, index = correct.double().mean().item(), bin_index(confidence, n_bins)
    reliability = resolution = 0.0
    for m in index.unique():
        inside = index == m
        share, hit = inside.double().mean().item(), correct[inside].double().mean().item()
        reliability += share * (confidence[inside].mean().item() - hit) ** 2
        resolution += share * (hit - base) ** 2
    assert parts[:3] == pytest.approx((reliability, resolution, base * (1 - base)), abs=1e-14)
    in_bin = torch.full((9,), 0.65)
    assert brier_parts(in_bin, torch.arange(9) < 5).within == pytest.approx(0, abs=1e-15)


def test_risk_coverage_area_agrees_with_a_loop_and_averages_over_the_orders_of_ties():
    confidence, correct = samples(200)
    ranked = sorted(zip(confidence.tolist(), correct.tolist(), strict=True), reverse=True)
    risks = [sum(not r for _, r in ranked[:n]) / n for n in range(1, 201)]
    assert risk_coverage_area(confidence, correct) == pytest.approx(np.mean(risks), abs=1e-12)
    tied = torch.tensor([0.5, 0.5, 0.25])
    both = [(1 + 1 / 2 + 1 / 3) / 3, (0 + 1 / 2 + 1 / 3) / 3]  # wrong first, right first
    for right in ([True, False, True], [False, True, True]):
        area = risk_coverage_area(tied, torch.tensor(right))
        assert area == pytest.approx(sum(both) / 2, abs=1e-12)


# Bootstrap


@pytest.mark.parametrize("ragged", [False, True])
def test_bootstrap_agrees_with_a_plain_loop_over_the_public_functions(ragged):
    _, probs, target, n_options, _ = ragged_rows(120, 4)
    if not ragged:
        (probs, target), n_options = rows(120, 4), None
    found = bootstrap(probs, target, n_options, n_resamples=2000)
    value = summary(probs, target, n_options)
    assert {k: v[0] for k, v in found.items()} == {k: value[k] for k in found}
    assert set(value) - set(found) == {"n", "n_bins"}
    generator = np.random.default_rng(1)
    resampled = []
    for _ in range(250):
        draw = torch.from_numpy(generator.integers(120, size=120))
        options = None if n_options is None else n_options[draw]
        resampled.append(summary(probs[draw], target[draw], options))
    for name, (v, low, high) in found.items():
        q = np.quantile([r[name] for r in resampled], [0.025, 0.975])
        if name.endswith("ece"):
            q = math.sqrt(max(0, 2 * v**2 - q[1] ** 2)), max(v, 2 * v - q[0])
        error = 4 * np.std([r[name] for r in resampled]) * math.sqrt(7 / 250)  # of a quantile
        if name.endswith("ece"):
            error *= 3  # the square root stretches it
        assert low == pytest.approx(q[0], abs=error)
        assert high == pytest.approx(q[1], abs=error)
        assert low <= v <= high


@pytest.mark.parametrize(("factor", "truth"), [(1.08, 0.019), (1.9, 0.150)])
def test_bootstrap_intervals_of_the_conf_ece_cover_at_300_rows(factor, truth):
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        z = 1.5 * torch.randn(n, 4, generator=generator)
        target = torch.multinomial(z.softmax(-1), 1, generator=generator).squeeze(1)
        return (factor * z).softmax(-1), target

    true = confidence_ece(*draw(400_000)).item()
    assert true == pytest.approx(truth, abs=0.003)
    held = 0
    for _ in range(80):
        _, low, high = bootstrap(*draw(300), n_resamples=200)["conf_ece"]
        held += low <= true <= high
    assert held >= 0.85 * 80


def test_bootstrap_and_floor_depend_on_the_seed_alone(monkeypatch):
    probs, target = rows(100, 3)
    first, floor = bootstrap(probs, target, seed=3), noise_floor(probs, seed=3)
    torch.manual_seed(1)
    assert bootstrap(probs, target, seed=3) == first
    assert noise_floor(probs, seed=3) == floor
    assert bootstrap(probs, target, seed=4)["nll"] != first["nll"]
    assert noise_floor(probs, seed=4) != floor
    monkeypatch.setattr(metrics.samples, "_CELLS", 1500)  # many small chunks
    for name, interval in bootstrap(probs, target, seed=3).items():
        assert interval == pytest.approx(first[name], abs=1e-9)


def test_bootstrap_of_a_model_that_is_always_right():
    probs, _ = rows(50, 3)
    found = bootstrap(probs, probs.argmax(-1))
    assert found["accuracy"] == (1, 1, 1)
    assert all(math.isnan(x) for x in found["auroc"])


@pytest.mark.parametrize("ragged", [False, True])
def test_floor_is_the_ece_of_answers_drawn_from_the_probabilities(ragged):
    _, probs, _, n_options, mask = ragged_rows(150, 5)
    if not ragged:
        probs, n_options, mask = rows(150, 5)[0], None, None
    found = noise_floor(probs, n_options, n_bins=7)
    generator = torch.Generator().manual_seed(5)
    conf, cw = [], []
    for _ in range(600):
        answer = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        conf.append(confidence_ece(probs, answer, 7).item())
        cw.append(classwise_ece(probs, answer, 7, mask).item())
    for name, values in (("conf_ece", conf), ("cw_ece", cw)):
        error = np.std(values) / math.sqrt(600)
        assert found[name].mean == pytest.approx(np.mean(values), abs=5 * error)
        assert found[name].p95 == pytest.approx(np.quantile(values, 0.95), abs=12 * error)


def test_floor_falls_with_the_root_of_n_and_is_0_for_a_model_that_is_certain():
    probs, _ = rows(400, 4)
    one, four = (noise_floor(probs.repeat(r, 1))["cw_ece"].mean for r in (1, 4))
    assert four == pytest.approx(one / 2, rel=0.05)
    assert noise_floor(torch.tensor([[0.0, 1.0]] * 9))["conf_ece"] == (0, 0)


# Bad input


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.1, math.inf])
@pytest.mark.parametrize(
    "function", [equal_mass_ece, smooth_ece, bin_sensitivity, brier_parts, risk_coverage_area]
)
def test_a_bad_sample_is_named(function, value):
    confidence, correct = samples(9)
    confidence[5] = value
    with pytest.raises(ValueError, match="Row 5 has confidence"):
        function(confidence, correct)
    with pytest.raises(ValueError, match="bool correct"):
        function(confidence, correct.long())
    with pytest.raises(ValueError, match="no predictions"):
        function(confidence[:0], correct[:0])
    with pytest.raises(ValueError, match=r"one run|one shape"):
        function(confidence.repeat(2, 1), correct)


def test_no_bins_and_no_rows_are_errors():
    pair = samples(9)
    for call in (
        lambda: equal_mass_ece(*pair, 0),
        lambda: brier_parts(*pair, 0),
        lambda: bin_sensitivity(*pair, bins=[0]),
        lambda: bootstrap(*rows(9, 3), n_bins=0),
        lambda: noise_floor(rows(9, 3)[0], n_bins=0),
    ):
        with pytest.raises(ValueError, match="n_bins must be at least 1"):
            call()
    empty = torch.zeros(0, 3)
    for call in (lambda: noise_floor(empty), lambda: bootstrap(empty, torch.zeros(0).long())):
        with pytest.raises(ValueError, match="no predictions"):
            call()
    bad = rows(9, 3)[0]
    bad[4, 0] = torch.nan
    with pytest.raises(ValueError, match="Row 4 "):
        noise_floor(bad)
    with pytest.raises(ValueError, match="Row 4 "):
        bootstrap(bad, torch.zeros(9).long())


# Paired bootstrap


def answers(n, seeds, overconfidence, seed):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(seeds, n, generator=generator)
    right = torch.rand(seeds, n, generator=generator) < truth
    return truth ** (1 / overconfidence), right


@pytest.mark.parametrize("seeds", [1, 3])
def test_bootstrap_difference_is_the_difference_of_the_means_over_seeds(seeds):
    a, b = answers(400, seeds, 2.0, 0), answers(400, 2, 1.0, 1)

    def mean_ece(confidence, right):
        return sum(
            loop_ece(list(zip(c.double().tolist(), r.tolist(), strict=True)), 10)
            for c, r in zip(confidence, right, strict=True)
        ) / len(right)

    difference, low, high = paired_bootstrap(a, b)
    assert difference == pytest.approx(mean_ece(*a) - mean_ece(*b), abs=1e-12)
    assert 0 < low < high  # a is clearly worse
    reverse = paired_bootstrap(b, a)
    assert reverse == pytest.approx((-difference, -high, -low), abs=1e-12)


def test_bootstrap_of_equal_models_contains_zero():
    a, b = answers(600, 3, 1.5, 0), answers(600, 3, 1.5, 1)
    _, low, high = paired_bootstrap(a, b)
    assert low < 0 < high
    assert paired_bootstrap(a, a) == (0, 0, 0)


def test_bootstrap_resamples_questions_for_both_models_together():
    # b is a, shifted by 0.01 within the bin: the difference hardly varies, unless unpaired.
    confidence = torch.full((200,), 0.85)
    right = torch.arange(200) % 2 == 0
    difference, low, high = paired_bootstrap((confidence + 0.01, right), (confidence, right))
    assert difference == pytest.approx(0.01, abs=1e-6)
    assert high - low < 1e-6
    _, low, high = paired_bootstrap((confidence, right.roll(1)), (confidence, right))
    assert high - low > 0.1


def test_bootstrap_interval_agrees_with_a_plain_resampling_loop():
    a, b = answers(150, 2, 3.0, 0), answers(150, 1, 1.0, 1)
    generator = np.random.default_rng(0)
    gaps = [(m[1].double() - m[0].double()).numpy() for m in (a, b)]
    bins = [bin_index(m[0], 10).numpy() for m in (a, b)]
    differences = []
    for _ in range(2000):
        draw = generator.integers(150, size=150)
        eces = [
            np.mean(
                [
                    np.abs(np.bincount(k[draw], g[draw])).sum() / 150
                    for g, k in zip(gap, index, strict=True)
                ]
            )
            for gap, index in zip(gaps, bins, strict=True)
        ]
        differences.append(eces[0] - eces[1])
    expected = np.quantile(differences, [0.025, 0.975])
    assert paired_bootstrap(a, b)[1:] == pytest.approx(tuple(expected), abs=0.01)


def test_paired_bootstrap_depends_on_the_seed_alone(monkeypatch):
    a, b = answers(100, 2, 2.0, 0), answers(100, 2, 1.0, 1)
    first = paired_bootstrap(a, b, seed=7)
    torch.manual_seed(123)
    assert paired_bootstrap(a, b, seed=7) == first
    assert paired_bootstrap(a, b, seed=8)[1:] != first[1:]
    monkeypatch.setattr(metrics.samples, "_CELLS", 1500)  # many small chunks
    assert paired_bootstrap(a, b, seed=7) == pytest.approx(first, abs=1e-12)


def test_bootstrap_auroc_agrees_with_a_plain_resampling_loop():
    (a, b), generator = (answers(150, 2, 3.0, 0), answers(150, 1, 1.0, 1)), torch.Generator()

    def area(scored, draw):
        pairs = zip(*scored, strict=True)
        return np.mean([binary_auroc(c[draw], r[draw].long()).item() for c, r in pairs])

    whole = torch.arange(150)
    value, low, high = paired_bootstrap_auroc(a, b)
    assert value == pytest.approx(area(a, whole) - area(b, whole), abs=1e-6)
    draws = torch.randint(150, (500, 150), generator=generator.manual_seed(1))
    expected = np.quantile([area(a, d) - area(b, d) for d in draws], [0.025, 0.975])
    assert (low, high) == pytest.approx(tuple(expected), abs=0.02)
    assert paired_bootstrap_auroc(a, a) == (0, 0, 0)
    two = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.625, 0.375]]), torch.tensor([0, 0, 1])
    pair = two[0].max(-1).values, two[0].argmax(-1) == two[1]
    against_none = paired_bootstrap_auroc(pair, (torch.full((3,), 0.5), pair[1]))
    assert against_none[0] == auroc(*two).item() - 0.5


def test_bootstrap_mean():
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(2, 400, generator=generator)
    a = b.mean(0) + 0.1 * torch.randn(400, generator=generator) + 0.05
    difference, low, high = paired_bootstrap_mean(a, b)
    assert difference == pytest.approx((a.mean() - b.mean()).item(), abs=1e-6)
    assert 0 < low < difference < high
    error = (a - b.mean(0)).std().item() / 20  # normal theory of the paired difference
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_bootstrap_bad_input():
    confidence, right = torch.rand(2, 10), torch.ones(2, 10).bool()
    good = confidence, right
    for bad in (
        (confidence * 100, right),
        (confidence, right.long()),
        (confidence, right[:1]),
        (confidence * torch.nan, right),
        (-confidence, right),
    ):
        with pytest.raises(ValueError, match="bool correct"):
            paired_bootstrap(good, bad)
    with pytest.raises(ValueError, match="same questions, not of 10 and 9"):
        paired_bootstrap(good, (confidence[:, :9], right[:, :9]))
    with pytest.raises(ValueError, match="finite values"):
        paired_bootstrap_mean(confidence, confidence.masked_fill(confidence > 0.5, torch.nan))
