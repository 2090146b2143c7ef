"""Where two files differ that should be equal: the first place, named as whoever looks for the cause needs it."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

_AR: Final = b"!<arch>\n"
_AR_HEADER: Final = 60
_DEEPEST: Final = 5


class Difference(NamedTuple):
    """The path to the first difference, the outermost first: members, a section, a symbol, an offset."""

    path: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.path)


def first_difference(one: bytes, two: bytes, depth: int = 0) -> Difference | None:
    """Where the contents part; None when they are equal.

    Archives (zip, tar, ar) are looked into, ELF files are told by section and symbol, JSON by path,
    safetensors by tensor, text by line, and everything else by the offset of the first byte.
    """
    if one == two:
        return None
    for looks_like, look in _LOOKS:
        if depth < _DEEPEST and looks_like(one) and looks_like(two):
            try:
                found = look(one, two, depth)
            except Exception:
                # a file of that kind that its reader cannot read is told by its bytes
                continue
            if found is not None:
                return Difference(found)
    return Difference((_by_offset(one, two),))


_Path = tuple[str, ...]


def _by_offset(one: bytes, two: bytes) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    sizes = f" ({len(one):,} and {len(two):,} bytes)" if len(one) != len(two) else ""
    if at is None:
        return f"one ends after {min(len(one), len(two)):,} bytes{sizes}"
    return f"byte {at:,}: {one[at]:#04x} and {two[at]:#04x}{sizes}"


# ---------------------------------------------------------------- archives


def _members(
    one: list[tuple[str, str, bytes]], two: list[tuple[str, str, bytes]], depth: int
) -> _Path | None:
    """The first of the members `(name, everything else about it, content)` that differs."""
    names = [[name for name, _, _ in each] for each in (one, two)]
    if names[0] != names[1]:
        only = [name for name in names[0] + names[1] if (name in names[0]) != (name in names[1])]
        return (f"only one has {only[0]}" if only else "the members stand in another order",)
    for (name, about, content), (_, other_about, other) in zip(one, two, strict=True):
        inner = first_difference(content, other, depth + 1)
        if inner is not None:
            return (name, *inner.path)
        if about != other_about:
            return (name, f"{about} and {other_about}")
    return None


def _zip(one: bytes, two: bytes, depth: int) -> _Path | None:
    def members(content: bytes) -> list[tuple[str, str, bytes]]:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return [
                (
                    info.filename,
                    f"time {info.date_time}, mode {info.external_attr >> 16:o}",
                    archive.read(info),
                )
                for info in archive.infolist()
            ]

    return _members(members(one), members(two), depth)


def _tar(one: bytes, two: bytes, depth: int) -> _Path | None:
    def members(content: bytes) -> list[tuple[str, str, bytes]]:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return [
                (
                    info.name,
                    f"time {info.mtime}, mode {info.mode:o}, owner {info.uid}:{info.gid}",
                    archive.extractfile(info).read() if info.isfile() else b"",  # type: ignore[union-attr]
                )
                for info in archive.getmembers()
            ]

    return _members(members(one), members(two), depth)


def _ar(one: bytes, two: bytes, depth: int) -> _Path | None:
    def members(content: bytes) -> list[tuple[str, str, bytes]]:
        found, at = [], len(_AR)
        while at + _AR_HEADER <= len(content):
            header = content[at : at + _AR_HEADER].decode("latin-1")
            size = int(header[48:58])
            body = content[at + _AR_HEADER : at + _AR_HEADER + size]
            found.append((header[:16].strip(), f"header {header[16:48].split()}", body))
            at += _AR_HEADER + size + size % 2
        return found

    return _members(members(one), members(two), depth)


# ---------------------------------------------------------------- ELF


class _Section(NamedTuple):
    name: str
    number: int
    data: bytes


def _elf(one: bytes, two: bytes, depth: int) -> _Path | None:
    first, second = _sections(one), _sections(two)
    # code and data before tables, which follow from them
    order = sorted(
        first, key=lambda name: (not name.startswith((".text", ".rodata", ".data")), name)
    )
    for name in order:
        if name not in second:
            return (f"only one has the section {name}",)
        a, b = first[name], second[name]
        if a.data != b.data:
            return (f"section {name}", *_symbol(one, a, b), _by_offset(a.data, b.data))
    missing = [name for name in second if name not in first]
    return (f"only one has the section {missing[0]}",) if missing else None


def _sections(content: bytes) -> dict[str, _Section]:
    from elftools.elf.elffile import ELFFile

    found: dict[str, _Section] = {}
    for index, section in enumerate(ELFFile(io.BytesIO(content)).iter_sections()):
        name = section.name if section.name not in found else f"{section.name}#{index}"
        data = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
        found[name] = _Section(name, index, data)
    return found


def _symbol(content: bytes, a: _Section, b: _Section) -> Iterator[str]:
    """`symbol NAME` for the one in which the first difference of two sections lies."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    at = next(
        (i for i, (x, y) in enumerate(zip(a.data, b.data, strict=False)) if x != y), len(a.data)
    )
    file = ELFFile(io.BytesIO(content))
    base = file.get_section(a.number)["sh_addr"]
    best: tuple[int, str] | None = None
    for table in file.iter_sections():
        for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
            if symbol["st_shndx"] != a.number or not symbol.name:
                continue
            start = symbol["st_value"] - base
            if start <= at and (best is None or start >= best[0]):
                best = (start, symbol.name)
    if best:
        yield f"symbol {best[1]}"


# ---------------------------------------------------------------- texts and tensors


def _json(one: bytes, two: bytes, depth: int) -> _Path | None:
    place = _json_place(json.loads(one), json.loads(two), "$")
    return (place,) if place else None


def _json_place(one: Any, two: Any, path: str) -> str:
    if type(one) is type(two) and isinstance(one, dict):
        for name in one:
            if name not in two:
                return f"only one has {path}.{name}"
            found = _json_place(one[name], two[name], f"{path}.{name}")
            if found:
                return found
        more = [name for name in two if name not in one]
        return f"only one has {path}.{more[0]}" if more else ""
    if type(one) is type(two) and isinstance(one, list):
        for index, (a, b) in enumerate(zip(one, two, strict=False)):
            found = _json_place(a, b, f"{path}[{index}]")
            if found:
                return found
        return f"{path} has {len(one)} and {len(two)} entries" if len(one) != len(two) else ""
    return "" if one == two else f"{path}: {_short(one)} and {_short(two)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensors(one: bytes, two: bytes, depth: int) -> _Path | None:
    headers = [json.loads(each[8 : 8 + int.from_bytes(each[:8], "little")]) for each in (one, two)]
    starts = [8 + int.from_bytes(each[:8], "little") for each in (one, two)]
    for name in headers[0]:
        if name not in headers[1]:
            return (f"only one has the tensor {name}",)
        about = [each[name] for each in headers]
        if about[0] != about[1]:
            return (f"tensor {name}", f"{_short(about[0])} and {_short(about[1])}")
        if name != "__metadata__":
            low, high = about[0]["data_offsets"]
            a, b = (x[s + low : s + high] for x, s in zip((one, two), starts, strict=True))
            if a != b:
                return (f"tensor {name}", _by_offset(a, b))
    return None


def _text(one: bytes, two: bytes, depth: int) -> _Path | None:
    lines = [each.decode().split("\n") for each in (one, two)]
    pairs = enumerate(zip(*lines, strict=False), 1)
    at = next((number for number, (a, b) in pairs if a != b), min(map(len, lines)) + 1)
    return (f"line {at}",)


def _is_tar(content: bytes) -> bool:
    return content[:2] == b"\x1f\x8b" or content[257:262] == b"ustar"


def _is_tensors(content: bytes) -> bool:
    length = int.from_bytes(content[:8], "little")
    return 2 <= length <= len(content) - 8 and content[8:9] == b"{"


def _is_text(content: bytes) -> bool:
    return b"\0" not in content[:4096]


_LOOKS: Final[
    tuple[tuple[Callable[[bytes], bool], Callable[[bytes, bytes, int], _Path | None]], ...]
] = (
    (lambda content: content[:4] == b"\x7fELF", _elf),
    (lambda content: content[:4] == b"PK\x03\x04", _zip),
    (lambda content: content[: len(_AR)] == _AR, _ar),
    (_is_tar, _tar),
    (lambda content: content[:1] in (b"{", b"["), _json),
    (_is_tensors, _tensors),
    (_is_text, _text),
)
