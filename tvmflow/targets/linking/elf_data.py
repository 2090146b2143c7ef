"""ELF objects that hold data alone, written piece by piece: an assembler would hold all of it in memory, several times.

The format is that of the System V ABI, chapter 4; large sections are those of its supplement for x86-64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

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
    """The machine of an object file, as its header has it.

    Attributes:
        ident: The first 16 bytes: class, byte order and system.
        number: The machine.
        flags: Further properties, such as the calling convention.
    """

    ident: bytes
    number: int
    flags: int

    @classmethod
    def read(cls, path: Path) -> _Machine:
        """Return the machine of an object file."""
        with path.open("rb") as stream:
            header = stream.read(64)
        machine = cls(header[:16], 0, 0)
        (number,) = machine.unpack("H", header, 18)
        (flags,) = machine.unpack("I", header, 48 if machine.is_64 else 36)
        return machine._replace(number=number, flags=flags)

    @property
    def is_64(self) -> bool:
        """True for addresses of 64 bits."""
        return self.ident[4] == _CLASS_64

    @property
    def section_size(self) -> int:
        """The bytes of an entry of the table of sections."""
        return 64 if self.is_64 else 40

    @property
    def _order(self) -> str:
        return "<" if self.ident[5] == _LITTLE_ENDIAN else ">"

    def unpack(self, layout: str, data: bytes, offset: int) -> tuple[int, ...]:
        """Return values in the byte order of the machine."""
        return struct.unpack_from(self._order + layout, data, offset)

    def pack(self, layout: str, *values: int) -> bytes:
        """Return the bytes of values; `A` in the layout is an address."""
        return struct.pack(self._order + layout.replace("A", "Q" if self.is_64 else "I"), *values)

    def symbol(self, name: int, info: int, section: int, size: int) -> bytes:
        """Return an entry of a symbol table."""
        if self.is_64:
            return self.pack("IBBHQQ", name, info, 0, section, 0, size)
        return self.pack("IIIBBH", name, 0, size, info, 0, section)

    def header(self, sections_at: int, sections: int) -> bytes:
        """Return the header of an object file whose last section has the names of sections."""
        size = 64 if self.is_64 else 52
        values = (_RELOCATABLE, self.number, 1, 0, 0, sections_at, self.flags, size, 0, 0)
        return self.ident + self.pack(
            "HHIAAAIHHHHHH", *values, self.section_size, sections, sections - 1
        )


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data.

    Args:
        output: The object file.
        code: An object file for the same machine.
        symbol: The global symbol of the data.
        pieces: The data, in order.
    """
    machine = _Machine.read(code)
    # Code reaches a large section by 64-bit addresses alone, so that it may be larger than 2 GiB.
    is_large = machine.number == _X86_64
    name, flags = (".lrodata", _ALLOC | _LARGE) if is_large else (".rodata", _ALLOC)
    # Without the note, linkers let the stack of the whole program be executable.
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
    """Return the place and the size of the data in an object file that `write_data` wrote."""
    machine = _Machine.read(path)
    word, layout = (8, "QQ") if machine.is_64 else (4, "II")
    with path.open("rb") as stream:
        # kind, machine, version, entry point and table of segments come before the table of sections
        (sections,) = machine.unpack(layout[0], stream.read(_ALIGNMENT), 24 + 2 * word)
        # the first section has no content; name, kind, flags and address come before place and size
        stream.seek(sections + machine.section_size + 8 + 2 * word)
        begin, size = machine.unpack(layout, stream.read(2 * word), 0)
    return begin, size
