"""What goes on around a run: progress for people, files for later."""

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from calm_lightning import report


class PlainProgress(ProgressBar):
    """A line at most every few seconds, where there is no terminal for a bar (logs, CI).

    Args:
        every: seconds between lines.
    """

    def __init__(self, every: float = 3.0):
        super().__init__()
        self._every, self._last, self._began = every, 0.0, 0.0

    def disable(self) -> None:
        """Say nothing from now on (Lightning calls this on ranks other than 0)."""
        self._every = float("inf")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock for the time left."""
        self._began, self._from = time.monotonic(), pl_module.trainer.fit_loop.total_batch_idx + 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Outer iteration, losses, time left."""
        done = trainer.fit_loop.total_batch_idx + 1
        total = trainer.num_training_batches * (trainer.max_epochs or 1)
        shown = {
            name: f"{float(number):.4g}"
            for name, number in trainer.progress_bar_metrics.items()
            if name != "v_num"
        }
        spent = time.monotonic() - self._began
        left = spent / max(1, done - self._from) * (total - done)
        self._say(
            f"fit {done}/{total}  "
            + "  ".join(f"{name} {number}" for name, number in shown.items())
            + f"  left {int(left) // 60}:{int(left) % 60:02d}",
            last=done == total,
        )

    def on_validation_batch_end(self, trainer, pl_module, *args) -> None:
        """Batches seen."""
        self._count("validate", args[2], trainer.num_val_batches, args[3:])

    def on_test_batch_end(self, trainer, pl_module, *args) -> None:
        """Batches seen."""
        self._count("test", args[2], trainer.num_test_batches, args[3:])

    def on_predict_batch_end(self, trainer, pl_module, *args) -> None:
        """Batches seen."""
        self._count("predict", args[2], trainer.num_predict_batches, args[3:])

    def _count(self, what: str, batch_idx: int, sizes: list, loader: tuple) -> None:
        before = sum(sizes[: loader[0]]) if loader else 0
        done, total = before + batch_idx + 1, sum(sizes)
        self._say(f"{what} {done}/{total} batches", last=done == total)

    def _say(self, line: str, last: bool) -> None:
        now = time.monotonic()
        if last or now - self._last > self._every:
            self._last = now
            print(line, flush=True)


class LastCheckpoint(Checkpoint):
    """`last.ckpt` in the run folder: every so many outer iterations, and at the end.

    Not ModelCheckpoint: its folder and name would depend on versions and monitors, and resuming
    must find the one file again. Lightning writes it aside and renames it.

    Args:
        run_dir: the run folder.
        every: outer iterations between two writes.
    """

    def __init__(self, run_dir: str | Path, every: int):
        self.path, self.every = Path(run_dir) / "last.ckpt", every

    def on_train_batch_end(self, trainer: Trainer, *_) -> None:
        """Write after every `every`-th train item."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every == 0:
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final state."""
        trainer.save_checkpoint(self.path, weights_only=False)


class TestReport(Callback):
    """After a test: metrics.json, bins.csv and reliability.png in the run folder.

    Args:
        run_dir: where they go; rows already there are kept, those of the same key replaced.
        run: what metrics.json says of the run.
        check_first: set the test data up before fit, so that what cannot be tested costs no run.
    """

    __test__ = False  # not a test class of pytest's

    def __init__(
        self, run_dir: str | Path, run: dict[str, Any] | None = None, check_first: bool = False
    ):
        self.run_dir, self.run, self.check_first = Path(run_dir), run or {}, check_first
        self.scored: list = []
        self.rows: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the test questions (the DataModule keeps them)."""
        if self.check_first and trainer.datamodule is not None:
            trainer.datamodule.setup("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what the module's `scored` says; pictures hold every variant seen so far."""
        if not trainer.is_global_zero:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        n_bins = pl_module.hparams.n_bins
        fresh = {(s.dataset, s.scoring, s.variant) for s in pl_module.scored}
        kept = [s for s in self.scored if (s.dataset, s.scoring, s.variant) not in fresh]
        self.scored = kept + pl_module.scored
        rows = report.metric_rows(pl_module.scored, n_bins)
        self.rows = report.write_metrics(self.run_dir / "metrics.json", self.run, rows)
        report.write_bins(self.run_dir / "bins.csv", pl_module.scored, n_bins)
        figure = report.reliability_figure(self.scored, n_bins)
        figure.savefig(self.run_dir / "reliability.png", dpi=150)
        if trainer.logger is not None and hasattr(trainer.logger.experiment, "add_figure"):
            trainer.logger.experiment.add_figure("test/reliability", figure, trainer.global_step)


class PredictionWriter(Callback):
    """Predictions as JSON Lines, written batch by batch; `predictions.jsonl` in the run folder.

    Args:
        run_dir: where; with several processes each writes `predictions-<rank>.jsonl`.
    """

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)

    def _path(self, trainer: Trainer) -> Path:
        several = trainer.world_size > 1
        return self.run_dir / f"predictions{f'-{trainer.global_rank}' if several else ''}.jsonl"

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a file aside, so that the last whole one stays until this one is."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._file = open(f"{self._path(trainer)}.part", "w", encoding="utf-8")  # noqa: SIM115

    def on_predict_batch_end(self, trainer, pl_module, outputs, *batch) -> None:
        """One line a question."""
        for row in outputs:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the finished file in place."""
        self._file.close()
        os.replace(f"{self._path(trainer)}.part", self._path(trainer))
