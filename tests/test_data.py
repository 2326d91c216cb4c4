"""Prompts, files, Alpaca and Shift; and the real samples of every set."""

import json
import logging

import datasets
import pytest
from conftest import SHARED_DATA, instructions, mmlu, needs_shared_data, write
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from calm_lightning import samples
from calm_lightning.data import prompts
from calm_lightning.data.alpaca import AlpacaDataModule
from calm_lightning.data.files import load_rows, local_file, read_rows
from calm_lightning.data.mcqa import MCQADataModule
from calm_lightning.data.questions import load_questions
from calm_lightning.data.shift import Shift

# Prompts


def test_alpaca_forms_follow_the_protocol():
    bare = prompts.instruction("alpaca", None, " Add. ", "")
    assert bare.text.startswith("Below is an instruction that describes a task. Write")
    assert bare.text.endswith("### Instruction:\nAdd.\n\n### Response:")
    given = prompts.instruction("alpaca", None, "Add.", "1 {x}")
    assert "paired with an input" in given.text
    assert given.text.endswith("### Input:\n1 {x}\n\n### Response:")
    assert (bare.lead, given.lead) == ("", "")


def test_question_form_puts_the_input_on_its_own_line():
    assert prompts.instruction("question", None, "Add.", "1, 2") == (
        "Question: Add.\n1, 2\nAnswer:",
        " ",
        True,
    )
    assert prompts.lettered("Why?", ["x", "y"]) == "Why?\nA. x\nB. y"


def test_chat_form_has_exactly_one_bos(chat_tokenizer, tmp_path):
    source = write(tmp_path / "a.jsonl", instructions(20))
    data = AlpacaDataModule(source, form="chat", tokenizer=chat_tokenizer)
    row = data.rows("train")[0]
    assert chat_tokenizer.decode(row["input_ids"]) == "<s>[user] Say 0.\n[assistant]\n0!</s>"
    assert row["input_ids"].count(chat_tokenizer.bos_token_id) == 1


def test_chat_form_without_a_template_says_so(tiny_tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        prompts.chat(tiny_tokenizer, "hi")


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("Noinput", True),
        ("<no input>", True),
        ("\\<noinput\\>", True),
        ("`<noinput>`", True),
        ("No input required.", True),
        ("", False),
        ("Joe Smith \n<noinput>", False),
        ("He was <noinput>", False),
        ("no", False),
    ],
)
def test_no_input_markers(text, marker):
    assert prompts.is_no_input_marker(text) is marker


# Files


def test_every_format_gives_the_same_rows(tmp_path):
    rows = [
        {"question": "Is it “NA”?", "n": "01"},
        {"question": "Line\u2028 and \n break", "n": "NA"},
    ]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.csv").write_text(
        '\ufeffquestion,n\nIs it “NA”?,01\n"Line\u2028 and \n break",NA\n', encoding="utf-8"
    )
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.csv", "d.parquet"):
        assert read_rows(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"a.jsonl, row 2: '\[1\]' is not an object"),
        ("a.json", "[1", "a.json: not valid JSON"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv, row 2: its number of cells"),
        ("a.csv", "a,b\n1\n", "a.csv, row 1: its number of cells"),
        ("a.tsv", "a", "the name ends in none of .jsonl"),
        ("a.json", None, "there is no such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"question\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"a.csv: not UTF-8"):
        read_rows(tmp_path / "a.csv")


def test_root_stands_in_for_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"mmlu: none of these files exists: .*mmlu/test.jsonl"):
        local_file(tmp_path, "mmlu", ("test",))
    split = write(tmp_path / "mmlu" / "validation.jsonl", mmlu(1))
    assert str(local_file(tmp_path, "mmlu", ("test", "validation"))) == split
    whole = write(tmp_path / "mmlu.jsonl", mmlu(1))
    assert str(local_file(tmp_path, "mmlu", ("test",))) == whole


def test_a_hub_that_can_not_be_reached_names_the_remedy(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"cais/mmlu:all:test .*no network\); give a local folder"):
        load_rows("cais/mmlu", "mmlu", ("test",), config="all")


# Alpaca


def test_alpaca_counts_what_it_leaves_out_and_says_it_once(tiny_tokenizer, tmp_path, caplog):
    rows = [
        *instructions(40),
        {"instruction": "Say 1.", "input": "", "output": "1!"},  # a repeat
        {"instruction": "Say 1.", "input": None, "output": "1! "},  # the same after stripping
        {"instruction": "Draw.", "input": "", "output": "  "},
        {"instruction": "Sing.", "input": "Noinput", "output": "La"},
        {"instruction": "Long " * 30, "input": "", "output": "yes"},
        {"instruction": "Short.", "input": "x" * 70, "output": "yes"},
        {"instruction": "Short.", "input": "", "output": "yes" * 30},
    ]
    data = AlpacaDataModule(
        write(tmp_path / "a.jsonl", rows),
        form="question",
        tokenizer=tiny_tokenizer,
        max_length=100,
        max_chars_prompt=75,
        max_chars_response=80,
    )
    with caplog.at_level(logging.INFO):
        data.setup("fit")
        data.setup("validate")
    report = data.report["source"]
    assert report == {
        "from": str(tmp_path / "a.jsonl"),
        "rows": 47,
        "no-input markers": 1,
        "empty output": 1,
        "too many characters": 3,
        "repeated": 2,
        "prompt too long": 0,
        "train": 33,
        "calib": 4,
        "sel": 4,
    }
    lines = [message for message in caplog.messages if message.startswith("source:")]
    assert len(lines) == 1
    assert "repeated 2" in lines[0]
    assert "prompt too long" not in lines[0]
    texts = [tiny_tokenizer.decode(row["input_ids"]) for row in data.rows("sel")]
    assert texts[-1] == "<s>Question: Sing.\nAnswer: La</s>"


def test_a_prompt_that_fills_the_row_is_left_out_and_counted(tiny_tokenizer, tmp_path):
    rows = [*instructions(30), {"instruction": "z" * 60, "input": "", "output": "yes"}]
    source = write(tmp_path / "a.jsonl", rows)
    data = AlpacaDataModule(source, form="question", tokenizer=tiny_tokenizer, max_length=64)
    data.setup("fit")
    assert data.report["source"]["prompt too long"] == 1
    assert sum(len(data.rows(name)) for name in ("train", "calib", "sel")) == 30


def test_the_full_alpaca_keeps_the_papers_split(tiny_tokenizer, monkeypatch):
    rows = [(f"Say {i}.", "", str(i)) for i in range(52_002)]
    named = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in rows]
    data = AlpacaDataModule(tokenizer=tiny_tokenizer)
    monkeypatch.setattr(data, "read", lambda: (named, "hub"))
    splits = data.source_splits()
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 48_002,
        "calib": 2000,
        "sel": 2000,
    }
    assert splits["sel"][-1][1] == "52001"
    assert splits["calib"][0][1] == "48002"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a", "input": ""}, r'a.jsonl, row 2: there is no column "output"'),
        ({"instruction": "a", "output": 3}, r'a.jsonl, row 2: "output" is 3; it has to be text'),
        ({"instruction": " ", "output": "b"}, r'a.jsonl, row 2: "instruction" is empty'),
    ],
)
def test_a_bad_alpaca_row_is_named(tiny_tokenizer, tmp_path, row, message):
    source = write(tmp_path / "a.jsonl", [*instructions(1), row])
    with pytest.raises(ValueError, match=message):
        AlpacaDataModule(source, tokenizer=tiny_tokenizer).setup("fit")


def test_alpaca_needs_a_form_it_knows_and_enough_rows(tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match='form is "cft"; it is one of alpaca, question, chat'):
        AlpacaDataModule(form="cft")
    source = write(tmp_path / "a.jsonl", instructions(20))
    with pytest.raises(ValueError, match="its largest possible size is 17"):
        AlpacaDataModule(source, tokenizer=tiny_tokenizer, sizes={"calib": 18}).setup("fit")


def test_the_bundled_instructions_are_a_source(tiny_tokenizer):
    data = AlpacaDataModule("sample", form="question", tokenizer=tiny_tokenizer, val_rows=20)
    data.setup("fit")
    item = next(iter(data.train_dataloader()))
    assert len(item["train"]) == 21
    assert item["calib"]["input_ids"].shape[0] == 16
    batches = list(data.val_dataloader()[0])
    assert [batch["labels"].shape[0] for batch in batches] == [16, 4]
    assert all((batch["labels"] >= 0).any(1).all() for batch in batches)


# Shift


def test_shift_fits_on_one_and_tests_on_the_other(tiny_tokenizer, tmp_path):
    write(tmp_path / "alpaca" / "train.jsonl", instructions(30))
    write(tmp_path / "mmlu.jsonl", mmlu(5))
    shift = Shift(
        AlpacaDataModule(tokenizer=tiny_tokenizer, batch_size=2),
        MCQADataModule({"mmlu": None}, tokenizer=tiny_tokenizer),
        root=tmp_path,
    )
    shift.setup("fit")
    assert "calib" in next(iter(shift.train_dataloader()))
    assert "input_ids" in next(iter(shift.val_dataloader()[0]))
    assert not shift.target.report
    shift.setup("test")
    assert next(iter(shift.test_dataloader()[0]))["dataset"] == "mmlu"
    assert len(shift.predict_dataloader()) == 1


def test_shift_keeps_the_targets_questions_out_of_the_source(tiny_tokenizer, tmp_path):
    write(tmp_path / "mmlu.jsonl", mmlu(60))
    asked = {"tokenizer": tiny_tokenizer, "root": tmp_path}
    shift = Shift(
        MCQADataModule({}, fit_benchmarks={"mmlu": None}, **asked),
        MCQADataModule({"mmlu": 20}, scoring="text", **asked),
    )
    shift.setup("fit")
    assert shift.source.report["mmlu (fit)"]["test questions"] == 20


def test_shift_gives_foreign_modules_the_trainer():
    class Foreign(LightningDataModule):
        def train_dataloader(self):
            return self.trainer

    shift = Shift(Foreign(), Foreign())
    shift.trainer = object()
    shift.setup("fit")
    assert shift.train_dataloader() is shift.trainer
    assert shift.target.trainer is shift.trainer


class Reader(LightningModule):
    """Writes down the ids it is asked, and in what shape validation comes."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.ids, self.keys = tokenizer, [], set()

    def validation_step(self, batch, index, dataloader_idx=0):
        self.keys |= batch.keys()

    def test_step(self, batch, index, dataloader_idx=0):
        self.ids += batch["id"]

    def predict_step(self, batch, index, dataloader_idx=0):
        return batch["id"]


# Lightning 2.6.6 asks torch's pytree in a way that torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_lightning_validates_tests_and_predicts(tiny_tokenizer, tmp_path):
    write(tmp_path / "alpaca.jsonl", instructions(30))
    write(tmp_path / "mmlu.jsonl", mmlu(5))
    asked = {"mmlu": None, "sample": 6}
    shift = Shift(AlpacaDataModule(), MCQADataModule(asked, eval_batch_size=2), root=tmp_path)
    reader = Reader(tiny_tokenizer)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.validate(reader, shift, verbose=False)
    assert reader.keys == {"input_ids", "attention_mask", "labels"}
    trainer.test(reader, shift, verbose=False)
    wanted = sorted(q.id for q in shift.target.test_questions())
    assert sorted(reader.ids) == wanted
    predicted = trainer.predict(reader, shift)
    assert sorted(i for loader in predicted for batch in loader for i in batch) == wanted
    trainer.validate(reader, MCQADataModule({"sample": 700}, val_rows=3), verbose=False)
    assert "option_ids" in reader.keys


# The real samples


REAL = {  # benchmark: rows, repeats, rows with equal options
    "mmlu": (2280, 5, 2),
    "medmcqa": (1500, 0, 10),
    "openbookqa": (500, 0, 0),
    "arc_easy": (400, 0, 0),
    "arc_challenge": (1172, 0, 0),
    "sciq": (700, 0, 2),
    "piqa": (800, 0, 0),
}


@needs_shared_data
@pytest.mark.parametrize("name", REAL)
def test_real_questions(tiny_tokenizer, name):
    rows, repeated, equal = REAL[name]
    data = MCQADataModule({name: None}, root=SHARED_DATA, tokenizer=tiny_tokenizer)
    data.setup("test")
    report = data.report[f"{name} (test)"]
    assert (report["rows"], report["repeated"], report["equal options"]) == (rows, repeated, equal)
    assert report["used"] == rows - repeated - equal
    assert all(0 <= q.answer < len(q.options) for q in data.test_questions())


@needs_shared_data
def test_real_arc_keys_that_are_digits_or_fifth_options_count():
    questions, _ = load_questions("arc_challenge", "test", SHARED_DATA, {})
    raw = read_rows(SHARED_DATA / "arc_challenge" / "test.jsonl")
    digits = [(q, r) for q, r in zip(questions, raw, strict=True) if r["answerKey"].isdigit()]
    assert len(digits) == 22
    assert all(q.answer == int(r["answerKey"]) - 1 for q, r in digits)
    assert sorted({len(q.options) for q in questions}) == [3, 4, 5]


@needs_shared_data
def test_real_questions_shared_by_sets_keep_their_own_options():
    text = "Which of the following is true?"
    found = [
        {q.options for q in load_questions(name, "test", SHARED_DATA, {})[0] if q.question == text}
        for name in ("mmlu", "medmcqa", "openbookqa")
    ]
    assert sum(map(bool, found)) >= 2
    assert len(set.union(*found)) == sum(map(len, found))


@needs_shared_data
@pytest.mark.parametrize("form", ["alpaca", "question"])
def test_real_alpaca(tiny_tokenizer, form):
    data = AlpacaDataModule(root=SHARED_DATA, form=form, tokenizer=tiny_tokenizer, max_length=4096)
    data.setup("fit")
    report = data.report["source"]
    assert (report["rows"], report["no-input markers"], report["empty output"]) == (3000, 44, 1)
    assert (report["repeated"], report["prompt too long"]) == (0, 0)
    assert (report["train"], report["calib"], report["sel"]) == (2401, 299, 299)
    assert len(next(iter(data.train_dataloader()))["train"]) == 21


@needs_shared_data
@pytest.mark.parametrize(
    "name", ["popqa/test", "popqa/test_mixed", "trivia_qa/validation", "mmlu/dev"]
)
def test_real_files_that_no_module_uses_yet_are_read(name):
    path = SHARED_DATA / f"{name}.jsonl"
    assert len(read_rows(path)) == path.read_bytes().count(b"\n")


@needs_shared_data
def test_real_files_are_what_the_hub_client_reads(tmp_path):
    for name in ("arc_easy/validation", "medmcqa/validation"):
        path = str(SHARED_DATA / f"{name}.jsonl")
        client = datasets.load_dataset("json", data_files=path, split="train", cache_dir=tmp_path)
        assert list(client) == read_rows(path)


def test_the_bundled_questions_serve_both_ends(tiny_tokenizer):
    data = MCQADataModule({"sample": 400}, tokenizer=tiny_tokenizer)
    data.setup("fit")
    total = len(read_rows(samples.path("mcqa")))
    assert sum(map(len, data.source_questions().values())) == total - 400
    assert len(data.test_questions()) == 400
