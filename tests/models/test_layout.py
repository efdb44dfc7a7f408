"""Which kernels a Layout asks for; what they compute is tested where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import pallas_kernels.kda
from k3train.config import Kernels
from k3train.models import layout as layouts
from k3train.models.layout import Layout, LocalLayout
from k3train.sharding.layout import ShardedLayout
from k3train.sharding.mesh import AXES

IDS_BT = jax.ShapeDtypeStruct((2, 4), jnp.int32)
HEADS_BTHK = jax.ShapeDtypeStruct((2, 4, 3, 8), jnp.float32)
BETA_BTH, SCALE_H, BIAS_HK = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4, 3), (3,), (3, 8)))
WEIGHTS_ELF, WEIGHTS_EFL = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 8, 6), (5, 6, 8)))


def asked_for(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The implementations of KDA and of the experts' matmuls with which a layout's operations call the kernels."""
    asked, kda, experts = [], pallas_kernels.kda.kda, layouts.routed_experts

    def recorded(function):
        def call(*arrays, implementation, **keywords):
            asked.append(implementation)
            return function(*arrays, implementation=implementation, **keywords)

        return call

    monkeypatch.setattr(pallas_kernels.kda, "kda", recorded(kda))
    monkeypatch.setattr(layouts, "routed_experts", recorded(experts))

    def run(x, beta, scale, bias, ids, w_gate, w_down):
        o = layout.kda(x, x, x, x, beta, scale, bias, lower_bound=-5.0, segment_ids_BT=ids)
        choices = jnp.zeros((2, 4, 2), jnp.int32)
        return layout.experts(o[:, :, 0], choices, choices.astype(jnp.float32), w_gate, w_gate, w_down, activation=jnp.multiply)

    jax.eval_shape(run, HEADS_BTHK, BETA_BTH, SCALE_H, BIAS_HK, IDS_BT, WEIGHTS_ELF, WEIGHTS_EFL)
    return asked


@pytest.mark.parametrize(("kernels", "expected"), [("auto", [None, None]), ("xla", ["chunked", "xla"])])
def test_xla_forms_can_be_had_everywhere(kernels: Kernels, expected: list[str | None], monkeypatch: pytest.MonkeyPatch):
    assert asked_for(LocalLayout(kernels), monkeypatch) == expected
    mesh = AbstractMesh((1, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert asked_for(ShardedLayout(mesh, kernels), monkeypatch) == expected  # type: ignore[arg-type]
