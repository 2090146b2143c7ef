"""The nodes that replace one node of an ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import NodeProto, helper, numpy_helper


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

    def constant(self, array: Any, output: str = "") -> str:
        """Add a constant."""
        tensor = numpy_helper.from_array(np.asarray(array))
        return self.add("Constant", output=output, value=tensor)
