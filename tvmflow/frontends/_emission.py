"""Code that frontends share: names of nodes, custom operators, hyperbolic functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.custom_operators.definition import ADVICE, Node, Operator, OperatorError, Tensor
from tvmflow.custom_operators.loading import Operators
from tvmflow.graph.ir import dtype_of
from tvmflow.graph.marks import mark_new, take_marks


class NodeNames:
    """Marks the bindings of a node, so that passes over the imported module keep its name."""

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self._builder = builder
        self._names: list[str] = []

    def mark(self, name: str, results: Sequence[Any]) -> None:
        """Mark all bindings that compute the results of a node."""
        marks = frozenset((len(self._names),))
        self._names.append(name)
        for result in results:
            mark_new(result, marks, self._builder.lookup_binding)

    def take(self, mod: tvm.IRModule) -> tuple[str, ...]:
        """Return the name of the node that each binding of `main` came from, and remove the marks."""
        return tuple(self._names[min(own)] if own else "" for own in take_marks(mod))


# Words that occur only in internal errors of TVM and ONNX.
_INTERNALS: Final = re.compile(
    r"\b(relax|tirx?|tvm|[TR])\.\w|<class|Check failed|InternalError|InferenceError|op_type:"
)
# Errors about values of Python, not of a model.
_PYTHONS: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)


def explain_failure(error: Exception, operands: str) -> str:
    """Return an error's text; for an internal one, the operands without a conversion."""
    reason = last_line(error)
    if isinstance(error, _PYTHONS) or _INTERNALS.search(reason):
        return f"there is no conversion of it for its attributes and the operands {operands or 'it has'}"
    return reason


# ---------------------------------------------------------------- custom operators


def call_operator(
    operators: Operators,
    operator: Operator,
    node: Node,
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[str],
    builder: relax.BlockBuilder,
) -> list[Any]:
    """Return the results of an operator for a node (without its inputs), each a variable.

    Raises:
        StageError: when the implementation raises, with file and line.
        ImportFailed: when it returns too few results, or something else than tensors.
    """
    operands = [None if value is None else builder.emit(value) for value in inputs]
    tensors = tuple(None if operand is None else tensor_of(operand) for operand in operands)
    node = replace(node, inputs=tensors, _builder=builder, _sources=operators.sources)
    results = operators.call(operator, operator.implement, node, *operands)
    if isinstance(results, relax.Tuple):
        results = list(results.fields)
    results = list(results) if isinstance(results, list | tuple) else [results]
    if len(results) < node.outputs:
        text = f"returns {len(results)} results for {node.outputs} outputs"
        raise operator_error(operator, name, text)
    emitted = []
    for output, result in zip(outputs, results, strict=False):
        try:
            emitted.append(builder.emit(result))
            tensor_of(emitted[-1])
        except Exception as error:
            what = f" for {quoted(output)}" if output else ""
            text = f"returns no tensor{what}: {excerpt(str(error))}"
            raise operator_error(operator, name, text) from error
    return emitted


def tensor_of(expr: Any) -> Tensor:
    """Return shape and dtype of an emitted tensor, or raise OperatorError for anything else."""
    try:
        return Tensor(tuple(int(n) for n in expr.ty.shape.values), str(expr.ty.dtype.dtype))
    except (AttributeError, TypeError):
        raise OperatorError(f"it is of type {getattr(expr, 'ty', None)}") from None


def operator_error(operator: Operator, name: str, text: str) -> ImportFailed:
    """Return the error for an operator that does not fit a node; `text` ends the sentence."""
    return ImportFailed(
        f"{operator.where}: the operator {operator} (node {name}) {text}",
        fix=f"correct its implementation; {ADVICE}",
    )


# ---------------------------------------------------------------- hyperbolic functions
# LLVM cannot vectorize them.


_TERMS: Final = 8


def make_cosh(x: Any) -> Any:
    """Return `(eˣ + e⁻ˣ)/2`."""
    half = relax.const(0.5, dtype_of(x))
    return half * relax.op.exp(x) + half * relax.op.exp(relax.op.negative(x))


def make_sinh(x: Any, emit: Callable[[Any], Any]) -> Any:
    """Return `(eˣ − e⁻ˣ)/2`; below 1 the Taylor series, because the difference would lose most bits."""
    dtype = dtype_of(x)
    half, one = relax.const(0.5, dtype), relax.const(1.0, dtype)
    large = half * relax.op.exp(x) - half * relax.op.exp(relax.op.negative(x))
    square, series = emit(x * x), one
    for n in range(_TERMS, 0, -1):
        factor = relax.const(1 / (2 * n * (2 * n + 1)), dtype)
        series = emit(one + square * factor * series)
    return relax.op.where(relax.op.less(square, one), x * series, large)
