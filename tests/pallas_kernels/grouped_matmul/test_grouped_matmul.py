"""Grouped matmul against a dense float64 loop over the groups: values, gradients, cost and memory.

Shapes: M rows, K in, N out, E groups.
"""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_matmul as package
from pallas_kernels.grouped_matmul import grouped_matmul, reference
from pallas_kernels.target import Target
from tests.x64 import float64

pytestmark = pytest.mark.numerics

# One block and many, M that blocks do not divide, more groups than rows, widths of one.
SHAPES_MEKN = [(96, 3, 8, 12), (83, 7, 5, 4), (10, 16, 3, 6), (256, 2, 1, 1)]


def value_and_gradients(x_MK, w_EKN, sizes_E, dy_MN):
    y_MN, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E), x_MK, w_EKN)
    return y_MN, *pullback(dy_MN)


compute = jax.jit(value_and_gradients)


def chunked_compute(monkeypatch, matrices):
    """The same with room for only so many matrices in a chunk, so that the loops run on small shapes."""
    whole = reference._blocks

    def small(M, w_EKN):
        blocks = whole(M, w_EKN)
        return blocks._replace(C=min(blocks.T, matrices), D=min(w_EKN.shape[0], matrices))

    monkeypatch.setattr(reference, "_blocks", small)
    return jax.jit(lambda *arguments: value_and_gradients(*arguments))


def dense(x_MK, w_EKN, sizes_E, dy_MN):
    x_MK, w_EKN, dy_MN = (np.asarray(a, np.float64) for a in (x_MK, w_EKN, dy_MN))
    y_MN, dx_MK, dw_EKN = np.zeros_like(dy_MN), np.zeros_like(x_MK), np.zeros_like(w_EKN)
    start = 0
    for e, size in enumerate(np.asarray(sizes_E)):
        rows = slice(start, start + size)
        y_MN[rows], dx_MK[rows], dw_EKN[e] = x_MK[rows] @ w_EKN[e], dy_MN[rows] @ w_EKN[e].T, x_MK[rows].T @ dy_MN[rows]
        start += size
    return y_MN, dx_MK, dw_EKN


def arrays(M, E, K, N, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((M, K), (E, K, N), (M, N)))


def sizes_from(fractions, M):
    """Group sizes that sum to at most M, from numbers in 0..M taken as cuts."""
    cuts = np.minimum(np.sort(fractions), M)
    return jnp.asarray(np.diff(cuts, prepend=0), jnp.int32)


def assert_equal_to_dense(compute, shape, sizes_E, tolerance=1e-12):
    with float64():
        x_MK, w_EKN, dy_MN = arrays(*shape)
        results = compute(x_MK, w_EKN, jnp.asarray(sizes_E, jnp.int32), dy_MN)
        for name, got, wanted in zip(("y", "dx", "dw"), results, dense(x_MK, w_EKN, sizes_E, dy_MN), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} for sizes {sizes_E}")


@pytest.mark.parametrize("shape", SHAPES_MEKN)
@settings(max_examples=25)
@given(data=st.data())
def test_equals_dense_for_any_sizes(shape, data):
    M, E = shape[:2]
    cuts = data.draw(st.lists(st.integers(0, M), min_size=E, max_size=E))
    assert_equal_to_dense(compute, shape, sizes_from(cuts, M))


@pytest.mark.parametrize("matrices", [1, 3])
def test_loops_over_chunks_equal_dense(monkeypatch, matrices):
    M, E, K, N = shape = (131, 7, 5, 4 + matrices)
    compute = chunked_compute(monkeypatch, matrices)
    rng = np.random.default_rng(1)
    some = [sizes_from(rng.integers(0, M + 1, E), M) for _ in range(12)]
    for sizes_E in [*some, [0] * E, [M] + [0] * (E - 1), [0] * (E - 1) + [M], [16, 16, 0, 0, 32, 16, 48], [1] * E]:
        assert_equal_to_dense(compute, shape, sizes_E)


@pytest.mark.parametrize("sizes_E", [[0, 0, 0], [96, 0, 0], [0, 96, 0], [0, 0, 96], [16, 32, 48], [15, 17, 1], [96, 0, 0], [1, 0, 94]])
def test_special_sizes(sizes_E):
    assert_equal_to_dense(compute, SHAPES_MEKN[0], sizes_E)


def test_rows_past_the_sum_do_not_matter_even_if_not_finite():
    x_MK, w_EKN, dy_MN = arrays(96, 3, 8, 12, np.float32)
    sizes_E = jnp.array([20, 0, 31])
    clean = compute(x_MK, w_EKN, sizes_E, dy_MN)
    spoiled = compute(x_MK.at[51:].set(jnp.nan), w_EKN, sizes_E, dy_MN.at[51:].set(jnp.inf))
    for a, b in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(clean[0][51:], 0)
    np.testing.assert_array_equal(clean[1][51:], 0)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_relative_error_and_dtypes(dtype, bound):
    x_MK, w_EKN, dy_MN = arrays(512, 4, 64, 32, dtype)
    sizes_E = jnp.array([300, 0, 100, 90])
    for got, wanted in zip(compute(x_MK, w_EKN, sizes_E, dy_MN), dense(x_MK, w_EKN, sizes_E, dy_MN), strict=True):
        assert got.dtype == dtype
        assert np.linalg.norm(np.asarray(got, np.float64) - wanted) < bound * np.linalg.norm(wanted)


def test_bfloat16_weight_gradient_accumulates_in_float32():
    M = 2048
    x_MK, w_EKN, dy_MN = jnp.ones((M, 2), jnp.bfloat16), jnp.ones((2, 2, 2), jnp.bfloat16), jnp.ones((M, 2), jnp.bfloat16)
    _, _, dw_EKN = compute(x_MK, w_EKN, jnp.array([M - 8, 8]), dy_MN)
    np.testing.assert_array_equal(np.asarray(dw_EKN[:, 0, 0], np.float32), [M - 8, 8])  # a bfloat16 sum of ones stops at 256


def test_both_sums_of_parts_agree():
    rng = np.random.default_rng(0)
    sum_DKN, part_CKN = (jnp.asarray(rng.normal(size=(n, 3, 5)), jnp.float32) for n in (4, 7))
    slot_C = jnp.array([-1, 0, 0, 2, 2, 3, 4])
    part_CKN = part_CKN.at[0].set(jnp.nan).at[6].set(jnp.nan)  # these belong nowhere
    in_order, by_product = (jax.jit(f)(sum_DKN, part_CKN, slot_C) for f in (reference._add_in_order, reference._add_by_product))
    assert np.isfinite(in_order).all()
    np.testing.assert_allclose(in_order, by_product, rtol=1e-6, atol=1e-6)


def test_under_scan_checkpoint_and_shard_map():
    x_MK, w_EKN, dy_MN = arrays(64, 4, 6, 6, np.float32)
    sizes_E = jnp.array([30, 0, 20, 5])

    def loss(x_MK, w_LEKN):
        layer = jax.checkpoint(lambda x, w: (grouped_matmul(x, w, sizes_E), None))
        return jnp.sum(jax.lax.scan(layer, x_MK, w_LEKN)[0] * dy_MN)

    w_LEKN = jnp.stack([w_EKN, w_EKN[::-1]])
    plain = jax.jit(jax.grad(loss, (0, 1)))(x_MK, w_LEKN)
    with float64():
        first = dense(x_MK, w_LEKN[0], sizes_E, dy_MN)[0]
        _, d_first, dw_second = dense(first, w_LEKN[1], sizes_E, dy_MN)
        _, dx, dw_first = dense(x_MK, w_LEKN[0], sizes_E, d_first)
    for got, wanted in zip(plain, (dx, np.stack([dw_first, dw_second])), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)

    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows, everywhere = jax.sharding.PartitionSpec("fsdp"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(lambda x, w: grouped_matmul(x, w, sizes_E), mesh=mesh, in_specs=(rows, everywhere), out_specs=rows)
    _, pullback = jax.vjp(jax.jit(sharded), x_MK, w_EKN)
    for got, wanted in zip(pullback(dy_MN), compute(x_MK, w_EKN, sizes_E, dy_MN)[1:], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowers_for_every_platform(platform):
    shapes = specifications(512, 4, 64, 32, "bfloat16")
    text = compute.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert "ragged" not in text and "custom_call" not in text


def test_respects_the_default_matmul_precision():
    x_MK, w_EKN, dy_MN = arrays(64, 2, 8, 8, np.float32)
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(value_and_gradients)(x_MK, w_EKN, jnp.array([30, 20]), dy_MN))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST") > 0


def specifications(M, E, K, N, dtype="float32"):
    return [jax.ShapeDtypeStruct(*s) for s in (((M, K), dtype), ((E, K, N), dtype), ((E,), "int32"), ((M, N), dtype))]


def compiled(*shape):
    return jax.jit(value_and_gradients).lower(*specifications(*shape)).compile()


@pytest.mark.parametrize(("shape", "bound"), [((8192, 16, 64, 128), 1.6), ((16384, 64, 32, 32), 1.6)])
def test_operations_follow_the_rows(fresh_compilation, shape, bound):
    M, E, K, N = shape
    flops = compiled(*shape).cost_analysis()["flops"]
    assert flops < bound * 6 * M * K * N  # a dense computation takes E times that


@pytest.mark.slow
def test_memory_follows_rows_and_matrices(fresh_compilation):
    M, E, K, N = 512, 64, 512, 512
    assert compiled(M, E, K, N).memory_analysis().temp_size_in_bytes < E * K * N * 4 / 2
    M, E, K, N = 16384, 512, 16, 16
    assert compiled(M, E, K, N).memory_analysis().temp_size_in_bytes < E * M * 4 / 2


@pytest.mark.slow
def test_time_follows_the_rows():
    """CPU time, since other processes stretch the clock; a dense computation over 64 groups would take 64 times one matmul's."""
    M, E, K, N = 8192, 64, 64, 64
    x_MK, w_EKN, dy_MN = arrays(M, E, K, N, np.float32)
    one_matmul = jax.jit(lambda x, w, sizes, dy: (x @ w[0], dy @ w[0].T, x.T @ dy))
    for sizes_E in (np.full(E, M // E), np.eye(1, E)[0] * M, np.eye(1, E)[0] * (M // 2) + M // 2 // E):
        seconds = [cpu_seconds(partial(f, x_MK, w_EKN, jnp.asarray(sizes_E, jnp.int32), dy_MN)) for f in (compute, one_matmul)]
        assert seconds[0] < 8 * seconds[1]  # measured: 3


def cpu_seconds(call):
    jax.block_until_ready(call())
    taken = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(4):
            jax.block_until_ready(call())
        taken.append(time.process_time() - start)
    return min(taken)


def test_empty_arrays():
    sizes_E = jnp.zeros(2, jnp.int32)
    assert grouped_matmul(jnp.ones((0, 3)), jnp.ones((2, 3, 4)), sizes_E).shape == (0, 4)
    np.testing.assert_array_equal(grouped_matmul(jnp.ones((5, 0)), jnp.ones((2, 0, 4)), sizes_E), np.zeros((5, 4)))


@pytest.mark.parametrize(
    ("x", "w", "sizes", "error", "words"),
    [
        ((4, 3), (2, 5, 4), np.zeros(2, np.int32), ValueError, "3 wide"),
        ((4, 3, 1), (2, 3, 4), np.zeros(2, np.int32), ValueError, "rows"),
        ((4, 3), (2, 3, 4), np.zeros(3, np.int32), ValueError, "3 sizes, 2 matrices"),
        ((4, 3), (2, 3, 4), np.zeros(2, np.float32), TypeError, "integers"),
    ],
)
def test_bad_arguments(x, w, sizes, error, words):
    with pytest.raises(error, match=words):
        grouped_matmul(jnp.ones(x), jnp.ones(w), jnp.asarray(sizes))


def test_bad_dtypes_and_implementation():
    x_MK, w_EKN, sizes_E = jnp.ones((4, 3)), jnp.ones((2, 3, 4)), jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match="one dtype"):
        grouped_matmul(x_MK.astype(jnp.bfloat16), w_EKN, sizes_E)
    with pytest.raises(ValueError, match="'fast'"):
        grouped_matmul(x_MK, w_EKN, sizes_E, implementation="fast")


@pytest.mark.parametrize(
    ("platform", "k", "dtype", "chosen", "words"),
    [
        ("cpu", 512, jnp.bfloat16, "xla", "GPUs and TPUs"),
        ("gpu", 512, jnp.bfloat16, "hopper", "Hopper"),
        ("gpu", 64, jnp.bfloat16, "hopper", "Hopper"),
        ("gpu", 96, jnp.bfloat16, "xla", "K = 96"),
        ("gpu", 512, jnp.float32, "xla", "float32"),
    ],
)
def test_choice_by_platform_and_shape(monkeypatch, platform, k, dtype, chosen, words):
    if jax.__version_info__ < (0, 11):
        pytest.skip("the Hopper kernels need JAX 0.11")
    from pallas_kernels.grouped_matmul import hopper

    monkeypatch.setattr(package, "target", lambda: Target(platform, 1))
    monkeypatch.setattr(hopper, "platform_refusal", lambda: None)
    shapes = (jax.ShapeDtypeStruct((64, k), dtype), jax.ShapeDtypeStruct((4, k, 256), dtype))
    implementation, reason = package.choose(*shapes)
    assert implementation == chosen and words in reason


def test_the_choice_is_logged_once(caplog):
    package._log_once.cache_clear()
    x_MK, w_EKN, sizes_E = jnp.ones((4, 2)), jnp.ones((1, 2, 2)), jnp.array([4])
    with caplog.at_level("INFO", logger="pallas_kernels.grouped_matmul"):
        grouped_matmul(x_MK, w_EKN, sizes_E)
        grouped_matmul(x_MK, w_EKN, sizes_E)
    assert [record.message for record in caplog.records] == ["grouped_matmul on cpu: xla, since the kernels are for GPUs and TPUs"]
