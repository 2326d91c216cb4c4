"""What goes on around a run: progress for people, files for later."""

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from calm_lightning import figures, page, predictions, report
from calm_lightning.data.files import write_whole

COMPARED = (
    "Left: accuracy over confidence, on the diagonal where a model is calibrated. Right: the share "
    "of wrong answers among the surest questions; lower is better at sorting right from wrong."
)
DIAGRAMS = (
    "Bars: accuracy of each bin. Hatched: its gap to the mean confidence. Whiskers: 95 % Wilson "
    "interval. Dark: how many rows a bin holds. Top label: the largest probability; Total: every "
    "option's probability, pooled; option A, B, …: that of one place in the list of options."
)


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
    """After a test: what the run folder says of it, in numbers, pictures and words.

    metrics.json, bins.csv, test_predictions.jsonl, reliability.png, report.html. Rows already there
    are kept, those of the same key replaced; pictures and warnings are of all that is there.

    Args:
        run_dir: where they go; RUN/selection.json is read, where it exists.
        run: what metrics.json says of the run.
        check_first: set the test data up before fit, so that what cannot be tested costs no run.
    """

    __test__ = False  # not a test class of pytest's

    def __init__(
        self, run_dir: str | Path, run: dict[str, Any] | None = None, check_first: bool = False
    ):
        self.run_dir, self.run, self.check_first = Path(run_dir), run or {}, check_first
        self.texts: dict[tuple[str, str], tuple[str, list[str]]] = {}
        self.rows: list[dict[str, Any]] = []
        self.warnings: dict[tuple[str, str], list[str]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the test questions (the DataModule keeps them)."""
        if self.check_first and trainer.datamodule is not None:
            trainer.datamodule.setup("test")

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, *_) -> None:
        """Keep what was asked, for the page; of several processes the first knows its share."""
        if "question" in batch:
            asked = zip(batch["id"], batch["question"], batch["options"], strict=True)
            self.texts |= {(batch["dataset"], i): (q, options) for i, q, options in asked}

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what the module's `scored` says."""
        if not trainer.is_global_zero:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.run.setdefault("served", _served(pl_module))
        selection = self.run_dir / "selection.json"
        if selection.exists():
            self.run["selection"] = json.loads(selection.read_text())
        n_bins = pl_module.hparams.n_bins
        kept = predictions.write(self.run_dir / "test_predictions.jsonl", pl_module.scored)
        scored = predictions.with_unions(kept)
        tested = {(s.scoring, s.variant) for s in pl_module.scored}
        fresh = [s for s in scored if (s.scoring, s.variant) in tested]
        rows = report.metric_rows(fresh, n_bins)
        self.rows = report.write_metrics(self.run_dir / "metrics.json", self.run, rows)
        self.warnings = report.warnings(scored, self.rows)
        report.write_bins(self.run_dir / "bins.csv", fresh, n_bins)
        (shown,) = predictions.widest(s for s in scored if s.scoring == fresh[0].scoring)
        diagrams = figures.reliability(shown, n_bins)
        compared = figures.png(figures.comparison(shown, n_bins))
        images = {COMPARED: compared, DIAGRAMS: figures.png(diagrams)}
        (self.run_dir / "reliability.png").write_bytes(images[DIAGRAMS])
        html = page.render(self.run, self.rows, scored, self.warnings, images, self.texts)
        write_whole(self.run_dir / "report.html", html)
        for writer in _writers(trainer):
            name = f"test/reliability_{shown[0].scoring}"
            writer.add_figure(name, diagrams, trainer.global_step)


class TensorBoardRecord(Callback):
    """What scalars do not show: reliability at every validation, histograms of alpha, HPARAMS.

    Args:
        hparams: flat names and numbers, texts or truth values of the HPARAMS row.
    """

    def __init__(self, hparams: dict[str, Any] | None = None):
        self.hparams = hparams or {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the questions of this validation, if there were any."""
        for writer in _writers(trainer):
            for group in predictions.widest(pl_module.scored):
                figure = figures.reliability(group, pl_module.hparams.n_bins)
                name = f"val/reliability_{group[0].scoring}"
                writer.add_figure(name, figure, trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Histograms of what alpha trains (delta, l)."""
        for writer in _writers(trainer):
            for name, tensor in pl_module.alpha.named_parameters():
                if tensor.requires_grad:
                    writer.add_histogram(f"alpha/{name}", tensor, trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the HPARAMS row."""
        self._row(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the HPARAMS row, where no fit has."""
        self._row(trainer, pl_module)

    def _row(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Names only: the row shows the scalars of these tags, those of a later test among them
        measured = ("accuracy", "conf_ece", "cw_ece", "nll", "brier", "auroc")
        tags = [
            f"{k}/{m}"
            for k in ("val", *(f"test/{v}" for v in pl_module.variants))
            for m in measured
        ]
        for writer in _writers(trainer):
            for summary in hparams(self.hparams, dict.fromkeys(tags, 0.0)):
                writer.file_writer.add_summary(summary, trainer.global_step)


def _writers(trainer: Trainer) -> list[SummaryWriter]:
    """The TensorBoard writers of this process: none on ranks other than 0."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)]


def _served(module: LightningModule) -> str:
    """The variant that predictions come from."""
    used = module.trains_theta, module.alpha_in_use
    return next((v for v, u in module.variants.items() if u == used), list(module.variants)[-1])


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
