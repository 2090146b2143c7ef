"""Evaluation of constants and weights with numpy, which is faster than compiling kernels for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.numpy_rules import RULES

_Array = np.ndarray[Any, Any]

# A constant stays a broadcast, and is not stored, where it is larger and than what it is made of.
_MAX_GROWN_ELEMENTS: Final = 1 << 16


def evaluate_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace calls on constants alone by constants, as far as there are rules for them."""
    return relax.transform.CanonicalizeBindings()(rewrite_main(mod, _ConstantEvaluator))


def evaluate_function(function: relax.Function, weights: Sequence[_Array]) -> list[_Array] | None:
    """Evaluate a function that takes and returns a tuple of weights.

    Args:
        function: The function.
        weights: The fields of its argument.

    Returns:
        The fields of its result; None if it calls an operator without a rule.
    """
    (parameter,) = function.params
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    exprs = [*(binding.value for binding in bindings), function.body.body]
    last_uses = {var: step for step, expr in enumerate(exprs) for var in ir.list_variables(expr)}
    values: dict[Any, Any] = {parameter: [_supported_array(array) for array in weights]}
    for step, binding in enumerate(bindings):
        if isinstance(binding.var.ty, relax.ShapeType):
            continue
        if (value := _evaluate(binding.value, values)) is None:
            return None
        values[binding.var] = value
        # The values of a large model do not fit into memory all at once.
        for var in ir.list_variables(binding.value):
            if last_uses[var] == step:
                values.pop(var, None)
    result = _evaluate(function.body.body, values)
    if not isinstance(result, list) or not all(isinstance(array, np.ndarray) for array in result):
        return None
    return [np.asarray(array, order="C") for array in result]


def _evaluate(expr: Any, values: Mapping[Any, Any]) -> Any:
    """Return an array, or a list of arrays for a tuple; None if there is no rule."""
    if isinstance(expr, relax.Var):
        return values.get(expr)
    if isinstance(expr, tvm.ir.Constant):
        return _constant_array(expr)
    if isinstance(expr, relax.Tuple):
        fields = [_evaluate(field, values) for field in expr.fields]
        return None if any(field is None for field in fields) else fields
    if isinstance(expr, relax.TupleGetItem):
        return _evaluate(expr.tuple_value, values)[expr.index]
    if not isinstance(expr, relax.Call):
        return None
    arrays = [_evaluate(argument, values) for argument in _list_tensors(expr)]
    return _apply_rule(expr, _flatten(arrays))


def _constant_array(expr: tvm.ir.Constant) -> _Array | None:
    """Return the array of a constant; None for a scalar attribute, such as an axis."""
    if not isinstance(expr.value, tvm.runtime.Tensor):
        return None
    return _supported_array(expr.value.numpy())


def _supported_array(array: _Array) -> _Array | None:
    """Return the array; None for dtypes that numpy lacks, such as bfloat16."""
    return array if array.dtype.kind in "fiub" else None


def _apply_rule(call: Any, arrays: Sequence[Any]) -> _Array | None:
    rule = RULES.get(ir.operator_name(call))
    if rule is None or not all(isinstance(array, np.ndarray) for array in arrays):
        return None
    # Infinities and NaN are valid results.
    with np.errstate(all="ignore"):
        result = rule(call, arrays)
    # numpy returns scalars for operations on arrays of rank 0.
    return None if result is None else np.asarray(result)


class _ConstantEvaluator(MainRewriter):
    """Replaces calls of which all tensors are constants."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        arrays = _flatten([self._find_value(argument) for argument in _list_tensors(rewritten)])
        result = _apply_rule(call, arrays)
        if result is None or result.size > max(_MAX_GROWN_ELEMENTS, sum(a.size for a in arrays)):
            return rewritten
        return relax.const(np.asarray(result, order="C"), str(result.dtype))

    def _find_value(self, expr: Any) -> _Array | list[Any] | None:
        expr = ir.resolve_alias(expr, self.lookup_binding)
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(value, relax.Tuple):
            return [self._find_value(field) for field in value.fields]
        return _constant_array(value) if isinstance(value, tvm.ir.Constant) else None


def _list_tensors(call: Any) -> list[Any]:
    """Return the arguments of a call that are tensors, or tuples of them; no shapes, axes and numbers."""
    return [
        argument
        for argument in call.args
        if all(
            isinstance(kind, relax.TensorType)
            for kind in (
                argument.ty.fields if isinstance(argument.ty, relax.TupleType) else [argument.ty]
            )
        )
        and not (isinstance(argument.ty, relax.TupleType) and not argument.ty.fields)
    ]


def _flatten(values: Sequence[Any]) -> list[Any]:
    """Return the values with lists, which tuples become, in their place."""
    return [item for value in values for item in (value if isinstance(value, list) else [value])]
