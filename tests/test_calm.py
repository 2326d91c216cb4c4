"""The modules on a two-layer Llama: the direction, the optimizers, resuming, reuse."""

import copy

import pytest
import torch
from conftest import instructions, write
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from peft import LoraConfig
from torch.nn import functional as F

from calm_lightning import (
    AlpacaDataModule,
    CALMModule,
    FineTuning,
    MCQADataModule,
    Shift,
    TemperatureScaling,
)
from calm_lightning.bilevel import outer_step


def lora(**changes):
    return LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes
    )


def source(tmp_path, T=2, K=3, B=4, **options):
    path = write(tmp_path / "alpaca.jsonl", instructions(60))
    return AlpacaDataModule(
        path, form="question", batch_size=B, inner_steps=T, outer_steps_per_epoch=K,
        max_length=64, **options,
    )  # fmt: skip


def trainer(tmp_path, epochs=1, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, num_sanity_val_steps=0,
        limit_val_batches=0, **({"enable_checkpointing": False} | quiet | options),
    )  # fmt: skip


def calm(model, tokenizer, **options):
    defaults = {"lower_lr": 1e-3, "upper_lr": 1e-2, "inner_lr": 0.5, "lora": lora()}
    return CALMModule(model=model, tokenizer=tokenizer, **(defaults | options))


def naive(module, batch, form, alpha=None):
    """Mean loss of a micro-batch through the Hugging Face model itself."""
    z = module.backbone.lm(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits[:, :-1]
    delta, l = (module.alpha.delta, module.alpha.l) if alpha is None else alpha
    log_p = ((1 + delta) * z + l).log_softmax(-1)
    labels = batch["labels"][:, 1:]
    where = labels != -100
    if form == "task":
        return F.nll_loss(log_p[where], labels[where])
    return (log_p.exp() * log_p).sum(-1)[where].mean()


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_direction_by_hand_in_float64(tiny_lm, tiny_tokenizer, tmp_path, micro_batch_size):
    module = calm(
        tiny_lm.double(), tiny_tokenizer, lora=lora(), inner_lr=0.5, gamma=0.7,
        micro_batch_size=micro_batch_size, warmup_fraction=0.0,
        theta_optimizer=lambda params: torch.optim.SGD(params),
        alpha_optimizer=lambda params: torch.optim.SGD(params),
    )  # fmt: skip
    module.configure_model()
    with torch.no_grad():
        for p in module.backbone.theta():  # B of LoRA starts at 0: half of the gradients would be
            p.data = p.data.double() + 0.1 * torch.randn_like(p, dtype=torch.float64)
        module.alpha.double()
        module.alpha.delta.normal_(0, 0.1)
        module.alpha.l.normal_(0, 0.1)
    theta, alpha = module.backbone.theta(), module.alpha.free()
    data = source(tmp_path, T=2, K=1, B=5, tokenizer=tiny_tokenizer)
    data.setup("fit")
    item = data.train_dataloader()[0]
    residual, *inner = item["train"]

    saved = [p.detach().clone() for p in theta]
    for batch in inner:
        grads = torch.autograd.grad(naive(module, batch, "task"), theta)
        with torch.no_grad():
            for p, g in zip(theta, grads, strict=True):
                p -= 0.5 * g
    at_tilde = torch.autograd.grad(naive(module, residual, "task"), alpha)
    with torch.no_grad():
        for p, s in zip(theta, saved, strict=True):
            p.copy_(s)
    g_q = list(torch.autograd.grad(naive(module, residual, "task"), theta + alpha))
    for i, g in enumerate(at_tilde):
        g_q[len(theta) + i] = g_q[len(theta) + i] - g
    g_ent = torch.autograd.grad(naive(module, item["calib"], "entropy"), theta + alpha)
    dot = sum((a * b).sum() for a, b in zip(g_q, g_ent, strict=True))
    norm = sum((a * a).sum() for a in g_q)
    lam = torch.relu(0.7 - dot / norm)
    d = [e + lam * q for e, q in zip(g_ent, g_q, strict=True)]
    before = [p.detach().clone() for p in theta + alpha]

    trainer(tmp_path, precision="64-true").fit(module, data)
    rates = [module.hparams.lower_lr] * len(theta) + [module.hparams.upper_lr] * len(alpha)
    wanted = [b - r * g for b, r, g in zip(before, rates, d, strict=True)]
    wanted[-1] = wanted[-1] - wanted[-1].mean()  # l loses its mean
    for p, w in zip(theta + alpha, wanted, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*q_hat:UserWarning")
def test_q_hat_is_zero_without_inner_steps_although_dropout_is_on(
    tiny_lm, tiny_tokenizer, tmp_path
):
    module = calm(tiny_lm, tiny_tokenizer, lora=lora(lora_dropout=0.5))
    run = trainer(tmp_path)
    run.fit(module, source(tmp_path, T=0))
    assert run.callback_metrics["train/q_hat"].item() == 0
    active = [m for m in module.backbone.lm.modules() if isinstance(m, torch.nn.Dropout)]
    assert active
    assert all(m.training for m in active)  # on again for the next inner loop


def test_dropout_is_on_in_the_inner_loop_only(tiny_lm, tiny_tokenizer, tmp_path):
    module = calm(tiny_lm, tiny_tokenizer, lora=lora(lora_dropout=0.5))
    seen = []
    module.configure_model()
    dropout = next(m for m in module.backbone.lm.modules() if isinstance(m, torch.nn.Dropout))
    dropout.register_forward_pre_hook(lambda m, _: seen.append(m.training))
    trainer(tmp_path).fit(module, source(tmp_path, T=2, K=1))
    assert seen == [True, True, False, False, False]  # inner, inner; theta_tilde, g_q, g_ent


def test_gradient_checkpointing_runs_while_dropout_is_off(tiny_lm, tiny_tokenizer, tmp_path):
    plain, saving = copy.deepcopy(tiny_lm), tiny_lm
    a, b = calm(plain, tiny_tokenizer), calm(saving, tiny_tokenizer, gradient_checkpointing=True)
    seen = []
    b.configure_model()
    layer = b.backbone.lm.get_base_model().model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for module in (a, b):
        seed_everything(0, verbose=False)
        module.configure_model()
        for name, p in module.backbone.lm.named_parameters():
            if "lora_A" in name:
                torch.nn.init.constant_(p, 0.01)
        trainer(tmp_path).fit(module, source(tmp_path, T=1, K=1))
    for p, q in zip(a.backbone.theta(), b.backbone.theta(), strict=True):
        torch.testing.assert_close(p, q)
    assert len(seen) == 7  # inner, theta_tilde, g_q, g_ent; again for the three backward passes


def test_bf16_inner_loop_sees_the_moved_theta(tiny_lm, tiny_tokenizer, tmp_path):
    """Autocast caches bf16 copies of leaves: without clearing, theta_tilde would be theta."""
    module = calm(tiny_lm, tiny_tokenizer, inner_lr=2.0)
    run = trainer(tmp_path, precision="bf16-mixed")
    run.fit(module, source(tmp_path, T=3))
    assert abs(run.callback_metrics["train/q_hat"].item()) > 1e-3


def test_global_step_counts_outer_iterations_and_rates_follow_them(
    tiny_lm, tiny_tokenizer, tmp_path
):
    rates = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            rates.append([o.param_groups[0]["lr"] for o in trainer.optimizers])

    module = calm(tiny_lm, tiny_tokenizer, warmup_fraction=0.5)
    run = trainer(tmp_path, epochs=2, callbacks=[Watch()])
    run.fit(module, source(tmp_path, K=4))
    assert run.global_step == 8
    share = [r[0] / 1e-3 for r in rates]
    assert share[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert share[4:] == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)
    assert [r[1] for r in rates] == pytest.approx([10 * r[0] for r in rates])


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": "topk"}, {"entropy": "last_prompt"}, {"entropy": "options"},
        {"entropy": "self_ce"}, {"alpha": "scalar"}, {"alpha": "options"}, {"center": True},
        {"barrier": "residual"}, {"warm_start": True}, {"barrier_metric": "adam"},
        {"residual_alpha_grad": "frozen"},
        {"scale_min": 0.9, "upper_lr": 1.0},
    ],
)  # fmt: skip
def test_every_option_trains(options, tiny_lm, tiny_tokenizer, tmp_path, recwarn):
    module = calm(tiny_lm, tiny_tokenizer, **options)
    module.configure_model()
    before = [p.detach().clone() for p in module.backbone.theta() + module.alpha.free()]
    run = trainer(tmp_path, epochs=1)
    if "scale_min" in options:
        with pytest.warns(UserWarning, match="at its floor"):
            run.fit(module, source(tmp_path))
    else:
        run.fit(module, source(tmp_path))
    after = module.backbone.theta() + module.alpha.free()
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert all(moved)
    assert all(torch.isfinite(p).all() for p in after)
    floor = options.get("scale_min")
    assert floor is None or (1 + module.alpha.delta).min().item() == pytest.approx(floor)


@pytest.mark.filterwarnings("ignore:entropy:UserWarning")  # random weights begin near log V
def test_entropy_rises_and_task_loss_is_kept(tiny_lm, tiny_tokenizer, tmp_path):
    seed_everything(0, verbose=False)
    module = calm(tiny_lm, tiny_tokenizer, lower_lr=1e-2, upper_lr=3e-2, gamma=0.5)
    data = source(tmp_path, T=5, K=30, B=8)
    module.configure_model()
    data.tokenizer = tiny_tokenizer
    (batch,) = list(data.token_batches("sel", 6))
    before = [naive(module, batch, form).item() for form in ("task", "entropy")]
    trainer(tmp_path).fit(module, data)
    after = [naive(module, batch, form).item() for form in ("task", "entropy")]
    assert after[0] < before[0]
    assert -after[1] > -before[1] + 0.05


def state(module):
    return [p.detach().clone() for p in module.backbone.theta() + module.alpha.free()]


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("stop_at", [2, 3, 4])  # inside an epoch, at its end, after it
def test_resuming_continues_exactly_with_dropout(
    stop_at, warm_start, tiny_lm, tiny_tokenizer, tmp_path
):
    class Save(Callback):
        def __init__(self):
            self.losses, self.rates = [], []

        def on_train_batch_end(self, trainer, module, *_):
            self.losses.append(trainer.callback_metrics["train/task_loss"].item())
            self.rates.append(trainer.optimizers[1].param_groups[0]["lr"])
            if trainer.global_step == stop_at:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    def run(ckpt=None):
        seed_everything(0, verbose=False)
        module = calm(
            copy.deepcopy(tiny_lm), tiny_tokenizer, lora=lora(lora_dropout=0.3),
            warm_start=warm_start,
        )  # fmt: skip
        save = Save()
        t = trainer(tmp_path, epochs=2, callbacks=[save])
        t.fit(module, source(tmp_path, K=3), ckpt_path=ckpt)
        moments = [s["exp_avg_sq"] for o in t.optimizers for s in o.state.values()]
        return state(module), save, moments, t.global_step

    whole, first, moments, steps = run()
    resumed, second, moments_again, steps_again = run(tmp_path / "last.ckpt")
    assert steps == steps_again == 6
    assert second.losses == first.losses[stop_at:]
    assert second.rates == first.rates[stop_at:]
    for a, b in zip(whole + moments, resumed + moments_again, strict=True):
        assert torch.equal(a, b)


def test_a_warm_start_goes_on_from_theta_tilde_and_a_cold_one_from_theta():
    """Three outer iterations of one inner step on a quadratic, by hand."""
    target = torch.tensor([3.0, -1.0], dtype=torch.float64)
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    alpha = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def task():
        yield 0.5 * (alpha * (theta - target)).square().sum()

    def upper():
        yield (alpha * theta).square().sum()

    for warm in (True, False):
        with torch.no_grad():
            theta.zero_()
            alpha.fill_(1.0)
        surrogate = [torch.full((2,), 9.0, dtype=torch.float64)] if warm else None
        by_hand = torch.full((2,), 9.0, dtype=torch.float64)
        for _ in range(3):
            if not warm:
                by_hand = theta.detach().clone()
            by_hand = by_hand - 0.1 * alpha.detach() ** 2 * (by_hand - target)
            before = theta.detach().clone()
            step = outer_step([theta], [alpha], task, upper, [task], rho=0.1, surrogate=surrogate)
            assert torch.equal(theta, before)
            at = 0.5 * (alpha.detach() * (by_hand - target)).square().sum()
            torch.testing.assert_close(step.q_hat, step.task_loss - at)
            if warm:
                torch.testing.assert_close(surrogate[0], by_hand)
            with torch.no_grad():
                theta -= 0.1 * theta.grad
                alpha -= 0.01 * alpha.grad


def test_a_warm_start_needs_its_surrogate(tiny_lm, tiny_tokenizer, tmp_path):
    run = trainer(tmp_path)
    run.fit(calm(copy.deepcopy(tiny_lm), tiny_tokenizer), source(tmp_path))
    run.save_checkpoint(tmp_path / "cold.ckpt")
    with pytest.raises(ValueError, match="no surrogate to go on from"):
        trainer(tmp_path).fit(
            calm(tiny_lm, tiny_tokenizer, warm_start=True), source(tmp_path),
            ckpt_path=tmp_path / "cold.ckpt",
        )  # fmt: skip


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_the_mean_logit_is_logged(micro_batch_size, tiny_lm, tiny_tokenizer, tmp_path):
    module = calm(tiny_lm, tiny_tokenizer, micro_batch_size=micro_batch_size)
    data = source(tmp_path, K=1, tokenizer=tiny_tokenizer)
    data.setup("fit")
    batch = data.train_dataloader()[0]["calib"]
    module.configure_model()
    with torch.no_grad():
        z = module.backbone.lm(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits[:, :-1]
    wanted = z[batch["labels"][:, 1:] != -100].mean()
    run = trainer(tmp_path)
    run.fit(module, data)
    torch.testing.assert_close(run.callback_metrics["train/mean_logit"], wanted)


def test_checkpoint_holds_what_was_trained_and_refuses_others(tiny_lm, tiny_tokenizer, tmp_path):
    module = calm(copy.deepcopy(tiny_lm), tiny_tokenizer)
    run = trainer(tmp_path)
    run.fit(module, source(tmp_path))
    run.save_checkpoint(tmp_path / "a.ckpt")
    kept = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name or name.startswith("alpha.") for name in kept)
    other = FineTuning(model=tiny_lm, tokenizer=tiny_tokenizer, lora=lora())
    with pytest.raises(ValueError, match="does not fit FineTuning: 0 tensors missing"):
        trainer(tmp_path).fit(other, source(tmp_path), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("adapters", [True, False])
def test_the_test_reports_theta_0_and_theta_k_with_and_without_alpha(
    adapters, tiny_lm, tiny_tokenizer, tmp_path
):
    original = copy.deepcopy(tiny_lm)
    tiny_lm.get_output_embeddings().requires_grad_(False)
    module = calm(tiny_lm, tiny_tokenizer, lora=lora() if adapters else None, lower_lr=1e-2)
    data = Shift(source(tmp_path), MCQADataModule({"sample": 24}, scoring="text"))
    run = trainer(tmp_path)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    found = {s.variant: s for s in module.scored if s.dataset == "sample"}
    assert set(found) == {"base", "alpha", "theta", "both"}
    probs = [s.probs for s in found.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(probs) for b in probs[:i])
    assert all(s.id == found["base"].id for s in found.values())

    untrained = calm(original, tiny_tokenizer)
    run.test(untrained, data, verbose=False)
    again = {s.variant: s for s in untrained.scored if s.dataset == "sample"}
    torch.testing.assert_close(again["base"].probs, found["base"].probs)
    torch.testing.assert_close(again["both"].probs, found["base"].probs)


class Foreign(LightningDataModule):
    """Somebody else's data: token ids from nowhere, in the documented batches."""

    def __len__(self):
        return 4

    def train_dataloader(self):
        return self

    def __iter__(self):
        def batch(seed):
            ids = torch.randint(2, 300, (3, 9), generator=torch.Generator().manual_seed(seed))
            labels = ids.masked_fill(torch.arange(9) < 4, -100)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

        for k in range(4):
            yield {"train": [batch(k), batch(k + 1)], "calib": batch(k + 2)}


def test_in_a_foreign_project(tiny_lm, tiny_tokenizer, tmp_path):
    class Count(Callback):
        seen = 0

        def on_train_batch_end(self, *_):
            self.seen += 1

    module, count = calm(tiny_lm, tiny_tokenizer), Count()
    trainer(tmp_path, callbacks=[count]).fit(module, Foreign())
    assert count.seen == 4
    assert module.alpha.delta.abs().max() > 0


def test_fine_tuning_takes_calms_rows_or_all_of_its_tokens(tiny_lm, tiny_tokenizer, tmp_path):
    for use, updates in (("residual", 3), ("all", 3 * 4)):
        module = FineTuning(
            model=copy.deepcopy(tiny_lm), tokenizer=tiny_tokenizer, lora=lora(), use=use,
            lower_lr=1e-2,
        )  # fmt: skip
        run = trainer(tmp_path)
        run.fit(module, source(tmp_path, T=2, K=3))
        assert run.global_step == updates
        assert not module.alpha.delta.any()


def test_fine_tuning_descends_what_plain_autograd_says(tiny_lm, tiny_tokenizer, tmp_path):
    module = FineTuning(
        model=tiny_lm, tokenizer=tiny_tokenizer, lora=lora(), lower_lr=0.1, warmup_fraction=0.0,
        theta_optimizer=lambda params: torch.optim.SGD(params),
    )  # fmt: skip
    module.configure_model()
    data = source(tmp_path, K=1, tokenizer=tiny_tokenizer)
    data.setup("fit")
    batch = data.train_dataloader()[0]["train"][0]
    theta = module.backbone.theta()
    zero = torch.zeros(module.backbone.vocab_size)
    grads = torch.autograd.grad(naive(module, batch, "task", (zero, zero)), theta)
    wanted = [p.detach() - 0.1 * g for p, g in zip(theta, grads, strict=True)]
    trainer(tmp_path).fit(module, data)
    for p, w in zip(theta, wanted, strict=True):
        torch.testing.assert_close(p.detach(), w)


def test_temperature_scaling_fits_and_keeps_the_prediction(tiny_lm, tiny_tokenizer, tmp_path):
    module = TemperatureScaling(model=tiny_lm, tokenizer=tiny_tokenizer)
    data = Shift(
        source(tmp_path, tokenizer=tiny_tokenizer),
        MCQADataModule({"sample": 17}, scoring="first_token", tokenizer=tiny_tokenizer),
    )
    run = trainer(tmp_path)
    run.fit(module, data)
    (calib,) = list(data.source.token_batches("calib"))[:1]

    def nll(t):
        scale = torch.full((module.backbone.vocab_size,), 1 / t - 1)
        return naive(module, calib, "task", (scale, torch.zeros_like(scale))).item()

    assert module.temperature > 1.2  # random weights are sure of themselves and wrong
    assert nll(module.temperature) < nll(1.0)
    run.test(module, data, verbose=False)
    found = {s.variant: s for s in module.scored if s.dataset == "sample"}
    assert torch.equal(
        found["base"].probs.argmax(-1), found["temperature_scaling"].probs.argmax(-1)
    )


def test_a_loader_without_a_length_is_refused(tiny_lm, tiny_tokenizer, tmp_path):
    class Loader:
        def __iter__(self):
            return iter(Foreign())

    with pytest.raises(ValueError, match="no length, which the cosine needs"):
        trainer(tmp_path).fit(calm(tiny_lm, tiny_tokenizer), Loader())


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_halved_parameters_are_refused(precision, tiny_lm, tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=f"precision {precision} would halve"):
        trainer(tmp_path, precision=precision).fit(calm(tiny_lm, tiny_tokenizer), Foreign())


def test_a_gradient_that_is_no_number_stops_fine_tuning(tiny_lm, tiny_tokenizer, tmp_path):
    module = FineTuning(model=tiny_lm, tokenizer=tiny_tokenizer, lora=lora())
    module.configure_model()
    before = state(module)
    module.backbone.weight.data[5] = float("inf")
    with pytest.raises(FloatingPointError, match="step 0: loss"):
        trainer(tmp_path).fit(module, source(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(state(module), before, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lm: CALMModule(), "exactly one of model_name and model"),
        (lambda lm: CALMModule("x", model=lm), "exactly one of model_name and model"),
        (lambda lm: CALMModule(model=lm, entropy="gini"), "entropy must be one of exact"),
        (lambda lm: CALMModule(model=lm, barrier_metric="x"), "barrier_metric must be"),
        (lambda lm: CALMModule(model=lm, warmup_fraction=2), "share of all steps"),
        (lambda lm: CALMModule(model=lm, micro_batch_size=0), "at least 1 row"),
        (lambda lm: FineTuning(model=lm, use="some"), "use must be"),
    ],
)
def test_constructor_errors(make, words, tiny_lm):
    with pytest.raises(ValueError, match=words):
        make(tiny_lm)


@pytest.mark.parametrize(
    ("module_options", "trainer_options", "words"),
    [
        ({"theta_optimizer": lambda p: torch.optim.SGD(p, lr=5)}, {}, "set model.lower_lr"),
        ({"alpha_optimizer": lambda p: torch.optim.SGD(p, lr=5)}, {}, "set model.upper_lr"),
        ({}, {"accumulate_grad_batches": 2}, "micro_batch_size"),
        ({}, {"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"lora": None}, {}, "output layer"),
    ],
)
def test_trainers_and_optimizers_that_would_change_the_method(
    module_options, trainer_options, words, tiny_lm, tiny_tokenizer, tmp_path
):
    module = calm(tiny_lm, tiny_tokenizer, **module_options)
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, **trainer_options).fit(module, source(tmp_path))


def test_not_a_number_names_the_iteration_and_keeps_the_state(tiny_lm, tiny_tokenizer, tmp_path):
    class Poison(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                self.before = state(module)
                module.backbone.weight.data[0, 0] = float("nan")

    module, poison = calm(tiny_lm, tiny_tokenizer), Poison()
    with pytest.raises(FloatingPointError, match="outer iteration 2: task loss nan"):
        trainer(tmp_path, callbacks=[poison]).fit(module, source(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(state(module), poison.before, strict=True))
