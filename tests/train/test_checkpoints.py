"""Checkpoints: what is saved comes back, what is due and kept, and what is said of damaged and missing steps."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import jax
import pytest

from k3train.config import CheckpointConfig, ModelConfig
from k3train.errors import UserError
from k3train.train import checkpoints as module
from k3train.train import manifest
from k3train.train.checkpoints import Checkpoints, canonical
from tests.train.saves import SAVES, assert_equal, example_state, listing, record, save, target


@pytest.fixture(scope="module")
def model(tiny_model: ModelConfig) -> ModelConfig:
    """Three layers, of which the last two can be a stack."""
    return dataclasses.replace(tiny_model, num_layers=3, mixer_pattern=("kda", "gated_mla", "gated_mla"), attn_res_block_size=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: ModelConfig) -> Path:
    """Steps 2, 5 and 9 were saved, and two are kept. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(folder, (2, 5, 9), model)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_a_state_comes_back_bit_for_bit(saved: Path, model: ModelConfig):
    with Checkpoints(saved, model) as checkpoints:
        assert checkpoints.steps() == [5, 9]
        assert checkpoints.record() == record(9, model) and checkpoints.record(5) == record(5, model)
        assert_equal(checkpoints.restore(target(model)), example_state(9, model))
        assert_equal(checkpoints.restore(target(model), 5), example_state(5, model))
        assert_equal(checkpoints.restore_params(target(model).params, 5), example_state(5, model).params)
    assert sorted(path.name for path in saved.iterdir()) == ["5", "9"]


def test_the_layout_does_not_depend_on_how_layers_are_stacked(saved: Path, model: ModelConfig):
    """With other blocks the same layers lie in other stacks."""
    other = dataclasses.replace(model, attn_res_block_size=1)
    assert jax.tree.structure(target(other)) != jax.tree.structure(target(model))
    with Checkpoints(saved, other) as checkpoints:
        restored = checkpoints.restore(target(other))
    assert_equal(canonical(restored.params, other), canonical(example_state(9, model).params, model))
    assert_equal(canonical(restored.optimizer, other), canonical(example_state(9, model).optimizer, model))


def test_arrays_may_be_reused_as_soon_as_save_returns(tmp_path: Path, model: ModelConfig):
    state = example_state(3, model)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path / "c", model, SAVES) as checkpoints:
        checkpoints.save(state, record(3))
        jax.block_until_ready(overwrite(state))
        checkpoints.wait()
        assert_equal(checkpoints.restore(target(model)), example_state(3, model))


def test_checksums_do_not_hold_up_the_training(tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    write = manifest.write

    def slowly(folder: Path) -> None:
        time.sleep(2.0)
        write(folder)

    monkeypatch.setattr(manifest, "write", slowly)
    state = example_state(3, model)
    with Checkpoints(tmp_path / "c", model, CheckpointConfig(every_steps=10)) as checkpoints:
        checkpoints.save(state, record(3))
        assert not checkpoints.due(4) and checkpoints.steps() == []  # it does not wait
        checkpoints.wait()
        assert checkpoints.steps() == [3]


@pytest.mark.parametrize("minutes, due", [(None, [4, 8]), (1.0, [1, 3, 4, 6, 8])])
def test_when_a_save_is_due(minutes: float | None, due: list[int], tmp_path: Path, model: ModelConfig):
    """Forty seconds a step, but the first a hundred and the fifth twenty; a save that is due is made."""
    now, found, state = 0.0, [], example_state(1, model)
    config = CheckpointConfig(every_steps=4, every_minutes=minutes)
    with Checkpoints(tmp_path / "c", model, config, clock=lambda: now) as checkpoints:
        for step in range(1, 9):
            now += 100.0 if step == 1 else 20.0 if step == 5 else 40.0
            if checkpoints.due(step):
                found.append(step)
                checkpoints.save(state, record(step))
    assert found == due


def test_multiples_are_kept_for_good(tmp_path: Path, model: ModelConfig):
    state = example_state(1, model)
    with Checkpoints(tmp_path / "c", model, CheckpointConfig(keep=1, keep_every_steps=2)) as checkpoints:
        for step in (1, 2, 3, 5):
            checkpoints.save(state, record(step))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["2", "5"]


def test_nothing_saved(tmp_path: Path, model: ModelConfig):
    with pytest.raises(UserError, match="no checkpoint here"):
        Checkpoints(tmp_path / "absent", model)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    with Checkpoints(tmp_path / "empty", model) as checkpoints, pytest.raises(UserError, match="no checkpoint here"):
        checkpoints.record()


def test_a_step_that_is_not_there(saved: Path, model: ModelConfig):
    with Checkpoints(saved, model) as checkpoints, pytest.raises(UserError, match="step 3 is not saved here. There are 5, 9"):
        checkpoints.restore(target(model), 3)


def test_another_model(saved: Path, model: ModelConfig):
    for other in (dataclasses.replace(model, dense_dim=40), dataclasses.replace(model, num_layers=2)):
        with Checkpoints(saved, other) as checkpoints, pytest.raises(UserError, match="another model"):
            checkpoints.restore(target(other))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage, kind", [(cut, "truncated"), (flip, "changed"), (Path.unlink, "missing")])
def test_damage_to_any_file_is_found_before_it_is_read(damage, kind: str, copied: Path, model: ModelConfig):
    """Each file in turn; the message names it, what is wrong and the newest good step, and nothing is touched."""
    files = [path for path in sorted((copied / "9").rglob("*")) if path.is_file()]
    assert len(files) > 10
    for path in files:
        content, name = path.read_bytes(), path.relative_to(copied / "9").as_posix()
        damage(path)
        before = listing(copied)
        with Checkpoints(copied, model, notify=lambda _: None) as checkpoints:
            if path.name == manifest.FILE and kind == "missing":
                assert checkpoints.record().step == 5
            else:
                with pytest.raises(UserError) as error:
                    checkpoints.check()
                said = "changed" if path.name == manifest.FILE else kind
                assert f"{copied / '9'}: step 9 is damaged:" in str(error.value) and f"\n  {name}: {said}" in str(error.value)
                assert "The newest good step is 5. To use it, give the command again with --step 5." in str(error.value)
        assert listing(copied) == before
        path.write_bytes(content)


@pytest.mark.parametrize(
    "item, read", [("record", "record"), ("params", "restore"), ("optimizer", "restore"), ("params", "restore_params")]
)
def test_orbax_never_reads_a_damaged_item(item: str, read: str, copied: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    flip(max((path for path in (copied / "9" / item).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    with Checkpoints(copied, model) as checkpoints:
        monkeypatch.setattr(checkpoints._reader, "restore", lambda *_, **__: pytest.fail("was read"))
        arguments = {"record": (), "restore": (target(model),), "restore_params": (target(model).params,)}[read]
        with pytest.raises(UserError, match=f"{item}/.*: changed"):
            getattr(checkpoints, read)(*arguments)


def test_damage_to_another_item_does_not_matter(copied: Path, model: ModelConfig):
    shutil.rmtree(copied / "9" / "optimizer")
    with Checkpoints(copied, model) as checkpoints:
        assert_equal(checkpoints.restore_params(target(model).params), example_state(9, model).params)


def test_the_way_out_is_a_good_step_or_none(copied: Path, model: ModelConfig):
    for step in (5, 9):
        cut(copied / str(step) / "params" / "_METADATA")
    (copied / "9" / "params" / "stray").write_text("")
    with Checkpoints(copied, model) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.check()
    assert "No good step is saved here" in str(error.value) and "params/stray: foreign" in str(error.value)


def test_a_step_without_a_manifest_is_passed_over_and_makes_way(copied: Path, model: ModelConfig):
    """As a copy that broke off, or a crash between Orbax's last word and ours, leaves it."""
    (copied / "9" / manifest.FILE).unlink()
    (copied / "11.saving.orbax-checkpoint-tmp").mkdir()
    said: list[str] = []
    with Checkpoints(copied, model, notify=said.append) as checkpoints:
        assert checkpoints.record().step == 5
        assert len(said) == 1 and "Step 9" in said[0] and "passed over" in said[0]
        with pytest.raises(UserError, match="step 9 is not whole: it has no manifest.json. There are 5"):
            checkpoints.record(9)
    assert {path.name for path in copied.iterdir()} == {"5", "9", "11.saving.orbax-checkpoint-tmp"}
    with Checkpoints(copied, model, SAVES, notify=said.append) as checkpoints:
        assert_equal(checkpoints.restore(target(model)), example_state(5, model))
        assert {path.name for path in copied.iterdir()} == {"5", "9.no-manifest", "11.unfinished"}
        checkpoints.save(example_state(9, model), record(9, model))
        checkpoints.wait()
        assert checkpoints.steps() == [5, 9]
    assert len(said) == 4
    assert (copied / "9.no-manifest" / "params").is_dir()


def test_only_steps_without_a_manifest(copied: Path, model: ModelConfig):
    for step in (5, 9):
        (copied / str(step) / manifest.FILE).unlink()
    with Checkpoints(copied, model) as checkpoints, pytest.raises(UserError, match="no whole checkpoint here: step 9 has no manifest"):
        checkpoints.record()


def test_going_on_from_an_earlier_step_leaves_the_later_ones(copied: Path, model: ModelConfig):
    said: list[str] = []
    with Checkpoints(copied, model, SAVES, notify=said.append) as checkpoints:
        checkpoints.restore(target(model), 5)
        assert checkpoints.steps() == [5] and (copied / "9.superseded").is_dir() and "9.superseded" in said[0]
        checkpoints.save(example_state(8, model), record(9, model))
        checkpoints.wait()
        assert_equal(checkpoints.restore(target(model)).params, example_state(8, model).params)
    assert sorted(path.name for path in copied.iterdir()) == ["5", "9", "9.superseded"]


WRONG = [
    {"seconds": "long"},
    {"tokens": True},
    {"tokens": 1.5},
    {"experiment": [1]},
    {"versions": None},
    {"data_fingerprint": 3},
    {"format": 1},
]


def test_records_of_a_wrong_kind(tmp_path: Path, model: ModelConfig):
    state = example_state(1, model)
    with Checkpoints(tmp_path / "c", model, CheckpointConfig(keep=99)) as checkpoints:
        for number, wrong in enumerate(WRONG):
            checkpoints.save(state, dataclasses.replace(record(number), **wrong))
        checkpoints.save(state, record(50))
        checkpoints.wait()
        (tmp_path / "c" / "50").rename(tmp_path / "c" / "60")
        for step in (*range(len(WRONG)), 60):
            with pytest.raises(UserError, match=f"{step}: not a checkpoint of this version of k3train"):
                checkpoints.record(step)


def test_sound_files_that_cannot_be_read(copied: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **__):
        raise RuntimeError("out of\nluck")

    with Checkpoints(copied, model) as checkpoints:
        record_of = checkpoints.record()
        monkeypatch.setattr(checkpoints, "record", lambda _: record_of)
        monkeypatch.setattr(checkpoints._reader, "restore", fail)
        with pytest.raises(UserError, match=r"params cannot be read \(RuntimeError: out of luck\).*\n.*newest good step is 5"):
            checkpoints.restore(target(model))


def test_the_format_is_new():
    assert module.FORMAT == 2
