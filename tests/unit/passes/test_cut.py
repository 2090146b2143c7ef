"""A model cut at its tensors: parts that give, one after the other, what the whole gives."""

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

from tvmflow.errors import StageError
from tvmflow.frontends._base import LoadedModel
from tvmflow.frontends.onnx._importer import import_prepared
from tvmflow.frontends.onnx._prepare import prepare
from tvmflow.frontends.onnx._tensors import show_tensors
from tvmflow.passes.cut import Part, Signature, cut_out
from tvmflow.values import TensorSpec

SHAPE = (2, 3)

# `a` is read twice, `c` is an output that is read again, `e` is read by nobody, `k` becomes a weight
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
    shown = show_tensors(proto, tensors)
    return import_prepared(prepare(proto, ()), shown)


def parts(*cuts: list[str]) -> tuple[LoadedModel, list[Part]]:
    """The model, and its parts up to each of the cuts and to its end."""
    loaded = imported(*(name for cut in cuts for name in cut))
    signature = Signature(loaded.inputs, loaded.outputs, loaded.tensors)
    found: list[Part] = []
    before: list[str] = []
    for cut in [*cuts, []]:
        found.append(cut_out(loaded.mod, signature, before, cut))
        before += cut
    return loaded, found


def run(mod: Any, params: dict[str, Any], arrays: list[Any]) -> list[Any]:
    library = tvm.compile(relax.transform.LegalizeOps()(mod), tvm.target.Target("llvm"))
    main = mod["main"]
    names = [var.name for var in main.params[int(main.attrs["num_input"]) :]]
    values = [tvm.runtime.tensor(each) for each in (*arrays, *(params[n] for n in names))]
    result = relax.VirtualMachine(library, tvm.cpu())["main"](*values)
    return [each.numpy() for each in ([result] if hasattr(result, "numpy") else list(result))]


def check(*cuts: list[str]) -> list[Part]:
    """The parts compute, one after the other, what the whole does: bit by bit."""
    loaded, found = parts(*cuts)
    rng = np.random.default_rng(0)
    there = {spec.name: rng.standard_normal(SHAPE).astype(np.float32) for spec in loaded.inputs}
    whole = run(loaded.mod, loaded.params, [there[spec.name] for spec in loaded.inputs])
    for part in found:
        results = run(part.mod, loaded.params, [there[spec.name] for spec in part.inputs])
        there |= dict(zip((spec.name for spec in part.outputs), results, strict=True))
    for spec, expected in zip(loaded.outputs, whole, strict=False):
        np.testing.assert_array_equal(there[spec.name], expected)
    return found


@pytest.mark.parametrize(
    "cuts",
    [[["c"]], [["a", "b"]], [["a"]], [["b", "c"]], [["c"], ["d"]], [["a"], ["c"], ["f"]]],
    ids=str,
)
def test_parts_compute_what_the_whole_does(cuts: list[list[str]]) -> None:
    """With tensors that several read, an output in the middle, an input that only a later part takes."""
    check(*cuts)


def test_a_part_takes_and_gives_what_it_needs_and_no_more() -> None:
    """Inputs, then tensors of earlier parts; outputs as they are asked for; weights that it reads."""
    _, (first, second) = parts(["c"])
    assert [spec.name for spec in first.inputs] == ["x"]
    assert [spec.name for spec in first.outputs] == ["c"]
    assert [spec.name for spec in second.inputs] == ["y", "c"]
    assert [spec.name for spec in second.outputs] == ["g"]
    assert [var.name for var in second.mod["main"].params] == ["y", "c", "k"]


def test_what_depends_on_weights_alone_may_stand_twice() -> None:
    """It is computed when the libraries are built."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in "xw")
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            k = builder.emit(relax.op.negative(w))
            a = builder.emit(relax.op.add(x, k))
            ends = [builder.emit_output(each) for each in (relax.op.multiply(a, k), a)]
        builder.emit_func_output(relax.Tuple(ends))
    mod = builder.finalize()
    given, gives, between = (TensorSpec(name, SHAPE, "float32") for name in ("x", "out", "a"))
    first = cut_out(mod, Signature((given,), (gives,), (between,)), [], ["a"])
    second = cut_out(mod, Signature((given,), (gives,), (between,)), ["a"], [])
    for part in (first, second):
        assert [var.name for var in part.mod["main"].params][1:] == ["w"]
    values = {name: np.full(SHAPE, n, np.float32) for name, n in (("x", 5), ("w", 2))}
    (middle,) = run(first.mod, values, [values["x"]])
    (last,) = run(second.mod, values, [middle])
    np.testing.assert_array_equal(last, np.full(SHAPE, (5 - 2) * -2, np.float32))


def test_what_would_be_computed_twice_is_told() -> None:
    """By the operator whose result the part needs and is not given."""
    with pytest.raises(StageError) as caught:
        parts(["b"])
    assert caught.value.message == (
        "this part needs what a part before computes and does not give: the result of add of shape [2, 3]"
    )
    assert "until" in caught.value.fix


def test_a_part_without_work_is_told() -> None:
    """The last, when the outputs were given before; one that begins where it ends."""
    with pytest.raises(StageError, match="the last part has nothing to do"):
        parts(["c", "g"])
    with pytest.raises(StageError, match="'a' is not computed by this part"):
        loaded = imported("a")
        signature = Signature(loaded.inputs, loaded.outputs, loaded.tensors)
        cut_out(loaded.mod, signature, ["a"], ["a"])


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.data())
def test_any_cut_works_or_is_refused(data: st.DataObject) -> None:
    """Whatever tensors are named, in whatever order: equal numbers, or a sentence."""
    names = [output for _, _, output in NODES if output not in ("g", "k")]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
    at = data.draw(st.integers(1, len(chosen)))
    cuts = [chosen[:at], chosen[at:]] if chosen[at:] else [chosen]
    try:
        check(*cuts)
    except StageError as refused:
        assert refused.message and refused.fix
