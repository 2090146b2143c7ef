"""Converts nodes of the type `Custom` that a recipe's operators implement, and runs their references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import quoted
from tvmflow.frontends._emission import call_operator, check_reference
from tvmflow.frontends._reference_process import Array
from tvmflow.frontends.mxnet._checkpoint import Node, Symbol, read_symbol
from tvmflow.frontends.mxnet._op import Expr
from tvmflow.operators.definition import Node as OwnNode
from tvmflow.operators.definition import Operator, Tensor
from tvmflow.operators.loading import Operators

DOMAIN: Final = "mxnet"
CUSTOM: Final = "Custom"
_TYPE: Final = "op_type"


def find_operator(node: Node, operators: Operators) -> Operator | None:
    """Return the operator of a recipe that implements a node; None for all but `Custom`."""
    if node.op != CUSTOM:
        return None
    return operators.find(DOMAIN, node.attrs.get(_TYPE, ""), 1)


def label(node: Node) -> str:
    """Return the operator of a node as messages name it, with the type of a `Custom`."""
    return f"{CUSTOM} ({node.attrs.get(_TYPE, '')})" if node.op == CUSTOM else node.op


def count_outputs(symbol: Symbol, index: int) -> int:
    """Return how many outputs of a node a symbol reads: it does not say how many there are."""
    read = [entry for node in symbol.nodes for entry in node.inputs]
    return 1 + max(
        (output for source, output in (*read, *symbol.heads) if source == index), default=0
    )


def describe_node(
    node: Node, operator: Operator, outputs: int, inputs: Sequence[Tensor | None] = ()
) -> OwnNode:
    return OwnNode(
        operator=operator.name,
        domain=DOMAIN,
        version=1,
        # MXNet stores the arguments as strings
        attributes={k: v for k, v in node.attrs.items() if k != _TYPE and not k.startswith("__")},
        inputs=tuple(inputs),
        outputs=outputs,
    )


def convert(
    node: Node,
    inputs: Sequence[Expr | None],
    outputs: int,
    operators: Operators,
    builder: relax.BlockBuilder,
) -> list[Expr]:
    """Return the results of a node by its operator, each a variable."""
    operator = find_operator(node, operators)
    assert operator is not None
    described = describe_node(node, operator, outputs)
    names = [""] * outputs
    return call_operator(operators, operator, described, quoted(node.name), inputs, names, builder)


# ---------------------------------------------------------------- references
# Their numpy functions as custom operators of MXNet, in the reference's process.


def register(mx: Any, symbol: Path, operators: Operators) -> list[str]:
    """Let MXNet compute each `Custom` of a symbol by the reference of its operator, and return the names of these."""
    graph = read_symbol(symbol)
    arities: dict[Operator, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        operator = find_operator(node, operators)
        if operator is None:
            continue
        check_reference(operator, quoted(node.name), "MXNet")
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
        described = describe_node(node, operator, count, specs)
        assert operator.reference is not None
        results = operators.call(operator, operator.reference, described, *arrays)
        results = results if isinstance(results, list | tuple) else [results]
        return [np.asarray(result) for result in results[:count]]

    class Computed(mx.operator.CustomOp):  # type: ignore[misc]
        def __init__(self, attributes: dict[str, str]) -> None:
            super().__init__()
            self._attributes = attributes

        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
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
            return [f"data{number}" for number in range(inputs)]

        def list_outputs(self) -> list[str]:
            return ["output"] if count == 1 else [f"output{number}" for number in range(count)]

        def infer_shape(self, in_shape: Any) -> tuple[Any, Any, Any]:
            """Return the shapes of inputs, outputs and states: those of the results for zeros."""
            zeros = [np.zeros(shape, np.float32) for shape in in_shape]
            results = compute(self._attributes, zeros)
            return in_shape, [list(result.shape) for result in results], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Computed:
            del ctx, in_shapes, in_dtypes
            return Computed(self._attributes)

    mx.operator.register(operator.name)(Properties)
