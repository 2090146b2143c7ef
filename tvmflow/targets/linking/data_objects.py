"""Objects that hold constant data alone, in the format of the machine that they are for, written piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

from tvmflow.targets.linking import coff_data, elf_data, macho_data, wasm_data

# The first bytes of an object file -> the module that writes the format. COFF's begins with the machine.
_FORMATS: Final[dict[bytes, ModuleType]] = {
    b"\x7fELF": elf_data,
    b"\xcf\xfa\xed\xfe": macho_data,
    b"\0asm": wasm_data,
}


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data.

    Args:
        output: The object file.
        code: An object file for the same machine.
        symbol: The global symbol of the data, as C has it.
        pieces: The data, in order.
    """
    with code.open("rb") as stream:
        magic = stream.read(4)
    _FORMATS.get(magic, coff_data).write_data(output, code, symbol, pieces)
