"""What is otherwise for one target, or for one variant, and how a plan follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, write
from tvmflow.errors import RecipeError
from tvmflow.keys import key_of
from tvmflow.recipe import InputSpec, Kernels, Recipe, TargetSpec, Tune, Verify, load_recipe
from tvmflow.targets import cuda
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.toolchain import FLAGS
from tvmflow.values import Plan, StageSpec

DATA = {"data": {"shape": [1, 3, 8, 8], "dtype": "uint8", "range": [0, 9]}}
BATCHES = {"one": {}, "eight": {"inputs": {"data": {"shape": [8, 3, 8, 8]}}}}


def edge(**fields: Any) -> dict[str, Any]:
    return {"name": "edge", "preset": "cortex-a72", **fields}


def specs(plan: Plan) -> dict[str, StageSpec]:
    return {spec.id: spec for spec in plan.stages}


def keys(plan: Plan) -> dict[str, str]:
    """The key of each stage, with the name of each file in place of its content."""
    return {
        spec.id: key_of(
            spec,
            {f"{need.stage}/*": need.stage for need in spec.needs},
            dict.fromkeys(spec.tools, ""),
            "",
        ).digest
        for spec in plan.stages
    }


# ---------------------------------------------------------------- one target


def test_what_a_target_does_not_say_is_as_for_all() -> None:
    """Only the fields that are given change; no other target's do."""
    made = recipe(
        targets=["host", edge(tune={"trials": 8}, verify={"against": "none"}, outputs=["bundle"])],
        tune={"trials": 100, "seed": 3},
        verify={"rtol": 0.5},
        outputs=["shared-library"],
    )
    assert made.of("host") == made
    there = made.of("edge")
    assert there.tune == Tune(trials=8, seed=3)
    assert there.verify == Verify(against="none", rtol=0.5)
    assert there.outputs == ("bundle",)
    assert there.name == made.name
    assert made.of("a target that the plan alone knows") == made


def test_precision_may_be_another_for_each_target_and_part() -> None:
    """All of `kernels` may; the model that is imported is the same."""
    made = recipe(
        targets=["host", edge(kernels={"precision": "mixed"})], kernels={"layout": "plain"}
    )
    assert made.of("host").kernels == Kernels(layout="plain")
    assert made.of("edge").kernels == Kernels(layout="plain", precision="mixed")
    half = target("edge")._replace(features=("avx2", "f16c"))
    found = specs(plan_of(planned(made, target(), half)))
    assert "net:import" in found and "net:import/edge" not in found
    kept = {name: found[f"net:build/{name}"].settings["lowering"] for name in ("host", "edge")}
    assert [kept[name]["precision"] for name in ("host", "edge")] == ["model", "mixed"]
    assert [found[f"net:verify/{name}"].settings["mixed"] for name in kept] == [False, True]
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
    machines = tuple(each._replace(features=("f16c",)) for each in both.machines)
    found = specs(plan_of(planned(joined, both._replace(machines=machines), stages=COMPILE)))
    kept = {name: found[f"net:build/split.{name}"].settings for name in ("first", "second")}
    assert [kept[name]["lowering"]["precision"] for name in kept] == ["model", "mixed"]
    assert found["net:verify/split"].settings["mixed"]


def test_there_is_no_c_source_with_float16() -> None:
    """C has no such type."""
    half = target("edge")._replace(features=("f16c",))
    made = recipe(targets=[edge(kernels={"precision": "mixed"})], outputs=["c-source"])
    with pytest.raises(
        RecipeError, match="there is no c-source for the target 'edge': C has no float16"
    ):
        plan_of(planned(made, half))


@pytest.mark.parametrize(
    ("triple", "features", "reason"),
    [
        ("x86_64-linux-gnu", ("avx",), "its CPU lacks f16c"),
        ("armv7l-linux-gnueabihf", ("vfpv4",), "there is no code for armv7 that converts float16 in vectors"),
        ("x86_64-linux-gnu", ("avx2", "f16c"), ""),
        ("aarch64-linux-gnu", ("asimd",), ""),
    ],
)  # fmt: skip
def test_float16_is_for_machines_that_convert_it_in_vectors(
    triple: str, features: tuple[str, ...], reason: str
) -> None:
    """Others would only become slow, and are told so before anything runs."""
    made = recipe(targets=[edge()], kernels={"precision": "mixed"})
    there = target("edge")._replace(features=features)
    there = there._replace(tvm={**there.tvm, "mtriple": triple})
    if not reason:
        assert plan_of(planned(made, there)).stages
        return
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(made, there))
    assert refused.value.problems == [
        "/recipes/net.yaml:targets.0: targets: 'edge' only loses speed by kernels.precision: mixed: "
        f"{reason}; give it `kernels: {{precision: model}}`"
    ]
    assert plan_of(planned(made, there, stages=("import",))).stages


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
def test_the_rules_hold_for_the_whole(
    all_of_them: dict[str, Any], change: dict[str, Any], tune: Tune
) -> None:
    """What belongs together may stand in two places; an empty value takes back what the recipe says."""
    made = recipe(targets=[edge(tune=change)], tune=all_of_them)
    assert made.of("edge").tune.model_dump() == tune.model_dump()


def test_an_accuracy_on_the_recipes_data(tmp_path: Path) -> None:
    """The data is the recipe's, the gate a target's."""
    lay_out(tmp_path)
    text = edited(("- host", "- {name: a, preset: host, verify: {min_accuracy: 0.9}}"))
    made = load_recipe(write(tmp_path / "r.yaml", text)).recipe
    assert made.of("a").verify.data == "data.npz"


def test_attributes_beside_a_preset() -> None:
    """They take the place of the preset's, and those that it lacks are added."""
    fields = edge(tvm={"mcpu": "cortex-a73", "mattr": ["+crypto"]})
    mapping = TargetSpec.model_validate(fields).tvm_mapping()
    base = dict(PRESETS["cortex-a72"].tvm or {})
    assert mapping == {**base, "mcpu": "cortex-a73", "mattr": ["+crypto"]}
    assert dict(PRESETS["cortex-a72"].tvm or {}) == base


def test_a_toolchain_has_flags_for_a_compiler() -> None:
    """They can be given instead."""
    made = TargetSpec.model_validate(edge(toolchain={"linker": "g++"}))
    assert made.toolchain is not None and made.toolchain.flags == FLAGS
    own = TargetSpec.model_validate(edge(toolchain={"linker": "g++", "flags": ["-shared"]}))
    assert own.toolchain is not None and own.toolchain.flags == ("-shared",)


def test_every_stage_follows_its_own_target() -> None:
    """Settings, files, deliveries and the reference's packages are those of the target's recipe."""
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
    found = specs(plan)
    assert found["net:tune/host"].settings["tune"]["trials"] == 0
    assert found["net:tune/edge"].settings["tune"]["trials"] == 4
    data = {name: found[f"net:verify/{name}"].files[-1] for name in ("host", "edge")}
    assert data["host"].path == "/recipes/one.npz"
    assert data["host"].where == "/recipes/net.yaml:verify.data"
    assert data["edge"].path == "/recipes/two.npz"
    assert data["edge"].where == "/recipes/net.yaml:targets.1.verify.data"
    delivered = {(each.target, name) for each in plan.deliveries for _, name in each.files}
    assert delivered == {
        ("host", "net.so"),
        ("host", "verify.json"),
        ("edge", "net.tvmflow"),
        ("edge", "roofline.svg"),
        ("edge", "verify.json"),
    }
    away = plan_of(planned(made, target("host"), target("edge")))
    assert "onnxruntime" in specs(away)["net:verify/host"].tools
    assert "onnxruntime" not in specs(away)["net:verify/edge"].tools


def test_a_target_that_cannot_run_here_turns_off_what_would_have_to() -> None:
    """The others are tuned and verified all the same."""
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
        ({"kind": "cuda", "arch": "sm_62"}, "CUDA 13, which TVM 0.27 works with, makes no code for sm_62; the oldest is sm_75"),
        ({"kind": "cuda", "arch": "sm_90a"}, "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'"),
        ({"kind": "vulkan"}, "its kind is vulkan, and kernels are built for CPUs"),
    ],
)  # fmt: skip
def test_a_target_without_code_is_refused_before_anything_runs(
    tvm: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its place and the reason; to import the model is possible all the same."""
    monkeypatch.setattr(cuda, "is_installed", lambda: False)
    gpu = target("edge")._replace(tvm=tvm, why_not="there is none here")
    made = recipe(targets=["host", edge()])
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(made, gpu))
    [problem] = refused.value.problems
    start = "/recipes/net.yaml:targets.1: targets: 'edge' cannot be built: "
    assert problem.startswith(start + reason)
    quiet = recipe(targets=[edge()], verify={"against": "none"})
    assert plan_of(planned(quiet, gpu, stages=("import",))).stages


def test_a_target_without_a_linker_needs_one_of_the_users() -> None:
    """Object code can be built for more than can be linked."""
    sparc = target("edge")._replace(tvm={"kind": "llvm", "mtriple": "sparc64-linux-gnu"})
    with pytest.raises(RecipeError) as refused:
        plan_of(planned(recipe(targets=[edge()]), sparc))
    assert "'edge' cannot be linked: no linker is set up for sparc64" in str(refused.value)
    identity = {"linker": "ld", "flags": [], "version": "1", "sha256": "0"}
    plan = plan_of(planned(recipe(targets=[edge()]), sparc._replace(toolchain=identity)))
    assert specs(plan)["net:export/edge"].settings["toolchain"] == identity
    assert plan_of(planned(recipe(targets=[edge()]), sparc, stages=("import", "build"))).stages


def test_a_toolchain_matters_to_what_links_alone() -> None:
    """Another version of it links again; nothing is tuned or built again."""
    one, two = (
        target()._replace(toolchain={"linker": "ld", "flags": [], "version": v, "sha256": v})
        for v in "12"
    )
    before, after = (keys(plan_of(planned(recipe(), each))) for each in (one, two))
    assert {name for name in before if before[name] != after[name]} == {"net:export/host"}


# ---------------------------------------------------------------- variants


def test_a_variant_changes_the_shapes_and_has_a_name_of_its_own() -> None:
    """What it does not say of an input (dtype, range) is as in the recipe."""
    made = recipe(inputs=DATA, variants=BATCHES)
    assert made.variant("one") == made.model_copy(update={"name": "net-one"})
    assert made.variant("eight").name == "net-eight"
    assert made.variant("eight").inputs == {
        "data": InputSpec(shape=(8, 3, 8, 8), dtype="uint8", range=(0.0, 9.0))
    }


def test_a_variant_may_name_all_inputs() -> None:
    """Where the recipe names none, as for an ONNX model whose batch has a name."""
    made = recipe(variants=BATCHES)
    assert made.variant("eight").inputs == {"data": InputSpec(shape=(8, 3, 8, 8))}


def both(made: Recipe, *targets: Any, stages: tuple[str, ...] = COMPILE) -> Plan:
    return plan_of(
        *(planned(made, *targets, stages=stages)._replace(variant=each) for each in made.variants)
    )


def test_variants_and_targets_are_a_matrix() -> None:
    """Each variant is imported once, and built for every target; each has a folder of its own."""
    made = recipe(inputs=DATA, variants=BATCHES, targets=["host", "x86-64-v2"])
    plan = both(made, target("host"), target("x86-64-v2"))
    ids = [spec.id for spec in plan.stages]
    assert ids == [
        f"net-{variant}:{label}"
        for variant in ("one", "eight")
        for label in (
            "import",
            *(f"{stage}/{name}" for stage in COMPILE[1:] for name in ("host", "x86-64-v2")),
        )
    ]
    assert specs(plan)["net-eight:import"].settings["inputs"]["data"]["shape"] == [8, 3, 8, 8]
    places = {(each.recipe, each.target) for each in plan.deliveries}
    assert places == {(f"net-{v}", t) for v in ("one", "eight") for t in ("host", "x86-64-v2")}


def test_variants_share_no_more_than_they_can() -> None:
    """Another batch is another model from `import` on; the same inputs under two names are one."""
    found = keys(both(recipe(inputs=DATA, variants={**BATCHES, "same": {}}), target("host")))
    assert found["net-one:import"] != found["net-eight:import"]
    assert found["net-one:import"] == found["net-same:import"]
    assert found["net-one:build/host"] == found["net-same:build/host"]


def test_a_variant_with_the_name_of_another_recipe() -> None:
    """They would write into one folder."""
    made = recipe(inputs=DATA, variants=BATCHES)
    with pytest.raises(RecipeError) as caught:
        plan_of(
            planned(recipe("net-eight"), folder="/one"),
            planned(made, folder="/two")._replace(variant="eight"),
        )
    assert caught.value.problems == [
        "/two/net.yaml:variants.eight: variants.eight: 'net-eight' is also the name of /one/net-eight.yaml"
    ]


def test_what_is_wrong_with_a_target_is_told_once() -> None:
    """However many variants there are."""
    made = recipe(variants=BATCHES)
    with pytest.raises(RecipeError) as caught:
        both(made, target("host", why_not="it is for aarch64"))
    assert len(caught.value.problems) == 1


# ---------------------------------------------------------------- sharing


def test_targets_share_every_stage_that_does_not_tell_them_apart() -> None:
    """What they are called matters to exported files alone, and how many cores they have to what is scheduled."""
    one = target("x86-64-v3")
    renamed = one._replace(name="renamed")
    bigger = target("x86-64-v3", cores=8)._replace(name="bigger")
    made = recipe(targets=[{"name": each, "preset": "x86-64-v3"} for each in ("x86-64-v3", "renamed", "bigger")])  # fmt: skip
    found = keys(plan_of(planned(made, one, renamed, bigger)))

    def shared(other: str) -> set[str]:
        mine = {name.partition("/")[0]: key for name, key in found.items() if "/x86" in name}
        return {
            stage.partition(":")[2]
            for stage, key in mine.items()
            if found[f"{stage}/{other}"] == key
        }

    everything = {"extract_tasks", "tune", "pick_best", "build", "verify"}
    assert shared("renamed") == everything
    assert shared("bigger") == {"extract_tasks", "tune", "pick_best"}
