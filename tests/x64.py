"""Float64 in tests, on every supported JAX."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax


def float64() -> AbstractContextManager[None]:
    """Context in which JAX makes and keeps float64 arrays."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)
