"""The folder of a run: what lies where in it, and that one process at a time trains in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from k3train.errors import UserError

CHECKPOINTS_FOLDER, METRICS_FILE, RESULT_FILE, LOSS_CURVE_FILE = "checkpoints", "metrics.jsonl", "result.json", "loss_curve.png"
TENSORBOARD_FOLDER = "tensorboard"


class BusyError(UserError):
    """Another process is training in the folder."""


@contextlib.contextmanager
def alone(run_folder: Path) -> Iterator[None]:
    """Locks the run folder for this process; the lock goes with the process, however that ends.

    Raises:
      BusyError: another process has the lock.
    """
    folder = os.open(run_folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{run_folder}: another process is training here. Wait for it, or stop it with Ctrl-C.") from None
        yield
    finally:
        os.close(folder)


def refuse_existing_run(run_folder: Path) -> None:
    """Raises `UserError` if the folder holds a run."""
    existing = [name for name in (CHECKPOINTS_FOLDER, METRICS_FILE, RESULT_FILE) if (run_folder / name).exists()]
    if existing:
        raise UserError(f"{run_folder} already holds a run ({', '.join(existing)}). {way_on(run_folder)} Nothing was changed.")


def way_on(run_folder: Path) -> str:
    """What to do about a run folder that is in the way.

    Raises:
      BusyError: its run is under way.
    """
    with alone(run_folder):
        checkpoints = run_folder / CHECKPOINTS_FOLDER
        if checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir()):
            return f"Go on with it by `k3train resume {run_folder}`, or start a new one under another --name."
        return f"It was cut off before its first save: move it away (`mv {run_folder} {run_folder}.unsaved`), or choose another --name."
