"""`tvmflow device …`: its words, and what it says."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from tvmflow.commands.words import say
from tvmflow.errors import EXIT_OK, UsageError
from tvmflow.targets.host import read_host
from tvmflow.targets.tracker import VARIABLE, Devices, Tracker, split_address

_COLUMNS = ("key", "total", "free", "pending", "at")


def ls(args: argparse.Namespace) -> int:
    """List the devices that can be measured on: this machine, and those of a tracker."""
    address = _tracker(args, needed=False)
    found = list(Tracker(address).devices().values()) if address else []
    host = read_host()
    if args.json:
        here = {"arch": host.arch, "model": host.model, "cores": host.cores}
        devices = [each._asdict() for each in found]
        say(json.dumps({"host": here, "tracker": address or None, "devices": devices}))
        return EXIT_OK
    say(f"this machine: {host.model}, {host.arch}, {host.cores} cores")
    if not address:
        say(f"no tracker is named (--tracker HOST:PORT, or {VARIABLE})")
    elif not found:
        say(f"the tracker at {address} has no device")
    else:
        say(f"the tracker at {address}:", *_table([_COLUMNS, *map(_row, found)]))
    return EXIT_OK


def serve(args: argparse.Namespace) -> int:
    """Offer this machine as a device. Whoever reaches its port can run any code here."""
    from tvmflow.targets import server

    ports = server.PORTS if args.port is None else range(args.port, args.port + 1)
    server.serve(_tracker(args, needed=True), args.key, args.host, ports, say)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `device` and its sub-commands to the command line."""
    text = "List the devices that can be measured on, or offer this machine as one."
    parser = commands.add_parser("device", help=text, description=text, allow_abbrev=False)
    subs = parser.add_subparsers(metavar="WHAT", required=True)

    def sub(function: Any) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        added = subs.add_parser(function.__name__, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=function)
        added.add_argument(
            "--tracker", metavar="HOST:PORT", help=f"where TVM's RPC tracker is (${VARIABLE})"
        )
        return added

    added = sub(ls)
    added.add_argument("--json", action="store_true", help="the same as one line of JSON")
    added = sub(serve)
    added.add_argument(
        "--key", type=_key, required=True, metavar="KEY", help="what devices of its kind are called"
    )
    added.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address of this machine that is served at (127.0.0.1: only this machine reaches it)",
    )
    added.add_argument(
        "--port", type=_port, metavar="N", help="its port (the first free one from 9090)"
    )


def _tracker(args: argparse.Namespace, *, needed: bool) -> str:
    """The tracker's address; empty when none is named."""
    address = str(args.tracker or os.environ.get(VARIABLE, ""))
    if not address and not needed:
        return ""
    try:
        split_address(address)
    except ValueError as shape:
        what = f"--tracker: {shape}" if address else "no tracker is named"
        raise UsageError(what, fix=f"give --tracker HOST:PORT, or set {VARIABLE}") from shape
    return address


def _key(word: str) -> str:
    if not word or ":" in word or any(sign.isspace() for sign in word):
        raise ValueError
    return word


def _port(word: str) -> int:
    port = int(word)
    if not 0 < port < 65536:
        raise ValueError
    return port


def _row(devices: Devices) -> tuple[str, ...]:
    numbers = (devices.total, devices.free, devices.pending)
    return (devices.key, *map(str, numbers), ", ".join(devices.addresses))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [f"  {line}" for line in lines]
