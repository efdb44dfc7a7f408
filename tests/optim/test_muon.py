"""Muon steps against reference arrays; per head equals each head alone; which dims of a leaf make a matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.optim.muon import from_blocks, scale_by_muon, to_blocks
from tests.golden import check, load
from tests.quick import QUICK_COMPILE

GOLDEN = load("muon_step")
LR, DECAY = float(GOLDEN["lr"]), float(GOLDEN["weight_decay"])
HEADS = ("kv_rank", "heads", "head_dim")


def leaves(case: str, matrix: np.ndarray) -> tuple[dict, dict, bool]:
    """A stored matrix [out, in] as leaves of ours [in, ...out], with their axes, and whether they are split by heads."""
    blocks = GOLDEN[f"{case}_row_blocks"]
    if len(blocks) == 1:
        return {"w": matrix.T}, {"w": ("embed", "mlp")}, False
    kinds = {"k_up": blocks[0::2], "v_up": blocks[1::2]} if case == "kv_b_split" else {"q_proj": blocks}
    params = {name: np.stack([matrix[start:stop].T for start, stop in rows], axis=1) for name, rows in kinds.items()}
    return params, dict.fromkeys(params, HEADS), True


@pytest.mark.numerics
@pytest.mark.parametrize("case", ["whole", "per_head", "tall", "kv_b_split"])
def test_golden_steps(case: str):
    params, axes, per_head = leaves(case, GOLDEN[f"{case}_W0"])
    muon = scale_by_muon(axes, per_head=per_head, momentum=float(GOLDEN["momentum"]), dtype=jnp.float32)
    rule = optax.chain(muon, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(LR))

    @jax.jit
    def step(grads, state, params):
        directions, _ = muon.update(grads, state[0])
        updates, state = rule.update(grads, state, params)
        return directions, optax.apply_updates(params, updates), state

    state = rule.init(jax.tree.map(jnp.asarray, params))
    for t in range(len(GOLDEN[f"{case}_grads"])):
        grads = leaves(case, GOLDEN[f"{case}_grads"][t])[0]
        directions, params, state = step(grads, state, params)
        for what, tree, limit in (("update", directions, 5e-5), ("m", state[0].momentum, 1e-6), ("W", params, 1e-6)):
            expected = leaves(case, GOLDEN[f"{case}_{what}"][t])[0]
            for name in expected:
                check(tree[name], expected[name], limit, f"{what} of {name}, step {t}")


@pytest.mark.numerics
def test_per_head_is_each_head_alone():
    """Also inside a stack of layers, which are run one after another."""
    grads = np.random.default_rng(0).normal(size=(2, 12, 3, 8)).astype(np.float32)
    stacked = scale_by_muon({"q_proj": ("layers", *HEADS)}, per_head=True, dtype=jnp.float32)
    alone = scale_by_muon({"w": ("embed", "mlp")}, per_head=False, dtype=jnp.float32)

    def first_update(rule: optax.GradientTransformation, grads: dict) -> dict:
        return jax.jit(lambda g: rule.update(g, rule.init(g))[0], compiler_options=QUICK_COMPILE)(grads)

    together = first_update(stacked, {"q_proj": grads})["q_proj"]
    for layer in range(2):
        for head in range(3):
            single = first_update(alone, {"w": grads[layer, :, head]})["w"]
            check(together[layer, :, head], single, 1e-6, f"layer {layer}, head {head}")


@pytest.mark.parametrize(
    ("shape", "axes", "per_head", "blocks"),
    [
        ((12, 3, 8), ("embed", "heads", "head_dim"), True, (3, 12, 8)),
        ((12, 3, 8), ("embed", "heads", "head_dim"), False, (12, 24)),
        ((3, 8, 12), ("heads", "head_dim", "embed"), False, (24, 12)),
        ((5, 12, 7), ("experts", "latent", "expert_mlp"), False, (5, 12, 7)),
        ((12, 5), ("embed", "experts"), False, (12, 5)),
    ],
)
def test_blocks(shape, axes, per_head, blocks):
    x = np.arange(np.prod(shape)).reshape(shape)
    made = to_blocks(x, axes, per_head)
    assert made.shape == blocks
    np.testing.assert_array_equal(from_blocks(made, shape, axes, per_head), x)
    if per_head:
        np.testing.assert_array_equal(made[1], x[:, 1])


def test_the_update_has_the_size_of_adamw():
    """RMS 0.2, times the spread that the quintic leaves in the singular values: for square, wide, tall and head blocks."""
    axes = {"square": ("embed", "mlp"), "wide": ("layers", "embed", "mlp"), "tall": ("experts", "mlp", "embed")}
    shapes = {"square": (64, 64), "wide": (2, 32, 128), "tall": (3, 128, 32)}
    keys = np.random.default_rng(1)
    grads = {name: keys.normal(size=shape).astype(np.float32) * np.float32(1e-3) for name, shape in shapes.items()}
    rule = scale_by_muon(axes, per_head=False)
    updates = jax.jit(lambda g: rule.update(g, rule.init(g))[0])(grads)
    for name, update in updates.items():
        assert 0.12 < float(jnp.sqrt(jnp.mean(update**2))) < 0.25, name


def test_a_stack_is_orthogonalised_in_the_memory_of_one_layer():
    """What is held beside inputs and outputs is about two layers, however many are stacked."""

    def layers_held(layers: int) -> float:
        leaf = jax.ShapeDtypeStruct((layers, 4, 64, 128), jnp.float32)
        rule = scale_by_muon({"w": ("layers", "experts", "latent", "expert_mlp")}, per_head=False)
        compiled = jax.jit(rule.update).lower({"w": leaf}, jax.eval_shape(rule.init, {"w": leaf})).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (leaf.size * leaf.dtype.itemsize / layers)

    assert layers_held(8) <= 3.0
