"""The parts of the wall time."""

from __future__ import annotations

import time

import pytest

from k3train.train.timing import Split


def test_parts_add_up_and_start_anew():
    split = Split()
    for _ in range(2):
        with split.part("data"):
            time.sleep(0.02)
    time.sleep(0.03)
    parts = split.take()
    assert list(parts) == ["data", "other"]
    assert parts["data"] >= 0.04 and parts["other"] >= 0.03
    assert list(split.take()) == ["other"]


def test_time_counts_when_a_part_fails():
    split = Split()
    with pytest.raises(KeyError), split.part("save"):
        time.sleep(0.01)
        raise KeyError
    assert split.take()["save"] >= 0.01
