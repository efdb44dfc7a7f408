"""`k3train resume`: go on with a run from a checkpoint, with other settings where that is safe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError
from k3train.train.resume import PERMISSIONS, Resume, with_absolute_sources
from launch import experiments
from launch.train import CONFIG_FILE

USAGE = "RUN [--step N] [--allow-changed learning-rate] [--allow-changed data] [--FIELD VALUE ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train resume`; they may stand before or after the run."""
    _add_options(parser)
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, as in runs/quickstart")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="settings to change, after the run")
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="saved step to go on from (default: the newest whole one)")
    parser.add_argument(
        "--allow-changed",
        choices=PERMISSIONS,
        action="append",
        default=[],
        help="let the learning rate's course, or the text and how it is read, change; may be given twice",
    )


def run(options: argparse.Namespace) -> None:
    """Resumes the run with the configuration that its folder keeps and the changes asked for; a finished run is left as it is."""
    saved = saved_experiment(options.run_folder)
    later, fields = _later_options(options.rest)
    step = options.step if later.step is None else later.step
    experiment = with_absolute_sources(changed(saved, fields, options.run_folder)) if fields else saved
    from k3train.train import loop  # imports JAX
    from k3train.train.console import LastingConsole

    asked = Resume(step=step, allow=frozenset((*options.allow_changed, *later.allow_changed)))
    loop.run(experiment, options.run_folder, resume=asked, console=LastingConsole())


def changed(saved: Experiment, fields: Sequence[str], run_folder: Path) -> Experiment:
    """The saved experiment with fields set, validated.

    Raises:
        UserError: a field is unknown, or the result does not hold together.
        SystemExit: after help, or with code 2 after a message on a value of a wrong type.
    """
    experiments.check_names(saved, fields)
    import tyro  # a tenth of a second

    described = f"Settings of {run_folder}. Which of them may change is in docs/checkpoints.md."
    return tyro.cli(Experiment, default=saved, args=list(fields), prog=f"k3train resume {run_folder}", description=described).validate()


def saved_experiment(run_folder: Path) -> Experiment:
    """The configuration in a run folder; raises `UserError` if there is none."""
    if not (run_folder / CONFIG_FILE).is_file():
        what = "is not a run" if run_folder.is_dir() else "is a file" if run_folder.exists() else "no such folder"
        raise UserError(f"{run_folder}: {what}; give the folder that `k3train train` made, with its {CONFIG_FILE}")
    try:
        return config_io.load(run_folder / CONFIG_FILE)
    except UserError:
        from k3train.interop.hugging_face_config import describes_model  # imports JAX

        if describes_model(run_folder):
            message = f"{run_folder}: is a Hugging Face folder, not a run; `k3train score` and `generate --tokens` read it"
            raise UserError(message) from None
        raise


def _later_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Takes the command's own options out of what follows the run, wherever they stand; the rest are fields."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_options(parser)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error} (see k3train resume --help)") from error
