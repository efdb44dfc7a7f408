"""Lowers every variant of the Hopper kernels for cuda, without a GPU; run by test_hopper.py in a fresh process."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pallas_kernels.grouped_matmul.hopper_rows import RowsConfig, rows_matmul  # noqa: E402
from pallas_kernels.grouped_matmul.hopper_weights import weights_gradient  # noqa: E402

SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(name, function, *shapes, must_contain="mosaic_gpu"):
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert must_contain in text, name
    print(name, "lowered", flush=True)


def accumulate(x_MK, dy_MN, sizes_E, total_EKN):
    return weights_gradient(x_MK, dy_MN, sizes_E, accumulate_into=total_EKN)


if __name__ == "__main__":
    for transpose_w, w in (
        (False, struct(4, 512, 384)),
        (True, struct(4, 384, 512)),
        (False, struct(4, 64, 64)),
        (True, struct(4, 64, 64)),
    ):
        rows = struct(256, w.shape[2 if transpose_w else 1])
        lower(f"rows-{transpose_w}-{w.shape[1]}", functools.partial(rows_matmul, transpose_w=transpose_w), rows, w, SIZES)
    lower("rows-listed", functools.partial(rows_matmul, config=RowsConfig(walked=0)), struct(256, 512), struct(4, 512, 384), SIZES)
    for k, n in ((512, 384), (384, 512), (128, 64), (64, 64)):  # tiles of 192, 256 and 64 columns
        rows = (struct(256, k), struct(256, n), SIZES)
        for out_dtype in (jnp.bfloat16, jnp.float32):
            lower(f"weights-{k}-{n}-{out_dtype.__name__}", functools.partial(weights_gradient, out_dtype=out_dtype), *rows)
        lower(f"accumulate-{k}-{n}", accumulate, *rows, struct(4, k, n, dtype=jnp.float32), must_contain="output_operand_alias")
