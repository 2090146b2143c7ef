"""The parts of a partitioned model compute, one after the other, what the model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tvmflow.core.errors import StageError
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.onnx.importer import import_prepared
from tvmflow.frontends.onnx.model_files import add_outputs
from tvmflow.frontends.onnx.prepare import prepare
from tvmflow.graph.extract_part import Part, Signature, extract_part

SHAPE = (2, 3)

# `a` is read twice, `c` is an output that is read again, `e` is not read, `k` depends on weights alone.
NODES = [
    ("Add", ["x", "w"], "a"),
    ("Relu", ["a"], "b"),
    ("Mul", ["a", "b"], "c"),
    ("Sub", ["c", "y"], "d"),
    ("Exp", ["b"], "e"),
    ("Neg", ["w"], "k"),
    ("Add", ["d", "k"], "f"),
    ("Mul", ["f", "k"], "g"),
]
OUTPUTS = ("c", "g")


def model(nodes: list[tuple[str, list[str], str]] = NODES) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(SHAPE) / 5, "w")
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes],
        "net",
        value,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in OUTPUTS],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def imported(*tensors: str) -> LoadedModel:
    proto = model()
    shown = add_outputs(proto, tensors)
    return import_prepared(prepare(proto, ()), shown)


def parts(*cuts: list[str]) -> tuple[LoadedModel, list[Part]]:
    """Return the model, and its parts up to each of the cuts and to its end."""
    loaded = imported(*(name for cut in cuts for name in cut))
    signature = Signature(loaded.inputs, loaded.outputs, loaded.tensors)
    extracted: list[Part] = []
    before: list[str] = []
    for cut in [*cuts, []]:
        extracted.append(extract_part(loaded.mod, signature, before, cut))
        before += cut
    return loaded, extracted


def run(mod: Any, params: dict[str, Any], arrays: list[Any]) -> list[Any]:
    library = tvm.compile(relax.transform.LegalizeOps()(mod), tvm.target.Target("llvm"))
    main = mod["main"]
    names = [var.name for var in main.params[int(main.attrs["num_input"]) :]]
    values = [tvm.runtime.tensor(array) for array in (*arrays, *(params[n] for n in names))]
    result = relax.VirtualMachine(library, tvm.cpu())["main"](*values)
    return [array.numpy() for array in ([result] if hasattr(result, "numpy") else list(result))]


def check(*cuts: list[str]) -> list[Part]:
    """Check that the parts compute, one after the other, the bits that the model computes."""
    loaded, extracted = parts(*cuts)
    rng = np.random.default_rng(0)
    values = {spec.name: rng.standard_normal(SHAPE).astype(np.float32) for spec in loaded.inputs}
    expected = run(loaded.mod, loaded.params, [values[spec.name] for spec in loaded.inputs])
    for part in extracted:
        results = run(part.mod, loaded.params, [values[spec.name] for spec in part.inputs])
        values |= dict(zip((spec.name for spec in part.outputs), results, strict=True))
    for spec, array in zip(loaded.outputs, expected, strict=False):
        np.testing.assert_array_equal(values[spec.name], array)
    return extracted


@pytest.mark.parametrize(
    "cuts",
    [[["c"]], [["a", "b"]], [["a"]], [["b", "c"]], [["c"], ["d"]], [["a"], ["c"], ["f"]]],
    ids=str,
)
def test_parts_compute_what_the_model_computes(cuts: list[list[str]]) -> None:
    """Tensors may have several readers, outputs may lie in the middle, and later parts may take inputs."""
    check(*cuts)


def test_a_part_has_only_the_inputs_that_it_reads() -> None:
    """Inputs of the model come first, then tensors of earlier parts, then weights."""
    _, (first, second) = parts(["c"])
    assert [spec.name for spec in first.inputs] == ["x"]
    assert [spec.name for spec in first.outputs] == ["c"]
    assert [spec.name for spec in second.inputs] == ["y", "c"]
    assert [spec.name for spec in second.outputs] == ["g"]
    assert [var.name for var in second.mod["main"].params] == ["y", "c", "k"]


def test_two_parts_may_compute_the_same_weights() -> None:
    """Weights are computed when the libraries are built."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in "xw")
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            k = builder.emit(relax.op.negative(w))
            a = builder.emit(relax.op.add(x, k))
            ends = [builder.emit_output(value) for value in (relax.op.multiply(a, k), a)]
        builder.emit_func_output(relax.Tuple(ends))
    mod = builder.finalize()
    source, output, middle = (TensorSpec(name, SHAPE, "float32") for name in ("x", "out", "a"))
    signature = Signature((source,), (output,), (middle,))
    first = extract_part(mod, signature, [], ["a"])
    second = extract_part(mod, signature, ["a"], [])
    for part in (first, second):
        assert [var.name for var in part.mod["main"].params][1:] == ["w"]
    values = {name: np.full(SHAPE, n, np.float32) for name, n in (("x", 5), ("w", 2))}
    (cut,) = run(first.mod, values, [values["x"]])
    (last,) = run(second.mod, values, [cut])
    np.testing.assert_array_equal(last, np.full(SHAPE, (5 - 2) * -2, np.float32))


def test_tensors_that_would_be_computed_twice_are_reported() -> None:
    """The message names the operator and the shape."""
    with pytest.raises(StageError) as caught:
        parts(["b"])
    assert caught.value.message == (
        "this part reads tensors that an earlier part computes but does not output: the result of add of shape [2, 3]"
    )
    assert "until" in caught.value.fix


def test_a_part_that_computes_nothing_is_refused() -> None:
    """The last part, if earlier ones compute all outputs; a part that ends where it begins."""
    with pytest.raises(StageError, match="the last part has nothing to do"):
        parts(["c", "g"])
    with pytest.raises(StageError, match="'a' is not computed by this part"):
        loaded = imported("a")
        signature = Signature(loaded.inputs, loaded.outputs, loaded.tensors)
        extract_part(loaded.mod, signature, ["a"], ["a"])


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.data())
def test_any_partition_works_or_is_refused(data: st.DataObject) -> None:
    """Any tensors in any order give equal numbers, or a message."""
    names = [output for _, _, output in NODES if output not in ("g", "k")]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
    at = data.draw(st.integers(1, len(chosen)))
    cuts = [chosen[:at], chosen[at:]] if chosen[at:] else [chosen]
    try:
        check(*cuts)
    except StageError as refused:
        assert refused.message and refused.fix
