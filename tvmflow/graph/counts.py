"""Counts of outputs with data-dependent shapes: `main` returns their valid lengths after the outputs.

Such an output has memory for its upper bound. C libraries pass the counts to the calling program. For TVM's virtual
machine, `main` returns only the valid elements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx

from tvmflow.graph import ir

SIZES_NEEDED: Final = "tvmflow.sizes_needed"
"""The attribute of a `main` with tensors whose sizes only TVM's runtime can compute: the reason."""

_COUNTS: Final = "tvmflow.counts"

COUNT_ATTRIBUTES: Final = (SIZES_NEEDED, _COUNTS)
"""The attributes that `main` keeps through all passes."""


class OutputCount(NamedTuple):
    """An output that is padded along an axis: only its first elements are valid.

    Attributes:
        output: The index of the output.
        axis: The axis; all axes before it have size 1.
        count_index: The index of the count among the counts that `main` returns after its outputs.
    """

    output: int
    axis: int
    count_index: int


def write_counts(function: relax.Function, counts: Sequence[OutputCount]) -> relax.Function:
    """Return `main` with an attribute for the counts that it returns after its outputs."""
    return function.with_attr(_COUNTS, json.dumps(counts)) if counts else function


def read_counts(function: relax.Function) -> tuple[OutputCount, ...]:
    """Return the outputs of `main` that have a count."""
    return tuple(
        OutputCount(*entry) for entry in json.loads((function.attrs or {}).get(_COUNTS, "[]"))
    )


def cut_outputs(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module whose `main` returns only valid elements, and no counts."""
    main = mod["main"]
    counts = {entry.output: entry for entry in read_counts(main)}
    if not counts:
        return mod
    mod = relax.transform.ToNonDataflow()(mod)
    main, fields = mod["main"], ir.list_outputs(mod["main"])
    first_count = len(fields) - 1 - max(entry.count_index for entry in counts.values())
    kernels = {var: function for var, function in mod.functions_items() if var.name_hint != "main"}
    builder = relax.BlockBuilder(tvm.IRModule(kernels, mod.attrs, mod.global_infos))
    with builder.function("main", list(main.params)):
        for block in main.body.blocks:
            for binding in block.bindings:
                builder.emit_normalized(binding)
        sizes: dict[int, Any] = {}
        results = []
        for index, field in enumerate(fields[:first_count]):
            if (entry := counts.get(index)) is None:
                results.append(field)
                continue
            if entry.count_index not in sizes:
                count = relax.op.tensor_to_shape(fields[first_count + entry.count_index])
                size = sizes[entry.count_index] = tirx.Var("size", "int64")
                builder.match_cast(builder.emit(count), relax.ShapeType([size]))
            part = relax.op.strided_slice(field, [entry.axis], [0], [sizes[entry.count_index]])
            results.append(builder.emit(part))
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    cut = builder.get()
    attrs = {name: value for name, value in main.attrs.items() if name != _COUNTS}
    cut[cut.get_global_var("main")] = cut["main"].with_attrs(attrs)
    return relax.transform.LegalizeOps()(cut)
