"""Gated activations and the feed-forward block made of them.  Legend: B batch, T tokens, D model, F hidden."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.layout import SituGLU
from k3train.models.norms import wide
from k3train.models.parameters import weight


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate sigmoid(gate) * up, which SiTU-GLU equals near zero; in at least float32, cast back to gate's dtype."""
    g, u = gate.astype(wide(gate.dtype)), up.astype(wide(up.dtype))
    return (g * jax.nn.sigmoid(g) * u).astype(gate.dtype)


def activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The gated activation (gate, up) -> hidden of a model; SiTU-GLU is report equations 12, 18 and 19."""
    return swiglu if config.activation == "swiglu" else SituGLU(beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class FeedForward(nnx.Module):
    """W_down activation(W_gate x, W_up x): a dense layer's block, and the shared experts."""

    def __init__(self, config: ModelConfig, hidden: int):
        self.config = config
        self.gate_proj = weight((config.d_model, hidden), ("embed", "mlp"), config)
        self.up_proj = weight((config.d_model, hidden), ("embed", "mlp"), config)
        self.down_proj = weight((hidden, config.d_model), ("mlp", "embed"), config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D], in x's dtype."""
        dtype = x_BTD.dtype
        gate_BTF, up_BTF = x_BTD @ self.gate_proj[...].astype(dtype), x_BTD @ self.up_proj[...].astype(dtype)
        return activation(self.config)(gate_BTF, up_BTF) @ self.down_proj[...].astype(dtype)
