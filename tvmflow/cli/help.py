"""Help: the overview of all commands, and text that fits the width of a terminal.

`tvmflow --help` imports this module and little else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tvmflow.cli.commands import COMMANDS, GROUPS, Command
from tvmflow.core.errors import EXIT_CODES
from tvmflow.core.terminal import find_width
from tvmflow.core.version import VERSION

_DEFAULT_WIDTH: Final = 80
_MIN_WIDTH: Final = 30
_MAX_WIDTH: Final = 100
_NARROW: Final = 60
_SECTIONS: Final = ("Args:", "Raises:", "Returns:", "Examples:")

DESCRIPTION: Final = (
    "From a trained model to tuned, verified, packaged libraries, redoing only what a change makes "
    "necessary."
)
EXAMPLES: Final = """\
# a library from a model; or a recipe, to change it
tvmflow build net.onnx
tvmflow init net.onnx
# what would run, and why
tvmflow plan net.tvmflow.yaml
# run it: verified libraries are in dist/
tvmflow run net.tvmflow.yaml
# use one
tvmflow run-model dist/net/host/net.tvmflow"""


class CommandText(NamedTuple):
    """The docstring of a command in its parts: the first sentence, details, and examples."""

    summary: str
    details: str
    examples: str


def describe(command: Command) -> CommandText:
    """Return the help of a command, which is the docstring of its options."""
    return split_docstring(command.options.__doc__ or "")


def split_docstring(docstring: str) -> CommandText:
    """Return the parts of a command's docstring that are for users."""
    sections = {"": list[str]()}
    name = ""
    for line in docstring.splitlines():
        if line.strip() in _SECTIONS:
            name = line.strip()
        sections.setdefault(name, []).append(line)
    summary, *paragraphs = "\n".join(sections[""]).strip().split("\n\n")
    examples = [line.strip() for line in sections.get("Examples:", [])[1:] if line.strip()]
    joined = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return CommandText(" ".join(summary.split()), "\n\n".join(joined), "\n".join(examples))


def terminal_width() -> int:
    """Return the width for help: that of the terminal, within limits; 80 without a terminal."""
    width = find_width()
    return max(_MIN_WIDTH, min(width or _DEFAULT_WIDTH, _MAX_WIDTH))


def fill(text: str, width: int, indent: str = "") -> str:
    """Wrap each line of a text; indented lines hold commands, and only their comments are wrapped."""
    lines: list[str] = []
    for line in text.splitlines():
        content = line.lstrip()
        margin = indent + line[: len(line) - len(content)]
        if content.startswith("# ") and line != content:
            lines += wrap(content[2:], width - len(margin) - 2, f"{margin}# ")
        elif line != content:
            lines.append(margin + content)
        else:
            lines += wrap(content, width - len(margin), margin) or [""]
    return "\n".join(lines)


def wrap(text: str, width: int, margin: str = "") -> list[str]:
    """Return the lines of a paragraph, each `margin` and at most `width` characters where words allow it."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [margin + line for line in lines]


def table(rows: Mapping[str, str], width: int, column: int = 0) -> Iterator[str]:
    """Yield the lines of names with their descriptions; on a narrow terminal, these are below the names."""
    column = column or 4 + max(map(len, rows))
    for name, text in rows.items():
        if width < _NARROW:
            yield f"  {name}"
            yield from wrap(text, width - 6, " " * 6)
            continue
        first, *rest = wrap(text, width - column)
        yield f"  {name:<{column - 2}}{first}"
        yield from (" " * column + line for line in rest)


def examples_text(examples: str) -> str:
    """Return the section of a help with examples."""
    return "examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines())


def overview() -> str:
    """Return the help of `tvmflow` itself: the commands in their groups."""
    width = terminal_width()
    lines = [
        f"tvmflow {VERSION}",
        *wrap(DESCRIPTION, width),
        "",
        "usage: tvmflow COMMAND [OPTIONS] …",
    ]
    column = 4 + max(map(len, COMMANDS))
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *table(commands, width, column)]
    lines += ["", fill(examples_text(EXAMPLES), width)]
    lines += ["", "exit codes:", *table({str(c): text for c, text in EXIT_CODES.items()}, width)]
    more = "`tvmflow help COMMAND` shows the options of a command, with examples."
    return "\n".join([*lines, "", *wrap(more, width), ""])


def subcommand_overview(command: str, summary: str, subcommands: Mapping[str, str]) -> str:
    """Return the help of a command that has subcommands."""
    width = terminal_width()
    usage = f"usage: tvmflow {command} COMMAND [OPTIONS] …"
    more = f"`tvmflow help {command} COMMAND` shows the options of a command, with examples."
    lines = [usage, "", *wrap(summary, width), "", "commands:", *table(subcommands, width)]
    return "\n".join([*lines, "", *wrap(more, width), ""])
