"""Reference arrays from the published modelling code, and how to compare with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
EXACT = 1e-6  # limit of a float64 run: the float32 rounding of the stored values


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def check(actual, expected, limit: float, what: str = "") -> None:
    """Asserts max|a - b| / max|expected| <= limit over the array."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.all(np.isfinite(actual)), f"{what}: not finite"
    error = np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), np.finfo(np.float32).tiny)
    assert error <= limit, f"{what}: relative error {error:.2e} above {limit:.0e}"
