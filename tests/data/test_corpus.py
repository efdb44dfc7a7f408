"""Reading files: order, links, files that cannot be read, and the messages for an empty corpus."""

import logging
import os
import sys
from pathlib import Path

import pytest

from k3train.data.corpus import read_corpus
from k3train.errors import UserError

SUFFIXES = (".txt", ".md")


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_a_folder_is_read_recursively_by_suffix_in_the_order_of_names(tmp_path):
    write(tmp_path, {"b.txt": "b", "a/z.md": "z", "a/C.TXT": "C", "empty.txt": ""})
    write(tmp_path, {"a/code.py": "no", ".hidden/x.txt": "no", ".y.txt": "no"})
    corpus = read_corpus([tmp_path], SUFFIXES)
    assert [document.name for document in corpus.documents] == ["a/C.TXT", "a/z.md", "b.txt"]
    assert [document.text for document in corpus.documents] == [b"C", b"z", b"b"]
    assert corpus.skipped == () and corpus.repeated == 0


def test_named_files_are_read_whatever_their_suffix_and_named_below_their_common_folder(tmp_path):
    write(tmp_path, {"one/README": "1", "two/README": "2", "two/deep/x.txt": "3"})
    corpus = read_corpus([str(tmp_path / "two" / "README"), str(tmp_path / "one" / "README"), str(tmp_path / "two" / "deep")], SUFFIXES)
    assert [document.name for document in corpus.documents] == ["one/README", "two/README", "two/deep/x.txt"]


def test_links_are_followed_and_loops_are_harmless(tmp_path):
    folder = write(tmp_path / "data", {"a/x.txt": "x"})
    write(tmp_path / "elsewhere", {"y.txt": "y"})
    (folder / "a" / "up").symlink_to(folder)
    (folder / "a" / "self").symlink_to(folder / "a" / "self")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "x_again.txt").symlink_to(folder / "a" / "x.txt")
    assert [document.name for document in read_corpus([folder], SUFFIXES).documents] == ["a/x.txt", "linked/y.txt"]


def test_the_same_file_through_two_sources_is_one_document(tmp_path):
    write(tmp_path, {"a/x.txt": "x", "y.txt": "y"})
    assert len(read_corpus([tmp_path, tmp_path / "a", tmp_path / "a" / "x.txt"], SUFFIXES).documents) == 2


def test_copies_are_read_once_and_counted(tmp_path):
    corpus = read_corpus([write(tmp_path, {"a.txt": "same", "b.txt": "same", "c.txt": "other"})], SUFFIXES)
    assert [document.name for document in corpus.documents] == ["a.txt", "c.txt"] and corpus.repeated == 1


def test_files_without_text_are_reported_and_skipped(tmp_path, caplog, monkeypatch):
    write(tmp_path, {"good.txt": "good", "binary.txt": b"\0\1", "locked.txt": "secret"})
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    real_read = Path.read_bytes

    def read(path):
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied")
        return real_read(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus([tmp_path], SUFFIXES)
    assert [document.name for document in corpus.documents] == ["good.txt"]
    assert {name: reason.split(":")[0] for name, reason in corpus.skipped} == {
        "binary.txt": "binary",
        "locked.txt": "unreadable",
        "broken.txt": "not a regular file",
        "pipe.txt": "not a regular file",
    }
    assert "Left out 4 of 5 files" in caplog.text and "binary.txt (binary: holds a zero byte)" in caplog.text


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_corpus([tmp_path / "nowhere"], SUFFIXES)


@pytest.mark.parametrize("files", [{}, {"code.py": "x"}, {"empty.txt": ""}, {"binary.txt": b"\0"}])
def test_an_empty_corpus_says_where_and_what_to_do(tmp_path, files):
    with pytest.raises(UserError) as error:
        read_corpus([write(tmp_path, files)], SUFFIXES)
    message = str(error.value)
    assert str(tmp_path) in message and "data.sources" in message and "data.suffixes" in message
    assert (".txt, .md" in message) == (not files or "code.py" in files)
    assert ("binary.txt (binary" in message) == ("binary.txt" in files)


def test_the_fingerprint_tells_names_contents_and_extent_apart(tmp_path):
    variants = ({"a.txt": "1", "b.txt": "2"}, {"a.txt": "1", "c.txt": "2"}, {"a.txt": "1", "b.txt": "3"}, {"a.txt": "1"}, {"a.txt": "12"})
    folders = [write(tmp_path / str(number), files) for number, files in enumerate((*variants, variants[0]))]
    prints = [read_corpus([folder], SUFFIXES).fingerprint for folder in folders]
    assert len(set(prints)) == len(variants) and prints[0] == prints[-1]


def test_the_built_in_corpus_is_the_standard_library_without_tests():
    corpus = read_corpus((), SUFFIXES)
    names = [document.name for document in corpus.documents]
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
    assert not any(name.startswith(("config-", "_sysconfigdata")) for name in names)
    assert all(name.endswith(".py") for name in names) and len(set(names)) == len(names)
    assert sum(len(document.text) for document in corpus.documents) > 5_000_000, sys.version
    assert corpus.fingerprint == read_corpus((), ()).fingerprint
