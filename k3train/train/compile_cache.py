"""Compiled programs: kept on disk, so that a resumed or repeated run starts at once, and quick to make where they run briefly."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax


def enable() -> None:
    """Points JAX's compilation cache at a folder of this machine's, unless the user chose one (`JAX_COMPILATION_CACHE_DIR`).

    Must run before the first compilation. The folder is `$XDG_CACHE_HOME` or `~/.cache`, then `k3train/jax/<processor>`: programs
    for the CPU hold its own instructions, and home folders are shared between machines. A read program is the written one, bit for
    bit, so a resumed run computes what the first one did.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "k3train" / "jax" / _processor()))


def runs_briefly() -> dict[str, int]:
    """Compiler options for a program that does not run for long: on CPUs, optimising it would take longer than it runs."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def _processor() -> str:
    """A short name for the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return f"{platform.machine()}-{hashlib.sha256(repr((platform.processor(), features)).encode()).hexdigest()[:12]}"
