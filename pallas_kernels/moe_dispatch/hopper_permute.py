"""Token copies into expert order on Hopper (Mosaic GPU): each token is read once and its k copies leave from shared memory.

A gather by sorted rows reads every token k times, at k moments so far apart that the L2 cache has lost it. Here each warpgroup
takes a few tokens at a time, through a ring of its own that TMA fills, and sends every copy to its row by one TMA store.

Shapes: S tokens, k choices of a token, M = S k rows, L width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper_blocks import vary_like

TOKENS = 8  # of a tile
WARPGROUPS = 4
BLOCKS = 132
SHARED_BYTES = 200 * 1024
ALIGNED = 32  # int32 that fill 128 bytes, at whose multiples TMA writes to shared memory
BOX = 64  # columns; a side of a TMA box has at most 256 elements


def refusal(x_SL: jax.Array, k: int) -> str | None:
    """Why the kernel does not take these arrays (only shape and dtype are read), or None."""
    if x_SL.dtype != jnp.bfloat16:
        return f"tokens must be bfloat16, not {x_SL.dtype}"
    tokens, width = x_SL.shape
    if tokens % TOKENS or width % BOX or 0 in (tokens, width) or not 0 < k <= 32 or _stages(width) < 2:
        return f"{tokens} tokens of {width} with {k} choices are not a multiple of {TOKENS} of one of {BOX}, up to 1600, with at most 32"
    return None


def _stages(width: int) -> int:
    return min(4, SHARED_BYTES // (WARPGROUPS * TOKENS * width * 2))


def _kernel(x_SBC, row_M, rows_MBC, tokens, numbers, loaded, *, k, stages, num_blocks):
    wg = lax.axis_index("wg")
    worker, workers = lax.axis_index("block") * WARPGROUPS + wg, num_blocks * WARPGROUPS
    mine = lax.div(x_SBC.shape[0] // TOKENS - worker + (workers - 1), jnp.int32(workers))

    def load(turn):
        slot, first = lax.rem(turn, jnp.int32(stages)), (worker + turn * workers) * TOKENS
        plgpu.copy_gmem_to_smem(x_SBC.at[pl.ds(first, TOKENS)], tokens.at[wg, slot], loaded.at[wg * stages + slot])
        plgpu.copy_gmem_to_smem(
            row_M.at[pl.ds(first * k, TOKENS * k)], numbers.at[wg, slot, pl.ds(0, TOKENS * k)], loaded.at[wg * stages + slot]
        )

    for turn in range(stages):
        pl.when(turn < mine)(functools.partial(load, jnp.int32(turn)))

    @pl.loop(jnp.int32(0), mine)
    def _tile(turn):
        slot = lax.rem(turn, jnp.int32(stages))
        plgpu.barrier_wait(loaded.at[wg * stages + slot])

        @pl.loop(0, TOKENS)
        def _token(token):
            rows = [numbers[wg, slot, token * k + j] for j in range(k)]
            for row in rows:
                plgpu.copy_smem_to_gmem(tokens.at[wg, slot, pl.ds(token, 1)], rows_MBC.at[pl.ds(row, 1)], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        plgpu.commit_smem()  # every warp has read the tile's row numbers
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the tile before has left its buffer, which is the next to be loaded
        following = turn - 1 + stages
        pl.when((turn > 0) & (following < mine))(lambda: load(following))

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("num_blocks", "interpret"))  # lowered once for all the layers that call it
def spread(x_SL: jax.Array, row_M: jax.Array, *, num_blocks: int = BLOCKS, interpret=None) -> jax.Array:
    """Copies tokens to sorted rows: `rows_ML[row_M[s k + j]] = x_SL[s]`.

    Args:
      x_SL: tokens, bfloat16; S a multiple of 8, L of 64.
      row_M: int32, the sorted row of each slot, a permutation.

    Returns:
      rows_ML in x's dtype.
    """
    (num_tokens, width), k = x_SL.shape, row_M.shape[0] // x_SL.shape[0]
    stages, boxes = _stages(width), (width // BOX, BOX)
    kernel = plgpu.kernel(
        functools.partial(_kernel, k=k, stages=stages, num_blocks=num_blocks),
        out_type=jax.ShapeDtypeStruct((num_tokens * k, *boxes), x_SL.dtype),
        scratch_types=(
            plgpu.SMEM((WARPGROUPS, stages, TOKENS, *boxes), x_SL.dtype),
            plgpu.SMEM((WARPGROUPS, stages, pl.cdiv(TOKENS * k, ALIGNED) * ALIGNED), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS * stages),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        kernel_name="spread_tokens",
        interpret=interpret,
    )
    return vary_like(kernel(x_SL.reshape(num_tokens, *boxes), row_M), x_SL).reshape(num_tokens * k, width)
