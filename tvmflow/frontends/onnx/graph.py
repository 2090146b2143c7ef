"""Reads and changes ONNX graphs; reads models without the bytes of large weights."""

from __future__ import annotations

import copy
import math
import mmap
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.core.files import map_file
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Array
from tvmflow.custom_operators.definition import standard_domain
from tvmflow.frontends.base import NotAModel
from tvmflow.frontends.onnx._header import Field, fields

CUSTOM_DOMAIN: Final = "tvmflow.operators"
"""The domain of the nodes that custom operators implement (see `custom_nodes`)."""

OWN_DOMAIN: Final = "tvmflow"
"""The domain of operators that other frontends need and ONNX lacks."""

NUMBER: Final = "tvmflow.number"
"""The description of a float tensor that is a constant number, not a weight."""
_MAX_KNOWN_ELEMENTS: Final = 64
_PYTORCH_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""PyTorch's exporter lists in this property the modules around a node, and then the operator."""
_QUOTED_WORD: Final = re.compile(r"'([^']*)'")
FROM_START: Final = "tvmflow.from_start"
"""The property of a node whose negative indices are invalid; in ONNX they count from the end."""


class KnownValues(NamedTuple):
    """Small constants and static shapes of the values in a model."""

    constants: Mapping[str, Array]
    shapes: Mapping[str, tuple[int, ...]]


def known_values(model: ModelProto) -> KnownValues:
    """Return the small constants and static shapes of a model; names in its branches must be unique."""
    shapes = {}
    for value in typed_values(model):
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and tensor.HasField("shape"):
            sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
            if all(size >= 0 for size in sizes):
                shapes[value.name] = tuple(sizes)
    shapes.update({tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer})
    initializers = model.graph.initializer
    small = [t for t in initializers if math.prod(t.dims) <= _MAX_KNOWN_ELEMENTS]
    return KnownValues({tensor.name: array_of(tensor) for tensor in small}, shapes)


def element_types(model: ModelProto) -> dict[str, int]:
    """Return the known element types of values in a model and its branches, by name."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    values = {v.name: v.type.tensor_type.elem_type for v in typed_values(model)}
    return types | {name: element_type for name, element_type in values.items() if element_type}


def typed_values(model: ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the type entries (onnx.ValueInfoProto) of values in a model and its branches."""
    for graph in all_graphs(model.graph):
        yield from (*graph.input, *graph.value_info, *graph.output)


def dtype_of(element_type: int) -> str:
    """Return the name of an element type."""
    return str(helper.tensor_dtype_to_np_dtype(element_type))


def is_if(node: NodeProto) -> bool:
    """Return whether a node is ONNX's conditional operator."""
    return bool(node.op_type == "If" and is_standard(node))


def list_branches(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the branches of every If in a graph, without branches nested in them."""
    for node in graph.node:
        if is_if(node):
            yield from subgraphs(node)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and all branches in it, at any depth."""
    yield graph
    for branch in list_branches(graph):
        yield from all_graphs(branch)


def branch_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of the main graph and of all branches in it."""
    for graph in all_graphs(model.graph):
        yield from graph.node


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Return the graphs in a node's attributes, without graphs nested in them."""
    return graphs_in(node.attribute)


def graphs_in(attributes: Iterable[onnx.AttributeProto]) -> Iterator[GraphProto]:
    """Yield the graphs among attributes, without those nested in them."""
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of the main graph, of the functions, and of all subgraphs."""
    yield from with_inner_nodes(model.graph.node)
    for function in model.functions:
        yield from with_inner_nodes(function.node)
        for graph in graphs_in(function.attribute_proto):
            yield from with_inner_nodes(graph.node)


def with_inner_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and all graphs nested in it."""
    yield graph
    for node in with_inner_nodes(graph.node):
        yield from subgraphs(node)


def with_inner_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, each followed by the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from with_inner_nodes(graph.node)


def attribute_text(attributes: Mapping[str, Any], name: str, default: str) -> str:
    """Return a text attribute as str, whether it is str or bytes."""
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return the node's attributes as Python values; text is str."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    texts = {k: v.decode("utf-8", "replace") for k, v in values.items() if isinstance(v, bytes)}
    return values | texts


def opset_of(model: ModelProto) -> int:
    """Return the model's version of the standard opset; the newest version if it imports none."""
    return int(versions_of(model.opset_import).get("", onnx.defs.onnx_opset_version()))


def versions_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the version of each domain; the newest one if a domain is listed several times."""
    entries = sorted((standard_domain(entry.domain), entry.version) for entry in imports)
    return dict(entries)


def is_standard(entry: NodeProto | onnx.OperatorSetIdProto | onnx.FunctionProto) -> bool:
    """Return whether an operator, function or opset belongs to ONNX's standard domain."""
    return not standard_domain(entry.domain)


def node_name(node: NodeProto) -> str:
    """Return a node's name for messages; the name of its output if the node has none."""
    if node.name:
        return quoted(node.name)
    return f"with output {quoted(node.output[0])}" if node.output else "without a name"


def node_labels(model: ModelProto) -> dict[str, str]:
    """Return a label for each tensor: the name or operator of its node, and the PyTorch module."""
    labels: dict[str, str] = {}
    for node in branch_nodes(model):
        label = node.name or f"{node.op_type} ({next(iter(node.output), '')})"
        scopes = next((p.value for p in node.metadata_props if p.key == _PYTORCH_SCOPES), "")
        modules = [name for name in _QUOTED_WORD.findall(scopes)[:-1] if name]
        label = f"{label} ({modules[-1]})" if modules else label
        labels |= dict.fromkeys(node.output, label)
    return labels


def replace_nodes(graph: GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Replace the nodes of a graph; `nodes` may contain some of the present nodes."""
    set_entries(graph.node, [copy.deepcopy(node) for node in nodes])


def set_entries(field: Any, entries: Sequence[Any]) -> None:
    """Replace the entries of a repeated field; `entries` may contain some of the present entries."""
    del field[:]
    field.extend(entries)


def value_info(name: str, dtype: Any, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    """Return the type of a value, given its dtype as NumPy knows it."""
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element_type, list(shape))


def declare(tensor: TensorProto) -> onnx.ValueInfoProto:
    """Return the type entry of a tensor, under the tensor's name."""
    return helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)


def names_read(node: NodeProto) -> set[str]:
    """Return the names of all values that a node reads, including names inside its subgraphs."""
    return {*node.input} | captured_names(node)


def names_used(graph: GraphProto) -> set[str]:
    """Return the names of all values that a graph returns or its nodes read."""
    return {value.name for value in graph.output}.union(*map(names_read, graph.node))


def captured_names(node: NodeProto) -> set[str]:
    """Return all names read or returned in a node's subgraphs; some may be outer values."""
    return set().union(*map(names_used, subgraphs(node)))


def rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values that a graph, or a subgraph in it, reads or returns."""
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        rename_node(node, names)


def rename_node(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename values that a node, or a graph in it, reads."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for inner in subgraphs(node):
        rename_captured(inner, names)


def make_single(
    node: NodeProto,
    inputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[TensorProto],
    opsets: Iterable[onnx.OperatorSetIdProto],
) -> ModelProto:
    """Return a model of one node; its outputs have no types."""
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=list(opsets))


def make_evaluator(model: ModelProto) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function that evaluates a model with ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator: Any = ReferenceEvaluator(model)

    def evaluate(values: Mapping[str, Any]) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(evaluator.run(None, dict(values)))

    return evaluate


# ---------------------------------------------------------------- replacement


class Replacement:
    """The nodes that replace one node; their values' names begin with the name of its first output."""

    def __init__(self, node: NodeProto, suffix: str = "") -> None:
        self.node, self.attributes = node, attributes_of(node)
        # The outputs of a loop that no node reads have no name.
        self._prefix = next(filter(None, node.output), "loop") + suffix
        self.nodes: list[NodeProto] = []

    def name(self, position: int) -> str:
        """Return the name of an operand of the node; empty if the operand is missing."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def result(self, position: int = 0) -> str:
        """Return the name of a result of the node; empty if the result is missing."""
        return self.node.output[position] if position < len(self.node.output) else ""

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def add_all(self, operator: str, *inputs: str, results: int) -> list[str]:
        """Add a node with several results, and return their names."""
        names = [f"{self._prefix}.{len(self.nodes)}.{n}" for n in range(results)]
        self.nodes.append(helper.make_node(operator, inputs, names))
        return names

    def constant(self, array: Any, output: str = "") -> str:
        """Add a constant."""
        tensor = numpy_helper.from_array(np.asarray(array))
        return self.add("Constant", output=output, value=tensor)


# ---------------------------------------------------------------- large tensors
# Large weights stay in their file, perhaps the ONNX file itself, and are memory-mapped when needed. They are
# marked like ONNX's external data, with file, offset and length. So passes work on a small model, and protobuf's
# limit of 2 GiB applies only to the graph.


_MIN_BYTES: Final = 1 << 16
"""The size from which tensors stay in their file; passes read smaller ones, such as shapes and scales."""

# Field numbers of onnx.proto3.
_GRAPH, _INITIALIZER = 7, 5
_DATA_TYPE, _FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 2, 4, 9, 10
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
# The element types whose values have the same bytes in a file as in an array.
_MAPPED_TYPES: Final = frozenset(
    (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
)
# Fields with packed values -> the element type of the values.
_PACKED_TYPES: Final = {_FLOAT_DATA: TensorProto.FLOAT, _DOUBLE_DATA: TensorProto.DOUBLE}


class Place(NamedTuple):
    """The byte range of a tensor in a file."""

    file: str
    offset: int
    length: int


def read_without_large_tensors(path: Path) -> ModelProto:
    """Return the model in an ONNX file; its large weights stay in the file.

    Raises:
        OSError: when the file cannot be read.
        google.protobuf.message.DecodeError: when it is not an ONNX model.
    """
    if path.stat().st_size == 0:
        return ModelProto()
    with path.open("rb") as stream, map_file(stream) as data:
        try:
            content = _shorten(data, str(path), 0, len(data), "model")
        except NotAModel:
            # The file is malformed. Parsing all of it makes protobuf explain the problem.
            content = data[:]
    return ModelProto.FromString(content)


_CHILDREN: Final = {"model": (_GRAPH, "graph"), "graph": (_INITIALIZER, "tensor")}


def _shorten(data: mmap.mmap, file: str, start: int, end: int, kind: str) -> bytes:
    """Return a tensor, or a message of a kind in `_CHILDREN`, without the data of large weights."""
    found = _find_data(list(fields(data, start, end))) if kind == "tensor" else None
    if end - start < _MIN_BYTES or (kind == "tensor" and found is None):
        return data[start:end]
    if found is not None:
        mark = TensorProto()
        leave_in_file(mark, Place(file, found.start, found.end - found.start))
        rest = data[start : found.begin] + data[found.end : end]
        return rest + bytes(mark.SerializeToString())
    number, child = _CHILDREN[kind]
    parts, copied = [], start
    for field in fields(data, start, end):
        if field.number == number and field.end - field.start >= _MIN_BYTES:
            content = _shorten(data, file, field.start, field.end, child)
            head = bytes((*_varint(number << 3 | 2), *_varint(len(content))))
            parts += [data[copied : field.begin], head, content]
            copied = field.end
    return b"".join([*parts, data[copied:end]])


def _find_data(content: list[Field]) -> Field | None:
    """Return the field with all values of a tensor; None if the tensor must be read with the model."""
    types = [field.value for field in content if field.number == _DATA_TYPE]
    data = [
        field for field in content if field.number == _RAW_DATA or field.number in _PACKED_TYPES
    ]
    is_external = any(field.number in (_EXTERNAL_DATA, _DATA_LOCATION) for field in content)
    if len(types) != 1 or types[0] not in _MAPPED_TYPES or len(data) != 1 or is_external:
        return None
    (field,) = data
    is_large = field.end - field.start >= _MIN_BYTES
    return field if is_large and _PACKED_TYPES.get(field.number, types[0]) == types[0] else None


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


# ---------------------------------------------------------------- tensors of a model


def can_stay(tensor: TensorProto, place: Place) -> bool:
    """Return whether the data of an external tensor may stay in its file until it is needed."""
    return tensor.data_type in _MAPPED_TYPES and place.length >= _MIN_BYTES


def leave_in_file(tensor: TensorProto, place: Place) -> None:
    """Mark a tensor as one whose data is in a file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in zip(("location", "offset", "length"), place, strict=True):
        tensor.external_data.add(key=key, value=str(value))


def place_of(tensor: TensorProto) -> Place | None:
    """Return where a tensor's data stayed; None if the tensor contains its data."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(entries["location"], int(entries["offset"]), int(entries["length"]))


def array_of(tensor: TensorProto) -> Array:
    """Return the values of a tensor; if they are in a file, they are mapped copy-on-write."""
    place = place_of(tensor)
    if place is None:
        return np.asarray(numpy_helper.to_array(tensor))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    # TVM accepts only writable arrays
    return np.asarray(
        np.memmap(place.file, dtype, mode="c", offset=place.offset, shape=tuple(tensor.dims))
    )


def with_data(tensor: TensorProto) -> TensorProto:
    """Return the tensor with its data, reading it from the file if necessary."""
    is_in_file = place_of(tensor) is not None
    return numpy_helper.from_array(array_of(tensor), tensor.name) if is_in_file else tensor
