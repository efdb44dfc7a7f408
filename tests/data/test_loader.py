"""Batches by step: pure, resumable at any step, sliceable by host; held-out batches that stand for all held-out text."""

import subprocess
import sys

import numpy as np
import pytest

from k3train.config import DataConfig
from k3train.data.loader import open_data
from k3train.errors import UserError

CONFIG = {"sequence_length": 32, "batch_size": 4, "heldout_fraction": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"file{number:02}.txt").write_text(f"<{number:02}>" + " ".join(str(word) for word in range(number * 3)))
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return open_data(DataConfig(sources=(str(folder),), **CONFIG))


def assert_same(batch, other):
    for field, array, expected in zip(batch._fields, batch, other, strict=True):
        np.testing.assert_array_equal(array, expected, err_msg=field)


def test_shapes_dtypes_and_sizes(data, folder):
    batch = data.train_batch(0)
    assert {array.shape for array in batch} == {(4, 32)}
    assert [array.dtype.name for array in batch] == ["int32"] * 4 + ["float32"]
    assert data.train_files + data.heldout_files == 40
    assert data.train_bytes + data.heldout_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert (len(data.train_text), len(data.heldout_text)) == (data.train_bytes, data.heldout_bytes)
    assert batch.tokens.max() < data.tokenizer.vocab_size


def test_a_batch_is_a_pure_function_of_the_step(data, folder):
    again = open_data(DataConfig(sources=(str(folder),), **CONFIG))
    for step in (50, 3, 1000, 3, 0):
        assert_same(data.train_batch(step), again.train_batch(step))
    assert not np.array_equal(data.train_batch(0).tokens, data.train_batch(1).tokens)


@pytest.mark.parametrize("start", [0, 1, 17, 400])
def test_the_iterator_resumes_at_any_step(data, start):
    iterator = data.train_iterator(start)
    for step in range(start, start + 30):
        assert_same(next(iterator), data.train_batch(step))


def test_hosts_feed_slices_of_one_global_batch(data):
    whole = data.train_batch(9)
    for rows in (slice(0, 1), slice(1, 4), slice(2, None)):
        assert_same(data.train_batch(9, rows), [array[rows] for array in whole])
        assert_same(next(data.train_iterator(9, rows)), [array[rows] for array in whole])
    held_whole, held_part = list(data.heldout_batches(2)), list(data.heldout_batches(2, slice(1, 3)))
    for batch, part in zip(held_whole, held_part, strict=True):
        assert_same(part, [array[1:3] for array in batch])


def test_the_seed_decides_the_order(data, folder):
    other = open_data(DataConfig(sources=(str(folder),), seed=1, **CONFIG))
    assert other.fingerprint == data.fingerprint
    assert not np.array_equal(other.train_batch(0).tokens, data.train_batch(0).tokens)
    for batch, same in zip(data.heldout_batches(), other.heldout_batches(), strict=True):
        assert_same(batch, same)


def test_train_and_heldout_share_no_file(data):
    def opened(text):
        return {text[index + 1 : index + 3] for index in range(len(text)) if text[index : index + 1] == b"<"}

    train, heldout = opened(data.train_text), opened(data.heldout_text)
    assert not train & heldout and len(train | heldout) == 40
    steps = -(-data.train_packer.rows_per_epoch // 4)
    seen = np.concatenate([data.train_batch(step).tokens for step in range(steps)])
    in_rows = opened(b"\n".join(data.tokenizer.decode_bytes(row) for row in seen))
    assert not {name for name in in_rows if len(name) == 2 and name.isdigit()} & heldout


def test_all_heldout_text_is_served_once_in_order(data):
    batches = list(data.heldout_batches())
    assert {array.shape for batch in batches for array in batch} == {(4, 32)}
    tokens = np.concatenate([batch.tokens[batch.segment_ids >= 0] for batch in batches])
    assert data.tokenizer.decode_bytes(tokens) == data.heldout_text
    assert sum(data.count_bytes(batch) for batch in batches) == data.heldout_bytes
    assert sum(batch.loss_mask.sum() for batch in batches) == data.heldout_bytes + data.heldout_files


def test_limited_heldout_batches_are_spread_over_all_files(data):
    total = data.heldout_packer.rows_per_epoch
    batches = list(data.heldout_batches(2))
    assert len(batches) == 2 < total // 4
    everything = np.concatenate([batch.tokens for batch in data.heldout_batches()])[:total]
    places = [int(np.flatnonzero((everything == row).all(axis=1))[0]) for batch in batches for row in batch.tokens]
    gaps = np.diff([-1, *places, total])
    assert min(gaps[1:-1]) >= total // 8 and max(gaps) <= total // 8 + 1
    assert list(data.heldout_batches(0)) == []
    assert len(list(data.heldout_batches(10**6))) == len(list(data.heldout_batches()))


def test_a_corpus_smaller_than_a_row(tmp_path):
    (tmp_path / "only.txt").write_text("short\ntext\n")
    data = open_data(DataConfig(sources=(str(tmp_path),), sequence_length=64, batch_size=3))
    assert (data.train_text, data.heldout_text) == (b"short\ntext", b"\n")
    batch = data.train_batch(5)
    assert batch.loss_mask.sum(axis=1).tolist() == [11.0, 11.0, 11.0]
    assert [held.loss_mask.sum() for held in data.heldout_batches(7)] == [2.0]


def test_bad_input(data, tmp_path):
    with pytest.raises(UserError, match="No text"):
        open_data(DataConfig(sources=(str(tmp_path),)))
    with pytest.raises(ValueError, match="negative"):
        data.train_batch(-1)


def test_opening_a_corpus_imports_neither_jax_nor_grain():
    check = "import sys, k3train.data.loader, k3train.data.counting; assert not {'jax', 'grain'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
