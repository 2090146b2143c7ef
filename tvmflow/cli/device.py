"""`tvmflow device`: the devices that can be measured on."""

from __future__ import annotations

import os
from typing import Final

from tvmflow.cli.definitions.device import DeviceListOptions, DeviceServeOptions
from tvmflow.cli.output import print_json, print_lines, print_notes
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.formatting import count_text
from tvmflow.core.tables import columns
from tvmflow.targets import server
from tvmflow.targets.host import read_host
from tvmflow.targets.tracker import TRACKER_VARIABLE, DevicePoolStatus, Tracker, split_address

_HEADINGS: Final = ("key", "total", "free", "pending", "at")


def list_devices(options: DeviceListOptions) -> int:
    """List the devices that can be measured on: this machine, and those of a tracker."""
    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    devices = list(Tracker(_checked(address)).list_devices().values()) if address else []
    host = read_host()
    if options.json:
        this_machine = {"arch": host.arch, "model": host.model, "cores": host.cores}
        rows = [device._asdict() for device in devices]
        print_json({"host": this_machine, "tracker": address or None, "devices": rows})
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
    """Offer this machine as a device."""
    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    ports = server.PORTS if options.port is None else range(options.port, options.port + 1)
    server.serve(
        _checked(address),
        options.key,
        options.host,
        ports,
        lambda line: print_notes(options, line),
    )


def _checked(address: str) -> str:
    """Return the address of a tracker.

    Raises:
        UsageError: for an address that is missing or not valid.
    """
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


COMMANDS: Final = {"device": {"ls": list_devices, "serve": serve}}
