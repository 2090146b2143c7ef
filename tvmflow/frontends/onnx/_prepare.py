"""Prepares an ONNX model before TVM sees it: a list of passes that can be read aloud.

TVM's importer wants static shapes, constants where the operator needs them, and operators
that it knows. Most of what real models have instead can be brought to that form in ONNX's
own terms.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.errors import ImportFailed
from tvmflow.frontends.onnx._operators import (
    BEST_OPSETS,
    KNOWN_WRONG,
    attributes_of,
    opset_of,
    view_of,
    why_not,
)
from tvmflow.values import TensorSpec

# TVM's importer reads older ones wrongly.
_OLDEST_OPSET: Final = 7

# What a fold must not evaluate: results that are not determined, or that are real work.
_NOT_FOLDED: Final = frozenset(
    "Bernoulli Conv ConvTranspose Gemm If Loop MatMul Multinomial RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike Scan".split()
)
_FOLD_ELEMENTS: Final = 1 << 23
_PURE_COPIES: Final = frozenset({"Identity"})
_MAX_ROUNDS: Final = 8


def lay_out(files: Mapping[str, Path], folder: Path) -> Path:
    """Put the model and its external data side by side, as ONNX expects them; the model's path."""
    model = folder / "model.onnx"
    _link(model, files["model"])
    for role, path in files.items():
        if role.startswith("external/"):
            _link(folder / role.removeprefix("external/"), path)
    return model


def _link(link: Path, path: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())


def read_model(files: Mapping[str, Path]) -> ModelProto:
    """The model with all its data inside."""
    try:
        model = onnx.load(str(files["model"]), load_external_data=False)
        for tensor in _all_tensors(model):
            _load_external(tensor, files)
    except (OSError, ValueError) as error:
        raise ImportFailed(f"the ONNX file cannot be read: {error}") from error
    except Exception as error:  # protobuf's own errors have no common public base
        raise ImportFailed(
            f"the file is not an ONNX model: {error}", fix="export or download it again"
        ) from error
    if not model.HasField("graph"):
        raise ImportFailed(
            "the file is not an ONNX model: it holds no graph", fix="export or download it again"
        )
    return model


def _all_tensors(model: ModelProto) -> Iterable[TensorProto]:
    from onnx.external_data_helper import _get_all_tensors

    return _get_all_tensors(model)  # type: ignore[no-any-return]


def _load_external(tensor: TensorProto, files: Mapping[str, Path]) -> None:
    """Read one tensor's bytes from its file, wherever that lies."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = files[f"external/{entries['location']}"]
    with path.open("rb") as stream:
        stream.seek(int(entries.get("offset", 0)))
        tensor.raw_data = stream.read(int(entries["length"]) if "length" in entries else -1)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def prepare(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> ModelProto:
    """The model in the form that the importer takes. `inputs` may be empty when the model's shapes are static."""
    _strip_initializers_from_inputs(model)
    _set_input_shapes(model, inputs)
    for convert in (_inline_functions, _convert_opset, _constants_to_initializers):
        model = convert(model)
    for _ in range(_MAX_ROUNDS):
        before = model.SerializeToString(deterministic=True)
        for simplify in _SIMPLIFY:
            model = simplify(model)
        if model.SerializeToString(deterministic=True) == before:
            break
    return model


def _strip_initializers_from_inputs(model: ModelProto) -> None:
    """Up to IR version 3 every weight was listed as an input too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    real = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(real)
    # the first version in which weights need not be inputs; ONNX's converter insists on it
    model.ir_version = max(model.ir_version, 4)


def _set_input_shapes(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> None:
    """Write the recipe's shapes into the graph. Raises ImportFailed for all that do not fit, together."""
    given = {spec.name: spec for spec in inputs}
    there = {value.name: value for value in model.graph.input}
    problems = []
    for name in given.keys() - there.keys():
        near = difflib.get_close_matches(name, list(there), 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        problems.append(f"the model has no input '{name}'{hint} (it has {', '.join(there)})")
    for name, value in there.items():
        found = _set_input_shape(value, given.get(name), bool(given))
        problems += [found] if found else []
    if problems:
        raise ImportFailed("; ".join(sorted(problems)), fix="correct `inputs` in the recipe")
    # shapes that were inferred for other input shapes would contradict the new ones
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")


def _set_input_shape(value: Any, spec: TensorSpec | None, any_given: bool) -> str:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return f"input '{value.name}' is not a tensor"
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in tensor.shape.dim]
    dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if spec is None:
        if any_given:
            return f"input '{value.name}' is missing in the recipe"
        known = tensor.HasField("shape") and all(sizes)
        return "" if known else f"input '{value.name}' has no fixed shape: give one in the recipe"
    if spec.dtype != dtype:
        return f"input '{value.name}' is {dtype}, not {spec.dtype}"
    fits = len(sizes) == len(spec.shape) and all(
        not size or size == wanted for size, wanted in zip(sizes, spec.shape, strict=True)
    )
    if tensor.HasField("shape") and not fits:
        shown = [
            size or (dim.dim_param or "?")
            for size, dim in zip(sizes, tensor.shape.dim, strict=True)
        ]
        return f"input '{value.name}' has shape {shown}, which {list(spec.shape)} does not fit"
    tensor.shape.ClearField("dim")
    for size in spec.shape:
        tensor.shape.dim.add().dim_value = size
    return ""


# ---------------------------------------------------------------- conversions, once


def _inline_functions(model: ModelProto) -> ModelProto:
    from onnx import inliner

    return inliner.inline_local_functions(model) if model.functions else model


def _convert_opset(model: ModelProto) -> ModelProto:
    """Older and newer operator sets become one that the importer knows well."""
    from onnx import version_converter

    oldest, newest = BEST_OPSETS
    wanted = min(max(opset_of(model), oldest), newest)
    if opset_of(model) == wanted or _would_lose_attributes(model, wanted):
        return model
    try:
        return version_converter.convert_version(model, wanted)
    except Exception as error:  # the converter raises whatever it meets
        if opset_of(model) >= _OLDEST_OPSET:
            # TVM may still be able to take the model as it is
            return model
        raise ImportFailed(
            f"the model uses opset {opset_of(model)}, which cannot be converted: {error}",
            fix=f"export it with opset {_OLDEST_OPSET} or newer",
        ) from error


def _would_lose_attributes(model: ModelProto, opset: int) -> bool:
    """Whether a node says something that its operator could not say yet in that set; the converter drops it silently."""
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        try:
            there = onnx.defs.get_schema(node.op_type, opset, "").attributes
        except Exception:  # the converter itself refuses what is not there
            continue
        if opset < opset_of(model) and any(each.name not in there for each in node.attribute):
            return True
    return False


def _constants_to_initializers(model: ModelProto) -> ModelProto:
    """One kind of constant instead of two."""
    kept = []
    for node in model.graph.node:
        array = _constant_value(node) if node.op_type == "Constant" else None
        if array is None:
            kept.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    _replace_nodes(model, kept)
    return model


def _constant_value(node: NodeProto) -> np.ndarray[Any, Any] | None:
    if not node.attribute:
        # an expanded function may refer to an attribute that is not given
        return None
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return np.asarray(numpy_helper.to_array(value))
    dtypes = {
        "value_float": "float32",
        "value_floats": "float32",
        "value_int": "int64",
        "value_ints": "int64",
    }
    return np.asarray(value, dtypes[attribute.name]) if attribute.name in dtypes else None


# ---------------------------------------------------------------- simplifications, until nothing changes


def _infer_shapes(model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:
        # a graph that inference rejects may still be importable: TVM infers for itself
        return model


def _shapes_become_constants(model: ModelProto) -> ModelProto:
    """`Shape` and `Size` of a tensor whose shape is known are numbers."""
    shapes = view_of(model).shapes
    kept = []
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape = shapes[node.input[0]]
        attributes = attributes_of(node)
        if node.op_type == "Shape":
            part = shape[attributes.get("start", 0) : attributes.get("end", len(shape))]
            value = np.asarray(part, np.int64)
        else:
            value = np.asarray(np.prod(shape, dtype=np.int64), np.int64)
        model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    _replace_nodes(model, kept)
    return model


def _fold_constants(model: ModelProto) -> ModelProto:
    """A node whose inputs are all known is evaluated by ONNX's own reference evaluator."""
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = view_of(model).shapes
    kept = []
    for node in model.graph.node:
        large = any(math.prod(shapes.get(name, ())) > _FOLD_ELEMENTS for name in node.output)
        results = None if large else _evaluate(model, node, known)
        if results is None:
            kept.append(node)
            continue
        for name, array in results.items():
            tensor = numpy_helper.from_array(array, name)
            known[name] = tensor
            model.graph.initializer.append(tensor)
    _replace_nodes(model, kept)
    return model


def _evaluate(
    model: ModelProto, node: NodeProto, known: Mapping[str, TensorProto]
) -> dict[str, np.ndarray[Any, Any]] | None:
    """The node's outputs by name, or None when it cannot or should not be folded."""
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    has_body = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)
    if node.op_type in _NOT_FOLDED or has_body or any(name not in known for name in names):
        return None
    outputs = [name for name in node.output if name]
    graph = helper.make_graph(
        [node],
        "fold",
        [],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [known[name] for name in dict.fromkeys(names)],
    )
    single = helper.make_model(graph, opset_imports=list(model.opset_import))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arrays = ReferenceEvaluator(single).run(None, {})
    except Exception:  # an operator that the evaluator does not have is simply not folded
        return None
    if not all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    if any(np.asarray(array).size > _FOLD_ELEMENTS for array in arrays):
        return None
    return {name: np.asarray(array) for name, array in zip(outputs, arrays, strict=True)}


def _drop_copies(model: ModelProto) -> ModelProto:
    """What only passes a tensor on is bridged, unless it gives a graph output its name."""
    outputs = {value.name for value in model.graph.output}
    view = view_of(model)
    bridges: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = bridges.get(name, name)
        # Dropout does nothing in inference
        idle = node.op_type == "Dropout" and not KNOWN_WRONG["Dropout"](node, view)
        copies = node.op_type in _PURE_COPIES or idle
        if copies and node.output[0] not in outputs:
            bridges[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    _replace_nodes(model, kept)
    return model


def _drop_unused_outputs(model: ModelProto) -> ModelProto:
    """Exporters name masks and statistics that nobody reads; TVM would compute them, or fail to."""
    used = {value.name for value in model.graph.output}
    for node in model.graph.node:
        used.update(node.input)
        for attribute in node.attribute:
            used |= _captured(attribute)
    for node in model.graph.node:
        while len(node.output) > 1 and node.output[-1] not in used and _is_optional(model, node):
            del node.output[-1]
    return model


def _is_optional(model: ModelProto, node: NodeProto) -> bool:
    """Whether the node may do without its last output."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(model), node.domain)
    except Exception:  # nobody knows the operator
        return False
    last = len(node.output) - 1
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return last < len(schema.outputs) and schema.outputs[last].option == optional


def _drop_dead(model: ModelProto) -> ModelProto:
    """Nodes and weights that no output needs."""
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(node)
        needed.update(node.input)
        for attribute in node.attribute:
            needed.update(_captured(attribute))
    _replace_nodes(model, list(reversed(kept)))
    weights = {t.name: t for t in model.graph.initializer if t.name in needed}
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights.values())
    return model


def _captured(attribute: Any) -> set[str]:
    """Names that a subgraph may take from outside: all that its nodes mention."""
    graphs = [attribute.g, *attribute.graphs] if attribute.type in (5, 10) else []
    names: set[str] = set()
    for graph in graphs:
        names.update(value.name for value in graph.output)
        for node in graph.node:
            names.update(node.input)
            for inner in node.attribute:
                names |= _captured(inner)
    return names


def _replace_nodes(model: ModelProto, nodes: list[NodeProto]) -> None:
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _expand_unsupported(model: ModelProto) -> ModelProto:
    """Operators that TVM lacks, and that ONNX defines by others, are replaced by those."""
    from onnx import inliner

    view = view_of(model)
    missing = {node.op_type for node in model.graph.node if why_not(node, view)}
    if not missing:
        return model
    typed = ModelProto.FromString(model.SerializeToString())
    known = {each.name for each in typed.graph.value_info}
    # the inliner asks for the type of everything, and does not look among the initializers
    typed.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in typed.graph.initializer
        if tensor.name not in known
    )
    try:
        return inliner.inline_selected_functions(
            typed, [("", name) for name in sorted(missing)], inline_schema_functions=True
        )
    except Exception:  # what cannot be expanded is refused by name later
        return model


_SIMPLIFY: Final[tuple[Callable[[ModelProto], ModelProto], ...]] = (
    _infer_shapes,
    _shapes_become_constants,
    _fold_constants,
    _drop_unused_outputs,
    _expand_unsupported,
    _constants_to_initializers,
    _drop_copies,
    _drop_dead,
)
