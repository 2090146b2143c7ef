"""Passes that simplify an ONNX graph: they evaluate what is constant, and remove what no output needs."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._graph import (
    KnownValues,
    attributes_of,
    captured_names,
    known_values,
    opset_of,
    replace_nodes,
)
from tvmflow.frontends.onnx._operators import MISCOMPUTED

_log = logging.getLogger(__name__)

# Operators that are not evaluated: random ones, and those with the real work of a model.
_NOT_FOLDED: Final = frozenset(
    "Bernoulli Conv ConvTranspose Gemm If Loop MatMul Multinomial RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike Scan".split()
)
_MAX_FOLDED_ELEMENTS: Final = 1 << 23


def infer_shapes(model: ModelProto) -> ModelProto:
    """Infer shapes and types of all values."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:
        # TVM infers shapes itself, and may accept a graph that this inference rejects.
        _log.debug("ONNX cannot infer shapes: %s", error)
        return model


def fold_shapes(model: ModelProto) -> ModelProto:
    """Replace `Shape` and `Size` of a tensor with a known shape by constants."""
    shapes = known_values(model).shapes
    kept = []
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape = shapes[node.input[0]]
        attributes = attributes_of(node)
        if node.op_type == "Shape":
            part = shape[attributes.get("start", 0) : attributes.get("end", len(shape))]
            value = np.asarray(part, np.int64)
        else:
            value = np.asarray(np.prod(shape, dtype=np.int64), np.int64)
        model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    replace_nodes(model, kept)
    return model


def fold_constants(model: ModelProto) -> ModelProto:
    """Evaluate nodes whose inputs are all constant, with ONNX's reference evaluator."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = known_values(model).shapes
    kept = []
    for node in model.graph.node:
        is_large = any(
            math.prod(shapes.get(name, ())) > _MAX_FOLDED_ELEMENTS for name in node.output
        )
        results = None if is_large else _evaluate(model, node, constants)
        if results is None:
            kept.append(node)
            continue
        for name, array in results.items():
            tensor = numpy_helper.from_array(array, name)
            constants[name] = tensor
            model.graph.initializer.append(tensor)
    replace_nodes(model, kept)
    return model


def _evaluate(
    model: ModelProto, node: NodeProto, constants: Mapping[str, TensorProto]
) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return the node's outputs by name, or None when it cannot or should not be folded."""
    inputs = [name for name in node.input if name]
    has_body = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)
    if node.op_type in _NOT_FOLDED or has_body or any(name not in constants for name in inputs):
        return None
    outputs = [name for name in node.output if name]
    graph = helper.make_graph(
        [node],
        "fold",
        [],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [constants[name] for name in dict.fromkeys(inputs)],
    )
    arrays = _run(helper.make_model(graph, opset_imports=list(model.opset_import)))
    if not all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    if not arrays or any(np.asarray(array).size > _MAX_FOLDED_ELEMENTS for array in arrays):
        return None
    return {name: np.asarray(array) for name, array in zip(outputs, arrays, strict=True)}


def _run(model: ModelProto) -> list[Any]:
    """Return the outputs of a model without inputs, or nothing when an operator is not supported."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(ReferenceEvaluator(model).run(None, {}))
    except Exception:
        # The evaluator raises many kinds of errors for operators that it lacks.
        return []


def bypass_copies(model: ModelProto) -> ModelProto:
    """Remove nodes that only copy a tensor, except where they give a graph output its name."""
    outputs = {value.name for value in model.graph.output}
    known = known_values(model)
    sources: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = sources.get(name, name)
        if _is_copy(node, known) and node.output[0] not in outputs:
            sources[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    replace_nodes(model, kept)
    return model


def _is_copy(node: NodeProto, known: KnownValues) -> bool:
    # Dropout does nothing in inference.
    is_idle = node.op_type == "Dropout" and not MISCOMPUTED["Dropout"](node, known)
    return is_idle or bool(node.op_type == "Identity")


def drop_unused_outputs(model: ModelProto) -> ModelProto:
    """Remove optional outputs, such as masks and statistics, that no node reads.

    TVM would compute them, or fail to.
    """
    used = {value.name for value in model.graph.output}
    for node in model.graph.node:
        used.update(node.input)
        for attribute in node.attribute:
            used |= captured_names(attribute)
    for node in model.graph.node:
        while (
            len(node.output) > 1
            and node.output[-1] not in used
            and _is_last_output_optional(model, node)
        ):
            del node.output[-1]
    return model


def _is_last_output_optional(model: ModelProto, node: NodeProto) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(model), node.domain)
    except Exception:
        # ONNX does not know the operator.
        return False
    last = len(node.output) - 1
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return last < len(schema.outputs) and schema.outputs[last].option == optional


def drop_dead_nodes(model: ModelProto) -> ModelProto:
    """Remove nodes and weights that no output needs."""
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(node)
        needed.update(node.input)
        for attribute in node.attribute:
            needed.update(captured_names(attribute))
    replace_nodes(model, list(reversed(kept)))
    weights = {t.name: t for t in model.graph.initializer if t.name in needed}
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights.values())
    return model
