"""Folders of steps: what counts as whole, what makes way, what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config import CheckpointConfig
from k3train.train import manifest, step_folders


def make(folder: Path, *names: str, whole: bool = True) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "data").write_text(name)
        if whole:
            manifest.write(folder / name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_a_folder_with_a_manifest_is_whole(tmp_path: Path):
    make(tmp_path, "10", "9", "9.superseded", "11.saving")
    make(tmp_path, "12", whole=False)
    (tmp_path / "7").write_text("a file")
    assert step_folders.whole(tmp_path) == [9, 10]
    assert step_folders.without_manifest(tmp_path) == [12]
    assert step_folders.whole(tmp_path / "absent") == []


@pytest.mark.parametrize(
    "keep, every, gone", [(2, None, [1, 2, 3, 4]), (2, 2, [1, 3]), (1, 5, [1, 2, 3, 4]), (6, None, []), (9, None, []), (1, 1, [])]
)
def test_which_steps_are_surplus(keep: int, every: int | None, gone: list[int]):
    assert step_folders.surplus([6, 5, 4, 3, 2, 1], CheckpointConfig(keep=keep, keep_every_steps=every)) == gone


def test_the_way_is_cleared_by_renaming(tmp_path: Path):
    make(tmp_path, "4", "6", "8")
    make(tmp_path, "2", "7", "9.saving", "10.saving.orbax-checkpoint-tmp", "10.unfinished", whole=False)
    said = list(step_folders.make_way(tmp_path, 6))
    assert names(tmp_path) == [
        "10.unfinished", "10.unfinished-2", "2.no-manifest", "4", "6", "7.no-manifest", "8.superseded", "9.unfinished",
    ]  # fmt: skip
    assert len(said) == 5 and sum("cut off" in sentence for sentence in said) == 2
    assert (tmp_path / "8.superseded" / "data").read_text() == "8"
    assert list(step_folders.make_way(tmp_path, 6)) == []


def test_commit_overwrites_nothing(tmp_path: Path):
    make(tmp_path, "5", "5.saving")
    step_folders.commit(tmp_path / "5.saving", 5)
    assert (tmp_path / "5" / "data").read_text() == "5.saving"
    assert (tmp_path / "5.superseded" / "data").read_text() == "5"


def test_pruning_leaves_what_it_should(tmp_path: Path):
    make(tmp_path, "1", "2", "3", "4", "3.superseded")
    make(tmp_path, "2.no-manifest", "4.unfinished", "5.unfinished", "1.deleting", whole=False)
    step_folders.prune(tmp_path, CheckpointConfig(keep=2))
    assert names(tmp_path) == ["2.no-manifest", "3", "3.superseded", "4", "5.unfinished"]
