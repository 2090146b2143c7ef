"""The table of commands, and the parser of command lines.

The module of a command is imported only when a command line names it: `tvmflow --help` answers
without importing YAML, pydantic or cryptography.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tvmflow.core.errors import EXIT_CODES
from tvmflow.core.version import VERSION

if TYPE_CHECKING:
    from tvmflow.cli.options import Subparsers

COMMANDS: Final = {
    "run": "Bring recipes up to date and deliver their libraries.",
    "plan": "Show which stages `run` would run, and why, without running them.",
    "explain": "Show why one stage must run or not, and what its result depends on.",
    "lock": "Bring recipes up to date and record inputs and outputs in a lock file.",
    "diff": "Show what changed from one lock file to another; exit code 1 when anything did.",
    "run-model": "Run a bundle on images, on the arrays of an npz file, or on random ones.",
    "targets": "List the targets that recipes can name, and what this machine can do for each.",
    "device": "List the devices that can be measured on, or offer this machine as one.",
    "cache": "Show the content of the store, check it, share it, and garbage-collect unused results.",
    "records": "Show measured trials, carry them to other machines, prune and check them.",
    "inspect": "Show what delivered files are and what they were made from, without running them.",
    "verify": "Check delivered files against their statements and signatures; exit code 3 when one differs.",
    "sign": "Add a signature to the statements beside delivered files.",
    "keygen": "Create a key pair: a private key to sign with, and beside it the public key for those who verify.",
    "worker": "Run stages that a scheduler assigns. Anyone who can reach the scheduler can run code on this machine.",
    "scheduler": "Connect runs with workers. Anyone who can reach its port can run code on the workers.",
    "clean": "Remove all results from the store, and with --ledger the measured trials, too.",
    "schema": "Print the JSON Schema of recipes, for editors.",
    "doctor": "Check this installation piece by piece; exit code 4 when a required piece is not good.",
}
"""All commands with their help, in the order in which `tvmflow --help` lists them."""

_MODULES: Final = {
    "diff": "lock",
    "run-model": "run_model",
    **dict.fromkeys(("inspect", "verify", "sign", "keygen"), "provenance"),
    **dict.fromkeys(("worker", "scheduler"), "cluster"),
}
"""The modules of commands whose module has another name."""


def make_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows all commands, and the arguments of the command that `argv` names."""
    codes = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="tvmflow",
        description="From a trained model to tuned, verified, packaged libraries, redoing only what a change makes necessary.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tvmflow {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in argv[:1]:
            _add_command(commands, name, summary)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _add_command(commands: Subparsers, name: str, summary: str) -> None:
    from tvmflow.cli.options import add_command

    command = importlib.import_module(f"tvmflow.cli.{_MODULES.get(name, name)}").COMMANDS[name]
    if not isinstance(command, dict):
        add_command(commands, name, command)
        return
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for subname, run in command.items():
        add_command(subcommands, subname, run)
