"""The two processes of a cluster: dask's scheduler, and a worker with resources for stages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import EXIT_OK, EnvironmentProblem
from tvmflow.core.processes import kill_descendants
from tvmflow.executors import cluster_worker
from tvmflow.executors.dask import check_certificates, first_line, import_distributed

Notify = Callable[[str], None]
"""Shows a message to the user."""

# A stage is not tried on more workers than this, however long the scheduler has run.
_ALLOWED_FAILURES: Final = 2
_RETRY_S: Final = 2.0
_END_S: Final = 1.2
_DEATH_TIMEOUT_S: Final = 30.0
# dask's page of metrics has any port, so that two processes of one machine do not clash
_LOCAL_METRICS: Final = "127.0.0.1:0"


class WorkerOptions(NamedTuple):
    """The options of a worker that joins a cluster.

    `host` is the address of this machine for others: None for the one that dask finds. `slots` is the number of stages
    that it runs at a time. `remote_url` is the remote cache as this machine reaches it; empty for the one of a run.
    """

    scheduler: str
    host: str | None
    name: str | None
    slots: int
    store: str
    remote_url: str


# ---------------------------------------------------------------- scheduler


def serve_scheduler(host: str, port: int, *, tls: bool, notify: Notify) -> None:
    """Run a scheduler until it is interrupted.

    Raises:
        EnvironmentProblem: when it cannot serve at this address.
    """
    distributed = _import_distributed()
    if tls:
        check_certificates("tls://", "scheduler")

    async def serve(stopped: asyncio.Event) -> None:
        try:
            scheduler = await distributed.Scheduler(
                host=host,
                port=port,
                protocol="tls" if tls else "tcp",
                dashboard=False,
                dashboard_address=_LOCAL_METRICS,
                allowed_failures=_ALLOWED_FAILURES,
            )
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise EnvironmentProblem(
                f"cannot start a scheduler at {host}:{port}: {error}",
                fix="give another --port; for --tls dask's configuration must name the certificates",
            ) from error
        notify(f"scheduler at {scheduler.address}; start workers with")
        notify(f"  tvmflow worker --scheduler {scheduler.address}")
        async with scheduler:
            await stopped.wait()

    asyncio.run(_serve_until_interrupted(serve))


# ---------------------------------------------------------------- worker


def serve_worker(options: WorkerOptions, notify: Notify) -> None:
    """Run a worker until it is interrupted; when the scheduler goes away, wait for it."""
    distributed = _import_distributed()
    check_certificates(options.scheduler, "worker")
    name = options.name or f"{socket.gethostname()}-{os.getpid()}"
    worker = _Worker(distributed, options._replace(name=name), notify)
    asyncio.run(_serve_until_interrupted(worker.serve))


class _Worker:
    """A worker that joins the scheduler again and again."""

    def __init__(self, distributed: Any, options: WorkerOptions, notify: Notify) -> None:
        self._distributed = distributed
        self._options = options
        self._notify = notify
        self._description = cluster_worker.describe_this_host()

    async def serve(self, stopped: asyncio.Event) -> None:
        scheduler, is_waiting = self._options.scheduler, False
        while not stopped.is_set():
            try:
                nanny = await self._start_nanny()
            except (OSError, RuntimeError, ValueError, TypeError, asyncio.TimeoutError) as error:
                if not is_waiting:
                    self._notify(
                        f"the scheduler {scheduler} does not answer ({_describe_cause(error)}); "
                        "trying again until it does"
                    )
                is_waiting = True
                await _pause(stopped)
                continue
            is_waiting = False
            self._notify(self._describe())
            await _until_ended(nanny, stopped)
            if not stopped.is_set():
                self._notify(f"the scheduler {scheduler} is gone; waiting for it")
                await _pause(stopped)
        self._notify(f"worker {self._options.name} has ended")

    async def _start_nanny(self) -> Any:
        """Start dask's nanny, which starts the worker's process, and starts it again when it dies."""
        options = self._options
        environment = {cluster_worker.STORE_VARIABLE: options.store}
        if options.remote_url:
            environment[cluster_worker.REMOTE_VARIABLE] = options.remote_url
        own_address = await _find_own_address(options.scheduler)
        return await self._distributed.Nanny(
            options.scheduler,
            nthreads=options.slots,
            name=options.name,
            # without one, dask listens on all networks of this machine
            host=options.host or own_address,
            resources=cluster_worker.offered_resources(self._description),
            # the memory of stages is not the worker's own
            memory_limit=0,
            death_timeout=_DEATH_TIMEOUT_S,
            silence_logs=logging.CRITICAL,
            env=environment,
            dashboard=False,
            dashboard_address=_LOCAL_METRICS,
        )

    def _describe(self) -> str:
        options, description = self._options, self._description
        return (
            f"worker {options.name} of {options.scheduler}: {description.host}; "
            f"{options.slots} at a time; apache-tvm {description.tools['apache-tvm']}; "
            f"store {options.store}"
        )


async def _find_own_address(scheduler: str) -> str:
    """Return the address by which this machine reaches the scheduler."""
    host, _, port = scheduler.partition("://")[2].rpartition(":")
    connection = asyncio.open_connection(host.strip("[]"), int(port))
    _, writer = await asyncio.wait_for(connection, _RETRY_S)
    address = str(writer.get_extra_info("sockname")[0])
    writer.close()
    return address


async def _until_ended(nanny: Any, stopped: asyncio.Event) -> None:
    async with nanny:
        waits = [asyncio.ensure_future(nanny.finished()), asyncio.ensure_future(stopped.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


# ---------------------------------------------------------------- both


async def _pause(stopped: asyncio.Event) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stopped.wait(), _RETRY_S)


async def _serve_until_interrupted(
    serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Serve until SIGINT or SIGTERM, then end in order if that takes no longer than `_END_S`."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stopped)
    await serve(stopped)


def _stop(stopped: asyncio.Event) -> None:
    if not stopped.is_set():
        stopped.set()
        # dask waits for other machines when it ends
        timer = threading.Timer(_END_S, _end)
        timer.daemon = True
        timer.start()


def _end() -> None:
    kill_descendants(os.getpid())
    os._exit(EXIT_OK)


def _import_distributed() -> Any:
    # inherited by the process that dask starts, which configures its logging as it is imported
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
    return import_distributed("this")


def _describe_cause(error: BaseException) -> str:
    # dask's own message is about its process, and the reason is its cause
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
