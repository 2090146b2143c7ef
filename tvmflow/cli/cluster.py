"""`tvmflow worker` and `tvmflow scheduler`: the processes of a cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from tvmflow.cli.arguments import StoreOption, listening_host_option, scheduler_option, store_option
from tvmflow.cli.executors import scheduler_address
from tvmflow.cli.options import flag, option, port, positive_int
from tvmflow.cli.output import print_lines
from tvmflow.cli.remote_cache import URL_VARIABLE
from tvmflow.core.errors import EXIT_OK
from tvmflow.executors import cluster_server

DEFAULT_PORT: Final = 8786


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of `tvmflow worker`."""

    scheduler: str | None = scheduler_option()
    remote_url: str | None = option(
        "URL",
        "the address of the remote cache from this machine (that of the run, or $TVMFLOW_REMOTE)",
        name="--remote",
    )
    name: str | None = option("NAME", "the name of this worker (HOST-PID)")
    slots: int = option(
        "N", "stages at a time (1; measurements stay exclusive)", default=1, type=positive_int
    )
    host: str | None = option(
        "ADDRESS", "the address at which other machines reach this one (detected)"
    )
    store: StoreOption = store_option("files are")


def worker(options: WorkerOptions) -> int:
    """Run stages that a scheduler assigns. Anyone who can reach the scheduler can run code on this machine."""
    store = options.store.open()
    url = options.remote_url or os.environ.get(URL_VARIABLE, "")
    address = scheduler_address(options.scheduler)
    worker_options = cluster_server.WorkerOptions(
        scheduler=address,
        host=options.host,
        name=options.name,
        slots=options.slots,
        store=store.root,
        remote_url=url,
    )
    cluster_server.serve_worker(worker_options, print_lines)
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The options of `tvmflow scheduler`."""

    host: str = listening_host_option()
    port: int = option(
        "N",
        f"the port to listen on ({DEFAULT_PORT}; 0: any free port)",
        default=DEFAULT_PORT,
        type=port,
    )
    tls: bool = flag("use the certificates of dask's configuration")


def scheduler(options: SchedulerOptions) -> int:
    """Connect runs with workers. Anyone who can reach its port can run code on the workers."""
    cluster_server.serve_scheduler(options.host, options.port, tls=options.tls, notify=print_lines)
    return EXIT_OK


COMMANDS: Final = {"worker": worker, "scheduler": scheduler}
