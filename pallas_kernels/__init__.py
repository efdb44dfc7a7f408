"""Kernels for Kimi-K3-class models: pure functions on arrays, each with a plain XLA form that defines it."""
