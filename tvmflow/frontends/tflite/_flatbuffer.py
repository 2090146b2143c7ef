"""Reads FlatBuffers: tables whose fields are found by their number, vectors, strings.

The format is that of https://flatbuffers.dev/internals. Nothing is read outside the file, whatever stands in it.
Tables and vectors may overlap, and one may be named a hundred thousand times: what is read of all of them together is
limited by the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Final

from tvmflow.frontends.base import NotAModel

Buffer = bytes | mmap.mmap

_MAX_TEXT: Final = 1 << 16
# What converters write is read once or twice.
_READ_SHARE: Final = 4
_SMALLEST_BUDGET: Final = 1 << 16
# An empty table, and its place in a vector or in another table.
_TABLE_BYTES: Final = 8


class Budget:
    """The bytes of a file that may be read as tables, vectors and strings, each as often as it is read."""

    def __init__(self, data: Buffer) -> None:
        self._limit = self._left = max(_READ_SHARE * len(data), _SMALLEST_BUDGET)

    def spend(self, size: int) -> None:
        """Count bytes that are read.

        Raises:
            NotAModel: when they are too many.
        """
        self._left -= size
        if self._left < 0:
            raise NotAModel(
                f"it names the same tables, lists or names so often that they are more than {self._limit:,} bytes, "
                f"{_READ_SHARE} times its size, which no converter does"
            )


class Table:
    """A table of a FlatBuffer.

    Args:
        data: The file.
        position: Where the table begins.
        budget: How much may be read of the file.
    """

    def __init__(self, data: Buffer, position: int, budget: Budget) -> None:
        budget.spend(_TABLE_BYTES)
        self._data = data
        self._position = position
        self._budget = budget
        self._fields = position - int(_read(data, position, "i"))
        self._size = int(_read(data, self._fields, "H"))

    @classmethod
    def root(cls, data: Buffer, budget: Budget) -> Table:
        """Return the table that a file begins with."""
        return cls(data, int(_read(data, 0, "I")), budget)

    def scalar(self, number: int, code: str, default: float) -> float:
        """Return a number of the type `code`, as module `struct` names it."""
        place = self._place(number)
        return default if place is None else _read(self._data, place, code)

    def integer(self, number: int, code: str, default: int = 0) -> int:
        """Return an integer of the type `code`, as module `struct` names it."""
        return int(self.scalar(number, code, default))

    def table(self, number: int) -> Table | None:
        """Return a table, or None without one."""
        place = self._place(number)
        return None if place is None else Table(self._data, self._target(place), self._budget)

    def tables(self, number: int, limit: int) -> Iterator[Table]:
        """Give the tables of a vector, which has at most `limit`."""
        start, count = self.span(number, 4)
        if count > limit:
            raise NotAModel(f"a list in it has {count:,} entries, and the limit is {limit:,}")
        for index in range(count):
            yield Table(self._data, self._target(start + 4 * index), self._budget)

    def numbers(self, number: int, code: str, limit: int) -> tuple[float, ...]:
        """Return a vector of at most `limit` numbers of the type `code`."""
        size = struct.calcsize(code)
        start, count = self.span(number, size)
        if count > limit:
            raise NotAModel(f"a list in it has {count:,} numbers, and the limit is {limit:,}")
        self._budget.spend(count * size)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def integers(self, number: int, code: str, limit: int) -> tuple[int, ...]:
        """Return a vector of at most `limit` integers of the type `code`."""
        return tuple(map(int, self.numbers(number, code, limit)))

    def text(self, number: int) -> str:
        """Return a string; empty without one."""
        start, count = self.span(number, 1)
        if count > _MAX_TEXT:
            raise NotAModel(f"a name in it has {count:,} characters")
        self._budget.spend(count)
        return bytes(self._data[start : start + count]).decode("utf-8", "replace")

    def span(self, number: int, size: int) -> tuple[int, int]:
        """Return where the entries of a vector begin, each of `size` bytes, and their number."""
        place = self._place(number)
        if place is None:
            return 0, 0
        start = self._target(place)
        count = int(_read(self._data, start, "I"))
        if start + 4 + count * size > len(self._data):
            raise NotAModel("it is incomplete")
        return start + 4, count

    def _place(self, number: int) -> int | None:
        """Return where a field is, or None for one that has its default."""
        entry = 4 + 2 * number
        if entry + 2 > self._size:
            return None
        offset = int(_read(self._data, self._fields + entry, "H"))
        return self._position + offset if offset else None

    def _target(self, place: int) -> int:
        return place + int(_read(self._data, place, "I"))


def _read(data: Buffer, position: int, code: str) -> float:
    if position < 0 or position + struct.calcsize(code) > len(data):
        raise NotAModel("it is incomplete")
    value: float = struct.unpack_from(f"<{code}", data, position)[0]
    return value
