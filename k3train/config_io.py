"""Experiments as JSON: what a run folder and a checkpoint keep, read back strictly. Imports no array library."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from k3train.config import Experiment
from k3train.errors import UserError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """The tree of dataclasses as plain dicts, lists, strings and numbers."""
    return {item.name: _plain(getattr(config, item.name)) for item in dataclasses.fields(config)}


def from_dict(kind: type[T], data: object, where: str = "the configuration") -> T:
    """The dataclass `kind` from `to_dict`'s form. A field that is left out takes its default, if it has one.

    Raises:
        UserError: with every unknown field, missing field and value of a wrong type, by dotted name; `where` names the source.
    """
    problems: list[str] = []
    result = _dataclass(kind, data, "", problems)
    if problems:
        raise UserError(f"{where} does not describe {kind.__name__}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return result


def save(experiment: Experiment, path: Path) -> None:
    """Writes the experiment to a JSON file."""
    write_json(path, to_dict(experiment))


def write_json(path: Path, data: object) -> None:
    """Writes a JSON file that is whole or absent, whenever the process ends."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load(path: Path) -> Experiment:
    """Reads and validates an experiment that `save` wrote; raises `UserError` that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}). Put it back as it was, or move the folder away and train anew.") from error
    return from_dict(Experiment, data, str(path)).validate()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _dataclass(kind: type, data: object, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{path.rstrip('.') or 'top level'} = {data!r}: must be an object with the fields of {kind.__name__}")
        return None
    hints, known, values = typing.get_type_hints(kind), {item.name: item for item in dataclasses.fields(kind)}, {}
    problems += [f"{path}{name}: unknown field" for name in data if name not in known]
    before = len(problems)
    for name, item in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{path}{name}", problems)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            problems.append(f"{path}{name}: missing")
    return kind(**values) if len(problems) == before else None


def _value(hint: Any, value: object, path: str, problems: list[str]) -> Any:
    """`value` as the annotated type; an int passes for a float and a list for a tuple, nothing else is converted."""
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, f"{path}.", problems)
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        fits, converted = _fit(option, value)
        if fits:
            return converted
    problems.append(f"{path} = {value!r}: must be {' or '.join(map(_describe, options))}")
    return None


def _fit(hint: Any, value: object) -> tuple[bool, Any]:
    if typing.get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)), value
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            return False, None
        fitted = [_fit(item, entry) for entry in value]
        return all(fits for fits, _ in fitted), tuple(entry for _, entry in fitted)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return True, float(value)
    return type(value) is hint, value


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a list ({_describe(typing.get_args(hint)[0])} each)"
    return {types.NoneType: "null", int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]
