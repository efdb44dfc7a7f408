"""What plain counting achieves on the same text: byte models of order 1, 2 and 3, the yardstick beside a trained model's score.

The model of order n mixes the counts c of byte x after the n bytes h before it with the model of order n - 1 (Witten and Bell, 1991):
  p_n(x | h) = (c(h x) + t(h) p_{n-1}(x | h')) / (c(h) + t(h)),
where t(h) is the number of different bytes seen after h and h' is h without its oldest byte; p_{-1} is 1/256, and p_n = p_{n-1} if h was
never seen. It has no constants to tune, and on source code it is as good as the best constants of fixed or Dirichlet mixing.
A context reaches across the boundary of two documents, and into three line ends before the first, so that every byte is predicted.

Dimensions: N bytes, G different grams of four bytes.
"""

from __future__ import annotations

import numpy as np

MAX_ORDER = 3


def counting_baselines(train_text: bytes, heldout_text: bytes) -> dict[str, float]:
    """Bits per held-out byte under counts of the training text: `{"order_1": ..., "order_2": ..., "order_3": ...}`.

    The held-out text must not be empty. Takes about a second for ten megabytes.
    """
    if not heldout_text:
        raise ValueError("no held-out bytes to score")
    grams_G, counts_G = np.unique(_grams(train_text), return_counts=True)
    queries, repeats = np.unique(_grams(heldout_text), return_counts=True)
    probability = np.full(queries.size, 1 / 256)
    bits: dict[str, float] = {}
    for order in range(MAX_ORDER + 1):
        mask = np.uint32(2 ** (8 * (order + 1)) - 1)  # the byte and its `order` predecessors
        seen, seen_counts = _sum_by_key(grams_G & mask, counts_G)
        contexts, context_counts = _sum_by_key(seen >> 8, seen_counts)
        _, context_types = _sum_by_key(seen >> 8, np.ones_like(seen_counts))
        count = _look_up(seen, seen_counts, queries & mask)
        total = _look_up(contexts, context_counts, (queries & mask) >> 8)
        types = _look_up(contexts, context_types, (queries & mask) >> 8)
        mixed = (count + types * probability) / np.maximum(total + types, 1)
        probability = np.where(total > 0, mixed, probability)
        if order:
            bits[f"order_{order}"] = float(-np.log2(probability) @ repeats / len(heldout_text))
    return bits


def _grams(text: bytes) -> np.ndarray:
    """Each byte with the three before it, packed with the oldest on top: uint32 [N]."""
    padded = np.frombuffer(b"\n" * MAX_ORDER + text, np.uint8).astype(np.uint32)
    return padded[:-3] << 24 | padded[1:-2] << 16 | padded[2:-1] << 8 | padded[3:]


def _sum_by_key(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different keys in ascending order, and the sum of each one's values."""
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] + np.uint32(1)))
    return keys[starts], np.add.reduceat(values, starts) if starts.size else values


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The value of each query among ascending keys, 0 where it is missing."""
    if not keys.size:
        return np.zeros(queries.size, values.dtype)
    index = np.minimum(np.searchsorted(keys, queries), keys.size - 1)
    return np.where(keys[index] == queries, values[index], 0)
