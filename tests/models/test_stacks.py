"""Grouping, stacking and the scanned decoder: same numbers, bounded compile time, bounded memory."""

from __future__ import annotations

import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, MLAConfig, ModelConfig, MoEConfig
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
        moe=MoEConfig(num_experts=4, experts_per_token=2, latent_dim=16, expert_dim=8),
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


def test_plan_of_the_other_depths():
    k2_like = ModelConfig(num_layers=61, mixer_pattern=("mla_rope",), last_mixer=None, depth="residual", width="moe")
    assert stacks.plan(k2_like) == ((Group(0, 1, 1), Group(1, 1, 60)),)  # the whole depth is one block
    assert stacks.plan(config(num_layers=3, depth="full_attention_residuals")) == (tuple(Group(layer, 1, 1) for layer in range(3)),)


@pytest.mark.parametrize("depth", ["block_attention_residuals", "full_attention_residuals", "residual"])
@pytest.mark.parametrize("pattern", [("kda",), ("kda", "gated_mla"), ("kda", "kda", "kda", "gated_mla")])
@pytest.mark.parametrize("layers", [1, 5, 9])
def test_plan_keeps_the_order_of_layers(pattern, layers, depth):
    cfg = config(num_layers=layers, mixer_pattern=pattern, depth=depth)
    assert [group.layer(r, p) for group in stacks.groups(cfg) for r in range(group.repeats) for p in range(group.unit)] == list(
        range(layers)
    )
    kinds = list(zip(cfg.mixers, cfg.feed_forwards, strict=True))
    for group in stacks.groups(cfg):
        for position in range(group.unit):
            assert len({kinds[group.layer(repeat, position)] for repeat in range(group.repeats)}) == 1


def test_canonical_form_and_back():
    cfg = config()
    _, abstract, axes = parameters.abstract(cfg)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract)
    canonical = stacks.unstack(params, cfg)
    assert list(canonical["layers"]) == [str(layer) for layer in range(9)]
    jax.tree.map(np.testing.assert_array_equal, stacks.stack(canonical, cfg), params)
    assert shapes(abstract) == shapes(jax.eval_shape(lambda: initialize(cfg, 0)))
    assert shapes(stacks.unstack(abstract, cfg)) == shapes(canonical)
    assert shapes(stacks.stack(stacks.unstack(abstract, cfg), cfg)) == shapes(params)
    assert jax.tree.all(jax.tree.map(lambda leaf, names: leaf.ndim == len(names), abstract, axes))
    state = {"count": np.int32(3), "moments": [params, jax.tree.map(np.square, params)]}
    jax.tree.map(np.testing.assert_array_equal, stacks.stack_tree(stacks.unstack_tree(state, cfg), cfg), state)


def test_values_by_the_parameter_that_they_belong_to():
    """Each value lands where the leaf of its layer lies, among layers of two mixers with and without experts."""
    cfg = config(num_layers=9, mixer_pattern=("kda", "gated_mla"), last_mixer=None, num_dense_layers=1, depth="residual")
    assert stacks.groups(cfg) == (Group(0, 1, 1), Group(1, 2, 4))
    leaves = {("mixer", "q_up"): [1, 3, 5, 7], ("ffn", "router_bias"): list(range(1, 9)), ("mixer", "a_log"): [0, 2, 4, 6, 8]}
    _, abstract, _ = parameters.abstract(cfg)
    numbers = stacks.unstack(abstract, cfg)  # every leaf of layer l -> l
    numbers["layers"] = {layer: jax.tree.map(lambda _, n=layer: np.float32(n), tree) for layer, tree in numbers["layers"].items()}
    stored = stacks.stack(numbers, cfg)
    for leaf, layers in leaves.items():
        found = stacks.by_parameter(np.float32(layers), cfg, layers, leaf)
        for path, values in found.items():
            node = stored
            for key in path:
                node = node[int(key) if key.isdigit() else key]
            np.testing.assert_array_equal(values, node)
        assert sum(len(values) for values in found.values()) == len(layers)
    assert set(stacks.by_parameter(np.zeros((8, 2)), cfg, range(1, 9), ("ffn", "router_bias"))) == {
        ("groups", "1", "0", "ffn", "router_bias"), ("groups", "1", "1", "ffn", "router_bias")
    }  # fmt: skip
    with pytest.raises(ValueError, match="only some of them"):
        stacks.by_parameter(np.zeros(2), cfg, [1, 2], ("mixer", "q_up"))
    with pytest.raises(ValueError, match="3 values for 2 layers"):
        stacks.by_parameter(np.zeros(3), cfg, [1, 2], ("mixer", "q_up"))


def test_initial_values_do_not_depend_on_the_grouping():
    one, other = config(num_layers=5), config(num_layers=5, depth="residual")
    assert stacks.groups(one) != stacks.groups(other)
    first, second = (stacks.unstack(jax.device_get(jit(lambda c=c: initialize(c, 3))()), c)["layers"] for c in (one, other))
    for layer, leaves in second.items():
        jax.tree.map(np.testing.assert_array_equal, {name: first[layer][name] for name in leaves}, leaves)


def test_initial_values_follow_the_report():
    cfg = config(num_layers=5, init_std=0.02, d_model=64)
    layers = stacks.unstack(jax.device_get(jit(lambda: initialize(cfg, 0))()), cfg)["layers"]
    mixer = layers["1"]["mixer"]
    assert not np.any(mixer["a_log"]) and not np.any(layers["1"]["mixer_res"]["query"]) and not np.any(layers["1"]["ffn"]["router_bias"])
    decay = -5.0 / (1.0 + np.exp(-np.stack([layers[str(layer)]["mixer"]["dt_bias"] for layer in (0, 1, 2)])))
    assert -0.4759 < float(decay.min()) < -0.3 and -0.02 < float(decay.max()) < -0.0049  # -5 (1 - exp(-dt)), dt log-uniform in [0.001, 0.1]
    assert abs(np.std(mixer["q_proj"]) - 0.02) < 2e-3 and np.abs(mixer["q_conv"]).max() <= 0.5
    assert np.all(mixer["out_norm"] == 1) and np.all(layers["3"]["mixer"]["q_norm"] == 1)


@pytest.mark.parametrize(
    ("group", "fields"),
    [
        (Group(0, 2, 2), dict(mixer_pattern=("gated_mla", "mla_rope"), width="dense", remat="layer")),
        (Group(0, 1, 2), dict(mixer_pattern=("mla_rope",), num_dense_layers=0, depth="residual", remat="none")),
    ],
)
def test_scanned_layers_equal_layers_one_by_one(group, fields):
    """Logits, gradients and reports. Scanned KDA layers are in test_golden_model.py, with and without remat."""
    cfg = config(num_layers=group.unit * group.repeats, last_mixer=None, **fields)
    assert stacks.groups(cfg) == (group,)
    graphdef, abstract, _ = parameters.abstract(cfg)
    rng = np.random.default_rng(0)  # pseudo-queries must not stay at zero
    params = jax.tree.map(lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), abstract)
    tokens = rng.integers(0, 32, (2, 24), dtype=np.int32)
    segment_ids = np.tile(np.where(np.arange(24) < 9, 0, np.where(np.arange(24) < 22, 1, -1)).astype(np.int32), (2, 1))

    def loss(params, trace):
        output = nnx.merge(graphdef, params)(tokens, segment_ids, layout=LocalLayout(), collect=True, trace=trace)
        return jnp.mean(jnp.square(output.logits_BTV)), output

    (scanned, output), d_scanned = jit(jax.value_and_grad(lambda p: loss(p, False), has_aux=True))(params)
    (single, traced), d_single = jit(jax.value_and_grad(lambda p: loss(p, True), has_aux=True))(params)
    np.testing.assert_allclose(scanned, single, rtol=1e-5)
    assert sorted(output.aux) == sorted(traced.aux)
    for name, values in output.aux.items():
        exact = values.dtype in (jnp.int32, jnp.bool_)
        np.testing.assert_allclose(values, traced.aux[name], rtol=0 if exact else 1e-4, err_msg=name)
    if cfg.width != "dense":
        assert output.aux["expert_load"].shape == (2, 4) and int(output.aux["expert_load"].sum()) == 2 * 2 * 22 * 2
        assert output.aux["histogram"].shape == (2, 1, 4, 1000) and np.all(np.sum(output.aux["histogram"], axis=(1, 3)) == 2 * 22)
    for a, b in zip(jax.tree.leaves(jax.device_get(d_scanned)), jax.tree.leaves(jax.device_get(d_single)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1e-3))


def lowered_gradient(cfg: ModelConfig, batch: int, tokens: int, collect: bool = False):
    """The lowered gradient of a mean square of the logits, from shapes alone."""
    graphdef, params, _ = parameters.abstract(cfg)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def loss(params, tokens_BT, segment_ids_BT):
        output = nnx.merge(graphdef, params)(tokens_BT, segment_ids_BT, layout=LocalLayout(), collect=collect)
        return jnp.mean(jnp.square(output.logits_BTV)), output.aux

    return jit(jax.grad(loss, has_aux=True)).lower(params, ids, ids)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "sources"), [("block_attention_residuals", 2), ("full_attention_residuals", 6), ("residual", 0)])
def test_bfloat16_in_every_depth(depth, sources):
    """Carries of scans keep their types, reports stay wide, gradients have the parameters' type."""
    cfg = config(
        num_layers=3, mixer_pattern=("mla_rope",), last_mixer=None, depth=depth, width="moe", activation="swiglu", dtypes=DtypePolicy()
    )
    graphdef, params, _ = parameters.abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(params, tokens_BT, segment_ids_BT):
        output = nnx.merge(graphdef, params)(tokens_BT, segment_ids_BT, layout=LocalLayout(), collect=True)
        return jnp.mean(output.logits_BTV), output.aux

    grads, aux = jax.eval_shape(jax.grad(loss, has_aux=True), params, ids, ids)
    assert shapes(grads) == shapes(params)
    assert aux["finite"].shape == (3,) and aux["router_entropy"].dtype == aux["max_logit"].dtype == jnp.float32
    assert (aux["source_weights_ffn"].shape == (3, sources)) if sources else "source_weights_ffn" not in aux


def test_reports_have_one_row_for_each_layer_that_has_them():
    cfg = config(num_layers=9, depth="block_attention_residuals")
    graphdef, params, _ = parameters.abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def aux(collect, cfg=cfg):
        run = lambda p, t, s: nnx.merge(graphdef, p)(t, s, layout=LocalLayout(), collect=collect).aux  # noqa: E731
        return {name: (leaf.shape, leaf.dtype.name) for name, leaf in jax.eval_shape(run, params, ids, ids).items()}

    always = {"expert_load": ((8, 4), "int32"), "max_logit": ((3, 2), "float32")}
    assert aux(False) == always
    assert aux(True) == always | {
        "histogram": ((8, 1, 4, 1000), "int32"), "router_entropy": ((8,), "float32"), "bias_spread": ((8,), "float32"),
        "source_weights_mixer": ((9, 4), "float32"), "source_weights_ffn": ((9, 4), "float32"),
        "kda_log_decay": ((6,), "float32"), "kda_at_bound": ((6,), "float32"), "finite": ((9,), "bool"),
    }  # fmt: skip


def test_counts_are_made_once_under_remat():
    """The backward pass recomputes a layer, but neither its histogram nor its load."""
    cfg = config(num_layers=4, mixer_pattern=("gated_mla",), last_mixer=None, num_dense_layers=0, depth="residual", remat="layer")
    text = lowered_gradient(cfg, 2, 8, collect=True).as_text()
    scattered = re.findall(r"stablehlo.scatter.*?-> (tensor<\w+xi32>)", text, flags=re.DOTALL)
    assert scattered.count("tensor<4000xi32>") == 1, scattered
    assert scattered.count("tensor<2x4xi32>") == 1, scattered


def scanned(layers: int, remat: str = "layer") -> ModelConfig:
    return config(num_layers=layers, attn_res_block_size=layers, mixer_pattern=("kda",), last_mixer=None, num_dense_layers=0, remat=remat)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compilation")
def test_what_a_repeat_costs():
    """No compile time; of memory at most two residual streams [B, T, D] float32, without remat far more."""
    batch, tokens, few, many = 2, 256, 2, 16
    stream = batch * tokens * 32 * 4

    def measure(cfg: ModelConfig) -> tuple[int, float, float]:
        """Lines of the gradient's program, seconds to compile it, temporaries beside the layers' gradients in residual streams."""
        start = time.process_time()
        lowered = lowered_gradient(cfg, batch, tokens)
        analysis = lowered.compile().memory_analysis()
        seconds = time.process_time() - start
        return len(lowered.as_text().splitlines()), seconds, (analysis.temp_size_in_bytes - analysis.argument_size_in_bytes) / stream

    jit(jnp.sin).lower(jnp.ones(3)).compile()  # what the first compilation of a process pays once
    few_lines, few_seconds, few_streams = measure(scanned(few))
    many_lines, many_seconds, many_streams = measure(scanned(many))
    assert many_lines < 1.1 * few_lines
    assert many_seconds < 1.6 * few_seconds
    assert many_streams - few_streams <= 2.05 * (many - few)
    assert measure(scanned(many, remat="none"))[2] - many_streams > 4 * many
