"""Conversion of an MXNet symbol to ONNX, and its import."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, limit_lines, names_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import TensorSpec
from tvmflow.custom_operators.loading import Operators
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends._onnx_graph import Graph, Value, import_graph
from tvmflow.frontends.base import DYNAMIC_FIX, LoadedModel
from tvmflow.frontends.frontend import ImportCall, list_inner
from tvmflow.frontends.mxnet import _arithmetic, _arrays, _layers
from tvmflow.frontends.mxnet._checkpoint import (
    CUSTOM,
    DOMAIN,
    Node,
    Symbol,
    Weight,
    count_outputs,
    custom_attributes,
    find_operator,
    label,
    output_name,
    output_names,
)
from tvmflow.frontends.mxnet._op import Converter, Op
from tvmflow.frontends.onnx.custom_nodes import CustomNodes
from tvmflow.frontends.onnx.importer import OWN_FIX, explain_failure

CONVERTERS: Final[Mapping[str, Converter]] = {
    **_arithmetic.CONVERTERS,
    **_arrays.CONVERTERS,
    **_layers.CONVERTERS,
}
"""Operator -> converter; attributes have the defaults of MXNet 1.9."""

_log = logging.getLogger(__name__)

# Operators with a label as second input, which inference ignores.
_LABELLED: Final = frozenset(
    "LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput SVMOutput Softmax "
    "SoftmaxOutput".split()
)
# Operators with gamma as second input, which is 1 with `fix_gamma`, regardless of the checkpoint.
_BATCH_NORMS: Final = frozenset(
    "BatchNorm BatchNorm_v1 CuDNNBatchNorm _contrib_BatchNormWithReLU "
    "_contrib_SyncBatchNorm".split()
)

_MAX_LISTED: Final = 20


def build(
    symbol: Symbol, params: Mapping[str, Weight], call: ImportCall, operators: Operators
) -> LoadedModel:
    """Return the imported model of a symbol; intermediate tensors follow its outputs."""
    output_count = len(symbol.heads)
    symbol = _with_heads(symbol, call.tensors)
    live = _live_nodes(symbol)
    _log.debug("%d of %d nodes are needed in inference", len(live), len(symbol.nodes))
    _check_operators(symbol, live, operators)
    _check_names(symbol, live, params, call.inputs)

    graph = Graph(call.dimensions)
    free = tuple(spec for spec in call.inputs if spec.name not in call.bound)
    variables = {spec.name: graph.input(spec) for spec in free}
    variables |= {name: graph.constant(array) for name, array in call.bound.items()}
    for node in (symbol.nodes[index] for index in live):
        if node.op == "null" and node.name not in variables:
            array, place = params[node.name]
            variables[node.name] = graph.constant(array, name=node.name)._replace(place=place)
    names = list(output_names(symbol))
    custom = CustomNodes(operators)
    results = _Conversion(symbol, operators, graph, custom).convert(live, variables)
    # In ONNX, an output cannot have the name of an input.
    outputs = [graph.new_name(name) for name in names]
    model = graph.finish(list(zip(outputs, results, strict=True)))
    loaded = import_graph(model, len(names) - output_count, free, call, custom)
    specs = zip(names, (*loaded.outputs, *loaded.tensors), strict=True)
    named = tuple(spec._replace(name=name) for name, spec in specs)
    return loaded._replace(outputs=named[:output_count], tensors=named[output_count:])


class _Conversion(NamedTuple):
    """The conversion of a symbol to an ONNX graph."""

    symbol: Symbol
    operators: Operators
    graph: Graph
    custom: CustomNodes

    def convert(self, live: Sequence[int], variables: Mapping[str, Value]) -> list[Value]:
        values: dict[int, list[Value]] = {}
        for index in live:
            node = self.symbol.nodes[index]
            is_variable = node.op == "null"
            values[index] = (
                [variables[node.name]] if is_variable else self._convert(index, node, values)
            )
        return [self._pick(values, index, output) for index, output in self.symbol.heads]

    def _convert(
        self, index: int, node: Node, values: Mapping[int, Sequence[Value]]
    ) -> list[Value]:
        inputs = [
            self._pick(values, source, output) if _reads(node, operand) else None
            for operand, (source, output) in enumerate(node.inputs)
        ]
        names = [self.symbol.nodes[source].name for source, _ in node.inputs]
        self.graph.prefix = node.name
        op = Op(node, inputs, names, self.graph)
        operator = find_operator(node, self.operators)
        if operator is None:
            return _convert(node, op)
        for position in filter(op.reads, range(len(inputs))):
            op.shape(position)
        count = count_outputs(self.symbol, index)
        kind, operands = (DOMAIN, operator.name), list(filter(None, inputs))
        try:
            return self.graph.add_custom(
                kind, count, operands, custom_attributes(node.attrs), self.custom
            )
        except ValueError as error:
            op.refuse(str(error))

    def _pick(self, values: Mapping[int, Sequence[Value]], index: int, output: int) -> Value:
        if output >= len(values[index]):
            node = self.symbol.nodes[index]
            raise ImportFailed(
                f"{excerpt(node.op)} {quoted(node.name)} cannot be imported: its output {output} is not supported"
            )
        return values[index][output]


def _with_heads(symbol: Symbol, tensors: Sequence[str]) -> Symbol:
    """Add intermediate tensors, given by their names in MXNet's `get_internals`, to a symbol's outputs."""
    internals = _find_internals(symbol)
    fix = "use the names of MXNet's `symbol.get_internals().list_outputs()`: NODE_output"
    added = list_inner(tensors, output_names(symbol), internals, fix)
    return symbol._replace(heads=(*symbol.heads, *map(internals.__getitem__, added)))


def _find_internals(symbol: Symbol) -> dict[str, tuple[int, int]]:
    """Return name -> (node, output) of each tensor that a node reads; a model can be split there."""
    read = [entry for node in symbol.nodes for entry in node.inputs]
    return {
        output_name(symbol.nodes[index], output): (index, output)
        for index, output in read
        if symbol.nodes[index].op != "null"
    }


def list_tensors(symbol: Symbol) -> dict[str, str]:
    """Return intermediate tensor -> node name, in the order of inference."""
    live, outputs = set(_live_nodes(symbol)), set(output_names(symbol))
    entries = sorted((entry, name) for name, entry in _find_internals(symbol).items())
    return {
        name: symbol.nodes[index].name
        for (index, _), name in entries
        if index in live and name not in outputs
    }


def _reads(node: Node, position: int) -> bool:
    fixes_gamma = node.attrs.get("fix_gamma", "True").lower() in ("true", "1")
    is_unread = node.op in _LABELLED or (node.op in _BATCH_NORMS and fixes_gamma)
    return position != 1 or not is_unread


def _live_nodes(symbol: Symbol) -> list[int]:
    """Return the indices of nodes that the outputs need in inference, in topological order."""
    live: set[int] = set()
    pending = [index for index, _ in symbol.heads]
    while pending:
        index = pending.pop()
        if index in live:
            continue
        live.add(index)
        node = symbol.nodes[index]
        pending += [source for i, (source, _) in enumerate(node.inputs) if _reads(node, i)]
    return sorted(live)


def _check_operators(symbol: Symbol, live: Sequence[int], operators: Operators) -> None:
    unknown: dict[str, list[str]] = {}
    for index in live:
        node = symbol.nodes[index]
        is_known = node.op == "null" or node.op in CONVERTERS or find_operator(node, operators)
        if not is_known:
            unknown.setdefault(label(node), []).append(quoted(node.name))
    if unknown:
        lines = [f"{excerpt(op)}: node {names_text(nodes, 5)}" for op, nodes in unknown.items()]
        listed = "".join(f"\n  {line}" for line in limit_lines(lines, _MAX_LISTED))
        fix = "end the model before them (`symbol.get_internals()[NAME + '_output']`), and save it again"
        if any(name.startswith(CUSTOM) for name in unknown):
            fix += "; or " + OWN_FIX.format(name="OP_TYPE", domain=f'"{DOMAIN}"')
        text = f"the model has operators that tvmflow does not support:{listed}"
        raise ImportFailed(text, fix=fix)


def _check_names(
    symbol: Symbol, live: Sequence[int], params: Mapping[str, object], inputs: Sequence[TensorSpec]
) -> None:
    """Check that each variable is an input or a parameter, and that each recipe input is a variable."""
    variables = [symbol.nodes[i].name for i in live if symbol.nodes[i].op == "null"]
    all_variables = {node.name for node in symbol.nodes if node.op == "null"}
    recipe_inputs = {spec.name for spec in inputs}
    free = [name for name in dict.fromkeys(variables) if name not in params]
    problems = []
    for name in sorted(recipe_inputs - set(variables)):
        hint = did_you_mean(name, free or variables)
        if name in all_variables:
            problems.append(
                f"the input {quoted(name)} of the recipe is not used in inference: remove it"
            )
        else:
            problems.append(f"the model has no input {quoted(name)}{hint}")
    for name in free[:_MAX_LISTED]:
        if name not in recipe_inputs:
            hint = did_you_mean(name, [*params, *recipe_inputs])
            problems.append(
                f"{quoted(name)} is neither an input of the recipe nor in the checkpoint{hint}"
            )
    if problems:
        raise ImportFailed(
            "; ".join(problems[:_MAX_LISTED]),
            fix=f"list the inputs of the model with their shapes under `inputs`: {names_text(free) or 'none'}",
        )


def _convert(node: Node, op: Op) -> list[Value]:
    try:
        converted = CONVERTERS[node.op](op)
        op.check_all_read()
        return converted if isinstance(converted, list) else [converted]
    except ImportFailed:
        raise
    except DynamicShapeProblem as error:
        op.refuse(str(error), fix=DYNAMIC_FIX)
    except Exception as error:
        # ONNX, TVM and NumPy raise many kinds of errors for wrong shapes, types or values.
        reason = explain_failure(error, op.shapes_text())
        op.refuse(reason, fix="correct the model, or end it before this operator")
