"""Options of commands: frozen values that declare the arguments of a command line.

Each field is an argument, a nested group of options, or an attribute of the parsed command line (`argv`,
`verbosity`). A group with a `TITLE` gets its own heading in the help.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    TypeVar,
    get_origin,
    get_type_hints,
    overload,
)

from tvmflow.core.text import parse_age, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Any:
        """Return a decorator for type checkers, which changes nothing."""
        return lambda kind: kind


Value = TypeVar("Value")

# One day in seconds; as minutes, two months.
_MAX_DURATION: Final = 86_400.0
_MAX_PORT: Final = 65_535


# ---------------------------------------------------------------- fields of options


class Field(NamedTuple):
    """An argument: its default, its `name`, and its keyword arguments for `add_argument`."""

    default: object
    details: dict[str, Any]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options(SimpleNamespace):
    """A frozen value. Importing `dataclasses` would take longer than printing the help."""

    def __init__(self, **values: object) -> None:
        fields = ((name, find_field(type(self), name)) for name in list_fields(type(self)))
        super().__init__(**{name: field.default for name, field in fields if field} | values)

    def start_early(self) -> AbstractContextManager[None]:
        """Start slow work before modules are imported; the context ends unused work."""
        return contextlib.nullcontext()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")


_FIELDS: Final = dict[type[Options], dict[str, Any]]()


def list_fields(kind: type[Options]) -> dict[str, Any]:
    """Return the types of the fields of options, by name."""
    if kind not in _FIELDS:
        hints = get_type_hints(kind).items()
        _FIELDS[kind] = {name: h for name, h in hints if ClassVar not in (h, get_origin(h))}
    return _FIELDS[kind]


def find_field(kind: type[Options], name: str) -> Field | None:
    """Return the argument of a field, or None for nested options, `argv` and `verbosity`."""
    field = getattr(kind, name, None)
    return field if isinstance(field, Field) else None


def argument(metavar: str, text: str | None = None, nargs: str | None = None) -> Any:
    """Return the field of a positional argument."""
    details = {"metavar": metavar, "help": text, "nargs": nargs}
    # argparse would require an argument without a default.
    return Field(None, details | ({"default": None} if nargs == "*" else {}))


@overload
def option(
    metavar: str | None, text: str, *, default: Value, name: str = "", **details: object
) -> Value: ...
@overload
def option(
    metavar: str | None, text: str, *, name: str = "", **details: object
) -> Value | None: ...
def option(
    metavar: str | None, text: str, *, default: object = None, name: str = "", **details: object
) -> Any:
    """Return the field of an option with a value; an option with a tuple as type may be repeated.

    Without `metavar`, the help shows the choices. `name` replaces the name of the field. `details` are for
    `add_argument`; without `type`, the annotation of the field is used.
    """
    return Field(default, details | {"metavar": metavar, "help": text, "name": name})


def flag(text: str) -> Any:
    """Return the dataclass field of a flag: an option that takes no value."""
    return Field(False, {"help": text, "name": ""})


# ---------------------------------------------------------------- types of arguments


def _integer(what: str, minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= (maximum or int(text)):
            raise argparse.ArgumentTypeError(f"'{text}' is not a {what}")
        return int(text)

    return read


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if fits(value := float(text)):
                return value
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of {what}")

    return read


def _quantity(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return the argument type of a parser whose errors describe the expected form."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _is_duration(value: float) -> bool:
    return 0 <= value <= _MAX_DURATION


positive_int: Final = _integer("whole number from 1", 1)
port: Final = _integer(f"port from 0 to {_MAX_PORT}", 0, _MAX_PORT)
"""A TCP port; 0 means any free port."""
seconds: Final = _number(f"seconds from 0 to {_MAX_DURATION:.0f}", _is_duration)
minutes: Final = _number(f"minutes from 0 to {_MAX_DURATION:.0f}", _is_duration)
time_limit: Final = _number("seconds above 0", lambda value: 0 < value < math.inf)
days: Final = _number("days from 0", lambda value: value >= 0)
age: Final = _quantity(parse_age)
"""The seconds of an age such as `30d`, `12h`, `90min`, `2w`, or `0`."""
size: Final = _quantity(parse_size)
"""The bytes of a size such as `20GB`, `1.5GiB`, or `0`."""


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `NAME=1,3,224,224`; return the input's name and shape."""
    name, _, sizes = text.rpartition("=")
    parts = re.split(r"[,x]", sizes.strip("[]() "))
    if not name or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a shape such as data=1,3,224,224")
    return name, tuple(int(part) for part in parts)
