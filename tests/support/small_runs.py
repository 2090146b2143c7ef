"""Runs of a plan whose stages write a few bytes: the engine alone, without TVM and without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow import runner
from tvmflow.report import RunReport
from tvmflow.stores.local import LocalStore
from tvmflow.stores.remote import open_remote
from tvmflow.stores.remote.tier import Access, Tier
from tvmflow.values import Delivery, Need, Plan, StageCall, StageResult, StageSpec

CHAIN = ("import", "build", "export", "verify")


class Hands:
    """An executor that fills each stage's files with what depends on its settings and inputs; it keeps the calls."""

    def __init__(self, *, salt: str = "", during: Callable[[str], None] = lambda stage: None):
        self.calls: list[str] = []
        self.started = 0
        self.cancelled = False
        self.slots = 1
        self._salt = salt
        self._during = during
        self._lock = threading.Lock()

    def start(self) -> None:
        self.started += 1

    def execute(self, call: StageCall, log: Path, on_event: Callable[..., None]) -> StageResult:
        with self._lock:
            self.calls.append(call.stage)
        self._during(call.stage)
        out = Path(call.out, "deep")
        out.mkdir()
        came = "".join(Path(path).read_text()[:40] for _, path in sorted(call.inputs.items()))
        text = f"{call.stage} {call.settings} {self._salt} {came}"
        Path(call.out, "main.bin").write_text(text * 50)
        (out / "more.bin").write_text(text)
        (out / "empty.bin").write_text("")
        return StageResult("ok", "", "", {}, 0.01, str(log))

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        return


def plan_of(recipe: str = "net", *, width: int = 1, value: int = 0) -> Plan:
    """`import`, and for each of so many targets build, export and verify; what the last made is delivered."""
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
        Need(each.partition(":")[2].partition("/")[0], each, ("main.bin",)) for each in before
    )
    label = f"{stage}/{target}" if target else stage
    return StageSpec(
        f"{recipe}:{label}", stage, recipe, target, 1, {"value": value}, (), needs, (), 60.0
    )


def store_in(folder: Path) -> LocalStore:
    """A new store, or the one that is there."""
    store = LocalStore(str(folder))
    store.create()
    return store


class Machine:
    """A store of its own, an executor, and what was said; `run` as often as you like."""

    def __init__(self, folder: Path, url: str = "", *, hands: Hands | None = None, **access: Any):
        self.store = store_in(folder / "store")
        self.dist = folder / "dist"
        self.hands = hands or Hands()
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._url = url
        self.timeout_s = 20.0
        self.access = Access(**{"patience_s": 20.0, "wait_s": 30.0, **access})

    def tier(self) -> Tier:
        remote = open_remote(self._url, timeout_s=self.timeout_s)
        return Tier(remote, self.store, self.access, self.said.append)

    def run(self, plan: Plan, jobs: int = 1) -> RunReport:
        """One run; the stages that it ran are in `hands.calls`."""
        self.hands.calls.clear()
        tier = self.tier() if self._url else None
        options = runner.RunOptions(jobs, False, str(self.dist))
        return runner.run(plan, self.store, self.hands, self.events.append, options, tier)


def outcomes(report: RunReport) -> dict[str, str]:
    """How each stage ended, by label."""
    return {stage.stage_id.partition(":")[2]: stage.outcome for stage in report.stages}
