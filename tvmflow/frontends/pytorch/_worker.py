"""The processes that run PyTorch: `python -m tvmflow.frontends.pytorch._worker [REQUEST]`.

Without a request, the process is the reference. With a JSON request of `export_to_onnx` or `export_factory`, it runs
PyTorch's exporters, and writes the answer to a JSON file, with `problem` and `reason` if the export failed.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import logging
import math
import os
import pickle
import re
import sys
import traceback
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Array
from tvmflow.frontends._reference_process import LoadedReference, Message, ObservedNode, serve
from tvmflow.frontends.onnx.graph import FROM_START
from tvmflow.frontends.pytorch._archive import copy_for_pytorch, read_archive
from tvmflow.frontends.states import encode_content

if TYPE_CHECKING:
    import torch
    import torch.fx

# ---------------------------------------------------------------- loading
# Containers in inputs and outputs may be from packages that are not installed, such as transformers, and are
# replaced by stand-ins with the same structure.


class Problem(Exception):
    """A failed import, load or export: the kind of problem, and the reason."""

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


def import_torch() -> Any:
    """Import `torch`, configured to unpickle only tensors; ImportError for any error."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    warnings.simplefilter("ignore")
    try:
        import torch
        import torch.export
    except Exception as error:
        # PyTorch raises OSError for a missing system library.
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return torch


def open_program(
    path: str,
    containers: Mapping[str, Sequence[str]],
    buffers: Sequence[str],
    tensors: Sequence[str],
) -> tuple[Any, list[Any]]:
    """Return the `ExportedProgram` of a `.pt2` file, and the initial content of its changed buffers.

    The program returns a flat tuple: outputs, changed buffers, then intermediate tensors. Changed buffers are also its
    last inputs. `containers` (see `Archive`) need not be importable.
    """
    torch = import_torch()
    for name, fields in containers.items():
        _register_stand_in(name, fields)
    _leave_out_example_inputs()
    logged = _LoggedErrors()
    logging.getLogger("torch.export").addHandler(logged)
    try:
        program = torch.export.load(path)
    except Exception as error:
        cause = logged.error or error
        raise Problem("load", f"{type(cause).__name__}: {last_line(cause)}") from error
    _return_tensors(program, tensors)
    return _hold_buffers(torch, program, buffers, len(tensors)) if buffers else (program, [])


class _LoggedErrors(logging.Handler):
    """A handler that keeps the last logged error: PyTorch logs the cause, but raises another error."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.error = record.exc_info[1]


def _register_stand_in(name: str, fields: Sequence[str]) -> None:
    """Register a stand-in for a type that is not imported: a named tuple if it has fields."""
    from torch.utils import _pytree as pytree

    if name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return
    if fields:
        pytree._register_namedtuple(
            namedtuple("StandIn", fields, rename=True), serialized_type_name=name
        )
        return

    class StandIn:
        def __init__(self, children: Sequence[Any], context: Any) -> None:
            self.children, self.context = list(children), context

    def flatten_with_keys(value: StandIn) -> tuple[list[tuple[Any, Any]], Any]:
        keys = map(pytree.SequenceKey, range(len(value.children)))
        return list(zip(keys, value.children, strict=True)), value.context

    pytree.register_pytree_node(
        StandIn,
        lambda value: (value.children, value.context),
        StandIn,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=name,
        to_dumpable_context=json.dumps,
        from_dumpable_context=json.loads,
    )


def _leave_out_example_inputs() -> None:
    """Ignore example inputs that are not only tensors: their classes may not be importable."""
    from torch._export.serde import serialize

    load: Callable[[Any], Any] = serialize.deserialize_torch_artifact

    def load_tensors(serialized: Any) -> Any:
        try:
            return load(serialized)
        except pickle.UnpicklingError:
            return None

    serialize.deserialize_torch_artifact = load_tensors


def _return_tensors(program: Any, tensors: Sequence[str]) -> None:
    """Change the outputs of a program to a flat tuple of its tensors, including intermediate tensors."""
    from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
    from torch.utils import _pytree as pytree

    nodes = {node.name: node for node in program.graph.nodes}
    [output] = [node for node in nodes.values() if node.op == "output"]
    signature = program.graph_signature
    pairs = [
        (value, spec)
        for value, spec in zip(output.args[0], signature.output_specs, strict=True)
        if spec.kind != OutputKind.USER_OUTPUT or isinstance(spec.arg, TensorArgument)
    ]
    for name in tensors:
        if name not in nodes:
            raise Problem("tensor", name)
        argument = TensorArgument(name=nodes[name].name)
        pairs.append((nodes[name], OutputSpec(OutputKind.USER_OUTPUT, argument, None)))
    output.args = (tuple(value for value, _ in pairs),)
    signature.output_specs[:] = [spec for _, spec in pairs]
    count = sum(spec.kind == OutputKind.USER_OUTPUT for _, spec in pairs)
    flat = pytree.tree_flatten((0,) * count)[1]
    program.module_call_graph[0].signature.out_spec = flat


def _hold_buffers(
    torch: Any, program: Any, buffers: Sequence[str], inner_tensors: int
) -> tuple[Any, list[Any]]:
    """Return a program whose last inputs are buffers, which it also returns, and the buffers' content.

    The added outputs come before the last `inner_tensors` outputs.
    """
    from torch.export import graph_signature as kinds
    from torch.utils import _pytree as pytree

    _hold_constants(program, buffers)
    with torch.no_grad():
        # Decomposition removes in-place operators.
        program = program.run_decompositions({})
    signature, graph = program.graph_signature, program.graph
    values = {spec.target: spec.arg.name for spec in signature.input_specs}
    following = {spec.target: spec.arg.name for spec in signature.output_specs}
    nodes = {node.name: node for node in graph.nodes}
    changed = signature.buffers_to_mutate.values()
    if missing := sorted(set(changed) - set(buffers)):
        raise Problem("state", ", ".join(missing))
    [*_, last] = graph.find_nodes(op="placeholder")
    inputs = [spec for spec in signature.input_specs if spec.target not in buffers]
    results = [spec for spec in signature.output_specs if spec.kind == kinds.OutputKind.USER_OUTPUT]
    position = len(results) - inner_tensors
    contents = []
    for name in reversed(buffers):
        last.append(nodes[values[name]])
    for name in buffers:
        # Non-persistent buffers are among the constants.
        held = program.state_dict if name in program.state_dict else program.constants
        contents.append(held.pop(name))
        argument = kinds.TensorArgument(name=values[name])
        inputs.append(kinds.InputSpec(kinds.InputKind.USER_INPUT, argument, None))
        argument = kinds.TensorArgument(name=following[name] if name in changed else values[name])
        results.insert(position, kinds.OutputSpec(kinds.OutputKind.USER_OUTPUT, argument, None))
        position += 1
    signature.input_specs[:], signature.output_specs[:] = inputs, results
    graph.output_node().args = (tuple(nodes[spec.arg.name] for spec in results),)
    count = sum(spec.kind == kinds.InputKind.USER_INPUT for spec in inputs)
    call = program.module_call_graph[0].signature
    call.in_spec = pytree.tree_flatten(((0,) * count, {}))[1]
    call.out_spec = pytree.tree_flatten((0,) * len(results))[1]
    call.forward_arg_names = None
    # They no longer match the inputs.
    program.example_inputs = None
    program.graph_module.recompile()
    return program, contents


def _hold_constants(program: Any, buffers: Sequence[str]) -> None:
    """Turn constants that the model writes to into buffers, which may change in decompositions."""
    from torch.export.graph_signature import InputKind

    specs = [spec for spec in program.graph_signature.input_specs if spec.target is not None]
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in specs:
        if spec.kind != InputKind.CONSTANT_TENSOR or spec.target not in buffers:
            continue
        spec.kind, spec.persistent = InputKind.BUFFER, False
        tensor = program.constants[spec.target]
        for other in specs:
            # a registered buffer may be the same tensor, which the graph then has under both names
            for held in (program.constants, program.state_dict):
                same = held.get(other.target) if other is not spec else None
                if same is not None and same.is_set_to(tensor):
                    nodes[other.arg.name].replace_all_uses_with(nodes[spec.arg.name])
                    held[other.target] = tensor.clone()


# ---------------------------------------------------------------- branches of piecewise operators


# Operator -> (low, high): bounds of its branches.
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(
        ("abs", "celu", "elu", "leaky_relu", "prelu", "_prelu_kernel", "relu", "selu"), (0.0, 0.0)
    ),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
    "relu6": (0.0, 6.0),
}
# Operator -> names of the arguments that are its bounds.
_BOUND_ARGUMENTS: Final[Mapping[str, tuple[str, str]]] = {
    "clamp": ("min", "max"),
    "clamp_max": ("", "max"),
    "clamp_min": ("min", ""),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "threshold"),
}


def observe(module: torch.fx.GraphModule, values: Sequence[Any]) -> list[ObservedNode]:
    """Run an exported program node by node on flat inputs, and return the branches that they take."""
    import torch.fx

    observed: list[ObservedNode] = []
    dependent: set[torch.fx.Node] = set()

    class Observer(torch.fx.Interpreter):  # type: ignore[misc]  # PyTorch may be missing
        def run_node(self, n: torch.fx.Node) -> Any:
            if n.op == "placeholder" or not dependent.isdisjoint(n.all_input_nodes):
                dependent.add(n)
                if n.op == "call_function":
                    args, kwargs = self.fetch_args_kwargs_from_env(n)
                    if branches := _find_branches(n, args, kwargs, dependent):
                        observed.append(ObservedNode(n.name, _name(n), branches))
            return super().run_node(n)

    Observer(module).run(*values, enable_io_processing=False)
    return observed


def _name(node: torch.fx.Node) -> str:
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).rstrip("_")


def _find_branches(
    node: torch.fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dependent: set[torch.fx.Node],
) -> dict[str, float]:
    """Return branch -> share of elements that take it; empty for operators without branches."""
    import torch

    name = _name(node)
    if name in ("where", "cond") and node.args[0] in dependent:
        share = _share(torch.as_tensor(args[0]).bool())
        return {"true": share, "false": 1 - share}
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return {}
    bounds = _find_bounds(name, node, args, kwargs)
    if bounds is None or node.args[0] not in dependent:
        return {}
    low, high = bounds
    below, above = _share(args[0] < low), _share(args[0] > high)
    if low == high == 0:
        return {"negative inputs": below, "positive inputs": above}
    branches = {f"inputs below {low:g}": below} if math.isfinite(low) else {}
    if low != high:
        branches["inputs between its bounds"] = 1 - below - above
    return branches | ({f"inputs above {high:g}": above} if math.isfinite(high) else {})


def _find_bounds(
    name: str, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, float] | None:
    import torch

    if name in _BOUNDS:
        return _BOUNDS[name]
    if name not in _BOUND_ARGUMENTS:
        return None
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    bounds = []
    for argument, missing in zip(_BOUND_ARGUMENTS[name], (-math.inf, math.inf), strict=True):
        value = given.get(argument)
        if isinstance(value, torch.Tensor):
            return None
        bounds.append(missing if value is None else float(value))
    return bounds[0], bounds[1]


def _share(condition: torch.Tensor) -> float:
    return float(condition.double().mean()) if condition.numel() else 0.0


# ---------------------------------------------------------------- the reference


class _Program(LoadedReference):
    """The program of an archive, run in PyTorch's eager mode."""

    def __init__(self, torch: Any, first: Message) -> None:
        self.name, self.can_observe = f"PyTorch {torch.__version__}", True
        self._torch = torch
        torch.set_num_threads(first["threads"])
        archive = Path(first["archive"])
        copy = copy_for_pytorch(archive, Path(first["scratch"]))
        facts = read_archive(archive)
        buffers = list(facts.buffers.values())
        program, _ = open_program(str(copy), facts.containers, buffers, first["tensors"])
        self._module = program.module()
        self._spec = program.call_spec.in_spec
        self._arguments = [
            (spec.arg.name, getattr(spec.arg, "value", None))
            for spec in program.graph_signature.input_specs
            if spec.kind.name == "USER_INPUT"
        ]
        last = len(self._arguments) - len(buffers)
        self._arguments[last:] = [(name, None) for name in facts.buffers]

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        outputs = self.prepare(arrays)()
        return [output.numpy() for output in outputs]

    def observe(self, arrays: Mapping[str, Array]) -> Sequence[ObservedNode]:
        with self._torch.inference_mode():
            return observe(self._module, self._list_values(arrays))

    def _list_values(self, arrays: Mapping[str, Array]) -> list[Any]:
        tensors = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        return [tensors.get(name, constant) for name, constant in self._arguments]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], Sequence[Any]]:
        from torch.utils import _pytree as pytree

        values = self._list_values(arrays)
        positional, by_name = pytree.tree_unflatten(values, self._spec)

        def infer() -> Sequence[Any]:
            with self._torch.inference_mode():
                outputs: Sequence[Any] = self._module(*positional, **by_name)
                return outputs

        return infer


# ---------------------------------------------------------------- the export to ONNX


# Fixed, because the default differs between versions of PyTorch; all versions support this opset.
_OPSET: Final = 18
_MAX_REASON: Final = 400
_REFUSES_NEGATIVE: Final = re.compile(
    r"\baten\.(embedding|gather|index_(add|copy|fill|reduce|select)|scatter)(\.|_add|_reduce)"
)
"""PyTorch operators that do not accept negative indices."""


def _export(request: dict[str, Any]) -> dict[str, Any]:
    try:
        torch = import_torch()
        import onnxscript  # noqa: F401  (torch.onnx imports it late, and explains less)
    except ImportError as error:
        raise Problem("import", str(error)) from error
    buffers = request["buffers"]
    program, initial = open_program(
        request["archive"], request["containers"], buffers, request["tensors"]
    )
    arrays = (tensor.numpy(force=True) for tensor in initial)
    try:
        contents = {n: encode_content(n, a.tobytes()) for n, a in zip(buffers, arrays, strict=True)}
    except ValueError as error:
        raise Problem("content", str(error)) from error
    try:
        with torch.no_grad():
            program = _decompose(torch, program)
            exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=_OPSET)
    except Exception as error:
        raise Problem("export", _root_cause(error)) from error
    # The exporter has replaced in-place operators; remaining mutations change the model's buffers.
    functional = exported.exported_program or program.run_decompositions({})
    changed = functional.graph_signature.buffers_to_mutate
    if changed:
        raise Problem("state", ", ".join(sorted(changed.values())))
    graph = exported.model.graph
    names = [*request["outputs"], *request["tensors"]]
    if len(graph.inputs) != len(request["inputs"]) or len(graph.outputs) != len(names):
        counts = f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        expected = f"{len(request['inputs'])} and {len(names)}"
        raise Problem("signature", f"{counts} in place of {expected}")
    for node in graph.all_nodes():
        if _REFUSES_NEGATIVE.search(node.metadata_props.get("pkg.torch.onnx.fx_node", "")):
            node.metadata_props[FROM_START] = ""
    _rename(graph, request["inputs"], names)
    exported.save(request["onnx"], external_data=True)
    return {"contents": contents}


# ---------------------------------------------------------------- decompositions

_WIDE: Final = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d addcdiv addcmul avg_pool1d avg_pool2d
    avg_pool3d batch_norm celu cdist cumprod cumsum dist elu expm1 gelu glu group_norm
    hardsigmoid hardswish hypot instance_norm layer_norm lerp linalg_norm linalg_vector_norm log_sigmoid
    log_softmax logaddexp logaddexp2 logcumsumexp logit logsumexp mean mish native_batch_norm
    native_group_norm native_layer_norm nansum norm nuclear_norm prod renorm rms_norm
    selu silu sinc softmax softplus std std_mean sum tanhshrink var var_mean xlogy _log_softmax _softmax
""".split()
"""Operators of several steps, which PyTorch computes in float32 even for float16 and bfloat16."""


def _decompose(torch: Any, program: Any) -> Any:
    """Decompose operators that the exporter does not support or miscomputes."""
    aten = torch.ops.aten
    bound = functools.partial
    table: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: bound(_attend, torch),
        aten.cosine_similarity.default: bound(_cosine_similarity, torch),
        aten.masked_scatter.default: bound(_masked_scatter, torch),
        aten.pad.default: bound(_pad, torch),
        aten.div.Tensor_mode: bound(_divide, torch),
        aten.slice_scatter.default: bound(_slice_scatter, torch),
    }
    narrow = {torch.float16, torch.bfloat16}
    values = [node.meta.get("val") for node in program.graph.nodes]
    if any(getattr(value, "dtype", None) in narrow for value in values):
        packets = [getattr(aten, name) for name in _WIDE if hasattr(aten, name)]
        for operator in (getattr(p, name) for p in packets for name in p.overloads()):
            table[operator] = bound(_compute_wide, torch, operator)
    schemas = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    # In-place operators are replaced by functional ones first.
    called = {schema.name.removesuffix("_") for schema in schemas if schema is not None}
    used = {op: function for op, function in table.items() if op._schema.name in called}
    return program.run_decompositions(used) if used else program


def _attend(
    torch: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention in which fully masked queries have the result 0.

    The exporter masks keys with the lowest finite value, so that all keys would count for such queries.
    """
    if enable_gqa:
        heads = query.size(-3)
        key, value = (x.repeat_interleave(heads // x.size(-3), -3) for x in (key, value))
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores = (query.to(wide) * factor) @ key.to(wide).transpose(-2, -1)
    mask = attn_mask
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        mask = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        scores = scores + mask.to(wide)
    weights = scores.softmax(-1)
    if attn_mask is not None:
        weights = torch.where(weights.isnan(), 0.0, weights)
    return (weights @ value.to(wide)).to(query.dtype)


def _cosine_similarity(torch: Any, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return cosine similarities in the vectors' dtype; the exporter would return float32 for float16."""
    if torch.result_type(x, y) == torch.float32:
        return NotImplemented
    x, y = torch.broadcast_tensors(x, y)
    lengths = [torch.linalg.vector_norm(v, 2, dim, keepdim=True).clamp_min(eps) for v in (x, y)]
    products = x / lengths[0] * (y / lengths[1])
    return products.sum(dim, dtype=torch.float32).to(products.dtype)


def _masked_scatter(torch: Any, x: Any, mask: Any, source: Any) -> Any:
    """Return `masked_scatter` with static shapes: each masked element takes the next source value."""
    x, mask = torch.broadcast_tensors(x, mask)
    indices = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[indices].reshape(x.shape), x)


def _divide(torch: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Return rounded quotients of integers, which the exporter would divide as float32."""
    tensors = all(isinstance(value, torch.Tensor) for value in (x, y))
    if not rounding_mode or not tensors or torch.result_type(x, y).is_floating_point:
        return NotImplemented
    if rounding_mode == "trunc":
        x = x - torch.fmod(x, y)
    return torch.floor_divide(x, y)


def _slice_scatter(
    torch: Any, x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """Replace a slice whose start depends on values, which the exporter would give a dynamic size."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    count = src.size(dim)
    if not isinstance(count, int) or step != 1 or not free_unbacked_symbols(start):
        return NotImplemented
    return torch.index_copy(x, dim, torch.arange(count) + start, src)


def _pad(torch: Any, x: Any, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Any:
    """Return circular padding, which ONNX has only from opset 19 on."""
    if mode != "circular":
        return NotImplemented
    for index in range(len(pad) // 2):
        axis, (before, after) = x.dim() - 1 - index, pad[2 * index : 2 * index + 2]
        x = x.narrow(axis, max(0, -before), x.size(axis) + min(0, before) + min(0, after))
        parts = [x.narrow(axis, x.size(axis) - before, before)] if before > 0 else []
        parts += [x, *([x.narrow(axis, 0, after)] if after > 0 else [])]
        x = torch.cat(parts, axis)
    return x


def _compute_wide(torch: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator on float16 or bfloat16 in float32, and cast the results back."""
    kinds = (torch.float16, torch.bfloat16)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    narrow = [x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.dtype in kinds]
    if not narrow:
        return NotImplemented
    [result_type] = {x for x in leaves if isinstance(x, torch.dtype)} or {narrow[0]}

    def widen(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.float32 if x in kinds else x
        return x.to(torch.float32) if isinstance(x, torch.Tensor) and x.dtype in kinds else x

    def round_result(x: Any) -> Any:
        is_wide = isinstance(x, torch.Tensor) and x.dtype == torch.float32
        return x.to(result_type) if is_wide else x

    args, kwargs = torch.utils._pytree.tree_map(widen, (args, kwargs))
    return torch.utils._pytree.tree_map(round_result, operator(*args, **kwargs))


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return excerpt(text, _MAX_REASON)


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename inputs and outputs; also rename inner values and weights that clash with them."""
    names = {*inputs, *outputs}
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*inner, *graph.initializers.values()):
        if value.name in names:
            _rename_value(graph, value, f"{value.name}__inner")
    for value, name in zip(graph.inputs, inputs, strict=True):
        _rename_value(graph, value, name)
    for value, name in zip(graph.outputs, outputs, strict=True):
        _rename_value(graph, value, name)


def _rename_value(graph: Any, value: Any, name: str) -> None:
    # The dictionary of weights is keyed by name.
    is_weight = value.name in graph.initializers
    if is_weight:
        del graph.initializers[value.name]
    value.name = name
    if is_weight:
        graph.initializers[name] = value


# ---------------------------------------------------------------- factories


def find_factory(name: str) -> Callable[[], Any]:
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise Problem("module", f"there is no module {quoted(error.name)}") from error
        raise Problem("code", describe_error(error)) from error
    except (Exception, SystemExit) as error:
        raise Problem("code", describe_error(error)) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        text = f"the module has no function {quoted(function)}{did_you_mean(function, names)}"
        raise Problem("function", text)
    result: Callable[[], Any] = factory
    return result


def read_result(result: Any, module_type: type) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Check a factory's result; return the module, and its positional and named example arguments."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        text = f"it did not return a module and its inputs, but: {type(result).__name__}{count}"
        raise Problem("result", text)
    module, inputs = result
    if not isinstance(module, module_type):
        text = f"the first value that it returned is not a torch.nn.Module, but: {type(module).__name__}"
        raise Problem("result", text)
    if isinstance(inputs, Mapping):
        return module, (), inputs
    return module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def describe_error(error: BaseException) -> str:
    """Return an error with the innermost line of the user's code in its traceback."""
    paths = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [
        (path.relative_to(Path.cwd()), line)
        for path, line in paths
        if path.is_relative_to(Path.cwd())
    ]
    index = " ({}:{})".format(*own[-1]) if own else ""
    return f"{type(error).__name__}: {last_line(error)}{index}"


def _export_factory(request: Mapping[str, str]) -> dict[str, str]:
    try:
        import torch
        import torch.export
    except Exception as error:
        # PyTorch raises OSError for a missing system library.
        raise Problem("import", f"{type(error).__name__}: {error}") from error
    # Added after the import of PyTorch, so that no user file hides one of its modules.
    sys.path.insert(0, str(Path.cwd()))
    factory = find_factory(request["factory"])
    try:
        result = factory()
    except (Exception, SystemExit) as error:
        raise Problem("code", describe_error(error)) from error
    module, arguments, named = read_result(result, torch.nn.Module)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module.eval(), arguments, dict(named))
    except Exception as error:
        # The first line is the reason; the rest is advice.
        [reason, *_] = [*filter(None, str(error).splitlines()), ""]
        text = f"{type(error).__name__}: {excerpt(reason, _MAX_REASON)}"
        raise Problem("export", text) from error
    # Save to memory first, because PyTorch ends the process if a file cannot be written.
    content = io.BytesIO()
    torch.export.save(program, content)
    try:
        Path(request["archive"]).write_bytes(content.getbuffer())
    except OSError as error:
        raise Problem("write", str(error.errno or 0)) from error
    return {"torch": str(torch.__version__)}


def main() -> None:
    """Answer the request on the command line, or serve as the reference."""
    if len(sys.argv) == 1:
        serve(lambda first: _Program(import_torch(), first))
    request = json.loads(sys.argv[1])
    try:
        answer = _export_factory(request) if "factory" in request else _export(request)
    except Problem as error:
        answer = {"problem": error.problem, "reason": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
