"""How the TPU kernels of the grouped matmul cut their work: tile sizes that fit VMEM, and the list of tiles to visit.

Shapes: M rows, E groups, G = E or E + 1 groups in the list, V visits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import target

LANES = 128
PART = 128  # rows: where a tile is not all one group's, parts of this size that the group does not touch are skipped
TILE_ROWS = 512
CHUNK = 256  # features: an MXU's width on v6e and tpu7x, two on v5p
SMEM_BYTES = 512 << 10  # for the list of visits, of 1 MiB


class Chip(NamedTuple):
    """What the choice of tiles depends on."""

    cores: int
    """TensorCores of one device."""
    vmem: int
    """Bytes of VMEM of one of them: 64 MiB on v5p and tpu7x, 128 MiB on v6e."""

    @property
    def for_tiles(self) -> int:
        """What tiles and accumulators may take."""
        return self.vmem * 8 // 10

    @property
    def limit(self) -> int:
        """What a kernel may take with the compiler's own copies: up to 4 MiB on v5p, little on the others."""
        return self.vmem * 9 // 10


def chip() -> Chip:
    """The chip that is compiled for; interpretation has the smallest of those named above."""
    platform, cores = target()
    return Chip(cores, pltpu.get_tpu_info().vmem_capacity_bytes if platform == "tpu" else 64 << 20)


class Visits(NamedTuple):
    """Pairs of a group and a tile of rows that holds some of its rows, in the order of the rows; all int32."""

    group_V: jax.Array
    tile_V: jax.Array
    start_G1: jax.Array
    """First row of each group, and the end of the last one."""
    last_2: jax.Array
    """The last group that has rows, and the last tile that has rows of a group: 0 where none does."""
    count: jax.Array
    """Visits in use; the lists are longer."""


def list_visits(group_sizes_E: jax.Array, num_rows: int, tile_rows: int, *, for_rows: bool) -> Visits:
    """Lists what a kernel has to visit.

    Args:
      group_sizes_E: int32, their sum at most `num_rows`.
      num_rows: M, at least 1.
      tile_rows: rows of a tile.
      for_rows: the kernel writes every row: rows past the groups are one more group, number E, and empty groups are left
        out. Otherwise it writes every group: an empty group has one visit.
    """
    end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    total = end_E[-1]
    start_G1 = jnp.concatenate([jnp.zeros(1, jnp.int32), end_E])
    if for_rows:
        start_G1 = jnp.concatenate([start_G1, jnp.full(1, num_rows, jnp.int32)])
    start_G, end_G = start_G1[:-1], start_G1[1:]
    first_G = start_G // tile_rows
    tiles_G = jnp.where(end_G > start_G, (end_G - 1) // tile_rows - first_G + 1, 0 if for_rows else 1)
    done_G = jnp.cumsum(tiles_G, dtype=jnp.int32)
    num_tiles, G = pl.cdiv(num_rows, tile_rows), start_G.shape[0]
    visit_V = jnp.arange(num_tiles + G - 1, dtype=jnp.int32)
    group_V = jnp.minimum(jnp.sum(done_G <= visit_V[:, None], axis=1, dtype=jnp.int32), G - 1)
    tile_V = first_G[group_V] + visit_V - (done_G - tiles_G)[group_V]
    last_group = jnp.max(jnp.where(group_sizes_E > 0, jnp.arange(group_sizes_E.shape[0], dtype=jnp.int32), 0))
    last_tile = jnp.maximum(total - 1, 0) // tile_rows
    return Visits(group_V, jnp.minimum(tile_V, num_tiles - 1), start_G1, jnp.stack([last_group, last_tile]), done_G[-1])


def smem_bytes(num_rows: int, num_groups: int, itemsize: int) -> int:
    """Scalar memory that the longer list takes."""
    return 4 * (2 * (pl.cdiv(num_rows, row_tile(num_rows, itemsize)) + num_groups) + num_groups + 4)


def row_tile(num_rows: int, itemsize: int) -> int:
    """Rows of a tile: as many as pay, or all of few. In float32 a product is six, so that code for more than a part is large."""
    return min(TILE_ROWS if itemsize == 2 else PART, pl.cdiv(num_rows, PART) * PART)


def for_chunks(size: int, body: Callable[[Any], None]) -> None:
    """Runs the body for slices of a tile's features, in a loop: all at once would be megabytes of code."""
    chunks, rest = divmod(size, CHUNK)
    if chunks:

        @pl.loop(0, chunks)
        def _(i):
            body(pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK))

    if rest:
        body(pl.ds(chunks * CHUNK, rest))


class RowsTiles(NamedTuple):
    """Tiles of rows times matrices: rows, contracted width, produced features."""

    rows: int
    contracted: int
    features: int

    def vmem_bytes(self, itemsize: int, out_itemsize: int, contracted: int) -> int:
        """Rows, matrix and result in two buffers each, and a chunk's product in float32.

        If contracted in steps also the sum; if the last step is ragged also its operands in float32, where they are masked.
        """
        m, c, f = self
        buffers, product = 2 * itemsize * (m * c + c * f) + 2 * out_itemsize * m * f, 4 * m * min(f, CHUNK)
        return buffers + product + 4 * m * f * (contracted > c) + 4 * c * (m + min(f, CHUNK)) * (contracted % c > 0)


class WeightsTiles(NamedTuple):
    """Tiles of the gradient to matrices: rows, and the matrix's two sides."""

    rows: int
    k: int
    n: int

    def vmem_bytes(self, itemsize: int) -> int:
        """Both kinds of rows in two buffers each, the result with its sum, and a chunk's product in float32.

        A result in float32 is its own sum, so that its two buffers take what those of a bfloat16 one and the sum take.
        """
        m, k, n = self
        return 2 * itemsize * (m * k + m * n) + 8 * k * n + 4 * min(k, CHUNK) * n


def choose_rows_tiles(num_rows: int, contracted: int, features: int, itemsize: int, out_itemsize: int, chip: Chip) -> RowsTiles:
    """The fewest feature tiles, since each reads all rows again; a matrix is contracted whole unless it is too long for that.

    A matrix that is contracted in steps is read again by every tile of rows.
    """
    m, least = row_tile(num_rows, itemsize), _pieces_at_least(features, chip.cores)
    wide = min(4 * LANES, _piece(features, least))  # no narrower than this for the sake of contracting whole
    fitting = (
        tiles
        for steps in range(1, pl.cdiv(contracted, LANES) + 1)
        for pieces in range(least, pl.cdiv(features, LANES) + least, least)
        if (tiles := RowsTiles(m, _piece(contracted, steps), _piece(features, pieces))).features >= wide
        and tiles.vmem_bytes(itemsize, out_itemsize, contracted) <= chip.for_tiles
    )
    return next(fitting)


def choose_weights_tiles(num_rows: int, k: int, n: int, itemsize: int, chip: Chip) -> WeightsTiles:
    """What reads the fewest bytes: x once for each tile across N, dy once for each tile across K."""
    m, least = row_tile(num_rows, itemsize), _pieces_at_least(k, chip.cores)
    fitting = [
        (k * across_n + n * across_k, tiles)
        for across_k in range(least, pl.cdiv(k, LANES) + least, least)
        for across_n in range(1, pl.cdiv(n, LANES) + 1)
        if (tiles := WeightsTiles(m, _piece(k, across_k), _piece(n, across_n))).vmem_bytes(itemsize) <= chip.for_tiles
    ]
    return min(fitting)[1]


def _pieces_at_least(size: int, cores: int) -> int:
    """Pieces along the axis that the cores of a device share."""
    return cores if size > LANES else 1


def _piece(size: int, pieces: int) -> int:
    return pl.cdiv(pl.cdiv(size, pieces), LANES) * LANES
