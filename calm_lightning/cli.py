"""The command line: calm fit | validate | test | predict --config FILE [--config OVERLAY …]."""

import gc
import logging
import shutil
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

import calm_lightning
from calm_lightning import report
from calm_lightning.callbacks import LastCheckpoint, PlainProgress, PredictionWriter, TestReport
from calm_lightning.module import CalibrationModule

#: what a control takes over from `model`, unless it says otherwise
SHARED = [
    *("model_name", "quantization", "lora", "dtype", "gradient_checkpointing", "lower_lr"),
    *("theta_optimizer", "warmup_fraction", "micro_batch_size", "clip", "n_bins"),
]


class CALMCLI(LightningCLI):
    """LightningCLI with a fixed run folder, honest controls, and the user's word first."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What a run needs beside model, data and trainer."""
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="run folder (runs/<config stem>)"
        )
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="replace an existing run folder (fit)"
        )
        parser.add_argument(
            "--controls",
            type=dict[str, dict] | None,
            default=None,
            help="methods fitted and tested beside `model` on the same data: name -> {class_path, "
            "init_args}; they take the model and rates from `model`. {} only tests after fit",
        )
        parser.add_argument(
            "--checkpoint_every", type=int, default=5, help="outer iterations between last.ckpt"
        )

    def _parse_ckpt_path(self) -> None:
        """Leave hyperparameters to the command line and files: what the user says now wins."""

    def before_instantiate_classes(self) -> None:
        """Settle the run folder before anything is built, and refuse what would be lost."""
        c = self.config[self.subcommand]
        self.phases: dict[str, float] = {}
        stem = "-".join(Path(str(file)).stem for file in c.config or []) or "calm"
        self.run_dir = Path(c.run_dir or Path("runs") / stem)
        self.last = self.run_dir / "last.ckpt"
        resuming = "ckpt_path" in c and c.ckpt_path is not None
        if resuming and c.ckpt_path == "last":
            if not self.last.exists():
                raise SystemExit(f"calm: there is no {self.last} to go on from: fit without it")
            c.ckpt_path = str(self.last)
        if self.subcommand == "fit":
            if self.run_dir.exists() and any(self.run_dir.iterdir()) and not resuming:
                if not c.overwrite:
                    raise SystemExit(
                        f"calm: {self.run_dir} holds an earlier run: go on with --ckpt_path last, "
                        "replace it with --overwrite true, or choose another --run_dir"
                    )
                shutil.rmtree(self.run_dir)
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._parser(self.subcommand).save(
                c, self.run_dir / "config.yaml", skip_none=False, overwrite=True
            )
        elif c.ckpt_path is None and self.last.exists():
            c.ckpt_path = str(self.last)
            print(f"calm: using {self.last}")
        elif c.ckpt_path is None:
            print(f"calm: there is no {self.last}: this is the model before any training")

    def instantiate_trainer(self, **kwargs):
        """A trainer that writes into the run folder and shows how far it is."""
        c = self.config[self.subcommand]
        self.report = TestReport(self.run_dir)
        callbacks = [_progress(), self.report, PredictionWriter(self.run_dir)]
        if self.subcommand == "fit":
            callbacks.append(LastCheckpoint(self.run_dir, c.checkpoint_every))
        else:
            kwargs.setdefault("enable_checkpointing", False)
        if c.trainer.logger in (None, True):
            kwargs["logger"] = self._logger()
        kwargs.setdefault("default_root_dir", str(self.run_dir))
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def _logger(self) -> TensorBoardLogger:
        return TensorBoardLogger(self.run_dir, name="tb", version="", default_hp_metric=False)

    # ---- fit, then the test and the controls ----------------------------------------------

    def after_fit(self) -> None:
        """With `controls`, test the result beside them and print one table."""
        c = self.config.fit
        if c.controls is None:
            print(f"calm: {self.last} is written; calm test --config … scores it")
            return
        self.report.run = self._about()
        with self._phase("test"):
            self.trainer.test(self.model, self.datamodule, verbose=False)
        self._free(self.model)
        for name, spec in c.controls.items():
            control = self._control(name, spec)
            seed_everything(c.seed_everything, workers=True, verbose=False)
            kwargs = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
            trainer = self._small_trainer(kwargs)
            with self._phase(f"fit {report.label(name)}"):
                trainer.fit(control, self.datamodule)
            with self._phase(f"test {report.label(name)}"):
                trainer.test(control, self.datamodule, verbose=False)
            self._free(control)
        self.show()

    def _small_trainer(self, kwargs: dict):
        init = vars(self._get(self.config_init, "trainer")) | kwargs
        init["callbacks"] = [_progress(), self.report]
        init["enable_model_summary"] = False
        return self.trainer_class(**init)

    def _control(self, name: str, spec: dict) -> CalibrationModule:
        """Build a control from `model`'s shared arguments and its own; its variant is `name`."""
        shared = self.config.fit.model.init_args
        own = spec.get("init_args") or {}
        init = {key: shared[key] for key in SHARED if key in shared} | own
        parser = ArgumentParser()
        parser.add_subclass_arguments(CalibrationModule, "control")
        parsed = parser.parse_object(
            {"control": {"class_path": spec["class_path"], "init_args": _plain(init)}}
        )
        control = parser.instantiate(parsed).control
        # `base` is in the table already
        (found,) = (v for v in control.variants if v != "base")
        control.variants = {name: control.variants[found]}
        return control

    def _free(self, module: CalibrationModule) -> None:
        module.backbone = None
        gc.collect()

    def after_test(self) -> None:
        """Print the table of everything in metrics.json."""
        self.show()

    def after_predict(self) -> None:
        """Say where the predictions are."""
        print(f"calm: {self.run_dir / 'predictions.jsonl'} is written")

    def before_test(self) -> None:
        """Say of which run the numbers are."""
        self.report.run = self._about()

    def _about(self) -> dict:
        c = self.config[self.subcommand]
        return {
            "config": [str(file) for file in c.config or []],
            "model": c.model.class_path,
            "model_name": c.model.init_args.get("model_name"),
            "seed": c.seed_everything,
            "precision": str(self.trainer.precision),
            "version": _version(),
        }

    @contextmanager
    def _phase(self, name: str):
        print(f"calm: {name}", flush=True)
        began = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - began

    def _run_subcommand(self, subcommand: str) -> None:
        with self._phase(subcommand) if subcommand != "fit" else self._fit_phase():
            super()._run_subcommand(subcommand)

    @contextmanager
    def _fit_phase(self):
        """Time fit itself: after_fit, which runs within, keeps its own phases."""
        print("calm: fit", flush=True)
        began = time.monotonic()
        after_fit = self.after_fit

        def timed() -> None:
            self.phases["fit"] = time.monotonic() - began
            after_fit()

        self.after_fit = timed
        yield

    def show(self) -> None:
        """The table, where everything is, and the seconds of each phase."""
        if not self.trainer.is_global_zero:
            return
        console = Console(width=max(120, Console().width))
        rows = self.report.rows
        for dataset, scoring in dict.fromkeys((r["dataset"], r["scoring"]) for r in rows):
            console.print(report.table(rows, dataset, scoring))
        seconds = Table(title="seconds", title_justify="left", show_header=False)
        for name, spent in self.phases.items():
            seconds.add_row(name, f"{spent:.0f}")
        console.print(seconds)
        print(f"run folder: {self.run_dir} (metrics.json, bins.csv, reliability.png, tb/)")
        report.write_metrics(self.run_dir / "metrics.json", {"seconds": self.phases}, [])


def _quiet_libraries() -> None:
    """Leave out what libraries say of themselves and no user of `calm` could act on."""
    for words in ("is_gradient_checkpointing", "LeafSpec", "loftq_config", "in eval mode at the"):
        warnings.filterwarnings("ignore", message=f".*{words}.*")
    chatter = ("💡", "GPU available", "TPU available", "`weights_only` was not", "Loading `train_")
    for floor in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{floor}.utilities.rank_zero").addFilter(
            lambda record: not record.getMessage().startswith(chatter)
        )


def _progress():
    if not sys.stdout.isatty():
        return PlainProgress()
    # One metric a line: side by side they would not fit beside the bar
    return RichProgressBar(
        theme=RichProgressBarTheme(metrics_text_delimiter="\n", metrics_format=".4g")
    )


def _plain(value):
    """Namespaces as dicts, all the way down."""
    if isinstance(value, Namespace):
        return value.as_dict()
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _version() -> str:
    from importlib.metadata import version

    return version("calm-lightning")


def run(args: list[str] | None = None) -> CALMCLI:
    """Do what the command line (or `args`) says; errors as Python raises them."""
    _quiet_libraries()
    torch.set_float32_matmul_precision("high")
    return CALMCLI(
        CalibrationModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "devices": 1,
            "enable_model_summary": False,
        },
        parser_kwargs={"prog": "calm", "description": calm_lightning.__doc__},
        args=args,
    )


def main(args: list[str] | None = None) -> None:
    """As `run`, but bad input ends the process with one sentence."""
    try:
        run(args)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        raise SystemExit(f"calm: {error}") from error
