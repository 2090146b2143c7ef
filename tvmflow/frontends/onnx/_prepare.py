"""Prepares an ONNX model for TVM's importer, by passes over the ONNX graph.

The importer needs static shapes, constants where an operator requires them, and operators that
it supports. Most of what real models have instead can be rewritten in ONNX's own terms.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final

from onnx import ModelProto, TensorShapeProto, ValueInfoProto

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.onnx._branches import (
    inline_known_branches,
    name_branch_values,
    simplify_branches,
)
from tvmflow.frontends.onnx._conversion import (
    convert_constants_to_initializers,
    convert_opset,
    expand_unsupported_operators,
    inline_functions,
)
from tvmflow.frontends.onnx._einsum import convert_einsums
from tvmflow.frontends.onnx._graph import all_graphs
from tvmflow.frontends.onnx._inputs import ELEMENT_TYPES, ModelInput, find_input_problems
from tvmflow.frontends.onnx._loops import unroll_loops
from tvmflow.frontends.onnx._own_operators import NO_OPERATORS, OwnNodes
from tvmflow.frontends.onnx._rewrites import rewrite_nodes
from tvmflow.frontends.onnx._simplification import (
    bypass_copies,
    drop_dead_nodes,
    drop_unused_outputs,
    fold_constants,
    fold_shapes,
    infer_shapes,
    refuse_large_tensors,
)

_log = logging.getLogger(__name__)

_Pass = Callable[[ModelProto], ModelProto]

_CONVERSIONS: Final[tuple[_Pass, ...]] = (
    inline_functions,
    convert_opset,
    name_branch_values,
    convert_constants_to_initializers,
)
# Each may give the others something to do.
_SIMPLIFICATIONS: Final[tuple[_Pass, ...]] = (
    infer_shapes,
    fold_shapes,
    fold_constants,
    inline_known_branches,
    unroll_loops,
    drop_unused_outputs,
    rewrite_nodes,
    expand_unsupported_operators,
    convert_constants_to_initializers,
    convert_einsums,
    bypass_copies,
    drop_dead_nodes,
)
_MAX_ROUNDS: Final = 16
_MAX_PROBLEMS: Final = 20


def prepare(
    model: ModelProto, inputs: tuple[TensorSpec, ...], own: OwnNodes = NO_OPERATORS
) -> ModelProto:
    """Return the model in the form that TVM's importer needs.

    Args:
        model: A model with all of its data; it is changed.
        inputs: The inputs with their shapes; may be empty when the shapes in the model are static.
        own: The nodes of the recipe's own operators.

    Raises:
        ImportFailed: when inputs do not fit, or the opset is too old.
    """
    _strip_initializers_from_inputs(model)
    _set_input_shapes(model, inputs)
    for conversion in _CONVERSIONS:
        model = conversion(model)
    model = _simplify(model, own)
    refuse_large_tensors(model)
    return model


def _simplify(model: ModelProto, own: OwnNodes) -> ModelProto:
    for round_number in range(_MAX_ROUNDS):
        before = model.SerializeToString(deterministic=True)
        model = own.infer_shapes(model)
        for simplification in _SIMPLIFICATIONS:
            model = simplification(model)
        model = simplify_branches(model, functools.partial(_simplify, own=own))
        if model.SerializeToString(deterministic=True) == before:
            _log.debug("nothing left to simplify after %d rounds", round_number)
            break
    return model


def _strip_initializers_from_inputs(model: ModelProto) -> None:
    """Remove weights from the graph's inputs, where IR version 3 and older also listed them."""
    weights = {tensor.name for tensor in model.graph.initializer}
    real = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(real)
    # From version 4 on weights need not be inputs, and ONNX's version converter checks that.
    model.ir_version = max(model.ir_version, 4)


def _set_input_shapes(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> None:
    """Set the shapes of the graph's inputs, and remove all shapes that were inferred before.

    Raises:
        ImportFailed: with all inputs that are missing, unknown, or do not fit.
    """
    model_inputs = [_model_input(value) for value in model.graph.input]
    problems = list(find_input_problems(model_inputs, inputs))
    if problems:
        texts = [f"{excerpt('.'.join(problem.loc))}: {problem.text}" for problem in problems]
        raise ImportFailed("; ".join(texts[:_MAX_PROBLEMS]), fix="correct `inputs` in the recipe")
    specs = {spec.name: spec for spec in inputs}
    for value in model.graph.input:
        if value.name in specs:
            shape = value.type.tensor_type.shape
            shape.ClearField("dim")
            shape.dim.extend(
                TensorShapeProto.Dimension(dim_value=n) for n in specs[value.name].shape
            )
    # Shapes that were inferred from other input shapes would contradict the new ones.
    for graph in all_graphs(model.graph):
        del graph.value_info[:]
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")


def _model_input(value: ValueInfoProto) -> ModelInput:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return ModelInput(value.name, None, None)
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
    dims = tuple(sizes) if tensor.HasField("shape") else None
    return ModelInput(value.name, ELEMENT_TYPES.get(tensor.elem_type, ""), dims)
