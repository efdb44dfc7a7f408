"""Errors of Orbax and TensorStore: what they come down to, and how to have them once instead of with a traceback per thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator

CAUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Of failed saves: their messages hold the file system's word for it somewhere."""


def cause(error: BaseException) -> str:
    """The file system's word if there is one in the error, else the error's type and text, shortened."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    known = (os.strerror(number) for number in CAUSES)
    return next((words for words in known if words.lower() in text.lower()), f"{type(error).__name__}: {text[:300] or 'no details'}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps errors off the terminal that are raised as well.

    Orbax logs each with its traceback. When one of many writes fails, Orbax closes its event loop, and TensorStore prints a traceback for
    every other write that ends afterwards; that goes on for a moment after the error is raised, so then it stays quiet.
    """

    def passes(entry: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in entry.pathname or entry.levelno < logging.ERROR

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    absl, before = logging.getLogger("absl"), sys.unraisablehook
    absl.addFilter(passes)
    sys.unraisablehook = report
    try:
        yield
        sys.unraisablehook = before
    finally:
        absl.removeFilter(passes)
