"""Operators that Relax lacks: frontends emit calls of them, and passes lower the calls for the target.

The attributes of a call are the fields of the operator's class. TVM can load a stored model that calls these operators
only after this module has registered them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import tvm
from tvm import relax
from tvm.ir.op import Op, _ffi_api, register_op_attr
from typing_extensions import Self

from tvmflow.core.types import SCALE_BYTES
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, sizes_of

GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""The number of gates of each kind of recurrent layer."""

STATE_STEPS: Final = 127
"""The number of quantization steps between 0 and 1 of a recurrent layer's rounded state."""

SELECTED_COLUMNS: Final = 3
"""The number of columns in a row that `NonMaxSuppression` selects: image, class and box."""

NOTHING: Final = relax.Tuple([])
"""Stands for an omitted optional operand."""


@dataclass(frozen=True, kw_only=True)
class ModelOperator:
    """An operator with its attributes."""

    NAME: ClassVar[str]

    def call(self, *operands: Any) -> relax.Call:
        """Return a call of the operator."""
        attributes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        node = tvm.ir.make_node("ir.DictAttrs", **attributes)
        return relax.Call(Op.get(self.NAME), list(operands), node, [])

    @classmethod
    def read(cls, call: relax.Call) -> Self:
        """Return the operator with the attributes of a call."""
        return cls(
            **{field.name: _plain(call.attrs[field.name]) for field in dataclasses.fields(cls)}
        )

    def _result_type(self, operands: Sequence[Any]) -> Any:
        """Return the type of the result for some operands."""
        raise NotImplementedError


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    return tuple(map(_plain, value)) if isinstance(value, Sequence) else value


class Activation(NamedTuple):
    """An activation function of a recurrent layer: its ONNX name in lower case, and its parameters."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


ACTIVATION_DEFAULTS: Final[Mapping[str, tuple[float, ...]]] = {
    "affine": (0.0, 0.0),
    "elu": (1.0,),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01,),
    "relu": (),
    "scaledtanh": (0.0, 0.0),
    "sigmoid": (),
    "softplus": (),
    "softsign": (),
    "tanh": (),
    "thresholdedrelu": (0.0,),
}
"""Activation function -> its default parameters, as in ONNX Runtime, one for each that it takes."""


class RecurrentOperands(NamedTuple):
    """The operands of a recurrent layer, as in ONNX; `NOTHING` for missing operands.

    If `weights` is missing, `x` is the inputs already multiplied by them: (…, directions · gates · units). The recurrent
    weights may be a matrix (directions · gates · units, units).

    Attributes:
        rounding: Not in ONNX, of shape (2,): the matmul with the recurrent weights reads the first value times the
            state, plus the second times the state clipped to ±1 and rounded to `STATE_STEPS`; by default the state.
    """

    x: Any
    weights: Any
    recurrent: Any
    bias: Any = NOTHING
    lengths: Any = NOTHING
    hidden: Any = NOTHING
    cell: Any = NOTHING
    peepholes: Any = NOTHING
    rounding: Any = NOTHING


@dataclass(frozen=True, kw_only=True)
class Recurrent(ModelOperator):
    """A recurrent layer, in the terms of ONNX's operators.

    Its operands are `RecurrentOperands`. Its results are all hidden states, the last hidden states, and for an LSTM the
    last cell states.

    Attributes:
        kind: The operator.
        is_reversed: For each direction, whether it begins at the end of a sequence.
        activations: For each direction, the functions f, g and h in ONNX's equations, as far as the layer has them.
        clip: The largest absolute value of a gate before its activation; None without limit.
        has_coupled_gates: True if the forget gate of an LSTM is one minus its input gate.
        resets_product: True if a GRU's reset gate multiplies the matmul of the state and the recurrent weights
            (`linear_before_reset`), False if it multiplies the state.
        is_batch_first: True if the batch axis of operands and results precedes the axes of steps and directions.
    """

    NAME = "tvmflow.recurrent"

    kind: str
    is_reversed: tuple[bool, ...]
    activations: tuple[tuple[Activation, ...], ...]
    clip: float | None
    has_coupled_gates: bool
    resets_product: bool
    is_batch_first: bool

    @property
    def gates(self) -> int:
        """The number of gates."""
        return GATES[self.kind]

    @property
    def directions(self) -> int:
        """The number of directions."""
        return len(self.is_reversed)

    def __post_init__(self) -> None:
        functions = tuple(tuple(Activation(*f) for f in listed) for listed in self.activations)
        object.__setattr__(self, "activations", functions)

    def _result_type(self, operands: Sequence[Any]) -> Any:
        named = RecurrentOperands(*operands)
        sizes, hidden = sizes_of(named.x), ir.known_shape(named.recurrent)[-1]
        assert sizes is not None, "the rank of a layer's data is known"
        steps, batch = sizes[1::-1] if self.is_batch_first else sizes[:2]
        last = (self.directions, batch, hidden)
        states: tuple[IrSize, ...] = (steps, *last)
        if self.is_batch_first:
            last = (batch, self.directions, hidden)
            states = (batch, steps, self.directions, hidden)
        shapes = [states, last, *([last] if self.kind == "LSTM" else [])]
        dtype = ir.dtype_of(named.x)
        return relax.TupleType([relax.TensorType(shape, dtype) for shape in shapes])


@dataclass(frozen=True, kw_only=True)
class NonMaxSuppression(ModelOperator):
    """Non-maximum suppression class by class, as in ONNX.

    Its operands are boxes (n, boxes, 4), scores (n, classes, boxes), and three tensors of one element: the maximum
    number of boxes per class, the IoU threshold and the score threshold. Its results are the selected rows, followed
    by rows of 0, and the number of selected rows.

    Attributes:
        rows: The maximum number of boxes that are selected in all.
        is_centered: Whether a box is a center, a width and a height; otherwise it is two corners.
        takes_all_scores: Whether there is no threshold for scores.
    """

    NAME = "tvmflow.non_max_suppression"

    rows: int
    is_centered: bool
    takes_all_scores: bool

    def _result_type(self, operands: Sequence[Any]) -> Any:
        shapes = [(self.rows, SELECTED_COLUMNS), (1,)]
        return relax.TupleType([relax.TensorType(shape, "int64") for shape in shapes])


@dataclass(frozen=True, kw_only=True)
class MultiboxDetection(ModelOperator):
    """The last step of MXNet's `MultiBoxDetection`.

    Its operands are candidates (n, rows, 6) of class, score, left, top, right, bottom; their order by
    score (n, rows); the order in which MXNet first writes them (n, rows); and the number of valid
    candidates (n,). Its result has rows like the candidates.

    Attributes:
        top: The number of candidates that are compared; 0 for all.
        threshold: The IoU from which the candidate with the lower score is removed.
        ignores_class: Whether candidates of different classes are compared too.
        suppresses: Whether candidates are compared at all.
    """

    NAME = "tvmflow.multibox_detection"

    top: int
    threshold: float
    ignores_class: bool
    suppresses: bool

    def _result_type(self, operands: Sequence[Any]) -> Any:
        return operands[0].ty


@dataclass(frozen=True, kw_only=True)
class BoxNms(ModelOperator):
    """The selection of MXNet's `box_nms`: the kept rows by descending score, followed by rows of -1.

    Its operands are boxes (n, rows, width); their order by score (n, rows); and the number of valid boxes (n,).

    Attributes:
        top: The number of candidates that are compared.
        first: The column of the first of a box's four coordinates.
        class_column: The column of the class; -1 to compare boxes across classes.
        threshold: The IoU above which the box with the lower score is removed.
        is_centered: Whether boxes are given as x, y, width, height instead of as corners.
    """

    NAME = "tvmflow.box_nms"

    top: int
    first: int
    class_column: int
    threshold: float
    is_centered: bool

    def _result_type(self, operands: Sequence[Any]) -> Any:
        return operands[0].ty


@dataclass(frozen=True, kw_only=True)
class BlockQuantizedWeights(ModelOperator):
    """Block-quantized weights, dequantized to float32 (rows, depth): scale · (integer − zero point).

    Each row consists of groups of integers that share a scale. Its operands are `BlockQuantizedOperands`.

    Attributes:
        bits: The number of bits in an integer, 4 or 8.
        group: The number of integers in a group.
        depth: The length of a row; the last group may extend beyond it.
        zero: The zero point of all integers, if groups have no zero points of their own.
        rounds_data: Whether matmuls with the weights may round the data to int8, group by group.
    """

    NAME = "tvmflow.grouped_weights"

    bits: int
    group: int
    depth: int
    zero: int
    rounds_data: bool

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return -(-self.depth // self.group)

    def _result_type(self, operands: Sequence[Any]) -> Any:
        return relax.TensorType([ir.known_shape(operands[0])[0], self.depth], "float32")


class BlockQuantizedOperands(NamedTuple):
    """The operands of block-quantized weights.

    Attributes:
        packed: The unsigned integers as uint8 (rows, groups, bytes of a group). Of two 4-bit integers in a byte, the
            first is in the lower half.
        scales: One scale for each group of each row: float32, float16, or the bits of bfloat16 as uint16.
        zeros: The zero points (rows, groups), uint8 or float32; `NOTHING` if all integers have the same zero point.
    """

    packed: Any
    scales: Any
    zeros: Any = NOTHING


@dataclass(frozen=True, kw_only=True)
class RoundedData(ModelOperator):
    """Parametrized fake quantization of data x.

    It computes kept · x + scale · round(min(max(x · inverse, low), high)).

    Its operands are the data, kept, inverse, low, high and scale: tensors of float32 that broadcast to the data.
    Zeros stay zeros if low ≤ 0 ≤ high.
    """

    NAME = "tvmflow.rounded_data"

    def _result_type(self, operands: Sequence[Any]) -> Any:
        return operands[0].ty


@dataclass(frozen=True, kw_only=True)
class PackRows(ModelOperator):
    """Symmetric quantization of rows: int8 values, followed by the bytes of their float32 scale.

    Its operand is float32 (…, n), its result int8 (…, n + `SCALE_BYTES`).
    """

    NAME = "tvmflow.pack_rows"

    def _result_type(self, operands: Sequence[Any]) -> Any:
        *outer, row = sizes_of(operands[0]) or ()
        return relax.TensorType([*outer, row + SCALE_BYTES], "int8")


@dataclass(frozen=True, kw_only=True)
class UnpackRows(ModelOperator):
    """The float32 values of rows that `PackRows` quantized."""

    NAME = "tvmflow.unpack_rows"

    def _result_type(self, operands: Sequence[Any]) -> Any:
        *outer, row = sizes_of(operands[0]) or ()
        return relax.TensorType([*outer, row - SCALE_BYTES], "float32")


def _register(operator: type[ModelOperator]) -> None:
    _ffi_api.RegisterOp(operator.NAME, str(operator.__doc__))
    register_op_attr(
        operator.NAME, "FInferType", lambda call, _: operator.read(call)._result_type(call.args)
    )
    register_op_attr(operator.NAME, "FPurity", True)


_OPERATORS: Final = (
    *(Recurrent, NonMaxSuppression, MultiboxDetection, BoxNms, BlockQuantizedWeights, RoundedData),
    *(PackRows, UnpackRows),
)
for _operator in _OPERATORS:
    _register(_operator)
