"""The state's structure, and what accompanies which parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3train.config import OptimizerConfig, ScheduleConfig
from k3train.optim import build_optimizer
from k3train.optim.paths import path_of
from k3train.train import state as train_state

AXES = {"norm": {"scale": ("norm",)}, "groups": {0: {"mixer_norm": {"scale": ("layers", "norm")}, "w": ("layers", "embed", "mlp")}}}
SHAPES = {"norm": {"scale": (4,)}, "groups": {0: {"mixer_norm": {"scale": (2, 4)}, "w": (2, 4, 3)}}}


def test_moments_go_with_their_parameters_and_counters_with_none():
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    optimizer = build_optimizer(OptimizerConfig(), ScheduleConfig(), AXES, balancing="quantile")
    state = train_state.abstract(params, optimizer)
    names = {"norm": {"scale": "last"}, "groups": {0: {"mixer_norm": {"scale": "stack"}, "w": "matrix"}}}
    placed = train_state.shardings(state, names, "everywhere")
    assert placed.params is names and placed.step == "everywhere"
    leaves = jax.tree_util.tree_flatten_with_path(placed.optimizer)[0]
    found = {"/".join(path_of(path)): name for path, name in leaves}
    moments = {path: name for path, name in found.items() if {"mu", "nu", "momentum"} & set(path.split("/"))}
    assert len(moments) == 2 * 2 + 1  # AdamW on the two norms, Muon on the matrix
    for path, name in moments.items():
        assert name == ("matrix" if path.endswith("w") else "stack" if "mixer_norm" in path else "last")
    assert {name for path, name in found.items() if path not in moments} == {"everywhere"}
    assert train_state.count(params) == 4 + 8 + 24
