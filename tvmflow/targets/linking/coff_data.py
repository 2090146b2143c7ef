"""COFF objects that hold data alone. Layout: Microsoft's PE format, sections "COFF File Header" to "COFF Symbol Table"."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<HHIIIHH")
_SECTION: Final = struct.Struct("<8sIIIIIIHHI")
_SYMBOL: Final = struct.Struct("<IIIHHBB")
# Initialized data, aligned to 64 bytes, that is read only.
_ATTRIBUTES: Final = 0x00000040 | 0x00700000 | 0x40000000
_EXTERNAL: Final = 2


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
        stream.write(_SYMBOL.pack(0, 4, 0, 1, 0, _EXTERNAL, 0))
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
