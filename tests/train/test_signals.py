"""Stop requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

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
