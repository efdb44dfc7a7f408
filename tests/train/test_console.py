"""The console of a run whose reader goes away."""

from __future__ import annotations

import os

from k3train.train.console import LastingConsole


def test_a_console_without_a_reader_falls_silent(capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as file:
        console = LastingConsole(file=file)
        console.print("one")
        console.print("two")
    assert capsys.readouterr().err.count("nobody reads the output any more") == 1
