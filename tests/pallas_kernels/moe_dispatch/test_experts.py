"""The routed experts as one function: values by loops over tokens, gradients against the plain composition.

Shapes: S tokens, k choices, L latent width, F hidden width, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.moe_dispatch import combine, permute, routed_experts, sort_by_expert, sum_choices
from tests.x64 import float64

pytestmark = pytest.mark.numerics

S, K, L, F, E = 13, 3, 6, 4, 5


def activation(gate, up):
    return jnp.tanh(gate) * up


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    z_SL, weights_Sk = rng.normal(size=(S, L)), rng.uniform(0.1, 1, size=(S, K))
    matrices = tuple(rng.normal(size=shape) for shape in ((E, L, F), (E, L, F), (E, F, L)))
    return rng.integers(0, E, (S, K)), (z_SL, weights_Sk, *matrices), rng.normal(size=(S, L))


def separate(ids_Sk, z_SL, weights_Sk, w_gate_ELF, w_up_ELF, w_down_EFL):
    """Two products for gate and up, and the weights where the results are summed."""
    order_M, sizes_E = sort_by_expert(ids_Sk, E)
    rows_ML = permute(z_SL, order_M, K)
    hidden_MF = activation(grouped_matmul(rows_ML, w_gate_ELF, sizes_E), grouped_matmul(rows_ML, w_up_ELF, sizes_E))
    return combine(grouped_matmul(hidden_MF, w_down_EFL, sizes_E), weights_Sk, order_M)


def test_values_and_gradients_are_those_of_the_plain_composition():
    with float64():
        ids_Sk, arguments, d_u_SL = arrays()
        ids_Sk = jnp.asarray(ids_Sk, jnp.int32)

        def both(function):
            u_SL, pullback = jax.vjp(function, *map(jnp.asarray, arguments))
            return u_SL, *pullback(jnp.asarray(d_u_SL))

        ours = jax.jit(lambda: both(lambda *a: routed_experts(a[0], ids_Sk, *a[1:], activation=activation)))()
        plain = jax.jit(lambda: both(lambda *a: separate(ids_Sk, *a)))()
        for actual, expected in zip(ours, plain, strict=True):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
        z_SL, weights_Sk, w_gate_ELF, w_up_ELF, w_down_EFL = arguments
        for s in range(S):
            wanted = sum(
                weights_Sk[s, j] * (np.tanh(z_SL[s] @ w_gate_ELF[e]) * (z_SL[s] @ w_up_ELF[e])) @ w_down_EFL[e]
                for j, e in enumerate(ids_Sk[s])
            )
            np.testing.assert_allclose(ours[0][s], wanted, rtol=1e-12)


def test_choices_of_no_expert_add_nothing():
    ids_Sk, arguments, _ = arrays()
    arguments = [jnp.asarray(a, jnp.float32) for a in arguments]
    ids_Sk[:, 1] = E
    with_none = routed_experts(arguments[0], jnp.asarray(ids_Sk), *arguments[1:], activation=activation)
    kept = routed_experts(
        arguments[0], jnp.asarray(ids_Sk[:, ::2]), arguments[1][:, ::2], *arguments[2:], activation=activation
    )  # the first and the third choice
    np.testing.assert_allclose(with_none, kept, rtol=1e-5, atol=1e-5)


def test_sum_choices_is_combine_with_weights_one_and_keeps_the_rows_dtype_in_the_gradient():
    ids_Sk, _, _ = arrays()
    order_M, _ = sort_by_expert(jnp.asarray(ids_Sk), E)
    rows_ML = jnp.asarray(np.random.default_rng(1).normal(size=(S * K, L)), jnp.bfloat16)
    y_SL, pullback = jax.vjp(lambda rows: sum_choices(rows, order_M, K), rows_ML)
    assert y_SL.dtype == jnp.float32
    np.testing.assert_array_equal(y_SL, combine(rows_ML, jnp.ones((S, K), jnp.float32), order_M))
    (d_rows_ML,) = pullback(y_SL)
    assert d_rows_ML.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_rows_ML, permute(y_SL.astype(jnp.bfloat16), order_M, K))
    with pytest.raises(ValueError, match="sum_choices"):
        sum_choices(rows_ML[:-1], order_M, K)
