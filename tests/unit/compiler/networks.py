"""Small networks for tests of passes and schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tvm import relax

from tests.support.onnx_models import draw, model, value
from tvmflow.targets.presets import PRESETS

Layer = Callable[[Any, Any], Any]


def channels_of(value: Any) -> int:
    return int(value.ty.shape[1])


def convolution(out: int, kernel: tuple[int, ...], **options: Any) -> Layer:
    """Return a convolution over sequences, images or volumes."""

    def layer(value: Any, weight: Any) -> Any:
        groups = int(options.get("groups", 1))
        operator = getattr(relax.op.nn, f"conv{len(kernel)}d")
        return operator(value, weight((out, channels_of(value) // groups, *kernel)), **options)

    return layer


def depthwise(kernel: tuple[int, int], **options: Any) -> Layer:
    def layer(value: Any, weight: Any) -> Any:
        channels = channels_of(value)
        return relax.op.nn.conv2d(value, weight((channels, 1, *kernel)), groups=channels, **options)

    return layer


def transposed(out: int, kernel: tuple[int, ...], **options: Any) -> Layer:
    def layer(value: Any, weight: Any) -> Any:
        shape = (channels_of(value), out // int(options.get("groups", 1)), *kernel)
        operator = getattr(relax.op.nn, f"conv{len(kernel)}d_transpose")
        return operator(value, weight(shape), **options)

    return layer


def biased(value: Any, weight: Any) -> Any:
    size = [1] * (len(value.ty.shape) - 2)
    return relax.op.add(value, weight((1, channels_of(value), *size)))


def pooled(kind: str, **options: Any) -> Layer:
    return lambda value, _: getattr(relax.op.nn, f"{kind}_pool2d")(value, **options)


def residual(layer: Layer) -> Layer:
    """Return a residual connection around a layer."""
    return lambda value, weight: relax.op.add(value, layer(value, weight))


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


CPUS = {
    name: preset.tvm
    for name, preset in PRESETS.items()
    if preset.tvm and preset.tvm["kind"] == "llvm"
}
