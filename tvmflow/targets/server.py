"""Offers this machine as a device to TVM's RPC tracker, and goes on when a kernel takes a session down.

TVM's own `rpc_server` stays deaf for good once a session has crashed: the thread that listens
ends, and its process lives on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from tvmflow.errors import EnvironmentProblem
from tvmflow.targets.gpu import load_cuda, read_gpu
from tvmflow.targets.host import read_host
from tvmflow.targets.tracker import Tracker, split_address

PORTS: Final = range(9090, 9200)
_PAUSE_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1


def serve(
    tracker: str, key: str, host: str, ports: range, say: Callable[[str], object]
) -> NoReturn:
    """Serve sessions at `host`, on the first of `ports` that is free, until this process is ended.

    Kernels run with as many threads as TVM_NUM_THREADS says, else as there are cores. Raises
    StageError when the tracker cannot be reached, and EnvironmentProblem when no port is free.
    """
    from tvm.rpc.server import PopenRPCServerState

    Tracker(tracker).devices()
    try:
        # loaded, not used: a session is a fork of this process
        if read_gpu().gpu:
            load_cuda()
    except EnvironmentProblem as problem:
        say(f"its GPU is not offered: {problem.message} ({problem.fix})")
    os.environ.setdefault("TVM_NUM_THREADS", str(read_host().cores))
    # the thread that listens would outlive an interrupt; a session must not outlive this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.register_at_fork(after_in_child=_die_with_parent)
    threading.excepthook = lambda end: say(f"a session went wrong: {end.exc_value}")
    folder = Path.cwd()
    while True:
        try:
            server = PopenRPCServerState(
                host,
                ports.start,
                ports.stop,
                tracker_addr=split_address(tracker),
                key=key,
                silent=True,
            )
        except (OSError, ValueError) as refused:
            raise EnvironmentProblem(
                f"nothing can be served at {host}: {refused}",
                fix="name an address of this machine with --host, and a free port with --port",
            ) from refused
        say(f"serving '{key}' at {host}:{server.port} for the tracker at {tracker}")
        server.thread.join()
        server.sock.close()
        # a session works in a folder of its own, and one that went wrong does not come back
        os.chdir(folder)
        time.sleep(_PAUSE_S)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
