"""Hopper kernels of the grouped matmul: the tables, the kernels interpreted, lowered for cuda, and run on a GPU.

Shapes: M rows, K in, N out, E groups, T tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernel API and interpreter that the kernels use come with JAX 0.11", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import hopper
from pallas_kernels.grouped_matmul.hopper_rows import RowsConfig, row_tiles, rows_matmul
from pallas_kernels.grouped_matmul.hopper_segments import partial_sums, segment_rows, segments
from pallas_kernels.grouped_matmul.hopper_weights import WeightsConfig, choose_config, weights_gradient

M, K, N = 96, 128, 128  # what is interpreted: two tiles of rows, ragged in most draws
TOLERANCE = {jnp.bfloat16: 3e-3, jnp.float32: 1e-5}
SIZES = {
    "ragged": [11, 0, 66, 3],  # rows past the sum
    "one group holds everything": [0, 0, 96, 0],
    "no rows": [0, 0, 0, 0],
    "tiny": [1, 2, 0, 5],
}


def dense(x_MK, w_EKN, sizes_E, dy_MN):
    """y, dx and dw by float64 loops over the groups."""
    x_MK, w_EKN, dy_MN = (np.asarray(array, np.float64) for array in (x_MK, w_EKN, dy_MN))
    y_MN, dx_MK, dw_EKN = np.zeros_like(dy_MN), np.zeros_like(x_MK), np.zeros_like(w_EKN)
    for group, (start, size) in enumerate(zip(np.cumsum(sizes_E) - sizes_E, sizes_E, strict=True)):
        rows = slice(start, start + size)
        y_MN[rows], dx_MK[rows] = x_MK[rows] @ w_EKN[group], dy_MN[rows] @ w_EKN[group].T
        dw_EKN[group] = x_MK[rows].T @ dy_MN[rows]
    return y_MN, dx_MK, dw_EKN


def arrays(sizes_E, rows=M, k=K, n=N, seed=0):
    """x, w, dy in bfloat16; what rows past the groups hold must not matter, so they hold NaN."""
    rng = np.random.default_rng(seed)
    x_MK, w_EKN, dy_MN = (rng.normal(size=shape) for shape in ((rows, k), (len(sizes_E), k, n), (rows, n)))
    x_MK[sum(sizes_E) :] = dy_MN[sum(sizes_E) :] = np.nan
    return tuple(jnp.asarray(array, jnp.bfloat16) for array in (x_MK, w_EKN, dy_MN))


def relative_error(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_no_race():
    """JAX 0.12 raises at a race; 0.11 prints it and keeps its state."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found


@functools.cache
def interpreted():
    """The kernels on two interpreted SMs, compiled once for all sizes."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    walking = RowsConfig(max_rows=64, stages=2, num_sms=2)
    rows = functools.partial(rows_matmul, config=walking, interpret=interpret)
    listed = functools.partial(rows_matmul, config=dataclasses.replace(walking, walked=0), interpret=interpret)
    config = WeightsConfig(tile_n=128, stages=2, num_sms=2)
    weights = functools.partial(weights_gradient, config=config, interpret=interpret)
    buffered = dataclasses.replace(config, slots=2)
    return {
        "forward": jax.jit(rows),
        "forward from a list": jax.jit(listed),
        "grad_rows": jax.jit(functools.partial(rows, transpose_w=True)),
        "grad_weights": jax.jit(weights),
        "accumulate": jax.jit(lambda x, dy, sizes, total: weights(x, dy, sizes, accumulate_into=total, config=buffered)),
    }


# Sizes of 8 groups among at most 800 rows: one shape, so that a table compiles once.
sizes_strategy = st.lists(st.one_of(st.just(0), st.integers(0, 100)), min_size=8, max_size=8)
tables = {rows: jax.jit(functools.partial(row_tiles, num_rows=800, config=RowsConfig(max_rows=rows))) for rows in (64, 256)}
SEGMENT = 64
cut = jax.jit(functools.partial(segments, length=SEGMENT, partial=partial_sums(800, SEGMENT)))
whole = jax.jit(functools.partial(segments, length=None, partial=0))


@settings(max_examples=60)
@given(sizes=sizes_strategy, max_rows=st.sampled_from(list(tables)))
def test_row_tiles_cover_each_row_once_and_waste_less_than_64_rows_a_group(sizes, max_rows):
    config, rows, past = RowsConfig(max_rows=max_rows), 800, 800 - sum(sizes)
    tiles_T4, count_1 = jax.device_get(tables[max_rows](jnp.asarray(sizes)))
    assert count_1[0] <= len(tiles_T4)
    owner, covered = np.repeat(np.arange(len(sizes) + 1), [*sizes, past]), np.zeros(rows, int)
    multiplied = np.zeros(len(sizes) + 1, int)
    for group, first, stored, end in tiles_T4[: count_1[0]]:
        assert first % 8 == 0 and 0 <= stored < end <= max_rows
        assert (owner[first + stored : first + end] == group).all()
        covered[first + stored : first + end] += 1
        multiplied[group] += -(-end // config.unit) * config.unit
    assert (covered == 1).all()
    assert (multiplied - [*sizes, past] < 64).all()


@settings(max_examples=30)
@given(sizes=sizes_strategy)
def test_whole_groups_are_listed_once_largest_first(sizes):
    segments_T8 = jax.device_get(whole(jnp.asarray(sizes)))
    assert sorted(segments_T8[:, 0]) == list(range(len(sizes)))
    starts = np.cumsum(sizes) - sizes
    for group, first, head, rows, pieces, is_cut, total, count in segments_T8:
        assert rows - head == sizes[group] and first + head == starts[group] and (first % 8 == 0 or not rows)
        assert (pieces, is_cut, total, count) == (1, 0, sum(sizes), len(sizes))
    assert (np.diff(np.asarray(sizes)[segments_T8[:, 0]]) <= 0).all()


@settings(max_examples=60)
@given(sizes=st.one_of(sizes_strategy, st.integers(0, 800).map(lambda size: [0, 3, size, 0, 0, 0, 0, 0])))
def test_segments_cover_each_row_once_and_those_of_cut_groups_come_first(sizes):
    segments_T8 = jax.device_get(cut(jnp.asarray(sizes)))
    (total,), (count,) = set(segments_T8[:, 6]), set(segments_T8[:, 7])
    owner, covered, numbers = np.repeat(np.arange(len(sizes)), sizes), np.zeros(sum(sizes), int), {}
    for number, (group, first, head, rows, pieces, is_cut, *_) in enumerate(segments_T8[:count]):
        assert (first % 8 == 0 or not rows) and rows - head <= 1.5 * SEGMENT
        assert (owner[first + head : first + rows] == group).all()
        covered[first + head : first + rows] += 1
        numbers.setdefault(group, []).append(number)
        assert is_cut == (sizes[group] > 1.5 * SEGMENT) and (is_cut or pieces == 1) and number - numbers[group][0] < pieces
    assert total == sum(sizes) and (covered == 1).all() and sorted(numbers) == list(range(len(sizes)))
    assert (segments_T8[count:, 5] == 0).all() and (np.diff(segments_T8[:count, 5]) <= 0).all()
    assert sum(segments_T8[:count, 5]) <= partial_sums(800, SEGMENT)
    assert all(len(found) == segments_T8[found[0], 4] and found[-1] - found[0] == len(found) - 1 for found in numbers.values())


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("quantity", ["forward", "forward from a list", "grad_rows"])
@pytest.mark.parametrize("case", SIZES)
def test_rows_kernel_interpreted(case, quantity):
    x_MK, w_EKN, dy_MN = arrays(SIZES[case])
    y_MN, dx_MK, _ = dense(x_MK, w_EKN, SIZES[case], dy_MN)
    rows, expected = (x_MK, y_MN) if quantity.startswith("forward") else (dy_MN, dx_MK)
    actual = interpreted()[quantity](rows, w_EKN, jnp.asarray(SIZES[case], jnp.int32))
    assert actual.dtype == jnp.bfloat16 and relative_error(actual, expected) < TOLERANCE[jnp.bfloat16]
    assert_no_race()


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("case", SIZES)
def test_weights_kernel_interpreted(case):
    x_MK, w_EKN, dy_MN = arrays(SIZES[case])
    expected = dense(x_MK, w_EKN, SIZES[case], dy_MN)[2]
    sizes_E = jnp.asarray(SIZES[case], jnp.int32)
    actual = interpreted()["grad_weights"](x_MK, dy_MN, sizes_E)
    assert actual.dtype == jnp.bfloat16 and relative_error(actual, expected) < TOLERANCE[jnp.bfloat16]
    before = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    total = interpreted()["accumulate"](x_MK, dy_MN, sizes_E, jnp.asarray(before))
    assert total.dtype == jnp.float32 and relative_error(total, before + expected) < TOLERANCE[jnp.float32]
    assert_no_race()


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(("k", "n"), [(64, 64), (64, 192), (128, 256)])
def test_kernels_interpreted_with_matrices_narrower_than_a_tile(k, n):
    interpret, sizes = plgpu.InterpretGPUParams(detect_races=True), SIZES["ragged"]
    x_MK, w_EKN, dy_MN = arrays(sizes, k=k, n=n)
    rows = functools.partial(rows_matmul, config=RowsConfig(max_rows=64, stages=2, num_sms=2), interpret=interpret)
    weights = WeightsConfig(tile_n=choose_config(M, len(sizes), k, n, jnp.bfloat16, False).tile_n, stages=2, num_sms=2)
    sizes_E = jnp.asarray(sizes, jnp.int32)
    actual = (
        jax.jit(rows)(x_MK, w_EKN, sizes_E),
        jax.jit(functools.partial(rows, transpose_w=True))(dy_MN, w_EKN, sizes_E),
        jax.jit(functools.partial(weights_gradient, config=weights, interpret=interpret))(x_MK, dy_MN, sizes_E),
    )
    for value, expected in zip(actual, dense(x_MK, w_EKN, sizes, dy_MN), strict=True):
        assert relative_error(value, expected) < TOLERANCE[jnp.bfloat16]
    assert_no_race()


@pytest.mark.slow
@pytest.mark.numerics
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, M), min_size=4, max_size=4))
def test_kernels_interpreted_for_any_sizes(cuts):
    sizes = np.diff(sorted([0, *cuts]))
    x_MK, w_EKN, dy_MN = arrays(sizes)
    y_MN, _, dw_EKN = dense(x_MK, w_EKN, sizes, dy_MN)
    sizes_E = jnp.asarray(sizes, jnp.int32)
    assert relative_error(interpreted()["forward"](x_MK, w_EKN, sizes_E), y_MN) < TOLERANCE[jnp.bfloat16]
    assert relative_error(interpreted()["grad_weights"](x_MK, dy_MN, sizes_E), dw_EKN) < TOLERANCE[jnp.bfloat16]
    assert_no_race()


@pytest.mark.slow
@pytest.mark.numerics
def test_weights_kernel_interpreted_with_cut_groups():
    """In a process of its own: the interpreter blocks a thread per warpgroup, and XLA has one per core or device, whichever is more."""
    script = Path(__file__).with_name("interpret_segments.py")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=64"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 9 and all(error < (TOLERANCE[jnp.bfloat16] if "bfloat16" in name else 1e-6) for name, error in errors.items())


def test_groups_are_cut_only_where_few_tiles_leave_sms_idle():
    assert segment_rows(65536, 112, 3584, 3072, 336, 132) is None  # as many tiles as SMs
    for rows, groups, k, n, tiles in ((65536, 64, 512, 384, 8), (262144, 128, 1024, 768, 24), (65536, 896, 1024, 768, 24)):
        length = segment_rows(rows, groups, k, n, tiles, 132)
        assert length % 64 == 0 and length >= 2 * rows / groups and partial_sums(rows, length) * k * n * 4 <= 60 * 2**20
    assert segment_rows(256, 1, 64, 64, 1, 132) is None


@pytest.mark.aot
def test_every_variant_lowers_for_cuda():
    """In a process of its own: after interpretation, JAX 0.12 takes minutes for what takes seconds in a fresh one."""
    script = Path(__file__).with_name("lower_hopper_variants.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.split().count("lowered") == 17


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_shared_memory_is_within_what_a_block_may_have():
    for n in (64, 192, 384, 512, 3072):
        for out_dtype, accumulate in ((jnp.bfloat16, False), (jnp.float32, False), (jnp.float32, True)):
            config = choose_config(65536, 64, 512, n, out_dtype, accumulate)
            loads = config.stages * config.block_m * (128 + config.tile_n) * 2
            kept = 2 * config.slots * 64 * config.width * 4 if config.slots else 64 * config.tile_n * 2
            assert loads + kept <= 226 * 1024 and config.stages >= 3
            assert bool(config.slots) == (out_dtype == jnp.float32) and config.slots >= 2 * accumulate


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (struct(256, 512), struct(4, 512, 384), None),
        (struct(256, 512, dtype=jnp.float32), struct(4, 512, 384, dtype=jnp.float32), "float32"),
        (struct(250, 512), struct(4, 512, 384), "rows = 250"),
        (struct(256, 500), struct(4, 500, 384), "K = 500"),
        (struct(256, 512), struct(4, 512, 96), "N = 96"),
    ],
)
def test_shape_refusal_names_what_does_not_fit(x, w, reason):
    refusal = hopper.shape_refusal(x, w)
    assert refusal is None if reason is None else reason in refusal


def test_platform_refusal_names_the_backend():
    if jax.default_backend() == "cpu":
        assert "cpu" in hopper.platform_refusal()


def test_a_wrong_accumulator_is_refused():
    rows = jnp.zeros((8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="accumulate_into"):
        weights_gradient(rows, rows, jnp.zeros(2, jnp.int32), accumulate_into=jnp.zeros((2, 64, 64), jnp.bfloat16))


@functools.cache
def on_gpu():
    """The function with its gradients, and the FP32 and accumulating forms, compiled once per shape."""

    def all_of(x_MK, w_EKN, sizes_E, dy_MN, total_EKN):
        y_MN, pullback = jax.vjp(lambda x, w: hopper.grouped_matmul(x, w, sizes_E), x_MK, w_EKN)
        wide = weights_gradient(x_MK, dy_MN, sizes_E, out_dtype=jnp.float32)
        return y_MN, *pullback(dy_MN), wide, weights_gradient(x_MK, dy_MN, sizes_E, accumulate_into=total_EKN)

    return jax.jit(all_of)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(1000, 64, 64), (1000, 64, 192), (1000, 128, 256), (1000, 256, 128), (1000, 256, 256), (1000, 192, 320), (2048, 512, 384)],
)
def test_values_gradients_and_bits_on_a_gpu(rows, k, n):
    rng, groups = np.random.default_rng(1), 13
    cases = [np.diff([0, *np.sort(rng.integers(0, total + 1, groups - 1)), total]) for total in (rows, rows, rows - 77)]
    cases += [np.zeros(groups, int), np.where(np.arange(groups) == 5, rows, 0), np.arange(groups) % 4]
    for sizes in cases:
        x_MK, w_EKN, dy_MN = arrays(sizes, rows, k, n)
        y_MN, dx_MK, dw_EKN = dense(x_MK, w_EKN, sizes, dy_MN)
        before = rng.normal(size=dw_EKN.shape).astype(np.float32)
        arguments = (x_MK, w_EKN, jnp.asarray(sizes, jnp.int32), dy_MN, jnp.asarray(before))
        first, second = jax.device_get(on_gpu()(*arguments)), jax.device_get(on_gpu()(*arguments))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
        for actual, expected in zip(first, (y_MN, dx_MK, dw_EKN, dw_EKN, dw_EKN + before), strict=True):
            assert relative_error(actual, expected) < TOLERANCE[jnp.float32 if actual.dtype == np.float32 else jnp.bfloat16]
