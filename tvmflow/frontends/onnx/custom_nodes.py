"""Nodes of custom operators: marking, shape inference, conversion, references and model splitting.

Marking gives a node a tvmflow domain and name, to distinguish it from ONNX or TVM operators of the same name. Shapes
of results come from the implementation, because ONNX cannot infer them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from tvm import relax

from tvmflow.core.errors import ImportFailed, StageError
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.types import Array
from tvmflow.custom_operators.definition import (
    ADVICE,
    Node,
    Operator,
    OperatorError,
    Tensor,
    standard_domain,
)
from tvmflow.custom_operators.loading import Operators
from tvmflow.frontends._reference_process import check_reference
from tvmflow.frontends.onnx._inlining import inline_functions
from tvmflow.frontends.onnx.graph import (
    CUSTOM_DOMAIN,
    all_nodes,
    attributes_of,
    dtype_of,
    element_types,
    known_values,
    names_read,
    node_name,
    read_without_large_tensors,
    value_info,
    versions_of,
    with_inner_nodes,
)


class UsedOperator(NamedTuple):
    """A custom operator that a model calls, and the model's opset version of its domain."""

    operator: Operator
    version: int


def find_operator(
    node: NodeProto, operators: Operators, versions: Mapping[str, int]
) -> UsedOperator | None:
    """Return the custom operator that implements a node, or None."""
    version = versions.get(standard_domain(node.domain), 1)
    operator = operators.find(node.domain, node.op_type, version)
    return UsedOperator(operator, version) if operator else None


class CustomNodes:
    """The nodes of a model that custom operators implement."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._uses: dict[str, UsedOperator] = {}
        self._dtypes: dict[str, str] = {}

    def mark(self, model: ModelProto) -> None:
        """Mark the custom nodes of a model, including those in its functions."""
        if not self._operators.operators:
            return
        versions = versions_of(model.opset_import)
        for function in model.functions:
            versions = {**versions_of(function.opset_import), **versions}
        for node in all_nodes(model):
            if use := find_operator(node, self._operators, versions):
                name = f"{use.operator.domain or 'ai.onnx'}.{node.op_type}"
                self._uses[name] = use
                node.domain, node.op_type = CUSTOM_DOMAIN, name
        for function in model.functions:
            function.opset_import.append(helper.make_opsetid(CUSTOM_DOMAIN, 1))
        if self._uses:
            model.opset_import.append(helper.make_opsetid(CUSTOM_DOMAIN, 1))
        for value in (*model.graph.value_info, *model.graph.output):
            if element := value.type.tensor_type.elem_type:
                self._dtypes[value.name] = dtype_of(element)

    def infer_shapes(self, model: ModelProto) -> ModelProto:
        """Add the result shapes of custom nodes with known input shapes to a model."""
        if not self._uses:
            return model
        shapes = dict(known_values(model).shapes)
        dtypes = {name: dtype_of(kind) for name, kind in element_types(model).items()}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            lacks_shapes = any(name and name not in shapes for name in node.output)
            is_known = all(not name or (name in shapes and name in dtypes) for name in node.input)
            if node.domain != CUSTOM_DOMAIN or not lacks_shapes or not is_known:
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
                shapes[name], dtypes[name] = _tensor_of(result)
                _set_type(model, value_info(name, dtypes[name], shapes[name]))
        return model

    def convert(
        self, node: NodeProto, inputs: Sequence[Any], builder: relax.BlockBuilder
    ) -> list[Any]:
        """Return the results of a marked node, each as a variable."""
        use, name = self._uses[node.op_type], node_name(node)
        operator = use.operator
        operands = [None if value is None else builder.emit(value) for value in inputs]
        tensors = [None if operand is None else _tensor_of(operand) for operand in operands]
        described = describe_node(node, operator, use.version, tensors)
        described = replace(described, _builder=builder, _sources=self._operators.sources)
        results = self._operators.call(operator, operator.implement, described, *operands)
        if isinstance(results, relax.Tuple):
            results = list(results.fields)
        results = list(results) if isinstance(results, list | tuple) else [results]
        if len(results) < described.outputs:
            text = f"returns {len(results)} results for {described.outputs} outputs"
            raise _operator_error(operator, name, text)
        emitted = []
        for output, result in zip(node.output, results, strict=False):
            try:
                emitted.append(builder.emit(result))
                dtype = _tensor_of(emitted[-1]).dtype
            except Exception as error:
                what = f" for {quoted(output)}" if output else ""
                text = f"returns no tensor{what}: {excerpt(str(error))}"
                raise _operator_error(operator, name, text) from error
            if (declared := self._dtypes.get(output, dtype)) != dtype:
                text = f"returns {dtype} for {quoted(output)}, which is {declared} in the model"
                raise _operator_error(operator, name, text)
        return emitted


NO_OPERATORS: Final = CustomNodes(Operators())
"""For models of recipes without custom operators."""


def describe_node(
    node: NodeProto, operator: Operator, version: int, inputs: Sequence[Tensor | None]
) -> Node:
    """Return the description of a node for the operator's implementation and reference."""
    attributes = attributes_of(node)
    for name, value in attributes.items():
        if isinstance(value, GraphProto):
            text = f"cannot have the attribute '{name}', a graph"
            raise _operator_error(operator, node_name(node), text)
        if isinstance(value, list):
            texts = (v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in value)
            attributes[name] = list(texts)
        elif isinstance(value, TensorProto):
            attributes[name] = numpy_helper.to_array(value)
    return Node(
        operator=operator.name,
        domain=operator.domain,
        version=version,
        attributes=attributes,
        inputs=tuple(inputs),
        outputs=len(node.output),
    )


def _tensor_of(expr: Any) -> Tensor:
    """Return the shape and dtype of an emitted tensor; OperatorError for anything else."""
    try:
        return Tensor(tuple(int(n) for n in expr.ty.shape.values), str(expr.ty.dtype.dtype))
    except (AttributeError, TypeError):
        raise OperatorError(f"it is of type {getattr(expr, 'ty', None)}") from None


def _operator_error(operator: Operator, name: str, text: str) -> ImportFailed:
    """Return the error for a node that an operator cannot implement; `text` is the predicate."""
    return ImportFailed(
        f"{operator.where}: the operator {operator} (node {name}) {text}",
        fix=f"correct its implementation; {ADVICE}",
    )


def _set_type(model: ModelProto, typed: onnx.ValueInfoProto) -> None:
    declared = (*model.graph.output, *model.graph.value_info)
    own = next((value for value in declared if value.name == typed.name), None)
    (own or model.graph.value_info.add()).CopyFrom(typed)


# ---------------------------------------------------------------- references and pieces


_OPSET: Final = 17


def list_used_operators(path: str, operators: Operators) -> list[UsedOperator]:
    """Return the custom operators that a model calls."""
    model = read_without_large_tensors(Path(path))
    versions = versions_of(model.opset_import)
    used: dict[UsedOperator, NodeProto] = {}
    for node in all_nodes(model):
        if use := find_operator(node, operators, versions):
            used.setdefault(use, node)
    for use, node in used.items():
        check_reference(use.operator, node_name(node), "ONNX Runtime")
    return list(used)


class CustomReferences:
    """The NumPy references of custom operators; the first call of each node is recorded."""

    def __init__(self, used: Sequence[UsedOperator], operators: Operators, calls: Path) -> None:
        self.used, self._operators, self._calls = used, operators, calls
        self._recorded: list[NodeProto] = []

    def call(
        self, use: UsedOperator, node: NodeProto, arrays: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Return the outputs of a node."""
        operator = use.operator
        specs = [None if a is None else Tensor(a.shape, str(a.dtype)) for a in arrays]
        described = describe_node(node, operator, use.version, specs)
        assert operator.reference is not None
        results = self._operators.call(operator, operator.reference, described, *arrays)
        results = results if isinstance(results, list | tuple) else [results]
        if len(results) < described.outputs:
            raise StageError(
                f"{operator.where}: the reference of the operator {operator} returns {len(results)} results for {described.outputs} outputs",
                fix=f"return an array for each output; {ADVICE}",
            )
        results = tuple(np.asarray(result) for result in results[: described.outputs])
        if not any(node is other for other in self._recorded):
            self._recorded.append(node)
            path = self._calls / f"{operator.name}-{len(self._recorded)}.onnx"
            _record(path, node, use, arrays, results)
        return results

    def make_class(self, use: UsedOperator) -> type:
        """Return the class of an operator for ONNX's reference evaluator."""

        def load_attributes(node: Any) -> None:
            # A node's attributes must not overwrite attributes of the evaluator's class.
            node.has_linked_attribute, node.attributes_names_ = False, set()

        def run(node: Any, *arrays: Array | None, **_: Any) -> tuple[Array, ...]:
            return self.call(use, node.onnx_node, arrays)

        body: dict[str, Any] = {
            "op_domain": use.operator.domain,
            # Without this, the evaluator would use the schema of a standard operator with this name.
            "op_schema": None,
            "_load_attributes": load_attributes,
            "run": run,
            "_run": run,
        }
        # Imported here because the import takes a second.
        from onnx.reference.op_run import OpRun

        return type(use.operator.name, (OpRun,), body)


def _record(
    path: Path, node: NodeProto, use: UsedOperator, *arguments: Sequence[Array | None]
) -> None:
    """Write a call as a single-node model, and its input and output arrays beside the model."""
    arrays: dict[str, Array] = {}
    sides = []
    for names, values in zip((node.input, node.output), arguments, strict=True):
        side = {n: v for n, v in zip(names, values, strict=False) if n and v is not None}
        arrays |= side
        sides.append([value_info(name, array.dtype, array.shape) for name, array in side.items()])
    graph = helper.make_graph([node], use.operator.name, *sides)
    versions = {"": _OPSET, node.domain: use.version}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets)
    path.write_bytes(model.SerializeToString())
    np.savez(path.with_suffix(".npz"), **arrays)


# ---------------------------------------------------------------- models in pieces


class CustomPiece(NamedTuple):
    """A node of a custom operator."""

    node: NodeProto
    use: UsedOperator


class StandardPiece(NamedTuple):
    """A piece of standard nodes, and the values that it reads and returns."""

    model: ModelProto
    nodes: Sequence[NodeProto]
    inputs: Sequence[str]
    outputs: Sequence[str]

    def make_model(self, feed: Mapping[str, Array]) -> bytes:
        """Return a model of only these nodes; inputs have the dtypes and shapes of `feed`."""
        inputs = [value_info(name, array.dtype, array.shape) for name, array in feed.items()]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        read = _list_read(self.nodes)
        weights = [tensor for tensor in self.model.graph.initializer if tensor.name in read]
        graph = helper.make_graph(self.nodes, "piece", inputs, outputs, weights)
        own = {"opset_imports": self.model.opset_import, "ir_version": self.model.ir_version}
        content: bytes = helper.make_model(graph, **own).SerializeToString()
        return content


class SplitModel(NamedTuple):
    """A model split into pieces in execution order; `constants` are weights that pieces read."""

    pieces: Sequence[CustomPiece | StandardPiece]
    constants: Mapping[str, Array]
    outputs: Sequence[str]


def split_model(path: str, operators: Operators) -> SplitModel | None:
    """Split a model into pieces; None if a custom operator is in a branch or a loop."""
    model = inline_functions(onnx.load(path))
    graph, versions = model.graph, versions_of(model.opset_import)
    inner = (n for node in graph.node for n in itertools.islice(with_inner_nodes([node]), 1, None))
    if any(find_operator(node, operators, versions) for node in inner):
        return None
    weights = {tensor.name: tensor for tensor in graph.initializer}
    outputs = [value.name for value in graph.output]
    made = {value.name for value in graph.input} - weights.keys()
    uses = [(node, find_operator(node, operators, versions)) for node in graph.node]
    pieces: list[CustomPiece | StandardPiece] = []
    end = 0
    for is_custom, group in itertools.groupby(uses, key=lambda pair: pair[1] is not None):
        run = list(group)
        end += len(run)
        nodes = [node for node, _ in run]
        results = {name for node in nodes for name in node.output if name}
        if is_custom:
            pieces += [CustomPiece(node, use) for node, use in run if use]
        else:
            later = _list_read(graph.node[end:]) | set(outputs)
            inputs = sorted(_list_read(nodes) & made)
            pieces.append(StandardPiece(model, nodes, inputs, sorted(results & later)))
        made |= results
    read = {*outputs, *(name for node, use in uses if use for name in node.input)}
    constants = {name: numpy_helper.to_array(weights[name]) for name in weights if name in read}
    return SplitModel(pieces, constants, outputs)


def _list_read(nodes: Iterable[NodeProto]) -> set[str]:
    return {name for node in nodes for name in names_read(node)}
