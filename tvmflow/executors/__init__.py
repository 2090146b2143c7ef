"""Where stages run: forked workers that may crash, hang and be stopped without harm to the run; here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    # the fork server imports this package too, and must stay small
    from tvmflow.runner import Executor
    from tvmflow.stores.local import LocalStore
    from tvmflow.stores.remote.tier import Tier


class Asked(NamedTuple):
    """What an executor may need to know. `remote` gives a remote that may be written to, and its address for workers.

    `wait_s` is how long workers that are not there yet are waited for; `tell` says something to the user.
    """

    store: LocalStore
    scheduler: str
    remote: Callable[[Callable[[], bool]], tuple[str, Tier]]
    remote_timeout_s: float
    wait_s: float
    tell: Callable[[str], None]


def _dask(asked: Asked) -> Executor:
    from tvmflow.executors.dask import DaskExecutor

    return DaskExecutor(asked)


def _processes(asked: Asked) -> Executor:
    from tvmflow.executors.processes import ProcessExecutor

    return ProcessExecutor()


EXECUTORS: Final[dict[str, Callable[[Asked], Executor]]] = {
    "dask": _dask,
    "processes": _processes,
}
