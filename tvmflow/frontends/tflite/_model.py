"""Reader of TFLite files. Imports no framework and copies no weights."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tvmflow.frontends.base import NEXT, NotAModel, number_repeated

# ---------------------------------------------------------------- FlatBuffers
# The format is described in https://flatbuffers.dev/internals. Offsets are checked against the file size.
# A malicious file could refer to the same table or vector a hundred thousand times, so the total number of
# bytes read is limited relative to the file size.


Buffer = bytes | mmap.mmap

_MAX_TEXT: Final = 1 << 16
# Files from converters need about two reads per byte.
_READ_SHARE: Final = 4
_SMALLEST_BUDGET: Final = 1 << 16
# The size of an empty table and its reference.
_TABLE_BYTES: Final = 8


class Budget:
    """A limit of the bytes read as tables, vectors and strings; repeated reads count each time."""

    def __init__(self, data: Buffer) -> None:
        self._limit = self._left = max(_READ_SHARE * len(data), _SMALLEST_BUDGET)

    def spend(self, size: int) -> None:
        """Count `size` bytes; NotAModel beyond the limit."""
        self._left -= size
        if self._left < 0:
            raise NotAModel(
                f"it names the same tables, lists or names so often that they are more than {self._limit:,} bytes, "
                f"{_READ_SHARE} times its size, which no converter does"
            )


class Table:
    """A FlatBuffers table at a position in the file."""

    def __init__(self, data: Buffer, position: int, budget: Budget) -> None:
        budget.spend(_TABLE_BYTES)
        self._data = data
        self._position = position
        self._budget = budget
        self._fields = position - _read(data, position, "i")
        self._size = _read(data, self._fields, "H")

    def number(self, number: int, code: str, default: float = 0) -> Any:
        """Return the number in a field; `code` is its `struct` format character."""
        offset = self._find_field(number)
        return default if offset is None else _read(self._data, offset, code)

    def table(self, number: int) -> Table | None:
        offset = self._find_field(number)
        return None if offset is None else Table(self._data, self._target(offset), self._budget)

    def tables(self, number: int, limit: int) -> Iterator[Table]:
        """Yield the tables of a vector; NotAModel for more than `limit`."""
        start, count = self.span(number, 4)
        if count > limit:
            raise NotAModel(f"a list in it has {count:,} entries, and the limit is {limit:,}")
        for index in range(count):
            yield Table(self._data, self._target(start + 4 * index), self._budget)

    def numbers(self, number: int, code: str, limit: int) -> tuple[Any, ...]:
        """Return a vector of numbers; `code` is a `struct` format character.

        Raises:
            NotAModel: The vector has more than `limit` numbers.
        """
        size = struct.calcsize(code)
        start, count = self.span(number, size)
        if count > limit:
            raise NotAModel(f"a list in it has {count:,} numbers, and the limit is {limit:,}")
        self._budget.spend(count * size)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def text(self, number: int) -> str:
        start, count = self.span(number, 1)
        if count > _MAX_TEXT:
            raise NotAModel(f"a name in it has {count:,} characters")
        self._budget.spend(count)
        return bytes(self._data[start : start + count]).decode("utf-8", "replace")

    def span(self, number: int, size: int) -> tuple[int, int]:
        """Return the offset and the number of a vector's entries, each of `size` bytes."""
        offset = self._find_field(number)
        if offset is None:
            return 0, 0
        start = self._target(offset)
        count = _read(self._data, start, "I")
        if start + 4 + count * size > len(self._data):
            raise NotAModel("it is incomplete")
        return start + 4, count

    def _find_field(self, number: int) -> int | None:
        entry = 4 + 2 * number
        if entry + 2 > self._size:
            return None
        offset = _read(self._data, self._fields + entry, "H")
        return self._position + offset if offset else None

    def _target(self, offset: int) -> int:
        return offset + int(_read(self._data, offset, "I"))


def _read(data: Buffer, position: int, code: str) -> Any:
    if position < 0 or position + struct.calcsize(code) > len(data):
        raise NotAModel("it is incomplete")
    return struct.unpack_from(f"<{code}", data, position)[0]


# ---------------------------------------------------------------- operators
# Codes and fields follow TensorFlow's `lite/schema/schema.fbs`, version 3 (LiteRT 2).


NAMES: Final = (
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE "
    "EMBEDDING_LOOKUP FLOOR FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D "
    "LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 "
    "RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS "
    "SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER "
    "BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE "
    "UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT "
    "LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG "
    "PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE "
    "EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD "
    "REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV "
    "REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU "
    "SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS WHERE "
    "RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE "
    "NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM "
    "BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D "
    "IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL "
    "CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS "
    "RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU DYNAMIC_UPDATE_SLICE "
    "RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 "
    "UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD "
    "STABLEHLO_DIVIDE STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP "
    "STABLEHLO_CONCATENATE STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE "
    "STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE "
    "STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM STABLEHLO_NEGATE "
    "STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT "
    "STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT "
    "STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA "
    "STABLEHLO_DOT_GENERAL STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE "
    "STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW "
    "STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT "
).split()
"""The operators in the order of `BuiltinOperator` codes."""

CUSTOM: Final = NAMES.index("CUSTOM")
"""The code of custom operators."""

_WINDOW: Final = "padding:b stride_w:i stride_h:i"
_DILATION: Final = "dilation_w:i=1 dilation_h:i=1"
_VECTOR_LIMIT: Final = 16

# Operator -> its option fields NAME:TYPE=DEFAULT in table order. Types are `struct` codes, `v` for an int32 vector.
_FIELDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        "ABS ADD_N ARG_MAX ARG_MIN BATCH_TO_SPACE_ND BROADCAST_TO CAST CEIL COS DEQUANTIZE ELU "
        "EMBEDDING_LOOKUP EQUAL EXP EXPAND_DIMS FILL FLOOR FLOOR_DIV FLOOR_MOD GATHER_ND GREATER "
        "GREATER_EQUAL HARD_SWISH LESS LESS_EQUAL LOG LOGICAL_AND LOGICAL_NOT LOGICAL_OR LOGISTIC "
        "LOG_SOFTMAX MAXIMUM MINIMUM NEG NOT_EQUAL PAD PADV2 POW PRELU QUANTIZE RANGE RANK RELU "
        "RELU6 RELU_0_TO_1 RELU_N1_TO_1 REVERSE_V2 ROUND RSQRT SELECT SELECT_V2 SHAPE SIGN SIN "
        "SLICE SPACE_TO_BATCH_ND SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE TANH TILE TOPK_V2 "
        "TRANSPOSE ZEROS_LIKE".split(),
        "",
    ),
    **dict.fromkeys("ADD DIV L2_NORMALIZATION MUL SUB".split(), "activation:b"),
    **dict.fromkeys(
        "AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D".split(),
        f"{_WINDOW} filter_w:i filter_h:i activation:b",
    ),
    **dict.fromkeys(
        "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM".split(), "keep_dims:?"
    ),
    "BATCH_MATMUL": "adj_x:? adj_y:?",
    "CONCATENATION": "axis:i activation:b",
    "CONV_2D": f"{_WINDOW} activation:b {_DILATION}",
    "CONV_3D": "padding:b stride_d:i stride_w:i stride_h:i activation:b "
    "dilation_d:i=1 dilation_w:i=1 dilation_h:i=1",
    "CUMSUM": "exclusive:? reverse:?",
    "DEPTHWISE_CONV_2D": f"{_WINDOW} depth_multiplier:i activation:b {_DILATION}",
    "DEPTH_TO_SPACE": "block_size:i",
    "FULLY_CONNECTED": "activation:b weights_format:b keep_num_dims:?",
    "GATHER": "axis:i batch_dims:i",
    "GELU": "approximate:?",
    "LEAKY_RELU": "alpha:f",
    "LSTM": "activation:b cell_clip:f proj_clip:f kernel_type:b",
    "LOCAL_RESPONSE_NORMALIZATION": "radius:i bias:f alpha:f beta:f",
    "MIRROR_PAD": "mode:b",
    "ONE_HOT": "axis:i",
    "PACK": "count:i axis:i",
    "RESHAPE": "new_shape:v",
    "RESIZE_BILINEAR": "_:i _:i align_corners:? half_pixel_centers:?",
    "RESIZE_NEAREST_NEIGHBOR": "align_corners:? half_pixel_centers:?",
    "RNN": "activation:b",
    "SOFTMAX": "beta:f",
    "SPACE_TO_DEPTH": "block_size:i",
    "SQUEEZE": "axes:v",
    "STRIDED_SLICE": "begin_mask:i end_mask:i ellipsis_mask:i new_axis_mask:i shrink_axis_mask:i offset:?",
    "SVDF": "rank:i activation:b",
    "TRANSPOSE_CONV": f"{_WINDOW} activation:b",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "activation:b cell_clip:f proj_clip:f time_major:?",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "time_major:? activation:b",
    "UNPACK": "count:i axis:i",
}

_VARIABLE_FIELDS: Final[Mapping[str, str]] = {
    "ASSIGN_VARIABLE": "",
    "CALL_ONCE": "subgraph:i",
    "READ_VARIABLE": "",
    "VAR_HANDLE": "container:s shared_name:s",
}

VARIABLE_OPERATORS: Final = frozenset(_VARIABLE_FIELDS)
"""Operators on variables, which `read_model` replaces by inputs and outputs."""

# Recurrent operator -> its operands that are variable tensors.
_STATE_OPERANDS: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"), (18, 19)),
    **dict.fromkeys(("RNN", "SVDF", "UNIDIRECTIONAL_SEQUENCE_RNN"), (4,)),
}

SUPPORTED: Final = frozenset(_FIELDS)
"""The operators that can be imported."""


def read_options(name: str, table: Table | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    fields = _FIELDS.get(name) or _VARIABLE_FIELDS.get(name, "")
    for number, field in enumerate(fields.split()):
        key, _, kind = field.partition(":")
        code, _, default = kind.partition("=")
        if code == "v":
            options[key] = table.numbers(number, "i", _VECTOR_LIMIT) if table else ()
        elif code == "s":
            options[key] = table.text(number) if table else ""
        else:
            value = 0.0 if code == "f" else int(default or 0)
            options[key] = table.number(number, code, value) if table else value
    return options


# ---------------------------------------------------------------- the model


IDENTIFIER: Final = b"TFL3"
"""The file identifier of TFLite, at byte 4."""

MAX_ENTRIES: Final = 100_000
"""Maximum number of tensors and of operators: converters make fewer, and TVM would take hours."""

IMPORTED_DTYPES: Final = frozenset(
    "float32 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
"""The dtypes that can be imported."""

_MAX_RANK: Final = 8
_MAX_OPERANDS: Final = 10_000
_MAX_CHANNELS: Final = 1 << 20
_DTYPES: Final = (
    "float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64 "
    "resource variant uint32 uint16 int4 bfloat16"
).split()
_NO_TENSOR: Final = -1


class Quantization(NamedTuple):
    """The quantization parameters of a tensor: value = scale · (integer − zero_point).

    Attributes:
        scales: One for the whole tensor, or one for each entry along `axis`.
        zero_points: One for each scale.
        axis: The channel axis of per-channel scales.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: NumPy's name of the dtype, or TFLite's if NumPy does not have it.
        dims: Sizes, −1 for dynamic ones. Sizes of results are placeholders: they follow from the inputs.
        data: Start and end of the values in the file; None for a computed tensor.
        is_variable: Whether the tensor keeps its values between calls.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    data: tuple[int, int] | None
    quantization: Quantization | None
    is_sparse: bool
    is_variable: bool = False


class Operator(NamedTuple):
    """An operator of a file.

    Attributes:
        name: Name in `BuiltinOperator`; for custom operators `CUSTOM` and the operator's name.
        inputs: Tensor indices, negative for omitted operands.
        options: Options by name; empty for an unsupported operator.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]


class Model(NamedTuple):
    """The main graph of a file, in which variables are the last inputs and outputs.

    Attributes:
        operators: Operators in order of execution, without operators on variables. Recurrent operators have an
            additional result for each variable tensor.
        inputs: Tensor index -> name of the input, in order.
        outputs: (name, tensor index) of the outputs, in order.
        variables: Tensor index of each variable's input -> start and end of its initial values; None for zeros.
    """

    tensors: Sequence[Tensor]
    operators: Sequence[Operator]
    inputs: Mapping[int, str]
    outputs: Sequence[tuple[str, int]]
    variables: Mapping[int, tuple[int, int] | None] = MappingProxyType({})

    @property
    def next_values(self) -> Sequence[tuple[str, int]]:
        """The outputs with the next values of the variables, in the order of the variables."""
        return self.outputs[len(self.outputs) - len(self.variables) :]


def is_hybrid(model: Model, operator: Operator) -> bool:
    """Return whether LiteRT quantizes the float32 data of an operator with integer weights at run time."""
    operands = [model.tensors[number] for number in operator.inputs if number >= 0]
    return any(t.dtype == "float32" and t.data is None for t in operands) and any(
        map(_is_quantized_constant, operands)
    )


def list_hybrid_weights(model: Model) -> list[tuple[int, int]]:
    """Return the integer weights of operators with float32 data, as operator and operand index."""
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
    return head[4:8] == IDENTIFIER


def read_model(data: Buffer) -> Model:
    """Read a TFLite model; NotAModel if the file is damaged or of another kind."""
    if not is_tflite(data[:8]):
        raise NotAModel("it does not begin as one")
    budget = Budget(data)
    root = Table(data, _read(data, 0, "I"), budget)
    graphs = list(root.tables(2, MAX_ENTRIES))
    if not graphs:
        raise NotAModel("it has no graph")
    buffers = [_buffer_span(table, len(data)) for table in root.tables(4, 2 * MAX_ENTRIES)]
    codes = [_operator_name(table) for table in root.tables(1, MAX_ENTRIES)]
    tensors, operators = _read_graph(graphs[0], buffers, codes)
    signature = _read_signature(root)
    inputs = graphs[0].numbers(1, "i", _MAX_OPERANDS)
    outputs = graphs[0].numbers(2, "i", _MAX_OPERANDS)
    _check_indices((*inputs, *outputs), len(tensors))
    input_names = list(_names(inputs, tensors, signature[0]))
    output_names = list(_names(outputs, tensors, signature[1]))
    variables = _Variables(tensors)
    for operator in operators:
        if operator.name != "CALL_ONCE" or not 0 < operator.options["subgraph"] < len(graphs):
            variables.add(operator)
        elif not variables.start(
            *_read_graph(graphs[operator.options["subgraph"]], buffers, codes)
        ):
            variables.operators.append(operator)
    listed = variables.list_variables()
    input_names += [name for name, _ in listed.values()]
    names = list(_distinct(iter(input_names), budget))
    output_names += [f"{name}{NEXT}" for name in names[len(inputs) :]]
    following = [variables.current[number] for number in listed]
    indices = [*(variables.renamed.get(n, n) for n in outputs), *following]
    return Model(
        tensors,
        variables.operators,
        dict(zip((*inputs, *listed), names, strict=True)),
        list(zip(_distinct(iter(output_names), budget), indices, strict=True)),
        {number: initial for number, (_, initial) in listed.items()},
    )


def _read_graph(
    graph: Table, buffers: Sequence[tuple[int, int] | None], codes: Sequence[str]
) -> tuple[list[Tensor], list[Operator]]:
    tensors = [_read_tensor(table, buffers) for table in graph.tables(0, MAX_ENTRIES)]
    operators = [_read_operator(table, codes) for table in graph.tables(3, MAX_ENTRIES)]
    for operator in operators:
        _check_indices(operator.inputs, len(tensors), optional=True)
        _check_indices(operator.outputs, len(tensors))
    return tensors, operators


_Handle = tuple[str, str]


class _Variables:
    """Conversion of variables, which a model keeps between calls, to inputs and outputs.

    A read returns the last value assigned in the same call, or else an input. The last assigned value becomes an
    output. A recurrent operator gets an additional result for each variable tensor that it changes.

    Attributes:
        operators: The remaining operators.
        renamed: Tensor -> the tensor that has the same value.
        current: Tensor of a variable at the beginning of a call -> tensor with its value at the end.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.operators: list[Operator] = []
        self.renamed: dict[int, int] = {}
        self.current: dict[int, int] = {}
        self._tensors = tensors
        # Tensor with a handle -> the handle.
        self._handles: dict[int, _Handle] = {}
        # Handle -> tensor with the first, and with the last assigned value.
        self._first: dict[_Handle, int] = {}
        self._assigned: dict[_Handle, int] = {}
        self._initial: dict[_Handle, Tensor] = {}

    def add(self, operator: Operator) -> None:
        name, old = operator.name, operator.inputs
        inputs = tuple(self.renamed.get(number, number) for number in old)
        handle = self._handles.get(inputs[0]) if inputs else None
        if name == "VAR_HANDLE" and len(operator.outputs) == 1:
            self._handles[operator.outputs[0]] = _handle(operator)
        elif name == "ASSIGN_VARIABLE" and handle and len(inputs) == 2 and inputs[1] >= 0:
            self._assigned[handle] = inputs[1]
        elif name == "READ_VARIABLE" and handle and len(operator.outputs) == 1:
            [result] = operator.outputs
            known = self._assigned.get(handle)
            if known is None:
                known = self._first.setdefault(handle, result)
            if known != result:
                self.renamed[result] = known
        else:
            places = [p for p in _STATE_OPERANDS.get(name, ()) if p < len(old) and old[p] >= 0]
            results = [self._change(old[p]) for p in places if self._tensors[old[p]].is_variable]
            self.operators.append(
                operator._replace(inputs=inputs, outputs=(*operator.outputs, *results))
            )

    def _change(self, number: int) -> int:
        self.current[number] = self.renamed[number] = len(self._tensors)
        self._tensors.append(self._tensors[number]._replace(name="", is_variable=False))
        return self.current[number]

    def start(self, tensors: Sequence[Tensor], operators: Sequence[Operator]) -> bool:
        """Record the initial values that a graph assigns; return whether the graph only assigns."""
        handles: dict[int, _Handle] = {}
        for operator in operators:
            inputs = operator.inputs
            if operator.name == "VAR_HANDLE" and len(operator.outputs) == 1:
                handles[operator.outputs[0]] = _handle(operator)
                continue
            is_pair = operator.name == "ASSIGN_VARIABLE" and len(inputs) == 2 and min(inputs) >= 0
            if not is_pair or inputs[0] not in handles or tensors[inputs[1]].data is None:
                return False
            self._initial[handles[inputs[0]]] = tensors[inputs[1]]
        return True

    def list_variables(self) -> dict[int, tuple[str, tuple[int, int] | None]]:
        """Return tensor -> name and initial values of each variable that becomes an input."""
        variables: dict[int, tuple[str, tuple[int, int] | None]] = {
            number: (self._tensors[number].name or f"tensor_{number}", None)
            for number in self.current
        }
        for handle, number in self._first.items():
            following, initial = self._assigned.get(handle, number), self._initial.get(handle)
            is_constant = initial is not None and following == number
            if initial is not None:
                # Shapes of results in the file are placeholders.
                data = initial.data if is_constant else None
                known = self._tensors[number]._replace(dtype=initial.dtype, dims=initial.dims)
                self._tensors[number] = known._replace(data=data)
            if not is_constant:
                self.current[number] = following
                name = handle[1] or self._tensors[number].name or f"tensor_{number}"
                variables[number] = name, initial.data if initial else None
        return variables


def _handle(operator: Operator) -> _Handle:
    return operator.options["container"], operator.options["shared_name"]


def _check_indices(indices: Sequence[int], count: int, *, optional: bool = False) -> None:
    lowest = _NO_TENSOR if optional else 0
    if any(not lowest <= index < count for index in indices):
        raise NotAModel("it names a tensor that it does not have")


def _buffer_span(table: Table, size: int) -> tuple[int, int] | None:
    start, count = table.span(0, 1)
    if not count:
        # Large models store their data after the tables.
        start, count = table.number(1, "Q"), table.number(2, "Q")
    if start + count > size:
        raise NotAModel("it is incomplete")
    return (start, start + count) if count else None


def _read_tensor(table: Table, buffers: Sequence[tuple[int, int] | None]) -> Tensor:
    kind, buffer = table.number(1, "B"), table.number(2, "I")
    if kind >= len(_DTYPES) or (buffer and buffer >= len(buffers)):
        raise NotAModel("one of its tensors has a type or data that do not exist")
    fixed, signature = (table.numbers(number, "i", _MAX_RANK) for number in (0, 7))
    return Tensor(
        name=table.text(3),
        dtype=_DTYPES[kind],
        dims=signature or fixed,
        data=buffers[buffer] if buffer else None,
        quantization=_read_quantization(table.table(4)),
        is_sparse=table.table(6) is not None,
        is_variable=bool(table.number(5, "?")),
    )


def _read_quantization(table: Table | None) -> Quantization | None:
    scales = table.numbers(2, "f", _MAX_CHANNELS) if table else ()
    if not (table and scales):
        return None
    zero_points = table.numbers(3, "q", _MAX_CHANNELS) or (0,) * len(scales)
    if len(zero_points) == 1:
        zero_points *= len(scales)
    if len(zero_points) != len(scales):
        raise NotAModel("one of its tensors has different numbers of scales and zero points")
    return Quantization(scales, zero_points, table.number(6, "i"))


def _operator_name(table: Table) -> str:
    # Old files have only the first field, which cannot store codes above 127.
    number = max(table.number(0, "b"), table.number(3, "i"))
    if number == CUSTOM:
        return f"CUSTOM {table.text(1)}"
    return NAMES[number] if number < len(NAMES) else f"number {number}"


def _read_operator(table: Table, codes: Sequence[str]) -> Operator:
    code = table.number(0, "I")
    if code >= len(codes):
        raise NotAModel("it uses an operator that it does not list")
    inputs, outputs = (table.numbers(number, "i", _MAX_OPERANDS) for number in (1, 2))
    return Operator(codes[code], inputs, outputs, read_options(codes[code], table.table(4)))


def _read_signature(root: Table) -> tuple[dict[int, str], dict[int, str]]:
    """Return tensor index -> name of inputs and of outputs, if the file has a signature."""
    for table in root.tables(7, MAX_ENTRIES):
        if table.number(4, "I") == 0:
            entries = [list(table.tables(number, _MAX_OPERANDS)) for number in (0, 1)]
            inputs, outputs = ({e.number(1, "I"): e.text(0) for e in part} for part in entries)
            return inputs, outputs
    return {}, {}


def _names(
    indices: Sequence[int], tensors: Sequence[Tensor], signature: Mapping[int, str]
) -> Iterator[str]:
    for index in indices:
        yield signature.get(index) or tensors[index].name or f"tensor_{index}"


def _distinct(names: Iterator[str], budget: Budget) -> Iterator[str]:
    """Yield names, with repeated names numbered, because a tensor may be an output twice."""
    for name in number_repeated(names):
        budget.spend(len(name))
        yield name
