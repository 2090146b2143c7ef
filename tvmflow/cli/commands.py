"""The table of commands: their groups, their summaries, and the modules that they are in.

The module of a command has its options, with its help, and the function that runs it; what that function
needs is imported inside. `tvmflow COMMAND --help` answers without YAML, pydantic or NumPy, `tvmflow --help`
even without argparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmflow.cli.options import Options

GROUPS: Final = {
    "Start": {
        "init": "Write the recipe of a model.",
        "build": "Build a model without a recipe: import, compile, verify and deliver it.",
        "targets": "List targets, and what this machine can do for each.",
        "schema": "Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors.",
        "doctor": "Check this installation piece by piece.",
        "completion": "Print the completion of command lines for a shell.",
    },
    "Run": {
        "run": "Bring recipes up to date and deliver their libraries.",
        "plan": "Show which stages `run` would run, and why, without running them.",
        "explain": "Show why a stage must run or not, and what its result depends on.",
        "lock": "Run recipes, and record inputs and outputs in a lock file.",
        "diff": "Show what changed from one lock file to another.",
    },
    "Look back": {
        "runs": "List the last runs that did something, the last one first.",
        "show": "Show all that is known of a run, or of the kernels of a recipe.",
        "compare": "Show what changed between two runs, releases or deliveries.",
        "logs": "Show the log of a stage.",
        "trace": "Write where the time of a run went, for Perfetto and other viewers.",
    },
    "Use the results": {
        "run-model": "Run a bundle on images, arrays, or random numbers.",
        "inspect": "Show what delivered files are and what they were made from.",
        "verify": "Check delivered files against statements and signatures.",
        "report": "Write what a run or a release made as one HTML page.",
    },
    "Share": {
        "push": "Bring a delivery or a release to an OCI registry.",
        "pull": "Fetch a delivery or a release from an OCI registry.",
        "sign": "Add a signature to the statements beside delivered files.",
        "keygen": "Create a key pair: to sign with, and to verify with.",
        "device": "List devices to measure on, or offer this machine as one.",
        "ci": "Write what brings recipes to a CI service.",
        "worker": "Run stages that a scheduler assigns.",
        "scheduler": "Connect runs with workers.",
    },
    "Maintain": {
        "cache": "Show, check and share stored results; remove unused ones.",
        "records": "Show, carry, prune and check measured trials.",
        "clean": "Remove stored results, except those that are pinned.",
    },
}
"""All commands with their summaries, in the groups and in the order in which they are listed."""

COMMANDS: Final = {
    name: summary for commands in GROUPS.values() for name, summary in commands.items()
}

_MODULES: Final = {
    **dict.fromkeys(("build", "schema"), "init"),
    "explain": "plan",
    "diff": "lock",
    "logs": "runs",
    "trace": "runs",
    "pull": "push",
    "run-model": "run_model",
    **dict.fromkeys(("inspect", "verify", "sign", "keygen"), "provenance"),
    **dict.fromkeys(("device", "worker", "scheduler"), "cluster"),
}
"""The modules of commands whose module has another name."""


class Command(NamedTuple):
    """A command or subcommand: its name as it is typed, such as `cache gc`, and the function that runs it.

    The function takes the options of the command, and returns the exit code.
    """

    name: str
    run: Callable[[Any], int]

    @property
    def options(self) -> type[Options]:
        """The options of the command, with its help: the type that the function takes."""
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
