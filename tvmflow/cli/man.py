"""Man pages, from the same text as the help: `tvmflow(1)`, and a page for each command and subcommand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.cli.commands import COMMANDS, GROUPS, Command, load_commands
from tvmflow.cli.help import DESCRIPTION, EXAMPLES, describe, wrap
from tvmflow.cli.parser import CommandParser, list_arguments
from tvmflow.core.errors import EXIT_CODES
from tvmflow.core.version import VERSION, page_url

_NAME: Final = "tvmflow"
_WIDTH: Final = 78
_SUMMARY: Final = "build tuned, verified libraries of machine learning models"
_ESCAPES: Final = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}


def all_pages() -> dict[str, str]:
    """Return the pages of all commands, by the name of their file."""
    names = [""]
    for name in COMMANDS:
        names += dict.fromkeys([name, *(command.name for command in load_commands(name))])
    return {f"{_page_name(name)}.1": man_page(name) for name in names}


def man_page(name: str = "") -> str:
    """Return the page of a command such as `cache gc`, or without a name that of tvmflow."""
    if not name:
        lines = _overview()
    else:
        commands = {command.name: command for command in load_commands(name.split()[0])}
        lines = _command(commands[name]) if name in commands else _subcommands(name, commands)
    title = f'.TH "{_escape(_page_name(name).upper())}" "1" "" "{_escape(f"{_NAME} {VERSION}")}"'
    return "\n".join([title, ".nh", ".ad l", *lines, ""])


def _overview() -> Iterator[str]:
    yield from _head("", _SUMMARY, "COMMAND [OPTIONS] …")
    yield _text(DESCRIPTION)
    yield ".SH COMMANDS"
    for title, commands in GROUPS.items():
        yield f".SS {_escape(title)}"
        yield from _definitions({_reference(name): text for name, text in commands.items()})
    yield from _examples(EXAMPLES)
    yield ".SH EXIT STATUS"
    yield from _definitions({f"\\fB{code}\\fR": text for code, text in EXIT_CODES.items()})
    yield from _see_also([])


def _subcommands(name: str, commands: Mapping[str, Command]) -> Iterator[str]:
    yield from _head(name, COMMANDS[name], "COMMAND [OPTIONS] …")
    yield _text(COMMANDS[name])
    yield ".SH COMMANDS"
    yield from _definitions(
        {_reference(full): describe(command).summary for full, command in commands.items()}
    )
    yield from _see_also([""])


def _command(command: Command) -> Iterator[str]:
    text, parser = describe(command), CommandParser(command)
    yield from _head(command.name, text.summary, parser.synopsis)
    yield _text("\n\n".join(filter(None, [text.summary, text.details])))
    yield ".SH OPTIONS"
    for title, arguments in list_arguments(parser).items():
        yield f".SS {_escape(title)}"
        yield from _definitions({_argument(names, value): help for names, value, help in arguments})
    yield from _examples(text.examples)
    group = command.name.split()[0]
    yield from _see_also([""] if group == command.name else ["", group])


def _head(name: str, summary: str, synopsis: str) -> Iterator[str]:
    yield ".SH NAME"
    yield f"{_escape(_page_name(name))} \\- {_escape(summary.rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield f"\\fB{_escape(f'{_NAME} {name}'.strip())}\\fR {_escape(synopsis)}"
    yield ".SH DESCRIPTION"


def _text(text: str) -> str:
    """Return paragraphs with what stands between backquotes in bold."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        bold = re.sub(r"\\\(ga(.+?)\\\(ga", r"\\fB\1\\fR", _escape(paragraph))
        paragraphs.append("\n".join(map(_protect, wrap(bold, _WIDTH))))
    return "\n.PP\n".join(paragraphs)


def _definitions(rows: Mapping[str, str]) -> Iterator[str]:
    for name, text in rows.items():
        yield from (".TP", name, _text(text))


def _argument(names: tuple[str, ...], value: str) -> str:
    words = ", ".join(f"\\fB{_escape(name)}\\fR" for name in names)
    return " ".join(filter(None, [words, value and f"\\fI{_escape(value)}\\fR"]))


def _examples(examples: str) -> Iterator[str]:
    yield from (".SH EXAMPLES", ".EX")
    yield from (_protect(_escape(line)) for line in examples.splitlines())
    yield ".EE"


def _see_also(names: list[str]) -> Iterator[str]:
    yield ".SH SEE ALSO"
    yield from (f"{_reference(name)}," for name in names)
    yield _escape(page_url("cli"))


def _reference(name: str) -> str:
    return f"\\fB{_escape(_page_name(name))}\\fR(1)"


def _page_name(name: str) -> str:
    return "-".join([_NAME, *name.split()])


def _escape(text: str) -> str:
    """Return text that roff prints as it is, also where it is not ASCII."""
    ascii_text = "".join(_ESCAPES.get(character, character) for character in text)
    return "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in ascii_text)


def _protect(line: str) -> str:
    """Return a line that is no request, which begins with a dot."""
    return f"\\&{line}" if line.startswith((".", "'")) else line
