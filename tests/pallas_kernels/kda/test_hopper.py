"""KDA's Hopper kernels: interpreted, lowered for cuda, and run on a GPU, with their gradients.

Shapes: B batch, T tokens, H heads, K key channels, V value channels. Errors are relative in the L2 norm, against the float64
recurrence on the same bf16 inputs.
"""

from __future__ import annotations

import functools
import logging
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernel API and interpreter that the kernels use come with JAX 0.11", allow_module_level=True)

import pallas_kernels.kda as kda_package
from pallas_kernels.kda.hopper import kda_hopper, transition_hopper, unsupported_reason
from pallas_kernels.kda.hopper import prepare as prepare_module
from pallas_kernels.kda.hopper.recurrence import compute_warpgroups, recurrence
from pallas_kernels.kda.hopper.reverse import reverse_recurrence
from pallas_kernels.kda.recurrent import kda_recurrent
from pallas_kernels.target import Target
from tests.pallas_kernels.kda.cases import GOLDEN, LOWER_BOUND
from tests.pallas_kernels.kda.hopper_interpreter import interpret
from tests.x64 import float64

INPUTS = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")
REGIMES = {"random": 4.5e-3, "initial gate": 4.5e-3, "bound": 4.5e-3, "no decay": 6.5e-3, "repeated keys": 2e-2}
GRADIENT_LIMIT = 1.5e-2
# One and a half times the errors of flash-linear-attention on such inputs (docs/benchmarks/kda_h200.json).
WITH_REPEATED_KEYS = {"q": 2.6e-2, "k": 6.9e-3, "v": 4.3e-2, "beta_raw": 0.102}
CASES = ("a_basic", "b_ragged", "c_extreme", "d_packed")
EDGES = (1, 15, 16, 17, 63, 64, 65)


def make(regime, batch=1, tokens=131, heads=2, width=128, v_width=128, seed=0):
    """The eight inputs of one regime of gates: bf16, with FP32 a_log, dt_bias and state."""
    rng = np.random.default_rng(seed)
    q, k, gate = (rng.normal(size=(batch, tokens, heads, width)) for _ in range(3))
    v, beta = rng.normal(size=(batch, tokens, heads, v_width)), rng.normal(size=(batch, tokens, heads))
    a_log, dt_bias = np.log(rng.uniform(1, 16, heads)), 0.1 * rng.normal(size=(heads, width))
    if regime == "initial gate":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), dt_bias.shape))
        a_log, dt_bias, gate = np.zeros(heads), step + np.log(-np.expm1(-step)), 0.02 * gate
    if regime in ("no decay", "repeated keys"):
        a_log, gate = np.zeros(heads), np.full_like(gate, -50)
    if regime == "repeated keys":
        k, beta = np.broadcast_to(k[:, :1], k.shape), np.full_like(beta, 4)
    if regime == "bound":
        gate = np.full_like(gate, 50)
    state = 0.1 * rng.normal(size=(batch, heads, width, v_width))
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, gate, beta)), *(jnp.asarray(x, jnp.float32) for x in (a_log, dt_bias, state))


def documents(tokens, edges):
    """Segment ids [1, T] that change at the edges, with padding inside a document and at the end."""
    ids = np.searchsorted(np.asarray(edges), np.arange(tokens), side="right")
    ids[min(80, tokens - 4) : min(83, tokens - 1)] = -1
    ids[-2:] = -1
    return jnp.asarray(ids[None], jnp.int32)


def expected(inputs, segment_ids=None):
    return with_gradients(kda_recurrent, inputs, segment_ids, None)


def cotangents(inputs):
    """Of the output (bf16) and the final state (FP32)."""
    rng = np.random.default_rng(7)
    return jnp.asarray(rng.normal(size=inputs[2].shape), jnp.bfloat16), jnp.asarray(rng.normal(size=inputs[7].shape), jnp.float32)


@functools.cache
def compiled(form):
    """Jitted (cotangents or None, segment ids, *inputs) -> results of a form: once for all tests with the same shapes."""

    def results(given, segment_ids, *inputs):
        def call(*inputs):
            return form(*inputs[:7], lower_bound=LOWER_BOUND, segment_ids_BT=segment_ids, initial_state_BHKV=inputs[7])

        found, pull_back = jax.vjp(call, *inputs)
        cotangents = None if given is None else tuple(x.astype(y.dtype) for x, y in zip(given, found, strict=True))
        return (*found, *(() if given is None else pull_back(cotangents)))

    return jax.jit(results)


def with_gradients(form, inputs, segment_ids, given):
    """Output, final state and, if cotangents are given, the eight gradients; the recurrence runs in float64, on the CPU."""
    if form is not kda_recurrent:
        return compiled(form)(given, segment_ids, *inputs)
    if segment_ids is None:  # one document: the same program as with several
        segment_ids = np.zeros(inputs[0].shape[:2], np.int32)
    with float64(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        given, inputs = jax.tree.map(lambda x: jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64), (given, inputs))
        return [np.asarray(x) for x in compiled(form)(given, jnp.asarray(np.asarray(segment_ids)), *inputs)]


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_every_exponent_is_a_short_interval():
    """Within the bound of the report's 16-token tiles: at most 16 decays in a factor that may grow."""
    from_reference, to_later_reference, from_start, to_end = prepare_module.interval_signs().reshape(4, 64, 64)
    assert np.abs(from_reference.sum(axis=1)).max() <= 16
    assert to_later_reference.clip(max=0).sum(axis=1).min() >= -16
    assert set(np.unique([from_start, to_end])) == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.numerics
def test_interpreted_without_races():
    """Two chunks, so that no buffer of the recurrence's ring is filled twice: see the next test for that. No initial state."""
    *inputs, start = make("random", tokens=128, heads=1)
    o, state, races = interpret((*inputs, None), lower_bound=LOWER_BOUND, detect_races=True)
    assert not races
    want_o, want_state = expected((*inputs, 0 * start))
    assert error(o, want_o) < REGIMES["random"] and error(state, want_state) < REGIMES["random"]


@pytest.mark.slow
@pytest.mark.numerics
def test_interpreted_with_documents_and_a_ragged_tail():
    """One block walks over all chunks, so that its buffers are used again; widths are padded."""
    inputs = make("initial gate", tokens=131, heads=1, width=48, v_width=24)
    ids = documents(131, EDGES)
    o, state, _ = interpret(inputs, ids, lower_bound=LOWER_BOUND, blocks=1)
    want_o, want_state = expected(inputs, ids)
    assert error(o, want_o) < REGIMES["initial gate"] and error(state, want_state) < REGIMES["initial gate"]
    assert not np.asarray(o)[np.asarray(ids) < 0].any()


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("regime", ["initial gate", "no decay"])
def test_gradients_interpreted(regime):
    """Documents, a ragged tail and narrow values without decay; whole chunks and two warpgroups per head with it."""
    ragged = regime == "no decay"
    inputs = make(regime, tokens=150 if ragged else 128, heads=1, v_width=24 if ragged else 128)
    ids = documents(150, (17, 64)) if ragged else None
    given = cotangents(inputs)
    *_, got = interpret(inputs, ids, lower_bound=LOWER_BOUND, blocks=1, computing=1 if ragged else 2, cotangents=given)
    for name, a, b in zip(INPUTS, got, with_gradients(kda_recurrent, inputs, ids, given)[2:], strict=True):
        assert error(a, b) < GRADIENT_LIMIT, f"gradient of {name}"


def golden(case):
    """The inputs of a golden file rounded to bf16, and its segment ids or None."""
    arrays = dict(np.load(GOLDEN / f"kda_{case}.npz"))
    heads, width = arrays["q"].shape[2:]
    narrow = [jnp.asarray(arrays[name], jnp.bfloat16 if i < 5 else jnp.float32) for i, name in enumerate(INPUTS)]
    narrow[6] = narrow[6].reshape(heads, width)
    narrow[7] = narrow[7][: arrays["q"].shape[0]]
    return narrow, jnp.asarray(arrays["segment_ids"]) if case == "d_packed" else None


def check_golden(case, o, state, want_o, want_state):
    """Within the limits, head by head."""
    for head in range(o.shape[2]):
        limit = 2e-2 if case == "c_extreme" and head in (1, 3) else 4.5e-3  # heads 1 and 3 repeat keys without decay
        assert error(o[:, :, head], want_o[:, :, head]) < limit, f"o of head {head}"
        assert error(state[:, head], want_state[:, head]) < limit, f"state of head {head}"


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("case", CASES)
def test_golden_cases_interpreted(case):
    narrow, ids = golden(case)
    o, state, _ = interpret(narrow, ids, lower_bound=LOWER_BOUND)
    check_golden(case, o, state, *expected(narrow, ids))


@pytest.mark.slow
@pytest.mark.numerics
def test_transition_interpreted():
    """M S + S_zero_start is the final state; a ragged tail, and narrow keys."""
    inputs = make("no decay", tokens=100, heads=1, width=48, v_width=24)
    transition, zero_start = interpret(inputs, lower_bound=LOWER_BOUND, transition=True)
    _, want = expected(inputs)
    assert error(transition @ np.asarray(inputs[7]) + zero_start, want) < REGIMES["no decay"]


@pytest.mark.aot
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(1, 128, 2, 128, 128), (2, 200, 3, 64, 96)])
def test_lowers_for_cuda(shape, packed):
    """Two kernels of the forward pass, and, once with and once without documents, four more of the backward pass."""
    batch, tokens, heads, width, v_width = shape
    narrow, wide = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    token = (batch, tokens, heads)
    inputs = [narrow((*token, width)), narrow((*token, width)), narrow((*token, v_width)), narrow((*token, width)), narrow(token)]
    inputs += [wide((heads,)), wide((heads, width))]
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32) if packed else None
    backward = packed == (batch > 1)

    def run(ids, d_o, *inputs):
        o, pull_back = jax.vjp(lambda *inputs: kda_hopper(*inputs, lower_bound=LOWER_BOUND, segment_ids_BT=ids)[0], *inputs)
        return (o, *pull_back(d_o)) if backward else o

    text = jax.jit(run).trace(ids, inputs[2], *inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_and_calls(text) == ((5, 6) if backward else (2, 2))


def kernels_and_calls(text: str) -> tuple[int, int]:
    """How many kernels a lowered program holds, each of which takes a second to lower, and how often they are called."""
    return text.count("@mosaic_gpu"), len(re.findall(r"call @(?:prepare|recurrence|reverse_recurrence|input_gradients)(?:_\d+)?\(", text))


@pytest.mark.aot
@pytest.mark.parametrize("heads", [66, 67])
def test_recurrences_lower_for_cuda(heads):
    """With many heads a block holds two warpgroups that compute, with few one."""
    assert compute_warpgroups(heads) == heads - 65
    chunks, wide = (1, heads, 3), (64, 128)
    shapes = {"kg": wide, "qg": wide, "kd": wide, "ax": (3, 64, 64), "decay": (128,)}
    operands = {
        name: jax.ShapeDtypeStruct((*chunks, *shape), jnp.float32 if name == "decay" else jnp.bfloat16) for name, shape in shapes.items()
    }
    values = jax.ShapeDtypeStruct((1, 192, heads, 128), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((1, heads, 128, 128), jnp.float32)
    for kernel in (recurrence, functools.partial(recurrence, keep_states=True), reverse_recurrence):
        text = jax.jit(kernel).trace(operands, values, state).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu") == 1


def test_what_the_kernels_do_not_take():
    inputs = make("random", tokens=16)
    assert unsupported_reason(*inputs[:4]) is None
    assert "float32" in unsupported_reason(inputs[0].astype(jnp.float32), *inputs[1:4])
    wide = make("random", tokens=16, width=192)
    with pytest.raises(ValueError, match="192 channels"):
        kda_hopper(*wide[:7], lower_bound=LOWER_BOUND)


@pytest.mark.aot
def test_transition_lowers_for_cuda():
    """Three kernels, and four more for the gradient of each of its two walks."""
    narrow, wide = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    inputs = [*[narrow((1, 200, 2, 64))] * 3, narrow((1, 200, 2)), wide((2,)), wide((2, 64))]
    ids = jax.ShapeDtypeStruct((1, 200), jnp.int32)

    def run(ids, *inputs):
        results, pull_back = jax.vjp(lambda *inputs: transition_hopper(*inputs, lower_bound=LOWER_BOUND, segment_ids_BT=ids), *inputs)
        return pull_back(results)

    text = jax.jit(run).trace(ids, *inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_and_calls(text) == (5, 11)


def test_what_is_chosen(monkeypatch, caplog):
    """By the platform, the GPU's capability and the inputs; each reason against the kernels is logged once."""
    monkeypatch.setattr(kda_package, "target", lambda: Target("gpu", 1))
    kda_package._choose.cache_clear()
    inputs = make("random", tokens=16)
    with caplog.at_level(logging.WARNING, logger="pallas_kernels.kda"):
        assert [kda_package._choice(*inputs[:5]) for _ in range(2)] == ["chunked", "chunked"]  # this process has no GPU
    assert len(caplog.records) == 1 and "default backend is cpu" in caplog.text
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, chosen in (("8.0", "chunked"), ("9.0", "hopper")):
        monkeypatch.setattr(jax, "devices", lambda capability=capability: [SimpleNamespace(compute_capability=capability)])
        assert kda_package._choice(*inputs[:5]) == chosen
    assert kda_package._choice(*(x.astype(jnp.float32) for x in inputs[:5])) == "chunked"
    kda_package._choose.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_values_and_bits_on_a_gpu(regime, packed):
    inputs = make(regime, tokens=449, heads=3)
    ids = documents(449, EDGES + (200, 330)) if packed else None
    given = cotangents(inputs)
    first, second = (with_gradients(kda_hopper, inputs, ids, given) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    want = with_gradients(kda_recurrent, inputs, ids, given)
    assert error(first[0], want[0]) < REGIMES[regime]
    assert np.isfinite(np.asarray(first[1])).all()
    for name, a, b in zip(INPUTS, first[2:], want[2:], strict=True):
        # At the bound and without decay the gate's gradients vanish, but for what float64 leaves.
        limit = WITH_REPEATED_KEYS.get(name, GRADIENT_LIMIT) if regime == "repeated keys" else GRADIENT_LIMIT
        assert np.linalg.norm(b) < 1e-12 or error(a, b) < limit, f"gradient of {name}"


@pytest.mark.gpu
def test_no_initial_state_on_a_gpu():
    """Without one nothing is loaded; the bits are those of zeros."""
    *inputs, start = make("random", tokens=449, heads=3)
    form = jax.jit(functools.partial(kda_hopper, lower_bound=LOWER_BOUND))
    for a, b in zip(form(*inputs), form(*inputs, initial_state_BHKV=0 * start), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_golden_cases_on_a_gpu(case):
    """Through `kda`, which chooses these kernels by itself."""
    narrow, ids = golden(case)
    assert kda_package._choice(*narrow[:5]) == "hopper"
    o, state = with_gradients(kda_package.kda, narrow, ids, None)
    check_golden(case, o, state, *expected(narrow, ids))


@pytest.mark.gpu
def test_transition_on_a_gpu():
    """M S + S_zero_start is the final state, and its gradients are those of the final state."""
    inputs = make("initial gate", tokens=449, heads=3)
    nothing, d_final = jnp.zeros_like(inputs[2]), cotangents(inputs)[1]

    def final_state(*inputs):
        transition, zero_start = transition_hopper(*inputs[1:7], lower_bound=LOWER_BOUND)
        return jnp.einsum("bhkl,bhlv->bhkv", transition, inputs[7], precision="highest") + zero_start

    state, pull_back = jax.vjp(jax.jit(final_state), *inputs)
    _, want, *gradients = with_gradients(kda_recurrent, inputs, None, (nothing, d_final))
    assert error(state, want) < REGIMES["initial gate"]
    for name, a, b in list(zip(INPUTS, jax.jit(pull_back)(d_final), gradients, strict=True))[1:]:
        assert error(a, b) < GRADIENT_LIMIT, f"gradient of {name}"
