"""Bytes as tokens: 256 byte values and one document boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class ByteTokenizer:
    """Maps text to its UTF-8 bytes and back. Id `i < 256` is byte `i`; id 256 marks the boundary between documents.

    One boundary id is enough: as an input it opens a document (so the first byte is predicted from it), as a target it closes one.
    A model's vocabulary may be larger, for example to divide evenly over devices; the ids above 256 then never occur.
    """

    boundary_id: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, without boundaries: uint16 [N]. Escaped bytes (PEP 383, as in file names) become these bytes again."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes behind a sequence of ids; boundaries vanish. Raises `ValueError` for an id outside the vocabulary."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}), got {array.min()} to {array.max()}")
        return array[array != self.boundary_id].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text behind a sequence of ids, to be read: bytes that are not UTF-8 show as U+FFFD. `decode_bytes` is exact."""
        return self.decode_bytes(ids).decode("utf-8", "replace")
