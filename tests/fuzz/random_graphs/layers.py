"""How products, windows, recurrent and attention layers, and quantization are drawn."""

# a rule in few lines, as a table has it
# fmt: off
from __future__ import annotations

from typing import Any, Final

import numpy as np

from tests.fuzz.random_graphs.attributes import (
    FLOATS,
    drawn,
    element_of,
    quantized_operands,
    with_input,
)
from tests.fuzz.random_graphs.drawing import NO_VALUE, Graph, Rejected, Value

# ---------------------------------------------------------------- products


def matmul(g: Graph) -> None:
    m, k, n = g.size(), g.size(), g.size()
    batch = g.shape(0, 2)
    left, right = [*g.broadcast(batch), m, k], [*g.broadcast(batch), k, n]
    if g.draw.chance(15):
        left = [k]
    if g.draw.chance(15):
        right = [k]
    if g.operator == "MatMul":
        dtype = g.dtype("T")
        g.node(g.tensor(left, dtype), g.tensor(right, dtype))
        return
    a, b = g.dtype("T1"), g.dtype("T2")
    zeros = [NO_VALUE, NO_VALUE]
    if g.draw.chance(50):
        # one for each row, or for each column
        zeros[0] = g.tensor([], a)
        per_column = len(right) == 2 and g.draw.chance(40)
        zeros[1] = g.tensor([n] if per_column else [], b) if g.draw.chance(60) else NO_VALUE
    g.node(g.tensor(left, a), g.tensor(right, b), *zeros)


def gemm(g: Graph) -> None:
    m, k, n = g.size(), g.size(), g.size()
    attributes = {name: g.maybe(1) for name in ("transA", "transB")} | drawn(g)
    dtype = g.dtype("T")
    a = [k, m] if attributes["transA"] else [m, k]
    b = [n, k] if attributes["transB"] else [k, n]
    bias = [g.tensor(g.broadcast([m, n]), dtype)] if g.draw.chance(60) else []
    g.node(g.tensor(a, dtype), g.tensor(b, dtype), *bias, **attributes)


EQUATIONS: Final = "ij,jk->ik ij->ji bij,bjk->bik ii->i ij-> i,j->ij ...ij,...jk->...ik ij,ij->i bhwk,hkc->bwhc ij,jk ii".split()


def einsum(g: Graph) -> None:
    equation = g.draw.choice(EQUATIONS)
    sizes: dict[str, list[int]] = {"...": [g.size()]}
    operands, dtype = [], g.dtype("T")
    for term in equation.split("->")[0].split(","):
        shape = list(sizes["..."]) if "..." in term else []
        for label in term.replace("...", ""):
            shape += sizes.setdefault(label, [g.size()])
        operands.append(g.tensor(shape, dtype))
    g.node(*operands, equation=equation)


def det(g: Graph) -> None:
    n = g.draw.between(1, 4)
    g.node(g.tensor([*g.shape(0, 2), n, n], g.dtype("T"), tame=True))


def dft(g: Graph) -> None:
    g.wildness = 0
    shape, attributes = [g.draw.between(1, 3), g.draw.between(1, 8), g.draw.between(2, 5), 1], drawn(g)
    if attributes.get("inverse"):
        attributes.pop("onesided", None)
        shape[-1] = 2
    axis = g.draw.choice((1, 2, -2, -3))
    x = g.tensor(shape, g.dtype("T1", among=FLOATS))
    length = g.ints(g.draw.between(1, 8)) if g.draw.chance(30) else NO_VALUE
    if g.since(20):
        g.node(x, length, g.ints(axis) if g.draw.chance(70) else NO_VALUE, **attributes)
    else:
        g.node(x, length, axis=axis % 4, **attributes)


def stft(g: Graph) -> None:
    g.wildness = 0
    frame = g.draw.between(2, 8)
    dtype = g.dtype("T1", among=FLOATS)
    signal = g.tensor([g.draw.between(1, 2), frame + g.draw.between(0, 9), 1], dtype)
    window = g.tensor([frame], dtype) if g.draw.chance(60) else NO_VALUE
    length = g.ints(frame) if not window.name or g.draw.chance(50) else NO_VALUE
    g.node(signal, g.ints(g.draw.between(1, 4)), window, length, **drawn(g))


def window(g: Graph) -> None:
    g.node(g.tensor([], g.dtype("T1"), values=g.draw.between(1, 9), constant=True), **drawn(g))
    with_input(g)


def mel(g: Graph) -> None:
    values = (("int64", 8), ("int64", 16), ("int64", 8192), ("float32", 10.0), ("float32", 4000.0))
    g.node(*(g.tensor([], dtype, values=v, constant=True) for dtype, v in values), **drawn(g))
    with_input(g)


# ---------------------------------------------------------------- windows


def _spatial(g: Graph, kernel: list[int], *, ceil: bool = False, dilates: bool = True) -> tuple[list[int], dict[str, Any]]:
    """Return sizes of an image that a kernel fits, and attributes of windows."""
    rank = len(kernel)
    strides = [g.draw.choice((1, 2, 3)) for _ in kernel] if g.draw.chance(50) else None
    dilations = [g.draw.choice((1, 2)) for _ in kernel] if dilates and g.draw.chance(30) else None
    attributes: dict[str, Any] = {"strides": strides}
    if "dilations" in g.schema.attributes:
        attributes["dilations"] = dilations
    reach = [(k - 1) * (attributes.get("dilations") or [1] * rank)[i] + 1 for i, k in enumerate(kernel)]
    padding = g.draw.choice(("none", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"))
    if padding == "pads":
        attributes["pads"] = [g.draw.between(0, k - 1) for k in kernel * 2]
    elif padding != "none":
        attributes["auto_pad"] = padding
    if strides and padding.startswith("SAME"):
        # peers differ where the padding would be negative
        attributes["strides"] = [min(pair) for pair in zip(strides, reach, strict=True)]
    if ceil and "ceil_mode" in g.schema.attributes and "auto_pad" not in attributes:
        attributes["ceil_mode"] = g.maybe(1, 30)
    return [n + g.draw.between(0, 6) for n in reach], attributes


def _kernel(g: Graph) -> list[int]:
    return [g.draw.choice((1, 2, 3, 5)) for _ in range(g.draw.choice((2, 1, 3)))]


def convolution(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel)
    groups = g.draw.choice((1, 2, 3)) if g.draw.chance(30) else 1
    per_group, out = g.draw.choice((1, 2, 3, 8)), g.draw.choice((1, 2, 4, 8)) * groups
    x, w = [g.draw.between(1, 2), per_group * groups, *sizes], [out, per_group, *kernel]
    attributes |= {"group": groups if groups > 1 else None, "kernel_shape": g.maybe(kernel)}
    if g.operator == "Conv":
        dtype = g.dtype("T")
        bias = [g.tensor([out], dtype)] if g.draw.chance(50) else []
        g.node(g.tensor(x, dtype), g.tensor(w, dtype), *bias, **attributes)
    elif g.operator == "ConvInteger":
        a, b = g.dtype("T1"), g.dtype("T2")
        zeros = [g.tensor([], a), g.tensor([out] if g.draw.chance(30) else [], b)] if g.draw.chance(60) else []
        g.node(g.tensor(x, a), g.tensor(w, b), *zeros, **attributes)
    else:
        # QLinearConv
        a, b = g.dtype("T1"), g.dtype("T2")
        bias = [g.tensor([out], "int32")] if g.draw.chance(50) else []
        per_channel = g.draw.chance(30)
        scales = quantized_operands(g, b, [out] if per_channel else [])
        if b == "int8" and per_channel:
            scales[1].array[...] = 0
        g.node(g.tensor(x, a), *quantized_operands(g, a), g.tensor(w, b), *scales, *quantized_operands(g, a), *bias, **attributes)


def transposed_convolution(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel)
    groups = g.draw.choice((1, 2)) if g.draw.chance(30) else 1
    channels, out, dtype = g.draw.choice((1, 2, 4)) * groups, g.draw.choice((1, 2, 3)), g.dtype("T")
    sizes = [min(n, 5) for n in sizes]
    strides = attributes["strides"]
    if strides and g.draw.chance(30):
        attributes["output_padding"] = [g.draw.between(0, s - 1) for s in strides]
    if g.draw.chance(15) and "pads" not in attributes:
        attributes["output_shape"] = [n * (strides or [1] * len(kernel))[i] for i, n in enumerate(sizes)]
    bias = [g.tensor([out * groups], dtype)] if g.draw.chance(50) else []
    attributes |= {"group": groups if groups > 1 else None, "kernel_shape": g.maybe(kernel)}
    g.node(g.tensor([1, channels, *sizes], dtype), g.tensor([channels, out, *kernel], dtype, tame=True), *bias, **attributes)


def pool(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel, ceil=True)
    if g.operator == "AveragePool":
        attributes["count_include_pad"] = g.maybe(1, 30)
    if g.operator == "LpPool":
        attributes |= drawn(g)
    x = g.tensor([g.size(), g.draw.between(1, 3), *sizes], g.dtype("T"))
    outputs = 1
    if g.operator == "MaxPool":
        outputs = g.draw.choice((1, 1, 2))
        attributes["storage_order"] = g.maybe(1, 10)
    g.node(x, kernel_shape=kernel, outputs=outputs, **attributes)


def global_pool(g: Graph) -> None:
    g.node(g.tensor([g.size(), g.size(), *g.shape(1, 3)], g.dtype("T")), **drawn(g))


def max_unpool(g: Graph) -> None:
    n, c, h, w = 1, g.draw.between(1, 2), g.draw.between(1, 3), g.draw.between(1, 3)
    places = np.stack([g.rng.permutation(4 * h * w)[: h * w].reshape(h, w) for _ in range(n * c)]).reshape(n, c, h, w)
    places = places + (np.arange(n * c) * 4 * h * w).reshape(n, c, 1, 1)
    x = g.tensor([n, c, h, w], g.dtype("T1", among=FLOATS))
    size = [g.ints([n, c, 2 * h, 2 * w])] if g.draw.chance(30) else []
    g.node(x, g.tensor(places.shape, "int64", values=places), *size, kernel_shape=[2, 2], strides=[2, 2])


def _boxes(g: Graph, count: int, dtype: str, *, batch: bool) -> Value:
    corners = g.rng.random((count, 2)) * 3
    rows = np.concatenate([corners, corners + 0.5 + g.rng.random((count, 2)) * 3], 1)
    if batch:
        rows = np.concatenate([np.zeros((count, 1)), rows], 1)
    return g.tensor(rows.shape, dtype, values=rows)


def roi_pool(g: Graph) -> None:
    dtype = g.dtype("T")
    x = g.tensor([1, g.draw.between(1, 2), 6, 7], dtype, tame=True)
    g.node(x, _boxes(g, g.draw.between(1, 3), dtype, batch=True), pooled_shape=[g.draw.between(1, 3), 2], spatial_scale=g.maybe(0.5))


def roi_align(g: Graph) -> None:
    dtype, count = g.dtype("T1"), g.draw.between(1, 3)
    n = g.draw.between(1, 2)
    x = g.tensor([n, g.draw.between(1, 2), 6, 7], dtype, tame=True)
    attributes = {
        "mode": g.maybe(g.draw.choice(("avg", "max"))),
        "output_height": g.maybe(g.draw.between(1, 3)),
        "output_width": g.maybe(g.draw.between(1, 3)),
        "sampling_ratio": g.maybe(g.draw.choice((2, 1))),
        "spatial_scale": g.maybe(0.5),
        "coordinate_transformation_mode": g.maybe(g.draw.choice(("half_pixel", "output_half_pixel"))),
    }
    g.node(x, _boxes(g, count, dtype, batch=False), g.indices([count], n), **attributes)


def grid_sample(g: Graph) -> None:
    rank = g.draw.choice((2, 2, 3)) if g.since(20) else 2
    names = ("linear", "nearest", "cubic") if g.since(20) else ("bilinear", "nearest", "bicubic")
    mode = g.draw.choice(names if rank == 2 else names[:2])
    dtype = g.dtype("T1", among="float32 float64")
    n = g.draw.between(1, 2)
    x = g.tensor([n, g.draw.between(1, 2), *(g.draw.between(1, 6) for _ in range(rank))], dtype, tame=True)
    shape = [n, *(g.draw.between(1, 4) for _ in range(rank)), rank]
    values = g.rng.random(shape) * 2.6 - 1.3
    padding = g.maybe(g.draw.choice(("zeros", "border", "reflection")))
    g.node(x, g.tensor(shape, dtype, values=values), mode=g.maybe(mode, 80 if mode == names[0] else 100), padding_mode=padding, **drawn(g, "mode"))


def affine_grid(g: Graph) -> None:
    n, rank = g.draw.between(1, 2), g.draw.choice((2, 3))
    size = [n, 2, *(g.draw.between(1, 4) for _ in range(rank))]
    g.node(g.tensor([n, rank, rank + 1], g.dtype("T1", among=FLOATS), tame=True), g.ints(size), **drawn(g))


def suppression(g: Graph) -> None:
    n, classes, count = g.draw.between(1, 2), g.draw.between(1, 2), g.draw.between(1, 6)
    corners = g.rng.random((n, count, 2))
    boxes = np.concatenate([corners, corners + g.rng.random((n, count, 2))], -1)
    # no equal scores
    scores = g.rng.permutation(n * classes * count).reshape(n, classes, count) / 10
    operands = [g.tensor([1], "int64", values=[g.draw.between(0, 4)], constant=True), NO_VALUE, NO_VALUE]
    operands[1:] = [g.tensor([1], "float32", values=[v], constant=True) if g.draw.chance(60) else NO_VALUE for v in (0.4, 0.25)]
    g.node(g.tensor(boxes.shape, "float32", values=boxes), g.tensor(scores.shape, "float32", values=scores), *operands, **drawn(g))


# ---------------------------------------------------------------- recurrent layers, attention


ACTIVATIONS: Final = {"Sigmoid": (), "Tanh": (), "Relu": (), "HardSigmoid": (0.3, 0.4), "Softsign": (), "LeakyRelu": (0.1,), "Affine": (0.5, 0.2), "Elu": (0.7,), "ThresholdedRelu": (0.6,), "ScaledTanh": (0.9, 0.8)}
"""Activations of recurrent layers: alpha and beta that are not the defaults."""


def recurrent(g: Graph) -> None:
    g.wildness = 0
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[g.operator]
    direction = g.draw.choice(("forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    layout = g.maybe(1, 15) if "layout" in g.schema.attributes else None
    steps, batch, width, hidden = (g.draw.between(1, 4) for _ in range(4))
    # ONNX Runtime has no other dtype, and the reference evaluator ignores attributes
    dtype = g.dtype("T", among="float32" if g.draw.chance(70) else FLOATS)
    shape = [batch, steps, width] if layout else [steps, batch, width]
    first = [batch, ways, hidden] if layout else [ways, batch, hidden]
    operands = [
        g.tensor(shape, dtype),
        g.tensor([ways, gates * hidden, width], dtype, constant=g.draw.chance(80)),
        g.tensor([ways, gates * hidden, hidden], dtype, constant=g.draw.chance(80)),
        g.tensor([ways, 2 * gates * hidden], dtype) if g.draw.chance(60) else NO_VALUE,
        g.tensor([batch], "int32", values=g.rng.integers(1, steps + 1, batch)) if g.draw.chance(20) else NO_VALUE,
    ]
    if operands[-1].name:
        g.attributes.add("sequence_lens")
    states = 2 if g.operator == "LSTM" else 1
    operands += [g.tensor(first, dtype) if g.draw.chance(30) else NO_VALUE for _ in range(states)]
    attributes: dict[str, Any] = {"direction": direction, "layout": layout, "hidden_size": hidden}
    if g.operator == "LSTM":
        operands.append(g.tensor([ways, 3 * hidden], dtype) if g.draw.chance(20) else NO_VALUE)
        attributes["input_forget"] = g.maybe(1, 10)
    if g.operator == "GRU":
        attributes["linear_before_reset"] = g.maybe(1)
    attributes["clip"] = g.maybe(0.7, 15)
    if g.draw.chance(25):
        count = ways * {"LSTM": 3, "GRU": 2, "RNN": 1}[g.operator]
        names = [g.draw.choice(tuple(ACTIVATIONS)) for _ in range(count)]
        attributes["activations"] = names
        # only functions that have a parameter take one
        for place, parameter in enumerate(("activation_alpha", "activation_beta")):
            values = [ACTIVATIONS[name][place] for name in names if len(ACTIVATIONS[name]) > place]
            attributes[parameter] = values or None
    g.node(*operands, outputs=1 + states, **attributes)


def attention(g: Graph) -> None:
    g.wildness = 0
    batch, heads, size, value_size = g.draw.between(1, 2), g.draw.choice((2, 1, 4)), g.draw.choice((4, 2, 8)), g.draw.choice((4, 3))
    groups = g.draw.choice([h for h in (heads, 1, 2) if heads % h == 0])
    queries, keys = g.draw.between(1, 5), g.draw.between(1, 5)
    dtype = g.dtype("T1", among=FLOATS)
    is_flat = g.draw.chance(30)
    attributes = drawn(g, "scale")
    attributes["scale"] = g.maybe(0.5, 30)

    def part(count: int, length: int, width: int) -> Value:
        return g.tensor([batch, length, count * width] if is_flat else [batch, count, length, width], dtype)

    operands = [part(heads, queries, size), part(groups, keys, size), part(groups, keys, value_size)]
    if is_flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups}
    past = g.draw.between(1, 3) if g.draw.chance(20) else 0
    mask = NO_VALUE
    if g.draw.chance(50):
        shape = [*g.draw.choice(([], [1, 1], [batch, 1], [1, heads], [batch, heads])), queries, keys + past]
        kind = g.draw.choice((dtype, "bool"))
        if kind == "bool":
            values = g.rng.random(shape) < 0.7
            values[..., 0] = True
            mask = g.tensor(shape, "bool", values=values)
        else:
            mask = g.tensor(shape, kind)
    operands.append(mask)
    outputs = 1
    if past:
        operands += [g.tensor([batch, groups, past, w], dtype) for w in (size, value_size)]
        outputs = 3
    g.node(*operands, outputs=outputs, **attributes)


def rotary(g: Graph) -> None:
    g.wildness = 0
    batch, heads, length, size = g.draw.between(1, 2), g.draw.between(1, 3), g.draw.between(1, 4), g.draw.choice((4, 8))
    dtype, attributes = g.dtype("T", among=FLOATS), drawn(g)
    half = size // 2
    if g.draw.chance(30):
        half //= 2
        attributes["rotary_embedding_dim"] = 2 * half
    shape = [batch, heads, length, size]
    if g.draw.chance(30):
        shape = [batch, length, heads * size]
        attributes["num_heads"] = heads
    if g.draw.chance(60):
        caches = [g.tensor([6, half], dtype) for _ in range(2)]
        g.node(g.tensor(shape, dtype), *caches, g.tensor([batch, length], "int64", values=g.rng.integers(0, 6, (batch, length))), **attributes)
    else:
        g.node(g.tensor(shape, dtype), *(g.tensor([batch, length, half], dtype) for _ in range(2)), **attributes)


def dropout(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    operands = [g.tensor([], "float32", values=0.3, constant=True), g.tensor([], "bool", values=False, constant=True)]
    g.node(x, *operands[: g.draw.below(3)], outputs=g.draw.choice((1, 2)), **drawn(g))


def loss(g: Graph) -> None:
    g.wildness = 0
    batch, classes, more = g.draw.between(1, 4), g.draw.between(2, 4), g.shape(0, 2)
    dtype = g.dtype("T", among=FLOATS)
    if 0 in more:
        raise Rejected("a mean of nothing")
    labels = g.tensor([batch, *more], "int64", values=g.rng.integers(0, classes, (batch, *more)))
    weights = [g.tensor([classes], dtype, values=np.arange(1, classes + 1) / 2)] if g.draw.chance(40) else []
    g.node(g.tensor([batch, classes, *more], dtype), labels, *weights, **drawn(g))


# ---------------------------------------------------------------- quantization


def quantize(g: Graph) -> None:
    """QuantizeLinear and DequantizeLinear: of a tensor, along an axis, or in blocks."""
    is_quantize = g.operator == "QuantizeLinear"
    shape = g.shape(1)
    kind = g.draw.choice(("tensor", "axis", "block")) if g.since(21) else g.draw.choice(("tensor", "axis"))
    axis, block = g.axis(len(shape)), g.draw.between(1, 3)
    attributes: dict[str, Any] = {}
    scales: list[int] = []
    if kind != "tensor":
        attributes["axis"] = axis
        scales = [shape[axis]]
    if kind == "block":
        attributes["block_size"] = block
        scales = list(shape)
        scales[axis] = -(-shape[axis] // block)
    quantized = g.dtype("T2" if is_quantize and not g.since(21) else "T3" if is_quantize else ("T" if not g.since(19) else "T1"))
    real = "float32" if not g.since(19) else g.dtype("T1" if is_quantize else "T2", among="float32 float16")
    numbers = np.asarray(g.rng.choice([0.05, 0.1, 0.25, 0.03, 1.0], scales))
    scale = g.tensor(scales, real, values=numbers, constant=not g.draw.chance(15))
    zero = NO_VALUE
    if quantized != "int32" and g.draw.chance(60):
        zero = g.tensor(scales, quantized, values=g.rng.integers(0, 4 if "float8" not in quantized else 1, scales), constant=not g.draw.chance(15))
    elif is_quantize and quantized != "uint8":
        if g.since(21):
            attributes["output_dtype"] = element_of(quantized)
        else:
            zero = g.tensor(scales, quantized, values=np.zeros(scales), constant=True)
    x = g.tensor(shape, real if is_quantize else quantized)
    g.node(x, scale, zero, **attributes)


def dynamic_quantize(g: Graph) -> None:
    g.node(g.tensor(g.shape(1), "float32", tame=True), outputs=3)


def quantized_matmul(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    a, b, c = g.dtype("T1", among="uint8 int8"), g.dtype("T2", among="uint8 int8"), g.dtype("T3", among="uint8 int8")
    batch = g.shape(0, 1)
    g.node(g.tensor([*batch, m, k], a), *quantized_operands(g, a), g.tensor([*batch, k, n], b), *quantized_operands(g, b), *quantized_operands(g, c))
