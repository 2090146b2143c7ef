"""Readers of linked libraries (ELF, Mach-O and PE) for the fields that tests check."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_DYNAMIC = 2
_SYMBOLS = 11
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH, _VERNEED = 1, 5, 14, 15, 29, 0x6FFFFFFE
_LOAD_DYLIB, _ID_DYLIB, _SYMTAB = 0xC, 0xD, 0x2


class Elf(NamedTuple):
    """`machine`: 62 is x86-64, 183 AArch64, 243 RISC-V, 40 ARM, 3 i386. `tags`: all numbers in the dynamic section."""

    machine: int
    needed: tuple[str, ...]
    soname: str
    tags: frozenset[int]
    undefined: tuple[str, ...]
    exports: frozenset[str]

    @property
    def requires_symbol_versions(self) -> bool:
        return _VERNEED in self.tags

    @property
    def has_search_path(self) -> bool:
        return bool({_RPATH, _RUNPATH} & self.tags)


def read_elf(path: Path) -> Elf:
    """Read a little-endian ELF library of 32 or 64 bits."""
    content = path.read_bytes()
    assert content[:4] == b"\x7fELF" and content[5] == 1
    wide = content[4] == 2
    machine = struct.unpack_from("<H", content, 18)[0]
    offset = struct.unpack_from("<Q" if wide else "<I", content, 32 if wide else 28)[0]
    size, count = struct.unpack_from("<HH", content, 54 if wide else 42)
    segments = []
    for index in range(count):
        start = offset + index * size
        if wide:
            kind, _, place, address, _, length = struct.unpack_from("<IIQQQQ", content, start)
        else:
            kind, place, address, _, length = struct.unpack_from("<IIIII", content, start)
        segments.append((kind, place, address, length))

    def at(address: int) -> int:
        kinds = [s for s in segments if s[0] == 1 and s[2] <= address < s[2] + s[3]]
        return int(kinds[0][1] + address - kinds[0][2])

    [(_, place, _, length)] = [segment for segment in segments if segment[0] == _DYNAMIC]
    entry = struct.Struct("<qQ" if wide else "<iI")
    entries = list(entry.iter_unpack(content[place : place + length]))
    last = next(index for index, (tag, _) in enumerate(entries) if tag == 0)
    entries = entries[:last]
    tags = dict(entries)
    strings = at(tags[_STRTAB])

    def text(start: int) -> str:
        return content[strings + start : content.index(b"\0", strings + start)].decode()

    needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
    soname = text(tags[_SONAME]) if _SONAME in tags else ""
    symbols = _dynamic_symbols(content, wide)
    undefined = filter(None, (text(name) for name, section in symbols if not section))
    exports = frozenset(text(name) for name, section in symbols if section)
    return Elf(machine, needed, soname, frozenset(tags), tuple(undefined), exports)


def _dynamic_symbols(content: bytes, wide: bool) -> list[tuple[int, int]]:
    """Return `(offset of the name, section)` of each symbol that the loader sees."""
    offset = struct.unpack_from("<Q" if wide else "<I", content, 40 if wide else 32)[0]
    size, count = struct.unpack_from("<HH", content, 58 if wide else 46)
    header = struct.Struct("<IIQQQQ" if wide else "<IIIIII")
    symbol = struct.Struct("<IBBHQQ" if wide else "<IIIBBH")
    for index in range(count):
        _, kind, _, _, place, length = header.unpack_from(content, offset + index * size)
        if kind == _SYMBOLS:
            rows = symbol.iter_unpack(content[place : place + length])
            return [(row[0], row[3] if wide else row[5]) for row in rows]
    return []


class MachO(NamedTuple):
    """`cpu`: 0x0100000C is ARM64, 0x01000007 x86-64; `kind`: 6 is a dylib."""

    cpu: int
    kind: int
    name: str
    needed: tuple[str, ...]
    commands: frozenset[int]
    exports: frozenset[str]


def read_macho(path: Path) -> MachO:
    """Read a 64-bit little-endian Mach-O library."""
    content = path.read_bytes()
    magic, cpu, _, kind, count, _, _, _ = struct.unpack_from("<8I", content)
    assert magic == 0xFEEDFACF
    place, name, needed, commands = 32, "", [], set()
    exports: set[str] = set()
    for _ in range(count):
        command, size = struct.unpack_from("<II", content, place)
        commands.add(command)
        if command in (_LOAD_DYLIB, _ID_DYLIB):
            start = place + struct.unpack_from("<I", content, place + 8)[0]
            text = content[start : place + size].split(b"\0")[0].decode()
            if command == _ID_DYLIB:
                name = text
            else:
                needed.append(text)
        if command == _SYMTAB:
            table, count, names = struct.unpack_from("<III", content, place + 8)
            for entry in range(table, table + 16 * count, 16):
                start, flags = struct.unpack_from("<IB", content, entry)
                if flags & 0xF == 0xF:  # external, and defined in a section
                    symbol = content[names + start : content.index(b"\0", names + start)]
                    exports.add(symbol.decode())
        place += size
    return MachO(cpu, kind, name, tuple(needed), frozenset(commands), frozenset(exports))


class Pe(NamedTuple):
    """`machine`: 0x8664 is x86-64, 0xAA64 ARM64. `imports` maps a DLL to what is taken from it."""

    machine: int
    exports: tuple[str, ...]
    imports: dict[str, tuple[str, ...]]


def read_pe(path: Path) -> Pe:
    """Read a 64-bit PE library."""
    content = path.read_bytes()
    start = struct.unpack_from("<I", content, 0x3C)[0]
    assert content[start : start + 4] == b"PE\0\0"
    machine, sections, _, _, _, optional, _ = struct.unpack_from("<HHIIIHH", content, start + 4)
    head = start + 24
    assert struct.unpack_from("<H", content, head)[0] == 0x20B
    tables = [struct.unpack_from("<II", content, head + 112 + 8 * index) for index in range(2)]
    rows = [
        struct.unpack_from("<IIII", content, head + optional + 40 * index + 8)
        for index in range(sections)
    ]

    def at(address: int) -> int:
        _, begin, _, place = next(row for row in rows if row[1] <= address < row[1] + row[2])
        return int(place + address - begin)

    def text(address: int) -> str:
        place = at(address)
        return content[place : content.index(b"\0", place)].decode()

    exports: list[str] = []
    if tables[0][0]:
        place = at(tables[0][0])
        count, _, names = struct.unpack_from("<III", content, place + 24)
        exports = [text(a) for (a,) in struct.iter_unpack("<I", content[at(names) :][: 4 * count])]
    imports: dict[str, tuple[str, ...]] = {}
    place = at(tables[1][0]) if tables[1][0] else 0
    while place:
        lookup, _, _, dll, _ = struct.unpack_from("<5I", content, place)
        if not dll:
            break
        symbols, thunk = [], at(lookup)
        while address := struct.unpack_from("<Q", content, thunk)[0]:
            symbols.append(text(address + 2))
            thunk += 8
        imports[text(dll)] = tuple(symbols)
        place += 20
    return Pe(machine, tuple(exports), imports)
