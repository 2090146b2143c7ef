"""Commands: functions whose typed options are, field by field, the arguments of their command line."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from tvmflow.core.quantities import parse_age, parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Options = TypeVar("Options", bound="DataclassInstance")
Value = TypeVar("Value")

_MAX_SECONDS: Final = 86_400.0
_MAX_PORT: Final = 65_535


# ---------------------------------------------------------------- fields of options


def argument(metavar: str, text: str | None = None, nargs: str | None = None) -> Any:
    """Return the field of a positional argument."""
    return dataclasses.field(metadata={"metavar": metavar, "help": text, "nargs": nargs})


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
) -> object:
    """Return the field of an option that takes a value; one that is a tuple may be repeated.

    Args:
        metavar: The name of the value in the help; None to show the choices.
        text: The help.
        default: The value without the option.
        name: The option, where it is not named as the field.
        details: Further arguments of `add_argument`; without `type`, the annotation of the field is used.
    """
    details |= {"metavar": metavar, "help": text, "name": name}
    return dataclasses.field(default=default, metadata=details)


def flag(text: str) -> bool:
    """Return the field of an option without a value."""
    return dataclasses.field(default=False, metadata={"help": text, "name": ""})


# ---------------------------------------------------------------- commands


class Invocation(NamedTuple):
    """A command with its options.

    Attributes:
        run: Runs the command and returns its exit code.
        verbosity: -1 for `-q`, 0, 1 for `-v`, 2 for `-vv`.
    """

    run: Callable[[], int]
    verbosity: int


def add_command(commands: Subparsers, name: str, run: Callable[[Options], int]) -> None:
    """Add a command to the command line.

    Args:
        commands: Where commands, or sub-commands of one, are added.
        name: The name of the command.
        run: Runs the command and returns its exit code. Its docstring is the help. Its parameter `options`
            is a frozen dataclass: each field is an argument, again such a dataclass, or an attribute of
            the parsed command line (`argv`, `verbosity`).
    """
    summary = inspect.getdoc(run)
    options = get_type_hints(inspect.unwrap(run))["options"]
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(run=lambda namespace: run(_read_options(options, namespace)))
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument(
        "-v",
        dest="verbosity",
        action="count",
        default=0,
        help="log decisions with their reasons to stderr; -vv logs everything ($TVMFLOW_LOG: debug, info, …)",
    )
    verbosity.add_argument(
        "-q",
        dest="verbosity",
        action="store_const",
        const=-1,
        help="show only problems and the summary of a run",
    )
    _add_arguments(parser, options)


def _add_arguments(parser: argparse.ArgumentParser, options: type[DataclassInstance]) -> None:
    types = get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.metadata:
            _add_argument(parser, field.name, types[field.name], field)
        elif dataclasses.is_dataclass(types[field.name]):
            _add_arguments(parser, types[field.name])


def _add_argument(
    parser: argparse.ArgumentParser, dest: str, kind: object, field: dataclasses.Field[object]
) -> None:
    details = dict(field.metadata)
    name = details.pop("name", None)
    if kind is bool:
        details["action"] = "store_true"
    else:
        # The type of one value: `str` of `str`, of `str | None` and of `tuple[str, ...]`.
        details.setdefault("type", (*get_args(kind), kind)[0])
    if name is None:
        parser.add_argument(dest, **details)
        return
    if get_origin(kind) is tuple:
        details |= {"action": "append", "default": []}
    elif kind is not bool:
        details["default"] = field.default
    parser.add_argument(name or f"--{dest.replace('_', '-')}", dest=dest, **details)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Invocation:
    """Return the command that a command line names.

    Raises:
        SystemExit: after argparse has printed help, the version, or what is wrong.
    """
    namespace = parser.parse_args(argv)
    namespace.argv = list(argv)
    return Invocation(lambda: int(namespace.run(namespace)), namespace.verbosity)


def _read_options(kind: type[Options], namespace: argparse.Namespace) -> Options:
    types = get_type_hints(kind)
    values: dict[str, object] = {}
    for field in dataclasses.fields(kind):
        if not field.metadata and dataclasses.is_dataclass(types[field.name]):
            values[field.name] = _read_options(types[field.name], namespace)
        else:
            value = getattr(namespace, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


# ---------------------------------------------------------------- types of arguments


def positive_int(text: str) -> int:
    """Return a whole number from 1.

    Raises:
        argparse.ArgumentTypeError: for any other text, as for all functions below.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1")
    return int(text)


def port(text: str) -> int:
    """Return a TCP port; 0 means any free port."""
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port from 0 to {_MAX_PORT}")
    return int(text)


def seconds(text: str) -> float:
    """Return a duration in seconds, at most a day."""
    value = _number(text)
    if value is None or not 0 <= value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a number of seconds from 0 to {_MAX_SECONDS:.0f}"
        )
    return value


def days(text: str) -> float:
    """Return a duration in days."""
    value = _number(text)
    if value is None or not value >= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of days from 0")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def age(text: str) -> float:
    """Return the seconds of an age such as `30d`, `12h`, `90min`, `2w`, or `0`."""
    try:
        return parse_age(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Return the bytes of a size such as `20GB`, `1.5GiB`, or `0`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
