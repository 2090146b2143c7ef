"""Observes which branches inputs take: sides of activations, branches of Where and If.

A model gets an output for each branch, the share of elements that take it. So ONNX Runtime does not keep tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends._reference_process import ObservedNode
from tvmflow.frontends.onnx._inlining import inline_functions
from tvmflow.frontends.onnx.graph import attributes_of, element_types, is_standard, names_read

# The operators with a bend at 0.
_BENT_AT_ZERO: Final = "Abs Celu Elu LeakyRelu PRelu Relu Selu".split()
_BOUNDS: Final = {**dict.fromkeys(_BENT_AT_ZERO, (0.0, 0.0)), "HardSwish": (-3.0, 3.0)}
_SHAPES_ALONE: Final = frozenset({"Shape", "Size"})
# ONNX Runtime compares these.
_COMPARED: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_PREFIX: Final = "tvmflow.exercises"


class ObservedModel(NamedTuple):
    """A model whose last outputs are shares, and their nodes and branches."""

    model: ModelProto
    nodes: Sequence[tuple[str, str, Mapping[str, str]]]

    def read(self, results: Mapping[str, Any]) -> list[ObservedNode]:
        """Return the shares of each node, given the outputs by name."""
        return [
            ObservedNode(label, operator, {b: float(results[name]) for b, name in branches.items()})
            for label, operator, branches in self.nodes
        ]

    @property
    def outputs(self) -> list[str]:
        return [name for _, _, branches in self.nodes for name in branches.values()]


def observe_model(model: ModelProto, skeleton: ModelProto) -> ObservedModel:
    """Return a model that also returns which branches its inputs take, except of nodes in subgraphs.

    The skeleton is the same model without the data of large weights, in which types are inferred faster.
    """
    inlined = inline_functions(model)
    typed = inline_functions(skeleton)
    # values of unknown type are not observed
    with contextlib.suppress(Exception):
        typed = onnx.shape_inference.infer_shapes(typed)
    observer = _Observer(inlined, element_types(typed))
    reached = _list_dependent(inlined)
    nodes = []
    for node in list(inlined.graph.node):
        if not is_standard(node) or not node.output:
            continue
        branches = dict(observer.observe(node, reached))
        if branches:
            label = node.name or str(node.output[0])
            nodes.append((label, str(node.op_type), branches))
    return ObservedModel(inlined, nodes)


def _list_dependent(model: ModelProto) -> set[str]:
    """Return the values that depend on the inputs' values, and not only on their shapes or constants."""
    weights = {tensor.name for tensor in model.graph.initializer}
    dependent = {value.name for value in model.graph.input} - weights
    for node in model.graph.node:
        if node.op_type in _SHAPES_ALONE and is_standard(node):
            continue
        if not dependent.isdisjoint(names_read(node)):
            dependent.update(filter(None, node.output))
    return dependent


class _Observer:
    def __init__(self, model: ModelProto, types: Mapping[str, int]) -> None:
        self._graph, self._types = model.graph, types
        self._numbers = itertools.count()

    def observe(self, node: NodeProto, reached: set[str]) -> Iterator[tuple[str, str]]:
        """Yield each branch of a node with the output that has its share."""
        value = node.input[0] if node.input else ""
        if node.op_type in ("If", "Where"):
            if value in reached:
                share = self._mean(value)
                yield "true", share
                yield "false", self._complement(share)
        elif node.op_type in ("Max", "Min"):
            if len(node.input) == 2 and any(name not in reached for name in node.input):
                value, bound = sorted(node.input, key=lambda name: name not in reached)
                yield from self._compare(value, reached, {"Less": bound, "Greater": bound})
        elif node.op_type == "Clip":
            yield from self._compare(value, reached, self._clip_bounds(node))
        elif (bounds := self._bounds(node)) and self._types.get(value) in _COMPARED:
            low, high = (self._constant(bound, self._types[value]) for bound in bounds)
            yield from self._compare(value, reached, {"Less": low, "Greater": high}, bounds)

    def _bounds(self, node: NodeProto) -> tuple[float, float] | None:
        """Return the lower and the upper bend of an operator; None for others."""
        attributes = attributes_of(node)
        if node.op_type == "ThresholdedRelu":
            return (attributes.get("alpha", 1.0),) * 2
        if node.op_type == "HardSigmoid":
            alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        return _BOUNDS.get(node.op_type)

    def _clip_bounds(self, node: NodeProto) -> dict[str, str]:
        attributes, element_type = attributes_of(node), self._types.get(node.input[0])
        bounds = {}
        for position, name, operator in ((1, "min", "Less"), (2, "max", "Greater")):
            if position < len(node.input) and node.input[position]:
                bounds[operator] = node.input[position]
            elif name in attributes and element_type is not None:
                bounds[operator] = self._constant(attributes[name], element_type)
        return bounds

    def _compare(
        self,
        value: str,
        reached: set[str],
        bounds: Mapping[str, str],
        known: tuple[float, float] | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Yield the shares of a value beyond its bounds, and between them where these are two."""
        if self._types.get(value) not in _COMPARED or value not in reached:
            return
        low, high = "its minimum", "its maximum"
        if known:
            low, high = f"{known[0]:g}", f"{known[1]:g}"
        elif len(bounds) > len({*bounds.values()}):
            low = high = "its bound"
        names = {"Less": f"inputs below {low}", "Greater": f"inputs above {high}"}
        if known == (0.0, 0.0):
            names = {"Less": "negative inputs", "Greater": "positive inputs"}
        shares = {o: self._mean(self._add(o, value, bound)) for o, bound in bounds.items()}
        for operator, share in shares.items():
            yield names[operator], share
        if len(bounds) == 1:
            [share] = shares.values()
            yield "inputs within its bound", self._complement(share)
        elif len(set(bounds.values())) == 2 and not (known and known[0] == known[1]):
            between = self._complement(self._add("Add", *shares.values()))
            yield "inputs between its bounds", between

    def _mean(self, condition: str) -> str:
        """Return the output with the share of true elements."""
        cast = self._add("Cast", condition, to=TensorProto.FLOAT)
        return self._return(self._add("ReduceMean", cast, keepdims=0))

    def _complement(self, share: str) -> str:
        one = self._constant(1.0, TensorProto.FLOAT)
        return self._return(self._add("Sub", one, share))

    def _constant(self, value: float, element_type: int) -> str:
        array = np.asarray(value, helper.tensor_dtype_to_np_dtype(element_type))
        return self._add("Constant", value=numpy_helper.from_array(array))

    def _add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{_PREFIX}.{next(self._numbers)}"
        self._graph.node.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def _return(self, name: str) -> str:
        if not any(value.name == name for value in self._graph.output):
            self._graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
        return name
