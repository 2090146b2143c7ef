"""A TFLite file as values: tensors, operators, names. Imports no framework and copies no weights.

Numbers of fields are those of TensorFlow's `lite/schema/schema.fbs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.frontends.base import NotAModel
from tvmflow.frontends.tflite._flatbuffer import Budget, Buffer, Table
from tvmflow.frontends.tflite._operators import CUSTOM, NAMES, read_options

IDENTIFIER: Final = b"TFL3"
"""What stands in every TFLite file from its fifth byte on."""

MAX_ENTRIES: Final = 100_000
"""The most tensors and operators of a model: no converter makes more, and TVM would take hours."""

IMPORTED_DTYPES: Final = frozenset(
    "float32 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
"""The dtypes of tensors that are imported."""

_MAX_RANK: Final = 8
_MAX_OPERANDS: Final = 10_000
_MAX_CHANNELS: Final = 1 << 20
_DTYPES: Final = (
    "float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64 "
    "resource variant uint32 uint16 int4 bfloat16"
).split()
_NO_TENSOR: Final = -1


class Quantization(NamedTuple):
    """The meaning of integers that stand for real numbers: scale · (integer − zero_point).

    Attributes:
        scales: One for the whole tensor, or one for each entry along `axis`.
        zero_points: As many.
        axis: The axis of the channels that have a scale each.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: As in the file; empty for some.
        dtype: As NumPy names it, where NumPy has it.
        dims: Its sizes, −1 for free ones. Those of results are placeholders: they follow from the inputs.
        data: Where the bytes of its values begin and end; None for a tensor that is computed.
        quantization: What its integers stand for; None for plain numbers.
        is_sparse: Whether its values are stored in a sparse format.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    data: tuple[int, int] | None
    quantization: Quantization | None
    is_sparse: bool


class Operator(NamedTuple):
    """An operator of a file.

    Attributes:
        name: As in `BuiltinOperator`; for others `CUSTOM` and their own name.
        inputs: Numbers of tensors, negative for operands that are left out.
        outputs: Numbers of tensors.
        options: Its options by name; empty for an operator that is not imported.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]


class Model(NamedTuple):
    """The main graph of a file.

    Attributes:
        tensors: Its tensors.
        operators: Its operators in the order of execution.
        inputs: Number of a tensor -> name of that input, in order.
        outputs: Names and numbers of tensors of the outputs, in order.
    """

    tensors: Sequence[Tensor]
    operators: Sequence[Operator]
    inputs: Mapping[int, str]
    outputs: Sequence[tuple[str, int]]


def is_hybrid(model: Model, operator: Operator) -> bool:
    """Return whether an operator has float32 data and integer weights.

    LiteRT rounds the data of such an operator to integers by their range as it runs.
    """
    operands = [model.tensors[number] for number in operator.inputs if number >= 0]
    return any(t.dtype == "float32" and t.data is None for t in operands) and any(
        map(_is_quantized_constant, operands)
    )


def list_hybrid_weights(model: Model) -> list[tuple[int, int]]:
    """Return the integer weights of all operators with float32 data: numbers of operators and positions of operands."""
    return [
        (number, position)
        for number, operator in enumerate(model.operators)
        if is_hybrid(model, operator)
        for position, tensor in enumerate(operator.inputs)
        if tensor >= 0 and _is_quantized_constant(model.tensors[tensor])
    ]


def _is_quantized_constant(tensor: Tensor) -> bool:
    is_integer = tensor.dtype in ("int8", "uint8", "int4")
    return is_integer and tensor.quantization is not None and tensor.data is not None


def is_tflite(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a TFLite model."""
    return head[4:8] == IDENTIFIER


def read_model(data: Buffer) -> Model:
    """Return what a file holds.

    Raises:
        NotAModel: when it is not a TFLite model.
    """
    if not is_tflite(data[:8]):
        raise NotAModel("it does not begin as one")
    budget = Budget(data)
    root = Table.root(data, budget)
    graph = next(root.tables(2, MAX_ENTRIES), None)
    if graph is None:
        raise NotAModel("it has no graph")
    buffers = [_buffer_span(table, len(data)) for table in root.tables(4, 2 * MAX_ENTRIES)]
    tensors = [_read_tensor(table, buffers) for table in graph.tables(0, MAX_ENTRIES)]
    codes = [_operator_name(table) for table in root.tables(1, MAX_ENTRIES)]
    operators = [_read_operator(table, codes) for table in graph.tables(3, MAX_ENTRIES)]
    signature = _read_signature(root)
    inputs = graph.integers(1, "i", _MAX_OPERANDS)
    outputs = graph.integers(2, "i", _MAX_OPERANDS)
    for operator in operators:
        _check_numbers(operator.inputs, len(tensors), optional=True)
        _check_numbers(operator.outputs, len(tensors))
    _check_numbers((*inputs, *outputs), len(tensors))
    return Model(
        tensors,
        operators,
        dict(zip(inputs, _distinct(_names(inputs, tensors, signature[0]), budget), strict=True)),
        list(zip(_distinct(_names(outputs, tensors, signature[1]), budget), outputs, strict=True)),
    )


def _check_numbers(numbers: Sequence[int], count: int, *, optional: bool = False) -> None:
    lowest = _NO_TENSOR if optional else 0
    if any(not lowest <= number < count for number in numbers):
        raise NotAModel("it names a tensor that it does not have")


def _buffer_span(table: Table, size: int) -> tuple[int, int] | None:
    """Return where the data of a buffer are; None for one without data."""
    start, count = table.span(0, 1)
    if not count:
        # Large models have their data behind the tables.
        start, count = table.integer(1, "Q"), table.integer(2, "Q")
    if start + count > size:
        raise NotAModel("it is incomplete")
    return (start, start + count) if count else None


def _read_tensor(table: Table, buffers: Sequence[tuple[int, int] | None]) -> Tensor:
    kind, buffer = table.integer(1, "B"), table.integer(2, "I")
    if kind >= len(_DTYPES) or (buffer and buffer >= len(buffers)):
        raise NotAModel("one of its tensors has a type or data that do not exist")
    fixed, signature = (table.integers(number, "i", _MAX_RANK) for number in (0, 7))
    return Tensor(
        table.text(3),
        _DTYPES[kind],
        signature or fixed,
        buffers[buffer] if buffer else None,
        _read_quantization(table.table(4)),
        table.table(6) is not None,
    )


def _read_quantization(table: Table | None) -> Quantization | None:
    scales = table.numbers(2, "f", _MAX_CHANNELS) if table else ()
    if not (table and scales):
        return None
    zero_points = table.integers(3, "q", _MAX_CHANNELS) or (0,) * len(scales)
    if len(zero_points) == 1:
        zero_points *= len(scales)
    if len(zero_points) != len(scales):
        raise NotAModel("one of its tensors has other numbers of scales and of zero points")
    return Quantization(scales, zero_points, table.integer(6, "i"))


def _operator_name(table: Table) -> str:
    # Numbers above 127 do not fit the first field, which old files alone have.
    number = max(table.integer(0, "b"), table.integer(3, "i"))
    if number == CUSTOM:
        return f"CUSTOM {table.text(1)}"
    return NAMES[number] if number < len(NAMES) else f"number {number}"


def _read_operator(table: Table, codes: Sequence[str]) -> Operator:
    code = table.integer(0, "I")
    if code >= len(codes):
        raise NotAModel("it uses an operator that it does not list")
    inputs, outputs = (table.integers(number, "i", _MAX_OPERANDS) for number in (1, 2))
    return Operator(codes[code], inputs, outputs, read_options(codes[code], table.table(4)))


def _read_signature(root: Table) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of inputs and outputs by the numbers of their tensors, where the main graph has a signature."""
    for table in root.tables(7, MAX_ENTRIES):
        if table.integer(4, "I") == 0:
            entries = [list(table.tables(number, _MAX_OPERANDS)) for number in (0, 1)]
            inputs, outputs = ({e.integer(1, "I"): e.text(0) for e in part} for part in entries)
            return inputs, outputs
    return {}, {}


def _names(
    numbers: Sequence[int], tensors: Sequence[Tensor], signature: Mapping[int, str]
) -> Iterator[str]:
    for number in numbers:
        yield signature.get(number) or tensors[number].name or f"tensor_{number}"


def _distinct(names: Iterator[str], budget: Budget) -> Iterator[str]:
    """Give names, numbered where they repeat: a tensor may be an output twice."""
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for name in names:
        distinct, count = name, counts.get(name, 1)
        while distinct in seen:
            count += 1
            distinct = f"{name}_{count}"
        budget.spend(len(distinct))
        seen.add(distinct)
        counts[name] = count
        yield distinct
