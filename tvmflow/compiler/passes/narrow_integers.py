"""Computation of int64 as int32, for devices without integers of 64 bits: ids, indices and sizes.

Who runs the model checks that its inputs fit. Functions that are not operators still take int64, which the code
generator of such a device refuses.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main
from tvmflow.targets import webgpu

_WIDE: Final = "int64"
_NARROW: Final = "int32"
_FUNCTION_CALLS: Final = "relax.call_"


def narrow_integers(mod: tvm.IRModule) -> tvm.IRModule:
    """Let `main` take, compute and return int32 in place of int64.

    Raises:
        StageError: A constant does not fit.
    """
    for constant in _list_constants(mod["main"]):
        values = constant.value.numpy()
        if str(values.dtype) == _WIDE and not fits_narrow(values):
            raise webgpu.refuse("it has a constant of more than 32 bits")
    # names of names would keep operators from being fused
    return relax.transform.CanonicalizeBindings()(rewrite_main(mod, _IntegerNarrower))


def _list_constants(function: relax.Function) -> list[Any]:
    constants: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.Constant) and isinstance(node.ty, relax.TensorType):
            constants.append(node)

    relax.analysis.post_order_visit(function, visit)
    return constants


class _IntegerNarrower(MainRewriter):
    """Rewrites parameters, constants and calls."""

    def visit_function_(self, function: relax.Function) -> Any:
        params = []
        for param in function.params:
            if ir.dtype_of(param) == _WIDE:
                narrow = relax.Var(param.name, relax.TensorType(param.ty.shape, _NARROW))
                self.set_var_remap(param, narrow)
                param = narrow
            params.append(param)
        body = self.visit_with_new_scope(function.body)
        return relax.Function(params, body, body.ty, function.is_pure).with_attrs(function.attrs)

    def visit_generic_const_(self, constant: Any) -> Any:
        values = constant.value.numpy()
        if str(values.dtype) != _WIDE:
            return constant
        return relax.const(values.astype(_NARROW), _NARROW)

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if name.startswith(_FUNCTION_CALLS):
            return self._call_function(call, rewritten)
        if name == "relax.astype" and call.attrs.dtype == _WIDE:
            return self.cast(rewritten.args[0], _NARROW)
        return self._narrow(self.emit(rewritten))

    def _call_function(self, call: relax.Call, rewritten: Any) -> Any:
        """Return a call of a function, which reads and writes what it did."""
        operands = rewritten.args[1]
        if not isinstance(operands, relax.Tuple):
            return rewritten
        fields = [
            self.cast(new, _WIDE) if ir.dtype_of(old) == _WIDE else new
            for old, new in zip(call.args[1].fields, operands.fields, strict=True)
        ]
        args = [rewritten.args[0], relax.Tuple(fields), *rewritten.args[2:]]
        return self._narrow(self.emit(relax.Call(call.op, args, call.attrs, call.ty_args)))

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        return self._narrow(self.emit(super().visit_tuple_getitem_(item)))

    def _narrow(self, result: Any) -> Any:
        is_wide = isinstance(result.ty, relax.TensorType) and ir.dtype_of(result) == _WIDE
        return self.cast(result, _NARROW) if is_wide else result


def fits_narrow(values: np.ndarray[Any, Any]) -> bool:
    """Return whether integers fit 32 bits."""
    limits = np.iinfo(_NARROW)
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)
