"""What is known about single ONNX operators: which operands must be constants for TVM, and which are learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from onnx import NodeProto

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
