"""PE and COFF: DLLs for Windows, and the objects that are linked into them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from tvmflow.targets.linking.zig import IMPORT_LIBRARY, Interface, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> its name in the tool that writes import libraries, and in the linker.
_MACHINES: Final[Mapping[str, tuple[str, str]]] = {
    "x86_64": ("i386:x86-64", "x64"),
    "aarch64": ("arm64", "arm64"),
}
ARCHS: Final = tuple(_MACHINES)

_RUNTIME_DLL: Final = "tvm_ffi.dll"

# The system library's function that LLVM calls for large stack frames.
_STACK_PROBE: Final = "__chkstk"
# C library functions that kernels and C libraries call, and math functions without an LLVM instruction.
_C_FUNCTIONS: Final = (
    "memcpy memmove memset memcmp _aligned_malloc _aligned_free calloc free strcmp strncmp".split()
)
_MATH_FUNCTIONS: Final = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 "
    "fabs floor fma fmax fmin fmod hypot ldexp lgamma llround log log10 log1p log2 logb lround "
    "nearbyint nextafter pow remainder rint round sin sinh sqrt tan tanh tgamma trunc"
).split()
# The system functions that a C library calls, for threads, locks, clocks and mapped files.
_SYSTEM_FUNCTIONS: Final = (
    "GetEnvironmentVariableA LoadLibraryA GetProcAddress AcquireSRWLockExclusive ReleaseSRWLockExclusive "
    "SleepConditionVariableSRW WakeAllConditionVariable WakeConditionVariable CreateThread "
    "WaitForSingleObject CloseHandle SwitchToThread GetCurrentProcess GetProcessAffinityMask "
    "QueryPerformanceCounter QueryPerformanceFrequency CreateFileW GetFileSizeEx GetFileType "
    "CreateFileMappingW MapViewOfFile UnmapViewOfFile MultiByteToWideChar"
).split()
# Function -> the DLL that exports it.
_DLLS: Final[Mapping[str, str]] = {
    _STACK_PROBE: "ntdll.dll",
    **dict.fromkeys(_C_FUNCTIONS, "ucrtbase.dll"),
    **{f"{name}{kind}": "ucrtbase.dll" for name in _MATH_FUNCTIONS for kind in ("", "f")},
    **dict.fromkeys(_SYSTEM_FUNCTIONS, "kernel32.dll"),
}
# The prefix of the symbol for a pointer to an imported function.
_IMPORTED: Final = "__imp_"
# `_fltused` marks floating-point code, and only Microsoft's C library needs it; `___chkstk_ms` is GNU's stack probe.
_ALIASES: Final = (
    "/alternatename:_fltused=__ImageBase",
    f"/alternatename:___chkstk_ms={_STACK_PROBE}",
)


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a DLL as `ObjectFormat.link` does, with import libraries for the symbols that the objects need.

    For a C library, its own import library is written to `IMPORT_LIBRARY`.
    """
    dlltool_machine, linker_machine = _MACHINES[platform.arch]
    needed = {
        symbol.removeprefix(_IMPORTED)
        for name in names
        for symbol in undefined_symbols(folder / name)
    }
    libraries = []
    for dll, symbols in _imports(needed).items():
        stem = dll.partition(".")[0]
        (folder / f"{stem}.def").write_text("\n".join([f"LIBRARY {dll}", "EXPORTS", *symbols, ""]))
        files = ("-d", f"{stem}.def", "-l", f"{stem}.lib")
        run_zig(folder, "dlltool", "-m", dlltool_machine, *files)
        libraries.append(f"{stem}.lib")
    output, visible = "linked.dll", []
    if interface:
        output = interface.file
        visible = [f"/implib:{IMPORT_LIBRARY}", *(f"/export:{f}" for f in interface.functions)]
    run_zig(
        folder,
        "lld-link",
        # A library of kernels has no entry point. With /Brepro, a digest replaces the time stamp.
        *("/dll", "/noentry", "/nodefaultlib", "/Brepro", f"/machine:{linker_machine}", *_ALIASES),
        *(f"/out:{output}", *visible, *names, *libraries),
    )
    return output


def _imports(symbols: Set[str]) -> dict[str, list[str]]:
    """Return the symbols to import from each DLL; the linker reports symbols that no known DLL exports."""
    imports: dict[str, list[str]] = {}
    # The stack probe must always be imported, because GNU's name is an alias of it.
    for symbol in sorted({*symbols, _STACK_PROBE}):
        dll = _RUNTIME_DLL if symbol.startswith("TVMFFI") else _DLLS.get(symbol)
        if dll:
            imports.setdefault(dll, []).append(symbol)
    return imports


# ---------------------------------------------------------------- objects
# Layout: Microsoft's PE format, sections "COFF File Header" to "COFF Symbol Table".

_HEADER: Final = struct.Struct("<HHIIIHH")
_SYMBOL: Final = struct.Struct("<8sIhHBB")
_UNDEFINED: Final = 0
_EXTERNAL: Final = 2


def undefined_symbols(path: Path) -> list[str]:
    """Return an object's undefined symbols except weak ones; empty for a file of another format."""
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
        at = table + index * _SYMBOL.size
        raw, value, section, _, storage, auxiliary = _SYMBOL.unpack_from(content, at)
        if section == _UNDEFINED and storage == _EXTERNAL and value == 0:
            names.append(_decode_name(raw, content, strings))
        index += 1 + auxiliary
    return names


def remove_exports(content: bytes) -> bytes:
    """Remove the linker options in an object that would export its symbols from a DLL."""
    # Extra spaces between options are ignored, so blanking them keeps the object's layout.
    return re.sub(rb"(?i)[ ][-/]export:[\w.,]+", lambda option: b" " * len(option.group()), content)


def _decode_name(raw: bytes, content: bytes, strings: int) -> str:
    """Return a name, which is stored as eight bytes, or as four zeros and an offset into the string table."""
    if raw[:4] == b"\0\0\0\0":
        start = strings + int.from_bytes(raw[4:], "little")
        return content[start : content.index(b"\0", start)].decode()
    return raw.rstrip(b"\0").decode()


_SECTION: Final = struct.Struct("<8sIIIIIIHHI")
_DATA_SYMBOL: Final = struct.Struct("<IIIHHBB")
# Read-only initialized data, aligned to 64 bytes.
_ATTRIBUTES: Final = 0x00000040 | 0x00700000 | 0x40000000


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data, as `ObjectFormat.write_data`."""
    with code.open("rb") as stream:
        machine = int.from_bytes(stream.read(2), "little")
    begin = _HEADER.size + _SECTION.size
    with output.open("wb") as stream:
        stream.write(bytes(begin))
        size = sum(map(stream.write, pieces))
        text = f"{symbol}\0".encode()
        # A name longer than eight bytes is stored as four zeros and its offset in the string table.
        stream.write(_DATA_SYMBOL.pack(0, 4, 0, 1, 0, _EXTERNAL, 0))
        stream.write(struct.pack("<I", 4 + len(text)) + text)
        stream.seek(0)
        stream.write(_HEADER.pack(machine, 1, 0, begin + size, 1, 0, 0))
        stream.write(_SECTION.pack(b".rdata", 0, 0, size, begin, 0, 0, 0, 0, _ATTRIBUTES))


def find_data(path: Path) -> tuple[int, int]:
    """Return the offset and the size of the data in an object file that `write_data` wrote."""
    with path.open("rb") as stream:
        stream.seek(_HEADER.size)
        _, _, _, size, begin, *_ = _SECTION.unpack(stream.read(_SECTION.size))
    return begin, size
