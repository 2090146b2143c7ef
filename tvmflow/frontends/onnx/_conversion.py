"""Passes that rewrite an ONNX model into operators and an opset that TVM's importer supports."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, inliner, numpy_helper, version_converter

from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx._operators import unsupported_reason
from tvmflow.frontends.onnx.graph import is_standard, known_values, opset_of, replace_nodes

_log = logging.getLogger(__name__)

# The oldest and the newest opset that TVM's importer supports well; others are converted if possible.
_PREFERRED_OPSETS: Final = (13, 21)
# TVM's importer misreads older ones.
_OLDEST_OPSET: Final = 7
# Scan has another form before, which ONNX's converter takes for this one.
_SCAN_OPSET: Final = 9
# The attributes of Constant that hold plain numbers.
_CONSTANT_DTYPES: Final = {
    "value_float": "float32",
    "value_floats": "float32",
    "value_int": "int64",
    "value_ints": "int64",
}


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of the model's own functions by their bodies."""
    return inliner.inline_local_functions(model) if model.functions else model


def convert_opset(model: ModelProto) -> ModelProto:
    """Convert older and newer opsets to the nearest one that TVM's importer supports well.

    Raises:
        ImportFailed: when an opset that TVM misreads cannot be converted.
    """
    if opset_of(model) < _SCAN_OPSET and any(n.op_type == "Scan" for n in model.graph.node):
        return model
    oldest, newest = _PREFERRED_OPSETS
    opset = min(max(opset_of(model), oldest), newest)
    if opset_of(model) == opset or _would_lose_attributes(model, opset):
        return model
    try:
        return version_converter.convert_version(model, opset)
    except Exception as error:
        # The converter raises many kinds of errors.
        if opset_of(model) >= _OLDEST_OPSET:
            _log.debug("opset %d is kept: %s", opset_of(model), error)
            return model
        raise ImportFailed(
            f"the model uses opset {opset_of(model)}, which cannot be converted: {error}",
            fix=f"export it with opset {_OLDEST_OPSET} or newer",
        ) from error


def _would_lose_attributes(model: ModelProto, opset: int) -> bool:
    """Return whether a node has an attribute that its operator lacks in an older opset.

    ONNX's converter drops such attributes silently.
    """
    for node in model.graph.node if opset < opset_of(model) else ():
        if not is_standard(node):
            continue
        try:
            known = onnx.defs.get_schema(node.op_type, opset, "").attributes
        except Exception:
            # The operator is newer than the opset, which the converter itself refuses.
            continue
        if any(attribute.name not in known for attribute in node.attribute):
            return True
    return False


def convert_constants_to_initializers(model: ModelProto) -> ModelProto:
    """Replace Constant nodes by initializers, so that there is one kind of constant."""
    kept = []
    for node in model.graph.node:
        array = _constant_value(node) if node.op_type == "Constant" else None
        if array is None:
            kept.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    replace_nodes(model, kept)
    return model


def _constant_value(node: NodeProto) -> np.ndarray[Any, Any] | None:
    if not node.attribute:
        # An expanded function may refer to an attribute that is not set.
        return None
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return np.asarray(numpy_helper.to_array(value))
    dtype = _CONSTANT_DTYPES.get(attribute.name)
    return np.asarray(value, dtype) if dtype else None


def expand_unsupported_operators(model: ModelProto) -> ModelProto:
    """Replace operators that TVM lacks, and that ONNX defines by other operators, by their definition."""
    known = known_values(model)
    missing = {node.op_type for node in model.graph.node if unsupported_reason(node, known)}
    if not missing:
        return model
    typed = ModelProto.FromString(model.SerializeToString())
    with_type = {value.name for value in typed.graph.value_info}
    # The inliner needs the type of every value, and does not look at the initializers.
    typed.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in typed.graph.initializer
        if tensor.name not in with_type
    )
    try:
        return inliner.inline_selected_functions(
            typed, [("", name) for name in sorted(missing)], inline_schema_functions=True
        )
    except Exception as error:
        # The importer refuses what cannot be expanded, with the name of the node.
        _log.debug("not expanded: %s: %s", ", ".join(sorted(missing)), error)
        return model
