"""The numpy functions of a recipe's operators, as custom operators of MXNet: runs in the reference process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.core.errors import StageError
from tvmflow.frontends._frames import Array
from tvmflow.frontends.mxnet._own_operators import (
    CUSTOM,
    count_outputs,
    describe_node,
    find_operator,
)
from tvmflow.frontends.mxnet._symbol import Node, read_symbol
from tvmflow.operators.definition import ADVICE, Operator, Tensor
from tvmflow.operators.loading import Operators


def register(mx: Any, symbol: Path, operators: Operators) -> list[str]:
    """Let MXNet compute each `Custom` of a symbol by the reference of its operator.

    Args:
        mx: The module `mxnet`.
        symbol: The symbol file.
        operators: Those of the recipe.

    Returns:
        The names of the operators.

    Raises:
        StageError: when one has no reference, or nodes of one type differ in their operands.
    """
    graph = read_symbol(symbol)
    arities: dict[Operator, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        operator = find_operator(node, operators)
        if operator is None:
            continue
        if operator.reference is None:
            raise StageError(
                f"{operator.where}: the operator {operator} (node '{node.name}') has no reference, and MXNet lacks it",
                fix=f"give it one: `@operator(…, reference=FUNCTION)`, a function with numpy; {ADVICE}",
            )
        outputs = max(count_outputs(graph, index), arities.get(operator, (0, 0))[1])
        count = len(node.inputs)
        if arities.get(operator, (count, 0))[0] != count:
            raise StageError(
                f"nodes of the type {operator.name} have different numbers of inputs, which the reference cannot have",
                fix="disable the comparison with `verify: {against: none}`",
            )
        arities[operator] = count, outputs
    for operator, (inputs, outputs) in arities.items():
        _register_one(mx, operator, operators, inputs, outputs)
    return [str(operator) for operator in arities]


def _register_one(
    mx: Any, operator: Operator, operators: Operators, inputs: int, count: int
) -> None:
    def compute(attributes: dict[str, str], arrays: Sequence[Array]) -> list[Array]:
        specs = [Tensor(array.shape, str(array.dtype)) for array in arrays]
        node = Node(CUSTOM, operator.name, attributes, ())
        described = describe_node(node, operator, specs, count)
        assert operator.reference is not None
        results = operators.call(operator, operator.reference, described, *arrays)
        results = results if isinstance(results, list | tuple) else [results]
        return [np.asarray(result) for result in results[:count]]

    class Computed(mx.operator.CustomOp):  # type: ignore[misc]
        """The numpy function."""

        def __init__(self, attributes: dict[str, str]) -> None:
            super().__init__()
            self._attributes = attributes

        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            """Compute the outputs."""
            del is_train, aux
            results = compute(self._attributes, [data.asnumpy() for data in in_data])
            for target, kind, result in zip(out_data, req, results, strict=True):
                self.assign(target, kind, mx.nd.array(result, dtype=target.dtype))

    class Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
        """Names, shapes and dtypes of inputs and outputs."""

        def __init__(self, **attributes: str) -> None:
            super().__init__(need_top_grad=False)
            self._attributes = attributes

        def list_arguments(self) -> list[str]:
            """Return a name for each input."""
            return [f"data{number}" for number in range(inputs)]

        def list_outputs(self) -> list[str]:
            """Return a name for each output."""
            return ["output"] if count == 1 else [f"output{number}" for number in range(count)]

        def infer_shape(self, in_shape: Any) -> tuple[Any, Any, Any]:
            """Return the shapes of inputs, outputs and states: those of the results for zeros."""
            zeros = [np.zeros(shape, np.float32) for shape in in_shape]
            results = compute(self._attributes, zeros)
            return in_shape, [list(result.shape) for result in results], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Computed:
            """Return the operator."""
            del ctx, in_shapes, in_dtypes
            return Computed(self._attributes)

    mx.operator.register(operator.name)(Properties)
