"""Hopper kernels of the dispatch: interpreted, lowered for cuda, and run on a GPU; the golden LatentMoE layer with them.

Shapes: S tokens, k choices, M = S k rows, D model, L latent, F hidden width, E experts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernel API and interpreter that the kernels use come with JAX 0.11", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe_dispatch import (
    SituGLU,
    hopper_histogram,
    hopper_permute,
    hopper_situ,
    routed_experts,
    router_histogram,
    router_logits,
)
from pallas_kernels.moe_dispatch.dispatch import permute, sort_by_expert
from tests.golden import check, load
from tests.x64 import float64

SITU = SituGLU(beta=4.0, linear_beta=25.0)


def relative_error(actual, expected) -> float:
    expected = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def assert_no_race():
    """JAX 0.12 raises at a race; 0.11 prints it and keeps its state."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found


def value_and_gradients(function, *primals, cotangent):
    y, pullback = jax.vjp(function, *primals)
    return y, *pullback(cotangent.astype(y.dtype))


def situ_problem(rows, hidden):
    rng = np.random.default_rng(0)
    both_MG = jnp.asarray(3 * rng.normal(size=(rows, 2 * hidden)), jnp.bfloat16)
    return both_MG, jnp.asarray(rng.random(rows), jnp.float32), jnp.asarray(rng.normal(size=(rows, hidden)), jnp.bfloat16)


def check_situ(function, both_MG, weight_M, d_hidden_MF):
    """Against tanh and sigmoid in float32."""
    hidden = d_hidden_MF.shape[1]

    def plain(both_MG, weight_M):
        return SITU(both_MG[:, :hidden], both_MG[:, hidden:]) * weight_M[:, None]

    run = jax.jit(functools.partial(value_and_gradients, function, cotangent=d_hidden_MF))
    actual = run(both_MG, weight_M)
    expected = value_and_gradients(plain, both_MG.astype(jnp.float32), weight_M, cotangent=d_hidden_MF)
    for value, wanted, limit in zip(actual, expected, (3e-3, 3e-3, 1e-5), strict=True):
        assert relative_error(value, wanted) < limit
    return run, actual


@pytest.mark.slow
@pytest.mark.numerics
def test_situ_interpreted(monkeypatch):
    monkeypatch.setattr(hopper_situ, "WARPGROUPS", {"forward": 2, "backward": 2})
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check_situ(lambda both, weight: hopper_situ.weighted_situ(SITU, both, weight, 2, interpret), *situ_problem(448, 128))
    assert_no_race()


@pytest.mark.slow
@pytest.mark.numerics
def test_spread_interpreted(monkeypatch):
    monkeypatch.setattr(hopper_permute, "WARPGROUPS", 2)
    monkeypatch.setattr(hopper_permute, "_stages", lambda width: 3)
    rng, (S, k, L) = np.random.default_rng(0), (136, 3, 128)
    x_SL, row_M = jnp.asarray(rng.normal(size=(S, L)), jnp.bfloat16), rng.permutation(S * k)
    spread = functools.partial(hopper_permute.spread, num_blocks=2, interpret=plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_array_equal(jax.jit(spread)(x_SL, jnp.asarray(row_M, jnp.int32)), np.asarray(x_SL)[np.argsort(row_M) // k])
    assert_no_race()


def histogram_problem(S, E):
    rng = np.random.default_rng(0)
    scores_SE = rng.random((S, E)).astype(np.float32)
    return scores_SE, rng.random(S).astype(np.float32), rng.random(S) < 0.8


def counts(scores_SE, cutoffs_S, real_S, low, width, bins):
    """By numpy, whose quotients are IEEE's; XLA's on a CPU may be a product with the reciprocal."""
    place_SE = np.clip(np.floor((cutoffs_S[:, None] - scores_SE - np.float32(low)) / np.float32(width)), 0, bins - 1).astype(int)
    return np.stack([np.bincount(place_SE[real_S, expert], minlength=bins) for expert in range(scores_SE.shape[1])])


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("bins", [300, 1000])
def test_histogram_interpreted(bins):
    problem = histogram_problem(320, 64)
    interpret = plgpu.InterpretGPUParams()
    count = functools.partial(hopper_histogram.histogram, low=-1.0, width=2 / bins, bins=bins, num_blocks=4, interpret=interpret)
    np.testing.assert_array_equal(jax.jit(count)(*problem), counts(*problem, -1.0, 2 / bins, bins))


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.aot
def test_kernels_lower_for_cuda():
    f32 = jnp.float32
    backward = functools.partial(hopper_situ.weighted_situ, SITU)
    for function, *shapes in (
        (lambda *a: value_and_gradients(backward, *a[:2], cotangent=a[2]), struct(256, 256), struct(256, dtype=f32), struct(256, 128)),
        (hopper_permute.spread, struct(64, 256), struct(256, dtype=jnp.int32)),
        (
            functools.partial(hopper_histogram.histogram, bins=1000),
            *(struct(128, 64, dtype=f32), struct(128, dtype=f32), struct(128, dtype=jnp.bool_), struct(dtype=f32), struct(dtype=f32)),
        ),
    ):
        assert "mosaic_gpu" in jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_refusals_name_what_does_not_fit():
    assert hopper_situ.refusal(struct(128, 256)) is None and "130 rows" in hopper_situ.refusal(struct(130, 256))
    assert "float32" in hopper_situ.refusal(struct(128, 256, dtype=jnp.float32)) and "2 x 96" in hopper_situ.refusal(struct(128, 192))
    assert hopper_permute.refusal(struct(64, 1024), 8) is None and "12 tokens" in hopper_permute.refusal(struct(12, 128), 2)
    assert "float32" in hopper_permute.refusal(struct(64, 128, dtype=jnp.float32), 2)
    assert "of 1664" in hopper_permute.refusal(struct(64, 1664), 2)
    scores = struct(64, 96, dtype=jnp.float32)
    assert hopper_histogram.refusal(scores, 1024) is None and "1025 bins" in hopper_histogram.refusal(scores, 1025)
    assert "bfloat16" in hopper_histogram.refusal(struct(64, 96), 9) and "40 experts" in hopper_histogram.refusal(
        struct(64, 40, dtype=jnp.float32), 9
    )


def golden_layer(p, x_SD, ids_Sk, *, implementation, width):
    """The layer of report equations 11 to 13 with the released names and shapes; `width` pads latent and hidden with zeros."""

    def padded(w_EIO):
        return jnp.pad(w_EIO, ((0, 0), (0, width - w_EIO.shape[1]), (0, width - w_EIO.shape[2])))

    def out_in(name):
        return jnp.swapaxes(p[name], -1, -2)

    scores_SE = jax.nn.sigmoid(router_logits(x_SD, out_in("gate.weight")))
    chosen_Sk = jnp.take_along_axis(scores_SE, ids_Sk, axis=-1)
    weights_Sk = chosen_Sk / jnp.sum(chosen_Sk, axis=-1, keepdims=True)
    z_SL = x_SD @ out_in("routed_expert_down_proj.weight")
    L = z_SL.shape[1]
    experts = [padded(out_in(f"experts.{name}.weight")) for name in ("w1", "w3", "w2")]
    z_SL = jnp.pad(z_SL, ((0, 0), (0, width - L)))
    u_SL = routed_experts(z_SL, ids_Sk, weights_Sk, *experts, activation=SITU, implementation=implementation)[:, :L]
    u_SL = u_SL * jax.lax.rsqrt(jnp.mean(u_SL * u_SL, axis=-1, keepdims=True) + 1e-5)
    y_SD = (u_SL * p["routed_expert_norm.weight"]).astype(x_SD.dtype) @ out_in("routed_expert_up_proj.weight")
    gate, up = (x_SD @ out_in(f"shared_experts.{name}_proj.weight") for name in ("gate", "up"))
    return y_SD + SITU(gate, up) @ out_in("shared_experts.down_proj.weight")


def golden_run(dtype, rounded, **options):
    """Output, gradient to x and to the parameters of the golden layer in a dtype; with inputs rounded to bfloat16 or not."""
    a = load("latent_moe")
    cast = functools.partial(jnp.asarray, dtype=dtype)
    values = {key: jnp.asarray(value, jnp.bfloat16) if rounded else value for key, value in a.items() if key[:2] in ("x", "dy", "p:")}
    params = {
        key[2:]: cast(value) for key, value in values.items() if key.startswith("p:gate.weight") or (key[:2] == "p:" and "gate." not in key)
    }
    params["gate.weight"] = params["gate.weight"].astype(jnp.promote_types(dtype, jnp.float32))
    x_SD, dy_SD = (cast(values[name]).reshape(-1, a["x"].shape[-1]) for name in ("x", "dy"))
    layer = functools.partial(golden_layer, ids_Sk=jnp.asarray(a["topk_ids"]), **options)
    y_SD, d_params, dx_SD = jax.jit(functools.partial(value_and_gradients, layer))(params, x_SD, cotangent=dy_SD)
    return a, y_SD, dx_SD, d_params


@pytest.mark.numerics
def test_golden_layer_padded_with_zeros_in_float64():
    """So that on a GPU, where widths must be multiples of 64, padding changes nothing."""
    with float64():
        a, y_SD, dx_SD, d_params = golden_run(jnp.float64, False, implementation="xla", width=64)
    check(y_SD, a["y"].reshape(y_SD.shape), 1e-6, "y")
    check(dx_SD, a["d_x"].reshape(dx_SD.shape), 1e-6, "dx")
    for name, value in d_params.items():
        check(value, a[f"d:{name}"], 1e-6, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "limit"), [("hopper", 1e-2), ("xla", 1e-2)])
def test_golden_layer_on_a_gpu(implementation, limit):
    with float64():
        _, y_SD, dx_SD, d_params = golden_run(jnp.float64, True, implementation="xla", width=64)
        expected = {"y": np.asarray(y_SD), "x": np.asarray(dx_SD)} | {name: np.asarray(value) for name, value in d_params.items()}
    _, y_SD, dx_SD, d_params = golden_run(jnp.bfloat16, True, implementation=implementation, width=64)
    errors = {name: relative_error(value, expected[name]) for name, value in ({"y": y_SD, "x": dx_SD} | d_params).items()}
    assert max(errors.values()) < limit, errors


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden"), [(64 * 1001, 128), (4096, 768), (64, 64)])
def test_situ_on_a_gpu(rows, hidden):
    arguments = situ_problem(rows, hidden)
    run, first = check_situ(functools.partial(hopper_situ.weighted_situ, SITU), *arguments)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(first, run(*arguments[:2]), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "k", "E", "L"), [(4096, 8, 128, 1024), (8000, 3, 7, 64), (8, 1, 2, 256), (8192, 4, 16, 1536)])
def test_permute_on_a_gpu(S, k, E, L):
    rng = np.random.default_rng(0)
    x_SL, ids_Sk = jnp.asarray(rng.normal(size=(S, L)), jnp.bfloat16), jnp.asarray(rng.integers(0, E + 1, (S, k)), jnp.int32)
    order_M, _ = sort_by_expert(ids_Sk, E)
    assert hopper_permute.refusal(x_SL, k) is None
    ours, xla = (jax.jit(permute, static_argnums=(2, 3))(x_SL, order_M, k, name) for name in ("hopper", "xla"))
    np.testing.assert_array_equal(ours, xla)


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "E", "bins"), [(32768, 896, 1000), (64, 32, 1024), (4096, 128, 300)])
def test_histogram_on_a_gpu(S, E, bins):
    problem = histogram_problem(S, E)
    count = jax.jit(functools.partial(router_histogram, bins=bins, implementation="hopper"))
    np.testing.assert_array_equal(count(*problem, jnp.float32(-1), jnp.float32(2 / bins)), counts(*problem, -1.0, 2 / bins, bins))
