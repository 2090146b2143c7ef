"""What a release has by name, and what is new or gone since the one before."""

from __future__ import annotations

from typing import Any

from tests.support import engine
from tvmflow.core.types import Plan
from tvmflow.recipe import Release
from tvmflow.recipe.lock_file import LockedRecipe, LockedStage, LockFile
from tvmflow.release.gates import (
    ContentChange,
    FailedGate,
    check_content,
    compare_content,
    list_locked,
    list_missing,
    list_planned,
)


def plan(*targets: str, **fields: Any) -> Plan:
    made = engine.recipe(outputs=["bundle", "shared-library"], **fields)
    return engine.plan_of(engine.planned(made, *map(engine.target, targets)))


def lock_of(planned: Plan) -> LockFile:
    stages = {spec.label: LockedStage(version=1, settings=spec.settings) for spec in planned.stages}
    recipe = LockedRecipe(recipe="net.yaml", version="0", stages=stages, targets={})
    return LockFile(lock=1, machine="", tools={}, recipes={"net": recipe})


def test_recipes_targets_outputs_and_checks_have_names() -> None:
    assert list_planned(plan("host")) == {
        "net",
        "net/host",
        "net/host/bundle",
        "net/host/shared-library",
        "net/host/verify",
    }


def test_a_target_that_is_not_compared_with_a_reference_is_not_verified() -> None:
    assert "net/host/verify" not in list_planned(plan("host", verify={"against": "none"}))


def test_the_parts_of_a_model_belong_to_their_target() -> None:
    made = engine.recipe(outputs=["bundle", "shared-library"])
    names = list_planned(engine.plan_of(engine.planned(made, engine.joined_target())))
    assert names == {
        "net",
        "net/split",
        "net/split/bundle",
        "net/split/shared-library",
        "net/split/verify",
    }


def test_a_lock_file_has_the_names_of_its_plan() -> None:
    planned = plan("host", "edge")
    assert list_locked(lock_of(planned)) == list_planned(planned)


def test_only_the_outermost_name_of_a_change_is_listed() -> None:
    change = compare_content(list_planned(plan("host", "new")), list_planned(plan("host", "old")))
    assert change == ContentChange(added=("net/new",), removed=("net/old",))


def test_a_declaration_covers_what_is_inside() -> None:
    removed = ["net/edge", "net/host/wheel", "other"]
    assert list_missing(removed, ["net"]) == ["other"]
    assert list_missing(removed, ["net/edge", "other"]) == ["net/host/wheel"]
    assert list_missing(["net"], ["net/edge"]) == ["net"]


def test_what_is_gone_without_a_declaration_fails_its_gate() -> None:
    change = ContentChange(removed=("net/edge", "net/old"))
    release = Release(version="1", drop=("net/old",))
    assert check_content(change, "all-1.0", release) == [
        FailedGate("net/edge", "content", "it is in all-1.0, and not in this release")
    ]
