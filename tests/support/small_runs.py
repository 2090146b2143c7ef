"""Runs of a plan whose stages write a few bytes: the engine alone, without TVM and without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tvmflow.core.types import Delivery, Need, Plan, StageCall, StageResult, StageSpec
from tvmflow.engine import session
from tvmflow.engine.report import RunReport, can_be_shown
from tvmflow.store.local import LocalStore
from tvmflow.store.remote import open_remote_cache
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.connection import Access, RemoteConnection

CHAIN = ("import", "build", "export", "verify")
FETCHED = {"import": "fetched", **{f"{s}/t{n}": "fetched" for n in (0, 1) for s in CHAIN[1:]}}
"""The outcomes of a plan for two targets whose results are all in the remote cache."""
WRITES: dict[str, Any] = {"reads": True, "writes": True}
"""The access of a host that also uploads its results."""


class RecordingExecutor:
    """An executor that writes files whose content depends on settings and inputs, and records the calls.

    `during` is called with the name of each stage while it runs.
    """

    def __init__(self, *, salt: str = "", during: Callable[[str], None] = lambda stage: None):
        self.calls: list[str] = []
        self.started = 0
        self.cancelled = False
        self.slots = 1
        self._salt = salt
        self.during = during
        self._lock = threading.Lock()

    def start(self) -> None:
        self.started += 1

    def execute(self, call: StageCall, log: Path, on_event: Callable[..., None]) -> StageResult:
        with self._lock:
            self.calls.append(call.stage)
        self.during(call.stage)
        out = Path(call.out, "deep")
        out.mkdir()
        inputs = "".join(Path(path).read_text()[:40] for _, path in sorted(call.inputs.items()))
        text = f"{call.stage} {call.settings} {self._salt} {inputs}"
        Path(call.out, "main.bin").write_text(text * 50)
        (out / "more.bin").write_text(text)
        (out / "empty.bin").write_text("")
        return StageResult("ok", "", "", {}, 0.01, str(log))

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        return


def plan_of(recipe: str = "net", *, width: int = 1, value: int = 0) -> Plan:
    """Return a plan of `import`, and of build, export and verify for each of `width` targets."""
    stages = [_spec(recipe, "import", "", value, ())]
    deliveries = []
    for number in range(width):
        target, before = f"t{number}", stages[0].id
        for stage in CHAIN[1:]:
            made = _spec(recipe, stage, target, value + number, (before,))
            stages.append(made)
            before = made.id
        ids = [spec.id for spec in stages if spec.target == target]
        files = (("main.bin", f"{recipe}.bin"),)
        deliveries.append(Delivery(recipe, target, ids[1], files, ids[2]))
    return Plan(tuple(stages), tuple(deliveries))


def _spec(recipe: str, stage: str, target: str, value: int, before: tuple[str, ...]) -> StageSpec:
    needs = tuple(
        Need(stage_id.partition(":")[2].partition("/")[0], stage_id, ("main.bin",))
        for stage_id in before
    )
    label = f"{stage}/{target}" if target else stage
    return StageSpec(
        f"{recipe}:{label}", stage, recipe, target, 1, {"value": value}, (), needs, (), 60.0
    )


def store_in(folder: Path) -> LocalStore:
    """Return the store in a folder, created if it does not exist."""
    store = LocalStore(str(folder))
    store.create()
    return store


class RunHost:
    """A host with a store, an executor, and the messages and events of its runs."""

    def __init__(
        self,
        folder: Path,
        url: str = "",
        *,
        executor: RecordingExecutor | None = None,
        **access: Any,
    ):
        self.store = store_in(folder / "store")
        self.dist = folder / "dist"
        self.executor = executor or RecordingExecutor()
        self.messages: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._url = url
        self.timeout_s = 20.0
        self.access = Access(**{"patience_s": 20.0, "wait_s": 30.0, **access})

    def remote_client(self) -> RemoteCacheClient:
        cache = open_remote_cache(self._url, timeout_s=self.timeout_s)
        connection = RemoteConnection(cache, self.store, self.access, self.messages.append)
        return RemoteCacheClient(connection, can_be_shown)

    def run(self, plan: Plan, jobs: int = 1, forced: Collection[str] = ()) -> RunReport:
        """Run a plan; the stages that ran are in `executor.calls`."""
        self.executor.calls.clear()
        remote_client = self.remote_client() if self._url else None
        options = session.SessionOptions(jobs, dist=str(self.dist), forced=frozenset(forced))
        return session.run_plan(
            plan, self.store, self.executor, self.events.append, options, remote_client
        )


def outcomes(report: RunReport) -> dict[str, str]:
    """Return the outcome of each stage by label."""
    return {stage.stage_id.partition(":")[2]: stage.outcome for stage in report.stages}
