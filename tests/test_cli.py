"""`calm` as a user types it, on a two-layer Llama."""

import json
import subprocess
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import yaml
from conftest import SHARED_DATA, make_tokenizer, needs_shared_data

from calm_lightning.cli import main, run

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
    assert (run / "reliability.png").stat().st_size > 10_000
    assert list((run / "tb").glob("events*"))
    lines = (run / "bins.csv").read_text().splitlines()
    top = [x.split(",") for x in lines[1:] if ",base,top," in x]
    assert sum(float(x[8]) for x in top) == 20

    # what the command line stored can be used again, and finds the trained state
    main(["test", f"--config={run / 'config.yaml'}"])
    again = json.loads((run / "metrics.json").read_text())
    assert again["run"]["seconds"].keys() >= {"fit", "test", "fit plain fine-tuning"}
    again = again["rows"]
    key = lambda r: (r["variant"], r["metric"])  # noqa: E731
    before = {key(r): r["value"] for r in found["rows"]}
    assert {key(r): r["value"] for r in again} == before
    assert "using runs/demo/last.ckpt" in capsys.readouterr().out

    main(["validate", *DEMO, "--trainer.limit_val_batches=1"])
    main(["predict", *DEMO, "--ckpt_path=last"])
    rows = [json.loads(x) for x in (run / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-5)
        assert row["confidence"] == max(row["probs"])
        assert row["correct"] == (row["prediction"] == row["answer"])
        assert len(row["probs"]) == len(row["probs_raw"]) == len(row["options"])
    accuracy = sum(row["correct"] for row in rows) / 20
    assert accuracy == pytest.approx(before["both", "accuracy"])


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
    assert covered == {str(p.relative_to(CONFIGS))[:-5] for p in CONFIGS.rglob("*.yaml")}
    for path in CONFIGS.rglob("*.yaml"):
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
        args += [f"--data.root={SHARED_DATA}", "--data.max_length=400"]
    elif combination[0] == "calm_ood":
        args += [f"--data.root={SHARED_DATA}"]
    else:
        args += ["--data.source.max_length=400", "--controls={}", "--data.target.scoring=text"]
        args += ["--data.target.benchmarks={sample: 5}", f"--data.root={SHARED_DATA}"]
        args += ["--trainer.limit_val_batches=0"]
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
