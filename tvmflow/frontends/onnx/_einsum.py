"""Rewrites Einstein sums of two tensors to matrix products, which have optimized kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tvmflow.frontends.onnx._graph import attributes_of, is_standard, known_values, replace_nodes


def convert_einsums(model: ModelProto) -> ModelProto:
    """Replace Einstein sums of two tensors with static shapes by transposes, reshapes and a matrix product."""
    if not any(node.op_type == "Einsum" for node in model.graph.node):
        return model
    shapes = known_values(model).shapes
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        product = _find_product(node, shapes)
        nodes += [node] if product is None else _Converter(model, node, *product).convert()
    replace_nodes(model, nodes)
    return model


class _Product(NamedTuple):
    """The roles of the labels in an Einstein sum of two tensors, each in the order of the result.

    Attributes:
        left: The labels of the left tensor.
        right: Those of the right tensor.
        result: Those of the result.
        batch: Labels of both tensors and the result.
        rows: Labels of the left tensor and the result.
        columns: Labels of the right tensor and the result.
        summed: Labels of both tensors alone.
    """

    left: str
    right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str

    @classmethod
    def parse(cls, equation: str) -> _Product | None:
        """Return the roles; None if the sum is no matrix product, such as one with a diagonal or an ellipsis."""
        operands, arrow, result = equation.replace(" ", "").partition("->")
        left, _, right = operands.partition(",")
        texts = (left, right, result or "a")
        if not arrow or not all(t.isalpha() and len(set(t)) == len(t) for t in texts):
            return None
        batch = "".join(label for label in result if label in left and label in right)
        rows = "".join(label for label in result if label in left and label not in batch)
        columns = "".join(label for label in result if label in right and label not in batch)
        summed = "".join(label for label in left if label not in result)
        if set(left) != set(batch + rows + summed) or set(right) != set(batch + columns + summed):
            return None
        return cls(left, right, result, batch, rows, columns, summed)


def _find_product(
    node: NodeProto, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[_Product, dict[str, int]] | None:
    """Return the roles and the lengths of a node's labels; None for other nodes, sums and unknown shapes."""
    if node.op_type != "Einsum" or not is_standard(node) or len(node.input) != 2:
        return None
    product = _Product.parse(attributes_of(node)["equation"])
    if product is None or not all(name in shapes for name in node.input):
        return None
    sizes: dict[str, int] = {}
    for labels, name in zip((product.left, product.right), node.input, strict=True):
        # ONNX broadcasts an axis of length 1
        if len(labels) != len(shapes[name]) or any(
            sizes.setdefault(label, extent) != extent
            for label, extent in zip(labels, shapes[name], strict=True)
        ):
            return None
    return product, sizes


class _Converter:
    """Makes the nodes for one Einstein sum."""

    def __init__(
        self, model: ModelProto, node: NodeProto, product: _Product, sizes: Mapping[str, int]
    ) -> None:
        self._model = model
        self._node = node
        self._product = product
        self._sizes = sizes
        self._nodes: list[NodeProto] = []

    def convert(self) -> list[NodeProto]:
        """Return the nodes; the last one has the name and the output of the sum."""
        product = self._product
        groups = (product.rows, product.summed)
        left = self._arrange(self._node.input[0], product.left, groups)
        groups = (product.summed, product.columns)
        right = self._arrange(self._node.input[1], product.right, groups)
        value = self._add("MatMul", [left, right])
        order = product.batch + product.rows + product.columns
        if len(product.rows) != 1 or len(product.columns) != 1:
            value = self._reshape(value, [self._sizes[label] for label in order])
        self._transpose(value, order, product.result)
        self._nodes[-1].name = self._node.name
        self._nodes[-1].output[0] = self._node.output[0]
        return self._nodes

    def _arrange(self, value: str, labels: str, groups: tuple[str, str]) -> str:
        """Add what gives a tensor the axes of the batch, and one axis for each of two groups of labels."""
        batch = self._product.batch
        value = self._transpose(value, labels, batch + "".join(groups))
        if all(len(group) == 1 for group in groups):
            return value
        lengths = [math.prod(self._sizes[label] for label in group) for group in groups]
        return self._reshape(value, [*(self._sizes[label] for label in batch), *lengths])

    def _transpose(self, value: str, labels: str, order: str) -> str:
        if labels == order:
            return value
        axes = [labels.index(label) for label in order]
        return self._add("Transpose", [value], perm=axes)

    def _reshape(self, value: str, shape: Sequence[int]) -> str:
        name = f"{self._name()}/shape"
        array = np.array(shape, np.int64)
        self._model.graph.initializer.append(numpy_helper.from_array(array, name))
        return self._add("Reshape", [value, name])

    def _add(self, operator: str, inputs: Sequence[str], **attributes: Sequence[int]) -> str:
        node = helper.make_node(operator, inputs, [self._name()], **attributes)
        node.name = node.output[0]
        self._nodes.append(node)
        return str(node.output[0])

    def _name(self) -> str:
        return f"{self._node.output[0]}/einsum/{len(self._nodes)}"
