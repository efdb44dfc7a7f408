"""KDA's TPU kernels in TPU interpretation (races detected, uninitialised memory is NaN) against the golden arrays.

B batch, T tokens, H heads, K key channels, V value channels. Chunks of 32 or 64 here: they interpret faster than a chip's 128, and
the cases still cross tiles, chunks and blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels.kda as kda_package
from pallas_kernels.kda import chunk_transition, kda, kda_transition
from pallas_kernels.kda.recurrent import kda_recurrent
from pallas_kernels.kda.tpu import kda_tpu, transition_tpu
from pallas_kernels.target import Target
from tests.pallas_kernels.kda.cases import LOWER_BOUND, Inputs, Results, assert_near, golden_gradients, load, with_gradients
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.aot

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SMALL = {"lower_bound": LOWER_BOUND, "chunk": 32, "chunks_per_block": 2, "interpret": INTERPRET}
CASE_C_REPEATS_KEYS = (1, 3)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    yield
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


@cache
def tpu_form(chunk: int):
    """As `cases.with_gradients`, through the kernels."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(inputs: Inputs, d_o: jax.Array, d_final: jax.Array, segment_ids: jax.Array | None = None) -> Results:
        def call(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
            options = {**SMALL, "chunk": chunk}
            return kda_tpu(*inputs[:7], segment_ids_BT=segment_ids, initial_state_BHKV=inputs.initial_state, **options)

        (o, final_state), pull_back = jax.vjp(call, inputs)
        return Results(o, final_state, *pull_back((d_o.astype(o.dtype), d_final)))

    return run


def bf16_inputs(inputs: Inputs) -> Inputs:
    """q, k, v and gate rounded to bf16; the rest, which the model keeps in float32, as it is."""
    return Inputs(*(x.astype(jnp.bfloat16) for x in inputs[:4]), *inputs[4:])


def exact(inputs: Inputs, d_o, d_final, segment_ids=None) -> Results:
    """The recurrence in float64 on the same numbers."""
    with float64():
        wide = Inputs(*(jnp.asarray(np.asarray(x, np.float64)) for x in inputs))
        results = with_gradients("recurrent")(wide, jnp.asarray(d_o, "float64"), jnp.asarray(d_final, "float64"), segment_ids)
        return jax.tree.map(np.asarray, results)


def relative_l2(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", [pytest.param("a_basic", marks=pytest.mark.slow), "b_ragged"])
def test_float32(case: str) -> None:
    arrays, inputs = load(case, "float32")
    results = tpu_form(32)(inputs, jnp.asarray(arrays["do"]), jnp.asarray(arrays["dS"]))
    assert_near(results.o, arrays["o"], 1e-5, "o")
    assert_near(results.final_state, arrays["final_state"], 1e-5, "final_state")
    for name, got, want in zip(Inputs._fields, results.gradients, golden_gradients(arrays), strict=True):
        assert_near(got, want, 1e-5, f"gradient of {name}")


@pytest.mark.parametrize("chunk", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_float32_extremes_per_head(chunk: int) -> None:
    arrays, inputs = load("c_extreme", "float32")
    results = tpu_form(chunk)(inputs, jnp.asarray(arrays["do"]), jnp.asarray(arrays["dS"]))
    want, most = golden_gradients(arrays), 2e-5
    for head in range(4):
        assert_near(results.o[:, :, head], arrays["o"][:, :, head], most, f"o of head {head}")
        assert_near(results.final_state[:, head], arrays["final_state"][:, head], most, f"final_state of head {head}")
        for name in ("a_log", "dt_bias"):
            assert_near(getattr(results.gradients, name)[head], getattr(want, name)[head], most, f"gradient of {name}, head {head}")
        assert_near(results.gradients.initial_state[:, head], want.initial_state[:, head], most, f"gradient of the state, head {head}")
        for name in ("q", "k", "v", "gate", "beta"):
            got_T, want_T = getattr(results.gradients, name)[0, :, head], getattr(want, name)[0, :, head]
            # Key 0 at token 5, a tiny one at 6, query 0 at 7: their gradients are about 1000 times the others'.
            special = np.isin(np.arange(len(got_T)), [5, 6, 7]) & (head == 0)
            assert_near(got_T[~special], want_T[~special], most, f"gradient of {name}, head {head}")
            if head == 0:
                assert_near(got_T[special], want_T[special], most, f"gradient of {name}, special tokens of head 0")


def documents_as_rows(arrays: dict[str, np.ndarray], packed: Inputs):
    """Each document a row of its own, padded at the end: (inputs, d_o, ids, which tokens are real)."""
    edges, lengths = arrays["cu_seqlens"], arrays["doc_lengths"]
    inside = np.arange(int(lengths.max())) < lengths[:, None]
    token = np.where(inside, edges[:-1, None] + np.arange(inside.shape[1]), 0)
    rows = Inputs(*(x[0][token] for x in packed[:5]), *packed[5:])
    return rows, jnp.asarray(arrays["do"])[0][token], jnp.asarray(np.where(inside, 0, -1), jnp.int32), inside


@pytest.mark.slow
def test_float32_documents_as_rows() -> None:
    arrays, packed = load("d_packed", "float32")
    rows, d_o, ids, inside = documents_as_rows(arrays, packed)
    results = tpu_form(32)(rows, d_o, jnp.asarray(arrays["dS"]), ids)
    assert_near(np.asarray(results.o)[inside][None], arrays["o"], 1e-5, "o")
    assert not np.asarray(results.o)[~inside].any()
    assert_near(results.final_state, arrays["final_state"], 1e-5, "final_state")
    for name, got, want in zip(Inputs._fields, results.gradients, golden_gradients(arrays), strict=True):
        got = np.asarray(got)[inside][None] if name in Inputs._fields[:5] else got
        assert_near(got, want, 1e-5, f"gradient of {name}")


def test_float32_packed_row() -> None:
    """All documents in one row, with padding between two of them and behind the last; the gradients against float64."""
    arrays, packed = load("d_packed", "float32")
    ids = np.array(arrays["segment_ids"])
    ids[0, 100:104] = ids[0, -2:] = -1
    packed = packed._replace(initial_state=packed.initial_state[:1])
    d_o, d_final, ids = arrays["do"], arrays["dS"][-1:], jnp.asarray(ids)
    results = tpu_form(32)(packed, jnp.asarray(d_o), jnp.asarray(d_final), ids)
    want = exact(packed, d_o, d_final, ids)
    assert_near(results.o[:, :100], arrays["o"][:, :100], 1e-5, "o before the padding")
    for name in ("o", "final_state"):
        assert_near(getattr(results, name), getattr(want, name), 1e-5, name)
    for name, a, b in zip(Inputs._fields, results.gradients, want.gradients, strict=True):
        assert_near(a, b, 1e-5, f"gradient of {name}")
        assert name not in Inputs._fields[:5] or not np.asarray(a)[np.asarray(ids) < 0].any(), f"padding has a gradient of {name}"


def test_split_sequence() -> None:
    """Parts that hand their states on equal the whole; each part's transition is the product of its tokens' matrices."""
    arrays, inputs = load("e_parts", "float32")
    longest = int(arrays["part_lengths"].max())

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(tokens, state, ids):
        shared = (inputs.a_log, inputs.dt_bias)
        o, after = kda_tpu(*tokens, *shared, segment_ids_BT=ids, initial_state_BHKV=state, **SMALL)
        return o, after, transition_tpu(*tokens[1:], *shared, segment_ids_BT=ids, **SMALL)

    state, pieces, start = inputs.initial_state, [], 0
    for part, length in enumerate(arrays["part_lengths"]):
        index = np.minimum(start + np.arange(longest), arrays["q"].shape[1] - 1)
        ids = jnp.asarray(np.where(np.arange(longest) < length, 0, -1), jnp.int32)[None]
        start += length
        assert_near(state, arrays["S_in"][part], 1e-5, f"S_in of part {part}")
        o, state, (transition, zero_start) = run([x[:, index] for x in inputs[:5]], state, ids)
        pieces.append(o[:, :length])
        assert_near(state, arrays["S_out"][part], 1e-5, f"S_out of part {part}")
        assert_near(transition, arrays["M"][part], 1e-5, f"M of part {part}")
        assert_near(zero_start, arrays["S_zero_start"][part], 1e-5, f"S_zero_start of part {part}")
    assert_near(jnp.concatenate(pieces, axis=1), arrays["o"], 1e-5, "o")
    assert_near(state, arrays["final_state"], 1e-5, "final_state")


def test_gradients_of_the_transition() -> None:
    arrays, inputs = load("e_parts", "float32")
    tokens = [x[:, :70] for x in inputs[1:5]]
    ids = jnp.asarray(np.r_[[0] * 50, [-1] * 3, [0] * 17], jnp.int32)[None]
    weights = np.random.default_rng(0)
    d_transition, d_start = (jnp.asarray(weights.normal(size=s), "float32") for s in (arrays["M"][0].shape, arrays["S_in"][0].shape))

    def gradients(form, **options):
        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.grad, argnums=(0, 1))
        def run(tokens, shared):
            transition, zero_start = form(*tokens, *shared, segment_ids_BT=ids, **options)
            return jnp.sum(transition * d_transition) + jnp.sum(zero_start * d_start)

        return jax.tree.leaves(run(tokens, (inputs.a_log, inputs.dt_bias)))

    names = ("k", "v", "gate", "beta", "a_log", "dt_bias")
    for name, a, b in zip(names, gradients(transition_tpu, **SMALL), gradients(chunk_transition, lower_bound=LOWER_BOUND), strict=True):
        assert_near(a, np.asarray(b), 1e-5, f"gradient of {name}")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a_basic", "b_ragged", "d_packed", "e_parts"])
def test_bf16(case: str) -> None:
    arrays, inputs = load(case, "float32")
    rows = inputs.q.shape[0]
    inputs = bf16_inputs(inputs)._replace(initial_state=inputs.initial_state[:rows])
    random = np.random.default_rng(0)
    d_o = arrays["do"] if "do" in arrays else random.normal(size=arrays["o"].shape)
    d_o = np.asarray(jnp.asarray(d_o, jnp.bfloat16), np.float32)
    d_final = np.float32(arrays["dS"][-rows:] if "dS" in arrays else random.normal(size=inputs.initial_state.shape))
    ids = jnp.asarray(arrays["segment_ids"]) if "segment_ids" in arrays else None
    results, want = tpu_form(32)(inputs, jnp.asarray(d_o), jnp.asarray(d_final), ids), exact(inputs, d_o, d_final, ids)
    errors = {name: relative_l2(getattr(results, name), getattr(want, name)) for name in ("o", "final_state")}
    gradients = {n: relative_l2(a, b) for n, a, b in zip(Inputs._fields, results.gradients, want.gradients, strict=True)}
    print(f"\n{case} bf16: {errors} gradients {gradients}")
    assert max(errors.values()) <= 4.5e-3, errors
    assert gradients.pop("a_log") <= 1e-2, "one number per head, a sum over all tokens in which much cancels"
    assert max(gradients.values()) <= 4.5e-3, gradients


@pytest.mark.parametrize("chunk", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_bf16_extremes_per_head(chunk: int) -> None:
    arrays, inputs = load("c_extreme", "float32")
    inputs = bf16_inputs(inputs)
    d_o = np.asarray(jnp.asarray(arrays["do"], jnp.bfloat16), np.float32)
    results, want = tpu_form(chunk)(inputs, jnp.asarray(d_o), jnp.asarray(arrays["dS"])), exact(inputs, d_o, arrays["dS"])
    for head in range(4):
        errors = {
            "o": relative_l2(results.o[:, :, head], want.o[:, :, head]),
            "final_state": relative_l2(results.final_state[:, head], want.final_state[:, head]),
        }
        gradients = {
            name: relative_l2(getattr(results.gradients, name)[:, :, head], getattr(want.gradients, name)[:, :, head])
            for name in Inputs._fields[:5]
        }
        print(f"\nc_extreme bf16, chunk {chunk}, head {head}: {errors} gradients {gradients}")
        repeats = head in CASE_C_REPEATS_KEYS
        assert max(errors.values()) <= (2e-2 if repeats else 4.5e-3), (head, errors)
        assert max(gradients.values()) <= (2e-2 if repeats else 6e-3), (head, gradients)


def test_extreme_inputs_stay_finite() -> None:
    """Zero keys and queries, gates and beta far outside, a row of nothing but padding, and a tail that ends inside a tile."""
    arrays, inputs = load("a_basic", "float32")
    cut = [x[:, :70] for x in inputs[:5]]
    q, k, v, gate, beta = cut
    gate = gate.at[:, :, 0].set(1e4).at[:, :, 1].set(-1e4)
    inputs = Inputs(q.at[:, 10:20].set(0), k.at[:, 10:20].set(0), v, gate, beta.at[:, ::3].set(1e4).at[:, 1::3].set(-1e4), *inputs[5:])
    ids = jnp.asarray([[-1] * 70, [0] * 30 + [-1] * 30 + [1] * 10], jnp.int32)
    results = tpu_form(32)(inputs, jnp.ones_like(v), jnp.ones_like(inputs.initial_state), ids)
    for name, x in zip(("o", "final_state", *Inputs._fields), (*results[:2], *results.gradients), strict=True):
        assert np.isfinite(np.asarray(x)).all(), name
    np.testing.assert_array_equal(results.final_state[0], inputs.initial_state[0])
    want, _ = kda_recurrent(*inputs[:7], lower_bound=LOWER_BOUND, segment_ids_BT=ids, initial_state_BHKV=inputs.initial_state)
    assert_near(results.o, np.asarray(want), 1e-5, "o")


def test_what_the_kernels_do_not_take_is_named() -> None:
    x, beta, per_head = jnp.ones((1, 4, 2, 8), jnp.float16), jnp.ones((1, 4, 2)), (jnp.ones((2,)), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match='"tpu" does not apply: an input is float16'):
        kda(x, x, x, x, beta, *per_head, lower_bound=-5.0, implementation="tpu")
    wide = jnp.ones((1, 4, 2, 300))
    with pytest.raises(ValueError, match="300 channels"):
        kda_tpu(wide, wide, wide, wide, beta, per_head[0], jnp.ones((2, 300)), lower_bound=-5.0)


def test_choice_on_tpu_and_its_fall_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kda_package, "target", lambda: Target("tpu", 2))
    kda_package._choose.cache_clear()
    x, beta = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2))
    assert kda_package._choice(x, x, x, x, beta) == "tpu"
    with caplog.at_level(logging.WARNING, logger="pallas_kernels.kda"):
        assert [kda_package._choice(x.astype(jnp.float16), beta) for _ in range(2)] == ["chunked", "chunked"]
    assert len(caplog.records) == 1 and "slower chunked form" in caplog.text and "float16" in caplog.text


def test_transition_asks_for_a_form() -> None:
    arrays, inputs = load("e_parts", "float32")
    cut = [x[:, :20] for x in inputs[1:5]]
    shared = (inputs.a_log, inputs.dt_bias)
    for got, want in zip(
        kda_transition(*cut, *shared, lower_bound=LOWER_BOUND), chunk_transition(*cut, *shared, lower_bound=LOWER_BOUND), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="implementation must be"):
        kda_transition(*cut, *shared, lower_bound=LOWER_BOUND, implementation="recurrent")
    with pytest.raises(ValueError, match="dt_bias has shape"):
        kda_transition(*cut, inputs.a_log, inputs.dt_bias[:1], lower_bound=LOWER_BOUND)
