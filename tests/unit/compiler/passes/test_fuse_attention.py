"""Attention as one kernel computes what ONNX Runtime computes, for any shape, mask and layout."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import relax, tirx

from tests.support.kernels import FAST, LEVELS_HERE, host_level, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import forms, lowering
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]

_LENGTHS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 29, 33, 49, 64, 67)
_DEPTHS = (1, 2, 3, 5, 8, 12, 16, 17, 32, 40, 64, 80)
_MASKS = ("none", "causal", "padding", "bias", "masked", "where", "twice")


class _Graph:
    """The nodes, inputs and weights of a model while it is made."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.feed: dict[str, Array] = {}
        self.weights: dict[str, Array] = {}

    def node(self, operator: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        outputs = [f"v{len(self.nodes)}_{index}" for index in range(count)]
        self.nodes.append(helper.make_node(operator, inputs, outputs, **attributes))
        return outputs if count > 1 else outputs[0]

    def input(self, *shape: int) -> str:
        name = f"x{len(self.feed)}"
        self.feed[name] = draw(*shape, seed=self.rng.randrange(1 << 30))
        return name

    def weight(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(array)
        return name

    def integers(self, *numbers: int) -> str:
        return self.weight(np.array(numbers, np.int64))

    def scalar(self, number: float) -> str:
        return self.weight(np.float32(number))

    def reshape(self, tensor: str, *shape: int) -> str:
        return str(self.node("Reshape", tensor, self.integers(*shape)))

    def transpose(self, tensor: str, *axes: int) -> str:
        return str(self.node("Transpose", tensor, perm=axes))

    def heads(self, tensor: str, shape: tuple[int, int, int, int]) -> str:
        """Split (b, n, h·d) into heads (b, h, n, d)."""
        return self.transpose(self.reshape(tensor, *shape), 0, 2, 1, 3)

    def repeated(self, tensor: str, shape: tuple[int, int, int, int], repeats: int) -> str:
        """Repeat each head (b, h, n, d) as grouped-query attention does."""
        b, h, n, d = shape
        wide = self.node("Unsqueeze", tensor, self.integers(2))
        wide = self.node("Expand", wide, self.integers(b, h, repeats, n, d))
        return self.reshape(wide, b, h * repeats, n, d)


def _projections(
    graph: _Graph, b: int, h: int, n: int, m: int, d: int, e: int
) -> tuple[str, str, str]:
    """Return q, k and v (b, h, ·, ·) of an attention, in one of the layouts that exporters write."""
    rng = graph.rng
    layout = rng.choice(("plain", "heads", "grouped", "split", "gathered", "batch second"))
    if layout == "plain":
        return graph.input(b, h, n, d), graph.input(b, h, m, d), graph.input(b, h, m, e)
    if layout == "grouped" and h % 2 == 0:
        k, v = (graph.heads(graph.input(b, m, h // 2 * w), (b, m, h // 2, w)) for w in (d, e))
        repeated = [graph.repeated(x, (b, h // 2, m, w), 2) for x, w in ((k, d), (v, e))]
        return graph.heads(graph.input(b, n, h * d), (b, n, h, d)), *repeated  # type: ignore[return-value]
    if layout == "split" and n == m and d == e:
        parts = graph.node("Split", graph.input(b, n, 3 * h * d), count=3, axis=2)
        q, k, v = (graph.heads(part, (b, n, h, d)) for part in parts)
        return q, k, v
    if layout == "gathered" and n == m and d == e:
        qkv = graph.reshape(graph.input(b, n, 3 * h * d), b, n, 3, h, d)
        qkv = graph.transpose(qkv, 2, 0, 3, 1, 4)
        q, k, v = (
            graph.node("Gather", qkv, graph.weight(np.int64(index)), axis=0) for index in (0, 1, 2)
        )
        return q, k, v
    if layout == "batch second":
        q, k, v = (
            graph.transpose(graph.reshape(graph.input(rows, b, h * w), rows, b, h, w), 1, 2, 0, 3)
            for rows, w in ((n, d), (m, d), (m, e))
        )
        return q, k, v
    q, k, v = (
        graph.heads(graph.input(b, rows, h * w), (b, rows, h, w))
        for rows, w in ((n, d), (m, d), (m, e))
    )
    return q, k, v


def _masked(graph: _Graph, scores: str, kind: str, shape: tuple[int, int, int, int]) -> str:
    """Return the scores (b, h, n, m) with a mask or bias; -inf may mask whole rows."""
    b, h, n, m = shape
    rng = np.random.default_rng(graph.rng.randrange(1 << 30))
    low = graph.rng.choice((-np.inf, float(np.finfo(np.float32).min)))
    hidden = rng.random((1, 1, n, m)) < 0.4
    if kind == "causal":
        causal = np.where(np.tril(np.ones((n, m))) > 0, 0, low).astype(np.float32)
        return str(graph.node("Add", scores, graph.weight(causal)))
    if kind == "padding":
        name = graph.input(b, 1, 1, m)
        graph.feed[name] = np.where(rng.random((b, 1, 1, m)) < 0.3, low, 0).astype(np.float32)
        return str(graph.node("Add", name, scores))
    if kind == "bias":
        return str(graph.node("Add", scores, graph.input(h, n, m)))
    if kind == "masked":
        return str(graph.node("Where", graph.weight(hidden), graph.scalar(low), scores))
    if kind == "where":
        mask = graph.node("Where", graph.weight(hidden), graph.scalar(low), graph.scalar(0))
        return str(graph.node("Add", scores, mask))
    if kind == "twice":
        biased = graph.node("Add", scores, graph.input(1, h, n, m))
        wide = graph.node("Add", graph.reshape(biased, 1, b, h, n, m), graph.input(1, b, 1, n, m))
        return graph.reshape(wide, b, h, n, m)
    return scores


def attention(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model with a random attention, and its inputs."""
    rng = random.Random(seed)
    graph = _Graph(rng)
    b, h = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 4))
    n, d, e = rng.choice(_LENGTHS), rng.choice(_DEPTHS), rng.choice(_DEPTHS)
    m, e = rng.choice((n, n, rng.choice(_LENGTHS))), rng.choice((d, d, e))
    q, k, v = _projections(graph, b, h, n, m, d, e)
    scaling = rng.choice(("none", "scores", "divide", "query", "both"))
    root = graph.scalar(d**-0.5)
    if scaling in ("query", "both"):
        q = graph.node("Mul", q, root)
    k = graph.transpose(k, 0, 1, 3, 2)
    if scaling == "both":
        k = graph.node("Mul", root, k)
    scores = graph.node("MatMul", q, k)
    if scaling == "scores":
        scores = graph.node("Mul", scores, root)
    if scaling == "divide":
        scores = graph.node("Div", scores, graph.scalar(d**0.5))
    scores = _masked(graph, scores, rng.choice(_MASKS), (b, h, n, m))
    weights = graph.node("Softmax", scores, axis=-1)
    if rng.random() < 0.3:
        zero = graph.scalar(0)
        weights = graph.node("Where", graph.node("IsNaN", weights), zero, weights)
    result = graph.node("MatMul", weights, v)
    if rng.random() < 0.7:
        result = graph.reshape(graph.transpose(result, 0, 2, 1, 3), b, n, h * e)
    made = model(
        graph.nodes,
        [value(name, array.shape, str(array.dtype)) for name, array in graph.feed.items()],
        [value(result, None)],
        graph.weights,
    )
    return made, graph.feed


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
