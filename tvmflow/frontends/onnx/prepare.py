"""Prepares an ONNX model for TVM's importer, by passes over the ONNX graph.

The importer needs static shapes, constants where an operator requires them, and operators that
it supports. Most of what real models have instead can be rewritten in ONNX's own terms.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from onnx import ModelProto, TensorShapeProto, ValueInfoProto, numpy_helper

from tvmflow.core.types import Size, TensorSpec
from tvmflow.frontends.base import ModelInput
from tvmflow.frontends.inputs import check_inputs, request_of
from tvmflow.frontends.onnx._functions import inline_functions
from tvmflow.frontends.onnx._fused_operators import FUSED_OPERATORS
from tvmflow.frontends.onnx._grouped_weights import convert_grouped_weights
from tvmflow.frontends.onnx._header import model_input
from tvmflow.frontends.onnx._loops import (
    inline_known_branches,
    name_branch_values,
    simplify_branches,
    unroll_loops,
)
from tvmflow.frontends.onnx._own_operators import NO_OPERATORS, OwnNodes
from tvmflow.frontends.onnx._passes import (
    bypass_copies,
    convert_constants_to_initializers,
    convert_opset,
    drop_dead_nodes,
    drop_unused_outputs,
    expand_unsupported_operators,
    fold_constants,
    fold_shapes,
    infer_shapes,
    refuse_large_tensors,
)
from tvmflow.frontends.onnx._rewrites import convert_einsums, rewrite_nodes
from tvmflow.frontends.onnx.graph import all_graphs

_log = logging.getLogger(__name__)

_Pass = Callable[[ModelProto], ModelProto]

_CONVERSIONS: Final[tuple[_Pass, ...]] = (
    inline_functions,
    convert_grouped_weights,
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
# And one for each fused operator, which may have to wait for the shape or type that another one gives.
_MAX_ROUNDS: Final = 16


def prepare(
    model: ModelProto,
    inputs: tuple[TensorSpec, ...],
    bound: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
    own: OwnNodes = NO_OPERATORS,
) -> ModelProto:
    """Return the model in the form that TVM's importer needs.

    Args:
        model: A model with all of its data; it is changed.
        inputs: The inputs with their shapes; those with static shapes in the model may be missing.
        bound: The constants that take the place of inputs.
        own: The nodes of the recipe's own operators.

    Raises:
        ImportFailed: when inputs do not fit, or the opset is too old.
    """
    names = {spec.name for spec in inputs}
    _separate_inputs_and_weights(model, names)
    _set_input_shapes(model, inputs)
    _bind_inputs(model, bound)
    for conversion in _CONVERSIONS:
        model = conversion(model)
    model = _simplify(model, own)
    refuse_large_tensors(model)
    return model


def _simplify(model: ModelProto, own: OwnNodes) -> ModelProto:
    fused = sum(node.op_type in FUSED_OPERATORS for node in model.graph.node)
    for round_number in range(_MAX_ROUNDS + fused):
        before = model.SerializeToString(deterministic=True)
        model = own.infer_shapes(model)
        for simplification in _SIMPLIFICATIONS:
            model = simplification(model)
        model = simplify_branches(model, functools.partial(_simplify, own=own))
        if model.SerializeToString(deterministic=True) == before:
            _log.debug("nothing left to simplify after %d rounds", round_number)
            break
    return model


def _separate_inputs_and_weights(model: ModelProto, names: Collection[str]) -> None:
    """Let every name be that of an input or of a weight.

    An input may have an initializer as its default; IR version 3 and older list all weights so.

    Args:
        model: The model; it is changed.
        names: The inputs that the recipe names: their defaults are dropped.
    """
    listed = {value.name for value in model.graph.input}
    weights = [t for t in model.graph.initializer if t.name not in listed.intersection(names)]
    known = {tensor.name for tensor in weights}
    real = [value for value in model.graph.input if value.name not in known]
    if len(real) < len(listed):
        del model.graph.input[:]
        model.graph.input.extend(real)
    if len(weights) < len(model.graph.initializer):
        del model.graph.initializer[:]
        model.graph.initializer.extend(weights)
    # From version 4 on weights need not be inputs, and ONNX's version converter checks that.
    model.ir_version = max(model.ir_version, 4)


def _bind_inputs(model: ModelProto, bound: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Replace inputs by constants."""
    free = [value for value in model.graph.input if value.name not in bound]
    if bound:
        del model.graph.input[:]
        model.graph.input.extend(free)
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in bound.items())


def _set_input_shapes(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> None:
    """Set the shapes of the graph's inputs, and remove all shapes that were inferred before.

    Raises:
        ImportFailed: with all inputs that are missing, unknown, or do not fit.
    """
    model_inputs = [_model_input(value) for value in model.graph.input]
    check_inputs(model_inputs, list(map(request_of, inputs)))
    specs = {spec.name: spec for spec in inputs}
    for value in model.graph.input:
        if value.name in specs:
            shape = value.type.tensor_type.shape
            shape.ClearField("dim")
            spec = specs[value.name]
            shape.dim.extend(map(_size, spec.sizes or spec.shape))
    # Shapes that were inferred from other input shapes would contradict the new ones.
    for graph in all_graphs(model.graph):
        del graph.value_info[:]
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")


def _size(size: Size) -> TensorShapeProto.Dimension:
    if isinstance(size, str):
        return TensorShapeProto.Dimension(dim_param=size)
    return TensorShapeProto.Dimension(dim_value=size)


def _model_input(value: ValueInfoProto) -> ModelInput:
    tensor = value.type.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
    dims = tuple(sizes) if tensor.HasField("shape") else None
    element_type = tensor.elem_type if value.type.HasField("tensor_type") else None
    return model_input(value.name, element_type, dims, is_required=True)
