"""Which changes a resumed run takes, and what is written down of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from k3train import config_io
from k3train.config import Experiment, ModelConfig, ScheduleConfig
from k3train.errors import UserError
from k3train.train.checkpoints import Record
from k3train.train.resume import (
    CHANGES_FILE,
    CONFIG_FILE,
    adopt,
    check_resumable,
    describe,
    differences,
    find_changes,
    with_absolute_sources,
)

EXPERIMENT = Experiment(name="run", model=ModelConfig())
CONSTANT = dataclasses.replace(EXPERIMENT, schedule=ScheduleConfig(steps=10, kind="constant", warmup_fraction=0.1))


def saved(experiment: Experiment = EXPERIMENT, step: int = 3) -> Record:
    # As JSON gives it back.
    plain = json.loads(json.dumps(config_io.to_dict(experiment)))
    return Record(step=step, seconds=0.0, tokens=0, data_fingerprint="abc", experiment=plain, versions={})


def changed(settings: dict[str, Any], experiment: Experiment = EXPERIMENT) -> Experiment:
    plain = config_io.to_dict(experiment)
    for setting, value in settings.items():
        *folders, name = setting.split(".")
        node = plain
        for folder in folders:
            node = node[folder]
        assert name in node
        node[name] = value
    return config_io.from_dict(Experiment, plain)


NEEDS = [
    ("name", "moved", None),
    ("runs_folder", "elsewhere", None),
    ("kernels", "xla", None),
    ("mesh.replica", 2, None),
    ("mesh.fsdp", 4, None),
    ("checkpoint.every_steps", 9, None),
    ("checkpoint.every_minutes", 5.0, None),
    ("checkpoint.keep_every_steps", 100, None),
    ("logging.every_steps", 1, None),
    ("evaluation.batches", 3, None),
    ("optimizer.max_skipped_steps", 99, None),
    ("data.sources", ["/moved/text"], None),
    ("optimizer.peak_lr", 0.5, "learning-rate"),
    ("optimizer.muon.peak_lr", 0.5, "learning-rate"),
    ("optimizer.adamw.kind", "wsd", "learning-rate"),
    ("schedule.kind", "wsd", "learning-rate"),
    ("schedule.steps", 2000, "learning-rate"),
    ("schedule.final_fraction", 0.0, "learning-rate"),
    ("data.batch_size", 16, "data"),
    ("data.sequence_length", 64, "data"),
    ("data.seed", 1, "data"),
    ("model.num_layers", 4, "another run"),
    ("model.remat", "none", "another run"),
    ("optimizer.matrices", "adamw", "another run"),
    ("optimizer.muon.momentum", 0.5, "another run"),
    ("optimizer.clip_norm", 2.0, "another run"),
    ("optimizer.microbatches", 2, "another run"),
    ("seed", 1, "another run"),
    ("deterministic", True, "another run"),
]


@pytest.mark.parametrize("setting, value, needs", NEEDS)
def test_what_a_change_needs(setting: str, value: Any, needs: str | None, tmp_path: Path):
    experiment = changed({setting: value})
    assert [(change.setting, change.needs) for change in find_changes(saved(), experiment, "abc")] == [(setting, needs)]
    for allow in ((), ("learning-rate",), ("data",), ("learning-rate", "data")):
        if needs is None or needs in allow:
            assert len(check_resumable(saved(), experiment, "abc", tmp_path, allow)) == 1
        else:
            with pytest.raises(UserError, match=setting):
                check_resumable(saved(), experiment, "abc", tmp_path, allow)


def test_nothing_changed(tmp_path: Path):
    assert check_resumable(saved(), EXPERIMENT, "abc", tmp_path) == []


@pytest.mark.parametrize(
    "settings, step, needs",
    [
        ({}, 3, None),
        ({}, 1, "learning-rate"),  # twenty steps make the warm-up two long, and it is not over
        ({"optimizer.muon.kind": "cosine"}, 3, "learning-rate"),
        ({"optimizer.muon.kind": "constant", "optimizer.adamw.kind": "constant", "schedule.kind": "cosine"}, 3, None),
        ({"schedule.warmup_fraction": 0.5}, 7, "learning-rate"),
    ],
)
def test_the_number_of_steps_is_free_where_the_rate_is_constant(settings: dict, step: int, needs: str | None):
    before = changed(settings, CONSTANT)
    after = changed({"schedule.steps": 20}, before)
    assert [change.needs for change in find_changes(saved(before, step), after, "abc")] == [needs]


def test_a_schedule_that_is_over_already(tmp_path: Path):
    with pytest.raises(UserError, match="schedule.steps = 5, but 7 steps are made"):
        check_resumable(saved(CONSTANT, 7), changed({"schedule.steps": 5}, CONSTANT), "abc", tmp_path)


def test_the_refusal_is_a_table_of_both_configurations(tmp_path: Path):
    experiment = changed({"model.num_layers": 4, "optimizer.peak_lr": 0.5, "logging.every_steps": 1})
    with pytest.raises(UserError) as error:
        check_resumable(saved(), experiment, "xyz", tmp_path / "run")
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'run'} cannot go on from step 3 with these changes:",
        "  setting            at step 3  now",
        '  model.num_layers   93         4      would be another run',
        '  optimizer.peak_lr  0.001      0.5    needs --allow-changed learning-rate',
        '  the text           "abc"      "xyz"  needs --allow-changed data',
        "Set these back, or start a run with another --name. Nothing was changed.",
    ]  # fmt: skip


def test_the_refusal_names_the_permissions_that_help(tmp_path: Path):
    with pytest.raises(UserError, match="give the command again with --allow-changed data --allow-changed learning-rate"):
        check_resumable(saved(), changed({"optimizer.peak_lr": 0.5, "data.seed": 3}), "abc", tmp_path)


def test_moved_text_with_other_contents_needs_permission(tmp_path: Path):
    changes = check_resumable(saved(), changed({"data.sources": ["/moved"]}), "xyz", tmp_path, ("data",))
    assert [(change.setting, change.needs) for change in changes] == [("data.sources", "data"), ("the text", "data")]
    assert describe(changes) == "data.sources [] -> ['/moved'], the text 'abc' -> 'xyz'"


def test_what_was_allowed_is_not_asked_again_at_the_same_step(tmp_path: Path):
    """The run may be cut off before it saves anything with the new settings; whoever starts it again gives no flags."""
    experiment = changed({"optimizer.peak_lr": 0.5, "logging.every_steps": 1})
    config_io.save(EXPERIMENT, tmp_path / CONFIG_FILE)
    adopt(check_resumable(saved(), experiment, "xyz", tmp_path, ("learning-rate", "data")), experiment, tmp_path, 3)
    assert config_io.load(tmp_path / CONFIG_FILE) == experiment
    with (tmp_path / CHANGES_FILE).open("a") as file:
        file.write('{"step": 3, "cha')  # a crash
    assert len(check_resumable(saved(), experiment, "xyz", tmp_path)) == 3
    with pytest.raises(UserError, match="peak_lr"):
        check_resumable(saved(), changed({"optimizer.peak_lr": 0.25}), "abc", tmp_path)
    with pytest.raises(UserError, match="peak_lr"):
        check_resumable(saved(step=2), experiment, "xyz", tmp_path)


def test_adopting_nothing_writes_nothing(tmp_path: Path):
    config_io.save(EXPERIMENT, tmp_path / CONFIG_FILE)
    before = (tmp_path / CONFIG_FILE).stat().st_mtime_ns
    adopt([], EXPERIMENT, tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE] and (tmp_path / CONFIG_FILE).stat().st_mtime_ns == before


def test_relative_text_gets_its_full_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sources = with_absolute_sources(changed({"data.sources": ["text", "/other"]})).data.sources
    assert sources == (str(tmp_path / "text"), "/other")
    assert with_absolute_sources(EXPERIMENT) == EXPERIMENT


def test_differences_see_fields_on_either_side():
    assert list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": 3})) == [("a.c", 2, "not set"), ("d", "not set", 3)]
