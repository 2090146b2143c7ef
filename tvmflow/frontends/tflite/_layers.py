"""Layers: convolution, matrix products, normalization, pooling, resizing, pixels as channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np

from tvmflow.compiler.open_sizes import is_open
from tvmflow.frontends._open_sizes import OpenSizeProblem, shape_text
from tvmflow.frontends.tflite._graph import NOTHING, Converter, Operation, Value, pads

# ---------------------------------------------------------------- convolutions


def _window(operation: Operation, prefix: str, axes: str) -> list[int]:
    return [int(operation.options[f"{prefix}_{axis}"]) for axis in axes]


def _convolve(operation: Operation, weights: Value, groups: int, axes: str = "hw") -> None:
    """Add a convolution.

    Args:
        operation: The operator: data, weights, bias.
        weights: As (results, channels of a group, sizes …).
        groups: The number of groups.
        axes: The last letters of the options of each axis.
    """
    number, around = _without_padding(operation)
    data = operation.tensors.real(number, first=True)
    sizes = operation.real(0, first=True).shape[2:]
    kernel = weights.shape[2:]
    strides, dilations = (_window(operation, name, axes) for name in ("stride", "dilation"))
    bias = operation.bias(2, 0, 1)
    result = operation.graph.add(
        "Conv",
        *(data, weights, *((bias,) if bias else ())),
        group=groups,
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=[
            width + more
            for width, more in zip(
                pads(operation, sizes, kernel, strides, dilations), around, strict=True
            )
        ],
    )
    operation.write(result, first=True)


def _without_padding(operation: Operation) -> tuple[int, list[int]]:
    """Return the tensor that a convolution reads, and the widths of zeros around it.

    Models that come from other frameworks have padding as an operator of its own, whose result then
    is not computed.
    """
    number = operation.number(0)
    none = [0] * (2 * (operation.rank(0) - 2))
    return operation.tensors.padded.get(number, (number, none))


def _convolution(operation: Operation) -> None:
    # (results, height, width, channels of a group)
    weights = operation.weight(1, (0, 3, 1, 2))
    channels = operation.real(0, first=True).shape[1]
    if channels % weights.shape[1]:
        raise operation.refusal(f"of {channels} channels with weights for {weights.shape[1]}")
    _convolve(operation, weights, channels // weights.shape[1])


def _depthwise(operation: Operation) -> None:
    # (1, height, width, channels · results of each)
    weights = operation.weight(1, (3, 0, 1, 2))
    _convolve(operation, weights, operation.real(0, first=True).shape[1])


def _volume(operation: Operation) -> None:
    # (depth, height, width, channels of a group, results)
    weights = operation.weight(1, (4, 3, 0, 1, 2))
    channels = operation.real(0, first=True).shape[1]
    _convolve(operation, weights, channels // weights.shape[1], "dhw")


def _transposed_convolution(operation: Operation) -> None:
    # (results, height, width, channels); the operands are shape, weights, data, bias
    weights = operation.weight(1, (3, 0, 1, 2))
    data = operation.real(2, first=True)
    sizes = operation.sizes(0)[1:3]
    strides, kernel = _window(operation, "stride", "hw"), weights.shape[2:]
    # How far the windows reach beyond the result: that is cut off, one pixel more at the end.
    simplify = operation.graph.ranges.simplify_multiple
    beyond = [
        simplify((source - 1) * stride + taps - size)
        for source, stride, taps, size in zip(data.shape[2:], strides, kernel, sizes, strict=True)
    ]
    if any(map(is_open, beyond)):
        text = f"its result of {shape_text(sizes)} is not larger by the same at all sizes"
        raise OpenSizeProblem(f"{text} than its operands {operation.shapes_text()}")
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
    operands = [
        _transposed(operation, position, bool(operation.options[option]))
        for position, option in enumerate(("adj_x", "adj_y"))
    ]
    operation.write(operation.graph.add("MatMul", *operands))


def _transposed(operation: Operation, position: int, is_transposed: bool) -> Value:
    """Return an operand, of which the last two axes change places if `is_transposed`."""
    value = operation.real(position)
    axes = list(range(value.rank))
    if is_transposed:
        axes[-2:] = axes[:-3:-1]
    return operation.graph.transpose(value, axes)


def _softmax(operation: Operation) -> None:
    value, beta = operation.real(), operation.options["beta"]
    if beta != 1.0:
        value = operation.graph.add("Mul", value, operation.graph.constant(beta, value.dtype))
    operation.write(operation.graph.add("Softmax", value, axis=-1))


def _log_softmax(operation: Operation) -> None:
    operation.write(operation.graph.add("LogSoftmax", operation.real(), axis=-1))


def _l2_normalization(operation: Operation) -> None:
    graph, first = operation.graph, operation.is_first()
    value = operation.real(first=first)
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
        # ONNX divides by the size
        alpha=operation.options["alpha"] * size,
        beta=operation.options["beta"],
        bias=operation.options["bias"],
    )
    operation.write(value, first=True)


# ---------------------------------------------------------------- pooling and resizing


def _pool(operation: Operation, name: str, data: Value) -> Value:
    kernel = [operation.options["filter_h"], operation.options["filter_w"]]
    strides = [operation.options["stride_h"], operation.options["stride_w"]]
    return operation.graph.add(
        name,
        data,
        kernel_shape=kernel,
        strides=strides,
        pads=pads(operation, data.shape[2:], kernel, strides, (1, 1)),
    )


def _average(operation: Operation) -> None:
    operation.write(_pool(operation, "AveragePool", operation.real(first=True)), first=True)


def _max(operation: Operation) -> None:
    operation.write(_pool(operation, "MaxPool", operation.real(first=True)), first=True)


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


def _linear(operation: Operation) -> None:
    _resize(operation, "linear")


def _nearest(operation: Operation) -> None:
    # TFLite rounds half up between corners, and takes the pixel at ⌊(x + ½) · scale⌋ for centers.
    is_plain = not (operation.options["align_corners"] or operation.options["half_pixel_centers"])
    _resize(operation, "nearest", nearest_mode="floor" if is_plain else "round_prefer_ceil")


# ---------------------------------------------------------------- pixels and channels


def _move_pixels(operation: Operation, operator: str) -> None:
    block = operation.options["block_size"]
    value = operation.graph.add(operator, operation.real(first=True), blocksize=block)
    operation.write(value, first=True)


def _space_to_batch(operation: Operation) -> None:
    """Convert SPACE_TO_BATCH_ND by its definition: padded, cut in blocks, whose pixels become batches."""
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
    """Convert BATCH_TO_SPACE_ND: batches become pixels of blocks, and the edges are cut off."""
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
    if crops.any():
        starts = crops[:, 0].tolist()
        ends = [size - int(end) for size, end in zip(full, crops[:, 1], strict=True)]
        bounds = (starts, ends, list(range(1, count + 1)))
        value = graph.add("Slice", value, *map(graph.integers, bounds))
    operation.write(value)


CONVERTERS: Final[Mapping[str, Converter]] = {
    "CONV_2D": _convolution,
    "CONV_3D": _volume,
    "DEPTHWISE_CONV_2D": _depthwise,
    "TRANSPOSE_CONV": _transposed_convolution,
    "BATCH_MATMUL": _batch_matmul,
    "FULLY_CONNECTED": _fully_connected,
    "L2_NORMALIZATION": _l2_normalization,
    "LOCAL_RESPONSE_NORMALIZATION": _local_response_normalization,
    "LOG_SOFTMAX": _log_softmax,
    "SOFTMAX": _softmax,
    "AVERAGE_POOL_2D": _average,
    "L2_POOL_2D": _root_mean_square,
    "MAX_POOL_2D": _max,
    "RESIZE_BILINEAR": _linear,
    "RESIZE_NEAREST_NEIGHBOR": _nearest,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "DEPTH_TO_SPACE": partial(_move_pixels, operator="DepthToSpace"),
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "SPACE_TO_DEPTH": partial(_move_pixels, operator="SpaceToDepth"),
}
