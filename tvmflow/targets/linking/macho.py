"""Mach-O: shared libraries for macOS."""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.files import map_file
from tvmflow.targets.linking.zig import Interface, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> zig's target name.
_TARGETS: Final[Mapping[str, str]] = {"x86_64": "x86_64-macos", "aarch64": "aarch64-macos"}
ARCHS: Final = tuple(_TARGETS)


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a dylib as `ObjectFormat.link` does, and sign it as macOS requires."""
    if interface:
        for name in names:
            hide_symbols(folder / name, interface.functions)
    # A library of kernels finds the runtime's symbols in the program that loads it.
    undefined = "-fno-allow-shlib-undefined" if interface else "-fallow-shlib-undefined"
    file = interface.file if interface else "linked.dylib"
    run_zig(
        folder,
        "build-lib",
        *("-dynamic", "-fstrip", "-O", "ReleaseSmall"),
        *("-target", f"{_TARGETS[platform.arch]}.13.0"),
        # zig would compile compiler-rt, for half a minute, but the system's library contains it.
        *("-fno-compiler-rt", undefined),
        *("-install_name", f"@rpath/{file}", "-femit-bin=linked.dylib"),
        *names,
    )
    return "linked.dylib"


# ---------------------------------------------------------------- objects of data, and hidden symbols
# Layout: `<mach-o/loader.h>`, `<mach-o/nlist.h>`.

_HEADER: Final = struct.Struct("<IIIIIIII")
_COMMAND: Final = struct.Struct("<II")
_SEGMENT: Final = struct.Struct("<II16sQQQQiiII")
_SECTION: Final = struct.Struct("<16s16sQQIIIIIIII")
_SYMTAB: Final = struct.Struct("<IIIIII")
_SYMBOL: Final = struct.Struct("<IBBHQ")

_LC_SYMTAB, _LC_SEGMENT_64 = 0x2, 0x19
_LC_BUILD_VERSION: Final = 0x32
_IOS, _IOS_SIMULATOR, _IOS_14 = 2, 7, 14 << 16
# The load commands that name an object's system.
_LC_VERSIONS: Final = (0x24, 0x25, 0x2F, 0x30, 0x32)
_READ: Final = 1
_EXTERNAL, _IN_SECTION, _PRIVATE_EXTERNAL, _DEBUG = 0x01, 0x0E, 0x10, 0xE0


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data, as `ObjectFormat.write_data`."""
    content = code.read_bytes()
    magic, cpu, subtype, kind, *_ = _HEADER.unpack_from(content)
    versions = [
        content[at : at + size] for at, cmd, size in _commands(content) if cmd in _LC_VERSIONS
    ]
    length = _SEGMENT.size + _SECTION.size + _SYMTAB.size + sum(map(len, versions))
    begin = -(-(_HEADER.size + length) // 64) * 64
    with output.open("wb") as stream:
        stream.write(bytes(begin))
        size = sum(map(stream.write, pieces))
        text = f"\0_{symbol}\0".encode()
        stream.write(_SYMBOL.pack(1, _IN_SECTION | _EXTERNAL | _PRIVATE_EXTERNAL, 1, 0, 0))
        stream.write(text)
        stream.seek(0)
        stream.write(_HEADER.pack(magic, cpu, subtype, kind, 2 + len(versions), length, 0, 0))
        both = _SEGMENT.size + _SECTION.size
        stream.write(
            _SEGMENT.pack(_LC_SEGMENT_64, both, b"", 0, size, begin, size, _READ, _READ, 1, 0)
        )
        stream.write(
            _SECTION.pack(b"__const", b"__TEXT", 0, size, begin, 6, *[0] * 6)  # 2**6 bytes
        )
        stream.write(b"".join(versions))
        end = begin + size
        stream.write(_SYMTAB.pack(_LC_SYMTAB, _SYMTAB.size, end, 1, end + _SYMBOL.size, len(text)))


def find_data(path: Path) -> tuple[int, int]:
    """Return the offset and the size of the data in an object file that `write_data` wrote."""
    with path.open("rb") as stream:
        stream.seek(_HEADER.size + _SEGMENT.size)
        _, _, _, size, begin, *_ = _SECTION.unpack(stream.read(_SECTION.size))
    return begin, size


def hide_symbols(path: Path, public: Collection[str]) -> None:
    """Hide the symbols that an object defines, except public functions, from other libraries.

    If something changes and the path is a link to an object, it is replaced by a changed copy.
    """
    with path.open("rb") as stream, map_file(stream) as content:
        changed = {
            place: content[place] | _PRIVATE_EXTERNAL
            for place, name in _visible_symbols(content)
            if name[1:].decode() not in public
        }
    if changed:
        shutil.copyfile(path, copy := path.with_suffix(".hidden"))
        with copy.open("r+b") as target:
            for place, kind in changed.items():
                target.seek(place)
                target.write(bytes([kind]))
        copy.replace(path)


def _visible_symbols(content: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of the type, and the name, of each symbol that an object exports."""
    for at, command, _ in _commands(content):
        if command != _LC_SYMTAB:
            continue
        _, _, table, count, names, _ = _SYMTAB.unpack_from(content, at)
        for entry in range(table, table + count * _SYMBOL.size, _SYMBOL.size):
            name, kind, *_ = _SYMBOL.unpack_from(content, entry)
            is_defined = kind & _IN_SECTION == _IN_SECTION and not kind & _DEBUG
            if is_defined and kind & _EXTERNAL and not kind & _PRIVATE_EXTERNAL:
                yield entry + 4, content[names + name : content.find(b"\0", names + name)]


def write_for_simulator(source: Path, output: Path) -> None:
    """Write an iOS object as one for the simulator on Macs with the same CPU; the code is the same."""
    content = bytearray(source.read_bytes())
    for at, command, _ in _commands(content):
        if command == _LC_BUILD_VERSION and struct.unpack_from("<I", content, at + 8) == (_IOS,):
            struct.pack_into("<II", content, at + 8, _IOS_SIMULATOR, _IOS_14)
    output.write_bytes(content)


def _commands(content: bytes | bytearray | mmap.mmap) -> Iterator[tuple[int, int, int]]:
    at = _HEADER.size
    for _ in range(_HEADER.unpack_from(content)[4]):
        command, size = _COMMAND.unpack_from(content, at)
        yield at, command, size
        at += size
