"""COFF: the undefined symbols of a Windows object file, for which import libraries are made, and its exports."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<HHIIIHH")
_SYMBOL: Final = struct.Struct("<8sIhHBB")
_UNDEFINED: Final = 0
_EXTERNAL: Final = 2


def undefined_symbols(path: Path) -> list[str]:
    """Return the names of the symbols that an object uses and does not define; empty for a file of another format.

    Weak symbols, which have a default definition, are not among them. Layout: Microsoft's PE
    format, sections "COFF File Header" and "COFF Symbol Table".
    """
    content = path.read_bytes()
    if len(content) < _HEADER.size:
        return []
    _, _, _, table, count, _, _ = _HEADER.unpack_from(content)
    strings = table + count * _SYMBOL.size
    if strings + 4 > len(content):
        return []
    names = []
    index = 0
    while index < count:
        raw, value, section, _, storage, auxiliary = _SYMBOL.unpack_from(
            content, table + index * _SYMBOL.size
        )
        if section == _UNDEFINED and storage == _EXTERNAL and value == 0:
            names.append(_decode_name(raw, content, strings))
        index += 1 + auxiliary
    return names


def remove_exports(content: bytes) -> bytes:
    """Return an object without the options for the linker that make its symbols public in a DLL."""
    # spaces between options have no meaning, and the object keeps its layout
    return re.sub(rb"(?i)[ ][-/]export:[\w.,]+", lambda option: b" " * len(option.group()), content)


def _decode_name(raw: bytes, content: bytes, strings: int) -> str:
    """Return a name: eight bytes, or four zeros and an offset into the string table."""
    if raw[:4] == b"\0\0\0\0":
        start = strings + int.from_bytes(raw[4:], "little")
        return content[start : content.index(b"\0", start)].decode()
    return raw.rstrip(b"\0").decode()


# ---------------------------------------------------------------- coff data
# COFF objects that hold data alone. Layout: Microsoft's PE format, sections "COFF File Header" to
# "COFF Symbol Table".


_SECTION: Final = struct.Struct("<8sIIIIIIHHI")
_DATA_SYMBOL: Final = struct.Struct("<IIIHHBB")
# Initialized data, aligned to 64 bytes, that is read only.
_ATTRIBUTES: Final = 0x00000040 | 0x00700000 | 0x40000000


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data. The arguments are those of `data_objects.write_data`."""
    with code.open("rb") as stream:
        machine = int.from_bytes(stream.read(2), "little")
    begin = _HEADER.size + _SECTION.size
    with output.open("wb") as stream:
        stream.write(bytes(begin))
        size = sum(map(stream.write, pieces))
        text = f"{symbol}\0".encode()
        # a name of more than eight bytes is four zeros and its place in the table of names
        stream.write(_DATA_SYMBOL.pack(0, 4, 0, 1, 0, _EXTERNAL, 0))
        stream.write(struct.pack("<I", 4 + len(text)) + text)
        stream.seek(0)
        stream.write(_HEADER.pack(machine, 1, 0, begin + size, 1, 0, 0))
        stream.write(_SECTION.pack(b".rdata", 0, 0, size, begin, 0, 0, 0, 0, _ATTRIBUTES))


def find_data(path: Path) -> tuple[int, int]:
    """Return the place and the size of the data in an object file that `write_data` wrote."""
    with path.open("rb") as stream:
        stream.seek(_HEADER.size)
        _, _, _, size, begin, *_ = _SECTION.unpack(stream.read(_SECTION.size))
    return begin, size
