"""The two processes of a cluster: dask's scheduler, and a worker with the resources that stages ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem
from tvmflow.executors import cluster_worker, matching
from tvmflow.executors.dask import INSTALL, check_tls

Say = Callable[[str], None]

# A stage is not tried on more workers than this, however long the scheduler has run.
_ALLOWED_FAILURES: Final = 2
_AGAIN_S: Final = 2.0
_GIVE_UP_S: Final = 30.0


class Place(NamedTuple):
    """Where a worker belongs: its scheduler, its own address if it cannot be found, its name, stages at a time."""

    scheduler: str
    host: str | None
    name: str | None
    slots: int


def serve_scheduler(host: str, port: int, *, tls: bool, say: Say) -> None:
    """Run a scheduler until somebody stops it. Raises EnvironmentProblem."""
    distributed = _distributed()
    if tls:
        check_tls("tls://", "scheduler")

    async def serve(stopped: asyncio.Event) -> None:
        try:
            scheduler = await distributed.Scheduler(
                host=host,
                port=port,
                protocol="tls" if tls else "tcp",
                dashboard=False,
                # its page of metrics: two schedulers on one machine must not be in each other's way
                dashboard_address="127.0.0.1:0",
                allowed_failures=_ALLOWED_FAILURES,
            )
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise EnvironmentProblem(
                f"no scheduler at {host}:{port}: {error}",
                fix="give another --port; for --tls dask's configuration must name the certificates",
            ) from error
        say(f"scheduler at {scheduler.address}; start workers with")
        say(f"  tvmflow worker --scheduler {scheduler.address}")
        async with scheduler:
            await stopped.wait()

    asyncio.run(_until_stopped(serve))


def serve_worker(place: Place, store: str, remote: str, say: Say) -> None:
    """Run a worker until somebody stops it; where the scheduler goes away, wait for it. Raises EnvironmentProblem."""
    distributed = _distributed()
    about = matching.about_here()
    name = place.name or f"{socket.gethostname()}-{os.getpid()}"
    environment = {cluster_worker.STORE: store}
    check_tls(place.scheduler, "worker")
    if remote:
        environment[cluster_worker.REMOTE] = remote

    async def serve(stopped: asyncio.Event) -> None:
        waiting = False
        while not stopped.is_set():
            try:
                await _is_there(place.scheduler)
                nanny = await distributed.Nanny(
                    place.scheduler,
                    nthreads=place.slots,
                    name=name,
                    host=place.host,
                    resources=matching.offers(about),
                    # what stages take is not the worker's own memory
                    memory_limit=0,
                    death_timeout=_GIVE_UP_S,
                    silence_logs=logging.CRITICAL,
                    env=environment,
                    dashboard=False,
                )
            except (OSError, RuntimeError, ValueError, TypeError, asyncio.TimeoutError) as error:
                if not waiting:
                    say(
                        f"the scheduler {place.scheduler} does not answer ({_first_line(error)}); "
                        "trying again until it does"
                    )
                waiting = True
                await _pause(stopped)
                continue
            waiting = False
            say(
                f"worker {name} of {place.scheduler}: {about.host}; {place.slots} at a time; "
                f"apache-tvm {about.tools['apache-tvm']}; store {store}"
            )
            async with nanny:
                ended = asyncio.ensure_future(nanny.finished())
                asked = asyncio.ensure_future(stopped.wait())
                await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
                for each in (ended, asked):
                    each.cancel()
            if not stopped.is_set():
                say(f"the scheduler {place.scheduler} is gone; waiting for it")
                await _pause(stopped)
        say(f"worker {name} has ended")

    asyncio.run(_until_stopped(serve))


async def _is_there(scheduler: str) -> None:
    """Raises OSError, TimeoutError: dask's own process would go on trying without a word."""
    host, _, port = scheduler.partition("://")[2].rpartition(":")
    opened = asyncio.open_connection(host.strip("[]"), int(port))
    _, writer = await asyncio.wait_for(opened, _AGAIN_S)
    writer.close()


async def _pause(stopped: asyncio.Event) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stopped.wait(), _AGAIN_S)


async def _until_stopped(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Serve until Ctrl-C or a polite kill; a second one does not wait."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stopped)
    await serve(stopped)


def _stop(stopped: asyncio.Event) -> None:
    if stopped.is_set():
        os._exit(130)
    stopped.set()


def _distributed() -> Any:
    # for the process that dask starts too, which sets up its logging as it is imported
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
    try:
        import distributed
    except ImportError as missing:
        raise EnvironmentProblem(
            f"this needs the package distributed ({missing})", fix=INSTALL
        ) from missing
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    return distributed


def _first_line(error: BaseException) -> str:
    # dask's own words are about its process, and the reason stands behind them
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
