"""The methods to compare CALM with: losses by plain loops, limits, and whole runs."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
import yaml
from conftest import instructions, make_tokenizer, mmlu, write
from lightning.pytorch import Callback, Trainer, seed_everything
from peft import LoraConfig
from torch.nn import functional as F

from calm_lightning import (
    CFT,
    AlpacaDataModule,
    FineTuning,
    Iterate,
    LabelSmoothing,
    MCQADataModule,
    Regularization,
    TemperatureScaling,
    VectorScaling,
)
from calm_lightning.bilevel import gradient
from calm_lightning.cli import main, run
from calm_lightning.decisions import Bins, Decisions
from calm_lightning.smoothing import calibration_loss, smoothed_cross_entropy

CONFIGS = Path(__file__).parents[1] / "configs"


def free_text(tmp_path, T=1, K=3, B=4, **options):
    path = write(tmp_path / "alpaca.jsonl", instructions(60))
    return AlpacaDataModule(
        path, form="question", batch_size=B, inner_steps=T, outer_steps_per_epoch=K,
        max_length=64, **options,
    )  # fmt: skip


def letters(tmp_path, rows=None, T=1, K=3, B=4, **options):
    rows = [row | {"answer": i % 4} for i, row in enumerate(rows or mmlu(60))]
    files = {"mine": {"path": write(tmp_path / "mcqa.jsonl", rows), "question": "question",
                      "options": "choices", "answer": "answer"}}  # fmt: skip
    return MCQADataModule(
        {"mine": 12}, files=files, batch_size=B, inner_steps=T, outer_steps_per_epoch=K,
        max_length=128, **options,
    )  # fmt: skip


def trainer(tmp_path, epochs=1, **options):
    return Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, num_sanity_val_steps=0,
        limit_val_batches=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
    )  # fmt: skip


def method(make, lm, tokenizer, **options):
    """A method on the tiny model, whose LoRA starts where `seed_everything` says."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    seed_everything(0, verbose=False)
    lm = copy.deepcopy(lm)
    return make(model=lm, tokenizer=tokenizer, lora=lora, **({"lower_lr": 1e-2} | options))


# ---- losses ---------------------------------------------------------------------------------


def problem(n=9, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, k, generator=g, dtype=torch.float64)
    real = torch.ones(n, k, dtype=torch.bool)
    real[::3, -1] = False
    return z, torch.arange(n) % (k - 1), real


def masked(z, real):
    log_p = z.log_softmax(-1)
    return log_p if real is None else log_p.masked_fill(~real, torch.finfo(z.dtype).min)


@pytest.mark.parametrize("ragged", [False, True])
def test_smoothed_cross_entropy_by_a_loop(ragged):
    z, answer, real = problem()
    real = real if ragged else None
    keep = torch.linspace(0, 1, len(z), dtype=torch.float64)
    wanted = 0.0
    for i, row in enumerate(z.log_softmax(-1)):
        own = [j for j in range(4) if real is None or real[i, j]]
        for j in own:
            t = keep[i] if j == answer[i] else (1 - keep[i]) / (len(own) - 1)
            wanted -= t * row[j]
    loss = lambda z: smoothed_cross_entropy(masked(z, real), answer, real, keep)  # noqa: E731
    torch.testing.assert_close(loss(z), wanted)
    torch.autograd.gradcheck(loss, z.requires_grad_())


def test_smoothing_meets_cross_entropy_and_torchs_own():
    z, answer, _ = problem()
    hard = smoothed_cross_entropy(z.log_softmax(-1), answer, None, 1.0)
    torch.testing.assert_close(hard, F.cross_entropy(z, answer, reduction="sum"))
    soft = smoothed_cross_entropy(z.log_softmax(-1), answer, None, 0.9)
    # torch gives epsilon / K to every class, the right one included
    theirs = F.cross_entropy(z, answer, reduction="sum", label_smoothing=0.1 * 4 / 3)
    torch.testing.assert_close(soft, theirs)


BINS = Bins(  # bin 4 is empty, bin 5 always right, the last one rarely
    torch.tensor([0, 0, 2, 5, 0, 4, 9, 3, 8, 20.0]), torch.tensor([0, 0, 1, 1, 0, 4, 6, 1, 5, 2.0])
)


def published(z, real, legacy):
    """L_cal of the published code by a loop, over all bins or (legacy) all but the last."""
    total = z.new_zeros(())
    for i, row in enumerate(z):
        own = [j for j in range(z.shape[1]) if real is None or real[i, j]]
        p = row[own].softmax(-1).sort(descending=True).values
        k = min(int(p[0].item() * 10), 9)
        if BINS.count[k] == 0 or (legacy and k == 9):
            continue
        acc = float(BINS.right[k] / BINS.count[k])
        if acc == 1:
            t = torch.zeros_like(p[1:])
        else:
            rise = torch.tanh(math.log(3) / (p[1] * (1 - acc)) * p[1:])
            a = (1 - acc) / (rise.sum() + len(rise))
            t = a * rise + a
        assert t.sum().item() == pytest.approx(1 - acc)
        if not legacy:
            t = t.detach()
        total = total + ((p[0] - acc) ** 2 + ((p[1:] - t) ** 2).sum()) / float(BINS.count[k])
    return total


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_calibration_loss_by_a_loop(legacy, ragged):
    z, answer, real = problem(n=40)
    z[0] = torch.tensor([9.0, 0, 0, 0])  # confident beyond .9
    real = real if ragged else None
    places = {min(int(c * 10), 9) for c in z.softmax(-1).max(-1).values.tolist()}
    assert {4, 5, 9} <= places  # an empty bin, one always right, the last
    bins = Bins(*(t.double() for t in BINS))
    loss = lambda z: calibration_loss(masked(z, real), answer, real, bins=bins, legacy=legacy)  # noqa: E731
    z.requires_grad_()
    torch.testing.assert_close(loss(z), published(z, real, legacy))
    (ours,) = torch.autograd.grad(loss(z), z)
    (wanted,) = torch.autograd.grad(published(z, real, legacy), z)
    torch.testing.assert_close(ours, wanted)
    assert bool(ours[0].any()) is not legacy  # the published loss leaves the most confident alone
    if legacy:  # without a detached target the gradient is that of the value
        torch.autograd.gradcheck(loss, z)


@pytest.mark.parametrize("inside", [False, True])
def test_decisions_in_chunks_equal_all_at_once(inside):
    class Head:
        weight = torch.randn(13, 5, dtype=torch.float64)
        bias = torch.randn(13, dtype=torch.float64)

    n = 150  # more than two chunks
    hidden = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(13)[:4] for _ in range(n)])
    real = torch.arange(4) < torch.tensor([[4], [3]])[torch.arange(n) % 2]
    d = Decisions(hidden, torch.arange(n) % 3, *((ids, real) if inside else ()))
    keep = torch.rand(n, dtype=torch.float64)
    ours = d.total(smoothed_cross_entropy, Head, keep)
    log_p = (hidden @ Head.weight.T + Head.bias).log_softmax(-1)
    if inside:
        log_p = log_p.gather(1, ids)
    wanted = smoothed_cross_entropy(log_p, d.answer, d.real, keep)
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t, hidden) for t in (ours, wanted)))


def all_logits(module, batch, adjusted=False):
    z = module.backbone.lm(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits[:, :-1]
    return (1 + module.alpha.delta) * z + module.alpha.l if adjusted else z


def naive(module, name, batch, calib):
    """Each method's loss through the Hugging Face model, position by position."""
    labels, h = batch["labels"][:, 1:], module.hparams
    ids = [module.tokenizer.convert_tokens_to_ids(f"Ġ{c}") for c in "ABCD"]
    total, count = 0.0, int((labels != -100).sum())
    with torch.no_grad(), module.backbone.at_theta_0():
        start = all_logits(module, batch)
    log_p = all_logits(module, batch, adjusted=name == "upper").log_softmax(-1)
    for b in range(len(labels)):
        places = (labels[b] != -100).nonzero()[:, 0].tolist()
        for i in places:
            row, y = log_p[b, i], int(labels[b, i])
            decides = i == places[0] or h.get("over") == "vocabulary"
            own = ids if h.get("over") == "options" else range(len(row))
            if name == "label_smoothing" and decides:
                confidence = float(start[b, i][list(own)].softmax(-1).max())
                k = min(int(confidence * 10), 9)
                right, n = float(module.bins().right[k]), float(module.bins().count[k])
                keep = (right / n if n else 1.0) if h.epsilon is None else 1 - h.epsilon
                others = sum(row[j] for j in own if j != y)
                total -= (keep * row[y] + (1 - keep) / (len(own) - 1) * others) / count
            elif name == "cft":
                total -= (1 - h.weight) * row[y] / count
                if decides:
                    q = row[list(own)].log_softmax(-1)
                    at = torch.tensor([list(own).index(y)])
                    cal = calibration_loss(q[None], at, None, bins=module.bins())
                    total += h.weight * h.scale * cal
            elif name == "upper":
                total += (-h.task_weight * row[y] + row.max()) / count
            else:
                total -= row[y] / count
                if name == "regularization" and h.split == "train":
                    total -= h.weight * uncertainty(row, h.penalty) / count
    if name == "regularization" and h.split == "calib":
        where = calib["labels"][:, 1:] != -100
        rows = all_logits(module, calib).log_softmax(-1)[where]
        total -= h.weight * sum(uncertainty(row, h.penalty) for row in rows) / len(rows)
    return total


def uncertainty(row, penalty):
    return -row.max() if penalty == "self_ce" else -(row.exp() * row).sum()


LOSSES = [
    (Regularization, {"weight": 0.3}),
    (Regularization, {"weight": 0.3, "penalty": "exact"}),
    (Regularization, {"weight": 0.3, "penalty": "exact", "split": "calib"}),
    (LabelSmoothing, {"over": "options"}),
    (LabelSmoothing, {"over": "vocabulary"}),
    (LabelSmoothing, {"over": "options", "epsilon": 0.2}),
    (LabelSmoothing, {"over": "vocabulary", "epsilon": 0.2}),
    (CFT, {"over": "options", "scale": 1.0}),
    (CFT, {"over": "vocabulary", "scale": 1.0}),
    (Iterate, {}),
]


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize(("make", "options"), LOSSES)
def test_objectives_by_hand_in_float64(
    make, options, micro_batch_size, tiny_lm, tiny_tokenizer, tmp_path
):
    module = method(
        make, tiny_lm.double(), tiny_tokenizer, micro_batch_size=micro_batch_size, **options
    )
    module.configure_model()
    for p in module.backbone.theta():  # B of LoRA starts at 0: half of the gradients would be
        p.data = p.data.double() + 0.1 * torch.randn_like(p, dtype=torch.float64)
    module.alpha.double()
    if make is Iterate:
        module.alpha.delta.data.normal_(0, 0.1)
        module.alpha.l.data.normal_(0, 0.1)
    module._bins = 0, Bins(5 + torch.arange(10.0), torch.arange(10.0) / 2)
    data = letters(tmp_path, B=5, tokenizer=tiny_tokenizer)
    data.setup("fit")
    item = data.train_dataloader()[0]
    (batch, *_), calib = item["train"], item["calib"]
    name, params = list(module.variants)[-1], module.backbone.theta()
    if make is Iterate:
        name, params, loss = "upper", module.alpha.free(), module.upper(batch)
    else:
        loss = module.objective(batch, calib)
    value, grads = gradient(loss, params)
    plain = naive(module, name, batch, calib)
    torch.testing.assert_close(value, plain.detach().to(value), rtol=1e-6, atol=1e-8)
    wanted = torch.autograd.grad(plain, params)
    for ours, theirs in zip(grads, wanted, strict=True):  # Llama's norm is float32 within
        torch.testing.assert_close(ours, theirs.to(ours), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Regularization, {"weight": 0.0}),
        (Regularization, {"weight": 0.0, "split": "calib"}),
        (LabelSmoothing, {"epsilon": 0.0}),
        (LabelSmoothing, {"epsilon": 0.0, "over": "vocabulary"}),
        (CFT, {"weight": 0.0}),
        (CFT, {"weight": 0.0, "over": "vocabulary"}),
        (Iterate, {"upper_lr": 0.0}),
    ],
)
def test_in_their_limits_they_are_fine_tuning(make, options, tiny_lm, tiny_tokenizer, tmp_path):
    found = []
    for module in (
        method(FineTuning, tiny_lm, tiny_tokenizer),
        method(make, tiny_lm, tiny_tokenizer, **options),
    ):
        run = trainer(tmp_path)
        run.fit(module, letters(tmp_path))
        found.append(
            (run.callback_metrics["train/loss"], [p.detach() for p in module.backbone.theta()])
        )
    (loss, theta), (same_loss, same_theta) = found
    torch.testing.assert_close(loss, same_loss)
    for a, b in zip(theta, same_theta, strict=True):
        # AdamW turns rounding of a gradient near 0 into a step: compare as a whole
        assert (a - b).norm() < 1e-3 * a.norm()


# ---- runs -----------------------------------------------------------------------------------

EVERY = [
    ("fine_tuning", FineTuning, {}, {}),
    ("regularization", Regularization, {}, {}),
    ("iterate", Iterate, {"upper_lr": 1e-2}, {"upper_lr": 1e-2}),
    ("label_smoothing", LabelSmoothing, {"epsilon": 0.1, "over": "vocabulary"}, {}),
    ("cft", CFT, {"over": "vocabulary"}, {}),
    ("temperature_scaling", TemperatureScaling, {}, {"over": "options"}),
    ("vector_scaling", VectorScaling, {}, {}),
]


@pytest.mark.parametrize("source", [free_text, letters])
@pytest.mark.parametrize(
    ("name", "make", "text", "choice"), EVERY, ids=[name for name, *_ in EVERY]
)
def test_every_method_on_both_sources(
    name, make, text, choice, source, tiny_lm, tiny_tokenizer, tmp_path
):
    module = method(make, tiny_lm, tiny_tokenizer, **(text if source is free_text else choice))
    data, asked = source(tmp_path), letters(tmp_path)
    module.configure_model()
    state = lambda: [*module.backbone.theta(), *module.alpha.free()]  # noqa: E731
    before = [p.detach().clone() for p in state()]
    run = trainer(tmp_path)
    run.fit(module, data)
    moved = sum(not torch.equal(a, b) for a, b in zip(state(), before, strict=True))
    assert moved == len(before)
    assert all(torch.isfinite(p).all() for p in state())
    run.test(module, asked, verbose=False)
    found = {s.variant: s for s in module.scored if s.dataset == "mine"}
    assert set(found) == {"base", name}
    assert not torch.equal(found["base"].probs, found[name].probs)


@pytest.mark.parametrize("make", [LabelSmoothing, CFT])
def test_bins_are_those_of_the_whole_calib_split(make, tiny_lm, tiny_tokenizer, tmp_path):
    module = method(make, tiny_lm, tiny_tokenizer)
    data = letters(tmp_path, sizes={"train": 20, "calib": 17, "sel": 5})
    trainer(tmp_path).fit(module, data)
    batch = next(iter(data.token_batches("calib", 17))) | {}
    data.batch_size = 17
    (batch,) = data.token_batches("calib")
    ids = [tiny_tokenizer.convert_tokens_to_ids(f"Ġ{c}") for c in "ABCD"]
    count, right = torch.zeros(10), torch.zeros(10)
    with torch.no_grad(), module.backbone.at_theta_0():
        logits = all_logits(module, batch)
    for i, labels in enumerate(batch["labels"][:, 1:]):
        at = int((labels != -100).nonzero()[0])
        p = logits[i, at][ids].softmax(-1)
        k = min(int(float(p.max()) * 10), 9)
        count[k] += 1
        right[k] += ids[int(p.argmax())] == int(labels[at])
    assert count.sum() == 17
    assert torch.equal(module.bins().count, count)
    assert torch.equal(module.bins().right, right)


def test_bins_over_the_vocabulary_count_every_token(tiny_lm, tiny_tokenizer, tmp_path):
    module = method(CFT, tiny_lm, tiny_tokenizer, over="vocabulary")
    data = free_text(tmp_path)
    trainer(tmp_path).fit(module, data)
    tokens = sum(int((b["labels"] != -100).sum()) for b in data.token_batches("calib"))
    assert module.bins().count.sum() == tokens > 6


class Watch(Callback):
    """The bins of each epoch; a checkpoint in item `stop_at`."""

    def __init__(self, path, stop_at):
        self.path, self.stop_at, self.bins, self.losses = path, stop_at, [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.losses.append(trainer.callback_metrics["train/loss"].item())
        if trainer.is_last_batch:
            self.bins.append(module._bins[1] if hasattr(module, "_bins") else None)
        if trainer.global_step == self.stop_at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stop_at", [2, 3, 4])  # inside an epoch, at its end, after it
@pytest.mark.parametrize(
    ("make", "options"),
    [(LabelSmoothing, {}), (CFT, {"refresh_bins": True}), (Iterate, {"upper_lr": 1e-2})],
)
def test_resuming_continues_exactly(make, options, stop_at, tiny_lm, tiny_tokenizer, tmp_path):
    found = []
    for ckpt in (None, tmp_path / "last.ckpt"):
        module = method(make, tiny_lm, tiny_tokenizer, lower_lr=0.1, **options)
        watch = Watch(tmp_path / "last.ckpt", stop_at)
        trainer(tmp_path, epochs=2, callbacks=[watch]).fit(
            module, letters(tmp_path), ckpt_path=ckpt
        )
        found.append((watch, [*module.backbone.theta(), *module.alpha.free()]))
    (whole, state), (resumed, same) = found
    assert resumed.losses == whole.losses[stop_at:]
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))
    if make is not Iterate:
        changed = any(not torch.equal(a, b) for a, b in zip(*whole.bins, strict=True))
        assert changed is bool(options.get("refresh_bins"))


def test_iterate_moves_alpha_once_an_epoch_and_theta_otherwise(tiny_lm, tiny_tokenizer, tmp_path):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append((module.alpha.delta.clone(), module.backbone.theta()[0].detach().clone()))

    module = method(Iterate, tiny_lm, tiny_tokenizer, upper_lr=1e-2, use="all")
    run = trainer(tmp_path, epochs=2, callbacks=[Look()])
    run.fit(module, free_text(tmp_path, T=2))
    assert run.global_step == 2 * 3 * 3  # (T + 1) theta steps an item, calib is alpha's
    delta = [d for d, _ in seen]
    steps = itertools.pairwise([torch.zeros_like(delta[0]), *delta])
    moved = [not torch.equal(a, b) for a, b in steps]
    assert moved == [False, False, True, False, False, True]
    thetas = [t for _, t in seen]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(thetas))


# ---- what is refused, and options a row brings along ----------------------------------------


@pytest.mark.parametrize("make", [LabelSmoothing, CFT])
def test_free_text_has_no_options(make, tiny_lm, tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=f"{make.__name__} over options: a response begins with"):
        trainer(tmp_path).fit(method(make, tiny_lm, tiny_tokenizer), free_text(tmp_path))


def test_a_loader_alone_has_no_calib_split(tiny_lm, tiny_tokenizer, tmp_path):
    data = letters(tmp_path, tokenizer=tiny_tokenizer)
    data.setup("fit")
    with pytest.raises(ValueError, match="CFT reads the calib split as a whole"):
        trainer(tmp_path).fit(method(CFT, tiny_lm, tiny_tokenizer), data.train_dataloader())


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (CFT, {"over": "words"}, "over must be one of vocabulary, options"),
        (CFT, {"weight": 2.0}, "share of the loss"),
        (LabelSmoothing, {"epsilon": -0.1}, "share of the label"),
        (Regularization, {"penalty": "gini"}, "penalty must be one of self_ce, exact"),
        (Regularization, {"split": "test"}, "split must be"),
        (Iterate, {"penalty": "gini"}, "penalty must be one of self_ce, exact"),
    ],
)
def test_constructor_errors(make, options, words, tiny_lm):
    with pytest.raises(ValueError, match=words):
        make(model=tiny_lm, **options)


def test_rows_may_bring_their_own_options(tiny_lm, tiny_tokenizer):
    module = method(CFT, tiny_lm, tiny_tokenizer)
    module.configure_model()
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.long),
        "labels": torch.tensor([[-100, -100, 7], [-100, 9, 1]]),
        "option_ids": torch.tensor([[7, 3, -100], [2, 3, 9]]),
    }
    (s,) = module.supervised(batch)
    d = module.decisions(s, batch)
    assert d.answer.tolist() == [0, 2]
    assert d.real.tolist() == [[True, True, False], [True, True, True]]
    p = d.log_probs(module.backbone).softmax(-1)
    assert p[0, 2] == 0
    with torch.no_grad():
        z = all_logits(module, batch)
    torch.testing.assert_close(p[1], z[1, 0][[2, 3, 9]].softmax(-1))
    batch["option_ids"][1, 2] = 4
    with pytest.raises(ValueError, match="none of its row's options"):
        module.decisions(s, batch)


@pytest.mark.parametrize("scoring", ["letter", "first_token"])
@pytest.mark.parametrize("make", [LabelSmoothing, CFT, TemperatureScaling])
def test_questions_bring_their_own_options(make, scoring, tiny_lm, tiny_tokenizer, tmp_path):
    module = method(make, tiny_lm, tiny_tokenizer, over="options")
    # words that begin with a token of their own in this tokenizer
    choices = ["A town", "B town", "C town", "D town"]
    data = letters(tmp_path, mmlu(60, choices=choices), scoring=scoring)
    run = trainer(tmp_path)
    run.fit(module, data)
    row = data.rows("train")[0]
    question = data.source_questions()["train"][0]
    ids = data._options(question, data.prompt(question), scoring)[1]
    assert row["option_ids"] == [first for first, *_ in ids]
    answer = next(i for i in row["labels"] if i != -100)
    assert row["option_ids"].index(answer) == question.answer
    run.test(module, data, verbose=False)
    assert {s.variant for s in module.scored} == set(module.variants)


# ---- the overlays, as a user combines them --------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_lm):
    """An empty working folder with a tiny model whose tokenizer knows letters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["calm"])
    tiny_lm.save_pretrained("tiny")
    make_tokenizer([f"Question: is it {c}?\nAnswer: {c}" for c in "ABCDE"] * 4).save_pretrained(
        "tiny"
    )
    return tmp_path


OVERLAYS = sorted(p.stem for p in (CONFIGS / "methods").iterdir())
IN_DOMAIN = {"label_smoothing", "cft", "temperature_scaling_id"}


@pytest.mark.filterwarnings("ignore:.*loftq_config:UserWarning", "ignore:.*instantiate_classes")
@pytest.mark.filterwarnings("ignore:.*distutils.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*q_hat:UserWarning")
@pytest.mark.parametrize(
    ("base", "overlay"),
    [("smollm2_ood", name) for name in OVERLAYS]
    + [("calm_id", name) for name in sorted(IN_DOMAIN | {"iterate"})],
)
def test_overlays_change_the_method_and_keep_the_rest(overlay, base, folder):
    path = CONFIGS / "methods" / f"{overlay}.yaml"
    args = ["fit", f"--config={CONFIGS / base}.yaml", f"--config={path}"]
    args += ["--model.model_name=tiny", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0"]
    inner = "--data" if base == "calm_id" else "--data.source"
    args += [f"{inner}.{k}" for k in ("inner_steps=1", "batch_size=2", "outer_steps_per_epoch=2")]
    args += ["--controls=null"]
    if base == "calm_id":
        # float32 here: NF4 is the business of test_cli.py
        args += ["--model.quantization=null", "--trainer.precision=32-true"]
        args += ["--data.benchmarks={sample: 20}", "--data.fit_benchmarks={sample: 60}"]
        args += ["--data.max_length=400"]
    else:
        args += ["--data.source.source=sample", "--data.source.max_length=400"]
        args += ["--data.selection=null"]
        args += ["--data.target.benchmarks={sample: 20}", "--data.target.scoring=text"]
    if overlay in IN_DOMAIN and base != "calm_id":
        with pytest.raises(SystemExit, match="over options: a response begins with"):
            main(args)
        return
    found = run(args).model
    asked = yaml.safe_load(path.read_text())["model"]
    wanted = asked.get("class_path", "calm_lightning.CALMModule").split(".")[-1]
    assert type(found).__name__ == wanted
    for key, value in asked["init_args"].items():
        assert found.hparams[key] == value
    below = yaml.safe_load((CONFIGS / f"{base}.yaml").read_text())["model"]["init_args"]
    assert found.hparams.gradient_checkpointing == below.get("gradient_checkpointing", False)
    if found.trains_theta:
        assert found.backbone.lm.peft_config["default"].r == below["lora"]["r"]
        assert found.hparams.lower_lr == asked["init_args"].get("lower_lr", below["lower_lr"])
    saved = torch.load(f"runs/{base}-{overlay}/last.ckpt", weights_only=True)["state_dict"]
    kept = [p for p in found.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), kept, strict=True))
