"""The reference of all commands as a page, from the parsers of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, NamedTuple

from tvmflow.cli.commands import GROUPS, Command, describe, load_commands
from tvmflow.cli.parser import CommandParser

_INTRODUCTION: Final = """\
# Commands

All commands with all options, as `tvmflow help COMMAND` shows them. [cli.md](cli.md) describes output, exit codes and what several commands have in common; `-h`, `-v` and `-q` are options of every command.
"""
_COMMON: Final = ("-h", "-v", "-q")


class Argument(NamedTuple):
    """An argument for documentation: its names such as `--jobs`, its value, and its help."""

    names: tuple[str, ...]
    value: str
    text: str


def _list_arguments(parser: CommandParser) -> dict[str, list[Argument]]:
    """Return the arguments of a command by the title of their group."""
    groups = {
        group.title or "options": [_describe_argument(action) for action in group._group_actions]
        for group in parser._action_groups
    }
    return {title: arguments for title, arguments in groups.items() if arguments}


def _describe_argument(action: argparse.Action) -> Argument:
    choices = [str(choice) for choice in action.choices or ()]
    value = str(action.metavar or ("{" + ",".join(choices) + "}" if choices else action.dest))
    text = (action.help or "").replace("%%", "%")
    if choices and not all(choice in text for choice in choices):
        text += f" (one of {', '.join(choices)})"
    return Argument(tuple(action.option_strings), "" if action.nargs == 0 else value, text)


def commands_page() -> str:
    """Return the reference of all commands as Markdown."""
    sections = [
        f"## {group}\n\n" + "\n".join(map(_section, commands))
        for group, names in GROUPS.items()
        for commands in [[command for name in names for command in load_commands(name)]]
    ]
    return "\n".join([_INTRODUCTION, *sections])


def _section(command: Command) -> str:
    parser = CommandParser(command)
    text = describe(command)
    examples = f"```text\n{text.examples}\n```" if text.examples else ""
    tables = [_table(title, rows) for title, rows in _list_arguments(parser).items()]
    usage = f"`{(parser.usage or '').replace('%%', '%')}`"
    parts = [f"### `tvmflow {command.name}`", text.summary, usage, text.details, *tables, examples]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, arguments: Sequence[Argument]) -> str:
    rows = [_row(argument) for argument in arguments if not {*_COMMON} & {*argument.names}]
    return "\n".join([f"| {title} | meaning |", "|---|---|", *rows]) if rows else ""


def _row(argument: Argument) -> str:
    usage = " ".join(filter(None, [", ".join(argument.names), argument.value]))
    return f"| `{_escape(usage)}` | {_escape(argument.text)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
