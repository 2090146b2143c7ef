"""The argparse parser of one command, made from its options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args, get_origin

from tvmflow.cli.commands import (
    Command,
    describe,
    examples_text,
    fill,
    load_all_commands,
    terminal_width,
)
from tvmflow.cli.options import Field, Options, find_field, list_fields
from tvmflow.core.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_Group = argparse._ArgumentGroup
_COMMON: Final = ("store", "json")
"""Options of nearly every command, listed last."""
_NARROW: Final = 60
_USAGES: Final = {"+": "{} …", "*": "[{} …]", "?": "[{}]"}
# An empty --remote disables the remote cache of the environment.
_MAY_BE_EMPTY: Final = ("remote_url",)
_IGNORED_VALUE: Final = re.compile(r"argument (\S+): ignored explicit argument (.*)")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = terminal_width()
        super().__init__(prog, width=width, max_help_position=8 if width < _NARROW else 26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command; a mistake is a `UsageError`."""

    def __init__(self, command: Command) -> None:
        text = describe(command)
        super().__init__(
            prog=f"tvmflow {command.name}",
            description="\n\n".join(filter(None, [text.summary, text.details])),
            epilog=examples_text(text.examples) if text.examples else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.command = command
        self._positionals.title = "arguments"
        common = argparse._ArgumentGroup(self, "common options")
        _add_arguments(self, self._optionals, common, command.options)
        _add_common(common)
        self._action_groups.append(common)
        positionals = [
            _USAGES.get(str(action.nargs), "{}").format(action.metavar or action.dest)
            for action in self._get_positional_actions()
        ]
        self.usage = " ".join([self.prog, "[OPTIONS]", *positionals]).replace("%", "%%")

    def find_group(self, title: str) -> _Group:
        """Return the group of options with a title, added if there is none."""
        titled = {group.title: group for group in self._action_groups}
        return titled.get(title) or self.add_argument_group(title)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments; options may be before, between and after positional arguments.

        Raises:
            UsageError: for a missing, invalid or unknown argument.
            SystemExit: after the help was printed.
        """
        namespace, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            from tvmflow.cli.mistakes import explain_option

            options = [word for word in unknown if word.startswith("-")]
            known = [*self._option_string_actions]
            word = (options or unknown)[0]
            raise explain_option(self.command.name, word, known, _list_commands_with)
        return namespace

    def read_options(self, namespace: argparse.Namespace) -> Options:
        """Return the options of the command from parsed arguments."""
        return _read_options(self.command.options, namespace)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; argparse would ignore a failed write."""
        (file or sys.stdout).write(self.format_help())

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a word; refuse empty words of unset variables, which would mean the current folder."""
        if not arg_string and action.dest not in _MAY_BE_EMPTY:
            raise argparse.ArgumentError(action, "must not be empty")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UsageError."""
        message = _IGNORED_VALUE.sub(r"\1 takes no value, and has \2", message)
        fix = f"`{self.usage}`; `tvmflow help {self.command.name}` lists the options"
        raise UsageError(f"{self.command.name}: {message}", fix=fix)


def _list_commands_with(option: str) -> list[str]:
    parsers = map(CommandParser, load_all_commands())
    return [parser.command.name for parser in parsers if option in parser._option_string_actions]


def _add_common(group: _Group) -> None:
    group.add_argument("-h", "--help", action="help", help="show this help")
    verbosity = group.add_mutually_exclusive_group()
    verbosity.add_argument(
        "-v",
        "--verbose",
        dest="verbosity",
        action="count",
        default=0,
        help="log to stderr why each stage runs or not; -vv logs everything, also what workers write ($TVMFLOW_LOG: debug, info, …)",
    )
    verbosity.add_argument(
        "-q",
        "--quiet",
        dest="verbosity",
        action="store_const",
        const=-1,
        help="print only problems, results that were asked for, and a line for each delivery: verdict and folder",
    )


def _add_arguments(
    parser: CommandParser, group: _Group, common: _Group, options: type[Options]
) -> None:
    """Add the arguments of options; nested options with a `TITLE` become a separate group."""
    for name, kind in list_fields(options).items():
        if field := find_field(options, name):
            _add_argument(parser, common if name in _COMMON else group, name, kind, field)
        elif _is_options(kind):
            title = getattr(kind, "TITLE", "")
            inner = parser.find_group(title) if title else group
            _add_arguments(parser, inner, common, kind)


def _add_argument(
    parser: CommandParser, group: _Group, dest: str, kind: object, field: Field
) -> None:
    details: dict[str, Any] = dict(field.details)
    name = details.pop("name", None)
    if kind is bool:
        details["action"] = "store_true"
    else:
        # The type of one value: `str` for `str`, `str | None` and `tuple[str, ...]`.
        details.setdefault("type", (*get_args(kind), kind)[0])
    if name is None:
        parser.add_argument(dest, **details)
        return
    if get_origin(kind) is tuple:
        details |= {"action": "append", "default": []}
    elif kind is not bool:
        details["default"] = field.default
    # a short name and a long one
    names = name.split() or [f"--{dest.replace('_', '-')}"]
    group.add_argument(*names, dest=dest, **details)


def _read_options(kind: type[Options], namespace: argparse.Namespace) -> Options:
    values: dict[str, object] = {}
    for name, inner in list_fields(kind).items():
        value = _read_options(inner, namespace) if _is_options(inner) else getattr(namespace, name)
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _is_options(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)
