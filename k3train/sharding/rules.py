"""From logical axes to mesh axes: where parameters, batches and activations lie."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.sharding.mesh import ROWS

# Logical axes over which a parameter may be split, best first; `layers` never is, since a scan slices it.
SPLIT_ORDER = ("embed", "vocab", "experts", "latent", "mlp", "expert_mlp", "heads", "q_rank", "kv_rank", "head_dim", "decay_rank")


def parameter_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Splits the first axis in `SPLIT_ORDER` that the fsdp degree divides; a leaf without one is replicated (ZeRO-3)."""
    degree = mesh.shape["fsdp"]
    for name in SPLIT_ORDER:
        if name in axes and shape[axes.index(name)] % degree == 0:
            dim = axes.index(name)
            return PartitionSpec(*(None,) * dim, "fsdp")
    return PartitionSpec()


def parameter_shardings(axes: Any, params: Any, mesh: Mesh) -> Any:
    """The sharding of every parameter; `axes` holds logical names and `params` shapes, in trees of one structure."""
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, parameter_spec(names, leaf.shape, mesh)), params, axes)


def activation_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Rows of the batch are split, every other dim is whole."""
    return PartitionSpec(*(ROWS if name == "batch" else None for name in axes))
