"""The finite gate: a step with a non-finite loss or gradient changes nothing but its counters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3train.optim.global_norm import global_norm


class FiniteGateState(NamedTuple):
    """State of what is behind the gate, and int32 scalars."""

    inner: Any
    applied: Any
    """Steps applied since the start of the run; the schedules behind the gate count the same."""
    skipped: Any
    """Steps left out since the start of the run."""
    consecutive: Any
    """Steps left out since the last one applied."""


def finite_gate(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets `inner` see finite steps only.

    Its `update` takes `loss`, a scalar, beside what `inner` takes. If it or any gradient is NaN or infinite, or the gradients' norm
    overflows, all updates are zero and the inner state stays bit for bit: moments, schedule counts; the step's histograms and logits are
    dropped. Chosen by selects, not by products, so that no NaN survives as 0 * NaN.
    """
    behind = optax.with_extra_args_support(inner)

    def init(params: Any) -> FiniteGateState:
        applied, skipped, consecutive = (jnp.zeros((), jnp.int32) for _ in range(3))  # one buffer each, so that the state can be donated
        return FiniteGateState(behind.init(params), applied, skipped, consecutive)

    def update(grads: Any, state: FiniteGateState, params: Any = None, *, loss: jax.Array, **extra: Any) -> tuple[Any, FiniteGateState]:
        finite = jnp.isfinite(loss) & jnp.isfinite(global_norm(grads))
        updates, inner_state = behind.update(grads, state.inner, params, **extra)
        passed = finite.astype(jnp.int32)
        return _select(finite, updates, jax.tree.map(jnp.zeros_like, updates)), FiniteGateState(
            inner=_select(finite, inner_state, state.inner),
            applied=state.applied + passed,
            skipped=state.skipped + (1 - passed),
            consecutive=(state.consecutive + 1) * (1 - passed),
        )

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]  # the type of `update` there has no extra arguments


def _select(finite: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), yes, no)
