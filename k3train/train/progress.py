"""What a person sees while a run goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_SECONDS = 10.0
"""Between two lines where there is no terminal."""


class ProgressDisplay:
    """Shows steps, loss, tokens per second and time left. Use as a context."""

    def __init__(self, console: Console, step: int, steps: int):
        self._console, self._step, self._steps = console, step, steps
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]} · {task.fields[rate]} tokens/s · {task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=step, loss="-", rate="-", left="-")

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float, seconds_per_step: float) -> None:
        """Shows the figures after `step` updates; a rate of 0 stands for not known yet."""
        left = duration((self._steps - step) * seconds_per_step) if seconds_per_step else "-"
        rate = f"{tokens_per_second:,.0f}" if tokens_per_second else "-"
        fields: dict[str, Any] = {"loss": f"{loss:.3f}", "rate": rate, "left": left}
        self._bar.update(self._task, completed=step, **fields)
        now = time.monotonic()
        if not self._console.is_terminal and (now >= self._next_line or step == self._steps):
            self._next_line = now + LINE_SECONDS
            self.note(f"step {step}/{self._steps}: loss {fields['loss']}, {rate} tokens/s, {left} left")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
