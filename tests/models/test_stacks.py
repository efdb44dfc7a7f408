"""Grouping, stacking and the scanned decoder: same numbers, bounded compile time, bounded memory."""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, LatentMoEConfig, MLAConfig, ModelConfig
from k3train.models import parameters, stacks
from k3train.models.initialize import initialize
from k3train.models.layout import LocalLayout
from k3train.models.stacks import Group
from tests.quick import QUICK_COMPILE

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)


def config(**fields) -> ModelConfig:
    base = dict(
        vocab_size=32,
        d_model=32,
        num_layers=9,
        dense_dim=32,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=12, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=4, v_head_dim=8),
        moe=LatentMoEConfig(num_experts=4, experts_per_token=2, latent_dim=16, expert_dim=8),
        dtypes=DtypePolicy(compute="float32"),
        init_std=0.1,
    )
    return ModelConfig(**{**base, **fields})


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_plan_of_the_released_configuration():
    plan = stacks.plan(ModelConfig())
    assert [sum(group.unit * group.repeats for group in block) for block in plan] == [12] * 7 + [9]
    assert plan[1] == (Group(12, 4, 3),)  # a whole block is one pattern of four layers
    assert max(sum(group.unit for group in block) for block in plan) <= 7
    layers = [group.layer(r, p) for block in plan for group in block for r in range(group.repeats) for p in range(group.unit)]
    assert layers == list(range(93))


@pytest.mark.parametrize("pattern", [("kda",), ("kda", "gated_mla"), ("kda", "kda", "kda", "gated_mla")])
@pytest.mark.parametrize("layers", [1, 5, 9])
def test_plan_keeps_the_order_of_layers(pattern, layers):
    cfg = config(num_layers=layers, mixer_pattern=pattern)
    kinds = list(zip(cfg.mixers, cfg.feed_forwards, strict=True))
    for group in stacks.groups(cfg):
        for position in range(group.unit):
            assert len({kinds[group.layer(repeat, position)] for repeat in range(group.repeats)}) == 1


def test_canonical_form_and_back():
    cfg = config()
    params = jit(lambda: initialize(cfg, 0))()
    canonical = stacks.unstack(params, cfg)
    assert list(canonical["layers"]) == [str(layer) for layer in range(9)]
    jax.tree.map(np.testing.assert_array_equal, stacks.stack(canonical, cfg), params)
    _, abstract, axes = parameters.abstract(cfg)
    assert shapes(abstract) == shapes(params)
    assert shapes(stacks.unstack(abstract, cfg)) == shapes(canonical)
    assert shapes(stacks.stack(stacks.unstack(abstract, cfg), cfg)) == shapes(params)
    assert jax.tree.all(jax.tree.map(lambda leaf, names: leaf.ndim == len(names), abstract, axes))
    state = optax.adam(1e-3).init(params)
    state = jax.tree.map(lambda leaf: leaf + 1, state)
    jax.tree.map(np.testing.assert_array_equal, stacks.stack_tree(stacks.unstack_tree(state, cfg), cfg), state)


def test_initial_values_do_not_depend_on_the_grouping():
    one, other = config(attn_res_block_size=4), config(attn_res_block_size=9)
    assert stacks.groups(one) != stacks.groups(other)
    first, second = (stacks.unstack(jax.device_get(jit(lambda c=c: initialize(c, 3))()), c) for c in (one, other))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_initial_values_follow_the_report():
    cfg = config(init_std=0.02, d_model=64)
    layers = stacks.unstack(jax.device_get(jit(lambda: initialize(cfg, 0))()), cfg)["layers"]
    mixer = layers["1"]["mixer"]
    assert not np.any(mixer["a_log"]) and not np.any(layers["1"]["mixer_res"]["query"]) and not np.any(layers["1"]["ffn"]["router_bias"])
    decay = -5.0 / (1.0 + np.exp(-np.stack([layers[str(layer)]["mixer"]["dt_bias"] for layer in (0, 1, 2, 4)])))
    assert -0.4759 < float(decay.min()) < -0.3 and -0.02 < float(decay.max()) < -0.0049  # -5 (1 - exp(-dt)), dt log-uniform in [0.001, 0.1]
    assert abs(np.std(mixer["q_proj"]) - 0.02) < 2e-3 and np.abs(mixer["q_conv"]).max() <= 0.5
    assert np.all(mixer["out_norm"] == 1) and np.all(layers["3"]["mixer"]["q_norm"] == 1)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_scanned_layers_equal_layers_one_by_one(remat):
    cfg = config(num_layers=4, attn_res_block_size=4, mixer_pattern=("kda", "gated_mla"), num_dense_layers=0, last_mixer=None, remat=remat)
    assert stacks.groups(cfg) == (Group(0, 2, 2),)
    graphdef, _, _ = parameters.abstract(cfg)
    params = jit(lambda: initialize(cfg, 0))()
    rng = np.random.default_rng(0)  # pseudo-queries must not stay at zero
    params = jax.tree.map(lambda leaf: leaf + rng.normal(scale=0.05, size=leaf.shape).astype(np.float32), jax.device_get(params))
    tokens = rng.integers(0, 32, (2, 24), dtype=np.int32)
    segment_ids = np.tile(np.where(np.arange(24) < 9, 0, 1).astype(np.int32), (2, 1))

    def loss(params, trace):
        output = nnx.merge(graphdef, params)(tokens, segment_ids, layout=LocalLayout(), trace=trace)
        return jnp.mean(jnp.square(output.logits_BTV)), output

    (scanned, output), d_scanned = jit(jax.value_and_grad(lambda p: loss(p, False), has_aux=True))(params)
    (single, traced), d_single = jit(jax.value_and_grad(lambda p: loss(p, True), has_aux=True))(params)
    np.testing.assert_allclose(scanned, single, rtol=1e-5)
    np.testing.assert_allclose(output.aux["max_logit"], traced.aux["max_logit"], rtol=1e-4)
    np.testing.assert_array_equal(output.aux["expert_load"], traced.aux["expert_load"])
    assert output.aux["expert_load"].shape == (4, 4) and int(output.aux["expert_load"].sum()) == 4 * 2 * 24 * 2
    for a, b in zip(jax.tree.leaves(jax.device_get(d_scanned)), jax.tree.leaves(jax.device_get(d_single)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1e-3))


def gradient(cfg: ModelConfig, batch: int, tokens: int):
    """The lowered gradient of a mean square of the logits, from shapes alone."""
    graphdef, params, _ = parameters.abstract(cfg)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def loss(params, tokens_BT, segment_ids_BT):
        return jnp.mean(jnp.square(nnx.merge(graphdef, params)(tokens_BT, segment_ids_BT, layout=LocalLayout()).logits_BTV))

    return jit(jax.grad(loss)).lower(params, ids, ids)


def scanned(layers: int, remat: str = "layer") -> ModelConfig:
    return config(num_layers=layers, attn_res_block_size=layers, mixer_pattern=("kda",), last_mixer=None, num_dense_layers=0, remat=remat)


@pytest.mark.usefixtures("fresh_compilation")
def test_compile_time_does_not_grow_with_repeats():
    jit(jnp.sin).lower(jnp.ones(3)).compile()  # what the first compilation of a process pays once
    programs, seconds = {}, {}
    for layers in (2, 16):
        start = time.process_time()
        lowered = gradient(scanned(layers), 1, 32)
        lowered.compile()
        programs[layers], seconds[layers] = len(lowered.as_text().splitlines()), time.process_time() - start
    assert programs[16] < 1.1 * programs[2], programs
    assert seconds[16] < 1.6 * seconds[2], seconds


@pytest.mark.usefixtures("fresh_compilation")
def test_saved_activations_are_those_of_a_residual_network():
    """Temporaries grow per layer by at most two residual streams [B, T, D] float32; without remat by far more."""
    batch, tokens, few, many = 2, 256, 4, 12
    stream = batch * tokens * 32 * 4

    def temporaries(layers: int, remat: str) -> float:
        """In residual streams, beside the gradients of the layers."""
        analysis = gradient(scanned(layers, remat), batch, tokens).compile().memory_analysis()
        return (analysis.temp_size_in_bytes - analysis.argument_size_in_bytes) / stream

    kept = temporaries(many, "layer")
    assert kept - temporaries(few, "layer") <= 2.05 * (many - few)
    assert temporaries(many, "none") - kept > 4 * many
