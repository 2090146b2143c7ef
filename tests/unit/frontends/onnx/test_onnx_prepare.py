"""Preparing ONNX models: each pass leaves the numbers as they are, and the form is one that TVM takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import agree, classifier, draw, load, model, save, specs, value
from tests.support.source_files import empty_source_files
from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.onnx.graph import opset_of
from tvmflow.frontends.onnx.prepare import prepare
from tvmflow.recipe import ModelSource

frontend = FRONTENDS["onnx"]

node = helper.make_node


def operators(made: ModelProto) -> list[str]:
    return [item.op_type for item in made.graph.node]


def prepared(made: ModelProto, **feed: np.ndarray) -> ModelProto:  # type: ignore[type-arg]
    return prepare(made, specs(feed))


def test_computed_shapes_become_constants() -> None:
    """Flattening that exporters write as Shape, Gather, Concat and Reshape becomes one Reshape."""
    made = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Unsqueeze", ["n", "axes"], ["n1"]),
            node("Concat", ["n1", "rest"], ["shape"], axis=0),
            node("Reshape", ["x", "shape"], ["y"]),
        ],
        [value("x", ["batch", 2, 3])],
        [value("y", None)],
        {
            "zero": np.array(0, np.int64),
            "axes": np.array([0], np.int64),
            "rest": np.array([-1], np.int64),
        },
    )
    assert operators(prepared(made, x=draw(4, 2, 3))) == ["Reshape"]


def test_copies_dropouts_and_dead_nodes_are_removed() -> None:
    """Only nodes that an output needs are kept."""
    made = model(
        [
            node("Identity", ["x"], ["a"]),
            node("Dropout", ["a"], ["b"]),
            node("Relu", ["b"], ["y"]),
            node("Exp", ["b"], ["unused"]),
        ],
        [value("x", [2])],
        [value("y", [2])],
        {"nobody": draw(2)},
    )
    actual = prepared(made)
    assert operators(actual) == ["Relu"]
    assert not actual.graph.initializer


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    """A call of a local function is replaced by its nodes."""
    square = helper.make_function(
        "local",
        "Square",
        ["a"],
        ["b"],
        [node("Mul", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    made = model(
        [node("Square", ["x"], ["y"], domain="local")],
        [value("x", [3])],
        [value("y", [3])],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
        functions=[square],
    )
    assert operators(prepared(made)) == ["Mul"]
    agree(made, tmp_path, {"x": draw(3)})


def test_large_results_are_not_folded() -> None:
    """Folding a small tensor into gigabytes would cost more than it saves."""
    made = model(
        [node("Expand", ["one", "shape"], ["big"]), node("Add", ["x", "big"], ["y"])],
        [value("x", [1])],
        [value("y", None)],
        {"one": draw(1), "shape": np.array([1 << 15, 1 << 13], np.int64)},
    )
    assert "Expand" in operators(prepared(made))


def test_expensive_operators_are_not_folded() -> None:
    """A product of two weights depends on learned values, so it stays in the graph."""
    made = model(
        [node("MatMul", ["a", "b"], ["w"]), node("MatMul", ["x", "w"], ["y"])],
        [value("x", [2, 3])],
        [value("y", [2, 5])],
        {"a": draw(3, 4), "b": draw(4, 5)},
    )
    assert operators(prepared(made)) == ["MatMul", "MatMul"]


def test_an_if_with_a_constant_condition(tmp_path: Path) -> None:
    """The result is that of the taken branch."""

    def branch(name: str, operator: str) -> onnx.GraphProto:
        return helper.make_graph([node(operator, ["x"], [name])], name, [], [value(name, [3])])

    made = model(
        [
            node(
                "If",
                ["cond"],
                ["y"],
                then_branch=branch("t", "Exp"),
                else_branch=branch("e", "Neg"),
            ),
        ],
        [value("x", [3])],
        [value("y", [3])],
        {"cond": np.array(True)},
    )
    agree(made, tmp_path, {"x": draw(3)})


def test_weights_listed_as_inputs_are_weights(tmp_path: Path) -> None:
    """As up to IR version 3: the inputs are those without a value, and the opset can be converted."""
    made = classifier(opset=7)
    made.ir_version = 3
    for tensor in made.graph.initializer:
        made.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    assert [spec.name for spec in load(made, tmp_path).inputs] == ["data"]
    assert opset_of(prepared(made)) == 13


def test_external_data_is_read_by_role(tmp_path: Path) -> None:
    """Planning lists the files without importing onnx; they may be elsewhere when the model is loaded."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "big.onnx"
    onnx.save(
        classifier(),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    actual = frontend.files(
        ModelSource(onnx="in/big.onnx"), tmp_path, lambda *_: "r.yaml:1:1", empty_source_files()
    )
    assert [file.role for file in actual] == ["model", "external/weights.bin"]
    moved = tmp_path / "moved"
    Path(actual[1].path).rename(moved)
    loaded = frontend.load({"model": path, "external/weights.bin": moved}, ())
    expected = {t.name: numpy_helper.to_array(t) for t in classifier().graph.initializer}
    np.testing.assert_array_equal(loaded.params["w"], expected["w"])
    with pytest.raises(RecipeError, match=r"has weights in 'weights\.bin', which does not exist"):
        frontend.files(
            ModelSource(onnx="in/big.onnx"), tmp_path, lambda *_: "r.yaml:1:1", empty_source_files()
        )


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd"])
def test_external_data_outside_the_folder_is_rejected(tmp_path: Path, location: str) -> None:
    """A downloaded model must not read other files of this machine."""
    made = classifier()
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(RecipeError, match="refers to data outside its folder"):
        frontend.files(
            ModelSource(onnx="m.onnx"), tmp_path, lambda *_: "r.yaml:1:1", empty_source_files()
        )


# ---------------------------------------------------------------- inputs of the recipe


def problem(made: ModelProto, folder: Path, **feed: np.ndarray) -> str:  # type: ignore[type-arg]
    with pytest.raises(ImportFailed) as caught:
        frontend.load(save(made, folder), specs(feed))
    assert caught.value.fix
    return caught.value.message


def test_inputs_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    """Wrong names, shapes and dtypes: the message has those of the model and of the recipe."""
    made = model(
        [node("Add", ["left", "right"], ["y"])],
        [value("left", ["n", 3]), value("right", ["n", 3])],
        [value("y", None)],
    )
    good = draw(2, 3)
    assert "no input 'lefd'; did you mean 'left'?" in problem(made, tmp_path, lefd=good, right=good)
    assert "\n  right: {shape: [1, 3]}  # float32, [n, 3]" in problem(made, tmp_path, left=good)
    assert "'left' has shape ['n', 3], which [2, 4] does not fit" in problem(
        made, tmp_path, left=draw(2, 4), right=good
    )
    assert "'left' has dtype float32, not float64" in problem(
        made, tmp_path, left=good.astype(np.float64), right=good
    )
    assert problem(made, tmp_path).count("{shape: [1, 3]}") == 2


def test_an_input_with_a_default_becomes_one_when_the_recipe_names_it(tmp_path: Path) -> None:
    """Or gets another constant; otherwise the default is one."""
    made = model(
        [node("Add", ["x", "shift"], ["y"])],
        [value("x", [2]), value("shift", [2])],
        [value("y", None)],
        {"shift": np.array([10, 20], np.float32)},
    )
    assert [spec.name for spec in agree(made, tmp_path, {"x": draw(2)}).inputs] == ["x"]
    feed = {"x": draw(2), "shift": draw(2, seed=1)}
    assert [spec.name for spec in agree(made, tmp_path, feed).inputs] == ["x", "shift"]
    loaded = frontend.load(
        save(made, tmp_path), specs(feed), bound={"shift": np.array([1, 2], np.float32)}
    )
    assert [spec.name for spec in loaded.inputs] == ["x"]
    [actual] = compute(loaded, {"x": np.array([0, 0], np.float32)})
    assert actual.tolist() == [1, 2]


def test_symbolic_dimensions_take_the_sizes_of_the_recipe(tmp_path: Path) -> None:
    """Shapes that were inferred for other sizes are dropped."""
    made = model(
        [node("Relu", ["x"], ["a"]), node("Softmax", ["a"], ["y"], axis=-1)],
        [value("x", ["batch", "time"])],
        [value("y", ["batch", "time"])],
    )
    made.graph.value_info.append(value("a", [7, 7]))
    loaded = agree(made, tmp_path, {"x": draw(2, 5)})
    assert loaded.outputs[0].shape == (2, 5)


def test_an_opset_that_is_too_old_is_rejected(tmp_path: Path) -> None:
    """Below 7 it must be convertible; otherwise the message says with which opset to export."""
    made = model(
        [node("Crop", ["x"], ["y"], border=[0, 0, 1, 1])],
        [value("x", [1, 1, 2, 2])],
        [value("y", None)],
        opset=1,
    )
    assert "the model uses opset 1, which cannot be converted" in problem(made, tmp_path)
