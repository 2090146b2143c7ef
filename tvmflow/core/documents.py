"""Reader of untrusted JSON documents, with limits and typed access to fields."""

from __future__ import annotations

import json
import math
from io import BufferedReader
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from tvmflow.core.files import is_irregular, open_regular
from tvmflow.core.types import Json

_MAX_BYTES: Final = 64 << 20
_MAX_DEPTH: Final = 64
_MAX_QUOTED: Final = 80

_T = TypeVar("_T")


class Unreadable(Exception):
    """A document is invalid. The message is a reason, to be put after the document's name."""


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of limited size."""
    try:
        with open_regular(path) as file, BufferedReader(file) as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        reason = "it is not a file" if is_irregular(error) else error.strerror or str(error)
        raise Unreadable(reason) from error
    if len(content) > _MAX_BYTES:
        raise Unreadable(f"it is larger than {_MAX_BYTES >> 20} MB, the limit for documents")
    return content


def read_json(content: bytes) -> Json:
    """Return the value of a JSON text.

    Raises Unreadable if it is not JSON, nests too deeply, or is ambiguous: NaN, infinities, duplicate names.
    """
    try:
        value = json.loads(
            content, parse_constant=_reject_constant, object_pairs_hook=_unique_names
        )
    except RecursionError:
        raise Unreadable("it nests too deeply") from None
    except ValueError as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = str(error) if is_text else str(error).partition(":")[0]
        raise Unreadable(f"it is not JSON ({reason})") from None
    _check_depth(value)
    return value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _unique_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields: dict[str, Json] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{quote(name)} occurs twice")
        fields[name] = value
    return fields


def _check_depth(value: Json) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise Unreadable("it nests too deeply")


def get_field(value: Json, *path: str, of: type[_T]) -> _T:
    """Return the value at a path of names if it has the type `of`, or else an empty value of that type."""
    inner = _walk(value, path)
    return inner if isinstance(inner, of) else of()


def get_number(value: Json, *path: str) -> float | None:
    """Return the number at a path of names, or None if it is missing or not finite as a float."""
    inner = _walk(value, path)
    if isinstance(inner, bool) or not isinstance(inner, (int, float)):
        return None
    try:
        number = float(inner)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _walk(value: Json, path: tuple[str, ...]) -> Json:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def quote(value: Json) -> str:
    """Return an untrusted value for a message: quoted and of limited length."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
