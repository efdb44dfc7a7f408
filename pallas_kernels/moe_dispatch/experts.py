"""The routed experts of a layer: sort, permute, gate and up in one grouped matmul, activation, down, and the sum back to tokens.

A token's weight for an expert multiplies the hidden activations, inside the activation's own pass over memory, and not the
expert's result: the sum is the same, and the backward pass needs no stored result rows to differentiate the weight.

Shapes: S tokens, k choices of a token, M = S k rows, L latent width, F hidden width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import Implementation, grouped_matmul
from pallas_kernels.moe_dispatch.choice import on_hopper
from pallas_kernels.moe_dispatch.dispatch import permute, sort_by_expert, sum_choices
from pallas_kernels.moe_dispatch.situ import SituGLU


def routed_experts(
    z_SL: jax.Array,
    expert_ids_Sk: jax.Array,
    weights_Sk: jax.Array,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums each token's experts, weighted: `u[s] = sum_j weights[s, j] down_e(activation(gate_e(z[s]), up_e(z[s])))`, e = ids[s, j].

    Source: Kimi K3 report, section 2.3 (equations 12 and 13).

    Args:
        z_SL: tokens, bfloat16, float32 or float64.
        expert_ids_Sk: integer expert of each choice; one outside 0..E-1 adds nothing.
        weights_Sk: float weight of each choice, kept in its own dtype until it multiplies.
        w_gate_ELF, w_up_ELF, w_down_EFL: the experts' matrices, in the tokens' dtype.
        activation: of gate and up, elementwise. A `SituGLU` is one kernel with the weights where the Hopper kernels run.
        implementation: of the grouped matmuls, see `grouped_matmul`; the dispatch's kernels go with `hopper`.

    Returns:
        u_SL, float32 (float64 for float64), the sum over a token's experts accumulated in it.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit, as `sort_by_expert`, `permute` and `grouped_matmul` say.
    """
    active, hidden = expert_ids_Sk.shape[1], w_gate_ELF.shape[2]
    order_M, sizes_E = sort_by_expert(expert_ids_Sk, w_gate_ELF.shape[0])
    # One matmul for both: the gradient to the rows is then one product over 2 F, not two to write, read and add.
    w_both_ELG = jnp.concatenate([w_gate_ELF, w_up_ELF], axis=2)
    rows_ML = permute(z_SL, order_M, active, implementation)
    both_MG = grouped_matmul(rows_ML, w_both_ELG, sizes_E, implementation=implementation)
    weight_M = weights_Sk.reshape(-1).at[order_M].get(unique_indices=True, mode="promise_in_bounds")
    hidden_MF = _weighted(activation, both_MG, weight_M, hidden, implementation)
    return sum_choices(grouped_matmul(hidden_MF, w_down_EFL, sizes_E, implementation=implementation), order_M, active, implementation)


def _weighted(
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    both_MG: jax.Array,
    weight_M: jax.Array,
    hidden: int,
    implementation: Implementation | None,
) -> jax.Array:
    """Weight times activation, rounded once, after the weight."""
    if isinstance(activation, SituGLU) and on_hopper(implementation):
        from pallas_kernels.moe_dispatch import hopper_situ

        if hopper_situ.refusal(both_MG) is None:
            return hopper_situ.weighted_situ(activation, both_MG, weight_M.astype(jnp.float32))
    wide = jnp.promote_types(jnp.float32, both_MG.dtype)
    gate_MF, up_MF = both_MG[:, :hidden].astype(wide), both_MG[:, hidden:].astype(wide)
    return (activation(gate_MF, up_MF) * weight_M[:, None]).astype(both_MG.dtype)
