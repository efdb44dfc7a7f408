"""Which changes a resumed run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train import config_io
from k3train.config import CheckpointConfig, Experiment, LoggingConfig, MeshConfig, ModelConfig, OptimizerConfig
from k3train.errors import UserError
from k3train.train.checkpoints import Record
from k3train.train.resume import check_resumable, differences

EXPERIMENT = Experiment(name="run", model=ModelConfig())
RECORD = Record(step=3, seconds=0.0, tokens=0, data_fingerprint="abc", experiment=config_io.to_dict(EXPERIMENT), versions={})


def changed(**parts) -> Experiment:
    return Experiment(**{"name": "run", "model": ModelConfig()} | parts)


SAFE = [
    {},
    {"name": "moved"},
    {"mesh": MeshConfig(replica=2)},
    {"checkpoint": CheckpointConfig(keep=9)},
    {"logging": LoggingConfig(every_steps=1)},
]


@pytest.mark.parametrize("parts", SAFE)
def test_what_changes_no_number_may_change(parts: dict):
    check_resumable(RECORD, changed(**parts), "abc", Path("runs/run"))


def test_every_other_change_is_named():
    experiment = changed(model=ModelConfig(num_layers=4), optimizer=OptimizerConfig(peak_lr=0.5), seed=1)
    with pytest.raises(UserError) as error:
        check_resumable(RECORD, experiment, "abc", Path("runs/run"))
    text = str(error.value)
    assert "runs/run" in text
    for line in ("model.num_layers: 93 when it was saved, 4 now", "optimizer.peak_lr: 0.001 when it was saved, 0.5 now", "seed: 0 when"):
        assert line in text
    assert len(text.splitlines()) == 5


def test_changed_text_is_refused():
    with pytest.raises(UserError, match="the text has changed since step 3"):
        check_resumable(RECORD, EXPERIMENT, "xyz", Path("runs/run"))


def test_differences_see_fields_on_either_side():
    assert list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": 3})) == [("a.c", 2, "not set"), ("d", "not set", 3)]
