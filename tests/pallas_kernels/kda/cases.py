"""What the KDA tests share: running a form with all its gradients, and comparing results.

B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.chunked import kda_chunked
from pallas_kernels.kda.recurrent import kda_recurrent
from tests.quick import QUICK_COMPILE

GOLDEN = Path(__file__).parents[2] / "golden"
LOWER_BOUND = -5.0
FORMS = {"recurrent": kda_recurrent, "chunked": kda_chunked, "chunked64": partial(kda_chunked, chunk_size=64)}


class Inputs(NamedTuple):
    """The eight differentiable inputs, in the order of `kda`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    initial_state: jax.Array


class Results(NamedTuple):
    """Output, final state, and the gradients of sum(o * d_o) + sum(final_state * d_final)."""

    o: jax.Array
    final_state: jax.Array
    gradients: Inputs


@cache
def with_gradients(form: str) -> Callable[..., Results]:
    """Jitted (inputs, d_o, d_final, segment_ids) -> Results for one form."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(inputs: Inputs, d_o: jax.Array, d_final: jax.Array, segment_ids: jax.Array | None = None) -> Results:
        def call(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
            return FORMS[form](*inputs[:7], lower_bound=LOWER_BOUND, segment_ids_BT=segment_ids, initial_state_BHKV=inputs.initial_state)

        (o, final_state), pull_back = jax.vjp(call, inputs)
        return Results(o, final_state, *pull_back((d_o.astype(o.dtype), d_final.astype(final_state.dtype))))

    return run


def load(case: str, dtype: jnp.dtype) -> tuple[dict[str, np.ndarray], Inputs]:
    """A golden file, and its inputs as arrays of the dtype."""
    arrays = dict(np.load(GOLDEN / f"kda_{case}.npz"))
    heads, width = arrays["q"].shape[2:]
    names = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
    inputs = Inputs(*(jnp.asarray(arrays[name], dtype) for name in names))
    return arrays, inputs._replace(dt_bias=inputs.dt_bias.reshape(heads, width))


def golden_gradients(arrays: dict[str, np.ndarray]) -> Inputs:
    """The stored gradients of a golden file."""
    heads, width = arrays["q"].shape[2:]
    names = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
    gradients = Inputs(*(arrays[f"d_{name}"] for name in names))
    return gradients._replace(dt_bias=gradients.dt_bias.reshape(heads, width))


def assert_near(got: jax.Array, want: np.ndarray, limit: float, name: str) -> None:
    """Largest difference over largest expected entry, as the golden arrays' README measures."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    assert error <= limit, f"{name}: off by {error:.2e} of the largest entry, limit {limit:g}"


def assert_all_near(got: Results, want: Results, limit: float) -> None:
    """`assert_near` on the output, the final state and each gradient."""
    assert_near(got.o, want.o, limit, "o")
    assert_near(got.final_state, want.final_state, limit, "final_state")
    for name, a, b in zip(Inputs._fields, got.gradients, want.gradients, strict=True):
        assert_near(a, b, limit, f"gradient of {name}")
