"""Each pass that prepares an ONNX model, on a small graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from tests.support.onnx_models import agree, draw, model, value
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx.graph import known_values, opset_of
from tvmflow.frontends.onnx.operators import unsupported_reason
from tvmflow.frontends.onnx.prepare import (
    bypass_copies,
    convert_constants_to_initializers,
    convert_opset,
    drop_dead_nodes,
    drop_unused_outputs,
    expand_unsupported_operators,
    fold_constants,
    fold_shapes,
    infer_shapes,
)

node = helper.make_node


def operators(made: ModelProto) -> list[str]:
    return [item.op_type for item in made.graph.node]


def constants(made: ModelProto) -> dict[str, list[float]]:
    return {t.name: numpy_helper.to_array(t).tolist() for t in made.graph.initializer}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"value": numpy_helper.from_array(np.array([1, 2], np.int64))}, [1, 2]),
        ({"value_float": 0.5}, 0.5),
        ({"value_floats": [0.5, 1.5]}, [0.5, 1.5]),
        ({"value_int": 3}, 3),
        ({"value_ints": [3, 4]}, [3, 4]),
    ],
)
def test_constant_nodes_become_initializers(
    attributes: dict[str, object], expected: object
) -> None:
    """In every form that numbers have."""
    made = model([node("Constant", [], ["c"], **attributes)], [], [value("c", None)])
    converted = convert_constants_to_initializers(made)
    assert operators(converted) == []
    assert constants(converted) == {"c": expected}


def test_a_constant_that_is_no_number_stays() -> None:
    """TVM's importer refuses it by name, if it is needed."""
    made = model([node("Constant", [], ["c"], value_string="text")], [], [value("c", None)])
    assert operators(convert_constants_to_initializers(made)) == ["Constant"]


@pytest.mark.parametrize(("opset", "expected"), [(9, 13), (13, 13), (17, 17), (21, 21), (22, 21)])
def test_the_opset_becomes_one_that_tvm_supports_well(opset: int, expected: int) -> None:
    """Older ones are raised, newer ones lowered, all others kept."""
    made = model([node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])], opset=opset)
    made.ir_version = 10
    assert opset_of(convert_opset(made)) == expected


@pytest.mark.parametrize("axis", [None, 0, 2])
def test_hardmax_of_old_opsets_selects_one_element_of_several_axes(
    axis: int | None, tmp_path: Path
) -> None:
    """Before opset 13, the axes from `axis` on are one; ONNX's converter forgets it."""
    attributes = {} if axis is None else {"axis": axis}
    hardmax = node("Hardmax", ["x"], ["y"], **attributes)
    made = model([hardmax], [value("x", [2, 3, 4])], [value("y", None)], opset=11)
    agree(made, tmp_path, {"x": draw(2, 3, 4)})


def test_an_opset_that_tvm_misreads_must_be_convertible() -> None:
    """The message names the opset that it needs."""
    made = model(
        [node("Upsample", ["x"], ["y"], scales=[1.0, 2.0])],
        [value("x", [1, 2])],
        [value("y", None)],
        opset=6,
    )
    with pytest.raises(ImportFailed, match="opset 6, which cannot be converted") as caught:
        convert_opset(made)
    assert caught.value.fix == "export it with opset 7 or newer"


def test_operators_that_onnx_defines_by_others_are_expanded() -> None:
    """Those that TVM supports are not touched."""
    made = model(
        [node("Relu", ["x"], ["a"]), node("CenterCropPad", ["a", "size"], ["y"], axes=[2])],
        [value("x", [1, 2, 3, 3])],
        [value("y", [1, 2, 2, 3])],
        {"size": np.array([2])},
        opset=18,
    )
    known = known_values(made)
    assert [bool(unsupported_reason(item, known)) for item in made.graph.node] == [False, True]
    expanded = expand_unsupported_operators(infer_shapes(made))
    assert "CenterCropPad" not in operators(expanded)
    assert operators(expanded)[0] == "Relu"


def test_an_operator_without_a_definition_stays() -> None:
    """The importer names it."""
    made = model([node("RandomNormalLike", ["x"], ["y"])], [value("x", [2, 2])], [value("y", None)])
    assert operators(expand_unsupported_operators(infer_shapes(made))) == ["RandomNormalLike"]
    reason = unsupported_reason(made.graph.node[0], known_values(made))
    assert reason == "TVM has no operator RandomNormalLike"


def test_an_operator_of_another_domain_is_unsupported() -> None:
    """Its domain is in the reason."""
    made = node("Relu", ["x"], ["y"], domain="mine")
    reason = unsupported_reason(made, known_values(model([made], [], [])))
    assert reason == "TVM has no operator mine.Relu"


def test_folded_constants_have_the_dtype_that_onnx_declares() -> None:
    """The reference evaluator computes grids in float32."""
    made = model(
        [node("AffineGrid", ["theta", "size"], ["grid"]), node("Add", ["x", "grid"], ["y"])],
        [value("x", [1, 2, 2, 2], "float16")],
        [value("y", None, "float16")],
        {"theta": np.ones((1, 2, 3), np.float16), "size": np.array([1, 1, 2, 2])},
        opset=20,
    )
    folded = fold_constants(made)
    assert operators(folded) == ["Add"]
    assert [t.data_type for t in folded.graph.initializer if t.name == "grid"] == [10]


def test_shapes_and_sizes_become_numbers() -> None:
    """`Shape` may select dimensions; a tensor without a known shape is left alone."""
    made = model(
        [
            node("Shape", ["x"], ["all"]),
            node("Shape", ["x"], ["some"], start=1, end=3),
            node("Size", ["x"], ["size"]),
            node("Shape", ["z"], ["unknown"]),
        ],
        [value("x", [2, 3, 4]), value("z", ["n"])],
        [value(name, None, "int64") for name in ("all", "some", "size", "unknown")],
    )
    folded = fold_shapes(made)
    assert operators(folded) == ["Shape"]
    assert constants(folded) == {"all": [2, 3, 4], "some": [3, 4], "size": 24}


def test_constants_are_evaluated_in_a_chain() -> None:
    """A result is a constant for the nodes after it."""
    made = model(
        [
            node("Add", ["a", "a"], ["b"]),
            node("Mul", ["b", "a"], ["c"]),
            node("Add", ["x", "c"], ["y"]),
        ],
        [value("x", [1])],
        [value("y", [1])],
        {"a": np.array([3.0], np.float32)},
    )
    folded = fold_constants(made)
    assert operators(folded) == ["Add"]
    assert constants(folded)["c"] == [18.0]


@pytest.mark.parametrize(
    "unfolded",
    [
        node("RandomNormal", [], ["y"], shape=[2]),
        node("MatMul", ["w", "w"], ["y"]),
        node("NoSuchOperator", ["w"], ["y"]),
        node("Relu", ["x"], ["y"]),
    ],
    ids=lambda made: made.op_type,
)
def test_some_nodes_are_never_evaluated(unfolded: onnx.NodeProto) -> None:
    """Random ones, the real work of a model, unknown ones, and those that read an input."""
    made = model([unfolded], [value("x", [2])], [value("y", None)], {"w": draw(2, 2)})
    assert operators(fold_constants(made)) == [unfolded.op_type]


def test_a_copy_that_names_an_output_stays() -> None:
    """Other copies are bypassed, also in a chain."""
    made = model(
        [
            node("Identity", ["x"], ["a"]),
            node("Identity", ["a"], ["b"]),
            node("Relu", ["b"], ["c"]),
            node("Identity", ["c"], ["y"]),
        ],
        [value("x", [2])],
        [value("y", [2])],
    )
    bypassed = bypass_copies(made)
    assert operators(bypassed) == ["Relu", "Identity"]
    assert list(bypassed.graph.node[0].input) == ["x"]


def test_only_optional_outputs_are_dropped() -> None:
    """A mask that nothing reads goes; the values of TopK stay, with the indices that are read."""
    made = model(
        [node("Dropout", ["x"], ["d", "mask"]), node("TopK", ["d", "k"], ["values", "y"])],
        [value("x", [4])],
        [value("y", [2], "int64")],
        {"k": np.array([2], np.int64)},
    )
    dropped = drop_unused_outputs(made)
    assert [list(item.output) for item in dropped.graph.node] == [["d"], ["values", "y"]]


def test_what_a_subgraph_reads_is_not_dead() -> None:
    """A branch may use values of the outer graph without listing them."""
    branch = helper.make_graph([node("Exp", ["a"], ["b"])], "branch", [], [value("b", [2])])
    made = model(
        [
            node("Neg", ["x"], ["a"]),
            node("Abs", ["x"], ["dead"]),
            node("If", ["condition"], ["y"], then_branch=branch, else_branch=branch),
        ],
        [value("x", [2]), value("condition", [], "bool")],
        [value("y", [2])],
        {"unread": draw(2)},
    )
    live = drop_dead_nodes(made)
    assert operators(live) == ["Neg", "If"]
    assert constants(live) == {}
