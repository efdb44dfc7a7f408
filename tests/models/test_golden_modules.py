"""Every mechanism against arrays from the published modelling code: values and gradients, float32 and float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.models import attention_residuals, stacks
from k3train.models.decoder import Decoder
from k3train.models.feed_forward import activation
from k3train.models.kda import KimiDeltaAttention
from k3train.models.latent_moe import LatentMoE
from k3train.models.layout import LocalLayout
from k3train.models.mla import GatedMLA
from k3train.models.norms import gated_rms_norm
from k3train.models.parameters import graph_and_params
from k3train.models.router import route, router_scores
from k3train.models.short_conv import short_conv
from tests.golden import EXACT, check, load
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
pytestmark = pytest.mark.numerics


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """The arithmetic of a test; float64 is the sharper check of the equations."""
    with float64() if request.param == "float64" else nullcontext():
        yield request.param


def limits(dtype: str, float32_limit: float) -> float:
    return EXACT if dtype == "float64" else float32_limit


def config(dtype: str, **fields) -> ModelConfig:
    base = dict(
        vocab_size=8,
        d_model=48,
        num_layers=4,
        dense_dim=16,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=3, head_dim=16),
        mla=MLAConfig(num_heads=3, q_lora_rank=20, kv_lora_rank=12, nope_head_dim=16, rope_head_dim=8, v_head_dim=12),
        moe=MoEConfig(num_experts=32, experts_per_token=4, latent_dim=24, expert_dim=16),
        dtypes=DtypePolicy(parameters=dtype, compute=dtype),
    )
    return ModelConfig(**{**base, **fields})


def arrays(name: str, dtype: str) -> dict[str, jax.Array]:
    return {key: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for key, value in load(name).items()}


def values_and_pullback(function, args, cotangent):
    """The function's value and the gradients of sum(value * cotangent), compiled as one."""

    @jit
    def run(args, cotangent):
        value, pull = jax.vjp(function, *args)
        return value, pull(cotangent)

    return run(args, cotangent)


def test_short_conv(dtype):
    a = arrays("conv_silu_packed", dtype)
    limit = limits(dtype, 2e-6)
    x, w, do = a["x"][:, :, None, :], a["weight"][:, 0][None], a["do"][:, :, None, :]
    y, (d_x, d_w) = values_and_pullback(lambda x, w: short_conv(x, w, segment_ids_BT=a["segment_ids"]), (x, w), do)
    check(y[:, :, 0], a["y"], limit, "y")
    check(d_x[:, :, 0], a["d_x"], limit, "d_x")
    check(d_w[0][:, None], a["d_weight"], limit, "d_weight")
    check(short_conv(x, w)[:, :, 0], a["y_unpacked"], limit, "one long document")


def test_situ_glu(dtype):
    a = arrays("situ_glu", dtype)
    y, grads = values_and_pullback(activation(config(dtype)), (a["gate"], a["up"]), a["dy"])
    for name, value in zip(("y", "d_gate", "d_up"), (y, *grads), strict=True):
        check(value, a[name], limits(dtype, 2e-6), name)


def test_gated_rms_norm(dtype):
    a = arrays("rmsnorm_gated", dtype)
    y, grads = values_and_pullback(lambda x, gate, w: gated_rms_norm(x, gate, w, 1e-5), (a["x"], a["gate"], a["weight"]), a["do"])
    for name, value in zip(("y", "d_x", "d_gate", "d_weight"), (y, *grads), strict=True):
        check(value, a[name], limits(dtype, 5e-6), name)


def heads_in(weight: jax.Array, heads: int) -> jax.Array:
    """[H * K, D] as stored -> [D, H, K]."""
    return jnp.moveaxis(weight.reshape(heads, -1, weight.shape[-1]), -1, 0)


def heads_out(weight: jax.Array, heads: int) -> jax.Array:
    """[D, H * K] as stored -> [H, K, D]."""
    return weight.T.reshape(heads, -1, weight.shape[0])


def kda_params(get) -> dict[str, jax.Array]:
    taps = {f"{x}_conv": get(f"{x}_conv1d.weight").reshape(3, 16, 4) for x in "qkv"}
    heads = {
        name: heads_in(get(f"{released}.weight"), 3)
        for name, released in (("q_proj",) * 2, ("k_proj",) * 2, ("v_proj",) * 2, ("gate_proj", "g_proj"))
    }
    return {
        **taps,
        **heads,
        "beta_proj": get("b_proj.weight").T,
        "decay_down": get("f_a_proj.weight").T,
        "decay_up": heads_in(get("f_b_proj.weight"), 3),
        "a_log": get("A_log"),
        "dt_bias": get("dt_bias").reshape(3, 16),
        "out_norm": get("o_norm.weight"),
        "out_proj": heads_out(get("o_proj.weight"), 3),
    }


def mla_params(get) -> dict[str, jax.Array]:
    return {
        "q_down": get("q_a_proj.weight").T,
        "q_norm": get("q_a_layernorm.weight"),
        "q_up": heads_in(get("q_b_proj.weight"), 3),
        "kv_down": get("kv_a_proj_with_mqa.weight").T,
        "kv_norm": get("kv_a_layernorm.weight"),
        "k_up": heads_in(get("kv_b_proj.weight"), 3)[..., :16],
        "v_up": heads_in(get("kv_b_proj.weight"), 3)[..., 16:],
        "gate_proj": heads_in(get("g_proj.weight"), 3),
        "out_proj": heads_out(get("o_proj.weight"), 3),
    }


def moe_params(get) -> dict[str, jax.Array]:
    return {
        "router": get("gate.weight").T,
        "router_bias": get("gate.e_score_correction_bias"),
        "latent_norm": get("routed_expert_norm.weight"),
        "latent_down": get("routed_expert_down_proj.weight").T,
        "latent_up": get("routed_expert_up_proj.weight").T,
        "w_gate": get("experts.w1.weight").swapaxes(1, 2),
        "w_up": get("experts.w3.weight").swapaxes(1, 2),
        "w_down": get("experts.w2.weight").swapaxes(1, 2),
        "shared": {name: get(f"shared_experts.{name}.weight").T for name in ("gate_proj", "up_proj", "down_proj")},
    }


def run_module(module: nnx.Module, params, x, segment_ids, dy, **keywords):
    """Output, report, and gradients of sum(y * dy) with respect to the parameters and x."""
    graphdef, _ = graph_and_params(module)

    def forward(segment_ids, params, x):
        return nnx.merge(graphdef, params)(x, segment_ids, LocalLayout(), **keywords)

    @jit
    def run(params, x, segment_ids, dy):
        y, pull, report = jax.vjp(partial(forward, segment_ids), params, x, has_aux=True)
        return y, report, *pull(dy)

    return run(params, x, segment_ids, dy)


def check_trees(actual, expected, limit: float) -> None:
    flat = jax.tree_util.tree_flatten_with_path(actual)[0]
    for (path, value), wanted in zip(flat, jax.tree.leaves(expected), strict=True):
        check(value, wanted, limit, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("name", "module", "params_from", "float32_limit"),
    [("kda_module", KimiDeltaAttention, kda_params, 5e-5), ("mla_module", GatedMLA, mla_params, 1e-5)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_mixer(name, module, params_from, float32_limit, packed, dtype):
    a, limit = arrays(name, dtype), limits(dtype, float32_limit)
    suffix, grads = ("_packed", "d_packed:") if packed else ("", "d:")
    x = a[f"x{suffix}"]
    segment_ids = a["segment_ids_packed"] if packed else jnp.zeros(x.shape[:2], jnp.int32)
    y, _, d_params, d_x = run_module(module(config(dtype)), params_from(lambda key: a[f"p:{key}"]), x, segment_ids, a[f"dy{suffix}"])
    check(y, a[f"y{suffix}"], limit, "y")
    check(d_x, a[f"d_x{suffix}"], limit, "d_x")
    check_trees(d_params, params_from(lambda key: a[f"{grads}{key}"]), limit)


def test_latent_moe(dtype):
    a, limit = arrays("latent_moe", dtype), limits(dtype, 1e-5)
    segment_ids = jnp.zeros(a["x"].shape[:2], jnp.int32)
    params, cfg = moe_params(lambda key: a[f"p:{key}"]), config(dtype)
    y, report, d_params, d_x = run_module(LatentMoE(cfg), params, a["x"], segment_ids, a["dy"], collect=True)
    check(y, a["y"], limit, "y")
    check(d_x, a["d_x"], limit, "d_x")
    check_trees(d_params, moe_params(lambda key: a[f"d:{key}"]), limit)
    np.testing.assert_array_equal(np.sum(report["expert_load"], axis=0), a["load"])
    share = np.asarray(a["scores"]) / np.sum(a["scores"], axis=-1, keepdims=True)
    check(np.sum(report["router_entropy"]), -np.sum(share * np.log(share)), limit, "entropy")

    bias = np.asarray(params["router_bias"])
    low, width = bias.min() - 1, (np.ptp(bias) + 2) / 1000
    required = np.asarray(a["cutoff"])[:, None] - np.asarray(a["scores"])
    histogram = np.asarray(report["histogram"])[0]
    assert histogram.shape == (32, 1000) and np.all(histogram.sum(axis=1) == 48)
    for expert in range(32):  # bin edges carry rounding: two neighbours may share a count
        counted = low + width * (np.repeat(np.arange(1000), histogram[expert]) + 0.5)
        np.testing.assert_allclose(counted, np.sort(required[:, expert]), atol=0.51 * width)

    routing = jit(lambda x: route(router_scores(x, params["router"]), params["router_bias"], cfg.moe, LocalLayout()))(a["x"])
    np.testing.assert_array_equal(routing.expert_ids_BTk.reshape(48, 4), a["topk_ids"])
    check(routing.weights_BTk.reshape(48, 4), a["topk_weights"], limit, "weights")
    check(routing.cutoff_BT.reshape(48), a["cutoff"], limit, "cutoff")


def test_attention_residual_mix(dtype):
    a, limit = arrays("attnres_mix", dtype), limits(dtype, 5e-6)

    def run(sources_TND, gamma_D, w_D):
        sources = tuple(attention_residuals.source(value_TD[None], 1e-5) for value_TD in jnp.moveaxis(sources_TND, 1, 0))
        p_NBT = attention_residuals.depth_weights(sources, gamma_D * w_D[0])
        return attention_residuals.mix(sources, p_NBT)[0], p_NBT[:, 0].T

    args, zero = (a["sources"], a["gamma"], a["w"]), jnp.zeros_like(a["probs"])
    (y, probs), grads = values_and_pullback(run, args, (a["do"], zero))
    check(probs, a["probs"], limit, "probs")
    for name, value in zip(("y", "d_sources", "d_gamma", "d_w"), (y, *grads), strict=True):
        check(value, a[name], limit, name)


class Linear(nnx.Module):
    """Stands in for a mixer or a feed-forward block: x @ W^T."""

    def __init__(self, weight: nnx.Param):
        self.weight = weight

    def __call__(self, x, *_, collect):
        return x @ self.weight[...].T, {}


class Identity(nnx.Module):
    """Leaves its input as it is."""

    def __call__(self, x):
        return x


def test_attention_residual_trace(dtype, monkeypatch):
    a, limit = arrays("attnres_trace", dtype), limits(dtype, 3e-5)
    cfg = config(
        dtype, vocab_size=5, d_model=16, num_layers=7, num_dense_layers=7, mixer_pattern=("kda",), last_mixer=None, attn_res_block_size=3
    )
    names = ("W_attn", "W_ffn", "ln_attn", "ln_ffn", "attn_res_gamma", "attn_res_w", "mlp_res_gamma", "mlp_res_w")

    def build(p):
        decoder = Decoder(cfg)
        decoder.embed.embedding = nnx.Param(p["embed"])
        decoder.output_res.key_norm, decoder.output_res.query = nnx.Param(p["out_res_gamma"]), nnx.Param(p["out_res_w"])
        decoder.norm = decoder.head = Identity()
        for group, (layer,) in zip(stacks.groups(cfg), decoder.groups, strict=True):
            here = {name: nnx.Param(p[name][group.first : group.first + group.repeats]) for name in names}
            layer.mixer, layer.ffn = Linear(here["W_attn"]), Linear(here["W_ffn"])
            layer.mixer_norm.scale, layer.ffn_norm.scale = here["ln_attn"], here["ln_ffn"]
            layer.mixer_res.key_norm, layer.mixer_res.query = here["attn_res_gamma"], here["attn_res_w"]
            layer.ffn_res.key_norm, layer.ffn_res.query = here["mlp_res_gamma"], here["mlp_res_w"]
        return decoder

    p = {name: a[name] for name in (*names, "embed", "out_res_gamma", "out_res_w")}
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    segment_ids = jnp.zeros_like(tokens)

    grads = jit(jax.grad(lambda p: jnp.sum(build(p)(tokens, segment_ids, layout=LocalLayout()).logits_BTV[0] * a["do"])))(p)
    for name in p:
        check(grads[name], a[f"d_{name}"], limit, f"d_{name}")

    weigh, probs = attention_residuals.depth_weights, []
    monkeypatch.setattr(attention_residuals, "depth_weights", lambda *args: probs.append(weigh(*args)) or probs[-1])
    output, probs = jit(lambda p: (build(p)(tokens, segment_ids, layout=LocalLayout(), trace=True), list(probs)))(p)
    check(output.logits_BTV[0], a["out"], limit, "out")
    check(output.trace.running_sums[:, 0], a["partial_sum_after_layer"], limit, "running sums")
    check(output.trace.blocks[:, 0], a["blocks"], limit, "blocks")
    np.testing.assert_array_equal(output.trace.num_blocks, a["num_blocks_after_layer"])
    assert len(probs) == 2 * 7 + 1  # the reference leaves out the first, where the embedding is the only source
    for site, (p_NBT, wanted) in enumerate(zip(probs[1:], a["mix_probs"], strict=True)):
        count = int(a["mix_num_sources"][site])
        check(p_NBT[:count, 0].T, wanted[:, :count], limit, f"weights at site {site}")
        assert not np.any(p_NBT[count:])
