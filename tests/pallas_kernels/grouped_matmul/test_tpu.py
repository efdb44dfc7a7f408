"""TPU kernels of the grouped matmul: the list of visits, the tile sizes, and the kernels interpreted on the CPU.

The interpreter detects races and fills memory that nothing has written with NaN. tests/tpu compiles the kernels for chips.

Shapes: M rows, K in, N out, E groups, V visits.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from k3train.config import DtypePolicy
from k3train.models.feed_forward import activation
from k3train.models.latent_moe import LatentMoE
from k3train.models.layout import LocalLayout
from pallas_kernels.grouped_matmul import grouped_matmul, tpu, tpu_tiles
from pallas_kernels.grouped_matmul.tpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.tpu_tiles import Chip, RowsTiles, WeightsTiles, choose_rows_tiles, choose_weights_tiles, list_visits
from pallas_kernels.grouped_matmul.tpu_weights import weights_gradient
from pallas_kernels.target import Target
from tests.golden import check
from tests.models import test_golden_modules as golden
from tests.x64 import float64

pytestmark = pytest.mark.aot

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOLERANCE = {"bfloat16": 4.5e-3, "float32": 1e-6}
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


@functools.cache
def interpreted():
    """The function with its gradients, compiled once for all sizes."""

    def run(x_MK, w_EKN, sizes_E, dy_MN):
        y_MN, pullback = jax.vjp(lambda x, w: tpu.grouped_matmul(x, w, sizes_E, INTERPRET), x_MK, w_EKN)
        return y_MN, *pullback(dy_MN)

    return jax.jit(run)


def check_interpreted(sizes, dtype):
    x_MK, w_EKN, dy_MN = arrays(sizes, dtype)
    results = interpreted()(x_MK, w_EKN, jnp.asarray(sizes, jnp.int32), dy_MN)
    for name, actual, expected in zip(("y", "dx", "dw"), results, dense(x_MK, w_EKN, sizes, dy_MN), strict=True):
        assert_close(actual, expected, dtype, f"{name} for {sizes}")
    assert_no_race()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_interpreted(monkeypatch, dtype):
    small_tiles(monkeypatch)
    for sizes in SIZES.values():
        check_interpreted(sizes, dtype)


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, M), min_size=E, max_size=E))
def test_any_sizes_interpreted(cuts):
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        check_interpreted(np.diff(sorted([0, *cuts])).tolist(), "float32")


@pytest.mark.parametrize("quantity", ["forward", "grad_rows", "grad_weights"])
def test_several_tiles_each_way_interpreted(quantity):
    """Contraction in steps with a ragged last one, several tiles of features with several steps inside, two visits of one tile."""
    sizes, m, k, n = [130, 0, 60], 200, 200, 300
    x_MK, w_EKN, dy_MN = arrays(sizes, "float32", (m, k, n))
    rows = functools.partial(rows_matmul, interpret=INTERPRET)
    run, operands = {
        "forward": (functools.partial(rows, tiles=RowsTiles(128, 128, 256)), (x_MK, w_EKN)),
        "grad_rows": (functools.partial(rows, tiles=RowsTiles(128, 128, 128), transpose_w=True), (dy_MN, w_EKN)),
        "grad_weights": (functools.partial(weights_gradient, tiles=WeightsTiles(128, 128, 128), interpret=INTERPRET), (x_MK, dy_MN)),
    }[quantity]
    expected = dict(zip(("forward", "grad_rows", "grad_weights"), dense(x_MK, w_EKN, sizes, dy_MN), strict=True))[quantity]
    assert_close(jax.jit(run)(*operands, jnp.asarray(sizes, jnp.int32)), expected, "float32", quantity)
    assert_no_race()


@pytest.fixture
def compiled_for_tpu(monkeypatch):
    """What is called inside chooses its implementation as on a TPU, and is interpreted."""
    monkeypatch.setattr(importlib.import_module("pallas_kernels.grouped_matmul"), "target", lambda: Target("tpu", 1))
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        yield


def test_golden_latent_moe(compiled_for_tpu):
    """The whole module with the kernels in it, with the limits of the published arrays in float32."""
    a = golden.arrays("latent_moe", "float32")
    params, segment_ids = golden.moe_params(lambda key: a[f"p:{key}"]), jnp.zeros(a["x"].shape[:2], jnp.int32)
    y, _, d_params, d_x = golden.run_module(LatentMoE(golden.config("float32")), params, a["x"], segment_ids, a["dy"], collect=True)
    check(y, a["y"], 1e-5, "y")
    check(d_x, a["d_x"], 1e-5, "d_x")
    golden.check_trees(d_params, golden.moe_params(lambda key: a[f"d:{key}"]), 1e-5)
    assert_no_race()


def test_golden_experts_in_bfloat16(compiled_for_tpu):
    """Each matmul of the golden module's experts: operands rounded to bfloat16, expected values in float64."""
    a = golden.arrays("latent_moe", "float32")
    order_M = np.argsort(np.asarray(a["topk_ids"]).reshape(-1), kind="stable")
    sizes = np.bincount(np.asarray(a["topk_ids"]).reshape(-1), minlength=32)
    z_ML = (a["x"].reshape(48, 48) @ a["p:routed_expert_down_proj.weight"].T)[order_M // 4].astype(jnp.bfloat16)
    matrices = {name: jnp.swapaxes(a[f"p:experts.{name}.weight"], 1, 2).astype(jnp.bfloat16) for name in ("w1", "w2", "w3")}
    hidden_MF = jnp.asarray(np.random.default_rng(0).normal(size=(192, 16)), jnp.bfloat16)

    @jax.jit
    def run(x_MK, w_EKN, dy_MN):
        y_MN, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes)), x_MK, w_EKN)
        return y_MN, *pullback(dy_MN)

    for name, x_MK, dy_MN in (("w1", z_ML, hidden_MF), ("w3", z_ML, hidden_MF), ("w2", hidden_MF, z_ML)):
        results, expected = run(x_MK, matrices[name], dy_MN), dense(x_MK, matrices[name], sizes, dy_MN)
        for what, actual, wanted in zip(("y", "dx", "dw"), results, expected, strict=True):
            assert_close(actual, wanted, "bfloat16", f"{what} of {name}")
    assert_no_race()


class KernelsInBfloat16(LocalLayout):
    """The experts' matmuls take and give bfloat16; what lies around them keeps its type."""

    def experts(self, z_BTL, expert_ids_BTk, weights_BTk, *matrices, activation):
        z_BTL, *matrices = (array.astype(jnp.bfloat16) for array in (z_BTL, *matrices))
        return super().experts(z_BTL, expert_ids_BTk, weights_BTk, *matrices, activation=activation)


class ByDefinition(LocalLayout):
    """Each slot times its own expert's matrices."""

    rounds = False
    """To bfloat16 wherever `KernelsInBfloat16` does, values and their gradients alike."""

    def experts(self, z_BTL, expert_ids_BTk, weights_BTk, *matrices, activation):
        def stored(array):
            return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7) if self.rounds else array

        ids_M, weight_M1 = expert_ids_BTk.reshape(-1), weights_BTk.reshape(-1, 1)
        w_gate_MLF, w_up_MLF, w_down_MFL = (stored(matrix)[ids_M] for matrix in matrices)
        z_SL = stored(z_BTL).reshape(-1, z_BTL.shape[-1])
        rows_ML = stored(jnp.repeat(z_SL, expert_ids_BTk.shape[-1], axis=0))
        gate_MF, up_MF = (stored(jnp.einsum("ml,mlf->mf", rows_ML, w)) for w in (w_gate_MLF, w_up_MLF))
        hidden_MF = stored(activation(gate_MF, up_MF) * weight_M1)
        result_ML = stored(jnp.einsum("mf,mfl->ml", hidden_MF, w_down_MFL))
        return result_ML.reshape(*expert_ids_BTk.shape, -1).sum(axis=2)


class ByDefinitionRounded(ByDefinition):
    rounds = True


def rounded(array):
    """As float32 numbers that bfloat16 holds; integers as they are."""
    array = np.asarray(array)
    return np.float32(array.astype(jnp.bfloat16)) if array.dtype == np.float32 else array


def distances(actual, expected):
    """Relative L2 of each array."""
    return {name: float(np.linalg.norm(actual[name] - wanted) / np.linalg.norm(wanted)) for name, wanted in expected.items()}


def in_words(errors):
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def golden_experts(layout, dtype):
    """u and the gradients of the golden module's experts; z, matrices and cotangent rounded to bfloat16."""
    a = golden.arrays("latent_moe", "float32")
    names = ("w_gate", "w_up", "w_down")
    params = golden.moe_params(lambda key: a[f"p:{key}"])
    z_BTL = rounded(a["x"] @ params["latent_down"])
    ids_BTk, weights_BTk = (a[name].reshape(*z_BTL.shape[:2], -1) for name in ("topk_ids", "topk_weights"))
    operands = [jnp.asarray(array, dtype) for array in (z_BTL, weights_BTk, *(rounded(params[name]) for name in names))]
    du_BTL = rounded(np.float32(np.random.default_rng(0).normal(size=z_BTL.shape)))

    def experts(z_BTL, weights_BTk, *matrices):
        return layout.experts(z_BTL, jnp.asarray(ids_BTk), weights_BTk, *matrices, activation=activation(golden.config(dtype)))

    u_BTL, gradients = golden.values_and_pullback(experts, operands, jnp.asarray(du_BTL, dtype))
    return {name: np.asarray(x, np.float64) for name, x in zip(("u", "z", "weights", *names), (u_BTL, *gradients), strict=True)}


def test_golden_routed_experts_in_bfloat16(compiled_for_tpu):
    """Both matmuls with what lies between them: the inputs rounded to bfloat16, the definition in float64 on the same numbers."""
    actual = golden_experts(KernelsInBfloat16(), "float32")
    assert_no_race()
    with float64():
        errors = distances(actual, golden_experts(ByDefinition(), "float64"))
    print("\nrouted experts, bfloat16:", in_words(errors))
    assert max(errors.values()) < TOLERANCE["bfloat16"], in_words(errors)


def golden_module(layout, dtype, compute):
    """({name: y or a gradient}, chosen experts) of the golden module with all its arrays rounded to bfloat16."""
    a = {key: rounded(value) for key, value in golden.arrays("latent_moe", "float32").items()}
    config = golden.config(dtype, dtypes=DtypePolicy(parameters=dtype, compute=compute))
    params = golden.moe_params(lambda key: jnp.asarray(a[f"p:{key}"], dtype))
    x, dy = (jnp.asarray(a[key], compute) for key in ("x", "dy"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "LocalLayout", lambda: layout)
        y, report, d_params, d_x = golden.run_module(LatentMoE(config), params, x, jnp.zeros(x.shape[:2], jnp.int32), dy)
    named = jax.tree_util.tree_flatten_with_path({"y": y, "x": d_x, **d_params})[0]
    results = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(value, np.float64) for path, value in named}
    assert not results.pop("router_bias").any()
    return results, np.asarray(report["expert_ids"])


# Six roundings and more, each of about 1.7e-3, lie between the inputs and these gradients; z's alone makes 2.6e-3 to 3.4e-3 of them.
MANY_ROUNDINGS = {"w_gate", "w_up", "w_down", "latent_down", "router"}


def test_golden_latent_moe_in_bfloat16(compiled_for_tpu):
    """The whole module, float32 around the kernels, against float64: by the definition, and with the roundings of bfloat16 kernels."""
    actual, ids = golden_module(KernelsInBfloat16(), "float32", "float32")
    assert_no_race()
    with float64():
        exact, exact_ids = golden_module(ByDefinition(), "float64", "float64")
        same_roundings, _ = golden_module(ByDefinitionRounded(), "float64", "float64")
    np.testing.assert_array_equal(ids, exact_ids)
    errors, own = distances(actual, exact), distances(actual, same_roundings)
    print(f"\nLatentMoE, bfloat16 kernels: {in_words(errors)}\nbeyond its roundings: {in_words(own)}")
    for name, error in errors.items():
        assert error < (6e-3 if name in MANY_ROUNDINGS else TOLERANCE["bfloat16"]), f"{name}: {error:.1e}"
    assert max(own.values()) < 2e-4, in_words(own)  # room for a few sums that round to the other side in float32


def test_latent_moe_wholly_in_bfloat16_is_as_with_xla(compiled_for_tpu):
    """As training runs it. A CPU sums some of the products around the kernels in bfloat16, so XLA's form on it is the comparison."""
    (actual, _), (wanted, _) = (golden_module(LocalLayout(kernels), "float32", "bfloat16") for kernels in ("auto", "xla"))
    assert_no_race()
    errors = distances(actual, wanted)
    print("\nLatentMoE wholly in bfloat16, beside XLA's form:", in_words(errors))
    assert max(errors.values()) < 1e-3, in_words(errors)


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


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize(("k", "n"), [(3584, 3072), (3072, 3584), (1, 1), (7168, 2048), (300, 30000), (100000, 200)])
def test_tiles_fit_and_cover(k, n, chip, itemsize):
    for rows in (1, 77, 65536):
        forward = choose_rows_tiles(rows, k, n, itemsize, chip)
        weights = choose_weights_tiles(rows, k, n, itemsize, chip)
        taken = forward.vmem_bytes(itemsize, k), weights.vmem_bytes(itemsize)
        for tiles, shared, vmem in zip((forward, weights), (-(-n // forward.features), -(-k // weights.k)), taken, strict=True):
            assert vmem <= chip.for_tiles and all(size % 128 == 0 and size for size in tiles)
            assert shared >= chip.cores or min(k, n) <= 128


@pytest.mark.parametrize(
    ("name", "features", "weights"),
    [("v5p", (1536, 1536), (1792, 1536)), ("v6e", (3072, 3072), (3584, 3072)), ("tpu7x", (1536, 2048), (1280, 3072))],
)
def test_tiles_of_k3(name, features, weights):
    """Nothing is contracted in steps, and how often rows are read: docs/kernels/tpu.md counts on these."""
    for n, wanted in zip((3072, 6144), features, strict=True):
        assert choose_rows_tiles(65536, 3584, n, 2, CHIPS[name]) == RowsTiles(512, 3584, wanted)
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
