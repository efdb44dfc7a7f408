"""The chunk form equals the recurrence: any length, documents, padding and gates; values and every gradient.

B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kda import chunk_transition
from pallas_kernels.kda.chunked import kda_chunked
from tests.pallas_kernels.kda.cases import LOWER_BOUND, Inputs, assert_all_near, assert_near, with_gradients
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

# (batch, tokens, heads, key width, value width): each compiles three forms, so the data varies and the shapes do not.
SHAPES = [(2, 37, 3, 4, 6), (1, 70, 3, 8, 8)]


class Draw(NamedTuple):
    """What hypothesis chooses: the rest follows from the seed."""

    seed: int
    gates: tuple[str, ...]
    runs: list[list[tuple[int, int]]]
    repeated_keys: bool
    zero_keys: bool


draws = st.builds(
    Draw,
    seed=st.integers(0, 2**32 - 1),
    gates=st.tuples(*[st.sampled_from(["middling", "at the bound", "none", "flipping"])] * 3),
    # Per row, runs of (document id, length); -1 is padding. Ids may come back, and may skip numbers.
    runs=st.lists(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 40)), min_size=1, max_size=8), min_size=2, max_size=2),
    repeated_keys=st.booleans(),
    zero_keys=st.booleans(),
)


def make(shape: tuple[int, ...], draw: Draw) -> tuple[Inputs, np.ndarray, np.ndarray, np.ndarray]:
    batch, tokens, heads, key_width, value_width = shape
    random = np.random.default_rng(draw.seed)
    q, k, gate = (random.normal(size=(batch, tokens, heads, key_width)) for _ in range(3))
    v, d_o = (random.normal(size=(batch, tokens, heads, value_width)) for _ in range(2))
    beta = random.normal(size=(batch, tokens, heads))
    for head, kind in enumerate(draw.gates):
        shift = {"middling": 0, "at the bound": 12, "none": -12, "flipping": 12 * (-1) ** np.arange(tokens)[:, None]}[kind]
        gate[:, :, head] += shift
    if draw.repeated_keys:
        k[:, tokens // 4 :] = k[:, :1]
        beta[:, tokens // 4 :] += 6
    if draw.zero_keys:
        k[random.random(k.shape[:3]) < 0.2] = 0
        q[random.random(q.shape[:3]) < 0.2] = 0
    ids = np.full((batch, tokens), -1, np.int32)
    for row, runs in enumerate(draw.runs[:batch]):
        flat = np.concatenate([np.full(length, document) for document, length in runs])[:tokens]
        ids[row, : len(flat)] = flat
    state, d_final = (random.normal(size=(batch, heads, key_width, value_width)) for _ in range(2))
    a_log, dt_bias = random.normal(size=heads) * 0.3, random.normal(size=(heads, key_width))
    return Inputs(q, k, v, gate, beta, a_log, dt_bias, state), d_o, d_final, ids


def cast(inputs: Inputs, dtype: str) -> Inputs:
    return Inputs(*(jnp.asarray(x, dtype) for x in inputs))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25)
@given(draw=draws)
def test_chunked_equals_recurrent(shape: tuple[int, ...], draw: Draw) -> None:
    inputs, d_o, d_final, ids = make(shape, draw)
    with float64():
        args = (jnp.asarray(d_o), jnp.asarray(d_final), jnp.asarray(ids))
        want = with_gradients("recurrent")(cast(inputs, "float64"), *args)
        for form in ("chunked", "chunked64"):
            assert_all_near(with_gradients(form)(cast(inputs, "float64"), *args), want, 1e-10)
    # Against float32, too: where gates saturate, both forms share the rounding of 1 - sigmoid, which alone can be a tenth there.
    args = (cast(inputs, "float32"), jnp.asarray(d_o, "float32"), jnp.asarray(d_final, "float32"), jnp.asarray(ids))
    assert_all_near(with_gradients("chunked")(*args), with_gradients("recurrent")(*args), 1e-3)


@pytest.mark.parametrize(
    "runs",
    [
        [(-1, 5), (0, 40), (-1, 25)],
        [(0, 10), (-1, 9), (0, 30), (-1, 21)],
        [(0, 16), (3, 16), (0, 16), (-1, 1), (0, 21)],
        [(-1, 70)],
    ],
    ids=["padding around", "padding inside a document", "an id comes back", "nothing but padding"],
)
@pytest.mark.parametrize("form", ["recurrent", "chunked", "chunked64"])
def test_documents_and_padding(form: str, runs: list[tuple[int, int]]) -> None:
    """Each document, its padding removed, run alone gives the packed row's output; the last one gives its final state."""
    shape = SHAPES[1]
    draw = Draw(seed=7, gates=("middling", "none", "at the bound"), runs=[runs, runs], repeated_keys=False, zero_keys=False)
    inputs, d_o, d_final, ids = make(shape, draw)
    with float64():
        inputs = cast(inputs, "float64")
        results = with_gradients(form)(inputs, jnp.asarray(d_o), jnp.asarray(d_final), jnp.asarray(ids))
        assert not np.asarray(results.o)[ids < 0].any()
        real = np.flatnonzero(ids[0] >= 0)
        documents = np.split(real, 1 + np.flatnonzero(np.diff(ids[0, real]))) if len(real) else []
        state = inputs.initial_state
        for number, tokens in enumerate(documents):
            start = inputs.initial_state if number == 0 else jnp.zeros_like(inputs.initial_state)
            # Padded at the end to one length, which is the simplest padding, so that one compilation serves.
            index = np.resize(tokens, shape[1])
            alone_ids = jnp.asarray(np.where(np.arange(shape[1]) < len(tokens), 0, -1), jnp.int32)[None]
            alone = Inputs(*(x[:, index] for x in inputs[:5]), inputs.a_log, inputs.dt_bias, start)
            expected = with_gradients("recurrent")(alone, jnp.asarray(d_o), jnp.asarray(d_final), alone_ids)
            assert_near(results.o[:, tokens], expected.o[:, : len(tokens)], 1e-10, f"o of document {number}")
            state = expected.final_state
        assert_near(results.final_state, state, 1e-10, "final_state")
    for name, gradient in zip(Inputs._fields[:5], results.gradients, strict=False):
        assert not np.asarray(gradient)[ids < 0].any(), f"padding has a gradient of {name}"


def test_transition_is_differentiable() -> None:
    """M S + S_zero_start is the final state, so its gradients are those of the final state, too."""
    draw = Draw(seed=3, gates=("middling", "none", "at the bound"), runs=[[(0, 60)], [(0, 9)]], repeated_keys=False, zero_keys=False)
    inputs, d_o, d_final, ids = make(SHAPES[1], draw)
    with float64():
        inputs = cast(inputs, "float64")
        want = with_gradients("recurrent")(inputs, jnp.zeros_like(d_o), jnp.asarray(d_final), jnp.asarray(ids))

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @jax.grad
        def gradients(inputs: Inputs) -> jax.Array:
            transition, zero_start = chunk_transition(*inputs[1:7], lower_bound=LOWER_BOUND, segment_ids_BT=jnp.asarray(ids))
            return jnp.sum((transition @ inputs.initial_state + zero_start) * d_final)

        got = gradients(inputs)
    for name, a, b in zip(Inputs._fields, got, want.gradients, strict=True):
        assert_near(a, b, 1e-10, f"gradient of {name}")


def test_a_later_document_forgets_the_incoming_state() -> None:
    draw = Draw(seed=3, gates=("none",) * 3, runs=[[(0, 20), (1, 50)]] * 2, repeated_keys=False, zero_keys=False)
    inputs, _, _, ids = make(SHAPES[1], draw)
    run = jax.jit(partial(chunk_transition, lower_bound=LOWER_BOUND), compiler_options=QUICK_COMPILE)
    transition, zero_start = run(*cast(inputs, "float32")[1:7], segment_ids_BT=jnp.asarray(ids))
    assert not np.asarray(transition).any()
    assert np.asarray(zero_start).any()


def test_bf16_keeps_the_accuracy_of_its_inputs() -> None:
    """Relative L2 to the float64 recurrence on the same bf16 numbers: rounding the output alone costs 1.7e-3."""
    draw = Draw(seed=5, gates=("middling", "none", "flipping"), runs=[[(0, 70)]] * 2, repeated_keys=False, zero_keys=False)
    inputs, d_o, d_final, ids = make(SHAPES[1], draw)
    rounded = Inputs(*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]), *(jnp.asarray(x, jnp.float32) for x in inputs[5:]))
    run_ids = jnp.asarray(ids)
    got = with_gradients("chunked")(rounded, jnp.asarray(d_o, jnp.bfloat16), jnp.asarray(d_final, jnp.float32), run_ids)
    assert got.o.dtype == jnp.bfloat16 and got.final_state.dtype == jnp.float32
    assert [x.dtype for x in got.gradients] == [x.dtype for x in rounded]
    with float64():
        exact = Inputs(*(jnp.asarray(np.asarray(x, np.float64)) for x in rounded))
        d_o_rounded = np.asarray(jnp.asarray(d_o, jnp.bfloat16), np.float64)
        want = with_gradients("recurrent")(exact, jnp.asarray(d_o_rounded), jnp.asarray(np.float32(d_final)), run_ids)
    pairs = [("o", got.o, want.o), ("final_state", got.final_state, want.final_state)]
    pairs += [(f"gradient of {name}", a, b) for name, a, b in zip(Inputs._fields, got.gradients, want.gradients, strict=True)]
    for name, a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b)
        assert np.linalg.norm(a - b) < 4e-3 * np.linalg.norm(b), name


def test_default_start_and_documents() -> None:
    """No state is a zero state, no segment ids are one document."""
    draw = Draw(seed=9, gates=("middling",) * 3, runs=[[(0, 70)]] * 2, repeated_keys=False, zero_keys=False)
    inputs = cast(make(SHAPES[1], draw)[0], "float32")
    zero = jnp.zeros_like(inputs.initial_state)
    ids = jnp.zeros(inputs.q.shape[:2], jnp.int32)
    run = jax.jit(partial(kda_chunked, lower_bound=LOWER_BOUND), compiler_options=QUICK_COMPILE)
    bare = run(*inputs[:7])
    full = run(*inputs[:7], segment_ids_BT=ids, initial_state_BHKV=zero)
    for a, b in zip(bare, full, strict=True):
        assert_near(a, np.asarray(b), 1e-6, "result")
