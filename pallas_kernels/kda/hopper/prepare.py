"""The token-parallel half of chunked KDA on Hopper: everything of a chunk that does not need the state.

Legend: B batch, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels.

With g the log2 decays of a chunk, G their inclusive sums, k and q normalised, q scaled:

    L_ij = beta_i sum_c k_ic k_jc 2^(G_ic - G_jc), i > j        A_ij = sum_c q_ic k_jc 2^(G_ic - G_jc), i >= j
    X = (I + L)^-1 diag(beta)     Kg = k 2^G     Qg = q 2^G     Kd = k 2^(G_last - G)     decay = 2^G_last

Every exponent is a sum of g over an interval, so each is one product of a 0/1 (or sign) matrix with g, which is split into two
bf16 parts; no two large sums are subtracted. L and A need both factors bounded: 32 tokens share a reference in their middle,
which keeps |exponent| <= 16 * 5 nats (2^115.4, inside bf16); pairs across the two halves use the later half's reference,
where the columns' exponents are <= 0. Products above the diagonal may overflow; they are dropped by a select.

One persistent block per multiprocessor, two warpgroups with 64 channels each; the next chunk is fetched meanwhile.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.hopper.mma import COLUMN, ROW, WGMMA, matmuls, tile, zeros

CHUNK = 64
WIDTH = 128
HALF = 64  # channels of one warpgroup
BLOCKS = 132  # persistent blocks: one for each multiprocessor of an H100 or H200
L2_EPSILON = 1e-6


def _rows(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])


def _columns(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [1])


def _sum(matrix, axis, layout):
    return plgpu.layout_cast(jnp.sum(matrix, axis=axis), layout)


def _sigmoid(x):
    half = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return half * half


def interval_signs() -> np.ndarray:
    """Four stacked matrices [C, C]: row i times the decays g is an exponent of token i.

    Up to i from the reference of i's half (negative before it); from a token of the first half to the second half's
    reference; from the chunk's start to i; from i to the chunk's end.
    """
    row, column = np.indices((CHUNK, CHUNK))
    from_start = column <= row
    from_reference = from_start.astype(np.float32) - (column <= 32 * (row // 32) + 15)
    to_reference = (row < column) & (column <= 47) & (row < 32)
    return np.concatenate([from_reference, to_reference, from_start, column > row])


def _inverse(lower_16, distance, x_s, p_s, interpret):
    """(I + L)^-1 by block doubling: blocks [[A, 0], [C, D]] give -D^-1 C A^-1 below the diagonal; FP16 operands, FP32 sums.

    `distance` is row xor column: below 2^n inside a diagonal block of that size. No power of L is formed.
    """
    # Not a literal zero: left operands of wgmma that are constant in part gave wrong rows on the device (docs/kernels/kda.md, Traps).
    nothing = lower_16 * 0
    x = jnp.where(distance == 0, 1.0, 0.0) - jnp.where(distance < 2, lower_16, nothing).astype(jnp.float32)
    size = 2
    while size < CHUNK:
        below = jnp.where((distance >= size) & (distance < 2 * size), lower_16, nothing)
        x_s[...] = x.astype(jnp.float16)
        plgpu.commit_smem()
        [p] = matmuls([(zeros(CHUNK, CHUNK), [(below, x_s)])], interpret)
        p_s[...] = p.astype(jnp.float16)
        plgpu.commit_smem()
        [x] = matmuls([(x, [((-x).astype(jnp.float16), p_s)])], interpret)
        size *= 2
    return x


def _body(
    q_ref, k_ref, gate_ref, beta_ref, beta_again_ref, run_ref, run_again_ref, edge_ref, slope_ref, shift_ref, signs_ref,
    kg_ref, qg_ref, kd_ref, ax_ref, decay_ref,
    kq_stages, hi_stages, lo_union, col_s, cross_union, signs_s, k_sums_s, q_sums_s, kq_loaded, gate_loaded, joined, signs_loaded,
    *, num_chunks: int, num_heads: int, num_items: int, num_blocks: int, bound_log2: float, scale: float, packed: bool,
    interpret: bool,
):  # fmt: skip
    wg = lax.axis_index("wg")
    first_item = lax.axis_index("blocks")
    mine, square = pl.ds(wg * HALF, HALF), (CHUNK, CHUNK)
    lo_s, (x_s, p_s) = lo_union
    cross_s, ax_s = cross_union

    def place(item):
        return lax.rem(item, num_chunks), lax.rem(lax.div(item, num_chunks), num_heads), lax.div(item, num_chunks * num_heads)

    def fetch(item, stage):
        n, h, b = place(item)
        tokens = pl.ds(n * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h], kq_stages.at[2 * stage], kq_loaded.at[stage])
        plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h], kq_stages.at[2 * stage + 1], kq_loaded.at[stage])
        plgpu.copy_gmem_to_smem(gate_ref.at[b, tokens, h], hi_stages.at[stage], gate_loaded.at[stage])

    def vector(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def put(ref, value):
        ref[...] = value.astype(jnp.bfloat16)

    @pl.when(wg == 0)
    def _start():
        plgpu.copy_gmem_to_smem(signs_ref, signs_s, signs_loaded)
        fetch(first_item, 0)

    plgpu.barrier_wait(signs_loaded)
    reference_signs, cross_signs, start_signs, end_signs = (signs_s.at[CHUNK * i : CHUNK * (i + 1)] for i in range(4))
    rows = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=WGMMA)
    columns = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=WGMMA)

    def chunk(step, _):
        item = first_item + step * num_blocks
        n, h, b = place(item)
        tokens = pl.ds(n * CHUNK, CHUNK)
        stage = lax.rem(step, 2)
        k_s, q_s, hi_s = kq_stages.at[2 * stage], kq_stages.at[2 * stage + 1], hi_stages.at[stage]

        @pl.when((wg == 0) & (item + num_blocks < num_items))
        def _next():
            fetch(item + num_blocks, 1 - stage)

        if packed:
            run_row, run_column = vector(run_ref.at[b, tokens], ROW), vector(run_again_ref.at[b, tokens], COLUMN)
            first, last = edge_ref[b, 0, n], edge_ref[b, 1, n]
            real_row, real_column = run_row >= 0, run_column >= 0
            run_row = jnp.where(real_row, run_row, -1 - run_row)
            run_column = jnp.where(real_column, run_column, -1 - run_column)

        # Norms: each warpgroup sums over its channels.
        plgpu.barrier_wait(kq_loaded.at[stage])
        kept = plgpu.load(k_s.at[:, mine], layout=WGMMA), plgpu.load(q_s.at[:, mine], layout=WGMMA)
        k, q = (x.astype(jnp.float32) for x in kept)
        k_sums_s.at[wg][...] = _sum(k * k, 1, ROW)
        q_sums_s.at[wg][...] = _sum(q * q, 1, ROW)
        plgpu.barrier_arrive(joined.at[0])

        # Log2 decays, in two bf16 parts.
        plgpu.barrier_wait(gate_loaded.at[stage])
        raw = plgpu.load(hi_s.at[:, mine], layout=WGMMA).astype(jnp.float32)
        slope, shift = vector(slope_ref.at[h, mine], COLUMN), vector(shift_ref.at[h, mine], COLUMN)
        half = lax.rsqrt(1.0 + jnp.exp2(raw * _columns(slope, square) + _columns(shift, square)))
        g = half * half * bound_log2
        if packed:
            g = g * _rows(jnp.where(real_row, 1.0, 0.0), square)
        high = g.astype(jnp.bfloat16)
        hi_s.at[:, mine][...] = high
        put(lo_s.at[:, mine], g - high.astype(jnp.float32))
        plgpu.commit_smem()
        g_parts = hi_s.at[:, mine], lo_s.at[:, mine]

        def exponents(signs):
            return matmuls([(zeros(*square), [(signs, part) for part in g_parts])], interpret)[0]

        # Sums fall with the token, so the chunk's total is their minimum; transposed, it is one entry per row.
        [sums] = matmuls([(zeros(*square), [(part.transpose((1, 0)), start_signs.transpose((1, 0))) for part in g_parts])], interpret)
        decay = jnp.exp2(plgpu.layout_cast(jnp.min(sums, axis=1), ROW))
        if packed:
            decay = decay * jnp.where(first == last, 1.0, 0.0)
        decay_ref.at[b, h, n, mine][...] = decay

        # The two triangular matrices: the first warpgroup takes L, the second A.
        plgpu.barrier_wait(joined.at[0])
        k_scale = lax.rsqrt(vector(k_sums_s.at[0], ROW) + vector(k_sums_s.at[1], ROW) + L2_EPSILON)
        q_scale = lax.rsqrt(vector(q_sums_s.at[0], ROW) + vector(q_sums_s.at[1], ROW) + L2_EPSILON) * scale

        def normalized():
            """k and q in FP32; between their uses only the 16-bit values stay in registers."""
            nonlocal kept
            kept = lax.optimization_barrier(kept)
            return (x.astype(jnp.float32) * _rows(factor, square) for x, factor in zip(kept, (k_scale, q_scale), strict=True))

        k, q = normalized()
        relative = exponents(reference_signs)
        up = jnp.exp2(relative)
        put(k_s.at[:, mine], k * up)
        put(q_s.at[:, mine], q * up)
        put(col_s.at[:, mine], k * jnp.exp2(-relative))
        put(cross_s.at[:, mine], k * jnp.exp2(exponents(cross_signs)))  # rows of the later half are not used
        plgpu.commit_smem()
        plgpu.barrier_arrive(joined.at[1])
        plgpu.barrier_wait(joined.at[1])
        left_s = kq_stages.at[2 * stage + wg]
        near, far = matmuls([(zeros(*square), [(left_s, right.transpose((1, 0)))]) for right in (col_s, cross_s)], interpret)
        plgpu.barrier_arrive(joined.at[2])
        keep = columns + (1 - wg) <= rows
        if packed:
            keep = keep & (_rows(run_row, square) == _columns(run_column, square)) & _rows(real_row, square)
        triangle = jnp.where(keep, jnp.where((rows ^ columns) < 32, near, far), 0.0)
        # beta scales the rows of L; A is stored as it is. Kept in 16 bits from here: |L| <= 1 suits FP16.
        scores = triangle.astype(jnp.bfloat16)
        lower = (triangle * _rows(_sigmoid(vector(beta_ref.at[b, h, tokens], ROW)), square)).astype(jnp.float16)

        # The operands that meet the state.
        grown = jnp.exp2(exponents(start_signs))
        if packed:
            grown = grown * _rows(jnp.where((run_row == first) & real_row, 1.0, 0.0), square)
        plgpu.barrier_wait(joined.at[2])
        k, q = normalized()
        put(k_s.at[:, mine], -k * grown)
        put(q_s.at[:, mine], q * grown)
        left = jnp.exp2(exponents(end_signs))
        if packed:
            left = left * _rows(jnp.where(run_row == last, 1.0, 0.0), square)
        k, _ = normalized()
        put(col_s.at[:, mine], k * left)
        plgpu.commit_smem()
        plgpu.barrier_arrive(joined.at[3])
        plgpu.barrier_wait(joined.at[3])

        @pl.when(wg == 1)
        def _store():
            ax_s.at[0][...] = scores
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s, qg_ref.at[b, h, n])
            plgpu.copy_smem_to_gmem(col_s, kd_ref.at[b, h, n])
            plgpu.copy_smem_to_gmem(ax_s.at[0], ax_ref.at[b, h, n, 0])

        @pl.when(wg == 0)
        def _solve():
            plgpu.copy_smem_to_gmem(k_s, kg_ref.at[b, h, n])
            beta_column = _sigmoid(vector(beta_again_ref.at[b, h, tokens], COLUMN))
            if packed:
                beta_column = jnp.where(real_column, beta_column, 0.0)
            x = _inverse(lower, rows ^ columns, x_s, p_s, interpret) * _columns(beta_column, square)
            x_16 = x.astype(jnp.bfloat16)
            ax_s.at[1][...] = x_16
            put(ax_s.at[2], x - x_16.astype(jnp.float32))
            plgpu.commit_smem()
            for part in (1, 2):
                plgpu.copy_smem_to_gmem(ax_s.at[part], ax_ref.at[b, h, n, part])

        # Both warpgroups are done with every buffer before the next chunk writes or fetches into one.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(joined.at[4])
        plgpu.barrier_wait(joined.at[4])

    steps = lax.div(num_items - first_item + (num_blocks - 1), num_blocks)
    lax.fori_loop(0, steps, chunk, None)


def prepare(q_BTHK, k_BTHK, gate_BTHK, beta_BHT, slope_HK, shift_HK, runs, *, lower_bound: float, scale: float, interpret=None):
    """Chunk operands, a dict of [B, H, N, ...] arrays, bf16 but for the FP32 decay.

    kg (negated), qg, kd [C, K]; ax [3, C, C]: A, X, and what X's rounding to bf16 left; decay [K].

    `slope`, `shift` [H, K] give the gate's sigmoid argument times -log2(e). `runs` is None or the pair that
    `forward.chunk_runs` makes.
    """
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    num_chunks = num_tokens // CHUNK
    packed = runs is not None
    if not packed:
        runs = jnp.zeros((batch, CHUNK), jnp.int32), jnp.zeros((batch, 2, 1), jnp.int32)
    bf16 = jnp.bfloat16
    wide = jax.ShapeDtypeStruct((batch, num_heads, num_chunks, CHUNK, WIDTH), bf16)
    squares = jax.ShapeDtypeStruct((batch, num_heads, num_chunks, 3, CHUNK, CHUNK), bf16)
    num_items = num_chunks * num_heads * batch
    num_blocks = min(BLOCKS, num_items)
    body = functools.partial(
        _body,
        num_chunks=num_chunks,
        num_heads=num_heads,
        num_items=num_items,
        num_blocks=num_blocks,
        bound_log2=lower_bound * math.log2(math.e),
        scale=scale,
        packed=packed,
        interpret=interpret is not None,
    )
    kernel = plgpu.kernel(
        body,
        out_type=(wide, wide, wide, squares, jax.ShapeDtypeStruct((batch, num_heads, num_chunks, WIDTH), jnp.float32)),
        scratch_types=(
            tile((4, CHUNK, WIDTH), bf16),
            tile((2, CHUNK, WIDTH), bf16),
            plgpu.RefUnion(tile((CHUNK, WIDTH), bf16), (tile((CHUNK, CHUNK), jnp.float16), tile((CHUNK, CHUNK), jnp.float16))),
            tile((CHUNK, WIDTH), bf16),
            plgpu.RefUnion(tile((CHUNK, WIDTH), bf16), tile((3, CHUNK, CHUNK), bf16)),
            tile((4 * CHUNK, CHUNK), bf16),
            plgpu.SMEM((2, CHUNK), jnp.float32),
            plgpu.SMEM((2, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=5),
            plgpu.Barrier(),
        ),
        grid=(num_blocks,),
        grid_names=("blocks",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    run_BT, edge_B2N = runs
    # Vectors needed along rows and along columns come in twice: one load in two layouts has no solution for the compiler.
    outputs = kernel(
        q_BTHK, k_BTHK, gate_BTHK, beta_BHT, beta_BHT, run_BT, run_BT, edge_B2N, slope_HK, shift_HK, jnp.asarray(interval_signs(), bf16)
    )
    return dict(zip(("kg", "qg", "kd", "ax", "decay"), outputs, strict=True))
