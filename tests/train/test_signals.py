"""Stop requests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from k3train.train.signals import Stopped, StopRequest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

TWO_REQUESTS = """
import os, signal, time
from k3train.train.signals import StopRequest
with StopRequest(lambda number: print("first", number, flush=True)):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
print("not reached")
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number: signal.Signals):
    before, seen = signal.getsignal(number), []
    with StopRequest(seen.append) as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        wait_for(lambda: seen)
        assert stop.signal == number and seen == [number]
    assert signal.getsignal(number) is before
    assert Stopped(number).code == 128 + number


def test_the_second_ends_the_process_at_once():
    start = time.monotonic()
    process = subprocess.run([sys.executable, "-c", TWO_REQUESTS], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert process.returncode == 130
    assert process.stdout == "first 2\n"
    assert time.monotonic() - start < 25.0


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


STAND_IN = """#!/bin/sh
trap 'echo "$@" > "$0.stopped"; kill $!; exit 143' TERM
sleep 60 & echo > "$0.started"; wait
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("saved", [False, True])
def test_make_hands_sigterm_on_to_the_run(saved: bool, tmp_path: Path):
    """`make quickstart` with a command in the place of k3train that notes the signal."""
    command = tmp_path / "bin" / "k3train"
    command.parent.mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    command.write_text(STAND_IN)
    command.chmod(0o755)
    (tmp_path / ".made-for").write_text(ROOT)
    (tmp_path / ".has-k3train").touch()
    if saved:
        (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    clean = {
        name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
    }  # of a make around this
    command_line = ["make", "quickstart", f"VENV={tmp_path}", f"RUN={tmp_path / 'run'}"]
    process = subprocess.Popen(command_line, cwd=ROOT, stderr=subprocess.DEVNULL, env=clean)
    started, stopped = command.with_suffix(".started"), command.with_suffix(".stopped")
    wait_for(started.exists)
    process.terminate()
    assert process.wait(20) != 0
    wait_for(lambda: stopped.exists() and stopped.read_text())
    assert stopped.read_text().split() == (["resume", str(tmp_path / "run")] if saved else ["train", "experiments/quickstart.py"])
