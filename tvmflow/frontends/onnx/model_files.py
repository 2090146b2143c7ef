"""Reads ONNX models, wherever their external data lie; can expose intermediate tensors as outputs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from tvmflow.core.errors import ImportFailed
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.formatting import count_text, excerpt, last_line, quoted
from tvmflow.frontends.base import MAX_ELEMENTS, NotAModel
from tvmflow.frontends.frontend import MODEL, list_inner
from tvmflow.frontends.inputs import MAX_SIGNATURE
from tvmflow.frontends.onnx import EXTERNAL
from tvmflow.frontends.onnx._header import MAX_NODES, MAX_WEIGHTS
from tvmflow.frontends.onnx._inlining import function_id, inline_functions
from tvmflow.frontends.onnx.graph import (
    OWN_DOMAIN,
    Place,
    all_nodes,
    can_stay,
    is_standard,
    leave_in_file,
    node_name,
    place_of,
    read_without_large_tensors,
    subgraphs,
    versions_of,
    with_inner_nodes,
)
from tvmflow.frontends.onnx.operators import supported_operators


def link_files(files: Mapping[str, Path], folder: Path) -> Path:
    """Link the model and its external data into one folder, as ONNX expects; return the model's path."""
    model = folder / "model.onnx"
    _link(model, files[MODEL])
    for role, path in files.items():
        if role.startswith(EXTERNAL):
            _link(folder / role.removeprefix(EXTERNAL), path)
    return model


def _link(link: Path, path: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    symlink_or_copy(path.resolve(), link)


def read_model(files: Mapping[str, Path]) -> ModelProto:
    """Return the model; its large weights stay in their files (see `graph`).

    Raises:
        NotAModel: when the file is not an ONNX model.
        ImportFailed: when a file cannot be read.
    """
    try:
        model = read_without_large_tensors(files[MODEL])
    except OSError as error:
        raise ImportFailed(f"the ONNX file cannot be read: {last_line(error)}") from error
    except Exception as error:
        # protobuf's errors have no public base class in common.
        raise NotAModel(last_line(error)) from error
    check_model(model)
    # Large weights stay in the model's own file, which is read like an external data file.
    data_files = {f"{EXTERNAL}{files[MODEL]}": files[MODEL], **files}
    weights = len(model.graph.initializer)
    for index, tensor in enumerate(all_tensors(model)):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = _find_external(tensor, data_files)
            # Only the passes over weights support tensors that stay in their files.
            if index < weights and can_stay(tensor, place):
                leave_in_file(tensor, place)
            else:
                _load(tensor, place)
    check_tensors(model)
    return model


def _find_external(tensor: TensorProto, files: Mapping[str, Path]) -> Place:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name, location = quoted(tensor.name), entries.get("location", "")
    path = files.get(f"{EXTERNAL}{location}") or files.get(f"{EXTERNAL}{PurePosixPath(location)}")
    if path is None:
        raise ImportFailed(
            f"the data of {name} is in another file, {quoted(location)}, which the recipe does not name",
            fix=f"write `files: {{{excerpt(location)}: SHA256}}` below `model`, with the digest of that file",
        )
    try:
        size = path.stat().st_size
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else size - offset
        if offset < 0 or length < 0 or offset + length > size:
            raise ImportFailed(
                f"the data of {name} is not in {quoted(location)}: it would be {length} bytes from byte "
                f"{offset}, and the file has {size} bytes",
                fix="copy or export the model again with its external data",
            )
        return Place(str(path), offset, length)
    except ValueError:
        where = excerpt(f"offset {entries.get('offset')}, length {entries.get('length')}")
        raise NotAModel(f"the data of {name} has the position {where}") from None
    except OSError as error:
        text = f"the data of {name} in {quoted(location)} cannot be read: {error.strerror}"
        raise ImportFailed(text) from error


def _load(tensor: TensorProto, place: Place) -> None:
    try:
        with Path(place.file).open("rb") as stream:
            stream.seek(place.offset)
            tensor.raw_data = stream.read(place.length)
    except OSError as error:
        text = f"the data of {quoted(tensor.name)} cannot be read: {error.strerror}"
        raise ImportFailed(text) from error
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def add_outputs(model: ModelProto, names: Sequence[str]) -> int:
    """Append intermediate tensors to the model's outputs; return how many were not outputs before.

    Raises:
        ImportFailed: when the model has no tensor with one of these names.
    """
    outputs = {value.name for value in model.graph.output}
    tensors = {name for node in model.graph.node for name in node.output if name}
    fix = "name tensors, which are outputs of nodes, not nodes; netron.app shows them"
    inner = list_inner(names, outputs, tensors, fix)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return len(inner)


def save_for_reference(path: Path, names: Sequence[str], *, inlines: bool) -> Path:
    """Save beside a model a copy that also returns intermediate tensors; it shares the external data."""
    model = onnx.load(str(path), format="protobuf", load_external_data=False)
    add_outputs(model, names)
    copy = path.with_name(f"cut-{path.name}")
    onnx.save(inline_functions(model) if inlines else model, str(copy))
    return copy


# ---------------------------------------------------------------- validation
# Files are untrusted, and the passes and TVM's importer rely on these checks. `onnx.checker` would refuse models that
# ONNX Runtime accepts and that are in use.


# The bits per element of types for which NumPy's type is larger.
_PACKED_BITS: Final = {
    **dict.fromkeys((TensorProto.UINT4, TensorProto.INT4, TensorProto.FLOAT4E2M1), 4),
    **dict.fromkeys((TensorProto.UINT2, TensorProto.INT2), 2),
    **dict.fromkeys((TensorProto.FLOAT6E2M3, TensorProto.FLOAT6E3M2), 6),
}
_COMPLEX: Final = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def _invalid(reason: str) -> ImportFailed:
    return ImportFailed(
        f"the model is not valid ONNX: {reason}",
        fix="export it again; `onnx.checker.check_model` may say more",
    )


def check_model(model: ModelProto) -> None:
    """Check everything except the data of tensors, which may not be loaded yet."""
    if not model.HasField("graph"):
        raise NotAModel("it has no graph")
    nodes = list(all_nodes(model))
    _check_size(model, nodes)
    _check_names(model, nodes)
    _check_domains(nodes)
    _check_versions(model, nodes)
    for owner, own in ((model, model.graph), *((f, f) for f in model.functions)):
        _check_arities(owner.opset_import, with_inner_nodes(own.node))
    _check_functions(model)
    _check_outputs(model.graph)
    _check_edges(model.graph, [])


def all_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor in the model: weights and attributes, including those of all subgraphs."""
    yield from model.graph.initializer
    nodes = list(all_nodes(model))
    for node in nodes:
        for graph in subgraphs(node):
            yield from graph.initializer
    defaults = (function.attribute_proto for function in model.functions)
    for attribute in itertools.chain(*(node.attribute for node in nodes), *defaults):
        if attribute.type == AttributeProto.TENSOR and not attribute.ref_attr_name:
            yield attribute.t
        elif attribute.type == AttributeProto.TENSORS and not attribute.ref_attr_name:
            yield from attribute.tensors


# ---------------------------------------------------------------- sizes, names, versions


def _check_size(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    signature = len(model.graph.input) + len(model.graph.output) - len(model.graph.initializer)
    for count, limit, noun in (
        (len(nodes), MAX_NODES, "nodes"),
        (len(model.graph.initializer), MAX_WEIGHTS, "weights"),
        (signature, MAX_SIGNATURE, "inputs and outputs"),
    ):
        if count > limit:
            raise ImportFailed(
                f"the model has {count:,} {noun}, and tvmflow imports at most {limit:,}",
                fix="simplify the model, for example with onnxsim, or split it",
            )


def _check_names(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Check that all names are valid UTF-8, because protobuf passes on other bytes unchanged."""
    names: list[Any] = [entry.domain for entry in model.opset_import]
    for graph in (model.graph, *(inner for node in nodes for inner in subgraphs(node))):
        names += [value.name for value in (*graph.input, *graph.output)]
    for tensor in all_tensors(model):
        entries = ((entry.key, entry.value) for entry in tensor.external_data)
        names += [tensor.name, *itertools.chain(*entries)]
    for function in model.functions:
        names += [function.name, function.domain, *function.input, *function.output]
    for value in model.graph.input:
        names += [dim.dim_param for dim in value.type.tensor_type.shape.dim]
    for node in nodes:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    if not all(isinstance(name, str) for name in names):
        raise NotAModel("a name in it is not UTF-8 text")


def _check_domains(nodes: Sequence[NodeProto]) -> None:
    """Refuse nodes in the domains that tvmflow reserves: their converters do not check attributes."""
    for node in nodes:
        if node.domain.partition(".")[0] == OWN_DOMAIN:
            raise ImportFailed(
                f"{excerpt(node.op_type)} (node {node_name(node)}) has the domain {quoted(node.domain)}, which tvmflow reserves",
                fix="give the operator another domain where the model is made",
            )


def _check_versions(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Check that the model states its versions, and that the installed onnx supports them."""
    if not model.HasField("ir_version"):
        raise _invalid("it does not name its IR version")
    if model.ir_version > onnx.IR_VERSION:
        raise ImportFailed(
            f"the model has the IR version {model.ir_version}, and onnx {onnx.__version__} reads versions up to {onnx.IR_VERSION}",
            fix="export it with an older version of the exporter",
        )
    opsets = {entry.version for entry in model.opset_import if is_standard(entry)}
    if not opsets and any(is_standard(node) for node in nodes):
        raise ImportFailed(
            "the model does not name the opset of its operators: it has no opset_import",
            fix="export it again with a current version of the exporter",
        )
    if len(opsets) > 1:
        raise _invalid(f"it names several opsets: {', '.join(map(str, sorted(opsets)))}")
    newest = onnx.defs.onnx_opset_version()
    for function in model.functions:
        opsets |= {entry.version for entry in function.opset_import if is_standard(entry)}
    for opset in opsets:
        if not 1 <= opset <= newest:
            raise ImportFailed(
                f"the model uses opset {opset}, and onnx {onnx.__version__} knows opsets 1 to {newest}",
                fix=f"export it with opset {newest} or older",
            )


def _check_functions(model: ModelProto) -> None:
    """Check a model's functions; the ONNX operator of the same name would run instead of a function."""
    names = [".".join(filter(None, function_id(function))) for function in model.functions]
    if repeated := _first_repeated(names):
        raise _invalid(f"it has two functions with the name {quoted(repeated)}")
    for function in model.functions:
        inputs, outputs = (
            [onnx.ValueInfoProto(name=n) for n in side]
            for side in (function.input, function.output)
        )
        graph = helper.make_graph(function.node, function.name, inputs, outputs)
        _check_edges(graph, [], f"its function {quoted(function.name)}: ")
        if is_standard(function) and function.name in supported_operators():
            raise ImportFailed(
                f"the model has a function of its own with the name of ONNX's operator {quoted(function.name)}",
                fix="give it another name or domain where the model is made",
            )


# ---------------------------------------------------------------- the graph


def _check_outputs(graph: GraphProto) -> None:
    if not graph.output:
        raise _invalid("it has no outputs")
    for output in graph.output:
        if output.HasField("type") and not output.type.HasField("tensor_type"):
            kind = str(output.type.WhichOneof("value")).removesuffix("_type").replace("_", " ")
            raise ImportFailed(
                f"the output {quoted(output.name)} is not a tensor, but of the type {kind}",
                fix="export a model whose outputs are tensors",
            )


def _check_arities(imports: Iterable[onnx.OperatorSetIdProto], nodes: Iterable[NodeProto]) -> None:
    """Check that nodes of the standard opset have as many inputs and outputs as their operators need."""
    version = versions_of(imports).get("", 1)
    for node in nodes:
        # For operators that TVM lacks, the importer reports the error.
        if not is_standard(node) or node.op_type not in supported_operators():
            continue
        least = _least_arity(node.op_type, version)
        for noun, count in zip(("input", "output"), least, strict=True):
            size = len(getattr(node, noun))
            if size < count:
                start = f"{quoted(node.op_type)} (node {node_name(node)}) has"
                raise _invalid(f"{start} {count_text(size, noun)}, and needs {count}")


@functools.cache
def _least_arity(operator: str, version: int) -> tuple[int, int]:
    if not onnx.defs.has(operator, version, ""):
        # For an operator that this opset lacks, the importer reports the error.
        return 0, 0
    schema = onnx.defs.get_schema(operator, version, "")
    return schema.min_input, schema.min_output


def _check_edges(graph: GraphProto, outer: list[set[str]], where: str = "") -> None:
    """Check that each tensor is computed once, before it is read, and that all outputs are computed.

    A subgraph can also read the names in `outer`, those of its enclosing graphs. `where` begins messages.
    """
    weights = [tensor.name for tensor in graph.initializer]
    sparse = [str(tensor.values.name) for tensor in graph.sparse_initializer]
    for node in graph.node:
        if any(attribute.name == "sparse_value" for attribute in node.attribute):
            sparse += node.output
    if sparse:
        raise ImportFailed(
            f"the weight {quoted(sparse[0])} is sparse, which is not supported",
            fix="store it densely",
        )
    inputs = [value.name for value in graph.input]
    for kind, names in (("inputs", inputs), ("weights", weights)):
        if repeated := _first_repeated(names):
            raise _invalid(f"{where}it has two {kind} with the name {quoted(repeated)}")
    made = {*weights, *inputs}
    visible = [*outer, made]
    for node in graph.node:
        for name in node.input:
            if name and not any(name in names for names in visible):
                raise _invalid(
                    f"{where}{quoted(node.op_type)} (node {node_name(node)}) reads {quoted(name)}, which no node before it makes"
                )
        for subgraph in subgraphs(node):
            _check_edges(subgraph, visible, where)
        for name in filter(None, node.output):
            if name in made:
                raise _invalid(f"{where}two nodes make {quoted(name)}")
            made.add(name)
    outputs = [value.name for value in graph.output]
    for name in outputs:
        if not any(name in names for names in visible):
            raise _invalid(f"{where}nothing makes its output {quoted(name)}")
    if repeated := _first_repeated(outputs):
        raise _invalid(f"{where}it has two outputs with the name {quoted(repeated)}")


def _first_repeated(names: Sequence[str]) -> str:
    return next((name for name, count in Counter(names).items() if count > 1), "")


# ---------------------------------------------------------------- tensors


def check_tensors(model: ModelProto) -> None:
    """Check that every tensor has as much data as its type and shape need."""
    for tensor in all_tensors(model):
        if problem := _tensor_problem(tensor):
            raise _invalid(f"the constant {quoted(str(tensor.name))} {problem}")


def _tensor_problem(tensor: TensorProto) -> str:
    dims = list(tensor.dims)
    if any(size < 0 for size in dims):
        return f"has the shape {dims}"
    elements = math.prod(dims)
    if elements > MAX_ELEMENTS:
        return f"has the shape {dims}, which has more than 2^31 elements"
    kind = tensor.data_type
    if kind not in helper.get_all_tensor_dtypes():
        return f"has the unknown type {kind}"
    bits = _PACKED_BITS.get(kind) or 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize
    place, packed = place_of(tensor), math.ceil(elements * bits / 8)
    if (place or tensor.HasField("raw_data")) and kind != TensorProto.STRING:
        size, needed = place.length if place else len(tensor.raw_data), packed
        text = f"{count_text(size, 'byte')} of data"
    else:
        size = len(getattr(tensor, helper.tensor_dtype_to_field(kind)))
        needed = packed if kind in _PACKED_BITS else elements * (2 if kind in _COMPLEX else 1)
        text = count_text(size, "value")
    return "" if size == needed else f"has {text}, and needs {needed}"
