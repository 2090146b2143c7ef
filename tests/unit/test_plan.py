"""From recipes to a plan: which stages, fed by which, and what is delivered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import COMPILE, STAGES, plan_of, planned, recipe, target
from tvmflow.errors import RecipeError


def test_one_import_serves_all_targets() -> None:
    """Stages of the model stand once, those of a target once for each; every one after what it needs."""
    made = recipe(targets=["host", "x86-64-v2"])
    plan = plan_of(planned(made, target("host"), target("x86-64-v2")))
    ids = [spec.id for spec in plan.stages]
    assert ids.count("net:import") == 1
    assert len(ids) == len(set(ids)) == 1 + 2 * (len(STAGES) - 1)
    for position, spec in enumerate(plan.stages):
        assert {need.stage_id for need in spec.needs} <= set(ids[:position])


def test_a_stage_is_fed_by_its_own_target() -> None:
    """The library for one machine is not built from another's choice."""
    made = recipe(targets=["host", "x86-64-v2"])
    plan = plan_of(planned(made, target("host"), target("x86-64-v2")))
    build = next(spec for spec in plan.stages if spec.id == "net:build/x86-64-v2")
    assert {need.stage_id for need in build.needs} == {
        "net:import",
        "net:extract_tasks/x86-64-v2",
        "net:pick_best/x86-64-v2",
    }


def test_a_pipeline_without_tuning_leaves_out_what_it_lacks() -> None:
    """Needs on stages that are not in the pipeline are dropped."""
    plan = plan_of(planned(recipe(), stages=COMPILE))
    assert [spec.stage for spec in plan.stages] == list(COMPILE)
    build = plan.stages[1]
    assert [need.stage for need in build.needs] == ["import"]


def test_only_verified_files_are_delivered() -> None:
    """Each delivery waits for verify where the pipeline has it, and for nothing where it has not."""
    made = recipe(outputs=["bundle", "shared-library"])
    gated = plan_of(planned(made)).deliveries
    assert {delivery.verified_by for delivery in gated} == {"net:verify/host"}
    names = [delivered for delivery in gated for _, delivered in delivery.files]
    assert sorted(names) == ["net.so", "net.tvmflow", "verify.json"]
    free = plan_of(planned(made, stages=("import", "build", "export"))).deliveries
    assert [delivery.verified_by for delivery in free] == [""]


def test_verify_reads_the_model_without_depending_on_its_bytes() -> None:
    """What the model means has already been said by import: a file that means the same verifies the same."""
    plan = plan_of(planned(recipe()))
    verify = plan.stages[-1]
    assert [(file.role, file.keyed) for file in verify.files] == [("model", False)]
    assert [(file.role, file.keyed) for file in plan.stages[0].files] == [("model", True)]


def test_the_reference_counts_only_where_it_is_used() -> None:
    """With `against: none`, another ONNX Runtime verifies nothing again."""
    assert "onnxruntime" in plan_of(planned(recipe())).stages[-1].tools
    without = recipe(verify={"against": "none"})
    assert "onnxruntime" not in plan_of(planned(without)).stages[-1].tools


def test_two_recipes_of_one_name_are_refused() -> None:
    """They would write into one folder; the place of the second's name is in the message."""
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(recipe(), folder="/one"), planned(recipe(), folder="/two"))
    assert caught.value.problems == [
        "/two/net.yaml:name: name: 'net' is also the name of /one/net.yaml"
    ]


def test_a_target_that_cannot_run_here_can_be_built_but_not_measured() -> None:
    """Each thing that would have to run is named with the field that turns it off."""
    away = target("cortex-a72", why_not="it is aarch64, this machine is x86_64")
    asked = recipe(tune={"trials": 5})
    with pytest.raises(RecipeError, match=r"tuned \(tune.trials: 0 .*verified \(verify.against"):
        plan_of(planned(asked, away))
    quiet = recipe(verify={"against": "none"})
    assert plan_of(planned(quiet, away)).stages


def test_a_form_that_a_target_does_not_have_is_refused() -> None:
    """Named with the output's place and with every target that it is not for; without export nothing is."""
    made = recipe(outputs=["bundle", "wheel"], verify={"against": "none"})
    bare, gpu = target("bare"), target("gpu")
    bare = bare._replace(tvm={**bare.tvm, "mtriple": "riscv64-unknown-elf"})
    gpu = gpu._replace(tvm={"kind": "cuda"})
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made, target(), bare, gpu))
    assert caught.value.problems == [
        "/recipes/net.yaml:outputs.1: outputs.1: there is no wheel for the target 'bare': "
        "there are no wheels for 'riscv64-unknown-elf'",
        "/recipes/net.yaml:outputs.1: outputs.1: there is no wheel for the target 'gpu': "
        "its kind is cuda, not llvm",
    ]
    assert plan_of(planned(made, bare, gpu, stages=("import", "build"))).stages


def test_only_forms_that_need_it_are_compiled_for() -> None:
    """A bundle more builds nothing again; weights apart do, and a system library by its recipe's name."""

    def build(*outputs: str) -> Any:
        plan = plan_of(planned(recipe(outputs=list(outputs))))
        return next(spec for spec in plan.stages if spec.stage == "build").settings

    assert build("shared-library") == build("bundle", "wheel", "cpp", "objects", "archive")
    assert build("bundle")["forms"] == []
    apart = build("params", "system-library", "c-source")
    assert apart["forms"] == ["c-source", "params", "system-library"]
    assert apart["prefix"] == "net_"
    assert "prefix" not in build("params")


def test_libraries_are_called_as_their_system_calls_them() -> None:
    """The plan knows the names before anything is built."""
    made = recipe(outputs=["shared-library", "static-library"], verify={"against": "none"})
    names = {}
    for triple in ("aarch64-linux-gnu", "arm64-apple-macos13", "x86_64-pc-windows-msvc"):
        there = target()._replace(tvm={"kind": "llvm", "mtriple": triple})
        deliveries = plan_of(planned(made, there)).deliveries
        names[triple] = [name for _, name in deliveries[0].files]
    assert names == {
        "aarch64-linux-gnu": ["net.so", "libnet.a"],
        "arm64-apple-macos13": ["net.dylib", "libnet.a"],
        "x86_64-pc-windows-msvc": ["net.dll", "net.lib"],
    }
