"""Bundled sample data: small question and instruction sets for trying the package offline."""

from pathlib import Path

NAMES = ("mcqa", "instructions", "open_questions")


def path(name: str) -> Path:
    """Return where the bundled JSON Lines file called `name` lies."""
    if name not in NAMES:
        raise ValueError(
            f"calm_lightning.samples.path: no sample is called {name!r}; "
            f"use one of {', '.join(NAMES)}."
        )
    return Path(__file__).with_name(f"{name}.jsonl")
