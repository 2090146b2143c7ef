"""An MXNet operator for its converter: typed attributes, inputs with known shapes, refusals.

A converter is a function from `Op` to an output value or a list of them. Attributes that a converter does not read are
errors (`Op.check_all_read`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import count_text, excerpt, names_text, quoted
from tvmflow.frontends._dynamic_shapes import shape_text, unfixed_text
from tvmflow.frontends._onnx_graph import Graph, Operand, Value
from tvmflow.frontends.base import DYNAMIC_FIX
from tvmflow.frontends.mxnet._checkpoint import Node
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic

Converter = Callable[["Op"], "Value | list[Value]"]

_Value = TypeVar("_Value")

# Attributes that change speed, memory or training, but not the result.
_WITHOUT_EFFECT: Final = frozenset(
    {"workspace", "cudnn_tune", "cudnn_off", "cudnn_algo_verbose", "momentum", "ctx"}
)
# Attributes for the optimizer and the scheduler, allowed on any operator.
_USER_KEYS: Final = ("lr_mult", "wd_mult", "ctx_group", "force_mirroring", "mirror_stage")
_FLAGS: Final = {"true": True, "false": False, "1": True, "0": False}
_MAX_CONSTANT_ELEMENTS: Final = 1 << 25
_NONE: Final = frozenset({"None", "none", ""})
_REQUIRED: Final[Any] = object()


def shown(sizes: Sequence[IrSize]) -> str:
    """Return a shape for messages in MXNet's notation."""
    text = shape_text(sizes)[1:-1]
    return f"({text},)" if len(sizes) == 1 else f"({text})"


class Op:
    """A node, its inputs (None if inference ignores them), and the graph being built."""

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Value | None],
        input_names: Sequence[str],
        graph: Graph,
    ) -> None:
        self.graph = graph
        self.ranges = graph.ranges
        self.kind = node.op
        self.name = node.name
        self._attrs = node.attrs
        self._inputs = tuple(inputs)
        self._input_names = tuple(input_names)
        self._read: set[str] = set()

    # -- inputs ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Value:
        if index >= len(self):
            self.refuse(f"it has {count_text(len(self), 'input')}, but input {index} is needed")
        value = self._inputs[index]
        assert value is not None, f"{self.kind} reads an input that it declares unread"
        return value

    def reads(self, index: int) -> bool:
        return self._inputs[index] is not None

    def all_inputs(self) -> list[Value]:
        """Return all inputs of a variadic operator; `num_args` must agree."""
        count = self.integer("num_args", len(self))
        if count != len(self):
            self.refuse(f"num_args is {count}, but it has {count_text(len(self), 'input')}")
        return [self[index] for index in range(count)]

    def sizes(self, index: int = 0) -> tuple[IrSize, ...]:
        """Return the sizes of an input; dynamic sizes are expressions of dimensions."""
        return self[index].shape

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of an input; refuse dynamic sizes."""
        return self.fixed(self.sizes(index), index)

    def size(self, axis: int, index: int = 0) -> int:
        [size] = self.fixed([self.sizes(index)[axis]], index)
        return size

    def fixed(self, sizes: Sequence[IrSize], index: int = 0) -> tuple[int, ...]:
        """Return sizes that must be constant; otherwise refuse them, naming the input `index`."""
        if any(map(is_dynamic, sizes)):
            self.refuse(
                f"{unfixed_text(sizes)}; "
                f"its input {quoted(self._input_names[index])} has the shape {shape_text(self.sizes(index))}",
                fix=DYNAMIC_FIX,
            )
        return tuple(map(int, sizes))

    def shapes_text(self) -> str:
        """Return the shapes of all inputs that inference reads, for messages."""
        shapes = [self.sizes(index) for index in range(len(self)) if self.reads(index)]
        return names_text([shape_text(sizes) for sizes in shapes])

    def rank(self, index: int = 0) -> int:
        return len(self.sizes(index))

    def dtype(self, index: int = 0) -> str:
        return self[index].dtype

    def expect_rank(self, rank: int) -> None:
        if self.rank() != rank:
            self.refuse(f"its data has {self.rank()} dimensions, {rank} are needed")

    def axis(self, value: int, rank: int | None = None) -> int:
        """Return a non-negative axis for `rank`, by default the rank of the first input."""
        rank = self.rank() if rank is None else rank
        if not -rank <= value < rank:
            self.refuse(f"axis {value} is out of range for {rank} dimensions")
        return value % rank

    def expect_shape(self, index: int, shape: tuple[IrSize, ...]) -> Value:
        if not self.ranges.are_equal(actual := self.sizes(index), shape):
            self.refuse(
                f"its input {quoted(self._input_names[index])} has the shape {shown(actual)}, but {shown(shape)} is needed "
                f"for data of shape {shown(self.sizes())}",
                fix="check that the model was made for the input shapes in the recipe, "
                "and that the two files belong together",
            )
        return self[index]

    # -- attributes ------------------------------------------------------------------------

    def _raw(self, key: str) -> str | None:
        self._read.add(key)
        value = self._attrs.get(key)
        return None if value is None or value in _NONE else str(value)

    def _parsed(
        self, key: str, default: _Value, parse: Callable[[str], _Value], expected: str
    ) -> _Value:
        text = self._raw(key)
        if text is None:
            if default is _REQUIRED:
                self.refuse(f"the attribute {key} is missing")
            return default
        try:
            return parse(text.strip())
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        ):
            self.refuse(f"{key}={quoted(text)} is not {expected}")

    def has(self, key: str) -> bool:
        return self._raw(key) is not None

    def flag(self, key: str, default: bool) -> bool:
        return self._parsed(key, default, lambda text: _FLAGS[text.lower()], "true or false")

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        return self._parsed(key, default, int, "an integer")

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        if self._attrs.get(key) in _NONE:
            # None in the symbol overrides the default.
            self.ignore(key)
            return None
        return self._parsed(key, default, int, "an integer")

    def number(self, key: str, default: float = _REQUIRED) -> float:
        return self._parsed(key, default, _number, "a number")

    def choice(self, key: str, default: str, supported: Sequence[str]) -> str:
        value = self._parsed(key, default, str, "a string")
        if value not in supported:
            self.refuse(f"{key}={quoted(value)} is not supported, only {', '.join(supported)}")
        return value

    def lookup(self, key: str, default: str, table: Mapping[str, _Value]) -> _Value:
        return table[self.choice(key, default, tuple(table))]

    def integers(self, key: str, default: tuple[int, ...] = _REQUIRED) -> tuple[int, ...]:
        """Return a tuple of integers; a single integer counts as a tuple of one."""
        return self._parsed(key, default, partial(_tuple, int), "a tuple of integers")

    def numbers(self, key: str, default: tuple[float, ...] = _REQUIRED) -> tuple[float, ...]:
        """Return a tuple of values; a single number counts as a tuple of one."""
        return self._parsed(key, default, partial(_tuple, float), "a tuple of numbers")

    def optional_integers(self, key: str) -> tuple[int, ...] | None:
        return self._parsed(key, None, partial(_tuple, int), "a tuple of integers")

    def bounds(self, key: str) -> tuple[int | None, ...]:
        """Return a tuple of integers and None, as in `slice`."""
        parse = partial(_tuple, lambda item: None if item is None else int(item))
        return self._parsed(key, _REQUIRED, parse, "a tuple of integers")

    def require(self, key: str, value: str, reason: str) -> None:
        """Refuse values of an attribute other than its default `value`."""
        text = self._raw(key)
        if text is not None and text.lower() != value.lower():
            self.refuse(f"{key}={quoted(text)} is not supported: {reason}")

    def ignore(self, *keys: str) -> None:
        """Mark attributes that do not matter in inference as read."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        """Refuse attributes that the converter did not read: they might change the result."""
        unread = [
            f"{excerpt(key)}={quoted(value)}"
            for key, value in sorted(self._attrs.items())
            if key not in self._read
            and key not in _WITHOUT_EFFECT
            and not key.startswith("__")
            and not any(key == user or key.endswith(f"_{user}") for user in _USER_KEYS)
        ]
        if unread:
            self.refuse(f"it has unsupported attributes: {', '.join(unread[:20])}")

    # -- results ---------------------------------------------------------------------------

    def add(self, operator: str, *operands: Operand, **attributes: Any) -> Value:
        """Add an ONNX node; see `Graph.add_several`."""
        return self.graph.add(operator, *operands, **attributes)

    def scalar(self, value: float, dtype: str | None = None) -> Value:
        """Return a constant, by default with the dtype of the first input."""
        return self.graph.number(value, dtype or self.dtype())

    def filled(self, value: float, shape: Sequence[IrSize], dtype: str) -> Value:
        return self.add("Expand", self.scalar(value, dtype), self.graph.integers(shape))

    def along(self, vector: Value, axis: int) -> Value:
        """Reshape a vector to broadcast along an axis of the first input."""
        shape: list[IrSize] = [1] * self.rank()
        shape[axis] = vector.shape[0]
        return self.graph.reshape(vector, shape)

    def reduce(self, operator: str, value: Value, axes: Sequence[int], *, keep: bool) -> Value:
        return self.add(operator, value, self.graph.integers(axes), keepdims=int(keep))

    def check_constant(self, elements: int) -> None:
        if elements > _MAX_CONSTANT_ELEMENTS:
            self.refuse(
                f"it makes a constant of {elements:,} elements, and the limit is {_MAX_CONSTANT_ELEMENTS:,}"
            )

    def refuse(self, reason: str, fix: str = "") -> NoReturn:
        read = [index for index in range(len(self)) if self.reads(index)]
        if not fix and any(is_dynamic(size) for index in read for size in self.sizes(index)):
            fix = DYNAMIC_FIX
        raise ImportFailed(
            f"{excerpt(self.kind)} {quoted(self.name)} cannot be imported: {reason}", fix=fix
        )


def _number(text: str) -> float:
    return float(_FLAGS[text.lower()] if text.lower() in ("true", "false") else text)


def _tuple(kind: Callable[[Any], _Value], text: str) -> tuple[_Value, ...]:
    # MXNet also writes (2L, 2L), and lists.
    value = ast.literal_eval(text.replace("L", "").replace("[", "(").replace("]", ")"))
    return tuple(map(kind, value)) if isinstance(value, tuple) else (kind(value),)


_DATA_LAYOUTS: Final = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def spatial_rank(op: Op) -> int:
    """Return the number of spatial dimensions of data; refuse layouts other than N, C, spatial."""
    dims = op.rank() - 2
    if dims not in _DATA_LAYOUTS:
        op.refuse(f"its data has {op.rank()} dimensions, 3 to 5 are supported")
    layout = _DATA_LAYOUTS[dims]
    op.require("layout", layout, f"data must be {layout}")
    return dims


def per_axis(op: Op, key: str, dims: int, default: int) -> tuple[int, ...]:
    """Return an attribute with one value for each spatial dimension; an empty tuple means the default."""
    values = op.integers(key, ()) or (default,) * dims
    if len(values) != dims:
        values_text = count_text(len(values), "value")
        op.refuse(f"{key} has {values_text}, but the data has {dims} spatial dimensions")
    return values


DTYPES: Final = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""The supported values of dtype attributes."""
