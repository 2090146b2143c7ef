"""The shapes of ONNX nodes with open sizes that a TFLite model becomes: ONNX infers numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import onnx

from tvmflow.compiler.open_sizes import IrSize, is_open
from tvmflow.frontends._open_sizes import OpenSizeProblem, SizeRanges
from tvmflow.frontends.onnx.graph import attributes_of

_Shape = Sequence[IrSize]


class _Operand(Protocol):
    """An operand: its shape, and its elements where they are known."""

    @property
    def shape(self) -> tuple[IrSize, ...]: ...

    @property
    def array(self) -> np.ndarray[Any, Any] | None: ...


class _Call(NamedTuple):
    ranges: SizeRanges
    operands: Sequence[_Operand]
    attributes: Mapping[str, Any]

    def shape(self, position: int = 0) -> list[IrSize]:
        return list(self.operands[position].shape)

    def numbers(self, position: int) -> list[IrSize]:
        array = self.operands[position].array
        if array is None:
            raise OpenSizeProblem("its sizes depend on values, and not on the dimensions alone")
        return list(array.ravel().tolist())

    def axis(self) -> int:
        return int(self.attributes.get("axis", -1)) % len(self.shape())

    def around(self, axis: int, *sizes: IrSize) -> list[IrSize]:
        """Return the shape of the first operand with other sizes in place of an axis."""
        return [*self.shape()[:axis], *sizes, *self.shape()[axis + 1 :]]


def infer_shapes(
    ranges: SizeRanges, node: onnx.NodeProto, operands: Sequence[_Operand]
) -> list[list[IrSize]]:
    """Return the shapes of the results of a node."""
    call = _Call(ranges, operands, attributes_of(node))
    rule: _Rule = _RULES.get(node.op_type, _broadcast)
    shapes = rule(call)
    results = shapes if shapes and isinstance(shapes[0], list) else [shapes]
    return [[ranges.simplify(size) for size in shape] for shape in results]


def _broadcast(call: _Call) -> _Shape:
    return broadcast(call.ranges, [operand.shape for operand in call.operands])


def broadcast(ranges: SizeRanges, shapes: Sequence[_Shape]) -> list[IrSize]:
    """Return the shape of what tensors of several shapes are broadcast to."""
    rank = max(map(len, shapes))
    result: list[IrSize] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if ranges.is_equal(result[axis], 1):
                result[axis] = size
            elif not (ranges.is_equal(size, 1) or ranges.is_equal(size, result[axis])):
                raise _differ(result[axis], size)
    return result


def _differ(one: IrSize, other: IrSize) -> OpenSizeProblem:
    text = f"sizes of {one} and {other} are not the same for all sizes of the dimensions"
    return OpenSizeProblem(text)


def _first(call: _Call) -> _Shape:
    return call.shape()


def _reshape(call: _Call) -> _Shape:
    if not call.ranges.is_equal(math.prod(call.numbers(1)), math.prod(call.shape())):
        raise OpenSizeProblem("its result has another number of elements")
    return call.numbers(1)


def _concat(call: _Call) -> _Shape:
    axis, first = call.axis(), call.shape()
    for operand in call.operands[1:]:
        for place, size in enumerate(operand.shape):
            if place == axis:
                first[axis] = first[axis] + size
            elif not call.ranges.is_equal(first[place], size):
                raise _differ(first[place], size)
    return first


def _pad(call: _Call) -> _Shape:
    before, after = np.reshape(np.array(call.numbers(1), object), (2, -1)).tolist()
    return [b + n + a for b, n, a in zip(before, call.shape(), after, strict=True)]


def _slice(call: _Call) -> _Shape:
    shape = call.shape()
    for start, end, axis, step in zip(*(call.numbers(n) for n in range(1, 5)), strict=True):
        if step < 0 and is_open(shape[axis]):
            # the whole axis
            continue
        if step < 0:
            shape[axis] = len(
                range(*slice(start, max(end, 0) if end >= 0 else None, step).indices(shape[axis]))
            )
            continue
        begin = call.ranges.clamp(start, shape[axis])
        length = call.ranges.at_least(call.ranges.clamp(end, shape[axis]), begin) - begin
        shape[axis] = call.ranges.divide_up(length, step)
    return shape


def _matmul(call: _Call) -> _Shape:
    left, right = call.shape(0), call.shape(1)
    if not call.ranges.is_equal(left[-1], right[-2]):
        raise _differ(left[-1], right[-2])
    return [*broadcast(call.ranges, [left[:-2], right[:-2]]), left[-2], right[-1]]


def _windows(call: _Call) -> list[IrSize]:
    kernel, strides = call.attributes["kernel_shape"], call.attributes["strides"]
    dilations = call.attributes.get("dilations", [1] * len(kernel))
    pads = call.attributes["pads"]
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    return [
        (size + b + a - d * (k - 1) - 1) // s + 1
        for size, k, s, d, b, a in zip(
            call.shape()[2:], kernel, strides, dilations, before, after, strict=True
        )
    ]


def _transposed_convolution(call: _Call) -> _Shape:
    kernel, strides = call.attributes["kernel_shape"], call.attributes["strides"]
    pads, more = call.attributes["pads"], call.attributes["output_padding"]
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    sizes = [
        (size - 1) * s + k - b - a + m
        for size, k, s, b, a, m in zip(
            call.shape()[2:], kernel, strides, before, after, more, strict=True
        )
    ]
    return [call.shape()[0], call.shape(1)[1], *sizes]


def _reduce(call: _Call) -> _Shape:
    shape = call.shape()
    axes = {int(axis) % len(shape) for axis in call.numbers(1)}
    if call.attributes["keepdims"]:
        return [1 if axis in axes else size for axis, size in enumerate(shape)]
    return [size for axis, size in enumerate(shape) if axis not in axes]


def _depth_to_space(call: _Call) -> _Shape:
    block = int(call.attributes["blocksize"])
    batch, channels, *sizes = call.shape()
    return [batch, channels // block**2, *(size * block for size in sizes)]


def _space_to_depth(call: _Call) -> _Shape:
    block = int(call.attributes["blocksize"])
    batch, channels, *sizes = call.shape()
    for size in sizes:
        if not call.ranges.is_equal(size // block * block, size):
            raise OpenSizeProblem(
                f"{size} may be no multiple of {block}; set `multiple_of` in `dimensions`"
            )
    return [batch, channels * block**2, *(size // block for size in sizes)]


def _range(call: _Call) -> _Shape:
    start, limit, step = (call.numbers(position)[0] for position in range(3))
    if is_open(step) or step < 1:
        raise OpenSizeProblem("its step is no whole number above 0")
    return [call.ranges.at_least(call.ranges.divide_up(limit - start, step), 0)]


_Rule = Callable[[_Call], Any]

_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("Cast", "CumSum", "DequantizeLinear", "LRN", "LogSoftmax"), _first),
    **dict.fromkeys(("QuantizeLinear", "Softmax"), _first),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), _reduce),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare"), _reduce),
    **dict.fromkeys(("AveragePool", "MaxPool"), lambda call: [*call.shape()[:2], *_windows(call)]),
    **dict.fromkeys(("ArgMax", "ArgMin"), lambda call: call.around(call.axis())),
    "Concat": _concat,
    "Conv": lambda call: [call.shape()[0], call.shape(1)[0], *_windows(call)],
    "ConvTranspose": _transposed_convolution,
    "DepthToSpace": _depth_to_space,
    "Expand": lambda call: broadcast(call.ranges, [call.shape(), call.numbers(1)]),
    "Gather": lambda call: call.around(int(call.attributes.get("axis", 0)), *call.shape(1)),
    "GatherND": lambda call: [*call.shape(1)[:-1], *call.shape()[int(call.shape(1)[-1]) :]],
    "MatMul": _matmul,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": lambda call: call.numbers(3),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": lambda call: [call.around(call.axis(), length) for length in call.numbers(1)],
    "Tile": lambda call: [
        n * times for n, times in zip(call.shape(), call.numbers(1), strict=True)
    ],
    "TopK": lambda call: [call.around(call.axis(), *call.numbers(1))] * 2,
    "Transpose": lambda call: [call.shape()[axis] for axis in call.attributes["perm"]],
}
"""Operator -> the shapes of its results; others are broadcast."""
