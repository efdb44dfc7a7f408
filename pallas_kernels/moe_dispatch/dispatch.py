"""Dispatch by a stable sort: `sort_by_expert` orders the slots, `permute` lays tokens out in that order, `combine` sums them back.

A slot is one of a token's k choices; slot s k + j is choice j of token s, and row m of the sorted rows is slot order_M[m].
Gradients are the functions' own and gather by the inverse permutation where plain differentiation would scatter-add rows.

Shapes: S tokens, k choices of a token, M = S k slots or rows, L width, E experts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import Implementation
from pallas_kernels.moe_dispatch.choice import on_hopper


def sort_by_expert(expert_ids_Sk: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Orders the slots by expert and, within an expert, by slot; no array of S x k x E elements arises.

    Args:
        expert_ids_Sk: integer expert of each choice. A choice outside 0..num_experts-1 goes to no expert: it sorts last.
        num_experts: E.

    Returns:
        order_M, int32: the slot of each sorted row (its token is order_M // k); and group_sizes_E, int32: the rows of each
        expert, whose sum falls short of M by the choices of no expert.

    Raises:
        ValueError: expert_ids_Sk is not of rank 2, or num_experts is below 1.
        TypeError: expert_ids_Sk does not hold integers.
    """
    if expert_ids_Sk.ndim != 2 or num_experts < 1:
        raise ValueError(f"sort_by_expert takes ids [S, k] and at least one expert, not shape {expert_ids_Sk.shape} and {num_experts}.")
    if not jnp.issubdtype(expert_ids_Sk.dtype, jnp.integer):
        raise TypeError(f"sort_by_expert: expert ids are integers, not {expert_ids_Sk.dtype}.")
    ids_M = expert_ids_Sk.reshape(-1).astype(jnp.int32)
    ids_M = jnp.where((ids_M >= 0) & (ids_M < num_experts), ids_M, num_experts)
    _, order_M = lax.sort((ids_M, jnp.arange(ids_M.size, dtype=jnp.int32)), num_keys=1, is_stable=True)
    return order_M, jnp.zeros(num_experts, jnp.int32).at[ids_M].add(1, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def permute(x_SL: jax.Array, order_M: jax.Array, k: int, implementation: Implementation | None = None) -> jax.Array:
    """Lays out one copy of its token for each slot: `rows_ML[m] = x_SL[order_M[m] // k]`.

    The gradient to a token sums its k copies in float32 (float64 for float64).

    Args:
        x_SL: tokens.
        order_M: int32 permutation of the S k slots, from `sort_by_expert`.
        k: choices of a token.
        implementation: None and `hopper` are a kernel on a Hopper GPU, for bfloat16, S a multiple of 8 and L of 64, up to 1600; XLA else.

    Returns:
        rows_ML in the tokens' dtype.

    Raises:
        ValueError: order_M does not hold S k slots.
    """
    _check_slots("permute", order_M, x_SL.shape[0], k)
    return _copies(x_SL, order_M, k, implementation)


def _permute_forward(x_SL: jax.Array, order_M: jax.Array, k: int, implementation: Implementation | None) -> tuple[jax.Array, jax.Array]:
    return permute(x_SL, order_M, k, implementation), order_M


def _permute_backward(k: int, implementation: Implementation | None, order_M: jax.Array, d_rows_ML: jax.Array) -> tuple[jax.Array, None]:
    del implementation
    row_Sk = _inverse(order_M).reshape(-1, k)
    return _sum_rows(d_rows_ML, row_Sk).astype(d_rows_ML.dtype), None


permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sum_choices(rows_ML: jax.Array, order_M: jax.Array, k: int, implementation: Implementation | None = None) -> jax.Array:
    """Brings sorted rows back to their tokens and adds up each token's k: `combine` with every weight 1, and `permute`'s transpose.

    Args:
        rows_ML: one row for each slot, in the order of `order_M`.
        order_M: int32 permutation of the S k slots, from `sort_by_expert`.
        k: choices of a token.
        implementation: of the gradient, a permutation; see `permute`.

    Returns:
        y_SL, float32 (float64 for float64), as is the accumulation; the gradient comes in the rows' dtype.

    Raises:
        ValueError: rows and order do not hold the same number of slots, or not S k of them.
    """
    _check_slots("sum_choices", order_M, rows_ML.shape[0] // k, k)
    return _sum_rows(rows_ML, _inverse(order_M).reshape(-1, k))


def _sum_choices_forward(
    rows_ML: jax.Array, order_M: jax.Array, k: int, implementation: Implementation | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return sum_choices(rows_ML, order_M, k, implementation), (order_M, jnp.zeros((0,), rows_ML.dtype))


def _sum_choices_backward(
    k: int, implementation: Implementation | None, saved: tuple[jax.Array, jax.Array], dy_SL: jax.Array
) -> tuple[jax.Array, None]:
    order_M, like_rows = saved
    return _copies(dy_SL.astype(like_rows.dtype), order_M, k, implementation), None


sum_choices.defvjp(_sum_choices_forward, _sum_choices_backward)


@jax.custom_vjp
def combine(rows_ML: jax.Array, weights_Sk: jax.Array, order_M: jax.Array) -> jax.Array:
    """Brings sorted rows back to their tokens and adds them up, weighted: `y_SL[s] = sum_j weights_Sk[s, j] rows of slot s k + j`.

    The form for experts of any kind. `routed_experts` weighs before its last product instead, which is linear, and needs no rows kept.

    Source: Kimi K3 report, section 2.3 (the sum over a token's routed experts).

    Args:
        rows_ML: one row for each slot, in the order of `order_M`.
        weights_Sk: a weight for each slot.
        order_M: int32 permutation of the S k slots, from `sort_by_expert`.

    Returns:
        y_SL, float32 (float64 if the rows or the weights are), as is the accumulation; gradients come in their arguments' dtypes.

    Raises:
        ValueError: rows, weights and order do not hold the same number of slots.
    """
    _check_slots("combine", order_M, *weights_Sk.shape)
    if rows_ML.shape[0] != order_M.shape[0]:
        raise ValueError(f"combine: {rows_ML.shape[0]} rows, but {order_M.shape[0]} slots.")
    return _sum_rows(rows_ML, _inverse(order_M).reshape(weights_Sk.shape), weights_Sk)


def _combine_forward(rows_ML: jax.Array, weights_Sk: jax.Array, order_M: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return combine(rows_ML, weights_Sk, order_M), (rows_ML, weights_Sk, order_M)


def _combine_backward(saved: tuple[jax.Array, ...], dy_SL: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_ML, weights_Sk, order_M = saved
    dy_ML = dy_SL[order_M // weights_Sk.shape[1]]
    d_rows_ML = weights_Sk.reshape(-1)[order_M][:, None].astype(dy_SL.dtype) * dy_ML
    d_weight_M = jnp.sum(dy_ML * rows_ML.astype(dy_SL.dtype), axis=1)
    d_weights_Sk = d_weight_M[_inverse(order_M)].reshape(weights_Sk.shape)
    return d_rows_ML.astype(rows_ML.dtype), d_weights_Sk.astype(weights_Sk.dtype), None


combine.defvjp(_combine_forward, _combine_backward)


def _check_slots(name: str, order_M: jax.Array, S: int, k: int) -> None:
    if order_M.shape != (S * k,):
        raise ValueError(f"{name}: the order has shape {order_M.shape}, but {S} tokens with {k} choices have {S * k} slots.")


def _copies(x_SL: jax.Array, order_M: jax.Array, k: int, implementation: Implementation | None) -> jax.Array:
    """Each slot's token, in sorted order."""
    if on_hopper(implementation):
        from pallas_kernels.moe_dispatch import hopper_permute

        if hopper_permute.refusal(x_SL, k) is None:
            return hopper_permute.spread(x_SL, _inverse(order_M))
    return x_SL[order_M // k]


def _inverse(order_M: jax.Array) -> jax.Array:
    """The sorted row of each slot."""
    row_M = jnp.arange(order_M.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(order_M).at[order_M].set(row_M, unique_indices=True)


def _sum_rows(rows_ML: jax.Array, row_Sk: jax.Array, weights_Sk: jax.Array | None = None) -> jax.Array:
    """The (weighted) sum of each token's k rows. One gather per choice fuses into the sum, where one for all would be stored."""
    accumulator = jnp.promote_types(jnp.float32, rows_ML.dtype if weights_Sk is None else jnp.result_type(rows_ML, weights_Sk))
    y_SL = jnp.zeros((row_Sk.shape[0], rows_ML.shape[1]), accumulator)
    for j in range(row_Sk.shape[1]):
        row_SL = rows_ML[row_Sk[:, j]].astype(accumulator)
        y_SL += row_SL if weights_Sk is None else row_SL * weights_Sk[:, j, None].astype(accumulator)
    return y_SL
