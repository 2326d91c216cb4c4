"""Methods that change no weight: fitted on the logits of the calib split."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from scipy.optimize import root_scalar
from torch import Tensor

from calm_lightning.bilevel import Reduce
from calm_lightning.head import Alpha
from calm_lightning.module import CalibrationModule


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


class TemperatureScaling(CalibrationModule):
    """One temperature, fitted on the response tokens of the calib rows that CALM would see.

    `fit` reads the calib micro-batches of its train items; T lands in alpha (d = 1 / T, l = 0), so
    it is applied to every token's logits before an option's log-probabilities are summed.
    """

    variants = {"base": (False, False), "temperature_scaling": (False, True)}  # noqa: RUF012
    trains_theta = False

    def __init__(self, model_name: str | None = None, **shared: Any):
        super().__init__(model_name, **shared)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def make_alpha(self) -> Alpha:
        """One d = 1 / T."""
        return Alpha(self.backbone.vocab_size, "scalar")

    def configure_optimizers(self) -> list:
        """Nothing is trained by gradients."""
        return []

    @property
    def temperature(self) -> float:
        """T = 1 / d."""
        return 1 / (1 + self.alpha.delta.item())

    def on_train_start(self) -> None:
        """Begin with nothing seen: a fit that is resumed sees only the items that are left."""
        self._seen.clear()
        super().on_train_start()

    @torch.no_grad()
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Keep the hidden states that predict response tokens of the calib rows."""
        batch = batch["calib"]
        labels = batch["labels"][:, 1:]
        with self.backbone.without_dropout():
            hidden, _ = self.backbone.hidden(batch["input_ids"], batch["attention_mask"])
        counted = labels != -100
        self._seen.append((hidden[:, :-1][counted], labels[counted]))

    def on_train_epoch_end(self) -> None:
        """Fit T on all that was seen."""
        hidden, target = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        rank_zero_info(f"temperature scaling: fitting T on {len(target)} calib tokens")
        head = self.backbone.weight, self.backbone.bias
        t = fit_temperature(hidden, target, *head, reduce=self.reduce)
        with torch.no_grad():
            self.alpha.delta.fill_(1 / t - 1)
        self.log("train/temperature", t, prog_bar=True)
