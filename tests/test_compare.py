"""Runs side by side: what may be compared, and what is said of what may not."""

import json

import pytest
from test_report import SELECTION, scored, sure

from calm_lightning import compare, predictions, report
from calm_lightning.metrics import paired_bootstrap


def make_run(folder, *several, served="theta", n_bins=10, **run):
    """A run folder as a test leaves it."""
    folder.mkdir()
    predictions.write(folder / "test_predictions.jsonl", several)
    rows = report.metric_rows(several, n_bins)
    report.write_metrics(folder / "metrics.json", {"served": served, **run}, rows)
    return folder


def test_a_run_is_not_compared_with_itself(tmp_path):
    a = make_run(tmp_path / "a", scored())
    with pytest.raises(ValueError, match="a is named twice"):
        compare.compare([a, tmp_path / "b" / ".." / "a"])


def test_two_runs_share_their_base_and_are_held_against_the_first(tmp_path):
    a = make_run(tmp_path / "a", scored(), scored("theta", seed=1), selection=SELECTION)
    b = make_run(tmp_path / "b", scored(), scored("theta", seed=2), scored("both", seed=3))
    found, reference, n_bins, chosen = compare.compare([a, b])
    assert [s.variant for s in found] == ["a: base", "a: theta", "b: theta", "b: both"]
    assert (reference, n_bins) == ("a: theta", 10)
    assert chosen == f"a: {report.chosen(SELECTION)}"
    rows = {(r["variant"], r["metric"]): r for r in compare.differences(found, reference, 10)}
    assert {v for v, _ in rows} == {"a: base", "b: theta", "b: both"}
    pair = [(s.confidence, s.correct) for s in (scored("theta", seed=2), scored("theta", seed=1))]
    row = rows["b: theta", "conf_ece"]
    assert (row["value"], row["low"], row["high"]) == paired_bootstrap(*pair)
    nll = [scored("theta", seed=s).summary(10)["nll"] for s in (2, 1)]
    assert rows["b: theta", "nll"]["value"] == pytest.approx(nll[0] - nll[1])


def test_another_base_is_kept(tmp_path):
    runs = [make_run(tmp_path / x, scored(seed=i), served="base") for i, x in enumerate("ab")]
    assert [s.variant for s in compare.compare(runs)[0]] == ["a: base", "b: base"]


def test_folders_of_one_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
    runs = [make_run(tmp_path / p / "run", scored(seed=i)) for i, p in enumerate("xy")]
    assert [s.variant for s in compare.compare(runs)[0]] == [f"{run}: base" for run in runs]


def test_predictions_of_an_api_find_their_data_sets_by_id(tmp_path):
    parts = [scored("theta", dataset=d, n=20, K=k) for d, k in (("p", 4), ("q", 3))]
    ids = [[f"{s.dataset}-{i}" for i in s.id] for s in parts]
    parts = [s._replace(id=i) for s, i in zip(parts, ids, strict=True)]
    run = make_run(tmp_path / "run", *parts)
    lines = [
        json.dumps({"id": i, "probs": p[: int(k)].tolist(), "answer": int(a)})
        for s in parts
        for i, p, a, k in zip(s.id, s.probs, s.answer, s.n_options, strict=True)
    ]
    (tmp_path / "api.jsonl").write_text("\n".join(reversed(lines)))
    found, reference, _, _ = compare.compare([run, tmp_path / "api.jsonl"])
    assert {(s.dataset, s.variant) for s in found} == {
        (d, v) for d in ("p", "q", "all") for v in ("run: theta", "api")
    }
    rows = compare.differences([s for s in found if s.dataset == "all"], reference, 10)
    assert all(r["value"] == r["low"] == r["high"] == 0 for r in rows)  # the same answers
    assert all(s.scoring == "text" for s in found)
    (tmp_path / "api.jsonl").write_text("\n".join([*lines[1:], lines[0].replace("p-", "z-")]))
    with pytest.raises(ValueError, match='the id "z-0000" names no one question of run'):
        compare.compare([run, tmp_path / "api.jsonl"])


def other_answer(s):
    return s._replace(answer=(s.answer + 1) % 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s._replace(scoring="letter"), "a and b differ in scoring: text and letter"),
        (lambda s: scored("theta", n=40), "10 are in the first alone, 0 in the second alone, 40"),
        (lambda s: s._replace(dataset="c"), "50 are in the first alone, 50 in the second"),
        (other_answer, "a and b give the question a/0000 other options or another right one"),
    ],
)
def test_unlike_tests_are_refused(change, words, tmp_path):
    theta = scored("theta")
    a, b = make_run(tmp_path / "a", theta), make_run(tmp_path / "b", change(theta))
    with pytest.raises(ValueError, match=words):
        compare.compare([a, b])


def test_another_m_is_refused(tmp_path):
    a = make_run(tmp_path / "a", scored("theta"))
    b = make_run(tmp_path / "b", scored("theta"), n_bins=15)
    with pytest.raises(ValueError, match="the runs differ in M: a M = 10, b M = 15"):
        compare.compare([a, b])
    report.write_metrics(a / "metrics.json", {}, report.metric_rows([scored("both")], 15))
    with pytest.raises(ValueError, match=r"a: its rows have M = \[10, 15\]"):
        compare.load(a)


def test_a_folder_without_a_test_is_named(tmp_path):
    with pytest.raises(ValueError, match="no test has been run there; run calm test --run_dir"):
        compare.load(tmp_path)


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    base = scored(n=400)
    a = make_run(tmp_path / "a", sure(base._replace(variant="theta"), 0.6, 0.65))
    b = make_run(tmp_path / "b", sure(base._replace(variant="theta"), 0.6, 0.95))
    compare.main([str(a), str(b), "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert "a, text, N = 400, M = 10" in text
    assert "[.300, .300]" in text  # b is .30 further off, whatever questions are drawn
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {r["variant"] for r in found["rows"]} == {"a: theta", "b: theta"}
    assert (tmp_path / "out" / "comparison_text.png").read_bytes().startswith(b"\x89PNG")
    assert {(r["variant"], r["minus"]) for r in found["differences"]} == {("b: theta", "a: theta")}
