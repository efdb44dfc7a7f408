"""The deterministic mode: nothing on CPUs; on GPUs two options and a cache in the run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from k3train.config import Experiment, ModelConfig
from k3train.train import determinism

EXPERIMENT = Experiment(name="run", model=ModelConfig(), deterministic=True)
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
    "jax_enable_compilation_cache",
)


def settings() -> dict[str, object]:
    return {name: getattr(jax.config, name) for name in SETTINGS}


@pytest.fixture
def restored_settings():
    before = settings()
    yield before
    for name, value in before.items():
        jax.config.update(name, value)


def test_cpus_are_left_alone(tmp_path: Path, restored_settings: dict[str, object]):
    determinism.prepare(EXPERIMENT, tmp_path)
    assert settings() == restored_settings and determinism.compiler_options(EXPERIMENT) == {}


def test_gpus_get_it_only_on_request(tmp_path: Path, restored_settings: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plain = dataclasses.replace(EXPERIMENT, deterministic=False)
    determinism.prepare(plain, tmp_path)
    assert settings() == restored_settings and determinism.compiler_options(plain) == {}
    determinism.prepare(EXPERIMENT, tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0


def test_the_compiler_knows_the_options(monkeypatch: pytest.MonkeyPatch):
    """Its debug options are the same on every platform; an unknown one raises."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = determinism.compiler_options(EXPERIMENT)
    assert options and jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2.0
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 2, compiler_options={"xla_gpu_no_such_option": True})(1.0)
