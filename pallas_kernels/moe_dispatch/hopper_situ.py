"""SiTU-GLU of the experts with their weights on Hopper (Mosaic GPU): one pass over memory forward, one backward.

`h[m] = weight[m] situ(both[m, :F], both[m, F:])`. XLA makes the backward pass of this several loops, since the gradient to the weight
is a sum over a row and those to gate and up lie side by side. Here each warpgroup takes 64 rows at a time and walks over their
columns in tiles of 64, through a ring of its own that TMA fills; results overwrite the tile they come from and leave from there.

Shapes: M rows, F hidden width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper_blocks import tiled, vary_like
from pallas_kernels.moe_dispatch.situ import SituGLU

ROWS = COLUMNS = 64  # of a tile
STAGES = 3
BLOCKS = 132
WARPGROUPS = {"forward": 4, "backward": 3}
_TILE, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def refusal(both_MG: jax.Array) -> str | None:
    """Why the kernels do not take this array (only its shape and dtype are read), or None."""
    if both_MG.dtype != jnp.bfloat16:
        return f"gate and up must be bfloat16, not {both_MG.dtype}"
    rows, width = both_MG.shape
    if rows % ROWS or width % (2 * COLUMNS) or 0 in (rows, width):
        return f"{rows} rows of 2 x {width / 2:g} are not positive multiples of {ROWS} and 2 x {COLUMNS}"
    return None


def _kernel(*refs, situ, backward, warpgroups, stages, num_blocks):
    if backward:
        both_MG, weight_M, d_hidden_MF, d_both_MG, d_weight_M, tiles, loaded = refs
    else:
        both_MG, weight_M, hidden_MF, tiles, loaded = refs
    width = both_MG.shape[1] // 2
    chunks, items = width // COLUMNS, both_MG.shape[0] // ROWS
    wg = lax.axis_index("wg")
    worker, workers = lax.axis_index("block") * warpgroups + wg, num_blocks * warpgroups
    mine = lax.div(items - worker + (workers - 1), jnp.int32(workers))

    def rows_of(item):
        return pl.ds(pl.multiple_of((worker + item * workers) * ROWS, ROWS), ROWS)

    def at(item, column):
        return rows_of(item), pl.ds(pl.multiple_of(column, COLUMNS), COLUMNS)

    def load(turn):
        """Starts the loads of the warpgroup's tile number `turn`."""
        item, slot = lax.div(turn, jnp.int32(chunks)), lax.rem(turn, jnp.int32(stages))
        column = lax.rem(turn, jnp.int32(chunks)) * COLUMNS
        sources = [both_MG.at[at(item, column)], both_MG.at[at(item, column + width)]]
        sources += [d_hidden_MF.at[at(item, column)]] if backward else []
        for index, source in enumerate(sources):
            plgpu.copy_gmem_to_smem(source, tiles.at[wg, slot, index], loaded.at[wg * stages + slot])

    def read(slot, index):
        return plgpu.load(tiles.at[wg, slot, index], layout=_TILE).astype(jnp.float32)

    def tile(item, weight, chunk, d_weight):
        turn = item * chunks + chunk
        slot = lax.rem(turn, jnp.int32(stages))
        plgpu.barrier_wait(loaded.at[wg * stages + slot])
        gate, up = read(slot, 0), read(slot, 1)
        weight = lax.broadcast_in_dim(weight, (ROWS, COLUMNS), (0,))
        if backward:
            gated, linear, gate_slope, up_slope = situ.factors_and_slopes(gate, up)
            d_hidden = read(slot, 2)
            d_weight = d_weight + jnp.sum(d_hidden * gated * linear, axis=1)
            d_hidden = d_hidden * weight
            results = (d_hidden * linear * gate_slope, d_hidden * gated * up_slope)
        else:
            results = (situ.product(gate, up) * weight,)
        for index, result in enumerate(results):
            tiles.at[wg, slot, index][...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()
        out = d_both_MG if backward else hidden_MF
        for index in range(len(results)):
            target = out.at[at(item, chunk * COLUMNS + index * width)]
            plgpu.copy_smem_to_gmem(tiles.at[wg, slot, index], target, commit_group=index == len(results) - 1)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the tile before has left its buffers, which are the next to be loaded
        following = turn - 1 + stages
        pl.when((turn > 0) & (following < mine * chunks))(lambda: load(following))
        return d_weight

    for turn in range(stages):
        pl.when(turn < mine * chunks)(functools.partial(load, jnp.int32(turn)))

    @pl.loop(jnp.int32(0), mine)
    def _item(item):
        weight = plgpu.load(weight_M.at[rows_of(item)], layout=_ROW, optimized=False)
        d_weight = plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), _ROW)
        d_weight = lax.fori_loop(0, chunks, functools.partial(tile, item, weight), d_weight)
        if backward:
            d_weight_M.at[rows_of(item)][...] = d_weight

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("situ", "num_blocks", "interpret"))  # lowered once for all the layers that call it
def _run(situ: SituGLU, both_MG, weight_M, *d_hidden_MF, num_blocks=BLOCKS, interpret=None):
    backward = bool(d_hidden_MF)
    rows, width = both_MG.shape
    warpgroups = WARPGROUPS["backward" if backward else "forward"]
    bf16, copies = jnp.bfloat16, 3 if backward else 2
    both, hidden = jax.ShapeDtypeStruct((rows, width), bf16), jax.ShapeDtypeStruct((rows, width // 2), bf16)
    kernel = plgpu.kernel(
        functools.partial(_kernel, situ=situ, backward=backward, warpgroups=warpgroups, stages=STAGES, num_blocks=num_blocks),
        out_type=(both, jax.ShapeDtypeStruct((rows,), jnp.float32)) if backward else hidden,
        scratch_types=(
            tiled((warpgroups, STAGES, copies, ROWS, COLUMNS), jnp.dtype(bf16)),
            plgpu.Barrier(num_arrivals=copies, num_barriers=warpgroups * STAGES),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="situ_glu_backward" if backward else "situ_glu_forward",
        interpret=interpret,
    )
    return jax.tree.map(lambda array: vary_like(array, both_MG), kernel(both_MG, weight_M, *d_hidden_MF))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def weighted_situ(situ: SituGLU, both_MG: jax.Array, weight_M: jax.Array, num_blocks: int = BLOCKS, interpret=None) -> jax.Array:
    """`weight_M[m] * situ(gate, up)` of gate = both_MG[:, :F] and up = both_MG[:, F:], rounded once.

    Args:
      situ: the activation.
      both_MG: gate and up side by side, bfloat16; M and F multiples of 64.
      weight_M: float32.
      num_blocks: that run at a time, one per SM.
      interpret: Mosaic GPU's interpreter, for a CPU.

    Returns:
      hidden_MF in bfloat16. Backward, gate and up are read again and nothing else is kept.
    """
    return _run(situ, both_MG, weight_M, num_blocks=num_blocks, interpret=interpret)


def _forward(situ, both_MG, weight_M, num_blocks, interpret):
    return weighted_situ(situ, both_MG, weight_M, num_blocks, interpret), (both_MG, weight_M)


def _backward(situ, num_blocks, interpret, saved, d_hidden_MF):
    return _run(situ, *saved, d_hidden_MF, num_blocks=num_blocks, interpret=interpret)


weighted_situ.defvjp(_forward, _backward)
