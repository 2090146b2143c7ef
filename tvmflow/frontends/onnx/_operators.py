"""What is known about single ONNX operators: what TVM lacks or has wrong, and which operands must be constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

BEST_OPSETS: Final = (13, 21)
"""The oldest and the newest operator set that TVM's importer knows well; others are converted where ONNX can."""

_REDUCTIONS: Final = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
).split()
STATIC_OPERANDS: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(_REDUCTIONS, (1,)),
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""Operands that decide a shape or the code itself, by position: they must be known when the model is imported."""


def static_operands(node: NodeProto) -> Iterator[str]:
    """The names of the node's operands that must be constants."""
    for position in STATIC_OPERANDS.get(node.op_type, ()):
        if position < len(node.input) and node.input[position]:
            yield node.input[position]


_DEFINING: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "OneHot": (1, 2),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "ThresholdedRelu": (1,),
    "Upsample": (1,),
}


def defining_operands(node: NodeProto) -> Iterator[str]:
    """The names of operands that are part of the operator's definition rather than data, though they may be floats."""
    for position in _DEFINING.get(node.op_type, ()):
        if position < len(node.input):
            yield node.input[position]


# ---------------------------------------------------------------- what TVM cannot be trusted with


class View(NamedTuple):
    """What is known of the values in a graph: constants, and shapes where they are fixed."""

    constants: Mapping[str, np.ndarray[Any, Any]]
    shapes: Mapping[str, tuple[int, ...]]


def view_of(model: ModelProto) -> View:
    """The constants and the fixed shapes of a model's main graph."""
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    shapes = {}
    for value in values:
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and tensor.HasField("shape"):
            sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
            if all(size >= 0 for size in sizes):
                shapes[value.name] = tuple(sizes)
    shapes.update({tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer})
    small = [t for t in model.graph.initializer if np.prod(t.dims, dtype=np.int64) <= _SMALL]
    return View({tensor.name: numpy_helper.to_array(tensor) for tensor in small}, shapes)


_SMALL: Final = 64


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values; texts as str."""
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {
        k: v.decode("utf-8", "replace") if isinstance(v, bytes) else v for k, v in found.items()
    }


def _gives(node: NodeProto, position: int) -> bool:
    return position < len(node.output) and bool(node.output[position])


def _batch_norm(node: NodeProto, _: View) -> str:
    trains = attributes_of(node).get("training_mode", 0) or _gives(node, 1)
    return "in training mode" if trains else ""


def _conv_transpose(node: NodeProto, _: View) -> str:
    return "with output_shape" if "output_shape" in attributes_of(node) else ""


def _dropout(node: NodeProto, view: View) -> str:
    if _gives(node, 1):
        return "with its mask"
    switch = node.input[2] if len(node.input) > 2 else ""
    trains = switch and not (switch in view.constants and not view.constants[switch].any())
    return "in training mode" if trains else ""


def _is_inf(node: NodeProto, _: View) -> str:
    given = attributes_of(node)
    both = given.get("detect_negative", 1) and given.get("detect_positive", 1)
    return "" if both else "for one sign only"


def _layer_norm(node: NodeProto, _: View) -> str:
    return "with its mean and deviation" if _gives(node, 1) or _gives(node, 2) else ""


def _resize(node: NodeProto, view: View) -> str:
    """TVM scales by the ratio of the sizes, ONNX by the factor that was given: they differ where it is rounded."""
    given = attributes_of(node)
    if given.get("antialias", 0):
        return "with antialias"
    name = node.input[2] if len(node.input) > 2 else ""
    scales, shape = view.constants.get(name), view.shapes.get(node.input[0])
    if scales is None or shape is None or scales.size != len(shape):
        return ""
    sizes = np.asarray(shape) * scales.astype(np.float64)
    # factors are float32: 1/3 of 6 is 2 for everyone
    return "" if np.allclose(sizes, np.round(sizes), rtol=1e-5) else "by a factor that is rounded"


def _roi_align(node: NodeProto, _: View) -> str:
    return "with mode max" if attributes_of(node).get("mode") == "max" else ""


def _sequence_erase(node: NodeProto, _: View) -> str:
    return "at a position" if len(node.input) > 1 and node.input[1] else ""


def _sequence_insert(node: NodeProto, _: View) -> str:
    return "at a position" if len(node.input) > 2 and node.input[2] else ""


def _space_to_depth(node: NodeProto, _: View) -> str:
    return "with mode CRD" if attributes_of(node).get("mode", "DCR") != "DCR" else ""


KNOWN_WRONG: Final[Mapping[str, Callable[[NodeProto, View], str]]] = {
    "BatchNormalization": _batch_norm,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_norm,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "SequenceErase": _sequence_erase,
    "SequenceInsert": _sequence_insert,
    "SpaceToDepth": _space_to_depth,
}
"""Where TVM 0.27's importer gives other numbers than ONNX defines: in which case, or an empty text."""

WHOLE_NUMBERS: Final = frozenset(
    "ConvInteger QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool "
    "QLinearLeakyRelu QLinearMatMul QLinearMul QLinearSigmoid QLinearSoftmax".split()
)
"""Operators of quantised models in another form than QDQ (ONNX Runtime's QOperator) that TVM lacks."""

_MICROSOFTS_OWN: Final = frozenset({"Attention"})


def opset_of(model: ModelProto) -> int:
    """The version of the standard operator set that the model uses."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    return max(versions, default=BEST_OPSETS[0])


@functools.cache
def _converters() -> frozenset[str]:
    """The operators that TVM's importer has a converter for."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    return frozenset(_get_convert_map()) | {"If", "Constant"}


def why_not(node: NodeProto, view: View) -> str:
    """Why TVM's importer must not be given this node; empty when it may."""
    standard = node.domain in ("", "ai.onnx")
    known = node.op_type in _converters() and (standard or node.domain == "com.microsoft")
    # an operator of one name in both sets is not the same operator
    if not known or (standard and node.op_type in _MICROSOFTS_OWN):
        return "TVM has no operator"
    case = KNOWN_WRONG[node.op_type](node, view) if node.op_type in KNOWN_WRONG else ""
    return f"TVM computes {case} wrongly" if case else ""
