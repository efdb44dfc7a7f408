"""Muon, whole or per head: momentum whose matrices are orthogonalised (report 2.5; base form of Moonlight and K2)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from k3train.optim.labels import Axes, is_axes
from k3train.optim.newton_schulz import newton_schulz
from k3train.optim.paths import Path, by_path, map_by_path

UPDATE_RMS = 0.2  # about AdamW's, so that one learning rate serves both


class MuonState(NamedTuple):
    """Momentum in a tree like the parameters."""

    momentum: Any


def scale_by_muon(
    axes: Any, *, per_head: bool, momentum: float = 0.95, steps: int = 5, dtype: DTypeLike = jnp.bfloat16
) -> optax.GradientTransformation:
    """m <- mu m + G; O = NS(mu m + G); update = 0.2 sqrt(max(rows, cols)) O, all per block.

    A block is one matrix: of one layer, one expert and, with `per_head`, one head; rows and cols are the block's own. The step
    size, its sign and the decay are for later links of a chain.

    Args:
      axes: tree of tuples of logical axis names, shaped like the whole parameter tree; the updates may be a masked part of it.
      per_head: [in, heads, head_dim] is orthogonalised head by head as [in, head_dim]; else heads and head_dim are one side.
      momentum: mu.
      steps: Newton-Schulz iterations.
      dtype: operands of their products.
    """
    axes_of: dict[Path, Axes] = by_path(axes, is_axes)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        moments = jax.tree.map(lambda m, g: (momentum * m + g).astype(m.dtype), state.momentum, updates)

        def orthogonal(path: Path, m: jax.Array, g: jax.Array) -> jax.Array:
            names = axes_of[path]
            if names[0] != "layers":
                return step(m, g, names)
            # One layer at a time: what Newton-Schulz holds beside the state is a layer's share of a stack, not the stack's.
            return jax.lax.map(lambda layer: step(layer[0], layer[1], names[1:]), (m, g))

        def step(m: jax.Array, g: jax.Array, names: Axes) -> jax.Array:
            blocks = to_blocks((momentum * m + g).astype(m.dtype), names, per_head)
            scale = UPDATE_RMS * math.sqrt(max(blocks.shape[-2:]))
            return from_blocks(scale * newton_schulz(blocks, steps=steps, dtype=dtype), m.shape, names, per_head)

        return map_by_path(orthogonal, moments, updates), MuonState(moments)

    return optax.GradientTransformation(init, update)


def to_blocks(x: jax.Array, axes: Axes, per_head: bool) -> jax.Array:
    """A leaf as matrices [..., rows, cols]; leading dims number the blocks."""
    if "head_dim" not in axes:
        return x
    heads = axes.index("heads")
    if per_head:
        return jnp.moveaxis(x, heads, -3)
    return x.reshape(*x.shape[:heads], -1, *x.shape[heads + 2 :])


def from_blocks(blocks: jax.Array, shape: tuple[int, ...], axes: Axes, per_head: bool) -> jax.Array:
    """The inverse of `to_blocks`, for a leaf of that shape."""
    return jnp.moveaxis(blocks, -3, axes.index("heads")) if per_head and "head_dim" in axes else blocks.reshape(shape)
