"""Computation of int64 and bool as int32, for devices that support only 32-bit words in memory.

The caller of the model checks that its inputs fit. Functions that are not operators still take int64 and bool, which
the code generator of such a device refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.passes.reductions import ARGREDUCTIONS
from tvmflow.graph import ir
from tvmflow.graph.rewriter import ELEMENTWISE, MainRewriter, rewrite_main
from tvmflow.targets.backends import webgpu

_INT64: Final = "int64"
_INT32: Final = "int32"
_BOOL: Final = "bool"
# The dtypes that tensors in memory must not have.
_REPLACED: Final = frozenset({_INT64, _BOOL})
_FUNCTION_CALLS: Final = "relax.call_"


def cast_integers(mod: tvm.IRModule) -> tvm.IRModule:
    """Let `main` take, compute and return int32 in place of int64 and bool.

    Raises:
        StageError: A constant does not fit.
    """
    # constants are checked here, because TVM replaces errors that are raised within a rewriter
    nodes: list[Any] = []
    relax.analysis.post_order_visit(mod["main"], nodes.append)
    for array in map(ir.constant_array, nodes):
        if array is not None:
            to_int32(array)
    # aliases would keep operators from being fused
    return relax.transform.CanonicalizeBindings()(rewrite_main(mod, _IntegerCaster))


def cast_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Store bool constants as int32, which kernels compare with 0; after constant folding, before fusion."""
    return rewrite_main(mod, _ConstantCaster)


class _IntegerCaster(MainRewriter):
    def visit_function_(self, function: relax.Function) -> Any:
        params = []
        for param in function.params:
            if ir.dtype_of(param) in _REPLACED:
                integers = relax.Var(param.name, relax.TensorType(param.ty.shape, _INT32))
                self.set_var_remap(param, integers)
                param = integers
            params.append(param)
        body = self.visit_with_new_scope(function.body)
        return relax.Function(params, body, body.ty, function.is_pure).with_attrs(function.attrs)

    def visit_generic_const_(self, constant: Any) -> Any:
        if constant.ty.dtype.dtype not in _REPLACED:
            return constant
        return relax.const(to_int32(constant.value.numpy()), _INT32)

    def visit_call_(self, call: relax.Call) -> Any:
        visited = [self.visit_expr(arg) for arg in call.args]
        name, attrs = ir.operator_name(call), call.attrs
        if name.startswith(_FUNCTION_CALLS):
            # the dtypes of a function's operands and results are unchanged
            args = list(visited)
            if isinstance(args[1], relax.Tuple):
                args[1] = self._promote(call.args[1], args[1], _REPLACED)
            return self._to_int32(self.emit(relax.Call(call.op, args, attrs, call.ty_args)))
        args = [self._promote(*pair, {_BOOL}) for pair in zip(call.args, visited, strict=True)]
        if name == "relax.astype" and attrs.dtype in _REPLACED:
            value = self.cast(args[0], _BOOL) if attrs.dtype == _BOOL else args[0]
            return self.cast(value, _INT32)
        if name in ARGREDUCTIONS:
            if attrs.axis is None:
                args[0] = self.reshape(args[0], [-1])
            return self._find_indices(
                args[0],
                int(attrs.axis or 0),
                keeps_axis=bool(attrs.keepdims),
                largest=ARGREDUCTIONS[name],
            )
        if name == "relax.topk":
            options = (int(attrs.k), int(attrs.axis), attrs.ret_type, attrs.largest, _INT32)
            return self.emit(relax.op.topk(args[0], *options))
        if name == "relax.argsort":
            order = (int(attrs.axis), bool(attrs.descending), _INT32)
            return self.emit(relax.op.argsort(args[0], *order))
        return self._to_int32(self.emit(relax.Call(call.op, args, attrs, call.ty_args)))

    def _promote(self, old: Any, new: Any, dtypes: Collection[str]) -> Any:
        """Return an operand, cast back to its original dtype if that is one of `dtypes`."""
        if isinstance(old, relax.Tuple) and isinstance(new, relax.Tuple):
            pairs = zip(old.fields, new.fields, strict=True)
            return relax.Tuple([self._promote(*pair, dtypes) for pair in pairs])
        if not isinstance(old.ty, relax.TensorType) or ir.dtype_of(old) not in dtypes:
            return new
        return self.cast(new, ir.dtype_of(old))

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        return self._to_int32(self.emit(super().visit_tuple_getitem_(item)))

    def _to_int32(self, result: Any) -> Any:
        is_tensor = isinstance(result.ty, relax.TensorType)
        is_replaced = is_tensor and ir.dtype_of(result) in _REPLACED
        return self.cast(result, _INT32) if is_replaced else result

    def _find_indices(self, data: Any, axis: int, *, keeps_axis: bool, largest: bool) -> Any:
        """Emit argmax or argmin along an axis; the first of equal values wins."""
        shape = ir.known_shape(data)
        at = axis % len(shape)
        # the indices are a tensor, because TVM promotes comparisons of loop variables
        positions = relax.const(np.arange(shape[at], dtype=_INT32))
        limit = tirx.min_value if largest else tirx.max_value

        def prefer(one: Any, other: Any) -> Any:
            """Return the argmax of two (index, value) pairs, in a form that TVM can split."""
            is_beyond = one[1] > other[1] if largest else one[1] < other[1]
            is_chosen = tirx.Or(is_beyond, tirx.And(one[1].equal(other[1]), one[0] < other[0]))
            position = tirx.Select(is_chosen, one[0], other[0])
            return position, tirx.Select(is_beyond, one[1], other[1])

        def find(tensor: te.Tensor, positions: te.Tensor) -> te.Tensor:
            along = te.reduce_axis((0, shape[at]), "along")
            outer = [*shape[:at], *([1] if keeps_axis else []), *shape[at + 1 :]]

            def element(*indices: Any) -> Any:
                position = (*indices[:at], along, *indices[at + keeps_axis :])
                return reducer((positions(along), tensor(*position)), axis=along)

            reducer = te.comm_reducer(
                prefer, lambda position, number: (tirx.const(-1, position), limit(number))
            )
            found = te.compute(outer, element, "found")
            return te.compute(outer, lambda *indices: found[0](*indices), "places")

        name = "argmax" if largest else "argmin"
        return self.builder_.emit_te(find, data, positions, primfunc_name_hint=name)


class _ConstantCaster(MainRewriter):
    OPERATORS = ("relax.call_tir",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        fields = list(map(self._to_bools, rewritten.args[1].fields))
        args = [rewritten.args[0], relax.Tuple(fields), *rewritten.args[2:]]
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    def _to_bools(self, operand: Any) -> Any:
        """Emit a kernel that computes a bool constant; each use has its own, with which it is fused."""
        if not isinstance(operand, tvm.ir.Constant) or ir.dtype_of(operand) != _BOOL:
            return operand

        def compare(tensor: te.Tensor) -> te.Tensor:
            return te.compute(tensor.shape, lambda *i: tensor(*i) != tirx.const(0, _INT32))

        integers = relax.const(to_int32(operand.value.numpy()), _INT32)
        return self.kernel(compare, "bools", integers, pattern=ELEMENTWISE)


def to_int32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return int64 and bool as int32, and other values unchanged.

    Raises:
        StageError: A value does not fit.
    """
    if str(values.dtype) not in _REPLACED:
        return values
    result = values.astype(_INT32)
    if not np.array_equal(result, values):
        raise webgpu.refuse("it has a constant of more than 32 bits")
    return result
