"""CALM: bilevel calibration of aligned language models, as a PyTorch Lightning package."""

import importlib

# Imported on first use (PEP 562): `calm --help` and `calm_lightning.metrics` stay quick.
_HOME = {
    "CALMModule": "calm",
    "CalibrationModule": "module",
    "FineTuning": "baselines",
    "Regularization": "baselines",
    "Iterate": "baselines",
    "LabelSmoothing": "smoothing",
    "CFT": "smoothing",
    "TemperatureScaling": "posthoc",
    "VectorScaling": "posthoc",
    "AlpacaDataModule": "data.alpaca",
    "MCQADataModule": "data.mcqa",
    "Shift": "data.shift",
    "ConfidenceECE": "metrics",
    "ClasswiseECE": "metrics",
    "TokenECE": "metrics",
    "MCE": "metrics",
    "RMSCE": "metrics",
    "Alpha": "head",
    "Backbone": "backbone",
    "outer_step": "bilevel",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
