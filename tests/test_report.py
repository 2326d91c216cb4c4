"""Files and pictures of a run, and progress without a terminal."""

import io
import json

import pytest
import torch
from rich.console import Console

from calm_lightning import report
from calm_lightning.callbacks import PlainProgress
from calm_lightning.scoring import Scored, Tally


def scored(variant="base", dataset="a", n=50, seed=0, K=4):
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(3 * torch.randn(n, K, generator=g), -1)
    answer = torch.randint(0, K, (n,), generator=g)
    ids = [f"{i:03d}" for i in range(n)]
    return Scored(dataset, "text", variant, ids, probs, answer, torch.full((n,), K), probs.sum(-1))


def test_rows_replace_their_own_kind_and_keep_the_rest(tmp_path):
    path = tmp_path / "metrics.json"
    report.write_metrics(path, {"seed": 1}, report.metric_rows([scored()], 10))
    report.write_metrics(path, {"device": "x"}, report.metric_rows([scored("theta", seed=1)], 10))
    rows = report.write_metrics(path, {}, report.metric_rows([scored(seed=2)], 10))
    found = json.loads(path.read_text())
    assert found["run"] == {"seed": 1, "device": "x", "seconds": {}}
    assert found["rows"] == rows
    ece = {r["variant"]: r["value"] for r in rows if r["metric"] == "conf_ece"}
    assert ece["base"] == pytest.approx(scored(seed=2).summary(10)["conf_ece"])
    assert ece["theta"] == pytest.approx(scored(seed=1).summary(10)["conf_ece"])


def test_a_metric_without_a_value_is_null(tmp_path):
    one = scored()
    right = one._replace(answer=one.probs.argmax(-1))  # AUROC needs a wrong answer
    path = tmp_path / "metrics.json"
    rows = report.write_metrics(path, {}, report.metric_rows([right], 10))
    assert [r["value"] for r in rows if r["metric"] == "auroc"] == [None]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table(rows, "a", "text"))
    assert "–" in console.export_text()


def test_the_union_is_shown_beside_several_sets_only():
    tally = Tally()
    for dataset in ("a", "b"):
        batch = {"dataset": dataset, "scoring": "text", "id": ["1", "2"]}
        batch |= {"answer": torch.tensor([0, 1]), "n_options": torch.tensor([3, 2])}
        log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]]).log()
        tally.add(batch, "base", log_probs, torch.ones(2))
        if dataset == "a":
            assert {r["dataset"] for r in report.metric_rows(tally.gather(), 10)} == {"a"}
            tally.add(batch, "base", log_probs, torch.ones(2))
    found = tally.gather()
    assert {s.dataset: len(s.id) for s in found} == {"a": 2, "b": 2, "all": 4}
    assert {r["dataset"] for r in report.metric_rows(found, 10)} == {"a", "b", "all"}
    assert tally.gather() == []


def test_bins_hold_every_question_of_every_kind(tmp_path):
    path = tmp_path / "bins.csv"
    for seed in (0, 1):  # the second run of a variant replaces the first
        report.write_bins(path, [scored(seed=seed), scored("theta", seed=seed + 5)], 10)
    head, *lines = path.read_text().splitlines()
    rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    kinds = {r["kind"] for r in rows}
    assert kinds == {"top", "class:0", "class:1", "class:2", "class:3", "total"}
    for variant in ("base", "theta"):
        count = {k: 0.0 for k in kinds}
        for r in rows:
            if r["variant"] == variant:
                count[r["kind"]] += float(r["count"])
        assert count == {k: 200.0 if k == "total" else 50.0 for k in kinds}
    top = [r for r in rows if r["kind"] == "top" and r["variant"] == "base"]
    gap = sum(abs(float(r["confidence_sum"]) - float(r["correct"])) for r in top) / 50
    assert gap == pytest.approx(scored(seed=1).summary(10)["conf_ece"], abs=1e-6)


def test_figure_has_a_panel_a_variant_with_its_number(tmp_path):
    several = [scored(v, seed=i) for i, v in enumerate(("both", "base", "theta", "fine_tuning"))]
    figure = report.reliability_figure(several, 10)
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert [t.split("\n")[0] for t in titles] == [
        "base", "plain fine-tuning", "CALM, α applied", "CALM, α dropped",
    ]  # fmt: skip
    assert f"{several[1].summary(10)['conf_ece']:.3f}" in titles[0]
    figure.savefig(tmp_path / "a.png")


def test_table_marks_the_best_and_warns_at_chance():
    guess = scored(K=2)
    guess = guess._replace(answer=torch.arange(50) % 2)
    sure = guess._replace(variant="theta", probs=torch.full((50, 2), 0.5))
    rows = report.metric_rows([guess, sure], 10)
    console = Console(width=140, record=True, file=io.StringIO(), force_terminal=True)
    console.print(report.table(rows, "a", "text"))
    text = console.export_text(styles=True)
    assert "N = 50, M = 10" in text
    assert "at chance" in text
    bold = [line for line in text.splitlines() if "\x1b[1m" in line and "0.500" in line]
    assert len(bold) == 1
    assert "α dropped" in bold[0]  # always .5 and right half of the time


def test_rows_of_different_sizes_say_so():
    rows = report.metric_rows([scored()], 10) + report.metric_rows([scored("theta", n=20)], 10)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.table(rows, "a", "text"))
    text = console.export_text()
    assert "do not compare" in text
    assert " 50 " in text
    assert " 20 " in text


class FakeLoop:
    total_batch_idx = -1


class FakeTrainer:
    max_epochs, num_training_batches = 2, 3
    progress_bar_metrics = {"task_loss": torch.tensor(1.5), "lambda": 2.0}  # noqa: RUF012
    num_test_batches = [2, 3]  # noqa: RUF012
    fit_loop = FakeLoop()


def test_plain_progress_says_losses_and_the_time_left(capsys):
    bar, trainer = PlainProgress(every=0.0), FakeTrainer()
    module = type("Module", (), {"trainer": trainer})()
    bar.on_train_start(trainer, module)
    for k in range(6):
        trainer.fit_loop.total_batch_idx = k
        bar.on_train_batch_end(trainer, module, None, None, k)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fit 1/6  task_loss 1.5  lambda 2  left 0:")
    assert lines[-1].startswith("fit 6/6")
    bar.on_test_batch_end(trainer, module, None, None, 1, 1)
    assert capsys.readouterr().out == "test 4/5 batches\n"
