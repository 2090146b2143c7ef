"""Typed values from JSON, and back; unknown fields, as of other versions, are dropped."""

from __future__ import annotations

import contextlib
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast

from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Json

_T = TypeVar("_T")
_Reader = Callable[[Json], Any]

# Limits above any measured quantity, so that sums and products of a few values stay finite.
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
    """JSON that does not match a type; the message states the path and the problem."""

    def within(self, name: str) -> Mismatch:
        """Return the same problem with a field name put before its path."""
        return Mismatch(f"{excerpt(name)}: {self}")


def from_json(kind: type[_T], value: Json) -> _T:
    """Convert JSON to a value of a type; drop unknown fields. Raises Mismatch for other types.

    Types are NamedTuple (fields without a default are required), TypedDict, str, bool, int, float, Literal, Any, and
    unions, tuples, lists and mappings of these. Numbers must be finite; `float | str` reads infinities and NaN as text.
    """
    return cast(_T, _reader_for(cast(Any, kind))(value))


_OMITTED: Final[dict[type, tuple[str, ...]]] = {}


def omits_empty(*names: str) -> Callable[[_T], _T]:
    """Return a class decorator for a NamedTuple: these fields are left out of its JSON if they are empty."""

    def decorate(kind: _T) -> _T:
        _OMITTED[cast(type, kind)] = names
        return kind

    return decorate


def to_json(value: Any) -> Json:
    """Convert a value to JSON, by its method `to_json` if it has one."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        own = getattr(value, "to_json", value._asdict)()
        own = without_empty(own, _OMITTED.get(type(value), ()))
        return {name: to_json(inner) for name, inner in own.items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, (tuple, list)) else value


def without_empty(fields: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
    """Return fields without empty ones among `names`."""
    left_out = {name for name in names if not fields[name]}
    return {name: value for name, value in fields.items() if name not in left_out}


@functools.cache
def _reader_for(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    if origin is Literal:
        return partial(_read_choice, arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return partial(_read_fixed_tuple, tuple(map(_reader_for, arguments)))
    if origin in (tuple, list):
        return partial(_read_list, origin, _reader_for(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        key_kind, value_kind = arguments
        read_key = _read_digits if key_kind is int else _reader_for(key_kind)
        return partial(_read_mapping, read_key, _reader_for(value_kind))
    if origin is Annotated:
        return _reader_for(arguments[0])
    readers = {name: _reader_for(hint) for name, hint in typing.get_type_hints(kind).items()}
    if typing.is_typeddict(kind):
        return partial(_read_object, dict, readers, kind.__required_keys__)
    return partial(_read_object, kind, readers, readers.keys() - kind._field_defaults)


def _wrong(value: Json, expected: str) -> Mismatch:
    noun = _NOUNS.get(type(value), type(value).__name__)
    return Mismatch(f"{noun} instead of {expected}")


def _read_scalar(kind: type, value: Json) -> Json:
    if not isinstance(value, kind):
        raise _wrong(value, _NOUNS[kind])
    return value


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
        raise Mismatch("a number that is too large or not finite")
    return value


def _read_any_number(value: Json) -> float | str:
    """Return a finite number, or NaN and infinities as text, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value in _NO_NUMBERS else _read_number(value)


_SCALARS: Final[Mapping[Any, _Reader]] = {
    Any: lambda value: value,
    float: _read_number,
    int: _read_integer,
    **{kind: partial(_read_scalar, kind) for kind in (bool, str, type(None))},
}


def _union_reader(kinds: tuple[Any, ...]) -> _Reader:
    if set(kinds) == {float, str}:
        return _read_any_number
    readers = [_reader_for(kind) for kind in kinds if kind is not type(None)]
    return partial(_read_union, readers, type(None) in kinds)


def _read_union(readers: Sequence[_Reader], is_nullable: bool, value: Json) -> Any:
    if value is None and is_nullable:
        return None
    for reader in readers[:-1]:
        with contextlib.suppress(Mismatch):
            return reader(value)
    return readers[-1](value)


def _read_choice(choices: tuple[Json, ...], value: Json) -> Json:
    if value not in choices:
        raise _wrong(value, f"one of {', '.join(map(repr, choices))}")
    return value


def _read_list(kind: type, read_item: _Reader, value: Json) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong(value, "a list")
    return kind(map(read_item, value))


def _read_fixed_tuple(readers: tuple[_Reader, ...], value: Json) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != len(readers):
        raise _wrong(value, f"a list of {len(readers)}")
    return tuple(reader(item) for reader, item in zip(readers, value, strict=True))


def _read_mapping(read_key: _Reader, read_value: _Reader, value: Json) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, "an object")
    return {read_key(name): _read_field(name, read_value, item) for name, item in value.items()}


def _read_digits(name: Json) -> int:
    text = str(name)
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise Mismatch(f"{excerpt(text)} is not an integer")
    return int(text)


def _read_object(
    kind: Callable[..., Any],
    readers: Mapping[str, _Reader],
    required: Collection[str],
    value: Json,
) -> Any:
    is_list = kind is not dict and isinstance(value, (list, tuple))
    if is_list and len(value) <= len(readers):
        value = dict(zip(readers, value, strict=False))
    if not isinstance(value, Mapping):
        raise _wrong(value, "an object")
    if missing := sorted(name for name in required if name not in value):
        raise Mismatch(f"{', '.join(missing)} missing")
    fields = {
        name: _read_field(name, reader, value[name])
        for name, reader in readers.items()
        if name in value
    }
    return kind(**fields)


def _read_field(name: Any, reader: _Reader, value: Json) -> Any:
    try:
        return reader(value)
    except Mismatch as error:
        raise error.within(str(name)) from None
