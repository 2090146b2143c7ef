"""Custom operators: files that a recipe names, from the import to a C++ program."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support import exports
from tests.support.c_library import CLibrary
from tests.support.mxnet_runs import node, var, write_checkpoint
from tests.support.onnx_models import draw
from tests.support.project import Project
from tests.support.recipes import ROOT

OPERATORS = """\
import numpy as np
from tvm import relax
from tables import SCALE
from tvmflow.custom_operators import Tensor, operator

def pool_with_numpy(node, x, cells):
    y = np.zeros(node.attributes["size"], x.dtype)
    np.add.at(y, cells, x * SCALE)
    return y

@operator("Pool", domain="org.example", reference=pool_with_numpy)
def pool(node, x, cells):
    outputs = [Tensor((node.attributes["size"],))]
    return node.c("pool.c", "pool", x, cells, outputs=outputs, arguments=[16, outputs[0].shape[0], SCALE])

@operator("Swish", domain="org.example", reference=lambda node, x: x / (1 + np.exp(-x)))
def swish(node, x):
    return relax.op.multiply(x, relax.op.sigmoid(x))
"""
SOURCE = """\
#include <stdint.h>
static float scaled(float x, double scale) { return x * (float)scale; }
void pool(const float *x, const int64_t *cells, float *y, int64_t count, int64_t size, double scale) {
  for (int64_t i = 0; i < size; i++) y[i] = 0;
  for (int64_t i = 0; i < count; i++) y[cells[i]] += scaled(x[i], scale);
}
"""


def write(project: Project) -> None:
    """A model of two operators that nobody else has."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Pool", ["a", "cells"], ["b"], "pool", domain="org.example", size=5),
        helper.make_node("Swish", ["b"], ["c"], "act", domain="org.example"),
        helper.make_node("Add", ["c", "c"], ["y"]),
    ]
    sides = [
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [16]),
            helper.make_tensor_value_info("cells", TensorProto.INT64, [16]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])],
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.example", 1)]
    graph = helper.make_graph(nodes, "own", *sides)
    model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    onnx.save(model, str(project.folder / "tiny.onnx"))
    (project.folder / "ops").mkdir(exist_ok=True)
    (project.folder / "ops/own_ops.py").write_text(OPERATORS)
    (project.folder / "ops/tables.py").write_text("SCALE = 0.5\n")
    (project.folder / "ops/pool.c").write_text(SOURCE)
    (project.folder / "tiny.yaml").write_text(
        "recipe: 1\nname: tiny\nmodel: {onnx: tiny.onnx}\n"
        "operators: [ops/own_ops.py, ops/pool.c]\npipeline: compile\n"
        "outputs: [c-library, bundle]\nverify: {repeat: 2, samples: 1}\n"
    )


def edit(project: Project, name: str, old: str, new: str) -> None:
    path = project.folder / "ops" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def library(project: Project) -> CLibrary:
    return CLibrary(project.folder / "dist/tiny/host/tiny-c-library/libtiny.so", "tiny", threads=1)


CUSTOM = """\
import numpy as np
from tvm import relax, te, tirx
from tvmflow.custom_operators import Tensor, operator

def scaled_with_numpy(node, x, slope):
    factor = np.float32(node.attributes["factor"])
    return [np.where(x > 0, x, x * slope) * factor, np.maximum(x, 0).sum(axis=1)]

@operator("scaled_prelu", domain="mxnet", reference=scaled_with_numpy)
def scaled(node, x, slope):
    factor = relax.const(float(node.attributes["factor"]), "float32")
    bent = relax.op.where(relax.op.greater(x, relax.const(0.0, "float32")), x, relax.op.multiply(x, slope))
    return [relax.op.multiply(bent, factor), relax.op.sum(relax.op.nn.relu(x), axis=[1])]
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mxnet"), reason="MXNet is not installed")
def test_a_checkpoint_with_a_custom_operator(project: Project) -> None:
    """MXNet itself computes the rest of the model, and its Custom by the recipe's numpy function."""
    nodes = [
        var("data"),
        var("fc_weight"),
        var("slope"),
        node("FullyConnected", "fc", [0, 1], num_hidden="6", no_bias="True"),
        node("Custom", "own", [3, 2], op_type="scaled_prelu", factor="2.5"),
        node("tanh", "last", [4]),
    ]
    weights = {"arg:fc_weight": draw(6, 4), "arg:slope": draw(6, seed=1)}
    heads = [[5, 0, 0], [4, 1, 0]]
    (project.folder / "ops").mkdir()
    (project.folder / "ops/custom.py").write_text(CUSTOM)
    write_checkpoint(project.folder, nodes, heads, weights)
    (project.folder / "tiny.yaml").write_text(
        "recipe: 1\nname: tiny\nmodel: {mxnet: {prefix: net, epoch: 0}}\noperators: [ops/custom.py]\n"
        "inputs: {data: {shape: [3, 4]}}\npipeline: compile\n"
        "outputs: [c-library]\nverify: {repeat: 2, samples: 1}\n"
    )
    first = project.run()
    assert first.code == 0, first.out
    facts = first.stages["verify/host"]["facts"]
    assert facts["reference"].startswith("MXNet")
    assert facts["reference_note"] == (
        "the reference of scaled_prelu (mxnet) is the numpy function of the recipe"
    )
    assert sorted(facts["outputs"]) == ["last_output", "own_output"]
    assert project.run().ran == []
    edit(project, "custom.py", "x * slope) * factor", "x * slope) * factor + 1")
    second = project.run()
    assert second.code == 3
    assert second.outcome("verify/host") == "rejected"


@pytest.mark.slow
def test_a_model_with_operators_of_its_own(project: Project, tmp_path: Path) -> None:
    """It is built, verified with the recipe's numpy functions, traced to all its files, and locked with them."""
    write(project)
    first = project.run()
    assert first.code == 0, first.out
    facts = first.stages["verify/host"]["facts"]
    assert facts["reference"].startswith("ONNX Runtime")
    assert "Pool (org.example), Swish (org.example)" in facts["reference_note"]
    feed = {"x": np.arange(-4, 12, dtype="float32"), "cells": np.arange(16) % 5}
    sums = np.zeros(5, np.float32)
    np.add.at(sums, feed["cells"], np.maximum(feed["x"], 0) / 2)
    [result] = library(project).run(feed)
    np.testing.assert_allclose(result, 2 * sums / (1 + np.exp(-sums)), rtol=1e-5)
    bom = json.loads((project.folder / "dist/tiny/host/tiny.cdx.json").read_text())
    named = {entry["name"] for entry in bom["components"]}
    assert {"operator:own_ops.py", "operator:pool.c", "operator import:tables.py"} <= named
    assert project.run().ran == []
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    assert project.run("--locked").code == 0
    # what the model means stays the same, so it is not compiled again
    edit(project, "own_ops.py", "import numpy as np\n", "import numpy as np\n# a comment\n")
    assert project.run().ran == ["import", "verify/host"]
    edit(project, "pool.c", "y[i] = 0;", "y[i] = 0.0f;")
    assert project.run().ran == ["import", "lower/host", "build/host", "export/host", "verify/host"]
    edit(project, "tables.py", "0.5", "0.25")
    locked = project.tvmflow("run", "tiny.yaml", "--locked")
    assert locked.code == 2
    assert "the content of file 'operator import:tables.py' changed" in locked.err
    assert "the content of file 'operator:pool.c' changed" in locked.err


@pytest.mark.slow
def test_a_reference_that_disagrees_names_the_operator(project: Project) -> None:
    """The other operator, which agrees with its own reference, is not the culprit."""
    write(project)
    edit(project, "own_ops.py", "x * SCALE)", "x)")
    ran = project.tvmflow("run", "tiny.yaml")
    assert ran.code == 3
    assert "the operator Pool (org.example) (node 'pool') disagrees with its reference" in ran.out
    assert "Swish (org.example) (node" not in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "code", "message"),
    [
        ("own_ops.py", "def pool_with", "def (", 2, "ops/own_ops.py:6: invalid syntax"),
        ("own_ops.py", "SCALE\n", "MISSING\n", 1, "ops/own_ops.py:3: the file of operators own_ops.py failed: ImportError"),
        ("own_ops.py", "    np.add.at", "    raise KeyError(1)  #", 1, "ops/own_ops.py:8: the reference of the operator Pool (org.example) failed: KeyError: 1"),
        ("own_ops.py", ", reference=pool_with_numpy", "", 1, "the operator Pool (org.example) (node 'pool') has no reference"),
        ("own_ops.py", '"pool.c", "pool"', '"pool.c", "poll"', 1, "pool.c has no function 'poll' (there is pool)"),
        ("own_ops.py", ", SCALE]", "]", 1, "the function 'pool' takes (ptr, ptr, ptr, i64, i64, double), and the kernel calls it with (ptr, ptr, ptr, i64, i64)"),
        ("pool.c", "x[i], scale)", "x[i])", 1, "pool.c:5:"),
        ("pool.c", "return x *", "return scaled(x, 1) *", 1, "pool.c: the function scaled calls itself"),
    ],
)  # fmt: skip
def test_mistakes_have_a_place(
    project: Project, name: str, old: str, new: str, code: int, message: str
) -> None:
    write(project)
    edit(project, name, old, new)
    ran = project.tvmflow("run", "tiny.yaml")
    assert ran.code == code
    assert message in ran.out + ran.err
    assert "fix: " in ran.out + ran.err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.int64, marks=pytest.mark.nightly)])
def test_an_operator_of_constants_alone(project: Project, dtype: type[np.generic]) -> None:
    """It is computed with the weights, or when the library runs."""
    constant = onnx.numpy_helper.from_array(np.arange(4).astype(dtype), "constant")
    nodes = [
        helper.make_node("Twice", ["constant"], ["twice"], "twice", domain="org.example"),
        helper.make_node("Cast", ["twice"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "float"], ["y"]),
    ]
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])] for name in "xy"]
    graph = helper.make_graph(nodes, "own", *sides, [constant])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.example", 1)]
    write(project)
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=opsets),
        str(project.folder / "tiny.onnx"),
    )
    element = "float" if dtype is np.float32 else "int64_t"
    (project.folder / "ops/pool.c").write_text(
        "#include <stdint.h>\n"
        f"void twice(const {element} *x, {element} *y) {{ for (int i = 0; i < 4; i++) y[i] = 2 * x[i]; }}"
    )
    (project.folder / "ops/own_ops.py").write_text(
        "from tvmflow.custom_operators import operator\n"
        "@operator('Twice', domain='org.example', reference=lambda node, x: 2 * x)\n"
        "def twice(node, x):\n"
        "    return node.c('pool.c', 'twice', x, outputs=node.inputs)\n"
    )
    ran = project.run()
    assert ran.code == 0, ran.out


@pytest.mark.slow
def test_missing_files_are_mistakes_of_the_recipe(project: Project) -> None:
    write(project)
    (project.folder / "ops/pool.c").rename(project.folder / "ops/poll.c")
    ran = project.tvmflow("run", "tiny.yaml")
    assert ran.code == 2
    assert "tiny.yaml:4:" in ran.err
    assert "operators.1: there is no file" in ran.err
    assert "did you mean 'poll.c'" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("form", ["shared-library", "static-library", "wheel"])
@pytest.mark.parametrize("runtime", ["c", "vm"])
def test_other_outputs_hold_the_operators(project: Project, form: str, runtime: str) -> None:
    """Also libraries for TVM's runtime."""
    write(project)
    project.edit_recipe(
        "outputs: [c-library, bundle]", f"outputs: [{form}, bundle]\nruntime: {runtime}"
    )
    ran = project.run()
    assert ran.code == 0, ran.out


@pytest.mark.slow
@pytest.mark.parametrize("system", ["wasm32-wasi", "aarch64", "cortex-m7"])
def test_other_systems_hold_the_operators(project: Project, system: str) -> None:
    """The function in C is compiled for each."""
    write(project)
    preset = (
        system
        if system != "aarch64"
        else "{name: aarch64, tvm: {kind: llvm, mtriple: aarch64-linux-gnu}}"
    )
    project.edit_recipe(
        "outputs: [c-library, bundle]",
        f"targets: [{preset}]\noutputs: [c-library]\n",
    )
    project.edit_recipe("verify: {", "verify: {against: none, ")
    ran = project.run()
    assert ran.code == 0, ran.out


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bev_pool", "bev_pool_c"])
def test_the_bird_s_eye_view_in_a_cpp_program(project: Project, tmp_path: Path, name: str) -> None:
    """The example of the page: built, verified, and run by the delivered C++ program and C library."""
    shutil.copytree(ROOT / "recipes", project.folder / "recipes")
    ran = project.tvmflow("run", f"recipes/{name}.yaml")
    assert ran.code == 0, ran.out + ran.err
    delivered = project.folder / "dist" / name / "host"
    model = _load_example()
    feed = {
        "image": np.random.default_rng(5).normal(size=(6, 16, 8, 22)).astype(np.float32),
        "cells": model.place_points(9),
    }
    np.savez(tmp_path / "in.npz", **feed)
    program = exports.program_of(delivered / f"{name}-cpp", tmp_path / "run")
    done = subprocess.run(
        [program, tmp_path / "in.npz", tmp_path / "out.npz"],
        capture_output=True,
        env={},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    [direct] = CLibrary(delivered / f"{name}-c-library/lib{name}.so", name).run(feed)
    expected = _bird_s_eye_view(feed, model)
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_allclose(archive["map"], expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(archive["map"], direct)


def _load_example() -> Any:
    spec = importlib.util.spec_from_file_location(
        "example", ROOT / "recipes/models/make_bev_pool.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _bird_s_eye_view(feed: dict[str, Any], model: Any) -> Any:
    """Return what the model computes, by loops that share nothing with the recipe's reference."""
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in model.make_model().graph.initializer
    }
    features = np.einsum("nchw,oc->nohw", feed["image"], weights["feature_weight"][:, :, 0, 0])
    scores = np.einsum("nchw,oc->nohw", feed["image"], weights["depth_weight"][:, :, 0, 0])
    depths = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    height, width = model.GRID
    grid = np.zeros((model.CHANNELS, height + 2, width + 2))
    for place, cell in np.ndenumerate(feed["cells"]):
        if cell >= 0:
            camera, depth, row, column = place
            y, x = divmod(int(cell), width)
            grid[:, y + 1, x + 1] += (
                features[camera, :, row, column] * depths[camera, depth, row, column]
            )
    head = weights["head_weight"]
    return sum(
        np.einsum("chw,oc->ohw", grid[:, y : y + height, x : x + width], head[:, :, y, x])
        for y in range(3)
        for x in range(3)
    )[None]
