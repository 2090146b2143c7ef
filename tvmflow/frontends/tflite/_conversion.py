"""Converts a TFLite model to ONNX, with the shapes of its inputs fixed, or open for dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import onnx

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.frontends._emission import explain_failure
from tvmflow.frontends._open_sizes import OpenSizeProblem
from tvmflow.frontends.base import OPEN_FIX
from tvmflow.frontends.tflite import _arrays, _layers
from tvmflow.frontends.tflite._graph import Array, Converter, Graph, Operation, Tensors
from tvmflow.frontends.tflite._model import FIX, Buffer, Model, Operator, is_hybrid

CONVERTERS: Final[Mapping[str, Converter]] = {**_arrays.CONVERTERS, **_layers.CONVERTERS}
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
    """Convert a model, whose inner tensors come after its outputs.

    Returns:
        The ONNX model, and how many of its outputs, the last ones, are inner tensors.

    Raises:
        ImportFailed: with operator and tensor, or with the name that is not a tensor of the model.
    """
    graph = Graph(dimensions)
    values = Tensors(graph, model.tensors, data)
    inner = _find_inner(model, tensors)
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


def _find_inner(model: Model, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of tensors that are no outputs, by name."""
    outputs = {name for name, _ in model.outputs}
    numbers = {model.tensors[n].name: n for o in model.operators for n in o.outputs}
    inner = {}
    for name in names:
        if name in outputs:
            continue
        if name not in numbers:
            hint = did_you_mean(name, numbers)
            raise ImportFailed(
                f"the model has no tensor {quoted(name)}{hint}",
                fix="name a tensor as netron.app shows it",
            )
        inner[name] = numbers[name]
    return inner


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
        is_open, shapes = values.graph.is_open, operation.shapes_text()
        reason = explain_failure(error, shapes)
        if is_open and not isinstance(error, OpenSizeProblem):
            reason = f"it is imported with fixed sizes alone; its operands have the shapes {shapes}"
        text = f"{name} cannot be imported: {reason}"
        raise ImportFailed(text, fix=OPEN_FIX if is_open else FIX) from error


def _refuse_hybrid(operator: Operator, model: Model) -> None:
    """Check that only operators that LiteRT has with float32 data and integer weights have them."""
    if is_hybrid(model, operator) and operator.name not in _HYBRID:
        where = quoted(model.tensors[operator.outputs[0]].name)
        text = f"the TFLite operator {operator.name} has data in float32 and integers with a scale (tensor {where})"
        raise ImportFailed(text, fix=_HYBRID_FIX)
