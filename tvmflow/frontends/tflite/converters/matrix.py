"""Products of matrices, and what normalizes vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tvmflow.frontends.tflite._graph import Value
from tvmflow.frontends.tflite._operation import Converter, Operation

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
    if math.prod(data.shape) % features:
        raise operation.refusal(f"of shape {list(data.shape)} with weights for {features} features")
    if not operation.options["keep_num_dims"]:
        data = graph.reshape(data, [math.prod(data.shape) // features, features])
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


CONVERTERS: Final[Mapping[str, Converter]] = {
    "BATCH_MATMUL": _batch_matmul,
    "FULLY_CONNECTED": _fully_connected,
    "L2_NORMALIZATION": _l2_normalization,
    "LOCAL_RESPONSE_NORMALIZATION": _local_response_normalization,
    "LOG_SOFTMAX": _log_softmax,
    "SOFTMAX": _softmax,
}
