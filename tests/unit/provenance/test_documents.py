"""What is refused of documents that anybody may have written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tvmflow.provenance import documents
from tvmflow.provenance.documents import Unreadable, at, number_at, read_file, read_json, shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no JSON"),
        (b"{", "it is no JSON"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b"NaN", "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1, "a": 2}', "'a' stands there twice"),
        (b"[" * 100 + b"]" * 100, "nests too deeply"),
        (b"[" * 1_000_000, "nests too deeply"),
        (b'{"a":' * 1_000_000, "nests too deeply"),
        (b"9" * 100_000, "it is no JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_is_a_sentence(content: bytes, words: str) -> None:
    with pytest.raises(Unreadable) as raised:
        read_json(content)
    assert words in str(raised.value)


def test_many_names_are_no_reason_to_wait() -> None:
    """A hundred thousand of them, the last one twice."""
    content = ",".join(f'"{n}": 0' for n in range(100_000))
    started = time.monotonic()
    with pytest.raises(Unreadable, match="'99999' stands there twice"):
        read_json(f'{{{content}, "99999": 1}}'.encode())
    assert time.monotonic() - started < 5


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    """Nothing waits for somebody to write."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(Unreadable):
            read_file(path)
    with pytest.raises(Unreadable, match="No such file"):
        read_file(tmp_path / "nothing")


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    monkeypatch.setattr(documents, "_MOST_BYTES", 1 << 20)
    with pytest.raises(Unreadable, match="larger than 1 MB"):
        read_file(path)


def test_what_has_another_type_is_empty() -> None:
    value = {"a": {"b": "text", "n": True, "x": 1}}
    assert at(value, "a", "b", of=str) == "text"
    assert (at(value, "a", "b", of=list), at(value, "a", "b", "c", of=dict)) == ([], {})
    assert (number_at(value, "a", "x"), number_at(value, "a", "n"), number_at(3, "a")) == (
        1.0,
        None,
        None,
    )


def test_a_number_that_no_float_holds_is_none() -> None:
    for text in (b"1e400", b"-1e400", b"9" * 4000):
        assert number_at({"x": read_json(text)}, "x") is None


def test_a_foreign_value_is_not_shown_at_any_length() -> None:
    assert len(shown("x" * 10_000)) < 100
