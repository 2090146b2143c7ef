"""Other machines, to measure on and to run stages: `tvmflow device`, `worker` and `scheduler`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    StoreOption,
    listening_host_option,
    scheduler_option,
    store_option,
)
from tvmflow.cli.options import Options, flag, option, port, positive_int
from tvmflow.cli.output import print_json, print_lines, print_notes
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.formatting import count_text
from tvmflow.core.text import columns

if TYPE_CHECKING:
    from tvmflow.targets.tracker import DevicePoolStatus


def _tracker_option() -> str | None:
    return option("HOST:PORT", "the address of TVM's RPC tracker ($TVMFLOW_TRACKER)")


class DeviceListOptions(Options):
    """List the devices that can be measured on: this machine, and those of a tracker.

    Examples:
        tvmflow device ls
        tvmflow device ls --tracker 192.168.1.5:9190
    """

    tracker: str | None = _tracker_option()
    json: bool = flag(JSON_HELP)


def _key(text: str) -> str:
    if not text or ":" in text or any(char.isspace() for char in text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a key: it may hold neither ':' nor spaces"
        )
    return text


def _port(text: str) -> int:
    number = port(text)
    if not number:
        raise argparse.ArgumentTypeError("0 is not a port that clients can connect to")
    return number


class DeviceServeOptions(Options):
    """Offer this machine as a device.

    Anyone who can reach its port can run code on it.

    Examples:
        # on the board: recipes name it with `rpc: {key: pi4}`
        tvmflow device serve --tracker 192.168.1.5:9190 --key pi4
    """

    tracker: str | None = _tracker_option()
    key: str = option(
        "KEY", "the key of devices of this kind", default="", type=_key, required=True
    )
    host: str = listening_host_option()
    port: int | None = option(
        "N", "the port to listen on (the first free one from 9090)", type=_port
    )
    verbosity: int


_HEADINGS: Final = ("key", "total", "free", "pending", "at")


def list_devices(options: DeviceListOptions) -> int:
    from tvmflow.targets.host import read_host
    from tvmflow.targets.tracker import TRACKER_VARIABLE, Tracker

    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    devices = list(Tracker(_checked(address)).list_devices().values()) if address else []
    host = read_host()
    if options.json:
        this_machine = {"arch": host.arch, "model": host.model, "cores": host.cores}
        print_json({"host": this_machine, "tracker": address or None, "devices": devices})
        return EXIT_OK
    print_lines(f"this machine: {host.model}, {host.arch}, {count_text(host.cores, 'core')}")
    if not address:
        print_lines(f"no tracker is named (--tracker HOST:PORT, or ${TRACKER_VARIABLE})")
    elif not devices:
        print_lines(f"the tracker at {address} has no devices")
    else:
        table = columns([_HEADINGS, *map(_row, devices)])
        print_lines(f"the tracker at {address}:", *(f"  {line}" for line in table))
    return EXIT_OK


def serve(options: DeviceServeOptions) -> int:
    from tvmflow.targets import server
    from tvmflow.targets.tracker import TRACKER_VARIABLE

    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    ports = server.PORTS if options.port is None else range(options.port, options.port + 1)
    server.serve(
        _checked(address), options.key, options.host, ports, lambda line: print_notes(options, line)
    )


def _checked(address: str) -> str:
    """Return the address of a tracker."""
    from tvmflow.targets.tracker import TRACKER_VARIABLE, split_address

    try:
        split_address(address)
    except ValueError as error:
        named_by = (
            f"${TRACKER_VARIABLE}" if address == os.environ.get(TRACKER_VARIABLE) else "--tracker"
        )
        problem = f"{named_by}: {error}" if address else "no tracker is named"
        raise UsageError(
            problem, fix=f"give --tracker HOST:PORT, or set ${TRACKER_VARIABLE}"
        ) from error
    return address


def _row(devices: DevicePoolStatus) -> tuple[str, ...]:
    counts = (devices.total, devices.free, devices.pending)
    return (devices.key, *map(str, counts), ", ".join(devices.addresses))


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
    from tvmflow.executors import cluster_server

    cluster_server.serve_scheduler(
        options.host, options.port, tls=options.tls, notify=lambda line: print_notes(options, line)
    )
    return EXIT_OK


COMMANDS: Final = {
    "device": {"ls": list_devices, "serve": serve},
    "worker": worker,
    "scheduler": scheduler,
}
