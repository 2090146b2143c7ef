"""Reader of a model's facts for planning, in a worker process with limits of memory and time.

Files are untrusted: readers count bytes, and the limits of the process are a second defense. Stages, which run in a
worker already, read directly.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from tvmflow.core import errors, fork_server_process, termination
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.errors import Interrupted, TvmflowError
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.core.formatting import size_text
from tvmflow.core.logs import explain_wait
from tvmflow.core.memory import CpuTimeExceeded, limit_address_space, limit_cpu_time
from tvmflow.core.types import Json
from tvmflow.frontends.base import ModelFacts, NotAModel

_Reader = Callable[[Path], ModelFacts]
_Read = TypeVar("_Read")

_ENTRY: Final = f"{__name__}:read_file"
_PRELOADED: Final = ("tvmflow.frontends",)
_MAX_MEMORY: Final = 800_000_000
# Limits of CPU time, which other load does not affect: for small files, and the maximum.
_MIN_SECONDS: Final = 7
_MAX_SECONDS: Final = 60
_BYTES_PER_SECOND: Final = 16 << 20
# Wall-clock limit, for pipes and disks that do not answer.
_TIMEOUT_S: Final = 300.0
_MAX_FACTS: Final = 16_000_000


def read_once(read: Callable[[Path], _Read]) -> Callable[[Path], _Read]:
    """Decorate a reader to cache its result until the file changes."""

    @functools.lru_cache(maxsize=16)
    def read_unchanged(path: Path, stamp: tuple[int, ...]) -> _Read:
        return read(path)

    @functools.wraps(read)
    def read_cached(path: Path) -> _Read:
        status = path.stat()
        return read_unchanged(path, (status.st_size, status.st_mtime_ns, status.st_ino))

    return read_cached


def read_in_worker(read: _Reader) -> _Reader:
    """Decorate a reader to run in a worker process, and to cache its result until the file changes.

    `read` must be a module's top-level function. It may raise NotAModel, OSError, and errors of tvmflow.
    """

    @functools.wraps(read)
    def read_aside(path: Path) -> ModelFacts:
        if fork_server_process.is_child:
            return read(path)
        payload = {"reader": f"{read.__module__}:{read.__qualname__}", "path": str(path.absolute())}
        # The server must be forked before `explain_wait` starts a thread.
        with _open_server() as server, explain_wait(f"reading {path.name}: up to a minute"):
            outcome = server.call(_ENTRY, payload, timeout_s=_TIMEOUT_S)
        return _facts_of(outcome, path)

    return read_once(read_aside)


# ---------------------------------------------------------------- this process


def _facts_of(outcome: Outcome, path: Path) -> ModelFacts:
    """Return the worker's facts, or raise its error."""
    if outcome.kind == "cancelled":
        raise Interrupted(outcome.message)
    if outcome.kind == "error":
        kind: type[TvmflowError] | None = getattr(errors, outcome.error, None)
        if kind is None:
            raise RuntimeError(f"reading {path} failed with {outcome.message}")
        raise kind(outcome.message, fix=outcome.fix)
    if outcome.kind != "ok":
        raise NotAModel(f"the process that reads it {outcome.message}")
    if "errno" in outcome.value:
        number = int(outcome.value["errno"])
        raise OSError(number, os.strerror(number), str(path))
    if "problem" in outcome.value:
        raise NotAModel(outcome.value["problem"])
    return from_json(ModelFacts, outcome.value["facts"])


@contextlib.contextmanager
def _open_server() -> Iterator[ForkServer]:
    """Yield a fork server for reading.

    A single-threaded process forks the server, which takes a millisecond. A process with threads starts a new
    interpreter and keeps the server, because a forked child could deadlock on a lock of another thread.
    """
    # The signal thread holds no locks.
    own = 1 + termination.has_signal_thread()
    if sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == own:
        with ForkServer.fork() as server:
            yield server
    else:
        yield _keep_server()


_lock: Final = threading.Lock()
_kept: dict[int, ForkServer] = {}
"""Process id -> its server; a forked child must not use its parent's server."""


def _keep_server() -> ForkServer:
    """Return the fork server of a process with threads, which lives as long as the process."""
    with _lock:
        server = _kept.get(os.getpid())
        if server is None or server.is_gone:
            if server is not None:
                server.close()
            _kept[os.getpid()] = server = ForkServer.start(_PRELOADED)
            atexit.register(server.close)
        return server


# ---------------------------------------------------------------- the worker


def read_file(payload: Json, emit: fork_server_process.Emit) -> Json:
    """Read a file within limits. This is the entry point of a child process.

    `payload` holds `reader` (as `module:name`) and `path`. The result holds `facts`, `problem` or `errno`.
    """
    module, _, name = payload["reader"].partition(":")
    reader: _Reader = getattr(importlib.import_module(module), name)
    path = Path(payload["path"])
    # The process ends soon, and garbage collection over millions of values would take most of the time.
    gc.disable()
    try:
        size = path.stat().st_size
        seconds = min(_MIN_SECONDS + size // _BYTES_PER_SECOND, _MAX_SECONDS)
        # The file is memory-mapped, so its size counts, too.
        limit_address_space(_MAX_MEMORY + size)
        limit_cpu_time(seconds)
        facts = to_json(reader(path))
        if len(json.dumps(facts)) > _MAX_FACTS:
            return {"problem": f"its inputs take more than {size_text(_MAX_FACTS)} to describe"}
        return {"facts": facts}
    except NotAModel as error:
        return {"problem": str(error)}
    except MemoryError:
        limit = f"{size_text(_MAX_MEMORY)} of memory, the limit for what is not weights"
        return {"problem": f"reading it takes more than {limit}"}
    except CpuTimeExceeded:
        return {"problem": f"reading it takes more than {seconds} s, the limit for its size"}
    except OSError as error:
        if error.errno is None:
            raise
        return {"errno": error.errno}
