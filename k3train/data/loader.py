"""Batches by step: batch `step` is a pure function of (files, config, step), so a run's whole data state is one number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from k3train.config import DataConfig
from k3train.data.batch import Batch
from k3train.data.corpus import Corpus, read_corpus
from k3train.data.packing import Packer, store_documents
from k3train.data.split import split_documents
from k3train.data.tokenizer import ByteTokenizer

ALL_ROWS = slice(None)


@dataclass(frozen=True, kw_only=True)
class Data:
    """An opened corpus. One host of many passes `rows`, the slice of a batch that it feeds; batches do not depend on the host count."""

    config: DataConfig
    tokenizer: ByteTokenizer
    fingerprint: str
    """Hash of the files' names and contents: a resumed run compares it."""
    train_files: int
    heldout_files: int
    train_packer: Packer
    heldout_packer: Packer

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Batch number `step`: arrays [batch_size, sequence_length], or the given rows of it. Raises `ValueError` if `step < 0`."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        first = step * self.config.batch_size
        return self.train_packer.rows(np.arange(first, first + self.config.batch_size, dtype=np.int64)[rows])

    def train_iterator(self, start_step: int = 0, rows: slice = ALL_ROWS) -> Iterator[Batch]:
        """Batches from `start_step` on without end, made ahead of time by a thread."""
        import grain  # here, because it takes about a second to import, and looking at a corpus needs none of it

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(_TrainBatches(self, start_step, rows)).to_iter_dataset(options))

    def heldout_batches(self, limit: int | None = None, rows: slice = ALL_ROWS) -> Iterator[Batch]:
        """Held-out text in order, every token at most once; at most `limit` batches.

        If the limit leaves text out, the rows are spread evenly over all of it. The last batch may end in rows of padding.
        """
        total, size = self.heldout_packer.rows_per_epoch, self.config.batch_size
        taken = total if limit is None else min(total, limit * size)
        chosen = (2 * np.arange(taken, dtype=np.int64) + 1) * total // (2 * taken) if taken else np.zeros(0, np.int64)
        padded = np.concatenate([chosen, np.full(-taken % size, -1, np.int64)])
        for batch_rows in padded.reshape(-1, size):
            yield self.heldout_packer.rows(batch_rows[rows])

    def count_bytes(self, batch: Batch) -> int:
        """Bytes among a batch's targets, the divisor of bits per byte: a document's closing boundary costs bits and is no byte."""
        return int(np.sum((np.asarray(batch.targets) != self.tokenizer.boundary_id) & (np.asarray(batch.loss_mask) > 0)))

    @property
    def train_text(self) -> bytes:
        """All training documents, one after another."""
        return self.train_packer.store.text

    @property
    def heldout_text(self) -> bytes:
        """All held-out documents, one after another."""
        return self.heldout_packer.store.text

    @property
    def train_bytes(self) -> int:
        """Bytes of the training documents."""
        return self.train_packer.store.num_bytes

    @property
    def heldout_bytes(self) -> int:
        """Bytes of the held-out documents."""
        return self.heldout_packer.store.num_bytes


def open_data(config: DataConfig) -> Data:
    """Reads and tokenises the corpus that the config names. Raises `UserError` if it is missing or empty."""
    corpus: Corpus = read_corpus(config.sources, config.suffixes)
    train, heldout = split_documents(corpus.documents, config.heldout_fraction)
    tokenizer = ByteTokenizer()
    train_store, heldout_store = (store_documents([document.text for document in side], tokenizer) for side in (train, heldout))
    return Data(
        config=config,
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        train_files=len(train),
        heldout_files=len(heldout),
        train_packer=Packer(train_store, tokenizer, config.sequence_length, config.seed),
        heldout_packer=Packer(heldout_store, tokenizer, config.sequence_length, None),
    )


@dataclass(frozen=True)
class _TrainBatches:
    """The training batches as a random-access source for grain."""

    data: Data
    start_step: int
    rows: slice

    def __len__(self) -> int:
        return 2**62 // self.data.config.batch_size  # grain wants an end: this one keeps row numbers within int64

    def __getitem__(self, index: int) -> Batch:
        return self.data.train_batch(self.start_step + int(index), self.rows)

    def __repr__(self) -> str:
        return f"train batches of corpus {self.data.fingerprint[:16]} from step {self.start_step}"
