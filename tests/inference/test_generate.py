"""Streams of tokens: greedy ones are the model's arg-max, drawn ones depend on seed and row alone, rows stop where they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, MLAConfig, ModelConfig
from k3train.inference import generate
from k3train.inference.generate import NOTHING, NotFiniteError, stream
from k3train.inference.sampling import Sampling
from k3train.models.layout import LocalLayout
from k3train.models.parameters import abstract

GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.5, top_k=9)
CONFIG = ModelConfig(
    vocab_size=12, d_model=12, num_layers=2, mixer_pattern=("kda", "gated_mla"), last_mixer=None, num_dense_layers=2, dense_dim=16,
    attn_res_block_size=2,
    kda=KDAConfig(num_heads=2, head_dim=6),
    mla=MLAConfig(num_heads=2, q_lora_rank=6, kv_lora_rank=5, nope_head_dim=6, rope_head_dim=4, v_head_dim=4),
    dtypes=DtypePolicy(compute="float32"), remat="none",
)  # fmt: skip
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 5]]


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: jnp.asarray(0.7 * rng.normal(size=leaf.shape), leaf.dtype), abstract(CONFIG)[1])


@pytest.fixture(scope="module", autouse=True)
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "PIECE", 4)
        generate._programs.cache_clear()
        yield
    generate._programs.cache_clear()


def pieces(params, prompts=PROMPTS, sampling=GREEDY, max_new_tokens=10, **options) -> list[np.ndarray]:
    return list(stream(CONFIG, params, prompts, max_new_tokens=max_new_tokens, sampling=sampling, **options))


def whole(params, **options) -> np.ndarray:
    return np.concatenate(pieces(params, **options), axis=1)


@pytest.fixture(scope="module")
def greedy(params, short_pieces) -> np.ndarray:
    return whole(params)


def test_greedy_stream_is_the_models_argmax(params, greedy):
    assert greedy.shape == (3, 10) and greedy.dtype == np.int32 and len(set(greedy.reshape(-1).tolist())) > 3
    rows = [[*prompt, *new] for prompt, new in zip(PROMPTS, greedy.tolist(), strict=True)]
    tokens = np.array([row + [0] * (20 - len(row)) for row in rows])
    graphdef, _, _ = abstract(CONFIG)

    @jax.jit
    def logits(params, tokens):
        return nnx.merge(graphdef, params)(tokens, jnp.zeros_like(tokens), layout=LocalLayout()).logits_BTV

    best = np.argmax(logits(params, tokens), axis=-1)
    for prompt, new, row in zip(PROMPTS, greedy, best, strict=True):
        np.testing.assert_array_equal(row[len(prompt) - 1 : len(prompt) + 9], new)


def test_pieces_come_as_they_are_made(params, greedy):
    parts = pieces(params)
    assert [part.shape for part in parts] == [(3, 4), (3, 4), (3, 2)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), greedy)


def test_rows_stop_before_the_stop_token(params, greedy):
    stop = int(greedy[0, 2])
    expected = greedy.copy()
    for row in expected:
        places = np.flatnonzero(row == stop)
        if places.size:
            row[places[0] :] = NOTHING
    assert np.any(expected != NOTHING)
    found = whole(params, stop_id=stop)
    np.testing.assert_array_equal(found, expected[:, : found.shape[1]])
    assert np.all(expected[:, found.shape[1] :] == NOTHING)


def test_all_ends_when_every_row_has(params, greedy):
    found = pieces(params, prompts=PROMPTS[:1] * 3, stop_id=int(greedy[0, 2]))
    assert len(found) == 1 and np.all(found[0][:, 2:] == NOTHING)


def test_draws_depend_on_seed_and_row(params):
    same = [[7, 7]] * 3
    first, again, other = (whole(params, prompts=same, sampling=DRAWN, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other) and np.any(first[0] != first[1])
    changed = whole(params, prompts=[[7, 7], [1, 2, 3], [7, 7]], sampling=DRAWN, seed=1)
    np.testing.assert_array_equal(changed[[0, 2]], first[[0, 2]])


def test_ids_beyond_the_tokenizers_are_never_drawn(params):
    assert whole(params, sampling=DRAWN, num_tokens=3).max() <= 2 < whole(params, sampling=DRAWN).max()


def test_bad_prompts_and_weights(params):
    for prompts, message in (([[1], []], "at least one"), ([], "at least one"), ([[12]], "from 0 to 12; the vocabulary is 0 to 11")):
        with pytest.raises(ValueError, match=message):
            pieces(params, prompts=prompts)
    broken = {**params, "norm": {"scale": params["norm"]["scale"].at[3].set(jnp.nan)}}
    with pytest.raises(NotFiniteError):
        pieces(broken)
