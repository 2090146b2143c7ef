"""Prepares an ONNX model for TVM's importer, by passes over the ONNX graph.

The importer needs static shapes, constants where an operator requires them, and operators that
it supports. Most of what real models have instead can be rewritten in ONNX's own terms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from onnx import ModelProto, ValueInfoProto, helper

from tvmflow.core.errors import ImportFailed
from tvmflow.core.suggestions import did_you_mean
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.onnx._conversion import (
    convert_constants_to_initializers,
    convert_opset,
    expand_unsupported_operators,
    inline_functions,
)
from tvmflow.frontends.onnx._simplification import (
    bypass_copies,
    drop_dead_nodes,
    drop_unused_outputs,
    fold_constants,
    fold_shapes,
    infer_shapes,
)

_log = logging.getLogger(__name__)

_Pass = Callable[[ModelProto], ModelProto]

_CONVERSIONS: Final[tuple[_Pass, ...]] = (
    inline_functions,
    convert_opset,
    convert_constants_to_initializers,
)
# Each may give the others something to do.
_SIMPLIFICATIONS: Final[tuple[_Pass, ...]] = (
    infer_shapes,
    fold_shapes,
    fold_constants,
    drop_unused_outputs,
    expand_unsupported_operators,
    convert_constants_to_initializers,
    bypass_copies,
    drop_dead_nodes,
)
_MAX_ROUNDS: Final = 8


def prepare(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> ModelProto:
    """Return the model in the form that TVM's importer needs.

    Args:
        model: A model with all of its data; it is changed.
        inputs: The inputs with their shapes; may be empty when the shapes in the model are static.

    Raises:
        ImportFailed: when inputs do not fit, or the opset is too old.
    """
    _strip_initializers_from_inputs(model)
    _set_input_shapes(model, inputs)
    for conversion in _CONVERSIONS:
        model = conversion(model)
    for round_number in range(_MAX_ROUNDS):
        before = model.SerializeToString(deterministic=True)
        for simplification in _SIMPLIFICATIONS:
            model = simplification(model)
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
    specs = {spec.name: spec for spec in inputs}
    values = {value.name: value for value in model.graph.input}
    problems = []
    for name in specs.keys() - values.keys():
        hint = did_you_mean(name, values)
        problems.append(f"the model has no input '{name}'{hint} (valid: {', '.join(values)})")
    for name, value in values.items():
        problem = _set_input_shape(value, specs.get(name), bool(specs))
        problems += [problem] if problem else []
    if problems:
        raise ImportFailed("; ".join(sorted(problems)), fix="correct `inputs` in the recipe")
    # Shapes that were inferred from other input shapes would contradict the new ones.
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")


def _set_input_shape(value: ValueInfoProto, spec: TensorSpec | None, has_specs: bool) -> str:
    """Set the shape of one input, or return why that is not possible."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return f"input '{value.name}' is not a tensor"
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in tensor.shape.dim]
    dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if spec is None:
        if has_specs:
            return f"input '{value.name}' is missing in the recipe"
        is_fixed = tensor.HasField("shape") and all(sizes)
        return "" if is_fixed else f"input '{value.name}' has no fixed shape: set it in the recipe"
    if spec.dtype != dtype:
        return f"input '{value.name}' has dtype {dtype}, not {spec.dtype}"
    fits = len(sizes) == len(spec.shape) and all(
        not size or size == new_size for size, new_size in zip(sizes, spec.shape, strict=True)
    )
    if tensor.HasField("shape") and not fits:
        shown = [
            size or (dim.dim_param or "?")
            for size, dim in zip(sizes, tensor.shape.dim, strict=True)
        ]
        return f"input '{value.name}' has shape {shown}, which {list(spec.shape)} does not fit"
    tensor.shape.ClearField("dim")
    for size in spec.shape:
        tensor.shape.dim.add().dim_value = size
    return ""
