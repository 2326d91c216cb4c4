import math

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.functional.classification import multiclass_calibration_error as tm_ece

from calm_lightning.metrics import (
    ClasswiseECE,
    ConfidenceECE,
    auroc,
    bin_index,
    classwise_ece,
    confidence_ece,
    row_scores,
    summary,
)

UPDATE_FIRST = "ignore:The ``compute`` method of metric:UserWarning"  # torchmetrics' own hint


def rows(n, k, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    probs = (scale * torch.randn(n, k, generator=generator)).softmax(-1)
    return probs, torch.multinomial(probs.sqrt(), 1, generator=generator).squeeze(1)


def ragged_rows(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n_options = torch.randint(2, k + 1, (n,), generator=generator)
    mask = torch.arange(k) < n_options[:, None]
    logits = 2 * torch.randn(n, k, generator=generator)
    probs = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    target = torch.multinomial(probs.sqrt(), 1, generator=generator).squeeze(1)
    return logits, probs, target, n_options, mask


def loop_ece(pairs, n_bins):
    """Eq. 13 to the letter, in float64, one row at a time; pairs of (confidence, right)."""
    bins = [[] for _ in range(n_bins)]
    for confidence, right in pairs:
        edges = [np.float32(k / n_bins) for k in range(1, n_bins)]
        bins[sum(edge <= np.float32(confidence) for edge in edges)].append((confidence, right))
    error = 0.0
    for members in filter(None, bins):
        conf = sum(c for c, _ in members) / len(members)
        acc = sum(r for _, r in members) / len(members)
        error += len(members) / len(pairs) * abs(acc - conf)
    return error


def loop_conf_ece(probs, target, n_bins):
    probs = probs.double().tolist()
    pairs = [(max(p), p.index(max(p)) == t) for p, t in zip(probs, target.tolist(), strict=True)]
    return loop_ece(pairs, n_bins)


def loop_cw_ece(probs, target, n_bins, n_options=None):
    n_options = [probs.shape[1]] * len(probs) if n_options is None else n_options.tolist()
    triples = list(zip(probs.double().tolist(), target.tolist(), n_options, strict=True))
    errors = []
    for k in range(probs.shape[1]):
        pairs = [(p[k], t == k) for p, t, options in triples if k < options]
        if pairs:
            errors.append(loop_ece(pairs, n_bins))
    return sum(errors) / len(errors)


def test_float64_input_keeps_its_precision():
    probs, target = rows(500, 4)
    probs = probs.double() / probs.double().sum(-1, keepdim=True)
    assert abs(confidence_ece(probs, target).item() - loop_conf_ece(probs, target, 10)) < 2**-32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_edge_belongs_to_the_bin_above_and_one_to_the_last(dtype):
    confidence = torch.tensor([0.0, 0.1, 0.3, 0.6, 0.7, 0.9, 1.0], dtype=dtype)
    assert bin_index(confidence, 10).tolist() == [0, 1, 3, 6, 7, 9, 9]
    below = torch.nextafter(confidence[1:6].float(), torch.tensor(0.0))
    assert bin_index(below, 10).tolist() == [0, 2, 5, 6, 8]


def test_frequencies_follow_the_integer_rule():
    for n in range(1, 51):
        for m in range(1, 31):
            expected = [min(k * m // n, m - 1) for k in range(n + 1)]
            assert bin_index(torch.arange(n + 1) / n, m).tolist() == expected
    assert bin_index(torch.arange(21) / 20, 10).tolist() == [k // 2 for k in range(20)] + [9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: confidence_ece(*rows(3, 2), n_bins=0),
        lambda: ConfidenceECE(0),
        lambda: ClasswiseECE(4, n_bins=-1),
    ],
)
def test_no_bins_is_an_error(make):
    with pytest.raises(ValueError, match="n_bins"):
        make()


# D1 to D10: public bug reports against other libraries (reference/metrics.md).


def test_d1_confidence_one_is_in_the_last_bin():
    probs, target = torch.tensor([[0.05, 0.95], [0.0, 1.0]]), torch.tensor([1, 0])
    metric = ConfidenceECE()
    metric.update(probs, target)
    assert metric.compute().item() == pytest.approx(0.475, abs=1e-8)
    assert metric.reliability().count.tolist() == [0] * 9 + [2]
    assert tm_ece(probs, target, 2, 10).item() == pytest.approx(0.525, abs=1e-6)  # the known fault


def test_d2_confidence_zero_is_in_the_first_bin():
    p, y = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 1])
    metric = ClasswiseECE(2, n_bins=2)
    metric.update(torch.stack([1 - p, p], dim=1), y)
    assert metric.reliability().ece.tolist() == pytest.approx([0.6, 0.6])
    assert metric.reliability().count.tolist() == [[4, 1], [1, 4]]


def test_d3_logits_within_0_and_1_are_logits_in_every_batch():
    logits = torch.tensor([[0.9, 0.1, 0.2, 0.0], [0.3, 0.6, 0.1, 0.0], [5.0, 0.0, 0.0, 0.0]])
    target = torch.tensor([0, 0, 0])
    at_once, one_by_one = ConfidenceECE(), ConfidenceECE()
    at_once.update_logits(logits, target)
    for i in range(3):
        one_by_one.update_logits(logits[i : i + 1], target[i : i + 1])
    assert at_once.compute() == one_by_one.compute() == confidence_ece(logits.softmax(-1), target)
    with pytest.raises(ValueError, match="logits to update_logits"):
        at_once.update(logits[:2], target[:2])


def test_d4_every_row_counts_with_fewer_rows_than_bins_and_with_830():
    for n in (1, 3, 830):
        metric = ConfidenceECE(n_bins=100)
        metric.update(*rows(n, 4))
        assert metric.reliability().count.sum() == n
        expected = loop_conf_ece(*rows(n, 4), 100)
        assert metric.compute().item() == pytest.approx(expected, abs=1e-9)


def test_d5_mean_confidence_of_the_bin_and_not_its_middle():
    probs = torch.tensor([[0.99, 0.01]]).repeat(50, 1)
    assert confidence_ece(probs, torch.zeros(50).long()).item() == pytest.approx(0.01, abs=1e-8)


def test_d6_a_class_absent_from_the_targets_still_counts():
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    assert classwise_ece(probs, torch.tensor([0, 0])).item() == (0.375 + 0.375) / 2


def test_d7_two_columns_are_top_label():
    probs = torch.tensor([[0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
    target = torch.tensor([0, 1, 0])
    expected = (0.2 + 0.3 + 0.6) / 3
    assert confidence_ece(probs, target).item() == pytest.approx(expected, abs=1e-7)


def test_d8_every_class_keeps_its_own_error():
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.75, 0.25, 0.0]])
    metric = ClasswiseECE(3)
    metric.update(probs, torch.tensor([0, 1, 2, 0]))
    assert metric.reliability().ece.tolist() == [0.0625, 0.0625, 0.0]


CASTS = {
    "half": lambda m: m.half(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to float16": lambda m: m.to(torch.float16),
    "set_dtype": lambda m: m.set_dtype(torch.float16),
    "type of a parent": lambda m: torch.nn.ModuleList([m]).type(torch.float16)[0],
    "half of a parent": lambda m: torch.nn.ModuleList([m]).half()[0],
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("new", [ConfidenceECE, lambda: ClasswiseECE(4)])
def test_d9_casting_changes_nothing(cast, new):
    probs, target = rows(2100, 4)
    plain, metric = new(), cast(new())
    plain.update(probs, target)
    for batch in zip(probs.split(300), target.split(300), strict=True):
        metric.update(*batch)
        metric.compute()  # a cached value would be cast next
        metric = cast(metric)
    assert metric.bins.dtype == torch.int64
    assert torch.equal(metric.bins, plain.bins)
    assert metric.compute().dtype == torch.float64
    assert metric.compute() == plain.compute()
    metric.reset()
    assert metric.bins.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_d9_half_precision_probabilities_are_counted_exactly(dtype):
    probs, target = rows(3000, 4)
    probs = probs.to(dtype)
    metric = ConfidenceECE(n_bins=1)
    metric.update(probs, target)
    assert metric.reliability().count.item() == 3000
    expected = loop_conf_ece(probs, target, 1)
    assert metric.compute().item() == pytest.approx(expected, abs=1e-9)
    logits = torch.tensor([[3.0, 0.0, 0.0, 0.0]], dtype=dtype)
    metric = ConfidenceECE()
    metric.update_logits(logits, torch.tensor([0]))
    softmax = logits.float().softmax(-1)[0, 0].double()  # not in half precision
    assert abs(metric.reliability().mean_confidence - softmax) <= 2**-33


@pytest.mark.filterwarnings(UPDATE_FIRST)
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (0, 8)])
def test_d10_ragged_and_empty_processes_add_up(sizes):
    for new in (ConfidenceECE, lambda: ClasswiseECE(4)):
        whole, first, second = new(), new(), new()
        probs, target = rows(8, 4)
        whole.update(probs, target)
        for metric, p, t in zip(
            (first, second), probs.split(sizes), target.split(sizes), strict=True
        ):
            if len(p):
                metric.update(p, t)
        first.merge_state(second)
        assert torch.equal(first.bins, whole.bins)
        assert first.compute() == whole.compute()


def test_a_batch_without_rows_adds_nothing():
    for metric in (ConfidenceECE(), ClasswiseECE(4)):
        metric.update(*rows(8, 4))
        before = metric.compute()
        metric.update(torch.zeros(0, 4), torch.zeros(0).long())
        assert metric.compute() == before


@pytest.mark.filterwarnings(UPDATE_FIRST)
def test_compute_and_reliability_see_all_processes():
    def gather(state, group=None):
        return [
            state,
            2 * state,
            torch.zeros_like(state),
        ]  # this process, a busier one, an idle one

    metric = ClasswiseECE(4, dist_sync_fn=gather, distributed_available_fn=lambda: True)
    metric.update(*rows(10, 4))
    assert metric.reliability().count.sum(-1).tolist() == [30] * 4
    assert metric.reliability(total=True).count.sum() == 120
    assert metric.compute() == classwise_ece(*rows(10, 4))
    assert metric.bins[0].sum() == 40  # its own rows again


# Exactness


def test_order_batching_and_merging_change_nothing():
    probs, target = rows(1000, 4)
    for new in (ConfidenceECE, lambda: ClasswiseECE(4)):
        whole = new()
        whole.update(probs, target)
        for seed, size in enumerate((1000, 333, 64, 7)):
            order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
            parts = [new() for _ in range(3)]
            for i, batch in enumerate(order.split(size)):
                parts[i % 3].update(probs[batch], target[batch])
            bins = sum(m.bins for m in parts)
            assert torch.equal(bins, whole.bins)
            part = new()
            for batch in order.split(size):
                part(probs[batch], target[batch])  # forward
            assert part.compute() == whole.compute()


def test_exact_past_2_to_the_24_rows():
    half = torch.full((1 << 20, 2), 0.5)
    target = torch.arange(1 << 20) % 2
    metric = ConfidenceECE()
    for _ in range(17):  # float32 sums stall after 16
        metric.update(half, target)
    metric.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    n = 17 * (1 << 20) + 1
    bins = metric.reliability()
    assert bins.count.tolist() == [0] * 5 + [n] + [0] * 4
    assert bins.correct[5] == (n + 1) / 2
    assert bins.confidence_sum[5] == n / 2
    assert metric.compute() == 0.5 / n


def test_a_sum_that_could_overflow_is_an_error():
    metric = ConfidenceECE()
    metric.update(*rows(4, 4))
    metric.bins[0, 9] = 2**30
    metric.bins[1, 9] = 2**29
    metric.bins[2, 9] = 2**62
    assert metric.compute().item() == pytest.approx(0.5)
    metric.bins[0, 9] += 1
    for read in (metric.compute, metric.reliability):
        with pytest.raises(ValueError, match="overflow"):
            read()


def test_reset_under_inference_mode_then_update():
    metric = ConfidenceECE()
    with torch.inference_mode():
        metric.update(*rows(5, 3))
        metric.reset()
    metric.update(*rows(5, 3))
    assert metric.compute() == confidence_ece(*rows(5, 3))


def test_reliability_of_the_bins():
    probs, target = rows(400, 3)
    metric = ConfidenceECE(n_bins=20)
    metric.update(probs, target)
    bins = metric.reliability()
    confidence, choice = probs.double().max(-1)
    right = (choice == target).double()
    for m in range(20):
        inside = (confidence >= bins.low[m]) & (confidence < bins.high[m])
        assert bins.count[m] == inside.sum()
        torch.testing.assert_close(
            bins.confidence[m], confidence[inside].mean(), equal_nan=True, rtol=0, atol=1e-9
        )
        torch.testing.assert_close(bins.accuracy[m], right[inside].mean(), equal_nan=True)
    assert bins.confidence[0].isnan()  # three options: never below 1/3
    assert bins.mean_confidence.item() == pytest.approx(confidence.mean().item(), abs=1e-9)
    assert bins.mean_accuracy == right.mean()
    assert bins.ece == metric.compute()
    assert bins.low[0] == 0
    assert bins.high[-1] == 1


# Rows with fewer options


def test_masked_options_are_not_counted():
    logits, probs, target, n_options, mask = ragged_rows(300, 5)
    expected = loop_cw_ece(probs, target, 10, n_options)
    value = classwise_ece(probs, target, mask=mask)
    assert value.item() == pytest.approx(expected, abs=1e-9)
    assert abs(value - classwise_ece(probs, target)) > 1e-3  # counting the padding would show
    from_probs, from_logits, top = ClasswiseECE(5), ClasswiseECE(5), ConfidenceECE()
    from_probs.update(probs, target, mask)
    from_logits.update_logits(logits, target, mask)
    top.update_logits(logits, target, mask)
    assert from_probs.compute() == from_logits.compute() == value
    assert top.compute() == confidence_ece(probs, target)
    assert from_probs.reliability().count.sum(-1).tolist() == mask.sum(0).tolist()
    total = from_probs.reliability(total=True)
    assert total.count.sum() == n_options.sum()
    assert total.mean_accuracy.item() == pytest.approx(300 / n_options.sum().item())


def test_a_class_that_no_row_has_is_left_out():
    probs, target = rows(50, 3)
    padded = torch.nn.functional.pad(probs, (0, 1))
    mask = padded.new_ones(50, 4, dtype=torch.bool)
    mask[:, 3] = False
    metric = ClasswiseECE(4)
    metric.update(padded, target, mask)
    assert metric.compute() == classwise_ece(probs, target)
    assert metric.reliability().ece[3].isnan()


# Bad input


def broken(row, values, target=0):
    probs, y = rows(6, 3)
    probs[row], y[row] = torch.tensor(values), target
    return probs, y


@pytest.mark.parametrize(
    ("values", "target", "reason"),
    [
        ([math.nan, 0.5, 0.5], 0, "NaN or Inf"),
        ([math.inf, 0.0, 0.0], 0, "NaN or Inf"),
        ([1.2, -0.1, -0.1], 0, ">= 0"),
        ([0.5, 0.3, 0.198], 0, "sum to 1 within 0.001"),
        ([0.5, 0.3, 0.2], 3, r"0\.\.2"),
        ([0.5, 0.3, 0.2], -1, r"0\.\.2"),
    ],
)
@pytest.mark.parametrize("function", [confidence_ece, classwise_ece, row_scores, summary])
def test_a_bad_row_is_named(function, values, target, reason):
    with pytest.raises(ValueError, match=f"Row 4 .*{reason}"):
        function(*broken(4, values, target))


@pytest.mark.parametrize("new", [ConfidenceECE, lambda: ClasswiseECE(3)])
def test_rows_are_counted_since_reset_and_a_bad_batch_adds_nothing(new):
    metric = new()
    metric.update(*rows(100, 3))
    before = metric.compute()
    with pytest.raises(ValueError, match="Row 104 "):
        metric.update(*broken(4, [0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match=r"Row 101 .*NaN or Inf"):
        metric.update_logits(*broken(1, [0.5, math.nan, 0.5]))
    assert metric.compute() == before
    metric.reset()
    with pytest.raises(ValueError, match="Row 4 "):
        metric.update(*broken(4, [0.5, 0.5, 0.5]))


def test_the_first_of_several_bad_rows_is_named():
    probs, target = broken(5, [math.nan, 0.5, 0.5])
    probs[2] = torch.tensor([0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match=r"Row 2 .*sum to 1"):
        confidence_ece(probs, target)


def test_a_sum_one_float32_step_beyond_the_tolerance_is_named():
    probs = torch.tensor([[0.50100005, 0.5]])  # above 1.001 as Python compares, equal in float32
    assert probs.sum() == torch.tensor(1.001)
    assert probs.sum().item() > 1.001
    with pytest.raises(ValueError, match=r"Row 0 .*sum to 1"):
        confidence_ece(probs, torch.tensor([0]))


@pytest.mark.parametrize(
    ("mask_row", "probs_row", "target"),
    [
        ([True, True, False], [0.5, 0.25, 0.25], 0),  # probability on a missing option
        ([True, True, False], [0.75, 0.25, 0.0], 2),  # target is a missing option
        ([True, False, False], [1.0, 0.0, 0.0], 0),  # one option
    ],
)
def test_a_row_that_contradicts_its_mask_is_named(mask_row, probs_row, target):
    probs, y = broken(3, probs_row, target)
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[3] = torch.tensor(mask_row)
    with pytest.raises(ValueError, match=r"Row 3 .*mask must keep"):
        classwise_ece(probs, y, mask=mask)


@pytest.mark.parametrize(
    ("probs", "target"),
    [
        (torch.ones(3, 1), torch.zeros(3).long()),
        (torch.ones(3), torch.zeros(3).long()),
        (torch.ones(3, 2, 2) / 2, torch.zeros(3).long()),
        (torch.ones(3, 2).long(), torch.zeros(3).long()),
        (torch.ones(3, 2) / 2, torch.zeros(4).long()),
        (torch.ones(3, 2) / 2, torch.zeros(3, 1).long()),
        (torch.ones(3, 2) / 2, torch.zeros(3)),
        (torch.ones(3, 2) / 2, torch.zeros(3).bool()),
    ],
)
def test_wrong_shapes_and_dtypes(probs, target):
    for call in (confidence_ece, classwise_ece, row_scores, summary, ConfidenceECE().update):
        with pytest.raises(ValueError, match=r"K >= 2.*integer target"):
            call(probs, target)


def test_wrong_mask_number_of_classes_and_number_of_options():
    probs, target = rows(6, 3)
    with pytest.raises(ValueError, match="bool mask"):
        classwise_ece(probs, target, mask=torch.ones(6, 3))
    with pytest.raises(ValueError, match="bool mask"):
        ConfidenceECE().update_logits(probs, target, torch.ones(6, 2).bool())
    for metric in (ClasswiseECE(4), ClasswiseECE(2)):
        with pytest.raises(ValueError, match="num_classes"):
            metric.update(probs, target)
    for n_options in (torch.full((6,), 4), torch.full((5,), 3)):
        with pytest.raises(ValueError, match="from 2 to K"):
            summary(probs, target, n_options)
    with pytest.raises(ValueError, match=r"Row 0 .*mask must keep"):
        summary(probs, target, torch.ones(6).long())


@pytest.mark.filterwarnings(UPDATE_FIRST)
def test_no_data_is_an_error():
    empty = torch.zeros(0, 4), torch.zeros(0).long()
    calls = [ConfidenceECE().compute, ClasswiseECE(4).compute]
    calls += [lambda f=f: f(*empty) for f in (confidence_ece, classwise_ece, row_scores, summary)]
    for call in calls:
        with pytest.raises(ValueError, match="no predictions"):
            call()
    assert ConfidenceECE().reliability().count.sum() == 0  # an empty diagram can be drawn


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_every_integer_target_will_do(dtype):
    probs, target = rows(20, 3)
    assert summary(probs, target.to(dtype)) == summary(probs, target)


# Scores


def test_summary_agrees_with_plain_loops_on_ragged_rows():
    _, probs, target, n_options, _ = ragged_rows(300, 5)
    got = summary(probs, target, n_options, n_bins=7)
    total = {"accuracy": 0.0, "mean_confidence": 0.0, "nll": 0.0, "brier": 0.0}
    scored = []
    for p, t, k in zip(probs.double().tolist(), target.tolist(), n_options.tolist(), strict=True):
        top = max(range(k), key=p.__getitem__)
        scored.append((p[top], top == t))
        total["accuracy"] += top == t
        total["mean_confidence"] += p[top]
        total["nll"] -= math.log(p[t])
        total["brier"] += sum((p[j] - (j == t)) ** 2 for j in range(k))
    for name, value in total.items():
        assert got.pop(name) == pytest.approx(value / 300, rel=1e-12)
    wins = [(c > d) + 0.5 * (c == d) for c, r in scored if r for d, s in scored if not s]
    assert got.pop("auroc") == pytest.approx(sum(wins) / len(wins), rel=1e-12)
    assert got.pop("conf_ece") == pytest.approx(loop_conf_ece(probs, target, 7), abs=1e-9)
    assert got.pop("cw_ece") == pytest.approx(loop_cw_ece(probs, target, 7, n_options), abs=1e-9)
    assert got == {"n": 300.0, "n_bins": 7.0}
    assert all(type(v) is float for v in summary(probs, target).values())


def test_nll_of_an_impossible_answer_is_large_and_finite():
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    got = row_scores(probs, torch.tensor([1, 0]))["nll"].tolist()
    assert got == pytest.approx([-math.log(torch.finfo(torch.float32).tiny), math.log(2)])
    assert got[0] == pytest.approx(87.34, abs=0.005)


def test_auroc_with_ties_agrees_with_torchmetrics_and_is_nan_without_a_pair():
    probs, target = rows(500, 3)
    probs = (8 * probs).round() / 8  # many ties
    probs[:, 2] = 1 - probs[:, :2].sum(-1)
    probs, target = probs[(probs >= 0).all(-1)], target[(probs >= 0).all(-1)]
    scores = row_scores(probs, target)
    expected = binary_auroc(scores["confidence"], scores["correct"].long())
    assert auroc(probs, target).item() == pytest.approx(expected.item(), abs=1e-6)
    choice = probs.argmax(-1)
    assert auroc(probs, choice).isnan()
    assert auroc(probs, (choice + 1) % 3).isnan()


def test_works_in_a_metric_collection():
    collection = torchmetrics.MetricCollection([ConfidenceECE(), ClasswiseECE(3)])
    collection.update(*rows(40, 3))
    assert collection.compute() == {
        "ConfidenceECE": confidence_ece(*rows(40, 3)),
        "ClasswiseECE": classwise_ece(*rows(40, 3)),
    }
