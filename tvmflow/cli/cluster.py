"""`tvmflow worker` and `tvmflow scheduler`: the processes of a cluster."""

from __future__ import annotations

import os
from typing import Final

from tvmflow.cli.definitions.cluster import SchedulerOptions, WorkerOptions
from tvmflow.cli.executors import scheduler_address
from tvmflow.cli.output import print_notes
from tvmflow.cli.remote_cache import URL_VARIABLE
from tvmflow.core.errors import EXIT_OK
from tvmflow.executors import cluster_server


def worker(options: WorkerOptions) -> int:
    """Run stages that a scheduler assigns."""
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
    cluster_server.serve_worker(worker_options, lambda line: print_notes(options, line))
    return EXIT_OK


def scheduler(options: SchedulerOptions) -> int:
    """Connect runs with workers."""
    cluster_server.serve_scheduler(
        options.host,
        options.port,
        tls=options.tls,
        notify=lambda line: print_notes(options, line),
    )
    return EXIT_OK


COMMANDS: Final = {"worker": worker, "scheduler": scheduler}
