"""Takes a prepared ONNX model through TVM's importer, with weights apart and every failure named by its node."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, Final

import numpy as np
import onnx
import tvm
from onnx import ModelProto, NodeProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from tvmflow.errors import ImportFailed
from tvmflow.frontends._base import LoadedModel
from tvmflow.frontends.onnx._operators import (
    WHOLE_NUMBERS,
    defining_operands,
    opset_of,
    view_of,
    why_not,
)
from tvmflow.values import TensorSpec

# An integer tensor of more elements than this is a table that was learned, not a shape.
_SMALL: Final = 1024


def node_name(node: NodeProto) -> str:
    """How to find a node: its name, or what it gives when it has none."""
    return f"'{node.name}'" if node.name else f"that gives '{node.output[0]}'"


def import_prepared(model: ModelProto, tensors: int = 0) -> LoadedModel:
    """Import a model that went through `prepare`, the last `tensors` outputs of which are inner ones. Raises ImportFailed."""
    _refuse_unsupported(model)
    importer = _Importer(model)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        mod = importer.from_onnx(model.graph, opset_of(model))
    mod = tvm.transform.Sequential(
        [relax.transform.Normalize(), relax.transform.DeadCodeElimination()]
    )(mod)
    mod, params = _weights_apart(mod, importer.weights)
    if not relax.analysis.check_well_formed(mod):
        raise ImportFailed(
            "TVM's importer made a module that is not well formed", fix="please report the model"
        )
    main = mod["main"]
    inputs = main.params[: int(main.attrs["num_input"])]
    names = [value.name for value in model.graph.input]
    outputs = _outputs(model, main.ret_ty)
    count = len(outputs) - tensors
    return LoadedModel(
        mod,
        params,
        tuple(_spec(name, var.ty) for name, var in zip(names, inputs, strict=True)),
        outputs[:count],
        outputs[count:],
    )


def _refuse_unsupported(model: ModelProto) -> None:
    """Raise ImportFailed with every operator that cannot be imported, and the first node of each."""
    view = view_of(model)
    refused: dict[tuple[str, str], list[NodeProto]] = {}
    for node in model.graph.node:
        if reason := why_not(node, view):
            refused.setdefault((reason, _operator(node)), []).append(node)
    if not refused:
        return
    shown = [
        f"{reason}: {operator} (node {node_name(nodes[0])}"
        + (f" and {len(nodes) - 1} more)" if len(nodes) > 1 else ")")
        for (reason, operator), nodes in sorted(refused.items(), key=lambda item: item[0])
    ]
    are_quantised = any(node.op_type in WHOLE_NUMBERS for node in model.graph.node)
    raise ImportFailed(
        "; ".join(shown),
        fix="quantise the model in the format QDQ: QuantizeLinear and DequantizeLinear around its operators"
        if are_quantised
        else "replace it in the model, or cut the model before it",
    )


def _operator(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, told which initializers are weights, and made to say at which node it fails."""

    def __init__(self, model: ModelProto) -> None:
        super().__init__({}, "float32", keep_params_in_input=False, sanitize=False)
        self._dtype = {v.name: _dtype_name(v.type.tensor_type.elem_type) for v in model.graph.input}
        self._defining = {n for node in model.graph.node for n in defining_operands(node)}
        self._quantised = {
            node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"
        }
        self.weights: dict[str, tuple[relax.Var, np.ndarray[Any, Any]]] = {}

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = np.asarray(numpy_helper.to_array(tensor), order="C")
            is_small = _is_definition(array) and tensor.name not in self._quantised
            if tensor.name in self._defining or is_small:
                self._nodes[tensor.name] = relax.const(array, str(array.dtype))
                continue
            name = tensor.name
            var = self._new_var(name, array.shape, str(array.dtype))
            self._nodes[tensor.name] = var
            self._params[name] = (var, tvm.runtime.tensor(array))
            self.weights[name] = (var, array)
        self._keep_params_in_input = True

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        """As TVM does, but for Clip and PRelu, which it turns into what no pass for layouts sees through."""
        if op_name == "PRelu":
            return self._prelu(*inputs)
        bounds = _clip_bounds(inputs, attrs) if op_name == "Clip" else None
        if bounds is None:
            return super()._convert_operator(op_name, inputs, attrs, opset)
        value = inputs[0]
        for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
            value = value if bound is None else self.bb.normalize(operator(value, bound))
        return value

    def _prelu(self, x: relax.Expr, slope: relax.Expr) -> relax.Expr:
        """max(x, 0) + slope · min(x, 0); a row of slopes that fits the channels and nothing else is one for each of them.

        So have operator set 6, and MXNet's and PyTorch's old exports in newer ones.
        """
        sizes, slopes = ([int(n) for n in each.ty.shape] for each in (x, slope))
        if len(slopes) == 1 and len(sizes) > 1 and slopes[0] not in (1, sizes[-1]):
            if slopes[0] != sizes[1]:
                raise ValueError(f"slopes of shape {slopes} do not fit data of shape {sizes}")
            slope = relax.op.reshape(slope, [slopes[0], *[1] * (len(sizes) - 2)])
        zero = relax.const(0, x.ty.dtype.dtype)
        below = relax.op.multiply(slope, relax.op.minimum(x, zero))
        return self.bb.normalize(relax.op.add(relax.op.maximum(x, zero), below))

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        """One node at a time, so that a failure has a name."""
        for node in graph.node:
            single = onnx.GraphProto()
            single.node.append(node)
            try:
                super()._construct_nodes(single)
            except ImportFailed:
                raise
            except Exception as error:
                lines = [line for line in str(error).strip().splitlines() if line.strip()]
                raise ImportFailed(
                    f"{node.op_type} (node {node_name(node)}) cannot be imported: "
                    f"{lines[-1].strip() if lines else type(error).__name__}",
                    fix="replace it in the model, or cut the model before it",
                ) from error


def _clip_bounds(inputs: Any, attrs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The least and the greatest value of a Clip, None for one that it lacks; None when they are not constants."""
    dtype = str(inputs[0].ty.dtype.dtype)
    if "min" in attrs or "max" in attrs:
        given = [attrs.get(name) for name in ("min", "max")]
        bounds = [None if each is None else relax.const(float(each), dtype) for each in given]
    else:
        bounds = [inputs[place] if place < len(inputs) else None for place in (1, 2)]
    if any(each is not None and not isinstance(each, tvm.ir.Constant) for each in bounds):
        return None
    # a bound that is not a number is none, as in ONNX Runtime
    least, most = (
        None if each is None or np.isnan(each.value.numpy()).any() else each for each in bounds
    )
    return least, most


def _dtype_name(elem_type: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(elem_type))


def _is_definition(array: np.ndarray[Any, Any]) -> bool:
    """Small integers and truth values are shapes, axes and masks: part of the graph."""
    return array.dtype.kind in "iub" and array.size <= _SMALL


def _weights_apart(
    mod: tvm.IRModule, weights: dict[str, tuple[relax.Var, np.ndarray[Any, Any]]]
) -> tuple[tvm.IRModule, dict[str, np.ndarray[Any, Any]]]:
    """Drop the weights that became constants on the way, and the attribute that holds their values."""
    main = mod["main"]
    count = int(main.attrs["num_input"])
    used = {var.name for var in relax.analysis.free_vars(main.body)}
    kept = [var for var in main.params[count:] if var.name in used]
    main = relax.Function(
        [*main.params[:count], *kept], main.body, main.ret_ty, main.is_pure
    ).with_attrs({"num_input": count, "global_symbol": "main"})
    # kernels that the importer wrote stay beside it
    mod.update_func(mod.get_global_var("main"), main)
    return mod, {var.name: weights[var.name][1] for var in kept}


def _spec(name: str, kind: Any) -> TensorSpec:
    try:
        shape = tuple(int(size) for size in kind.shape.values if kind.shape is not None)
    except (TypeError, AttributeError):
        raise ImportFailed(
            f"'{name}' has no fixed shape after import",
            fix="give all input shapes in the recipe; shapes that depend on values cannot be imported",
        ) from None
    return TensorSpec(name, shape, str(kind.dtype))


def _outputs(model: ModelProto, kind: Any) -> tuple[TensorSpec, ...]:
    kinds = list(kind.fields) if hasattr(kind, "fields") else [kind]
    names = [value.name for value in model.graph.output]
    return tuple(_spec(name, each) for name, each in zip(names, kinds, strict=True))
