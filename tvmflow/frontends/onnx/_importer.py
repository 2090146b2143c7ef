"""Takes a prepared ONNX model through TVM's importer, with weights apart and every failure named by its node."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from contextlib import redirect_stdout
from typing import Any, Final

import numpy as np
import onnx
import tvm
from onnx import ModelProto, NodeProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from tvmflow.errors import ImportFailed
from tvmflow.frontends._base import LoadedModel
from tvmflow.frontends.onnx._prepare import opset_of
from tvmflow.values import TensorSpec

_CONVERTERS: Final = frozenset(_get_convert_map()) | {"If", "Constant"}

# Which inputs of an operator are part of its definition rather than data, by position. They are
# constants even when they are floating-point numbers.
_DEFINING: Final = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "OneHot": (1, 2),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "ThresholdedRelu": (1,),
    "Upsample": (1,),
}
# An integer tensor of more elements than this is a table that was learned, not a shape.
_SMALL: Final = 1024


def supported(node: NodeProto) -> bool:
    """Whether TVM's importer has a converter for the node's operator."""
    return node.domain in ("", "ai.onnx", "com.microsoft") and node.op_type in _CONVERTERS


def node_name(node: NodeProto) -> str:
    """How to find a node: its name, or what it gives when it has none."""
    return f"'{node.name}'" if node.name else f"that gives '{node.output[0]}'"


def import_prepared(model: ModelProto) -> LoadedModel:
    """Import a model that went through `prepare`. Raises ImportFailed."""
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
    return LoadedModel(
        mod,
        params,
        tuple(_spec(name, var.ty) for name, var in zip(names, inputs, strict=True)),
        _outputs(model, main.ret_ty),
    )


def _refuse_unsupported(model: ModelProto) -> None:
    missing = [node for node in model.graph.node if not supported(node)]
    if not missing:
        return
    first = {node.op_type: node for node in reversed(missing)}
    counts = Counter(node.op_type for node in missing)
    shown = [
        f"{node.domain + '.' if node.domain else ''}{name} (node {node_name(node)}"
        + (f" and {counts[name] - 1} more)" if counts[name] > 1 else ")")
        for name, node in sorted(first.items())
    ]
    raise ImportFailed(
        f"TVM has no {'operators' if len(shown) > 1 else 'operator'} {', '.join(shown)}",
        fix="replace it in the model, or cut the model before it",
    )


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, told which initializers are weights, and made to say at which node it fails."""

    def __init__(self, model: ModelProto) -> None:
        super().__init__({}, "float32", keep_params_in_input=False, sanitize=False)
        self._dtype = {v.name: _dtype_name(v.type.tensor_type.elem_type) for v in model.graph.input}
        self._defining = _defining_inputs(model)
        self._named = {id_of(node): node for node in model.graph.node}
        self._node: NodeProto | None = None
        self.weights: dict[str, tuple[relax.Var, np.ndarray[Any, Any]]] = {}

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = np.ascontiguousarray(numpy_helper.to_array(tensor))
            if tensor.name in self._defining or _is_definition(array):
                self._nodes[tensor.name] = relax.const(array, str(array.dtype))
                continue
            name = tensor.name
            var = self._new_var(name, array.shape, str(array.dtype))
            self._nodes[tensor.name] = var
            self._params[name] = (var, tvm.runtime.tensor(array))
            self.weights[name] = (var, array)
        self._keep_params_in_input = True

    def _parse_attr(self, attributes: Any) -> dict[str, Any]:
        parsed: dict[str, Any] = super()._parse_attr(attributes)
        return parsed

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


def id_of(node: NodeProto) -> str:
    """A node is known by what it gives."""
    return str(node.output[0])


def _dtype_name(elem_type: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(elem_type))


def _defining_inputs(model: ModelProto) -> set[str]:
    return {
        node.input[position]
        for node in model.graph.node
        for position in _DEFINING.get(node.op_type, ())
        if position < len(node.input)
    }


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
    return tvm.IRModule({"main": main}), {var.name: weights[var.name][1] for var in kept}


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
