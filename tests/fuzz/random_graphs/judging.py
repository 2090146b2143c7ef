"""Runs graphs as a recipe's library does, many in one module, and compares them with ONNX Runtime and the ONNX reference."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax

from tests.fuzz.random_graphs.drawing import (
    Array,
    Case,
    Draw,
    Feed,
    Graph,
    Rejected,
    finish,
)
from tests.fuzz.random_graphs.operators import RULES, name_of
from tests.support.kernels import LEVELS_HERE, level
from tests.support.onnx_models import frontend, save
from tests.support.random_networks.judging import run_reference
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import load_c_library
from tvmflow.compiler.c_program.program import UnsupportedProgram
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.core.errors import TvmflowError
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.graph.counts import SIZES_NEEDED
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.targets.tvm_target import make_target

OFF_BY_ONE: Final = frozenset(
    name.removeprefix("ms.")
    for name in RULES
    if name.startswith(("ms.QLinear", "QLinear", "ms.QGemm", "Resize"))
)
"""ONNX Runtime rounds or cuts what these compute: a result may be the next integer."""

KNOWN: Final[Sequence[tuple[str, str, str]]] = (
    ("Gemm", "instead of -9223372036854775808", "the evaluator multiplies integers of 64 bits as floats"),
    ("AveragePool", "has nan instead of -?inf", "a sum overflows before an infinity of the other sign"),
)  # fmt: skip
"""Differences that are known: a pattern of the operator, one of the finding, and why. They are counted and listed."""

UNDRAWN_ATTRIBUTES: Final = frozenset(
    "Attention.qk_matmul_output_mode Attention.left_window_size Attention.right_window_size Cast.round_mode "
    "CastLike.round_mode CastLike.saturate Constant.sparse_value Constant.value_string Constant.value_strings "
    "DequantizeLinear.output_dtype LRN.bias MaxUnpool.pads QuantizeLinear.output_dtype "
    "QuantizeLinear.precision QuantizeLinear.saturate Range.stash_type Resize.keep_aspect_ratio_policy SpaceToDepth.mode".split()
)
"""Attributes that no peer implements, that text alone has, or that concern types of less than 16 bits."""

_log = logging.getLogger(__name__)
_LARGE: Final = 1e37

RTOL: Final[Mapping[str, float]] = {
    "float32": 1e-4,
    # some constants of TVM's are float32
    "float64": 1e-7,
    "float16": 4e-3,
    "bfloat16": 2e-2,
}


SCHEMAS: Final = {
    schema.name: schema for schema in onnx.defs.get_all_schemas() if not schema.domain
}


class Verdict(NamedTuple):
    """How a graph ended, and why: right, refused, skipped, deviation, wrong or raised."""

    outcome: str
    reason: str


def make_case(seed: int, replayed: Sequence[int] | None = None) -> tuple[Case, list[int]]:
    """Return the graph of a seed, or of choices for its operator, and the choices."""
    name = name_of(seed)
    for attempt in range(50):
        draw = Draw(seed + attempt * 1_000_003, replayed)
        try:
            graph = Graph(
                draw, name.removeprefix("ms."), "com.microsoft" if name.startswith("ms.") else ""
            )
            RULES[name](graph)
            return finish(graph), draw.choices
        except Rejected:
            if replayed is not None:
                raise
    raise AssertionError(f"{name} is never drawn")


def _specs(case: Case) -> tuple[TensorSpec, ...]:
    largest = {name: high for name, (_, high) in case.dimensions.items()}
    specs = []
    for value in case.model.graph.input:
        dims = value.type.tensor_type.shape.dim
        sizes = tuple(d.dim_param or d.dim_value for d in dims)
        shape = tuple(largest.get(d.dim_param, d.dim_value) for d in dims)
        array = case.feeds[0][value.name]
        specs.append(
            TensorSpec(value.name, shape, str(array.dtype), sizes=sizes if shape != sizes else ())
        )
    return tuple(specs)


def _dimensions(case: Case) -> tuple[Dimension, ...]:
    return tuple(Dimension(name, low, high) for name, (low, high) in case.dimensions.items())


def import_case(case: Case, folder: Path) -> Any:
    return frontend.load(save(case.model, folder), _specs(case), dimensions=_dimensions(case))


def build(case: Case, folder: Path, target: dict[str, Any]) -> Any:
    """Return a function of a feed: the C library, or TVM's virtual machine where there is none."""
    loaded = import_case(case, folder)
    dimensions = _dimensions(case)
    if dimensions:
        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], dimensions))
    options = LoweringOptions()
    model = lowering.lower(loaded.mod, make_target(target), options).schedule_untuned(
        loaded.params, target, SCHEDULES_VERSION
    )
    signature = {
        "inputs": [spec.to_json() for spec in loaded.inputs],
        "outputs": [spec.to_json() for spec in loaded.outputs],
        "dimensions": [entry.to_json() for entry in dimensions],
    }
    names = [spec.name for spec in loaded.inputs]
    try:
        library = load_c_library(model, signature, threads=1)
    except UnsupportedProgram:
        compiled = (
            lowering.lower(loaded.mod, make_target(target), options)
            .schedule_untuned(loaded.params, target, SCHEDULES_VERSION)
            .compile()
        )
        machine = relax.VirtualMachine(compiled, tvm.cpu())

        def run(feed: Feed) -> list[Array]:
            values = (tvm.runtime.tensor(np.asarray(feed[name], order="C")) for name in names)
            result = machine["main"](*values)
            return [t.numpy() for t in ([result] if hasattr(result, "numpy") else list(result))]

        return run
    return lambda feed: list(library.main(*(feed[name] for name in names)))


def merge(cases: Sequence[Case]) -> Case:
    """Return one case of several, which have the same opset, side by side."""
    merged = onnx.ModelProto.FromString(cases[0].model.SerializeToString())
    for field in ("graph", "functions", "opset_import"):
        merged.ClearField(field)
    merged.graph.name = "g"
    domains: dict[str, int] = {}
    dimensions: dict[str, tuple[int, int]] = {}
    for index, case in enumerate(cases):
        one = onnx.ModelProto.FromString(case.model.SerializeToString())
        _add_prefix(one.graph, f"c{index}_", {function.name for function in one.functions})
        for function in one.functions:
            function.name = f"c{index}_{function.name}"
        dimensions |= {f"c{index}_{name}": ends for name, ends in case.dimensions.items()}
        for field in ("node", "input", "output", "initializer"):
            getattr(merged.graph, field).extend(getattr(one.graph, field))
        merged.functions.extend(one.functions)
        domains |= {entry.domain: entry.version for entry in one.opset_import}
    merged.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in domains.items())
    feeds = []
    for number in range(max(len(case.feeds) for case in cases)):
        feeds.append(
            {
                f"c{index}_{name}": array
                for index, case in enumerate(cases)
                for name, array in case.feeds[number % len(case.feeds)].items()
            }
        )
    return Case("", merged, feeds, dimensions, (), frozenset())


def _add_prefix(graph: onnx.GraphProto, prefix: str, functions: Collection[str]) -> None:
    """Rename all values, dimensions and calls of a graph, and of the graphs in it."""
    for named in (*graph.input, *graph.output, *graph.initializer):
        named.name = prefix + named.name
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = prefix + dim.dim_param
    for node in graph.node:
        node.input[:] = [name and prefix + name for name in node.input]
        node.output[:] = [name and prefix + name for name in node.output]
        if node.op_type in functions:
            node.op_type = prefix + node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _add_prefix(attribute.g, prefix, functions)


# ---------------------------------------------------------------- peers


def run_evaluator(model: onnx.ModelProto, feed: Feed) -> list[Array]:
    """Return the outputs of the ONNX reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        outputs = ReferenceEvaluator(model).run(None, dict(feed))
    # numpy promotes integers
    kinds = [output.type.tensor_type.elem_type for output in model.graph.output]
    return [
        np.asarray(v).astype(helper.tensor_dtype_to_np_dtype(kind) if kind else np.asarray(v).dtype)
        for v, kind in zip(outputs, kinds, strict=True)
    ]


_IGNORED_BY_EVALUATOR: Final = {
    "activations",
    "clip",
    "input_forget",
    "sequence_lens",
}


def _list_peers(case: Case) -> list[Any]:
    """Return what may compute the outputs.

    The reference evaluator concatenates the results of a Loop or Scan, which ONNX stacks, and ignores some
    attributes and operands of recurrent layers.
    """
    is_ignored = case.operator in ("GRU", "LSTM", "RNN") and case.attributes & _IGNORED_BY_EVALUATOR
    stacks = not {"Loop", "Scan"}.isdisjoint(case.features)
    return [run_reference, *([] if is_ignored or stacks else [run_evaluator])]


def _peer_outputs(model: onnx.ModelProto, feed: Feed, peer: Any) -> list[Array] | None:
    try:
        outputs = [np.asarray(array) for array in peer(model, feed)]
    except Exception:
        return None
    return None if any(array.dtype.kind in "OSU" for array in outputs) else outputs


class Expected(NamedTuple):
    """What a peer computes of one feed."""

    peer: Any
    outputs: list[Array]


def run_peers(case: Case) -> tuple[Case, list[Expected]]:
    """Return the case with the feeds that a peer takes, and what it computes: ONNX Runtime, else the reference."""
    feeds, expected, peers = [], [], _list_peers(case)
    if case.operator in ("AveragePool", "GlobalMaxPool", "LpPool"):
        # alone, the evaluator has wrong shapes of pools, and no NaN where a window has one
        peers = [run_reference]
    for feed in case.feeds:
        for peer in peers:
            outputs = _peer_outputs(case.model, feed, peer)
            if outputs is not None:
                feeds.append(feed)
                expected.append(Expected(peer, outputs))
                # other sizes that it refuses are not valid
                peers = [peer]
                break
    if case.dimensions and len(feeds) < 2:
        # sizes that must be what they are, such as those of weights
        return _with_known_sizes(case._replace(feeds=feeds)), expected
    return case._replace(feeds=feeds), expected


def _with_known_sizes(case: Case) -> Case:
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    for value in model.graph.input:
        for dim, size in (
            zip(value.type.tensor_type.shape.dim, case.feeds[0][value.name].shape, strict=True)
            if case.feeds
            else ()
        ):
            dim.dim_value = size
    return case._replace(model=model, dimensions={})


def _moved(feed: Feed, seed: int) -> Feed:
    """Return inputs that differ by a rounding error or a few."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, array in feed.items():
        step = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}.get(
            str(array.dtype)
        )
        with np.errstate(all="ignore"):
            moved[name] = (
                array
                if step is None
                else (array * (1 + step * rng.standard_normal(array.shape))).astype(array.dtype)
            )
    return moved


def _without_overflow(feed: Feed) -> Feed:
    """Return inputs of which none is near the largest float32: whether a sum overflows depends on its order."""
    return {
        name: np.where(np.isfinite(x) & (np.abs(x) > _LARGE), x / 16, x).astype(x.dtype)
        if x.dtype in (np.float32, np.float64)
        else x
        for name, x in feed.items()
    }


def find_difference(
    actual: Sequence[Array],
    expected: Sequence[Array],
    others: Sequence[Sequence[Array]] = (),
    *,
    is_rounded: bool = False,
) -> str:
    """Return in what outputs differ, or an empty string.

    Args:
        actual: The outputs.
        expected: What they should be.
        others: The expected outputs of inputs that differ by rounding errors, which show how much an
            element may be off.
        is_rounded: Whether integers may be off by one.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} outputs, not {len(expected)}"
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"output {index} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        tolerance = RTOL.get(str(b.dtype), 0.0)
        steps = int(is_rounded and b.dtype.kind in "iu")
        x, y = (
            v.astype(np.float64)
            if (v.dtype != bool and v.dtype.kind != "i") or v.dtype.itemsize < 8
            else v
            for v in (a, b)
        )
        with np.errstate(all="ignore"):
            same = (x == y) | (np.isnan(x) & np.isnan(y)) if x.dtype.kind == "f" else x == y
            if steps:
                same |= np.abs(x - y) <= steps
            if tolerance and not same.all():
                finite = np.isfinite(x) & np.isfinite(y)
                top = np.abs(y[np.isfinite(y)]).max(initial=0.0)
                # a number that is not normal may be 0
                least = float(np.finfo(b.dtype).tiny) if b.dtype.kind == "f" else 0.0
                same |= finite & (np.abs(x - y) <= tolerance * (np.abs(y) + min(top, 1.0)) + least)
            for other in others:
                z = (
                    other[index].astype(np.float64)
                    if other[index].shape == y.shape
                    else np.full(y.shape, np.nan)
                )
                classes = np.isfinite(z) != np.isfinite(y)
                same |= classes | (np.abs(x.astype(np.float64) - y) <= 20 * np.abs(z - y))
        if not same.all():
            place = np.unravel_index(int(np.argmin(same)), same.shape)
            wrong = int((~same).sum())
            return f"output {index} has {a[place]} instead of {b[place]} at {[int(n) for n in place]}, {wrong} of {same.size} differ"
    return ""


def judge(case: Case, actual: Sequence[Sequence[Array]], expected: Sequence[Expected]) -> Verdict:
    """Compare the outputs of all feeds with those of the peers."""
    for feed, outputs, (peer, wanted) in zip(case.feeds, actual, expected, strict=True):
        why = _explain(case, feed, outputs, peer, wanted)
        if not why:
            continue
        if peer is run_reference and run_evaluator in _list_peers(case):
            defined = _peer_outputs(case.model, feed, run_evaluator)
            if defined is not None and not _explain(case, feed, outputs, run_evaluator, defined):
                return Verdict("deviation", f"ONNX Runtime differs from the ONNX reference: {why}")
            if (
                defined is not None
                and _explain(case, feed, expected[0].outputs, run_evaluator, defined)
                and feed is case.feeds[0]
            ):
                why += "; the peers differ, too"
        return Verdict("wrong", why)
    return Verdict("right", "")


def _explain(
    case: Case, feed: Feed, outputs: Sequence[Array], peer: Any, wanted: Sequence[Array]
) -> str:
    """Return in what outputs differ by more than rounding errors."""
    is_rounded = case.operator in OFF_BY_ONE
    if not find_difference(outputs, wanted, is_rounded=is_rounded):
        return ""
    feeds = [*(_moved(feed, n) for n in range(4)), _without_overflow(feed)]
    others = [_peer_outputs(case.model, moved, peer) for moved in feeds]
    known = [other for other in others if other is not None]
    return find_difference(outputs, wanted, known, is_rounded=is_rounded)


# ---------------------------------------------------------------- cases


def refusal(error: Exception) -> Verdict:
    """Return the verdict about an error: a refusal says what, where and what to do."""
    if isinstance(error, TvmflowError) and not _is_raw(error):
        return Verdict("refused", error.message)
    return Verdict("raised", f"{type(error).__name__}: {error}"[:600])


def _is_raw(error: TvmflowError) -> bool:
    """Return whether a message shows TVM's own text, or no way out."""
    raw = (
        "compiling C failed",
        "T.",
        "Check failed",
        "relax.",
        "R.",
        "Traceback",
        "TypeError",
        "KeyError",
        "InternalError",
    )
    return not error.fix or any(word in error.message for word in raw)


def _target(number: int) -> dict[str, Any]:
    return level(LEVELS_HERE[number % len(LEVELS_HERE)])


def answer(
    what: str, seeds: Sequence[int], folder: Path, choices: Sequence[int] | None = None
) -> Any:
    """Return verdicts, choices or the text of graphs, for `campaign`."""
    if what == "batch":
        return _check_batch(seeds, folder)
    try:
        case, drawn = make_case(seeds[0], choices)
    except Rejected as error:
        return Verdict("undrawn", str(error))
    if what == "choices":
        return drawn
    if what == "text":
        return describe(case)
    verdicts = _check_batch(seeds, folder, {seeds[0]: case})
    return verdicts[seeds[0]]


def describe(case: Case) -> str:
    """Return a graph and its inputs as text."""
    lines = [onnx.printer.to_text(case.model)]
    lines += [f"dimensions: {case.dimensions}"] if case.dimensions else []
    for feed in case.feeds[:1]:
        lines += [
            f"{name} = np.array({v.tolist()}, {str(v.dtype)!r}).reshape({v.shape})"
            for name, v in feed.items()
        ]
    return "\n".join(lines)


def _check_batch(
    seeds: Sequence[int], folder: Path, drawn: Mapping[int, Case] = MappingProxyType({})
) -> dict[int, Verdict]:
    """Judge graphs: those of one opset in one module.

    Args:
        seeds: Their seeds.
        folder: Where files are written, and in `step.json`, what is being done with which seeds.
        drawn: The graphs that are not those of their seeds.
    """
    verdicts: dict[int, Verdict] = {}
    groups: dict[Any, dict[int, tuple[Case, list[Expected]]]] = {}
    for seed in seeds:
        try:
            case = drawn[seed] if seed in drawn else make_case(seed)[0]
        except Exception as error:
            verdicts[seed] = Verdict("undrawn", f"{type(error).__name__}: {error}")
            continue
        _enter(folder, "peers", [seed])
        known, expected = run_peers(case)
        if not expected:
            verdicts[seed] = Verdict("skipped", "no peer runs it")
            continue
        _enter(folder, "import", [seed])
        try:
            loaded = import_case(known, folder)
        except Exception as error:
            verdicts[seed] = refusal(error)
            continue
        # it would bring all others to TVM's virtual machine
        is_alone = SIZES_NEEDED in loaded.mod["main"].attrs
        opset = [e.version for e in case.model.opset_import if not e.domain]
        groups.setdefault((*opset, bool(known.dimensions), is_alone), {})[seed] = (known, expected)
    for group in groups.values():
        verdicts |= _check_group(group, folder)
    return verdicts


def _enter(folder: Path, stage: str, seeds: Sequence[int]) -> None:
    (folder / "step.json").write_text(json.dumps([stage, seeds]))


def _check_group(
    group: Mapping[int, tuple[Case, list[Expected]]], folder: Path
) -> dict[int, Verdict]:
    seeds = list(group)
    _enter(folder, "build", seeds)
    merged = merge([case for case, _ in group.values()]) if len(seeds) > 1 else group[seeds[0]][0]
    try:
        run = build(merged, folder, level(LEVELS_HERE[seeds[0] % len(LEVELS_HERE)]))
        results = [run(feed) for feed in merged.feeds]
    except Exception as error:
        if len(seeds) == 1:
            return {seeds[0]: refusal(error)}
        _log.warning("judged by halves: %s", str(error)[:500])
        halves = seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]
        first, second = (_check_group({s: group[s] for s in half}, folder) for half in halves)
        return first | second
    _enter(folder, "peers", seeds)
    verdicts, place = {}, 0
    for seed, (case, expected) in group.items():
        count = len(case.model.graph.output)
        actual = [results[n][place : place + count] for n in range(len(case.feeds))]
        verdicts[seed] = judge(case, actual, expected)
        place += count
    return verdicts
