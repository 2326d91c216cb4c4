"""The adjusted output layer: z' = (1 + delta) * z + l over the vocabulary (Eq. 2, d = 1 + delta).

`Alpha` holds the adjustments; `token_loss` gives the summed cross-entropy or entropy of many
positions without ever holding their (N, V) logits, and forms the gradients in its forward pass.
"""

import torch
from torch import Tensor, nn

ALPHA_KINDS = ("vector", "scalar", "options")
LOSS_FORMS = ("cross_entropy", "entropy", "topk", "self_ce")


class Alpha(nn.Module):
    """Calibration adjustments alpha = (delta, l), float32, zero at the start (the identity).

    Args:
        vocab_size: width V of the logits (the output layer's, not the tokenizer's).
        kind: ``vector`` (V entries each), ``scalar`` (one delta for all, no l: a common shift has
            no gradient), ``options`` (entries for ``token_ids`` only).
        token_ids: the tokens adjusted by ``options``, (C,) int64.
        scale_min: floor for d = 1 + delta, or None.
        clip: bound for |d| and |l| (App. C.2: 10), or None.

    Raises:
        ValueError: unknown kind; ``options`` without token_ids.

    >>> Alpha(3)(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
    [[1.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        vocab_size: int,
        kind: str = "vector",
        token_ids: Tensor | None = None,
        scale_min: float | None = None,
        clip: float | None = None,
        center: bool = False,
    ):
        super().__init__()
        if kind not in ALPHA_KINDS:
            raise ValueError(f"alpha must be one of {', '.join(ALPHA_KINDS)}, not {kind!r}")
        if (kind == "options") != (token_ids is not None):
            raise ValueError("alpha 'options' (and no other kind) needs the option token ids")
        self.vocab_size, self.kind = vocab_size, kind
        self.scale_min, self.clip, self.center = scale_min, clip, center
        size = {"vector": vocab_size, "scalar": 1}.get(kind) or len(token_ids)
        # delta = d - 1 and not d: at d = 1 a float32 step below 6e-8 would be lost.
        self.delta = nn.Parameter(torch.zeros(size))
        self.l = nn.Parameter(torch.zeros(size), requires_grad=kind != "scalar")
        self.register_buffer("token_ids", token_ids, persistent=False)

    def free(self) -> list[Tensor]:
        """The trained tensors: [delta, l], or [delta] for a scalar."""
        return [p for p in (self.delta, self.l) if p.requires_grad]

    def full(self) -> tuple[Tensor, Tensor]:
        """(delta, l) over the vocabulary, (V,) each; differentiable."""
        if self.kind == "vector":
            return self.delta, self.l
        if self.kind == "scalar":
            return self.delta.expand(self.vocab_size), self.l.expand(self.vocab_size)
        zeros = torch.zeros(self.vocab_size, device=self.delta.device)
        index = (self.token_ids,)
        return zeros.index_put(index, self.delta), zeros.index_put(index, self.l)

    def forward(self, logits: Tensor) -> Tensor:
        """Adjusted logits, (..., V)."""
        return adjust(logits, *self.full(), center=self.center)

    @torch.no_grad()
    def project_(self) -> None:
        """After an outer step: d to its floor, the mean off l, both to +-clip.

        A constant in l changes no probability, so it is no degree of freedom; without its removal
        weight rounding would let it drift.
        """
        if self.clip is not None:
            self.delta.clamp_(-self.clip - 1, self.clip - 1)
        if self.scale_min is not None:
            self.delta.clamp_min_(self.scale_min - 1)
        if self.kind == "vector":
            self.l.sub_(self.l.mean())
        if self.clip is not None:
            self.l.clamp_(-self.clip, self.clip)


def adjust(logits: Tensor, delta: Tensor, l: Tensor, center: bool = False) -> Tensor:
    """z' = (1 + delta) z + l, with z less its mean over the vocabulary where ``center``."""
    if center:
        logits = logits - logits.mean(-1, keepdim=True)
    return logits + delta * logits + l


def token_loss(
    hidden: Tensor,  # (N, H) hidden states at the positions that count
    weight: Tensor,  # (V, H) output layer, frozen
    alpha: tuple[Tensor, Tensor] | None = None,  # (delta, l), (V,) float32 each
    target: Tensor | None = None,  # (N,) int64, for cross_entropy
    form: str = "cross_entropy",
    *,
    bias: Tensor | None = None,  # (V,) of the output layer, frozen
    topk: int = 20,
    support: Tensor | None = None,  # (C,) int64: the distribution over these tokens alone
    center: bool = False,
    chunk: int = 64,
) -> Tensor:
    """Sum over positions of a loss of the adjusted next-token distribution, in nats.

    ``cross_entropy`` -log p[target]; ``entropy`` H(p) of Eq. 5; ``topk`` H of p renormalised over
    its k largest entries; ``self_ce`` -log max p, the CE(y_hat, y_hat) of App. C.2.
    Gradients reach ``hidden``, ``delta`` and ``l``; they are formed in the forward pass, so memory
    is O(chunk * V). The product h W^T runs in the weight's dtype, everything after it in float32.

    Raises:
        ValueError: unknown form, or cross_entropy without a target.
    """
    if form not in LOSS_FORMS:
        raise ValueError(f"form must be one of {', '.join(LOSS_FORMS)}, not {form!r}")
    if (form == "cross_entropy") != (target is not None):
        raise ValueError("cross_entropy (and no other form) needs a target")
    delta, l = alpha if alpha is not None else (None, None)
    if support is not None:
        weight = weight[support]
        bias = None if bias is None else bias[support]
        delta, l = (None, None) if alpha is None else (delta[support], l[support])
    return _TokenLoss.apply(hidden, delta, l, weight, bias, target, form, topk, center, chunk)


class _TokenLoss(torch.autograd.Function):
    """Chunked forward that also forms d loss / d (hidden, delta, l); backward scales them."""

    @staticmethod
    def forward(ctx, hidden, delta, l, weight, bias, target, form, topk, center, chunk):
        need_hidden, need_delta, need_l = ctx.needs_input_grad[:3]
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_delta = torch.zeros_like(delta, dtype=wide) if need_delta else None
        d_l = torch.zeros_like(l, dtype=wide) if need_l else None
        d = None if delta is None else 1 + delta
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                z = (hidden[rows].to(weight.dtype) @ weight.T).to(wide)  # (chunk, V)
                if bias is not None:
                    z += bias
                if center:
                    z -= z.mean(-1, keepdim=True)
                log_p = (z if d is None else torch.addcmul(l, z, d)).log_softmax(-1)
                at = None if target is None else target[rows]
                value, grad = _FORMS[form](log_p, at, topk)  # grad: d value / d z'
                total += value
                if need_l:
                    d_l += grad.sum(0)
                if need_delta:
                    d_delta += z.mul_(grad).sum(0)  # z is not needed any more
                if need_hidden:
                    if d is not None:
                        grad *= d
                    if center:
                        grad -= grad.mean(-1, keepdim=True)
                    d_hidden[rows] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.save_for_backward(d_hidden, d_delta, d_l)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grads = [None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors]
        return (*grads, *[None] * 7)


def _cross_entropy(log_p: Tensor, target: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(target), device=target.device)
    value = -log_p[rows, target].sum()
    grad = log_p.exp_()
    grad[rows, target] -= 1
    return value, grad


def _entropy(log_p: Tensor, target: None, topk: int) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    log_p = log_p.clamp_min_(-1e4)  # where log p is -inf, p is 0, and 0 * -inf must be 0
    entropy = -torch.einsum("nv,nv->n", p, log_p)[:, None]
    return entropy.sum(), log_p.add_(entropy).mul_(p).neg_()  # dH/dz' = -p (log p + H)


def _topk_entropy(log_p: Tensor, target: None, topk: int) -> tuple[Tensor, Tensor]:
    best, index = log_p.topk(min(topk, log_p.shape[-1]), dim=-1)
    value, grad = _entropy(best.log_softmax(-1), None, topk)
    return value, torch.zeros_like(log_p).scatter_(-1, index, grad)


def _self_ce(log_p: Tensor, target: None, topk: int) -> tuple[Tensor, Tensor]:
    return _cross_entropy(log_p, log_p.argmax(-1), topk)


_FORMS = dict(zip(LOSS_FORMS, (_cross_entropy, _entropy, _topk_entropy, _self_ce), strict=True))


def fold(
    weight: Tensor, bias: Tensor | None, delta: Tensor, l: Tensor, center: bool = False
) -> tuple[Tensor, Tensor]:
    """Output layer whose plain logits are the adjusted ones: ((1 + delta) W, (1 + delta) b + l)."""
    scale = 1 + delta
    if center:
        weight = weight - weight.mean(0)
        bias = None if bias is None else bias - bias.mean()
    folded_bias = l if bias is None else scale * bias + l
    return (weight.to(delta.dtype) * scale[:, None]).to(weight.dtype), folded_bias.to(weight.dtype)
