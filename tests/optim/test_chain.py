"""The chain as a whole: which rule moves what, in which order, with which rate; and its state."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import AdamWConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, MuonConfig, OptimizerConfig, ScheduleConfig
from k3train.models import parameters, stacks
from k3train.optim import build_optimizer, learning_rate, learning_rates
from k3train.optim.paths import by_path
from k3train.train.state import like_params

AXES = {
    "ffn": {"up_proj": ("layers", "embed", "mlp"), "router_bias": ("layers", "experts")},
    "mixer": {"dt_bias": ("layers", "heads", "head_dim"), "q_up": ("layers", "q_rank", "heads", "head_dim"),
              "k_up": ("layers", "kv_rank", "heads", "head_dim")},
    "head": {"kernel": ("embed", "vocab")},
}  # fmt: skip
SHAPES = {"up_proj": (2, 4, 6), "router_bias": (2, 3), "dt_bias": (2, 2, 4), "q_up": (2, 4, 2, 6), "k_up": (2, 4, 2, 4), "kernel": (4, 5)}
BIAS, QUERY = ("ffn", "router_bias"), ("mixer", "q_up")
SCHEDULE = ScheduleConfig(steps=10, warmup_fraction=0.1)
NOTHING = {"histograms": {}, "loads": {}, "max_logits": {}}
PARAMS = jax.tree.map_with_path(lambda path, _: jnp.full(SHAPES[path[-1].key], 2.0), AXES, is_leaf=lambda node: isinstance(node, tuple))


def update(config: OptimizerConfig, gradient: float, balancing="quantile", schedule=SCHEDULE, **extra) -> dict:
    """The first update for gradients of one value."""
    optimizer = build_optimizer(config, schedule, AXES, balancing=balancing)
    grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), PARAMS)
    given = {"loss": jnp.float32(1.0), **NOTHING, **extra}
    return jax.jit(lambda grads: optimizer.update(grads, optimizer.init(PARAMS), PARAMS, **given)[0])(grads)


def test_decay_alone_moves_what_has_no_gradient():
    config = OptimizerConfig(peak_lr=0.1, muon=MuonConfig(weight_decay=0.5), adamw=AdamWConfig(weight_decay=0.25))
    still = update(config, 0.0)
    for leaf in (still["ffn"]["up_proj"], still["mixer"]["q_up"], still["mixer"]["k_up"]):
        np.testing.assert_allclose(leaf, -0.1 * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(still["head"]["kernel"], -0.1 * 0.25 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(still["mixer"]["dt_bias"], 0.0)
    np.testing.assert_array_equal(still["ffn"]["router_bias"], 0.0)


def test_each_rule_has_its_own_rate():
    plain = AdamWConfig(weight_decay=0.0)
    base = OptimizerConfig(peak_lr=0.1, muon=MuonConfig(weight_decay=0.0), adamw=plain)
    one = update(base, 1.0)
    np.testing.assert_allclose(one["mixer"]["dt_bias"], -0.1, rtol=1e-3)
    own = dataclasses.replace(base, muon=MuonConfig(weight_decay=0.0, peak_lr=0.3), adamw=dataclasses.replace(plain, kind="constant"))
    schedule = ScheduleConfig(steps=1, warmup_fraction=0.0, final_fraction=0.5)  # the first update has the final rate
    two = update(own, 1.0, schedule=schedule)
    np.testing.assert_allclose(two["ffn"]["up_proj"], 1.5 * one["ffn"]["up_proj"], rtol=1e-5)
    np.testing.assert_allclose(two["head"]["kernel"], one["head"]["kernel"], rtol=1e-5)
    rates = learning_rates(own, schedule)
    assert {name: float(rate(0)) for name, rate in rates.items()} == pytest.approx({"learning_rate": 0.15, "learning_rate_adamw": 0.1})
    assert list(learning_rates(base, SCHEDULE)) == ["learning_rate"]


def test_matrices_under_adamw_move_like_vectors():
    config = OptimizerConfig(peak_lr=0.1, matrices="adamw", adamw=AdamWConfig(weight_decay=0.0))
    moved = update(config, 1.0)
    for leaf in (moved["ffn"]["up_proj"], moved["mixer"]["q_up"], moved["mixer"]["dt_bias"]):
        np.testing.assert_allclose(leaf, -0.1, rtol=1e-3)


def test_nothing_but_its_rule_touches_the_router_bias():
    """Not the clip, the rate, the decay or the gradient."""
    loads = {BIAS: jnp.array([[3, 1, 2], [0, 0, 6]], jnp.int32)}
    histograms = {BIAS: jnp.zeros((2, 3, 8), jnp.int32).at[..., 3].set(12)}
    config = OptimizerConfig(clip_norm=1e-3, sign_balance_rate=0.25)
    moved = {
        kind: update(config, 5.0, kind, loads=loads, histograms=histograms)["ffn"]["router_bias"] for kind in ("quantile", "sign", "none")
    }
    np.testing.assert_allclose(PARAMS["ffn"]["router_bias"] + moved["quantile"], 0.0, atol=1e-6)  # all experts alike
    np.testing.assert_array_equal(moved["sign"], np.multiply(0.25, [[-1, 1, 0], [1, 1, -1]]))
    np.testing.assert_array_equal(moved["none"], 0.0)


def test_the_clip_of_logits_comes_last():
    """It scales what the labels leave behind."""
    logits = {QUERY: jnp.array([[400.0, 50.0], [100.0, 100.0]])}
    for config in (OptimizerConfig(qk_clip=100.0), OptimizerConfig(qk_clip=None)):
        moved = PARAMS["mixer"]["q_up"] + update(config, 1.0, max_logits=logits)["mixer"]["q_up"]
        free = PARAMS["mixer"]["q_up"] + update(config, 1.0)["mixer"]["q_up"]
        ratio = np.asarray(moved / free)
        factor = 1.0 if config.qk_clip is None else 0.5
        np.testing.assert_allclose(ratio[0, :, 0, :4], factor, rtol=1e-5)
        np.testing.assert_allclose(ratio[0, :, 0, 4:], factor**2, rtol=1e-5)
        np.testing.assert_array_equal(ratio[0, :, 1], 1.0)
        np.testing.assert_array_equal(ratio[1], 1.0)


def test_the_norm_is_clipped_over_all_leaves():
    """A gradient of norm 5 clipped to 1 gives the moments of its fifth."""
    axes = {"a": ("embed",), "b": ("embed", "mlp")}
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    optimizer = build_optimizer(OptimizerConfig(clip_norm=1.0, adamw=AdamWConfig(beta1=0.0)), ScheduleConfig(), axes, balancing="none")
    _, state = optimizer.update(grads, optimizer.init(grads), grads, loss=jnp.float32(0.0), **NOTHING)
    moments = {path[-1]: float(leaf.squeeze()) for path, leaf in by_path(state).items() if {"mu", "momentum"} & set(path)}
    assert moments == pytest.approx({"a": 0.6, "b": 0.8})


def test_schedules_count_applied_updates():
    """A step left out does not move the rate on."""
    axes, params = {"head": {"kernel": ("embed", "vocab")}}, {"head": {"kernel": jnp.ones((2, 2))}}
    schedule = ScheduleConfig(steps=4, warmup_fraction=1.0)
    config = OptimizerConfig(peak_lr=1.0, adamw=AdamWConfig(weight_decay=1.0))
    optimizer = build_optimizer(config, schedule, axes, balancing="none")
    zero, state, seen = jax.tree.map(jnp.zeros_like, params), optimizer.init(params), []
    for loss in (1.0, np.nan, 1.0, np.nan, np.nan, 1.0):
        updates, state = optimizer.update(zero, state, params, loss=jnp.float32(loss), **NOTHING)
        seen.append(-float(updates["head"]["kernel"][0, 0]))
    rate = learning_rate(1.0, "cosine", schedule)
    assert seen == pytest.approx([float(rate(0)), 0.0, float(rate(1)), 0.0, 0.0, float(rate(2))])


def test_the_state_lies_and_is_saved_like_the_parameters():
    """Every moment's path ends with its parameter's, and the state converts to one subtree per layer and back."""
    config = ModelConfig(
        vocab_size=17, d_model=8, num_layers=8, dense_dim=8, attn_res_block_size=4,
        kda=KDAConfig(num_heads=2, head_dim=4),
        mla=MLAConfig(num_heads=2, q_lora_rank=4, kv_lora_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4),
        moe=MoEConfig(num_experts=4, experts_per_token=2, latent_dim=4, expert_dim=4),
    )  # fmt: skip
    _, params, axes = parameters.abstract(config)
    state = jax.eval_shape(build_optimizer(OptimizerConfig(), ScheduleConfig(), axes, balancing="quantile").init, params)
    owners = by_path(like_params(state, params, None), is_leaf=lambda node: node is None)
    leaves = by_path(state)
    own = [path for path in leaves if owners[path] is not None]
    assert all(leaves[path].shape == owners[path].shape for path in own)
    assert all(leaves[path].shape == () for path in leaves if owners[path] is None)
    names = [path[-1] for path in own]
    assert names.count("q_up") == 2 and "router_bias" not in names  # one momentum in each of two groups
    assert names.count("embedding") == 2  # two moments of AdamW
    canonical = stacks.unstack_tree(state, config)
    assert sum("layers" in path for path in by_path(canonical)) > 0 and not any("groups" in path for path in by_path(canonical))
    assert by_path(stacks.stack_tree(canonical, config)) == leaves


ON_EIGHT = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from k3train.config import MuonConfig, OptimizerConfig, ScheduleConfig
from k3train.optim import build_optimizer
from k3train.train.state import like_params
axes = {"q_up": ("layers", "q_rank", "heads", "head_dim"), "k_up": ("layers", "kv_rank", "heads", "head_dim"),
        "out_proj": ("heads", "head_dim", "embed"), "w_up": ("layers", "experts", "latent", "expert_mlp"),
        "router_bias": ("layers", "experts"), "norm": ("norm",)}
shapes = {"q_up": (2, 16, 8, 6), "k_up": (2, 16, 8, 4), "out_proj": (8, 4, 16), "w_up": (2, 8, 6, 10), "router_bias": (2, 8), "norm": (16,)}
split = {"q_up": P(None, "d"), "k_up": P(None, None, "d"), "out_proj": P(None, None, "d"), "w_up": P(None, "d"),
         "router_bias": P(None, "d"), "norm": P()}
rng = np.random.default_rng(0)
draw = lambda: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
params, grads = draw(), [draw() for _ in range(2)]
extra = {"histograms": {("router_bias",): rng.multinomial(64, np.ones(16) / 16, (2, 8)).astype(np.int32)},
         "loads": {("router_bias",): np.full((2, 8), 16, np.int32)}, "max_logits": {("q_up",): np.full((2, 8), 250.0, np.float32)}}
config = OptimizerConfig(muon=MuonConfig(newton_schulz_dtype="float32"))
optimizer = build_optimizer(config, ScheduleConfig(steps=4), axes, balancing="quantile")

def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params, loss=jnp.float32(1.0), **extra)
    return optax.apply_updates(params, updates), state

def run(place):
    p = place(params)
    state = jax.jit(optimizer.init)(p)
    state = jax.device_put(state, like_params(state, shardings, whole)) if place is sharded else state
    jitted = jax.jit(step, donate_argnums=(0, 1))
    for g in grads:
        p, state = jitted(p, state, place(g))
    return p, state

mesh = Mesh(np.array(jax.devices()), ("d",))
whole = NamedSharding(mesh, P())
shardings = {name: NamedSharding(mesh, spec) for name, spec in split.items()}
one, sharded = lambda tree: jax.device_put(tree, jax.devices()[0]), lambda tree: jax.device_put(tree, shardings)
a, b = run(one), run(sharded)
assert int(b[1].applied) == 2
jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=2e-6), a, b)
print("devices:", len(b[0]["w_up"].sharding.device_set))
"""


@pytest.mark.numerics
def test_split_over_eight_devices_it_is_the_same():
    """Parameters, moments and the state's other arrays as they lie in a run; two donated steps."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run([sys.executable, "-c", ON_EIGHT], cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == "devices: 8"
