"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """The run was asked to stop, and its state is saved. Exit code 128 + signal: 130 for Ctrl-C, 143 for SIGTERM, as shells have it."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `signal`, and the second ends the process at once.

    Python runs its signal handlers between two bytecodes of the main thread, which may sit in the compiler for a minute. The
    wake-up pipe is written at once instead, and a thread of ours reads it. Outside the main thread, where Python does not let
    handlers be set, the context does nothing.
    """

    def __init__(self, on_request: Callable[[int], None] = lambda number: None):
        """`on_request` is called with the first signal's number, from another thread."""
        self.signal: int | None = None
        self._on_request = on_request
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        watcher = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watcher.start()
        self._undo = [
            *(lambda number=number, handler=handler: signal.signal(number, handler) for number, handler in handlers.items()),
            lambda: signal.set_wakeup_fd(previous),
            lambda: os.close(writing),  # the watcher reads the end of the pipe and returns
            watcher.join,
            lambda: os.close(reading),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for undo in self._undo:
            undo()

    def _watch(self, reading: int) -> None:
        while received := os.read(reading, 1):
            if received[0] not in STOP_SIGNALS:
                continue
            if self.signal is not None:
                os._exit(128 + received[0])
            self.signal = received[0]
            self._on_request(received[0])
