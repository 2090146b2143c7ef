"""Observes which branches a model's inputs exercise: sides of activations, branches of Where and If.

For each branch, the model gets an output: the share of elements that take it. Only these shares are returned,
so ONNX Runtime need not keep whole tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from tvmflow.frontends._reference_process import ObservedNode
from tvmflow.frontends.onnx._inlining import inline_functions
from tvmflow.frontends.onnx.graph import Replacement, element_types, is_standard, names_read

# Piecewise functions whose slope changes at 0.
_BENT_AT_ZERO: Final = "Abs Celu Elu LeakyRelu PRelu Relu Selu".split()
_BENDS: Final = {**dict.fromkeys(_BENT_AT_ZERO, (0.0, 0.0)), "HardSwish": (-3.0, 3.0)}
_SHAPES_ALONE: Final = frozenset({"Shape", "Size"})
# The element types that ONNX Runtime can compare.
_COMPARED: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class ObservedModel(NamedTuple):
    """A model whose last outputs are the shares, and the nodes and branches that these belong to."""

    model: ModelProto
    nodes: Sequence[tuple[str, str, Mapping[str, str]]]

    def read(self, results: Mapping[str, Any]) -> list[ObservedNode]:
        return [
            ObservedNode(label, operator, {b: float(results[name]) for b, name in branches.items()})
            for label, operator, branches in self.nodes
        ]

    @property
    def outputs(self) -> list[str]:
        return [name for _, _, branches in self.nodes for name in branches.values()]


def observe_model(model: ModelProto, skeleton: ModelProto) -> ObservedModel:
    """Return a model that also returns the share of each branch, except for nodes in subgraphs.

    The skeleton is the same model without the data of large weights; types are inferred faster in it.
    """
    inlined = inline_functions(model)
    typed = inline_functions(skeleton)
    # Values of unknown type are not observed.
    with contextlib.suppress(Exception):
        typed = onnx.shape_inference.infer_shapes(typed)
    types, reached = element_types(typed), _list_dependent(inlined)
    nodes = []
    for node in list(inlined.graph.node):
        if not is_standard(node) or not node.output:
            continue
        observer = _Observer(node, types, reached)
        branches = dict(observer.observe())
        if branches:
            nodes.append((node.name or str(node.output[0]), str(node.op_type), branches))
            inlined.graph.node.extend(observer.nodes)
            inlined.graph.output.extend(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
                for name in branches.values()
            )
    return ObservedModel(inlined, nodes)


def _list_dependent(model: ModelProto) -> set[str]:
    """Return the values that depend on the contents of inputs, and not only on shapes or constants."""
    weights = {tensor.name for tensor in model.graph.initializer}
    dependent = {value.name for value in model.graph.input} - weights
    for node in model.graph.node:
        if node.op_type in _SHAPES_ALONE and is_standard(node):
            continue
        if not dependent.isdisjoint(names_read(node)):
            dependent.update(filter(None, node.output))
    return dependent


class _Observer(Replacement):
    """The nodes that compute the shares of a node's branches."""

    def __init__(self, node: NodeProto, types: Mapping[str, int], reached: set[str]) -> None:
        super().__init__(node, ".exercises")
        self._types, self._reached = types, reached

    def observe(self) -> Iterator[tuple[str, str]]:
        """Yield each branch of the node, and the name of the output with its share."""
        value, operator = self.name(0), self.node.op_type
        if operator in ("If", "Where"):
            if value in self._reached:
                share = self._mean(value)
                yield "true", share
                yield "false", self._complement(share)
        elif operator in ("Max", "Min"):
            names = sorted(self.node.input, key=lambda name: name not in self._reached)
            if len(names) == 2 and names[1] not in self._reached:
                yield from self._compare(names[0], {"Less": names[1], "Greater": names[1]})
        elif operator == "Clip":
            yield from self._compare(value, self._clip_bounds())
        elif (bounds := self._bends()) and self._types.get(value) in _COMPARED:
            low, high = (self._number(bound, self._types[value]) for bound in bounds)
            yield from self._compare(value, {"Less": low, "Greater": high}, bounds)

    def _bends(self) -> tuple[float, float] | None:
        """Return the lower and upper input at which an operator's slope changes; None for other operators."""
        attributes = self.attributes
        if self.node.op_type == "ThresholdedRelu":
            return (attributes.get("alpha", 1.0),) * 2
        if self.node.op_type == "HardSigmoid":
            alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        return _BENDS.get(self.node.op_type)

    def _clip_bounds(self) -> dict[str, str]:
        element_type, bounds = self._types.get(self.name(0)), {}
        for position, name, operator in ((1, "min", "Less"), (2, "max", "Greater")):
            if self.name(position):
                bounds[operator] = self.name(position)
            elif name in self.attributes and element_type is not None:
                bounds[operator] = self._number(self.attributes[name], element_type)
        return bounds

    def _compare(
        self, value: str, bounds: Mapping[str, str], known: tuple[float, float] | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield the share of elements below and above the bounds, and between them if the bounds differ."""
        if self._types.get(value) not in _COMPARED or value not in self._reached:
            return
        low, high = "its minimum", "its maximum"
        if known:
            low, high = f"{known[0]:g}", f"{known[1]:g}"
        elif len(bounds) > len({*bounds.values()}):
            low = high = "its bound"
        names = {"Less": f"inputs below {low}", "Greater": f"inputs above {high}"}
        if known == (0.0, 0.0):
            names = {"Less": "negative inputs", "Greater": "positive inputs"}
        shares = {o: self._mean(self.add(o, value, bound)) for o, bound in bounds.items()}
        for operator, share in shares.items():
            yield names[operator], share
        if len(bounds) == 1:
            [share] = shares.values()
            yield "inputs within its bound", self._complement(share)
        elif len(set(bounds.values())) == 2 and not (known and known[0] == known[1]):
            yield "inputs between its bounds", self._complement(self.add("Add", *shares.values()))

    def _mean(self, condition: str) -> str:
        """Add a node for the share of true elements, and return its name."""
        cast = self.add("Cast", condition, to=TensorProto.FLOAT)
        return self.add("ReduceMean", cast, keepdims=0)

    def _complement(self, share: str) -> str:
        return self.add("Sub", self.constant(np.float32(1)), share)

    def _number(self, value: float, element_type: int) -> str:
        return self.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(element_type)))
