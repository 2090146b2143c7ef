"""Options and help: `tvmflow device`."""

from __future__ import annotations

import argparse
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, listening_host_option
from tvmflow.cli.options import Options, flag, option, port


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


COMMANDS: Final = {"device": {"ls": DeviceListOptions, "serve": DeviceServeOptions}}
