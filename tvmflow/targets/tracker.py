"""Speaks with TVM's RPC tracker: which devices there are, and a turn on one of them. Needs no TVM.

TVM's own client waits forever for an answer and tries for a minute to connect; here every wait
has an end, and a question takes a millisecond where loading TVM would take a second. The
messages are those of `tvm/rpc/tracker.py`.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tvmflow.errors import StageError
from tvmflow.values import Json

VARIABLE: Final = "TVMFLOW_TRACKER"
"""The environment variable that names the tracker where a recipe does not."""

_MAGIC: Final = 0x2F271
_REQUEST: Final = 4
_SUMMARY: Final = 6
_SUCCESS: Final = 0
_ANSWER_S: Final = 10.0
_LOOK_S: Final = 0.5
_MOST_BYTES: Final = 1 << 24
_START: Final = "python -m tvm.exec.rpc_tracker --host HOST --port 9190"


class Devices(NamedTuple):
    """The devices of one key: how many there are, how many wait for work, how many requests wait for one, `HOST:PORT` of each."""

    key: str
    total: int
    free: int
    pending: int
    addresses: tuple[str, ...]


class Turn(NamedTuple):
    """A device that is ours for one session; its server takes nobody else's word but `match`."""

    host: str
    port: int
    match: str

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def split_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` as host and port. Raises ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    if not (colon and name and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"'{text}' is not HOST:PORT, such as 192.168.1.10:9190")
    return name, int(port)


class Tracker:
    """The tracker at an address. Every method raises StageError when it cannot be reached."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._place = split_address(address)

    def devices(self) -> dict[str, Devices]:
        """The devices that are registered, by key in alphabetical order."""
        try:
            with self._connected() as line:
                line.send([_SUMMARY])
                status, found = line.receive()
        except (OSError, ValueError) as trouble:
            raise self._unreachable(trouble) from trouble
        if status != _SUCCESS:
            raise self._unreachable(ValueError(f"it answers {status}"))
        addresses: dict[str, list[str]] = {}
        for server in found["server_info"]:
            key = str(server["key"]).removeprefix("server:")
            addresses.setdefault(key, []).append(":".join(map(str, server["addr"])))
        queues = found["queue_info"]
        return {
            key: Devices(
                key,
                len(each),
                queues.get(key, {}).get("free", 0),
                queues.get(key, {}).get("pending", 0),
                tuple(sorted(each)),
            )
            for key, each in sorted(addresses.items())
        }

    def request(self, key: str, priority: int, go_on: Callable[[], bool]) -> Turn | None:
        """A turn on a device, as soon as one is free; None when `go_on` turns false while it is waited for."""
        try:
            with self._connected() as line:
                line.send([_REQUEST, key, "", priority])
                while not line.has_answer(_LOOK_S):
                    if not go_on():
                        return None
                status, found = line.receive()
                if status != _SUCCESS:
                    raise ValueError(f"it answers {status}")
                host, port, match = found
                return Turn(str(host), int(port), str(match))
        except (OSError, ValueError, TypeError) as trouble:
            raise self._unreachable(trouble) from trouble

    def _connected(self) -> _Line:
        line = _Line(socket.create_connection(self._place, _ANSWER_S))
        try:
            line.greet()
        except BaseException:
            line.__exit__()
            raise
        return line

    def _unreachable(self, trouble: Exception) -> StageError:
        what = getattr(trouble, "strerror", None) or str(trouble) or type(trouble).__name__
        return StageError(
            f"the RPC tracker at {self.address} cannot be used: {what}",
            fix=f"see that it runs (`{_START}`) and that its address is right "
            f"(remote.tracker of the target in the recipe, or ${VARIABLE})",
        )


class _Line:
    """A connection to a tracker: messages are JSON, each after its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(_ANSWER_S)

    def greet(self) -> None:
        self._connection.sendall(struct.pack("<i", _MAGIC))
        if struct.unpack("<i", self._read(4)) != (_MAGIC,):
            raise ValueError("what answers there is not an RPC tracker")

    def send(self, message: Json) -> None:
        data = json.dumps(message).encode()
        self._connection.sendall(struct.pack("<i", len(data)) + data)

    def has_answer(self, seconds: float) -> bool:
        """Whether something arrives within so many seconds; an end of the connection counts."""
        self._connection.settimeout(seconds)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
            return True
        except TimeoutError:
            return False
        finally:
            self._connection.settimeout(_ANSWER_S)

    def receive(self) -> Any:
        (size,) = struct.unpack("<i", self._read(4))
        if not 0 < size <= _MOST_BYTES:
            raise ValueError("it does not speak as a tracker does")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data, end = b"", time.monotonic() + _ANSWER_S
        while len(data) < size:
            chunk = self._connection.recv(size - len(data))
            if not chunk or time.monotonic() > end:
                raise ConnectionError("it closed the connection" if not chunk else "it is too slow")
            data += chunk
        return data

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
