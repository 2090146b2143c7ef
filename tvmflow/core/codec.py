"""JSON as values of types: read with checks, as another version may have recorded it, and written."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast

from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Json

_T = TypeVar("_T")
_Reader = Callable[[Json], Any]

# The range of 64-bit counters, more than any measured quantity: sums and products of a few such values are finite.
_MAX_INTEGER: Final = 2**63
_MAX_NUMBER: Final = 1e100
_MAX_DIGITS: Final = 18
_NO_NUMBERS: Final = ("inf", "-inf", "nan")
_NOUNS: Final[Mapping[type, str]] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a text",
    type(None): "null",
}


class Mismatch(ValueError):
    """JSON that does not match a type: where, and the problem."""

    def within(self, name: str) -> Mismatch:
        """Return the same for the value that has it under a name."""
        return Mismatch(f"{excerpt(name)}: {self}")


def from_json(kind: type[_T], value: Json) -> _T:
    """Return JSON as a value of a type; unknown fields are dropped. Mismatch if it is not of this type.

    A type is a NamedTuple, whose fields without a default are required, a TypedDict, text, a number, a literal, Any, or
    a union, tuple, list or mapping of types. Numbers must be finite; a `float | str` reads others as text.
    """
    return cast(_T, _reader_for(cast(Any, kind))(value))


def to_json(value: Any) -> Json:
    """Return a value of such a type as JSON; one with a method `to_json` as that returns it."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        own = getattr(value, "to_json", value._asdict)()
        return {name: to_json(inner) for name, inner in own.items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, (tuple, list)) else value


def without_empty(fields: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
    """Return fields without those of some names that are empty."""
    left_out = {name for name in names if not fields[name]}
    return {name: value for name, value in fields.items() if name not in left_out}


@functools.cache
def _reader_for(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin in (Union, types.UnionType):
        return _read_any_number if set(arguments) == {float, str} else _union_reader(arguments)
    if origin is Literal:
        return _choice_reader(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed_tuple_reader(arguments)
    if origin in (tuple, list):
        return _list_reader(origin, _reader_for(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(*arguments)
    if origin is Annotated:
        return _reader_for(arguments[0])
    hints = typing.get_type_hints(kind)
    if typing.is_typeddict(kind):
        return _object_reader(dict, hints, hints.keys() - kind.__required_keys__)
    return _object_reader(kind, hints, kind._field_defaults.keys())


def _wrong(value: Json, expected: str) -> Mismatch:
    noun = _NOUNS.get(type(value), type(value).__name__)
    return Mismatch(f"{noun} instead of {expected}")


def _read_scalar(kind: type) -> _Reader:
    def read(value: Json) -> Json:
        if not isinstance(value, kind):
            raise _wrong(value, _NOUNS[kind])
        return value

    return read


def _read_integer(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(value, "an integer")
    if abs(value) > _MAX_INTEGER:
        raise Mismatch("an integer that is too large")
    return value


def _read_number(value: Json) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(value, "a number")
    if not abs(value) <= _MAX_NUMBER:
        raise Mismatch("a number that is too large, or none")
    return value


def _read_any_number(value: Json) -> float | str:
    """Return a number of any size; one that JSON lacks as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value in _NO_NUMBERS else _read_number(value)


_SCALARS: Final[Mapping[Any, _Reader]] = {
    Any: lambda value: value,
    bool: _read_scalar(bool),
    float: _read_number,
    int: _read_integer,
    str: _read_scalar(str),
    type(None): _read_scalar(type(None)),
}


def _union_reader(kinds: tuple[Any, ...]) -> _Reader:
    is_nullable = type(None) in kinds
    readers = [_reader_for(kind) for kind in kinds if kind is not type(None)]

    def read(value: Json) -> Any:
        if value is None and is_nullable:
            return None
        for reader in readers[:-1]:
            try:
                return reader(value)
            except Mismatch:
                continue
        return readers[-1](value)

    return read


def _choice_reader(choices: tuple[Json, ...]) -> _Reader:
    def read(value: Json) -> Json:
        if value not in choices:
            raise _wrong(value, f"one of {', '.join(map(repr, choices))}")
        return value

    return read


def _list_reader(kind: type, read_item: _Reader) -> _Reader:
    def read(value: Json) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, "a list")
        return kind(map(read_item, value))

    return read


def _fixed_tuple_reader(kinds: tuple[Any, ...]) -> _Reader:
    readers = tuple(map(_reader_for, kinds))

    def read(value: Json) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(readers):
            raise _wrong(value, f"a list of {len(readers)}")
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _mapping_reader(key_kind: Any, value_kind: Any) -> _Reader:
    read_value = _reader_for(value_kind)
    read_key = _read_digits if key_kind is int else _reader_for(key_kind)

    def read(value: Json) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        return {read_key(name): _read_field(name, read_value, item) for name, item in value.items()}

    return read


def _read_digits(name: Json) -> int:
    text = str(name)
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise Mismatch(f"{excerpt(text)} is not an integer")
    return int(text)


def _object_reader(
    kind: Callable[..., Any], hints: Mapping[str, Any], optional: Iterable[str]
) -> _Reader:
    readers = {name: _reader_for(hint) for name, hint in hints.items()}
    required = readers.keys() - set(optional)

    def read(value: Json) -> Any:
        is_list = kind is not dict and isinstance(value, (list, tuple))
        if is_list and len(value) <= len(readers):
            value = dict(zip(readers, value, strict=False))
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        if missing := sorted(required - value.keys()):
            raise Mismatch(f"{', '.join(missing)} missing")
        return kind(
            **{
                name: _read_field(name, reader, value[name])
                for name, reader in readers.items()
                if name in value
            }
        )

    return read


def _read_field(name: Any, reader: _Reader, value: Json) -> Any:
    try:
        return reader(value)
    except Mismatch as error:
        raise error.within(str(name)) from None
