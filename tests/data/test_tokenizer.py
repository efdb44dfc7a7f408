"""Bytes in, the same bytes out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@settings(deadline=None)
@given(st.binary())
def test_bytes_survive(raw):
    ids = TOKENIZER.encode(raw)
    assert ids.dtype == np.uint16 and ids.size == len(raw)
    assert TOKENIZER.decode_bytes(ids) == raw


@settings(deadline=None)
@given(st.text())
def test_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_escaped_bytes_become_bytes_again():
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(b"a\xff".decode("utf-8", "surrogateescape"))) == b"a\xff"


def test_decoding_takes_lists_drops_boundaries_and_shows_broken_utf8():
    assert TOKENIZER.decode([TOKENIZER.boundary_id, 104, 105, TOKENIZER.boundary_id]) == "hi"
    assert TOKENIZER.decode([0xC3]) == "\ufffd"
    assert TOKENIZER.decode([]) == ""


@pytest.mark.parametrize("ids", [[-1], [TOKENIZER.vocab_size]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="token ids must lie in"):
        TOKENIZER.decode(ids)


def test_vocabulary_is_the_bytes_and_the_boundary():
    assert TOKENIZER.vocab_size == 257 and TOKENIZER.boundary_id == 256
