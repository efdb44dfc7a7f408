"""SiTU-GLU, the gated activation of Kimi K3's experts (report equations 12, 18 and 19), cheap enough for what memory delivers.

bfloat16 is computed in float32 from three exponentials and one reciprocal, and the backward pass computes them again: nothing
but the arguments is stored, and both gradients come from one pass. Wider types take tanh and sigmoid as they are.

Shapes: elementwise.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class SituGLU:
    """`beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`, bounded by `beta * linear_beta`.

    Called with gate and up of one dtype. bfloat16 is computed in float32 and rounded once, with an absolute error of about 5e-7 of each
    factor's bound before that; other dtypes are computed in themselves, float16 in float32.
    """

    beta: float
    linear_beta: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden activations, in gate's dtype."""
        if gate.dtype == jnp.bfloat16:
            return _rounded(self, gate, up)
        g, u = (array.astype(jnp.promote_types(jnp.float32, array.dtype)) for array in (gate, up))
        hidden = self.beta * jnp.tanh(g / self.beta) * jax.nn.sigmoid(g) * self.linear_beta * jnp.tanh(u / self.linear_beta)
        return hidden.astype(gate.dtype)

    def product(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The activation of float32 arguments."""
        p, s, q, over = self._exponentials(gate, up)
        gated = jnp.where(gate >= 0, 1.0 - p, (p - 1.0) * s)
        linear = jnp.where(up >= 0, 1.0 - q, q - 1.0)
        return gated * linear * (over * (self.beta * self.linear_beta))

    def factors_and_slopes(self, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """`beta tanh(gate / beta) sigmoid(gate)`, `linear_beta tanh(up / linear_beta)`, and the derivative of each by its argument."""
        p, s, q, over = self._exponentials(gate, up)
        one_p, one_s = 1.0 + p, 1.0 + s
        over_ps, over_q = over * (1.0 + q), over * (one_p * one_s)  # 1 / ((1 + p) (1 + s)) and 1 / (1 + q)
        positive = gate >= 0
        tanh, linear = jnp.where(positive, 1.0 - p, p - 1.0), jnp.where(up >= 0, 1.0 - q, q - 1.0)  # times 1 + p and 1 + q
        sigmoid, rest = jnp.where(positive, 1.0, s), jnp.where(positive, s, 1.0)  # it and 1 less it, times 1 + s
        tanh, sigmoid = self.beta * tanh, sigmoid * over_ps
        slope = (4.0 * p * one_s + tanh * rest * one_p) * sigmoid * over_ps
        return tanh * sigmoid, self.linear_beta * linear * over_q, slope, 4.0 * q * over_q * over_q

    def _exponentials(self, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """p = exp(-2 |gate| / beta), s = exp(-|gate|), q = exp(-2 |up| / linear_beta), and 1 / ((1 + p) (1 + s) (1 + q))."""
        size = jnp.abs(gate)
        p = jnp.exp2(size * (-2.0 * math.log2(math.e) / self.beta))
        s = p * p if self.beta == 4 else jnp.exp2(size * -math.log2(math.e))
        q = jnp.exp2(jnp.abs(up) * (-2.0 * math.log2(math.e) / self.linear_beta))
        root = lax.rsqrt((1.0 + p) * (1.0 + s) * (1.0 + q))  # of 1 to 8; squared it is the reciprocal, for less than a division
        return p, s, q, root * root


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(situ: SituGLU, gate: jax.Array, up: jax.Array) -> jax.Array:
    return situ.product(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def _rounded_forward(situ: SituGLU, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rounded(situ, gate, up), (gate, up)


def _rounded_backward(situ: SituGLU, saved: tuple[jax.Array, jax.Array], d_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up = saved
    gated, linear, gate_slope, up_slope = situ.factors_and_slopes(gate.astype(jnp.float32), up.astype(jnp.float32))
    d = d_hidden.astype(jnp.float32)
    return (d * linear * gate_slope).astype(gate.dtype), (d * gated * up_slope).astype(up.dtype)


_rounded.defvjp(_rounded_forward, _rounded_backward)
