"""The `ActionResult` of Bazel's Remote Execution API, as far as it is needed: the output files.

bazel-remote accepts no other actions, and returns one only while all blobs that it lists exist.
Encoder and decoder of the protobuf wire format are written here, because the fields that are used
take fewer lines than the dependency would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.store.remote.base import BlobRef, RemoteCacheError

MAX_FILE_BYTES: Final = 64 << 30
_MAX_FILES: Final = 10_000
# A longer part of a path is not shown, since it is another machine's text.
MAX_SHOWN: Final = 255

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

# Field numbers of ActionResult, OutputFile and Digest.
_OUTPUT_FILES: Final = 2
_PATH, _FILE_DIGEST = 1, 2
_HASH, _SIZE_BYTES = 1, 2

# Wire types, and the sizes of those with a fixed size.
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}


class InvalidAction(RemoteCacheError):
    """An action that is rejected; the text says why."""


def encode(files: Mapping[str, BlobRef]) -> bytes:
    """Return the `ActionResult` with these output files by path."""
    entries = [_encode_file(path, blob) for path, blob in sorted(files.items())]
    return b"".join(_encode_bytes(_OUTPUT_FILES, entry) for entry in entries)


def _encode_file(path: str, blob: BlobRef) -> bytes:
    digest = _encode_bytes(_HASH, blob.digest.encode()) + _encode_number(_SIZE_BYTES, blob.size)
    return _encode_bytes(_PATH, path.encode()) + _encode_bytes(_FILE_DIGEST, digest)


def decode(content: bytes) -> dict[str, BlobRef]:
    """Return the output files of an `ActionResult` by path.

    Other fields are ignored: bazel-remote adds the worker, for example.

    Raises:
        InvalidAction: when the message is damaged, or a digest or size in it is not valid.
    """
    files: dict[str, BlobRef] = {}
    try:
        for number, value in _fields(content):
            if number != _OUTPUT_FILES:
                continue
            entry = dict(_fields(_as_bytes(value)))
            digest = dict(_fields(_as_bytes(entry[_FILE_DIGEST])))
            path = _as_bytes(entry[_PATH]).decode()
            if path in files:
                raise InvalidAction(f"it lists two files {path[:MAX_SHOWN]!r}")
            size = digest.get(_SIZE_BYTES, 0)
            if not isinstance(size, int):
                raise ValueError("a size is not a number")
            files[path] = BlobRef(_as_bytes(digest[_HASH]).decode(), size)
            if len(files) > _MAX_FILES:
                raise InvalidAction(f"it lists more than {_MAX_FILES} files")
    except (ValueError, KeyError, IndexError, TypeError) as damage:
        raise InvalidAction(f"it is damaged ({type(damage).__name__})") from None
    for path, blob in files.items():
        _check_blob(path, blob)
    return files


def _check_blob(path: str, blob: BlobRef) -> None:
    if not _DIGEST.fullmatch(blob.digest):
        raise InvalidAction(f"the file {path[:MAX_SHOWN]!r} has no digest")
    if not 0 <= blob.size <= MAX_FILE_BYTES:
        raise InvalidAction(f"the file {path[:MAX_SHOWN]!r} has a size of {blob.size} bytes")


# ---------------------------------------------------------------- protobuf


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message.

    Raises:
        ValueError: when it is not a message.
        IndexError: when it ends too early.
    """
    position = 0
    while position < len(message):
        tag, position = _decode_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _decode_varint(message, position)
            # an int64: a negative number has all 64 bits
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire_type == _LENGTH_DELIMITED:
            length, position = _decode_varint(message, position)
        elif wire_type in _FIXED_SIZES:
            length = _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"a field of wire type {wire_type}")
        if length > len(message) - position:
            raise ValueError("a field is longer than its message")
        yield number, message[position : position + length]
        position += length


def _decode_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), position
    raise ValueError("a varint is too long")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes are expected")
    return value


def _encode_bytes(number: int, content: bytes) -> bytes:
    tag = _encode_varint(number << 3 | _LENGTH_DELIMITED)
    return tag + _encode_varint(len(content)) + content


def _encode_number(number: int, value: int) -> bytes:
    # zero is omitted, as every encoder of proto3 does
    return _encode_varint(number << 3 | _VARINT) + _encode_varint(value) if value else b""


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
