"""The whole tiny model, read through the Hugging Face reader, against the published modelling code's arrays (tests/golden/model_tiny)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, ModelConfig
from k3train.interop import hugging_face
from k3train.interop.hugging_face_names import PREFIX, gathered, tensors
from k3train.models import stacks
from k3train.models.decoder import DecoderOutput
from k3train.models.layout import LocalLayout
from k3train.models.parameters import abstract
from tests.golden import EXACT, FOLDER, check, load
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

NO_TARGET = -100
LENGTH = 98  # of the packed row; the plain rows have 80 tokens


class Runs(NamedTuple):
    """Everything that one dtype gives: traced forward passes, losses, and gradients by released name, plain and packed."""

    dtype: str
    io: dict[str, np.ndarray]
    output: DecoderOutput
    scanned_logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    packed_logits: np.ndarray
    packed_loss: float
    packed_gradients: dict[str, np.ndarray]

    def limit(self, float32_limit: float) -> float:
        """The README's limit in float32, and the rounding of the stored values in float64."""
        return EXACT if self.dtype == "float64" else float32_limit


@pytest.fixture(scope="module", params=["float32", "float64"])
def runs(request) -> Iterator[Runs]:
    with float64() if request.param == "float64" else nullcontext():
        yield run_all(request.param)


def run_all(dtype: str) -> Runs:
    folder = FOLDER / "model_tiny"
    io = load("model_tiny/io")
    remat = "layer" if dtype == "float32" else "none"  # each once, to keep compilation short
    config = dataclasses.replace(hugging_face.read_config(folder), dtypes=DtypePolicy(parameters=dtype, compute=dtype), remat=remat)
    params = stacks.stack(hugging_face.read_checkpoint(folder, config), config)
    graphdef, _, _ = abstract(config)

    def forward(params: Any, tokens_BT: jax.Array, segments_BT: jax.Array, trace: bool = False) -> DecoderOutput:
        return nnx.merge(graphdef, params)(tokens_BT, segments_BT, layout=LocalLayout(), trace=trace)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def step(params: Any, tokens_BT: jax.Array, segments_BT: jax.Array, labels_BT: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits_BTV = forward(params, tokens_BT, segments_BT).logits_BTV
            log_probs_BTV = jax.nn.log_softmax(logits_BTV)
            picked_BT = jnp.take_along_axis(log_probs_BTV, jnp.maximum(labels_BT, 0)[..., None], axis=-1)[..., 0]
            real_BT = labels_BT != NO_TARGET
            return -jnp.sum(picked_BT * real_BT) / jnp.sum(real_BT), logits_BTV

        return jax.value_and_grad(loss, has_aux=True)(params)

    tokens = io["token_ids"]
    plain = rows(tokens, np.zeros_like(tokens), np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TARGET))
    packed = rows(io["packed_token_ids"], io["packed_segment_ids"], io["packed_labels"])
    output = jax.jit(forward, static_argnames="trace", compiler_options=QUICK_COMPILE)(params, *plain[:2], trace=True)
    (loss, logits), gradients = step(params, *plain)
    (packed_loss, packed_logits), packed_gradients = step(params, *packed)
    return Runs(
        dtype, io, output, np.asarray(logits), float(loss), by_released_name(gradients, config),
        np.asarray(packed_logits), float(packed_loss), by_released_name(packed_gradients, config),
    )  # fmt: skip


def rows(tokens_BT: np.ndarray, segments_BT: np.ndarray, labels_BT: np.ndarray) -> tuple[np.ndarray, ...]:
    """Both runs as two rows of `LENGTH` tokens, the rest padding, so that one compilation serves both."""
    missing = ((0, 2 - len(tokens_BT)), (0, LENGTH - tokens_BT.shape[1]))
    fills = ((tokens_BT, 0), (segments_BT, -1), (labels_BT, NO_TARGET))
    return tuple(np.pad(array, missing, constant_values=fill) for array, fill in fills)


def by_released_name(gradients: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    canonical = stacks.unstack(gradients, config)
    return {PREFIX + name: tensor for rule, leaves in gathered(canonical, config) for name, tensor in tensors(rule, leaves)}


def check_gradients(runs: Runs, prefix: str, gradients: dict[str, np.ndarray]) -> None:
    names = [key.removeprefix(prefix) for key in runs.io if key.startswith(prefix)]
    assert names
    for name in names:
        if np.any(runs.io[prefix + name]):
            check(gradients[name], runs.io[prefix + name], runs.limit(2e-3), prefix + name)
        else:  # the router bias
            assert not np.any(gradients[name]), f"{prefix}{name}: must be zero"


def test_logits(runs: Runs) -> None:
    for logits in (runs.scanned_logits[:, :80], runs.output.logits_BTV[:, :80]):
        if runs.dtype == "float64":
            check(logits, runs.io["logits_f64"], EXACT, "logits")
        else:
            np.testing.assert_allclose(logits, runs.io["logits"], rtol=0, atol=2e-3)


def test_running_sums_and_blocks(runs: Runs) -> None:
    trace = runs.output.trace
    assert trace is not None
    for layer, expected in enumerate(runs.io["partial_sum_after_layer"]):
        check(trace.running_sums[layer, :, :80], expected, runs.limit(2e-4), f"running sum after layer {layer}")
    for number, expected in enumerate(runs.io["blocks"]):
        check(trace.blocks[number, :, :80], expected, runs.limit(2e-4), f"block {number}")
    assert len(trace.blocks) == len(runs.io["blocks"])
    assert list(trace.num_blocks) == runs.io["num_blocks_after_layer"].tolist()
    check(trace.final_hidden[:, :80], runs.io["final_hidden"], runs.limit(2e-4), "last hidden state")


def test_chosen_experts(runs: Runs) -> None:
    assert runs.output.trace is not None
    np.testing.assert_array_equal(runs.output.trace.expert_ids[:, :, :80], runs.io["router_topk_ids"])


def test_expert_load_counts_every_choice(runs: Runs) -> None:
    chosen = runs.io["router_topk_ids"]
    expected = [np.bincount(layer.reshape(-1), minlength=16) for layer in chosen]
    np.testing.assert_array_equal(runs.output.aux["expert_load"], expected)


def test_loss_and_gradients(runs: Runs) -> None:
    check(runs.loss, runs.io["loss"], runs.limit(1e-4), "loss")
    check_gradients(runs, "grad:", runs.gradients)


def test_packed_documents(runs: Runs) -> None:
    if runs.dtype == "float64":
        check(runs.packed_logits[:1], runs.io["packed_logits_f64"], EXACT, "packed logits")
    else:
        np.testing.assert_allclose(runs.packed_logits[:1], runs.io["packed_logits"], rtol=0, atol=2e-3)
    check(runs.packed_loss, runs.io["packed_loss"], runs.limit(1e-4), "packed loss")
    check_gradients(runs, "packed_grad:", runs.packed_gradients)
