"""Compiler options for tests, where compiling is nearly all of the time."""

from __future__ import annotations

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
