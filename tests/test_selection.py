"""The choice of a checkpoint: what it looks at, what it keeps, what it refuses."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import instructions, make_lm, mmlu, write
from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig

from calm_lightning import (
    AlpacaDataModule,
    CALMModule,
    FineTuning,
    MCQADataModule,
    Shift,
    TemperatureScaling,
)
from calm_lightning.callbacks import LastCheckpoint
from calm_lightning.data.near_misses import near_miss_rows, tf_idf
from calm_lightning.data.prompts import question
from calm_lightning.report import chosen
from calm_lightning.selection import FIXED, RULE, Candidate, ChooseCheckpoint, choose

pytestmark = pytest.mark.filterwarnings("ignore:.*loftq_config:UserWarning")


def at(iteration, score, accuracy, alpha="dropped", method="calm"):
    gaps = {"set": score}
    return Candidate(method, iteration, alpha, score, accuracy, accuracy + score, gaps)


# ---- the rule ----------------------------------------------------------------------------------


def test_lowest_score_wins_where_accuracy_is_kept():
    base, good, forgot = at(0, 0.3, 0.5), at(4, 0.1, 0.4), at(8, 0.0, 0.399)
    assert choose([base, good, forgot]) == good  # .4 = .8 x .5 is enough, .399 is not


def test_doing_nothing_can_win_and_equals_go_to_the_first():
    base, worse, equal = at(0, 0.1, 0.5), at(2, 0.2, 0.6), at(4, 0.1, 0.6)
    assert choose([base, worse, equal]) == base


def test_without_iteration_0_there_is_no_choice():
    with pytest.raises(ValueError, match="num_sanity_val_steps to -1"):
        choose([at(2, 0.1, 0.5)])


# ---- near misses -------------------------------------------------------------------------------

ROWS = [
    (question(q), a)
    for q, a in [
        ("Name a red fruit", "apple pie"),
        ("Name a yellow fruit", "banana ice"),
        ("Name a green fruit", "cherry tea"),
        ("Name a blue fruit", "damson jam"),
        ("Who wrote Faust and when?", "Goethe did"),
        ("Name a sour fruit", "an enormous yellow lemon from the south of Italy"),
    ]
]


def test_wrong_options_answer_the_most_similar_prompts_and_are_as_long(tiny_tokenizer):
    rows, report = near_miss_rows(ROWS, tiny_tokenizer, "text")
    assert report == {
        "rows": 6,
        "merged with the prompt": 0,
        "too few near misses": 1,
        "used": 5,
    }  # the lemon is too long
    first = rows[0]
    assert set(first["options"]) == {"apple pie", "banana ice", "cherry tea", "damson jam"}
    for row in rows:
        gold = next(a for prompt, a in ROWS if prompt.text == row["question"])
        assert row["options"][row["answer"]] == gold
        assert len(row["options"]) == len(set(row["options"])) == 4
        assert all(len(gold) / 2 <= len(o) <= 2 * len(gold) for o in row["options"])
    assert len({row["answer"] for row in rows}) > 1  # the gold one is not always in one place


def test_order_is_seeded_and_count_keeps_the_first(tiny_tokenizer):
    def places(seed, count=None):
        return [r["answer"] for r in near_miss_rows(ROWS, tiny_tokenizer, "text", seed, count)[0]]

    assert places(0) == places(0)
    assert any(places(0) != places(seed) for seed in range(1, 5))
    assert places(0, 2) == places(0)[:2]


def test_first_tokens_differ_where_they_are_scored(tiny_tokenizer):
    twins = [(question(f"Name fruit {i}"), text) for i, text in enumerate(
        ["A pie", "A jam", "B ice", "C tea", "D jam"])]  # fmt: skip
    rows, _ = near_miss_rows(twins, tiny_tokenizer, "first_token")
    assert rows
    for row in rows:
        assert len({int(ids[0]) for ids in row["option_ids"]}) == 4
        assert not {"A pie", "A jam"} <= set(row["options"])


def test_rows_too_few_to_make_a_question_are_an_error(tiny_tokenizer):
    with pytest.raises(ValueError, match="no question can be made of 3 rows of sel"):
        near_miss_rows(ROWS[:3], tiny_tokenizer, "text")


def test_words_of_the_template_say_nothing():
    words = tf_idf([prompt.text for prompt, _ in ROWS])
    near = (words @ words.T).toarray()
    assert near[0, 4] == 0  # both hold "Question:" and "Answer:"
    assert near[0, 1] > 0


# ---- in a run ----------------------------------------------------------------------------------


def source(tmp_path, **options):
    path = write(tmp_path / "rows.jsonl", instructions(40))
    return AlpacaDataModule(
        path, batch_size=4, inner_steps=1, outer_steps_per_epoch=4, max_length=400, **options
    )


def module(make, tiny_lm, tokenizer, **options):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return make(model=tiny_lm, tokenizer=tokenizer, lora=lora, lower_lr=5e-2, **options)


def trainer(tmp_path, *callbacks, **options):
    options = {"val_check_interval": 2, "num_sanity_val_steps": -1, "max_epochs": 1} | options
    return Trainer(
        callbacks=list(callbacks), accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip


def fitted(tmp_path, tiny_lm, tiny_tokenizer, data, **options):
    seed_everything(0, verbose=False)
    calm = module(CALMModule, tiny_lm, tiny_tokenizer, upper_lr=5e-2)
    keep = ChooseCheckpoint(tmp_path)
    trainer(tmp_path, keep, **options).fit(calm, data)
    return calm, keep, json.loads((tmp_path / "selection.json").read_text())


def test_every_validation_is_a_candidate_and_the_best_is_kept(tmp_path, tiny_lm, tiny_tokenizer):
    data = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    _, keep, said = fitted(tmp_path, tiny_lm, tiny_tokenizer, data)
    found = [(c["iteration"], c["alpha"]) for c in said["candidates"]]
    assert found == [(k, a) for k in (0, 2, 4) for a in ("dropped", "applied")]
    assert said["rule"] == RULE
    assert said["split"] == "near misses by text, N = 3"
    assert said["n_candidates"] == 6
    assert said["chosen"] == min(
        (c for c in said["candidates"] if c["accuracy"] >= 0.8 * said["candidates"][0]["accuracy"]),
        key=lambda c: c["score"],
    )
    kept = torch.load(keep.path, weights_only=True)
    assert kept["alpha_chosen"] == (said["chosen"]["alpha"] == "applied")

    # what was kept is that state: validated again, it shows the candidate's numbers
    again = module(CALMModule, make_lm(), tiny_tokenizer, upper_lr=5e-2)
    trainer(tmp_path).validate(again, data, ckpt_path=keep.path, verbose=False)
    assert again.alpha_in_use == kept["alpha_chosen"]
    variant = "both" if again.alpha_in_use else "theta"
    (s,) = [s for s in again.scored if s.variant == variant and s.dataset == "near misses"]
    assert s.overconfidence == pytest.approx(
        said["chosen"]["gaps"]["near misses by text"], abs=1e-6
    )


def test_another_benchmark_can_choose(tmp_path, tiny_lm, tiny_tokenizer):
    other = write(tmp_path / "other.jsonl", mmlu(8))
    tested = write(tmp_path / "tested.jsonl", mmlu(8, subject="t"))
    columns = {"question": "question", "options": "choices", "answer": "answer"}
    files = {"other": {"path": other, **columns}, "tested": {"path": tested, **columns}}
    target = MCQADataModule({"tested": 4}, scoring="text", files=files)
    with_overlap = Shift(
        source(tmp_path), target, MCQADataModule({"other": None}, scoring="text", files=files)
    )
    with pytest.raises(ValueError, match=r"other\.jsonl, row \d+ is a test question too, one of 4"):
        fitted(tmp_path, tiny_lm, tiny_tokenizer, with_overlap)

    write(tmp_path / "other.jsonl", mmlu(8, choices=["Bern", "Wien", "Riga", "Graz"]))
    data = Shift(
        source(tmp_path), target, MCQADataModule({"other": None}, scoring="text", files=files)
    )
    _, _, said = fitted(tmp_path, tiny_lm, tiny_tokenizer, data)
    assert said["split"] == "other by text, N = 8"


def test_the_worst_of_several_sets_counts(tmp_path, tiny_lm, tiny_tokenizer):
    files = {"other": {"path": write(tmp_path / "other.jsonl", mmlu(8)), "question": "question",
                       "options": "choices", "answer": "answer"}}  # fmt: skip
    other = MCQADataModule({"other": None}, scoring="text_mean", files=files)
    tested = MCQADataModule({"sample": 4}, scoring="text")
    near = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    _, _, said = fitted(tmp_path, tiny_lm, tiny_tokenizer, Shift(near, tested, other))
    assert said["split"] == "near misses by text, N = 3, other by text_mean, N = 8"
    for c in said["candidates"]:
        assert set(c["gaps"]) == {"near misses by text", "other by text_mean"}
        assert c["score"] == max(abs(gap) for gap in c["gaps"].values())
        whole = (3 * c["gaps"]["near misses by text"] + 8 * c["gaps"]["other by text_mean"]) / 11
        assert c["mean_confidence"] - c["accuracy"] == pytest.approx(whole, abs=1e-6)


def test_without_validation_the_fixed_number_is_the_rule(tmp_path, tiny_lm, tiny_tokenizer):
    _, keep, said = fitted(tmp_path, tiny_lm, tiny_tokenizer, source(tmp_path), limit_val_batches=0)
    assert said["rule"] == FIXED
    assert said["chosen"] == {"method": "calm", "iteration": 4, "alpha": "applied"}
    assert not keep.path.exists()


def test_a_temperature_is_not_judged_before_it_is_fitted(tmp_path, tiny_lm, tiny_tokenizer):
    data = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    seed_everything(0, verbose=False)
    keep = ChooseCheckpoint(tmp_path, "temperature_scaling")
    scaled = TemperatureScaling(model=tiny_lm, tokenizer=tiny_tokenizer)
    trainer(tmp_path, keep).fit(scaled, data)
    assert json.loads((tmp_path / "selection.json").read_text())["rule"] == FIXED
    assert not keep.path.exists()  # so that the test takes the T at the end
    assert scaled.temperature != 1


def test_iteration_0_is_asked_every_question(tmp_path, tiny_lm, tiny_tokenizer):
    data = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    with pytest.raises(ValueError, match="num_sanity_val_steps to -1"):
        fitted(tmp_path, tiny_lm, tiny_tokenizer, data, num_sanity_val_steps=2)


def beside(tmp_path, tiny_lm, tiny_tokenizer, *rivals):
    """What selection.json says after plain fine-tuning beside candidates already known."""
    data = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    keep = ChooseCheckpoint(tmp_path, "fine_tuning", "fine_tuning.ckpt", rivals)
    tuned = module(FineTuning, tiny_lm, tiny_tokenizer)
    trainer(tmp_path, keep, num_sanity_val_steps=0).fit(tuned, data)
    return json.loads((tmp_path / "selection.json").read_text())


def test_what_wins_and_what_the_folder_serves_are_both_said(tmp_path, tiny_lm, tiny_tokenizer):
    rivals = at(0, 0.99, 0.0), at(2, 0.98, 0.0)
    said = beside(tmp_path, tiny_lm, tiny_tokenizer, *rivals)
    assert said["chosen"]["method"] == "fine_tuning"
    assert (said["served"]["method"], said["served"]["iteration"]) == ("calm", 2)
    assert "this folder serves the best of its own method: CALM, iteration 2" in chosen(said)


def test_a_rival_is_among_the_candidates(tmp_path, tiny_lm, tiny_tokenizer):
    said = beside(tmp_path, tiny_lm, tiny_tokenizer, at(0, 0.9, 0.0), at(4, 0.8, 0.0))
    assert said["n_candidates"] == 4
    assert said["chosen"]["method"] == "fine_tuning"
    assert (tmp_path / "fine_tuning.ckpt").exists()


def test_candidates_survive_a_resumed_run(tmp_path, tiny_lm, tiny_tokenizer):
    data = source(tmp_path, near_misses="text", near_miss_rows=3, sizes={"sel": 12})
    seed_everything(0, verbose=False)
    calm = module(CALMModule, tiny_lm, tiny_tokenizer, upper_lr=5e-2)
    last = LastCheckpoint(tmp_path, every=1)
    trainer(tmp_path, ChooseCheckpoint(tmp_path), last).fit(calm, data)
    whole = json.loads((tmp_path / "selection.json").read_text())
    keep = ChooseCheckpoint(tmp_path)
    keep.load_state_dict(
        next(v for k, v in torch.load(last.path, weights_only=True)["callbacks"].items()
             if k.startswith("ChooseCheckpoint"))
    )  # fmt: skip
    assert len(keep.candidates) == whole["n_candidates"]

    # killed after the validation at 2, before the next last.ckpt: what was seen counts
    keep = ChooseCheckpoint(tmp_path)
    keep.load_state_dict({"candidates": whole["candidates"][:2], "split": ""})
    keep.on_train_start(SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=1)), calm)
    assert [c.iteration for c in keep.candidates] == [0, 0, 2, 2]
