"""The comparison of a recipe's libraries: what is in a row, which rows are compared, and which are marked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tests.support.facts import seconds, verify_facts
from tvmflow.core.types import Artifact, Json, Plan
from tvmflow.engine.report import (
    ComparedLibrary,
    RunReport,
    compare_libraries,
    mark_pareto_optimal,
)
from tvmflow.engine.summary import render

HALF = {"kernels": {"precision": "mixed"}}
EIGHT = {"inputs": {"data": {"shape": [8, 3]}}}
VARIANTS = {"full": {}, "half": HALF, "full8": EIGHT, "half8": {**EIGHT, **HALF}}


def library(variant: str = "full", group: int = 0, **measured: Any) -> ComparedLibrary:
    return ComparedLibrary(f"net-{variant}", variant, "host", "", group, **measured)


def marked(*libraries: ComparedLibrary) -> list[bool]:
    return [item.is_pareto_optimal for item in mark_pareto_optimal(libraries)]


@pytest.mark.parametrize(
    ("first", "second", "marks"),
    [
        ((1e-3, 100, 1e-6), (2e-3, 50, 1e-3), [True, True]),
        ((1e-3, 100, 1e-6), (2e-3, 200, 1e-3), [True, False]),
        ((1e-3, 100, 1e-6), (1e-3, 50, 1e-6), [False, True]),
        ((1e-3, 100, 1e-6), (1e-3, 100, 1e-6), [True, True]),
        ((None, 100, 1e-6), (None, 50, 1e-6), [False, True]),
        ((1e-3, 100, 1e-6), (None, 50, 1e-6), [False, False]),
        ((1e-3, 100, None), (2e-3, 50, 1e-6), [False, False]),
        ((None, 100, None), (None, 50, None), [False, False]),
        ((None, None, None), (None, None, None), [False, False]),
    ],
)
def test_pareto_optimal_is_what_no_other_library_dominates(
    first: tuple[Any, ...], second: tuple[Any, ...], marks: list[bool]
) -> None:
    """Ties are both marked. Where other things were measured nothing is compared; size alone is not a merit."""
    rows = [
        library(latency_s=latency, bytes=size, max_abs_error=error)
        for latency, size, error in (first, second)
    ]
    assert marked(*rows) == marks


def test_one_library_is_compared_with_none() -> None:
    """Also if the others have other inputs or are for another machine."""
    assert marked() == []
    assert marked(library(latency_s=1.0, bytes=1)) == [False]
    assert marked(library(latency_s=1.0, bytes=1), library(group=1, latency_s=2.0, bytes=2)) == [
        False,
        False,
    ]


def test_accuracy_stands_in_for_the_error() -> None:
    """With labels, an error that changes no result is not a loss."""
    exact = library(latency_s=2.0, bytes=2, accuracy=0.9, max_abs_error=1e-7)
    coarse = library(latency_s=1.0, bytes=1, accuracy=0.9, max_abs_error=1e-2)
    worse = coarse._replace(accuracy=0.8)
    assert marked(exact, coarse) == [False, True]
    assert marked(exact, worse) == [True, True]


def test_a_middle_row_may_be_dominated_by_either_side() -> None:
    """Each library is compared with every other one."""
    rows = [(1.0, 30), (3.0, 40), (2.0, 20), (3.0, 10)]
    assert marked(*(library(latency_s=a, bytes=b) for a, b in rows)) == [True, False, True, True]


# ---------------------------------------------------------------- rows of a plan


def facts_of(plan: Plan, measured: dict[str, tuple[float, int, float]]) -> dict[str, Artifact]:
    """Results with these latencies, sizes and errors by recipe; on a target that runs here."""
    artifacts = {}
    for spec in plan.stages:
        latency, size, error = measured[spec.recipe]
        shape = [8, 3] if spec.recipe.endswith("8") else [1, 3]
        by_stage: dict[str, dict[str, Json]] = {
            "import": {"inputs": [{"name": "data", "shape": shape, "dtype": "float32"}]},
            "export": {"library_bytes": size, "files": {}},
            "verify": {
                **verify_facts(latency={"library": seconds(latency)}),
                "outputs": {"a": {"max_abs_error": 0.0}, "b": {"max_abs_error": error}},
            },
        }
        artifacts[spec.id] = Artifact(spec.id, (), by_stage.get(spec.stage, {}))
    return artifacts


MEASURED = {
    "net-full": (2e-3, 200_000, 1e-6),
    "net-half": (1e-3, 100_000, 1e-3),
    "net-full8": (8e-3, 200_000, 1e-6),
    "net-half8": (9e-3, 250_000, 1e-3),
}


def plan_with(variants: dict[str, Any], *targets: str) -> Plan:
    names = targets or ("host",)
    made = recipe(variants=variants, targets=[{"name": n, "preset": "host"} for n in names])
    machines = [target("cpu")._replace(name=name, features=("f16c",)) for name in names]
    return plan_of(
        *(
            planned(made, *machines, stages=COMPILE)._replace(variant=item)
            for item in (variants or [""])
        )
    )


def test_rows_are_compared_for_the_same_inputs() -> None:
    """Two precisions for each of two shapes, grouped by shape."""
    plan = plan_with(VARIANTS)
    rows = compare_libraries(plan, facts_of(plan, MEASURED))
    assert [(row.variant, row.group, row.is_pareto_optimal) for row in rows] == [
        ("full", 0, True), ("half", 0, True), ("full8", 1, True), ("half8", 1, False),
    ]  # fmt: skip
    assert rows[1] == ComparedLibrary(
        "net-half", "half", "host", "data 1×3", 0, 1e-3, 100_000, None, 1e-3, True
    )


def test_targets_for_one_machine_are_compared_without_variants() -> None:
    """As with an override of `kernels` for one of them."""
    plan = plan_with({}, "host", "other")
    rows = compare_libraries(plan, facts_of(plan, {"net": (2e-3, 200_000, 1e-6)}))
    assert [(row.target, row.group, row.is_pareto_optimal) for row in rows] == [
        ("host", 0, True),
        ("other", 0, True),
    ]


@pytest.mark.parametrize("variants", [{}, {"only": {}}])
def test_one_library_needs_no_table(variants: dict[str, Any]) -> None:
    """Neither does one for each of several machines."""
    plan = plan_with(variants)
    measured = dict.fromkeys(("net", "net-only"), (1e-3, 1, 1e-6))
    assert compare_libraries(plan, facts_of(plan, measured)) == ()
    edge = target("edge")
    made = recipe(targets=["host", {"name": "edge", "preset": "cortex-a72"}])
    plan = plan_of(planned(made, target("host"), edge, stages=COMPILE))
    assert compare_libraries(plan, facts_of(plan, measured)) == ()


def test_what_failed_has_no_row_and_what_was_not_measured_is_none() -> None:
    """The others keep theirs."""
    plan = plan_with({"full": {}, "half": HALF, "third": HALF})
    artifacts = facts_of(plan, {**MEASURED, "net-third": (1e-3, 1, 1e-6)})
    del artifacts["net-third:verify/host"]
    artifacts["net-half:verify/host"] = Artifact("", (), verify_facts(not_run="it is for aarch64"))
    rows = compare_libraries(plan, artifacts)
    assert [(row.variant, row.latency_s, row.max_abs_error) for row in rows] == [
        ("full", 2e-3, 1e-6),
        ("half", None, None),
    ]


def test_the_library_of_a_partitioned_target_has_the_size_of_its_parts() -> None:
    """They are delivered in one bundle."""
    split = joined_target()
    fields = [
        {"name": "first", "preset": "host", "until": ["middle"]},
        {"name": "second", "preset": "host"},
    ]
    made = recipe(variants={"a": {}, "b": {}}, targets=[{"name": "split", "parts": fields}])
    plan = plan_of(
        *(planned(made, split, stages=COMPILE)._replace(variant=name) for name in ("a", "b"))
    )
    rows = compare_libraries(
        plan, facts_of(plan, {"net-a": (1e-3, 100, 1e-6), "net-b": (2e-3, 100, 1e-6)})
    )
    assert [(row.variant, row.bytes, row.is_pareto_optimal) for row in rows] == [
        ("a", 200, True),
        ("b", 200, False),
    ]


def test_a_report_has_the_comparison_as_json() -> None:
    """And in the table of builds, as text."""
    plan = plan_with({"full": {}, "half": HALF})
    rows = compare_libraries(plan, facts_of(plan, MEASURED))
    report = RunReport((), (), (), 1.0, compared_libraries=rows)
    content = json.loads(render(report, as_json=True))["compared_libraries"]
    assert [row["is_pareto_optimal"] for row in content] == [True, True]
    assert content[1]["max_abs_error"] == 1e-3
