"""Calibration metrics: functions on torch, one exact bin state, thin torchmetrics classes over it.

Torch, torchmetrics and scipy only. Whether numbers are probabilities or logits is the caller's word
(`update`, `update_logits`), never guessed. Binned metrics rest on integer sums per bin, so that no
order, batching, device, number of processes or precision plugin can change a value.

Arguments that functions share; what is made of probs is float64 tensors, of samples Python floats:
    probs: `(N, K)` probabilities, K >= 2. A row sums to 1 within 1e-3 (bfloat16: 2**-7, its step).
    target: `(N,)` integer index of the right option.
    mask: `(N, K)` bool, True where the row has that option; None: every row has K options. A row
        has at least two, its target is one of them, and those it lacks hold probability 0.
    confidence, correct: samples `(N,)`, the largest probability and bool whether it was right.
A breach is a ValueError of one sentence: the first wrong row, counted from 0, and the remedy.
"""

from calm_lightning.metrics.bins import (
    Reliability,
    bin_index,
    classwise_ece,
    confidence_ece,
    debiased_squared_ece,
    max_calibration_error,
    rms_calibration_error,
)
from calm_lightning.metrics.classes import MCE, RMSCE, ClasswiseECE, ConfidenceECE, TokenECE
from calm_lightning.metrics.samples import (
    Floor,
    bin_sensitivity,
    bootstrap,
    cube_root_bins,
    equal_mass_ece,
    noise_floor,
    paired_bootstrap,
    paired_bootstrap_auroc,
    paired_bootstrap_mean,
    smooth_ece,
)
from calm_lightning.metrics.scores import (
    BrierParts,
    accuracy,
    auroc,
    brier,
    brier_parts,
    mean_confidence,
    nll,
    risk_coverage_area,
    row_scores,
    summary,
)

__all__ = [
    "MCE",
    "RMSCE",
    "BrierParts",
    "ClasswiseECE",
    "ConfidenceECE",
    "Floor",
    "Reliability",
    "TokenECE",
    "accuracy",
    "auroc",
    "bin_index",
    "bin_sensitivity",
    "bootstrap",
    "brier",
    "brier_parts",
    "classwise_ece",
    "confidence_ece",
    "cube_root_bins",
    "debiased_squared_ece",
    "equal_mass_ece",
    "max_calibration_error",
    "mean_confidence",
    "nll",
    "noise_floor",
    "paired_bootstrap",
    "paired_bootstrap_auroc",
    "paired_bootstrap_mean",
    "risk_coverage_area",
    "rms_calibration_error",
    "row_scores",
    "smooth_ece",
    "summary",
]
