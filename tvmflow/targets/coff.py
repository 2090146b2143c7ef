"""Reads of a Windows object file what it takes from elsewhere, so that import libraries can be made for it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<HHIIIHH")
_SYMBOL: Final = struct.Struct("<8sIhHBB")
_UNDEFINED: Final = 0
_EXTERNAL: Final = 2


def undefined(path: Path) -> list[str]:
    """The names of symbols that the object uses and does not have; empty for what is no COFF object.

    Weak ones, which have a definition to fall back to, are not among them. Layout: Microsoft's
    PE format, sections "COFF File Header" and "COFF Symbol Table".
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
        raw, value, section, _, storage, extra = _SYMBOL.unpack_from(
            content, table + index * _SYMBOL.size
        )
        if section == _UNDEFINED and storage == _EXTERNAL and value == 0:
            names.append(_name(raw, content, strings))
        index += 1 + extra
    return names


def _name(raw: bytes, content: bytes, strings: int) -> str:
    """Eight bytes, or four of zero and a place in the table of strings."""
    if raw[:4] == b"\0\0\0\0":
        start = strings + int.from_bytes(raw[4:], "little")
        return content[start : content.index(b"\0", start)].decode()
    return raw.rstrip(b"\0").decode()
