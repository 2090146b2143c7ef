"""ELF: shared libraries for Linux and Android, and objects that hold only data."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.targets.linking.zig import Interface, library_folder, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> the linker's name for its object format (emulation).
_EMULATIONS: Final[Mapping[str, str]] = {
    "x86_64": "elf_x86_64",
    "i386": "elf_i386",
    "aarch64": "aarch64linux",
    "armv7": "armelf_linux_eabi",
    "riscv64": "elf64lriscv",
}
ARCHS: Final = tuple(_EMULATIONS)

# 64-bit integer functions that LLVM calls on 32-bit machines. They are in libgcc, which every Linux with C++ has.
_INTEGER_HELPERS: Final = (
    *(f"__{name}3" for name in "divdi moddi udivdi umoddi ashldi lshrdi ashrdi muldi".split()),
    *(f"__fix{sign}{kind}di" for sign in ("", "uns") for kind in ("sf", "df")),
    *(f"__float{sign}di{kind}" for sign in ("", "un") for kind in ("sf", "df")),
    *("__divmoddi4", "__udivmoddi4"),
)
# The division functions that LLVM calls on 32-bit ARM, for triples without the ARM EABI's names.
_DIVISIONS: Final = ("__divsi3", "__modsi3", "__udivsi3", "__umodsi3")
# The ARM EABI's names of the 64-bit functions and of division.
_ARM_HELPERS: Final = tuple(
    f"__aeabi_{name}"
    for name in (
        "idiv uidiv idivmod uidivmod ldivmod uldivmod l2f l2d ul2f ul2d f2lz f2ulz d2lz d2ulz llsl llsr lasr lmul"
    ).split()
)
# zig has these functions only under the ARM EABI's names.
_ARM_ALIASES: Final = ("--defsym=__divsi3=__aeabi_idiv", "--defsym=__udivsi3=__aeabi_uidiv")
_HELPERS: Final[Mapping[str, tuple[str, ...]]] = {
    "armv7": (*_INTEGER_HELPERS, *_DIVISIONS, *_ARM_HELPERS),
    "i386": _INTEGER_HELPERS,
}


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a shared library as `ObjectFormat.link`."""
    stubs = [
        link_stub(folder, f"stub-{library}", library, platform.arch, ())
        for library in _list_libraries(platform, interface)
    ]
    helpers = []
    if platform.system == "android":
        helpers = _compile_helpers(folder) if platform.arch == "armv7" else []
    elif platform.arch in _HELPERS:
        library, symbols = "libgcc_s.so.1", _HELPERS[platform.arch]
        stub = link_stub(folder, f"stub-{library}", library, platform.arch, symbols)
        helpers = ["--as-needed", stub]
    visible = []
    if interface:
        public = "; ".join(interface.functions)
        (folder / "public").write_text(f"{{ global: {public}; local: *; }};\n")
        visible = ["--version-script=public", "-soname", interface.file]
    # Android 15 supports 16 KB pages. Android 5 reads only one of the two kinds of symbol hash tables.
    android = ["-z", "max-page-size=16384", "--hash-style=both"]
    options = android if platform.system == "android" else []
    options += ["--strip-all", *visible, *names, "--no-as-needed", *stubs, *helpers]
    _run_lld(folder, platform.arch, "linked.so", options)
    return "linked.so"


def _compile_helpers(folder: Path) -> list[str]:
    """Compile functions that LLVM calls on 32-bit ARM and Android lacks; return the linker's options."""
    source = library_folder() / "compiler_rt.zig"
    target = ("-target", "arm-linux-androideabi", "-fno-compiler-rt")
    run_zig(
        folder,
        *("build-lib", "-static", "-fPIC", "-fstrip", "-O", "ReleaseFast", "-ffunction-sections"),
        *(*target, "-femit-bin=helpers.a", str(source)),
    )
    return ["--gc-sections", "--exclude-libs=ALL", *_ARM_ALIASES, "helpers.a"]


def link_program(folder: Path, names: Sequence[str], arch: str) -> str:
    """Link a static executable in a folder, and return its name."""
    options = ["-static", "--build-id=none", "--strip-all", "--gc-sections"]
    options += _ARM_ALIASES if arch == "armv7" else []
    run_zig(folder, "ld.lld", "-m", _EMULATIONS[arch], *options, "-o", "linked", *names)
    return "linked"


def _list_libraries(platform: Platform, interface: Interface | None) -> list[str]:
    """Return the system's libraries: libc, libm; for C libraries, also those for threads and `dlopen`."""
    loads_libraries = interface is not None and interface.loads_libraries
    if platform.system == "android":
        return ["libc.so", "libm.so", *(["libdl.so"] if loads_libraries else [])]
    if platform.libc.startswith("musl"):
        # musl has libc and libm in one library; distributions that use musl give it this name.
        return [f"libc.musl-{platform.arch}.so.1"]
    libraries = ["libc.so.6", "libm.so.6"]
    if platform.libc.startswith("gnu"):
        # Since glibc 2.34, these are parts of libc.
        libraries += ["libpthread.so.0"] if interface else []
        libraries += ["libdl.so.2"] if loads_libraries else []
    return libraries


def link_stub(
    folder: Path, name: str, soname: str, arch: str, symbols: Sequence[str], *, address: int = 0
) -> str:
    """Link an empty library; a library linked with it makes the loader load the real one. Return its name."""
    (folder / "empty").touch()
    definitions = [f"--defsym={symbol}={address}" for symbol in symbols]
    _run_lld(folder, arch, name, ["-soname", soname, *definitions, "--format=binary", "empty"])
    return name


def _run_lld(folder: Path, arch: str, output: str, arguments: Sequence[str]) -> None:
    options = ["-shared", "--build-id=none", "--hash-style=gnu"]
    run_zig(folder, "ld.lld", "-m", _EMULATIONS[arch], *options, "-o", output, *arguments)


# ---------------------------------------------------------------- objects of data
# Objects are written piece by piece, because an assembler would hold all data in memory several times. Layout: System
# V ABI, chapter 4; large sections: its x86-64 supplement.

_CLASS_64: Final = 2
_LITTLE_ENDIAN: Final = 1
_RELOCATABLE: Final = 1
_X86_64: Final = 62
_PROGBITS, _SYMTAB, _STRTAB = 1, 2, 3
_ALLOC, _LARGE = 0x2, 0x10000000
_GLOBAL_OBJECT: Final = 1 << 4 | 1
_ALIGNMENT: Final = 64
_WORD: Final = 8


class _Machine(NamedTuple):
    """The machine in an object's header: `ident` holds class, byte order and system, `flags` the ABI."""

    ident: bytes
    number: int
    flags: int

    @classmethod
    def read(cls, path: Path) -> _Machine:
        with path.open("rb") as stream:
            header = stream.read(64)
        machine = cls(header[:16], 0, 0)
        (number,) = machine.unpack("H", header, 18)
        (flags,) = machine.unpack("I", header, 48 if machine.is_64 else 36)
        return machine._replace(number=number, flags=flags)

    @property
    def is_64(self) -> bool:
        return self.ident[4] == _CLASS_64

    @property
    def section_size(self) -> int:
        return 64 if self.is_64 else 40

    @property
    def _order(self) -> str:
        return "<" if self.ident[5] == _LITTLE_ENDIAN else ">"

    def unpack(self, layout: str, data: bytes, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(self._order + layout, data, offset)

    def pack(self, layout: str, *values: int) -> bytes:
        """Return values as bytes; an `A` in the layout is an address."""
        return struct.pack(self._order + layout.replace("A", "Q" if self.is_64 else "I"), *values)

    def symbol(self, name: int, info: int, section: int, size: int) -> bytes:
        if self.is_64:
            return self.pack("IBBHQQ", name, info, 0, section, 0, size)
        return self.pack("IIIBBH", name, 0, size, info, 0, section)

    def header(self, sections_at: int, sections: int) -> bytes:
        """Return the header of an object file; its last section has the names of the sections."""
        size = 64 if self.is_64 else 52
        values = (_RELOCATABLE, self.number, 1, 0, 0, sections_at, self.flags, size, 0, 0)
        return self.ident + self.pack(
            "HHIAAAIHHHHHH", *values, self.section_size, sections, sections - 1
        )


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data, as `ObjectFormat.write_data`."""
    machine = _Machine.read(code)
    # On x86-64, a large section is addressed only with 64 bits, so it may exceed 2 GiB.
    is_large = machine.number == _X86_64
    name, flags = (".lrodata", _ALLOC | _LARGE) if is_large else (".rodata", _ALLOC)
    # Without this note, linkers make the stack of the whole program executable.
    note = ".note.GNU-stack"
    names = "\0".join(("", name, ".symtab", ".strtab", note, ".shstrtab", "")).encode()
    texts = f"\0{symbol}\0".encode()
    with output.open("wb") as stream:
        stream.write(bytes(_ALIGNMENT))
        size = sum(map(stream.write, pieces))
        symbols = machine.symbol(0, 0, 0, 0) + machine.symbol(1, _GLOBAL_OBJECT, 1, size)
        headers = [machine.pack("IIAAAAIIAA", *[0] * 10)]
        position = _ALIGNMENT
        # name, type, flags, content or size, linked section, first global symbol, alignment, size of an entry
        for section, kind, attributes, content, link, info, alignment, entry in (
            (name, _PROGBITS, flags, size, 0, 0, _ALIGNMENT, 0),
            (".symtab", _SYMTAB, 0, symbols, 3, 1, _WORD, len(symbols) // 2),
            (".strtab", _STRTAB, 0, texts, 0, 0, 1, 0),
            (note, _PROGBITS, 0, b"", 0, 0, 1, 0),
            (".shstrtab", _STRTAB, 0, names, 0, 0, 1, 0),
        ):
            if isinstance(content, bytes):
                position += stream.write(bytes(-position % _WORD))
                stream.write(content)
            length = len(content) if isinstance(content, bytes) else content
            name_at = names.index(f"\0{section}\0".encode()) + 1
            values = (name_at, kind, attributes, 0, position, length, link, info, alignment, entry)
            headers.append(machine.pack("IIAAAAIIAA", *values))
            position += length
        position += stream.write(bytes(-position % _WORD))
        stream.write(b"".join(headers))
        stream.seek(0)
        stream.write(machine.header(position, len(headers)))


def find_data(path: Path) -> tuple[int, int]:
    """Return the offset and the size of the data in an object file that `write_data` wrote."""
    machine = _Machine.read(path)
    word, layout = (8, "QQ") if machine.is_64 else (4, "II")
    with path.open("rb") as stream:
        # Before the section table's offset come type, machine, version, entry point and segment table.
        (sections,) = machine.unpack(layout[0], stream.read(_ALIGNMENT), 24 + 2 * word)
        # The first section is empty; in a section's header, name, type, flags and address precede offset and size.
        stream.seek(sections + machine.section_size + 8 + 2 * word)
        begin, size = machine.unpack(layout, stream.read(2 * word), 0)
    return begin, size
