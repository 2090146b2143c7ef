"""Updating a lock file: schedules stay, nothing is searched, and what is not covered has a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.provenance import WORKLOAD, World, contents
from tvmflow.core.canonical_json import canonical
from tvmflow.core.files import hash_file
from tvmflow.core.types import Json, Plan
from tvmflow.engine.report import RunReport
from tvmflow.planning.checks import LOCKED
from tvmflow.planning.decisions import PlanState
from tvmflow.recipe.lock_file import Lock, LockedKernel, LockedRecipe, LockedTarget, LockFile
from tvmflow.release import lock as lock_update
from tvmflow.tuning.trials import trial_id

TRACE: list[list[object]] = [[], []]


def task(key: str, name: str, *, tunable: bool = True) -> Json:
    return {"key": key, "names": [name], "weight": 2, "tunable": tunable}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Results of a model with a known kernel, a new one, and one that cannot be tuned."""
    tasks = [task(WORKLOAD, "conv"), task("new", "dense"), task("old", "pool", tunable=False)]
    made = World(tmp_path)
    files = contents()
    files["extract_tasks"]["tasks.json"] = json.dumps(tasks).encode()
    made.make(files)
    return made


def lock_with(**kernels: LockedKernel) -> Lock:
    target = LockedTarget(tvm={"kind": "llvm"}, cores=2, kernels=kernels)
    recipe = LockedRecipe(recipe="net.yaml", version="0", stages={}, targets={"host": target})
    file = LockFile(lock=1, machine="linux-x86_64", tools={}, recipes={"net": recipe})
    return Lock(Path("net.lock.yaml"), file, lambda *_: "net.lock.yaml:1:1")


def tuned(name: str) -> LockedKernel:
    trace = canonical(TRACE).decode()
    return LockedKernel(names=[name], calls=1, trial=trial_id(TRACE), trace=trace)


def state_of(world: World) -> PlanState:
    state = PlanState(world.store)
    state.artifacts = dict(world.artifacts)
    return state


def test_a_plan_reads_the_locked_schedules_in_place_of_its_search(world: World) -> None:
    """Those of kernels that the model no longer has are left out: they would fit none."""
    lock = lock_with(**{WORKLOAD: tuned("conv"), "gone": tuned("other")})
    update = lock_update.update_plan(lock, world.plan, state_of(world))
    assert [spec.stage for spec in update.plan.stages] == [
        "import", "lower", "extract_tasks", "build", "export", "verify",
    ]  # fmt: skip
    build = next(spec for spec in update.plan.stages if spec.stage == "build")
    [schedules] = [file for file in build.files if file.role == "pick_best/chosen.json"]
    assert json.loads(Path(schedules.path).read_text()) == {WORKLOAD: TRACE}
    assert not [need for need in build.needs if need.stage == "pick_best"]
    assert {delivery.stage_id for delivery in update.plan.deliveries} <= {
        spec.id for spec in update.plan.stages
    }


def test_kernels_that_are_not_covered_are_named(world: World) -> None:
    """But not those that no search can tune; calls and names are those of the model now."""
    update = lock_update.update_plan(
        lock_with(**{WORKLOAD: tuned("conv")}), world.plan, state_of(world)
    )
    assert update.uncovered == (lock_update.UncoveredKernels("net", "host", ("dense",)),)
    kernels = update.lock.recipes["net"].targets["host"].kernels
    assert {key: (kernel.calls, bool(kernel.trace)) for key, kernel in kernels.items()} == {
        WORKLOAD: (2, True),
        "new": (2, False),
        "old": (2, False),
    }


def test_a_recipe_that_is_not_in_the_lock_file_is_not_covered(world: World) -> None:
    """It is built without a schedule that was searched."""
    lock = lock_with()
    lock = lock._replace(file=lock.file.model_copy(update={"recipes": {}}))
    update = lock_update.update_plan(lock, world.plan, state_of(world))
    assert update.uncovered[0].kernels == ("conv", "dense")


def test_kernels_are_found_before_anything_is_built(world: World) -> None:
    """By the stages that extract tasks, and what these need."""
    plans: list[Plan] = []

    def fail(plan: Plan) -> RunReport:
        plans.append(plan)
        return RunReport((), signal=2)

    lock_update.run_update(lock_with(), world.plan, world.store, fail)
    assert [spec.stage for spec in plans[0].stages] == ["import", "lower", "extract_tasks"]


def test_the_schedules_that_it_reuses_are_no_damaged_files(world: World) -> None:
    """`cache verify` compares the files of locked schedules with their names."""
    lock_update.update_plan(lock_with(), world.plan, state_of(world))
    files = list(Path(world.store.root, LOCKED).iterdir())
    assert files
    assert [file.name for file in files] == [hash_file(file) for file in files]
