"""Knows which ONNX operators TVM's importer lacks or miscomputes, and which operands are no weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from onnx import NodeProto

from tvmflow.core.formatting import excerpt
from tvmflow.frontends.onnx._grouped_weights import DOMAIN as GROUPED_DOMAIN
from tvmflow.frontends.onnx._header import NARROW_TYPES, name_of
from tvmflow.frontends.onnx._loops import MAX_UNROLLED_NODES
from tvmflow.frontends.onnx.graph import OWN_DOMAIN, KnownValues, attributes_of, is_standard

_PARAMETER_OPERANDS: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2),
    "DFT": (1, 2),
    "DequantizeLinear": (1, 2),
    "ConvInteger": (3,),
    "MatMulInteger": (3,),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 2, 3),
    "ThresholdedRelu": (1,),
    "Upsample": (1,),
}


def parameter_operands(node: NodeProto) -> Iterator[str]:
    """Give the operands that parametrize the operator, and are no weights though they may be floats."""
    for position in _PARAMETER_OPERANDS.get(node.op_type, ()):
        if position < len(node.input):
            yield node.input[position]


def _has_output(node: NodeProto, position: int) -> bool:
    return position < len(node.output) and bool(node.output[position])


def _batch_norm(node: NodeProto, _: KnownValues) -> str:
    is_training = attributes_of(node).get("training_mode", 0) or _has_output(node, 1)
    return "in training mode" if is_training else ""


def _cast(node: NodeProto, _: KnownValues) -> str:
    """TVM neither rounds nor saturates as ONNX does in casts to float8 or to less than a byte."""
    to = attributes_of(node).get("to", 0)
    return f"to {name_of(to)}" if to in NARROW_TYPES else ""


def _conv_transpose(node: NodeProto, _: KnownValues) -> str:
    return "with output_shape" if "output_shape" in attributes_of(node) else ""


def _dropout(node: NodeProto, known: KnownValues) -> str:
    if _has_output(node, 1):
        return "with its mask"
    switch = node.input[2] if len(node.input) > 2 else ""
    is_training = switch and not (switch in known.constants and not known.constants[switch].any())
    return "in training mode" if is_training else ""


def _layer_norm(node: NodeProto, _: KnownValues) -> str:
    return "with its mean and deviation" if _has_output(node, 1) or _has_output(node, 2) else ""


def _rms_norm(node: NodeProto, known: KnownValues) -> str:
    shape = known.shapes.get(node.input[0], ())
    axis = attributes_of(node).get("axis", -1)
    return "over all axes" if axis in (0, -len(shape)) else ""


def _scatter_elements(node: NodeProto, known: KnownValues) -> str:
    """TVM counts through the axes before and behind as if data and indices had the same sizes there."""
    data, indices = (known.shapes.get(name, ()) for name in node.input[:2])
    axis = attributes_of(node).get("axis", 0) % max(len(data), 1)
    counted = (slice(1, axis), slice(axis + 2, None))
    differs = any(data[part] != indices[part] for part in counted)
    return "with indices of fewer rows than the data" if differs else ""


def _sequence_erase(node: NodeProto, _: KnownValues) -> str:
    return "at a position" if len(node.input) > 1 and node.input[1] else ""


def _sequence_insert(node: NodeProto, _: KnownValues) -> str:
    return "at a position" if len(node.input) > 2 and node.input[2] else ""


def _space_to_depth(node: NodeProto, _: KnownValues) -> str:
    return "with mode CRD" if attributes_of(node).get("mode", "DCR") != "DCR" else ""


def _top_k(node: NodeProto, known: KnownValues) -> str:
    """TVM takes 0 for all."""
    count = known.constants.get(node.input[1]) if len(node.input) > 1 else None
    return "with K = 0" if count is not None and not count.any() else ""


MISCOMPUTED: Final[Mapping[str, Callable[[NodeProto, KnownValues], str]]] = {
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "ScatterElements": _scatter_elements,
    "SequenceErase": _sequence_erase,
    "SequenceInsert": _sequence_insert,
    "SpaceToDepth": _space_to_depth,
    "TopK": _top_k,
}
"""Operators that TVM 0.27's importer can miscompute; each function returns in which case, or an empty string."""

_UNROLLED: Final[Mapping[str, str]] = {
    "Loop": "a number of iterations that is constant or has a constant limit, at most "
    f"{MAX_UNROLLED_NODES:,} nodes in all, and no stacked outputs where a condition is computed",
    "Scan": f"opset 9, a known length, and at most {MAX_UNROLLED_NODES:,} nodes in all",
}
"""What it takes for a loop to have been replaced by its iterations."""

# The converters of these names are for operators in the domain com.microsoft, which are others.
_MICROSOFT_ONLY: Final = frozenset({"Attention", "RotaryEmbedding"})


@functools.cache
def supported_operators() -> frozenset[str]:
    """Return the operators that TVM's importer or tvmflow's has a converter for."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    # These modules import TVM.
    from tvmflow.frontends.onnx._converters import CONVERTERS
    from tvmflow.frontends.onnx._recurrent import OPERATORS

    return frozenset(_get_convert_map()) | {"If", "Constant"} | OPERATORS | set(CONVERTERS)


def unsupported_reason(node: NodeProto, known: KnownValues) -> str:
    """Return why TVM's importer cannot import this node correctly, or an empty string."""
    if node.domain in (OWN_DOMAIN, GROUPED_DOMAIN):
        return ""
    if is_standard(node) and node.op_type in _UNROLLED:
        return f"{node.op_type} is unrolled, which needs {_UNROLLED[node.op_type]}"
    name = excerpt(f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type))
    has_converter = node.op_type in supported_operators() and (
        is_standard(node) or node.domain == "com.microsoft"
    )
    if not has_converter or (is_standard(node) and node.op_type in _MICROSOFT_ONLY):
        return f"TVM has no operator {name}"
    case = MISCOMPUTED[node.op_type](node, known) if node.op_type in MISCOMPUTED else ""
    return f"TVM miscomputes {name} {case}" if case else ""
