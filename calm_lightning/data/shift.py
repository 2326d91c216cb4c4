"""Out of domain: fit on one DataModule, test on another."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from calm_lightning.data.mcqa import MCQADataModule


class Shift(LightningDataModule):
    """Fit and validate on `source`, test and predict on `target`; a lone module is its own target.

    `root`, the folder used instead of the hub, goes to both modules unless they have one.
    """

    def __init__(
        self,
        source: LightningDataModule,
        target: LightningDataModule,
        root: str | Path | None = None,
    ):
        super().__init__()
        self.source, self.target, self.root = source, target, root
        if root is not None:
            for module in (source, target):
                if getattr(module, "root", None) is None:
                    module.root = root
        if isinstance(source, MCQADataModule):
            source.held_out = target if isinstance(target, MCQADataModule) else None

    def prepare_data(self) -> None:
        """Let both prepare."""
        self.source.prepare_data()
        self.target.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Hand the trainer to both, and set up the one whose stage it is."""
        self.source.trainer = self.target.trainer = self.trainer
        if stage in ("fit", "validate", None):
            self.source.setup(stage)
        if stage in ("test", "predict", None):
            self.target.setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        """Tear down the one whose stage it is."""
        module = self.source if stage in ("fit", "validate") else self.target
        module.teardown(stage)

    def train_dataloader(self) -> Any:
        """Return the source's."""
        return self.source.train_dataloader()

    def val_dataloader(self) -> Any:
        """Return the source's."""
        return self.source.val_dataloader()

    def test_dataloader(self) -> Any:
        """Return the target's."""
        return self.target.test_dataloader()

    def predict_dataloader(self) -> Any:
        """Return the target's."""
        return self.target.predict_dataloader()
