"""Prepares an ONNX model for TVM's importer, by passes over the ONNX graph.

The importer needs static shapes, constants where an operator requires them, and operators that it supports. Most
other constructs in real models can be rewritten as other ONNX nodes.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, inliner, numpy_helper, version_converter

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Array, TensorSpec
from tvmflow.frontends.base import MAX_ELEMENTS, ModelInput
from tvmflow.frontends.inputs import check_inputs, request_of
from tvmflow.frontends.onnx._block_quantized import DOMAIN as BLOCK_QUANTIZED_DOMAIN
from tvmflow.frontends.onnx._block_quantized import convert_block_quantized
from tvmflow.frontends.onnx._header import model_input
from tvmflow.frontends.onnx._inlining import (
    inline_functions,
    inline_known_branches,
    name_branch_values,
    simplify_branches,
    unroll_loops,
)
from tvmflow.frontends.onnx.custom_nodes import NO_OPERATORS, CustomNodes
from tvmflow.frontends.onnx.graph import (
    OWN_DOMAIN,
    KnownValues,
    Replacement,
    all_graphs,
    all_nodes,
    attributes_of,
    branch_nodes,
    declare,
    element_types,
    is_standard,
    known_values,
    make_evaluator,
    make_single,
    names_read,
    names_used,
    node_name,
    opset_of,
    place_of,
    rename_captured,
    replace_nodes,
    set_entries,
    subgraphs,
    with_data,
    with_inner_graphs,
)
from tvmflow.frontends.onnx.operators import operator_of, rewrite_nodes, unsupported_reason

_log = logging.getLogger(__name__)

_Pass = Callable[[ModelProto], ModelProto]


# ---------------------------------------------------------------- conversions


# The oldest and newest opset that TVM's importer supports well; models in others are converted if possible.
_PREFERRED_OPSETS: Final = (13, 21)
# TVM's importer misreads opsets before this one.
_OLDEST_OPSET: Final = 7
# ONNX's version converter misreads Scan in opsets before this one, where Scan has a batch axis.
_SCAN_OPSET: Final = 9
# Before this opset, Resize has no modes, and samples at scaled positions rounded down.
_RESIZE_MODES_OPSET: Final = 11
# Before this opset, Hardmax selects among the axes from `axis` on together.
_PER_AXIS_OPSET: Final = 13


def convert_opset(model: ModelProto) -> ModelProto:
    """Convert a model to the nearest opset that TVM's importer supports well.

    Raises:
        ImportFailed: when a model in an opset that TVM misreads cannot be converted.
    """
    if opset_of(model) < _SCAN_OPSET and any(n.op_type == "Scan" for n in model.graph.node):
        return model
    oldest, newest = _PREFERRED_OPSETS
    opset = min(max(opset_of(model), oldest), newest)
    if opset_of(model) == opset or _would_lose_attributes(model, opset):
        return model
    if opset_of(model) < _PER_AXIS_OPSET:
        for graph in with_inner_graphs(model.graph):
            _flatten_hardmax(graph)
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:
        # The converter raises many types of exceptions.
        if opset_of(model) >= _OLDEST_OPSET:
            _log.debug("opset %d is kept: %s", opset_of(model), error)
            return model
        raise ImportFailed(
            f"the model uses opset {opset_of(model)}, which cannot be converted: {error}",
            fix=f"export it with opset {_OLDEST_OPSET} or newer",
        ) from error
    # ONNX's converter drops the semantics that Resize and Upsample had before they had modes.
    for node in all_nodes(converted) if opset_of(model) < _RESIZE_MODES_OPSET else ():
        if node.op_type == "Resize" and "coordinate_transformation_mode" not in attributes_of(node):
            modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            node.attribute.extend(helper.make_attribute(*mode) for mode in modes.items())
    return converted


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Flatten the data of Hardmax, as ONNX's converter does for Softmax and LogSoftmax."""
    nodes = []
    for node in graph.node:
        if node.op_type != "Hardmax" or not is_standard(node):
            nodes.append(node)
            continue
        new = Replacement(node)
        shape = new.add("Shape", new.name(0))
        rows = new.add("Flatten", new.name(0), axis=new.attributes.get("axis", 1))
        new.add("Reshape", new.add("Hardmax", rows, axis=1), shape, output=new.result())
        nodes += new.nodes
    replace_nodes(graph, nodes)


def _would_lose_attributes(model: ModelProto, opset: int) -> bool:
    """Return whether ONNX's converter would drop attributes that the older opset lacks."""
    for node in model.graph.node if opset < opset_of(model) else ():
        # The converter itself refuses an operator that is newer than the opset.
        if is_standard(node) and onnx.defs.has(node.op_type, opset, ""):
            known = onnx.defs.get_schema(node.op_type, opset, "").attributes
            if any(attribute.name not in known for attribute in node.attribute):
                return True
    return False


def convert_constants_to_initializers(model: ModelProto) -> ModelProto:
    """Replace Constant nodes by initializers, so that passes handle only one kind of constant."""
    kept = []
    for node in model.graph.node:
        array = _constant_value(node) if node.op_type == "Constant" else None
        if array is None:
            kept.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    replace_nodes(model.graph, kept)
    return model


def _constant_value(node: NodeProto) -> Array | None:
    # An attribute of an inlined function may refer to a caller's attribute that is not set.
    for name, value in attributes_of(node).items():
        if name == "value":
            return np.asarray(numpy_helper.to_array(value))
        if name.startswith(("value_float", "value_int")):
            return np.asarray(value, "float32" if "float" in name else "int64")
    return None


def expand_unsupported_operators(model: ModelProto) -> ModelProto:
    """Replace operators that TVM lacks by their ONNX function bodies, if they have one."""
    known = known_values(model)
    missing = {node.op_type for node in model.graph.node if unsupported_reason(node, known)}
    if not missing:
        return model
    typed = copy.deepcopy(model)
    with_type = {value.name for value in typed.graph.value_info}
    # The inliner needs every value's type, but does not read the types of initializers.
    typed.graph.value_info.extend(
        declare(tensor) for tensor in typed.graph.initializer if tensor.name not in with_type
    )
    for node in typed.graph.node:
        _set_defaults(node, opset_of(model))
    try:
        return inliner.inline_selected_functions(
            typed, [("", name) for name in sorted(missing)], inline_schema_functions=True
        )
    except Exception as error:
        # The importer reports operators that cannot be expanded, with the node's name.
        _log.debug("not expanded: %s: %s", ", ".join(sorted(missing)), error)
        return model


def _set_defaults(node: NodeProto, opset: int) -> None:
    """Set an operator's default attribute values explicitly, because ONNX's inliner ignores defaults."""
    if not is_standard(node) or not onnx.defs.has(node.op_type, opset, ""):
        return
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset, "").attributes.items():
        if name not in given and attribute.default_value.name:
            node.attribute.append(attribute.default_value)


# ---------------------------------------------------------------- simplifications


# Operators that are never folded: random ones, and those that do a model's main work.
_NOT_FOLDED: Final = frozenset(
    "Bernoulli Conv ConvTranspose Gemm If Loop MatMul Multinomial RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike Scan".split()
)
# The results have data-dependent shapes, but at most a few times the elements of the inputs.
_AS_LARGE_AS_INPUTS: Final = frozenset(
    "Compress ConcatFromSequence NonZero Optional OptionalGetElement SequenceAt SequenceConstruct "
    "SequenceEmpty SequenceLength SplitToSequence StringSplit Unique".split()
)
_MAX_FOLDED_ELEMENTS: Final = 1 << 23
# The maximum number of elements in all constants of a model together, because protobuf's limit is 2 GiB.
_MAX_HELD_ELEMENTS: Final = 1 << 27
# The maximum number of elements of one constant that the library computes, or that TVM's importer computes.
_MAX_CONSTANT_ELEMENTS: Final = 1 << 28
_MAX_RANGE_ELEMENTS: Final = 1 << 25
_MAX_SHAPE_ELEMENTS: Final = 1024
# NumPy's limit on axes. ONNX writes each axis into the model, so more would need much memory.
_MAX_AXES: Final = 64
# The operand that has one element for each axis, or for each added axis, of the result.
_LISTS_OF_AXES: Final = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1, "Tile": 1, "Unsqueeze": 1}
# Operators through which ONNX's shape inference propagates values; see the limits below.
_VALUE_OPERATORS: Final = frozenset(
    "Add Cast CastLike Concat Gather Identity Mul Range Shape Slice Squeeze Sub Unsqueeze".split()
)
_MAX_PROPAGATED_ELEMENTS: Final = 1 << 18


def infer_shapes(model: ModelProto) -> ModelProto:
    """Infer the shapes and types of all values, including shapes that depend on computed values.

    Raises:
        ImportFailed: when a tensor has so many axes that no memory could list them.
    """
    _refuse_many_axes(model, {tensor.name: tensor.dims for tensor in model.graph.initializer})
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
        if not _propagates_little(inferred):
            return inferred
        return onnx.shape_inference.infer_shapes(inferred, data_prop=True)
    except Exception as error:
        # TVM infers shapes itself, and may accept a graph that ONNX's inference rejects.
        _log.debug("ONNX cannot infer shapes: %s", error)
        return model


def _propagates_little(model: ModelProto) -> bool:
    """Return whether inference would propagate few values; ONNX takes about 100 bytes for each element."""
    known = known_values(model)
    counts = {name: math.prod(shape) for name, shape in known.shapes.items() if len(shape) <= 1}
    for node in model.graph.node:
        if node.op_type not in _VALUE_OPERATORS or not (node.input and node.output):
            continue
        inputs = [counts.get(name, 0) for name in node.input]
        if node.op_type == "Range":
            counts[node.output[0]] = _range_count(node, known)
        elif node.op_type == "Shape":
            counts[node.output[0]] = _MAX_SHAPE_ELEMENTS
        elif node.output[0] not in counts:
            counts[node.output[0]] = sum(inputs) if node.op_type == "Concat" else max(inputs)
        if max(counts[node.output[0]], *inputs) > _MAX_PROPAGATED_ELEMENTS:
            _log.debug("values are not propagated: %s makes too many", node.output[0])
            return False
    return True


def _range_count(node: NodeProto, known: KnownValues) -> int:
    """Return the number of elements of a Range; if it is not known yet, a number above the limit."""
    bounds = [known.constants.get(name) for name in node.input]
    if any(bound is None or bound.size != 1 for bound in bounds):
        return _MAX_PROPAGATED_ELEMENTS + 1
    start, limit, step = (float(bound.item()) for bound in bounds if bound is not None)
    return math.ceil(abs(limit - start) / abs(step)) if step else 0


def fold_shapes(model: ModelProto) -> ModelProto:
    """Replace `Shape` and `Size` by constants if the tensor's shape is known."""
    shapes = known_values(model).shapes
    kept = []
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") or node.input[0] not in shapes:
            kept.append(node)
            continue
        sizes, attributes = np.array(shapes[node.input[0]], np.int64), attributes_of(node)
        part = sizes[attributes.get("start", 0) : attributes.get("end", len(sizes))]
        array = np.asarray(sizes.prod()) if node.op_type == "Size" else part
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    replace_nodes(model.graph, kept)
    return model


def fold_constants(model: ModelProto) -> ModelProto:
    """Evaluate nodes whose inputs are all constant, using ONNX's reference evaluator.

    Raises:
        ImportFailed: when a constant would exhaust the memory.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    room = _MAX_HELD_ELEMENTS - sum(
        math.prod(tensor.dims) for tensor in constants.values() if place_of(tensor) is None
    )
    kept = []
    for node in model.graph.node:
        results = None
        if _is_foldable(node, constants):
            inferred = _infer_results(model, node, constants)
            if _fits(node, known_values(inferred).shapes, room):
                results = _evaluate(node, constants, inferred)
        if results is None:
            kept.append(node)
            continue
        for name, array in results.items():
            room -= array.size
            tensor = numpy_helper.from_array(array, name)
            constants[name] = tensor
            model.graph.initializer.append(tensor)
    replace_nodes(model.graph, kept)
    return model


def _is_foldable(node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    has_body = any(subgraphs(node))
    is_work = has_body or node.op_type in _NOT_FOLDED or node.domain == BLOCK_QUANTIZED_DOMAIN
    if is_work or not all(name in constants for name in node.input if name):
        return False
    if node.op_type != "DequantizeLinear" or attributes_of(node).get("block_size", 0):
        return True
    # 8-bit weights stay quantized in the library, so their DequantizeLinear is not folded.
    weights = constants[node.input[0]]
    return len(weights.dims) <= 1 or weights.data_type not in (
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
    )


def _fits(node: NodeProto, shapes: Mapping[str, tuple[int, ...]], room: int) -> bool:
    """Return whether a node's results fit into `room` more elements; shapes are folded even without."""
    counts = [math.prod(shapes[name]) for name in node.output if name in shapes]
    limit = _MAX_RANGE_ELEMENTS if node.op_type == "Range" else _MAX_CONSTANT_ELEMENTS
    if max(counts, default=0) > limit:
        raise too_large(node, "a constant", max(counts), limit)
    is_known = bool(counts) or node.op_type in _AS_LARGE_AS_INPUTS
    limit = min(_MAX_FOLDED_ELEMENTS, max(room, _MAX_SHAPE_ELEMENTS))
    return is_known and max(counts, default=0) <= limit


def too_large(node: NodeProto, what: str, elements: int, limit: int) -> ImportFailed:
    """Return the error for a node whose result would not fit into memory."""
    return ImportFailed(
        f"{excerpt(node.op_type)} (node {node_name(node)}) makes {what} of {elements:,} elements, "
        f"and the limit is {limit:,}",
        fix="correct the sizes in the model or in the recipe's `inputs`",
    )


def _infer_results(
    model: ModelProto, node: NodeProto, constants: Mapping[str, onnx.TensorProto]
) -> ModelProto:
    """Return a model of one node with constant inputs, with the types that ONNX infers for its results."""
    inputs, known = [], []
    for tensor in (constants[name] for name in dict.fromkeys(node.input) if name):
        # Inference needs the values of shapes, which are small; of other constants, only the types.
        if math.prod(tensor.dims) <= _MAX_SHAPE_ELEMENTS:
            known.append(with_data(tensor))
        else:
            inputs.append(declare(tensor))
    single = make_single(node, inputs, known, model.opset_import)
    single.ir_version = model.ir_version
    return infer_shapes(single)


def refuse_large_tensors(model: ModelProto) -> None:
    """Refuse tensors that would not fit into memory, where shapes are known."""
    shapes = known_values(model).shapes
    _refuse_many_axes(model, shapes)
    for node in branch_nodes(model):
        for name in node.output:
            elements = math.prod(shapes.get(name, ()))
            if elements > MAX_ELEMENTS:
                raise too_large(node, "a tensor", elements, MAX_ELEMENTS)


def _refuse_many_axes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse operands that list too many axes, where shapes are known."""
    for node in branch_nodes(model):
        place = _LISTS_OF_AXES.get(node.op_type, len(node.input))
        axes = math.prod(shapes.get(node.input[place], ())) if place < len(node.input) else 0
        if axes > _MAX_AXES:
            raise ImportFailed(
                f"{node.op_type} (node {node_name(node)}) lists {axes:,} axes, and the limit is {_MAX_AXES}",
                fix="correct the shapes in the model",
            )


def _evaluate(
    node: NodeProto, constants: Mapping[str, onnx.TensorProto], inferred: ModelProto
) -> dict[str, Array] | None:
    """Return a node's outputs by name, in the dtypes that ONNX infers; None if it cannot be folded."""
    if node.op_type == "DequantizeLinear":
        tensor = constants[node.input[0]]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if not tensor.dims and np.issubdtype(dtype, np.integer):
            return {node.output[0]: _dequantize_scalar(node, constants)}
    known = [with_data(constants[name]) for name in dict.fromkeys(node.input) if name]
    single = make_single(node, [], known, inferred.opset_import)
    try:
        arrays = make_evaluator(single)({})
    except Exception:
        # For an operator that it lacks, the evaluator raises many types of exceptions.
        return None
    if not arrays or not all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    if any(array.size > _MAX_FOLDED_ELEMENTS for array in arrays):
        return None
    names, types = filter(None, node.output), element_types(inferred)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}
    return {
        name: np.asarray(array).astype(dtypes.get(name, array.dtype), copy=False)
        for name, array in zip(names, arrays, strict=True)
    }


def _dequantize_scalar(node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Array:
    """Return the dequantized value of a scalar, which ONNX's evaluator (onnx 1.23) cannot compute."""
    number, scale, *zero = (
        numpy_helper.to_array(with_data(constants[name])) for name in node.input if name
    )
    wide = np.promote_types(scale.dtype, np.float32)
    difference = number.astype(np.int64) - (zero[0].astype(np.int64) if zero else 0)
    output = attributes_of(node).get("output_dtype", 0)
    dtype = helper.tensor_dtype_to_np_dtype(output) if output else scale.dtype
    return np.asarray(difference.astype(wide) * scale.astype(wide)).reshape(()).astype(dtype)


def bypass_copies(model: ModelProto) -> ModelProto:
    """Remove nodes that only copy a tensor, except those that give a graph output its name."""
    outputs = {value.name for value in model.graph.output}
    known = known_values(model)
    sources: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = sources.get(name, name)
        for graph in subgraphs(node):
            rename_captured(graph, sources)
        # Dropout does nothing in inference.
        is_idle = node.op_type == "Dropout" and not unsupported_reason(node, known)
        if (is_idle or node.op_type == "Identity") and node.output[0] not in outputs:
            sources[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    replace_nodes(model.graph, kept)
    return model


def drop_unused_outputs(model: ModelProto) -> ModelProto:
    """Remove optional outputs that no node reads, such as masks: TVM may fail to convert them."""
    used = names_used(model.graph)
    for node in model.graph.node:
        while node.output[1:] and node.output[-1] not in used and _ends_optional(model, node):
            del node.output[-1]
    return model


def _ends_optional(model: ModelProto, node: NodeProto) -> bool:
    if not onnx.defs.has(node.op_type, opset_of(model), node.domain):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset_of(model), node.domain)
    last = len(node.output) - 1
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return last < len(schema.outputs) and schema.outputs[last].option == optional


def drop_dead_nodes(model: ModelProto) -> ModelProto:
    """Remove nodes and weights that no output depends on."""
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(node)
        needed |= names_read(node)
    replace_nodes(model.graph, kept[::-1])
    weights = {t.name: t for t in model.graph.initializer if t.name in needed}
    set_entries(model.graph.initializer, list(weights.values()))
    return model


# ---------------------------------------------------------------- the passes in their order


_CONVERSIONS: Final[tuple[_Pass, ...]] = (
    inline_functions,
    convert_block_quantized,
    # Before the opset is converted, because ONNX's converter may refuse the types of replaced weights.
    drop_dead_nodes,
    convert_opset,
    name_branch_values,
    convert_constants_to_initializers,
)
# Each pass may make further simplifications possible for the others, so they run in rounds.
_SIMPLIFICATIONS: Final[tuple[_Pass, ...]] = (
    infer_shapes,
    fold_shapes,
    fold_constants,
    inline_known_branches,
    unroll_loops,
    drop_unused_outputs,
    rewrite_nodes,
    expand_unsupported_operators,
    convert_constants_to_initializers,
    bypass_copies,
    drop_dead_nodes,
)
# The maximum number of rounds, plus one per fused operator: it may wait for a shape or type from another operator.
_MAX_ROUNDS: Final = 16


def prepare(
    model: ModelProto,
    inputs: tuple[TensorSpec, ...],
    bound: Mapping[str, Array] = MappingProxyType({}),
    custom: CustomNodes = NO_OPERATORS,
) -> ModelProto:
    """Convert a model in place to the form that TVM's importer needs, and return it.

    `inputs` may omit inputs with static shapes. Inputs in `bound` become constants.

    Raises:
        ImportFailed: when the inputs do not match the model, or its opset is too old.
    """
    _separate_inputs_and_weights(model, {spec.name for spec in inputs})
    _set_input_shapes(model, inputs)
    set_entries(model.graph.input, [v for v in model.graph.input if v.name not in bound])
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in bound.items())
    for conversion in _CONVERSIONS:
        model = conversion(model)
    model = _simplify(model, custom)
    refuse_large_tensors(model)
    return model


def _simplify(model: ModelProto, custom: CustomNodes) -> ModelProto:
    fused = sum(operator_of(node).format == "fused" for node in model.graph.node)
    for round_number in range(_MAX_ROUNDS + fused):
        before = model.SerializeToString(deterministic=True)
        model = custom.infer_shapes(model)
        for simplification in _SIMPLIFICATIONS:
            model = simplification(model)
        model = simplify_branches(model, functools.partial(_simplify, custom=custom))
        if model.SerializeToString(deterministic=True) == before:
            _log.debug("nothing left to simplify after %d rounds", round_number)
            break
    return model


def _separate_inputs_and_weights(model: ModelProto, names: Collection[str]) -> None:
    """Ensure that no name is both an input and a weight; up to IR version 3, all weights are inputs, too.

    An input's initializer is its default value, which is dropped if the recipe names the input.
    """
    listed = {value.name for value in model.graph.input}
    weights = [t for t in model.graph.initializer if t.name not in listed.intersection(names)]
    known = {tensor.name for tensor in weights}
    set_entries(model.graph.input, [v for v in model.graph.input if v.name not in known])
    set_entries(model.graph.initializer, weights)
    # Up to IR version 3, ONNX's version converter requires that weights are inputs, too.
    model.ir_version = max(model.ir_version, 4)


def _set_input_shapes(model: ModelProto, inputs: tuple[TensorSpec, ...]) -> None:
    """Set the shapes of the graph's inputs, and remove all shapes inferred earlier."""
    model_inputs = [_model_input(value) for value in model.graph.input]
    check_inputs(model_inputs, list(map(request_of, inputs)))
    specs = {spec.name: spec for spec in inputs}
    for value in model.graph.input:
        if value.name in specs:
            shape = value.type.tensor_type.shape
            shape.ClearField("dim")
            spec = specs[value.name]
            for size in spec.sizes or spec.shape:
                shape.dim.add(**{"dim_param" if isinstance(size, str) else "dim_value": size})
    # Shapes inferred from other input shapes would contradict the new ones.
    own = {name for node in model.graph.node if node.domain == OWN_DOMAIN for name in node.output}
    for graph in all_graphs(model.graph):
        set_entries(graph.value_info, [value for value in graph.value_info if value.name in own])
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")


def _model_input(value: onnx.ValueInfoProto) -> ModelInput:
    tensor = value.type.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
    dims = tuple(sizes) if tensor.HasField("shape") else None
    element_type = tensor.elem_type if value.type.HasField("tensor_type") else None
    return model_input(value.name, element_type, dims, is_required=True)
