"""COFF: the undefined symbols of a Windows object file, for which import libraries are made, and its exports."""

from __future__ import annotations

import re
import struct
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
