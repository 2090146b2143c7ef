"""A network that grows operator by operator, and knows the shape of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from tests.support.onnx_models import model, value

_OPSET = 17
_Choice = TypeVar("_Choice")


class Network:
    """A random network under construction.

    Attributes:
        read: The values that some operator reads.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, np.ndarray[Any, Any]] = {}
        self._types: dict[str, onnx.TypeProto] = {}
        self._inputs: list[str] = []
        self.read: set[str] = set()

    # ------------------------------------------------------------ random choices

    def choice(self, options: Sequence[_Choice]) -> _Choice:
        """Return one of some options."""
        return options[int(self._random.integers(len(options)))]

    def integer(self, low: int, high: int) -> int:
        """Return a number of [low, high]."""
        return int(self._random.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self._random.random() < probability)

    def channels(self) -> int:
        """Return a number of channels: ones, primes and multiples of vectors."""
        return self.choice((1, 2, 3, 5, 6, 8, 12, 13, 16, 17, 24, 32, 33, 40, 48, 64))

    def permutation(self, count: int) -> list[int]:
        """Return a random order of the numbers below `count`."""
        return [int(n) for n in self._random.permutation(count)]

    # ------------------------------------------------------------ values

    @property
    def inputs(self) -> Sequence[str]:
        """The names of the inputs."""
        return self._inputs

    def shape(self, name: str) -> list[int]:
        """Return the shape of a value."""
        return [dim.dim_value for dim in self._types[name].tensor_type.shape.dim]

    def size(self, name: str) -> int:
        """Return the number of elements of a value."""
        return int(np.prod(self.shape(name)))

    def input(self, *shape: int) -> str:
        """Add an input of float32."""
        name = f"x{len(self._inputs)}"
        self._inputs.append(name)
        self._types[name] = value(name, shape).type
        return name

    def constant(self, array: Any, dtype: str = "int64") -> str:
        """Add a constant."""
        name = f"w{len(self._weights)}"
        self._weights[name] = np.asarray(array, dtype)
        tensor = numpy_helper.from_array(self._weights[name], name)
        self._types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        return name

    def weight(self, *shape: int, terms: int = 1, mean: float = 0.0) -> str:
        """Add weights whose products with `terms` normally distributed numbers have a sum of about 1."""
        values = self._random.standard_normal(shape) / np.sqrt(max(terms, 1)) + mean
        return self.constant(values, "float32")

    # ------------------------------------------------------------ operators

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one result, and return its name."""
        return self.add_many(operator, 1, *inputs, **attributes)[0]

    def add_many(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add an operator with some results, and return their names."""
        index = len(self._nodes)
        names = [f"v{index}_{n}" if n else f"v{index}" for n in range(count)]
        node = helper.make_node(operator, list(inputs), names, **attributes)
        types = {name: self._types[name] for name in inputs if name}
        constants = {
            name: numpy_helper.from_array(self._weights[name], name)
            for name in types
            if name in self._weights
        }
        schema = onnx.defs.get_schema(operator, _OPSET, "")
        opset = [helper.make_opsetid("", _OPSET)]
        inferred = shape_inference.infer_node_outputs(schema, node, types, constants, None, opset)
        self._types.update({name: inferred[name] for name in names})
        self._nodes.append(node)
        self.read.update(inputs)
        return names

    def model(self, outputs: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, Any]]:
        """Return the network with some values as its outputs, and inputs for it."""
        made = model(
            self._nodes,
            [value(name, self.shape(name)) for name in self._inputs],
            [value(name, self.shape(name)) for name in outputs if name not in self._inputs],
            self._weights,
            opset=_OPSET,
        )
        onnx.checker.check_model(made)
        feed = {
            name: self._random.standard_normal(self.shape(name)).astype("float32")
            for name in self._inputs
        }
        return made, feed


Operator = Callable[[Network, str], str | None]
"""Adds an operator, or a few, behind a value; returns the result, or None where the value does not fit."""
Attributes = Mapping[str, Any]
