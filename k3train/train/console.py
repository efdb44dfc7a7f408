"""The console of a run, which outlives its reader."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console


class LastingConsole(Console):
    """Falls silent when its reader goes away, as in `k3train train ... | head`: metrics and checkpoints are files, so the run goes on."""

    def on_broken_pipe(self) -> None:
        """Called by Rich in place of the exception; what is printed later goes nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        with contextlib.suppress(OSError):  # the errors' reader may be gone too
            print("k3train: nobody reads the output any more; the run goes on, and its folder has all of it", file=sys.stderr)
