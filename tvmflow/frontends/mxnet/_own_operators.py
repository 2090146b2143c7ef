"""Nodes of MXNet's operator `Custom` that a recipe's operators implement, under their `op_type`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvm import relax

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.frontends.mxnet._op import Expr, signature
from tvmflow.frontends.mxnet._symbol import Node, Symbol
from tvmflow.operators.definition import ADVICE, Operator, Tensor
from tvmflow.operators.definition import Node as OwnNode
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
    node: Node, operator: Operator, inputs: Sequence[Tensor | None], outputs: int, **private: Any
) -> OwnNode:
    """Return a node as implementations and references of operators know it."""
    return OwnNode(
        operator=operator.name,
        domain=DOMAIN,
        version=1,
        attributes=attributes_of(node.attrs),
        inputs=tuple(inputs),
        outputs=outputs,
        **private,
    )


def attributes_of(attrs: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of a `Custom`, which MXNet stores as strings."""
    return {key: value for key, value in attrs.items() if key != _TYPE and not key.startswith("__")}


def convert(
    node: Node,
    inputs: Sequence[Expr | None],
    outputs: int,
    operators: Operators,
    builder: relax.BlockBuilder,
) -> list[Expr]:
    """Return the results of a node by its operator, each a variable.

    Raises:
        StageError: when the implementation raises, with file and line.
        ImportFailed: when its results do not fit the model.
    """
    operator = find_operator(node, operators)
    assert operator is not None
    exprs = [None if value is None else builder.emit(value) for value in inputs]
    specs = [None if expr is None else Tensor(*signature(expr)) for expr in exprs]
    described = describe_node(
        node, operator, specs, outputs, _builder=builder, _sources=operators.sources
    )
    results = operators.call(operator, operator.implement, described, *exprs)
    if isinstance(results, relax.Tuple):
        results = list(results.fields)
    results = list(results) if isinstance(results, list | tuple) else [results]
    if len(results) < outputs:
        raise _error(operator, node, f"returns {len(results)} results for {outputs} outputs")
    try:
        emitted = [builder.emit(result) for result in results]
        for result in emitted:
            signature(result)
    except Exception as error:
        raise _error(operator, node, f"returns no tensor: {excerpt(str(error))}") from error
    return emitted


def _error(operator: Operator, node: Node, text: str) -> ImportFailed:
    return ImportFailed(
        f"{operator.where}: the operator {operator} (node {quoted(node.name)}) {text}",
        fix=f"correct its implementation; {ADVICE}",
    )
