"""Objects that hold constant data alone, in the format of the machine that they are for, written piece by piece, and read again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from tvmflow.targets.linking import coff, elf, macho, wasm


class _DataFormat(Protocol):
    """A module that writes and reads objects of one format, as the functions of this one say."""

    def write_data(
        self, output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]
    ) -> None:
        """Write an object file with constant data."""

    def find_data(self, path: Path) -> tuple[int, int]:
        """Return the place and the size of the data."""
        ...


# The first bytes of an object file -> the module of the format. COFF's begins with the machine.
_FORMATS: Final[dict[bytes, _DataFormat]] = {
    b"\x7fELF": elf,
    b"\xcf\xfa\xed\xfe": macho,
    b"\0asm": wasm,
}


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data.

    Args:
        output: The object file.
        code: An object file for the same machine.
        symbol: The global symbol of the data, as C has it.
        pieces: The data, in order.
    """
    _format_of(code).write_data(output, code, symbol, pieces)


def find_data(path: Path) -> tuple[int, int]:
    """Return the place and the size of the data in an object file that `write_data` wrote."""
    return _format_of(path).find_data(path)


def _format_of(path: Path) -> _DataFormat:
    """Return the module that writes and reads the format of an object file."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    return _FORMATS.get(magic, coff)
