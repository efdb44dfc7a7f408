"""Runs on GPUs that repeat bit for bit (`Experiment.deterministic`).

Two things vary there. Some kernels add up in whatever order their threads arrive (scatters, some of cuBLAS's and cuDNN's): these are
left out. And XLA picks kernels by timing them, which falls out differently from compilation to compilation: what it chose, and the
programs themselves, are kept in the run folder, and a resumed run reads them. So autotuning stays on, at its full use.

On CPUs and TPUs a compiled program repeats itself, and nothing here does anything.
"""

from __future__ import annotations

from pathlib import Path

import jax

from k3train.config import Experiment

PROGRAMS_FOLDER = "programs"
"""In the run folder: compiled programs, and under `xla_gpu_per_fusion_autotune_cache_dir` the choices of the autotuner."""


def prepare(experiment: Experiment, run_folder: Path) -> None:
    """Points JAX's compilation cache, which keeps autotuned choices too, at the run folder. Call it before the first compilation."""
    if not _applies(experiment):
        return
    jax.config.update("jax_compilation_cache_dir", str(run_folder.absolute() / PROGRAMS_FOLDER))
    # By default programs that compile within a second are not kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir")
    jax.config.update("jax_enable_compilation_cache", True)


def compiler_options(experiment: Experiment) -> dict[str, bool]:
    """For `jax.jit` of everything that a run computes with.

    `xla_gpu_deterministic_ops` is not used: it switches autotuning off as well.
    """
    return {"xla_gpu_exclude_nondeterministic_ops": True} if _applies(experiment) else {}


def _applies(experiment: Experiment) -> bool:
    return experiment.deterministic and jax.default_backend() == "gpu"
