"""The executor of a run: which one the command line names, and how it is opened."""

from __future__ import annotations

import os

from tvmflow.cli import remote_cache
from tvmflow.cli.arguments import SCHEDULER_VARIABLE, ExecutionOptions
from tvmflow.core.errors import UsageError
from tvmflow.engine.progress import Printer
from tvmflow.executors import EXECUTORS, Executor, ExecutorContext
from tvmflow.store.local import LocalStore

_DASK = "dask"


def check_executor_options(execution: ExecutionOptions) -> None:
    """Check that the options of a run fit together, before anything is done.

    Raises:
        UsageError: for a cluster without a scheduler or a remote cache, or a scheduler without a cluster.
    """
    options = execution.executor
    if options.executor == _DASK:
        scheduler_address(options.scheduler)
        remote_cache.cluster_remote_url(execution.remote)
    elif options.scheduler:
        raise UsageError(
            f"--scheduler is only for --executor {_DASK}", fix=f"add --executor {_DASK}"
        )


def open_executor(execution: ExecutionOptions, store: LocalStore, printer: Printer) -> Executor:
    """Return the executor of a run whose options were checked."""
    options = execution.executor
    context = ExecutorContext(
        store=store,
        scheduler=scheduler_address(options.scheduler) if options.executor == _DASK else "",
        open_remote=lambda cancelled: remote_cache.open_cluster_client(
            execution.remote, store, printer.remote, cancelled
        ),
        remote_timeout_s=execution.remote.cache.remote_timeout_s,
        wait_s=options.wait_for_workers_s,
        notify=printer.cluster,
    )
    return EXECUTORS[options.executor](context)


def scheduler_address(option: str | None) -> str:
    """Return the address of the scheduler that `--scheduler` or the environment names.

    Raises:
        UsageError: when neither names one, or it is not a valid address.
    """
    address = option or os.environ.get(SCHEDULER_VARIABLE, "")
    if not address:
        raise UsageError(
            "no scheduler is named",
            fix=f"give --scheduler tcp://HOST:PORT, or set ${SCHEDULER_VARIABLE}",
        )
    scheme, separator, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if (separator and scheme not in ("tcp", "tls")) or not host or not port.isdecimal():
        raise UsageError(
            f"--scheduler {address}: not an address of a scheduler",
            fix="give it as tcp://HOST:PORT, or tls://HOST:PORT",
        )
    return address if separator else f"tcp://{address}"
