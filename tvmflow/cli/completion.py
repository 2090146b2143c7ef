"""`tvmflow completion`: shell completion, generated from the table of commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from tvmflow.cli import commands as table
from tvmflow.cli.options import Options, argument
from tvmflow.core.errors import EXIT_OK, UsageError


class CompletionOptions(Options):
    """Print the completion script of a shell.

    It completes commands, options, targets, stages and files.

    Examples:
        # in ~/.bashrc
        eval "$(tvmflow completion bash)"
        # in ~/.zshrc
        eval "$(tvmflow completion zsh)"
        # once, for fish
        tvmflow completion fish > ~/.config/fish/completions/tvmflow.fish
    """

    shell: str = argument("SHELL", "bash, zsh or fish")


_PREAMBLES: Final = {
    "bash": "",
    "fish": "",
    # a ~/.zshrc may not have enabled completion yet
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }",
}
# Shell code that completes a predefined pipeline or a file.
_PIPELINES: Final = {
    "bash": "_tvmflow_pipeline_files",
    "fish": "compile tune (__fish_complete_path (commandline -ct))",
    "zsh": "{compadd compile tune; _files}",
    "preamble": {
        "bash": "_tvmflow_pipeline_files() { compgen -W 'compile tune' -f -- \"$1\"; }",
    },
}


def completion(options: CompletionOptions) -> int:
    import shtab

    if options.shell not in _PREAMBLES:
        raise UsageError(
            f"there is no completion for '{options.shell}'", fix=f"choose {', '.join(_PREAMBLES)}"
        )
    script = shtab.complete(_make_parser(), options.shell, preamble=_PREAMBLES[options.shell])
    sys.stdout.write(f"{script}\n")
    return EXIT_OK


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands, for shtab only: it parses nothing."""
    from tvmflow.cli.parser import CommandParser

    root = argparse.ArgumentParser("tvmflow")
    top = root.add_subparsers()
    for name, summary in table.COMMANDS.items():
        commands = table.load_commands(name)
        is_group = commands[0].name != name
        group = top.add_parser(name, help=summary).add_subparsers() if is_group else top
        for command in commands:
            word = command.name.split()[-1]
            group.add_parser(word, help=table.describe(command).summary)
            group.choices[word] = CommandParser(command)
            _add_values(group.choices[word])
    help_parser = top.add_parser("help", help="Show the options of a command.")
    help_parser.add_argument("command", choices=[*table.COMMANDS])
    return root


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Set the completions of each argument with a value: known words, or else files."""
    import shtab

    from tvmflow.stages import STAGES
    from tvmflow.targets.presets import NAMES

    words: dict[str, Sequence[str]] = {
        **dict.fromkeys(("force", "stage", "until"), tuple(STAGES)),
        **dict.fromkeys(("target", "targets"), NAMES),
        "executor": ("processes", "dask"),
        "shell": tuple(_PREAMBLES),
    }
    for action in parser._actions:
        if action.choices is None and action.nargs != 0:
            if action.dest in words:
                action.choices = words[action.dest]
            else:
                files = _PIPELINES if action.dest == "pipeline" else shtab.FILE
                action.complete = files  # type: ignore[attr-defined]


COMMANDS: Final = {"completion": completion}
