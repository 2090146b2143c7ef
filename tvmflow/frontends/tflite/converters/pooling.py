"""Pooling and resizing of images, with channels first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.frontends.tflite._graph import NOTHING, Value
from tvmflow.frontends.tflite._operation import Converter, Operation, pads


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
    sizes = operation.graph.integers([*data.shape[:2], *operation.integers(1)])
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


CONVERTERS: Final[Mapping[str, Converter]] = {
    "AVERAGE_POOL_2D": _average,
    "L2_POOL_2D": _root_mean_square,
    "MAX_POOL_2D": _max,
    "RESIZE_BILINEAR": _linear,
    "RESIZE_NEAREST_NEIGHBOR": _nearest,
}
