"""Executors run stages: in processes on this machine, or through a plug-in such as dask.

A plug-in is an entry point of the group `tvmflow.executors`: a module that satisfies `ExecutorPlugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tvmflow.core.errors import UsageError
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import StageCall, StageResult

if TYPE_CHECKING:
    # The fork server's child imports this package too, and must stay small.
    from tvmflow.store.local import LocalStore
    from tvmflow.store.remote.connection import RemoteConnection


Event = dict[str, Any]
"""A progress event: a small JSON object whose `event` says which kind it is."""

PLACE: Final = "place"
"""The kind of the event that says where a stage runs: `pid` and `worker` (empty for this machine)."""

OnEvent = Callable[[Event], None]

Notify = Callable[[str], None]
"""Shows a message to the user."""


class Executor(Protocol):
    """Runs the stages of a run. Its methods may be called from several threads."""

    @property
    def slots(self) -> int:
        """How many stages it runs at a time; known once it has started."""

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""

    def start(self) -> None:
        """Start the processes of stages, or connect to them; raise EnvironmentProblem."""
        ...

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage to its end; a failure or crash is returned as a result, not raised."""
        ...

    def cancel(self) -> None:
        """Stop all running stages, and start no more. May be called by a signal handler."""
        ...

    def close(self) -> None:
        """Release everything that `start` acquired."""
        ...


class ExecutorContext(NamedTuple):
    """What an executor needs besides the stages.

    `open_remote` takes a function that returns whether the run was cancelled. It returns the connection to a writable
    remote cache, and before it the URL by which workers reach it. `wait_s` limits how long a stage waits for a worker
    that can run it.
    """

    store: LocalStore
    scheduler: str
    open_remote: Callable[[Callable[[], bool]], tuple[str, RemoteConnection]]
    remote_timeout_s: float
    wait_s: float
    notify: Notify


PROCESSES: Final = "processes"
"""The name of the executor that runs stages on this machine."""

_GROUP: Final = "tvmflow.executors"


class ExecutorPlugin(Protocol):
    """An executor whose scheduler and workers are on other machines."""

    def find_scheduler(self, option: str | None) -> str:
        """Return the address that an option or the environment names, or raise UsageError."""
        ...

    def open_executor(self, context: ExecutorContext, /) -> Executor:
        """Return the executor of a run; it connects when the first stage runs."""
        ...

    def serve_scheduler(self, host: str, port: int, *, tls: bool, notify: Notify) -> None:
        """Run a scheduler until it is interrupted, or raise EnvironmentProblem."""
        ...

    def serve_worker(
        self,
        scheduler: str,
        *,
        host: str | None,
        name: str | None,
        slots: int,
        store: str,
        remote_url: str,
        notify: Notify,
    ) -> None:
        """Run a worker until it is interrupted; if the scheduler goes away, wait until it returns.

        `host` is the address at which other machines reach this one; None to detect it. `remote_url` is the URL
        of the remote cache for this machine; empty to use the run's.
        """
        ...


def load_plugin(name: str) -> ExecutorPlugin:
    """Return the plug-in with an executor's name; UsageError if no installed package has one."""
    from importlib.metadata import entry_points

    plugins = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if name not in plugins:
        raise UsageError(
            f"there is no executor '{name}'{did_you_mean(name, [PROCESSES, *plugins])}",
            fix=f"choose {PROCESSES}, or install a package with an entry point in {_GROUP}",
        )
    plugin: ExecutorPlugin = plugins[name].load()
    return plugin
