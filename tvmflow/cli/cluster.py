"""`tvmflow worker` and `tvmflow scheduler`: the processes of a cluster."""

from __future__ import annotations

import os
from typing import Final

from tvmflow.cli.arguments import StoreOption, listening_host_option, scheduler_option, store_option
from tvmflow.cli.options import Options, flag, option, port, positive_int
from tvmflow.core.errors import EXIT_OK

DEFAULT_PORT: Final = 8786


class WorkerOptions(Options):
    """Run stages that a scheduler assigns.

    Anyone who can reach the scheduler can run code on this machine.

    Examples:
        tvmflow worker --scheduler tcp://192.168.1.5:8786 --slots 2
    """

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
        "ADDRESS",
        "the address to listen on, at which other machines reach this one (that of the connection to the scheduler)",
    )
    store: StoreOption = store_option("files are")
    verbosity: int


class SchedulerOptions(Options):
    """Connect runs with workers.

    Anyone who can reach its port can run code on the workers.

    Examples:
        tvmflow scheduler --host 192.168.1.5
        # then, elsewhere; $TVMFLOW_REMOTE names the cache that all of them reach
        tvmflow run net.yaml --executor dask --scheduler tcp://192.168.1.5:8786
    """

    host: str = listening_host_option()
    port: int = option(
        "N",
        f"the port to listen on ({DEFAULT_PORT}; 0: any free port)",
        default=DEFAULT_PORT,
        type=port,
    )
    tls: bool = flag("use the certificates of dask's configuration")
    verbosity: int


def worker(options: WorkerOptions) -> int:
    from tvmflow.cli.output import print_notes
    from tvmflow.engine.driver import find_scheduler
    from tvmflow.engine.remote_access import URL_VARIABLE
    from tvmflow.executors import cluster_server

    store = options.store.open()
    url = options.remote_url or os.environ.get(URL_VARIABLE, "")
    address = find_scheduler(options.scheduler)
    worker_options = cluster_server.WorkerOptions(
        scheduler=address,
        host=options.host,
        name=options.name,
        slots=options.slots,
        store=store.root,
        remote_url=url,
    )
    cluster_server.serve_worker(worker_options, lambda line: print_notes(options, line))
    return EXIT_OK


def scheduler(options: SchedulerOptions) -> int:
    from tvmflow.cli.output import print_notes
    from tvmflow.executors import cluster_server

    cluster_server.serve_scheduler(
        options.host,
        options.port,
        tls=options.tls,
        notify=lambda line: print_notes(options, line),
    )
    return EXIT_OK


COMMANDS: Final = {"worker": worker, "scheduler": scheduler}
