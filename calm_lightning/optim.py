"""Optimizers and rates: what App. C.1 and C.2 fix of them."""

import math

import torch
from lightning.pytorch.cli import OptimizerCallable


def adamw(params) -> torch.optim.Optimizer:
    """AdamW for theta, as the paper has it; its rate is set by `lower_lr`."""
    return torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.02)


def adamw_alpha(params) -> torch.optim.Optimizer:
    """AdamW for alpha, without decay; its rate is set by `upper_lr`."""
    return torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.0)


def with_rate(make: OptimizerCallable, params: list, lr: float, name: str) -> torch.optim.Optimizer:
    """Optimizer with this rate; ValueError where the callable brings a rate of its own."""
    optimizer = make(params)
    if optimizer.defaults["lr"] != type(optimizer)(params).defaults["lr"]:
        raise ValueError(f"the optimizer has an lr of its own: remove it and set model.{name}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def warmup_cosine(k: int, total: int, warmup: int) -> float:
    """Share of the peak rate at item k of `total`: a line up over `warmup` items, a cosine to 0.

    The line begins at 1 / warmup: a first step at rate 0 would waste a whole outer iteration.

    >>> [round(warmup_cosine(k, 6, 2), 2) for k in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if k < warmup:
        return (k + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (k - warmup) / max(1, total - warmup)))
