import json

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from peft import LoraConfig

from calm_lightning import CALMModule, FineTuning, TemperatureScaling
from calm_lightning.backbone import Backbone, load_lm, load_tokenizer
from calm_lightning.cli import main
from calm_lightning.data import known_truth
from calm_lightning.data.files import read_rows
from calm_lightning.data.known_world import CUES, DOMAINS, World, token_ids
from calm_lightning.metrics import confidence_ece
from calm_lightning.scoring import Scored

pytestmark = pytest.mark.filterwarnings(
    # as in test_cli.py: jsonargparse, peft and lightning's TensorBoard writer of themselves
    "ignore:.*loftq_config:UserWarning",
    "ignore:.*instantiate_classes",
    "ignore:.*distutils.*:DeprecationWarning",
)
SEEDS = (1, 2)  # settings are seed 0's; all ten: benchmarks/known_truth.py


@pytest.fixture(scope="module")
def beds(tmp_path_factory):
    """A bed for each seed."""
    root = tmp_path_factory.mktemp("known_truth")
    return {seed: known_truth.write(root / f"bed-{seed}", seed) for seed in SEEDS}


def fitted(method, folder, k, tested=("target",), lora=None, **options):
    """A method after k train items, and what its test scored."""
    data = known_truth.data(
        folder, tested, tokenizer=load_tokenizer(str(folder)), seed=0,
        batch_size=32, inner_steps=3, outer_steps_per_epoch=k,
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = method(str(folder), lora=lora, **options)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return module, {(s.dataset, s.variant): s for s in module.scored}


def lora():
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def cues(text):
    return torch.tensor([[int(word.removeprefix("cue")) for word in text.split()]])


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_follow_the_stored_truth(beds, seed):
    truth, world = known_truth.truth(beds[seed]), World(seed)
    rows = {name: read_rows(beds[seed] / f"{name}.jsonl") for name in truth}
    for i in (0, 7, -1):
        p = world.truth(cues(rows["source"][i]["instruction"]))[0]
        torch.testing.assert_close(truth["source"][i], p)
        row = rows["target"][i]
        p = world.truth(cues(row["question"]))[0]
        p = p[[int(option.removeprefix("answer")) for option in row["options"]]]
        torch.testing.assert_close(truth["target"][i], p / p.sum())
    drawn = {
        "source": [int(row["output"].removeprefix("answer")) for row in rows["source"]],
        **{name: [row["answer"] for row in rows[name]] for name in ("target", "other")},
    }
    for name, p in truth.items():
        assert len(p) == len(drawn[name]) == DOMAINS[name].rows
        # The probability of what was drawn has mean sum p² and a known variance in every row.
        of_drawn = p.gather(1, torch.tensor(drawn[name])[:, None])[:, 0]
        mean, variance = (p**2).sum(1), (p**3).sum(1) - (p**2).sum(1) ** 2
        assert abs((of_drawn - mean).sum() / variance.sum().sqrt()) < 4


def test_rows_are_one_token_a_word(beds):
    folder = beds[1]
    data = known_truth.data(folder, ("target", "other"), tokenizer=load_tokenizer(str(folder)))
    row, tokenised = read_rows(folder / "source.jsonl")[0], data.source.rows("train")[0]
    answer = int(row["output"].removeprefix("answer"))
    ids = token_ids(cues(row["instruction"]), torch.tensor([answer]))[0]
    assert tokenised["input_ids"] == ids.tolist()
    assert tokenised["labels"] == [-100] * (len(ids) - 2) + ids[-2:].tolist()
    assert {name: len(data.source.rows(name)) for name in ("train", "calib", "sel")} == {
        "train": 3200, "calib": 400, "sel": 400,
    }  # fmt: skip
    for loader, name in zip(data.target.test_dataloader(), ("target", "other"), strict=True):
        batches = list(loader)
        assert sum(len(b["id"]) for b in batches) == DOMAINS[name].rows
        assert {len(o) for b in batches for options in b["option_ids"] for o in options} == {1}
        prompt = cues(batches[0]["question"][0])
        assert batches[0]["prompt_ids"][0].tolist() == token_ids(prompt)[0, :-2].tolist()


def test_rare_words_on_the_target(beds):
    shares = {}
    for name, key in (("source", "instruction"), ("target", "question"), ("other", "question")):
        text = [row[key] for row in read_rows(beds[1] / f"{name}.jsonl")]
        found = torch.cat([cues(t)[0] for t in text])
        shares[name] = (found >= CUES // 2).double().mean()
    assert shares["source"] < 0.25 < 0.6 < shares["other"] < shares["target"]


@pytest.mark.parametrize("seed", SEEDS)
def test_overconfident_where_a_source_temperature_does_not_reach(beds, seed):
    _, scored = fitted(TemperatureScaling, beds[seed], 12, ("target", "other"))
    base, scaled = scored["target", "base"], scored["target", "temperature_scaling"]
    assert base.summary(10)["conf_ece"] >= 0.15
    assert scaled.summary(10)["conf_ece"] >= 0.05
    assert scored["other", "base"].summary(10)["conf_ece"] >= 0.15
    assert base.confidence.mean() > base.correct.double().mean()
    # knows something, though not all: better than one in four, worse than the truth's own choice
    best = known_truth.truth(beds[seed])["target"].max(1).values.mean()
    assert 0.4 < base.correct.double().mean() < best - 0.03
    gap, ece = known_truth.true_errors(base, beds[seed])
    assert gap >= ece == pytest.approx(base.summary(10)["conf_ece"], abs=0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_source_tokens_stay_calibrated(beds, seed):
    folder = beds[seed]
    data = known_truth.data(folder, tokenizer=load_tokenizer(str(folder)), batch_size=400)
    (batch,) = data.source.token_batches("sel")
    backbone = Backbone(load_lm(str(folder)), trained=False)
    with torch.no_grad():
        hidden, _ = backbone.hidden(batch["input_ids"], batch["attention_mask"])
    counted = batch["labels"][:, 1:] != -100
    probs = backbone.logits(hidden[:, :-1][counted]).softmax(-1)
    # two in three wrong answers, half of the tokens EOS: at N = 800 noise alone is near .03
    assert confidence_ece(probs, batch["labels"][:, 1:][counted]) < 0.08


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_calm_lowers_what_fine_tuning_leaves(beds, seed):
    shared = {"lora": lora(), "lower_lr": 3e-3, "warmup_fraction": 0.1}
    _, tuned = fitted(FineTuning, beds[seed], 60, **shared)
    calm = {"inner_lr": 0.5, "upper_lr": 2e-2, "gamma": 0.05, "scale_min": 0.25}
    _, ours = fitted(CALMModule, beds[seed], 60, **shared, **calm)
    error = {
        name: known_truth.true_errors(scored, beds[seed])[1]
        for (dataset, name), scored in (tuned | ours).items()
        if dataset == "target"
    }
    assert error["fine_tuning"] > 0.5 * error["base"]
    # over ten seeds it was at most .63 of the base's, and .10 below fine-tuning's
    assert error["both"] < 0.75 * error["base"]
    assert error["both"] < error["fine_tuning"] - 0.05


@pytest.mark.slow
def test_the_same_seed_writes_the_same_bed(beds, tmp_path):
    again = known_truth.write(tmp_path / "again", 1)
    for path in sorted(beds[1].iterdir()):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_true_errors(beds):
    p = known_truth.truth(beds[1])["other"]
    n = len(p)

    def scored(probs):
        four, one = torch.full((n,), 4), torch.ones(n)
        ids = [f"{i:05d}" for i in range(n)]
        return Scored("other", "first_token", "base", ids, probs, torch.zeros(n).long(), four, one)

    assert known_truth.true_errors(scored(p), beds[1]) == pytest.approx((0, 0), abs=1e-6)
    with pytest.raises(ValueError, match='no truth of "all"'):
        known_truth.true_errors(scored(p)._replace(dataset="all"), beds[1])
    certain = torch.eye(4)[p.argmax(1)]
    off = 1 - p.max(1).values.mean().item()
    assert known_truth.true_errors(scored(certain), beds[1]) == pytest.approx((off, off), abs=1e-6)
    # confident as the truth is on average: right as a bin, wrong on most questions
    flat = torch.eye(4)[p.argmax(1)] * (1 - off)
    gap, ece = known_truth.true_errors(scored(flat), beds[1])
    assert ece == pytest.approx(0, abs=1e-6)
    assert gap > 0.1


def test_the_command_line_runs_on_it(beds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["calm"])
    folder, columns = beds[1], {key: key for key in ("question", "options", "answer")}
    target = {
        "benchmarks": {"target": 200}, "scoring": "first_token", "eval_batch_size": 100,
        "files": {"target": {"path": str(folder / "target.jsonl"), **columns}},
    }  # fmt: skip
    source = {
        "source": str(folder / "source.jsonl"), "form": "question", "batch_size": 8,
        "inner_steps": 2, "outer_steps_per_epoch": 2,
    }  # fmt: skip
    config = {
        "controls": {
            "fine_tuning": {"class_path": "calm_lightning.FineTuning"},
            "temperature_scaling": {"class_path": "calm_lightning.TemperatureScaling"},
        },
        "model": {
            "class_path": "calm_lightning.CALMModule",
            "init_args": {"model_name": str(folder), "inner_lr": 0.5},
        },
        "data": {
            "class_path": "calm_lightning.Shift",
            "init_args": {
                "source": {"class_path": "calm_lightning.AlpacaDataModule", "init_args": source},
                "target": {"class_path": "calm_lightning.MCQADataModule", "init_args": target},
            },
        },
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "precision": "32-true"},
    }
    (tmp_path / "bed.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config=bed.yaml"])
    rows = json.loads((tmp_path / "runs" / "bed" / "metrics.json").read_text())["rows"]
    variants = {row["variant"] for row in rows if row["dataset"] == "target" and row["n"] == 200}
    assert variants == {"base", "alpha", "theta", "both", "fine_tuning", "temperature_scaling"}


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(ValueError, match="exists: name a new folder"):
        known_truth.write(tmp_path)
