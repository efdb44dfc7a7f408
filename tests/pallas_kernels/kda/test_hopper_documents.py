"""KDA's Hopper kernels read where documents begin; here that is held against the documents of every other form.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernel API that the kernels use comes with JAX 0.11", allow_module_level=True)

from pallas_kernels.kda.hopper.forward import chunk_runs
from pallas_kernels.kda.inputs import number_documents


def test_documents_as_the_kernels_read_them():
    """Padding after a document has its code, less 128; where a chunk ends with another one, that one's."""
    ids = jnp.asarray([[-1] * 2 + [5] * 58 + [-1] * 4 + [5] * 2 + [-1] + [7] * 60 + [-1], [3] * 64 + [4] * 64])
    first, second = chunk_runs(ids).tolist()
    assert first[:64] == [-129] * 2 + [-1] * 58 + [-129] * 4
    assert first[64:] == [-1] * 2 + [2 - 128] + [2] * 60 + [2 - 128]
    assert second == [-1] * 64 + [0] * 64


@functools.cache
def documents_twice():
    """Jitted: the codes of the kernels and the numbers of documents."""
    return jax.jit(lambda ids: (chunk_runs(ids), number_documents(ids).number_BT))


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(-1, 2), st.sampled_from((1, 2, 15, 40, 63, 64, 70, 130))), min_size=1, max_size=24))
def test_documents_of_the_kernels_are_the_documents(stretches):
    """Stretches of few ids and padding: the same tokens belong together, to the entering and to the leaving state."""
    ids = np.concatenate([np.full(length, number) for number, length in stretches])
    ids = np.pad(ids, (0, 256), constant_values=-1)[:256]
    codes, numbers = (np.asarray(x)[0] for x in documents_twice()(jnp.asarray(ids[None], jnp.int32)))
    assert (ids >= 0).tolist() == (codes > -2).tolist()
    entering = 0
    for start in range(0, 256, 64):
        chunk = slice(start, start + 64)
        code, number, real = codes[chunk], numbers[chunk], ids[chunk] >= 0
        assert ((code[:, None] == code) == (number[:, None] == number))[np.ix_(real, real)].all()
        assert ((code == -1) == (number == entering))[real].all()
        # A token's document begins behind every earlier one's tokens, so its pairs are those from the begin to the token.
        pairs = (np.arange(64) >= code[:, None]) & (np.arange(64) <= np.arange(64)[:, None])
        assert (pairs == (number[:, None] == number) & np.tri(64, dtype=bool))[np.ix_(real, real)].all()
        leaving = code[63] if real[63] else code[63] + 128
        assert ((code == leaving) == (number == number[63]))[real].all()
        assert (leaving == -1) == (number[63] == entering)
        entering = number[63]
