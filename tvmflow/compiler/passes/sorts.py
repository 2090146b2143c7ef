"""Gives sorts, and selections of the first k, kernels for CPUs in place of calls of TVM's runtime."""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.operators import sorting
from tvmflow.compiler.operators.sorting import Sort
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main

_OPERATORS: Final = frozenset({"relax.sort", "relax.argsort", "relax.topk"})


def replace_sorts(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace `sort`, `argsort` and `topk` of static shapes."""
    return rewrite_main(mod, _SortRewriter, context.cpu.cores if context.cpu else 1)


class _SortRewriter(MainRewriter):
    """Rewrites sorts."""

    def __init__(self, mod: tvm.IRModule, cores: int) -> None:
        super().__init__(mod)
        self._cores = cores

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten, sort = super().visit_call_(call), _as_sort(call)
        if sort is None or not sorting.is_supported(sort):
            return rewritten
        variable = self.builder_.add_func(sorting.make_kernel(sort, self._cores), "sort")
        types = [relax.TensorType(sort.result_shape, dtype) for dtype in sort.result_dtypes]
        results = types if len(types) > 1 else types[0]
        return self.emit(relax.call_tir(variable, [rewritten.args[0]], results))


def _as_sort(call: Any) -> Sort | None:
    """Return the sort that an operator of static shapes computes; None if it is another one."""
    name = ir.operator_name(call)
    shape = ir.shape_of(call.args[0]) if name in _OPERATORS else None
    if not shape:
        return None
    attrs, dtype = call.attrs, ir.dtype_of(call.args[0])
    axis = int(attrs.axis) % len(shape)
    if name != "relax.topk":
        index_dtype = str(attrs.dtype) if name == "relax.argsort" else None
        return Sort(
            shape, dtype, axis, shape[axis], bool(attrs.descending), not index_dtype, index_dtype
        )
    count, results = int(attrs.k), str(attrs.ret_type)
    return Sort(
        shape,
        dtype,
        axis,
        count if count > 0 else shape[axis],
        bool(attrs.largest),
        results != "indices",
        None if results == "values" else str(attrs.dtype),
    )
