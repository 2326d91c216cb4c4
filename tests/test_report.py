"""Files, table, warnings and pictures of a run, its page in a browser, progress in a log."""

import csv
import io
import json
import re
import shutil

import pytest
import torch
from PIL import Image
from rich.console import Console

from calm_lightning import figures, metrics, page, predictions, report
from calm_lightning.callbacks import PlainProgress
from calm_lightning.scoring import Scored, Tally

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
SELECTION = {
    "rule": "lowest NLL",
    "split": "sel",
    "n_candidates": 12,
    "chosen": {"method": "theta", "iteration": 7, "alpha": "dropped"},
}


def scored(variant="base", dataset="a", n=50, seed=0, K=4, scoring="text", mass=1.0):
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(3 * torch.randn(n, K, generator=g), -1)
    answer = torch.randint(0, K, (n,), generator=torch.Generator().manual_seed(1000))
    ids = [f"{i:04d}" for i in range(n)]
    columns = torch.full((n,), K), torch.full((n,), mass)
    return Scored(dataset, scoring, variant, ids, probs, answer, *columns)


def sure(s: Scored, accuracy: float, confidence: float) -> Scored:
    """The same questions, a share of them right, all at one confidence."""
    n, K = s.probs.shape
    right = torch.arange(n) < round(accuracy * n)
    choice = torch.where(right, s.answer, (s.answer + 1) % K)
    probs = torch.full((n, K), (1 - confidence) / (K - 1))
    return s._replace(probs=probs.scatter(1, choice[:, None], confidence))


def printed(rows, warnings=None, note="", width=120):
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    report.show(console, rows, warnings or {}, note)
    return console


def warned(*several):
    """Every warning about these, as one text."""
    rows = report.metric_rows(several, 10)
    return "\n".join(report.warnings(list(several), rows)["a", several[0].scoring])


# ---- files ----------------------------------------------------------------------------------


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


def test_a_row_holds_interval_and_floor_as_metrics_say_them():
    s = scored()
    rows = {r["metric"]: r for r in report.metric_rows([s], 10)}
    sample = s.probs, s.answer, s.n_options, 10
    for metric, (value, low, high) in metrics.bootstrap(*sample).items():
        assert [rows[metric][k] for k in ("value", "low", "high")] == [value, low, high]
        assert value == pytest.approx(s.summary(10)[metric])
    floor = metrics.noise_floor(s.probs, s.n_options, 10)
    for metric in ("conf_ece", "cw_ece"):
        assert rows[metric]["floor"] == floor[metric].mean
        assert rows[metric]["floor_p95"] == floor[metric].p95
    assert rows["accuracy"]["floor"] is None
    assert rows["least_ece_of_m"]["value"] <= rows["conf_ece"]["value"]
    assert rows["conf_ece"]["value"] <= rows["most_ece_of_m"]["value"]
    assert rows.keys() >= {*report.COLUMNS, *report.MORE}


def test_a_metric_without_a_value_is_null(tmp_path):
    one = scored()
    right = one._replace(answer=one.probs.argmax(-1))  # AUROC needs a wrong answer
    path = tmp_path / "metrics.json"
    rows = report.write_metrics(path, {}, report.metric_rows([right], 10))
    assert [r["value"] for r in rows if r["metric"] == "auroc"] == [None]
    assert "–" in printed(rows).export_text()


def test_predictions_come_back_exactly_and_replace_their_own_kind(tmp_path):
    path = tmp_path / "test_predictions.jsonl"
    ragged = scored("theta", seed=3)
    probs = ragged.probs.clone()
    probs[0] = torch.tensor([0.7, 0.3, 0.0, 0.0])
    k = ragged.n_options.clone()
    k[0] = 2
    ragged = ragged._replace(probs=probs, n_options=k, answer=ragged.answer.clamp(max=1))
    predictions.write(path, [scored(), scored(dataset="all"), scored("theta")])
    predictions.write(path, [ragged])
    found = {s[:3]: s for s in predictions.read(path)}
    assert set(found) == {("a", "text", "base"), ("a", "text", "theta")}
    for s in (scored(), ragged):
        again = found[s[:3]]
        assert again.id == s.id
        assert all(torch.equal(x, y) for x, y in zip(again[4:], s[4:], strict=True))


def test_the_union_is_made_of_several_sets_only():
    tally = Tally()
    for dataset in ("b", "a"):
        batch = {"dataset": dataset, "scoring": "text", "id": ["1", "2"]}
        K = 3 if dataset == "a" else 2
        batch |= {"answer": torch.tensor([0, 1]), "n_options": torch.tensor([K, 2])}
        log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]])[:, :K].log()
        tally.add(batch, "base", log_probs, torch.ones(2))
    found = {s.dataset: s for s in tally.gather()}
    of_tally = found.pop("all")
    several = predictions.with_unions(found.values())
    (union,) = (s for s in several if s.dataset == "all")
    assert union.id == of_tally.id == ["a/1", "a/2", "b/1", "b/2"]
    assert torch.equal(union.probs, of_tally.probs)
    assert torch.equal(union.n_options, of_tally.n_options)
    assert [s.dataset for s in predictions.with_unions([found["a"]])] == ["a"]
    assert [[s.dataset for s in group] for group in predictions.widest(several)] == [["all"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "1", "probs": [0.5, 0.5]}', "row 1: it lacks answer"),
        ('{"id": "1", "probs": [0.5, 0.2], "answer": 0}', "row 1: probs must"),
        ('{"id": "1", "probs": [NaN, 0.2], "answer": 0}', "row 1: probs must"),
        ('{"id": "1", "probs": [0.5, 0.5], "answer": 2}', "the answer 2 is none of 0..1"),
        ('{"id": "1", "probs": [0.5, 0.5], "answer": -1}', "unlabelled"),
        ('{"id": "1", "probs": [0.5, 0.5], "answer": 0}\n' * 2, 'row 2: the id "1" is there'),
        ("", "holds no prediction"),
        ("{", "line 1: not valid JSON"),
    ],
)
def test_a_wrong_prediction_is_named(line, words, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        predictions.read(path)
    assert "mine.jsonl" in str(error.value)


def test_bins_of_a_set_with_a_comma_in_its_name_are_replaced_too(tmp_path):
    path = tmp_path / "bins.csv"
    odd = scored()._replace(dataset='ours, "new"')
    for _ in range(2):
        report.write_bins(path, [odd], 10)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {r["dataset"] for r in rows} == {odd.dataset}
    assert len(rows) == 6 * 10


def test_bins_hold_every_question_of_every_kind(tmp_path):
    path = tmp_path / "bins.csv"
    for seed in (0, 1):  # the second run of a variant replaces the first
        report.write_bins(path, [scored(seed=seed), scored("theta", seed=seed + 5)], 10)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    kinds = {r["kind"] for r in rows}
    assert kinds == {"top", "class:0", "class:1", "class:2", "class:3", "total"}
    for variant in ("base", "theta"):
        count = dict.fromkeys(kinds, 0.0)
        for r in rows:
            if r["variant"] == variant:
                count[r["kind"]] += float(r["count"])
        assert count == {k: 200.0 if k == "total" else 50.0 for k in kinds}
    top = [r for r in rows if r["kind"] == "top" and r["variant"] == "base"]
    gap = sum(abs(float(r["confidence_sum"]) - float(r["correct"])) for r in top) / 50
    assert gap == pytest.approx(scored(seed=1).summary(10)["conf_ece"], abs=1e-6)


# ---- table ----------------------------------------------------------------------------------


def test_table_says_value_interval_and_floor_within_120_columns():
    variants = ["base", "alpha", "theta", "both", "fine_tuning", "temperature_scaling"]
    rows = report.metric_rows([scored(v, seed=i, n=400) for i, v in enumerate(variants)], 10)
    note = f"chosen: {report.chosen(SELECTION)}"
    text = printed(rows, note=note).export_text()
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text  # nothing was cut
    assert "N = 400, M = 10" in text
    for row in rows:
        if row["metric"] in report.COLUMNS:
            assert report.shown(row["value"]) in text
            digits = 2 if row["high"] >= 1 else 3
            ends = [report.shown(row[end], digits) for end in ("low", "high")]
            assert "–".join(ends) in text
        if row["metric"] == "conf_ece":
            assert report.shown(row["floor"]) in text
    names = [line[:21].strip() for line in text.splitlines() if line.startswith(" ")]
    assert [n for n in names if n and "─" not in n] == [
        "base", "plain fine-tuning", "temperature scaling", "CALM's α on the base",
        "CALM, α dropped", "CALM, α applied",
    ]  # fmt: skip
    assert "CALM, α dropped, iteration 7, α dropped; by lowest NLL on sel among 12" in " ".join(
        text.split()
    )


def test_the_lowest_ece_is_bold():
    base = sure(scored(), 0.5, 0.9)
    rows = report.metric_rows([base, sure(scored("theta"), 0.5, 0.55)], 10)
    text = printed(rows).export_text(styles=True)
    bold = [line for line in text.splitlines() if "\x1b[1m" in line and " .500" in line]
    assert len(bold) == 1
    assert "α dropped" in bold[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.5834, ".583"), (-0.0291, "−.029"), (1.192, "1.192"), (10.04, "10.040")],
        *[(0.9999, "1.000"), (0.0, ".000"), (None, "–"), (float("nan"), "–")],
    ],
)
def test_numbers_are_shown(value, text):
    assert report.shown(value) == text


# ---- warnings: a case that fires and one that does not ---------------------------------------


def test_rows_of_different_sizes_say_so():
    assert "do not compare" in warned(scored(), scored("theta", n=20))
    text = printed(report.metric_rows([scored(), scored("theta", n=20)], 10)).export_text()
    assert "N 50, M 10" in text
    assert "N 20, M 10" in text
    assert "do not compare" not in warned(scored(), scored("theta"))


@pytest.mark.parametrize(
    ("scoring", "mass", "fires"),
    [
        *[("first_token", 0.016, True), ("letter", 0.05, True), ("letter", 0.9, False)],
        *[("text", 1e-9, False), ("first_token", float("nan"), False)],  # always rare; not known
    ],
)
def test_a_low_option_mass_is_explained(scoring, mass, fires):
    text = warned(scored(scoring=scoring, mass=mass))
    assert ("mostly begins its answer otherwise" in text) == fires
    assert (f"hold {report.shown(mass)}" in text) == fires


def test_accuracy_under_four_fifths_of_the_base_is_named():
    base = sure(scored(n=400), 0.8, 0.9)
    text = warned(base, sure(scored("theta", n=400), 0.6, 0.6))
    assert "CALM, α dropped is right in .600 where the base is in .800" in text
    assert "where the base is" not in warned(base, sure(scored("theta", n=400), 0.65, 0.65))


def test_a_base_at_chance_is_named():
    text = warned(sure(scored(n=400), 0.30, 0.5))
    assert "at chance" in text
    assert "guessing in .250" in text
    assert "at chance" not in warned(sure(scored(n=400), 0.40, 0.5))
    # of few questions the lower bound decides
    assert "at chance" in warned(sure(scored(n=30), 0.40, 0.5))


def test_a_difference_that_n_cannot_tell_is_named():
    text = warned(scored(), scored("theta", seed=1))
    assert "N = 50 is too small to tell the lowest conf-ECE, that of" in text
    far = warned(sure(scored(n=2000), 0.6, 0.9), sure(scored("theta", n=2000), 0.6, 0.7))
    assert "too small to tell" not in far


def test_an_ece_below_the_noise_floor_is_named():
    assert "as high a conf-ECE" in warned(sure(scored(n=40), 0.6, 0.65))
    assert "as high a conf-ECE" not in warned(sure(scored(n=400), 0.6, 0.9))


# ---- pictures -------------------------------------------------------------------------------


def test_figure_has_a_panel_a_kind_and_variant_with_its_number(tmp_path):
    several = [scored(v, seed=i) for i, v in enumerate(("both", "base", "theta", "fine_tuning"))]
    figure = figures.reliability(several, 10)
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert [t.split("\n")[0] for t in titles[:4]] == [
        "base", "plain fine-tuning", "CALM, α applied", "CALM, α dropped",
    ]  # fmt: skip
    ece = report.shown(several[1].summary(10)["conf_ece"])
    assert titles[0] == f"base\ntop label, ECE {ece}"
    kinds = [t.split("\n")[1].split(",")[0] for t in titles[::4]]
    assert kinds == ["top label", "Total", "option A", "option B", "option C", "option D"]
    (tmp_path / "a.png").write_bytes(figures.png(figure))
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] / image.info["dpi"][0] * 25.4 == pytest.approx(100, abs=0.2)  # mm


def test_panels_show_what_the_bins_hold():
    figure = figures.reliability([scored()], 10, ("top",))
    (axis,) = figure.axes
    r = report.diagrams(scored(), 10)["top"]
    bars, gap, counts = (patch.get_data() for patch in axis.patches)
    assert bars.values == pytest.approx(r.accuracy.numpy(), nan_ok=True)
    assert gap.values == pytest.approx(r.confidence.numpy(), nan_ok=True)
    assert gap.baseline == pytest.approx(r.accuracy.numpy(), nan_ok=True)
    heights = counts.values - counts.baseline
    assert heights / heights.sum() == pytest.approx((r.count / r.count.sum()).numpy())
    assert str(int(r.count.max())) in [t.get_text() for t in axis.texts]
    whiskers = axis.collections[1].get_segments()
    low, high = r.wilson()
    filled = (r.count > 0).nonzero()[:, 0].tolist()
    drawn = {round(float(s[0][0]), 6): (s[0][1], s[1][1]) for s in whiskers if len(s)}
    for m in filled:
        ends = drawn[round(float(r.confidence[m]), 6)]
        assert ends == pytest.approx((float(low[m]), float(high[m])))


# ---- page -----------------------------------------------------------------------------------

NASTY = 'Is <script>document.title = "run"</script><img src=x onerror="alert(1)"> & "x" right?'


def rendered() -> str:
    several = [scored(v, seed=i) for i, v in enumerate(("base", "theta"))]
    rows = report.metric_rows(several, 10)
    texts = {("a", i): (NASTY, ["<b>yes</b>", "no", "{{ 7 * 7 }}", "‑ó"]) for i in several[0].id}
    run = {"served": "theta", "model_name": "tiny", "seed": 0, "seconds": {"fit": 3.2}}
    run |= {"config": ["configs/demo.yaml"], "selection": SELECTION}
    images = {"Lines": figures.png(figures.comparison(several, 10))}
    images["Diagrams"] = figures.png(figures.reliability(several, 10, ("top",)))
    warnings = report.warnings(several, rows)
    return page.render(run, rows, several, warnings, images, texts)


def test_page_tells_what_was_run_and_where_it_erred():
    html = rendered()
    for words in ("configs/demo.yaml", "lowest NLL", "3 s", "too small to tell"):
        assert words in html
    s = scored("theta", seed=1)
    mistakes = html.split("Most confident mistakes")[1].split("A few questions")[0]
    shown = re.findall(r"a, (\d{4})</small>", mistakes)
    wrong = [i for i in s.confidence.argsort(descending=True).tolist() if not s.correct[i]]
    assert shown == [s.id[i] for i in wrong[:8]]
    assert "<script" not in html
    assert "http://" not in html
    assert "https://" not in html


# apt may be out of reach where everything else is not; `.ci/run` then says so
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium: make browser")


@needs_browser
@pytest.mark.browser
def test_page_in_a_browser(tmp_path):
    """No error, no request beyond the file, every image whole, a question's markup as text."""
    from playwright.sync_api import sync_playwright

    path = tmp_path / "report.html"
    path.write_text(rendered(), encoding="utf-8")
    said, asked = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER)
        tab = browser.new_page(viewport={"width": 400, "height": 800})
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        title, text = tab.title(), tab.inner_text("body")
        widths = tab.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
        overflow = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert len(widths) == 2
    assert min(widths) > 600
    assert title == "Calibration of tiny"
    assert NASTY in text
    assert "<b>yes</b>" in text
    assert "{{ 7 * 7 }}" in text
    assert overflow <= 0  # a phone scrolls tables, not the page


# ---- progress -------------------------------------------------------------------------------


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
