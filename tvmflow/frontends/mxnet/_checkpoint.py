"""Reader of `symbol.json` and `.params` files of MXNet 0.8 to 1.9, without MXNet."""

from __future__ import annotations

import ast
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import ImportFailed
from tvmflow.core.files import map_file
from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.core.types import Array
from tvmflow.frontends.base import number_repeated

if TYPE_CHECKING:
    from tvmflow.custom_operators.definition import Operator
    from tvmflow.custom_operators.loading import Operators
    from tvmflow.frontends.onnx.graph import Place


# ---------------------------------------------------------------- the symbol


# Operators with three inputs and two auxiliary states, which files before MXNet 0.9 omit.
_WITH_STATES: Final = frozenset({"BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm"})
_MAX_NODES: Final = 100_000
# NumPy's limit; a higher rank means that the file is damaged.
_MAX_RANK: Final = 32
_MAX_BYTES: Final = 32 << 20
# Files without a version are from MXNet 0.8 or before.
_OLDEST: Final = 800
# Output names of MXNet operators with more than one output; operators not listed use `output0`, `output1`, …
_WITH_VARIANCE: Final = ("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm", "InstanceNorm")
_OUTPUT_NAMES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_WITH_VARIANCE, ("output", "mean", "var")),
    **dict.fromkeys(("GroupNorm", "LayerNorm"), ("output", "mean", "std")),
    **dict.fromkeys(("Dropout", "LeakyReLU"), ("output", "mask")),
    "L2Normalization": ("output", "norm"),
    "LRN": ("output", "tmp_norm"),
    "RNN": ("output", "state_output", "statecell_output"),
    "make_loss": ("loss",),
}
_NUMBERED: Final = frozenset(
    "SliceChannel _contrib_box_nms _split_v2 amp_multicast sort split".split()
)
"""Operators with numbered outputs in MXNet; hidden outputs count."""


class Node(NamedTuple):
    """A node; a variable if `op` is `null`. `inputs` are (node, output) indices."""

    op: str
    name: str
    attrs: dict[str, str]
    inputs: tuple[tuple[int, int], ...]


class Symbol(NamedTuple):
    """A graph in topological order, and its outputs as (node, output) indices."""

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]


def read_symbol(path: Path) -> Symbol:
    """Return the graph in a symbol file; ImportFailed if the file is damaged or of another kind."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise not_a_symbol(path, f"it has {size:,} bytes, and the limit is {_MAX_BYTES:,}")
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
        # 10901 is 1.9.1
        version = int(graph.get("attrs", {}).get("mxnet_version", ["int", _OLDEST])[1])
        nodes = [_node(raw) for raw in graph["nodes"]]
        heads = tuple(_entry(head) for head in graph["heads"])
    except RecursionError:
        raise not_a_symbol(path, "it is nested too deep") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_a_symbol(path, f"{type(error).__name__}: {last_line(error)}") from None
    if len(nodes) > _MAX_NODES:
        raise not_a_symbol(path, f"it has {len(nodes):,} nodes, and the limit is {_MAX_NODES:,}")
    if not heads:
        raise ImportFailed(f"{path.name}: the symbol has no outputs")
    _check_order(nodes, heads, path)
    if version < 900:
        nodes, heads = _with_auxiliary_states(nodes, heads)
    if version < 905:
        nodes = [_without_flat_axis(node) for node in nodes]
    return Symbol(tuple(nodes), heads)


def read_shape(node: Node) -> tuple[int | str, ...] | None:
    """Return the shape of a variable with "" for unknown sizes, or None if the symbol has no shape."""
    try:
        value = ast.literal_eval(node.attrs.get("__shape__", "").replace("L", ""))
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(value, tuple | list) or not 0 < len(value) <= _MAX_RANK:
        return None
    if not all(isinstance(size, int) for size in value):
        return None
    # 0 is an unknown size; with NumPy shape semantics, -1.
    return tuple(int(size) if size > 0 else "" for size in value)


def not_a_symbol(path: Path, reason: str) -> ImportFailed:
    return ImportFailed(
        f"{path.name} is not an MXNet symbol: {reason}",
        fix="name the checkpoint by its prefix and epoch: PREFIX-symbol.json and PREFIX-0000.params",
    )


def _node(raw: dict[str, Any]) -> Node:
    # MXNet 0.8 has operator attributes in `param` and user attributes in `attr`; later versions have both in
    # `attr`, and newer versions in `attrs`.
    keys = ("param",) if "param" in raw else ("attr", "attrs")
    attrs: dict[str, str] = {}
    for key in keys:
        attrs.update({str(name): str(value) for name, value in (raw.get(key) or {}).items()})
    if not (isinstance(raw["op"], str) and isinstance(raw["name"], str)):
        raise TypeError("the operator or the name of a node is not a string")
    # Raise for lone surrogates, which cannot be written to an ONNX model.
    "".join((raw["op"], raw["name"], *attrs, *attrs.values())).encode()
    return Node(raw["op"], raw["name"], attrs, tuple(_entry(entry) for entry in raw["inputs"]))


def _entry(raw: list[int]) -> tuple[int, int]:
    # Old files have [node, output], newer files [node, output, version].
    return int(raw[0]), int(raw[1])


def _with_auxiliary_states(
    nodes: list[Node], heads: tuple[tuple[int, int], ...]
) -> tuple[list[Node], tuple[tuple[int, int], ...]]:
    """Add variables for auxiliary states that old files omit (MXNet: `UpgradeJSON_000800_000900`)."""
    upgraded: list[Node] = []
    moved: list[int] = []
    for node in nodes:
        inputs = [(moved[index], output) for index, output in node.inputs]
        if node.op in _WITH_STATES and len(inputs) == 3:
            for state in ("moving_mean", "moving_var"):
                inputs.append((len(upgraded), 0))
                upgraded.append(Node("null", f"{node.name}_{state}", {}, ()))
        moved.append(len(upgraded))
        upgraded.append(node._replace(inputs=tuple(inputs)))
    return upgraded, tuple((moved[index], output) for index, output in heads)


def _without_flat_axis(node: Node) -> Node:
    """Remove axis -1 of argmax and argmin, before 0.9.5 all axes (`UpgradeJSON_000904_000905`)."""
    if node.op in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        return node._replace(attrs={k: v for k, v in node.attrs.items() if k != "axis"})
    return node


def _check_order(nodes: Sequence[Node], heads: Sequence[tuple[int, int]], path: Path) -> None:
    for position, node in enumerate(nodes):
        if any(not 0 <= index < position or output < 0 for index, output in node.inputs):
            raise ImportFailed(
                f"{path.name} is damaged: node {position} ({excerpt(node.op)} {quoted(node.name)}) reads a node that does not precede it"
            )
    if any(not 0 <= index < len(nodes) or output < 0 for index, output in heads):
        raise ImportFailed(f"{path.name} is damaged: an output is not a node of the graph")


# ---------------------------------------------------------------- custom operators

DOMAIN: Final = "mxnet"
CUSTOM: Final = "Custom"
_TYPE: Final = "op_type"


def find_operator(node: Node, operators: Operators) -> Operator | None:
    if node.op != CUSTOM:
        return None
    return operators.find(DOMAIN, node.attrs.get(_TYPE, ""), 1)


def label(node: Node) -> str:
    """Return the operator of a node for messages, with the type of a `Custom`."""
    return f"{CUSTOM} ({node.attrs.get(_TYPE, '')})" if node.op == CUSTOM else node.op


def count_outputs(symbol: Symbol, index: int) -> int:
    """Return the number of a node's outputs that the graph reads, because symbols do not store it."""
    read = [entry for node in symbol.nodes for entry in node.inputs]
    return 1 + max(
        (output for source, output in (*read, *symbol.heads) if source == index), default=0
    )


def custom_attributes(attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a `Custom`, which MXNet stores as strings."""
    return {k: v for k, v in attributes.items() if k != _TYPE and not k.startswith("__")}


def output_names(symbol: Symbol) -> list[str]:
    """Return the names of MXNet's `Symbol.list_outputs`; repeated names are numbered."""
    names = (output_name(symbol.nodes[index], output) for index, output in symbol.heads)
    return list(number_repeated(names))


def output_name(node: Node, output: int) -> str:
    if node.op == "null":
        return node.name
    names = _OUTPUT_NAMES.get(node.op, ())
    if output < len(names):
        return f"{node.name}_{names[output]}"
    has_values = node.op == "topk" and node.attrs.get("ret_typ") in ("both", "value")
    number = output if has_values or node.op in _NUMBERED else ""
    return f"{node.name}_output{number}"


def find_states(symbol: Symbol) -> dict[str, str]:
    """Return the variables that `RNN` begins with, each with the output that is its final state."""
    names = dict(zip(symbol.heads, output_names(symbol), strict=True))
    return {
        symbol.nodes[source].name: names[index, output]
        for index, node in enumerate(symbol.nodes)
        if node.op == "RNN"
        for output, (source, _) in enumerate(node.inputs[2:4], 1)
        if symbol.nodes[source].op == "null" and (index, output) in names
    }


# ---------------------------------------------------------------- the parameters
# The format is defined by `NDArray::Save` and `NDArray::Load` in MXNet's `src/ndarray/ndarray.cc`.
# Names can be read without numpy and without reading values.


_FILE_MAGIC: Final = 0x112


class _Format(NamedTuple):
    """The header of an array in one version of the format."""

    has_storage: bool = False
    rank_code: str = "I"
    dim_code: str = "q"
    no_value: int = 0
    """The rank of an array without a value."""


_FORMATS: Final[dict[int, _Format]] = {
    0xF993FAC8: _Format(),  # MXNet 0.9: 64-bit dimensions
    0xF993FAC9: _Format(has_storage=True),  # 0.12: sparse arrays
    # 1.5: NumPy shape semantics, in which rank 0 is a scalar
    0xF993FACA: _Format(has_storage=True, rank_code="i", no_value=-1),
}
# Storage type -> (name, number of index arrays after the values).
_SPARSE: Final[dict[int, tuple[str, int]]] = {1: ("row-sparse", 1), 2: ("CSR", 2)}

_BFLOAT16: Final = "bfloat16"
# (dtype, bytes of an element) by MXNet's type number.
_DTYPES: Final = (
    *(("float32", 4), ("float64", 8), ("float16", 2), ("uint8", 1), ("int32", 4), ("int8", 1)),
    *(("int64", 8), ("bool", 1), ("int16", 2), ("uint16", 2), ("uint32", 4), ("uint64", 8)),
    (_BFLOAT16, 2),
)
_MAX_ELEMENTS: Final = 1 << 56


class Weight(NamedTuple):
    """A memory-mapped array of a checkpoint, and its place in the file."""

    array: Array
    place: Place


class _Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    offset: int


class _Reader:
    """A sequential reader of a file; its errors name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            is_empty = path.stat().st_size == 0
            mapped = b"" if is_empty else map_file(stream)
        self._data = memoryview(mapped)
        self.position = 0

    def take(self, size: int, what: str) -> memoryview:
        """Return the next `size` bytes; errors call them `what`."""
        if size > len(self._data) - self.position:
            raise self.damaged(
                f"it ends within {what}: {size} bytes are needed at byte {self.position}, "
                f"{len(self._data) - self.position} are left"
            )
        self.position += size
        return self._data[self.position - size : self.position]

    def number(self, code: str, what: str) -> int:
        """Return the next number; `code` is its `struct` format character."""
        return self.numbers(code, 1, what)[0]

    def numbers(self, code: str, count: int, what: str) -> tuple[int, ...]:
        code = f"<{count}{code}"
        return struct.unpack(code, self.take(struct.calcsize(code), what))

    def damaged(self, reason: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path.name} is damaged: {reason}",
            fix="copy or export the checkpoint again, and compare its size with that of the original",
        )

    def unsupported(self, reason: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path.name} is not a .params file of MXNet 0.8 to 1.9: {reason}",
            fix="name the checkpoint by its prefix and epoch: PREFIX-symbol.json and PREFIX-0000.params",
        )

    def is_at_end(self) -> bool:
        return self.position == len(self._data)


def read_params(path: Path) -> dict[str, Weight]:
    """Return the arrays of a checkpoint by name, without the prefixes `arg:` and `aux:`."""
    import numpy as np

    from tvmflow.frontends.onnx.graph import Place

    params: dict[str, Weight] = {}
    for name, stored in read_stored(path).items():
        if isinstance(stored, str):
            raise ImportFailed(
                f"{path.name}: {quoted(name)} cannot be imported: {stored}",
                fix="store the array densely (`array.tostype('default')`) as float32 and save the checkpoint again",
            )
        array = np.frombuffer(stored.data, np.dtype(stored.dtype)).reshape(stored.shape)
        params[name] = Weight(array, Place(str(path), stored.offset, stored.data.nbytes))
    return params


def read_stored(path: Path) -> dict[str, _Stored | str]:
    """Return name -> array of a checkpoint, or the reason why the array is not supported."""
    reader = _Reader(path)
    head = bytes(reader.take(min(8, path.stat().st_size), "its first number"))
    if head[:4] == b"PK\x03\x04":
        raise reader.unsupported("it is a NumPy archive, the format of MXNet 2")
    if head != struct.pack("<Q", _FILE_MAGIC):
        raise reader.unsupported(f"it starts with {head.hex() or 'nothing'}")
    reader.take(8, "the header")

    count = reader.number("Q", "the number of arrays")
    arrays = [_read_array(reader, f"array {index + 1} of {count}") for index in range(count)]
    name_count = reader.number("Q", "the number of names")
    if name_count == 0 and count > 0:
        raise reader.unsupported(f"its {count} arrays have no names")
    if name_count != count:
        raise reader.damaged(f"it has {count} arrays and {name_count} names")
    names = [_read_name(reader, index + 1) for index in range(count)]
    if not reader.is_at_end():
        raise reader.damaged("bytes follow the last name")

    stored: dict[str, _Stored | str] = {}
    for name, array in zip(names, arrays, strict=True):
        plain = name.removeprefix("arg:").removeprefix("aux:")
        if plain in stored:
            raise reader.damaged(f"it has two arrays named {quoted(plain)}")
        stored[plain] = array
    return stored


def _read_name(reader: _Reader, index: int) -> str:
    size = reader.number("Q", f"the length of name {index}")
    try:
        return bytes(reader.take(size, f"name {index}")).decode()
    except UnicodeDecodeError:
        raise reader.damaged(f"name {index} is not text") from None


def _read_array(reader: _Reader, what: str) -> _Stored | str:
    """Return one array, or the reason why it is not supported."""
    magic = reader.number("I", what)
    # Before 64-bit dimensions, there was no magic number, and the first value is the rank.
    form = _FORMATS.get(magic, _Format(dim_code="I"))
    storage = reader.number("i", what) if form.has_storage else 0
    if storage in _SPARSE:
        return _skip_sparse(reader, what, storage, form)
    if storage != 0:
        raise reader.damaged(f"{what} has the unknown storage type {storage}")
    shape = _shape(reader, what, form, rank=None if magic in _FORMATS else magic)
    if shape is None:
        return "it was saved without a value"
    reader.take(8, f"the device of {what}")
    dtype, width = _dtype(reader, what)
    offset = reader.position
    data = reader.take(math.prod(shape) * width, f"the data of {what}")
    return "its type is bfloat16" if dtype == _BFLOAT16 else _Stored(dtype, shape, data, offset)


def _dtype(reader: _Reader, what: str) -> tuple[str, int]:
    """Return the dtype of an array and the bytes of an element."""
    flag = reader.number("i", f"the type of {what}")
    if not 0 <= flag < len(_DTYPES):
        raise reader.damaged(f"{what} has the unknown type {flag}")
    return _DTYPES[flag]


def _shape(
    reader: _Reader, what: str, form: _Format, rank: int | None = None
) -> tuple[int, ...] | None:
    """Return the shape of an array, or None if it has no value."""
    if rank is None:
        rank = reader.number(form.rank_code, f"the rank of {what}")
    if rank == form.no_value:
        return None
    if not 0 <= rank <= _MAX_RANK:
        raise reader.damaged(f"{what} cannot have {rank} dimensions")
    dims = reader.numbers(form.dim_code, rank, f"the shape of {what}")
    # NumPy checks the size of an empty array as if its dimensions of 0 were 1.
    if any(dim < 0 for dim in dims) or math.prod(dim or 1 for dim in dims) > _MAX_ELEMENTS:
        raise reader.damaged(f"{what} has the shape {dims}")
    return dims


def _skip_sparse(reader: _Reader, what: str, storage: int, form: _Format) -> str:
    """Skip a sparse array, because names follow it; return why it is not supported."""
    name, index_arrays = _SPARSE[storage]
    stored = _shape(reader, what, form) or ()
    if _shape(reader, what, form) is not None:
        reader.take(8, f"the device of {what}")
        sizes = [_dtype(reader, what)[1] * math.prod(stored)]
        for _ in range(index_arrays):
            width = _dtype(reader, what)[1]
            sizes.append(width * math.prod(_shape(reader, what, form) or ()))
        # Values are stored before the index arrays.
        for size in sizes:
            reader.take(size, what)
    return f"its storage is {name}"
