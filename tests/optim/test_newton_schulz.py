"""Newton-Schulz against reference arrays, in every arithmetic."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3train.optim.newton_schulz import newton_schulz
from tests.golden import EXACT, check, load
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

GOLDEN = load("muon_newton_schulz")
CASES = sorted(name.removeprefix("ns_in_") for name in GOLDEN if name.startswith("ns_in_"))


def run(matrices, dtype) -> np.ndarray:
    return np.asarray(jax.jit(partial(newton_schulz, dtype=dtype), compiler_options=QUICK_COMPILE)(matrices))


@pytest.mark.numerics
@pytest.mark.parametrize("case", CASES)
def test_golden(case: str):
    matrix = GOLDEN[f"ns_in_{case}"]
    check(run(matrix, jnp.float32), GOLDEN[f"ns_out_{case}"], 1e-3 if case == "rank1" else 5e-5, "float32")
    with float64():
        check(run(matrix.astype(np.float64), jnp.float64), GOLDEN[f"ns_out64_{case}"], EXACT, "float64")


def by_hand(matrix: np.ndarray) -> np.ndarray:
    """The same iteration in NumPy: operands rounded to bfloat16, everything else float32."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    a, b, c = GOLDEN["coefficients"]
    x = rounded(matrix / (np.linalg.norm(matrix) + np.float32(1e-7)))
    for _ in range(5):
        gram = x @ x.T
        x = rounded(a * x + rounded(b * gram + c * (rounded(gram) @ rounded(gram))) @ x)
    return x


@pytest.mark.numerics
@pytest.mark.parametrize("case", ["gauss0", "gauss2", "gauss3", "orthogonal"])
def test_bfloat16_is_the_default(case: str):
    """Only the operands are rounded. That moves entries by up to a tenth of the largest, but no singular value far out of the range."""
    matrix = GOLDEN[f"ns_in_{case}"]
    actual = run(matrix, jnp.bfloat16)
    np.testing.assert_array_equal(actual, np.asarray(jax.jit(newton_schulz, compiler_options=QUICK_COMPILE)(matrix)))
    assert actual.dtype == np.float32
    check(actual, by_hand(matrix), 1e-2, case)
    values, exact = (np.linalg.svd(x, compute_uv=False) for x in (actual, GOLDEN[f"ns_out64_{case}"]))
    assert exact.min() - 0.06 < values.min() and values.max() < exact.max() + 0.06


def test_a_batch_is_its_matrices_and_zero_stays_zero():
    batch = np.random.default_rng(0).normal(size=(2, 3, 6, 4)).astype(np.float32) * np.float32(1e-4)
    batch[1, 2] = 0.0
    together = run(batch, jnp.float32)
    alone = run(batch[0, 1], jnp.float32)
    np.testing.assert_allclose(together[0, 1], alone, atol=1e-6)
    np.testing.assert_array_equal(together[1, 2], 0.0)
    assert np.all(np.isfinite(together))
