"""The golden LatentMoE with the TPU kernels of the grouped matmul, interpreted on the CPU, in float32 and with bfloat16 operands.

Shapes: B batch, T tokens, k choices of a token, S = B T, M = S k rows, K in, N out, L latent, F hidden, E experts.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3train.config import DtypePolicy
from k3train.models.feed_forward import activation
from k3train.models.latent_moe import LatentMoE
from k3train.models.layout import LocalLayout
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.target import Target
from tests.golden import check
from tests.models import test_golden_modules as golden
from tests.pallas_kernels.grouped_matmul.test_tpu import INTERPRET, TOLERANCE, assert_close, assert_no_race, dense
from tests.x64 import float64

pytestmark = pytest.mark.aot


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


def rounding(*, values, gradients):
    """The identity, with a rounding to bfloat16 on the way there or back."""

    def stored(array, is_rounded):
        return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7) if is_rounded else array

    @jax.custom_vjp
    def identity(array):
        return stored(array, values)

    identity.defvjp(lambda array: (stored(array, values), None), lambda _, gradient: (stored(gradient, gradients),))
    return identity


class ByDefinition(LocalLayout):
    """Each slot times its own expert's matrices."""

    operand = result = staticmethod(lambda array: array)
    """What happens to each array before and after a matmul."""

    def experts(self, z_BTL, expert_ids_BTk, weights_BTk, *matrices, activation):
        ids_M, weight_M1 = expert_ids_BTk.reshape(-1), weights_BTk.reshape(-1, 1)
        w_gate_MLF, w_up_MLF, w_down_MFL = (self.operand(matrix)[ids_M] for matrix in matrices)
        z_SL = self.operand(z_BTL).reshape(-1, z_BTL.shape[-1])
        rows_ML = self.operand(jnp.repeat(z_SL, expert_ids_BTk.shape[-1], axis=0))
        gate_MF, up_MF = (self.result(jnp.einsum("ml,mlf->mf", rows_ML, w)) for w in (w_gate_MLF, w_up_MLF))
        hidden_MF = self.operand(activation(gate_MF, up_MF) * weight_M1)
        result_ML = self.result(jnp.einsum("mf,mfl->ml", hidden_MF, w_down_MFL))
        return result_ML.reshape(*expert_ids_BTk.shape, -1).sum(axis=2)


class RoundedOperands(ByDefinition):
    """Rounds what enters a product, in the backward pass too."""

    operand, result = staticmethod(rounding(values=True, gradients=False)), staticmethod(rounding(values=False, gradients=True))


class RoundedArrays(ByDefinition):
    """Rounds what is stored as bfloat16 where operands and results both are."""

    operand = result = staticmethod(rounding(values=True, gradients=True))


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


# The module's experts with bfloat16 operands: the layout, JAX's matmul precision, and the definition that rounds as it does.
RESULTS = {"float32": (LocalLayout, "bfloat16", RoundedOperands), "bfloat16": (KernelsInBfloat16, None, RoundedArrays)}


@pytest.mark.parametrize("results", RESULTS)
def test_golden_routed_experts_in_bfloat16(compiled_for_tpu, results):
    """Both matmuls with what lies between them: the inputs rounded to bfloat16, the definition in float64 on the same numbers."""
    layout, products, _ = RESULTS[results]
    with jax.default_matmul_precision(products):
        actual = golden_experts(layout(), "float32")
    assert_no_race()
    with float64():
        errors = distances(actual, golden_experts(ByDefinition(), "float64"))
    print(f"\nrouted experts, bfloat16 operands, {results} results: {in_words(errors)}")
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


@pytest.mark.parametrize("results", RESULTS)
def test_golden_latent_moe_in_bfloat16(compiled_for_tpu, results):
    """The whole module, float32 around the kernels, against float64: by the definition, and with the kernels' roundings.

    Results in bfloat16 are two roundings more for most gradients, which alone take some of them past the limit.
    """
    layout, products, definition = RESULTS[results]
    with jax.default_matmul_precision(products):
        actual, ids = golden_module(layout(), "float32", "float32")
    assert_no_race()
    with float64():
        exact, exact_ids = golden_module(ByDefinition(), "float64", "float64")
        same_roundings, _ = golden_module(definition(), "float64", "float64")
    np.testing.assert_array_equal(ids, exact_ids)
    errors, own = distances(actual, exact), distances(actual, same_roundings)
    print(f"\nLatentMoE, bfloat16 operands, {results} results: {in_words(errors)}\nbeyond its roundings: {in_words(own)}")
    held = errors if results == "float32" else {name: errors[name] for name in ("y", "x")}
    assert max(held.values()) < TOLERANCE["bfloat16"], in_words(held)
    assert max(own.values()) < 2e-4, in_words(own)  # room for a few sums that round to the other side in float32


def test_latent_moe_wholly_in_bfloat16_is_as_with_xla(compiled_for_tpu):
    """As training runs it. A CPU sums some of the products around the kernels in bfloat16, so XLA's form on it is the comparison."""
    (actual, _), (wanted, _) = (golden_module(LocalLayout(kernels), "float32", "bfloat16") for kernels in ("auto", "xla"))
    assert_no_race()
    errors = distances(actual, wanted)
    print("\nLatentMoE wholly in bfloat16, beside XLA's form:", in_words(errors))
    assert max(errors.values()) < 1e-3, in_words(errors)
