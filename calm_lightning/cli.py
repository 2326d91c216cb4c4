"""The command line: calm fit | validate | test | predict --config FILE …; calm compare RUN …."""

import argparse
import gc
import logging
import shutil
import sys
import time
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

import calm_lightning
from calm_lightning import compare, report
from calm_lightning.callbacks import (
    LastCheckpoint,
    PlainProgress,
    PredictionWriter,
    TensorBoardRecord,
    TestReport,
)
from calm_lightning.module import CalibrationModule
from calm_lightning.selection import ChooseCheckpoint

DESCRIPTION = f"{calm_lightning.__doc__} calm compare RUN RUN … sets runs side by side."
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
            "--checkpoint_every", type=int, default=1, help="outer iterations between last.ckpt"
        )

    def _parse_ckpt_path(self) -> None:
        """Leave hyperparameters to the command line and files: what the user says now wins."""

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        """Parse; --run_dir alone brings the config that the run's fit has left there."""
        self.config = parser.parse_args(_with_config(sys.argv[1:] if args is None else args))

    def before_instantiate_classes(self) -> None:
        """Find the run folder and the state to start from; nothing is written or removed yet."""
        c = self.config[self.subcommand]
        self.phases: dict[str, float] = {}
        stem = "-".join(Path(str(file)).stem for file in c.config or []) or "calm"
        self.run_dir = Path(c.run_dir or Path("runs") / stem)
        last = self.run_dir / "last.ckpt"
        self.resuming = c.ckpt_path is not None
        if c.ckpt_path == "last":
            if not last.exists():
                raise SystemExit(f"calm: there is no {last} to go on from: fit without it")
            c.ckpt_path = str(last)
        elif c.ckpt_path is None and self.subcommand != "fit":
            chosen = self.run_dir / "chosen.ckpt"
            found = chosen if chosen.exists() else last
            if found.exists():
                c.ckpt_path = str(found)
                print(f"calm: using {found}")
            else:
                print(f"calm: there is no {last}: this is the model before any training")
        if self.subcommand == "fit" and rank_zero_only.rank == 0:
            self._check_folder(c.overwrite)
        if self.subcommand == "test":
            c.verbose = False  # Lightning's own list would stand above the report's table
        if self.subcommand == "validate" and c.trainer.limit_val_batches == 0:
            c.trainer.limit_val_batches = None  # a 0 in a config spares fit, not the one who asks

    def _check_folder(self, overwrite: bool) -> None:
        if self.resuming or not self.run_dir.exists() or not any(self.run_dir.iterdir()):
            return
        if not overwrite:
            raise SystemExit(
                f"calm: {self.run_dir} holds an earlier run: go on with --ckpt_path last, "
                "replace it with --overwrite true, or choose another --run_dir"
            )
        if not (self.run_dir / "config.yaml").exists():
            raise SystemExit(
                f"calm: {self.run_dir} holds files but no config.yaml, so it is no run to "
                "overwrite: choose another --run_dir"
            )

    def instantiate_classes(self) -> None:
        """Build everything, the controls too, and only then touch the run folder."""
        super().instantiate_classes()
        if self.subcommand != "fit":
            return
        c = self.config.fit
        self.fitted_controls = {
            name: self._control(name, spec)
            for name, spec in (c.controls or {}).items()
            if name not in self.model.variants  # the method itself, chosen by an overlay
        }
        if rank_zero_only.rank == 0:
            if not self.resuming and self.run_dir.exists():
                shutil.rmtree(self.run_dir)  # empty, or checked to be a run that may go
            self.run_dir.mkdir(parents=True, exist_ok=True)
            # as a file that finds this run again and never removes it
            saved = c.clone()
            saved.run_dir, saved.overwrite, saved.ckpt_path = str(self.run_dir), False, None
            self._parser("fit").save(
                saved, self.run_dir / "config.yaml", skip_none=False, overwrite=True
            )

    def instantiate_trainer(self, **kwargs):
        """A trainer that writes into the run folder and shows how far it is."""
        c = self.config[self.subcommand]
        tests_after_fit = self.subcommand == "fit" and c.controls is not None
        self.report = TestReport(self.run_dir, check_first=tests_after_fit)
        given = self.config_init[self.subcommand].trainer.callbacks or []
        callbacks = [*given] if isinstance(given, list) else [given]
        callbacks += [_progress(), self.report, PredictionWriter(self.run_dir)]
        callbacks.append(TensorBoardRecord(_hparams(c)))
        if self.subcommand == "fit":
            callbacks.append(LastCheckpoint(self.run_dir, c.checkpoint_every))
            self.choice = ChooseCheckpoint(self.run_dir, self._method())
            callbacks.append(self.choice)
        elif c.trainer.enable_checkpointing is None:
            kwargs["enable_checkpointing"] = False
        if c.trainer.logger in (None, True):
            kwargs["logger"] = self._logger()
        if c.trainer.default_root_dir is None:
            kwargs["default_root_dir"] = str(self.run_dir)
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def _method(self) -> str:
        """What the run's own candidates are called: CALM, or the method's own variant."""
        return "calm" if "theta" in self.model.variants else list(self.model.variants)[-1]

    def _logger(self) -> TensorBoardLogger:
        return TensorBoardLogger(self.run_dir, name="tb", version="", default_hp_metric=False)

    # ---- fit, then the test and the controls ----------------------------------------------

    def test_beside_controls(self) -> None:
        """With `controls`, test what was fitted beside them and print one table."""
        c = self.config.fit
        if c.controls is None:
            print(f"calm: {self.run_dir} is written; calm test --run_dir {self.run_dir} scores it")
            return
        self.report.run = self._about()
        with self._phase("test"):
            self._test(self.trainer, self.model, self.choice)
        self._free(self.model)
        for name, control in self.fitted_controls.items():
            seed_everything(c.seed_everything, workers=True, verbose=False)
            rivals = [*self.choice.rivals, *self.choice.candidates]
            self.choice = ChooseCheckpoint(self.run_dir, name, f"{name}.ckpt", rivals)
            trainer = self._small_trainer(by_gradients=control.trains_theta)
            with self._phase(f"fit {report.label(name)}"):
                trainer.fit(control, self.datamodule)
            with self._phase(f"test {report.label(name)}"):
                self._test(trainer, control, self.choice)
            self._free(control)
        self.show()

    def _test(self, trainer, module: CalibrationModule, choice: ChooseCheckpoint) -> None:
        """Test the state that was chosen, or the last one where nothing was."""
        chosen = str(choice.path) if choice.path.exists() else None
        trainer.test(module, self.datamodule, ckpt_path=chosen, verbose=False)

    def _small_trainer(self, by_gradients: bool):
        init = vars(self._get(self.config_init, "trainer")) | {"logger": False}
        init |= {"num_sanity_val_steps": 0, "enable_model_summary": False}
        init["callbacks"] = [_progress(), self.report]
        if by_gradients:
            init["callbacks"].append(self.choice)
        else:  # a temperature is not there before the end, so there is no choice
            init |= {"limit_val_batches": 0, "enable_checkpointing": False}
        return self.trainer_class(**init)

    def _control(self, name: str, spec: dict) -> CalibrationModule:
        """Build a control from `model`'s shared arguments and its own; its variant is `name`."""
        where = f"controls.{name}"
        if "class_path" not in spec:
            raise SystemExit(f"calm: {where} needs a class_path, such as calm_lightning.FineTuning")
        shared = self.config.fit.model.init_args
        init = {key: shared[key] for key in SHARED if key in shared} | (spec.get("init_args") or {})
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(CalibrationModule, "control")
        control = {"class_path": spec["class_path"], "init_args": _plain(init)}
        try:
            control = parser.instantiate(parser.parse_object({"control": control})).control
        except ArgumentError as error:
            raise SystemExit(f"calm: {where}: {_short(error)}") from None
        trained = [v for v in control.variants if v != "base"]
        if len(trained) != 1 or name in ("base", "alpha", "theta", "both"):
            raise SystemExit(
                f"calm: {where} must be a method with one variant of its own (FineTuning, "
                "TemperatureScaling, …) under a name that is not base, alpha, theta or both"
            )
        control.variants = {name: control.variants[trained[0]]}  # `base` is in the table already
        return control

    def _free(self, module: CalibrationModule) -> None:
        module.backbone = None
        gc.collect()

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
            "version": version("calm-lightning"),
            "seconds": self.phases,
        }

    @contextmanager
    def _phase(self, name: str):
        print(f"calm: {name}", flush=True)
        began = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - began

    def _run_subcommand(self, subcommand: str) -> None:
        """The subcommand with its time, and what follows from it."""
        with self._phase(subcommand):
            super()._run_subcommand(subcommand)
        if subcommand == "fit":
            self.test_beside_controls()
        elif subcommand == "test":
            self.show()

    def show(self) -> None:
        """The table, where everything is, and the seconds of each phase."""
        if not self.trainer.is_global_zero:
            return
        console = Console(width=max(120, Console().width))
        selection = self.report.run.get("selection")
        note = f"chosen: {report.chosen(selection)}" if selection else ""
        report.show(console, self.report.rows, self.report.warnings, note)
        seconds = Table(title="seconds", title_justify="left", show_header=False)
        for name, spent in self.phases.items():
            seconds.add_row(name, f"{spent:.0f}")
        console.print(seconds)
        print(f"run folder: {self.run_dir} (report.html, metrics.json, reliability.png, …)")
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


def _with_config(args: list[str]) -> list[str]:
    """Bring RUN/config.yaml along where a command other than fit names a run and no config."""
    where = Namespace(run_dir=None, config=None)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run_dir")
    parser.add_argument("--config", "-c")
    parser.parse_known_args(args, where)
    if args[:1] == ["fit"] or where.config or not where.run_dir:
        return args
    config = Path(where.run_dir) / "config.yaml"
    if not config.exists():
        raise SystemExit(
            f"calm: there is no {config}: name a folder that calm fit made, or give --config too"
        )
    return [args[0], f"--config={config}", *args[1:]]


def _hparams(c: Namespace) -> dict[str, int | float | str]:
    """What TensorBoard tells runs apart by: the plain settings of model and data, and the seed."""
    flat = Namespace(model=c.model, data=c.data, seed=c.seed_everything).as_flat()
    names = {k.replace("init_args.", ""): v for k, v in vars(flat).items()}
    return {k: v for k, v in names.items() if isinstance(v, int | float | str)}


def _progress():
    if not sys.stdout.isatty():
        return PlainProgress()
    # One metric a line: side by side they would not fit beside the bar
    return RichProgressBar(
        theme=RichProgressBarTheme(metrics_text_delimiter="\n", metrics_format=".4g")
    )


def _short(error: BaseException, most: int = 600) -> str:
    """One line for an error; where jsonargparse quotes whole namespaces, its cause instead."""
    while "Namespace(" in str(error) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[:most] + " …"


def _plain(value):
    """Namespaces as dicts, all the way down."""
    if isinstance(value, Namespace):
        return value.as_dict()
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def run(args: list[str] | None = None) -> CALMCLI:
    """Do what the command line (or `args`) says; errors as Python raises them."""
    _quiet_libraries()
    return CALMCLI(
        CalibrationModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={
            "num_sanity_val_steps": -1,  # iteration 0 is a candidate
            "log_every_n_steps": 1,
            "devices": 1,
            "enable_model_summary": False,
        },
        parser_kwargs={"prog": "calm", "description": DESCRIPTION},
        args=args,
    )


def main(args: list[str] | None = None) -> None:
    """As `run`, but bad input ends the process with one sentence."""
    words = sys.argv[1:] if args is None else args
    try:
        if words[:1] == ["compare"]:
            compare.main(words[1:])
        else:
            run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"calm: {_short(error)}") from error
