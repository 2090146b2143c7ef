"""Per-target overrides and variants of a recipe, and the plans that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, write
from tvmflow.core.errors import RecipeError
from tvmflow.core.keys import stage_key
from tvmflow.core.types import Plan, StageSpec
from tvmflow.planning.recipes import load_recipe
from tvmflow.recipe import InputSpec, Kernels, Recipe, TargetSpec, Tune, Verify
from tvmflow.targets.backends.cuda import gpu as cuda_gpu
from tvmflow.targets.backends.cuda import nvrtc
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.toolchain import DEFAULT_FLAGS

DATA = {"data": {"shape": [1, 3, 8, 8], "dtype": "uint8", "range": [0, 9]}}
BATCHES = {"one": {}, "eight": {"inputs": {"data": {"shape": [8, 3, 8, 8]}}}}


def edge(**fields: Any) -> dict[str, Any]:
    return {"name": "edge", "preset": "cortex-a72", **fields}


def specs(plan: Plan) -> dict[str, StageSpec]:
    return {spec.id: spec for spec in plan.stages}


def keys(plan: Plan) -> dict[str, str]:
    """The key of each stage, with the name of each file in place of its content."""
    return {
        spec.id: stage_key(
            spec,
            {f"{need.stage}/*": need.stage for need in spec.needs},
            dict.fromkeys(spec.tools, ""),
            "",
        ).digest
        for spec in plan.stages
    }


# ---------------------------------------------------------------- one target


def test_fields_without_override_are_those_of_the_recipe() -> None:
    """Overrides change only their own fields, and only for their target."""
    made = recipe(
        targets=["host", edge(tune={"trials": 8}, verify={"against": "none"}, outputs=["bundle"])],
        tune={"trials": 100, "seed": 3},
        verify={"rtol": 0.5},
        outputs=["shared-library"],
    )
    assert made.for_target("host") == made
    edge_recipe = made.for_target("edge")
    assert edge_recipe.tune == Tune(trials=8, seed=3)
    assert edge_recipe.verify == Verify(against="none", rtol=0.5)
    assert edge_recipe.outputs == ("bundle",)
    assert edge_recipe.name == made.name
    assert made.for_target("a target that the plan alone knows") == made


def test_precision_can_be_overridden_per_target_and_part() -> None:
    """As all of `kernels`; the imported model is the same."""
    made = recipe(
        targets=["host", edge(kernels={"precision": "mixed"})], kernels={"layout": "plain"}
    )
    assert made.for_target("host").kernels == Kernels(layout="plain")
    assert made.for_target("edge").kernels == Kernels(layout="plain", precision="mixed")
    half = target("edge")._replace(features=("avx2", "f16c"))
    actual = specs(plan_of(planned(made, target(), half)))
    assert "net:import" in actual and "net:import/edge" not in actual
    kept = {name: actual[f"net:lower/{name}"].settings["lowering"] for name in ("host", "edge")}
    assert [kept[name]["precision"] for name in ("host", "edge")] == ["model", "mixed"]
    checks = [actual[f"net:verify/{name}"].settings["precision"] for name in kept]
    assert checks == ["model", "mixed"]
    joined = recipe(
        targets=[
            {
                "name": "split",
                "parts": [
                    {"name": "first", "preset": "host", "until": ["middle"]},
                    {"name": "second", "preset": "host", "kernels": {"precision": "mixed"}},
                ],
            }
        ]
    )
    both = joined_target()
    machines = tuple(item._replace(features=("f16c",)) for item in both.parts)
    actual = specs(plan_of(planned(joined, both._replace(parts=machines), stages=COMPILE)))
    kept = {name: actual[f"net:lower/split.{name}"].settings for name in ("first", "second")}
    assert [kept[name]["lowering"]["precision"] for name in kept] == ["model", "mixed"]
    assert actual["net:verify/split"].settings["precision"] == "mixed"


@pytest.mark.parametrize(("precision", "dtype"), [("mixed", "float16"), ("bfloat16", "bfloat16")])
def test_c_source_does_not_support_narrow_floats(precision: str, dtype: str) -> None:
    """C has no such types."""
    half = target("edge")._replace(features=("f16c", "avx512_bf16", "avx512vl"))
    made = recipe(targets=[edge(kernels={"precision": precision})], outputs=["c-source"])
    with pytest.raises(
        RecipeError, match=f"there is no c-source for the target 'edge': C has no {dtype}"
    ):
        plan_of(planned(made, half))


MIXED = " or, for weights of float16, `{precision: mixed}`"
"""What is advised besides, but where `mixed` would be refused in turn."""
NO_MIXED = ("riscv64-linux-gnu",)


def check_precision(
    precision: str,
    tvm: dict[str, str],
    features: tuple[str, ...],
    reason: str,
    problem: str,
    other: str = "",
) -> tuple[Recipe, ResolvedTarget]:
    """Check that a target with these features is refused for a reason, or planned where there is none."""
    made = recipe(targets=[edge()], kernels={"precision": precision})
    edge_target = target("edge")._replace(features=features)
    edge_target = edge_target._replace(tvm={**edge_target.tvm, **tvm})
    if not reason:
        assert plan_of(planned(made, edge_target)).stages
        return made, edge_target
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(made, edge_target))
    assert refused.value.problems == [
        f"/recipes/net.yaml:targets.0: targets: 'edge' {problem}: "
        f"{reason}; give it `kernels: {{precision: model}}`{other}"
    ]
    return made, edge_target


@pytest.mark.parametrize(
    ("triple", "features", "reason"),
    [
        ("x86_64-linux-gnu", ("avx",), "its CPU lacks f16c"),
        ("armv7l-linux-gnueabihf", ("vfpv4",), "there is no code for armv7 that converts float16 in vectors"),
        ("x86_64-linux-gnu", ("avx2", "f16c"), ""),
        ("aarch64-linux-gnu", ("asimd",), ""),
    ],
)  # fmt: skip
def test_float16_needs_vector_conversion_instructions(
    triple: str, features: tuple[str, ...], reason: str
) -> None:
    """Other targets would only become slower, which is reported before anything runs."""
    problem = "only loses speed by kernels.precision: mixed"
    made, edge_target = check_precision("mixed", {"mtriple": triple}, features, reason, problem)
    if reason:
        assert plan_of(planned(made, edge_target, stages=("import",))).stages


@pytest.mark.parametrize(
    ("tvm", "features", "reason"),
    [
        ({"mtriple": "x86_64-linux-gnu"}, ("avx512f", "avx512vl", "f16c"), "its CPU lacks avx512_bf16"),
        ({"mtriple": "aarch64-linux-gnu"}, ("asimd",), "its CPU lacks bf16"),
        ({"mtriple": "riscv64-linux-gnu"}, ("v",), "there is no code for riscv64 that multiplies bfloat16"),
        ({"mtriple": "x86_64-linux-gnu"}, ("avx512_bf16", "avx512vl"), ""),
        ({"mtriple": "aarch64-linux-gnu"}, ("bf16",), ""),
    ],
)  # fmt: skip
def test_bfloat16_needs_an_instruction(
    tvm: dict[str, str], features: tuple[str, ...], reason: str
) -> None:
    """Without it, kernels would compute in float32, which is reported before anything runs."""
    problem = "has no instructions for kernels.precision: bfloat16"
    other = "" if tvm["mtriple"] in NO_MIXED else MIXED
    check_precision("bfloat16", tvm, features, reason, problem, other)


@pytest.mark.parametrize(
    ("tvm", "features", "reason"),
    [
        ({"mtriple": "x86_64-linux-gnu"}, ("f16c",), "there is no code for x86_64 that adds float16"),
        ({"mtriple": "riscv64-linux-gnu"}, ("v",), "there is no code for riscv64 that adds float16"),
        ({"mtriple": "aarch64-linux-gnu"}, ("asimd",), "its CPU lacks fphp, asimdhp (Armv8.2 has it: cortex-a55, neoverse-n1 and later)"),
        ({"mtriple": "aarch64-linux-gnu"}, ("asimd", "asimdhp", "fphp"), ""),
    ],
)  # fmt: skip
def test_float16_arithmetic_needs_an_instruction(
    tvm: dict[str, str], features: tuple[str, ...], reason: str
) -> None:
    """Without it, kernels would compute in float32, which is reported before anything runs."""
    problem = "has no instructions for kernels.precision: float16"
    other = "" if tvm["mtriple"] in NO_MIXED else MIXED
    check_precision("float16", tvm, features, reason, problem, other)


@pytest.mark.parametrize(
    ("all_of_them", "change", "tune"),
    [
        ({"trials": 9}, {"minutes": 5}, Tune(trials=9, minutes=5)),
        ({}, {"minutes": 5.0}, Tune.model_validate({"minutes": 5.0})),
        ({"trials": 9, "min_speedup": 2}, {"trials": 0, "min_speedup": None}, Tune(trials=0)),
        ({"trials": 9}, {"min_speedup": 2}, Tune(trials=9, min_speedup=2.0)),
        ({"trials": 9, "only": ["conv2d"]}, {"only": []}, Tune(trials=9)),
    ],
)
def test_rules_between_fields_hold_after_overrides(
    all_of_them: dict[str, Any], change: dict[str, Any], tune: Tune
) -> None:
    """Fields that belong together may be in two places; null resets a field of the recipe."""
    made = recipe(targets=[edge(tune=change)], tune=all_of_them)
    assert made.for_target("edge").tune.model_dump() == tune.model_dump()


def test_an_accuracy_gate_of_a_target_uses_the_data_of_the_recipe(tmp_path: Path) -> None:
    """The data is the recipe's, the gate is an override."""
    lay_out(tmp_path)
    text = edited(("- host", "- {name: a, preset: host, verify: {min_accuracy: 0.9}}"))
    made = load_recipe(write(tmp_path / "r.yaml", text)).recipe
    assert made.for_target("a").verify.data == "data.npz"


def test_attributes_override_those_of_a_preset() -> None:
    """Others are added to those of the preset."""
    fields = edge(tvm={"mcpu": "cortex-a73", "mattr": ["+crypto"]})
    mapping = TargetSpec.model_validate(fields).tvm_target()
    base = dict(PRESETS["cortex-a72"].tvm or {})
    assert mapping == {**base, "mcpu": "cortex-a73", "mattr": ["+crypto"]}
    assert dict(PRESETS["cortex-a72"].tvm or {}) == base


def test_a_toolchain_has_default_flags_for_a_compiler() -> None:
    """A recipe can replace them."""
    made = TargetSpec.model_validate(edge(toolchain={"linker": "g++"}))
    assert made.toolchain is not None and made.toolchain.flags == DEFAULT_FLAGS
    own = TargetSpec.model_validate(edge(toolchain={"linker": "g++", "flags": ["-shared"]}))
    assert own.toolchain is not None and own.toolchain.flags == ("-shared",)


def test_every_stage_follows_the_overrides_of_its_target() -> None:
    """Settings, files, deliveries and the tools of the reference are those of the target."""
    made = recipe(
        targets=["host", {**edge(), "tune": {"trials": 4}, "verify": {"against": "none"}}],
        outputs=["shared-library"],
        verify={"data": "one.npz"},
    )
    changed = made.model_copy(
        update={
            "targets": (
                made.targets[0],
                TargetSpec.model_validate(
                    edge(outputs=["bundle"], tune={"trials": 4}, verify={"data": "two.npz"})
                ),
            )
        }
    )
    plan = plan_of(planned(changed, target("host"), target("edge")))
    actual = specs(plan)
    assert actual["net:tune/host"].settings["tune"]["trials"] == 0
    assert actual["net:tune/edge"].settings["tune"]["trials"] == 4
    data = {name: actual[f"net:verify/{name}"].files[-1] for name in ("host", "edge")}
    assert data["host"].path == "/recipes/one.npz"
    assert data["host"].where == "/recipes/net.yaml:verify.data"
    assert data["edge"].path == "/recipes/two.npz"
    assert data["edge"].where == "/recipes/net.yaml:targets.1.verify.data"
    delivered = {(item.target, name) for item in plan.deliveries for _, name in item.files}
    assert delivered == {
        ("host", "net.so"),
        ("host", "verify.json"),
        ("host", "measurements.json"),
        ("edge", "net.tvmflow"),
        ("edge", "roofline.svg"),
        ("edge", "verify.json"),
        ("edge", "measurements.json"),
    }
    away = plan_of(planned(made, target("host"), target("edge")))
    assert "onnxruntime" in specs(away)["net:verify/host"].tools
    assert "onnxruntime" not in specs(away)["net:verify/edge"].tools


def test_a_target_that_cannot_run_locally_disables_measurements() -> None:
    """Other targets are tuned and verified."""
    away = target("edge", why_not="it is for aarch64, and this machine is x86_64")
    quiet = edge(tune={"trials": 0}, verify={"against": "none"})
    fields: dict[str, Any] = {"tune": {"trials": 4}}
    plan = plan_of(planned(recipe(targets=["host", quiet], **fields), target("host"), away))
    assert specs(plan)["net:tune/host"].settings["tune"]["trials"] == 4
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(recipe(targets=["host", edge()], **fields), away))
    [problem] = refused.value.problems
    assert problem.startswith("/recipes/net.yaml:targets.1: targets: 'edge' cannot be tuned")


@pytest.mark.parametrize(
    ("tvm", "reason"),
    [
        ({"kind": "cuda", "arch": "sm_80"}, "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'"),
        ({"kind": "cuda", "arch": "sm_62"}, "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'"),
        ({"kind": "cuda", "arch": "sm_37"}, "no compiler for sm_37 is left; the oldest GPUs are sm_50"),
        ({"kind": "cuda", "arch": "sm_90a"}, "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'"),
        ({"kind": "vulkan"}, "its kind is vulkan, and kernels are built for CPUs"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_built_is_rejected_before_anything_runs(
    tvm: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its position and the reason; the model can still be imported."""
    monkeypatch.setattr(nvrtc, "is_installed", lambda: False)
    monkeypatch.setattr(cuda_gpu, "has_libdevice", lambda: False)
    gpu = target("edge")._replace(tvm=tvm, unrunnable_reason="there is none here")
    made = recipe(targets=["host", edge()])
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(made, gpu))
    [problem] = refused.value.problems
    start = "/recipes/net.yaml:targets.1: targets: 'edge' cannot be built: "
    assert problem.startswith(start + reason)
    quiet = recipe(targets=[edge()], verify={"against": "none"})
    assert plan_of(planned(quiet, gpu, stages=("import",))).stages


def test_a_target_without_a_linker_needs_a_toolchain() -> None:
    """Object code can be built for more targets than can be linked."""
    sparc = target("edge")._replace(tvm={"kind": "llvm", "mtriple": "sparc64-linux-gnu"})
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(recipe(targets=[edge()]), sparc))
    assert "'edge' cannot be linked: no linker is set up for sparc64" in str(refused.value)
    identity = {"linker": "ld", "flags": [], "version": "1", "sha256": "0"}
    plan = plan_of(planned(recipe(targets=[edge()]), sparc._replace(toolchain=identity)))
    assert specs(plan)["net:export/edge"].settings["toolchain"] == identity
    assert plan_of(planned(recipe(targets=[edge()]), sparc, stages=("import", "build"))).stages


def test_a_toolchain_only_matters_to_stages_that_link() -> None:
    """After a change of its version only `export` runs again."""
    one, two = (
        target()._replace(toolchain={"linker": "ld", "flags": [], "version": v, "sha256": v})
        for v in "12"
    )
    before, after = (keys(plan_of(planned(recipe(), item))) for item in (one, two))
    assert {name for name in before if before[name] != after[name]} == {"net:export/host"}


# ---------------------------------------------------------------- variants


def test_a_variant_has_its_own_shapes_and_name() -> None:
    """Other fields of an input (dtype, range) are those of the recipe."""
    made = recipe(inputs=DATA, variants=BATCHES)
    assert made.for_variant("one") == made.model_copy(update={"name": "net-one"})
    assert made.for_variant("eight").name == "net-eight"
    assert made.for_variant("eight").inputs == {
        "data": InputSpec(shape=(8, 3, 8, 8), dtype="uint8", range=(0.0, 9.0))
    }


def test_a_variant_may_define_all_inputs() -> None:
    """When the recipe has none, as for an ONNX model with a symbolic batch size."""
    made = recipe(variants=BATCHES)
    assert made.for_variant("eight").inputs == {"data": InputSpec(shape=(8, 3, 8, 8))}


def both(made: Recipe, *targets: Any, stages: tuple[str, ...] = COMPILE) -> Plan:
    return plan_of(
        *(planned(made, *targets, stages=stages)._replace(variant=item) for item in made.variants)
    )


def test_every_variant_is_built_for_every_target() -> None:
    """Each variant is imported once, and has its own folder for each target."""
    made = recipe(inputs=DATA, variants=BATCHES, targets=["host", "x86-64-v2"])
    plan = both(made, target("host"), target("x86-64-v2"))
    ids = [spec.id for spec in plan.stages]
    assert ids == [
        f"net-{variant}:{label}"
        for variant in ("one", "eight")
        for label in (
            "import",
            *(
                f"{stage}/{name}"
                for stage in ("lower", *COMPILE[1:])
                for name in ("host", "x86-64-v2")
            ),
        )
    ]
    assert specs(plan)["net-eight:import"].settings["inputs"]["data"]["shape"] == [8, 3, 8, 8]
    places = {(item.recipe, item.target) for item in plan.deliveries}
    assert places == {(f"net-{v}", t) for v in ("one", "eight") for t in ("host", "x86-64-v2")}


def test_variants_with_the_same_inputs_share_stages() -> None:
    """With another batch size all stages differ, from `import` on."""
    actual = keys(both(recipe(inputs=DATA, variants={**BATCHES, "same": {}}), target("host")))
    assert actual["net-one:import"] != actual["net-eight:import"]
    assert actual["net-one:import"] == actual["net-same:import"]
    assert actual["net-one:build/host"] == actual["net-same:build/host"]


def test_a_variant_may_have_its_own_kernels_and_checks() -> None:
    """Beside other shapes or without; what a target says of itself has priority."""
    half = {"kernels": {"precision": "mixed"}, "verify": {"rtol": 0.02}}
    made = recipe(
        inputs=DATA,
        kernels={"math": "libm"},
        verify={"rtol": 0.01, "samples": 7},
        variants={"full": {}, "half": half, "half8": {**BATCHES["eight"], **half}},
        targets=["host", edge(kernels={"precision": "model"}, verify={"rtol": 0.5})],
    )
    assert made.for_variant("full").kernels == made.kernels
    assert made.for_variant("half").kernels == Kernels(precision="mixed", math="libm")
    assert made.for_variant("half").verify == Verify(rtol=0.02, samples=7)
    assert made.for_variant("half8").kernels == made.for_variant("half").kernels
    assert made.for_variant("half8").inputs["data"].shape == (8, 3, 8, 8)
    on_edge = made.for_variant("half").for_target("edge")
    assert on_edge.kernels == made.kernels
    assert on_edge.verify == Verify(rtol=0.5, samples=7)


def test_variants_with_other_kernels_share_what_does_not_depend_on_them() -> None:
    """The model is imported once for equal inputs; an alias of a precision shares everything."""
    half = {"kernels": {"precision": "mixed"}}
    variants = {"full": {}, "half": half, "same": half, "half8": {**BATCHES["eight"], **half}}
    machine = target("host")._replace(features=("f16c",))
    actual = keys(both(recipe(inputs=DATA, variants=variants), machine))
    assert actual["net-full:import"] == actual["net-half:import"]
    assert actual["net-half8:import"] != actual["net-half:import"]
    assert actual["net-full:lower/host"] != actual["net-half:lower/host"]
    assert actual["net-half:lower/host"] == actual["net-same:lower/host"]
    assert actual["net-full:verify/host"] != actual["net-half:verify/host"]


def test_a_precision_that_a_target_cannot_use_is_reported_with_its_variant() -> None:
    """The same advice as without variants helps: the target keeps its own precision."""
    variants = {"full": {}, "half": {"kernels": {"precision": "mixed"}}}
    old = target("edge")
    with pytest.raises(RecipeError) as refused:
        both(recipe(variants=variants, targets=[edge()]), old)
    assert refused.value.problems == [
        "/recipes/net.yaml:targets.0: targets: 'edge' only loses speed by "
        "variants.half.kernels.precision: mixed: its CPU lacks f16c; give it `kernels: {precision: model}`"
    ]
    allowed = recipe(variants=variants, targets=[edge(kernels={"precision": "model"})])
    assert both(allowed, old).stages


def test_an_impossible_place_to_run_is_reported_in_the_variant_that_names_it() -> None:
    """A device behind RPC, without a remote."""
    variants = {"here": {}, "there": {"verify": {"run_on": "rpc"}}}
    with pytest.raises(RecipeError) as refused:
        both(recipe(variants=variants), target("host"))
    [problem] = refused.value.problems
    assert problem.startswith("/recipes/net.yaml:variants.there.verify.run_on: verify.run_on: rpc ")


def test_a_speedup_needs_a_latency_in_every_variant() -> None:
    """Emulation measures none."""
    tune = {"trials": 8, "min_speedup": 1.5}
    variants = {"here": {}, "emulated": {"verify": {"run_on": "qemu"}}}
    assert recipe(tune=tune, variants={"here": {}})
    with pytest.raises(
        ValueError, match="needs a latency, and the target 'host' is verified under emulation"
    ):
        recipe(tune=tune, variants=variants)


def test_a_variant_with_the_name_of_another_recipe_is_rejected() -> None:
    """They would write into one folder."""
    made = recipe(inputs=DATA, variants=BATCHES)
    with pytest.raises(RecipeError) as caught:
        plan_of(
            planned(recipe("net-eight"), folder="/one"),
            planned(made, folder="/two")._replace(variant="eight"),
        )
    assert caught.value.problems == [
        "/two/net.yaml:variants.eight: variants.eight: 'net-eight' is also the name of /one/net-eight.yaml; "
        "both would be delivered to one folder: give one of them another name"
    ]


def test_a_wrong_target_is_reported_once() -> None:
    """Not once for each variant."""
    made = recipe(variants=BATCHES)
    with pytest.raises(RecipeError) as caught:
        both(made, target("host", why_not="it is for aarch64"))
    assert len(caught.value.problems) == 1


# ---------------------------------------------------------------- sharing


def test_targets_share_stages_that_do_not_depend_on_name_or_threads() -> None:
    """The name only matters to exported files, and the number of threads to what is measured."""
    one = target("x86-64-v3")
    renamed = one._replace(name="renamed")
    bigger = target("x86-64-v3", threads=8)._replace(name="bigger")
    made = recipe(targets=[{"name": item, "preset": "x86-64-v3"} for item in ("x86-64-v3", "renamed", "bigger")])  # fmt: skip
    actual = keys(plan_of(planned(made, one, renamed, bigger)))

    def shared(other: str) -> set[str]:
        own_keys = {name.partition("/")[0]: key for name, key in actual.items() if "/x86" in name}
        return {
            stage.partition(":")[2]
            for stage, key in own_keys.items()
            if actual[f"{stage}/{other}"] == key
        }

    everything = {"lower", "extract_tasks", "tune", "pick_best", "build", "verify"}
    assert shared("renamed") == everything
    assert shared("bigger") == everything - {"verify"}
