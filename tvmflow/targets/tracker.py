"""TVM's RPC tracker: list its devices, lease one, and serve this machine as a device.

The client does not import TVM, which takes a second. TVM's own client tries to connect for a minute, and waits for
answers forever; here every wait has a limit. The messages are those of `tvm/rpc/tracker.py`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server_process import end_with_parent
from tvmflow.core.formatting import excerpt
from tvmflow.core.processes import without_torch
from tvmflow.core.types import Json
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.threads import VARIABLE, count_usable_cpus

_log = logging.getLogger(__name__)

TRACKER_VARIABLE: Final = "TVMFLOW_TRACKER"
"""The environment variable with the tracker's address, for recipes that name none."""

_MAGIC: Final = 0x2F271
_REQUEST: Final = 4
_SUMMARY: Final = 6
_SUCCESS: Final = 0
_ANSWER_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.5
_MAX_BYTES: Final = 1 << 24
_START: Final = "python -m tvm.exec.rpc_tracker --host HOST --port 9190"


class DevicePoolStatus(NamedTuple):
    """The devices with one key at `HOST:PORT`: how many in total, how many free, and waiting requests."""

    key: str
    total: int
    free: int
    pending: int
    addresses: tuple[str, ...]


class DeviceLease(NamedTuple):
    """A device for one session; its server accepts only a client that sends `match`."""

    host: str
    port: int
    match: str

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return f"{self.host}:{self.port}"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; ValueError for other text."""
    host, colon, port = text.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    if not (colon and name and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"'{excerpt(text)}' is not HOST:PORT, such as 192.168.1.10:9190")
    return name, int(port)


class Tracker:
    """The tracker at an address. Every method raises EnvironmentProblem if it cannot be reached."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._endpoint = split_address(address)

    def list_devices(self) -> dict[str, DevicePoolStatus]:
        """Return the registered devices by key, in alphabetical order."""
        with self._connect() as connection:
            connection.send([_SUMMARY])
            return _parse_summary(connection.receive())

    def request(
        self, key: str, priority: int, keep_waiting: Callable[[], bool]
    ) -> DeviceLease | None:
        """Wait for a device lease. While none is free, `keep_waiting` is polled; None once it returns False.

        Requests with a higher priority get a device first.
        """
        with self._connect() as connection:
            connection.send([_REQUEST, key, "", priority])
            while not connection.has_answer(_POLL_S):
                if not keep_waiting():
                    return None
            host, port, match = connection.receive()
            lease = DeviceLease(str(host), int(port), str(match))
        _log.debug("the tracker at %s leases '%s' at %s", self.address, key, lease.address)
        return lease

    @contextmanager
    def _connect(self) -> Iterator[_Connection]:
        try:
            with socket.create_connection(self._endpoint, _ANSWER_TIMEOUT_S) as sock:
                connection = _Connection(sock)
                connection.greet()
                yield connection
        except (OSError, ValueError, TypeError, LookupError, AttributeError, Unreadable) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EnvironmentProblem(
                f"the RPC tracker at {self.address} cannot be used: {reason}",
                fix=f"check that it runs (`{_START}`) and that its address is right "
                f"(remote.tracker of the target in the recipe, or ${TRACKER_VARIABLE})",
            ) from error


def _parse_summary(summary: Json) -> dict[str, DevicePoolStatus]:
    addresses: dict[str, list[str]] = {}
    for server in summary["server_info"]:
        key = str(server["key"]).removeprefix("server:")
        addresses.setdefault(key, []).append(":".join(map(str, server["addr"])))
    pools = {}
    for key, servers in sorted(addresses.items()):
        queue = summary["queue_info"].get(key, {})
        pools[key] = DevicePoolStatus(
            key=key,
            total=len(servers),
            free=queue.get("free", 0),
            pending=queue.get("pending", 0),
            addresses=tuple(sorted(servers)),
        )
    return pools


class _Connection:
    """A connection to a tracker; each message is its length, followed by JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def greet(self) -> None:
        self._socket.sendall(struct.pack("<i", _MAGIC))
        if struct.unpack("<i", self._read(4)) != (_MAGIC,):
            raise ValueError("the service that answers there is not an RPC tracker")

    def send(self, message: Json) -> None:
        data = json.dumps(message).encode()
        self._socket.sendall(struct.pack("<i", len(data)) + data)

    def has_answer(self, seconds: float) -> bool:
        """Return whether data (or the end of the connection) arrives within this many seconds."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
            return True
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def receive(self) -> Json:
        """Return the answer to the last request, without its status; the status must be success."""
        (size,) = struct.unpack("<i", self._read(4))
        if not 0 < size <= _MAX_BYTES:
            raise ValueError("its answer is not that of an RPC tracker")
        status, answer = read_json(self._read(size))
        if status != _SUCCESS:
            raise ValueError(f"it answers {status}")
        return answer

    def _read(self, size: int) -> bytes:
        data, end = b"", time.monotonic() + _ANSWER_TIMEOUT_S
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk or time.monotonic() > end:
                raise ConnectionError("it closed the connection" if not chunk else "it is too slow")
            data += chunk
        return data


# ---------------------------------------------------------------- a server of this machine
# After a session crashes, TVM's own `rpc_server` never listens again: its listening thread ends, but the process
# lives on.

PORTS: Final = range(9090, 9200)
_PAUSE_S: Final = 1.0

Say = Callable[[str], object]


def serve_device(tracker: str, key: str, host: str, ports: range, say: Say) -> NoReturn:
    """Serve sessions at the first free port in a range, until this process is ended.

    The tracker lists this device under `key`; `say` receives messages for the user. Kernels use $TVM_NUM_THREADS
    threads; by default, one per usable CPU.

    Raises:
        EnvironmentProblem: when the tracker cannot be reached, or no port is free.
    """
    # Sessions are forked from this process, so it must not load PyTorch.
    with without_torch():
        from tvm.rpc.server import PopenRPCServerState

    Tracker(tracker).list_devices()
    _load_backends(say)
    os.environ.setdefault(VARIABLE, str(count_usable_cpus()))
    # Python's handler would leave the listening thread running. Sessions must end with this process, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.register_at_fork(after_in_child=end_with_parent)
    threading.excepthook = lambda end: say(f"a session failed: {end.exc_value}")
    folder, address = Path.cwd(), split_address(tracker)
    while True:
        try:
            server = PopenRPCServerState(
                host, ports.start, ports.stop, tracker_addr=address, key=key, silent=True
            )
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(
                f"nothing can be served at {host}: {error}",
                fix="name an address of this machine with --host, and a free port with --port",
            ) from error
        say(f"serving '{key}' at {host}:{server.port} for the tracker at {tracker}")
        server.thread.join()
        server.sock.close()
        # A session changes the current folder, and does not change back if it fails.
        os.chdir(folder)
        time.sleep(_PAUSE_S)


def _load_backends(say: Say) -> None:
    """Load the runtime of every backend whose device this machine has; sessions are forked afterwards."""
    for backend in BACKENDS.values():
        if backend.has_device():
            try:
                backend.load_runtime()
            except EnvironmentProblem as problem:
                reason = f"{problem.message} ({problem.fix})"
                say(f"this machine's {backend.DEVICE} device is not served: {reason}")
