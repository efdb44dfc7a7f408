"""The learning rate's course."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from k3train.config import ScheduleConfig
from k3train.optim import learning_rate

TENTH = ScheduleConfig(steps=100, warmup_fraction=0.1, decay_fraction=0.2, final_fraction=0.2)


@pytest.mark.parametrize(
    ("kind", "course"),
    [
        ("cosine", {0: 0.05, 4: 0.25, 9: 0.5, 54: 0.5 * (0.2 + 0.8 * 0.5), 99: 0.1, 1000: 0.1}),
        ("wsd", {0: 0.05, 4: 0.25, 9: 0.5, 54: 0.5, 79: 0.5, 89: 0.5 * (0.2 + 0.8 * 0.5), 99: 0.1, 1000: 0.1}),
        ("constant", {0: 0.05, 4: 0.25, 9: 0.5, 54: 0.5, 99: 0.5, 1000: 0.5}),
    ],
)
def test_course(kind, course: dict[int, float]):
    """Keys are updates already made; the last of 100 has the final rate."""
    rate = learning_rate(0.5, kind, TENTH)
    assert {count: float(rate(count)) for count in course} == pytest.approx(course)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1, 0.0, 0.2), (1, 1.0, 1.0), (7, 0.0, 1.0), (7, 1.0, 0.5), (3, 0.01, 0.01)])
def test_edges_stay_finite_and_below_the_peak(kind, steps: int, warmup: float, decay: float):
    config = ScheduleConfig(steps=steps, warmup_fraction=warmup, decay_fraction=decay, final_fraction=0.0)
    values = np.asarray(jax.vmap(learning_rate(1.0, kind, config))(np.arange(steps + 2)))
    assert all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in values)
    assert values[-1] == (1.0 if kind == "constant" else 0.0)
    rises = round(warmup * steps)
    assert np.all(np.diff(values[:rises]) > 0) and np.all(np.diff(values[rises:]) <= 0)
