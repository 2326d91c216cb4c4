"""Methods that change no weight: fitted on the logits of the calib split."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from scipy.optimize import minimize, root_scalar
from torch import Tensor

from calm_lightning.bilevel import Reduce
from calm_lightning.decisions import DecidingModule, calib_batches
from calm_lightning.head import Alpha, token_loss
from calm_lightning.module import CalibrationModule


@torch.no_grad()
def fit_temperature(
    hidden: Tensor,  # (N, H)
    target: Tensor,  # (N,)
    weight: Tensor,  # (V, H)
    bias: Tensor | None = None,  # (V,)
    bounds: tuple[float, float] = (0.1, 10.0),
    chunk: int = 256,
    reduce: Reduce = lambda tensors: None,
) -> float:
    """Temperature T in `bounds` that minimises the NLL of softmax(z / T) over the vocabulary.

    The NLL is convex in 1 / T, so the root of its derivative, the mean of E_p[z] - z_target, is
    the minimum; without a root inside, T is the bound with the smaller NLL.

    `reduce` sums over processes that hold a share of the positions each; all find the same T.

    Raises:
        ValueError: no position to fit on.

    >>> z = torch.log(torch.tensor([[0.8, 0.2]] * 5))
    >>> round(fit_temperature(3 * z, torch.tensor([0, 0, 0, 0, 1]), torch.eye(2)), 3)
    3.0
    """
    count = torch.tensor(float(len(hidden)), dtype=torch.float64, device=weight.device)
    reduce([count])
    if not count:
        raise ValueError("temperature scaling has no calib token to fit on: give calib rows")

    def slope(beta: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            z = (hidden[rows].to(weight) @ weight.T).float()
            if bias is not None:
                z += bias
            p = (beta * z).softmax(-1)
            total += (p * z).sum() - z.gather(1, target[rows, None]).sum()
        reduce([total])
        return float(total / count)

    low, high = 1 / bounds[1], 1 / bounds[0]
    if slope(low) >= 0:
        return bounds[1]
    if slope(high) <= 0:
        return bounds[0]
    return 1 / root_scalar(slope, bracket=(low, high), method="brentq", rtol=1e-4).root


def fit_vector(
    hidden: Tensor,  # (N, H)
    target: Tensor,  # (N,)
    weight: Tensor,  # (V, H)
    bias: Tensor | None = None,  # (V,)
    pull: float = 1.0,
    reduce: Reduce = lambda tensors: None,
) -> tuple[Tensor, Tensor]:
    """(delta, l), (V,) float32 each, that minimise the NLL of softmax((1 + delta) z + l).

    To the summed NLL comes pull / 2 (|delta|^2 + |l|^2): a token that is never the right one would
    lose its probability without end, and one that never weighs stays as it is. By L-BFGS-B, with
    d in [0.1, 10] and l in [-10, 10]; `reduce` as in `fit_temperature`.

    Raises:
        ValueError: no position to fit on.
    """
    size = len(weight)
    count = torch.tensor(float(len(hidden)), device=weight.device)
    reduce([count])
    if not count:
        raise ValueError("vector scaling has no calib token to fit on: give calib rows")

    def objective(x):
        at = torch.as_tensor(x, dtype=torch.float32, device=weight.device)
        alpha = [part.clone().requires_grad_() for part in at.split(size)]
        total = token_loss(hidden, weight, tuple(alpha), target, bias=bias)
        found = [total.detach(), *torch.autograd.grad(total, alpha)]
        reduce(found)
        nll, slope = found[0].double(), torch.cat(found[1:]).double()
        at = at.double()
        value = nll + 0.5 * pull * (at @ at)
        return float(value / count), ((slope + pull * at) / count).cpu().numpy()

    bounds = [(0.1 - 1, 10 - 1)] * size + [(-10, 10)] * size
    found = minimize(
        objective, torch.zeros(2 * size), jac=True, method="L-BFGS-B", bounds=bounds,
        options={"maxiter": 50},
    )  # fmt: skip
    return torch.as_tensor(found.x, dtype=torch.float32, device=weight.device).split(size)


class PostHoc(CalibrationModule):
    """Adjustments fitted on the response tokens of the calib rows that CALM would see.

    `fit` reads the calib micro-batches of its train items; what it finds lands in alpha, so it is
    applied to every token's logits before an option's log-probabilities are summed.
    """

    trains_theta = False

    def __init__(self, model_name: str | None = None, **shared: Any):
        super().__init__(model_name, **shared)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def configure_optimizers(self) -> list:
        """Nothing is trained by gradients."""
        return []

    def on_train_start(self) -> None:
        """Begin with nothing seen: a fit that is resumed sees only the items that are left."""
        self._seen.clear()
        super().on_train_start()

    @torch.no_grad()
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Keep the hidden states that predict response tokens of the calib rows."""
        with self.backbone.without_dropout():
            self._seen += [(s.hidden, s.token) for s in self.supervised(batch["calib"])]

    def seen(self) -> tuple[Tensor, Tensor]:
        """Hidden states (N, H) and the tokens that they should predict (N,)."""
        hidden, target = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        rank_zero_info(f"{type(self).__name__}: fitting on {len(target)} calib tokens")
        return hidden, target


class TemperatureScaling(DecidingModule, PostHoc):
    """One temperature T, as alpha's d = 1 / T.

    Args:
        over: ``vocabulary``: see `PostHoc`. ``options``: among a row's options, on the first half
            of the calib split, read once (in domain, App. C.2).
        **shared: see `DecidingModule`.
    """

    variants = {"base": (False, False), "temperature_scaling": (False, True)}  # noqa: RUF012

    def make_alpha(self) -> Alpha:
        """One d = 1 / T."""
        return Alpha(self.backbone.vocab_size, "scalar")

    @property
    def temperature(self) -> float:
        """T = 1 / d."""
        return 1 / (1 + self.alpha.delta.item())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Keep the hidden states, where they are what T is fitted on."""
        if self.hparams.over == "vocabulary":
            super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """Fit T on all that was seen."""
        if self.hparams.over == "vocabulary":
            head = self.backbone.weight, self.backbone.bias
            t = fit_temperature(*self.seen(), *head, reduce=self.reduce)
        else:
            z, answer = self._half_of_calib()
            t = fit_temperature(z, answer, torch.eye(z.shape[1]).to(z), reduce=self.reduce)
        with torch.no_grad():
            self.alpha.delta.fill_(1 / t - 1)
        self.log("train/temperature", t, prog_bar=True)

    @torch.no_grad()
    def _half_of_calib(self) -> tuple[Tensor, Tensor]:
        """Option logits (N, K), but for a constant of each row, and the right ones (N,)."""
        found = []
        with self.backbone.without_dropout():
            for batch in calib_batches(self, share=0.5):
                for s in self.supervised(batch, local=True):
                    d = self.decisions(s, batch)
                    found.append((d.log_probs(self.backbone), d.answer))
        width = max(z.shape[1] for z, _ in found)
        low = torch.finfo(found[0][0].dtype).min  # what a row without that option has
        z = [torch.nn.functional.pad(z, (0, width - z.shape[1]), value=low) for z, _ in found]
        rank_zero_info(f"TemperatureScaling: fitting on {sum(map(len, z))} calib decisions")
        return torch.cat(z), torch.cat([answer for _, answer in found])


class VectorScaling(PostHoc):
    """Two numbers a token, d and l of the paper's alpha, fitted by NLL instead of Eq. 8.

    Args:
        pull: strength of the pull to the identity, in tokens; see `fit_vector`.
        **shared: see `CalibrationModule`.

    Raises:
        ValueError: a pull that is not positive.
    """

    variants = {"base": (False, False), "vector_scaling": (False, True)}  # noqa: RUF012

    def __init__(self, model_name: str | None = None, *, pull: float = 1.0, **shared: Any):
        super().__init__(model_name, **shared)
        if pull <= 0:
            raise ValueError(f"pull must be positive, not {pull}: rare tokens need one")

    def make_alpha(self) -> Alpha:
        """A d and an l for every token."""
        return Alpha(self.backbone.vocab_size)

    def on_train_epoch_end(self) -> None:
        """Fit on all that was seen."""
        head = self.backbone.weight, self.backbone.bias
        delta, l = fit_vector(*self.seen(), *head, self.hparams.pull, self.reduce)
        with torch.no_grad():
            self.alpha.delta.copy_(delta)
            self.alpha.l.copy_(l)
        self.log_dict({"train/d_min": 1 + delta.min(), "train/d_max": 1 + delta.max()})
