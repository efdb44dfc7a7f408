"""(I + L) U = R inside a chunk: substitution in the 16-token diagonal tiles, block doubling above them.

C tokens of a chunk, S tokens of a block, V value channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import broadcasted_iota

from pallas_kernels.kda.tiles import TILE
from pallas_kernels.kda.tpu.matmul import Passes, matmul, matmul_nt, matmul_tn


def later_blocks(x: jax.Array, size: int) -> jax.Array:
    """Rows of every second block of `size` rows: [C, ...] -> [C / 2, ...]."""
    rows, width = x.shape
    return x.reshape(rows // (2 * size), 2, size, width)[:, 1].reshape(rows // 2, width)


def embed_later_blocks(x: jax.Array, size: int) -> jax.Array:
    """The inverse of `later_blocks`, zeros in the rows between."""
    rows, width = x.shape
    x = x.reshape(rows // size, 1, size, width)
    return jnp.concatenate([jnp.zeros_like(x), x], axis=1).reshape(2 * rows, width)


def below_diagonal(size: int, rows: int, chunk: int) -> jax.Array:
    """Mask [rows, C] for `later_blocks` rows: the columns of the block just before the row's own."""
    row, column = broadcasted_iota(jnp.int32, (rows, chunk), 0), broadcasted_iota(jnp.int32, (rows, chunk), 1)
    return lax.div(row, size) * 2 == lax.div(column, size)


def _tile_inverses(lowers: Sequence[jax.Array]) -> list[jax.Array]:
    """(I + L)^-1 of each diagonal tile, [C, C] with zeros outside the tiles; exact float32 substitution on the vector unit.

    All tiles are solved at once: a tile's row i is row i of an array [16, C], its columns lie at the tile's lanes.
    """
    chunk = lowers[0].shape[0]
    tiles = range(chunk // TILE)
    row, lane = broadcasted_iota(jnp.int32, (TILE, chunk), 0), broadcasted_iota(jnp.int32, (TILE, chunk), 1)
    tile = lax.div(lane, TILE)
    joined = [sum((jnp.where(tile == t, x[t * TILE : (t + 1) * TILE], 0.0) for t in tiles), jnp.zeros((TILE, chunk))) for x in lowers]
    inverses = [jnp.where(lax.rem(lane, TILE) == row, 1.0, 0.0)] * len(lowers)
    for column in range(TILE - 1):
        factors = [jnp.take_along_axis(x, tile * TILE + column, axis=1, mode="promise_in_bounds") for x in joined]
        inverses = [x - factor * x[column : column + 1] for x, factor in zip(inverses, factors, strict=True)]
    return [jnp.concatenate([jnp.where(tile == t, x, 0.0) for t in tiles], axis=0) for x in inverses]


def unit_lower_inverses(passes: Passes, lowers: Sequence[jax.Array]) -> list[jax.Array]:
    """(I + L)^-1 of several strictly lower L [C, C]; C is 16 times a power of two.

    Blocks double by X21 = -X22 L21 X11: the inverse's entries are bounded, those of L's powers are not. Below full float32, L is
    rounded to bf16 once (a change of the system, which U follows smoothly) and X keeps 16 bits (its rows differ by less).
    """
    chunk = lowers[0].shape[0]
    operand = jnp.float32 if passes == "f32" else jnp.bfloat16
    lowers = [x.astype(operand).astype(jnp.float32) for x in lowers]
    inverses = _tile_inverses(lowers)
    size = TILE
    while size < chunk:
        mask = below_diagonal(size, chunk // 2, chunk)
        below = [jnp.where(mask, later_blocks(x, size), 0.0).astype(operand) for x in lowers]
        middle = [embed_later_blocks(matmul(passes, x, y), size) for x, y in zip(below, inverses, strict=True)]
        joints = [matmul(passes, later_blocks(x, size), y) for x, y in zip(inverses, middle, strict=True)]
        inverses = [x - embed_later_blocks(y, size) for x, y in zip(inverses, joints, strict=True)]
        size *= 2
    return inverses


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve(passes: Passes, lowers: list[jax.Array], rights: list[jax.Array]) -> list[jax.Array]:
    """U [C, V] of (I + L) U = R, for several independent systems: side by side, their chains of small products overlap."""
    return _solve_forward(passes, lowers, rights)[0]


def _solve_forward(passes: Passes, lowers: list[jax.Array], rights: list[jax.Array]):
    inverses = unit_lower_inverses(passes, lowers)
    solutions = [matmul(passes, x, y) for x, y in zip(inverses, rights, strict=True)]
    return solutions, (inverses, solutions)


def _solve_backward(passes: Passes, kept, d_solutions: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    inverses, solutions = kept
    d_rights = [matmul_tn(passes, x, y) for x, y in zip(inverses, d_solutions, strict=True)]
    ordinary = "f32" if passes == "f32" else "bf16"
    return [-matmul_nt(ordinary, x, y) for x, y in zip(d_rights, solutions, strict=True)], d_rights


solve.defvjp(_solve_forward, _solve_backward)
