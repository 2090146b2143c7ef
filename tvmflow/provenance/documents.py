"""Reads documents that anybody may have written: within limits, and never further than they are what they should be."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, Final, NoReturn

from tvmflow.values import Json

_MOST_BYTES: Final = 64 << 20
_MOST_DEPTH: Final = 64
_MOST_SHOWN: Final = 80


class Unreadable(Exception):
    """Something is not what it should be. The message says why, to stand behind its name."""


def read_file(path: Path) -> bytes:
    """The content of a plain file of a sensible size. Raises Unreadable."""
    try:
        # a pipe would have us wait for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is no file")
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    if len(content) > _MOST_BYTES:
        raise Unreadable(f"it is larger than {_MOST_BYTES >> 20} MB, as no such document is")
    return content


def read_json(content: bytes) -> Json:
    """What a JSON text says. Raises Unreadable, also for what only some readers accept, or read alike."""
    try:
        value = json.loads(content, parse_constant=_no_number, object_pairs_hook=_once)
    except RecursionError:
        raise Unreadable("it nests too deeply") from None
    except ValueError as error:
        raise Unreadable(f"it is no JSON ({_short(error)})") from None
    _check_depth(value)
    return value


def _short(error: ValueError) -> str:
    return str(error).partition(":")[0] if isinstance(error, UnicodeDecodeError) else str(error)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} stands there twice")
        found[name] = value
    return found


def _check_depth(value: Json) -> None:
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Unreadable("it nests too deeply")


def at(value: Json, *path: str, of: type) -> Any:
    """What stands at a path of names, if it is of this type; else an empty one."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, of) else of()


def number_at(value: Json, *path: str) -> float | None:
    """The number at a path; None when there is none, or none that a float can hold."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Json) -> str:
    """A foreign value in a sentence: in quotes, and not at any length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
