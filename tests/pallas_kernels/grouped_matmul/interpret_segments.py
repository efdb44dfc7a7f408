"""Interprets the weights kernel with groups cut into segments; run by test_hopper.py in a process with many XLA threads."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pallas_kernels.grouped_matmul.hopper_weights import WeightsConfig, weights_gradient  # noqa: E402

M, K, N = 456, 128, 128
SIZES = ([11, 0, 200, 230], [5, 30, 60, 90], [0, 0, 456, 0])  # rows past the sum hold NaN
CONFIGS = {
    jnp.bfloat16: WeightsConfig(tile_n=128, stages=2, num_sms=2, segment=64),
    jnp.float32: WeightsConfig(tile_n=128, stages=2, slots=2, num_sms=2, segment=64),
}


def error(out_dtype: jnp.dtype, accumulate: bool, run, sizes: list[int]) -> float:
    rng = np.random.default_rng(0)
    x_MK, dy_MN = rng.normal(size=(M, K)), rng.normal(size=(M, N))
    x_MK[sum(sizes) :] = dy_MN[sum(sizes) :] = np.nan
    x_MK, dy_MN = (jnp.asarray(array, jnp.bfloat16) for array in (x_MK, dy_MN))
    total_EKN = jnp.asarray(rng.normal(size=(len(sizes), K, N)), jnp.float32)
    expected = np.asarray(total_EKN, np.float64) * accumulate
    for group, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        rows = slice(start, start + size)
        expected[group] += np.asarray(x_MK[rows], np.float64).T @ np.asarray(dy_MN[rows], np.float64)
    actual = run(x_MK, dy_MN, jnp.asarray(sizes, jnp.int32), *([total_EKN] if accumulate else []))
    assert actual.dtype == out_dtype
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    errors = {}
    for out_dtype, accumulate in ((jnp.bfloat16, False), (jnp.float32, False), (jnp.float32, True)):
        weights = functools.partial(weights_gradient, config=CONFIGS[out_dtype], interpret=plgpu.InterpretGPUParams())
        plain = functools.partial(weights, out_dtype=out_dtype)
        run = jax.jit((lambda x, dy, sizes, total, weights=weights: weights(x, dy, sizes, accumulate_into=total)) if accumulate else plain)
        for sizes in SIZES:
            errors[f"{jnp.dtype(out_dtype).name} {accumulate} {sizes}"] = error(out_dtype, accumulate, run, sizes)
    print(json.dumps(errors))
