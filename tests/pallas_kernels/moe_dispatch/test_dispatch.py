"""Dispatch against plain code: the order, the way there and back, and gradients.

Shapes: S tokens, k choices, M = S k rows, L width, E experts.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.moe_dispatch import combine, permute, sort_by_expert
from tests.x64 import float64

pytestmark = pytest.mark.numerics

SHAPES_SKE = [(1, 1, 1), (7, 3, 5), (32, 2, 40)]
sort = jax.jit(sort_by_expert, static_argnums=1)


@pytest.mark.parametrize("shape", SHAPES_SKE)
@settings(max_examples=20)
@given(data=st.data())
def test_order_is_the_stable_sort(shape, data):
    S, k, E = shape
    ids_Sk = np.array(data.draw(st.lists(st.integers(0, E - 1), min_size=S * k, max_size=S * k)), np.int32).reshape(S, k)
    order_M, sizes_E = sort(jnp.asarray(ids_Sk), E)
    assert order_M.dtype == sizes_E.dtype == jnp.int32
    np.testing.assert_array_equal(order_M, np.argsort(ids_Sk.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(sizes_E, np.bincount(ids_Sk.reshape(-1), minlength=E))


def test_choices_of_no_expert_sort_last():
    order_M, sizes_E = sort(jnp.array([[2, -1], [0, 3], [0, 1]]), 3)
    np.testing.assert_array_equal(order_M, [2, 4, 5, 0, 1, 3])
    np.testing.assert_array_equal(sizes_E, [2, 1, 1])


def test_no_array_over_choices_and_experts():
    S, k, E = 64, 4, 32
    jaxpr = jax.make_jaxpr(lambda ids: sort_by_expert(ids, E))(jnp.zeros((S, k), jnp.int32))
    assert max(v.aval.size for equation in jaxpr.jaxpr.eqns for v in equation.outvars) <= S * k


@pytest.mark.parametrize("k", [1, 4])
def test_there_and_back(k):
    rng = np.random.default_rng(0)
    x_SL = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)
    ids_Sk = jnp.asarray(rng.integers(0, 6, (9, k)))
    order_M, sizes_E = sort(ids_Sk, 6)
    rows_ML = permute(x_SL, order_M, k)
    np.testing.assert_array_equal(rows_ML, x_SL[np.asarray(order_M) // k])
    np.testing.assert_array_equal(np.repeat(np.arange(6), sizes_E), np.asarray(ids_Sk).reshape(-1)[np.asarray(order_M)])
    np.testing.assert_allclose(combine(rows_ML, jnp.full((9, k), 1 / k), order_M), x_SL, rtol=1e-6)


def problem(dtype, S=11, k=3, E=4, L=6):
    rng = np.random.default_rng(1)
    x_SL, w_ELL, c_SL = (jnp.asarray(rng.normal(size=s), dtype) for s in ((S, L), (E, L, L), (S, L)))
    weights_Sk = jnp.asarray(rng.random((S, k)), jnp.promote_types(dtype, jnp.float32))
    return x_SL, w_ELL, weights_Sk, c_SL, jnp.asarray(rng.integers(0, E - 1, (S, k)), jnp.int32)  # the last expert stays empty


def experts(x_SL, w_ELL, weights_Sk, c_SL, ids_Sk):
    order_M, sizes_E = sort_by_expert(ids_Sk, w_ELL.shape[0])
    rows_ML = grouped_matmul(permute(x_SL, order_M, ids_Sk.shape[1]), w_ELL, sizes_E)
    return jnp.sum(jnp.sin(combine(rows_ML, weights_Sk, order_M)) * c_SL)


def plain_experts(x_SL, w_ELL, weights_Sk, c_SL, ids_Sk):
    rows_SkL = jnp.einsum("sl,skln->skn", x_SL, w_ELL[ids_Sk])
    return jnp.sum(jnp.sin(jnp.einsum("skl,sk->sl", rows_SkL, weights_Sk)) * c_SL)


def test_experts_and_gradients_equal_plain_code():
    with float64():
        arguments = problem(jnp.float64)
        got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*arguments) for f in (experts, plain_experts))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_each_gradient_equals_plain_code():
    with float64():
        x_SL, _, weights_Sk, c_SL, ids_Sk = problem(jnp.float64)
        order_M, _ = sort(ids_Sk, 4)
        k = ids_Sk.shape[1]
        rows_ML = jnp.asarray(np.random.default_rng(2).normal(size=(order_M.size, x_SL.shape[1])))

        def plain_combine(rows_ML, weights_Sk):
            weighted_ML = rows_ML * weights_Sk.reshape(-1)[order_M][:, None]
            return jnp.zeros_like(x_SL).at[order_M // k].add(weighted_ML)

        pairs = [
            (lambda x: permute(x, order_M, k), lambda x: x[order_M // k], (x_SL,), rows_ML),
            (lambda r, w: combine(r, w, order_M), plain_combine, (rows_ML, weights_Sk), c_SL),
        ]
        for ours, plain, primals, cotangent in pairs:
            (y, pullback), (plain_y, plain_pullback) = jax.vjp(ours, *primals), jax.vjp(plain, *primals)
            np.testing.assert_allclose(y, plain_y, rtol=1e-13, atol=1e-13)
            for a, b in zip(pullback(cotangent), plain_pullback(cotangent), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_bfloat16_accumulates_in_float32():
    k, L = 16, 2  # bfloat16 cannot add 1 to 512
    order_M, _ = sort(jnp.zeros((1, k), jnp.int32), 1)
    rows_ML = jnp.ones((k, L), jnp.bfloat16).at[0].set(512)
    y_SL, pullback = jax.vjp(lambda r, w: combine(r, w, order_M), rows_ML, jnp.ones((1, k)))
    assert y_SL.dtype == jnp.float32
    np.testing.assert_array_equal(y_SL, np.full((1, L), 512 + k - 1))
    d_rows_ML, d_weights_Sk = pullback(jnp.ones_like(y_SL))
    assert (d_rows_ML.dtype, d_weights_Sk.dtype) == (jnp.bfloat16, jnp.float32)
    (dx_SL,) = jax.vjp(lambda x: permute(x, order_M, k), jnp.ones((1, L), jnp.bfloat16))[1](rows_ML)
    assert dx_SL.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dx_SL, jnp.full((1, L), 512 + k - 1, jnp.bfloat16))


def test_backward_gathers_rows_and_scatters_only_indices():
    x_SL, _, weights_Sk, c_SL, ids_Sk = problem(jnp.float32)
    order_M, _ = sort(ids_Sk, 4)

    def there_and_back(x_SL, weights_Sk):
        return jnp.sum(combine(permute(x_SL, order_M, ids_Sk.shape[1]), weights_Sk, order_M) * c_SL)

    scattered = re.findall(r":(\w+)\[[^]]*\] = scatter", str(jax.make_jaxpr(jax.grad(there_and_back, (0, 1)))(x_SL, weights_Sk)))
    assert scattered and set(scattered) == {"i32"}


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least one expert"):
        sort_by_expert(jnp.zeros((2, 2), jnp.int32), 0)
    with pytest.raises(TypeError, match="integers"):
        sort_by_expert(jnp.zeros((2, 2)), 3)
    with pytest.raises(ValueError, match="4 slots"):
        permute(jnp.ones((2, 3)), jnp.arange(6), 2)
    with pytest.raises(ValueError, match="5 rows"):
        combine(jnp.ones((5, 3)), jnp.ones((2, 2)), jnp.arange(4))
