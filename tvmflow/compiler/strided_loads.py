"""Loads of every second, third or fourth number, or of each number twice: whole vectors of which numbers are selected.

TVM loads such numbers one by one. Pooling with stride 2 and slices with steps read the former, and resizing to
nearest pixels the latter.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.ir import find_nodes

MAX_STRIDE: Final = 4
"""With larger strides, numbers are loaded one by one: so many vectors would have few of them."""


def shuffle_strided_loads() -> tvm.transform.Pass:
    """Return a pass that loads numbers with a small stride as vectors."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        analyzer = tvm.sym.Analyzer()
        for loop in find_nodes(function.body, tirx.For):
            analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))

        def shuffle(load: Any) -> Any:
            index = load.indices[-1]
            if isinstance(index, tirx.Ramp):
                return _select(load, index, analyzer)
            return _repeat(load, index, analyzer)

        return function.with_body(
            tvm_ffi.structural_map(function.body, (tvm.ir.TensorLoad, shuffle))
        )

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="ShuffleStridedLoads")


def _repeat(load: Any, index: Any, analyzer: Any) -> Any:
    """Return the numbers that a load reads several times each, from one vector."""
    terms = _list_terms(index)
    quotients = [term for term in terms if isinstance(term, tirx.FloorDiv)]
    others = [term.value for term in terms if isinstance(term, tirx.Broadcast)]
    if len(quotients) != 1 or len(others) + 1 != len(terms):
        return load
    ramp, count = quotients[0].a, quotients[0].b
    is_ramp = isinstance(ramp, tirx.Ramp) and _as_number(ramp.stride) == 1
    count = _as_number(count.value) if isinstance(count, tirx.Broadcast) else 0
    lanes = int(ramp.lanes) if is_ramp else 0
    if count < 2 or lanes % count or lanes < 2 * count:
        return load
    steps = analyzer.modular_set(ramp.base)
    if int(steps.coeff) % count or int(steps.base) % count:
        # the first number of a vector may have been read for the one before it
        return load
    start = sum(others, ramp.base // count)
    vector = tirx.BufferLoad(load.source, [*load.indices[:-1], tirx.Ramp(start, 1, lanes // count)])
    # TVM selects at most as many numbers as there are
    return tirx.Shuffle([vector] * count, [lane // count for lane in range(lanes)])


def _list_terms(index: Any) -> list[Any]:
    """Return the terms of a sum."""
    if isinstance(index, tirx.Add):
        return [*_list_terms(index.a), *_list_terms(index.b)]
    return [index]


def _as_number(expr: Any) -> int:
    """Return a constant; 0 for other expressions."""
    return int(expr) if isinstance(expr, tirx.IntImm) else 0


def _select(load: Any, index: tirx.Ramp, analyzer: Any) -> Any:
    """Return the numbers that a load reads, selected from vectors that do not reach beyond the tensor."""
    stride, lanes = _as_number(index.stride), int(index.lanes)
    if not 1 < stride <= MAX_STRIDE:
        return load
    end, extent = stride * lanes, load.source.ty.shape[-1]
    is_known = isinstance(extent, tirx.IntImm)
    if not is_known or analyzer.const_int_bound(index.base).max_value + end > int(extent):
        end -= stride - 1
    # whole vectors, so that loads of the numbers between them read the same ones
    starts = [min(n * lanes, end - lanes) for n in range(stride)]
    outer = list(load.indices[:-1])
    vectors = [
        tirx.BufferLoad(load.source, [*outer, tirx.Ramp(index.base + start, 1, lanes)])
        for start in starts
    ]
    places = [
        number // lanes * lanes + number - starts[number // lanes]
        for number in range(0, end, stride)
    ]
    return tirx.Shuffle(vectors, places)
