"""KDA against the arrays of the published token-by-token formulas: values and all eight gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import chunk_transition
from tests.pallas_kernels.kda.cases import FORMS, LOWER_BOUND, Inputs, assert_near, golden_gradients, load, with_gradients
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

RUNS = [("recurrent", "float32"), ("recurrent", "float64"), ("chunked", "float32"), ("chunked", "float64")]
# Chunks of 64 differ from those of 16 in structure; case c is where that is hard.
RUNS_64 = [("chunked64", "float32"), ("chunked64", "float64")]


def limit(dtype: str, float32_limit: float) -> float:
    return float32_limit if dtype == "float32" else 1e-6


def precision(dtype: str):
    return float64() if dtype == "float64" else nullcontext()


@pytest.mark.parametrize(("form", "dtype"), RUNS)
@pytest.mark.parametrize("case", ["a_basic", "b_ragged"])
def test_plain(case: str, form: str, dtype: str) -> None:
    with precision(dtype):
        arrays, inputs = load(case, dtype)
        results = with_gradients(form)(inputs, jnp.asarray(arrays["do"]), jnp.asarray(arrays["dS"]))
    assert_near(results.o, arrays["o"], limit(dtype, 1e-5), "o")
    assert_near(results.final_state, arrays["final_state"], limit(dtype, 1e-5), "final_state")
    for name, got, want in zip(Inputs._fields, results.gradients, golden_gradients(arrays), strict=True):
        assert_near(got, want, limit(dtype, 1e-5), f"gradient of {name}")


@pytest.mark.parametrize(("form", "dtype"), [*RUNS, *RUNS_64])
def test_extremes_per_head(form: str, dtype: str) -> None:
    with precision(dtype):
        arrays, inputs = load("c_extreme", dtype)
        results = with_gradients(form)(inputs, jnp.asarray(arrays["do"]), jnp.asarray(arrays["dS"]))
    most = limit(dtype, 2e-5)
    want = golden_gradients(arrays)
    for head in range(4):
        assert_near(results.o[:, :, head], arrays["o"][:, :, head], most, f"o of head {head}")
        assert_near(results.final_state[:, head], arrays["final_state"][:, head], most, f"final_state of head {head}")
        assert_near(results.gradients.a_log[head], want.a_log[head], most, f"gradient of a_log, head {head}")
        assert_near(results.gradients.dt_bias[head], want.dt_bias[head], most, f"gradient of dt_bias, head {head}")
        assert_near(results.gradients.initial_state[:, head], want.initial_state[:, head], most, f"gradient of the state, head {head}")
        for name in ("q", "k", "v", "gate", "beta"):
            got_T, want_T = getattr(results.gradients, name)[0, :, head], getattr(want, name)[0, :, head]
            # Key 0 at token 5, a tiny one at 6, query 0 at 7: their gradients are about 1000 times the others'.
            special = np.isin(np.arange(len(got_T)), [5, 6, 7]) & (head == 0)
            assert_near(got_T[~special], want_T[~special], most, f"gradient of {name}, head {head}")
            if head == 0:
                assert_near(got_T[special], want_T[special], most, f"gradient of {name}, special tokens of head 0")


@pytest.mark.parametrize(("form", "dtype"), RUNS)
def test_packed_documents(form: str, dtype: str) -> None:
    """Documents as rows give every stored state and gradient; one packed row gives the same as the rows."""
    with precision(dtype):
        arrays, packed = load("d_packed", dtype)
        edges, lengths = arrays["cu_seqlens"], arrays["doc_lengths"]
        longest, documents = int(lengths.max()), len(lengths)
        inside = np.arange(longest) < lengths[:, None]

        token_of_row = jnp.asarray(np.where(inside, edges[:-1, None] + np.arange(longest), 0))

        def rows(x_1T):
            return jnp.asarray(x_1T)[0][token_of_row]

        token_inputs = Inputs(*(rows(x) for x in packed[:5]), *packed[5:])
        ids = jnp.asarray(np.where(inside, 0, -1), jnp.int32)
        d_o, d_final = rows(arrays["do"]), jnp.asarray(arrays["dS"])
        results = with_gradients(form)(token_inputs, d_o, d_final, ids)
        last_only = jnp.where(jnp.arange(documents)[:, None, None, None] == documents - 1, d_final, 0)
        by_rows = with_gradients(form)(token_inputs, d_o, last_only, ids)
        one_row = with_gradients(form)(
            packed._replace(initial_state=packed.initial_state[:1]),
            jnp.asarray(arrays["do"]),
            d_final[-1:],
            jnp.asarray(arrays["segment_ids"]),
        )
    most = limit(dtype, 1e-5)
    want = golden_gradients(arrays)

    def unrow(x_NT):
        return np.asarray(x_NT)[inside][None]

    assert_near(unrow(results.o), arrays["o"], most, "o of rows")
    assert not np.asarray(results.o)[~inside].any()
    assert_near(results.final_state, arrays["final_state"], most, "final_state of rows")
    for name, got, wanted in zip(Inputs._fields, results.gradients, want, strict=True):
        assert_near(unrow(got) if name in Inputs._fields[:5] else got, wanted, most, f"gradient of {name}, rows")
    assert_near(one_row.o, arrays["o"], most, "o of the packed row")
    assert_near(one_row.final_state, arrays["final_state"][-1:], most, "final_state of the packed row")
    for name, got, wanted in zip(Inputs._fields, one_row.gradients, by_rows.gradients, strict=True):
        wanted = unrow(wanted) if name in Inputs._fields[:5] else wanted[:1] if name == "initial_state" else wanted
        assert_near(got, wanted, most, f"gradient of {name}, packed row")


@pytest.mark.parametrize(("form", "dtype"), [*RUNS, *RUNS_64])
def test_split_sequence(form: str, dtype: str) -> None:
    """Parts that hand their states on equal the whole; each part's transition equals the product of its tokens' matrices."""
    most = limit(dtype, 1e-5)
    with precision(dtype):
        arrays, inputs = load("e_parts", dtype)
        longest = int(arrays["part_lengths"].max())
        size = {} if form == "recurrent" else {"chunk_size": 64 if form == "chunked64" else 16}

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def run(tokens, state, segment_ids):
            shared = {"lower_bound": LOWER_BOUND, "segment_ids_BT": segment_ids}
            o, after = FORMS[form](*tokens, inputs.a_log, inputs.dt_bias, initial_state_BHKV=state, **shared)
            if form == "recurrent":
                return o, after, None
            return o, after, chunk_transition(*tokens[1:], inputs.a_log, inputs.dt_bias, **shared, **size)

        state, pieces, start = inputs.initial_state, [], 0
        for part, length in enumerate(arrays["part_lengths"]):
            # Padded to one length, so that one compilation serves.
            index = np.minimum(start + np.arange(longest), arrays["q"].shape[1] - 1)
            ids = jnp.asarray(np.where(np.arange(longest) < length, 0, -1), jnp.int32)[None]
            start += length
            assert_near(state, arrays["S_in"][part], most, f"S_in of part {part}")
            o, state, transition = run([x[:, index] for x in inputs[:5]], state, ids)
            pieces.append(o[:, :length])
            assert_near(state, arrays["S_out"][part], most, f"S_out of part {part}")
            if transition is not None:
                assert_near(transition[0], arrays["M"][part], most, f"M of part {part}")
                assert_near(transition[1], arrays["S_zero_start"][part], most, f"S_zero_start of part {part}")
    assert_near(jnp.concatenate(pieces, axis=1), arrays["o"], most, "o")
    assert_near(state, arrays["final_state"], most, "final_state")
