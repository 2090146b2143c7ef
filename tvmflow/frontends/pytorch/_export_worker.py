"""Runs PyTorch's exporters: `python -m tvmflow.frontends.pytorch._export_worker REQUEST`.

The request is a JSON document: see `export`. The answer is a JSON file, with `problem` and `reason` where nothing was
exported.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.frontends.onnx.graph import FROM_START
from tvmflow.frontends.pytorch._reference_worker import CannotLoad, import_torch, open_program

# The default differs between versions of PyTorch, and all of them have this one.
_OPSET: Final = 18
_MAX_REASON: Final = 400
_REFUSES_NEGATIVE: Final = re.compile(
    r"\baten\.(embedding|gather|index_(add|copy|fill|reduce|select)|scatter)(\.|_add|_reduce)"
)
"""Operators of PyTorch that take no index from the end."""


def _export(request: dict[str, Any]) -> dict[str, str]:
    try:
        torch = import_torch()
        import onnxscript  # noqa: F401  (torch.onnx imports it late, and explains less)
    except ImportError as error:
        return {"problem": "import", "reason": str(error)}
    try:
        program = open_program(request["archive"], request["containers"], request["tensors"])
    except CannotLoad as error:
        return {"problem": "load", "reason": str(error)}
    except KeyError as error:
        return {"problem": "tensor", "reason": str(error.args[0])}
    try:
        with torch.no_grad():
            program = _decompose(torch, program)
            exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=_OPSET)
    except Exception as error:
        return {"problem": "export", "reason": _root_cause(error)}
    # The exporter has replaced operators that write to their inputs; what is left changes the model.
    functional = exported.exported_program or program.run_decompositions({})
    changed = functional.graph_signature.buffers_to_mutate
    if changed:
        return {"problem": "state", "reason": ", ".join(sorted(changed.values()))}
    graph = exported.model.graph
    names = [*request["outputs"], *request["tensors"]]
    if len(graph.inputs) != len(request["inputs"]) or len(graph.outputs) != len(names):
        counts = f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        expected = f"{len(request['inputs'])} and {len(names)}"
        return {"problem": "signature", "reason": f"{counts} in place of {expected}"}
    for node in graph.all_nodes():
        if _REFUSES_NEGATIVE.search(node.metadata_props.get("pkg.torch.onnx.fx_node", "")):
            node.metadata_props[FROM_START] = ""
    _rename(graph, request["inputs"], names)
    exported.save(request["onnx"], external_data=True)
    return {}


# ---------------------------------------------------------------- decompositions
# In operators of PyTorch, for what the exporter lacks or miscomputes.


_WIDE: Final = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d addcdiv addcmul avg_pool1d avg_pool2d
    avg_pool3d batch_norm celu cdist cumprod cumsum dist elu expm1 gelu glu group_norm
    hardsigmoid hardswish hypot instance_norm layer_norm lerp linalg_norm linalg_vector_norm log_sigmoid
    log_softmax logaddexp logaddexp2 logcumsumexp logit logsumexp mean mish native_batch_norm
    native_group_norm native_layer_norm nansum norm nuclear_norm prod renorm rms_norm
    selu silu sinc softmax softplus std std_mean sum tanhshrink var var_mean xlogy _log_softmax _softmax
""".split()
"""Operators of several steps, which PyTorch computes in float32 also where their operands are narrower."""


def _decompose(torch: Any, program: Any) -> Any:
    """Return a program without the operators that the exporter cannot express in ONNX, or miscomputes."""
    aten = torch.ops.aten
    bound = functools.partial
    table: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: bound(_attend, torch),
        aten.masked_scatter.default: bound(_masked_scatter, torch),
        aten.pad.default: bound(_pad, torch),
        aten.div.Tensor_mode: bound(_divide, torch),
    }
    narrow = {torch.float16, torch.bfloat16}
    values = [node.meta.get("val") for node in program.graph.nodes]
    if any(getattr(value, "dtype", None) in narrow for value in values):
        packets = [getattr(aten, name) for name in _WIDE if hasattr(aten, name)]
        for operator in (getattr(p, name) for p in packets for name in p.overloads()):
            table[operator] = bound(_compute_wide, torch, operator)
    schemas = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    # operators that write to their inputs become others first
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
    """Return attention whose queries without a visible key have a result of 0.

    The exporter hides keys with the lowest finite value, so that all keys count for such a query.
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


def _masked_scatter(torch: Any, x: Any, mask: Any, source: Any) -> Any:
    """Return data with the next value of the source wherever the mask is set, in static shapes."""
    x, mask = torch.broadcast_tensors(x, mask)
    places = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[places].reshape(x.shape), x)


def _divide(torch: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Return quotients of integers, rounded; the exporter divides them as float32."""
    tensors = all(isinstance(value, torch.Tensor) for value in (x, y))
    if not rounding_mode or not tensors or torch.result_type(x, y).is_floating_point:
        return NotImplemented
    if rounding_mode == "trunc":
        x = x - torch.fmod(x, y)
    return torch.floor_divide(x, y)


def _pad(torch: Any, x: Any, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Any:
    """Return data with a margin from its other end; ONNX has no such mode before opset 19."""
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
    """Return the result of an operator on narrow floats, computed in float32."""
    narrow = [
        x.dtype
        for x in torch.utils._pytree.tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    ]
    if not narrow:
        return NotImplemented
    has_dtype = any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))

    def convert(value: Any, source: Any, target: Any) -> Any:
        def one(x: Any) -> Any:
            return x.to(target) if isinstance(x, torch.Tensor) and x.dtype in source else x

        return torch.utils._pytree.tree_map(one, value)

    args, kwargs = convert((args, kwargs), set(narrow), torch.float32)
    result = operator(*args, **kwargs)
    return result if has_dtype else convert(result, {torch.float32}, narrow[0])


def _root_cause(error: BaseException) -> str:
    """Return the error that began a chain of them."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return excerpt(text, _MAX_REASON)


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names, and others to inner values and weights that have one of these."""
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
    # Weights are listed by their names.
    is_weight = value.name in graph.initializers
    if is_weight:
        del graph.initializers[value.name]
    value.name = name
    if is_weight:
        graph.initializers[name] = value


# ---------------------------------------------------------------- factories


class InvalidFactory(Exception):
    """A factory, or what it returns, is not what it should be."""

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class Example(NamedTuple):
    """A module with the arguments of a call, by position and by name."""

    module: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


def find_factory(name: str) -> Callable[[], Any]:
    """Return the function `PACKAGE.MODULE:FUNCTION`."""
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidFactory("module", f"there is no module {quoted(error.name)}") from error
        raise InvalidFactory("code", describe_error(error)) from error
    except (Exception, SystemExit) as error:
        raise InvalidFactory("code", describe_error(error)) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        text = f"the module has no function {quoted(function)}{did_you_mean(function, names)}"
        raise InvalidFactory("function", text)
    result: Callable[[], Any] = factory
    return result


def read_result(result: Any, module_type: type) -> Example:
    """Return what a factory returned as a module with the arguments of a call."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        text = f"it did not return a module and its inputs, but: {type(result).__name__}{count}"
        raise InvalidFactory("result", text)
    module, inputs = result
    if not isinstance(module, module_type):
        text = f"the first value that it returned is not a torch.nn.Module, but: {type(module).__name__}"
        raise InvalidFactory("result", text)
    if isinstance(inputs, Mapping):
        return Example(module, (), inputs)
    return Example(module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def describe_error(error: BaseException) -> str:
    """Return an error with the last line of the user's own code that it came from."""
    paths = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [
        (path.relative_to(Path.cwd()), line)
        for path, line in paths
        if path.is_relative_to(Path.cwd())
    ]
    place = " ({}:{})".format(*own[-1]) if own else ""
    return f"{type(error).__name__}: {last_line(error)}{place}"


def _export_factory(request: Mapping[str, str]) -> dict[str, str]:
    try:
        import torch
        import torch.export
    except Exception as error:
        # a missing system library is an OSError
        return {"problem": "import", "reason": f"{type(error).__name__}: {error}"}
    # after PyTorch: no file of the user's takes the place of one of its modules
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = find_factory(request["factory"])
        try:
            result = factory()
        except (Exception, SystemExit) as error:
            raise InvalidFactory("code", describe_error(error)) from error
        example = read_result(result, torch.nn.Module)
    except InvalidFactory as error:
        return {"problem": error.problem, "reason": str(error)}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                example.module.eval(), example.arguments, dict(example.named)
            )
    except Exception as error:
        # the first line is the reason, and what follows is advice
        [reason, *_] = [*filter(None, str(error).splitlines()), ""]
        return {
            "problem": "export",
            "reason": f"{type(error).__name__}: {excerpt(reason, _MAX_REASON)}",
        }
    # PyTorch ends the process where a file cannot be written
    content = io.BytesIO()
    torch.export.save(program, content)
    try:
        Path(request["archive"]).write_bytes(content.getbuffer())
    except OSError as error:
        return {"problem": "write", "reason": str(error.errno or 0)}
    return {"torch": str(torch.__version__)}


def main() -> None:
    request = json.loads(sys.argv[1])
    answer = _export_factory(request) if "factory" in request else _export(request)
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
