"""Converters of TFLite's operators to nodes of ONNX, by theme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.frontends.tflite._operation import Converter
from tvmflow.frontends.tflite.converters import (
    convolution,
    elementwise,
    indexing,
    matrix,
    pooling,
    reduction,
    shape,
    space,
)

CONVERTERS: Final[Mapping[str, Converter]] = {
    **convolution.CONVERTERS,
    **elementwise.CONVERTERS,
    **indexing.CONVERTERS,
    **matrix.CONVERTERS,
    **pooling.CONVERTERS,
    **reduction.CONVERTERS,
    **shape.CONVERTERS,
    **space.CONVERTERS,
}
"""The converter of each operator of `_operators.SUPPORTED`."""
