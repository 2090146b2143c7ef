"""Attention as one kernel computes what ONNX Runtime computes, for any shape, mask and layout."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import relax, tirx

from tests.support.dynamic_networks import Input, make_network
from tests.support.kernels import FAST, LEVELS_HERE, host_level, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.seeds import seeds
from tests.unit.compiler.networks import _Graph, attention
from tvmflow.compiler import forms, lowering
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.ir_operators import UnpackRows
from tvmflow.runtime.arrays import pack_rows, unpack_rows
from tvmflow.targets.tvm_target import make_target


def check(seed: int, folder: Path) -> None:
    made, feed = attention(seed)
    loaded = load(made, folder, feed)
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    lowered = lowering.lower(loaded.mod, make_target(target), FAST)
    kernels = ir.list_kernels(lowered.mod)
    assert any(name.startswith("attention") for name in kernels)
    assert not any("softmax" in name or "matmul" in name for name in kernels), kernels
    library = (
        lowering.lower(loaded.mod, make_target(target), FAST)
        .schedule_untuned(loaded.params, target, 1)
        .compile()
    )
    arguments = [tvm.runtime.tensor(feed[spec.name]) for spec in loaded.inputs]
    actual = relax.VirtualMachine(library, tvm.cpu())["main"](*arguments)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (expected,) = session.run(None, feed)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("seed", seeds(6, 22, 200))
def test_attention_of_any_shape_agrees(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def test_a_recipe_keeps_attention_as_the_model_has_it(tmp_path: Path) -> None:
    made, feed = attention(0)
    target = make_target(level(LEVELS_HERE[-1]))
    options = LoweringOptions(plain=("attention",))
    kernels = ir.list_kernels(lowering.lower(load(made, tmp_path, feed).mod, target, options).mod)
    assert any("softmax" in name for name in kernels)


def _plain(folder: Path, keys: int, *, replacement: float | None = None) -> LoadedModel:
    """Return the model of an attention of 29 queries whose scores have a bias."""
    graph = _Graph(random.Random(0))
    q, k, v = graph.input(2, 29, 16), graph.input(2, keys, 16), graph.input(2, keys, 16)
    scores = graph.node("MatMul", q, graph.transpose(k, 0, 2, 1))
    scores = graph.node("Add", scores, graph.input(29, keys))
    weights = graph.node("Softmax", scores, axis=-1)
    if replacement is not None:
        is_nan = graph.node("IsNaN", weights)
        weights = graph.node("Where", is_nan, graph.scalar(replacement), weights)
    result = graph.node("MatMul", weights, v)
    inputs = [value(name, array.shape) for name, array in graph.feed.items()]
    made = model(graph.nodes, inputs, [value(result, None)], graph.weights)
    return load(made, folder, graph.feed)


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_weights_that_are_nan_are_all_replaced(mcpu: str, tmp_path: Path) -> None:
    """In rows that are masked altogether, also in the last vectors, which are fewer than are computed side by side."""
    loaded = _plain(tmp_path, 141, replacement=0.25)
    feed = {spec.name: draw(*spec.shape) for spec in loaded.inputs}
    feed["x3"][5:7] = -np.inf
    (actual,) = outputs(loaded, feed, level(mcpu))
    expected = np.broadcast_to(0.25 * feed["x2"].sum(1, keepdims=True), (2, 2, 16))
    np.testing.assert_allclose(actual[:, 5:7], expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(actual).all()


def test_attention_is_written_as_c(tmp_path: Path) -> None:
    """The keys of which there are none have scores of -∞, for which TVM writes no valid constant."""
    loaded = _plain(tmp_path, 141)
    target = make_target(host_level())
    lowered = lowering.lower(loaded.mod, target, FAST)
    (tmp_path / "c").mkdir()
    forms.compile_form("c-source", ScheduledModel(lowered.mod, [], target), tmp_path / "c")
    assert "attention" in (tmp_path / "c" / "lib0.c").read_text()


def test_rows_of_scores_are_in_different_sets_of_the_cache(tmp_path: Path) -> None:
    """A row of 1024 scores takes an odd number of lines, as rows a power of two apart evict each other."""
    loaded = _plain(tmp_path, 1024)
    lowered = lowering.lower(loaded.mod, make_target(host_level()), FAST).mod
    (kernel,) = (f for var, f in lowered.functions.items() if "attention" in var.name_hint)
    sizes: list[int] = []
    allocations = (tirx.AllocBuffer, lambda made: sizes.append(math.prod(made.buffer.shape)))
    tvm_ffi.structural_walk(kernel, allocations)
    assert any(size % 1040 == 0 for size in sizes)


@pytest.mark.parametrize(("queries", "shared"), [(1, 1), (3, 4), (29, 2)])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_quantized_keys_and_values_are_scaled_as_they_are_read(
    mcpu: str, queries: int, shared: int
) -> None:
    """With few queries and packed, for heads of their own and shared ones; no kernel unpacks them before."""
    inputs = {
        "q": Input((2, shared, queries, 32)),
        "k": Input((2, 61, 36), dtype="int8"),
        "v": Input((2, 61, 68), dtype="int8"),
    }

    def attend(emit: Any, q: Any, k: Any, v: Any) -> Any:
        keys, values = (
            emit(relax.op.broadcast_to(emit(relax.op.expand_dims(rows, 1)), (2, shared, 61, size)))
            for rows, size in ((emit(UnpackRows().call(k)), 32), (emit(UnpackRows().call(v)), 64))
        )
        scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(keys, [0, 1, 3, 2]))))
        return emit(relax.op.matmul(emit(relax.op.nn.softmax(scores, -1)), values))

    network = make_network((), inputs, {}, attend)
    assert network.list_kernels(level(mcpu)) == ["attention"]
    query = draw(2, shared, queries, 32)
    # each row has a scale of its own
    factors = np.linspace(0.01, 2, 61, dtype=np.float32)[:, None]
    rows = [pack_rows(draw(2, 61, size) * factors) for size in (32, 64)]
    [actual] = network.compile(level(mcpu))(q=query, k=rows[0], v=rows[1])
    keys, values = (unpack_rows(packed)[:, None].astype(np.float64) for packed in rows)
    exponentials = np.exp(query @ keys.transpose(0, 1, 3, 2))
    expected = exponentials / exponentials.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 29])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_keys_and_values_of_float16_are_cast_as_they_are_read(
    mcpu: str, queries: int, tmp_path: Path
) -> None:
    """With few queries, and with packed keys and values; no kernel casts them before."""
    shapes = {"q": (2, queries, 16), "k": (2, 61, 16), "v": (2, 61, 32)}
    nodes = [
        *(helper.make_node("Cast", [name], [f"{name}_wide"], to=1) for name in "kv"),
        helper.make_node("Transpose", ["k_wide"], ["columns"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "columns"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v_wide"], ["result"]),
    ]
    dtypes = {"q": "float32", "k": "float16", "v": "float16"}
    feed = {name: draw(*shape).astype(dtypes[name]) for name, shape in shapes.items()}
    inputs = [value(name, shape, dtypes[name]) for name, shape in shapes.items()]
    loaded = load(model(nodes, inputs, [value("result", None)]), tmp_path, feed)
    lowered = lowering.lower(loaded.mod, make_target(level(mcpu)), FAST).mod
    assert ir.list_kernels(lowered) == ["attention"]
    (actual,) = outputs(loaded, feed, level(mcpu))
    q, k, v = (feed[name].astype(np.float64) for name in shapes)
    exponentials = np.exp(q @ k.transpose(0, 2, 1))
    expected = exponentials / exponentials.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
