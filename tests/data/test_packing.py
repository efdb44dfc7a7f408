"""Packing loses and repeats no token, and its segments and positions are those of a plain loop."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.packing import Packer, store_documents
from k3train.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
BOUNDARY = TOKENIZER.boundary_id
TEXTS = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
LENGTHS = st.integers(1, 24)
SEEDS = st.one_of(st.none(), st.integers(-3, 2**40))


def epoch(packer, number):
    first = number * packer.rows_per_epoch
    return packer.rows(np.arange(first, first + packer.rows_per_epoch))


@settings(max_examples=200, deadline=None)
@given(TEXTS, LENGTHS, SEEDS, st.integers(0, 3))
def test_an_epoch_loses_and_repeats_no_token(texts, length, seed, number):
    batch = epoch(Packer(store_documents(texts, TOKENIZER), TOKENIZER, length, seed), number)
    real = batch.loss_mask > 0
    pairs = Counter(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True))
    expected = Counter()
    for text in texts:
        tokens = [BOUNDARY, *text, BOUNDARY]
        expected.update(zip(tokens[:-1], tokens[1:], strict=True))
    assert pairs == expected
    assert np.count_nonzero(~real) < length


@settings(max_examples=100, deadline=None)
@given(TEXTS, LENGTHS, SEEDS, st.integers(0, 3))
def test_an_epoch_put_back_together_gives_the_documents(texts, length, seed, number):
    packer = Packer(store_documents(texts, TOKENIZER), TOKENIZER, length, seed)
    batch = epoch(packer, number)
    in_order = np.argsort(packer.epoch_order(number).rows_W)
    stream = batch.tokens[in_order][batch.loss_mask[in_order] > 0]
    stream = np.roll(stream, packer.epoch_order(number).turn)
    documents = "".join(map(chr, stream)).split(chr(BOUNDARY))[1:]
    assert sorted(documents) == sorted(text.decode("latin-1") for text in texts)
    if seed is None:
        assert documents == [text.decode("latin-1") for text in texts]


@settings(max_examples=100, deadline=None)
@given(TEXTS, LENGTHS, SEEDS)
def test_segments_and_positions_are_those_of_a_plain_loop(texts, length, seed):
    batch = epoch(Packer(store_documents(texts, TOKENIZER), TOKENIZER, length, seed), 0)
    for tokens, targets, segments, positions, mask in zip(*(array.tolist() for array in batch), strict=True):
        segment, position = 0, 0
        for column in range(length):
            if not mask[column]:
                assert (tokens[column], targets[column], segments[column], positions[column]) == (0, 0, -1, 0)
                continue
            if column and tokens[column] == BOUNDARY:
                segment, position = segment + 1, 0
            assert (segments[column], positions[column]) == (segment, position)
            position += 1
            if column + 1 < length and mask[column + 1]:
                assert targets[column] == tokens[column + 1]


@settings(max_examples=50, deadline=None)
@given(TEXTS, LENGTHS, SEEDS, st.lists(st.integers(-1, 40), max_size=12))
def test_a_row_depends_on_its_number_alone(texts, length, seed, numbers):
    store = store_documents(texts, TOKENIZER)
    packer = Packer(store, TOKENIZER, length, seed)
    together = packer.rows(np.array(numbers, np.int64))
    for index, number in enumerate(numbers):
        alone = Packer(store, TOKENIZER, length, seed).rows(np.array([number]))
        for whole, row in zip(together, alone, strict=True):
            np.testing.assert_array_equal(whole[index], row[0])
        assert (number >= 0) or not alone.loss_mask.any()


def test_a_small_stream_by_hand():
    batch = epoch(Packer(store_documents([b"ab", b"c"], TOKENIZER), TOKENIZER, 3, None), 0)
    a, b, c = b"abc"
    assert batch.tokens.tolist() == [[BOUNDARY, a, b], [BOUNDARY, c, 0]]
    assert batch.targets.tolist() == [[a, b, BOUNDARY], [c, BOUNDARY, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0], [0, 0, -1]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert [array.dtype.name for array in batch] == ["int32"] * 4 + ["float32"]


def test_epochs_differ_in_document_order_cuts_and_row_order():
    texts = [bytes([65 + number]) * 50 for number in range(8)]
    packer = Packer(store_documents(texts, TOKENIZER), TOKENIZER, 10, 0)
    first, second = packer.epoch_order(0), packer.epoch_order(1)
    assert first.turn != second.turn
    assert not np.array_equal(first.shift_D, second.shift_D)
    assert not np.array_equal(first.rows_W, second.rows_W)
    assert not np.array_equal(first.rows_W, np.arange(packer.rows_per_epoch))
    other_seed = Packer(packer.store, TOKENIZER, 10, 1).epoch_order(0)
    assert not np.array_equal(first.rows_W, other_seed.rows_W)


def test_the_shuffle_is_the_same_on_every_machine_and_numpy():
    order = Packer(store_documents([bytes(9)] * 6, TOKENIZER), TOKENIZER, 8, 7).epoch_order(3)
    assert (order.turn, order.shift_D.tolist(), order.rows_W.tolist()) == (27, [30, 30, -20, -10, 10, -40], [3, 1, 7, 4, 2, 0, 6, 5])
