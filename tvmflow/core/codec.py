"""JSON of named tuples, derived from their fields: what is written, and what may be read.

Whoever wrote the JSON may have been another version, or anybody: types are checked, fields that are
not known are left out, and those that are missing have their defaults.
"""

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from tvmflow.core.types import Json

_T = TypeVar("_T")

_UNIONS = (Union, types.UnionType)
_MAPPINGS = (dict, Mapping)
_SHOWN_NAMES = 80


def to_json(value: Any) -> Json:
    """Return a value as plain JSON: named tuples as objects, other tuples as lists."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_json(getattr(value, name)) for name in value._fields}
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: to_json(entry) for name, entry in value.items()}
    return value


def from_json(kind: type[_T], value: Json) -> _T:
    """Return the named tuple that a JSON value holds: an object, or a list of its fields in their order.

    Raises:
        ValueError: when a field is missing, or has another type; the message names it.
    """
    decoded: _T = _decode(kind, value, "")
    return decoded


def _decode(hint: Any, value: Json, where: str) -> Any:
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _decode(arguments[0], value, where)
    if origin is Literal:
        return _checked(value in arguments, value, where)
    if origin in _UNIONS:
        return _decode_union(arguments, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if (origin or hint) in _MAPPINGS:
        _checked(isinstance(value, dict), value, where)
        entry = arguments[1] if arguments else Any
        return {name: _decode(entry, inner, f"{where}.{name}") for name, inner in value.items()}
    if hasattr(hint, "_fields"):
        return _decode_fields(hint, value, where)
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return _checked(is_number, value, where)
    return _checked(type(value) is (type(None) if hint is None else hint), value, where)


def _decode_union(choices: tuple[Any, ...], value: Json, where: str) -> Any:
    problem: ValueError | None = None
    for choice in choices:
        try:
            return _decode(choice, value, where)
        except ValueError as error:
            # of `X | None`, what is wrong with an X
            problem = problem or error
    raise problem or ValueError


def _decode_tuple(entries: tuple[Any, ...], value: Json, where: str) -> tuple[Any, ...]:
    _checked(isinstance(value, (list, tuple)), value, where)
    if entries[-1] is Ellipsis:
        entries = (entries[0],) * len(value)
    _checked(len(entries) == len(value), value, where)
    pairs = enumerate(zip(entries, value, strict=True))
    return tuple(_decode(entry, inner, f"{where}.{index}") for index, (entry, inner) in pairs)


def _decode_fields(kind: Any, value: Json, where: str) -> Any:
    hints = _hints(kind)
    if isinstance(value, (list, tuple)):
        _checked(len(value) <= len(hints), value, where)
        value = dict(zip(hints, value, strict=False))
    _checked(isinstance(value, dict), value, where)
    fields = {}
    for name, hint in hints.items():
        path = f"{where}.{name}" if where else name
        if name in value:
            fields[name] = _decode(hint, value[name], path)
        elif name not in kind._field_defaults:
            raise ValueError(f"the field '{path[:_SHOWN_NAMES]}' is missing")
    return kind(**fields)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a named tuple, when the first one is read."""
    return typing.get_type_hints(kind, include_extras=True)


def _checked(is_right: bool, value: _T, where: str) -> _T:
    if not is_right:
        raise ValueError(f"the field '{where[:_SHOWN_NAMES]}' has another type")
    return value
