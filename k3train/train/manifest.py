"""A size and a checksum for every file of a saved step: written last, checked before anything of the step is used.

Orbax gives a flipped bit, or half of a file, back as arrays without a word. `manifest.json` lies in the step's folder and lists
every other file there, by its path from the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

FILE = "manifest.json"
FORMAT = 1
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That read files side by side; half of the processors are left to the training. A core does about 1 GB/s."""

T = TypeVar("T")
Kind = Literal["missing", "truncated", "changed", "foreign", "unreadable"]


@dataclass(frozen=True)
class Entry:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Fault:
    """A file that is not as it was saved; `str` says so in a few words."""

    path: str
    """From the step's folder."""
    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


def exists(folder: Path) -> bool:
    """Whether the folder has a manifest, sound or not: the save came to its end."""
    return (folder / FILE).is_file()


def write(folder: Path) -> None:
    """Writes the manifest of a folder that nobody writes to any more. Everything in it is on the disk when this returns."""

    def entry(path: str) -> Entry:
        with (folder / path).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            return Entry(os.fstat(file.fileno()).st_size, checksum)

    paths = sorted(set(_files(folder)) - {FILE})
    files = {path: asdict(found) for path, found in zip(paths, _side_by_side(entry, paths), strict=True)}
    with (folder / FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "files": files, "sha256": _checksum(files)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def faults(folder: Path, *, leave_out: Collection[str] = ()) -> list[Fault]:
    """Every fault of a folder, by path; none if it is as it was saved.

    Args:
      folder: of the step.
      leave_out: subfolders that are not looked at.
    """

    def wanted(path: str) -> bool:
        return path.partition("/")[0] not in leave_out

    try:
        entries = {path: entry for path, entry in _read(folder).items() if wanted(path)}
    except FileNotFoundError:
        return [Fault(FILE, "missing")]
    except OSError as error:
        return [Fault(FILE, "unreadable", error.strerror or "")]
    except (ValueError, TypeError, KeyError, AttributeError):  # not JSON, or not of this form, or not its own checksum
        return [Fault(FILE, "changed")]

    def fault(path: str) -> Fault | None:
        entry, where = entries[path], folder / path
        try:
            size = where.stat().st_size
            if size != entry.size:
                return Fault(path, "truncated" if size < entry.size else "changed", f"{size:,} bytes of {entry.size:,}")
            with where.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
            return None if same else Fault(path, "changed", f"{size:,} bytes, as saved, but not the same")
        except FileNotFoundError:
            return Fault(path, "missing")
        except OSError as error:
            return Fault(path, "unreadable", error.strerror or "")

    foreign = [Fault(path, "foreign", "not saved with this step") for path in _files(folder) if wanted(path) and path not in entries]
    known = [found for found in _side_by_side(fault, sorted(entries)) if found]
    return sorted(known + [found for found in foreign if found.path != FILE], key=lambda found: found.path)


def _read(folder: Path) -> dict[str, Entry]:
    data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if data["format"] != FORMAT or data["sha256"] != _checksum(data["files"]):
        raise ValueError("damaged")
    return {path: Entry(**entry) for path, entry in data["files"].items()}


def _checksum(files: dict[str, dict[str, object]]) -> str:
    """Of the list itself, so that damage to it is not taken for damage to the files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _side_by_side(work: Callable[[str], T], paths: list[str]) -> list[T]:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checksums") as threads:
        return list(threads.map(work, paths))
