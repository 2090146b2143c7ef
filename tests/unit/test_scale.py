"""What a stage costs does not grow with the number of stages: counted in lines of our code, so on any machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tvmflow
from tests.support.engine import COMPILE, plan_of, planned, recipe, target
from tests.support.pretend import PretendExecutor
from tvmflow import delivery, plancache, runner
from tvmflow.decide import Survey
from tvmflow.plancache import Planned
from tvmflow.planned import PlannedRecipe
from tvmflow.report import RunReport, StageReport, render
from tvmflow.stores import collect, usage
from tvmflow.stores.collect import Limits
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.values import Plan

TARGETS = (6, 12, 24)
OURS = str(Path(tvmflow.__file__).parent)
# To look up one of the recipe's targets among all by its name takes a line for each.
SLACK = 1.05


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of tvmflow a piece of work runs through, and calls of it make: loops count every time."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
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
    """A further target costs no more among many than among few; what comes once does not count."""
    [few, some, many] = counts
    among_few = (some - few) / (TARGETS[1] - TARGETS[0])
    among_many = (many - some) / (TARGETS[2] - TARGETS[1])
    assert among_many < SLACK * among_few, counts


def a_recipe(folder: Path, targets: int) -> PlannedRecipe:
    names = [f"t{number}" for number in range(targets)]
    tvm = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
    made = recipe(outputs=["bundle"], targets=[{"name": name, "tvm": tvm} for name in names])
    machines = [target(name) for name in names]
    return planned(made, *machines, stages=COMPILE, folder=str(folder))


class UpToDate:
    """A plan with so many targets, everything of it in the store and delivered."""

    def __init__(self, folder: Path, targets: int) -> None:
        folder.mkdir()
        (folder / "net.onnx").write_text("model")
        self.plan: Plan = plan_of(a_recipe(folder, targets))
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        self.dist = str(folder / "dist")
        options = runner.RunOptions(dist=self.dist)
        report = runner.run(self.plan, self.store, PretendExecutor(), ignore, options)
        assert report.exit_code == 0
        assert len(report.delivered) == 2 * targets
        self.words = ["run", str(folder)]
        digests = FileDigests(self.store)
        plancache.save(self.store, self.words, Planned(self.plan, (), self.dist, False), digests)

    def confirm(self) -> None:
        """What an up-to-date run does."""
        digests = FileDigests(self.store)
        remembered = plancache.load(self.store, self.words, digests)
        assert remembered is not None
        survey = Survey(self.store, digests)
        survey.look(remembered.plan)
        files = delivery.delivered(remembered.plan, survey.artifacts, self.store, self.dist)
        assert files is not None
        stages = tuple(
            StageReport(spec.id, survey.decisions[spec.id].kind, "", 0.0, {})
            for spec in remembered.plan.stages
        )
        render(RunReport(stages, files, (), 0.0), as_json=False)

    def again(self) -> None:
        """The same with a recipe that was read anew."""
        options = runner.RunOptions(dist=self.dist)
        runner.run(self.plan, self.store, PretendExecutor(), ignore, options)


def ignore(event: dict[str, Any]) -> None: ...


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[UpToDate]:
    folder = tmp_path_factory.mktemp("scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        # nothing here is about a loss of power
        patch.setattr(os, "fsync", lambda _: None)
        return [UpToDate(folder / str(targets), targets) for targets in TARGETS]


def test_planning_a_stage_costs_the_same_among_many(tmp_path: Path) -> None:
    """Twice the targets, twice the work of make_plan."""
    recipes = [a_recipe(tmp_path, targets) for targets in TARGETS]
    assert_linear([lines_of(partial(plan_of, each)) for each in recipes])


@pytest.mark.parametrize(
    "work",
    [
        UpToDate.confirm,
        UpToDate.again,
        lambda world: usage.measure(world.store),
        lambda world: collect.collect(world.store, Limits(), do=True),
    ],
    ids=["confirmed from memory", "run again", "cache stat", "cache gc"],
)
def test_an_up_to_date_stage_costs_the_same_among_many(
    worlds: list[UpToDate], work: Callable[[UpToDate], Any]
) -> None:
    """Twice the stages, twice the lines that are run through."""
    assert_linear([lines_of(partial(work, world)) for world in worlds])


def test_confirming_a_stage_reads_a_known_number_of_files(
    worlds: list[UpToDate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its action, its model's stamp, and a note for what is delivered: nothing is read twice."""
    opened: list[str] = []
    real = open

    def counting(path: Any, *more: Any, **named: Any) -> Any:
        opened.append(str(path))
        return real(path, *more, **named)

    world, targets = worlds[-1], TARGETS[-1]
    monkeypatch.setattr("builtins.open", counting)
    world.confirm()
    monkeypatch.undo()
    ours = [path for path in opened if path.startswith(world.store.root)]
    assert len(ours) == len(set(ours))
    below = {
        folder: sum(f"/{folder}/" in path for path in ours) for folder in ("actions", "delivered")
    }
    assert below == {"actions": 1 + 3 * targets, "delivered": 2 * targets}
