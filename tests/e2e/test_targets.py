"""One model for several targets and with several shapes: shared work is done once, and the rest in parallel."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.e2e.faults import inject_fault
from tests.support.binaries import read_elf
from tests.support.kernels import LEVELS, level
from tests.support.project import Project, Ran
from tvmflow.runtime import loading
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.targets.features import flags_of
from tvmflow.targets.host import CPU_VARIABLE

RECIPE = """\
recipe: 1
name: tiny
model: {onnx: tiny.onnx}
variants:
  one: {inputs: {data: {shape: [1, 3]}}}
  four: {inputs: {data: {shape: [4, 3]}}}
targets:
  - x86-64-v2
  - {name: twin, preset: x86-64-v2, outputs: [archive, bundle]}
  - {name: board, preset: cortex-a72, verify: {against: none}}
verify: {repeat: 2, samples: 2}
pipeline: compile
"""


def write_symbolic_model(path: Path) -> None:
    """`data` (n, 3) times a matrix is `scores` (n, 2), for any n."""
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["data", "w"], ["scores"])],
        "tiny",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])],
        [weight],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(path))


def make_matrix(folder: Path) -> Project:
    made = Project(folder)
    write_symbolic_model(made.folder / "tiny.onnx")
    (made.folder / "tiny.yaml").write_text(RECIPE)
    return made


CAPPED = """\
recipe: 1
name: capped
model: {onnx: tiny.onnx}
dimensions:
  n: {min: 1, max: 9}
inputs: {data: {shape: [n, 3]}}
targets: [host, x86-64-any]
outputs: [bundle]
tune: {trials: 0}
verify: {repeat: 2, samples: 2}
"""


@pytest.mark.parametrize("cap", ["x86-64-v2", pytest.param("x86-64-v3", marks=pytest.mark.slow)])
def test_a_capped_cpu_runs_and_verifies_no_level_above_the_cap(
    cap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`host` has no instruction of a higher level, and a library of all levels is delivered with the lower ones verified."""
    level(cap)
    made = Project(tmp_path)
    write_symbolic_model(made.folder / "tiny.onnx")
    (made.folder / "tiny.yaml").write_text(CAPPED)
    made.environment[CPU_VARIABLE] = cap
    done = made.run()
    assert done.code == 0, done.out + done.err
    assert manifest(made, "dist/capped/host/capped.tvmflow")["target"]["features"] == sorted(
        flags_of(cap)
    )
    folder = made.folder / "dist/capped/x86-64-any"
    levels = json.loads((folder / "measurements.json").read_text())["levels"]
    above = LEVELS[LEVELS.index(cap) + 1 :]
    assert [name for name in LEVELS if "not_verified" in levels[name]] == [*above]
    assert all(f"capped to {cap} by TVMFLOW_CPU" in levels[name]["not_verified"] for name in above)
    monkeypatch.setenv(CPU_VARIABLE, cap)
    program = loading.load(folder / "capped.tvmflow").program
    assert isinstance(program, NativeProgram) and program.level == cap


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def ran(project: Project) -> Ran:
    """The whole matrix, two stages at a time."""
    done = project.run("--jobs", "2")
    assert done.code == 0, done.out + done.err
    return done


def outcomes(ran: Ran) -> dict[str, str]:
    return {stage["stage_id"]: stage["outcome"] for stage in ran.events[-1]["stages"]}


def manifest(project: Project, path: str) -> dict[str, Any]:
    with zipfile.ZipFile(project.folder / path) as archive:
        fields: dict[str, Any] = {
            **json.loads(archive.read("manifest.json")),
            **json.loads(archive.read("signature.json")),
        }
        return fields


@pytest.mark.slow
def test_import_runs_once_for_each_variant_and_equal_targets_are_built_once(ran: Ran) -> None:
    """The twin has the code of the first target; either may be built first."""
    stages = outcomes(ran)
    for variant in ("tiny-one", "tiny-four"):
        assert stages[f"{variant}:import"] == "ran"
        builds = [stages[f"{variant}:build/{name}"] for name in ("x86-64-v2", "twin")]
        assert sorted(builds) == ["hit", "ran"]
        assert stages[f"{variant}:build/board"] == "ran"
        exports = [stages[f"{variant}:export/{name}"] for name in ("x86-64-v2", "twin", "board")]
        assert exports == ["ran"] * 3


TARGETS = ("x86-64-v2", "twin", "board")
DESCRIBED = ("intoto.jsonl", "cdx.json", "measurements.intoto.jsonl")


@pytest.mark.slow
def test_each_build_has_a_folder_and_the_outputs_of_its_target(project: Project, ran: Ran) -> None:
    """`dist/<recipe>-<variant>/<target>`; files have the variant's name."""
    assert sorted(ran.events[-1]["delivered"]) == sorted(
        f"dist/tiny-{variant}/{path.format(variant)}"
        for variant in ("one", "four")
        for path in (
            "x86-64-v2/tiny-{}.tvmflow",
            *(
                f"{target}/{name}"
                for target in TARGETS
                for name in ("verify.json", "measurements.json")
            ),
            "twin/tiny-{}.twin.tar.gz",
            "twin/tiny-{}.tvmflow",
            "board/tiny-{}.tvmflow",
            *(f"{target}/tiny-{{}}.{kind}" for target in TARGETS for kind in DESCRIBED),
            *(f"{target}/README.md" for target in TARGETS),
        )
    )
    for variant, batch in (("one", 1), ("four", 4)):
        fields = manifest(project, f"dist/tiny-{variant}/x86-64-v2/tiny-{variant}.tvmflow")
        assert fields["inputs"][0]["shape"] == [batch, 3]
        assert fields["outputs"][0]["shape"] == [batch, 2]


@pytest.mark.slow
def test_the_board_gets_a_library_of_its_own(tmp_path: Path) -> None:
    """Linked on this machine for another CPU, with the features that a loader on the board compares."""
    project = make_matrix(tmp_path)
    assert project.run("--variant", "one", "--target", "board").code == 0
    path = project.folder / "dist/tiny-one/board/tiny-one.tvmflow"
    with zipfile.ZipFile(path) as archive:
        archive.extract("library.so", project.folder)
    assert read_elf(project.folder / "library.so").machine == 183
    assert manifest(project, str(path))["target"]["features"] == ["asimd", "fp"]
    verdict = json.loads((path.parent / "measurements.json").read_text())
    assert "it is for aarch64" in verdict["not_run"]


@pytest.mark.slow
def test_an_edit_of_one_variant_rebuilds_that_variant_alone(project: Project, ran: Ran) -> None:
    """Another shape for one variant leaves the others alone; `--variant` and `--target` choose."""
    assert project.run("--jobs", "2").ran == []
    project.edit_recipe("shape: [4, 3]", "shape: [5, 3]")
    stages = outcomes(project.run("--target", "x86-64-v2"))
    assert {name for name, outcome in stages.items() if outcome == "ran"} == {
        f"tiny-four:{label}"
        for label in (
            "import",
            "lower/x86-64-v2",
            "build/x86-64-v2",
            "export/x86-64-v2",
            "verify/x86-64-v2",
        )
    }
    only = outcomes(project.run("--variant", "one"))
    assert {name.partition(":")[0] for name in only} == {"tiny-one"}
    assert set(only.values()) == {"hit"}


@pytest.mark.slow
def test_an_impossible_shape_is_reported_with_its_place(project: Project, ran: Ran) -> None:
    """The model's own header says so, before anything runs; without that variant the other one is up to date."""
    project.edit_recipe("shape: [1, 3]", "shape: [1, 7]")
    failed = project.tvmflow("run", "tiny.yaml", "--target", "x86-64-v2")
    assert failed.code == 2
    assert "tiny.yaml:5:32: variants.one.inputs.data.shape: input 'data' has shape" in failed.err
    project.edit_recipe("shape: [1, 7]", "shape: [1, 3]")
    only = outcomes(project.run("--target", "x86-64-v2", "--variant", "four"))
    assert only["tiny-four:verify/x86-64-v2"] == "hit"


@pytest.mark.slow
def test_one_library_has_code_for_several_levels(tmp_path: Path) -> None:
    """Each level is verified, a new one is built alone, and one that is forced runs or is refused by name."""
    project = Project(tmp_path)
    project.edit_recipe("  - host", "  - {name: any, levels: [x86-64-v2, x86-64-v3]}")
    project.edit_recipe("[shared-library, bundle]", "[bundle, c-library]")
    first = project.run()
    assert first.code == 0, first.out + first.err
    project.edit_recipe("x86-64-v3]", "x86-64-v3, x86-64-v4]")
    second = project.run()
    assert [label for label in second.ran if label.startswith(("lower", "build"))] == [
        "lower/any.x86-64-v4",
        "build/any.x86-64-v4",
    ]
    levels = json.loads((project.folder / "dist/tiny/any/measurements.json").read_text())["levels"]
    assert list(levels) == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    verified = [name for name, level in levels.items() if "not_verified" not in level]
    assert "x86-64-v2" in verified
    for name in verified:
        assert levels[name]["outputs"]["scores"]["passed"]
        assert levels[name]["latency"]["median"] > 0
    kernels = project.tvmflow("run", "tiny.yaml").out.partition("slowest kernels")[2].splitlines()
    assert any(line.startswith("  ") and line.endswith(")") for line in kernels[1:3]), kernels
    project.environment["TINY_LEVEL"] = "x86-64-v9"
    refused = project.tvmflow("run-model", "dist/tiny/any/tiny.tvmflow")
    assert refused.code != 0
    assert "the library has x86-64-v2, x86-64-v3, x86-64-v4" in refused.err


@pytest.mark.slow
def test_a_wrong_kernel_of_one_level_is_found_behind_an_index(tmp_path: Path) -> None:
    """The scores of an index are compared at each level, not only at the one that this machine chooses."""
    project = Project(tmp_path)
    model = onnx.load(project.folder / "tiny.onnx")
    model.graph.node.append(helper.make_node("ArgMax", ["scores"], ["best"], axis=1))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, None))
    onnx.save(model, project.folder / "tiny.onnx")
    project.edit_recipe("  - host", "  - {name: any, levels: [x86-64-v2, x86-64-v3]}")
    project.edit_recipe("[shared-library, bundle]", "[bundle]")
    assert project.run().code == 0
    levels = json.loads((project.folder / "dist/tiny/any/measurements.json").read_text())["levels"]
    assert [level["index_inputs"]["scores"]["passed"] for level in levels.values()] == [True, True]
    inject_fault(project, "build", "wrong-kernel", "x86-64-v2")
    failed = project.run("--force", "build")
    assert (failed.code, failed.outcome("verify/any")) == (3, "rejected")
    assert (
        "level x86-64-v2: 'scores' (the scores of an index) is not in the library's memory"
        in (failed.stages["verify/any"]["message"])
    )
