"""Operators that Relax lacks: frontends emit calls of them, and passes lower these for the target.

The attributes of a call are the fields of the operator's class. TVM can load a stored model that
calls them only after this module has registered them.
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

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, sizes_of

GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""The number of gates of each kind of recurrent layer."""

STATE_STEPS: Final = 127
"""The steps of a rounded state of a recurrent layer between 0 and 1."""

SELECTED_COLUMNS: Final = 3
"""The columns of a row that `NonMaxSuppression` selects: image, class and box."""

NOTHING: Final = relax.Tuple([])
"""Stands for an operand that a call lacks."""


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
        """Return the operator that a call has."""
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
    """An activation function of a recurrent layer: its name in ONNX, in lower case, and parameters."""

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
"""The parameters of each function where a model does not give them; as many as it has. They are ONNX Runtime's."""


class RecurrentOperands(NamedTuple):
    """The operands of a recurrent layer, as ONNX has them; `NOTHING` for missing ones.

    Without weights, `x` is their product with the inputs: (…, directions · gates · units). The recurrent weights
    may be a matrix (directions · gates · units, units).

    Attributes:
        rounding: No operand of ONNX: the parts of the state that products with the recurrent weights read unrounded,
            and limited to those from -1 to 1 and rounded to `STATE_STEPS`: (2,). Without it they read it unrounded.
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

    Its operands are `RecurrentOperands`; its results all hidden states, the last ones, and of an LSTM
    the last cell states.

    Attributes:
        kind: The operator.
        is_reversed: For each direction, whether it begins at the end of a sequence.
        activations: For each direction, the functions f, g and h of ONNX's equations, as many as the layer has.
        clip: The largest absolute value of a gate before its activation; None without limit.
        has_coupled_gates: True if the forget gate of an LSTM is one minus its input gate.
        resets_product: True if a GRU's reset gate multiplies the product with the state (`linear_before_reset`), not
            the state.
        is_batch_first: True if operands and results have the sequences before the steps and the directions.
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

    Its operands are boxes (n, boxes, 4) and scores (n, classes, boxes), and, each as a tensor of one number,
    the most boxes of a class, the overlap above which a box is left out, and the least score. Its results
    are the rows that are selected, those after them 0, and the number of selected rows.

    Attributes:
        rows: The most boxes that are selected in all.
        is_centered: Whether a box is a center, a width and a height; two corners otherwise.
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
    candidates (n,). Its result are rows like the candidates.

    Attributes:
        top: The number of candidates that are compared; 0 for all.
        threshold: The overlap from which the candidate with the lower score is removed.
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
    """The selection of MXNet's `box_nms`: the rows that are kept, by falling score, then rows of -1.

    Its operands are boxes (n, rows, width); their order by score (n, rows); and the number of valid boxes (n,).

    Attributes:
        top: The number of candidates that are compared.
        first: The column of the first of a box's four coordinates.
        class_column: The column of the class; -1 to compare boxes of all classes.
        threshold: The overlap above which the box with the lower score is removed.
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
    """Weights (rows, depth) as float32, of integers of 4 or 8 bits: scale · (integer − zero point).

    Groups of integers of a row share a scale. Its operands are `BlockQuantizedOperands`.

    Attributes:
        bits: The bits of an integer, 4 or 8.
        group: The integers of a group.
        depth: The length of a row; the last group may extend beyond it.
        zero: The zero point of all integers, where groups have none of their own.
        rounds_data: Whether products with the weights may round the data to int8, a group at a time.
    """

    NAME = "tvmflow.grouped_weights"

    bits: int
    group: int
    depth: int
    zero: int
    rounds_data: bool

    @property
    def groups(self) -> int:
        """The groups of a row."""
        return -(-self.depth // self.group)

    def _result_type(self, operands: Sequence[Any]) -> Any:
        return relax.TensorType([ir.known_shape(operands[0])[0], self.depth], "float32")


class BlockQuantizedOperands(NamedTuple):
    """The operands of block-quantized weights.

    Attributes:
        packed: The integers, not negative, as uint8 (rows, groups, bytes of a group); of 4 bits, the first
            of two is in the lower half of a byte.
        scales: The scales, as many as rows times groups: float32, float16, or the bits of bfloat16 as uint16.
        zeros: The zero points (rows, groups), uint8 or float32; `NOTHING` if all are one.
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


def _register(operator: type[ModelOperator]) -> None:
    _ffi_api.RegisterOp(operator.NAME, str(operator.__doc__))
    register_op_attr(
        operator.NAME, "FInferType", lambda call, _: operator.read(call)._result_type(call.args)
    )
    register_op_attr(operator.NAME, "FPurity", True)


_OPERATORS: Final = (
    *(Recurrent, NonMaxSuppression, MultiboxDetection, BoxNms, BlockQuantizedWeights, RoundedData),
)
for _operator in _OPERATORS:
    _register(_operator)
