"""What a step tells of the inside of the model: per layer how experts, depths, decays and logits are used, and the size of gradients
and updates by module.

Legend: E experts, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3train.config import ModelConfig
from k3train.models import stacks
from k3train.optim.paths import path_of
from k3train.train.state import Tree
from k3train.train.step import Aux, Metrics

AS_IS = ("router_entropy", "bias_spread", "kda_log_decay", "kda_at_bound", "source_weights_mixer", "source_weights_ffn", "finite")


def build_report(config: ModelConfig, qk_clip: float | None) -> Callable[[Aux, Tree, Tree], Metrics]:
    """(side outputs, gradients, updates) -> figures, one array over layers each; pure.

    `expert_load_max_over_mean` and `dead_experts` per MoE layer, `max_logit` and `clipped_heads` per attention layer, the side outputs
    named in `AS_IS`, and `gradient_rms/MODULE` and `update_rms/MODULE` per layer, or a scalar for a module outside the layers.
    """

    def report(aux: Aux, grads: Tree, updates: Tree) -> Metrics:
        metrics = {name: aux[name] for name in AS_IS if name in aux}
        if "expert_load" in aux:
            load_LE = aux["expert_load"].astype(jnp.float32)
            metrics["expert_load_max_over_mean"] = jnp.max(load_LE, axis=-1) / jnp.maximum(jnp.mean(load_LE, axis=-1), 1e-9)
            metrics["dead_experts"] = jnp.sum(aux["expert_load"] == 0, axis=-1)
        if "max_logit" in aux:
            metrics["max_logit"] = jnp.max(aux["max_logit"], axis=-1)
            if qk_clip is not None:
                metrics["clipped_heads"] = jnp.sum(aux["max_logit"] > qk_clip, axis=-1)
        for name, tree in (("gradient_rms", grads), ("update_rms", updates)):
            metrics |= {f"{name}/{module}": value for module, value in rms_by_module(tree, config).items()}
        return metrics

    return report


def rms_by_module(tree: Tree, config: ModelConfig) -> dict[str, jax.Array]:
    """Root mean square of a tree shaped like the parameters, by module: [L] for the layers' modules, a scalar for the others.

    A module is a layer's part such as `mixer` or `ffn_norm`; a layer without it has 0. Router biases, which get no gradient, are left out.
    """
    groups = stacks.groups(config)
    squares: dict[tuple[str, ...], jax.Array] = {}  # of a module outside the layers, or of a stack's module [R]
    sizes: dict[tuple[str, ...], int] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if path_of(keys)[-1] == "router_bias":
            continue
        path, values = path_of(keys), leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        stack = (path[3], path[1], path[2]) if path[0] == "groups" else (path[0],)
        dims = tuple(range(1 if path[0] == "groups" else 0, leaf.ndim))
        squares[stack] = squares.get(stack, 0.0) + jnp.sum(values * values, axis=dims)
        sizes[stack] = sizes.get(stack, 0) + leaf.size // (leaf.shape[0] if path[0] == "groups" else 1)
    result = {stack[0]: jnp.sqrt(squares[stack] / sizes[stack]) for stack in squares if len(stack) == 1}
    for module in dict.fromkeys(stack[0] for stack in squares if len(stack) == 3):
        stacks_of_module = [stack for stack in squares if stack[0] == module]
        means = jnp.concatenate([jnp.zeros(1), *(squares[stack] / sizes[stack] for stack in stacks_of_module)])
        entry = dict.fromkeys(range(config.num_layers), 0)  # where a layer's mean stands among `means`; 0 for a layer without the module
        number = 1
        for _, index, position in stacks_of_module:
            for repeat in range(groups[int(index)].repeats):
                entry[groups[int(index)].layer(repeat, int(position))] = number
                number += 1
        result[module] = jnp.sqrt(means[jnp.array([entry[layer] for layer in range(config.num_layers)])])
    return result


def where_not_finite(metrics: Mapping[str, Any], finite_L: Sequence[bool], config: ModelConfig) -> str:
    """Names the place where a step's numbers stopped being finite, from its metrics and the layers' `finite` marks, on the host.

    Forward, it is the first layer that left something not finite; if all are whole, the loss. In the backward pass, which runs from the
    last layer to the first, it is the last layer with such a gradient.
    """

    def layer(number: int) -> str:
        return f"layer {number} ({config.mixers[number]}, {config.feed_forwards[number]})"

    if not all(finite_L):
        return f"{layer(list(finite_L).index(False))}, in the forward pass"
    if not np.isfinite(metrics["loss"]):
        return "the head or the loss, after the last layer"
    gradients = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("gradient_rms/")}
    bad = {module: [i for i, x in enumerate(np.atleast_1d(value)) if not np.isfinite(x)] for module, value in gradients.items()}
    top = [module for module in ("head", "norm", "output_res") if bad.get(module)]
    if top:
        return f"{top[0]}, in the backward pass"
    layers = [(numbers[-1], module) for module, numbers in bad.items() if numbers and gradients[module].ndim]
    if layers:
        number, module = max(layers)
        return f"{layer(number)}, {module}, in the backward pass"
    return "the embedding, in the backward pass" if bad.get("embed") else "the gradient's norm, which overflows"
