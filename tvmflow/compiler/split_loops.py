"""Splits loops at the periods of their indices, because LLVM's loop vectorizer miscompiles them.

In `for i in range(16)` with `a[i % 8]` in a condition, LLVM may read 16 consecutive elements of `a`: it takes
the modulo by a power of 2, which is a cast to a few bits for it, for one that never wraps. It does so where its
vectors are longer than the period, as those of `znver4` and `znver5` are. In a loop of 8 iterations nothing wraps.
"""

from __future__ import annotations

import math
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.ir import find_nodes, replace_variables

# Elements of the longest vectors, times the vectors that LLVM computes in turns.
_MAX_PERIOD: Final = 512


def split_loops_where_indices_repeat() -> tvm.transform.Pass:
    """Return a pass that splits loops in which an index is taken modulo less than it reaches."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        if not find_nodes(function.body, tirx.FloorMod, tirx.Mod):
            return function
        return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, _split)))

    return tirx.transform.prim_func_pass(
        transform, opt_level=0, name="SplitLoopsWhereIndicesRepeat"
    )


def _split(loop: tirx.For) -> tirx.For:
    """Return a loop, or nested ones, of which none has an index that repeats."""
    period = _find_period(loop)
    if not period:
        return loop
    dtype, extent = loop.loop_var.ty.dtype, loop.extent
    outer, inner = (tirx.Var(f"{loop.loop_var.name}_{name}", dtype) for name in ("outer", "inner"))
    body = replace_variables(loop.body, {loop.loop_var: outer * period + inner})
    length = tvm.sym.Analyzer().simplify(extent % period)
    is_whole = isinstance(length, tirx.IntImm) and int(length) == 0
    own = tirx.IntImm(dtype, period) if is_whole else tirx.min(period, extent - outer * period)
    nested = tirx.For(inner, loop.min, own, tirx.ForKind.SERIAL, body)
    count = tvm.sym.Analyzer().simplify((extent + period - 1) // period)
    # indices may repeat in the outer loop, too
    return _split(tirx.For(outer, loop.min, count, loop.kind, nested, annotations=loop.annotations))


def _find_period(loop: tirx.For) -> int:
    """Return the number of iterations after which an index of a loop first repeats, if vectors may reach beyond them; else 0."""
    is_known = isinstance(loop.extent, tirx.IntImm)
    limit = min(_MAX_PERIOD, int(loop.extent) if is_known else _MAX_PERIOD)
    if not (isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0):
        return 0
    if find_nodes(loop.body, tirx.Ramp):
        # it is in vectors already
        return 0
    values = {bind.var: bind.value for bind in find_nodes(loop.body, tirx.Bind)}
    periods = (
        _period_of(node, loop.loop_var, values)
        for node in find_nodes(loop.body, tirx.FloorMod, tirx.Mod)
    )
    return min((p for p in periods if 1 < p < limit), default=0)


def _period_of(modulo: Any, var: Any, values: dict[Any, Any]) -> int:
    """Return the period of a modulo by a power of 2 in a variable; 0 for others, and if it is not linear in it.

    Args:
        modulo: The modulo.
        var: The variable.
        values: What other variables are bound to.
    """
    divisor = int(modulo.b) if isinstance(modulo.b, tirx.IntImm) else 0
    if divisor < 1 or divisor & (divisor - 1):
        return 0
    index = modulo.a
    while values.keys() & (bound := set(find_nodes(index, tirx.Var))):
        index = replace_variables(index, {v: values[v] for v in bound & values.keys()})
    step = tvm.sym.Analyzer().simplify(replace_variables(index, {var: var + 1}) - index)
    return divisor // math.gcd(divisor, int(step)) if isinstance(step, tirx.IntImm) else 0
