"""A target in parts: what a recipe may say of it, and the plan that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Plan, StageSpec
from tvmflow.exporters import EXPORTERS
from tvmflow.recipe import Recipe, Tune, Verify
from tvmflow.stages import join
from tvmflow.targets.resolve import PartitionedTarget

PARTS: list[dict[str, Any]] = [
    {"name": "first", "until": ["middle"], "preset": "x86-64-v2"},
    {"name": "second", "preset": "host"},
]
SPLIT = {"name": "split", "parts": PARTS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the recipe names, which is also the current one."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(parts: str) -> list[str]:
    """What is wrong with a recipe whose one target has these parts."""
    text = edited(("  - host\n", f"  - {{name: split, parts: {parts}}}\n"))
    return problems_in(write(Path("r.yaml"), text))


def made(**fields: Any) -> Recipe:
    return recipe(targets=["host", SPLIT], **fields)


def plan(*, stages: tuple[str, ...] = COMPILE, **fields: Any) -> Plan:
    return plan_of(planned(made(**fields), target(), joined_target(), stages=stages))


def spec(actual: Plan, name: str) -> StageSpec:
    (only,) = (item for item in actual.stages if item.id == f"net:{name}")
    return only


# ---------------------------------------------------------------- the language


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("[{name: a, preset: host}]", "needs at least two parts"),
        (
            "[{name: a, preset: host}, {name: b, preset: host}]",
            "needs until, the tensors at which this part ends",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, until: [u], preset: host}]",
            "is not allowed for the last part",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: a, preset: host}]",
            "duplicate part name 'a'",
        ),
        (
            "[{name: a, until: [t, t], preset: host}, {name: b, preset: host}]",
            "'t' is listed twice",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, until: [t], preset: host}, {name: c, preset: host}]",
            "the part 'a' already ends at 't'",
        ),
        ("[{name: a, until: [t]}, {name: b, preset: host}]", "needs preset or tvm"),
        (
            "[{name: a, until: [t], preset: hots}, {name: b, preset: host}]",
            "'hots' is not a target; did you mean 'host'?",
        ),
        ("[{name: a, until: t, preset: host}, {name: b, preset: host}]", "must be a list"),
        (
            '[{name: a, until: ["t\\n"], preset: host}, {name: b, preset: host}]',
            "the tensor 't\\n' has the control character U+000A in its name",
        ),
        (
            '[{name: a, until: [""], preset: host}, {name: b, preset: host}]',
            "must be the name of a tensor",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, preset: host}], preset: host",
            "is not allowed with parts; set it for each part",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, preset: host, tune: {min_speedup: 2}}]",
            "is not supported for the target 'split', which is in parts",
        ),
        (
            "[{name: a, until: [t], preset: host, outputs: [bundle]}, {name: b, preset: host}]",
            "belongs at the top level or under targets",
        ),
    ],
)
def test_wrong_parts(parts: str, words: str) -> None:
    """Each mistake is one message with a position."""
    (actual,) = problems(parts)
    assert words in actual
    assert actual.startswith("8:")


def test_no_target_has_the_name_of_a_part() -> None:
    """Their stages would have the same names."""
    with pytest.raises(
        ValueError, match=r"'split\.first' is the name of a part of the target 'split'"
    ):
        recipe(targets=[SPLIT, {"name": "split.first", "preset": "host"}])


def test_a_part_overrides_its_target() -> None:
    """Overrides of the part come before those of the target, and those before the recipe; joined outputs are not its own."""
    parts = [{**PARTS[0], "tune": {"trials": 7}}, PARTS[1]]
    whole = recipe(
        targets=[{"name": "split", "parts": parts, "tune": {"seed": 5}, "verify": {"rtol": 0.5}}],
        tune={"trials": 100},
        outputs=["bundle", "shared-library", "wheel"],
    )
    first, second = whole.for_target("split.first"), whole.for_target("split.second")
    assert (first.name, second.name) == ("net-first", "net-second")
    assert first.tune == Tune(trials=7, seed=5)
    assert second.tune == Tune(trials=100, seed=5)
    assert first.outputs == ("shared-library",)
    assert whole.for_target("split").verify == first.verify == Verify(rtol=0.5)
    assert whole.for_target("split").outputs == ("bundle", "shared-library", "wheel")


# ---------------------------------------------------------------- the plan


def test_the_stages_of_a_partitioned_model() -> None:
    """It is imported once with the tensors of the cuts; each part is built and exported; all are joined and verified as one."""
    actual = plan()
    assert [item.id.removeprefix("net:") for item in actual.stages] == [
        "import",
        "import/split",
        "cut/split.first",
        "cut/split.second",
        "lower/host",
        "lower/split.first",
        "lower/split.second",
        "build/host",
        "build/split.first",
        "build/split.second",
        "export/host",
        "export/split.first",
        "export/split.second",
        "join/split",
        "verify/host",
        "verify/split",
    ]
    assert spec(actual, "import/split").settings["tensors"] == ["middle"]
    assert "tensors" not in spec(actual, "import").settings
    assert spec(actual, "cut/split.first").settings == {
        "input_tensors": [],
        "output_tensors": ["middle"],
    }
    assert spec(actual, "cut/split.second").settings == {
        "input_tensors": ["middle"],
        "output_tensors": [],
    }


@pytest.mark.parametrize(
    ("stage", "makers"),
    [
        ("cut/split.first", {"import": "import/split"}),
        ("lower/split.first", {"import": "cut/split.first"}),
        ("build/split.first", {"import": "cut/split.first", "lower": "lower/split.first"}),
        ("export/split.second", {"import": "cut/split.second", "build": "build/split.second"}),
        (
            "join/split",
            {
                "import": "import/split",
                "export/first": "export/split.first",
                "export/second": "export/split.second",
            },
        ),
        ("verify/split", {"import": "import/split", "export": "join/split"}),
        (
            "verify/host",
            {
                "import": "import",
                "lower": "lower/host",
                "build": "build/host",
                "export": "export/host",
            },
        ),
    ],
)
def test_the_inputs_of_a_part_s_stages(stage: str, makers: dict[str, str]) -> None:
    """The part's `import` is the stage `cut`."""
    actual = {need.stage: need.stage_id for need in spec(plan(), stage).needs}
    assert actual == {role: f"net:{maker}" for role, maker in makers.items()}


def test_the_unpartitioned_import_is_only_made_for_other_targets() -> None:
    """Otherwise the model is only imported with the tensors of the cuts."""
    only = planned(recipe(targets=[SPLIT]), joined_target(), stages=COMPILE)
    assert [item.id for item in plan_of(only).stages][:2] == [
        "net:import/split",
        "net:cut/split.first",
    ]


def test_deliveries_wait_for_the_verification_of_all_parts() -> None:
    """Files of the parts and joined files are in one folder, under different names."""
    actual = plan(outputs=["bundle", "shared-library"], stages=COMPILE)
    delivered = [item for item in actual.deliveries if item.target == "split"]
    assert {item.verified_by for item in delivered} == {"net:verify/split"}
    names = [name for item in delivered for _, name in item.files]
    assert sorted(names) == [
        *("measurements.json", "net-first.so", "net-second.so", "net.tvmflow", "verify.json")
    ]


def test_each_tuned_part_has_a_roofline() -> None:
    """They are delivered with the names of the parts."""
    actual = plan_of(planned(made(tune={"trials": 4}), joined_target()))
    names = [name for item in actual.deliveries for _, name in item.files]
    assert {"first-roofline.svg", "second-roofline.svg"} <= set(names)


def test_a_part_that_cannot_run_locally_is_named() -> None:
    """The position is that of the part; without verification it is built anyway."""
    split = joined_target(why_not="it is for a GPU")
    with pytest.raises(RecipeError, match=r"parts.1: targets: 'split.second' cannot be verified"):
        plan_of(planned(made(), split))
    plan_of(planned(made(verify={"against": "none"}), split))


def test_emulation_covers_every_part() -> None:
    """Each has an emulation program of its own."""
    actual = plan_of(planned(made(verify={"run_on": "qemu"}), joined_target(), stages=COMPILE))
    roles = {need.stage: need.stage_id for need in spec(actual, "verify/split").needs}
    assert roles["emulation_program/first"] == "net:emulation_program/split.first"
    assert roles["emulation_program/second"] == "net:emulation_program/split.second"


def test_every_part_needs_a_device() -> None:
    """Parts without one are named."""
    split = joined_target()
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made(verify={"run_on": "rpc"}), split))
    assert [item.partition("; ")[2] for item in caught.value.problems] == [
        f"'split.{name}' needs `remote: {{key: NAME}}`" for name in ("first", "second")
    ]


@pytest.mark.parametrize("output", ["wheel", "cpp"])
def test_some_joined_outputs_need_one_platform(output: str) -> None:
    """A wheel and a C++ program are for one platform, under any of its triples; the message names those of the parts."""
    same = second_as({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu"})
    plan_of(planned(made(outputs=[output]), same))
    other = second_as({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    plan_of(planned(made(outputs=["bundle"]), other))
    assert refusal(output, other) == (
        f"there is no {output} for the target 'split': its parts would have to run in one process: "
        "'first' is for x86_64-linux-gnu, 'second' is for aarch64-linux-gnu"
    )


def test_an_output_of_c_libraries_names_the_part_that_has_none() -> None:
    """Parts for GPUs have one, whose executor calls the driver."""
    host = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
    reasons = [
        EXPORTERS["cpp"].unsupported_reason(
            join.make_request(made(), second_as({"kind": kind, "host": host}))
        )
        for kind in ("cuda", "rocm")
    ]
    assert reasons == ["", "the kind of its part 'second' is rocm, not llvm or cuda or opencl"]


def test_parts_of_a_program_in_cpp_are_c_libraries() -> None:
    """So a part that needs TVM's runtime is refused before it is tuned; in a bundle it may have it."""
    with_bundle, with_cpp = (
        made(outputs=outputs, verify={"against": "none"})
        for outputs in (["bundle"], ["bundle", "cpp", "shared-library"])
    )
    runtimes = [
        {
            str(spec.settings["runtime"])
            for spec in plan_of(planned(recipe, joined_target())).stages
            if spec.stage == "extract_tasks"
        }
        for recipe in (with_bundle, with_cpp)
    ]
    assert runtimes == [{"auto"}, {"c"}]


def second_as(tvm: dict[str, Any]) -> PartitionedTarget:
    first, second = joined_target().parts
    return joined_target()._replace(parts=(first, second._replace(tvm=tvm)))


def refusal(output: str, split: PartitionedTarget) -> str:
    """The one reason why there is no such output."""
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made(outputs=[output]), split))
    (problem,) = caught.value.problems
    return problem.rpartition("outputs.0: ")[2]
