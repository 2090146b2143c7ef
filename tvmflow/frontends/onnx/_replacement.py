"""The nodes that replace one node of an ONNX graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import NodeProto, helper, numpy_helper

# Reductions take their axes as an input from here on.
_AXES_INPUT_OPSET: Final = 18


class Replacement:
    """The nodes that replace one node; the names of their values begin with that of its first output."""

    def __init__(self, node: NodeProto) -> None:
        self._prefix = node.output[0]
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def add_all(self, operator: str, *inputs: str, results: int) -> list[str]:
        """Add a node with several results, and return their names."""
        names = [f"{self._prefix}.{len(self.nodes)}.{n}" for n in range(results)]
        self.nodes.append(helper.make_node(operator, inputs, names))
        return names

    def reduce(self, operator: str, value: str, axes: Sequence[int], opset: int) -> str:
        """Add a reduction over some axes, which become 1 long."""
        if opset < _AXES_INPUT_OPSET:
            return self.add(operator, value, axes=list(axes), keepdims=1)
        return self.add(operator, value, self.constant(np.array(axes, np.int64)), keepdims=1)

    def constant(self, array: Any, output: str = "") -> str:
        """Add a constant."""
        tensor = numpy_helper.from_array(np.asarray(array))
        return self.add("Constant", output=output, value=tensor)
