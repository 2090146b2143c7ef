"""Runs TVM's importer on a prepared ONNX model, with separate weights and the node in every error."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import ModelProto, NodeProto
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, onnx_input

from tvmflow.core.dimensions import WrongSize, evaluate_shape
from tvmflow.core.errors import ImportFailed, StageError
from tvmflow.core.formatting import excerpt, last_line, names_text, quoted
from tvmflow.core.types import Array, Dimension, TensorSpec
from tvmflow.core.version import page_url
from tvmflow.frontends._data_dependent_shapes import MixedRows, count_outputs
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends.base import DYNAMIC_FIX, OPERATOR_FIX, LoadedModel
from tvmflow.frontends.onnx._arithmetic import NodeToConvert
from tvmflow.frontends.onnx._inlining import list_inputs_of
from tvmflow.frontends.onnx.custom_nodes import NO_OPERATORS, CustomNodes
from tvmflow.frontends.onnx.graph import (
    CUSTOM_DOMAIN,
    FROM_START,
    NUMBER,
    all_graphs,
    array_of,
    attributes_of,
    branch_nodes,
    captured_names,
    dtype_of,
    is_if,
    is_standard,
    known_values,
    node_name,
    opset_of,
    place_of,
)
from tvmflow.frontends.onnx.operators import (
    EXTENSION_OPERATORS,
    OPERATORS,
    Operator,
    operator_of,
    unsupported_reason,
)
from tvmflow.frontends.onnx.sizes import Sizes, SizeValue
from tvmflow.graph.counts import COUNT_ATTRIBUTES, SIZES_NEEDED, read_counts
from tvmflow.graph.dynamic_shapes import NoSize, plain, read_size, size_text, sizes_of
from tvmflow.graph.marks import mark_new, take_marks

_log = logging.getLogger(__name__)

# An integer tensor with more elements is a learned table, not a shape.
_MAX_SHAPE_ELEMENTS: Final = 1024
# The operand that gives the shape of the result.
_SHAPE_OPERANDS: Final = {"ConstantOfShape": 0, "Expand": 1}
OWN_FIX: Final = f"""\
implement it: name a file under `operators` in the recipe ({page_url("custom-operators")}), with
       from tvmflow.custom_operators import operator
       @operator({{name}}, domain={{domain}})
       def implement(node, *inputs): ...  # node.te(…), node.tir(…), node.c(…), or operators of Relax"""
"""How to implement an operator `name` of a `domain`."""

_QUANTIZED_FIX: Final = (
    "quantize the model in QDQ format: QuantizeLinear and DequantizeLinear around its operators"
)


def import_prepared(
    model: ModelProto,
    inner_outputs: int = 0,
    custom: CustomNodes = NO_OPERATORS,
    labels: Mapping[str, str] = MappingProxyType({}),
    dimensions: Sequence[Dimension] = (),
    *,
    counts_rows: bool = True,
) -> LoadedModel:
    """Import a model from `prepare`; its last `inner_outputs` outputs are intermediate tensors.

    `labels` names the user's node that computes each tensor. With `counts_rows`, a result with data-dependent rows has
    a row count; without it, only TVM's runtime knows the number of rows.

    Raises:
        ImportFailed: for a node that cannot be imported; the error names operator and node.
    """
    _refuse_unsupported(model, is_dynamic=bool(dimensions))
    largest = {entry.name: entry.max for entry in dimensions}
    importer = _Importer(model, custom, labels, dimensions)
    try:
        mod = count_outputs(importer.import_model())
        bounded = read_counts(mod["main"])
        if bounded and not counts_rows:
            raise MixedRows("a cut into parts")
    except MixedRows as error:
        # This needs no row counts, because TVM's runtime knows the sizes of tensors.
        _log.debug("the sizes of tensors are not counted: %s", error.message)
        importer = _Importer(model, custom, labels, dimensions, counts_rows=False)
        mod = importer.import_model()
        main = mod.get_global_var("main")
        mod[main] = mod[main].with_attr(SIZES_NEEDED, error.message)
        bounded = error.bounded
    clean_up = [relax.transform.Normalize(), relax.transform.DeadCodeElimination()]
    mod = tvm.transform.Sequential(clean_up)(mod)
    mod, params = _drop_unused_weights(mod, importer.weights)
    _log.debug("%d weights, %d nodes", len(params), len(model.graph.node))
    if not relax.analysis.check_well_formed(mod):
        raise ImportFailed(
            "TVM's importer returned a module that is not well-formed",
            fix="report a bug of tvmflow, with the model",
        )
    nodes = tuple(importer.names[min(own)] if own else "" for own in take_marks(mod))
    main = mod["main"]
    kinds = [var.ty for var in main.params[: int(main.attrs["num_input"])]]
    inputs = _specs(model.graph.input, kinds, largest)
    results = list(getattr(main.ret_ty, "fields", [main.ret_ty]))
    outputs = _specs(model.graph.output, results[: len(model.graph.output)], largest)
    for entry in bounded:
        outputs[entry.output] = outputs[entry.output]._replace(bounded_axis=entry.axis)
    count = len(outputs) - inner_outputs
    return LoadedModel(
        mod=mod,
        params=params,
        inputs=tuple(inputs),
        outputs=tuple(outputs[:count]),
        tensors=tuple(outputs[count:]),
        nodes=nodes,
    )


def infer_results(
    model: ModelProto,
    known: Mapping[str, SizeValue],
    symbols: Mapping[str, Any],
    dimensions: Sequence[Dimension],
) -> list[Any]:
    """Return the Relax types of the results of a one-node model.

    `known` are operands computed from the dimensions, whose variables are `symbols`.

    Raises:
        Exception: whatever the node's conversion raises.
    """
    importer = _Importer(model, NO_OPERATORS, {}, dimensions, symbols=symbols, known=known)
    try:
        importer.import_model()
    except ImportFailed as error:
        raise error.__cause__ or error from None
    # A function's type cannot contain variables that its operands do not define, so the types are read here.
    return [importer.type_of(value.name) for value in model.graph.output]


def _refuse_unsupported(model: ModelProto, *, is_dynamic: bool) -> None:
    """Raise one ImportFailed that lists all nodes that cannot be imported."""
    known = known_values(model)
    refused: dict[str, list[NodeProto]] = {}
    for node in branch_nodes(model):
        if reason := unsupported_reason(node, known):
            refused.setdefault(reason, []).append(node)
    if not refused:
        return
    lines = []
    for reason, nodes in sorted(refused.items()):
        rest = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        lines.append(f"{reason} (node {node_name(nodes[0])}{rest})")
    first = refused[min(refused)][0]
    if any(operator_of(node).format == "quantized" for node in branch_nodes(model)):
        fixes = [_QUANTIZED_FIX]
    elif any(attribute.HasField("g") for attribute in first.attribute):
        # A custom operator cannot replace a loop.
        advice = _binding_advice(model, first.input[0]) if first.op_type == "Loop" else ""
        fixes = [advice, DYNAMIC_FIX if is_dynamic else "", OPERATOR_FIX]
    else:
        name, domain = quoted(first.op_type), quoted(first.domain)
        fixes = [OPERATOR_FIX, OWN_FIX.format(name=name, domain=domain)]
    raise ImportFailed("; ".join(lines), fix="; or ".join(filter(None, fixes)))


def _binding_advice(model: ModelProto, name: str) -> str:
    """Return how to make a condition or iteration count constant if it depends on inputs."""
    names = " or ".join(f"inputs.{excerpt(n)}.value" for n in list_inputs_of(model, name))
    return f"make it constant with {names}" if names else ""


# Words that occur only in internal errors of TVM and ONNX.
_INTERNALS: Final = re.compile(
    r"\b(relax|tirx?|tvm|[TR])\.\w|<class|Check failed|InternalError|InferenceError|op_type:"
)
# Errors about Python values, whose texts do not help users.
_PYTHONS: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)


def explain_failure(error: Exception, operands: str) -> str:
    """Return the text of an error; for an internal error, that these operands are not supported."""
    reason = last_line(error)
    if isinstance(error, _PYTHONS) or _INTERNALS.search(reason):
        return f"there is no conversion of it for its attributes and the operands {operands or 'it has'}"
    return reason


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer with weights as parameters, `OPERATORS`, and the node in each error."""

    _nodes: dict[str, Any]

    def __init__(
        self,
        model: ModelProto,
        custom: CustomNodes,
        labels: Mapping[str, str],
        dimensions: Sequence[Dimension],
        *,
        counts_rows: bool = True,
        symbols: Mapping[str, Any] = MappingProxyType({}),
        known: Mapping[str, SizeValue] = MappingProxyType({}),
    ) -> None:
        super().__init__({}, "float32", keep_params_in_input=False, sanitize=False)
        self._model = model
        self._custom = custom
        self._labels = labels
        self._counts_rows = counts_rows
        # The node of each mark, by which passes over the imported module keep the names of nodes.
        self.names: list[str] = []
        inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        self._dtype = {n: dtype_of(t) for n, t in inputs.items()}
        self._parameters = {
            node.input[position]
            for node in branch_nodes(model)
            for position in operator_of(node).parameters
            if position < len(node.input)
        }
        self._quantized = {
            node.input[0] for node in branch_nodes(model) if node.op_type == "DequantizeLinear"
        }
        self.weights: dict[str, tuple[relax.Var, Array]] = {}
        self._sizes: Sizes | None = None
        if dimensions:
            self._sizes = Sizes(self.bb, self._nodes, self.weights, dimensions, known, symbols)

    def import_model(self) -> tvm.IRModule:
        """Import the model, with a variable for every expression."""
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            mod = self.from_onnx(self._model.graph, opset_of(self._model))
        return relax.transform.Normalize()(mod)

    def type_of(self, name: str) -> Any:
        return self._nodes[name].ty

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            name, array = tensor.name, np.asarray(array_of(tensor), order="C")
            # Shapes, axes and masks are small integer tensors.
            is_shape_like = array.dtype.kind in "iub" and array.size <= _MAX_SHAPE_ELEMENTS
            is_constant = is_shape_like and name not in self._quantized
            if name in self._parameters or is_constant or tensor.doc_string == NUMBER:
                self._nodes[name] = relax.const(array, str(array.dtype))
                continue
            var = self._new_var(name, array.shape, str(array.dtype))
            self._nodes[name] = var
            # TVM's importer reads the values of constant inputs from here; values in a file are mapped, not copied.
            as_tensor = tvm_ffi.from_dlpack if place_of(tensor) else tvm.runtime.tensor
            self._params[name] = (var, as_tensor(array))
            self.weights[name] = (var, array)
        self._keep_params_in_input = True

    def _parse_graph_input(self, graph: onnx.GraphProto) -> None:
        """Make parameters of inputs; TVM, which ignores precedence, would misread dimension expressions."""
        for value in graph.input:
            name = value.name
            if name not in self._nodes:
                self._num_input += 1
                self._input_names.append(name)
                dims = value.type.tensor_type.shape.dim
                symbols = self._sizes.symbols if self._sizes else {}
                shape = [read_size(dim.dim_param or dim.dim_value, symbols) for dim in dims]
                self._nodes[name] = self._new_var(name, shape, self._dtype[name])
            self._inputs[name] = self._nodes[name]

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        """Convert an operator with tvmflow's converter if there is one, otherwise with TVM's."""
        convert = super()._convert_operator

        def convert_by_tvm(operands: Sequence[Any]) -> relax.Expr:
            return convert(op_name, onnx_input(operands), attrs, opset)

        # `import_prepared` has refused extension operators outside OWN_DOMAIN
        entry = OPERATORS.get(op_name) or EXTENSION_OPERATORS.get(op_name)
        own = entry.convert if entry else None
        if own is None:
            return _checked(convert_by_tvm(inputs))
        node = NodeToConvert(
            builder=self.bb,
            inputs=list(inputs),
            attributes=attrs,
            opset=opset,
            convert_by_tvm=convert_by_tvm,
            counts_rows=self._counts_rows,
        )
        return _checked(self.bb.normalize(own(node)))

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Do nothing: `import_prepared` has refused them."""

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        """Convert the nodes one by one, so that an error can name its node."""
        if self._sizes:
            for value in graph.input:
                self._sizes.shape_of(self._nodes[value.name])
        for node in graph.node:
            try:
                if self._sizes and self._construct_sizes(node, self._sizes):
                    pass
                elif is_if(node):
                    self._construct_if(node)
                elif node.domain == CUSTOM_DOMAIN:
                    inputs = [self._nodes[name] if name else None for name in node.input]
                    results = self._custom.convert(node, inputs, self.bb)
                    self._nodes.update(zip(node.output, results, strict=True))
                else:
                    self._refuse_computed_shape(node)
                    single = onnx.GraphProto()
                    single.node.append(node)
                    if any(entry.key == FROM_START for entry in node.metadata_props):
                        single.node[0].attribute.append(onnx.helper.make_attribute(FROM_START, 1))
                    super()._construct_nodes(single)
                if self._sizes:
                    self._sizes.check_results(node)
            except StageError:
                raise
            except Exception as error:
                name = f"{excerpt(node.op_type)} (node {node_name(node)})"
                reason = self._explain(node, error)
                if self._sizes and not isinstance(error, DynamicShapeProblem):
                    reason = self._sizes.fixed_text(node) or reason
                text = f"{name} cannot be imported: {reason}"
                raise ImportFailed(
                    text, fix=DYNAMIC_FIX if self._sizes else OPERATOR_FIX
                ) from error
            # Nodes added by `prepare` get the label of the user's node that computes one of their results.
            label = next((self._labels[n] for n in node.output if n in self._labels), None)
            if label is not None:
                marks = frozenset((len(self.names),))
                self.names.append(label)
                for name in filter(self._nodes.__contains__, node.output):
                    mark_new(self._nodes[name], marks, self.bb.lookup_binding)
        if self._sizes:
            self._sizes.materialize([value.name for value in graph.output])

    def _refuse_computed_shape(self, node: NodeProto) -> None:
        """Raise ImportFailed if the operand that gives the result's shape is computed at run time."""
        if node.op_type not in _SHAPE_OPERANDS:
            return
        name = node.input[_SHAPE_OPERANDS[node.op_type]]
        operand = self._nodes[name]
        if isinstance(operand, tvm.ir.Constant) or not isinstance(operand.ty, relax.TensorType):
            return
        names = names_text([excerpt(n) for n in list_inputs_of(self._model, name)])
        text = (
            f"{excerpt(node.op_type)} (node {node_name(node)}) cannot be imported: the shape of its "
            f"result depends on the values of {names or 'inputs'}"
        )
        raise ImportFailed(text, fix=_binding_advice(self._model, name) or OPERATOR_FIX)

    def _explain(self, node: NodeProto, error: Exception) -> str:
        types = [self._nodes[name].ty for name in node.input if name in self._nodes]
        operands = [
            f"{ty.dtype}{list(map(plain, ty.shape.values))}"
            for ty in types
            if isinstance(getattr(ty, "shape", None), relax.ShapeExpr)
        ]
        return explain_failure(error, ", ".join(operands))

    def _construct_sizes(self, node: NodeProto, sizes: Sizes) -> bool:
        """Convert a node with its rule for dynamic shapes, if it applies; return whether it did."""
        entry = operator_of(node) if is_standard(node) else Operator()
        if entry.evaluate and sizes.evaluate(node, entry.evaluate):
            return True
        result = entry.follow(sizes, node) if entry.follow else None
        if result is None:
            sizes.materialize([*node.input, *sorted(captured_names(node))])
            return False
        results = result if isinstance(result, list) else [result]
        for name, value in zip(node.output, results, strict=True):
            self._nodes[name] = self.bb.emit(self.bb.normalize(value))
        return True

    def _construct_if(self, node: NodeProto) -> None:
        """Convert an If; at run time, only the selected branch is computed."""
        branches = [attributes_of(node)[name] for name in ("then_branch", "else_branch")]
        inner = [n for branch in branches for graph in all_graphs(branch) for n in graph.node]
        advice = _binding_advice(self._model, node.input[0])
        if not self._counts_rows and any(n.op_type == "NonMaxSuppression" for n in inner):
            text = (
                f"If (node {node_name(node)}) cannot be imported: NonMaxSuppression in a branch "
                "selects a number of boxes that is known only when it runs"
            )
            raise ImportFailed(text, fix=advice or OPERATOR_FIX)
        # Expressions that are not bound to a variable would be computed again in each branch.
        for name in sorted(captured_names(node)):
            if isinstance(self._nodes.get(name), relax.Call):
                self._nodes[name] = self.bb.emit(self._nodes[name])
        condition = self.bb.emit(relax.op.reshape(self._nodes[node.input[0]], []))
        try:
            bodies = [self._convert_branch(branch) for branch in branches]
        except ImportFailed as error:
            raise ImportFailed(error.message, fix=advice or error.fix) from error
        _check_results(node, bodies, advice)
        result = self.bb.emit(relax.If(condition, *bodies))
        if len(node.output) == 1:
            self._nodes[node.output[0]] = result
            return
        for index, name in enumerate(node.output):
            self._nodes[name] = self.bb.emit(relax.TupleGetItem(result, index))

    def _convert_branch(self, graph: onnx.GraphProto) -> relax.SeqExpr:
        outer = dict(self._nodes)
        self.bb.begin_scope()
        self.bb._begin_binding_block()
        self._construct_nodes(graph)
        results = [self._nodes[value.name] for value in graph.output]
        body = self.bb.emit(results[0] if len(results) == 1 else relax.Tuple(results))
        block = self.bb._end_block()
        self.bb.end_scope()
        # Changed in place, because TVM's importer shares this dictionary.
        self._nodes.clear()
        self._nodes.update(outer)
        return relax.SeqExpr([block], body)


def _checked(result: relax.Expr) -> relax.Expr:
    """Check that a result has no negative size; TVM infers one if a window is larger than the data."""
    shape = getattr(result.ty, "shape", None)
    sizes = list(map(plain, shape.values)) if isinstance(shape, relax.ShapeExpr) else []
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(
            f"its result would have the shape {sizes}: a window is larger than the padded data"
        )
    return result


def _check_results(node: NodeProto, bodies: Sequence[relax.SeqExpr], advice: str) -> None:
    """Check that both branches of an If return tensors of the same shapes and dtypes."""
    types = [getattr(body.body.ty, "fields", [body.body.ty]) for body in bodies]
    for one, other in zip(*types, strict=True):
        if not tvm_ffi.structural_equal(one, other):
            returned = f"{_type_text(one)} and {_type_text(other)}"
            text = f"If (node {node_name(node)}) has branches that return {returned}, and must return one shape and dtype"
            raise ImportFailed(text, fix=advice or OPERATOR_FIX)


def _type_text(kind: Any) -> str:
    sizes = kind.shape.values if kind.shape is not None else []
    texts = (str(int(n)) if isinstance(n, tvm.tirx.IntImm) else "?" for n in sizes)
    return f"{kind.dtype.dtype}[{', '.join(texts)}]"


def _drop_unused_weights(
    mod: tvm.IRModule, weights: dict[str, tuple[relax.Var, Array]]
) -> tuple[tvm.IRModule, dict[str, Array]]:
    """Remove weights that are no longer used, and the attribute with their values."""
    main = mod["main"]
    count = int(main.attrs["num_input"])
    used = {var.name for var in relax.analysis.free_vars(main.body)}
    kept = [var for var in main.params[count:] if var.name in used]
    parameters = [*main.params[:count], *kept]
    own = {name: main.attrs[name] for name in COUNT_ATTRIBUTES if name in main.attrs}
    attributes = {"num_input": count, "global_symbol": "main", **own}
    slim = relax.Function(parameters, main.body, main.ret_ty, main.is_pure).with_attrs(attributes)
    # Functions of kernels that the importer emitted stay in the module.
    mod.update_func(mod.get_global_var("main"), slim)
    return mod, {var.name: weights[var.name][1] for var in kept}


def _specs(
    values: Iterable[onnx.ValueInfoProto],
    kinds: Iterable[Any],
    largest: Mapping[str, int],
) -> list[TensorSpec]:
    specs = []
    for value, kind in zip(values, kinds, strict=True):
        sizes = sizes_of(SimpleNamespace(ty=kind))
        try:
            if sizes is None:
                raise NoSize
            texts = tuple(map(size_text, sizes))
            shape = evaluate_shape(texts, largest)
        except (NoSize, WrongSize):
            raise ImportFailed(
                f"{quoted(value.name)} has a size that depends on the values of inputs",
                fix="return a mask or scores in place of selected elements, or end the model before it selects",
            ) from None
        dynamic = () if texts == shape else texts
        specs.append(TensorSpec(value.name, shape, str(kind.dtype), sizes=dynamic))
    return specs
