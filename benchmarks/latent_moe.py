"""Speed of one LatentMoE layer on one Hopper GPU, forward and backward, against its matmuls at 700 TFLOP/s; and of its parts.

    python benchmarks/latent_moe.py --output docs/benchmarks/latent_moe_h200.json

The values and gradients of a layer of fewer tokens, and of its routed experts alone, are compared with the XLA form in float32.
The layer, the same with some of it in XLA, and its parts are timed as `benchmarks/grouped_matmul.py` does: the median of three windows
of calls, each window one program, in processes of their own so that they compile in parallel.
The router's product counts at its own rate: float32 proper, 67 TFLOP/s by the data sheet, for its forward and backward.

Shapes: S tokens, D model, L latent, F hidden of an expert, E experts, k choices, M = S k rows, H hidden of the shared experts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.grouped_matmul import READY, environment, in_turn, repeated, result_in, run_all, windows  # noqa: E402
from pallas_kernels.grouped_matmul import grouped_matmul  # noqa: E402
from pallas_kernels.moe_dispatch import (  # noqa: E402
    SituGLU,
    combine,
    permute,
    routed_experts,
    router_histogram,
    router_logits,
    sort_by_expert,
    sum_choices,
)

S, D, L, F, E, K, H = 32768, 2048, 1024, 768, 128, 8, 2 * 768
RATE, ROUTER_RATE = 700e12, 67e12  # FLOP/s; the second in float32
SITU = SituGLU(beta=4.0, linear_beta=25.0)


def plain_situ(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation from tanh and sigmoid in float32, differentiated by JAX."""
    return SITU(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def plain_logits(x_SD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """The router's product in float32."""
    return jnp.einsum("sd,de->se", x_SD.astype(jnp.float32), router_DE, precision=lax.Precision.HIGHEST)


def separate_experts(z_SL, ids_Sk, weights_Sk, w_gate_ELF, w_up_ELF, w_down_EFL, *, activation, implementation):
    """The same experts without what `routed_experts` fuses: two products for gate and up, weights where the results are summed."""
    order_M, sizes_E = sort_by_expert(ids_Sk, w_gate_ELF.shape[0])
    rows_ML = permute(z_SL, order_M, ids_Sk.shape[1], "xla")
    matmul = partial(grouped_matmul, group_sizes_E=sizes_E, implementation=implementation)
    hidden_MF = activation(matmul(rows_ML, w_gate_ELF), matmul(rows_ML, w_up_ELF))
    return combine(matmul(hidden_MF, w_down_EFL), weights_Sk, order_M)


def layer(
    params: dict,
    x_SD: jax.Array,
    *,
    implementation: str | None,
    experts: Callable = routed_experts,
    activation: Callable = SITU,
    logits: Callable = router_logits,
) -> jax.Array:
    """Stable LatentMoE (report equations 11 to 13) with shared experts; router and norm in float32, the rest in x's dtype."""
    scores_SE = jax.nn.sigmoid(logits(x_SD, params["router"].astype(jnp.float32)))
    _, ids_Sk = lax.top_k(lax.stop_gradient(scores_SE), K)
    chosen_Sk = jnp.take_along_axis(scores_SE, ids_Sk, axis=-1)
    weights_Sk = chosen_Sk / jnp.sum(chosen_Sk, axis=-1, keepdims=True)
    matrices = (params["w_gate"], params["w_up"], params["w_down"])
    u_SL = experts(x_SD @ params["down"], ids_Sk, weights_Sk, *matrices, activation=activation, implementation=implementation)
    u_SL = (u_SL * lax.rsqrt(jnp.mean(u_SL * u_SL, axis=-1, keepdims=True) + 1e-6)).astype(x_SD.dtype)
    shared_SD = activation(x_SD @ params["shared_gate"], x_SD @ params["shared_up"]) @ params["shared_down"]
    return u_SL @ params["up"] + shared_SD


def gradients(params: dict, x_SD: jax.Array, dy_SD: jax.Array, **options) -> tuple:
    """Output and all gradients."""
    y_SD, pullback = jax.vjp(partial(layer, **options), params, x_SD)
    return y_SD, pullback(dy_SD)


def draw(tokens: int, dtype=jnp.bfloat16) -> tuple[dict, jax.Array, jax.Array]:
    """Random parameters, input and cotangent; the values are bfloat16's whatever the dtype."""
    shapes = {
        "router": (D, E),
        "down": (D, L),
        "up": (L, D),
        "w_gate": (E, L, F),
        "w_up": (E, L, F),
        "w_down": (E, F, L),
        "shared_gate": (D, H),
        "shared_up": (D, H),
        "shared_down": (H, D),
    }
    keys = dict(zip((*shapes, "x", "dy"), jax.random.split(jax.random.key(0), len(shapes) + 2), strict=True))
    params = {name: jax.random.normal(keys[name], shape, jnp.bfloat16) * shape[-2] ** -0.5 for name, shape in shapes.items()}
    x_SD, dy_SD = (jax.random.normal(keys[name], (tokens, D), jnp.bfloat16) for name in ("x", "dy"))
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(dtype), (params, x_SD, dy_SD))


def draw_experts(tokens: int, dtype=jnp.bfloat16) -> tuple[dict, jax.Array, jax.Array]:
    """The same for the routed experts: matrices and choices (ids, normalised weights), latent input, cotangent."""
    params, _, _ = draw(tokens, dtype)
    z_SL, du_SL = (jax.random.normal(jax.random.key(seed), (tokens, L), jnp.bfloat16).astype(dtype) for seed in (1, 2))
    scores_Sk, ids_Sk = lax.top_k(jax.random.uniform(jax.random.key(3), (tokens, E)), K)
    choices = {"ids": ids_Sk, "weights": scores_Sk / jnp.sum(scores_Sk, axis=-1, keepdims=True)}
    return {name: params[name] for name in ("w_gate", "w_up", "w_down")} | choices, z_SL, du_SL


def experts_gradients(params: dict, z_SL: jax.Array, du_SL: jax.Array, *, implementation, experts=routed_experts, activation=SITU) -> tuple:
    """Output and all gradients of the routed experts."""
    ids_Sk, floats = params["ids"], {name: value for name, value in params.items() if name != "ids"}

    def run(floats, z_SL):
        matrices = (floats["w_gate"], floats["w_up"], floats["w_down"])
        return experts(z_SL, ids_Sk, floats["weights"], *matrices, activation=activation, implementation=implementation)

    u_SL, pullback = jax.vjp(run, floats, z_SL)
    return u_SL, pullback(du_SL.astype(u_SL.dtype))


def check(tokens: int) -> dict[str, dict]:
    """Relative L2 of outputs and gradients in bfloat16, ours and XLA's, against the XLA form in float32."""
    plain = dict(experts=separate_experts, activation=plain_situ)
    comparisons = {
        "layer": comparison(gradients, draw, tokens, dict(plain, logits=plain_logits)),
        "routed experts": comparison(experts_gradients, draw_experts, tokens, plain),
    }
    print(READY, flush=True)
    with in_turn():
        return {name: compare() for name, compare in comparisons.items()}


def comparison(function: Callable, arguments: Callable, tokens: int, plain: dict) -> Callable[[], dict[str, dict]]:
    """Compiles `function`, whose XLA form takes the options `plain`; what it returns gives {form: {"same_bits", name: relative L2}}."""

    def compiled(args, implementation, **options):
        program = jax.jit(partial(function, implementation=implementation, **options)).lower(*args)
        return program.compile({"xla_gpu_autotune_level": 0} if implementation == "xla" else None)  # its many small products take minutes

    def named(result):
        y, (d_params, dx) = result
        return {"y": y, "x": dx, **d_params}

    wide, narrow = arguments(tokens, jnp.float32), arguments(tokens)
    with jax.default_matmul_precision("highest"):
        reference = compiled(wide, "xla", **plain)
    forms = {"hopper": compiled(narrow, "hopper"), "xla": compiled(narrow, "xla", **plain)}

    def compare():
        expected, found = jax.device_get(named(reference(*wide))), {}
        for implementation, run in forms.items():
            first, second = run(*narrow), run(*narrow)
            leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
            errors: dict = {"same_bits": all(bool(jnp.array_equal(a, b)) for a, b in leaves)}
            for name, value in named(first).items():
                error = jnp.linalg.norm(value.astype(jnp.float32) - expected[name]) / jnp.linalg.norm(expected[name])
                errors[name] = round(float(error), 5)
            found[implementation] = errors
        return found

    return compare


def flops() -> tuple[float, float]:
    """(of the matmuls but the router, of the router), forward and backward."""
    dense, experts, shared = 2 * S * D * L * 2, 2 * S * K * L * F * 3, 2 * S * D * H * 3
    return 3.0 * (dense + experts + shared), 3.0 * 2 * S * D * E


def parts() -> dict[str, tuple[Callable, Callable[[], tuple], float]]:
    """What a layer does beside its matmuls, and the grouped ones: (function, its arguments, bytes it must move or FLOPs it must do)."""
    key, M = jax.random.key(1), S * K
    normal, uniform = partial(jax.random.normal, key, dtype=jnp.bfloat16), partial(jax.random.uniform, key)

    def ids():
        return lax.top_k(uniform((S, E)), K)[1]

    def sort(ids_Sk):
        return sort_by_expert(ids_Sk, E)

    def backward(function):
        return lambda *args: jax.vjp(function, *args[:2])[1](args[2])

    def matmul(rows, matrices, sizes):
        return grouped_matmul(rows, matrices, sizes, implementation="hopper")

    def matmul_backward(rows, matrices, sizes, d):
        return jax.vjp(lambda r, w: matmul(r, w, sizes), rows, matrices)[1](d)

    def spread(implementation):
        return lambda z, order: permute(z, order, K, implementation)

    def histogram(implementation):
        return partial(router_histogram, bins=1000, implementation=implementation)

    def plain_weighted(both_MG, weight_M):
        gate, up = (half.astype(jnp.float32) for half in (both_MG[:, :F], both_MG[:, F:]))
        return (plain_situ(gate, up) * weight_M[:, None]).astype(jnp.bfloat16)

    def weighted(both_MG, weight_M):
        from pallas_kernels.moe_dispatch.hopper_situ import weighted_situ

        return weighted_situ(SITU, both_MG, weight_M)

    def scores():
        return jax.nn.sigmoid(jax.random.normal(key, (S, 896))), uniform((S,)), jnp.ones(S, bool), jnp.float32(-1.0), jnp.float32(2e-3)

    def routed():
        return normal((S, D)), uniform((D, E)), uniform((S, E))

    def hidden():
        return normal((M, 2 * F)), uniform((M,)), normal((M, F))

    def shared():
        return normal((S, H)), normal((S, H)), normal((S, H))

    row, product, work = 2.0 * M, 2.0 * S * D * E, 2.0 * M * L * 2 * F
    return {
        "router product": (router_logits, lambda: routed()[:2], product),
        "router product, backward": (backward(router_logits), routed, 2 * product),
        "router product in float32": (plain_logits, lambda: routed()[:2], product),
        "router product in float32, backward": (backward(plain_logits), routed, 2 * product),
        "top k": (lambda scores_SE: lax.top_k(scores_SE, K), lambda: (uniform((S, E)),), 4.0 * S * E),
        "sort": (sort, lambda: (ids(),), 8.0 * M),
        "permute": (spread("hopper"), lambda: (normal((S, L)), sort(ids())[0]), row * L + 2.0 * S * L),
        "permute in XLA": (spread("xla"), lambda: (normal((S, L)), sort(ids())[0]), row * L + 2.0 * S * L),
        "gate and up": (matmul, lambda: (normal((M, L)), normal((E, L, 2 * F)), sort(ids())[1]), work),
        "gate and up, backward": (
            matmul_backward,
            lambda: (normal((M, L)), normal((E, L, 2 * F)), sort(ids())[1], normal((M, 2 * F))),
            2 * work,
        ),
        "activation with weights": (weighted, lambda: hidden()[:2], row * 3 * F),
        "activation with weights, backward": (backward(weighted), hidden, row * 5 * F),
        "activation with weights in XLA": (plain_weighted, lambda: hidden()[:2], row * 3 * F),
        "activation with weights in XLA, backward": (backward(plain_weighted), hidden, row * 5 * F),
        "shared activation": (SITU, lambda: shared()[:2], 6.0 * S * H),
        "shared activation, backward": (backward(SITU), shared, 10.0 * S * H),
        "shared activation from tanh": (plain_situ, lambda: shared()[:2], 6.0 * S * H),
        "shared activation from tanh, backward": (backward(plain_situ), shared, 10.0 * S * H),
        "sum of choices": (lambda r, order: sum_choices(r, order, K), lambda: (normal((M, L)), sort(ids())[0]), row * L + 4.0 * S * L),
        "histogram of 896 experts": (histogram("hopper"), scores, 4.0 * S * 896),
        "histogram of 896 experts in XLA": (histogram("xla"), scores, 4.0 * S * 896),
    }


# The layer, and what each of its fusions gains: (options of `layer`).
LAYERS: dict[str, dict] = {
    "layer": {},
    "layer, router in float32 and activation from tanh": {"logits": plain_logits, "activation": plain_situ},
    "layer, nothing fused": {"experts": separate_experts, "logits": plain_logits, "activation": plain_situ},
}


def measure(name: str, tokens: int) -> dict:
    """One job: "check", a layer or a part."""
    if name == "check":
        return {"name": name, "tokens": tokens, "relative_l2": check(tokens)}
    if name in LAYERS:
        function, args = partial(gradients, implementation="hopper", **LAYERS[name]), draw(S)
    else:
        function, arguments, work = parts()[name]
        args = arguments()
    calls = 10 if name in LAYERS else 200
    program = repeated(function, calls, False).lower(*args).compile()
    seconds = windows(lambda: jax.block_until_ready(program(*args)), calls)
    row = {"name": name, "ms": round(seconds[1] * 1e3, 4), "spread_ms": [round(s * 1e3, 4) for s in seconds]}
    if name in LAYERS:
        matmul_flops, router_flops = flops()
        bound = matmul_flops / RATE + router_flops / ROUTER_RATE
        row |= {"matmuls_at_700_ms": round(bound * 1e3, 3), "ratio": round(seconds[1] / bound, 3)}
        return {**row, "temp_bytes": int(program.memory_analysis().temp_size_in_bytes)}
    unit = "tflops" if "gate and up" in name or "product" in name else "tb_per_s"
    return {**row, unit: round(work / seconds[1] / 1e12, 3)}


def main() -> None:
    """Runs every job in a process, prints the rows and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=4096, help="of the layer that is compared with the XLA form")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which measurements are given up")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        print("RESULT " + json.dumps(measure(arguments.job, arguments.tokens)), flush=True)
        return
    names = ("check", *LAYERS, *parts())
    command = [sys.executable, __file__, "--tokens", str(arguments.tokens), "--job"]
    rows = []
    for name, text in zip(names, run_all([[*command, name] for name in names], arguments.limit), strict=True):
        row = result_in(text)
        rows += [row] if row else []
        print(json.dumps(row) if row else f"{name}: no result. {text[-600:]}", flush=True)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
