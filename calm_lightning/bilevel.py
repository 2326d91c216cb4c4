"""Algorithm 1 of CALM over plain lists of tensors: no Lightning, no language model.

A bilevel problem has two kinds of variables, ``theta`` (lower level: stays optimal for the task
loss) and ``alpha`` (upper level: the calibration adjustments). BOME turns it into a descent on the
upper loss under the constraint that the residual q_hat = L(theta; alpha) - L(theta_tilde; alpha)
shrinks, with first derivatives only.

A loss is a function without arguments that yields one or more scalars whose sum is the loss. Each
is differentiated as soon as it is yielded, so a batch may come in chunks that never share memory.

Paper section 3, a 4-class classifier with adjustments (d, l) of its logits, in ten lines:

>>> import torch
>>> from torch.nn import functional as F
>>> _ = torch.manual_seed(0)
>>> centres = 2.0 * torch.randn(4, 8)
>>> y = torch.arange(400) % 4
>>> x = centres[y] + 1.5 * torch.randn(400, 8)
>>> x_calib = centres[y] + 1.5 * torch.randn(400, 8)
>>> net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
>>> theta = list(net.parameters())
>>> delta, l = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
>>> adjusted = lambda inputs: (1 + delta) * net(inputs) + l
>>> def task():
...     yield F.cross_entropy(adjusted(x), y)
>>> def negative_entropy():
...     log_p = F.log_softmax(adjusted(x_calib), dim=-1)
...     yield (log_p.exp() * log_p).sum(-1).mean()
>>> def confidence():
...     with torch.no_grad():
...         return adjusted(x_calib).softmax(-1).max(-1).values.mean().item()
>>> fit = torch.optim.Adam(theta, lr=1e-2)
>>> for _ in range(200):  # an overconfident classifier
...     fit.zero_grad()
...     next(task()).backward()
...     fit.step()
>>> before = confidence()
>>> optimizer = torch.optim.SGD([*theta, delta, l], lr=0.1)
>>> for _ in range(50):
...     step = outer_step(theta, [delta, l], task, negative_entropy, [task] * 5, rho=0.1)
...     optimizer.step()
>>> before > 0.9 and confidence() < before - 0.02 and step.lambda_k.item() >= 0
True
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[], Iterable[Tensor]]
Reduce = Callable[[list[Tensor]], None]


@dataclass
class OuterStep:
    """What one outer iteration saw, as scalar tensors on the device."""

    task_loss: Tensor  # L(theta; alpha) on the residual batch, nats per token
    entropy: Tensor  # mean H on the calib batch, nats
    q_hat: Tensor  # L(theta; alpha) - L(theta_tilde; alpha), nats
    lambda_k: Tensor
    g_q_norm_sq: Tensor  # in the metric of the barrier
    g_q_dot_g_ent: Tensor
    g_q: list[Tensor]  # residual gradient over (theta, alpha)
    overflow: bool = False  # under a loss scale; every .grad is NaN


def outer_step(
    theta: Sequence[Tensor],
    alpha: Sequence[Tensor],
    task: Loss,
    negative_entropy: Loss,
    inner: Iterable[Loss],
    *,
    rho: float,
    gamma: float = 0.5,
    barrier: str = "grad_norm",
    residual_alpha_grad: str = "danskin",
    clip: float | None = None,
    surrogate: Sequence[Tensor] | None = None,
    metric: Sequence[Tensor] | None = None,
    scale: Tensor | None = None,
    reduce: Reduce = lambda tensors: None,
    quiet: Callable[[], AbstractContextManager] = nullcontext,
) -> OuterStep:
    """Put the direction d_k of Algorithm 1 into ``.grad`` of theta and alpha (lines 3 to 8).

    Order: snapshot, inner loop, alpha's gradient at theta_tilde, restore, g_q, g_ent, combine in
    place. One extra copy of theta exists during the inner loop, none afterwards (with
    ``surrogate`` that one copy is the surrogate's own, and stays).

    Args:
        theta: lower-level tensors; changed by the inner loop and restored bit for bit.
        alpha: upper-level tensors.
        task: task loss on the residual batch; called at theta and at theta_tilde.
        negative_entropy: the upper loss on the calib batch (lower is more entropy).
        inner: one task loss for each inner step, T in all; they may be random (dropout).
        rho: inner step size (plain gradient descent).
        gamma: barrier strength; phi = gamma |g_q|^2 (``grad_norm``) or gamma max(q_hat, 0)
            (``residual``).
        barrier: ``grad_norm`` (Alg. 1 line 7) or ``residual`` (BOME's other dynamic barrier).
        residual_alpha_grad: ``danskin`` (grad_alpha of q_hat has both terms) or ``frozen``
            (Eq. 12 to the letter: the second term is constant).
        clip: theta is clamped to [-clip, clip] after every inner step.
        surrogate: theta_tilde of the iteration before, from which the inner loop goes on, changed
            in place (a single loop where `inner` is one step); None begins at theta.
        metric: one positive tensor for each of theta and alpha: diagonal metric of the dot
            products, for optimizers that precondition the direction.
        scale: of the loss while it is differentiated, so that half-precision gradients do not
            vanish. All that is computed from the gradients is unscaled. Where one overflows, every
            ``.grad`` is set to NaN, by which a GradScaler skips each optimizer.
        reduce: sums the given tensors over processes in place (one call for a gradient list).
        quiet: a context in which the residual and the entropy are evaluated (dropout off).

    Raises:
        ValueError: an unknown barrier or residual_alpha_grad.
        FloatingPointError: a loss is not finite, or without `scale` a gradient; theta and alpha are
            as before.
    """
    if barrier not in ("grad_norm", "residual"):
        raise ValueError(f"barrier must be 'grad_norm' or 'residual', not {barrier!r}")
    if residual_alpha_grad not in ("danskin", "frozen"):
        raise ValueError(
            f"residual_alpha_grad must be 'danskin' or 'frozen', not {residual_alpha_grad!r}"
        )
    theta, alpha = list(theta), list(alpha)
    u = theta + alpha

    aside = [p.detach().clone() for p in theta] if surrogate is None else list(surrogate)
    _swap(theta, aside)  # theta is theta_tilde until it is swapped back
    try:
        descend(theta, inner, rho=rho, clip=clip, reduce=reduce, scale=scale)
        with quiet():
            if residual_alpha_grad == "danskin":
                with frozen(theta):  # no graph through the body: alpha's gradient needs the head
                    task_tilde, g_tilde = gradient(task, alpha, reduce, scale)
            else:
                with torch.no_grad():
                    task_tilde = value(task, reduce)
                g_tilde = [torch.zeros_like(p) for p in alpha]
    finally:
        _swap(theta, aside)
    del aside

    with quiet():
        task_loss, g_q = gradient(task, u, reduce, scale)
        torch._foreach_sub_(g_q[len(theta) :], g_tilde)
        negative, g_ent = gradient(negative_entropy, u, reduce, scale)

    q_hat = task_loss - task_tilde
    norm_sq, dot = inner_product(g_q, g_q, metric), inner_product(g_q, g_ent, metric)
    phi = gamma * norm_sq if barrier == "grad_norm" else gamma * q_hat.clamp_min(0.0)
    lambda_k = barrier_weight(phi, dot, norm_sq)
    seen = torch.stack([task_loss, negative, task_tilde, norm_sq, dot, lambda_k]).isfinite()
    losses, all_finite = torch.stack([seen[:2].all(), seen.all()]).tolist()  # one wait for both
    if not all_finite and (scale is None or not losses):
        raise FloatingPointError(
            f"task loss {task_loss:.4g} at theta and {task_tilde:.4g} after the inner loop, "
            f"entropy {-negative:.4g}, |g_q|^2 {norm_sq:.4g}, lambda {lambda_k:.4g}: theta and "
            "alpha stay as they were; lower the rates or rho"
        )
    for p, e, q in zip(u, g_ent, g_q, strict=True):
        direction = e.add_(q * lambda_k.to(q.dtype)).to(p.dtype)
        p.grad = direction if all_finite else torch.full_like(p, torch.nan)
    return OuterStep(
        task_loss, -negative, q_hat, lambda_k, norm_sq, dot, g_q, overflow=not all_finite
    )


def barrier_weight(phi: Tensor, dot: Tensor, norm_sq: Tensor) -> Tensor:
    """Weight lambda_k = max((phi - <g_q, g_ent>) / |g_q|^2, 0); 0 where g_q = 0 (Alg. 1 line 7)."""
    safe = torch.where(norm_sq > 0, norm_sq, torch.ones_like(norm_sq))
    return torch.where(norm_sq > 0, (phi - dot) / safe, torch.zeros_like(dot)).clamp_min(0.0)


def descend(
    theta: list[Tensor],
    losses: Iterable[Loss],
    *,
    rho: float,
    clip: float | None = None,
    reduce: Reduce = lambda tensors: None,
    scale: Tensor | None = None,
) -> None:
    """Gradient descent in place with step ``rho``, one step for each loss (Alg. 1 line 3)."""
    for loss in losses:
        _, grads = gradient(loss, theta, reduce, scale)
        with torch.no_grad():
            torch._foreach_add_(theta, grads, alpha=-rho)
            clamp_(theta, clip)


def clamp_(tensors: list[Tensor], clip: float | None) -> None:
    """Clamp to [-clip, clip] in place; None leaves them (call it under no_grad)."""
    if clip is not None:
        torch._foreach_clamp_min_(tensors, -clip)
        torch._foreach_clamp_max_(tensors, clip)


def gradient(
    loss: Loss,
    params: Sequence[Tensor],
    reduce: Reduce = lambda tensors: None,
    scale: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Value and gradient of a chunked loss, accumulated in float32 or wider; both unscaled."""
    total, grads = None, None
    for chunk in loss():
        scaled = chunk if scale is None else chunk * scale
        parts = torch.autograd.grad(scaled, params, allow_unused=True)
        parts = [
            torch.zeros_like(p, dtype=_wide(p)) if g is None else g.to(_wide(p))
            for g, p in zip(parts, params, strict=True)
        ]
        chunk = chunk.detach().to(_wide(chunk))
        if grads is None:
            # clone: a leaf used twice may hand out one shared gradient tensor
            total, grads = chunk, [g.clone() for g in parts]
        else:
            total = total + chunk
            torch._foreach_add_(grads, parts)
    if grads is None:
        raise ValueError("the loss yielded nothing: it must yield at least one scalar")
    if scale is not None:
        torch._foreach_mul_(grads, 1 / scale)  # a power of two: exact
        # An infinite step could hide behind the clamp; as NaN it is seen in the next loss.
        torch._foreach_add_(grads, [g * 0 for g in grads])
    reduce([total, *grads])
    return total, grads


def put_gradient(
    loss: Loss,
    params: Sequence[Tensor],
    reduce: Reduce = lambda tensors: None,
    scale: Tensor | None = None,
) -> Tensor:
    """Put the gradient of a loss into ``.grad`` of params (`scale`: as in `outer_step`).

    Returns:
        The loss.

    Raises:
        FloatingPointError: the loss is not finite, or without `scale` its gradient; nothing was
            changed.
    """
    total, grads = gradient(loss, params, reduce, scale)
    all_finite = torch.isfinite(torch.stack([total, *(g.sum() for g in grads)])).all()
    if not all_finite and (scale is None or not total.isfinite()):
        raise FloatingPointError(
            f"loss {total:.4g} or its gradient is not finite: nothing was changed; lower the rates"
        )
    for p, g in zip(params, grads, strict=True):
        p.grad = g.to(p.dtype) if all_finite else torch.full_like(p, torch.nan)
    return total


def value(loss: Loss, reduce: Reduce = lambda tensors: None) -> Tensor:
    """Value of a chunked loss."""
    total = sum(chunk.detach() for chunk in loss())
    reduce([total])
    return total


def inner_product(
    a: Sequence[Tensor], b: Sequence[Tensor], metric: Sequence[Tensor] | None = None
) -> Tensor:
    """<a, b> over lists of tensors, in the diagonal ``metric`` where given; tensor by tensor."""
    weights = metric if metric is not None else [None] * len(a)
    dots = [
        torch.dot(x.flatten(), (y if w is None else y * w).flatten())
        for x, y, w in zip(a, b, weights, strict=True)
    ]
    return torch.stack(dots).sum()


@torch.no_grad()
def _swap(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@contextmanager
def frozen(params: Sequence[Tensor]) -> Iterator[None]:
    """No gradient for these tensors, and no graph through what only they are trained in."""
    for p in params:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in params:
            p.requires_grad_(True)
