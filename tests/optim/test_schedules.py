"""The learning rate's course."""

from __future__ import annotations

import math

import pytest

from k3train.config import ScheduleConfig
from k3train.optim import warmup_cosine


def test_warm_up_peak_and_end():
    rate = warmup_cosine(0.5, ScheduleConfig(steps=100, warmup_fraction=0.1, final_fraction=0.2))
    assert float(rate(0)) == pytest.approx(0.05)
    assert float(rate(4)) == pytest.approx(0.25)
    assert float(rate(9)) == pytest.approx(0.5)
    assert float(rate(54)) == pytest.approx(0.5 * (0.2 + 0.8 * 0.5))
    assert float(rate(99)) == pytest.approx(0.1)
    assert float(rate(1000)) == pytest.approx(0.1)


@pytest.mark.parametrize("steps, warmup", [(1, 0.0), (1, 1.0), (7, 0.0), (7, 1.0), (3, 0.01)])
def test_edges_stay_finite_and_below_the_peak(steps: int, warmup: float):
    rate = warmup_cosine(1.0, ScheduleConfig(steps=steps, warmup_fraction=warmup, final_fraction=0.0))
    values = [float(rate(count)) for count in range(steps + 2)]
    assert all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in values)
    assert values[-1] == 0.0
