"""Reader of `torch.export` archives for planning, and writer of a checked copy for PyTorch.

The graph is a JSON document in a zip file: `NAME/models/model.json` from PyTorch 2.8 on, formerly
`serialized_exported_program.json`; both have the schema of torch/_export/serde/schema.py. Weights
are not read, and pickles in the archive are not loaded.

`torch.export.load` trusts its file. It evaluates size formulas as Python, calls any function that an operator names,
runs guard code, unpickles constants, imports modules that a container names, and loads compiled libraries (see in
PyTorch 2.13: `_export/serde/serialize.py`, `export/pt2_archive/_package.py`, `export/_unlift.py`,
`utils/_pytree.py`). The check of the graph refuses such archives. PyTorch gets a copy with only the checked files.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import math
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import ImportFailed
from tvmflow.core.file_kinds import is_graph
from tvmflow.core.formatting import excerpt, last_line, names_text, quoted
from tvmflow.frontends._reading import read_once
from tvmflow.frontends.base import (
    NEXT,
    Limits,
    ModelInput,
    NotAModel,
    number_repeated,
    unsupported_dtype,
)

# ---------------------------------------------------------------- allowed content of a graph

# PyTorch generates code in which names of values become variables.
_VALUE: Final = re.compile(r"\w*")
# Names of weights, modules and classes, without characters that end a string or a line.
_NAME: Final = re.compile(r"[\w.@:/+<> -]*")
_OPERATOR: Final = re.compile(
    r"torch\.ops\.(aten|prims|torchvision|quantized_decomposed|onnx|onnx_symbolic)\._?[a-zA-Z0-9]\w*\.[a-zA-Z]\w*"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.[a-zA-Z]\w*"
    r"|torch\.ops\.higher_order\.(cond|map|map_impl|scan|while_loop|associative_scan|invoke_subgraph"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast|auto_functionalized|auto_functionalized_v2)"
    r"|torch\._?sym_\w+|torch\._C\._set_grad_enabled"
    r"|math\.[a-z]\w*"
    r"|_operator\.(abs|add|and_|eq|floordiv|ge|getitem|gt|invert|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow"
    r"|rshift|sub|truediv|xor)"
)
# `from_file` maps a file, or creates it.
_REFUSED_OPERATOR: Final = "torch.ops.aten.from_file."
# A formula of sizes in sympy's notation; only `_FUNCTIONS` may be called, and attributes are not allowed.
_FORMULA: Final = re.compile(r"[\w.+\-*/%<>=~&|!,()' ]+", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?[\d.]+(?:e[+-]?\d{1,4})?")
_MAX_FORMULA: Final = 10_000
# Limits for sympy: bits of a value, terms of an expanded product, and parts of a formula.
_MAX_BITS: Final = 4096
_MAX_TERMS: Final = 10_000
_MAX_PARTS: Final = 1000
_SIZE_BITS: Final = 64
_FUNCTIONS: Final = frozenset(
    "Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge "
    "GreaterThan Gt Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod "
    "ModularIndexing Mul Ne Not Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt "
    "StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where Xor ceiling floor "
    "sqrt".split()
)


def check_graph(document: Mapping[str, Any]) -> None:
    """Check that PyTorch would not run any text in a graph as code."""
    for key, text in _texts("", document):
        _RULES.get(key, _check_name)(text)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each string of a document with its field name, and each field name with an empty one."""
    pending = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            # `metadata` holds names of modules and source positions, which PyTorch keeps as text.
            fields = {} if key == "metadata" else value
            yield from (("", str(name)) for name in fields)
            pending += fields.items()
        elif isinstance(value, list):
            pending += ((key, entry) for entry in value)
        elif isinstance(value, str):
            yield key, value


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise NotAModel(f"its graph has the name {quoted(text)}, which PyTorch does not make")


def _check_value(text: str) -> None:
    if not _VALUE.fullmatch(text):
        raise NotAModel(f"its graph has a value with the name {quoted(text)}")


def _check_operator(text: str) -> None:
    if not _OPERATOR.fullmatch(text) or text.startswith(_REFUSED_OPERATOR):
        raise NotAModel(
            f"its graph calls {quoted(text)}, which is not an operator that tvmflow lets PyTorch run"
        )


def _check_formula(text: str) -> None:
    try:
        if len(text) > _MAX_FORMULA or not _FORMULA.fullmatch(text):
            raise ValueError
        tree = ast.parse(text, mode="eval")
        if sum(1 for _ in ast.walk(tree)) > _MAX_PARTS:
            raise _TooLarge
        _measure(tree.body)
    except _TooLarge:
        raise NotAModel(
            f"its graph has the size {quoted(text)}, which takes too long to compute"
        ) from None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise NotAModel(f"its graph has the size {quoted(text)}, which is not a formula") from None


class _TooLarge(Exception):
    """A formula whose value or expansion could be too large."""


class _Extent(NamedTuple):
    """Upper bounds of a formula: the bits of its value, and the number of terms after expansion."""

    bits: float
    terms: float
    constant: float | None = None


_SIZE: Final = _Extent(_SIZE_BITS, 1.0)


def _measure(node: ast.expr) -> _Extent:
    """Return upper bounds of a formula; ValueError if it is none, _TooLarge if a part is too large."""
    extent = _measure_part(node)
    if extent.bits > _MAX_BITS or extent.terms > _MAX_TERMS:
        raise _TooLarge
    return extent


def _measure_part(node: ast.expr) -> _Extent:
    match node:
        case ast.Constant(value=str() as text):
            # A number as text, or the name of a size.
            return _constant(text) if _NUMBER.fullmatch(text) else _SIZE
        case ast.Constant(value=float() as number) if math.isinf(number):
            # sympy would expand the exponent of a number that Python reads as infinity.
            raise _TooLarge
        case ast.Constant(value=int() | float() as number):
            return _constant(str(float(number) if isinstance(number, bool) else number))
        case ast.Name():
            return _SIZE
        case ast.UnaryOp(op=operator, operand=operand):
            inner = _measure(operand)
            is_negative = isinstance(operator, ast.USub) and inner.constant is not None
            return inner._replace(constant=-(inner.constant or 0)) if is_negative else inner
        case ast.BinOp(left=left, op=operator, right=right):
            combine = _OPERATORS.get(type(operator), _opaque)
            return combine([_measure(left), _measure(right)])
        case ast.Compare(left=left, comparators=others):
            return _sum([_measure(one) for one in (left, *others)])
        case ast.Tuple(elts=entries):
            return _sum([_measure(one) for one in entries])
        case ast.Call(func=ast.Name(id=name)):
            return _measure_call(name, node)
        case _:
            raise ValueError


def _measure_call(name: str, call: ast.Call) -> _Extent:
    if name not in _FUNCTIONS:
        raise ValueError
    parts = [_measure(one) for one in call.args]
    options = [_measure(option.value) for option in call.keywords]
    # The precision of a Float must be limited, too.
    for digits in (*options, *(parts[1:] if name == "Float" else ())):
        if digits.constant is not None and abs(digits.constant) > _MAX_BITS:
            raise _TooLarge
    if name in _ATOMS and parts:
        return parts[0]
    return _CALLS.get(name, _opaque)(parts)


def _constant(text: str) -> _Extent:
    mantissa, _, exponent = text.lower().partition("e")
    bits = 4 * (len(mantissa) + abs(int(exponent or 0)))
    return _Extent(bits, 1.0, float(text) if bits <= 2 * _SIZE_BITS else None)


def _sum(parts: Sequence[_Extent]) -> _Extent:
    bits = max((part.bits for part in parts), default=0) + len(parts)
    return _Extent(bits, sum(part.terms for part in parts))


def _product(parts: Sequence[_Extent]) -> _Extent:
    terms = math.prod(max(part.terms, 1) for part in parts)
    return _Extent(sum(part.bits for part in parts), terms)


def _opaque(parts: Sequence[_Extent]) -> _Extent:
    """Return upper bounds of a function's result, which stays one term in expansions."""
    return _Extent(_product(parts).bits, 1.0)


def _quotient(parts: Sequence[_Extent]) -> _Extent:
    match [part.constant for part in parts]:
        case [float() as above, float() as below] if below:
            return _product(parts)._replace(constant=above / below)
    return _product(parts)


def _power(parts: Sequence[_Extent]) -> _Extent:
    """Return upper bounds of a power or shift; the exponent must be constant."""
    if len(parts) != 2:
        raise ValueError
    base, exponent = parts
    if exponent.constant is None or abs(exponent.constant) > _SIZE_BITS:
        raise _TooLarge
    times = max(1.0, abs(exponent.constant))
    if base.terms > 1 and times * math.log(base.terms) > math.log(_MAX_TERMS):
        raise _TooLarge
    return _Extent(base.bits * times + _SIZE_BITS, base.terms**times)


_ATOMS: Final = frozenset({"Float", "Identity", "Integer", "Symbol"})
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Sequence[_Extent]], _Extent]]] = {
    ast.Add: _sum,
    ast.Div: _quotient,
    ast.Mult: _product,
    ast.Sub: _sum,
    ast.Pow: _power,
    ast.LShift: _power,
    ast.RShift: _power,
}
_CALLS: Final = {
    "Rational": _quotient,
    "Add": _sum,
    "Mul": _product,
    **dict.fromkeys(
        ("FloatPow", "LShift", "Pow", "PowByNatural", "RShift", "RoundDecimal"), _power
    ),
}


def _check_structure(text: str) -> None:
    """Check a container structure: PyTorch imports types that an enum or `defaultdict` names."""
    pending = [json.loads(text)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            module = value.get("default_factory_module", "builtins")
            if "__enum__" in value or module not in ("builtins", "collections"):
                raise NotAModel("its inputs or outputs name a class that PyTorch would import")
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            # Keys of a dictionary are strings with JSON.
            with contextlib.suppress(ValueError):
                pending.append(json.loads(value))


def _accept(text: str) -> None:
    """Accept a text that PyTorch only compares or passes to an operator."""


_RULES: Final[Mapping[str, Callable[[str], None]]] = {
    "as_name": _check_value,
    "name": _check_value,
    "as_operator": _check_operator,
    "target": _check_operator,
    "expr_str": _check_formula,
    "in_spec": _check_structure,
    "out_spec": _check_structure,
    "as_string": _accept,
    "as_strings": _accept,
    "torch_version": _accept,
    # Removed from the copy.
    "guards_code": _accept,
}

# ---------------------------------------------------------------- allowed content of an archive

# Pattern of allowed files beside the graph `{name}`, relative to the archive's root folder: tensors and their
# indices. Constants with other names are pickled objects.
_FILES: Final = (
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|\.format_version"
    r"|\.storage_alignment|data/weights/[\w.-]+|data/constants/(tensor_\w+|{name}_constants_config\.json|{name}\.pt)"
    r"|data/sample_inputs/{name}\.pt|serialized_(state_dict|constants|example_inputs)\.(pt|json)"
)
_BLOCK_BYTES: Final = 1 << 20


def copy_archive(path: Path, graph: str, document: Mapping[str, Any], copy: Path) -> None:
    """Write a copy of an archive with only its checked graph and allowed files."""
    inside = PurePosixPath(graph)
    folder = inside.parents[1] if inside.parent.name == "models" else inside.parent
    files = re.compile(_FILES.format(name=re.escape(inside.stem)))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as output:
        for entry in archive.infolist():
            name = PurePosixPath(entry.filename)
            if entry.filename == graph:
                output.writestr(graph, json.dumps({**document, "guards_code": []}))
            elif name.is_relative_to(folder) and files.fullmatch(str(name.relative_to(folder))):
                with archive.open(entry) as source, output.open(entry.filename, "w") as target:
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)


# ---------------------------------------------------------------- the archive


_MODEL: Final = "model"
_NAMED_TUPLE: Final = "collections.namedtuple"
# PyTorch does not compress archives. Ordinary compression saves less than this factor, except for zeros.
_MAX_GRAPH_BYTES: Final = 64 << 20
_MAX_INFLATION: Final = 16
_MIN_INFLATED_BYTES: Final = 256 << 20
_MAX_ENTRIES: Final = 100_000
# The first dtypes of `ScalarType` in order; inputs cannot be bfloat16 or complex.
_SCALAR_TYPES: Final = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
).split()
_OTHER_DTYPES: Final = dict(enumerate(_SCALAR_TYPES, 1))
_DTYPES: Final[Mapping[int, str]] = {
    **{number: _OTHER_DTYPES[number] for number in (*range(1, 9), 12)},
    28: "uint16",
    34: "uint32",
    35: "uint64",
}
# Operator -> the argument that is true in training mode.
_TRAINING: Final[Mapping[str, str]] = {
    "batch_norm": "training",
    "dropout": "train",
    "feature_dropout": "train",
    "alpha_dropout": "train",
    "feature_alpha_dropout": "train",
}
# Operators that write to their first operand, such as `index_copy_` and `__ior__`, but not `__or__`.
_IN_PLACE: Final = re.compile(r"\w*[^_]_|__i\w+__")
# Operators with results that can share memory with their first operand.
_VIEWS: Final = frozenset(
    "alias as_strided chunk contiguous detach diagonal expand expand_as flatten movedim narrow permute reshape select "
    "slice split split_with_sizes squeeze swapaxes t tensor_split to transpose unbind unflatten unfold unsqueeze view "
    "view_as".split()
)
# Exceptions of zipfile and json for damaged files.
_DAMAGE: Final = (EOFError, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error)
_SYMBOL: Final = re.compile(r"Symbol\('(\w+)'[^()]*\)")
# A minimum of 2 only means that the export specialized for a size other than 0 and 1.
_SPECIALIZED_MINIMUM: Final = 2
_INFINITY: Final = 1 << 62


_Type = tuple[str | None, tuple[int | str, ...] | None]


class Archive(NamedTuple):
    """Facts of a model in an archive.

    Attributes:
        torch_version: Version of PyTorch that wrote it, such as `2.13.0+cpu`; may be empty.
        inputs: Input tensors in order, without arguments that were constant in the export.
        outputs: Names of the output tensors in order (see `name_outputs`).
        output_types: Dtype and sizes of each output, as in `ModelOutput`.
        buffers: Input name -> buffer that a call changes. These are the last inputs, with the content before the call;
            the last outputs have the content after it.
        containers: Types in inputs and outputs that are not built in, such as
            `transformers.modeling_outputs.BaseModelOutput`; for named tuples with their fields.
    """

    torch_version: str
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...]
    output_types: tuple[_Type, ...]
    buffers: Mapping[str, str]
    containers: Mapping[str, Sequence[str]]


@read_once
def read_archive(path: Path) -> Archive:
    """Return the facts of an archive; NotAModel if it has content that cannot be imported."""
    _, document = _read_graph(path)
    try:
        check_graph(document)
        return _parse(document)
    except NotAModel:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise NotAModel(
            f"its graph does not have the format of torch.export ({type(error).__name__})"
        ) from error


def copy_for_pytorch(path: Path, folder: Path) -> Path:
    """Write a checked copy of an archive, which PyTorch may load, into a folder; return its path."""
    copy = folder / "model.pt2"
    name, document = _read_graph(path)
    check_graph(document)
    try:
        copy_archive(path, name, document, copy)
    except (zipfile.BadZipFile, *_DAMAGE) as error:
        raise ImportFailed(
            f"one of its files is damaged ({last_line(error)})", fix="export or download it again"
        ) from error
    return copy


def _read_graph(path: Path) -> tuple[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if is_graph(entry.filename)]
            names = [Path(entry.filename).stem for entry in entries]
            if len(entries) > 1 and _MODEL not in names:
                raise NotAModel(
                    f"it has several models, and none is named {_MODEL!r}: {names_text(names)}"
                )
            if not entries:
                raise NotAModel("it has no graph of torch.export")
            entry = entries[names.index(_MODEL) if _MODEL in names else 0]
            _check_sizes(archive.infolist(), entry, path.stat().st_size)
            # `read` stops at the size in the index, so that a decompression bomb is harmless.
            return entry.filename, json.loads(archive.read(entry))
    except zipfile.BadZipFile as error:
        raise NotAModel(
            "it is not a zip file, as archives of torch.export are, or a damaged one"
        ) from error
    except NotAModel:
        raise
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # zipfile raises OSError for a negative position in the file.
        raise NotAModel("its graph is not a JSON document, or is damaged") from error


def _check_sizes(
    entries: Sequence[zipfile.ZipInfo], graph: zipfile.ZipInfo, archive_bytes: int
) -> None:
    if len(entries) > _MAX_ENTRIES or len({entry.filename for entry in entries}) < len(entries):
        raise NotAModel(f"it has {len(entries):,} files, or two of one name")
    if graph.file_size > _MAX_GRAPH_BYTES:
        raise NotAModel(
            f"its graph has {graph.file_size:,} bytes, and the limit is {_MAX_GRAPH_BYTES:,}"
        )
    limit = max(_MAX_INFLATION * archive_bytes, _MIN_INFLATED_BYTES)
    total = sum(entry.file_size for entry in entries)
    if total > limit:
        raise NotAModel(
            f"its files have {total:,} bytes when they are unpacked, and the limit for its size is {limit:,}"
        )


def _parse(document: Mapping[str, Any]) -> Archive:
    module = document["graph_module"]
    graph, signature = module["graph"], module["signature"]
    _refuse_other_devices(graph["tensor_values"])
    _refuse_training(graph["nodes"])
    [whole] = [call["signature"] for call in module["module_call_graph"] if call["fqn"] == ""]
    fields = module.get("treespec_namedtuple_fields") or {}
    limits = document.get("range_constraints") or {}
    ranges = {name: _limits(limits[name]) for name in sorted(limits)}
    own = tuple(_inputs(signature["input_specs"], graph, ranges))
    changed = _find_changed_buffers(graph["nodes"], signature)
    names = [*number_repeated([*(value.name for value in own), *changed.values()])][len(own) :]
    held = [
        _input(name, graph["tensor_values"][value], {})
        for name, value in zip(names, changed, strict=True)
    ]
    inputs = (*own, *held)
    forms = [json.loads(whole[kind])[1] for kind in ("in_spec", "out_spec")]
    specs = [spec["user_output"] for spec in signature["output_specs"] if "user_output" in spec]
    named = zip(name_outputs(forms[1], fields), (spec["arg"] for spec in specs), strict=True)
    tensors = [(name, arg["as_tensor"]["name"]) for name, arg in named if "as_tensor" in arg]
    types = [_type(graph["tensor_values"].get(value)) for _, value in tensors]
    outputs = [*(name for name, _ in tensors), *(f"{name}{NEXT}" for name in names)]
    containers = {kind: names for form in forms for kind, names in _containers(form, fields)}
    return Archive(
        torch_version=str(document.get("torch_version") or ""),
        inputs=inputs,
        outputs=_distinct(outputs, [value.name for value in inputs]),
        output_types=(*types, *((value.dtype, value.dims) for value in held)),
        buffers=dict(zip(names, changed.values(), strict=True)),
        containers=containers,
    )


def _inputs(
    specs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any], limits: Mapping[str, Limits]
) -> Iterator[ModelInput]:
    """Yield the tensor inputs of a model, and inputs for symbolic numbers, which are problems."""
    for spec in specs:
        argument = spec.get("user_input", {}).get("arg", {})
        if "as_tensor" in argument:
            name = argument["as_tensor"]["name"]
            yield _input(str(name), graph["tensor_values"][name], limits)
        elif any(kind.startswith("as_sym") for kind in argument):
            [value] = argument.values()
            yield ModelInput(str(value.get("as_name", "?")), problem="is not a tensor")


def _input(name: str, tensor: Mapping[str, Any], limits: Mapping[str, Limits]) -> ModelInput:
    dtype, dims = _type(tensor)
    other = _OTHER_DTYPES.get(tensor["dtype"], f"number {tensor['dtype']} of PyTorch")
    problem = "" if dtype else unsupported_dtype(other)
    own = {dim: limits[dim] for dim in dims or () if isinstance(dim, str) and dim in limits}
    return ModelInput(name, dtype, dims, problem=problem, limits=own)


def _find_changed_buffers(
    nodes: Sequence[Mapping[str, Any]], signature: Mapping[str, Any]
) -> dict[str, str]:
    """Return graph value -> buffer that operators write to, directly or through views.

    A tensor that is not a registered buffer, such as one of a cache object, is a constant of the archive.
    """
    buffers = {
        str(spec[kind]["arg"]["name"]): str(spec[kind][f"{kind}_name"])
        for spec in signature["input_specs"]
        for kind in ("buffer", "tensor_constant")
        if kind in spec
    }
    # Functionalized graphs list the mutations in the signature.
    mutations = (spec.get("buffer_mutation") for spec in signature["output_specs"])
    changed = {str(spec["buffer_name"]) for spec in mutations if spec}
    owners = dict(buffers)
    for node in nodes:
        [first, *_] = [*(entry["arg"] for entry in node["inputs"]), {}]
        owner = owners.get(first.get("as_tensor", {}).get("name"))
        operator = _operator(node)
        writes = _IN_PLACE.fullmatch(operator) is not None
        if owner is not None and (writes or operator in _VIEWS):
            changed.update([owner] if writes else [])
            for output in node["outputs"]:
                results = output.get("as_tensors") or [output.get("as_tensor", {})]
                owners.update({str(result.get("name")): owner for result in results})
    return {value: name for value, name in buffers.items() if name in changed}


def _operator(node: Mapping[str, Any]) -> str:
    return str(node["target"]).removeprefix("torch.ops.aten.").partition(".")[0]


def _type(tensor: Mapping[str, Any] | None) -> _Type:
    """Return the dtype of a tensor (None if NumPy does not have it) and its sizes."""
    if tensor is None:
        return None, None
    return _DTYPES.get(tensor["dtype"]), tuple(_dim(size) for size in tensor["sizes"])


def _dim(size: Mapping[str, Any]) -> int | str:
    """Return a fixed size, or the name or formula of a dynamic dimension."""
    if "as_int" in size:
        return int(size["as_int"])
    return _SYMBOL.sub(r"\1", str(size["as_expr"]["expr_str"]))


def _limits(size: Mapping[str, Any]) -> Limits:
    """Return the minimum and maximum of a dimension, None if unlimited (old files: a huge number)."""
    smallest, largest = size["min_val"], size["max_val"]
    has_minimum = isinstance(smallest, int) and smallest > _SPECIALIZED_MINIMUM
    has_maximum = isinstance(largest, int) and largest < _INFINITY
    return smallest if has_minimum else None, largest if has_maximum else None


def _refuse_other_devices(tensors: Mapping[str, Mapping[str, Any]]) -> None:
    for tensor in tensors.values():
        device = tensor["device"]["type"]
        if device != "cpu":
            raise NotAModel(
                f"it was exported on the device {excerpt(str(device))}: export `model.cpu()` with inputs on the CPU"
            )


def _refuse_training(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse operators in training mode, which have random results or change weights."""
    for node in nodes:
        operator = _operator(node)
        if operator in _TRAINING:
            arguments = {entry["name"]: entry["arg"] for entry in node["inputs"]}
            trains = arguments.get(_TRAINING[operator], {}).get("as_bool", False)
            # Without running statistics, batch statistics are used in inference, too.
            learned = "as_none" not in arguments.get("running_mean", {})
            if trains and learned and arguments.get("p", {}).get("as_float", 1.0) > 0:
                raise NotAModel(
                    f"it was exported in training mode ({operator}): call `model.eval()` before torch.export.export"
                )


# ---------------------------------------------------------------- names of outputs


def name_outputs(
    spec: Mapping[str, Any], fields: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield a name for each value in a model's result, which has the structure of a `TreeSpec`.

    These are keys of dictionaries and fields of classes; `output_0`, `output_1`, … for tuples and lists; `output` for a
    single value. Keys of nested values are joined: `hidden_0`.
    """
    if spec["type"] is None:
        yield prefix or "output"
        return
    children = spec["children_spec"]
    keys = _keys(spec, fields)
    for index, child in enumerate(children):
        if len(keys) == len(children):
            name = f"{prefix}_{keys[index]}" if prefix else keys[index]
        else:
            name = f"{prefix or 'output'}_{index}"
        yield from name_outputs(child, fields, name)


def _keys(spec: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    """Return the keys of the values in a container; empty for tuples and lists."""
    if spec["type"] == _NAMED_TUPLE:
        return [str(name) for name in fields.get(spec["context"], {}).get("field_names", ())]
    context = json.loads(spec["context"])
    # The context of a dataclass has its fields and its fields that are None; of a defaultdict, type and keys.
    lists = [context, *context] if isinstance(context, list) else []
    count = len(spec["children_spec"])
    matching = (keys for keys in lists if isinstance(keys, list) and len(keys) == count)
    keys = next((keys for keys in matching if not any(isinstance(key, list) for key in keys)), [])
    return [str(key) for key in keys]


def _distinct(names: Sequence[str], inputs: Sequence[str]) -> tuple[str, ...]:
    """Return output names that differ from each other and from the names of inputs."""
    changed = [f"output_{name}" if name in inputs else name for name in names]
    if len({*changed, *inputs}) < len(changed) + len(inputs):
        return tuple(f"output_{index}" for index in range(len(names)))
    return tuple(changed)


def _containers(
    spec: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the types in a nested value that are not built in; for named tuples with their fields."""
    kind = spec["type"]
    if kind == _NAMED_TUPLE:
        count = len(spec["children_spec"])
        numbered = [f"field_{index}" for index in range(count)]
        yield str(spec["context"]), _keys(spec, fields) or numbered
    elif kind is not None and not str(kind).startswith(("builtins.", "collections.")):
        yield str(kind), ()
    for child in spec["children_spec"]:
        yield from _containers(child, fields)
