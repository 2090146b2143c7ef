"""States that a library stores as float16 or int8, and those that it cannot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import Dimension, Size, State, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.states import pair_states, store_states

DIMENSIONS = (Dimension("past", 0, 8), Dimension("seq", 1, 4))
LARGEST = {"past": 8, "seq": 4, "past + seq": 12}


def spec(name: str, *sizes: Size, dtype: str = "float32") -> TensorSpec:
    shape = tuple(LARGEST[size] if isinstance(size, str) else size for size in sizes)
    return TensorSpec(name, shape, dtype, sizes=sizes)


def pair(before: TensorSpec, after: TensorSpec, dtype: str = "float16") -> State:
    names = {before.name: after.name}
    [state] = pair_states(names, [before], [after], DIMENSIONS, {before.name: dtype})
    return state


def test_rows_of_int8_are_along_the_last_axis() -> None:
    """Each has its own scale; so a state cannot grow along that axis."""
    state = pair(spec("past", 1, "past", 4), spec("present", 1, "past + seq", 4), "int8")
    assert state == State("past", "present", 1, stored_as="int8")
    message = (
        "'past' cannot be stored as int8: it grows along its last axis, which must be the values"
    )
    with pytest.raises(ImportFailed, match=message) as error:
        pair(spec("past", 1, 4, "past"), spec("present", 1, 4, "past + seq"), "int8")
    assert error.value.fix == "leave `dtype: int8` out under `state` in the recipe"


def test_a_tensor_with_row_scales_has_four_more_bytes_in_a_row() -> None:
    plain = spec("past", 1, "past", 4)
    packed = plain.stored_as("int8")
    assert (packed.shape, packed.sizes, packed.dtype) == ((1, 8, 8), (1, "past", 8), "int8")
    assert packed.row_scales
    assert TensorSpec.from_json(packed.to_json()) == packed
    assert packed.stored_as("float32") == plain
    assert plain.stored_as("float16") == plain._replace(dtype="float16")
    assert "row_scales" not in plain.to_json()


def test_a_growing_state_is_stored_as_float16() -> None:
    state = pair(spec("past", 1, "past", 4), spec("present", 1, "past + seq", 4))
    assert state == State("past", "present", 1, stored_as="float16")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            spec("h", 1, 4),
            spec("hn", 1, 4),
            "state: 'h' cannot be stored as float16: each step replaces it by 'hn'",
        ),
        (
            spec("past", 1, "past", 4, dtype="float64"),
            spec("present", 1, "past + seq", 4, dtype="float64"),
            "state: 'past' cannot be stored as float16: it is float64, and only float32 states can be",
        ),
    ],
)
def test_other_states_are_refused(before: TensorSpec, after: TensorSpec, message: str) -> None:
    with pytest.raises(ImportFailed, match=re.escape(message)) as error:
        pair(before, after)
    assert error.value.fix == "leave `dtype: float16` out under `state` in the recipe"


def load(nodes: Sequence[NodeProto], results: Sequence[str], path: Path) -> LoadedModel:
    """Return a model of `past` and `new` with these nodes; its results grow."""
    sides: dict[str, list[int | str | None]] = {"past": [1, "past", 4], "new": [1, "seq", 4]}
    sides |= {name: [1, None, 4] for name in results}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sides.items()]
    graph = helper.make_graph(nodes, "g", infos[:2], infos[2:])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opset), path)
    inputs = spec("past", 1, "past", 4), spec("new", 1, "seq", 4)
    return FRONTENDS["onnx"].load({"model": path}, inputs, dimensions=DIMENSIONS)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_concatenation_of_a_cache_alone_reads_nothing(dtype: str, tmp_path: Path) -> None:
    """As transformers exports the first key cache, which it joins to an empty one."""
    nodes = [
        helper.make_node("Concat", ["past"], ["whole"], axis=1),
        helper.make_node("Concat", ["whole", "new"], ["present"], axis=1),
        helper.make_node("Neg", ["new"], ["negative"]),
    ]
    loaded = load(nodes, ["present", "negative"], tmp_path / "m.onnx")
    stored = store_states(loaded, [State("past", "present", 1, stored_as=dtype)])
    assert {stored.inputs[0].dtype, stored.outputs[0].dtype} == {dtype}


def test_a_state_that_a_model_also_reads_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Concat", ["past", "new"], ["present"], axis=1),
        helper.make_node("Neg", ["past"], ["negative"]),
    ]
    loaded = load(nodes, ["present", "negative"], tmp_path / "m.onnx")
    state = State("past", "present", 1, stored_as="float16")
    with pytest.raises(ImportFailed, match="does more with it than to append rows"):
        store_states(loaded, [state])
    with pytest.raises(ImportFailed, match="cannot be stored as int8: the model does more with it"):
        store_states(loaded, [state._replace(stored_as="int8")])
    assert store_states(loaded, [state._replace(stored_as="")]) is loaded
    assert np.dtype(loaded.inputs[0].dtype) == np.float32
