"""Where the wall time of a run goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Split:
    """Seconds spent in named parts since the last `take`; what no part claims is `other`."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time in this context; parts do not nest."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - begin

    def take(self) -> dict[str, float]:
        """The parts in seconds, `other` last; starts anew."""
        now = time.monotonic()
        parts, self._parts = self._parts, {}
        parts["other"] = max(now - self._start - sum(parts.values()), 0.0)
        self._start = now
        return parts


class Rate:
    """Speed over about the last twenty steps."""

    def __init__(self) -> None:
        self._mark = time.monotonic()
        self._seconds = self._tokens = self._steps = 0.0

    def restart(self) -> None:
        """Leaves out the time since the last step: something else was done."""
        self._mark = time.monotonic()

    def add(self, tokens: float) -> None:
        """Counts one finished step."""
        now, keep = time.monotonic(), 0.95
        self._seconds = keep * self._seconds + now - self._mark
        self._tokens, self._steps, self._mark = keep * self._tokens + tokens, keep * self._steps + 1.0, now

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def seconds_per_step(self) -> float:
        """0 before the first step."""
        return self._seconds / self._steps if self._steps else 0.0
