import pytest
import torch
from torch.nn import functional as F

from calm_lightning.head import LOSS_FORMS, Alpha, adjust, fold, token_loss

N, H, V = 7, 5, 13


def naive(hidden, weight, delta, l, target, form, bias, topk, center):
    """What `token_loss` computes, by plain autograd over the whole (N, V) matrix."""
    z = hidden @ weight.T + bias
    log_p = adjust(z, delta, l, center).log_softmax(-1)
    if form == "cross_entropy":
        return F.nll_loss(log_p, target, reduction="sum")
    if form == "self_ce":
        return -log_p.max(-1).values.sum()
    if form == "topk":
        log_p = log_p.topk(topk, -1).values.log_softmax(-1)
    return -(log_p.exp() * log_p).sum()


def problem(dtype=torch.float64, n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)  # noqa: E731
    free = [r(n, H), 0.3 * r(V), r(V)]
    return [t.requires_grad_() for t in free], r(V, H), r(V), torch.arange(n) % V


@pytest.mark.parametrize("form", LOSS_FORMS)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("n", [7, 1, 0])
def test_value_and_gradient_equal_naive_autograd(form, center, n):
    (hidden, delta, l), weight, bias, target = problem(n=n)
    at = target if form == "cross_entropy" else None
    ours = token_loss(
        hidden, weight, (delta, l), at, form, bias=bias, topk=4, center=center, chunk=3
    )
    plain = naive(hidden, weight, delta, l, target, form, bias, 4, center)
    torch.testing.assert_close(ours, plain)
    upstream = 2.5  # a loss that is scaled later, as by 1 / count
    grads = torch.autograd.grad(upstream * ours, [hidden, delta, l])
    wanted = torch.autograd.grad(upstream * plain, [hidden, delta, l])
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("form", LOSS_FORMS)
def test_gradcheck(form):
    (hidden, delta, l), weight, bias, target = problem(n=3)
    at = target if form == "cross_entropy" else None
    torch.autograd.gradcheck(
        lambda h, d, s: token_loss(h, weight, (d, s), at, form, bias=bias, topk=4, chunk=2),
        (hidden, delta, l),
    )


def test_without_alpha_and_only_alpha():
    (hidden, delta, l), weight, bias, target = problem()
    zero = torch.zeros(V, dtype=torch.float64)
    plain = token_loss(hidden, weight, None, target, bias=bias)
    torch.testing.assert_close(plain, token_loss(hidden, weight, (zero, zero), target, bias=bias))
    frozen = hidden.detach()
    loss = token_loss(frozen, weight, (delta, l), target)
    grads = torch.autograd.grad(loss, [delta, l])
    wanted = torch.autograd.grad(
        naive(frozen, weight, delta, l, target, "cross_entropy", 0, 0, False), [delta, l]
    )
    torch.testing.assert_close(grads, wanted)


def test_support_restricts_the_distribution():
    (hidden, delta, l), weight, bias, _ = problem()
    ids = torch.tensor([4, 9, 1])
    ours = token_loss(hidden, weight, (delta, l), None, "entropy", bias=bias, support=ids)
    log_p = adjust(hidden @ weight.T + bias, delta, l)[:, ids].log_softmax(-1)
    plain = -(log_p.exp() * log_p).sum()
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, [hidden, delta, l]),
        torch.autograd.grad(plain, [hidden, delta, l]),
    )


def test_entropy_survives_probabilities_that_underflow():
    hidden = torch.tensor([[400.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    value = token_loss(hidden, weight, None, None, "entropy")
    (grad,) = torch.autograd.grad(value, hidden)
    assert value.item() == 0
    assert torch.isfinite(grad).all()
    masked = torch.tensor([[0.0, 0.0, float("-inf")]])  # a token that a mask rules out
    delta, l = torch.zeros(3), masked[0].requires_grad_()
    value = token_loss(torch.zeros(1, 1), weight, (delta, l), None, "entropy")
    assert value.item() == pytest.approx(0.6931, abs=1e-4)
    assert torch.isfinite(torch.autograd.grad(value, l)[0]).all()


def test_entropy_has_a_gradient_and_raises_entropy():
    (hidden, delta, l), weight, bias, _ = problem()
    before = token_loss(hidden, weight, (delta, l), None, "entropy", bias=bias)
    (grad,) = torch.autograd.grad(before, l)
    assert grad.norm() > 1e-3
    after = token_loss(hidden, weight, (delta, l + 1e-3 * grad), None, "entropy", bias=bias)
    assert after > before


def test_bf16_product_float32_softmax():
    (hidden, delta, l), weight, _bias, target = problem(torch.float32)
    half = token_loss(hidden, weight.bfloat16(), (delta, l), target)
    assert half.dtype == torch.float32
    torch.testing.assert_close(
        half, token_loss(hidden, weight, (delta, l), target), rtol=0.03, atol=0.3
    )


@pytest.mark.parametrize("kind", ["vector", "scalar", "options"])
def test_alpha_starts_as_the_identity_and_moves_what_it_says(kind):
    ids = torch.tensor([2, 5]) if kind == "options" else None
    alpha = Alpha(V, kind, token_ids=ids)
    z = torch.randn(4, V)
    assert torch.equal(alpha(z), z)
    loss = token_loss(z, torch.eye(V), alpha.full(), torch.arange(4))
    grads = torch.autograd.grad(loss, alpha.free())
    assert len(grads) == (1 if kind == "scalar" else 2)
    with torch.no_grad():
        alpha.delta += 0.5
    moved = alpha(z) != z
    assert moved[:, 2].all()
    assert moved[:, 3].any() == (kind != "options")


def test_scalar_alpha_is_temperature_scaling():
    alpha = Alpha(V, "scalar")
    with torch.no_grad():
        alpha.delta.fill_(1 / 2.5 - 1)
    z = torch.randn(4, V)
    torch.testing.assert_close(alpha(z).softmax(-1), (z / 2.5).softmax(-1))


def test_projection_floor_clip_and_mean():
    alpha = Alpha(4, scale_min=0.25, clip=10)
    with torch.no_grad():
        alpha.delta.copy_(torch.tensor([-3.0, 20.0, 0.0, -0.75]))
        alpha.l.copy_(torch.tensor([30.0, -30.0, 1.0, 3.0]))
    alpha.project_()
    assert (1 + alpha.delta).tolist() == [0.25, 10.0, 1.0, 0.25]
    torch.testing.assert_close(alpha.l.data, torch.tensor([10.0, -10.0, 0.0, 2.0]))  # mean 1


@pytest.mark.parametrize("center", [False, True])
def test_fold_reproduces_the_adjusted_logits(center):
    (hidden, delta, l), weight, bias, _ = problem()
    folded, folded_bias = fold(weight, bias, delta, l, center)
    torch.testing.assert_close(
        hidden @ folded.T + folded_bias, adjust(hidden @ weight.T + bias, delta, l, center)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Alpha(3, "matrix"), "alpha must be one of"),
        (lambda: Alpha(3, "options"), "needs the option token ids"),
        (lambda: token_loss(torch.ones(1, 1), torch.ones(2, 1), form="brier"), "form must be"),
        (lambda: token_loss(torch.ones(1, 1), torch.ones(2, 1)), "needs a target"),
    ],
)
def test_errors_say_what_would_be_right(call, words):
    with pytest.raises(ValueError, match=words):
        call()
