"""A target in parts: what a recipe may say of it, and the plan that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow.errors import RecipeError
from tvmflow.exporters import EXPORTERS
from tvmflow.recipe import Recipe, Tune, Verify
from tvmflow.stages import join
from tvmflow.targets.resolve import JoinedTarget
from tvmflow.values import Plan, StageSpec

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


def spec(found: Plan, name: str) -> StageSpec:
    (only,) = (each for each in found.stages if each.id == f"net:{name}")
    return only


# ---------------------------------------------------------------- the language


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("[{name: a, preset: host}]", "a model in parts has at least two"),
        (
            "[{name: a, preset: host}, {name: b, preset: host}]",
            "needs until: the tensors at which this part ends",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, until: [u], preset: host}]",
            "the last part ends with the model's outputs",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: a, preset: host}]",
            "a second part with the name 'a'",
        ),
        ("[{name: a, until: [t, t], preset: host}, {name: b, preset: host}]", "'t' stands twice"),
        (
            "[{name: a, until: [t], preset: host}, {name: b, until: [t], preset: host}, {name: c, preset: host}]",
            "'t' is given by the part 'a' already",
        ),
        ("[{name: a, until: [t]}, {name: b, preset: host}]", "needs a preset, or tvm"),
        (
            "[{name: a, until: [t], preset: hots}, {name: b, preset: host}]",
            "'hots' is not a target; did you mean 'host'?",
        ),
        ("[{name: a, until: t, preset: host}, {name: b, preset: host}]", "must be a list"),
        ('[{name: a, until: [""], preset: host}, {name: b, preset: host}]', "a tensor's name"),
        (
            "[{name: a, until: [t], preset: host}, {name: b, preset: host}], preset: host",
            "goes into each of the parts, where there are parts",
        ),
        (
            "[{name: a, until: [t], preset: host}, {name: b, preset: host, tune: {min_speedup: 2}}]",
            "is for a library as a whole, and 'split' is in parts",
        ),
        (
            "[{name: a, until: [t], preset: host, outputs: [bundle]}, {name: b, preset: host}]",
            "belongs at the top or under targets",
        ),
    ],
)
def test_what_parts_cannot_be(parts: str, words: str) -> None:
    """Each mistake is one sentence at its place."""
    (found,) = problems(parts)
    assert words in found
    assert found.startswith("8:")


def test_no_target_has_the_name_of_a_part() -> None:
    """Its stages would be taken for the part's."""
    with pytest.raises(ValueError, match=r"'split\.first' is what a part of the target 'split' is"):
        recipe(targets=[SPLIT, {"name": "split.first", "preset": "host"}])


def test_a_part_is_as_its_target_is_but_for_its_own_words() -> None:
    """Its tuning on top of the target's on top of the recipe's; forms of the whole are not its own."""
    parts = [{**PARTS[0], "tune": {"trials": 7}}, PARTS[1]]
    whole = recipe(
        targets=[{"name": "split", "parts": parts, "tune": {"seed": 5}, "verify": {"rtol": 0.5}}],
        tune={"trials": 100},
        outputs=["bundle", "shared-library", "wheel"],
    )
    first, second = whole.of("split.first"), whole.of("split.second")
    assert (first.name, second.name) == ("net-first", "net-second")
    assert first.tune == Tune(trials=7, seed=5)
    assert second.tune == Tune(trials=100, seed=5)
    assert first.outputs == ("shared-library",)
    assert whole.of("split").verify == first.verify == Verify(rtol=0.5)
    assert whole.of("split").outputs == ("bundle", "shared-library", "wheel")


# ---------------------------------------------------------------- the plan


def test_a_part_goes_the_road_of_a_model_that_was_cut_out() -> None:
    """Imported once with the tensors of the cuts; each part built and exported by itself; joined; verified as one."""
    found = plan()
    assert [each.id.removeprefix("net:") for each in found.stages] == [
        "import",
        "import/split",
        "cut/split.first",
        "cut/split.second",
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
    assert spec(found, "import/split").settings["tensors"] == ["middle"]
    assert "tensors" not in spec(found, "import").settings
    assert spec(found, "cut/split.first").settings == {"given": [], "until": ["middle"]}
    assert spec(found, "cut/split.second").settings == {"given": ["middle"], "until": []}


@pytest.mark.parametrize(
    ("stage", "makers"),
    [
        ("cut/split.first", {"import": "import/split"}),
        ("build/split.first", {"import": "cut/split.first"}),
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
            {"import": "import", "build": "build/host", "export": "export/host"},
        ),
    ],
)
def test_what_a_stage_of_a_part_reads(stage: str, makers: dict[str, str]) -> None:
    """What `import` is to a part was cut out of the whole."""
    found = {need.stage: need.stage_id for need in spec(plan(), stage).needs}
    assert found == {role: f"net:{maker}" for role, maker in makers.items()}


def test_without_another_target_the_whole_is_not_imported() -> None:
    """Only with the tensors of the cuts."""
    only = planned(recipe(targets=[SPLIT]), joined_target(), stages=COMPILE)
    assert [each.id for each in plan_of(only).stages][:2] == [
        "net:import/split",
        "net:cut/split.first",
    ]


def test_nothing_is_delivered_before_the_whole_is_verified() -> None:
    """Files of the parts and of the whole lie in one folder, under names of their own."""
    found = plan(outputs=["bundle", "shared-library"], stages=COMPILE)
    delivered = [each for each in found.deliveries if each.target == "split"]
    assert {each.verified_by for each in delivered} == {"net:verify/split"}
    names = [name for each in delivered for _, name in each.files]
    assert sorted(names) == ["net-first.so", "net-second.so", "net.tvmflow", "verify.json"]


def test_each_part_draws_its_roofline() -> None:
    """Where it is tuned."""
    found = plan_of(planned(made(tune={"trials": 4}), joined_target()))
    names = [name for each in found.deliveries for _, name in each.files]
    assert {"first-roofline.svg", "second-roofline.svg"} <= set(names)


def test_a_part_that_cannot_run_here_is_told_by_its_name() -> None:
    """At its own place in the recipe; without a reference it is built all the same."""
    split = joined_target(why_not="it is for a GPU")
    with pytest.raises(RecipeError, match=r"parts.1: targets: 'split.second' cannot be verified"):
        plan_of(planned(made(), split))
    plan_of(planned(made(verify={"against": "none"}), split))


def test_emulation_is_for_every_part() -> None:
    """Each has the runner of its architecture."""
    found = plan_of(planned(made(verify={"run_on": "qemu"}), joined_target(), stages=COMPILE))
    roles = {need.stage: need.stage_id for need in spec(found, "verify/split").needs}
    assert roles["runner/first"] == "net:runner/split.first"
    assert roles["runner/second"] == "net:runner/split.second"


def test_a_device_is_needed_for_every_part() -> None:
    """The one that has none is named."""
    split = joined_target()
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made(verify={"run_on": "rpc"}), split))
    assert [each.partition("; ")[2] for each in caught.value.problems] == [
        f"'split.{name}' needs `remote: {{key: NAME}}`" for name in ("first", "second")
    ]


@pytest.mark.parametrize("output", ["wheel", "cpp"])
def test_a_form_of_the_whole_asks_for_one_platform(output: str) -> None:
    """A wheel and a C++ program are for one system, whatever it is called; parts for two are named with theirs."""
    same = second_as({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu"})
    plan_of(planned(made(outputs=[output]), same))
    other = second_as({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    plan_of(planned(made(outputs=["bundle"]), other))
    assert refusal(output, other) == (
        f"there is no {output} for the target 'split': its parts would have to run in one process: "
        "'first' is for x86_64-linux-gnu, 'second' is for aarch64-linux-gnu"
    )


def test_a_form_for_cpus_names_the_part_that_is_for_a_gpu() -> None:
    """The bundle holds its library all the same."""
    host = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
    wanted = join.asked(made(), second_as({"kind": "cuda", "host": host}))
    assert EXPORTERS["cpp"].why_not(wanted) == "the kind of its part 'second' is cuda, not llvm"
    assert EXPORTERS["bundle"].why_not(wanted) == ""


def second_as(tvm: dict[str, Any]) -> JoinedTarget:
    first, second = joined_target().machines
    return joined_target()._replace(machines=(first, second._replace(tvm=tvm)))


def refusal(output: str, split: JoinedTarget) -> str:
    """The one reason why there is no such output."""
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(made(outputs=[output]), split))
    (problem,) = caught.value.problems
    return problem.rpartition("outputs.0: ")[2]
