"""The first difference of two files, named by member, path, tensor, line or byte."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save

from tvmflow.release.reproduce import find_difference


def zipped(*members: tuple[str, bytes], year: int = 1980) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), content)
    return stream.getvalue()


def tarred(*members: tuple[str, bytes], mode: int = 0o644) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), mtime=0)


def archived(*members: tuple[str, bytes]) -> bytes:
    archive = b"!<arch>\n"
    for name, content in members:
        header = f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(content):<10}`\n"
        archive += header.encode() + content + b"\n" * (len(content) % 2)
    return archive


def test_equal_contents_have_no_difference() -> None:
    assert find_difference(b"same", b"same") is None


def tensors(**arrays: list[float]) -> bytes:
    content: bytes = save({name: np.array(v, "float32") for name, v in arrays.items()})
    return content


BLOB = bytes(range(256)) * 20
OTHER = BLOB[:700] + b"!" + BLOB[701:]


@pytest.mark.parametrize(
    ("first", "second", "location"),
    [
        (BLOB, OTHER, "byte 700: 0xbc and 0x21"),
        (BLOB, BLOB[:100], "one ends after 100 bytes (5,120 and 100 bytes)"),
        (b"a\nb\nc", b"a\nB\nc", "line 2"),
        (b"a\nb", b"a\nb\nc", "line 3"),
        (json.dumps({"a": [1, 2]}).encode(), json.dumps({"a": [1, 3]}).encode(), "$.a[1]: 2 and 3"),
        (json.dumps({"a": 1}).encode(), json.dumps({"a": 1, "b": 2}).encode(), "only one has $.b"),
        (zipped(("x", BLOB)), zipped(("x", OTHER)), "x, byte 700: 0xbc and 0x21"),
        (zipped(("x", BLOB)), zipped(("y", BLOB)), "only one has x"),
        (
            zipped(("x", b"1"), ("y", b"2")),
            zipped(("y", b"2"), ("x", b"1")),
            "the order of the members",
        ),
        (
            zipped(("x", BLOB)),
            zipped(("x", BLOB), year=1999),
            "x, time (1980, 1, 1, 0, 0, 0), mode 600 and time (1999, 1, 1, 0, 0, 0), mode 600",
        ),
        (tarred(("x", BLOB)), tarred(("x", OTHER)), "x, byte 700: 0xbc and 0x21"),
        (archived(("x", BLOB)), archived(("x", OTHER)), "x/, byte 700: 0xbc and 0x21"),
        (
            zipped(("in.zip", zipped(("x", BLOB)))),
            zipped(("in.zip", zipped(("x", OTHER)))),
            "in.zip, x, byte 700: 0xbc and 0x21",
        ),
        (
            tensors(a=[1.0, 2.0], b=[3.0]),
            tensors(a=[1.0, 2.0], b=[4.0]),
            "tensor b, byte 2: 0x40 and 0x80",
        ),
    ],
)
def test_the_first_difference_is_named(first: bytes, second: bytes, location: str) -> None:
    assert ", ".join(find_difference(first, second) or ()) == location


def test_a_file_that_only_looks_like_an_archive_is_compared_by_bytes() -> None:
    first, second = b"PK\x03\x04" + BLOB, b"PK\x03\x04" + OTHER
    assert ", ".join(find_difference(first, second) or ()) == "byte 704: 0xbc and 0x21"


def test_another_mode_is_a_difference() -> None:
    difference = ", ".join(
        find_difference(tarred(("x", b"")), tarred(("x", b""), mode=0o600)) or ()
    )
    assert difference == "x, time 0, mode 644, owner 0:0 and time 0, mode 600, owner 0:0"
