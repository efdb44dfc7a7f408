"""The only place that stacks and unstacks layers.

Storage: consecutive repeats of a layer pattern are one `Group` whose parameters carry a leading `layers` dim, so that a
scan compiles the pattern once. What may be scanned depends on the depth form: see `plan`. Checkpoints and other formats use the canonical
form, one subtree per layer, which depends on no grouping.
    stored     {"embed": ..., "groups": {g: {j: leaves [repeats, ...]}}, ...}
    canonical  {"embed": ..., "layers": {"0": leaves [...], "1": ...}, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3train.config import ModelConfig
from k3train.models.parameters import Tree

Path = tuple[str, ...]


class Group(NamedTuple):
    """`repeats` times a pattern of `unit` consecutive layers, from layer `first` on."""

    first: int
    unit: int
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Number of the layer at a position of a repeat."""
        return self.first + repeat * self.unit + position


def plan(config: ModelConfig) -> tuple[tuple[Group, ...], ...]:
    """The groups of each block, in order; a group lies in one block.

    Block Attention Residuals: a block of layers has one number of sources. Full: every layer has its own, so that nothing repeats.
    Plain residual: all layers are one block.
    """
    kinds = tuple(zip(config.mixers, config.feed_forwards, strict=True))
    if config.depth == "full_attention_residuals":
        return (tuple(Group(layer, 1, 1) for layer in range(config.num_layers)),)
    size = config.attn_res_block_size if config.depth == "block_attention_residuals" else config.num_layers
    return tuple(_group_block(kinds[start : start + size], start) for start in range(0, config.num_layers, size))


def groups(config: ModelConfig) -> tuple[Group, ...]:
    """All groups, in order."""
    return tuple(group for block in plan(config) for group in block)


def _group_block(kinds: tuple[Any, ...], start: int) -> tuple[Group, ...]:
    """Cuts a block so that the fewest layers are compiled; among equals, into the fewest groups."""
    best: list[tuple[int, tuple[Group, ...]]] = [(0, ())]  # best[n]: cost and cut of the first n layers
    for end in range(1, len(kinds) + 1):
        choices = []
        for begin in range(end):
            length = end - begin
            for unit in range(1, length + 1):
                if length % unit == 0 and kinds[begin : begin + unit] * (length // unit) == kinds[begin:end]:
                    cost, cut = best[begin]
                    choices.append((cost + unit, (*cut, Group(start + begin, unit, length // unit))))
                    break
        best.append(min(choices, key=lambda choice: (choice[0], len(choice[1]))))
    return best[-1][1]


def stacked(layer: nnx.Module, repeats: int) -> nnx.Module:
    """The same module with every declared parameter given a leading `layers` dim of that size."""
    for param in jax.tree.leaves(nnx.state(layer, nnx.Param), is_leaf=lambda node: isinstance(node, nnx.Variable)):
        shape = param.get_value()
        param.set_value(jax.ShapeDtypeStruct((repeats, *shape.shape), shape.dtype))
        param.set_metadata(axes=("layers", *param.get_metadata()["axes"]))
    return layer


def unstack(params: Tree, config: ModelConfig) -> Tree:
    """Stored form to canonical form; leaves may be arrays, `jax.ShapeDtypeStruct`s or moments shaped like parameters."""
    layers: dict[int, Any] = {}
    for index, group in enumerate(groups(config)):
        for position in range(group.unit):
            for repeat in range(group.repeats):
                layers[group.layer(repeat, position)] = jax.tree.map(
                    lambda leaf, r=repeat: _take(leaf, r), params["groups"][index][position]
                )
    rest = {name: subtree for name, subtree in params.items() if name != "groups"}
    return {**rest, "layers": {str(layer): layers[layer] for layer in sorted(layers)}}


def stack(canonical: Tree, config: ModelConfig) -> Tree:
    """Canonical form to stored form: the inverse of `unstack`."""
    layers = canonical["layers"]
    stored = {
        index: {
            position: jax.tree.map(
                lambda *leaves: _join(leaves), *(layers[str(group.layer(repeat, position))] for repeat in range(group.repeats))
            )
            for position in range(group.unit)
        }
        for index, group in enumerate(groups(config))
    }
    rest = {name: subtree for name, subtree in canonical.items() if name != "layers"}
    return {**rest, "groups": stored}


def by_parameter(values_LX: Any, config: ModelConfig, layers: Sequence[int], leaf: Path) -> dict[Path, Any]:
    """Values of some layers, keyed by the stored parameter that they belong to.

    Args:
      values_LX: array [L, ...], one entry for each of `layers`.
      layers: rising numbers of the layers that have the leaf, such as those with experts.
      leaf: the leaf inside a layer, such as ("ffn", "router_bias").

    Returns:
      {path of the leaf in the stored form, as ("groups", "1", "0", "ffn", "router_bias"): [repeats, ...], like the leaf}.

    Raises:
      ValueError: the values are not one per layer, or only some layers of a stack are named.
    """
    if values_LX.shape[0] != len(layers):
        raise ValueError(f"{values_LX.shape[0]} values for {len(layers)} layers")
    row = {layer: index for index, layer in enumerate(layers)}
    result = {}
    for index, group in enumerate(groups(config)):
        for position in range(group.unit):
            members = [group.layer(repeat, position) for repeat in range(group.repeats)]
            rows = [row[layer] for layer in members if layer in row]
            if rows and len(rows) < group.repeats:
                raise ValueError(f"layers {members} are stacked, but only some of them are among {list(layers)}")
            if rows:  # equally far apart, since a group repeats one pattern
                step = rows[1] - rows[0] if len(rows) > 1 else 1
                result[("groups", str(index), str(position), *leaf)] = values_LX[rows[0] : rows[-1] + 1 : step]
    return result


def unstack_tree(tree: Any, config: ModelConfig) -> Any:
    """Converts every parameter-like subtree (optimizer moments, say) of a tree to the canonical form."""
    return _convert(tree, "groups", lambda subtree: unstack(subtree, config))


def stack_tree(tree: Any, config: ModelConfig) -> Any:
    """Converts every canonical subtree of a tree to the stored form: the inverse of `unstack_tree`."""
    return _convert(tree, "layers", lambda subtree: stack(subtree, config))


def _convert(tree: Any, mark: str, convert: Callable[[Tree], Tree]) -> Any:
    def is_params(node: Any) -> bool:
        return isinstance(node, dict) and mark in node

    return jax.tree.map(lambda node: convert(node) if is_params(node) else node, tree, is_leaf=is_params)


def _take(leaf: Any, repeat: int) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf[repeat]
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _join(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if not isinstance(first, jax.ShapeDtypeStruct):
        return jnp.stack(leaves)
    sharding = first.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype, sharding=sharding)
