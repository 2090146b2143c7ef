"""What can be said of a trace without TVM: its form, and whether its instructions exist.

Whether it applies to a kernel is for a child process with TVM to find out; see `replay`.
"""

from __future__ import annotations

from typing import Final

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

from tvmflow.core.types import Json

INSTRUCTIONS: Final = frozenset(
    """
    AddUnitLoop Annotate AnnotateBufferAccess Bind Blockize CacheIndex CacheInplace CacheRead
    CacheWrite ComputeAt ComputeInline DecomposePadding DecomposeReduction EnterPostproc Fuse
    FuseReductionEpilogue GetChildBlocks GetConsumers GetLoops GetOutputBlocks GetProducers
    GetSBlock LoopPartition Merge PadEinsum Parallel RFactor ReIndex ReadAt ReindexCacheRead
    ReindexCacheWrite Reorder ReorderBlockIterVar ReverseComputeAt ReverseComputeInline
    RollingBuffer SampleCategorical SampleComputeLocation SamplePartitionedTile SamplePerfectTile
    SetScope Split StorageAlign Tensorize TransformBlockLayout TransformLayout Unannotate Unroll
    UnsafeHideBufferAccess UnsafeSetDType Vectorize WriteAt
    """.split()
)
"""The kinds of instructions of TVM's schedules."""

_INT64: Final = range(-(1 << 63), 1 << 63)
_MAX_QUOTED: Final = 40

_Instruction = tuple[StrictStr, list[Json], list[Json], list[StrictStr]]
_TRACE: Final = TypeAdapter(tuple[list[_Instruction], list[tuple[StrictInt, Json]]])


def has_form(trace: Json) -> bool:
    """Return whether a value is a list of instructions and a list of decisions."""
    try:
        _TRACE.validate_python(trace)
    except ValidationError:
        return False
    return True


def find_problem(trace: Json) -> str:
    """Return why no search of this tvmflow can have made a trace; an empty string when one can.

    Args:
        trace: A trace that has the form of one.
    """
    instructions, decisions = trace
    for kind, *_ in instructions:
        if kind not in INSTRUCTIONS:
            return f"its trace has an instruction that TVM does not have: {kind[:_MAX_QUOTED]!r}"
    if any(index not in range(len(instructions)) for index, _ in decisions):
        return "its trace has a decision about an instruction that it lacks"
    if not _has_only_int64(trace):
        return "its trace has a number that TVM cannot hold"
    return ""


def _has_only_int64(trace: Json) -> bool:
    values = [trace]
    while values:
        value = values.pop()
        if isinstance(value, int) and value not in _INT64:
            return False
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
    return True
