"""Experiment files: loading one by path, and overriding its fields from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import itertools
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the experiment file and the fields after it."""
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT.py", help="a Python file that defines `experiment() -> Experiment`")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="fields to set, after the file")


def resolve(path: Path, overrides: Sequence[str], prog: str) -> Experiment:
    """The experiment of a file with command-line overrides applied, validated. `--help` prints every field and exits.

    Raises:
        UserError: the file does not give an experiment, a field is unknown, or the result does not hold together.
        SystemExit: after help, or with code 2 after a message on a value of a wrong type.
    """
    experiment = load(path)
    check_names(experiment, overrides)
    import tyro  # a tenth of a second

    resolved = tyro.cli(
        Experiment, default=experiment, args=list(overrides), prog=f"{prog} {path}", description=f"Fields of the experiment in {path}."
    )
    return resolved.validate()


def load(path: Path) -> Experiment:
    """Runs an experiment file and calls its `experiment()`; every failure is one `UserError` that names file and cause."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}; give a Python file that defines `experiment() -> Experiment`")
    spec = importlib.util.spec_from_file_location(f"k3train_experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file; an experiment's name ends in .py")
    absolute = path.absolute()  # as in tracebacks; before the file runs, which may change the working folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses defined in the file look themselves up here
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "experiment", None)
        result = make() if callable(make) else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{_place(path, absolute, error)}: {type(error).__name__}: {error}") from error
    if not callable(make):
        raise UserError(f"{path}: defines no function `experiment() -> Experiment`")
    if not isinstance(result, Experiment):
        raise UserError(f"{path}: experiment() returned {type(result).__name__}, must return k3train.config.Experiment")
    return config_io.from_dict(Experiment, config_io.to_dict(result), f"{path}: experiment()")


def _place(path: Path, absolute: Path, error: BaseException) -> str:
    """The file as the user named it, and the last of its lines on the way to the error."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{path}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).absolute() == absolute]
    return f"{path}, line {frames[-1].lineno}" if frames else str(path)


def check_names(experiment: Experiment, overrides: Sequence[str]) -> None:
    """Raises on a field that does not exist, with the nearest that do, and on a list without a value (an unset shell variable)."""
    types = dict(_fields(Experiment))
    fields = list(types)
    switches = {f"{folder}{dot}no_{last}" for folder, dot, last in (field.rpartition(".") for field in fields)}  # --logging.no-tensorboard
    for argument, following in itertools.zip_longest(overrides, overrides[1:], fillvalue="--"):
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and "=" not in argument and typing.get_origin(types.get(name)) is tuple and following.startswith("--"):
            raise UserError(f"{argument} needs at least one value")
        if not argument.startswith("--") or name in {"help", *fields, *switches}:
            continue
        raise UserError(f"unknown field {argument.partition('=')[0]}" + _suggestion(name, fields))


def _suggestion(name: str, fields: Sequence[str]) -> str:
    """The fields that a mistyped name may mean: near in whole, or near in the part after the last dot."""
    last = name.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for field in fields:
        by_last.setdefault(field.rpartition(".")[2], []).append(field)
    near = [field for close in difflib.get_close_matches(last, by_last, n=2, cutoff=0.75) for field in by_last[close]]
    near += [field for field in fields if last in field.rpartition(".")[2].split("_") and field not in near]
    near = near or difflib.get_close_matches(name, fields, n=2, cutoff=0.75)
    options = " or ".join("--" + field.replace("_", "-") for field in near[:4])
    return f"; did you mean {options}?" if options else "; --help after the experiment file lists every field"


def _fields(kind: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names of all fields that hold a value, with their types."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _fields(hints[item.name], f"{path}{item.name}.")
        else:
            yield f"{path}{item.name}", hints[item.name]
