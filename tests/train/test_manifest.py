"""Manifests: every kind of damage to a step's folder is seen and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train.train import manifest
from k3train.train.manifest import Fault

FILES = {"record/metadata": b'{"step": 3}', "params/d/abc": bytes(range(256)) * 40, "params/empty": b"", "top.txt": b"committed"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    manifest.write(tmp_path)
    return tmp_path


def kinds(folder: Path, **options) -> list[tuple[str, str]]:
    return [(fault.path, fault.kind) for fault in manifest.faults(folder, **options)]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_sound_folder_has_no_fault(folder: Path):
    assert manifest.exists(folder) and manifest.faults(folder) == []
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert {name: entry["size"] for name, entry in listed.items()} == {name: len(content) for name, content in FILES.items()}


@pytest.mark.parametrize("bit", [0, 12345, 81919])
def test_one_flipped_bit(folder: Path, bit: int):
    flip(folder / "params/d/abc", bit)
    assert kinds(folder) == [("params/d/abc", "changed")]


DAMAGES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda f: (f / "params/d/abc").write_bytes(b"x" * 100), "params/d/abc", "truncated"),
    (lambda f: (f / "top.txt").write_bytes(b""), "top.txt", "truncated"),
    (lambda f: (f / "params/empty").write_bytes(b"more"), "params/empty", "changed"),
    (lambda f: (f / "record/metadata").unlink(), "record/metadata", "missing"),
    (lambda f: (f / "params/d/other").write_bytes(b""), "params/d/other", "foreign"),
    (lambda f: (f / "manifest.json").unlink(), "manifest.json", "missing"),
    (lambda f: (f / "manifest.json").write_bytes(b""), "manifest.json", "changed"),
    (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json", "changed"),
    (lambda f: (f / "manifest.json").write_text('{"format": 1, "files": {}, "sha256": ""}'), "manifest.json", "changed"),
    (lambda f: flip(f / "manifest.json", 8 * (f / "manifest.json").read_text().index('"sha256"') + 80), "manifest.json", "changed"),
]


@pytest.mark.parametrize("damage, path, kind", DAMAGES)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], path: str, kind: str):
    damage(folder)
    assert kinds(folder) == [(path, kind)]


def test_every_fault_is_found_and_said_in_words(folder: Path):
    (folder / "top.txt").write_bytes(b"comm")
    (folder / "params/d/abc").unlink()
    assert [str(fault) for fault in manifest.faults(folder)] == ["params/d/abc: missing", "top.txt: truncated (4 bytes of 9)"]


def test_parts_can_be_left_out(folder: Path):
    (folder / "params/d/abc").unlink()
    (folder / "params/new").write_bytes(b"")
    assert kinds(folder, leave_out={"params"}) == []
    assert kinds(folder, leave_out={"record"}) == [("params/d/abc", "missing"), ("params/new", "foreign")]


def test_a_file_that_cannot_be_read_is_a_fault(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Root reads whatever the modes say, so the error is made."""
    opened = Path.open

    def fail(self: Path, *args, **options):
        if self.name == "abc":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", fail)
    assert manifest.faults(folder) == [Fault("params/d/abc", "unreadable", "Permission denied")]
