"""The entry point of the command line: parsing, dispatch, and reports of errors.

Help and usage errors are printed without importing the dependencies of commands.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from tvmflow.cli.commands import (
    COMMANDS,
    Command,
    describe,
    load_commands,
    overview,
    subcommand_overview,
)
from tvmflow.core import termination
from tvmflow.core.disk_errors import OutputError
from tvmflow.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    Interrupted,
    TvmflowError,
    UsageError,
)
from tvmflow.core.version import VERSION

if TYPE_CHECKING:
    from tvmflow.cli.options import Options


Invocation = Callable[[], int]
"""Runs a parsed command line and returns the exit code."""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; report every error as a message."""
    try:
        invocation = parse(argv)
    except SystemExit:
        # the help was printed
        return EXIT_OK
    except UsageError as error:
        return _report_problem(error)
    try:
        with termination.Unwinding():
            return invocation()
    except TvmflowError as error:
        return _report_problem(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (BrokenPipeError, OutputError):
        raise
    except Exception as error:
        from tvmflow.cli import mistakes

        problem = mistakes.explain(error)
        if problem is None and not termination.signal_number():
            return mistakes.report(error)
        return _report_problem(problem or Interrupted(str(error)))


def parse(argv: Sequence[str]) -> Invocation:
    """Parse a command line.

    Raises:
        UsageError: for an invalid command line.
        SystemExit: after help was printed.
    """
    words = ["--help" if word == "-h" else word for word in argv[:1]] + list(argv[1:])
    if not words:
        return _printing(overview(), sys.stderr, EXIT_USAGE)
    if words == ["--version"]:
        return _printing(f"tvmflow {VERSION}\n")
    if words[0] in ("help", "--help"):
        if not words[1:]:
            return _printing(overview())
        # `tvmflow help cache gc` is `tvmflow cache gc --help`
        words = [*words[1:3], "--help"]
    name, rest = words[0], words[1:]
    commands = _load_commands(name)
    if isinstance(commands, Command):
        return _parse_options(commands, rest, argv)
    if rest[:1] in ([], ["--help"], ["-h"]):
        summaries = {key: describe(command).summary for key, command in commands.items()}
        text = subcommand_overview(name, COMMANDS[name], summaries)
        return _printing(text) if rest else _printing(text, sys.stderr, EXIT_USAGE)
    if rest[0] not in commands:
        from tvmflow.cli.mistakes import explain_subcommand

        raise explain_subcommand(name, rest[0], list(commands))
    return _parse_options(commands[rest[0]], rest[1:], argv)


def _load_commands(name: str) -> Command | dict[str, Command]:
    if name not in COMMANDS:
        from tvmflow.cli.mistakes import explain_command

        raise explain_command(name)
    first, *others = load_commands(name)
    if first.name == name:
        return first
    return {command.name.split()[1]: command for command in (first, *others)}


def _parse_options(command: Command, words: Sequence[str], argv: Sequence[str]) -> Invocation:
    from tvmflow.cli.parser import CommandParser

    parser = CommandParser(command)
    namespace = parser.parse(words)
    namespace.argv = list(argv)
    options = parser.read_options(namespace)
    return lambda: _run(command, options, namespace.verbosity)


def _run(command: Command, options: Options, verbosity: int) -> int:
    from tvmflow.cli.arguments import RecipeOptions
    from tvmflow.core import logs
    from tvmflow.core.logs import explain_wait

    logs.configure(logs.level_for(verbosity))
    logs.check_level()
    selections = [value for value in vars(options).values() if isinstance(value, RecipeOptions)]
    with contextlib.ExitStack() as stack:
        if any(selection.recipes for selection in selections):
            stack.enter_context(options.start_early())
            # This import takes most of the time before a command's first output.
            with explain_wait("loading tvmflow: a few seconds the first time"):
                import tvmflow.planning.prepare  # noqa: F401
        return command.run(options)


def _printing(text: str, stream: TextIO | None = None, exit_code: int = EXIT_OK) -> Invocation:
    def write() -> int:
        (stream or sys.stdout).write(text)
        return exit_code

    return write


def _report_problem(problem: TvmflowError) -> int:
    if termination.signal_number():
        # The signal caused the problem and has been reported already.
        return EXIT_INTERRUPTED
    from tvmflow.core.formatting import printable_lines

    # Raises if stdout cannot be written, which `__main__` reports.
    sys.stdout.flush()
    # If stderr cannot be written either, only the exit code reports the problem.
    with contextlib.suppress(OSError):
        print(f"tvmflow: {printable_lines(str(problem))}", file=sys.stderr)
    if "GITHUB_ACTIONS" in os.environ:
        from tvmflow.cli.ci_messages import annotate_problem

        annotate_problem(problem)
    return problem.exit_code
