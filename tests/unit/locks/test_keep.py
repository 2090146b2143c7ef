"""From a finished plan to its lock and back: the same keys, without a search, for every kind of plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import engine
from tvmflow.decide import Survey
from tvmflow.errors import LockMismatch, RecipeError
from tvmflow.locks import Lock, keep_to, make_lock, read_lock
from tvmflow.planned import PlannedRecipe, Target
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.tuning.ledger import trial_id
from tvmflow.values import Plan, StageSpec

TRACE = [["GetSBlock", [], ["b0", "main"], ["b0"]], []]
WORKLOAD = "ab" * 32
CONTENTS = {
    "tasks.json": f'[{{"key": "{WORKLOAD}", "names": ["conv"], "weight": 2}}]',
    "chosen.json": f'{{\n "{WORKLOAD}": [\n  [\n   "GetSBlock",\n   [],\n   [\n    "b0",\n    "main"\n   ],\n'
    '   [\n    "b0"\n   ]\n  ],\n  []\n ]\n}',
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


def finish(plan: Plan, store: LocalStore) -> Survey:
    """Give every stage a result, with all files that anything asks for, and no facts."""
    survey = Survey(store, FileDigests(store))
    for spec in plan.stages:
        survey.decide(spec)
        key = survey.keys[spec.id]
        if spec.id not in survey.artifacts:
            with store.claim(key.digest) as slot:
                for name in _files(plan, spec):
                    text = CONTENTS.get(name, f"{name} of {spec.id}")
                    Path(slot.out, name).write_text(text)
                survey.artifacts[spec.id] = store.publish(slot, key, {}, 0.0)
    return survey


def _files(plan: Plan, spec: StageSpec) -> set[str]:
    needed = {
        name
        for other in plan.stages
        for need in other.needs
        if need.stage_id == spec.id
        for name in need.files
    }
    delivered = {
        stored for each in plan.deliveries if each.stage_id == spec.id for stored, _ in each.files
    }
    return needed | delivered | {"more"}


def lock_of(recipe: PlannedRecipe, store: LocalStore) -> tuple[Plan, Survey, Lock]:
    plan = engine.plan_of(recipe)
    survey = finish(plan, store)
    path = Path(store.root).parent / "net.lock.yaml"
    path.write_text(make_lock([recipe], plan, survey, store, path))
    return plan, survey, read_lock(path)


def survey_of(store: LocalStore) -> Survey:
    return Survey(store, FileDigests(store))


KINDS: dict[str, tuple[Target, ...]] = {
    "one target": (engine.target(),),
    "two targets": (engine.target("a"), engine.target("b")),
    "in parts": (engine.joined_target(),),
    "both": (engine.target("a"), engine.joined_target()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_locked_plan_has_the_same_keys_and_searches_nothing(
    kind: str, store: LocalStore, folder: str
) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), *KINDS[kind], folder=folder)
    plan, survey, lock = lock_of(recipe, store)
    kept = keep_to(lock, plan, survey_of(store), store)
    again = survey_of(store)
    again.look(kept)
    stages = {spec.stage for spec in kept.stages}
    assert stages == {spec.stage for spec in plan.stages} - {"tune", "pick_best"}
    assert {id: again.keys[id] for id in again.keys} == {
        spec.id: survey.keys[spec.id] for spec in kept.stages
    }
    assert all(decision.kind == "hit" for decision in again.decisions.values())
    assert not any(
        each.stage_id.partition(":")[2].startswith("pick_best") for each in kept.deliveries
    )


def test_what_a_library_is_only_checked_with_is_free(store: LocalStore, folder: str) -> None:
    """Another emulator's runner verifies the same library."""
    recipe = engine.planned(engine.recipe(verify={"run_on": "qemu"}), folder=folder)
    plan, survey, lock = lock_of(recipe, store)
    runner = next(spec for spec in plan.stages if spec.stage == "runner")
    assert survey.artifacts[runner.id].digests(("runner",))["runner"] not in lock.path.read_text()
    kept = keep_to(lock, plan, survey_of(store), store)
    assert runner.id in {spec.id for spec in kept.stages}


def test_a_lock_names_the_trial_of_each_kernel(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    _, _, lock = lock_of(recipe, store)
    (kernel,) = lock.recipes["net"].targets["host"].kernels.values()
    assert (kernel.names, kernel.calls, kernel.trial) == (["conv"], 2, trial_id(TRACE))


def test_the_same_results_give_the_same_text(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(), engine.target("b"), engine.target("a"), folder=folder)
    _, _, lock = lock_of(recipe, store)
    text = lock.path.read_text()
    turned = recipe._replace(targets=recipe.targets[::-1])
    assert lock_of(turned, store)[2].path.read_text() == text


def test_another_result_than_the_locked_one_is_refused(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(), folder=folder)
    plan, survey, lock = lock_of(recipe, store)
    digest = survey.artifacts["net:export/host"].digests(("more",))["more"]
    lock.path.write_text(lock.path.read_text().replace(digest, "e" * 64))
    kept = keep_to(read_lock(lock.path), plan, survey_of(store), store)
    with pytest.raises(LockMismatch, match="net:export/host: more has the digest"):
        survey_of(store).look(kept)


def test_all_that_differs_is_told_at_once(store: LocalStore, folder: str) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    plan, _, lock = lock_of(recipe, store)
    Path(folder, "net.onnx").write_bytes(b"another model")
    other = engine.recipe(tune={"trials": 4}, outputs=["objects"])
    changed = engine.plan_of(
        engine.planned(other, engine.target(), engine.target("b"), folder=folder)
    )
    with pytest.raises(RecipeError) as refused:
        keep_to(lock, changed, survey_of(store), store)
    text = str(refused.value)
    assert "net:build/b is not in this lock" in text
    assert "net:import is not what was locked: the content of file 'model' changed" in text
    assert 'net:export/host is not what was locked: outputs ["bundle"] -> ["objects"]' in text
    assert plan.stages


def test_sides_of_a_merge_that_do_not_belong_together_are_found(
    store: LocalStore, folder: str
) -> None:
    recipe = engine.planned(engine.recipe(tune={"trials": 4}), folder=folder)
    plan, survey, lock = lock_of(recipe, store)
    text = lock.path.read_text()
    kernel = f"          {WORKLOAD}:\n"
    without = text[: text.index(kernel)].rstrip().removesuffix("kernels:").rstrip() + "\n"
    lock.path.write_text(without)
    with pytest.raises(RecipeError, match="are not those that net:build/host was built with"):
        keep_to(read_lock(lock.path), plan, survey_of(store), store)
    # an output of one side, an input of the other
    digest = survey.artifacts["net:import"].digests(("model.json",))["model.json"]
    first = text.index(f"model.json: {digest}", text.index("      import:"))
    lock.path.write_text(text[:first] + f"model.json: {'d' * 64}" + text[first + 76 :])
    with pytest.raises(RecipeError, match=r"import gave another model\.json"):
        keep_to(read_lock(lock.path), plan, survey_of(store), store)
