"""How sequences and operators of com.microsoft are drawn, and the rule of each operator."""

# a rule in few lines, as a table has it
# fmt: off
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.random_graphs import layers, tensors
from tests.fuzz.random_graphs.attributes import (
    Rule,
    element_of,
    quantized_operands,
)
from tests.fuzz.random_graphs.drawing import NO_VALUE, Graph, Rejected, Value

# ---------------------------------------------------------------- sequences


def sequence(g: Graph) -> None:
    """Build a sequence, change it, and take tensors from it: all operators of sequences in one rule."""
    shape, dtype = g.shape(1, 3), g.draw.choice(("float32", "int64"))
    parts = [g.tensor(shape, dtype) for _ in range(g.draw.between(1, 3))]
    count, axis = len(parts), 0
    last = ["s"]
    nodes = g.nodes
    if g.operator == "SplitToSequence":
        given = tensors.sizes_of_parts(g, shape[0], count) if g.draw.chance(60) else g.draw.between(1, 4)
        sizes = g.maybe(g.ints(given), 70)
        operands = [parts[0].name, *([sizes.name] if sizes else [])]
        keepdims = g.maybe(g.draw.below(2), 30) if not sizes else None
        attributes = {} if keepdims is None else {"keepdims": keepdims}
        nodes.append(helper.make_node("SplitToSequence", operands, last, axis=axis, **attributes))
        g.attributes |= {"axis", *attributes}
        if not sizes or not isinstance(given, list):
            count = -(-shape[0] // int(given)) if sizes and isinstance(given, int) else shape[0]
    else:
        nodes.append(helper.make_node("SequenceConstruct", [p.name for p in parts], last))
    if g.operator == "SequenceInsert":
        position = [g.ints(g.draw.between(-count, count)).name] if g.draw.chance(50) else []
        nodes.append(helper.make_node("SequenceInsert", ["s", parts[0].name, *position], ["t"]))
        last, count = ["t"], count + 1
    if g.operator == "SequenceErase":
        position = [g.ints(g.draw.between(-count, count - 1)).name] if g.draw.chance(50) else []
        nodes.append(helper.make_node("SequenceErase", ["s", *position], ["t"]))
        last, count = ["t"], count - 1
    if g.operator == "SequenceEmpty":
        g.attributes.add("dtype")
        nodes.append(helper.make_node("SequenceEmpty", [], ["e"], dtype=element_of(dtype)))
        nodes.append(helper.make_node("SequenceInsert", ["e", parts[0].name], ["t"]))
        last, count = ["t"], 1
    if g.operator in ("SequenceLength", "SequenceErase"):
        g.then("SequenceLength", *last)
    elif g.operator in ("ConcatFromSequence", "SplitToSequence", "SequenceInsert") and g.draw.chance(60):
        if count == 0:
            raise Rejected("an empty sequence")
        new = g.maybe(1, 30) if g.operator == "ConcatFromSequence" else None
        attributes = {} if new is None else {"new_axis": new}
        g.attributes |= {"axis", "new_axis"}
        g.then("ConcatFromSequence", *last, axis=axis, **attributes)
    else:
        if count == 0:
            raise Rejected("an empty sequence")
        g.then("SequenceAt", *last, g.ints(g.draw.between(-count, count - 1)).name)


def optional(g: Graph) -> None:
    x = g.tensor(g.shape(), "float32", constant=False)
    g.nodes.append(helper.make_node("Optional", [x.name], ["o"]))
    g.attributes.add("type")
    g.then("OptionalHasElement" if g.operator == "OptionalHasElement" else "OptionalGetElement", "o")


def upsample(g: Graph) -> None:
    """The oldest form that has scales as an operand."""
    g.opset = 9
    g.schema = onnx.defs.get_schema("Upsample", 9, "")
    x = g.tensor([1, 2, g.draw.between(1, 4), g.draw.between(1, 4)], "float32")
    scales = [1.0, 1.0, g.draw.choice((2.0, 1.0, 3.0)), g.draw.choice((2.0, 1.5))]
    g.node(x, g.tensor([4], "float32", values=scales, constant=True), mode=g.maybe(g.draw.choice(("nearest", "linear"))))


# ---------------------------------------------------------------- operators of com.microsoft


def _floats(g: Graph, *shapes: list[int]) -> list[Value]:
    return [g.tensor(shape, "float32", tame=True) for shape in shapes]


def ms_elementwise(g: Graph) -> None:
    shape = g.shape(1, 3)
    if g.operator == "QuickGelu":
        g.node(*_floats(g, shape), alpha=g.maybe(1.5))
    else:
        has_bias = g.operator == "BiasGelu" or g.draw.chance(50)
        g.node(*_floats(g, shape, *([shape[-1:]] if has_bias else [])))


def ms_norm(g: Graph) -> None:
    batch, length, width = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(2, 8)
    shape = [batch, length, width]
    attributes: dict[str, Any] = {"epsilon": g.maybe(1e-3)}
    operands = _floats(g, shape, [width])
    if g.operator == "SimplifiedLayerNormalization":
        g.node(*operands, axis=-1, **attributes)
        return
    more = [[width]] if g.operator == "SkipLayerNormalization" and g.draw.chance(60) else []
    g.node(*_floats(g, shape, shape, [width], *more), **attributes)


def ms_products(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    if g.operator == "FusedConv":
        operands = _floats(g, [1, 2, 5, 5], [3, 2, 3, 3], [3])
        g.node(*operands, activation=g.draw.choice(("Relu", "Sigmoid", "Tanh")), pads=g.maybe([1] * 4))
        return
    turns = {name: g.maybe(1) for name in ("transA", "transB")}
    a, b = [k, m] if turns["transA"] else [m, k], [n, k] if turns["transB"] else [k, n]
    turns["alpha"] = g.maybe(0.5)
    if g.operator == "FusedGemm":
        g.node(*_floats(g, a, b, [n]), activation=g.draw.choice(("Relu", "Sigmoid", "Tanh")), **turns)
    else:
        g.node(*_floats(g, a, b), **turns)


def ms_integer_products(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    weights = g.tensor([k, n], "uint8", constant=g.draw.chance(70))
    scale = g.tensor([], "float32", values=0.1, constant=True)
    zero = g.tensor([], "uint8", values=3, constant=True) if g.draw.chance(60) else NO_VALUE
    bias = g.tensor([n], "float32", tame=True) if g.draw.chance(50) else NO_VALUE
    if g.operator == "DynamicQuantizeMatMul":
        g.node(*_floats(g, [m, k]), weights, scale, zero, bias)
    else:
        a = g.tensor([m, k], "uint8")
        g.node(a, weights, scale, scale, zero, zero, bias)


def ms_quantized(g: Graph) -> None:
    dtype = g.draw.choice(("uint8", "int8"))
    g.result = np.zeros(0, dtype)
    shape = [g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(2, 5), g.draw.between(2, 5)]

    def part(sizes: list[int]) -> list[Value]:
        return [g.tensor(sizes, dtype), *quantized_operands(g, dtype)]

    if g.operator in ("QLinearAdd", "QLinearMul"):
        g.node(*part(shape), *part(g.broadcast(shape)), *quantized_operands(g, dtype))
    elif g.operator == "QLinearConcat":
        g.node(*quantized_operands(g, dtype), *part(shape), *part(shape), axis=g.draw.below(4))
    elif g.operator == "QGemm":
        m, k, n = (g.draw.between(1, 6) for _ in range(3))
        g.node(*part([m, k]), *part([k, n]), NO_VALUE, *quantized_operands(g, dtype))
    elif g.operator == "QLinearAveragePool":
        g.node(*part(shape), *quantized_operands(g, dtype), kernel_shape=[2, 2], strides=g.maybe([2, 2]))
    elif g.operator == "QLinearSoftmax":
        g.node(*part(shape), *quantized_operands(g, dtype), axis=-1, opset=13)
    elif g.operator == "QLinearLeakyRelu":
        g.node(*part(shape), *quantized_operands(g, dtype), alpha=0.1)
    elif g.operator == "QLinearGlobalAveragePool":
        g.node(*part(shape), *quantized_operands(g, dtype), channels_last=0)
    else:
        g.node(*part(shape), *quantized_operands(g, dtype))


def ms_attention(g: Graph) -> None:
    batch, length, heads, size = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.choice((2, 1)), g.draw.choice((4, 2))
    width = heads * size
    if g.operator == "Attention":
        g.node(*_floats(g, [batch, length, width], [width, 3 * width], [3 * width]), num_heads=heads, unidirectional=g.maybe(1))
    else:
        keys = g.draw.between(1, 4)
        g.node(*_floats(g, [batch, length, width], [batch, keys, width], [batch, keys, width]), num_heads=heads, scale=g.maybe(0.3))


def ms_rotary(g: Graph) -> None:
    batch, length, heads, size = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(1, 2), 4
    x, cos, sin = _floats(g, [batch, length, heads * size], [8, 2], [8, 2])
    places = g.tensor([batch, length], "int64", values=g.rng.integers(0, 8, (batch, length)))
    g.node(x, places, cos, sin, interleaved=g.maybe(1))


def ms_embedding(g: Graph) -> None:
    batch, length, width = g.draw.between(1, 2), g.draw.between(1, 4), 4
    ids = [g.tensor([batch, length], "int32", values=g.rng.integers(0, n, (batch, length)), constant=False) for n in (7, 2)]
    tables = [g.tensor(s, "float32", constant=True) for s in ([7, width], [6, width], [2, width], [width], [width])]
    g.node(*ids, *tables)


def ms_grouped(g: Graph) -> None:
    """MatMulNBits: 4-bit weights in groups of 16 or 32, packed."""
    n, groups, size = g.draw.between(1, 5), g.draw.between(1, 2), g.draw.choice((16, 32))
    k = groups * size
    packed = g.rng.integers(0, 256, (n, groups, size // 2))
    scales = g.rng.random(n * groups) + 0.1
    operands = [*_floats(g, [g.draw.between(1, 3), k]), g.tensor(packed.shape, "uint8", values=packed, constant=True)]
    operands.append(g.tensor(scales.shape, "float32", values=scales, constant=True))
    if g.draw.chance(50):
        zeros = g.rng.integers(0, 256, n * ((groups + 1) // 2))
        operands.append(g.tensor(zeros.shape, "uint8", values=zeros, constant=True))
    g.node(*operands, K=k, N=n, bits=4, block_size=size)


# ---------------------------------------------------------------- all


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Final[Mapping[str, Rule]] = {
    **_named(
        tensors.unary,
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
        "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid "
        "Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu NonZero",
    ),
    **_named(
        tensors.binary,
        "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Xor",
    ),
    **_named(tensors.division, "Div Mod"),
    "Pow": tensors.power,
    "BitShift": tensors.shift,
    **_named(tensors.variadic, "Max Mean Min Sum"),
    "Where": tensors.where,
    "Clip": tensors.clip,
    "PRelu": tensors.prelu,
    **_named(
        tensors.reduction,
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare",
    ),
    **_named(tensors.along_axis, "ArgMax ArgMin Hardmax LogSoftmax LpNormalization Softmax"),
    **_named(tensors.cumulative, "CumProd CumSum"),
    "MeanVarianceNormalization": tensors.mean_variance,
    "TopK": tensors.top_k,
    **_named(tensors.layer_norm, "LayerNormalization RMSNormalization"),
    **_named(tensors.channel_norm, "BatchNormalization GroupNormalization InstanceNormalization LRN"),
    **_named(tensors.cast, "Cast CastLike"),
    "BitCast": tensors.bit_cast,
    "Concat": tensors.concat,
    "ConstantOfShape": tensors.constant_of_shape,
    "Constant": tensors.constant,
    **_named(tensors.space, "DepthToSpace SpaceToDepth"),
    "Expand": tensors.expand,
    "EyeLike": tensors.eye_like,
    "Flatten": tensors.flatten,
    "Gather": tensors.gather,
    "GatherElements": tensors.gather_elements,
    "GatherND": tensors.gather_nd,
    "Compress": tensors.compress,
    "OneHot": tensors.one_hot,
    "Pad": tensors.pad,
    "Range": tensors.range_,
    "Reshape": tensors.reshape,
    "Resize": tensors.resize,
    "ReverseSequence": tensors.reverse_sequence,
    "ScatterElements": tensors.scatter_elements,
    "ScatterND": tensors.scatter_nd,
    **_named(tensors.shape_of, "Shape Size"),
    "Slice": tensors.slice_,
    "Split": tensors.split,
    "Squeeze": tensors.squeeze,
    "Unsqueeze": tensors.unsqueeze,
    "Tile": tensors.tile,
    "Transpose": tensors.transpose,
    "Trilu": tensors.trilu,
    "Unique": tensors.unique,
    "Upsample": upsample,
    "CenterCropPad": tensors.center_crop_pad,
    "Col2Im": tensors.col2im,
    **_named(layers.matmul, "MatMul MatMulInteger"),
    "Gemm": layers.gemm,
    "Einsum": layers.einsum,
    "Det": layers.det,
    "DFT": layers.dft,
    "STFT": layers.stft,
    **_named(layers.window, "BlackmanWindow HammingWindow HannWindow"),
    "MelWeightMatrix": layers.mel,
    **_named(layers.convolution, "Conv ConvInteger QLinearConv"),
    "ConvTranspose": layers.transposed_convolution,
    **_named(layers.pool, "AveragePool LpPool MaxPool"),
    **_named(layers.global_pool, "GlobalAveragePool GlobalLpPool GlobalMaxPool"),
    "MaxUnpool": layers.max_unpool,
    "MaxRoiPool": layers.roi_pool,
    "RoiAlign": layers.roi_align,
    "GridSample": layers.grid_sample,
    "AffineGrid": layers.affine_grid,
    "NonMaxSuppression": layers.suppression,
    **_named(layers.recurrent, "GRU LSTM RNN"),
    "Attention": layers.attention,
    "RotaryEmbedding": layers.rotary,
    "Dropout": layers.dropout,
    **_named(layers.loss, "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"),
    **_named(layers.quantize, "DequantizeLinear QuantizeLinear"),
    "DynamicQuantizeLinear": layers.dynamic_quantize,
    "QLinearMatMul": layers.quantized_matmul,
    **_named(
        sequence,
        "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
        "SplitToSequence",
    ),
    **_named(optional, "Optional OptionalGetElement OptionalHasElement"),
    **_named(ms_elementwise, "ms.BiasGelu ms.FastGelu ms.QuickGelu"),
    **_named(ms_norm, "SimplifiedLayerNormalization ms.SkipLayerNormalization ms.SkipSimplifiedLayerNormalization"),
    **_named(ms_products, "ms.FusedConv ms.FusedGemm ms.FusedMatMul ms.TransposeMatMul"),
    **_named(ms_integer_products, "ms.DynamicQuantizeMatMul ms.MatMulIntegerToFloat"),
    **_named(
        ms_quantized,
        "ms.QGemm ms.QLinearAdd ms.QLinearAveragePool ms.QLinearConcat ms.QLinearGlobalAveragePool ms.QLinearLeakyRelu "
        "ms.QLinearMul ms.QLinearSigmoid ms.QLinearSoftmax",
    ),
    **_named(ms_attention, "ms.Attention ms.MultiHeadAttention"),
    "ms.RotaryEmbedding": ms_rotary,
    "ms.EmbedLayerNormalization": ms_embedding,
    "ms.MatMulNBits": ms_grouped,
}
"""Operator -> how it is drawn; `ms.` stands for the domain com.microsoft."""


def name_of(seed: int) -> str:
    """Return the operator of a seed: all take turns."""
    names = sorted(RULES)
    return names[seed % len(names)]
