"""Evaluation of constants and weights with numpy, which is faster than compiling kernels for them.

Each rule gives the bits that TVM's own operator gives on a CPU without fused multiply-add:
values are moved, or rounded once as IEEE 754 defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main

_Array = np.ndarray[Any, Any]
_Rule = Callable[[Any, Sequence[_Array]], _Array | None]


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
    return _apply_rule(expr, [_evaluate(argument, values) for argument in _list_tensors(expr)])


def _constant_array(expr: tvm.ir.Constant) -> _Array | None:
    """Return the array of a constant; None for a scalar attribute, such as an axis."""
    if not isinstance(expr.value, tvm.runtime.Tensor):
        return None
    return _supported_array(expr.value.numpy())


def _supported_array(array: _Array) -> _Array | None:
    """Return the array; None for dtypes that numpy lacks, such as bfloat16."""
    return array if array.dtype.kind in "fiub" else None


def _apply_rule(call: Any, arrays: Sequence[Any]) -> _Array | None:
    rule = _RULES.get(ir.operator_name(call))
    if rule is None or not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
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
        arrays = [self._find_array(argument) for argument in _list_tensors(rewritten)]
        result = _apply_rule(call, arrays)
        if result is None:
            return rewritten
        return relax.const(np.asarray(result, order="C"), str(result.dtype))

    def _find_array(self, expr: Any) -> _Array | None:
        expr = ir.resolve_alias(expr, self.lookup_binding)
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return _constant_array(value) if isinstance(value, tvm.ir.Constant) else None


def _list_tensors(call: Any) -> list[Any]:
    """Return the arguments of a call that are no shapes."""
    return [argument for argument in call.args if not isinstance(argument, relax.ShapeExpr)]


# ---------------------------------------------------------------- rules


def _reshape(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    shape = ir.shape_of(call)
    return None if shape is None else arrays[0].reshape(shape)


def _permute(call: Any, arrays: Sequence[_Array]) -> _Array:
    axes = call.attrs.axes
    return arrays[0].transpose(None if axes is None else [int(axis) for axis in axes])


def _pad(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    if call.attrs.pad_mode != "constant":
        return None
    widths = np.array([int(width) for width in call.attrs.pad_width]).reshape(-1, 2)
    return np.pad(arrays[0], widths, constant_values=float(call.attrs.pad_value))


def _flip(call: Any, arrays: Sequence[_Array]) -> _Array:
    return np.flip(arrays[0], int(call.attrs.axis))


def _take(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, indices = arrays
    if call.attrs.axis is None or indices.dtype.kind not in "iu":
        return None
    if indices.size and not -1 < indices.min() <= indices.max() < data.shape[int(call.attrs.axis)]:
        return None
    return np.take(data, indices, int(call.attrs.axis))


def _astype(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    dtype = ir.dtype_of(call)
    return arrays[0].astype(dtype, copy=False) if dtype in _DTYPES else None


def _dequantize(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, *parameters = arrays
    if data.dtype.kind not in "iu" or call.attrs.out_dtype != "float32":
        return None
    scale, zero_point = (
        _along_axis(parameter, int(call.attrs.axis), data.ndim) for parameter in parameters
    )
    difference = data.astype("int32") - zero_point.astype("int32")
    return np.multiply(difference.astype("float32"), scale)


def _along_axis(parameter: _Array, axis: int, rank: int) -> _Array:
    """Return one number, or one for each index of an axis, in a shape that broadcasts over data of that rank."""
    if parameter.size == 1:
        # The axis means nothing here, and data of a low rank need not have it.
        return parameter.reshape(())
    shape = [1] * rank
    shape[axis] = -1
    return parameter.reshape(shape)


def _elementwise(function: Callable[..., _Array], *dtypes: str) -> _Rule:
    """Return the rule of a function of float32, and of some other dtypes."""

    def rule(_: Any, arrays: Sequence[_Array]) -> _Array | None:
        is_supported = {str(array.dtype) for array in arrays} <= {"float32", *dtypes}
        return function(*arrays) if is_supported else None

    return rule


def _sum(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    """Return a sum of integers, which is the same in any order."""
    axes, keepdims = call.attrs.axis, bool(call.attrs.keepdims)
    if arrays[0].dtype != np.int32 or axes is None:
        return None
    return np.asarray(arrays[0].sum(tuple(map(int, axes)), dtype=np.int32, keepdims=keepdims))


def _rsqrt(x: _Array) -> _Array:
    # TVM computes it like this, rounded twice.
    return np.float32(1) / np.sqrt(x)


def _matmul(_: Any, arrays: Sequence[_Array]) -> _Array | None:
    """Return a matrix product summed in the order of TVM's loop; BLAS libraries have other orders."""
    left, right = arrays
    if left.dtype != np.float32 or min(left.ndim, right.ndim) < 2 or left.shape[-1] > _MAX_TERMS:
        return None
    total = np.zeros((), np.float32)
    for term in range(left.shape[-1]):
        total = total + left[..., :, term, None] * right[..., None, term, :]
    return total


_DTYPES: Final = frozenset(
    (*(f"float{bits}" for bits in (16, 32, 64)), *(f"int{bits}" for bits in (8, 16, 32, 64)))
)
# Enough for the transforms of Winograd's algorithm, which have 3.
_MAX_TERMS: Final = 8

# Relax has the names of numpy for these.
_UFUNCS: Final = (np.add, np.subtract, np.divide, np.negative, np.sqrt)

_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("relax.reshape", "relax.expand_dims", "relax.squeeze"), _reshape),
    "relax.permute_dims": _permute,
    "relax.nn.pad": _pad,
    "relax.flip": _flip,
    "relax.take": _take,
    "relax.astype": _astype,
    "relax.dequantize": _dequantize,
    "relax.matmul": _matmul,
    **{f"relax.{function.__name__}": _elementwise(function) for function in _UFUNCS},
    "relax.multiply": _elementwise(np.multiply, "int32"),
    "relax.sum": _sum,
    "relax.rsqrt": _elementwise(_rsqrt),
}
