"""Out of domain: fit on one DataModule, test on another."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from calm_lightning.data.mcqa import MCQADataModule


class Shift(LightningDataModule):
    """Fit and validate on `source`, test and predict on `target`; a lone module is its own target.

    `selection`, labelled questions of other benchmarks, are validated on beside the source's rows:
    by them the checkpoint is chosen (see `selection`). `root`, the folder used instead of the hub,
    goes to all modules unless they have one.

    Raises:
        ValueError: at setup, a selection question that is a test question too.
    """

    def __init__(
        self,
        source: LightningDataModule,
        target: LightningDataModule,
        selection: MCQADataModule | None = None,
        root: str | Path | None = None,
    ):
        super().__init__()
        self.source, self.target, self.selection, self.root = source, target, selection, root
        if root is not None:
            for module in filter(None, (source, target, selection)):
                if getattr(module, "root", None) is None:
                    module.root = root
        if isinstance(source, MCQADataModule):
            source.held_out = target if isinstance(target, MCQADataModule) else None

    def prepare_data(self) -> None:
        """Let all prepare."""
        for module in filter(None, (self.source, self.target, self.selection)):
            module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Hand the trainer to both, and set up the one whose stage it is."""
        for module in filter(None, (self.source, self.target, self.selection)):
            module.trainer = self.trainer
        if stage in ("fit", "validate", None):
            self.source.setup(stage)
            if self.selection is not None:
                self.selection.setup("test")
                self._refuse_overlap()
        if stage in ("test", "predict", None):
            self.target.setup(stage)
        if stage == "test" and self.selection is not None:
            self._refuse_overlap()  # the target may be another one than fit had

    def teardown(self, stage: str | None = None) -> None:
        """Tear down those whose stage it is."""
        fitted = stage in ("fit", "validate")
        for module in (self.source, self.selection) if fitted else (self.target,):
            if module is not None:
                module.teardown(stage)

    def train_dataloader(self) -> Any:
        """Return the source's."""
        return self.source.train_dataloader()

    def val_dataloader(self) -> Any:
        """Return the source's, and the questions of `selection`."""
        loaders = self.source.val_dataloader()
        if self.selection is None:
            return loaders
        loaders = loaders if isinstance(loaders, list) else [loaders]
        return [*loaders, *self.selection.test_dataloader()]

    def test_dataloader(self) -> Any:
        """Return the target's."""
        return self.target.test_dataloader()

    def predict_dataloader(self) -> Any:
        """Return the target's."""
        return self.target.predict_dataloader()

    def _refuse_overlap(self) -> None:
        if not isinstance(self.target, MCQADataModule):
            return
        tested = {question.content for question in self.target.test_questions()}
        both = [q for q in self.selection.test_questions() if q.content in tested]
        if both:
            raise ValueError(
                f"{both[0].where} is a test question too, one of {len(both)} such: choose by other "
                "questions than those that are tested."
            )
