"""Multiple-choice sets: which token an option is, their readers, the draw, both ends."""

import pytest
import torch
from conftest import make_tokenizer, mmlu, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from calm_lightning.data import prompts
from calm_lightning.data.mcqa import MCQADataModule, option_ids
from calm_lightning.data.questions import load_questions

# Which token an option is (D15 to D18)


def test_letters_are_one_token_in_context(tiny_tokenizer):
    before, ids = option_ids(tiny_tokenizer, prompts.question("is it A?"), list("ABC"), "letter")
    tokens = tiny_tokenizer.convert_ids_to_tokens([i for option in ids for i in option])
    assert tokens == ["ĠA", "ĠB", "ĠC"]
    assert before[0] == tiny_tokenizer.bos_token_id


def test_a_split_letter_is_an_error_that_names_option_and_tokenizer():
    split = make_tokenizer(["nothing merges"], vocab_size=258)  # bytes only: " A" is two tokens
    split.name_or_path = "bytes-only"
    with pytest.raises(ValueError, match=r"option ' A' is not one new token .* bytes-only"):
        option_ids(split, prompts.question("q"), ["A"], "letter")
    _, ids = option_ids(split, prompts.question("q"), ["Aa", "Ab"], "text")
    assert [len(option) for option in ids] == [3, 3]


def test_a_letter_merged_into_the_prompt_is_an_error():
    merging = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    merging.train_from_iterator(["Question: q\nAnswer: A", "Answer: A", "r: A", ": A"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging)
    with pytest.raises(ValueError, match="' A' is not one new token"):
        option_ids(tokenizer, prompts.question("q"), ["A"], "letter")


def test_a_letter_that_only_stands_alone_as_two_pieces_is_found_in_context():
    # As in Llama 2: " A" by itself is "▁", "▁A", but one token after "Answer:".
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    pieces.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    pieces.train_from_iterator(["Question: q Answer: A B C A B C"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="A")
    assert len(tokenizer(" A", add_special_tokens=False).input_ids) == 2
    _, ids = option_ids(tokenizer, prompts.question("q"), ["B", "C"], "letter")
    assert tokenizer.convert_ids_to_tokens([option[0] for option in ids]) == ["▁B", "▁C"]


def test_first_tokens_that_collide_are_left_out_counted_and_replaced(tiny_tokenizer, tmp_path):
    rows = mmlu(20, choices=["zoo", "yes"]) + [
        {"question": f"Which {i}?", "subject": "s", "choices": ["A", "B"], "answer": 0}
        for i in range(10)
    ]
    write(tmp_path / "mmlu.jsonl", rows)
    asked = {"root": tmp_path, "tokenizer": tiny_tokenizer}
    data = MCQADataModule({"mmlu": 10}, scoring="first_token", **asked)
    assert [q.question for q in data.test_questions()] == [f"Which {i}?" for i in range(10)]
    report = data.report["mmlu (test)"]
    assert report["looked at"] == report["same first token"] + 10
    again = MCQADataModule({"mmlu": 10}, scoring="text", distinct_first_token=True, **asked)
    assert again.test_questions() == data.test_questions()
    with pytest.raises(
        ValueError, match=r"11 questions .* largest possible number is 10 .*token 20"
    ):
        MCQADataModule({"mmlu": 11}, scoring="first_token", **asked).setup("test")


# Multiple choice


def ask(tmp_path, name, rows):
    write(tmp_path / f"{name}.jsonl", rows)
    return load_questions(name, "test", tmp_path, {})[0]


def arc(text, label, key):
    choices = {"text": text, "label": label}
    return {"id": "x", "question": "Why?", "choices": choices, "answerKey": key}


@pytest.mark.parametrize(
    ("label", "key", "answer"),
    [("1234", "2", 1), ("ABCDE", "E", 4), ("ABC", "A", 0), ("ABCD", "", -1)],
)
def test_keys_are_looked_up_among_the_rows_own_labels(tmp_path, label, key, answer):
    options = [f"o{i}" for i in label]
    (question,) = ask(tmp_path, "arc_challenge", [arc(options, list(label), key)])
    assert (question.options, question.answer) == (tuple(options), answer)


@pytest.mark.parametrize(
    ("name", "row", "options", "answer"),
    [
        (
            "medmcqa",
            {"question": "q", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": 0},
            ("a", "b", "c", "d"),
            0,
        ),
        (
            "openbookqa",
            {
                "question_stem": "q",
                "choices": {"text": ["a", "b"], "label": ["A", "B"]},
                "answerKey": "B",
            },
            ("a", "b"),
            1,
        ),
        ("piqa", {"goal": "q", "sol1": " a", "sol2": "b", "label": 1}, ("a", "b"), 1),
        (
            "calibration",
            {"question": "q", "choices": "['it\\'s', \"that's\", 'so, so']", "answer": "2"},
            ("it's", "that's", "so, so"),
            2,
        ),
        ("mmlu", {"question": "q", "choices": [1, 2.5], "answer": 0}, ("1", "2.5"), 0),
    ],
)
def test_hub_columns_are_read(tmp_path, name, row, options, answer):
    (question,) = ask(tmp_path, name, [row])
    assert (question.question, question.options, question.answer) == ("q", options, answer)
    assert (question.id, question.dataset) == (f"{name}-1", name)


def test_sciq_options_are_shuffled_by_the_row_itself(tmp_path):
    rows = [
        {
            "question": f"q{i}",
            "correct_answer": "right",
            **{f"distractor{j}": f"wrong{j}" for j in (1, 2, 3)},
            "support": "it is right",
        }
        for i in range(60)
    ]
    questions = ask(tmp_path, "sciq", rows)
    assert all(q.options[q.answer] == "right" for q in questions)
    assert {q.answer for q in questions} == {0, 1, 2, 3}
    alone = ask(tmp_path, "sciq", rows[30:31])
    assert alone[0].options == questions[30].options


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mmlu", mmlu(1, answer=4)[0], "mmlu.jsonl, row 2: the answer is option 4"),
        ("mmlu", mmlu(1, answer=-2)[0], "row 2: the answer is option -2"),
        ("mmlu", mmlu(1, answer="B")[0], "row 2: the answer 'B' is no index"),
        ("mmlu", mmlu(1, answer=1.0)[0], "row 2: the answer 1.0 is no index"),
        ("mmlu", mmlu(1, choices=["one"])[0], "row 2: a question needs .* two options"),
        ("mmlu", mmlu(1, choices=["a", " "])[0], "row 2: a question needs .* none empty"),
        ("mmlu", mmlu(1, choices=["a", None])[0], "row 2: a question needs .* none empty"),
        ("mmlu", mmlu(1, choices="['a' 'b']")[0], "row 2: a question needs .* two options"),
        ("mmlu", mmlu(1, choices="a, b")[0], "row 2: its options are not a list"),
        ("mmlu", {"question": "q"}, 'row 2: there is no column "choices"'),
        ("mmlu", {**mmlu(1)[0], "id": "same"}, None),
        ("arc_easy", arc(["a", "b"], ["A", "B"], "C"), "the answer 'C' is none of its labels A, B"),
    ],
)
def test_a_bad_question_is_named(tmp_path, name, row, message):
    good = arc(["a", "b"], ["A", "B"], "A") | {"id": "y"} if name == "arc_easy" else mmlu(1)[0]
    if message is None:
        with pytest.raises(ValueError, match='row 2: the id "same" is taken already'):
            ask(tmp_path, name, [row, row])
        return
    with pytest.raises(ValueError, match=message):
        ask(tmp_path, name, [good, row])


@pytest.mark.parametrize(
    ("answers", "cell", "answer"),
    [
        ("index", "1", 1),
        ("letter", "B", 1),
        ("number", "2", 1),
        ("text", "no, never", 1),
        ("letter", "", -1),
    ],
)
def test_a_csv_with_declared_columns(tmp_path, answers, cell, answer):
    (tmp_path / "own.csv").write_text(
        f'q,o1,o2,o3,key\n"Is it, so?",yes,"no, never",,"{cell}"\n', encoding="utf-8"
    )
    spec = {
        "path": str(tmp_path / "own.csv"),
        "question": "q",
        "options": ["o1", "o2", "o3"],
        "answer": "key",
        "answers": answers,
    }
    (question,), _ = load_questions("own", "test", None, {"own": spec})
    assert question.question == "Is it, so?"
    assert (question.options, question.answer) == (("yes", "no, never"), answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anwser": "a"}, r"files\[own\] has \['anwser'\]"),
        ({"answers": "roman"}, 'answers is "roman"'),
        ({"options": None}, r"files\[own\] lacks \['options'\]"),
        ({"answer": "key"}, 'own.jsonl, row 1: there is no column "key"; there are: q, o'),
    ],
)
def test_a_wrong_declaration_is_named(tmp_path, change, message):
    path = write(tmp_path / "own.jsonl", [{"q": "why", "o": ["a", "b"]}])
    spec = {"path": path, "question": "q", "options": "o"} | change
    spec = {key: value for key, value in spec.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load_questions("own", "test", None, {"own": spec})


def test_an_unknown_benchmark_lists_those_there_are():
    with pytest.raises(
        ValueError, match="no benchmark mmul; declare it in files, or use sample, mmlu"
    ):
        load_questions("mmul", "test", None, {})


def test_repeats_and_equal_options_are_left_out_and_counted(tiny_tokenizer, tmp_path):
    rows = [
        *mmlu(6),
        mmlu(1, choices=["Paris", "Rome", "Bonn", "Oslo "], answer=0)[0],  # row 0 in another order
        mmlu(1, choices=["Paris", "Rome"])[0],  # the same question with other options stays
        {"question": "Twice?", "choices": ["a", "a ", "b"], "answer": 2},
    ]
    write(tmp_path / "mmlu.jsonl", rows)
    data = MCQADataModule({"mmlu": None}, root=tmp_path, tokenizer=tiny_tokenizer)
    data.setup("test")
    report = data.report["mmlu (test)"]
    assert (report["rows"], report["repeated"], report["equal options"]) == (9, 1, 1)
    assert report["used"] == 7
    assert [q.id for q in data.test_questions()] == [f"mmlu-{i}" for i in (1, 2, 3, 4, 5, 6, 8)]


def test_the_draw_depends_on_the_seed_and_not_on_the_other_sets(tiny_tokenizer, tmp_path):
    write(tmp_path / "mmlu.jsonl", mmlu(50))
    write(
        tmp_path / "piqa.jsonl",
        [{"goal": f"g{i}", "sol1": "a", "sol2": "b", "label": 0} for i in range(30)],
    )

    def drawn(benchmarks, seed=0):
        data = MCQADataModule(benchmarks, root=tmp_path, tokenizer=tiny_tokenizer, seed=seed)
        return [q.id for q in data.test_questions() if q.dataset == "mmlu"]

    first = drawn({"mmlu": 10})
    assert len(first) == 10
    assert first == sorted(first, key=lambda i: int(i.split("-")[1]))
    assert drawn({"piqa": 5, "mmlu": 10}) == first
    assert drawn({"mmlu": 10}, seed=1) != first
    with pytest.raises(ValueError, match=r"mmlu: 51 questions .* largest possible number is 50"):
        drawn({"mmlu": 51})
    with pytest.raises(ValueError, match="mmlu: 0 questions"):
        drawn({"mmlu": 0})


def test_evaluation_batches(tiny_tokenizer, tmp_path):
    rows = [
        {"question": "Why" + "?" * i, "choices": list("abcde")[: 2 + i % 4], "answer": 1}
        for i in range(11)
    ]
    write(tmp_path / "mmlu.jsonl", rows)
    data = MCQADataModule(
        {"mmlu": None}, root=tmp_path, tokenizer=tiny_tokenizer, eval_batch_size=4
    )
    data.setup("test")
    (loader,) = data.test_dataloader()
    batches = list(loader)
    assert (
        [len(batch["id"]) for batch in batches] == [4, 4, 3] == [len(b["answer"]) for b in batches]
    )
    lengths = [len(ids) for batch in batches for ids in batch["prompt_ids"]]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(i for batch in batches for i in batch["id"]) == sorted(
        f"mmlu-{i + 1}" for i in range(11)
    )
    batch = batches[0]
    assert (batch["dataset"], batch["scoring"]) == ("mmlu", "letter")
    assert [len(options) for options in batch["option_ids"]] == batch["n_options"].tolist()
    assert {batch[key].dtype for key in ("answer", "n_options")} == {torch.int64}
    assert all(option.shape == (1,) for options in batch["option_ids"] for option in options)
    text = tiny_tokenizer.decode(batch["prompt_ids"][0])
    assert (
        text
        == f"<s>Question: {batch['question'][0]}\n"
        + "".join(
            f"{letter}. {option}\n"
            for letter, option in zip("ABCDE", batch["options"][0], strict=False)
        )
        + "Answer:"
    )


def test_ranks_evaluate_every_row_once(tiny_tokenizer, tmp_path, monkeypatch):
    write(tmp_path / "mmlu.jsonl", mmlu(11))
    data = MCQADataModule(
        {"mmlu": None}, root=tmp_path, tokenizer=tiny_tokenizer, eval_batch_size=2
    )
    seen = []
    for rank in range(3):
        monkeypatch.setattr(data, "rank", lambda rank=rank: (rank, 3))
        seen += [i for loader in data.test_dataloader() for batch in loader for i in batch["id"]]
    assert sorted(seen) == sorted(f"mmlu-{i + 1}" for i in range(11))


def test_unlabelled_rows_are_predicted_and_not_tested(tiny_tokenizer, tmp_path):
    write(
        tmp_path / "medmcqa.jsonl",
        [{"question": "q", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": -1}],
    )
    data = MCQADataModule({"medmcqa": None}, root=tmp_path, tokenizer=tiny_tokenizer)
    data.setup("predict")
    (batch,) = data.predict_dataloader()[0]
    assert batch["answer"].tolist() == [-1]
    with pytest.raises(ValueError, match=r"medmcqa.jsonl, row 1: its answer is not known"):
        data.test_dataloader()
    data.held_out = None
    with pytest.raises(ValueError, match="row 1: its answer is not known"):
        data.source_questions()


def test_in_domain_source_never_holds_a_test_question(tiny_tokenizer, tmp_path):
    write(tmp_path / "mmlu" / "test.jsonl", mmlu(40))
    write(
        tmp_path / "piqa" / "validation.jsonl",
        [{"goal": f"g{i}", "sol1": "a", "sol2": "b", "label": 0} for i in range(30)],
    )
    write(
        tmp_path / "piqa" / "train.jsonl",
        [{"goal": f"g{i}", "sol1": "a", "sol2": "b", "label": 0} for i in range(20, 80)],
    )
    data = MCQADataModule({"mmlu": 20, "piqa": None}, root=tmp_path, tokenizer=tiny_tokenizer)
    data.setup("fit")
    source = data.source_questions()
    tested = {q.content for q in data.test_questions()}
    everything = [q for split in source.values() for q in split]
    assert len(tested) == 50
    assert len({q.content for q in everything}) == len(everything) == 20 + 50
    assert not tested & {q.content for q in everything}
    assert data.report["mmlu (fit)"]["test questions"] == 20
    assert data.report["piqa (fit)"]["test questions"] == 10
    # Each split holds both sets in proportion.
    assert [
        sum(q.dataset == "mmlu" for q in source[name]) for name in ("train", "calib", "sel")
    ] == [16, 2, 2]
    item = next(iter(data.train_dataloader()))
    labelled = item["calib"]["labels"][0]
    assert tiny_tokenizer.decode(labelled[labelled >= 0]) in (" A</s>", " B</s>")
    assert {loader.rows[0]["dataset"] for loader in data.val_dataloader()} == {"mmlu", "piqa"}


def test_a_source_that_is_all_tested_is_refused(tiny_tokenizer, tmp_path):
    write(tmp_path / "mmlu.jsonl", mmlu(40))
    data = MCQADataModule({"mmlu": None}, root=tmp_path, tokenizer=tiny_tokenizer)
    with pytest.raises(
        ValueError, match=r"all questions are asked for; .* is 0 .*test questions 40"
    ):
        data.setup("fit")


def test_the_calibration_set_keeps_the_papers_split(tiny_tokenizer, tmp_path):
    write(tmp_path / "calibration" / "calibration_train.jsonl", mmlu(3000))
    write(
        tmp_path / "calibration" / "test_1.jsonl",
        [{**row, "question": "T" + row["question"]} for row in mmlu(100)],
    )
    data = MCQADataModule(
        {"calibration": None}, root=tmp_path, tokenizer=tiny_tokenizer, scoring="text"
    )
    data.setup("fit")
    sizes = {name: len(questions) for name, questions in data.source_questions().items()}
    assert sizes == {"train": 2000, "calib": 500, "sel": 500}
    labelled = [i for i in data.rows("train")[0]["labels"] if i >= 0]
    assert tiny_tokenizer.decode(labelled) == " Paris</s>"


def test_chat_form_of_a_question(chat_tokenizer, tmp_path):
    write(tmp_path / "mmlu.jsonl", mmlu(1))
    data = MCQADataModule(
        {"mmlu": None}, scoring="text", chat=True, root=tmp_path, tokenizer=chat_tokenizer
    )
    (batch,) = data.test_dataloader()[0]
    assert chat_tokenizer.decode(batch["prompt_ids"][0]) == "<s>[user] Capital 0?\n[assistant]\n"
    assert chat_tokenizer.decode(batch["option_ids"][0][1]) == "Paris"


def test_arguments_out_of_range_are_named():
    with pytest.raises(ValueError, match='scoring is "letters"'):
        MCQADataModule({"mmlu": 1}, scoring="letters")
    with pytest.raises(ValueError, match="eval_batch_size is 0"):
        MCQADataModule({"mmlu": 1}, eval_batch_size=0)
