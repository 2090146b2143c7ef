"""A scheduler and workers on this machine, with tiny stages instead of TVM unless real ones are wanted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.small_runs import store_in
from tvmflow import runner
from tvmflow.executors import Asked
from tvmflow.executors.dask import DaskExecutor
from tvmflow.report import RunReport
from tvmflow.stores.local import LocalStore
from tvmflow.stores.remote import open_remote
from tvmflow.stores.remote.tier import Access, Tier
from tvmflow.values import Plan

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).resolve().parent / "cluster"


class Cluster(NamedTuple):
    """Where its scheduler is, and that one's process."""

    address: str
    scheduler: subprocess.Popen[str]
    folder: Path


def _start(folder: Path, *words: str, tiny: bool) -> subprocess.Popen[str]:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("TVMFLOW_")}
    environment["PYTHONPATH"] = os.pathsep.join([*([str(TINY)] if tiny else []), str(ROOT)])
    # no measurement of anybody else is waited for
    environment["XDG_RUNTIME_DIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, "-m", "tvmflow", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def cluster(folder: Path, *names: str, tiny: bool = True) -> Iterator[Cluster]:
    """A cluster with workers of these names, for the length of the block."""
    with contextlib.ExitStack() as stack:
        scheduler = _started(stack, _start(folder, "scheduler", "--port", "0", tiny=tiny))
        assert scheduler.stdout is not None
        address = scheduler.stdout.readline().split()[2].rstrip(";")
        words = ("worker", "--scheduler", address, "--name")
        workers = [
            _started(stack, _start(folder, *words, name, "--store", str(folder / name), tiny=tiny))
            for name in names
        ]
        for each in workers:
            assert each.stdout is not None
            first = each.stdout.readline()
            assert first.startswith("worker "), first
        yield Cluster(address, scheduler, folder)


def _started(stack: contextlib.ExitStack, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
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
    """A machine that gives its runs to a cluster; `run` as often as you like."""

    def __init__(self, folder: Path, address: str, remote: str, *, wait_s: float = 0.0) -> None:
        self.store = store_in(folder / "store")
        self.dist = folder / "dist"
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None

        def tier(cancelled: Callable[[], bool]) -> tuple[str, Tier]:
            access = Access(writes=True, patience_s=2.0)
            opened = open_remote(remote, timeout_s=2.0)
            return remote, Tier(opened, self.store, access, self.said.append, cancelled)

        self.executor = DaskExecutor(
            Asked(self.store, address, tier, 2.0, wait_s, self.said.append)
        )

    def run(self, plan: Plan) -> RunReport:
        """One run, with as many stages at a time as there are slots."""
        options = runner.RunOptions(None, False, str(self.dist))
        return runner.run(plan, self.store, self.executor, self._hear, options)

    def _hear(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.on_event(event)


def files(store: LocalStore, plan: Plan) -> dict[str, Any]:
    """Label -> files of all results, as the store has them."""
    found = {}
    for spec in plan.stages:
        artifact = store.find(store.last_key(spec.recipe, spec.label) or "")
        found[spec.label] = artifact and artifact.files
    return found
