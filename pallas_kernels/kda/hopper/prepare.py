"""The token-parallel half of chunked KDA on Hopper: everything of a chunk that does not need the state.

Legend: B batch, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels.

With g the log2 decays of a chunk, G their inclusive sums, k and q normalised, q scaled:

    L_ij = beta_i sum_c k_ic k_jc 2^(G_ic - G_jc), i > j        A_ij = sum_c q_ic k_jc 2^(G_ic - G_jc), i >= j
    X = (I + L)^-1 diag(beta)     Kg = k 2^G     Qg = q 2^G     Kd = k 2^(G_last - G)     decay = 2^G_last

Every exponent is a sum of g over an interval: one product of a constant 0/1/-1 matrix with g in FP16. Rounding g moves a decay
by at most 2^-12 of its logarithm, and every use sees the same rounded g. L and A need both factors bounded: 32 tokens share a
reference in their middle, which keeps |exponent| <= 16 * 5 nats (2^115.4, inside bf16); pairs across the two halves use the later
half's reference, where the columns' exponents are <= 0. Products above the diagonal may overflow; they are dropped by a select.

A persistent block per multiprocessor, three warpgroups, each with chunks of its own: they never meet, so one computes while
another waits.
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

from pallas_kernels.kda.hopper.mma import COLUMN, ROW, WGMMA, load_wide, matmuls, tile, zeros

CHUNK = 64
WIDTH = 128
HALF = 64  # channels that are worked on at once
BLOCKS = 132  # persistent blocks: one for each multiprocessor of an H100 or H200
WORKERS = 3  # warpgroups of a block; 168 registers each
LEVELS = 6  # doublings from diagonal blocks of one token to the chunk
L2_EPSILON = 1e-6
PADDED = 128  # what a padding token's code of `forward.chunk_runs` is lowered by


def rows_of(vector, shape):
    """A vector with one entry per row, as a matrix."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns_of(vector, shape):
    """A vector with one entry per column, as a matrix."""
    return lax.broadcast_in_dim(vector, shape, [1])


def vector(ref, layout):
    """A vector from global memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def leaving_document(run_ref, row, chunk):
    """The code of the document whose state leaves a chunk: its last token's, where padding has it too."""
    code = run_ref[row, chunk * CHUNK + CHUNK - 1]
    return jnp.where(code > -2, code, code + PADDED)


def sum_of_rows(matrix):
    """The sum of every row."""
    return plgpu.layout_cast(jnp.sum(matrix, axis=1), ROW)


def interval_signs() -> np.ndarray:
    """Four matrices [4, C, C]: row i times the decays g is an exponent of token i.

    From the reference of i's half to i (negative before it); from i to the second half's reference (negative after it); from the
    chunk's start to i; from i to the chunk's end.
    """
    row, column = np.indices((CHUNK, CHUNK))
    from_start = (column <= row).astype(np.float32)
    from_reference = from_start - (column <= 32 * (row // 32) + 15)
    return np.stack([from_reference, (column <= 47) - from_start, from_start, column > row])


def levels() -> np.ndarray:
    """[C, C]: l where an entry joins two diagonal blocks of size 2^l to one of twice the size, -1 on the diagonal."""
    row, column = np.indices((CHUNK, CHUNK))
    return np.floor(np.log2(np.maximum(row ^ column, 0.5)))


def _inverse(lower, level, x_s, p_s, interpret):
    """(I + L)^-1 by block doubling: blocks [[A, 0], [C, D]] give -D^-1 C A^-1 below the diagonal; FP16 operands, FP32 sums.

    No power of L is formed: all entries stay within [-1, 1]. `level` is `levels()` in FP16; masks are arithmetic on pairs of it.
    """

    def mask(number):
        distance = level - number
        return jnp.maximum(1 - distance * distance, 0)

    x = (mask(-1) - lower * mask(0)).astype(jnp.float32)
    for number in range(1, LEVELS):
        x_s[...] = x.astype(jnp.float16)
        plgpu.commit_smem()
        [p] = matmuls([(zeros(CHUNK, CHUNK), [(lower * mask(number), x_s)])], interpret)
        p_s[...] = p.astype(jnp.float16)
        plgpu.commit_smem()
        [x] = matmuls([(x, [((-x).astype(jnp.float16), p_s)])], interpret)
    return x


def _body(
    q_ref, k_ref, gate_ref, beta_ref, beta_again_ref, run_ref, affine_ref, signs_ref, levels_ref, zero_ref,
    kg_ref, qg_ref, kd_ref, ax_ref, decay_ref,
    k_all, q_all, gate_union, near_union, far_union, signs_all, loaded, signs_loaded,
    *, num_chunks: int, num_heads: int, num_items: int, items_each: int, bound_log2: float, scale: float, packed: bool,
    interpret: bool,
):  # fmt: skip
    wg = lax.axis_index("wg")
    start = (lax.axis_index("blocks") * WORKERS + wg) * items_each  # neighbours share a head, whose vectors stay in the cache
    end = jnp.minimum(start + items_each, num_items)
    square = (CHUNK, CHUNK)

    def place(item):
        return lax.rem(item, num_chunks), lax.rem(lax.div(item, num_chunks), num_heads), lax.div(item, num_chunks * num_heads)

    def fetch(item):
        n, h, b = place(item)
        tokens = pl.ds(n * CHUNK, CHUNK)
        for ref, target in ((k_ref, k_all), (q_ref, q_all), (gate_ref, gate_union[0])):
            plgpu.copy_gmem_to_smem(ref.at[b, tokens, h], target.at[wg], loaded.at[wg])

    def put(ref, value):
        ref[...] = value.astype(jnp.bfloat16)

    def tiles(zero):
        """The warpgroup's memory. Addresses, descriptors and masks are made from a zero that was just read, so where they are used; else
        the compiler makes them all before the loop, and they fill the registers.
        """
        return [x.at[wg + zero] for x in (k_all, q_all, *gate_union, *near_union, *far_union)]

    def numbers(zero, layout):
        return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) + zero

    @pl.when(wg == 0)
    def _start():
        plgpu.copy_gmem_to_smem(signs_ref, signs_all, signs_loaded)

    @pl.when(start < end)
    def _first():
        fetch(start)

    plgpu.barrier_wait(signs_loaded)

    def chunk(item, _):
        zero = zero_ref[0]
        n, h, b = place(item)
        tokens = pl.ds(n * CHUNK, CHUNK)
        k_s, q_s, *_ = tiles(zero)
        if packed:
            begin, last = vector(run_ref.at[b, tokens], ROW), leaving_document(run_ref, b, n)
        plgpu.barrier_wait(loaded.at[wg])

        def norm(ref):
            total = 0.0
            for c in range(WIDTH // HALF):
                x = load_wide(ref.at[:, c * HALF : (c + 1) * HALF], interpret)
                total = total + sum_of_rows(x * x)
            return lax.rsqrt(total + L2_EPSILON)

        k_scale, q_scale = norm(k_s), norm(q_s) * scale
        if packed:
            q_scale = jnp.where(begin > -2, q_scale, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's X has left

        def half(c, triangles):
            zero = zero_ref[0]
            k_s, q_s, kd_s, g_s, near_s, _, far_s, _ = tiles(zero)
            reference_signs, far_signs, start_signs, end_signs = (signs_all.at[zero + i] for i in range(4))
            mine = pl.ds(c * HALF, HALF)
            raw = load_wide(kd_s.at[:, mine], interpret)
            slope, shift = affine_ref[h, 0, 0], vector(affine_ref.at[h, 1, mine], COLUMN)
            root = lax.rsqrt(1.0 + jnp.exp2(raw * slope + columns_of(shift, square)))
            # Documents' masks go into what scales the rows anyway; of padding only q, g and beta need to be zero.
            bound, q_entering, k_entering, k_leaving = bound_log2, q_scale, k_scale, k_scale
            if packed:
                begin_here = begin + zero
                bound = rows_of(jnp.where(begin_here > -2, bound_log2, 0.0), square)
                q_entering, k_entering = (jnp.where(begin_here < 0, x, 0.0) for x in (q_scale, k_scale))
                k_leaving = jnp.where(begin_here == last, k_scale, 0.0)
            g = root * root * bound
            g_s.at[:, mine][...] = g.astype(jnp.float16)
            plgpu.commit_smem()

            def exponents(signs):
                return matmuls([(zeros(*square), [(signs, g_s.at[:, mine])])], interpret)[0]

            # Sums fall with the token, so the chunk's total is the least of the last eight; transposed, it is one entry per row.
            last_rows = start_signs.at[CHUNK - 8 : CHUNK].transpose((1, 0))
            [sums] = matmuls([(zeros(CHUNK, 8), [(g_s.at[:, mine].transpose((1, 0)), last_rows)])], interpret)
            decay = jnp.exp2(plgpu.layout_cast(jnp.min(sums, axis=1), ROW))
            if packed:
                decay = decay * jnp.where(last < 0, 1.0, 0.0)
            decay_ref.at[b, h, n, mine][...] = decay

            def key():
                return load_wide(k_s.at[:, mine], interpret)

            def query():
                return load_wide(q_s.at[:, mine], interpret)

            put(far_s, key() * rows_of(k_scale, square) * jnp.exp2(exponents(far_signs)))
            relative = exponents(reference_signs)
            put(near_s, key() * rows_of(k_scale, square) * jnp.exp2(-relative))
            up = jnp.exp2(relative)
            k_up, q_up = (key() * up).astype(jnp.bfloat16), (query() * up).astype(jnp.bfloat16)
            plgpu.commit_smem()
            # Rows of the first half meet the columns of `near`, those of the second half the columns of `far`.
            early = rows_of(numbers(zero, ROW) < 32, square)
            early, late = (jnp.where(early, *pair).astype(jnp.bfloat16) for pair in ((1.0, 0.0), (0.0, 1.0)))

            def grow(triangle, left):  # one at a time: both at once do not fit the registers
                return matmuls([(triangle, [(left * early, near_s.transpose((1, 0))), (left * late, far_s.transpose((1, 0)))])], interpret)[
                    0
                ]

            triangles = grow(triangles[0], k_up), grow(triangles[1], q_up)
            grown = jnp.exp2(exponents(start_signs))
            put(q_s.at[:, mine], query() * rows_of(q_entering, square) * grown)
            k = key()
            put(k_s.at[:, mine], -(k * rows_of(k_entering, square)) * grown)
            left = jnp.exp2(exponents(end_signs))
            plgpu.commit_smem()  # every warp's product has read g
            put(kd_s.at[:, mine], k * rows_of(k_leaving, square) * left)
            return triangles

        lower, scores = lax.fori_loop(0, WIDTH // HALF, half, (zeros(*square), zeros(*square)))
        zero = zero_ref[0]
        n, h, b = place(item + zero)
        tokens = pl.ds(n * CHUNK, CHUNK)
        k_s, q_s, kd_s, _, near_s, p_s, far_s, x_s = tiles(zero)
        rows, columns = numbers(zero, ROW), columns_of(numbers(zero, COLUMN), square)
        if packed:  # from the document's begin to the token is one comparison of unsigned numbers
            rows, columns = (x.astype(jnp.uint32) for x in (rows - begin, columns - rows_of(begin, square)))
        rows = rows_of(rows, square)
        put(near_s, jnp.where(columns <= rows, scores * rows_of(q_scale, square), 0.0))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s, kg_ref.at[b, h, n])
        plgpu.copy_smem_to_gmem(q_s, qg_ref.at[b, h, n])
        plgpu.copy_smem_to_gmem(kd_s, kd_ref.at[b, h, n])
        plgpu.copy_smem_to_gmem(near_s, ax_ref.at[b, h, n, 0])
        row_scale = vector(beta_ref.at[b, h, tokens], ROW) * k_scale
        # |L| <= 1 suits FP16.
        lower = jnp.where(columns < rows, lower * rows_of(row_scale, square), 0.0).astype(jnp.float16)
        level = plgpu.load(levels_ref, layout=WGMMA, optimized=False)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(item + 1 < end)
        def _next():
            fetch(item + 1)

        x = _inverse(lower, level, x_s, p_s, interpret)
        x = x * columns_of(vector(beta_again_ref.at[b, h, tokens], COLUMN), square)
        x_16 = lax.optimization_barrier(x.astype(jnp.bfloat16))
        put(far_s, x_16)
        plgpu.commit_smem()  # every warp's product has read P
        put(near_s, x - x_16.astype(jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(far_s, ax_ref.at[b, h, n, 1])
        plgpu.copy_smem_to_gmem(near_s, ax_ref.at[b, h, n, 2])

    lax.fori_loop(start, end, chunk, None)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("lower_bound", "scale", "interpret"))  # lowered once for all the layers that call it
def prepare(q_BTHK, k_BTHK, gate_BTHK, beta_BHT, affine_H2K, run_BT, *, lower_bound: float, scale: float, interpret=None):
    """Chunk operands, a dict of [B, H, N, ...] arrays, bf16 but for the FP32 decay.

    kg (negated), qg, kd [C, K]; ax [3, C, C]: A, X, and what X's rounding to bf16 left; decay [K].

    `beta` is the step size, 0 at padding. `affine` is `forward.gate_affine`'s, `run` None or `forward.chunk_runs`'.
    """
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    num_chunks = num_tokens // CHUNK
    packed = run_BT is not None
    if not packed:
        run_BT = np.zeros((1, 1), np.int32)  # not read; a constant, which no kernel fills
    bf16, fp16 = jnp.bfloat16, jnp.float16
    wide = jax.ShapeDtypeStruct((batch, num_heads, num_chunks, CHUNK, WIDTH), bf16)
    squares = jax.ShapeDtypeStruct((batch, num_heads, num_chunks, 3, CHUNK, CHUNK), bf16)
    num_items = num_chunks * num_heads * batch
    items_each = -(-num_items // (BLOCKS * WORKERS))
    num_blocks = -(-num_items // (items_each * WORKERS))
    body = functools.partial(
        _body,
        num_chunks=num_chunks,
        num_heads=num_heads,
        num_items=num_items,
        items_each=items_each,
        bound_log2=lower_bound * math.log2(math.e),
        scale=scale,
        packed=packed,
        interpret=interpret is not None,
    )
    chunk, block = (WORKERS, CHUNK, WIDTH), (WORKERS, CHUNK, CHUNK)
    kernel = plgpu.kernel(
        body,
        out_type=(wide, wide, wide, squares, jax.ShapeDtypeStruct((batch, num_heads, num_chunks, WIDTH), jnp.float32)),
        scratch_types=(
            tile(chunk, bf16),
            tile(chunk, bf16),
            plgpu.RefUnion(tile(chunk, bf16), tile(chunk, fp16)),
            plgpu.RefUnion(tile(block, bf16), tile(block, fp16)),
            plgpu.RefUnion(tile(block, bf16), tile(block, fp16)),
            tile((4, CHUNK, CHUNK), fp16),
            plgpu.Barrier(num_arrivals=3, num_barriers=WORKERS),
            plgpu.Barrier(),
        ),
        grid=(num_blocks,),
        grid_names=("blocks",),
        num_threads=WORKERS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    constants = jnp.asarray(interval_signs(), fp16), jnp.asarray(levels(), fp16), jnp.zeros(1, jnp.int32)
    # A vector needed along rows and along columns comes in twice: one load in two layouts has no solution for the compiler.
    outputs = kernel(q_BTHK, k_BTHK, gate_BTHK, beta_BHT, beta_BHT, run_BT, affine_H2K, *constants)
    return dict(zip(("kg", "qg", "kd", "ax", "decay"), outputs, strict=True))
