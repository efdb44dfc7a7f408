"""Degrees to meshes, logical axes to splits. The numbers on eight devices are in tests/train/test_mesh.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest
from jax.sharding import Mesh, PartitionSpec

from k3train.config import MeshConfig, ModelConfig
from k3train.errors import UserError
from k3train.models import parameters
from k3train.models.layout import LocalLayout
from k3train.sharding.layout import sharded_layout
from k3train.sharding.mesh import AXES, make_mesh
from k3train.sharding.rules import activation_spec, parameter_spec

EIGHT = [object()] * 8


def split_by(degree: int) -> Mesh:
    """All that the rules read of a mesh."""
    return cast(Mesh, SimpleNamespace(shape={"replica": 1, "fsdp": degree}))


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (MeshConfig(replica=2, fsdp=2), "set mesh.fsdp = 4"),
        (MeshConfig(replica=3), "set mesh.replica to a divisor of 8"),
        (MeshConfig(replica=16), "set mesh.replica to a divisor of 8"),
        (MeshConfig(fsdp=3), "set mesh.fsdp = 8"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_advice(config: MeshConfig, advice: str):
    with pytest.raises(UserError, match="number of devices is 8") as error:
        make_mesh(config, EIGHT)
    assert advice in str(error.value)


def test_one_device_needs_no_wrapping():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_names == AXES and mesh.size == 1
    assert isinstance(sharded_layout(mesh), LocalLayout)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("layers", "embed", "heads", "head_dim"), (3, 64, 4, 16), PartitionSpec(None, "fsdp")),
        (("layers", "embed", "heads"), (3, 66, 4), PartitionSpec(None, None, "fsdp")),  # 4 does not divide 66
        (("vocab", "embed"), (257, 64), PartitionSpec(None, "fsdp")),
        (("layers", "experts", "latent", "expert_mlp"), (4, 16, 32, 8), PartitionSpec(None, "fsdp")),
        (("layers", "norm"), (4, 64), PartitionSpec()),  # a norm's weight is small: whole everywhere
        (("layers", "heads"), (4, 3), PartitionSpec()),
    ],
)
def test_parameters_are_split_along_an_axis_that_divides(axes: tuple[str, ...], shape: tuple[int, ...], expected: PartitionSpec):
    assert parameter_spec(axes, shape, split_by(4)) == expected


def test_every_large_parameter_of_the_released_model_is_split():
    _, shapes, axes = parameters.abstract(ModelConfig())

    def whole(leaf: jax.ShapeDtypeStruct, names: Any) -> int:
        return 0 if "fsdp" in parameter_spec(names, leaf.shape, split_by(64)) else leaf.size

    left = jax.tree.leaves(jax.tree.map(whole, shapes, axes))
    assert max(left) <= 12 * 7168  # a stack of vectors, one per layer of a block


def test_activations_are_split_along_rows_alone():
    assert activation_spec(("batch", "tokens", "embed")) == PartitionSpec(AXES, None, None)
