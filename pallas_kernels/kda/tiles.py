"""Work inside one chunk of KDA: decayed products of token pairs, and the unit-triangular inverse.

C tokens of a chunk, S tokens of a tile (16), P tiles or blocks of a chunk, K key channels. Leading dims are batch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.matmul import HIGHEST, MatmulStyle, matmul, matmul_nt, matmul_tn

TILE = 16
# Exponents against a tile's middle token stay below 8 x 5 = 40, and a product of two below 80: inside float32.
MOST_NEGATIVE_BOUND = -5.0


class Decayed(NamedTuple):
    """Products and factors of a chunk; every decay is from the chunk's start, to its end, or across it."""

    qk_CC: jax.Array
    kk_CC: jax.Array
    q_start_CK: jax.Array
    k_start_CK: jax.Array
    k_end_CK: jax.Array
    decay_K: jax.Array


def decayed_products(q_CK: jax.Array, k_CK: jax.Array, g_CK: jax.Array, style: MatmulStyle) -> Decayed:
    """sum_c q_ic k_jc exp(G_ic - G_jc) and the same with k_i, valid for i >= j (other entries are finite, not used).

    Report section 2.1 equations 3 and 4, tiles of section 2.1.1: the rows of a tile and all columns up to its end refer to the
    tile's middle token, so a factor's exponent is below 40 inside the tile and, for columns before it, <= 0.
    """
    *batch, chunk, width = k_CK.shape
    tiles = chunk // TILE
    row_sums, column_sums, middle_sums = _signed_sums(chunk, g_CK.dtype)

    def sums(matrix: np.ndarray) -> jax.Array:
        return matmul(style.at_highest(), jnp.broadcast_to(matrix, (*batch, *matrix.shape)), g_CK)

    def tiled(x_CK: jax.Array) -> jax.Array:
        return x_CK.reshape(*batch, tiles, TILE, width)

    exponent = sums(row_sums)
    row = jnp.exp(exponent)
    column = jnp.exp(-exponent)[..., None, :, :] if tiles == 1 else jnp.exp(sums(column_sums)).reshape(*batch, tiles, chunk, width)
    to_middle = jnp.exp(sums(middle_sums))[..., None, :]
    to_end = tiled(row)[..., -1, -1:, :]
    q_row, k_row, k_column = tiled(q_CK * row), tiled(k_CK * row), k_CK[..., None, :, :] * column
    return Decayed(
        qk_CC=matmul_nt(style, q_row, k_column).reshape(*batch, chunk, chunk),
        kk_CC=matmul_nt(style, k_row, k_column).reshape(*batch, chunk, chunk),
        q_start_CK=(q_row * to_middle).reshape(k_CK.shape),
        k_start_CK=(k_row * to_middle).reshape(k_CK.shape),
        k_end_CK=k_column[..., -1, :, :] * to_end,
        decay_K=(to_middle[..., -1, :, :] * to_end)[..., 0, :],
    )


def _signed_sums(chunk: int, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices that sum log decays into exponents: of rows [C, C], of columns [P * C, C], from the start to each middle [P, C].

    Direct sums: as differences of one long cumulative sum, exponents would carry the rounding of its size. Columns after
    a tile get exponent 0; their products are not used.
    """
    token = np.arange(chunk)
    middle = np.arange(TILE // 2 - 1, chunk, TILE)

    def path(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """+1 at the tokens summed when going forward from start to end, -1 when going back."""
        start, end = start[..., None], end[..., None]
        return ((token > start) & (token <= end)).astype(dtype) - ((token > end) & (token <= start)).astype(dtype)

    tile = token // TILE
    columns = np.where((tile <= np.arange(len(middle))[:, None])[..., None], path(token, middle[:, None]), 0)
    return path(middle[tile], token), columns.reshape(-1, chunk), (token <= middle[:, None]).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def unit_lower_inverse(style: MatmulStyle, lower_CC: jax.Array) -> jax.Array:
    """(I + L)^-1 for strictly lower L, by block doubling X21 = -X22 L21 X11.

    The entries of the inverse are bounded, those of the powers of L are not (binomials, for repeated keys), so no
    product of powers is formed. C is 16 times a power of two.
    """
    chunk = lower_CC.shape[-1]
    blocks = _diagonal_blocks(lower_CC, TILE)
    inverse = jnp.eye(TILE, dtype=lower_CC.dtype) - blocks * _below_diagonal_blocks(1, lower_CC.dtype)
    size = 2
    while size < TILE:
        middle = jnp.matmul(blocks * _below_diagonal_blocks(size, lower_CC.dtype), inverse, precision=HIGHEST)
        inverse, size = inverse - jnp.matmul(inverse, middle, precision=HIGHEST), 2 * size
    while size < chunk:
        inverse = inverse.reshape(*inverse.shape[:-3], -1, 2, size, size)
        below = jnp.stack([lower_CC[..., i + size : i + 2 * size, i : i + size] for i in range(0, chunk, 2 * size)], axis=-3)
        below = jnp.matmul(below, inverse[..., 0, :, :], precision=HIGHEST)
        inverse = _join(inverse, -jnp.matmul(inverse[..., 1, :, :], below, precision=HIGHEST))
        size *= 2
    return inverse[..., 0, :, :]


def _join(diagonal: jax.Array, below: jax.Array) -> jax.Array:
    """[..., 2, m, m] diagonal blocks and [..., m, m] below them -> [..., 2m, 2m], zero above."""
    first, second = diagonal[..., 0, :, :], diagonal[..., 1, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _diagonal_blocks(x_CC: jax.Array, size: int) -> jax.Array:
    return jnp.stack([x_CC[..., i : i + size, i : i + size] for i in range(0, x_CC.shape[-1], size)], axis=-3)


def _below_diagonal_blocks(size: int, dtype: jnp.dtype) -> np.ndarray:
    """Mask [S, S] of the blocks that join diagonal blocks 2i and 2i + 1 of the given size."""
    row, column = np.indices((TILE, TILE)) // size
    return ((row % 2 == 1) & (column == row - 1)).astype(dtype)


def _inverse_forward(style: MatmulStyle, lower_CC: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse_CC = unit_lower_inverse(style, lower_CC)
    return inverse_CC, inverse_CC


def _inverse_backward(style: MatmulStyle, inverse_CC: jax.Array, d_inverse_CC: jax.Array) -> tuple[jax.Array]:
    style = style.at_highest()
    return (-jnp.tril(matmul_nt(style, matmul_tn(style, inverse_CC, d_inverse_CC), inverse_CC), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
