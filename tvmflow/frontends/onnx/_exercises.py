"""Observes which branches inputs take: sides of activations, branches of Where and If.

A model gets one number more for each branch, the share of elements that take it, so that ONNX Runtime keeps
no tensor for longer.
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

_NEGATIVE, _POSITIVE = "negative inputs", "positive inputs"
# The operators with a bend at 0.
_BENT_AT_ZERO: Final = "Abs Celu Elu LeakyRelu PRelu Relu Selu".split()
_BOUNDS: Final = {**dict.fromkeys(_BENT_AT_ZERO, (0.0, 0.0)), "HardSwish": (-3.0, 3.0)}
_SHAPES_ALONE: Final = frozenset({"Shape", "Size"})
# ONNX Runtime compares these.
_COMPARED: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_PREFIX: Final = "tvmflow.exercises"


class ObservedModel(NamedTuple):
    """A model whose last outputs are shares, and the nodes and branches that they are of."""

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
    """Return a model that also returns which branches its inputs take.

    Nodes in the branches of If, and in loops, are not observed. The skeleton is the same model without the data of
    large weights: its types are soon inferred.
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
    """Return the values that follow from values of the inputs, not from their shapes or constants alone."""
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
        if node.op_type in ("If", "Where"):
            if node.input[0] in reached:
                share = self._mean(node.input[0])
                yield "true", share
                yield "false", self._complement(share)
            return
        value = node.input[0] if node.input else ""
        if node.op_type in ("Max", "Min"):
            if len(node.input) == 2 and any(name not in reached for name in node.input):
                value, bound = sorted(node.input, key=lambda name: name not in reached)
                yield from self._compare(value, reached, {"Less": bound, "Greater": bound})
            return
        if node.op_type == "Clip":
            yield from self._observe_clip(node, reached)
            return
        bounds = self._bounds(node)
        if bounds is None or self._types.get(value) not in _COMPARED:
            return
        low, high = (self._constant(bound, self._types[value]) for bound in bounds)
        yield from self._compare(value, reached, {"Less": low, "Greater": high}, bounds)

    def _bounds(self, node: NodeProto) -> tuple[float, float] | None:
        """Return below and above which value an operator bends; None for others."""
        attributes = attributes_of(node)
        if node.op_type == "ThresholdedRelu":
            return (attributes.get("alpha", 1.0),) * 2
        if node.op_type == "HardSigmoid":
            alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
            return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else None
        return _BOUNDS.get(node.op_type)

    def _observe_clip(self, node: NodeProto, reached: set[str]) -> Iterator[tuple[str, str]]:
        attributes = attributes_of(node)
        bounds = {}
        for position, (name, operator) in enumerate((("min", "Less"), ("max", "Greater"))):
            element_type = self._types.get(node.input[0])
            if position + 1 < len(node.input) and node.input[position + 1]:
                bounds[operator] = node.input[position + 1]
            elif name in attributes and element_type is not None:
                bounds[operator] = self._constant(attributes[name], element_type)
        yield from self._compare(node.input[0], reached, bounds)

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
        names = {"Less": "inputs below its minimum", "Greater": "inputs above its maximum"}
        if set(bounds) == {"Less", "Greater"} and len({*bounds.values()}) == 1:
            names = {"Less": "inputs below its bound", "Greater": "inputs above its bound"}
        if known:
            names = {"Less": f"inputs below {known[0]:g}", "Greater": f"inputs above {known[1]:g}"}
        if known == (0.0, 0.0):
            names = {"Less": _NEGATIVE, "Greater": _POSITIVE}
        shares = {
            operator: self._mean(self._add(operator, value, bound))
            for operator, bound in bounds.items()
        }
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
