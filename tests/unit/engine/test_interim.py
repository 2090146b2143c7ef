"""Interim libraries: a long search runs in parts, and what each found is delivered."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from tests.support.engine import plan_of, planned, recipe, target
from tests.support.facts import tune_facts
from tests.support.small_runs import RunHost
from tvmflow.core.errors import StoreError
from tvmflow.core.types import Artifact, Decision, Delivery, Plan, StageSpec, StoredFile
from tvmflow.engine import delivery, session
from tvmflow.planning.decisions import PlanState

TUNE = "net:tune/host"


def plan_for(**tune: Any) -> Plan:
    return plan_of(planned(recipe(tune=tune), target("host")))


class Runs:
    """Runs plans; their searches stop at the limit of their time until they have had `enough_s`."""

    def __init__(self, enough_s: float, *, is_tuned: bool = False, fails_at: int = -1) -> None:
        self.plans: list[tuple[list[str], float | None, frozenset[str]]] = []
        self.takes_known_choices: list[bool | None] = []
        self._enough_s = enough_s
        self._is_tuned = is_tuned
        self._fails_at = fails_at

    def __call__(self, plan: Plan, forced: frozenset[str]) -> PlanState | None:
        search = next((spec for spec in plan.stages if spec.id == TUNE), None)
        tune = search.settings["tune"] if search else {}
        ids = [spec.id.partition(":")[2] for spec in plan.stages]
        assert tune.get("interim", True)
        self.plans.append((ids, tune.get("minutes"), forced))
        chooser = next((spec for spec in plan.stages if spec.stage == "choose"), None)
        self.takes_known_choices.append(chooser and bool(chooser.settings.get("interim")))
        if len(self.plans) - 1 == self._fails_at:
            return None
        spent_s = min((tune.get("minutes") or 0.0) * 60, self._enough_s)
        stopped = "time" if spent_s < self._enough_s else "converged"
        facts = tune_facts(stopped=stopped, spent_s=spent_s)
        kind: Literal["hit", "run"] = "hit" if self._is_tuned else "run"
        state = SimpleNamespace(
            artifacts={TUNE: Artifact("", (), facts)},
            decide=lambda spec: Decision(spec.id, kind, ""),
        )
        return cast(PlanState, state)

    @property
    def minutes(self) -> list[float | None]:
        return [minutes for _, minutes, _ in self.plans]


def labels(specs: Iterable[StageSpec]) -> list[str]:
    return [spec.label for spec in specs]


def test_a_search_runs_in_parts_up_to_its_limit() -> None:
    """First what tells whether there is anything to choose or search, then no search, then longer and longer.

    The first library does not wait for the measurement of choices.
    """
    plan, runs = plan_for(minutes=5, deliver_every=2), Runs(1e9)
    assert session.run_parts(plan, runs)
    assert runs.minutes == [None, None, 0.0, 2.0, 4.0]
    assert runs.takes_known_choices == [None, True, True, False, False]
    assert [ids for ids, _, _ in runs.plans] == [
        ["import"],
        ["import", "choose/host", "lower/host", "extract_tasks/host"],
        *[labels(plan.stages)] * 3,
    ]
    # no key knows what is in the ledger
    assert [forced for _, _, forced in runs.plans] == [
        frozenset(), frozenset(), frozenset({TUNE}), frozenset(), frozenset(),
    ]  # fmt: skip


def test_a_search_that_has_come_to_its_end_has_no_further_part() -> None:
    """Also one whose budget is in trials."""
    runs = Runs(100.0)
    assert session.run_parts(plan_for(trials=1000, deliver_every=1), runs)
    assert runs.minutes == [None, None, 0.0, 1.0, 2.0]


def test_what_is_tuned_already_is_not_delivered_in_parts() -> None:
    """As after new weights, when the search is kept."""
    runs = Runs(1e9, is_tuned=True)
    assert session.run_parts(plan_for(minutes=5, deliver_every=2), runs)
    assert (runs.minutes, runs.takes_known_choices) == ([None, None], [None, False])


def test_a_failure_ends_the_parts() -> None:
    """A library that does not even verify untuned is known before the search."""
    runs = Runs(1e9, fails_at=2)
    assert not session.run_parts(plan_for(minutes=5, deliver_every=2), runs)
    assert runs.minutes == [None, None, 0.0]


@pytest.mark.parametrize(
    "tune",
    [{"minutes": 5}, {"trials": 0}, {"minutes": 5, "deliver_every": 1, "min_speedup": 2.0}],
    ids=str,
)
def test_other_plans_have_no_parts(tune: dict[str, Any]) -> None:
    """Unless the recipe asks for it; and what does not reach a gate yet is not delivered."""
    runs = Runs(1e9)
    assert session.run_parts(plan_for(**tune), runs) and runs.plans == []


def test_deliveries_in_between_are_in_no_key() -> None:
    """The stages of both recipes have the same settings: the same results."""
    plain, parts = plan_for(minutes=5), plan_for(minutes=5, deliver_every=2)
    assert [spec.settings for spec in plain.stages] == [spec.settings for spec in parts.stages]
    assert [spec.deliver_every_s for spec in parts.stages if spec.id == TUNE] == [120.0]


def test_files_of_a_delivery_are_replaced_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at the second file leaves the first as it was."""
    host = RunHost(tmp_path)
    store = host.store
    (tmp_path / "content").mkdir()
    names = ("a.bin", "b.bin")

    def artifact(text: str) -> Artifact:
        files = []
        for name in names:
            path = tmp_path / "content" / name
            path.write_text(text + name)
            digest = store.blobs.add(str(path))
            files.append(StoredFile(name, digest, 5))
        return Artifact("key", tuple(files), {})

    pairs = tuple((name, name) for name in names)
    plan = Plan((), (Delivery("net", "host", "net:export/host", pairs, ""),))
    dist = str(tmp_path / "dist")
    delivery.deliver(plan, {"net:export/host": artifact("old")}, store, dist)
    new = artifact("new")
    copied: list[str] = []

    def copyfile(source: str, to: str) -> None:
        copied.append(to)
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(to).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(StoreError):
        delivery.deliver(plan, {"net:export/host": new}, store, dist)
    folder = Path(dist, "net", "host")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: f"old{name}" for name in names
    }
