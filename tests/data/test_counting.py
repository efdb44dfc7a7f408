"""Counting baselines: by hand, against a dictionary, and in the order that real text gives."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.corpus import read_corpus
from k3train.data.counting import counting_baselines


def by_dictionary(train, heldout):
    """The same models, one byte at a time."""
    train, heldout = b"\n\n\n" + train, b"\n\n\n" + heldout
    counts = [defaultdict(Counter) for _ in range(4)]
    for at in range(3, len(train)):
        for order in range(4):
            counts[order][train[at - order : at]][train[at]] += 1
    bits = dict.fromkeys(range(4), 0.0)
    for at in range(3, len(heldout)):
        probability = 1 / 256
        for order in range(4):
            seen = counts[order].get(heldout[at - order : at], Counter())
            if seen:
                probability = (seen[heldout[at]] + len(seen) * probability) / (seen.total() + len(seen))
            bits[order] -= math.log2(probability)
    return {f"order_{order}": bits[order] / (len(heldout) - 3) for order in (1, 2, 3)}


def test_by_hand():
    # Train "ab", score "b" after a line end. p_0(b) = (1 + 2/256) / 4; after a line end only "a" was seen, once, whatever the order.
    zero = (1 + 2 / 256) / 4
    first = (0 + 1 * zero) / (1 + 1)
    second, third = first / 2, first / 4
    expected = {"order_1": -math.log2(first), "order_2": -math.log2(second), "order_3": -math.log2(third)}
    assert counting_baselines(b"ab", b"b") == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.binary(min_size=1, max_size=30))
def test_equals_a_dictionary_on_any_bytes(train, heldout):
    assert counting_baselines(train, heldout) == pytest.approx(by_dictionary(train, heldout))


@settings(max_examples=50, deadline=None)
@given(st.text("ab\n", max_size=200).map(str.encode), st.text("abc\n", min_size=1, max_size=50).map(str.encode))
def test_equals_a_dictionary_where_contexts_repeat(train, heldout):
    assert counting_baselines(train, heldout) == pytest.approx(by_dictionary(train, heldout))


def test_longer_contexts_help_on_source_code():
    texts = [document.text for document in read_corpus((), ()).documents]
    bits = counting_baselines(b"".join(texts[:100]), b"".join(texts[100:110]))
    assert 1.0 < bits["order_3"] < bits["order_2"] < bits["order_1"] < 5.0


def test_nothing_to_score():
    with pytest.raises(ValueError, match="no held-out bytes"):
        counting_baselines(b"text", b"")
