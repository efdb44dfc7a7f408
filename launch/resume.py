"""`k3train resume`: go on with a run from its newest checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError
from launch.train import CONFIG_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train resume`."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, as in runs/quickstart")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Resumes the run with the configuration that its folder keeps; a finished run is left as it is."""
    experiment = saved_experiment(options.run_folder)
    from rich.console import Console

    from k3train.train import loop  # imports JAX

    loop.run(experiment, options.run_folder, resume=True, console=Console())


def saved_experiment(run_folder: Path) -> Experiment:
    """The configuration in a run folder; raises `UserError` if there is none."""
    if not (run_folder / CONFIG_FILE).is_file():
        what = "is not a run" if run_folder.is_dir() else "no such folder"
        raise UserError(f"{run_folder}: {what}; give the folder that `k3train train` made, with its {CONFIG_FILE}")
    return config_io.load(run_folder / CONFIG_FILE)
