"""Marks the nodes of a recipe's operators before the model is prepared, and converts them.

A marked node is in a domain of its own, under a name that no other operator has, so that nothing takes
it for an operator that ONNX or TVM knows. ONNX cannot infer the shapes of its results: these come from
the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from tvm import relax

from tvmflow.core.formatting import excerpt, quoted
from tvmflow.frontends._emission import call_operator, operator_error
from tvmflow.frontends.onnx.graph import (
    OWN_DOMAIN,
    all_nodes,
    attributes_of,
    dtype_of,
    element_types,
    known_values,
    node_name,
    versions_of,
)
from tvmflow.operators.definition import Node, Operator, OperatorError, Tensor, standard_domain
from tvmflow.operators.loading import Operators


class UsedOperator(NamedTuple):
    """An operator that a model calls, and the version of its domain that the model has."""

    operator: Operator
    version: int


def find_operator(
    node: NodeProto, operators: Operators, versions: Mapping[str, int]
) -> UsedOperator | None:
    """Return the operator of a recipe that implements a node.

    Args:
        node: The node.
        operators: Those of the recipe.
        versions: The version of each domain that the model uses.
    """
    version = versions.get(standard_domain(node.domain), 1)
    operator = operators.find(node.domain, node.op_type, version)
    return UsedOperator(operator, version) if operator else None


class OwnNodes:
    """The nodes of a model that a recipe's operators implement."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._uses: dict[str, UsedOperator] = {}
        self._dtypes: dict[str, str] = {}

    def mark(self, model: ModelProto) -> None:
        """Mark the nodes of a model, and of its own functions."""
        if not self._operators.operators:
            return
        versions = versions_of(model.opset_import)
        for function in model.functions:
            versions = {**versions_of(function.opset_import), **versions}
        for node in all_nodes(model):
            self._mark_node(node, versions)
        for function in model.functions:
            function.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))
        if self._uses:
            model.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))
        for value in (*model.graph.value_info, *model.graph.output):
            if element := value.type.tensor_type.elem_type:
                self._dtypes[value.name] = dtype_of(element)

    def _mark_node(self, node: NodeProto, versions: Mapping[str, int]) -> None:
        if use := find_operator(node, self._operators, versions):
            name = f"{use.operator.domain or 'ai.onnx'}.{node.op_type}"
            self._uses[name] = use
            node.domain, node.op_type = OWN_DOMAIN, name

    def infer_shapes(self, model: ModelProto) -> ModelProto:
        """Add the shapes of results, as soon as those of the inputs are known."""
        if not self._uses:
            return model
        shapes = dict(known_values(model).shapes)
        dtypes = {name: dtype_of(kind) for name, kind in element_types(model).items()}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            is_open = any(name and name not in shapes for name in node.output)
            is_known = all(not name or (name in shapes and name in dtypes) for name in node.input)
            if node.domain != OWN_DOMAIN or not is_open or not is_known:
                continue
            inputs = [
                relax.const(numpy_helper.to_array(constants[name]))
                if name in constants and dtypes[name].startswith("int")
                else relax.Var(f"input{index}", relax.TensorType(shapes[name], dtypes[name]))
                if name
                else None
                for index, name in enumerate(node.input)
            ]
            builder = relax.BlockBuilder()
            variables = [value for value in inputs if isinstance(value, relax.Var)]
            with builder.function("main", variables):
                results = self.convert(node, inputs, builder)
                builder.emit_func_output(results[0])
            for name, result in zip(node.output, results, strict=False):
                shape, dtype = _spec(result)
                shapes[name], dtypes[name] = shape, dtype
                element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
                _set_type(model, helper.make_tensor_value_info(name, element, shape))
        return model

    def convert(
        self, node: NodeProto, inputs: Sequence[Any], builder: relax.BlockBuilder
    ) -> list[Any]:
        """Return the results of a marked node, each a variable.

        Raises:
            StageError: when its implementation raises, with file and line.
            ImportFailed: when its results do not fit the model.
        """
        use = self._uses[node.op_type]
        exprs = [None if value is None else builder.emit(value) for value in inputs]
        described = replace(
            describe_node(
                node, use.operator, use.version, [None if e is None else _tensor(e) for e in exprs]
            ),
            _builder=builder,
            _sources=self._operators.sources,
        )
        name = node_name(node)
        results = call_operator(self._operators, use.operator, described, name, exprs)
        emitted = []
        for output, result in zip(node.output, results, strict=False):
            try:
                variable = builder.emit(result)
                dtype = _spec(variable)[1]
            except Exception as error:
                text = f"returns no tensor for {quoted(output)}: {excerpt(str(error))}"
                raise operator_error(use.operator, name, text) from error
            if self._dtypes.get(output, dtype) != dtype:
                declared = self._dtypes[output]
                text = f"returns {dtype} for {quoted(output)}, which is {declared} in the model"
                raise operator_error(use.operator, name, text)
            emitted.append(variable)
        return emitted


NO_OPERATORS: Final = OwnNodes(Operators())
"""Those of a recipe that brings none."""


def describe_node(
    node: NodeProto, operator: Operator, version: int, inputs: Sequence[Tensor | None]
) -> Node:
    """Return a node as implementations and references of operators know it.

    Raises:
        ImportFailed: when it has an attribute that is a graph.
    """
    attributes = {}
    for name, value in attributes_of(node).items():
        if isinstance(value, GraphProto):
            raise operator_error(
                operator, node_name(node), f"cannot have the attribute '{name}', a graph"
            )
        attributes[name] = _attribute(value)
    return Node(
        operator=operator.name,
        domain=operator.domain,
        version=version,
        attributes=attributes,
        inputs=tuple(inputs),
        outputs=len(node.output),
    )


def _attribute(value: Any) -> Any:
    if isinstance(value, list):
        return [
            entry.decode("utf-8", "replace") if isinstance(entry, bytes) else entry
            for entry in value
        ]
    return numpy_helper.to_array(value) if hasattr(value, "data_type") else value


def _tensor(expr: Any) -> Tensor:
    return Tensor(*_spec(expr))


def _spec(expr: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an emitted tensor.

    Raises:
        OperatorError: when it is none, or its shape is not fixed.
    """
    try:
        return tuple(int(extent) for extent in expr.ty.shape.values), str(expr.ty.dtype.dtype)
    except (AttributeError, TypeError):
        raise OperatorError(f"it is of type {getattr(expr, 'ty', None)}") from None


def _set_type(model: ModelProto, typed: Any) -> None:
    """Set the type of a value in the main graph, which may be an output."""
    for value in (*model.graph.output, *model.graph.value_info):
        if value.name == typed.name:
            value.CopyFrom(typed)
            return
    model.graph.value_info.append(typed)
