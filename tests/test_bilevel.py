"""Algorithm 1 against NumPy and against its own identities."""

import numpy as np
import pytest
import torch

from calm_lightning.bilevel import barrier_weight, gradient, inner_product, outer_step


def numpy_bome(x, w, lr, inner_steps, gamma, steps, clip=10.0):
    """BOME on the game f = x w, g = -x w, written with plain numbers (full gradients, SGD)."""
    path = []
    for _ in range(steps):
        x_tilde = x
        for _ in range(inner_steps):
            x_tilde = np.clip(x_tilde - lr * (-w), -clip, clip)
        g_q = np.array([-w, -x + x_tilde])  # d/dx, d/dw of g(x, w) - g(x_tilde, w)
        g_ent = np.array([w, x])
        norm = g_q @ g_q
        lam = max((gamma * norm - g_q @ g_ent) / norm, 0.0) if norm > 0 else 0.0
        d = g_ent + lam * g_q
        x, w = np.clip([x - lr * d[0], w - lr * d[1]], -clip, clip)
        path.append((x, w, lam))
    return np.array(path)


@pytest.mark.parametrize("inner_steps", [1, 10])
def test_toy_game_follows_numpy_bome(inner_steps):
    x = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x, w], lr=0.05)

    def task():
        yield -x * w

    def upper():
        yield x * w

    path = []
    for _ in range(100):
        step = outer_step([x], [w], task, upper, [task] * inner_steps, rho=0.05, clip=10.0)
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-10, 10)
            w.clamp_(-10, 10)
        path.append((x.item(), w.item(), step.lambda_k.item()))
    wanted = numpy_bome(4.0, 4.0, 0.05, inner_steps, 0.5, 100)
    np.testing.assert_allclose(path, wanted, atol=1e-6)
    assert np.abs(wanted[-1, :2] - 4).max() > 1  # the game moved


def problem(dtype=torch.float64):
    """A small classifier: theta, alpha and its two losses."""
    g = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)  # noqa: E731
    inputs, calib, y = r(12, 4), r(12, 4), torch.arange(12) % 3
    theta = [r(4, 3).requires_grad_(), r(3).requires_grad_()]
    alpha = [(0.1 * r(3)).requires_grad_(), (0.1 * r(3)).requires_grad_()]

    def log_p(x):
        return ((1 + alpha[0]) * (x @ theta[0] + theta[1]) + alpha[1]).log_softmax(-1)

    def task():
        yield -log_p(inputs)[torch.arange(12), y].mean()

    def chunked():
        for part in torch.arange(12).split(5):
            yield -log_p(inputs[part])[torch.arange(len(part)), y[part]].sum() / 12

    def upper():
        yield (log_p(calib).exp() * log_p(calib)).sum(-1).mean()

    return theta, alpha, task, chunked, upper


def directions(theta, alpha):
    return [p.grad.clone() for p in theta + alpha]


def test_direction_by_hand():
    theta, alpha, task, _, upper = problem()
    rho, gamma, T = 0.3, 0.7, 4
    # by hand: descend a copy, differentiate, combine
    saved = [p.detach().clone() for p in theta]
    for _ in range(T):
        grads = torch.autograd.grad(next(task()), theta)
        with torch.no_grad():
            for p, g in zip(theta, grads, strict=True):
                p -= rho * g
    at_tilde = torch.autograd.grad(next(task()), alpha)
    loss_tilde = next(task()).detach()
    with torch.no_grad():
        for p, s in zip(theta, saved, strict=True):
            p.copy_(s)
    g_q = list(torch.autograd.grad(next(task()), theta + alpha))
    g_q[2:] = [a - b for a, b in zip(g_q[2:], at_tilde, strict=True)]
    g_ent = torch.autograd.grad(next(upper()), theta + alpha)
    flat_q, flat_e = (torch.cat([t.flatten() for t in g]) for g in (g_q, g_ent))
    lam = max(float(gamma - flat_q @ flat_e / (flat_q @ flat_q)), 0.0)
    wanted = [e + lam * q for e, q in zip(g_ent, g_q, strict=True)]

    step = outer_step(theta, alpha, task, upper, [task] * T, rho=rho, gamma=gamma)
    torch.testing.assert_close(directions(theta, alpha), wanted)
    torch.testing.assert_close(step.q_hat, next(task()).detach() - loss_tilde)
    assert step.lambda_k.item() == pytest.approx(lam)
    assert step.q_hat > 0


def test_theta_is_restored_bit_for_bit_even_after_an_error():
    theta, alpha, task, _, upper = problem(torch.float32)
    saved = [p.detach().clone() for p in theta]
    outer_step(theta, alpha, task, upper, [task] * 7, rho=0.3)
    assert all(torch.equal(p, s) for p, s in zip(theta, saved, strict=True))

    def broken():
        raise RuntimeError("inner batch")
        yield

    with pytest.raises(RuntimeError, match="inner batch"):
        outer_step(theta, alpha, task, upper, [task, task, broken], rho=0.3)
    assert all(torch.equal(p, s) for p, s in zip(theta, saved, strict=True))


def test_chunks_give_the_same_direction():
    theta, alpha, task, chunked, upper = problem()
    outer_step(theta, alpha, task, upper, [task] * 3, rho=0.3)
    whole = directions(theta, alpha)
    outer_step(theta, alpha, chunked, upper, [chunked] * 3, rho=0.3)
    torch.testing.assert_close(directions(theta, alpha), whole)


def test_frozen_does_not_depend_on_the_inner_loop_and_danskin_does():
    theta, alpha, task, _, upper = problem()
    found = {}
    for how in ("frozen", "danskin"):
        for T in (0, 20):
            options = {"rho": 0.3, "residual_alpha_grad": how}
            outer_step(theta, alpha, task, upper, [task] * T, **options)
            found[how, T] = directions(theta, alpha)
    for a, b in zip(found["frozen", 0], found["frozen", 20], strict=True):
        assert torch.equal(a, b)
    assert not torch.allclose(found["danskin", 0][2], found["danskin", 20][2])


def test_without_inner_steps_the_residual_is_exactly_zero():
    theta, alpha, task, _, upper = problem()
    step = outer_step(theta, alpha, task, upper, [], rho=0.3)
    assert step.q_hat.item() == 0
    assert all((g == 0).all() for g in step.g_q[2:])  # danskin's alpha block


def test_residual_barrier_uses_q_hat():
    theta, alpha, task, _, upper = problem()
    step = outer_step(theta, alpha, task, upper, [task] * 5, rho=0.3, gamma=3.0, barrier="residual")
    phi = 3.0 * step.q_hat.clamp_min(0)
    wanted = ((phi - step.g_q_dot_g_ent) / step.g_q_norm_sq).clamp_min(0)
    torch.testing.assert_close(step.lambda_k, wanted)


def test_barrier_weight_both_formulas_scale_and_zero():
    g_q, g_ent = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    norm, dot, gamma = g_q @ g_q, g_q @ g_ent, 0.5
    lam = barrier_weight(gamma * norm, dot, norm)
    torch.testing.assert_close(lam, torch.relu(gamma - dot / norm))
    s = 65536.0
    torch.testing.assert_close(barrier_weight(gamma * norm * s**2, dot * s**2, norm * s**2), lam)
    zero = torch.zeros(())
    assert barrier_weight(zero, zero, zero).item() == 0
    assert barrier_weight(gamma * norm, 2 * norm, norm).item() == 0  # entropy already helps


def test_barrier_promise_in_the_metric_of_the_step():
    """d' = P d satisfies <P d, g_q> >= gamma |g_q|_P^2, which the euclidean weight breaks."""
    theta, alpha, task, _, upper = problem()
    u = theta + alpha
    g = torch.Generator().manual_seed(3)
    metric = [torch.rand(p.shape, generator=g, dtype=p.dtype) ** 6 * 1e3 for p in u]
    step = outer_step(theta, alpha, task, upper, [task] * 3, rho=0.3, gamma=0.5, metric=metric)
    moved = inner_product([p.grad for p in u], step.g_q, metric)
    assert moved >= 0.5 * inner_product(step.g_q, step.g_q, metric) * (1 - 1e-9)


def test_not_a_number_stops_before_anything_changed():
    theta, alpha, task, _, _upper = problem()
    saved = [p.detach().clone() for p in theta + alpha]

    def broken():
        yield theta[0].sum() * float("nan")

    with pytest.raises(FloatingPointError, match="stay as they were"):
        outer_step(theta, alpha, task, broken, [task], rho=0.3)
    assert all(torch.equal(p, s) for p, s in zip(theta + alpha, saved, strict=True))
    assert all(p.grad is None for p in theta + alpha)


def test_reduce_gets_every_list_once_and_its_sums_are_used():
    """Two processes with the same half each: sums are doubled, and so is the direction."""
    theta, alpha, task, _, upper = problem()
    alone = outer_step(theta, alpha, task, upper, [], rho=0.3, gamma=0.5)
    direction, calls = directions(theta, alpha), []

    def double(tensors):
        calls.append(len(tensors))
        for t in tensors:
            t.mul_(2)

    both = outer_step(theta, alpha, task, upper, [], rho=0.3, gamma=0.5, reduce=double)
    assert calls == [3, 5, 5]  # alpha at theta_tilde; task; entropy: each with its value
    torch.testing.assert_close(both.lambda_k, alone.lambda_k)
    torch.testing.assert_close(both.task_loss, 2 * alone.task_loss)
    torch.testing.assert_close(directions(theta, alpha), [2 * d for d in direction])


def test_a_gradient_that_is_no_number_stops_although_the_loss_is_finite():
    theta, alpha, task, _, upper = problem()

    def broken():  # sqrt has an infinite slope at 0, times 0
        yield next(task()) + (theta[0] * 0).abs().sum().sqrt() * 0

    with pytest.raises(FloatingPointError, match="stay as they were"):
        outer_step(theta, alpha, broken, upper, [task], rho=0.3)
    assert all(p.grad is None for p in theta + alpha)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"barrier": "x"}, "barrier must be"), ({"residual_alpha_grad": "x"}, "residual_alpha_grad")],
)
def test_unknown_options(options, words):
    theta, alpha, task, _, upper = problem()
    with pytest.raises(ValueError, match=words):
        outer_step(theta, alpha, task, upper, [], rho=0.1, **options)


def test_a_loss_that_yields_nothing():
    with pytest.raises(ValueError, match="yielded nothing"):
        gradient(lambda: iter(()), [torch.zeros(1, requires_grad=True)])
