"""The numpy functions of a recipe's operators, as operators of ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import NodeProto, helper
from onnx.reference.op_run import OpRun

from tvmflow.core.errors import StageError
from tvmflow.frontends.onnx._large_tensors import read_without_large_tensors
from tvmflow.frontends.onnx._own_operators import (
    UsedOperator,
    describe_node,
    find_operator,
)
from tvmflow.frontends.onnx.graph import all_nodes, node_name, versions_of
from tvmflow.operators.definition import ADVICE, Tensor
from tvmflow.operators.loading import Operators

_OPSET: Final = 17

Array = np.ndarray[Any, Any]


def list_used_operators(path: str, operators: Operators) -> list[UsedOperator]:
    """Return the operators of the recipe that a model calls.

    Raises:
        StageError: when one has no reference.
    """
    model = read_without_large_tensors(Path(path))
    versions = versions_of(model.opset_import)
    used: dict[UsedOperator, NodeProto] = {}
    for node in all_nodes(model):
        if use := find_operator(node, operators, versions):
            used.setdefault(use, node)
    for use, node in used.items():
        if use.operator.reference is None:
            raise StageError(
                f"{use.operator.where}: the operator {use.operator} (node {node_name(node)}) has no reference, and ONNX Runtime lacks it",
                fix=f"give it one: `@operator(…, reference=FUNCTION)`, a function with numpy; {ADVICE}",
            )
    return list(used)


class OwnReferences:
    """The numpy functions of operators, with a record of the first call of each node.

    Args:
        used: The operators.
        operators: Those of the recipe.
        calls: The folder for the records.
    """

    def __init__(self, used: Sequence[UsedOperator], operators: Operators, calls: Path) -> None:
        self.used, self._operators, self._calls = used, operators, calls
        self._recorded: list[NodeProto] = []

    def call(
        self, use: UsedOperator, node: NodeProto, arrays: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Return the outputs of a node.

        Raises:
            StageError: when its function raises, or returns too few.
        """
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

    def make_classes(self) -> list[type[OpRun]]:
        """Return a class for each operator, by which ONNX's reference evaluator knows it."""
        return [self._make_class(use) for use in self.used]

    def _make_class(self, use: UsedOperator) -> type[OpRun]:
        def load_attributes(node: Any) -> None:
            # The attributes of a node must not take the place of the evaluator's own.
            node.has_linked_attribute, node.attributes_names_ = False, set()

        def run(node: Any, *arrays: Array | None, **_: Any) -> tuple[Array, ...]:
            return self.call(use, node.onnx_node, arrays)

        # Without a schema of its own, the evaluator would take that of a standard operator of the same name.
        body: dict[str, Any] = {
            "op_domain": use.operator.domain,
            "op_schema": None,
            "_load_attributes": load_attributes,
        }
        body |= {"run": run, "_run": run}
        return type(use.operator.name, (OpRun,), body)


def _record(
    path: Path,
    node: NodeProto,
    use: UsedOperator,
    inputs: Sequence[Array | None],
    outputs: Sequence[Array],
) -> None:
    """Write a call as a model of its node alone, with the arrays beside it."""
    arrays: dict[str, Array] = {}
    sides = []
    for names, values in ((node.input, inputs), (node.output, outputs)):
        side = {n: v for n, v in zip(names, values, strict=False) if n and v is not None}
        arrays |= side
        sides.append(
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for n, v in side.items()
            ]
        )
    graph = helper.make_graph([node], use.operator.name, *sides)
    versions = {"": _OPSET, node.domain: use.version}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets)
    path.write_bytes(model.SerializeToString())
    np.savez(path.with_suffix(".npz"), **arrays)
