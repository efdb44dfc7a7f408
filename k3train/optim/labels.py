"""Which update rule a parameter gets, read off its logical axes and its name alone.

A matrix joins one width to another. `heads` and `head_dim` are one width in two dimensions, and leading `layers` or `experts`
only stack equal parameters: counting dimensions would take dt_bias [H, K] or a stack of norm scales [layers, D] for matrices.
"""

from __future__ import annotations

from typing import Any

from jax.tree_util import tree_map_with_path

from k3train.config import OptimizerConfig
from k3train.optim.paths import path_of

MUON = "muon"
MUON_PER_HEAD = "muon_per_head"
ADAMW = "adamw"
ADAMW_NO_DECAY = "adamw_no_decay"
BALANCE = "balance"

STACKED = ("layers", "experts")
ROUTER_BIAS = "router_bias"
PER_HEAD = {"q_proj", "k_proj", "v_proj", "q_up", "k_up", "v_up"}  # queries, keys and values (report 2.5)
GATES = {"gate_proj", "decay_up"}  # by heads on request, where they have heads

Axes = tuple[str, ...]


def labels(axes: Any, config: OptimizerConfig) -> Any:
    """The label of every parameter.

    Args:
      axes: tree of tuples of logical axis names, one tuple per parameter.
      config: `matrices = "adamw"` puts the matrices of the layers under AdamW, `muon.per_head_gates` splits gates by heads.

    Returns:
      the same tree of `muon` (a matrix of a layer, or of each of its experts, orthogonalised whole), `muon_per_head` (head by head),
      `adamw` (embedding, head, convolutions, KDA's beta), `adamw_no_decay` (a vector per layer or head: norms, a_log, dt_bias,
      pseudo-queries) or `balance` (the router bias, which no gradient reaches).
    """
    return tree_map_with_path(lambda path, names: _label(path_of(path)[-1], unstacked(names), config), axes, is_leaf=is_axes)


def is_axes(node: Any) -> bool:
    """Whether a node of the tree is one parameter's axes."""
    return isinstance(node, tuple)


def unstacked(axes: Axes) -> Axes:
    """The axes of one of the stacked parameters."""
    while axes and axes[0] in STACKED:
        axes = axes[1:]
    return axes


def _label(name: str, axes: Axes, config: OptimizerConfig) -> str:
    if name == ROUTER_BIAS:
        return BALANCE
    if len(set(axes) - {"head_dim"} if "heads" in axes else set(axes)) < 2:
        return ADAMW_NO_DECAY
    one_number_per_head = "heads" in axes and "head_dim" not in axes
    if config.matrices == "adamw" or "vocab" in axes or "conv" in axes or one_number_per_head:
        return ADAMW
    by_heads = "heads" in axes and (name in PER_HEAD or (config.muon.per_head_gates and name in GATES))
    return MUON_PER_HEAD if by_heads else MUON
