"""TPU kernels of the grouped matmul: the list of visits, the tile sizes, and the kernels interpreted on the CPU.

The interpreter detects races and fills memory that nothing has written with NaN. tests/tpu compiles the kernels for chips.

Shapes: M rows, K in, N out, E groups, V visits.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import grouped_matmul, tpu, tpu_tiles
from pallas_kernels.grouped_matmul.tpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.tpu_tiles import Chip, RowsTiles, WeightsTiles, choose_rows_tiles, choose_weights_tiles, list_visits
from pallas_kernels.grouped_matmul.tpu_weights import weights_gradient
from pallas_kernels.target import Target

pytestmark = pytest.mark.aot

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOLERANCE = {"bfloat16": 4.5e-3, "float32": 1e-6}  # by the dtype of a result: sums of products of bfloat16 are float32's too
M, E, K, N = 280, 5, 24, 40  # three tiles of 128 rows, widths that lanes do not divide
SIZES = {
    "ragged, with rows past the sum": [100, 0, 150, 7, 3],
    "no rows": [0, 0, 0, 0, 0],
    "one group holds everything": [0, 280, 0, 0, 0],
    "tiles' edges": [128, 128, 0, 24, 0],
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


def arrays(sizes_E, dtype, shape=(M, K, N), seed=0):
    """x, w, dy; what rows past the groups hold must not matter, so they hold NaN."""
    rng, (m, k, n) = np.random.default_rng(seed), shape
    x_MK, w_EKN, dy_MN = (rng.normal(size=shape) for shape in ((m, k), (len(sizes_E), k, n), (m, n)))
    x_MK[sum(sizes_E) :] = dy_MN[sum(sizes_E) :] = np.nan
    return tuple(jnp.asarray(array, dtype) for array in (x_MK, w_EKN, dy_MN))


def assert_close(actual, expected, dtype, what):
    assert actual.dtype == dtype and np.isfinite(np.asarray(actual, np.float32)).all(), what
    error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.1e}"


def assert_no_race():
    """JAX 0.12 raises at a race; before, it prints it and keeps its state."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


def small_tiles(monkeypatch):
    """Tiles of 128 rows, so that a few hundred rows are several tiles."""
    monkeypatch.setattr(tpu_tiles, "TILE_ROWS", 128)


class Form(NamedTuple):
    """Dtypes of what is given, multiplied and returned."""

    given: str
    operands: str
    result: str


FORMS = {
    "float32": Form("float32", "float32", "float32"),
    "bfloat16": Form("bfloat16", "bfloat16", "bfloat16"),
    "bfloat16, results float32": Form("bfloat16", "bfloat16", "float32"),
    "bfloat16, results and gradients float32": Form("float32", "bfloat16", "float32"),
}


def products(form):
    """The context that makes float32 arrays enter products as bfloat16, for a form that wants it."""
    return jax.default_matmul_precision("bfloat16") if form.given != form.operands else nullcontext()


@functools.cache
def interpreted(form):
    """The function with its gradients, compiled once for all sizes."""

    def run(x_MK, w_EKN, sizes_E, dy_MN):
        multiply = functools.partial(tpu.grouped_matmul, interpret=INTERPRET, out_dtype=form.result)
        y_MN, pullback = jax.vjp(lambda x, w: multiply(x, w, sizes_E), x_MK, w_EKN)
        return y_MN, *pullback(dy_MN)

    return jax.jit(run)


def check_interpreted(sizes, form):
    exact = [np.asarray(array.astype(form.operands), np.float64) for array in arrays(sizes, "float32")]
    x_MK, w_EKN, dy_MN = (jnp.asarray(a, dtype) for a, dtype in zip(exact, (form.given, form.given, form.result), strict=True))
    with products(form):
        results = interpreted(form)(x_MK, w_EKN, jnp.asarray(sizes, jnp.int32), dy_MN)
    wanted = zip(("y", "dx", "dw"), dense(exact[0], exact[1], sizes, exact[2]), (form.result, form.given, form.given), strict=True)
    for actual, (name, expected, dtype) in zip(results, wanted, strict=True):
        assert_close(actual, expected, dtype, f"{name} for {sizes}")
    assert_no_race()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_interpreted(monkeypatch, form):
    small_tiles(monkeypatch)
    for sizes in SIZES.values():
        check_interpreted(sizes, form)


def test_operands_and_cotangents_are_rounded_once(monkeypatch):
    """Float32 arrays that bfloat16 does not hold give what their rounded values give, and the results are not rounded."""
    small_tiles(monkeypatch)
    sizes, form = SIZES["ragged, with rows past the sum"], FORMS["bfloat16, results and gradients float32"]
    given = arrays(sizes, "float32")
    with products(form):
        results = interpreted(form)(*given[:2], jnp.asarray(sizes, jnp.int32), given[2])
    rounded_MK, rounded_EKN, rounded_MN = (array.astype("bfloat16") for array in given)
    for name, actual, expected in zip(("y", "dx", "dw"), results, dense(rounded_MK, rounded_EKN, sizes, rounded_MN), strict=True):
        assert_close(actual, expected, "float32", name)
    assert_no_race()


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, M), min_size=E, max_size=E))
def test_any_sizes_interpreted(cuts):
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        check_interpreted(np.diff(sorted([0, *cuts])).tolist(), FORMS["float32"])


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantity", ["forward", "grad_rows", "grad_weights"])
def test_several_tiles_each_way_interpreted(quantity, out_dtype):
    """Contraction in steps with a ragged last one, several tiles of features with several steps inside, two visits of one tile."""
    sizes, m, k, n = [130, 0, 60], 200, 200, 300
    x_MK, w_EKN, dy_MN = arrays(sizes, "float32", (m, k, n))
    rows, weights = (functools.partial(f, interpret=INTERPRET, out_dtype=out_dtype) for f in (rows_matmul, weights_gradient))
    run, operands = {
        "forward": (functools.partial(rows, tiles=RowsTiles(128, 128, 256)), (x_MK, w_EKN)),
        "grad_rows": (functools.partial(rows, tiles=RowsTiles(128, 128, 128), transpose_w=True), (dy_MN, w_EKN)),
        "grad_weights": (functools.partial(weights, tiles=WeightsTiles(128, 128, 128)), (x_MK, dy_MN)),
    }[quantity]
    expected = dict(zip(("forward", "grad_rows", "grad_weights"), dense(x_MK, w_EKN, sizes, dy_MN), strict=True))[quantity]
    assert_close(jax.jit(run)(*operands, jnp.asarray(sizes, jnp.int32)), expected, out_dtype, quantity)
    assert_no_race()


# Sizes of 8 groups among at most 800 rows: one shape, so that a list compiles once.
sizes_strategy = st.lists(st.one_of(st.just(0), st.integers(0, 100)), min_size=8, max_size=8)
lists = {
    (tile_rows, for_rows): jax.jit(functools.partial(list_visits, num_rows=800, tile_rows=tile_rows, for_rows=for_rows))
    for tile_rows in (128, 512)
    for for_rows in (True, False)
}


@settings(max_examples=60)
@given(sizes=sizes_strategy, key=st.sampled_from(list(lists)))
def test_visits_are_the_tiles_of_each_group_in_order(sizes, key):
    tile_rows, for_rows = key
    visits = jax.device_get(lists[key](jnp.asarray(sizes, jnp.int32)))
    ends = np.cumsum([*sizes, 800 - sum(sizes)])
    groups = [(start, end) for start, end in zip([0, *ends], ends, strict=False)][: 9 if for_rows else 8]
    wanted = []
    for group, (start, end) in enumerate(groups):
        tiles = range(start // tile_rows, -(-end // tile_rows)) if end > start else [None] * (not for_rows)
        wanted += [(group, tile) for tile in tiles]
    found = list(zip(visits.group_V, visits.tile_V, strict=True))
    assert visits.count == len(wanted) <= len(found)
    assert all(g == group and tile in (None, t) for (g, t), (group, tile) in zip(found, wanted, strict=False))
    assert (np.diff(visits.tile_V) >= 0).all() and 0 <= visits.tile_V.min() <= visits.tile_V.max() <= 799 // tile_rows
    np.testing.assert_array_equal(visits.start_G1, [0, *ends][: len(groups) + 1])
    used = np.flatnonzero(sizes)
    np.testing.assert_array_equal(visits.last_2, [used[-1], (sum(sizes) - 1) // tile_rows] if len(used) else [0, 0])


CHIPS = {"v5p": Chip(2, 64 << 20), "v6e": Chip(1, 128 << 20), "tpu7x": Chip(1, 64 << 20)}


@pytest.mark.parametrize(("itemsize", "out_itemsize"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize(("k", "n"), [(3584, 3072), (3072, 3584), (1, 1), (7168, 2048), (300, 30000), (100000, 200)])
def test_tiles_fit_and_cover(k, n, chip, itemsize, out_itemsize):
    for rows in (1, 77, 65536):
        forward = choose_rows_tiles(rows, k, n, itemsize, out_itemsize, chip)
        weights = choose_weights_tiles(rows, k, n, itemsize, chip)
        taken = forward.vmem_bytes(itemsize, out_itemsize, k), weights.vmem_bytes(itemsize)
        for tiles, shared, vmem in zip((forward, weights), (-(-n // forward.features), -(-k // weights.k)), taken, strict=True):
            assert vmem <= chip.for_tiles and all(size % 128 == 0 and size for size in tiles)
            assert shared >= chip.cores or min(k, n) <= 128


@pytest.mark.parametrize(
    ("name", "features", "weights"),
    [("v5p", (1536, 1536), (1792, 1536)), ("v6e", (3072, 3072), (3584, 3072)), ("tpu7x", (1536, 2048), (1280, 3072))],
)
def test_tiles_of_k3(name, features, weights):
    """Nothing is contracted in steps, and how often rows are read: docs/kernels/tpu.md counts on these. The same for float32 results."""
    for (n, wanted), out_itemsize in itertools.product(zip((3072, 6144), features, strict=True), (2, 4)):
        assert choose_rows_tiles(65536, 3584, n, 2, out_itemsize, CHIPS[name]) == RowsTiles(512, 3584, wanted)
    assert choose_weights_tiles(65536, 3584, 3072, 2, CHIPS[name]) == WeightsTiles(512, *weights)


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("rows", "groups", "dtype", "reason"),
    [(65536, 896, "bfloat16", None), (8, 2, "float32", None), (8, 2, "float64", "float64"), (1 << 26, 2, "bfloat16", "scalar memory")],
)
def test_refusals_say_why(rows, groups, dtype, reason):
    refusal = tpu.refusal(struct(rows, 8, dtype=dtype), struct(groups, 8, 8, dtype=dtype))
    assert refusal is None if reason is None else reason in refusal


def test_the_choice_follows_the_platform(monkeypatch, caplog):
    package = importlib.import_module("pallas_kernels.grouped_matmul")
    bf16, sizes = (struct(8, 8), struct(2, 8, 8)), struct(2, dtype="int32")
    for platform, kernels in (("tpu", 1), ("cpu", 0), ("gpu", 0)):
        monkeypatch.setattr(package, "target", lambda platform=platform: Target(platform, 1))
        assert str(jax.make_jaxpr(lambda *a: grouped_matmul(*a))(*bf16, sizes)).count("pallas_call") == kernels
    monkeypatch.setattr(package, "target", lambda: Target("tpu", 1))
    monkeypatch.setattr(tpu, "refusal", lambda *_: "a reason")
    arguments = jnp.ones((4, 2)), jnp.ones((1, 2, 2)), jnp.array([4])
    with caplog.at_level("WARNING", logger=package.__name__):
        grouped_matmul(*arguments)
    assert "tpu: xla, since a reason" in caplog.text
    with pytest.raises(ValueError, match="'tpu' does not apply: a reason"):
        grouped_matmul(*arguments, implementation="tpu")
