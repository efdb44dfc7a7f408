"""Documents laid end to end and cut into rows.

A document of n bytes is n + 1 tokens: a boundary, then its bytes. The documents of an epoch, laid end to end and closed into a ring, are
its token stream; row w covers the T stream positions from w * T on, and the target of a position is the next token. Hence
  * in one epoch every token is an input exactly once and a target exactly once: no byte is lost, repeated, or left without a prediction;
  * a document's first byte is predicted from its boundary and its end is predicted as the next boundary, so no target crosses into
    another document's state and the model's loss is the true code length of the documents;
  * only an epoch's last row can hold padding.
A document that is longer than what is left of a row goes on in another row as a segment of its own, with a fresh state.
Each epoch has its own order of documents, its own turn of the ring (the cuts fall elsewhere) and its own order of rows.

Dimensions: B rows, T tokens of a row, S = T + 1 stream positions behind a row, D documents, N tokens of the stream, W rows of an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3train.data.batch import Batch
from k3train.data.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class TokenStore:
    """The tokens of all documents in memory, each document behind its boundary."""

    tokens_N: np.ndarray
    """uint16."""
    starts_D: np.ndarray
    """int64: where each document's boundary lies in `tokens_N`."""

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens of each document, its boundary included: int64."""
        return np.diff(self.starts_D, append=self.tokens_N.size)

    @property
    def text(self) -> bytes:
        """All documents' bytes, one after another."""
        return self.tokens_N[self.tokens_N < 256].astype(np.uint8).tobytes()

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents."""
        return self.tokens_N.size - self.starts_D.size


def store_documents(texts: Sequence[bytes], tokenizer: ByteTokenizer) -> TokenStore:
    """Tokenises at least one text and puts the document boundary before each."""
    if not texts:
        raise ValueError("a token store needs at least one document")
    lengths_D = np.array([len(text) + 1 for text in texts], np.int64)
    starts_D = np.cumsum(lengths_D) - lengths_D
    tokens_N = np.empty(lengths_D.sum(), np.uint16)
    for start, length, text in zip(starts_D, lengths_D, texts, strict=True):
        tokens_N[start] = tokenizer.boundary_id
        tokens_N[start + 1 : start + length] = tokenizer.encode(text)
    return TokenStore(tokens_N, starts_D)


@dataclass(frozen=True)
class EpochOrder:
    """Where the tokens of one epoch's stream lie in the store."""

    ends_D: np.ndarray
    """int64: end in the stream of its d-th document, ascending."""
    shift_D: np.ndarray
    """int64: place in the store minus place in the stream, for the stream's d-th document."""
    turn: int
    """Stream position at which row 0 begins."""
    rows_W: np.ndarray
    """int64: the order in which rows are served."""


class Packer:
    """Rows of a token store by their number: row r is row `r % W` of epoch `r // W`, whichever rows were asked for before."""

    def __init__(self, store: TokenStore, tokenizer: ByteTokenizer, sequence_length: int, seed: int | None):
        """`seed=None` keeps documents and rows in their own order in every epoch."""
        self.store = store
        self.boundary_id = tokenizer.boundary_id
        self.sequence_length = sequence_length
        self.seed = seed
        self.rows_per_epoch = -(-store.tokens_N.size // sequence_length)
        # An order is a pure function of the epoch: the cache only saves time. Neighbouring batches meet at most two big epochs.
        self.epoch_order = functools.lru_cache(maxsize=4)(self._epoch_order)

    def rows(self, rows_B: np.ndarray) -> Batch:
        """The rows with these numbers (int64; a negative number gives a row of padding)."""
        epochs_B = rows_B // self.rows_per_epoch
        shape = (rows_B.size, self.sequence_length)
        zeros = np.zeros(shape, np.int32)
        batch = Batch(zeros, zeros.copy(), np.full(shape, -1, np.int32), zeros.copy(), np.zeros(shape, np.float32))
        for epoch in np.unique(epochs_B[rows_B >= 0]):
            here = epochs_B == epoch
            order = self.epoch_order(int(epoch))
            part = self._pack(order, order.rows_W[rows_B[here] % self.rows_per_epoch])
            for whole, values in zip(batch, part, strict=True):
                whole[here] = values  # type: ignore[index]
        return batch

    def _epoch_order(self, epoch: int) -> EpochOrder:
        documents = np.arange(self.store.starts_D.size)
        rows_W, turn = np.arange(self.rows_per_epoch), 0
        if self.seed is not None:
            # Raw words of a bit generator: unlike `Generator.permutation`, NumPy promises never to change them.
            words = np.random.Philox(np.random.SeedSequence(self.seed % 2**64, spawn_key=(epoch,))).random_raw
            turn = int(words(1)[0] % np.uint64(self.store.tokens_N.size))
            documents = np.argsort(words(documents.size), kind="stable")
            rows_W = np.argsort(words(rows_W.size), kind="stable")
        ends_D = np.cumsum(self.store.lengths_D[documents])
        begins_D = ends_D - self.store.lengths_D[documents]
        return EpochOrder(ends_D, self.store.starts_D[documents] - begins_D, turn, rows_W)

    def _pack(self, order: EpochOrder, rows_B: np.ndarray) -> Batch:
        size = self.store.tokens_N.size
        column_T = np.arange(self.sequence_length, dtype=np.int32)
        offset_BS = rows_B[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        position_BS = (offset_BS + order.turn) % size
        document_BS = np.searchsorted(order.ends_D, position_BS, side="right")
        tokens_BS = self.store.tokens_N[position_BS + order.shift_D[document_BS]].astype(np.int32)

        tokens_BT, targets_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
        real_BT = offset_BS[:, :-1] < size
        opens_BT = tokens_BT == self.boundary_id
        segments_BT = np.cumsum(opens_BT, axis=1, dtype=np.int32) - opens_BT[:, :1]
        positions_BT = column_T - np.maximum.accumulate(np.where(opens_BT, column_T, 0), axis=1)
        return Batch(
            tokens=np.where(real_BT, tokens_BT, 0),
            targets=np.where(real_BT, targets_BT, 0),
            segment_ids=np.where(real_BT, segments_BT, -1),
            positions=np.where(real_BT, positions_BT, 0),
            loss_mask=real_BT.astype(np.float32),
        )
