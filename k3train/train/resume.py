"""When a run may go on from a checkpoint: with the same text and, but for a few settings, the same experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3train import config_io
from k3train.config import Experiment
from k3train.errors import UserError
from k3train.train.checkpoints import Record

CHANGEABLE = ("name", "runs_folder", "mesh.", "checkpoint.", "logging.", "evaluation.")
"""Settings that change nothing of what is computed: where it runs, what is saved, what is shown."""

ABSENT = "not set"


def check_resumable(record: Record, experiment: Experiment, data_fingerprint: str, run_folder: Path) -> None:
    """Raises `UserError` with every difference that would make the resumed run another run than the one that was saved."""
    changes = [
        f"  {field}: {before!r} when it was saved, {now!r} now"
        for field, before, now in differences(record.experiment, config_io.to_dict(experiment))
        if not field.startswith(CHANGEABLE)
    ]
    if changes:
        raise UserError(
            "\n".join(
                (
                    f"{run_folder} cannot go on with a changed experiment:",
                    *changes,
                    "Set these back, or start a run with another --name.",
                )
            )
        )
    if record.data_fingerprint != data_fingerprint:
        raise UserError(
            f"{run_folder} cannot go on: the text has changed since step {record.step} was saved"
            f" (fingerprint {record.data_fingerprint[:16]} then, {data_fingerprint[:16]} now).\n"
            "Bring back the files that the run began with, or start a run with another --name."
        )


def differences(before: Any, now: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, old value, new value) of every leaf in which two trees of dicts differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            yield from differences(before.get(name, ABSENT), now.get(name, ABSENT), f"{field}.{name}" if field else name)
    elif before != now:
        yield field, before, now
