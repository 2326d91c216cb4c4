"""`calm` as a user types it, on a two-layer Llama."""

import json
import subprocess
import sys
from html import escape
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import yaml
from conftest import SHARED_DATA, make_tokenizer, mmlu, needs_shared_data, write
from PIL import Image

from calm_lightning import samples
from calm_lightning.cli import main, run
from calm_lightning.selection import RULE

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
pytestmark = pytest.mark.filterwarnings(
    # what jsonargparse 4.53 and peft 0.21 say of themselves when LightningCLI builds a LoraConfig
    "ignore:.*loftq_config:UserWarning",
    "ignore:.*instantiate_classes",
    # lightning's TensorBoard writer: tensorboard/compat, numpy alias
    "ignore:.*distutils.*:DeprecationWarning",
)


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_lm):
    """An empty working folder with a tiny model whose tokenizer knows short words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["calm"])
    tiny_lm.save_pretrained("tiny")
    make_tokenizer([f"Question: is it {c}?\nAnswer: {c}" for c in "ABCDE"] * 4).save_pretrained(
        "tiny"
    )
    return tmp_path


SMALL = [
    "--model.model_name=tiny",
    "--data.source.batch_size=4",
    "--data.source.inner_steps=2",
    "--data.source.max_length=400",
    "--data.source.outer_steps_per_epoch=2",
    "--data.target.scoring=text",
    "--data.target.benchmarks={sample: 20}",
]
DEMO = [f"--config={CONFIGS / 'demo.yaml'}", *SMALL]


def test_fit_controls_validate_test_predict(folder, capsys):
    main(["fit", *DEMO])
    printed = capsys.readouterr().out
    for row in ("base", "plain fine-tuning", "temperature scaling", "α dropped", "α applied"):
        assert row in printed
    run = folder / "runs" / "demo"
    assert str(run.relative_to(folder)) in printed
    found = json.loads((run / "metrics.json").read_text())
    assert found["schema"] == 1
    assert found["run"]["seconds"].keys() >= {"fit", "test", "fit plain fine-tuning"}
    variants = {r["variant"] for r in found["rows"]}
    assert variants == {"base", "fine_tuning", "temperature_scaling", "alpha", "theta", "both"}
    metrics = {r["metric"] for r in found["rows"]}
    assert metrics >= {"accuracy", "mean_confidence", "conf_ece", "cw_ece", "nll", "brier", "auroc"}
    assert all(r["n"] == 20 and r["bins"] == 10 for r in found["rows"])
    ece = [r for r in found["rows"] if r["metric"] in ("conf_ece", "cw_ece")]
    assert all(r["low"] <= r["value"] and r["floor"] < r["floor_p95"] for r in ece)
    with Image.open(run / "reliability.png") as image:
        assert image.format == "PNG"
    html = (run / "report.html").read_text()
    asked = [r["question"] for r in map(json.loads, sample_lines())]
    assert sum(escape(question) in html for question in asked) >= 5
    assert "Most confident mistakes of CALM, α" in html
    kept = [json.loads(x) for x in (run / "test_predictions.jsonl").read_text().splitlines()]
    assert len(kept) == 6 * 20
    assert {r["variant"] for r in kept} == variants
    lines = (run / "bins.csv").read_text().splitlines()
    top = [x.split(",") for x in lines[1:] if ",base,top," in x]
    assert sum(float(x[8]) for x in top) == 20

    # every validation was a candidate, plain fine-tuning's too, and the table says what chose
    selection = json.loads((run / "selection.json").read_text())
    assert [(c["method"], c["iteration"]) for c in selection["candidates"]] == [
        *[("calm", 0)] * 2, *[("calm", 2)] * 2, ("fine_tuning", 2),
    ]  # fmt: skip
    assert selection["rule"] == RULE
    assert selection["split"].startswith("near misses by first_token, N = ")
    assert "among 5 candidates" in " ".join(printed.split())
    assert found["run"]["selection"] == selection
    assert RULE.split(" at ")[0] in html

    # the folder alone says what to test: the chosen state
    main(["test", "--run_dir", "runs/demo"])
    again = json.loads((run / "metrics.json").read_text())
    assert again["run"]["seconds"].keys() >= {"fit", "test", "fit plain fine-tuning"}
    again = again["rows"]
    key = lambda r: (r["variant"], r["metric"])  # noqa: E731
    before = {key(r): r["value"] for r in found["rows"]}
    assert {key(r): r["value"] for r in again} == before
    assert "using runs/demo/chosen.ckpt" in capsys.readouterr().out

    main(["validate", *DEMO, "--trainer.limit_val_batches=1"])
    main(["predict", "--run_dir=runs/demo"])
    assert "using runs/demo/chosen.ckpt" in capsys.readouterr().out
    rows = [json.loads(x) for x in (run / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-5)
        assert row["confidence"] == max(row["probs"])
        assert row["correct"] == (row["prediction"] == row["answer"])
        assert len(row["probs"]) == len(row["probs_raw"]) == len(row["options"])
    accuracy = sum(row["correct"] for row in rows) / 20
    alpha = torch.load(run / "chosen.ckpt", weights_only=True)["alpha_chosen"]
    assert accuracy == pytest.approx(before["both" if alpha else "theta", "accuracy"])


def sample_lines():
    return samples.path("mcqa").read_text(encoding="utf-8").splitlines()


def test_a_folder_without_a_run_is_no_config(folder):
    with pytest.raises(SystemExit, match=r"there is no nowhere/config\.yaml: name a folder"):
        main(["test", "--run_dir", "nowhere"])


def test_the_base_is_measured_without_a_run(folder, capsys):
    main(["test", *DEMO, "--run_dir=new"])
    assert "this is the model before any training" in capsys.readouterr().out
    rows = json.loads(Path("new/metrics.json").read_text())["rows"]
    assert len({r["value"] for r in rows if r["metric"] == "nll"}) == 1  # nothing was trained


def test_two_runs_and_an_api_compared_by_the_entry_point(folder, capsys):
    for seed in (0, 1):
        main(["fit", *DEMO, f"--run_dir=run{seed}", f"--seed_everything={seed}", "--controls={}"])
    capsys.readouterr()
    kept = [json.loads(x) for x in Path("run0/test_predictions.jsonl").read_text().splitlines()]
    rows = [{k: r[k] for k in ("id", "probs", "answer")} for r in kept if r["variant"] == "base"]
    Path("api.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    calm = Path(sys.executable).with_name("calm")
    done = subprocess.run(
        [calm, "compare", "run0", "run1", "api.jsonl", "--out", "both"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert any("minus run0: CALM, α dropped: sample, text" in line for line in lines)
    assert sum(line.startswith(" run1: ") for line in lines) == 2 * 3  # its base is run0's
    found = json.loads(Path("both/comparison.json").read_text())
    said = {r["variant"]: r["value"] for r in found["rows"] if r["metric"] == "conf_ece"}
    assert said["api"] == said["run0: base"]
    minus = {r["variant"]: r["value"] for r in found["differences"] if r["metric"] == "conf_ece"}
    assert minus["api"] == pytest.approx(said["api"] - said["run0: theta"])
    with Image.open("both/comparison_text.png") as image:
        assert image.format == "PNG"


def test_tensorboard_holds_figures_histograms_and_one_row(folder):
    import tensorboard.backend.event_processing.event_accumulator as reader
    from tensorboard.plugins.hparams import metadata

    write(Path("questions/q.jsonl"), mmlu(60, choices=["yes", "no"], answer=0))
    files = (
        "{mine: {path: questions/q.jsonl, question: question, options: choices, answer: answer}}"
    )
    own = ["--data=calm_lightning.MCQADataModule", "--data.benchmarks={mine: 10}"]
    own += [f"--data.files={files}", "--data.scoring=text", "--data.max_length=400"]
    own += ["--data.batch_size=2", "--data.inner_steps=1", "--data.outer_steps_per_epoch=2"]
    own += ["--model=calm_lightning.CALMModule", "--model.model_name=tiny"]
    own += ["--model.lora.target_modules=all-linear", "--trainer.accelerator=cpu"]
    main(["fit", *own, "--trainer.max_epochs=2", "--run_dir=r"])
    main(["test", "--run_dir=r"])
    found = reader.EventAccumulator("r/tb", {"histograms": 0}).Reload()  # 0: all of them
    tags = found.Tags()
    assert {"alpha/delta", "alpha/l"} <= set(tags["histograms"])
    assert [e.step for e in found.Histograms("alpha/delta")] == [2, 4]
    assert {"val/reliability_text", "test/reliability_text"} <= set(tags["images"])
    assert {"val/conf_ece", "test/both/conf_ece"} <= set(tags["scalars"])
    start = metadata.parse_session_start_info_plugin_data(
        found.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    )
    assert start.hparams["model.gamma"].number_value == 0.5
    assert start.hparams["data.inner_steps"].number_value == 1
    experiment = metadata.parse_experiment_plugin_data(
        found.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    )
    named = {info.name.tag for info in experiment.metric_infos}
    assert {"val/conf_ece", "test/both/conf_ece"} <= named


def test_an_existing_run_is_kept_unless_told(folder, capsys):
    args = ["fit", *DEMO, "--controls=null", "--run_dir=here"]
    main(args)
    state = torch.load("here/last.ckpt", weights_only=True)["state_dict"]
    with pytest.raises(SystemExit, match="holds an earlier run"):
        main(args)
    # going on from a finished run changes nothing and is no error
    main([*args, "--ckpt_path=last"])
    again = torch.load("here/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(state[k], again[k]) for k in state)
    Path("here/mine.txt").write_text("x")
    with pytest.raises(SystemExit, match="entropy must be one of"):
        main([*args, "--overwrite=true", "--model.entropy=gini"])
    assert Path("here/last.ckpt").exists()  # bad input costs nothing
    main([*args, "--overwrite=true"])
    assert not Path("here/mine.txt").exists()
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_text("x")
    with pytest.raises(SystemExit, match=r"no config\.yaml"):
        main(["fit", *DEMO, "--run_dir=photos", "--overwrite=true"])
    assert Path("photos/cat.jpg").exists()
    with pytest.raises(SystemExit, match=r"no elsewhere/last\.ckpt to go on from"):
        main(["fit", *DEMO, "--run_dir=elsewhere", "--ckpt_path=last"])


def test_resuming_by_the_command_line_equals_one_run(folder):
    long = ["--data.source.outer_steps_per_epoch=4", "--controls=null", "--trainer.max_epochs=2"]
    long.append("--model.lora.lora_dropout=0.3")  # so the dice matter
    main(["fit", *DEMO, *long, "--run_dir=whole"])
    # the same run, interrupted in its sixth outer iteration of 8, inside an epoch
    stop = ["--trainer.callbacks+=conftest.StopIn", "--trainer.callbacks.item=5"]
    with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
        main(["fit", *DEMO, *long, *stop, "--run_dir=parts"])
    assert torch.load("parts/last.ckpt", weights_only=True)["global_step"] == 5
    main(["fit", *DEMO, *long, "--run_dir=parts", "--ckpt_path=last"])
    a, b = (torch.load(f"{d}/last.ckpt", weights_only=True) for d in ("whole", "parts"))
    assert a["global_step"] == b["global_step"] == 8
    for key, tensor in a["state_dict"].items():
        assert torch.equal(tensor, b["state_dict"][key])


def test_as_a_module_and_from_the_entry_point(folder):
    calm = Path(sys.executable).with_name("calm")
    for command in ([sys.executable, "-m", "calm_lightning"], [calm]):
        done = subprocess.run([*command, "fit", "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert "--controls" in done.stdout


def overlays():
    """Every base config alone and under every overlay that fits it."""
    for base in ("calm_ood", "calm_id", "demo", "smollm2_ood"):
        yield (base,)
    for model in sorted(p.stem for p in (CONFIGS / "models").iterdir()):
        for base in ("calm_ood", "calm_id"):
            yield (base, f"models/{model}")
            yield (base, f"paper/{base.split('_')[1]}_{model}")


def test_configs_name_hub_ids_and_every_file_is_covered():
    covered = {name for combination in overlays() for name in combination}
    # those of methods, which name no model, are for tests/test_baselines.py
    files = [p for p in CONFIGS.rglob("*.yaml") if p.parent.name != "methods"]
    assert covered == {str(p.relative_to(CONFIGS))[:-5] for p in files}
    for path in files:
        name = yaml.safe_load(path.read_text())["model"]["init_args"]["model_name"]
        assert name.count("/") == 1
        assert not Path(name).exists()


@needs_shared_data
@pytest.mark.filterwarnings("ignore:.*q_hat:UserWarning")  # one inner step at a small rate
@pytest.mark.parametrize("combination", list(overlays()), ids="+".join)
def test_every_overlay_runs_two_outer_iterations(combination, folder, capsys):
    """calm_ood and calm_id really run NF4 with double quantisation and LoRA r = 64 on this CPU."""
    args = ["fit", *[f"--config={CONFIGS / name}.yaml" for name in combination]]
    args += ["--model.model_name=tiny", "--trainer.max_epochs=1", "--trainer.limit_val_batches=1"]
    inner = "--data" if combination[0] == "calm_id" else "--data.source"
    args += [f"{inner}.{k}" for k in ("inner_steps=1", "batch_size=2", "outer_steps_per_epoch=2")]
    if combination[0] == "calm_id":
        args += ["--data.benchmarks={openbookqa: 20}", "--data.fit_benchmarks={openbookqa: 100}"]
        args += [f"--data.root={SHARED_DATA}", "--data.max_length=400", "--controls=null"]
    elif combination[0] == "calm_ood":
        args += [f"--data.root={SHARED_DATA}", "--controls=null"]
    else:
        args += ["--data.source.max_length=400", "--controls={}", "--data.target.scoring=text"]
        args += ["--data.target.benchmarks={sample: 5}", f"--data.root={SHARED_DATA}"]
        args += ["--trainer.limit_val_batches=0"]
        args += ["--data.selection=null"] if combination[0] == "smollm2_ood" else []
    backbone = run(args).model.backbone  # None after controls, which need the memory
    folder = Path("runs") / "-".join(Path(name).name for name in combination)
    state = torch.load(folder / "last.ckpt", weights_only=True)
    assert state["global_step"] == 2
    if combination[0].startswith("calm"):
        states = [
            m.weight.quant_state for m in backbone.lm.modules() if isinstance(m, bnb.nn.Linear4bit)
        ]
        assert {s.quant_type for s in states} == {"nf4"}
        assert all(s.nested for s in states)  # double quantisation
        assert len(states) == 2 * 7
        shapes = {tuple(t.shape) for k, t in state["state_dict"].items() if "lora_A" in k}
        assert all(shape[0] == 64 for shape in shapes)
        assert not any("lm_head" in k for k in state["state_dict"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--model.model_name=./nowhere", "there is no model at nowhere"),
        ("--trainer.accumulate_grad_batches=2", "micro_batch_size"),
        ("--data.source.batch_size=0", "batch_size is 0"),
        ("--data.source.source=missing.jsonl", "missing.jsonl"),
        ("--data.target.benchmarks={sample: 2000}", "largest possible number is"),
        ("--model.gamma=much", "gamma"),
        ("--model.model_name=someone/no-such-model", "someone/no-such-model"),
        ("--controls={mine: {init_args: {}}}", "controls.mine needs a class_path"),
        ("--controls={mine: {class_path: calm_lightning.CALMModule}}", "one variant of its own"),
        ("--controls={mine: {class_path: calm_lightning.Nothing}}", "controls.mine: "),
        (
            "--controls={mine: {class_path: calm_lightning.FineTuning, init_args: {speed: 1}}}",
            "speed",
        ),
        ("--model.entropy=gini", "entropy must be one of"),
    ],
)
def test_bad_input_is_one_sentence(change, words, folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *DEMO, "--run_dir=bad", change])
    printed = capsys.readouterr()
    said = str(stop.value) + printed.err
    assert words in said
    assert "Traceback" not in said
    assert len(str(stop.value)) < 1100
    assert "fit 1/" not in printed.out  # before any training
