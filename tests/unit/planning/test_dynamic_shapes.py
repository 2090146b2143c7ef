"""Recipes with dimensions: what is in which key, and the targets that need fixed sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import joined_target, plan_of, planned, recipe, target
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import StageSpec

STAGES = ("import", "extract_tasks", "pick_best", "build", "export", "verify")
TRIPLE = "x86_64-linux-gnu"
INPUTS = {"data": {"shape": ["batch", 3, 8, 8], "dtype": "float32"}}


def made(**dimension: Any) -> Any:
    return recipe(inputs=INPUTS, dimensions={"batch": {"min": 1, "max": 8, **dimension}})


def settings(recipe_: Any) -> dict[str, dict[str, Any]]:
    plan = plan_of(planned(recipe_, target("host"), stages=STAGES))
    return {spec.id: spec.settings for spec in plan.stages}


def changed(before: Any, after: Any) -> list[str]:
    left, right = settings(before), settings(after)
    assert left.keys() == right.keys()
    return sorted(name for name in left if left[name] != right[name])


def test_sizes_to_tune_at_are_no_part_of_the_import() -> None:
    """Another range is; both are in the reasons, by their words in the recipe."""
    assert settings(made(tune_at=[4]))["net:verify/host"]["tune_at"] == {"batch": [4]}
    assert "net:verify/host" in changed(made(), made(tune_at=[4]))
    assert "net:import" not in changed(made(), made(tune_at=[4]))
    assert "net:import" in changed(made(), made(max=16))


def test_a_recipe_of_fixed_sizes_has_the_settings_that_it_had() -> None:
    fixed = recipe(inputs={"data": {"shape": [1, 3, 8, 8], "dtype": "float32"}})
    unused = fixed.model_copy(update={"dimensions": made().dimensions})
    assert "tune_at" not in settings(fixed)["net:verify/host"]
    assert changed(fixed, unused) == []


def gpu(name: str) -> Any:
    return target(name)._replace(
        tvm={"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mtriple": TRIPLE}}
    )


def test_targets_that_need_fixed_sizes_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts, or for a GPU; importing such a model is not a problem, and no dimension is none either."""
    monkeypatch.setattr("tvmflow.targets.backends.cuda.nvrtc.is_installed", lambda: True)
    for wrong, reason in (
        (gpu("host"), "kernels for cuda are made for fixed sizes"),
        (joined_target("host"), "the parts of a model exchange tensors of fixed sizes"),
    ):
        with pytest.raises(RecipeError) as refused:
            plan_of(planned(made(), wrong, stages=STAGES))
        problem = "; ".join(refused.value.problems)
        assert (
            f"targets: '{wrong.name}' does not support the dynamic dimensions batch: {reason}; write"
            in problem
        )
    assert plan_of(planned(made(), gpu("host"), stages=("import",))).stages


def test_dynamic_shapes_are_no_problem_for_a_cpu() -> None:
    plan = plan_of(planned(made(), target("host"), stages=STAGES))
    assert [spec.stage for spec in plan.stages if isinstance(spec, StageSpec)][-1] == "verify"


def test_a_project_in_cpp_takes_dynamic_shapes() -> None:
    cpp = made().model_copy(update={"outputs": ("bundle", "cpp")})
    assert "cpp" in settings(cpp)["net:export/host"]["outputs"]
