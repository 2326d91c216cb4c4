"""Tokens, the endless shuffle, the train item, and a mid-epoch resume through Lightning."""

import random

import pytest
import torch
from conftest import make_tokenizer, needs_shared_data
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from calm_lightning.data.alpaca import AlpacaDataModule
from calm_lightning.data.prompts import Prompt
from calm_lightning.data.source import TokenDataModule, split_rows, without_repeats
from calm_lightning.data.tokens import (
    Batches,
    EndlessShuffle,
    OuterLoader,
    TokenRows,
    collate,
    encode,
    in_context,
    plain_ids,
)

# Lightning 2.6.6 asks torch's pytree in a way that torch 2.13 deprecates.
LIGHTNING_PYTREE = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Without a pre-tokenizer, BPE merges across words: ':A' becomes one token."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["x:A y:A z:A :A :A"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_encode_labels_the_response_and_its_end(tiny_tokenizer):
    row = encode(tiny_tokenizer, "Question: is it A?\nAnswer:", " Paris", 64)
    labelled = [i for i in row["labels"] if i != -100]
    assert len(row["input_ids"]) == len(row["labels"])
    assert tiny_tokenizer.decode(labelled) == " Paris</s>"
    assert row["input_ids"][-len(labelled) :] == labelled
    assert row["input_ids"].count(tiny_tokenizer.bos_token_id) == 1
    assert row["input_ids"][0] == tiny_tokenizer.bos_token_id


def test_encode_adds_no_bos_to_a_rendered_template(tiny_tokenizer):
    row = encode(tiny_tokenizer, "<s>[user]\n", "Paris", 64, special=False)
    assert row["input_ids"].count(tiny_tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_appends_eos_ends_no_prompt_with_it(tiny_tokenizer):
    from tokenizers.processors import TemplateProcessing

    both = make_tokenizer(["an answer"])
    both.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert both("an").input_ids[-1] == 1
    assert encode(both, "an", " answer", 64)["input_ids"].count(1) == 1


def test_a_merged_border_is_labelled_with_the_merged_token():
    tokenizer = merging_tokenizer()
    assert ":A" in tokenizer.get_vocab()
    ids, start = in_context(tokenizer, "x:", "A")
    assert tokenizer.convert_ids_to_tokens(ids[start:]) == [":A"]
    row = encode(tokenizer, "x:", "A", 8)
    assert tokenizer.convert_ids_to_tokens([i for i in row["labels"] if i >= 0]) == [":A", "</s>"]


def test_a_long_row_keeps_its_prompt_and_loses_the_end_of_its_response(tiny_tokenizer):
    prompt = "Question: is it A?\nAnswer:"
    start = len(plain_ids(tiny_tokenizer, [prompt])[0])
    row = encode(tiny_tokenizer, prompt, " Paris" * 50, start + 3)
    assert row["labels"][:start] == [-100] * start
    assert len(row["input_ids"]) == start + 3
    assert tiny_tokenizer.eos_token_id not in row["labels"]
    with pytest.raises(ValueError, match=rf"takes {start} tokens of max_length={start}"):
        encode(tiny_tokenizer, prompt, " Paris", start)


def test_encode_refuses_a_tokenizer_without_eos_and_an_empty_prompt(tiny_tokenizer):
    no_eos = make_tokenizer(["a"])
    no_eos.eos_token = None
    with pytest.raises(ValueError, match="EOS"):
        encode(no_eos, "a", " b", 9)
    with pytest.raises(ValueError, match="at least one token of prompt"):
        encode(tiny_tokenizer, "", "b", 9, special=False)


def test_collate_pads_on_the_right_to_the_longest():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
    ]
    batch = collate(rows, pad_id=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_rows_are_tokenised_once_and_cuts_are_counted(tiny_tokenizer):
    prompt = Prompt("Question: is it A?\nAnswer:", " ", True)
    rows = TokenRows([(prompt, "Paris"), (prompt, "water " * 40)], tiny_tokenizer, 32, "train")
    assert rows[0] is rows[0]
    assert rows.cut == set()
    assert len(rows[1]["input_ids"]) == 32
    assert rows[1] is rows[1]
    assert rows.cut == {1}


def test_shuffle_is_a_permutation_an_epoch_and_a_pure_function():
    shuffle = EndlessShuffle(7, "0/inner")
    epochs = [[shuffle[7 * e + i] for i in range(7)] for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    fresh = EndlessShuffle(7, "0/inner")
    assert [fresh[i] for i in (20, 3, 27, 0)] == [
        epochs[2][6],
        epochs[0][3],
        epochs[3][6],
        epochs[0][0],
    ]
    assert [EndlessShuffle(50, 1)[i] for i in range(50)] != [
        EndlessShuffle(50, 2)[i] for i in range(50)
    ]


@pytest.mark.parametrize(("n", "size"), [(23, 4), (640, 8), (3, 8), (16, 4), (1, 3)])
def test_batches_by_length_hold_every_row_once_an_epoch_and_little_padding(n, size):
    lengths = [random.Random(i).randint(1, 400) for i in range(n)]
    shuffle = EndlessShuffle(n, "0/inner", size, lengths.__getitem__)
    flat = [shuffle[i] for i in range(n * size * 3)]
    for e in range(size * 3):
        assert sorted(flat[e * n : (e + 1) * n]) == list(range(n))  # each once before any twice
    places = list(range(len(flat)))
    random.Random(0).shuffle(places)
    fresh = EndlessShuffle(n, "0/inner", size, lengths.__getitem__)
    assert all(fresh[i] == flat[i] for i in places[:200])  # a pure function of the position
    by_chance = EndlessShuffle(n, "0/inner", size)
    padded = [
        sum(
            max(lengths[r] for r in rows) * size - sum(lengths[r] for r in rows)
            for rows in ([order[b * size + i] for i in range(size)] for b in range(n * 3))
        )
        for order in (shuffle, by_chance)
    ]
    assert padded[0] <= padded[1]
    if n == 640:
        assert padded[0] < 0.15 * padded[1]
        batches = [tuple(flat[b * size : (b + 1) * size]) for b in range(3 * n // size)]
        assert len(set(batches)) == len(batches)  # other batches in another epoch
        mean = [sum(lengths[r] for r in batch) / size for batch in batches[: n // size]]
        assert mean != sorted(mean)  # and not from short to long


@needs_shared_data
def test_alpaca_carries_little_padding(shared_data, tiny_tokenizer):
    shares = []
    for by_length in (True, False):
        data = AlpacaDataModule(
            root=shared_data,
            tokenizer=tiny_tokenizer,
            batch_size=16,
            max_length=2048,
            by_length=by_length,
        )
        data.setup("fit")
        items = [data.train_dataloader()[k] for k in range(3)]
        masks = [b["attention_mask"] for item in items for b in (*item["train"], item["calib"])]
        carried = sum(mask.numel() for mask in masks)
        shares.append(1 - sum(int(mask.sum()) for mask in masks) / carried)
    assert shares[0] <= 0.1 < 0.3 < shares[1]


def numbered(n: int, first: int = 0) -> list[dict]:
    """Rows that can be told apart: row i holds the id i, once or up to three times."""
    return [
        {"input_ids": [first + i] * (1 + i % 3), "labels": [first + i] * (1 + i % 3)}
        for i in range(n)
    ]


def loader(inner_steps=3, length=5, **kwargs) -> OuterLoader:
    defaults = {"batch_size": 4, "seed": 0, "pad_id": 999} | kwargs
    return OuterLoader(
        numbered(23), numbered(9, 100), inner_steps=inner_steps, length=length, **defaults
    )


def ids(micro_batch) -> list[int]:
    return micro_batch["input_ids"][:, 0].tolist()


def flat(item) -> list[list[int]]:
    return [ids(batch) for batch in [*item["train"], item["calib"]]]


def test_item_holds_t_plus_one_micro_batches_and_calib():
    item = loader()[0]
    assert [len(ids(batch)) for batch in item["train"]] == [4] * 4
    assert all(i >= 100 for i in ids(item["calib"]))
    assert all(batch["input_ids"].shape[1] <= 3 for batch in item["train"])


def test_item_is_a_pure_function_of_seed_and_k():
    a, b = loader(), loader()
    assert flat(a[17]) == flat(b[17])
    b[3]
    assert flat(a[17]) == flat(b[17])
    assert flat(a[17]) != flat(a[18])
    assert flat(a[17]) != flat(loader(seed=1)[17])


def test_residual_and_calib_rows_do_not_depend_on_t():
    for k in (0, 1, 12):
        few, many = loader(inner_steps=0)[k], loader(inner_steps=9)[k]
        assert ids(few["train"][0]) == ids(many["train"][0])
        assert ids(few["calib"]) == ids(many["calib"])
        assert (len(few["train"]), len(many["train"])) == (1, 10)


def test_every_stream_visits_each_row_once_an_epoch():
    some = loader(batch_size=1, inner_steps=1)
    items = [some[k] for k in range(23)]
    assert sorted(ids(item["train"][0])[0] for item in items) == list(range(23))
    assert sorted(ids(item["train"][1])[0] for item in items) == list(range(23))
    assert sorted(ids(item["calib"])[0] for item in items[:9]) == list(range(100, 109))
    assert [ids(i["train"][0]) for i in items] != [ids(i["train"][1]) for i in items]


def test_iterating_runs_to_the_end_of_the_epoch_and_can_be_resumed_in_it():
    whole = loader()
    epochs = [[flat(item) for item in whole] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [5, 5]
    assert epochs[1][0] == flat(whole[5])

    stopped = loader()
    iter(stopped)  # Lightning makes iterators that it does not use
    for _, item in zip(range(2), stopped, strict=False):
        assert flat(item) in epochs[0]
    assert stopped.state_dict() == {"k": 2}
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert [flat(item) for item in resumed] == epochs[0][2:]
    assert [flat(item) for item in resumed] == epochs[1]


def test_ranks_share_every_micro_batch_in_order():
    alone = loader()[6]
    ranks = [loader(rank=r, world_size=2)[6] for r in range(2)]
    joined = [a + b for a, b in zip(*map(flat, ranks), strict=True)]
    assert joined == flat(alone)
    with pytest.raises(ValueError, match="batch_size=4 can not be shared evenly by 3 devices"):
        loader(rank=0, world_size=3)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="calib split has no rows"):
        OuterLoader(numbered(3), [], 1, 1, 1, 0, 0)


def test_batches_cover_every_row_once_over_ranks():
    rows = list(range(11))
    seen = [Batches(rows[r::3], 2, list) for r in range(3)]
    assert sorted(i for rank in seen for batch in rank for i in batch) == rows
    assert [len(rank) for rank in seen] == [2, 2, 2]
    assert list(Batches(rows, 4, list)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_split_is_by_tenths_in_file_order_or_by_sizes():
    rows = list(range(48))
    assert split_rows(rows, None, "f") == {
        "train": rows[:40],
        "calib": rows[40:44],
        "sel": rows[44:],
    }
    assert split_rows(rows, {"train": 5, "calib": 3, "sel": 2}, "f") == {
        "train": rows[:5],
        "calib": [43, 44, 45],
        "sel": [46, 47],
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train": 45}, r"f has 48 usable rows: train .* largest possible size is 40"),
        ({"calib": 44}, r"calib .* largest possible size is 43"),
        ({"sel": 0}, r"sel can not have 0"),
        ({"val": 3}, r"sizes names \['val'\]"),
    ],
)
def test_a_split_larger_than_its_source_names_the_largest(sizes, message):
    with pytest.raises(ValueError, match=message):
        split_rows(list(range(48)), sizes, "f")


def test_repeats_keep_the_first_and_are_counted():
    assert without_repeats(["b", "a", "B", "c"], str.lower) == (["b", "a", "c"], 1)


class Source(TokenDataModule):
    def source_splits(self):
        word = Prompt("Question: is it A?\nAnswer:", " ", True)
        return split_rows([(word, f"answer {i}") for i in range(40)], self.sizes, "here")


class Recorder(LightningModule):
    """Trains one number and writes down which train rows it saw."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.weight, self.seen = tokenizer, nn.Parameter(torch.ones(())), []

    def training_step(self, item, index):
        self.seen.append(item["train"][0]["input_ids"].tolist())
        return self.weight**2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(tmp_path, tokenizer, epochs, stop=-1, resume=None, length=4, **kwargs):
    model = Recorder(tokenizer)
    data = Source(batch_size=2, inner_steps=1, outer_steps_per_epoch=length)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        max_steps=stop,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1),
        **kwargs,
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model.seen


@LIGHTNING_PYTREE
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_lightning_resumes_inside_an_epoch_with_the_next_item(tmp_path, tiny_tokenizer, stop):
    whole = fit(tmp_path / "whole", tiny_tokenizer, epochs=3)
    assert len(whole) == 12
    assert len({str(item) for item in whole}) > 6
    first = fit(tmp_path / "part", tiny_tokenizer, epochs=3, stop=stop)
    rest = fit(tmp_path / "part", tiny_tokenizer, epochs=3, resume=tmp_path / "part" / "last.ckpt")
    assert first + rest == whole


@LIGHTNING_PYTREE
def test_limiting_batches_shortens_the_epoch_but_skips_no_item(tmp_path, tiny_tokenizer):
    whole = fit(tmp_path / "a", tiny_tokenizer, epochs=2)
    limited = fit(tmp_path / "b", tiny_tokenizer, epochs=2, limit_train_batches=3)
    assert limited == whole[:6]
    with pytest.raises(ValueError, match="outer_steps_per_epoch"):
        fit(tmp_path / "c", tiny_tokenizer, epochs=1, limit_train_batches=0.5)


def test_the_tokenizer_is_needed_and_never_changed(tiny_tokenizer):
    with pytest.raises(ValueError, match="Source has no tokenizer"):
        Source().setup("fit")
    data = Source(tokenizer=tiny_tokenizer)
    data.setup("fit")
    assert data.pad_id() == tiny_tokenizer.eos_token_id
    next(iter(data.train_dataloader()))
    assert tiny_tokenizer.pad_token is None
    assert (len(data.rows("calib")), len(data.rows("sel"))) == (4, 4)
    assert [batch["input_ids"].shape[0] for batch in data.token_batches("train", 20)] == [16, 4]


def test_a_size_out_of_range_is_named():
    with pytest.raises(ValueError, match="batch_size is 0; it has to be at least 1"):
        Source(batch_size=0)
