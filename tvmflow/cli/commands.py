"""The table of commands, their overview, and text wrapped to the width of the terminal.

The function of a command imports its dependencies inside. So `tvmflow COMMAND --help` works without YAML, pydantic or
NumPy, and `tvmflow --help` without argparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import EXIT_CODES
from tvmflow.core.formatting import find_width
from tvmflow.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmflow.cli.options import Options

GROUPS: Final = {
    "Start": {
        "init": "Write the recipe of a model.",
        "build": "Build a model without a recipe: import, compile, verify and deliver it.",
        "targets": "List targets, and this machine's support for each.",
        "schema": "Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors.",
        "doctor": "Check this installation piece by piece.",
        "completion": "Print the completion script of a shell.",
    },
    "Run": {
        "run": "Bring recipes up to date and deliver their libraries.",
        "plan": "Show which stages `run` would run, and why, without running them.",
        "explain": "Show why a stage must run or not, and the dependencies of its result.",
        "lock": "Run recipes, and record inputs and outputs in a lock file.",
        "diff": "Show the changes from one lock file to another.",
    },
    "Look back": {
        "runs": "List the last runs that did something, the newest first.",
        "show": "Show the details of a run, or of the kernels of a recipe.",
        "compare": "Show the changes between two runs, releases or deliveries.",
        "logs": "Show the log of a stage.",
        "trace": "Write where the time of a run went, for Perfetto and other viewers.",
    },
    "Use the results": {
        "run-model": "Run a bundle on images, arrays, or random numbers.",
        "inspect": "Show the kind and provenance of delivered files.",
        "verify": "Check delivered files against statements and signatures.",
        "report": "Write the results of a run or a release as one HTML page.",
    },
    "Share": {
        "push": "Push a delivery or a release to an OCI registry.",
        "pull": "Fetch a delivery or a release from an OCI registry.",
        "sign": "Add a signature to the statements beside delivered files.",
        "keygen": "Create a key pair: to sign with, and to verify with.",
        "device": "List devices to measure on, or offer this machine as one.",
        "ci": "Write the configuration of a CI service that runs recipes.",
        "worker": "Run stages that a scheduler assigns.",
        "scheduler": "Start a scheduler, which connects runs with workers.",
    },
    "Maintain": {
        "cache": "Show, check and share stored results; remove unused ones.",
        "records": "Show, export, import, prune and check measured trials.",
        "clean": "Remove stored results, except pinned ones.",
    },
}
"""All commands with their summaries, grouped and ordered as in the overview."""

_MODULES: Final = {
    **dict.fromkeys(("build", "schema"), "init"),
    "clean": "cache",
    "compare": "report",
    "explain": "plan",
    "run-model": "run_model",
    **dict.fromkeys(("lock", "diff"), "run"),
    **dict.fromkeys(("show", "logs", "trace"), "runs"),
    **dict.fromkeys(("inspect", "verify", "sign", "keygen", "push", "pull"), "provenance"),
    **dict.fromkeys(("targets", "device", "worker", "scheduler"), "machines"),
}
"""Command -> its module, if the names differ."""


class Command(NamedTuple):
    """A command or subcommand, named as it is typed (`cache gc`), and its function."""

    name: str
    run: Callable[[Any], int]

    @property
    def options(self) -> type[Options]:
        """Return the type of the command's options, whose docstring is its help."""
        function: Any = getattr(self.run, "__wrapped__", self.run)
        kind: type[Options] = function.__globals__[function.__annotations__["options"]]
        return kind


def load_commands(name: str) -> tuple[Command, ...]:
    """Import the module of a command, and return the command, or its subcommands."""
    import importlib

    module = importlib.import_module(f"tvmflow.cli.{_MODULES.get(name, name)}")
    run = module.COMMANDS[name]
    if isinstance(run, dict):
        return tuple(Command(f"{name} {subname}", function) for subname, function in run.items())
    return (Command(name, run),)


def load_all_commands() -> list[Command]:
    """Import the modules of all commands, and return the commands and subcommands."""
    return [command for name in COMMANDS for command in load_commands(name)]


# ---------------------------------------------------------------- help

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
    """The parts of a command's docstring: first sentence, details and examples."""

    summary: str
    details: str
    examples: str


def describe(command: Command) -> CommandText:
    """Return the help of a command, which is the docstring of its options."""
    return split_docstring(command.options.__doc__ or "")


def split_docstring(docstring: str) -> CommandText:
    """Return the parts of a command's docstring."""
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
    """Return the width of help in characters: the terminal's, within limits, or 80."""
    width = find_width()
    return max(_MIN_WIDTH, min(width or _DEFAULT_WIDTH, _MAX_WIDTH))


def fill(text: str, width: int, indent: str = "") -> str:
    """Wrap each line of a text, except commands, which are indented; their comments are wrapped."""
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
    """Return the lines of a paragraph: each is `margin` and at most `width` characters."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [margin + line for line in lines]


def table(rows: Mapping[str, str], width: int, column: int = 0) -> Iterator[str]:
    """Yield lines of names and descriptions; on a narrow terminal, descriptions are below names."""
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


COMMANDS: Final = {
    name: summary for commands in GROUPS.values() for name, summary in commands.items()
}
