"""Walks an MXNet graph and builds the Relax function: what is needed, in which order, by which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.errors import ImportFailed
from tvmflow.frontends._base import LoadedModel, nearest
from tvmflow.frontends.mxnet import _detection, _ops_array, _ops_math, _ops_nn
from tvmflow.frontends.mxnet._op import Converter, Expr, Op, signature, table
from tvmflow.frontends.mxnet._symbol import Node, Symbol
from tvmflow.values import TensorSpec

Array = np.ndarray[Any, Any]

CONVERTERS: Final[dict[str, Converter]] = table(
    _ops_nn.CONVERTERS, _ops_math.CONVERTERS, _ops_array.CONVERTERS, _detection.CONVERTERS
)

# Inputs that inference does not read, by position: labels, weights of samples
_UNREAD_INPUTS: Final[dict[str, frozenset[int]]] = {
    "SoftmaxOutput": frozenset({1}),
    "Softmax": frozenset({1}),
    "LinearRegressionOutput": frozenset({1}),
    "LogisticRegressionOutput": frozenset({1}),
    "MAERegressionOutput": frozenset({1}),
    "SVMOutput": frozenset({1}),
}
_BATCH_NORMS: Final = frozenset(
    {
        "BatchNorm",
        "BatchNorm_v1",
        "CuDNNBatchNorm",
        "_contrib_BatchNormWithReLU",
        "_contrib_SyncBatchNorm",
    }
)

# How MXNet numbers the outputs of operators that have several: by name, else `output0`, `output1`, …
_OUTPUT_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "BatchNorm": ("output", "mean", "var"),
    "CuDNNBatchNorm": ("output", "mean", "var"),
    "BatchNorm_v1": ("output", "mean", "var"),
    "InstanceNorm": ("output", "mean", "var"),
    "LayerNorm": ("output", "mean", "std"),
    "GroupNorm": ("output", "mean", "std"),
    "L2Normalization": ("output", "norm"),
    "LRN": ("output", "tmp_norm"),
    "Dropout": ("output", "mask"),
    "make_loss": ("loss",),
    "LeakyReLU": ("output", "mask"),
}


def build(
    symbol: Symbol,
    params: Mapping[str, Array],
    inputs: Sequence[TensorSpec],
    tensors: Sequence[str] = (),
) -> LoadedModel:
    """The Relax module of a symbol for these input shapes, which also gives these of its inner tensors. Raises ImportFailed."""
    own = len(symbol.heads)
    symbol = _with_heads(symbol, tensors)
    live = _live_nodes(symbol)
    _check_operators(symbol, live)
    _check_names(symbol, live, params, inputs)

    builder = relax.BlockBuilder()
    input_vars = {spec.name: _variable(spec.name, spec.shape, spec.dtype) for spec in inputs}
    param_vars = {
        node.name: _variable(node.name, params[node.name].shape, str(params[node.name].dtype))
        for node in (symbol.nodes[index] for index in live)
        if node.op == "null" and node.name not in input_vars
    }
    every_var = {**param_vars, **input_vars}
    results: list[Expr] = []
    failure: ImportFailed | None = None
    with builder.function("main", attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            try:
                results = _emit(symbol, live, every_var, builder)
            except ImportFailed as error:
                failure = error
        # also after a failure, since TVM prints a warning about a builder left open
        builder.emit_func_output(
            results[0] if len(results) == 1 else relax.Tuple(results),
            [*input_vars.values(), *param_vars.values()],
        )
    if failure:
        raise failure
    mod = builder.finalize()

    outputs = tuple(
        TensorSpec(name, *signature(result))
        for name, result in zip(output_names(symbol), results, strict=True)
    )
    weights = {name: params[name] for name in param_vars}
    return LoadedModel(mod, weights, tuple(inputs), outputs[:own], outputs[own:])


def _with_heads(symbol: Symbol, tensors: Sequence[str]) -> Symbol:
    """The symbol with further outputs, by the names that MXNet's `get_internals` has for them."""
    there = set(output_names(symbol))
    wanted = [name for name in tensors if name not in there]
    if not wanted:
        return symbol
    # what nobody reads is nowhere to cut
    read = [entry for node in symbol.nodes for entry in node.inputs]
    internals = {
        _output_name(symbol.nodes[index], output): (index, output)
        for index, output in read
        if symbol.nodes[index].op != "null"
    }
    unknown = [name for name in wanted if name not in internals]
    if unknown:
        raise ImportFailed(
            "; ".join(
                f"the model has no tensor {name!r}{nearest(name, list(internals))}"
                for name in unknown
            ),
            fix="name them as MXNet's `symbol.get_internals().list_outputs()` does: NODE_output",
        )
    return symbol._replace(heads=(*symbol.heads, *(internals[name] for name in wanted)))


def _emit(
    symbol: Symbol,
    live: Sequence[int],
    variables: Mapping[str, Expr],
    builder: relax.BlockBuilder,
) -> list[Expr]:
    """Every node in order; the values of the heads."""
    values: dict[int, list[Expr]] = {}
    for index in live:
        node = symbol.nodes[index]
        if node.op == "null":
            values[index] = [variables[node.name]]
        else:
            values[index] = _convert(node, symbol, values, builder)
    return [
        builder.emit_output(_pick(symbol.nodes[index], values[index], output))
        for index, output in symbol.heads
    ]


def output_names(symbol: Symbol) -> list[str]:
    """What MXNet's `Symbol.list_outputs` gives; a name that comes twice gets a number the second time."""
    names: list[str] = []
    for index, output in symbol.heads:
        node = symbol.nodes[index]
        name = _output_name(node, output)
        unique, count = name, 1
        while unique in names:
            count += 1
            unique = f"{name}_{count}"
        names.append(unique)
    return names


def _output_name(node: Node, output: int) -> str:
    return node.name if node.op == "null" else f"{node.name}_{_output_suffix(node, output)}"


def _output_suffix(node: Node, output: int) -> str:
    if node.op in _OUTPUT_NAMES:
        return _OUTPUT_NAMES[node.op][output]
    if node.op in _ops_array.NUMBERED_OUTPUTS and _ops_array.NUMBERED_OUTPUTS[node.op](node.attrs):
        return f"output{output}"
    return "output"


def _unread_inputs(node: Node) -> frozenset[int]:
    if node.op in _BATCH_NORMS and _ops_nn.gamma_is_fixed(node.attrs):
        return frozenset({1})
    return _UNREAD_INPUTS.get(node.op, frozenset())


def _live_nodes(symbol: Symbol) -> list[int]:
    """The nodes that the outputs depend on in inference, in the graph's order."""
    live: set[int] = set()
    pending = [index for index, _ in symbol.heads]
    while pending:
        index = pending.pop()
        if index in live:
            continue
        live.add(index)
        node = symbol.nodes[index]
        unread = _unread_inputs(node)
        pending.extend(
            source for position, (source, _) in enumerate(node.inputs) if position not in unread
        )
    return sorted(live)


def _check_operators(symbol: Symbol, live: Sequence[int]) -> None:
    unknown: dict[str, list[str]] = {}
    for index in live:
        node = symbol.nodes[index]
        if node.op != "null" and node.op not in CONVERTERS:
            unknown.setdefault(node.op, []).append(repr(node.name))
    if unknown:
        lines = [
            f"  {op}: node {', '.join(nodes[:5])}{' and ' + str(len(nodes) - 5) + ' more' if len(nodes) > 5 else ''}"
            for op, nodes in unknown.items()
        ]
        raise ImportFailed(
            "the model has operators that tvmflow cannot import:\n" + "\n".join(lines),
            fix="end the model before them (`symbol.get_internals()[NAME + '_output']`) and save it again",
        )


def _check_names(
    symbol: Symbol,
    live: Sequence[int],
    params: Mapping[str, Array],
    inputs: Sequence[TensorSpec],
) -> None:
    """Every variable is an input or a parameter, and every input of the recipe is a variable."""
    variables = [node.name for node in (symbol.nodes[index] for index in live) if node.op == "null"]
    every = {node.name for node in symbol.nodes if node.op == "null"}
    given = {spec.name for spec in inputs}
    free = [name for name in dict.fromkeys(variables) if name not in params]
    problems = []
    for name in sorted(given - set(variables)):
        if name in every:
            problems.append(f"the recipe's input {name!r} is not read in inference: remove it")
        else:
            problems.append(f"the model has no input {name!r}{nearest(name, free or variables)}")
    for name in free:
        if name not in given:
            problems.append(
                f"{name!r} is neither an input of the recipe nor in the checkpoint{nearest(name, [*params, *given])}"
            )
    if problems:
        raise ImportFailed(
            "; ".join(problems),
            fix=f"list the model's inputs with their shapes under `inputs`: {', '.join(free) or 'none'}",
        )


def _variable(name: str, shape: Sequence[int], dtype: str) -> Expr:
    return relax.Var(name, relax.TensorType(tuple(int(dim) for dim in shape), dtype))


def _convert(
    node: Node,
    symbol: Symbol,
    values: Mapping[int, list[Expr]],
    builder: relax.BlockBuilder,
) -> list[Expr]:
    unread = _unread_inputs(node)
    read: list[Expr | None] = []
    names = []
    for position, (source, output) in enumerate(node.inputs):
        names.append(symbol.nodes[source].name)
        if position in unread:
            read.append(None)
        else:
            read.append(_pick(symbol.nodes[source], values[source], output))
    op = Op(node, read, names, builder)
    try:
        results = CONVERTERS[node.op](op)
        op.check_all_read()
        return [
            result if isinstance(result, relax.Var) else builder.emit(result)
            for result in (results if isinstance(results, list) else [results])
        ]
    except ImportFailed:
        raise
    except (tvm.error.TVMError, ValueError, TypeError, IndexError, RuntimeError) as error:
        # TVM found shapes or types that do not go together
        lines = [line for line in str(error).splitlines() if line.strip()]
        op.refuse(f"TVM says: {lines[-1].strip() if lines else type(error).__name__}")


def _pick(node: Node, outputs: list[Expr], output: int) -> Expr:
    if output >= len(outputs):
        raise ImportFailed(
            f"{node.op} {node.name!r} cannot be imported: its output {output} is not supported"
        )
    return outputs[output]
