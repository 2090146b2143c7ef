"""Locked runs: from a finished plan to its lock file and back, with the same keys and without a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import engine
from tvmflow.core.errors import LockMismatch, RecipeError
from tvmflow.core.types import Plan, StageSpec
from tvmflow.planning.checks import enforce_lock
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.recipes import PlannedRecipe, Target
from tvmflow.recipe.lock_file import Lock, read_lock
from tvmflow.release.lock import lock_text, make_lock
from tvmflow.stages.choose import choices_text
from tvmflow.store.local import LocalStore
from tvmflow.tuning.trials import trial_id

TRACE = [[["GetSBlock", [], ["b0", "main"], ["b0"]]], []]
WORKLOAD = "ab" * 32
CONTENTS = {
    "tasks.json": f'[{{"key": "{WORKLOAD}", "names": ["conv"], "weight": 2}}]',
    "chosen.json": json.dumps({WORKLOAD: TRACE}, indent=1),
    "choices.json": choices_text({"conv 1×8": {"winograd": 4}}),
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "cache"))
    made.create()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "net.onnx").write_bytes(b"a model")
    return str(tmp_path)


def finish(plan: Plan, store: LocalStore) -> PlanState:
    """Give every stage a result with all files that are read or delivered, and return the state of the plan."""
    state = PlanState(store)
    for spec in plan.stages:
        state.decide(spec)
        key = state.keys[spec.id]
        if spec.id not in state.artifacts:
            with store.claim(key.digest) as claim:
                for name in _files(plan, spec):
                    text = CONTENTS.get(name, f"{name} of {spec.id}")
                    Path(claim.out, name).write_text(text)
                state.artifacts[spec.id] = store.publish(claim, key, {}, 0.0)
    return state


def _files(plan: Plan, spec: StageSpec) -> set[str]:
    needed = {
        name
        for other in plan.stages
        for need in other.needs
        if need.stage_id == spec.id
        for name in need.files
    }
    delivered = {
        stored
        for delivery in plan.deliveries
        if delivery.stage_id == spec.id
        for stored, _ in delivery.files
    }
    return needed | delivered | {"more"}


def write_lock(recipe: PlannedRecipe, store: LocalStore) -> tuple[Plan, PlanState, Lock]:
    plan = engine.plan_of(recipe)
    state = finish(plan, store)
    path = Path(store.root).parent / "net.lock.yaml"
    path.write_text(lock_text(make_lock([recipe], plan, state, store, path.parent)))
    return plan, state, read_lock(path)


def new_state(store: LocalStore) -> PlanState:
    return PlanState(store)


KINDS: dict[str, tuple[Target, ...]] = {
    "one target": (engine.target(),),
    "two targets": (engine.target("a"), engine.target("b")),
    "in parts": (engine.joined_target(),),
    "both": (engine.target("a"), engine.joined_target()),
}


@pytest.mark.parametrize("trials", [4, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_locked_plan_has_the_same_keys_and_searches_nothing(
    kind: str, trials: int, store: LocalStore, folder: str
) -> None:
    """Schedules are those of the lock file, and so are choices, which larger budgets measure."""
    recipe = engine.planned(engine.recipe(tune={"trials": trials}), *KINDS[kind], folder=folder)
    plan, state, lock = write_lock(recipe, store)
    locked = enforce_lock(lock, plan, new_state(store), store)
    again = new_state(store)
    again.decide_all(locked)
    stages = {spec.stage for spec in locked.stages}
    assert stages == {spec.stage for spec in plan.stages} - {"choose", "tune", "pick_best"}
    assert ("choose" in {spec.stage for spec in plan.stages}) == (trials == 128)
    assert {id: again.keys[id] for id in again.keys} == {
        spec.id: state.keys[spec.id] for spec in locked.stages
    }
    assert all(decision.kind == "hit" for decision in again.decisions.values())
    assert not any(
        delivery.stage_id.partition(":")[2].startswith("pick_best")
        for delivery in locked.deliveries
    )


def test_the_emulation_program_is_not_locked(store: LocalStore, folder: str) -> None:
    """It only checks the library, so another version of it verifies the same library."""
    recipe = engine.planned(engine.recipe(verify={"run_on": "qemu"}), folder=folder)
    plan, state, lock = write_lock(recipe, store)
    program = next(spec for spec in plan.stages if spec.stage == "emulation_program")
    assert state.artifacts[program.id].digests(("program",))["program"] not in lock.path.read_text()
    locked = enforce_lock(lock, plan, new_state(store), store)
    assert program.id in {spec.id for spec in locked.stages}


def test_a_lock_file_names_the_trial_of_each_kernel(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    _, _, lock = write_lock(recipe, store)
    (kernel,) = lock.recipes["net"].targets["host"].kernels.values()
    assert (kernel.names, kernel.calls, kernel.trial) == (["conv"], 2, trial_id(TRACE))


def test_a_choice_that_tvmflow_does_not_make_is_refused(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 128}), folder=folder)
    _, _, lock = write_lock(recipe, store)
    lock.path.write_text(lock.path.read_text().replace("winograd: 4", "winograd: 5"))
    with pytest.raises(RecipeError, match="is refused: it is not a choice that this version"):
        read_lock(lock.path)


def test_the_same_results_give_the_same_text(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(), engine.target("b"), engine.target("a"), folder=folder)
    _, _, lock = write_lock(recipe, store)
    text = lock.path.read_text()
    turned = recipe._replace(targets=recipe.targets[::-1])
    assert write_lock(turned, store)[2].path.read_text() == text


def test_another_result_than_the_locked_one_is_refused(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(), folder=folder)
    plan, state, lock = write_lock(recipe, store)
    digest = state.artifacts["net:export/host"].digests(("more",))["more"]
    lock.path.write_text(lock.path.read_text().replace(digest, "e" * 64))
    locked = enforce_lock(read_lock(lock.path), plan, new_state(store), store)
    with pytest.raises(LockMismatch, match="net:export/host: more has the digest"):
        new_state(store).decide_all(locked)


def test_all_differences_are_reported_together(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    plan, _, lock = write_lock(recipe, store)
    Path(folder, "net.onnx").write_bytes(b"another model")
    other = engine.recipe(tune={"trials": 4}, outputs=["objects"])
    changed = engine.plan_of(
        engine.planned(other, engine.target(), engine.target("b"), folder=folder)
    )
    with pytest.raises(RecipeError) as refused:
        enforce_lock(lock, changed, new_state(store), store)
    text = str(refused.value)
    assert "net:build/b is not in this lock file" in text
    assert "net:import is not what was locked: the content of file 'model' changed" in text
    assert 'net:export/host is not what was locked: outputs ["bundle"] -> ["objects"]' in text
    assert plan.stages


def test_a_lock_file_of_a_wrong_merge_is_refused(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    plan, state, lock = write_lock(recipe, store)
    text = lock.path.read_text()
    kernel = f"          {WORKLOAD}:\n"
    without = text[: text.index(kernel)].rstrip().removesuffix("kernels:").rstrip() + "\n"
    lock.path.write_text(without)
    with pytest.raises(RecipeError, match="are not those that net:build/host was built with"):
        enforce_lock(read_lock(lock.path), plan, new_state(store), store)
    # An output of one side, an input of the other.
    digest = state.artifacts["net:import"].digests(("model.json",))["model.json"]
    first = text.index(f"model.json: {digest}", text.index("      import:"))
    lock.path.write_text(text[:first] + f"model.json: {'d' * 64}" + text[first + 76 :])
    with pytest.raises(RecipeError, match=r"model\.json of import changed"):
        enforce_lock(read_lock(lock.path), plan, new_state(store), store)
