"""`k3train train`: an experiment file and its overrides become a run folder, and the run begins."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError
from k3train.train.resume import with_absolute_sources
from launch import experiments

CONFIG_FILE = "config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train train`."""
    experiments.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Resolves the experiment, saves it in a new run folder, and trains."""
    start(with_absolute_sources(experiments.resolve(options.experiment, options.overrides, "k3train train")))


def start(experiment: Experiment) -> None:
    """Trains a validated experiment in `runs_folder/name`, which must not hold a run.

    If the run fails on the user's input before it has written anything, its folder is taken away again, so that the mended command can
    be given unchanged.
    """
    folder = new_run_folder(experiment)
    from k3train.train import loop  # imports JAX
    from k3train.train.console import LastingConsole
    from k3train.train.run_folder import BusyError

    try:
        loop.run(experiment, folder, console=LastingConsole())
    except BusyError:  # the folder is the other process's
        raise
    except UserError:
        if [path.name for path in folder.iterdir()] == [CONFIG_FILE]:
            (folder / CONFIG_FILE).unlink()
            folder.rmdir()
        raise


def new_run_folder(experiment: Experiment) -> Path:
    """Makes the run folder with the resolved configuration in it.

    Refuses a folder that holds anything, save this same configuration alone: a start that was cut off before it made anything.
    """
    folder = Path(experiment.runs_folder) / experiment.name
    config = folder / CONFIG_FILE
    if folder.exists():
        present = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else ["a file"]
        if present == [CONFIG_FILE] and config_io.load(config) == experiment:
            return folder
        if CONFIG_FILE in present:
            from k3train.train.run_folder import way_on

            raise UserError(f"{folder} already holds a run. {way_on(folder)} Nothing was changed.")
        if present:
            raise UserError(f"{folder} exists and is not an empty folder: choose another --name or --runs-folder. Nothing was changed.")
    folder.mkdir(parents=True, exist_ok=True)
    config_io.save(experiment, config)
    return folder
