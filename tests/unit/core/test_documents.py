"""Documents from untrusted sources: what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tvmflow.core import documents
from tvmflow.core.documents import (
    Unreadable,
    get_field,
    get_number,
    quote,
    read_file,
    read_json,
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"NaN", "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b"[" * 100 + b"]" * 100, "nests too deeply"),
        (b"[" * 1_000_000, "nests too deeply"),
        (b'{"a":' * 1_000_000, "nests too deeply"),
        (b"9" * 100_000, "it is not JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_invalid_json_is_reported(content: bytes, message: str) -> None:
    with pytest.raises(Unreadable) as raised:
        read_json(content)
    assert message in str(raised.value)


def test_many_names_are_read_quickly() -> None:
    """A hundred thousand of them, the last one twice."""
    content = ",".join(f'"{n}": 0' for n in range(100_000))
    # of this process alone: others may run at the same time
    started_s = time.process_time()
    with pytest.raises(Unreadable, match="'99999' occurs twice"):
        read_json(f'{{{content}, "99999": 1}}'.encode())
    assert time.process_time() - started_s < 5


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    """Reading a pipe does not wait for a writer."""
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
    monkeypatch.setattr(documents, "_MAX_BYTES", 1 << 20)
    with pytest.raises(Unreadable, match="larger than 1 MB"):
        read_file(path)


def test_a_field_of_another_type_is_empty() -> None:
    value = {"a": {"b": "text", "n": True, "x": 1}}
    assert get_field(value, "a", "b", of=str) == "text"
    assert (get_field(value, "a", "b", of=list), get_field(value, "a", "b", "c", of=dict)) == (
        [],
        {},
    )
    assert (get_number(value, "a", "x"), get_number(value, "a", "n"), get_number(3, "a")) == (
        1.0,
        None,
        None,
    )


def test_a_number_beyond_the_range_of_floats_is_none() -> None:
    for text in (b"1e400", b"-1e400", b"9" * 4000):
        assert get_number({"x": read_json(text)}, "x") is None


def test_a_long_value_is_shortened_in_messages() -> None:
    assert len(quote("x" * 10_000)) < 100
