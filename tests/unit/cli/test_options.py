"""Command lines become typed values: groups of arguments, their types, and the verbosity of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.cli import commands
from tvmflow.cli.arguments import (
    DistOption,
    ExecutionOptions,
    ExecutorOptions,
    LockOptions,
    RecipeOptions,
    RemoteCacheOptions,
    RunRemoteCacheOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.commands import COMMANDS
from tvmflow.cli.options import (
    Options,
    days,
    minutes,
    port,
    positive_int,
    seconds,
    shape,
    time_limit,
)
from tvmflow.cli.parser import CommandParser
from tvmflow.core.errors import UsageError
from tvmflow.planning.prepare import RunRequest


class AllOptions(Options):
    """Show the options. This sentence is part of the help."""

    store: StoreOption = store_option()
    recipes: RecipeOptions
    lock: LockOptions
    execution: ExecutionOptions
    argv: tuple[str, ...]


class Command:
    """A command with all options that commands share."""

    def __init__(self) -> None:
        def show(options: AllOptions) -> int:
            return 0

        self.parser = CommandParser(commands.Command("show", show))

    def parse(self, *arguments: str) -> AllOptions:
        namespace = self.parser.parse(arguments)
        namespace.argv = ["show", *arguments]
        options = self.parser.read_options(namespace)
        assert isinstance(options, AllOptions)
        return options


def test_defaults_of_all_groups() -> None:
    options = Command().parse("a.yaml")
    assert options == AllOptions(
        store=StoreOption(None),
        recipes=RecipeOptions(
            recipes=("a.yaml",), targets=(), variants=(), until=None, pipeline=None
        ),
        lock=LockOptions(locked=False, lock=None),
        execution=ExecutionOptions(
            jobs=None,
            keep_going=False,
            dist=DistOption(None),
            stage_timeout_s=None,
            remote=RunRemoteCacheOptions(
                cache=RemoteCacheOptions(
                    remote_url=None, require_signatures=None, remote_timeout_s=10.0
                ),
                remote_mode=None,
                remote_wait_s=None,
            ),
            executor=ExecutorOptions(executor="processes", scheduler=None, wait_for_workers_s=0.0),
        ),
        argv=("show", "a.yaml"),
    )


def test_arguments_reach_their_fields() -> None:
    options = Command().parse(
        *("a.yaml", "b.yaml", "--target", "host", "--target", "edge", "--variant", "v"),
        *("--until", "build", "--pipeline", "compile", "--jobs", "3", "--stage-timeout", "9.5"),
        *("--remote", "http://cache", "--require-signatures", "keys", "--remote-mode", "both"),
        *("--executor", "dask", "--scheduler", "tcp://host:1", "--wait-for-workers", "4"),
    )
    assert options.recipes.request("x.lock.yaml") == RunRequest(
        ("a.yaml", "b.yaml"), "compile", ("host", "edge"), "build", ("v",), lock="x.lock.yaml"
    )
    assert (options.execution.jobs, options.execution.stage_timeout_s) == (3, 9.5)
    remote = options.execution.remote
    assert (remote.cache.remote_url, remote.remote_mode) == ("http://cache", "both")
    assert remote.cache.require_signatures == Path("keys")
    assert options.execution.executor == ExecutorOptions(
        executor="dask", scheduler="tcp://host:1", wait_for_workers_s=4.0
    )


def test_a_list_of_an_earlier_command_line_does_not_stay() -> None:
    """The lists of repeated options begin anew for each command line."""
    command = Command()
    command.parse("a.yaml", "--target", "host")
    assert command.parse("a.yaml", "--target", "edge").recipes.targets == ("edge",)


def test_the_lock_file_is_that_of_the_recipe_or_the_named_one() -> None:
    command = Command()
    unlocked = command.parse("net.yaml").lock
    assert unlocked.find(("net.yaml",)) is None
    locked = command.parse("net.yaml", "--locked").lock
    assert locked.find(("some/net.yaml",)) == "some/net.lock.yaml"
    named = command.parse("net.yaml", "--locked", "--lock", "x.yaml").lock
    assert named.find(("net.yaml",)) == "x.yaml"
    with pytest.raises(UsageError, match="this run is not locked"):
        command.parse("net.yaml", "--lock", "x.yaml").lock.find(("net.yaml",))


@pytest.mark.parametrize(
    ("arguments", "verbosity"), [((), 0), (("-v",), 1), (("-vv",), 2), (("-q",), -1)]
)
def test_verbosity(arguments: tuple[str, ...], verbosity: int) -> None:
    assert Command().parser.parse(["a.yaml", *arguments]).verbosity == verbosity


def test_quiet_and_verbose_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="not allowed with"):
        Command().parser.parse(["a.yaml", "-q", "-v"])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("",), "RECIPE"), (("a.yaml", "--dist", ""), "--dist"), (("a.yaml", "--lock="), "--lock")],
)
def test_no_value_is_empty(arguments: tuple[str, ...], name: str) -> None:
    """A variable of the shell that is not set would otherwise be the current folder."""
    with pytest.raises(UsageError, match=f"argument {name}: must not be empty"):
        Command().parse(*arguments)


def test_options_may_stand_between_arguments() -> None:
    options = Command().parse("a.yaml", "--jobs", "2", "b.yaml")
    assert options.recipes.recipes == ("a.yaml", "b.yaml")
    assert options.execution.jobs == 2


LEAST: dict[str, list[str]] = {
    "completion": ["bash"],
    "run": ["a"],
    "plan": ["a"],
    "explain": ["a", "build"],
    "lock": ["a"],
    "diff": ["a", "b"],
    "run-model": ["a"],
    "inspect": ["a"],
    "verify": ["a"],
    "push": ["a", "b"],
    "pull": ["a"],
    "sign": ["a"],
    "keygen": ["a"],
    "device": ["ls"],
    "cache": ["stat"],
    "records": ["ls"],
    "show": ["run"],
    "init": ["a"],
    "build": ["a"],
    "compare": ["a", "b"],
}


def command_lines() -> list[list[str]]:
    """Return a command line for every command and sub-command, with the arguments that it needs."""
    groups = {
        "device": [["ls"], ["serve", "--key", "k"]],
        "cache": [
            *(["stat"], ["verify"], ["gc"], ["pins"], ["unpin", "a"], ["push"], ["pull", "a"]),
        ],
        "records": [
            *(["ls"], ["show", "a"], ["export", "a"], ["import", "a"], ["merge", "a"]),
            *(["prune"], ["verify"]),
        ],
        "ci": [["github", "a"], ["gitlab", "a"]],
        "show": [["run"], ["kernels", "a"], ["kernel", "a", "b"]],
    }
    return [
        [name, *arguments]
        for name in COMMANDS
        for arguments in groups.get(name, [LEAST.get(name, [])])
    ]


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
def test_every_command_has_options_for_its_arguments(line: list[str]) -> None:
    """Each field of a command's options is an argument of its parser, and every command takes -q and -v."""
    [command] = [
        c for c in commands.load_all_commands() if c.name.split() == line[: len(c.name.split())]
    ]
    parser = CommandParser(command)
    namespace = parser.parse([*line[len(command.name.split()) :], "-v"])
    namespace.argv = [*line, "-v"]
    assert namespace.verbosity == 1
    assert isinstance(parser.read_options(namespace), command.options)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (positive_int, "3", 3),
        (port, "0", 0),
        (port, "65535", 65535),
        (seconds, "0.5", 0.5),
        (days, "1e3", 1000.0),
    ],
)
def test_types_of_arguments(kind: Callable[[str], float], text: str, value: float) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((positive_int, text) for text in ("0", "-1", "1.5", "", "x")),
        *((port, text) for text in ("65536", "-1", "http")),
        *((seconds, text) for text in ("-1", "86401", "nan", "soon")),
        *((days, text) for text in ("-1", "nan", "")),
        *((minutes, text) for text in ("-1", "86401", "nan", "soon")),
        *((time_limit, text) for text in ("0", "-1", "nan", "inf", "soon")),
    ],
)
def test_wrong_values_are_named_in_the_message(kind: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not"):
        kind(text)


def test_shapes_have_two_spellings() -> None:
    """The name of an input may have an equals sign itself."""
    assert shape("data=1,3,224,224") == ("data", (1, 3, 224, 224))
    assert shape("a=b=[1x3]") == ("a=b", (1, 3))
    with pytest.raises(argparse.ArgumentTypeError, match="is not a shape"):
        shape("data=1,0")
