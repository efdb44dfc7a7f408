"""Which update rule a parameter gets, read off its logical axes and its path alone.

A matrix joins one width to another. `heads` and `head_dim` are one width in two dimensions, and leading `layers` or `experts`
only stack equal parameters: counting dimensions would take dt_bias [H, K] or a stack of norm scales [layers, D] for matrices.
"""

from __future__ import annotations

from typing import Any

import jax

ADAMW = "adamw"
ADAMW_NO_DECAY = "adamw_no_decay"
FROZEN = "frozen"

STACKED = ("layers", "experts")
ONE_WIDTH = {"heads": "channels", "head_dim": "channels"}
ROUTER_BIAS = "router_bias"

Axes = tuple[str, ...]


def labels(axes: Any) -> Any:
    """The label of every parameter.

    Args:
      axes: tree of tuples of logical axis names, one tuple per parameter.

    Returns:
      the same tree of `adamw` (matrices, embeddings and the convolutions' filters), `adamw_no_decay` (a vector per layer or head:
      norms, a_log, dt_bias, pseudo-queries) or `frozen` (the router bias, which no gradient reaches).
    """
    return jax.tree_util.tree_map_with_path(_label, axes, is_leaf=is_axes)


def is_axes(node: Any) -> bool:
    """Whether a node of the tree is one parameter's axes."""
    return isinstance(node, tuple)


def _label(path: tuple[Any, ...], axes: Axes) -> str:
    if jax.tree_util.keystr(path[-1:], simple=True) == ROUTER_BIAS:
        return FROZEN
    while axes and axes[0] in STACKED:
        axes = axes[1:]
    widths = {ONE_WIDTH.get(axis, axis) for axis in axes}
    return ADAMW if len(widths) > 1 else ADAMW_NO_DECAY
