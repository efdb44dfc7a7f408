"""Documents from text files: any folders and files, or the Python standard library."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k3train.errors import UserError

logger = logging.getLogger(__name__)

STANDARD_LIBRARY_LEFT_OUT = (
    *("test", "tests", "idle_test"),
    *("site-packages", "dist-packages", "__pycache__"),
    *("config-*", "_sysconfigdata_*", "sitecustomize.py"),
    "pydoc_data",
)
"""Files and folders of the standard library that are not read: tests, installed packages, files that differ between two builds of one
release, and one generated 0.8 MB text (a fifteenth of all bytes in a single file)."""


class Document(NamedTuple):
    """One file."""

    name: str
    """Path below the folder that holds all sources, with forward slashes."""
    text: bytes


class Skipped(NamedTuple):
    """A file or folder that was found and not read."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in the order of their names."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    """Files that are unreadable or binary."""
    repeated: int
    """Files left out because an earlier one has the same contents: a copy must not sit on both sides of the held-out split."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names and contents, hexadecimal: equal if and only if two corpora are equal."""
        total = hashlib.sha256()
        for name, text in self.documents:
            total.update(hashlib.sha256(_raw(name)).digest() + hashlib.sha256(text).digest())
        return total.hexdigest()


def read_corpus(sources: Sequence[str | Path], suffixes: Sequence[str]) -> Corpus:
    """Reads files and folders; no sources stand for the Python standard library (its `.py` files, without tests).

    Folders are searched recursively, links followed (a loop is harmless), for files with one of the endings `suffixes` in either case;
    hidden files and folders are passed over. Files named in `sources` are read whatever their ending. Empty files are no documents.
    Binary files (with a zero byte) and files that cannot be read are reported by a warning and listed in `Corpus.skipped`.
    Raises `UserError` if a source does not exist or nothing is found.
    """
    if not sources:
        return _read([Path(sysconfig.get_path("stdlib"))], (".py",), STANDARD_LIBRARY_LEFT_OUT)
    return _read([Path(source).expanduser() for source in sources], tuple(suffixes), ())


def _read(sources: list[Path], suffixes: tuple[str, ...], left_out: tuple[str, ...]) -> Corpus:
    skipped: list[Skipped] = []
    paths: list[Path] = []
    for source in sources:
        if source.is_dir():
            paths += _walk(source, suffixes, left_out, skipped)
        elif source.exists():
            paths.append(source)
        else:
            raise UserError(f"data.sources: {source} does not exist (looked in {Path.cwd()}). Name an existing file or folder.")
    root = os.path.commonpath([os.path.abspath(source if source.is_dir() else source.parent) for source in sources])
    found = {Path(os.path.relpath(path, root)).as_posix(): path for path in paths}
    documents: list[Document] = []
    files: set[str] = set()
    contents: set[bytes] = set()
    repeated = 0
    for name in sorted(found, key=_raw):
        path = found[name]
        real = os.path.realpath(path)
        if real in files:  # the same file, reached by a link or through two sources
            continue
        files.add(real)
        text = _text(path)
        if isinstance(text, str):
            skipped.append(Skipped(name, text))
        elif text:
            digest = hashlib.sha256(text).digest()
            repeated += digest in contents
            if digest not in contents:
                contents.add(digest)
                documents.append(Document(name, text))
    if skipped:
        logger.warning("Left out %d of %d files: %s", len(skipped), len(found), _examples(skipped))
    if not documents:
        raise _nothing_found(sources, suffixes, len(found), skipped)
    return Corpus(documents=tuple(documents), skipped=tuple(skipped), repeated=repeated)


def _walk(folder: Path, suffixes: tuple[str, ...], left_out: tuple[str, ...], skipped: list[Skipped]) -> Iterator[Path]:
    """Files below a folder with one of the endings, each real folder visited once, in the order of names."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    visited = {os.path.realpath(folder)}

    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out)

    def refused(error: OSError) -> None:
        skipped.append(Skipped(str(error.filename), f"unreadable folder: {error.strerror}"))

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refused):
        here = Path(parent)
        inside = []
        for name in sorted(folders, key=_raw):
            real = os.path.realpath(here / name)
            if real not in visited and wanted(name):
                visited.add(real)
                inside.append(name)
        folders[:] = inside  # os.walk goes on with these
        yield from (here / name for name in names if name.lower().endswith(endings) and wanted(name))


def _text(path: Path) -> bytes | str:
    """The contents of a file, or the reason why there are none to read."""
    if not path.is_file():  # a broken link, or a pipe that would block
        return "not a regular file"
    try:
        text = path.read_bytes()
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return "binary: holds a zero byte" if b"\0" in text else text


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _examples(skipped: Sequence[Skipped]) -> str:
    shown = "; ".join(f"{name} ({reason})" for name, reason in skipped[:5])
    return shown if len(skipped) <= 5 else f"{shown}; and {len(skipped) - 5} more"


def _nothing_found(sources: list[Path], suffixes: tuple[str, ...], found: int, skipped: Sequence[Skipped]) -> UserError:
    places = ", ".join(str(source) for source in sources)
    endings = ", ".join(suffixes) or "(data.suffixes is empty)"
    reason = f"{found} files were found, none with text" if found else f"no file there ends in {endings}"
    left_out = f" Left out: {_examples(skipped)}." if skipped else ""
    return UserError(
        f"No text in data.sources = {places}: {reason}.{left_out}\n"
        "Name a folder or files with text in data.sources, or add the ending of your files to data.suffixes."
    )
