"""WebAssembly modules without threads, for WASI and for JavaScript."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tvmflow.targets.linking.zig import Interface, run_zig
from tvmflow.targets.platforms import Platform

ARCHS: Final = ("wasm32",)

# Exported so that programs in other languages can allocate tensors in the module's memory.
_MEMORY: Final = ("malloc", "free")


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a module that exports memory and functions (a WASI reactor), as `ObjectFormat.link` does.

    For this, zig compiles WASI's C library, which takes most of a minute of one CPU.
    """
    functions = (*interface.functions, *_MEMORY) if interface else ()
    exports = [f"-Wl,--export={function}" for function in functions]
    run_zig(
        folder,
        *("cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-Wl,--strip-all"),
        *(*names, "-lm", *exports, "-o", "linked.wasm"),
    )
    return "linked.wasm"


# ---------------------------------------------------------------- objects of data
# Layout: WebAssembly's specification, and "Linking" of its tool conventions.

_MAGIC: Final = b"\0asm\1\0\0\0"
_CUSTOM, _DATA = 0, 11
_SEGMENT_INFO, _SYMBOL_TABLE = 5, 8
_DATA_SYMBOL, _HIDDEN = 1, 4
_LOG2_ALIGNMENT: Final = 6
_I32_CONST_0: Final = b"\x41\0\x0b"


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data, as `ObjectFormat.write_data`."""
    with output.open("wb") as stream:
        # A single segment at address 0, which the linker relocates; its size and the section's are written last.
        stream.write(_MAGIC + bytes([_DATA]))
        section = stream.tell()
        stream.write(_number(0) + b"\1\0" + _I32_CONST_0)
        segment = stream.tell()
        stream.write(_number(0))
        begin = stream.tell()
        size = sum(map(stream.write, pieces))
        name = symbol.encode()
        symbols = _vector(
            bytes([_DATA_SYMBOL, _HIDDEN]) + _text(name) + _number(0) + _number(0) + _number(size)
        )
        segments = _vector(_text(b".rodata") + bytes([_LOG2_ALIGNMENT, 0]))
        linking = b"\2" + _block(_SYMBOL_TABLE, symbols) + _block(_SEGMENT_INFO, segments)
        stream.write(_block(_CUSTOM, _text(b"linking") + linking))
        stream.seek(section)
        stream.write(_number(begin - section - len(_number(0)) + size))
        stream.seek(segment)
        stream.write(_number(size))


def find_data(path: Path) -> tuple[int, int]:
    """Return the offset and the size of the data in an object file that `write_data` wrote."""
    length = len(_number(0))
    # Before the data come the section's kind and size, and one segment's kind (0) and address.
    before = len(_MAGIC) + 1 + length + 2 + len(_I32_CONST_0)
    with path.open("rb") as stream:
        stream.seek(before)
        size = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(stream.read(length)))
    return before + length, size


def _number(value: int) -> bytes:
    """Return an unsigned LEB128 padded to five bytes, which fits every 32-bit integer."""
    return bytes([value >> shift & 0x7F | (0x80 if shift < 28 else 0) for shift in range(0, 35, 7)])


def _text(content: bytes) -> bytes:
    return _number(len(content)) + content


def _block(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + _text(content)


def _vector(entry: bytes) -> bytes:
    return _number(1) + entry
