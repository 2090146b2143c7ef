"""A scheduler and workers on this machine, with tiny stages instead of TVM unless a test needs real ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.small_runs import store_in
from tvmflow.core.types import Plan, StageCall
from tvmflow.engine import session
from tvmflow.engine.report import RunReport
from tvmflow.executors import ExecutorContext
from tvmflow.executors.dask import DaskExecutor
from tvmflow.store.local import LocalStore
from tvmflow.store.remote import open_remote_cache
from tvmflow.store.remote.connection import Access, RemoteConnection
from tvmflow.targets.host import CPU_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).resolve().parent / "cluster"


class Cluster(NamedTuple):
    """The address and the process of a scheduler, and the folder of its workers."""

    address: str
    scheduler: subprocess.Popen[str]
    folder: Path


def _start(folder: Path, *arguments: str, tiny: bool) -> subprocess.Popen[str]:
    environment = {
        key: text
        for key, text in os.environ.items()
        if key == CPU_VARIABLE or not key.startswith("TVMFLOW_")
    }
    environment["PYTHONPATH"] = os.pathsep.join([*([str(TINY)] if tiny else []), str(ROOT)])
    # locks of its own: it does not wait for measurements of other processes
    environment["XDG_RUNTIME_DIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, "-m", "tvmflow", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def cluster(folder: Path, *names: str, tiny: bool = True) -> Iterator[Cluster]:
    """Give a cluster with workers of these names."""
    with contextlib.ExitStack() as stack:
        scheduler = _end_with(stack, _start(folder, "scheduler", "--port", "0", tiny=tiny))
        assert scheduler.stdout is not None
        address = scheduler.stdout.readline().split()[2].rstrip(";")
        arguments = ("worker", "--scheduler", address, "--name")
        workers = [
            _end_with(
                stack, _start(folder, *arguments, name, "--store", str(folder / name), tiny=tiny)
            )
            for name in names
        ]
        for process in workers:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("worker "), first
        yield Cluster(address, scheduler, folder)


def _end_with(stack: contextlib.ExitStack, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    def end() -> None:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    stack.callback(end)
    return process


class Client:
    """A machine that runs plans on a cluster, any number of times."""

    def __init__(self, folder: Path, address: str, remote: str, *, wait_s: float = 0.0) -> None:
        self.store = store_in(folder / "store")
        self.dist = folder / "dist"
        self.events: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None

        def connect(cancelled: Callable[[], bool]) -> tuple[str, RemoteConnection]:
            access = Access(writes=True, patience_s=2.0)
            opened = open_remote_cache(remote, timeout_s=2.0)
            return remote, RemoteConnection(
                opened, self.store, access, self.messages.append, cancelled
            )

        self.executor = DaskExecutor(
            ExecutorContext(self.store, address, connect, 2.0, wait_s, self.messages.append)
        )

    def run(self, plan: Plan) -> RunReport:
        """Run a plan, with as many stages at a time as there are slots."""
        options = session.SessionOptions(None, False, str(self.dist))
        return session.run_plan(plan, self.store, self.executor, self._on_event, options)

    def _on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.on_event(event)


def files(store: LocalStore, plan: Plan) -> dict[str, Any]:
    """Return the files of all results in the store, by label."""
    results = {}
    for spec in plan.stages:
        artifact = store.find(store.last_key(spec.recipe, spec.label) or "")
        results[spec.label] = artifact and artifact.files
    return results


def call(stage: str, *tools: str, **settings: Any) -> StageCall:
    return StageCall(stage, settings, {}, "", "", "", "", 1.0, dict.fromkeys(tools, "1+x"))
