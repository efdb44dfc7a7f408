"""Train and held-out: decided by names alone, never the same document on both, never an empty side."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.corpus import Document
from k3train.data.split import split_documents
from k3train.errors import UserError

NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), unique=True, min_size=2, max_size=30)


@settings(deadline=None)
@given(NAMES, st.floats(0.01, 0.99))
def test_every_document_lands_on_exactly_one_side(names, fraction):
    documents = [Document(name, name.encode()) for name in names]
    train, heldout = split_documents(documents, fraction)
    assert train and heldout
    assert sorted(train + heldout) == sorted(documents)
    assert [document for document in documents if document in train] == train
    reversed_train, reversed_heldout = split_documents(documents[::-1], fraction)
    assert (set(reversed_train), set(reversed_heldout)) == (set(train), set(heldout))


def test_other_files_do_not_sway_a_document():
    documents = [Document(f"file{number}.txt", b"x") for number in range(400)]
    all_heldout = split_documents(documents, 0.1)[1]
    assert 20 < len(all_heldout) < 60
    assert split_documents(documents[:200], 0.1)[1] == [document for document in all_heldout if document in documents[:200]]


def test_the_choice_is_the_same_on_every_machine():
    documents = [Document(name, b"x") for name in ("argparse.py", "copyreg.py", "json/decoder.py", "token.py", "typing.py")]
    assert [document.name for document in split_documents(documents, 0.05)[1]] == ["copyreg.py", "token.py"]


def test_an_empty_side_gets_the_document_that_fits():
    documents = [Document("argparse.py", b"x" * 100), Document("typing.py", b"x" * 9), Document("json/decoder.py", b"x")]
    assert [document.name for document in split_documents(documents, 0.08)[1]] == ["typing.py"]
    assert [document.name for document in split_documents(documents, 0.9999)[0]] == ["argparse.py"]


@pytest.mark.parametrize(
    ("text", "heldout"),
    [(b"line\n" * 100, b"line\n" * 10), (b"x" * 100, b"x" * 10), (b"ab", b"b"), (b"\n\n", b"\n"), (b"x" * 99 + b"\n", b"x" * 9 + b"\n")],
)
def test_a_lone_document_is_cut_at_a_line_near_its_end(text, heldout):
    (train,), (kept,) = split_documents([Document("one.txt", text)], 0.1)
    assert kept == Document("one.txt", heldout) and train.text + kept.text == text


def test_one_byte_is_too_little():
    with pytest.raises(UserError, match="Too little text"):
        split_documents([Document("one.txt", b"x")], 0.1)
