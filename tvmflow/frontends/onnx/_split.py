"""A model in pieces: the nodes that a recipe's own operators implement, and what is between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, inliner, numpy_helper

from tvmflow.frontends.onnx._own_operators import UsedOperator, find_operator
from tvmflow.frontends.onnx.graph import captured_names, subgraphs, versions_of
from tvmflow.operators.loading import Operators

Array = np.ndarray[Any, Any]


class OwnPiece(NamedTuple):
    """A node of an own operator."""

    node: NodeProto
    use: UsedOperator


class StandardPiece(NamedTuple):
    """Other nodes, in their order.

    Attributes:
        model: The model that they are part of.
        nodes: The nodes.
        inputs: The values that they read and do not compute, without weights.
        outputs: The values that others read, or that the model returns.
    """

    model: ModelProto
    nodes: Sequence[NodeProto]
    inputs: Sequence[str]
    outputs: Sequence[str]

    def make_model(self, feed: Mapping[str, Array]) -> bytes:
        """Return a model of the nodes alone, for inputs of the dtypes of some arrays."""
        inputs = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in feed.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        read = {name for node in self.nodes for name in _list_read(node)}
        weights = [tensor for tensor in self.model.graph.initializer if tensor.name in read]
        graph = helper.make_graph(self.nodes, "piece", inputs, outputs, weights)
        made = helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        content: bytes = made.SerializeToString()
        return content


class SplitModel(NamedTuple):
    """A model in pieces, in the order of their computation.

    Attributes:
        pieces: The pieces.
        constants: The weights that own operators read.
        outputs: The names of the outputs.
    """

    pieces: Sequence[OwnPiece | StandardPiece]
    constants: Mapping[str, Array]
    outputs: Sequence[str]


def split_model(path: str, operators: Operators) -> SplitModel | None:
    """Return a model in pieces; None for one with own operators in a branch or a loop."""
    model = inliner.inline_local_functions(onnx.load(path))
    versions = versions_of(model.opset_import)
    left = [(node, find_operator(node, operators, versions)) for node in model.graph.node]
    if any(_has_inner(node, operators, versions) for node, _ in left):
        return None
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    known = {value.name for value in model.graph.input} | {
        n for node, _ in left for n in node.output
    }
    pieces: list[OwnPiece | StandardPiece] = []
    while left:
        nodes: list[NodeProto] = []
        later: list[tuple[NodeProto, UsedOperator | None]] = []
        open_names: set[str] = set()
        for node, use in left:
            if use or not open_names.isdisjoint(_list_read(node)):
                later.append((node, use))
                open_names.update(node.output)
            else:
                nodes.append(node)
        if nodes:
            made = {name for node in nodes for name in node.output if name}
            read = {name for node in nodes for name in _list_read(node)}
            needed = {name for node, _ in later for name in _list_read(node)} | set(outputs)
            inputs = sorted(name for name in (read & known) - made - weights.keys() if name)
            pieces.append(StandardPiece(model, nodes, inputs, sorted(made & needed)))
        if later:
            # All that is left waits for an own operator, and the first of these for none.
            node, use = later[0]
            assert use is not None
            pieces.append(OwnPiece(node, use))
        left = later[1:]
    read_by_own = {n for piece in pieces if isinstance(piece, OwnPiece) for n in piece.node.input}
    constants = {
        name: numpy_helper.to_array(tensor)
        for name, tensor in weights.items()
        if name in read_by_own or name in outputs
    }
    return SplitModel(pieces, constants, outputs)


def _list_read(node: NodeProto) -> set[str]:
    """Return the names of all values that a node reads, also in its branches; of these, some may be inner ones."""
    return {*node.input} | captured_names(node)


def _has_inner(node: NodeProto, operators: Operators, versions: Mapping[str, int]) -> bool:
    """Return whether a branch or a loop has a node of an own operator."""
    return any(
        find_operator(inner, operators, versions) or _has_inner(inner, operators, versions)
        for graph in subgraphs(node)
        for inner in graph.node
    )
