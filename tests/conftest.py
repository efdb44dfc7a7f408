"""What every test shares: the platform, a compilation cache that outlives the run, and hypothesis' settings.

The environment is set here, before any test imports JAX, and only where the caller has not set it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # an installed libtpu would wait for a metadata server
# Compiling is most of the tests' time: a fifth less of it. Compilers for GPUs and TPUs would read these flags too.
if os.environ["JAX_PLATFORMS"] == "cpu" and importlib.util.find_spec("libtpu") is None:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

# A first call compiles, so deadlines mean nothing; a fixed seed lets a failure be repeated by anyone.
hypothesis.settings.register_profile(
    "k3train", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("k3train")


@pytest.fixture
def fresh_compilation() -> Iterator[None]:
    """Compiles in this test bypass the persistent cache: for tests that time or count compilations."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def use_cache(enabled: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # JAX asks the setting once per process

    before = jax.config.jax_enable_compilation_cache
    use_cache(False)
    yield
    use_cache(before)
