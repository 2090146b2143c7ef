"""Serves this machine as a device of TVM's RPC tracker, and continues when a kernel ends a session.

TVM's own `rpc_server` stops listening for good once a session has crashed: the thread that listens
ends, and its process lives on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server_process import end_with_parent
from tvmflow.core.processes import without_torch
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.threads import VARIABLE, count_usable_cpus
from tvmflow.targets.tracker import Tracker, split_address

PORTS: Final = range(9090, 9200)
_PAUSE_S: Final = 1.0

Say = Callable[[str], object]


def serve(tracker: str, key: str, host: str, ports: range, say: Say) -> NoReturn:
    """Serve sessions until this process is ended.

    Kernels run with as many threads as TVM_NUM_THREADS says, else as there are cores.

    Args:
        tracker: The tracker's address.
        key: The key under which it lists this device.
        host: The address at which sessions are served.
        ports: The ports to try; the first free one is taken.
        say: Receives messages for people.

    Raises:
        EnvironmentProblem: when the tracker cannot be reached, or no port is free.
    """
    # sessions are forked from this process
    with without_torch():
        from tvm.rpc.server import PopenRPCServerState

    Tracker(tracker).list_devices()
    _load_backends(say)
    os.environ.setdefault(VARIABLE, str(count_usable_cpus()))
    # the thread that listens would survive an interrupt; a session must not survive this process
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
        # a session changes the current folder, and one that failed does not change back
        os.chdir(folder)
        time.sleep(_PAUSE_S)


def _load_backends(say: Say) -> None:
    """Load the runtime of every backend whose device this machine has.

    A session is a fork of this process.
    """
    for backend in BACKENDS.values():
        if backend.has_device():
            try:
                backend.load_runtime()
            except EnvironmentProblem as problem:
                reason = f"{problem.message} ({problem.fix})"
                say(f"this machine's {backend.DEVICE} device is not served: {reason}")
