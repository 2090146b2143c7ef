"""Conversion of a TFLite model to ONNX, with fixed or dynamic input shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.types import Array, Dimension, TensorSpec
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem, shape_text
from tvmflow.frontends._onnx_graph import NOTHING, Graph, Value
from tvmflow.frontends.base import DYNAMIC_FIX, OPERATOR_FIX
from tvmflow.frontends.frontend import list_inner
from tvmflow.frontends.onnx.importer import explain_failure
from tvmflow.frontends.tflite import _arrays
from tvmflow.frontends.tflite._model import Buffer, Model, Operator, is_hybrid
from tvmflow.frontends.tflite._operation import (
    Converter,
    Operation,
    Tensors,
    aligned,
    axis_in,
    first_axes,
    limit,
    pads,
)
from tvmflow.graph.dynamic_shapes import is_dynamic

_HYBRID: Final = frozenset(
    "BATCH_MATMUL CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV".split()
)
_HYBRID_FIX: Final = "convert the model again with full integer quantization (a representative data set), or without quantization"


def convert(
    model: Model,
    data: Buffer,
    inputs: Sequence[TensorSpec],
    tensors: Sequence[str] = (),
    bound: Mapping[str, Array] = MappingProxyType({}),
    dimensions: Sequence[Dimension] = (),
) -> tuple[onnx.ModelProto, int]:
    """Return the ONNX model, whose last outputs are the intermediate tensors, and the number of these."""
    graph = Graph(dimensions)
    values = Tensors(graph, model.tensors, data)
    indices = {model.tensors[n].name: n for o in model.operators for n in o.outputs}
    names = list_inner(
        tensors, dict(model.outputs), indices, "name a tensor as netron.app shows it"
    )
    inner = {name: indices[name] for name in names}
    outputs = [*model.outputs, *inner.items()]
    specs = {spec.name: spec for spec in inputs}
    for number, name in model.inputs.items():
        is_bound = name in bound
        value = graph.constant(bound[name]) if is_bound else graph.input(specs[name])
        values.set_input(number, value)
    graph.reserve([name for name, _ in outputs])
    for operator in model.operators:
        _refuse_hybrid(operator, model)
        _convert_operator(operator, values)
    results = [(name, values.stored(number)) for name, number in outputs]
    return graph.finish(results), len(inner)


def _convert_operator(operator: Operator, values: Tensors) -> None:
    number = operator.outputs[0] if operator.outputs else 0
    values.graph.prefix = values.tensor(number).name or f"tensor_{number}"
    operation = Operation(operator, values)
    try:
        CONVERTERS[operator.name](operation)
    except ImportFailed:
        raise
    except Exception as error:
        name = f"{excerpt(operator.name)} (tensor {quoted(values.graph.prefix)})"
        is_dynamic, shapes = values.graph.is_dynamic, operation.shapes_text()
        reason = explain_failure(error, shapes)
        if is_dynamic and not isinstance(error, DynamicShapeProblem):
            reason = f"it is supported only with fixed sizes; its operands have the shapes {shapes}"
        text = f"{name} cannot be imported: {reason}"
        raise ImportFailed(text, fix=DYNAMIC_FIX if is_dynamic else OPERATOR_FIX) from error


def _refuse_hybrid(operator: Operator, model: Model) -> None:
    """Refuse a hybrid operator (float32 data, integer weights) that LiteRT does not implement as hybrid."""
    if is_hybrid(model, operator) and operator.name not in _HYBRID:
        where = quoted(model.tensors[operator.outputs[0]].name)
        text = f"the TFLite operator {operator.name} has data in float32 and integers with a scale (tensor {where})"
        raise ImportFailed(text, fix=_HYBRID_FIX)


# ---------------------------------------------------------------- convolutions


def _window(operation: Operation, prefix: str, axes: str) -> list[int]:
    return [int(operation.options[f"{prefix}_{axis}"]) for axis in axes]


def _convolution(operation: Operation, order: Sequence[int], axes: str = "hw") -> None:
    """Convert a convolution.

    `order` permutes the weights to (results, channels of a group, spatial axes …).
    """
    weights, data = operation.weight(1, order), operation.real(0, first=True)
    channels, *sizes = data.shape[1:]
    if channels % weights.shape[1]:
        raise operation.refusal(f"of {channels} channels with weights for {weights.shape[1]}")
    number, none = operation.number(0), [0] * (2 * len(sizes))
    # Models from other frameworks have a separate padding operator, which is fused into the convolution.
    number, around = operation.tensors.padded.get(number, (number, none))
    kernel = weights.shape[2:]
    strides, dilations = (_window(operation, name, axes) for name in ("stride", "dilation"))
    bias = operation.bias(2, 0, 1)
    padding = np.add(pads(operation, sizes, kernel, strides, dilations), around).tolist()
    result = operation.graph.add(
        "Conv",
        *(operation.tensors.real(number, first=True), weights, *((bias,) if bias else ())),
        group=channels // weights.shape[1],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=padding,
    )
    operation.write(result, first=True)


def _transposed_convolution(operation: Operation) -> None:
    # (results, height, width, channels); operands: shape, weights, data, bias
    weights = operation.weight(1, (3, 0, 1, 2))
    data = operation.real(2, first=True)
    sizes = operation.sizes(0)[1:3]
    strides, kernel = _window(operation, "stride", "hw"), weights.shape[2:]
    # The number of pixels by which windows extend beyond the result. Half of them are cropped on each side; if the
    # number is odd, the extra pixel is cropped at the end.
    simplify = operation.graph.ranges.simplify_multiple
    beyond = [
        simplify((source - 1) * stride + extent - size)
        for source, stride, extent, size in zip(data.shape[2:], strides, kernel, sizes, strict=True)
    ]
    if any(map(is_dynamic, beyond)):
        text = f"its result of {shape_text(sizes)} is not larger by the same at all sizes"
        raise DynamicShapeProblem(f"{text} than its operands {operation.shapes_text()}")
    bias = operation.bias(3, 2, 1)
    result = operation.graph.add(
        "ConvTranspose",
        *(data, weights, *((bias,) if bias else ())),
        kernel_shape=kernel,
        strides=strides,
        pads=[max(n, 0) // 2 for n in beyond] + [max(n, 0) - max(n, 0) // 2 for n in beyond],
        output_padding=[max(-n, 0) for n in beyond],
    )
    operation.write(result, first=True)


# ---------------------------------------------------------------- products of matrices, softmax, normalization


_SHUFFLED_WEIGHTS: Final = 1
# From LiteRT's kernel of L2_NORMALIZATION.
_EPSILON: Final = 1e-6


def _fully_connected(operation: Operation) -> None:
    if operation.options["weights_format"] == _SHUFFLED_WEIGHTS:
        raise operation.refusal("with shuffled weights")
    data, graph = operation.real(), operation.graph
    # (results, features)
    weights = operation.weight(1, (1, 0))
    features, results = weights.shape
    rows = graph.ranges.simplify(math.prod(data.shape) // features)
    if not graph.ranges.is_equal(rows * features, math.prod(data.shape)):
        raise operation.refusal(
            f"of shape {shape_text(data.shape)} with weights for {features} features"
        )
    if not operation.options["keep_num_dims"]:
        data = graph.reshape(data, [rows, features])
    value = graph.add("MatMul", data, weights)
    if bias := operation.bias(2, 0, 1):
        value = graph.add("Add", value, graph.reshape(bias, [results]))
    operation.write(value)


def _batch_matmul(operation: Operation) -> None:
    operands = []
    for position, option in enumerate(("adj_x", "adj_y")):
        value = operation.real(position)
        axes = list(range(value.rank))
        if operation.options[option]:
            axes[-2:] = axes[:-3:-1]
        operands.append(operation.graph.transpose(value, axes))
    operation.write(operation.graph.add("MatMul", *operands))


def _softmax(operation: Operation) -> None:
    value, beta = operation.real(), operation.options["beta"]
    if beta != 1.0:
        value = operation.graph.add("Mul", value, operation.graph.constant(beta, value.dtype))
    operation.write(operation.graph.add("Softmax", value, axis=-1))


def _l2_normalization(operation: Operation) -> None:
    graph, (value, first) = operation.graph, operation.in_its_order()
    axis = graph.integers([1 if first else value.rank - 1])
    length = graph.add("Sqrt", graph.add("ReduceSumSquare", value, axis, keepdims=1))
    length = graph.add("Max", length, graph.constant(_EPSILON, value.dtype))
    operation.write(graph.add("Div", value, length), first=first)


def _local_response_normalization(operation: Operation) -> None:
    size = 2 * operation.options["radius"] + 1
    value = operation.graph.add(
        "LRN",
        operation.real(first=True),
        size=size,
        # ONNX divides alpha by the size.
        alpha=operation.options["alpha"] * size,
        beta=operation.options["beta"],
        bias=operation.options["bias"],
    )
    operation.write(value, first=True)


# ---------------------------------------------------------------- recurrent layers

# Sequences are unrolled, so each step becomes separate nodes.
_MAX_STEPS: Final = 256

_Step = Callable[[Value], Value]


def _unroll(operation: Operation, projected: Value, step: _Step) -> None:
    """Apply `step` along the time axis of `projected`, and write the results."""
    graph = operation.graph
    is_sequence = operation.name.startswith("UNIDIRECTIONAL")
    if not is_sequence:
        _write_sequence(operation, step(projected))
        return
    axis = 0 if operation.options["time_major"] else 1
    [steps] = operation.fixed([projected.shape[axis]])
    if not 0 < steps <= _MAX_STEPS:
        raise operation.refusal(f"of {steps} steps, and the limit is {_MAX_STEPS}")
    axes = graph.integers([axis])
    results = [
        graph.add("Unsqueeze", step(graph.add("Squeeze", part, axes)), axes)
        for part in graph.split(projected, axis, [1] * steps)
    ]
    _write_sequence(
        operation, graph.add("Concat", *results, axis=axis) if steps > 1 else results[0]
    )


def _write_sequence(operation: Operation, value: Value) -> None:
    """Set the result to values that include the activation already."""
    operation.tensors.write(operation.outputs[0], value)


def _rnn(operation: Operation) -> None:
    """Convert RNN: h = activation(x W + h R + b)."""
    graph, hidden = operation.graph, operation.real(4)
    recurrent = operation.weight(2, (1, 0))

    def step(projected: Value) -> Value:
        nonlocal hidden
        total = graph.add("Add", projected, graph.add("MatMul", hidden, recurrent))
        hidden = operation.activate(total)
        return hidden

    projected = graph.add("MatMul", operation.real(), operation.weight(1, (1, 0)))
    _unroll(operation, graph.add("Add", projected, operation.real(3)), step)
    operation.write_states([hidden])


# Gates in the order of the operands: input, forget, cell, output.
_INPUT, _FORGET, _CELL, _OUTPUT = range(4)


def _lstm(operation: Operation) -> None:
    """Convert LSTM; without operands for the input gate, it is 1 - forget gate (CIFG)."""
    if operation.options.get("kernel_type") or any(map(operation.has, range(20, 24))):
        raise operation.refusal("of the kind `basic` or with layer normalization")
    graph, options = operation.graph, operation.options
    gates = [gate for gate in range(4) if operation.has(1 + gate)]
    hidden, cell = operation.real(18), operation.real(19)
    peepholes = {
        gate: operation.real(9 + index)
        for index, gate in enumerate((_INPUT, _FORGET, _OUTPUT))
        if operation.has(9 + index)
    }
    inward, recurrent = (
        _join_gates(operation, [operation.weight(first + gate, (1, 0)) for gate in gates], 1)
        for first in (1, 5)
    )
    biases = _join_gates(operation, [operation.real(12 + gate) for gate in gates], 0)

    def gate_of(parts: Mapping[int, Value], gate: int) -> Value:
        value = parts[gate]
        if gate in peepholes:
            value = graph.add("Add", value, graph.add("Mul", cell, peepholes[gate]))
        return graph.add("Sigmoid", value)

    def step(projected: Value) -> Value:
        nonlocal hidden, cell
        total = graph.add("Add", projected, graph.add("MatMul", hidden, recurrent))
        units = operation.fixed([cell.shape[-1]])
        parts = dict(zip(gates, graph.split(total, 1, units * len(gates)), strict=True))
        forget = gate_of(parts, _FORGET)
        new = (
            gate_of(parts, _INPUT)
            if _INPUT in parts
            else graph.add("Sub", graph.constant(1.0, "float32"), forget)
        )
        candidate = operation.activate(parts[_CELL])
        cell = graph.add("Add", graph.add("Mul", forget, cell), graph.add("Mul", new, candidate))
        cell = _limit_state(operation, cell, options["cell_clip"])
        hidden = graph.add("Mul", gate_of(parts, _OUTPUT), operation.activate(cell))
        if operation.has(16):
            hidden = graph.add("MatMul", hidden, operation.weight(16, (1, 0)))
            if operation.has(17):
                hidden = graph.add("Add", hidden, operation.real(17))
            hidden = _limit_state(operation, hidden, options["proj_clip"])
        return hidden

    projected = graph.add("MatMul", operation.real(), inward)
    _unroll(operation, graph.add("Add", projected, biases), step)
    operation.write_states([hidden, cell])


def _join_gates(operation: Operation, parts: Sequence[Value], axis: int) -> Value:
    arrays = [part.array for part in parts if part.array is not None]
    if len(arrays) == len(parts):
        return operation.graph.constant(np.concatenate(arrays, axis))
    return operation.graph.add("Concat", *parts, axis=axis)


def _limit_state(operation: Operation, value: Value, most: float) -> Value:
    return limit(operation.graph, value, -most, most) if most > 0 else value


def _svdf(operation: Operation) -> None:
    """Convert SVDF: weighted features of the last steps, summed over `rank` filters per unit."""
    graph, rank = operation.graph, int(operation.options["rank"])
    features, times = operation.weight(1, (1, 0)), operation.weight(2, (0, 1))
    filters, steps = operation.fixed(times.shape)
    batch = operation.real().shape[0]
    if rank < 1 or filters % rank:
        raise operation.refusal(f"of rank {rank} with {filters} filters")
    past = graph.reshape(operation.real(4), [batch, filters, steps])
    now = graph.reshape(graph.add("MatMul", operation.real(), features), [batch, filters, 1])
    history = graph.add("Concat", graph.cut(past, {2: slice(1, None)}), now, axis=2)
    weighted = graph.add("Mul", history, times)
    weighted = graph.reshape(weighted, [batch, filters // rank, rank * steps])
    total = graph.add("ReduceSum", weighted, graph.integers([2]), keepdims=0)
    if operation.has(3):
        total = graph.add("Add", total, operation.real(3))
    operation.write(total)
    operation.write_states([history])


# ---------------------------------------------------------------- pooling and resizing


def _pool(operation: Operation, name: str, data: Value) -> Value:
    kernel, strides = (_window(operation, prefix, "hw") for prefix in ("filter", "stride"))
    return operation.graph.add(
        name,
        data,
        kernel_shape=kernel,
        strides=strides,
        pads=pads(operation, data.shape[2:], kernel, strides, (1, 1)),
    )


def _plain_pool(operation: Operation, name: str) -> None:
    operation.write(_pool(operation, name, operation.real(first=True)), first=True)


def _root_mean_square(operation: Operation) -> None:
    data = operation.real(first=True)
    squares = _pool(operation, "AveragePool", operation.graph.add("Mul", data, data))
    operation.write(operation.graph.add("Sqrt", squares), first=True)


def _resize(operation: Operation, mode: str, **attributes: str) -> None:
    data = operation.real(first=True)
    sizes = operation.graph.integers([*data.shape[:2], *operation.sizes(1)])
    coordinates = "asymmetric"
    if operation.options["align_corners"]:
        coordinates = "align_corners"
    elif operation.options["half_pixel_centers"]:
        coordinates = "half_pixel"
    result = operation.graph.add(
        "Resize",
        *(data, NOTHING, NOTHING, sizes),
        mode=mode,
        coordinate_transformation_mode=coordinates,
        **attributes,
    )
    operation.write(result, first=True)


def _nearest(operation: Operation) -> None:
    # TFLite rounds half up with aligned corners, and takes pixel ⌊(x + ½) · scale⌋ with half-pixel centers.
    is_plain = not (operation.options["align_corners"] or operation.options["half_pixel_centers"])
    _resize(operation, "nearest", nearest_mode="floor" if is_plain else "round_prefer_ceil")


# ---------------------------------------------------------------- pixels and channels


def _move_pixels(operation: Operation, operator: str) -> None:
    block = operation.options["block_size"]
    value = operation.graph.add(operator, operation.real(first=True), blocksize=block)
    operation.write(value, first=True)


def _space_to_batch(operation: Operation) -> None:
    """Convert SPACE_TO_BATCH_ND: pad, split into blocks, and move the pixels of blocks to the batch."""
    graph, value = operation.graph, operation.real()
    blocks, widths = operation.integers(1), operation.constant(2)
    count = len(blocks)
    amounts = np.zeros((value.rank, 2), np.int64)
    amounts[1 : 1 + count] = widths
    if amounts.any():
        value = graph.add("Pad", value, graph.integers(amounts.T.ravel().tolist()))
    batch, *sizes = value.shape
    for size, block in zip(sizes, blocks, strict=False):
        if not graph.ranges.is_equal(size // block * block, size):
            operation.fixed([size])
    cut = [n for size, block in zip(sizes, blocks, strict=False) for n in (size // block, block)]
    rest = sizes[count:]
    value = graph.reshape(value, [batch, *cut, *rest])
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    last = range(2 * count + 1, 2 * count + 1 + len(rest))
    value = graph.transpose(value, [*inner, 0, *outer, *last])
    shape = [batch * math.prod(blocks), *cut[::2], *rest]
    operation.write(graph.reshape(value, shape))


def _batch_to_space(operation: Operation) -> None:
    """Convert BATCH_TO_SPACE_ND: move batches to the pixels of blocks, and crop."""
    graph, value = operation.graph, operation.real()
    blocks, crops = operation.integers(1), operation.constant(2)
    count, batch = len(blocks), value.shape[0] // math.prod(blocks)
    sizes, rest = value.shape[1 : 1 + count], value.shape[1 + count :]
    value = graph.reshape(value, [*blocks, batch, *sizes, *rest])
    pairs = [axis for i in range(count) for axis in (count + 1 + i, i)]
    last = range(2 * count + 1, 2 * count + 1 + len(rest))
    value = graph.transpose(value, [count, *pairs, *last])
    full = [size * block for size, block in zip(sizes, blocks, strict=True)]
    value = graph.reshape(value, [batch, *full, *rest])
    pairs_of_crops = zip(full, crops.tolist(), strict=True)
    parts = [slice(start, size - end) for size, (start, end) in pairs_of_crops]
    operation.write(graph.cut(value, dict(enumerate(parts, 1))))


# ---------------------------------------------------------------- arithmetic


def _reduce(operation: Operation, name: str, *, is_bool: bool = False) -> None:
    first = operation.is_first() and not is_bool
    value, graph = operation.real(first=first), operation.graph
    rank, keep = value.rank, int(operation.options["keep_dims"])
    if is_bool:
        value = graph.cast(value, "int32")
    axes = {operation.checked_axis(axis, rank) for axis in operation.integers(1)}
    moved = graph.integers(sorted(axis_in(axis, rank, first) for axis in axes))
    if axes:
        value = graph.add(name, value, moved, keepdims=keep)
    if is_bool:
        value = graph.cast(value, "bool")
    if first and axes and not keep:
        # The remaining axes get the file's order.
        left = [axis for axis in first_axes(rank) if axis not in axes]
        value = graph.transpose(value, [left.index(axis) for axis in sorted(left)])
        first = False
    operation.write(value, first=first)


def _arg(operation: Operation, name: str) -> None:
    value = operation.real()
    axis = operation.axis(1, value.rank)
    result = operation.graph.add(name, value, axis=axis, keepdims=0)
    operation.write(operation.graph.cast(result, operation.output_dtype()))


def _top_k(operation: Operation) -> None:
    count = operation.graph.integers(operation.integers(1))
    values, indices = operation.graph.add_several("TopK", 2, operation.real(), count, axis=-1)
    operation.write(values)
    operation.write(operation.graph.cast(indices, operation.output_dtype(1)), 1)


def _cumsum(operation: Operation) -> None:
    value = operation.real()
    axis = operation.graph.constant(np.int64(operation.axis(1, value.rank)))
    exclusive, reverse = (int(operation.options[name]) for name in ("exclusive", "reverse"))
    result = operation.graph.add("CumSum", value, axis, exclusive=exclusive, reverse=reverse)
    operation.write(result)


_Formula = Callable[..., Value]


def _elementwise(operation: Operation, formula: _Formula) -> None:
    values, first = aligned(operation, range(len(operation.inputs)))
    operation.write(formula(operation.graph, *values), first=first)


def _node(name: str, **attributes: Any) -> _Formula:
    def formula(graph: Graph, *values: Value) -> Value:
        return graph.add(name, *values, **attributes)

    return formula


def _square(graph: Graph, x: Value) -> Value:
    return graph.add("Mul", x, x)


def _floor_mod(graph: Graph, x: Value, y: Value) -> Value:
    if np.dtype(x.dtype).kind in "iu":
        return graph.add("Mod", x, y)
    return graph.add("Sub", x, graph.add("Mul", _floor_divide(graph, x, y), y))


def _floor_divide(graph: Graph, x: Value, y: Value) -> Value:
    if np.dtype(x.dtype).kind in "iu":
        # x − x mod y is a multiple of y, so that Div, which rounds to zero, is exact.
        return graph.add("Div", graph.add("Sub", x, graph.add("Mod", x, y)), y)
    return graph.add("Floor", graph.add("Div", x, y))


def _gelu(operation: Operation) -> None:
    approximation = "tanh" if operation.options["approximate"] else "none"
    _elementwise(operation, _node("Gelu", approximate=approximation))


def _hard_swish(graph: Graph, x: Value) -> Value:
    gate = limit(graph, graph.add("Add", x, graph.constant(3.0, x.dtype)), 0.0, 6.0)
    return graph.add("Mul", x, graph.add("Mul", gate, graph.constant(1 / 6, x.dtype)))


def _cast(operation: Operation) -> None:
    first = operation.is_first()
    value = operation.tensors.stored(operation.number(0), first=first)
    dtype = operation.output_dtype()
    if dtype not in ("float32", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"):
        raise operation.refusal(f"to dtype {dtype}")
    operation.write(operation.graph.cast(value, dtype), first=first)


def _dequantize(operation: Operation) -> None:
    value, first = operation.in_its_order()
    operation.write(operation.graph.cast(value, "float32"), first=first)


def _select(operation: Operation) -> None:
    """Convert SELECT, in which a 1-D condition selects entries of the first axis."""
    condition, x = operation.tensors.stored(operation.number(0)), operation.real(1)
    if condition.rank == 1 and x.rank > 1 and operation.name == "SELECT":
        rows = [*condition.shape, *[1] * (x.rank - 1)]
        condition = operation.graph.reshape(condition, rows)
        operation.write(operation.graph.add("Where", condition, x, operation.real(2)))
    else:
        _elementwise(operation, _node("Where"))


_SAME_NAMES: Final = (
    "Abs Add Ceil Cos Div Elu Equal Exp Floor Greater Less Log Mul Neg Pow PRelu Relu Round Sign Sin "
    "Sqrt Sub Tanh"
).split()
_FORMULAS: Final[Mapping[str, _Formula]] = {
    **{name.upper(): _node(name) for name in _SAME_NAMES},
    "ADD_N": _node("Sum"),
    "FLOOR_DIV": _floor_divide,
    "FLOOR_MOD": _floor_mod,
    "GREATER_EQUAL": _node("GreaterOrEqual"),
    "HARD_SWISH": _hard_swish,
    "LESS_EQUAL": _node("LessOrEqual"),
    "LOGICAL_AND": _node("And"),
    "LOGICAL_NOT": _node("Not"),
    "LOGICAL_OR": _node("Or"),
    "LOGISTIC": _node("Sigmoid"),
    "MAXIMUM": _node("Max"),
    "MINIMUM": _node("Min"),
    "NOT_EQUAL": lambda graph, x, y: graph.add("Not", graph.add("Equal", x, y)),
    "QUANTIZE": lambda graph, x: x,
    "RELU6": lambda graph, x: limit(graph, x, 0.0, 6.0),
    "RELU_0_TO_1": lambda graph, x: limit(graph, x, 0.0, 1.0),
    "RELU_N1_TO_1": lambda graph, x: limit(graph, x, -1.0, 1.0),
    "RSQRT": lambda graph, x: graph.add("Reciprocal", graph.add("Sqrt", x)),
    "SQUARE": _square,
    "SQUARED_DIFFERENCE": lambda graph, x, y: _square(graph, graph.add("Sub", x, y)),
}

CONVERTERS: Final[Mapping[str, Converter]] = {
    **_arrays.CONVERTERS,
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"), _lstm),
    **dict.fromkeys(("RNN", "UNIDIRECTIONAL_SEQUENCE_RNN"), _rnn),
    "SVDF": _svdf,
    # The orders of weights in a file are: (results, height, width, channels of a group), (depth, height, width, channels
    # of a group, results), and (1, height, width, channels · results of each).
    "CONV_2D": functools.partial(_convolution, order=(0, 3, 1, 2)),
    "CONV_3D": functools.partial(_convolution, order=(4, 3, 0, 1, 2), axes="dhw"),
    "DEPTHWISE_CONV_2D": functools.partial(_convolution, order=(3, 0, 1, 2)),
    "TRANSPOSE_CONV": _transposed_convolution,
    "BATCH_MATMUL": _batch_matmul,
    "FULLY_CONNECTED": _fully_connected,
    "L2_NORMALIZATION": _l2_normalization,
    "LOCAL_RESPONSE_NORMALIZATION": _local_response_normalization,
    "LOG_SOFTMAX": lambda operation: operation.write(
        operation.graph.add("LogSoftmax", operation.real(), axis=-1)
    ),
    "SOFTMAX": _softmax,
    "AVERAGE_POOL_2D": functools.partial(_plain_pool, name="AveragePool"),
    "L2_POOL_2D": _root_mean_square,
    "MAX_POOL_2D": functools.partial(_plain_pool, name="MaxPool"),
    "RESIZE_BILINEAR": functools.partial(_resize, mode="linear"),
    "RESIZE_NEAREST_NEIGHBOR": _nearest,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "DEPTH_TO_SPACE": functools.partial(_move_pixels, operator="DepthToSpace"),
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "SPACE_TO_DEPTH": functools.partial(_move_pixels, operator="SpaceToDepth"),
    "MEAN": functools.partial(_reduce, name="ReduceMean"),
    "REDUCE_MAX": functools.partial(_reduce, name="ReduceMax"),
    "REDUCE_MIN": functools.partial(_reduce, name="ReduceMin"),
    "REDUCE_PROD": functools.partial(_reduce, name="ReduceProd"),
    "SUM": functools.partial(_reduce, name="ReduceSum"),
    "ARG_MAX": functools.partial(_arg, name="ArgMax"),
    "ARG_MIN": functools.partial(_arg, name="ArgMin"),
    "CUMSUM": _cumsum,
    "REDUCE_ALL": functools.partial(_reduce, name="ReduceMin", is_bool=True),
    "REDUCE_ANY": functools.partial(_reduce, name="ReduceMax", is_bool=True),
    "TOPK_V2": _top_k,
    **{name: functools.partial(_elementwise, formula=f) for name, f in _FORMULAS.items()},
    "CAST": _cast,
    "DEQUANTIZE": _dequantize,
    "GELU": _gelu,
    "LEAKY_RELU": lambda operation: _elementwise(
        operation, _node("LeakyRelu", alpha=operation.options["alpha"])
    ),
    "SELECT": _select,
    "SELECT_V2": _select,
}
