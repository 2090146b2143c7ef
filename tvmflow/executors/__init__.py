"""Executors: what runs stages, in local processes or on a dask cluster.

Imports planning and what is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tvmflow.core.types import StageCall, StageResult

if TYPE_CHECKING:
    # the fork server's child imports this package too, and must stay small
    from tvmflow.store.local import LocalStore
    from tvmflow.store.remote.connection import RemoteConnection


Event = dict[str, Any]
"""A progress event: a small JSON object whose `event` says which kind it is."""

PLACE: Final = "place"
"""The kind of the event that says where a stage runs: `pid`, and `worker`, which is empty on this machine."""

OnEvent = Callable[[Event], None]


class Executor(Protocol):
    """Runs the stages of a run. Its methods may be called from several threads."""

    @property
    def slots(self) -> int:
        """The number of stages that it runs at a time, known once it has started."""

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""

    def start(self) -> None:
        """Start what stages run in; does nothing when it has started. Raises EnvironmentProblem."""
        ...

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage to its end; a failure or a crash is a result, not an exception."""
        ...

    def cancel(self) -> None:
        """Stop every running stage and let none start. May be called from a signal handler."""
        ...

    def close(self) -> None:
        """Release everything that `start` acquired."""
        ...


class ExecutorContext(NamedTuple):
    """Everything that an executor may need besides the stages.

    `open_remote` takes a function that returns whether the run was cancelled, and returns the URL of
    a writable remote cache, as workers reach it, with the connection to it. `scheduler` is the address of a
    dask scheduler. `wait_s` limits how long a stage waits for a worker that can run it; `notify`
    shows a message to the user.
    """

    store: LocalStore
    scheduler: str
    open_remote: Callable[[Callable[[], bool]], tuple[str, RemoteConnection]]
    remote_timeout_s: float
    wait_s: float
    notify: Callable[[str], None]


def _dask(context: ExecutorContext) -> Executor:
    # its modules are imported only where a cluster is used
    from tvmflow.executors.dask import DaskExecutor

    return DaskExecutor(context)


def _processes(context: ExecutorContext) -> Executor:
    from tvmflow.executors.local import ProcessExecutor

    return ProcessExecutor()


EXECUTORS: Final[dict[str, Callable[[ExecutorContext], Executor]]] = {
    "dask": _dask,
    "processes": _processes,
}
