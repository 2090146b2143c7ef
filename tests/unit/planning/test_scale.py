"""The cost of a stage does not grow with the number of stages: counted in executed lines, so the same on any host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tvmflow
from tests.support.engine import COMPILE, plan_of, planned, recipe, target
from tests.support.fake_executor import FakeExecutor
from tvmflow.core.types import Plan
from tvmflow.engine import session, up_to_date
from tvmflow.planning.prepare import PreparedRun
from tvmflow.planning.recipes import PlannedRecipe
from tvmflow.store.garbage_collection import Limits, collect_garbage, measure_usage
from tvmflow.store.local import LocalStore

TARGETS = (6, 12, 24)
PACKAGE = str(Path(tvmflow.__file__).parent)
# Finding a target of the recipe by its name executes a line for every target.
SLACK = 1.05


def count_lines(work: Callable[[], Any]) -> int:
    """Return how many lines of tvmflow are executed by a piece of work, each time that they are."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(counts: Sequence[int]) -> None:
    """Check that a further target costs no more among many than among few. Costs that occur once do not count."""
    [few, some, many] = counts
    among_few = (some - few) / (TARGETS[1] - TARGETS[0])
    among_many = (many - some) / (TARGETS[2] - TARGETS[1])
    assert among_many < SLACK * among_few, counts


def make_recipe(folder: Path, targets: int) -> PlannedRecipe:
    names = [f"t{number}" for number in range(targets)]
    tvm = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
    made = recipe(outputs=["bundle"], targets=[{"name": name, "tvm": tvm} for name in names])
    machines = [target(name) for name in names]
    return planned(made, *machines, stages=COMPILE, folder=str(folder))


class UpToDateRun:
    """A plan with a number of targets, all of whose results are in the store and delivered."""

    def __init__(self, folder: Path, targets: int) -> None:
        folder.mkdir()
        (folder / "net.onnx").write_text("model")
        self.plan: Plan = plan_of(make_recipe(folder, targets))
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        self.dist = str(folder / "dist")
        options = session.SessionOptions(dist=self.dist)
        report = session.run_plan(self.plan, self.store, FakeExecutor(), ignore, options)
        assert report.exit_code == 0
        # A bundle, its verdict, what was measured, and four sidecar files.
        assert len(report.delivered) == 7 * targets

    def confirm(self) -> None:
        """Do what an up-to-date run does with its plan."""
        prepared = PreparedRun(self.plan, (), (), time.time_ns())
        words = ["run", "--store", self.store.root]
        assert up_to_date.confirm_run(
            words, prepared, self.store, self.dist, as_json=False, quiet=False
        )

    def run_again(self) -> None:
        """Do what it does when it has to show its stages."""
        options = session.SessionOptions(dist=self.dist)
        session.run_plan(self.plan, self.store, FakeExecutor(), ignore, options)


def ignore(event: dict[str, Any]) -> None: ...


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[UpToDateRun]:
    folder = tmp_path_factory.mktemp("scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        # No test of this module is about a loss of power.
        patch.setattr(os, "fsync", lambda _: None)
        return [UpToDateRun(folder / str(targets), targets) for targets in TARGETS]


def test_planning_a_stage_costs_the_same_among_many(tmp_path: Path) -> None:
    """make_plan executes twice the lines for twice the targets."""
    recipes = [make_recipe(tmp_path, targets) for targets in TARGETS]
    assert_linear([count_lines(partial(plan_of, planned_recipe)) for planned_recipe in recipes])


@pytest.mark.parametrize(
    "work",
    [
        UpToDateRun.confirm,
        UpToDateRun.run_again,
        lambda world: measure_usage(world.store),
        lambda world: collect_garbage(world.store, Limits()),
    ],
    ids=["confirm", "run again", "cache stat", "cache gc"],
)
def test_an_up_to_date_stage_costs_the_same_among_many(
    runs: list[UpToDateRun], work: Callable[[UpToDateRun], Any]
) -> None:
    """Twice the stages, twice the executed lines."""
    assert_linear([count_lines(partial(work, world)) for world in runs])


def test_confirming_a_stage_reads_a_known_number_of_files(
    runs: list[UpToDateRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its action record, the stamp of its model, and a note for each delivered file: nothing is read twice."""
    opened: list[str] = []
    real = os.open

    def counting(path: Any, *more: Any, **named: Any) -> Any:
        opened.append(str(path))
        return real(path, *more, **named)

    world, targets = runs[-1], TARGETS[-1]
    monkeypatch.setattr(os, "open", counting)
    world.confirm()
    monkeypatch.undo()
    store_files = [path for path in opened if path.startswith(world.store.root)]
    assert len(store_files) == len(set(store_files))
    below = {
        folder: sum(f"/{folder}/" in path for path in store_files)
        for folder in ("actions", "delivered")
    }
    assert below == {"actions": 1 + 4 * targets, "delivered": 4 * targets}
