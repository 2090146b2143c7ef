"""From recipes to a plan: its stages, their inputs, and what is delivered."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.engine import COMPILE, STAGES, plan_of, planned, recipe, target
from tests.support.facts import extract_tasks_facts
from tvmflow.core.errors import RecipeError
from tvmflow.core.keys import stage_key
from tvmflow.core.types import Artifact, Need
from tvmflow.planning.checks import describe_runtimes
from tvmflow.recipe import Recipe
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.c_runtime import unsupported_reason
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.resolve import ResolvedTarget


def test_one_import_serves_all_targets() -> None:
    """Stages of the model occur once, those of a target once per target, after the stages that they need."""
    made = recipe(targets=["host", "x86-64-v2"])
    plan = plan_of(planned(made, target("host"), target("x86-64-v2")))
    ids = [spec.id for spec in plan.stages]
    assert ids.count("net:import") == 1
    assert len(ids) == len(set(ids)) == 1 + 2 * len(STAGES)
    for position, spec in enumerate(plan.stages):
        assert {need.stage_id for need in spec.needs} <= set(ids[:position])


def test_an_origin_names_all_targets_of_the_recipe() -> None:
    """Also those that the command line left out."""
    made = recipe(targets=["host", "x86-64-v2"])
    (origin,) = plan_of(planned(made, target("host"))).origins
    assert origin.targets == ("host", "x86-64-v2")


def test_a_stage_is_fed_by_its_own_target() -> None:
    """The library for one machine is not built from another's choice."""
    made = recipe(targets=["host", "x86-64-v2"])
    plan = plan_of(planned(made, target("host"), target("x86-64-v2")))
    build = next(spec for spec in plan.stages if spec.id == "net:build/x86-64-v2")
    assert {need.stage_id for need in build.needs} == {
        "net:import",
        "net:lower/x86-64-v2",
        "net:extract_tasks/x86-64-v2",
        "net:pick_best/x86-64-v2",
    }


def test_a_pipeline_without_tuning_leaves_out_what_it_lacks() -> None:
    """Needs on stages that are not in the pipeline are dropped."""
    plan = plan_of(planned(recipe(), stages=COMPILE))
    assert [spec.stage for spec in plan.stages] == ["import", "lower", "build", "export", "verify"]
    build = plan.stages[1]
    assert [need.stage for need in build.needs] == ["import"]


def test_only_verified_files_are_delivered() -> None:
    """Each delivery waits for verify where the pipeline has it, and for nothing where it has not."""
    made = recipe(outputs=["bundle", "shared-library"])
    gated = plan_of(planned(made)).deliveries
    assert {delivery.verified_by for delivery in gated} == {"net:verify/host"}
    names = [delivered for delivery in gated for _, delivered in delivery.files]
    assert sorted(names) == ["measurements.json", "net.so", "net.tvmflow", "verify.json"]
    free = plan_of(planned(made, stages=("import", "build", "export"))).deliveries
    assert [delivery.verified_by for delivery in free] == [""]


def test_verify_reads_the_model_without_depending_on_its_bytes() -> None:
    """Import depends on its bytes: a file with the same meaning gives the same verdict."""
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
    """They would share a folder; the message has the position of the second name."""
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(recipe(), folder="/one"), planned(recipe(), folder="/two"))
    assert caught.value.problems == [
        "/two/net.yaml:name: name: 'net' is also the name of /one/net.yaml; "
        "both would be delivered to one folder: give one of them another name"
    ]


def test_a_target_that_cannot_run_here_can_be_built_but_not_measured() -> None:
    """The message names every stage that would have to run, with the field that turns it off."""
    away = target("cortex-a72", why_not="it is aarch64, this machine is x86_64")
    targets = [{"name": "cortex-a72", "tvm": {"kind": "llvm"}}]
    tuned = recipe(tune={"trials": 5}, targets=targets)
    with pytest.raises(RecipeError, match=r"tuned or verified on.*tune.trials: 0 .*verify.against"):
        plan_of(planned(tuned, away))
    quiet = recipe(verify={"against": "none"}, targets=targets)
    assert plan_of(planned(quiet, away)).stages


def test_a_form_that_a_target_does_not_have_is_refused() -> None:
    """The message has the position of the output and every target that lacks it; without export there is none."""
    made = recipe(outputs=["bundle", "wheel"], verify={"against": "none"})
    phone = target("phone")
    phone = phone._replace(tvm={**phone.tvm, "mtriple": "aarch64-linux-android"})
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made, target(), phone))
    assert caught.value.problems == [
        "/recipes/net.yaml:outputs.1: outputs.1: there is no wheel for the target 'phone': "
        "there are no wheels for 'aarch64-linux-android'",
    ]
    assert plan_of(planned(made, phone, stages=("import", "build"))).stages


def test_only_forms_that_need_it_are_compiled_for() -> None:
    """Another bundle builds nothing again; separate weights do, and a system library depends on the recipe's name."""

    def build(*outputs: str) -> Any:
        plan = plan_of(planned(recipe(outputs=list(outputs))))
        return next(spec for spec in plan.stages if spec.stage == "build").settings

    assert build("bundle") == build("bundle", "wheel", "archive")
    assert build("bundle")["forms"] == []
    assert build("bundle", "c-library")["forms"] == ["c-library"]
    assert build("cpp")["forms"] == ["c-library"]
    assert build("shared-library") == build("objects", "static-library")
    extra_forms = build("params", "system-library", "c-source")
    assert extra_forms["forms"] == ["c-source", "params", "system-library"]
    assert extra_forms["prefix"] == "net_"
    assert "prefix" not in build("params")


def test_libraries_are_called_as_their_system_calls_them() -> None:
    """The plan knows the names before anything is built."""
    made = recipe(outputs=["shared-library", "static-library"], verify={"against": "none"})
    names = {}
    for triple in ("aarch64-linux-gnu", "arm64-apple-macos13", "x86_64-pc-windows-msvc"):
        subject = target()._replace(tvm={"kind": "llvm", "mtriple": triple})
        deliveries = plan_of(planned(made, subject)).deliveries
        names[triple] = [name for _, name in deliveries[0].files]
    assert names == {
        "aarch64-linux-gnu": ["net.so", "libnet.a"],
        "arm64-apple-macos13": ["net.dylib", "libnet.a"],
        "x86_64-pc-windows-msvc": ["net.dll", "net.lib"],
    }


def away(**fields: Any) -> ResolvedTarget:
    """A board that this machine cannot run."""
    made = target("edge", why_not="it is for aarch64, and this machine is x86_64")
    return made._replace(tvm={**made.tvm, "mtriple": "aarch64-linux-gnu", **fields})


def for_edge(*names: str, **fields: Any) -> Recipe:
    """A recipe for that board, or for boards of these names."""
    return recipe(
        targets=[{"name": name, "tvm": {"kind": "llvm"}} for name in names or ("edge",)], **fields
    )


def test_a_target_is_verified_where_the_recipe_says() -> None:
    """The message lists all possibilities, and each of them works."""
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(for_edge(), away()))
    (problem,) = caught.value.problems
    assert problem.startswith(
        "/recipes/net.yaml:targets.0: targets: 'edge' cannot be verified on this machine: "
    )
    for word in ("verify.against: none", "verify.run_on: qemu", "rpc"):
        assert word in problem
    assert plan_of(planned(for_edge(verify={"run_on": "qemu"}), away())).stages
    board = away()._replace(remote={"key": "pi4", "priority": 1, "timeout_s": 60.0})
    assert plan_of(planned(for_edge(verify={"run_on": "rpc"}), board)).stages
    with pytest.raises(RecipeError, match="cannot be verified"):
        plan_of(planned(for_edge(verify={"run_on": "local", "against": "none"}), away()))


def test_a_place_that_the_target_does_not_have_is_told() -> None:
    """With the position of `run_on` in the recipe."""
    emulated, remote = (for_edge(verify={"run_on": place}) for place in ("qemu", "rpc"))
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(emulated, away(mtriple="arm64-apple-macos13")))
    assert caught.value.problems == [
        "/recipes/net.yaml:verify.run_on: verify.run_on: qemu runs libraries for Linux and Android on aarch64, "
        "armv7, riscv64, x86_64; 'edge' is for arm64-apple-macos13"
    ]
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(remote, away()))
    assert caught.value.problems == [
        "/recipes/net.yaml:verify.run_on: verify.run_on: rpc runs libraries on the devices of a "
        "target's remote; 'edge' needs `remote: {key: NAME}`"
    ]


def test_code_that_qemu_does_not_emulate_is_refused_before_it_is_built() -> None:
    """qemu has no CPU with AVX-512: such a library ended with an illegal instruction, after a search of hours."""
    made = for_edge(verify={"run_on": "qemu"})
    server = away(mtriple="x86_64-linux-gnu")._replace(features=("avx2", "avx512f"))
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made, server))
    assert caught.value.problems == [
        "/recipes/net.yaml:verify.run_on: verify.run_on: qemu emulates no AVX-512, for which 'edge' has code; "
        "choose verify.run_on: local or rpc; with verify.against: none, nothing is checked"
    ]


def test_emulation_adds_the_emulation_program() -> None:
    """A program for each target, with the C library of its architecture; verify alone reads it."""
    made = for_edge("edge", "other", verify={"run_on": "qemu"})
    plan = plan_of(planned(made, away(), away(mcpu="cortex-a76")._replace(name="other")))
    stages = {spec.id: spec for spec in plan.stages}
    one, two = stages["net:emulation_libc/edge"], stages["net:emulation_libc/other"]
    assert one.settings == two.settings == {"compiled": "aarch64-linux-musl"}
    assert (one.needs, one.files) == ((), ())
    program = stages["net:emulation_program/edge"]
    assert program.needs == (
        Need("import", "net:import", ("signature.json",)),
        Need("build", "net:build/edge", ()),
        Need("emulation_libc", "net:emulation_libc/edge", ()),
    )
    assert program.settings["compiled"] == "aarch64-linux-musl"
    assert stages["net:build/edge"].settings["forms"] == ["c-library"]
    verify = stages["net:verify/edge"]
    assert Need("emulation_program", "net:emulation_program/edge", ("program",)) in verify.needs
    assert [spec.id for spec in plan.stages if "net:emulation_program/edge" in str(spec.needs)] == [
        verify.id
    ]
    others = {spec.stage for spec in plan_of(planned(recipe())).stages}
    assert not others & {"emulation_libc", "emulation_program"}


def test_emulation_needs_a_system_with_c_libraries() -> None:
    """A Linux whose C library is known."""
    made = for_edge("edge", verify={"run_on": "qemu"})
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made, away(mtriple="aarch64-linux-uclibc")))
    (problem,) = caught.value.problems
    assert problem.endswith(
        "verify.run_on: qemu runs plain C libraries: the C library of aarch64-linux-uclibc is "
        "unknown (there are gnu, musl)"
    )


def test_emulation_needs_the_c_runtime() -> None:
    """A library for TVM's runtime is refused, whether the recipe says so or its outputs."""
    for fields in ({"runtime": "vm"}, {"outputs": ["shared-library"]}):
        made = for_edge("edge", verify={"run_on": "qemu"}, **fields)
        with pytest.raises(RecipeError) as caught:
            plan_of(planned(made, away()))
        (problem,) = caught.value.problems
        assert problem.startswith(
            "/recipes/net.yaml:verify.run_on: verify.run_on: qemu runs plain C libraries, and "
            "'edge' has a library for TVM's runtime; "
        )


@pytest.mark.parametrize("fields", [{"runtime": "vm"}, {"outputs": ["shared-library", "bundle"]}])
def test_old_gpus_have_c_libraries_alone(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TVM's runtime works with a CUDA that does not know them."""
    monkeypatch.setattr(BACKENDS["cuda"], "unbuildable_reason", lambda _: "")
    tx2 = target("edge")._replace(tvm=dict(PRESETS["jetson-tx2"].tvm or {}))
    made = for_edge("edge", verify={"against": "none"}, **fields)
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made, tx2))
    (problem,) = caught.value.problems
    assert problem.endswith(
        "'edge' cannot have a library for TVM's runtime: TVM's runtime works with CUDA 13, which does "
        "not know sm_62; ask for the output c-library, and leave `runtime: vm` out"
    )


def test_a_target_may_have_a_place_of_its_own() -> None:
    """One recipe, some of whose libraries run here and others under emulation."""
    edge = {"name": "edge", "tvm": {"kind": "llvm"}, "verify": {"run_on": "qemu"}}
    made = recipe(targets=["host", edge])
    ids = {spec.id for spec in plan_of(planned(made, target("host"), away())).stages}
    assert "net:emulation_program/edge" in ids and "net:emulation_program/host" not in ids
    with pytest.raises(RecipeError) as caught:
        # as `--target edge` has it
        plan_of(planned(made, away(mtriple="arm64-apple-macos13")))
    (problem,) = caught.value.problems
    assert problem.startswith("/recipes/net.yaml:targets.1.verify.run_on: verify.run_on: qemu runs")


def test_where_a_library_runs_is_part_of_what_it_is_verified_by() -> None:
    """It is absent where the library runs here, so that `auto` and `local` are equal."""

    def settings(place: str) -> Any:
        return plan_of(planned(recipe(verify={"run_on": place}))).stages[-1].settings

    assert settings("auto") == settings("local")
    auto = settings("auto")
    assert auto.pop("deliveries") == {"bundle": ["net.tvmflow"]}
    assert settings("qemu") == {**auto, "run_on": "qemu"}


def test_a_limit_of_memory_is_no_part_of_a_key() -> None:
    """Every stage has that of its recipe; what the key is made of stays the same."""
    plain, limited = (
        plan_of(planned(recipe(**fields))) for fields in ({}, {"stage_memory": "2GiB"})
    )
    assert {spec.memory_bytes for spec in plain.stages} == {None}
    assert {spec.memory_bytes for spec in limited.stages} == {2 << 30}
    for before, after in zip(plain.stages, limited.stages, strict=True):
        assert after._replace(memory_bytes=None) == before
        keys = [
            stage_key(spec, {}, dict.fromkeys(spec.tools, "1"), "m") for spec in (before, after)
        ]
        assert keys[0] == keys[1]


def test_a_limit_of_memory_is_a_size_with_a_unit() -> None:
    with pytest.raises(
        ValidationError, match="'4G' is not a size such as 20GB or 500MB; units are"
    ):
        recipe(stage_memory="4G")


def test_a_plan_says_which_libraries_need_tvm() -> None:
    """By the target or the outputs, before anything runs; by the model, once a stage has lowered it."""
    made = recipe(outputs=["bundle"], verify={"against": "none"})
    triple = "powerpc64le-linux-gnu"
    cuda = {"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mtriple": triple}}
    both = planned(made, target(), target("gpu")._replace(tvm=cuda))
    plan = plan_of(planned(made, target()))
    gpu = f"net/gpu: runs on TVM's virtual machine (runtime: vm): {unsupported_reason(triple)}"
    assert list(describe_runtimes([both], plan, {})) == [gpu]
    reason = "sizes that are known only when it runs, which max needs"
    stage = next(
        spec for spec in plan.stages if spec.stage == "extract_tasks" and spec.target == "host"
    )
    lowered = {stage.id: Artifact("key", (), extract_tasks_facts(needs_tvm_for=reason))}
    assert list(describe_runtimes([both], plan, lowered)) == [
        gpu,
        f"net/host: runs on TVM's virtual machine (runtime: vm), which it needs for {reason}",
    ]
    system = recipe(outputs=["system-library"], verify={"against": "none"})
    (line,) = describe_runtimes([planned(system, target())], plan, {})
    assert line.endswith("(runtime: vm): all outputs are made for it")
    chosen = planned(recipe(outputs=["bundle"], runtime="vm"), target())
    assert not list(describe_runtimes([chosen], plan, {}))


def target_of_levels(*levels: str, measured: str) -> ResolvedTarget:
    """A target whose library has code for several levels, of which this machine has those until `measured`."""
    reasons = ["" if level <= measured else "this machine's CPU lacks it" for level in levels]
    parts = tuple(
        target(f"any.{level}", why_not=reason)._replace(isa_level_target="any")
        for level, reason in zip(levels, reasons, strict=True)
    )
    return parts[0]._replace(name="any", levels=parts, isa_level_target="")


def test_each_level_is_built_and_one_library_is_exported() -> None:
    """The best level of this machine is tuned; `verify` reads what was built for it."""
    levels = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
    made = recipe(targets=[{"name": "any", "levels": list(levels)}], tune={"trials": 8})
    plan = plan_of(planned(made, target_of_levels(*levels, measured="x86-64-v3")))
    specs = {spec.id.removeprefix("net:"): spec for spec in plan.stages}
    assert sorted(id for id in specs if not id.startswith(("lower", "build"))) == [
        "export/any",
        "extract_tasks/any.x86-64-v3",
        "import",
        "pick_best/any.x86-64-v3",
        "tune/any.x86-64-v3",
        "verify/any",
    ]
    for stage in ("lower", "build"):
        assert all(f"{stage}/any.{level}" in specs for level in levels)
    assert [need for need in specs["export/any"].needs if need.stage != "import"] == [
        Need(f"build/{level}", f"net:build/any.{level}", ()) for level in levels
    ]
    assert Need("lower", "net:lower/any.x86-64-v3", ("lowered.json",)) in specs["verify/any"].needs
    settings = specs["verify/any"].settings
    assert settings["target"]["tvm"]["mcpu"] == "any.x86-64-v3"
    assert {name: level.get("not_verified", "") for name, level in settings["levels"].items()} == {
        "x86-64-v2": "",
        "x86-64-v3": "",
        "x86-64-v4": "this machine's CPU lacks it (verify.run_on: qemu emulates other CPUs)",
    }


def test_code_for_webgpu_is_built_beside_webassembly() -> None:
    """Both are lowered and built, and exported as one package, without which it is an error."""
    tvm = {"kind": "llvm", "mtriple": "wasm32-wasi"}
    wasm = target("browser", why_not="it is for wasm32")._replace(tvm=tvm)
    gpu = wasm._replace(name="browser.webgpu", tvm={"kind": "webgpu", "host": wasm.tvm})
    browser = wasm._replace(webgpu=gpu)
    fields: dict[str, Any] = {
        "targets": ["browser"],
        "tune": {"trials": 0},
        "verify": {"against": "none"},
    }
    plan = plan_of(planned(recipe(outputs=["web"], **fields), browser))
    specs = {spec.id.removeprefix("net:"): spec for spec in plan.stages}
    for stage in ("lower", "build"):
        assert {f"{stage}/browser", f"{stage}/browser.webgpu"} <= specs.keys()
    assert [need for need in specs["export/browser"].needs if need.stage != "import"] == [
        Need("build", "net:build/browser", ()),
        Need("build/webgpu", "net:build/browser.webgpu", ()),
    ]
    settings = specs["build/browser.webgpu"].settings
    assert (settings["runtime"], settings["forms"]) == ("webgpu", [])
    alone = planned(recipe(outputs=["c-library"], **fields), browser)
    with pytest.raises(RecipeError, match="has code for WebGPU, and no output holds it; add `web`"):
        plan_of(alone)
    # what runs in Chromium is the package itself
    fields["verify"] = {"run_on": "chromium"}
    (check,) = (
        spec
        for spec in plan_of(planned(recipe(outputs=["web"], **fields), browser)).stages
        if spec.stage == "verify"
    )
    assert Need("export", "net:export/browser", ()) in check.needs
    fields["targets"] = ["host"]
    with pytest.raises(RecipeError, match="chromium runs packages for browsers; add `web`"):
        plan_of(planned(recipe(outputs=["bundle"], **fields), target()))


def test_a_level_that_is_added_changes_no_other_one() -> None:
    """The settings of what is lowered and built for one level do not name the others; nothing is tuned here."""
    both = [
        plan_of(
            planned(
                recipe(targets=[{"name": "any", "levels": list(levels)}], tune={"trials": 0}),
                target_of_levels(*levels, measured=levels[-1]),
            )
        )
        for levels in (("x86-64-v2", "x86-64-v3"), ("x86-64-v2", "x86-64-v3", "x86-64-v4"))
    ]
    few, many = ({spec.id: spec for spec in plan.stages} for plan in both)
    changed = {id for id, spec in many.items() if few.get(id) != spec}
    assert changed == {
        "net:lower/any.x86-64-v4",
        "net:build/any.x86-64-v4",
        "net:export/any",
        "net:verify/any",
    }


def test_only_c_libraries_have_levels() -> None:
    """Code for TVM's runtime is for one CPU."""
    made = recipe(targets=[{"name": "any", "levels": ["x86-64-v2", "x86-64-v3"]}])
    wrong = made.model_copy(update={"outputs": ("bundle", "shared-library")})
    any_target = target_of_levels("x86-64-v2", "x86-64-v3", measured="x86-64-v3")
    with pytest.raises(RecipeError, match=r"outputs\.1: there is no shared-library for .* 'any'"):
        plan_of(planned(wrong, any_target))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"levels": ["x86-64-v2"]}, "needs two levels or more"),
        ({"levels": ["x86-64-v2", "dotprod"]}, "levels of several architectures: aarch64, x86_64"),
        ({"levels": ["x86-64-v2", "x86-64-v3"], "preset": "aarch64"}, "the target is for aarch64"),
        ({"levels": ["x86-64-v2", "x86-64-v2"]}, "'x86-64-v2' is listed twice"),
        ({"levels": ["x86-64-v2", "x86-64-v5"]}, "is not a level"),
        ({"preset": "x86-64-any", "tvm": {"mcpu": "znver4"}}, "is set by each level"),
        ({"preset": "host", "levels": ["x86-64-v2", "x86-64-v3"]}, "not allowed with host"),
    ],
)
def test_levels_that_cannot_be_are_refused(fields: dict[str, Any], problem: str) -> None:
    """With a sentence about the field."""
    with pytest.raises(ValidationError, match=problem):
        recipe(targets=[{"name": "any", **fields}])
