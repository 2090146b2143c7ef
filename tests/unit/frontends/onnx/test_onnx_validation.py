"""Models that are wrong in themselves: each is refused with a sentence before a pass or TVM sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.support.onnx_models import classifier, draw, load, model, save, specs, value
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["onnx"]

node = helper.make_node
NEWEST = onnx.defs.onnx_opset_version()


def relu(shape: Any = (1, 4), **more: Any) -> ModelProto:
    return model([node("Relu", ["x"], ["y"])], [value("x", shape)], [value("y", None)], **more)


def refusal(made: ModelProto, folder: Path, **feed: np.ndarray[Any, Any]) -> ImportFailed:
    with pytest.raises(ImportFailed) as caught:
        frontend.load(save(made, folder), specs(feed))
    assert caught.value.fix
    assert str(caught.value).replace("\n", " ").isprintable()
    return caught.value


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("opset", [NEWEST + 1, 999, 1 << 40, 0, -1])
def test_an_opset_that_onnx_does_not_know_is_refused(opset: int, tmp_path: Path) -> None:
    """Nobody can say what its operators mean, whatever would be computed."""
    error = refusal(relu(opset=opset), tmp_path)
    assert f"uses opset {opset}, and onnx {onnx.__version__} knows opsets 1 to" in error.message


def test_a_model_without_an_opset_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime refuses it too, so that verify could only say the same later, or not at all."""
    made = relu()
    del made.opset_import[:]
    assert "does not name the opset of its operators" in refusal(made, tmp_path).message


def test_two_standard_opsets_are_refused(tmp_path: Path) -> None:
    """Both domains mean the standard one."""
    made = relu(opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("ai.onnx", 17)])
    assert "several opsets: 13, 17" in refusal(made, tmp_path).message


def test_the_ir_version_must_be_known(tmp_path: Path) -> None:
    """None at all, or one from the future."""
    made = relu()
    made.ir_version = 99
    assert "has the IR version 99" in refusal(made, tmp_path).message
    made.ClearField("ir_version")
    assert "does not name its IR version" in refusal(made, tmp_path).message


# ---------------------------------------------------------------- inputs


def test_an_input_of_size_minus_one_is_free(tmp_path: Path) -> None:
    """As in ONNX Runtime: the recipe has to choose it, and is told which."""
    error = refusal(relu([-1, 4]), tmp_path)
    assert error.message == (
        "inputs: the model has dynamic dimensions; write this in the recipe:\n\n"
        "inputs:\n  x: {shape: [1, 4]}  # float32, [-1, 4]\n\n"
        "or, to let one library serve all sizes, write this, with the maximum for each SIZE:\n\n"
        "dimensions:\n  batch: {max: SIZE}\ninputs:\n  x: {shape: [batch, 4]}  # float32, [-1, 4]"
    )
    loaded = load(relu([-1, 4]), tmp_path, {"x": draw(3, 4)})
    assert loaded.outputs[0].shape == (3, 4)


def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime takes nothing else, whatever the recipe says."""
    for feed in ({}, {"x": draw(1, 4)}):
        error = refusal(relu([0, 4]), tmp_path, **feed)
        assert "inputs.x.shape: input 'x' has shape [0, 4], which is empty" in error.message


@pytest.mark.parametrize("size", [1 << 31, 1 << 40, (1 << 63) - 1])
def test_an_input_that_is_too_large_is_refused(size: int, tmp_path: Path) -> None:
    """The number of elements is computed without overflow."""
    error = refusal(relu([size, 4]), tmp_path)
    assert f"'x' has shape [{size}, 4], which has more than 2^31 elements" in error.message


def test_an_input_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Strings, and what is not a tensor."""
    made = relu()
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    assert "'x' has dtype string, which no input of a library can have" in (
        refusal(made, tmp_path).message
    )
    made.graph.input[0].type.tensor_type.elem_type = 99
    assert "'x' has dtype number 99 of ONNX" in refusal(made, tmp_path).message
    made.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1
    assert "'x' is not a tensor" in refusal(made, tmp_path).message


# ---------------------------------------------------------------- the graph


def _edit(change: Callable[[ModelProto], object]) -> ModelProto:
    made = classifier()
    change(made)
    return made


def _sparse(made: ModelProto) -> None:
    sparse = made.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "thin"))


def _sparse_constant(made: ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "v")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "p")
    sparse = helper.make_sparse_tensor(values, places, [3])
    made.graph.node.append(helper.make_node("Constant", [], ["few"], sparse_value=sparse))


def _function(made: ModelProto) -> None:
    """A function that takes the name of an operator of ONNX."""
    own = helper.make_function(
        "", "Relu", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], made.opset_import
    )
    made.functions.append(own)


def _sequence(made: ModelProto) -> None:
    made.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = 1


WRONG: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "no outputs": (lambda m: m.graph.ClearField("output"), "it has no outputs"),
    "an output that nothing makes": (
        lambda m: setattr(m.graph.output[0], "name", "nobody"),
        "nothing makes its output 'nobody'",
    ),
    "an output without a name": (
        lambda m: setattr(m.graph.output[0], "name", ""),
        "nothing makes its output ''",
    ),
    "an output that is not a tensor": (
        _sequence,
        "the output 'prob' is not a tensor, but of the type sequence",
    ),
    "a function in place of an operator": (
        _function,
        "the model has a function of its own with the name of ONNX's operator 'Relu'",
    ),
    "an edge from nowhere": (
        lambda m: m.graph.node[2].input.__setitem__(0, "lost"),
        "'Relu' (node 'relu') reads 'lost', which no node before it makes",
    ),
    "a cycle": (
        lambda m: m.graph.node[0].input.__setitem__(0, "p"),
        "'Conv' (node 'conv') reads 'p', which no node before it makes",
    ),
    "a tensor that is made twice": (
        lambda m: m.graph.node[2].output.__setitem__(0, "n"),
        "two nodes make 'n'",
    ),
    "a weight twice": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]),
        "two weights with the name 'w'",
    ),
    "an output twice": (
        lambda m: m.graph.output.append(m.graph.output[0]),
        "two outputs with the name 'prob'",
    ),
    "an operator without inputs": (
        lambda m: m.graph.node[2].ClearField("input"),
        "'Relu' (node 'relu') has 0 inputs, and needs 1",
    ),
    "sparse weights": (_sparse, "the weight 'thin' is sparse"),
    "a sparse constant": (_sparse_constant, "the weight 'few' is sparse"),
    "short data": (
        lambda m: setattr(m.graph.initializer[1], "raw_data", b"1234567"),
        "the constant 'b' has 7 bytes of data, and needs 24",
    ),
    "no data": (
        lambda m: m.graph.initializer[1].ClearField("raw_data"),
        "the constant 'b' has 0 values, and needs 6",
    ),
    "a negative size": (
        lambda m: m.graph.initializer[1].dims.__setitem__(0, -6),
        "the constant 'b' has the shape [-6]",
    ),
    "a size beyond all memory": (
        lambda m: m.graph.initializer[1].dims.append(1 << 62),
        "the constant 'b' has the shape [6, 4611686018427387904], which has more than 2^31",
    ),
    "an unknown type": (
        lambda m: setattr(m.graph.initializer[1], "data_type", 77),
        "the constant 'b' has the unknown type 77",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_graph_is_named(case: str, tmp_path: Path) -> None:
    """With the node or the tensor."""
    change, text = WRONG[case]
    assert text in refusal(_edit(change), tmp_path).message


def test_a_subgraph_sees_the_tensors_around_it(tmp_path: Path) -> None:
    """And only those that are made before it."""
    branch = helper.make_graph([node("Relu", ["a"], ["t"])], "b", [], [value("t", None)])
    nodes = [
        node("Neg", ["x"], ["a"]),
        node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    inputs, weights = [value("x", [2])], {"c": np.array(True)}
    load(model(nodes, inputs, [value("y", None)], weights), tmp_path)
    made = model(nodes[::-1], inputs, [value("y", None)], weights)
    assert "'Relu' (node with output 't') reads 'a'" in refusal(made, tmp_path).message


def test_names_that_are_not_text_are_refused(tmp_path: Path) -> None:
    """Protobuf gives such bytes as they are."""
    content = classifier().SerializeToString().replace(b"softmax", b"\xaa\xff\xfemaxx")
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ImportFailed, match="a name in it is not UTF-8 text"):
        frontend.load({"model": path}, ())


def test_names_are_shown_escaped_and_short(tmp_path: Path) -> None:
    """Operator, node and tensor may command the terminal, or fill it."""
    name = "\x1b[2J\r\u202e" + "n" * 50_000
    nodes = [node(name, ["x"], ["y"], name=name, domain="com.example")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    made = model(nodes, [value("x", [1])], [value("y", None)], opset_imports=opsets)
    error = refusal(made, tmp_path)
    assert "\\x1b[2J\\r\\u202ennn" in error.message
    assert len(str(error)) < 1000
    made = model([node("Relu", [name], ["y"])], [value(name, ["n"])], [value("y", None)])
    assert len(str(refusal(made, tmp_path))) < 1000


# ---------------------------------------------------------------- sizes


def constants(*nodes: onnx.NodeProto, **weights: Any) -> ModelProto:
    """Return a model that adds the sum of the constant `c`, which the nodes make, to its input."""
    tail = [
        node("Cast", ["c"], ["f"], to=TensorProto.FLOAT),
        node("ReduceSum", ["f"], ["s"], keepdims=0),
        node("Add", ["x", "s"], ["y"]),
    ]
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    return model([*nodes, *tail], [value("x", [4])], [value("y", None)], arrays, opset=18)


ONE, HUGE = np.ones(1, np.float32), np.array([1 << 20, 1 << 20])
TOO_LARGE = {
    "Range": constants(
        node("Range", ["a", "b", "d"], ["c"]), a=np.int64(0), b=np.int64(1 << 40), d=np.int64(1)
    ),
    "ConstantOfShape": constants(node("ConstantOfShape", ["n"], ["c"]), n=HUGE),
    "Expand": constants(node("Expand", ["k", "n"], ["c"]), k=ONE, n=HUGE),
    "Tile": constants(node("Tile", ["k", "n"], ["c"]), k=ONE, n=np.array([1 << 40])),
    "Pad": constants(node("Pad", ["k", "n"], ["c"]), k=ONE, n=np.array([1 << 40, 0])),
    "OneHot": constants(
        node("OneHot", ["i", "n", "v"], ["c"]), i=np.array([0]), n=np.int64(1 << 40), v=np.array([0, 1], np.float32)
    ),
    "Resize": constants(
        node("Resize", ["k", "", "n"], ["c"]),
        k=np.ones((1, 1, 2, 2), np.float32),
        n=np.array([1, 1, 1 << 20, 1 << 20], np.float32),
    ),
    "Add": constants(
        node("Expand", ["k", "n"], ["p"]),
        node("Reshape", ["p", "m"], ["q"]),
        node("Add", ["p", "q"], ["c"]),
        k=ONE,
        n=np.array([1 << 16]),
        m=np.array([1 << 16, 1]),
    ),
    "Concat": constants(
        *(node("Concat", [f"t{i}"] * 2, [f"t{i + 1}"], axis=0) for i in range(40)),
        node("Identity", ["t40"], ["c"]),
        t0=np.ones(1 << 16, np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", TOO_LARGE)
def test_a_few_numbers_do_not_fill_the_memory(operator: str, tmp_path: Path) -> None:
    """What would be evaluated or inferred is measured before anything makes it."""
    error = refusal(TOO_LARGE[operator], tmp_path)
    assert error.message.startswith(f"{operator} (node with output ")
    assert "elements, and the limit is" in error.message


def test_a_tensor_that_cannot_exist_is_refused(tmp_path: Path) -> None:
    """Its size is computed from the inputs' shapes, without overflow."""
    made = model(
        [node("Conv", ["x", "w"], ["y"], pads=[1 << 30, 1 << 30, 0, 0])],
        [value("x", [1, 1, 4, 4])],
        [value("y", None)],
        {"w": draw(1, 1, 1, 1)},
    )
    assert "Conv (node with output 'y') makes a tensor of" in refusal(made, tmp_path).message


def test_more_inputs_than_any_model_has(tmp_path: Path) -> None:
    """Neither the message nor the search for similar names goes through all of them."""
    made = relu()
    made.graph.input.extend([value(f"i{n}", [1]) for n in range(10_001)])
    assert "the model has 10,003 inputs and outputs" in refusal(made, tmp_path).message


def test_a_chain_of_many_nodes_is_imported(tmp_path: Path) -> None:
    """The time grows with the number of nodes."""
    nodes = [node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(1000)]
    load(model(nodes, [value("t0", [4])], [value("t1000", None)]), tmp_path)
