"""Indices and divisors that no operator takes, in libraries of both runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from tests.support.kernels import FAST, host_level, outputs
from tests.support.onnx_models import load, open_session
from tests.support.tflite_models import TfliteBuilder
from tests.unit.frontends.onnx.models import load_dynamic
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import load_c_library
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import Dimension
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.operands import has_computed_operands
from tvmflow.targets.tvm_target import make_target

Feed = Mapping[str, Any]

X = np.arange(20, dtype=np.float32).reshape(5, 4)
HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
GATHER = "g (float[5,4] x, int64[3] i) => (float[3,4] y) { y = Gather(x, i) }"


def import_text(text: str, folder: Path) -> tuple[Any, LoadedModel]:
    made = onnx.parser.parse_model(HEAD + text)
    return made, load(made, folder)


def compile_c(model: LoadedModel) -> Callable[[Feed], list[Any]]:
    target = host_level()
    lowered = lowering.lower(model.mod, make_target(target), FAST)
    signature = {
        "inputs": [spec.to_json() for spec in model.inputs],
        "outputs": [spec.to_json() for spec in model.outputs],
    }
    program = load_c_library(lowered.schedule_untuned(model.params, target, 1), signature, 2)
    nothing = [None] * len(model.outputs)
    return lambda feed: program.run([np.asarray(feed[s.name]) for s in model.inputs], nothing)


@pytest.mark.parametrize(
    ("operator", "right", "wrong"),
    [
        ("y = Gather(x, i)", [[0, 4, -5]], [[0, 5, 0], [-6, 0, 0], [0, 0, 10**12], [-(2**63), 0, 0]]),
        ("y = GatherElements<axis=1>(x, k)", [[3, -4, 0]], [[4, 0, 0], [0, -5, 0]]),
        ("y = GatherND(x, p)", [[4, -5, 0]], [[5, 0, 0], [0, 0, -6]]),
        ("y = ScatterElements<axis=1>(x, k, u)", [[0, -1, 2]], [[0, 4, 1], [-5, 0, 1], [2**60, 0, 1]]),
        ("y = ScatterND(x, p, v)", [[0, -1, 2]], [[0, 5, 1], [-6, 0, 1]]),
    ],
)  # fmt: skip
def test_indices_beyond_their_axis_are_reported(
    operator: str, right: Sequence[Any], wrong: Sequence[Any], tmp_path: Path
) -> None:
    """Those from the end are right, as in ONNX Runtime; the others read and write no other memory."""
    text = (
        f"g (float[5,4] x, int64[3] i) => (float y) <int64[1] a={{1}}, int64[2] r={{1,3}}, "
        f"float[1,3] u={{1,2,3}}, float[3,4] v={{1,2,3,4,5,6,7,8,9,10,11,12}}> "
        f"{{ k = Reshape(i, r) p = Unsqueeze(i, a) {operator} }}"
    )
    made = onnx.parser.parse_model(HEAD + text)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    model, session = load(made, tmp_path), open_session(made)
    run = compile_c(model)
    for values in right:
        feed = {"x": X, "i": np.array(values)}
        np.testing.assert_array_equal(run(feed)[0], session.run(None, feed)[0])
    for values in wrong:
        feed = {"x": X, "i": np.array(values)}
        with pytest.raises(BundleError, match="input 'i' has an index out of range for "):
            run(feed)
    with pytest.raises(ValueError, match="input 'i' has an index out of range for "):
        outputs(model, feed)


@pytest.mark.tflite
@pytest.mark.parametrize(
    ("operator", "rank"), [("GATHER", 2), ("GATHER_ND", 1), ("EMBEDDING_LOOKUP", 2)]
)
def test_tflite_has_no_indices_from_the_end(operator: str, rank: int, tmp_path: Path) -> None:
    """LiteRT fails for them, too."""
    model = TfliteBuilder()
    shape = (1, 2) if rank == 1 else (2,)
    indices = model.input("i", shape, "int32")
    operands = [indices, model.constant(X)] if rank == 2 else [model.constant(X), indices]
    if operator == "GATHER":
        result = model.result(operator, operands[::-1], rank, "Gather", Axis=0, BatchDims=0)
    else:
        result = model.result(operator, operands, rank)
    run = compile_c(FRONTENDS["tflite"].load({"model": model.save(tmp_path, result)}, ()))
    expected = X[[4, 3]] if rank == 2 else X[4, 3:]
    np.testing.assert_array_equal(
        run({"i": np.reshape(np.array([4, 3], "int32"), shape)})[0], expected
    )
    for wrong in ([-1, 0], [5, 0], [0, -(2**31)]):
        with pytest.raises(BundleError, match="input 'i' has an index out of range for "):
            run({"i": np.reshape(np.array(wrong, "int32"), shape)})


@pytest.mark.pytorch
def test_indices_and_divisors_of_pytorch(tmp_path: Path) -> None:
    """Indexing alone takes indices from the end; integers are divided exactly, and never by 0."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]  # PyTorch may be missing
        def forward(
            self, x: Any, e: Any, s: Any, g: Any, t: Any, p: Any, i: Any, a: Any, b: Any
        ) -> Any:
            return (
                *(torch.nn.functional.embedding(e, x), x.index_select(0, s), x.gather(1, g)),
                *(x.scatter(1, t, 2.0), x.index_put((p,), x[:3]), x[i], a % b, a // b),
                *(torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")),
            )

    model = Model()
    feed = {name: np.array([0, 1, 2]) for name in "espi"}
    feed |= {name: np.zeros((5, 2), np.int64) for name in "gt"}
    feed = {"x": X, **feed, "a": np.array([7, -7, 2**53 + 1]), "b": np.array([-2, 2, -1])}
    feed = {name: feed[name] for name in "xesgtpiab"}
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(model, tuple(map(torch.tensor, feed.values()))), path)
    run = compile_c(FRONTENDS["pytorch"].load({"model": path}, ()))

    def check(**changes: Any) -> None:
        changed = feed | {n: np.resize(v, feed[n].shape) for n, v in changes.items()}
        expected = model(*map(torch.tensor, changed.values()))
        for result, values in zip(run(changed), expected, strict=True):
            np.testing.assert_array_equal(result, values.numpy())

    check()
    check(p=[-1, 0, -5], i=[-1, 4, -5], a=[-1, 0, -(2**53) - 1], b=[2, -3, 3])
    for name in "esgtpi":
        for index in (-6, 5, 10**12) if name in "pi" else (-1, 5, -(2**63)):
            with pytest.raises(BundleError, match=f"input '{name}' has an index out of range for "):
                run(feed | {name: np.resize([0, index, 1], feed[name].shape)})
    with pytest.raises(BundleError, match="input 'b' has a 0 by which "):
        run(feed | {"b": np.array([1, 0, 1])})


def test_computed_indices_and_random_ones(tmp_path: Path) -> None:
    """Random 64-bit indices give the right result or an error, and never other memory."""
    _, model = import_text(
        "g (float[5,4] x, int64[3] i) => (float[3,4] y) <int64 two={2}>"
        "{ j = Mul(i, two) y = Gather(x, j) }",
        tmp_path,
    )
    run, random = compile_c(model), np.random.default_rng(0)
    taken = 0
    for bits in range(1, 63):
        i = random.integers(-(1 << bits), 1 << bits, 3)
        j = i * 2
        if ((j < 5) & (j >= -5)).all():
            np.testing.assert_array_equal(run({"x": X, "i": i})[0], X[j])
            taken += 1
        else:
            with pytest.raises(BundleError, match="a computed tensor has an index out of range"):
                run({"x": X, "i": i})
    assert taken


@pytest.mark.parametrize(
    ("body", "is_computed"),
    [
        ("y = Gather(table, i)", False),
        ("j = Add(i, i) y = Gather(table, j)", True),
        ("j = Div(k, i) y = Cast<to=1>(j)", False),
        ("j = Abs(i) m = Div(k, j) y = Cast<to=1>(m)", True),
        ("j = Abs(i) y = Cast<to=1>(j)", False),
    ],
)
def test_indices_and_divisors_that_a_model_computes(
    body: str, is_computed: bool, tmp_path: Path
) -> None:
    head = "g (int64[2] i, int64[2] k) => (float[2] y) <float[5] table = {1,2,3,4,5}>"
    _, loaded = import_text(f"{head} {{ {body} }}", tmp_path)
    assert has_computed_operands(loaded.mod) == is_computed


def test_a_sum_is_not_blamed_on_an_input(tmp_path: Path) -> None:
    """Extremes of no elements are reported, too."""
    text = (
        "g (float[5,4] x, int64[3] i) => (float[3,4] y) <int64 two={2}>"
        "{ j = Add(i, two) y = Gather(x, j) }"
    )
    _, model = import_text(text, tmp_path)
    with pytest.raises(BundleError, match="a computed tensor has an index out of range"):
        compile_c(model)({"x": X, "i": np.array([0, 3, 1])})
    text = "g (float[n,3] x) => (int64[3] y) { y = ArgMax<axis=0, keepdims=0>(x) }"
    made = onnx.parser.parse_model(HEAD + text)
    model = load_dynamic(made, tmp_path, (Dimension("n", 0, 8),))
    np.testing.assert_array_equal(outputs(model, {"x": X[:, :3]})[0], [4, 4, 4])
    with pytest.raises(
        ValueError, match="looks for an extreme among 0 elements, along an axis of n"
    ):
        outputs(model, {"x": X[:0, :3]})


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8"])
def test_integer_divisions_do_not_trap(dtype: str, tmp_path: Path) -> None:
    """By zero they are reported; the quotient of the smallest integer and -1 is that integer."""
    _, model = import_text(
        f"g ({dtype}[24] a, {dtype}[24] b) => ({dtype}[24] q, {dtype}[24] m, {dtype}[24] f)"
        "{ q = Div(a, b) m = Mod(a, b) f = Mod<fmod=1>(a, b) }",
        tmp_path,
    )
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = np.resize([least, 7, most], 24).astype(dtype)
    b = np.resize([-1, 3, -1, 2] if least else [1, 3, 2, most], 24).astype(dtype)
    quotient, modulo, remainder = compile_c(model)({"a": a, "b": b})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(quotient * b + remainder, a)
    np.testing.assert_array_equal(remainder, np.fmod(a, b))
    np.testing.assert_array_equal(modulo, [int(x) % int(y) for x, y in zip(a, b, strict=True)])
    b[5] = 0
    for run in (compile_c(model), lambda feed: outputs(model, feed)):
        with pytest.raises(ValueError, match=r"input 'b' has a 0 by which .* divides"):
            run({"a": a, "b": b})


def test_a_constant_out_of_range_is_refused(tmp_path: Path) -> None:
    _, model = import_text(
        "g (float[5,4] x) => (float[1,4] y) <int64[1] i={5}> { y = Gather(x, i) }", tmp_path
    )
    with pytest.raises(
        StageError, match=r"an index out of range .*: it is a constant of the model"
    ):
        compile_c(model)


def test_models_without_such_operators_are_lowered_alike(tmp_path: Path) -> None:
    """And `checks: off` leaves the checks out."""
    _, plain = import_text("g (float[5,4] x) => (float[5,4] y) { y = Relu(x) }", tmp_path)
    _, gather = import_text(GATHER, tmp_path)
    target = make_target(host_level())
    _, constant = import_text(
        "g (float[5,4] x) => (float[1,4] y) <int64[1] i={-5}> { y = Gather(x, i) }", tmp_path
    )
    for model, is_checked in ((plain, False), (constant, False), (gather, True)):
        for checks in (True, False):
            lowered = lowering.lower(model.mod, target, LoweringOptions(checks=checks))
            names = ir.list_kernels(lowered.mod)
            assert ("check_operand" in names) == (is_checked and checks)
