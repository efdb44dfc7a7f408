"""Grouped matmul in XLA: matrix products whose cost follows the rows that are present, forward and backward.

The rows are cut into blocks of R rows at fixed places, so a block is a view and needs no copy. Each block is multiplied
by the matrix of the group that holds its first row. Where a group begins inside a block, its rows up to the block's end
are its head; a group has at most one, and a second product of E x R rows overwrites the heads. The weight gradient adds
up the blocks that lie wholly in a group, and one product over its head and its tail, the rows in its last, partial block.
So there are at most M + 2 E R rows of products, and R is at most about a quarter of the mean group.

Small problems run as two batched products; larger ones loop over chunks of blocks and of groups, with trip counts that
follow the rows present, so that gathered matrices stay within the bound of `_blocks`. No temporary has E x M elements.

Shapes: M rows, K in, N out, E groups, R rows of a block, T blocks, P = T R rows, C blocks of a chunk, D groups of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_SMALLEST_BLOCK, _USUAL_BLOCK, _LARGEST_BLOCK = 16, 128, 512
_LEAST_GATHERED_BYTES, _MOST_GATHERED_BYTES = 8 * 2**20, 256 * 2**20


class _Blocks(NamedTuple):
    """How M rows are cut, known at trace time: rows of a block, number of blocks, blocks and groups of a chunk."""

    R: int
    T: int
    C: int
    D: int


class _Plan(NamedTuple):
    """Which rows belong to whom, computed on the device."""

    start_E: jax.Array
    end_E: jax.Array
    block_group_T: jax.Array  # the group that holds a block's first row
    whole_T: jax.Array  # does the block lie wholly in that group?
    head_rows_ER: jax.Array  # a head's rows; elsewhere distinct indices past the last row, which gather 0 and scatter nothing
    tail_rows_ER: jax.Array  # likewise


@jax.custom_vjp
def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Multiplies each group of consecutive rows by its own matrix: `y_MN[m] = x_MK[m] @ w_EKN[group of m]`.

    Products accumulate in float32 (float64 for float64) at JAX's default matmul precision, which
    `jax.default_matmul_precision` changes: an expert is an ordinary matmul. Partial weight gradients are added in float32
    proper. Off the CPU a non-finite weight gradient may reach neighbouring groups' weight gradients, nothing else does.

    Args:
        x_MK: rows in group order.
        w_EKN: one matrix per group, in the rows' dtype.
        group_sizes_E: int32 rows of each group, zero allowed; their sum is at most M.

    Returns:
        y_MN in the rows' dtype; rows past the sum of the sizes are zero, and so are their gradients.
    """
    y_MN, _ = _forward(x_MK, w_EKN, group_sizes_E)
    return y_MN


def _forward(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    blocks = _blocks(x_MK.shape[0], w_EKN)
    y_MN = _times_weights(x_MK, w_EKN, _plan(group_sizes_E, blocks), blocks, weight_axis=1)
    return y_MN, (x_MK, w_EKN, group_sizes_E)


def _backward(saved: tuple[jax.Array, ...], dy_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, group_sizes_E = saved
    blocks = _blocks(x_MK.shape[0], w_EKN)
    plan = _plan(group_sizes_E, blocks)
    dx_MK = _times_weights(dy_MN, w_EKN, plan, blocks, weight_axis=2)
    dw_EKN = _weight_gradient(x_MK, dy_MN, plan, blocks, w_EKN.dtype)
    return dx_MK, dw_EKN, None


grouped_matmul.defvjp(_forward, _backward)


def _blocks(M: int, w_EKN: jax.Array) -> _Blocks:
    """A quarter of the mean group makes a block: a power of two, at least 16 rows and at most 128, or 512 for wide matrices.

    Short blocks waste little at the groups' ends, but each gathers a matrix: worth a fourth of the narrower side in rows.
    The matrices that a chunk gathers, and its partial weight gradients, may take 8 MiB (and at least one matrix), or more:
    as much memory as rows and results or half of all the matrices, whichever is less, but 256 MiB at most.
    """
    E, K, N = w_EKN.shape
    largest = min(max(min(K, N) / 4, _USUAL_BLOCK), _LARGEST_BLOCK)
    R = 2 ** round(math.log2(min(max(M / (4 * E), _SMALLEST_BLOCK), largest)))
    T = -(-M // R)
    itemsize = max(w_EKN.dtype.itemsize, 4)
    gathered_bytes = min(max(min(M * (K + N), E * K * N // 2) * itemsize, _LEAST_GATHERED_BYTES), _MOST_GATHERED_BYTES)
    matrices = max(gathered_bytes // (K * N * itemsize), 1)
    return _Blocks(R=R, T=T, C=min(T, matrices), D=min(E, matrices))


def _plan(group_sizes_E: jax.Array, blocks: _Blocks) -> _Plan:
    E, (R, T) = group_sizes_E.shape[0], blocks[:2]
    end_E = jnp.cumsum(group_sizes_E)
    start_E = end_E - group_sizes_E
    first_row_T = jnp.arange(T, dtype=jnp.int32) * R
    block_group_T = jnp.minimum(jnp.sum(end_E <= first_row_T[:, None], axis=1, dtype=jnp.int32), E - 1)
    row_R = jnp.arange(R, dtype=jnp.int32)
    nowhere_ER = T * R + jnp.arange(E * R, dtype=jnp.int32).reshape(E, R)

    def rows_in_group(first_E: jax.Array, exists_E: jax.Array) -> jax.Array:
        rows_ER = first_E[:, None] + row_R
        inside_ER = exists_E[:, None] & (rows_ER >= start_E[:, None]) & (rows_ER < end_E[:, None])
        return jnp.where(inside_ER, rows_ER, nowhere_ER)

    first_block_E, last_block_E = start_E // R, end_E // R
    return _Plan(
        start_E=start_E,
        end_E=end_E,
        block_group_T=block_group_T,
        whole_T=first_row_T + R <= end_E[block_group_T],
        head_rows_ER=rows_in_group(first_block_E * R, start_E % R != 0),
        tail_rows_ER=rows_in_group(last_block_E * R, last_block_E * R >= start_E),
    )


def _times_weights(x_MK: jax.Array, w_EKN: jax.Array, plan: _Plan, blocks: _Blocks, *, weight_axis: int) -> jax.Array:
    """Rows times their group's matrix, contracted over the matrices' axis 1 (forward) or 2 (gradient to rows)."""
    (M, K), E, (R, T, C, D) = x_MK.shape, w_EKN.shape[0], blocks
    N = w_EKN.shape[3 - weight_axis]
    x_TRK = _cut(x_MK, blocks)
    x_PK = x_TRK.reshape(T * R, K)

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return _batched_product(rows, weights, 2, weight_axis).astype(x_MK.dtype)

    def multiply_blocks(i: jax.Array | int, y_TRN: jax.Array) -> jax.Array:
        first = _chunk_start(i, C, T)
        group_C = _take(plan.block_group_T, first, C)
        row_CR = (first + jnp.arange(C, dtype=jnp.int32))[:, None] * R + jnp.arange(R, dtype=jnp.int32)
        y_CRN = product(_take(x_TRK, first, C), w_EKN[group_C])
        y_CRN = jnp.where((row_CR < plan.end_E[-1])[..., None], y_CRN, 0)
        return lax.dynamic_update_slice_in_dim(y_TRN, y_CRN, first, axis=0)

    def overwrite_heads(i: jax.Array | int, y_PN: jax.Array) -> jax.Array:
        first = _chunk_start(i, D, E)
        rows_DR = _take(plan.head_rows_ER, first, D)
        y_DRN = product(_rows_or_zero(x_PK, rows_DR), _take(w_EKN, first, D))
        return y_PN.at[rows_DR].set(y_DRN, mode="drop", unique_indices=True)

    y_TRN = _repeat(multiply_blocks, jnp.zeros_like(x_MK, shape=(T, R, N)), _ceil_div(plan.end_E[-1], C * R), once=C == T)
    y_PN = _repeat(overwrite_heads, y_TRN.reshape(T * R, N), -(-E // D), once=D == E)
    return y_PN[:M]


def _weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, plan: _Plan, blocks: _Blocks, dtype: jnp.dtype) -> jax.Array:
    """`x^T dy` of each group: head and tail plus the sum over its whole blocks, accumulated for a chunk of groups at a time."""
    K, N, E, (R, T, C, D) = x_MK.shape[1], dy_MN.shape[1], plan.end_E.shape[0], blocks
    x_TRK, dy_TRN = _cut(x_MK, blocks), _cut(dy_MN, blocks)
    x_PK, dy_PN = x_TRK.reshape(T * R, K), dy_TRN.reshape(T * R, N)
    end_rows_EQ = jnp.concatenate([plan.head_rows_ER, plan.tail_rows_ER], axis=1)

    def sum_groups(i: jax.Array | int, dw_EKN: jax.Array) -> jax.Array:
        first_group = _chunk_start(i, D, E)
        rows_DQ = _take(end_rows_EQ, first_group, D)
        ends_DKN = _batched_product(_rows_or_zero(x_PK, rows_DQ), _rows_or_zero(dy_PN, rows_DQ), 1, 1)
        first_block = 0 if C == T else plan.start_E[first_group] // R
        end_block = _ceil_div(plan.end_E[first_group + D - 1], R)

        def add_blocks(j: jax.Array | int, sum_DKN: jax.Array) -> jax.Array:
            wanted = first_block + j * C
            first = 0 if C == T else jnp.minimum(wanted, T - C)
            part_CKN = _batched_product(_take(x_TRK, first, C), _take(dy_TRN, first, C), 1, 1)
            is_new_C = first + jnp.arange(C, dtype=jnp.int32) >= wanted
            slot_C = jnp.where(_take(plan.whole_T, first, C) & is_new_C, _take(plan.block_group_T, first, C) - first_group, -1)
            return lax.platform_dependent(sum_DKN, part_CKN, slot_C, cpu=_add_in_order, default=_add_by_product)

        dw_DKN = _repeat(add_blocks, ends_DKN, _ceil_div(end_block - first_block, C), once=C == T)
        return lax.dynamic_update_slice_in_dim(dw_EKN, dw_DKN.astype(dtype), first_group, axis=0)

    return _repeat(sum_groups, jnp.zeros_like(x_MK, shape=(E, K, N), dtype=dtype), -(-E // D), once=D == E)


def _add_in_order(sum_DKN: jax.Array, part_CKN: jax.Array, slot_C: jax.Array) -> jax.Array:
    """Adds each part to the sum in its slot, none where the slot lies outside 0..D-1."""
    D = sum_DKN.shape[0]
    return sum_DKN.at[jnp.where(slot_C < 0, D, slot_C)].add(part_CKN, mode="drop")


def _add_by_product(sum_DKN: jax.Array, part_CKN: jax.Array, slot_C: jax.Array) -> jax.Array:
    """The same as a product with zeros and ones: on a GPU a scatter-add would be in no fixed order."""
    D, K, N = sum_DKN.shape
    is_slot_DC = jnp.arange(D, dtype=jnp.int32)[:, None] == slot_C
    part_CKN = jnp.where(is_slot_DC.any(0)[:, None, None], part_CKN, 0)
    part_DF = jnp.dot(is_slot_DC.astype(part_CKN.dtype), part_CKN.reshape(-1, K * N), precision=lax.Precision.HIGHEST)
    return sum_DKN + part_DF.reshape(D, K, N)


def _batched_product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """A batch of matrix products, in the accumulator's dtype."""
    accumulator = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))), preferred_element_type=accumulator)


def _cut(x_MK: jax.Array, blocks: _Blocks) -> jax.Array:
    (M, K), (R, T) = x_MK.shape, blocks[:2]
    if M < T * R:
        x_MK = jnp.pad(x_MK, ((0, T * R - M), (0, 0)))
    return x_MK.reshape(T, R, K)


def _chunk_start(i: jax.Array | int, chunk: int, total: int) -> jax.Array | int:
    """Where chunk i starts; the last one reaches back so that it is whole."""
    return 0 if chunk == total else jnp.minimum(i * chunk, total - chunk)


def _take(x: jax.Array, first: jax.Array | int, size: int) -> jax.Array:
    return x if size == x.shape[0] else lax.dynamic_slice_in_dim(x, first, size, axis=0)


def _rows_or_zero(x_PK: jax.Array, rows: jax.Array) -> jax.Array:
    return x_PK.at[rows].get(mode="fill", fill_value=0)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + (b - 1)) // b


def _repeat(body: Callable, initial: jax.Array, trips: jax.Array | int, *, once: bool) -> jax.Array:
    """A loop that is no loop where a single trip is known to do."""
    return body(0, initial) if once else lax.fori_loop(0, trips, body, initial)
