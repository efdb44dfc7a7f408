"""Full Attention Residuals and the plain residual against their equations: sublayers are matrices, so that only the depth is at work."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, ModelConfig
from k3train.models import depth, stacks
from k3train.models.decoder import Decoder
from k3train.models.layout import LocalLayout
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
L, T, D = 3, 5, 8
CONFIG = ModelConfig(
    vocab_size=T, d_model=D, num_layers=L, num_dense_layers=L, dense_dim=4, mixer_pattern=("mla_rope",), last_mixer=None,
    dtypes=DtypePolicy(parameters="float64", compute="float64"),
)  # fmt: skip
MIXES = ("mixer_res", "ffn_res")


class Matrix(nnx.Module):
    """Stands in for a mixer or a feed-forward block: x @ W."""

    def __init__(self, weight):
        self.weight = nnx.Param(weight)

    def __call__(self, x, *_, collect):
        return x @ self.weight[...], {}


class Identity(nnx.Module):
    """Leaves its input as it is."""

    def __call__(self, x):
        return x


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"embed": (T, D), "mixer": (L, D, D), "ffn": (L, D, D), "mixer_norm": (L, D), "ffn_norm": (L, D), "output_res": (2, D)}
    shapes |= {name: (2, L, D) for name in MIXES}  # key norms' weights, pseudo-queries
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def decoder(config: ModelConfig, p) -> Decoder:
    model = Decoder(config)
    model.embed.embedding, model.norm, model.head = nnx.Param(p["embed"]), Identity(), Identity()
    for group, (layer,) in zip(stacks.groups(config), model.groups, strict=True):
        here = slice(group.first, group.first + group.repeats)
        layer.mixer, layer.ffn = Matrix(p["mixer"][here]), Matrix(p["ffn"][here])
        layer.mixer_norm.scale, layer.ffn_norm.scale = nnx.Param(p["mixer_norm"][here]), nnx.Param(p["ffn_norm"][here])
        if config.depth != "residual":
            for name in MIXES:
                site = getattr(layer, name)
                site.key_norm, site.query = (nnx.Param(value[here]) for value in p[name])
    if config.depth != "residual":
        model.output_res.key_norm, model.output_res.query = map(nnx.Param, p["output_res"])
    return model


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale


def mix(sources, site):
    scores = jnp.stack([jnp.sum(rms_norm(v, site[0] * site[1]), axis=-1) for v in sources])
    p = jnp.exp(scores) / jnp.sum(jnp.exp(scores), axis=0)
    return sum(p_i[:, None] * v for p_i, v in zip(p, sources, strict=True)), jnp.mean(p, axis=1)


def full_reference(p):
    """Embedding and every earlier output are sources of every input (report eqs 8-9)."""
    sources, weights = [p["embed"]], []
    for layer in range(L):
        for sublayer in ("mixer", "ffn"):
            h, mean_weights = mix(sources, p[f"{sublayer}_res"][:, layer])
            sources.append(rms_norm(h, p[f"{sublayer}_norm"][layer]) @ p[sublayer][layer])
            weights.append(jnp.pad(mean_weights, (0, 2 * L - len(mean_weights))))
    return mix(sources, p["output_res"])[0], (jnp.stack(weights[::2]), jnp.stack(weights[1::2]))


def residual_reference(p):
    x = p["embed"]
    for layer in range(L):
        for sublayer in ("mixer", "ffn"):
            x = x + rms_norm(x, p[f"{sublayer}_norm"][layer]) @ p[sublayer][layer]
    return x, ()


@pytest.mark.parametrize(("form", "reference"), [("full_attention_residuals", full_reference), ("residual", residual_reference)])
def test_form_is_its_equation(form, reference):
    """Outputs, gradients of every parameter and the weights of the sources; under remat, and layer by layer."""
    config, p = dataclasses.replace(CONFIG, depth=form), parameters()
    tokens = np.arange(T, dtype=np.int32)[None]
    padded = np.concatenate([tokens, tokens], axis=1)  # a second copy as padding, which the weights must not count
    segment_ids = np.repeat(np.array([[0, -1]], np.int32), T, axis=1)
    cotangent = np.random.default_rng(1).normal(size=(T, D))

    def ours(p, trace):
        output = decoder(config, p)(padded, segment_ids, layout=LocalLayout(), collect=True, trace=trace)
        return jnp.sum(output.logits_BTV[0, :T] * cotangent), (output.logits_BTV[0, :T], output.aux)

    def wanted(p):
        y, weights = reference(p)
        return jnp.sum(y * cotangent), (y, weights)

    with float64():
        (_, (expected, weights)), d_expected = jit(jax.value_and_grad(wanted, has_aux=True))(p)
        (_, (y, aux)), d_p = jit(jax.value_and_grad(partial(ours, trace=False), has_aux=True))(p)
        _, (traced, traced_aux) = jit(partial(ours, trace=True))(p)
    for value in (y, traced):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
    for name in p:
        np.testing.assert_allclose(d_p[name], d_expected[name], rtol=1e-8, atol=1e-10, err_msg=name)
    for collected in (aux, traced_aux):
        assert sorted(collected) == sorted([*(["source_weights_ffn", "source_weights_mixer"] if weights else []), "finite"])
        assert collected["finite"].tolist() == [True] * L
        for name, value in zip(("source_weights_mixer", "source_weights_ffn"), weights, strict=False):
            np.testing.assert_allclose(collected[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_full_and_block_form_read_the_same_in_the_first_layer():
    """There the running sum is one sublayer's output. A second layer tells them apart."""
    embedded, *outputs = np.random.default_rng(2).normal(size=(4, 1, T, D)).astype(np.float32)
    config = dataclasses.replace(CONFIG, dtypes=DtypePolicy(compute="float32"))

    @jit
    def reads(outputs):
        read = []
        for form in ("block_attention_residuals", "full_attention_residuals"):
            so_far = depth.begin(dataclasses.replace(config, depth=form), embedded)
            site = depth.mixing_site(config)
            site.key_norm, site.query = nnx.Param(jnp.ones(D)), nnx.Param(jnp.linspace(-1, 1, D))
            inputs = [so_far.read(site)[0]]
            for y in outputs:
                so_far = so_far.add(y)
                inputs.append(so_far.read(site)[0])
            read.append(jnp.stack(inputs))
        return read

    block, full = reads(outputs)
    np.testing.assert_allclose(block[0], embedded, rtol=1e-6)  # an empty running sum does not count
    np.testing.assert_allclose(block[:2], full[:2], rtol=1e-6)
    assert np.abs(block[2] - full[2]).max() > 0.01


def test_a_layer_that_leaves_something_not_finite_is_named():
    p = parameters()
    p["ffn"][1] = np.inf
    for form in ("block_attention_residuals", "full_attention_residuals", "residual"):
        config = dataclasses.replace(CONFIG, depth=form)

        def finite(p, config=config):
            tokens = jnp.arange(T, dtype=jnp.int32)[None]
            return decoder(config, p)(tokens, jnp.zeros_like(tokens), layout=LocalLayout(), collect=True).aux["finite"]

        with float64():
            assert jit(finite)(p).tolist() == [True, False, False], form
