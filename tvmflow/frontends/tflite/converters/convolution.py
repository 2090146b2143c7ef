"""Convolutions of images and volumes, whose results have their channels first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.frontends.tflite._graph import Value
from tvmflow.frontends.tflite._operation import Converter, Operation, pads


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


def _transposed(operation: Operation) -> None:
    # (results, height, width, channels); the operands are shape, weights, data, bias
    weights = operation.weight(1, (3, 0, 1, 2))
    data = operation.real(2, first=True)
    sizes = operation.integers(0)[1:3]
    strides, kernel = _window(operation, "stride", "hw"), weights.shape[2:]
    # How far the windows reach beyond the result: that is cut off, one pixel more at the end.
    beyond = [
        (source - 1) * stride + taps - size
        for source, stride, taps, size in zip(data.shape[2:], strides, kernel, sizes, strict=True)
    ]
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


CONVERTERS: Final[Mapping[str, Converter]] = {
    "CONV_2D": _convolution,
    "CONV_3D": _volume,
    "DEPTHWISE_CONV_2D": _depthwise,
    "TRANSPOSE_CONV": _transposed,
}
