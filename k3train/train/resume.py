"""When a run may go on from a checkpoint with other settings, and what is written down of it. Imports no array library.

Settings are of four kinds: those that change nothing of what is learned (free), the learning rate's course and the data (each with
permission), and all others, with which it would be another run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError

if TYPE_CHECKING:
    from k3train.train.checkpoints import Record

Permission = Literal["learning-rate", "data"]
PERMISSIONS: tuple[Permission, ...] = ("learning-rate", "data")

FREE = ("name", "runs_folder", "mesh.", "kernels", "checkpoint.", "logging.", "evaluation.", "optimizer.max_skipped_steps")
"""Where and by which kernels the run goes on, what is saved and shown, and when it gives up."""
LEARNING_RATE = (
    "optimizer.peak_lr",
    "optimizer.muon.peak_lr",
    "optimizer.muon.kind",
    "optimizer.adamw.peak_lr",
    "optimizer.adamw.kind",
    "schedule.",
)
DATA = "data."
TEXT = "the text"
"""Stands in the place of a setting for the fingerprint of the text."""

CONFIG_FILE, CHANGES_FILE = "config.json", "changes.jsonl"
ABSENT = "not set"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What was asked for beside the settings."""

    step: int | None = None
    """Step to go on from; None: the newest whole one."""
    allow: frozenset[Permission] = frozenset()
    """Kinds of settings that may have changed."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the saved one."""

    setting: str
    saved: Any
    now: Any
    needs: Permission | Literal["another run"] | None
    """None: free."""


def check_resumable(
    record: Record, experiment: Experiment, data_fingerprint: str, run_folder: Path, allow: Collection[str] = ()
) -> list[Change]:
    """The changes with which the run goes on.

    Args:
      record: of the step that it goes on from.
      experiment: with which it goes on.
      data_fingerprint: of the text as it is now.
      run_folder: its `changes.jsonl` tells what was allowed before, at this same step.
      allow: permissions.

    Raises:
      UserError: with every change that is not allowed, if there is one, or if the schedule has ended before the saved step.
    """
    changes = find_changes(record, experiment, data_fingerprint)
    if experiment.schedule.steps < record.step:
        raise UserError(
            f"{run_folder}: schedule.steps = {experiment.schedule.steps}, but {record.step} steps are made. Set it to at least that, "
            "or go on from an earlier step with --step."
        )
    before = _allowed_before(run_folder / CHANGES_FILE, record.step)
    refused = [change for change in changes if change.needs is not None and change.needs not in allow and _key(change) not in before]
    if not refused:
        return changes
    permissions = sorted({change.needs for change in refused if change.needs in PERMISSIONS}, key=str)
    flags = " ".join(f"--allow-changed {permission}" for permission in permissions)
    if any(change.needs == "another run" for change in refused):
        advice = "Set these back, or start a run with another --name."
    else:
        advice = f"Set these back, or give the command again with {flags}."
    table = _table(refused, record.step)
    raise UserError(f"{run_folder} cannot go on from step {record.step} with these changes:\n{table}\n{advice} Nothing was changed.")


def find_changes(record: Record, experiment: Experiment, data_fingerprint: str) -> list[Change]:
    """Every setting that differs, and what it needs.

    Where the text is the same, it does not matter where it lies: `data.sources` is free. `schedule.steps` is free if the learning rate is
    constant and the warm-up over; otherwise it stretches the learning rate's course.
    """
    same_text = record.data_fingerprint == data_fingerprint
    steps_free = _steady(record.experiment, record.step) and _steady(config_io.to_dict(experiment), record.step)

    def needs(setting: str) -> Permission | Literal["another run"] | None:
        if setting.startswith(FREE) or (setting == "data.sources" and same_text) or (setting == "schedule.steps" and steps_free):
            return None
        if setting.startswith(LEARNING_RATE):
            return "learning-rate"
        return "data" if setting.startswith(DATA) else "another run"

    now = config_io.to_dict(experiment)
    changes = [Change(setting, old, new, needs(setting)) for setting, old, new in differences(record.experiment, now)]
    if not same_text:
        changes.append(Change(TEXT, record.data_fingerprint[:16], data_fingerprint[:16], "data"))
    return changes


def adopt(changes: Sequence[Change], experiment: Experiment, run_folder: Path, step: int) -> None:
    """Makes the experiment the run's own: `config.json` is replaced whole.

    What needed permission is first written down in `changes.jsonl`, so that a run that is cut off before its next save goes on without
    being asked again. The former settings stay in the records of the steps that were saved with them.
    """
    allowed = [_key(change) for change in changes if change.needs is not None]
    if allowed:
        with (run_folder / CHANGES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "changes": [json.loads(key) for key in allowed]}) + "\n")
    if changes or not (run_folder / CONFIG_FILE).is_file():
        config_io.save(experiment, run_folder / CONFIG_FILE)


def describe(changes: Sequence[Change]) -> str:
    """The changes on a line, for the person; empty if there are none."""
    return ", ".join(f"{change.setting} {change.saved!r} -> {change.now!r}" for change in changes)


def with_absolute_sources(experiment: Experiment) -> Experiment:
    """The same experiment with its text named from the root, so that it can go on from any working folder."""
    sources = tuple(str(Path(source).absolute()) for source in experiment.data.sources)
    return replace(experiment, data=replace(experiment.data, sources=sources))


def differences(before: Any, now: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, old value, new value) of every leaf in which two trees of dicts differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            yield from differences(before.get(name, ABSENT), now.get(name, ABSENT), f"{field}.{name}" if field else name)
    elif before != now:
        yield field, before, now


def _steady(experiment: dict[str, Any], step: int) -> bool:
    """Whether the learning rate stays what it is from this step on, however many steps follow."""
    try:
        schedule, optimizer = experiment["schedule"], experiment["optimizer"]
        kinds = {optimizer[label]["kind"] or schedule["kind"] for label in ("muon", "adamw")}
        return kinds == {"constant"} and step >= math.ceil(schedule["warmup_fraction"] * schedule["steps"])
    except (KeyError, TypeError):  # of another version
        return False


def _table(changes: Sequence[Change], step: int) -> str:
    """Aligned lines: setting, both values, what it takes."""
    needs = {"another run": "would be another run", **{name: f"needs --allow-changed {name}" for name in PERMISSIONS}}
    rows = [("setting", f"at step {step}", "now", "")]
    rows += [(change.setting, _shown(change.saved), _shown(change.now), needs.get(change.needs or "", "")) for change in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)


def _shown(value: Any) -> str:
    text = value if value == ABSENT else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _key(change: Change) -> str:
    return json.dumps([change.setting, change.saved, change.now])


def _allowed_before(path: Path, step: int) -> set[str]:
    """What was allowed at this step, from the lines of `changes.jsonl` that are whole."""
    if not path.is_file():
        return set()
    allowed: set[str] = set()
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["step"] == step:
                allowed |= {json.dumps(change) for change in line["changes"]}
        except (ValueError, KeyError, TypeError):  # torn by a crash
            continue
    return allowed
