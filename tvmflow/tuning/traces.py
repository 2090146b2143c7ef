"""Check a trace without TVM: its form, and whether a search by this version could have made it.

A trace is a program: TVM executes its instructions, and some contain code, such as LLVM IR or serialized expressions
that call any function. A trace from elsewhere must not be able to do more than schedule a kernel. So this module
lists what a search writes, and refuses everything else, wherever the trace comes from.

Whether a trace applies to a kernel is checked in a child process with TVM; see `replay`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.types import Json

_INT64: Final = range(-(1 << 63), 1 << 63)
_MAX_QUOTED: Final = 40
_MAX_NAME: Final = 1024

_Instruction = tuple[StrictStr, list[Json], list[Json], list[StrictStr]]
_TRACE: Final = TypeAdapter(tuple[list[_Instruction], list[tuple[StrictInt, Json]]])

_VARIABLE: Final = re.compile(r"[blv][0-9]{1,9}")
"""Variables for blocks, loops and integers that later instructions use."""

_THREAD_AXIS: Final = re.compile(r"(blockIdx|threadIdx|vthread)(\.[xyz])?")
_SCOPES: Final = frozenset({"global", "local", "shared", "shared.dyn"})
_INTRINSIC: Final = re.compile(r"[A-Za-z0-9_.]{0,128}")
"""The name of an intrinsic; TVM accepts only intrinsics that tvmflow registers for the target."""

_TILES: Final = re.compile("[SR]{1,32}")

_INDEX_NODES: Final = frozenset(
    """
    None int ffi.Array ffi.String ir.IntImm ir.PrimType ir.Var prim.Add prim.FloorDiv prim.FloorMod
    prim.Mul prim.Sub tirx.IndexMap
    """.split()
)
"""The node types of an index map that only computes indices: none of them is a call."""


def _is_number(value: Json) -> bool:
    return value is None or isinstance(value, int | float) or _is_variable(value)


def _is_variable(value: Json) -> bool:
    # TVM writes `None` for a factor to infer
    return isinstance(value, str) and (_VARIABLE.fullmatch(value) is not None or value == "None")


def _are_numbers(value: Json) -> bool:
    return all(map(_are_numbers, value)) if isinstance(value, list) else _is_number(value)


def _quoted(pattern: re.Pattern[str]) -> Callable[[Json], bool]:
    """Return a check that a value is a quoted string whose content matches a pattern."""

    def check(value: Json) -> bool:
        is_text = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"'
        return is_text and pattern.fullmatch(value[1:-1]) is not None

    return check


_ANNOTATIONS: Final[Mapping[str, Callable[[Json], bool]]] = {
    "meta_schedule.auto_tensorize": _quoted(_INTRINSIC),
    "meta_schedule.auto_tensorize_init": _quoted(_INTRINSIC),
    "meta_schedule.cooperative_fetch": _is_number,
    "meta_schedule.parallel": _is_number,
    "meta_schedule.random_compute_producer": _is_number,
    "meta_schedule.thread_extent_high_inclusive": _is_number,
    "meta_schedule.thread_extent_low_inclusive": _is_number,
    "meta_schedule.tiling_structure": _quoted(_TILES),
    "meta_schedule.unroll_explicit": _is_number,
    "meta_schedule.unroll_implicit": _is_number,
    "meta_schedule.vectorize": _is_number,
    "pragma_auto_unroll_max_step": _is_number,
    "pragma_loop_partition_hint": _is_number,
    "pragma_unroll_explicit": _is_number,
    "tvmflow.computes_tails_apart": _is_number,
    "tvmflow.prefetches_weights": _is_number,
    "software_pipeline_async_stages": _are_numbers,
    "software_pipeline_order": _are_numbers,
    "software_pipeline_stage": _are_numbers,
}
"""The annotations that a search writes, with a check of their values."""

_REMOVED_ANNOTATIONS: Final = frozenset({*_ANNOTATIONS, "schedule_rule"})


def _is_index_map(value: Json) -> bool:
    """Return whether a value is a serialized index map that only computes indices."""
    try:
        graph = read_json(value.encode()) if isinstance(value, str) else None
    except (Unreadable, UnicodeEncodeError):
        return False
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    return isinstance(nodes, list) and all(
        isinstance(node, dict) and node.get("type") in _INDEX_NODES for node in nodes
    )


def _is_name(value: Json) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_NAME


def _is_scope(value: Json) -> bool:
    return isinstance(value, str) and value in _SCOPES


def _matches(pattern: re.Pattern[str]) -> Callable[[Json], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


# A check of an instruction's inputs and attributes; returns what is wrong, or an empty string.
_Check = Callable[[list[Json], list[Json]], str]


def _check_values(*attributes: Callable[[Json], bool]) -> _Check:
    """Return a check of an instruction: of its first attributes; all other values must be numbers."""

    def check(inputs: list[Json], values: list[Json]) -> str:
        if not _are_numbers(inputs):
            return _foreign_value(inputs)
        for number, value in enumerate(values):
            is_valid = attributes[number] if number < len(attributes) else _are_numbers
            if not is_valid(value):
                return _foreign_value(value)
        return ""

    return check


def _check_layout(inputs: list[Json], values: list[Json]) -> str:
    block, *maps = inputs or [""]
    if not (_is_variable(block) and len(maps) == 1 and _is_index_map(maps[0])):
        return "an index map that does more than compute indices"
    return "" if _are_numbers(values) else _foreign_value(values)


def _check_block_layout(inputs: list[Json], values: list[Json]) -> str:
    if not (len(values) == 1 and _is_index_map(values[0])):
        return "an index map that does more than compute indices"
    return "" if _are_numbers(inputs) else _foreign_value(inputs)


def _check_annotation(inputs: list[Json], values: list[Json]) -> str:
    key = values[0] if len(values) == 1 else None
    is_valid = _ANNOTATIONS.get(key) if isinstance(key, str) else None
    if is_valid is None:
        return f"the annotation {_shorten(key)}"
    if len(inputs) != 2 or not _is_variable(inputs[0]) or not is_valid(inputs[1]):
        return f"the annotation {_shorten(key)} with a value of another kind"
    return ""


def _check_removed_annotation(inputs: list[Json], values: list[Json]) -> str:
    if len(values) != 1 or values[0] not in _REMOVED_ANNOTATIONS:
        return f"the annotation {_shorten(values[0] if values else None)}"
    return "" if _are_numbers(inputs) else _foreign_value(inputs)


def _foreign_value(value: Json) -> str:
    return f"the value {_shorten(value)}"


def _shorten(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


_NUMBERS: Final = _check_values()

INSTRUCTIONS: Final[Mapping[str, _Check]] = {
    **dict.fromkeys(
        """
        AddUnitLoop Blockize ComputeAt ComputeInline DecomposePadding DecomposeReduction EnterPostproc
        Fuse GetChildBlocks GetConsumers GetLoops GetOutputBlocks GetProducers Merge Parallel RFactor
        Reorder ReverseComputeAt ReverseComputeInline SampleCategorical SampleComputeLocation
        SamplePerfectTile Split Unroll Vectorize
        """.split(),
        _NUMBERS,
    ),
    "Annotate": _check_annotation,
    "Bind": _check_values(_matches(_THREAD_AXIS)),
    "CacheRead": _check_values(_is_number, _is_scope),
    "CacheWrite": _check_values(_is_number, _is_scope),
    "GetSBlock": _check_values(_is_name, _is_name),
    "SetScope": _check_values(_is_number, _is_scope),
    "Tensorize": _check_values(_matches(_INTRINSIC)),
    "TransformBlockLayout": _check_block_layout,
    "TransformLayout": _check_layout,
    "Unannotate": _check_removed_annotation,
}
"""The kinds of instructions that a search writes, with a check of their inputs and attributes."""


def has_form(trace: Json) -> bool:
    """Return whether a value is a list of instructions and a list of decisions."""
    try:
        _TRACE.validate_python(trace)
    except ValidationError:
        return False
    return True


def find_problem(trace: Json) -> str:
    """Return why a search of this version cannot have made a trace; empty if it can."""
    instructions, decisions = trace
    for number, (kind, inputs, values, _) in enumerate(instructions):
        check = INSTRUCTIONS.get(kind)
        if check is None:
            return f"its trace has an instruction that no search writes: {number}, {_shorten(kind)}"
        if problem := check(inputs, values):
            return (
                f"its trace has what no search writes: {problem}, in instruction {number} ({kind})"
            )
    if any(index not in range(len(instructions)) for index, _ in decisions):
        return "its trace has a decision about an instruction that it lacks"
    if not all(_are_numbers(decision) for _, decision in decisions):
        return "its trace has a decision that is not a number"
    if not _has_only_int64(trace):
        return "its trace has a number that TVM cannot hold"
    return ""


def _has_only_int64(trace: Sequence[Json]) -> bool:
    values = [*trace]
    while values:
        value = values.pop()
        if isinstance(value, int) and value not in _INT64:
            return False
        if isinstance(value, list):
            values += value
    return True
