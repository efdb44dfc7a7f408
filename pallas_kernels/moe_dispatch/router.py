"""The router's product as exact as in float32, on the tensor cores: the router is split into three bfloat16 terms.

Shapes: S tokens (or any leading axes), D model width, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.target import target


def router_logits(x_SD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """`x_SD @ router_DE` with the precision of float32 or more, which the choice of experts wants (Kimi K3 report, equation 11).

    bfloat16 tokens times a float32 router, on a GPU, are three products in bfloat16, as a float32 number is the sum of three
    of bfloat16: a third of a float32 product's time or less. There the gradient to the tokens, which is rounded to
    bfloat16, is right to 2e-5 before that, and the gradient to the router as exact as the product.

    Args:
        x_SD: tokens, bfloat16, float32 or float64, with any leading axes.
        router_DE: the router's matrix, float.

    Returns:
        logits_SE, float32 (float64 if either argument is).
    """
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(x_SD.dtype, router_DE.dtype))
    if x_SD.dtype == jnp.bfloat16 and dtype == jnp.float32 and target().platform == "gpu":
        x_MD = x_SD.reshape(-1, x_SD.shape[-1])
        return split_product(x_MD, router_DE.astype(dtype)).reshape(*x_SD.shape[:-1], router_DE.shape[1])
    return jnp.einsum("...d,de->...e", x_SD.astype(dtype), router_DE.astype(dtype), precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def split_product(x_SD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """The product of bfloat16 tokens [S, D] and a float32 router [D, E] from three products in bfloat16; float32."""
    return _sum_thirds(_product(x_SD, _side_by_side(*_terms(router_DE)), 1, 0))


def _forward(x_SD, router_DE):
    return split_product(x_SD, router_DE), (x_SD, router_DE)


def _backward(saved, d_logits_SE):
    x_SD, router_DE = saved
    (high_SE, middle_SE, low_SE), (high_DE, middle_DE, _) = _terms(d_logits_SE), _terms(router_DE)
    dx_SD = _product(_side_by_side(high_SE, middle_SE, high_SE), _side_by_side(high_DE, high_DE, middle_DE), 1, 1)
    d_router_DE = _sum_thirds(_product(x_SD, _side_by_side(high_SE, middle_SE, low_SE), 0, 0))
    return dx_SD.astype(x_SD.dtype), d_router_DE


split_product.defvjp(_forward, _backward)


def _terms(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three bfloat16 arrays whose sum is a float32 one. A cast there and back would be simplified away; `reduce_precision` is not."""
    high = lax.reduce_precision(x, 8, 7)
    middle = lax.reduce_precision(x - high, 8, 7)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), (x - high - middle).astype(jnp.bfloat16)


def _side_by_side(*terms: jax.Array) -> jax.Array:
    return jnp.concatenate(terms, axis=1)


def _product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _sum_thirds(x: jax.Array) -> jax.Array:
    """The smallest terms first."""
    high, middle, low = jnp.split(x, 3, axis=1)
    return high + (middle + low)
