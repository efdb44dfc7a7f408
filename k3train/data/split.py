"""Which documents train and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from k3train.data.corpus import Document
from k3train.errors import UserError


def split_documents(documents: Sequence[Document], heldout_fraction: float) -> tuple[list[Document], list[Document]]:
    """Returns (train, held-out) documents in the given order; both sides hold some text.

    A document is held out if the hash of its name, read as a number in [0, 1), is below `heldout_fraction`: the choice is the same on every
    machine and in any order, and other files do not sway it. If this leaves a side empty, one document changes sides: to held-out the one
    whose size is nearest to the wanted share, to train the largest. A lone document is cut: its end is held out, from the start of a line
    where there is one. Raises `UserError` if there are fewer than two bytes.
    """
    if len(documents) == 1:
        return _cut(documents[0], heldout_fraction)
    heldout = {document.name for document in documents if _hash_fraction(document.name) < heldout_fraction}
    if not heldout:
        wanted = heldout_fraction * sum(len(document.text) for document in documents)
        heldout.add(min(documents, key=lambda document: (abs(len(document.text) - wanted), document.name)).name)
    elif len(heldout) == len(documents):
        heldout.remove(max(documents, key=lambda document: (len(document.text), document.name)).name)
    return (
        [document for document in documents if document.name not in heldout],
        [document for document in documents if document.name in heldout],
    )


def _hash_fraction(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _cut(document: Document, heldout_fraction: float) -> tuple[list[Document], list[Document]]:
    name, text = document
    if len(text) < 2:
        raise UserError(
            f"Too little text: the only file, {name}, holds {len(text)} byte, and training and evaluation each need some.\n"
            "Name more files in data.sources."
        )
    at = min(len(text) - 1, max(1, round(len(text) * (1.0 - heldout_fraction))))
    line = text.find(b"\n", at - 1, (at + len(text)) // 2) + 1  # 0 if no line starts in the first half of the rest
    at = line or at
    return [Document(name, text[:at])], [Document(name, text[at:])]
