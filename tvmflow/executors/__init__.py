"""Executors: what runs stages, in local processes or on a dask cluster.

Imports planning and what is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tvmflow.executors.base import Event, Executor, ExecutorContext, OnEvent

__all__ = ["EXECUTORS", "Event", "Executor", "ExecutorContext", "OnEvent"]


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
