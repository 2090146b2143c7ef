"""Arithmetic on weights and constants with numpy: it needs no kernels, and the compiler takes long over those.

Each rule gives the bits that TVM's own operator gives on a CPU without fused multiply-add:
numbers are moved, or rounded once, as IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes._function import origin_of, rewritten, shape_of, variables_of

_Array = np.ndarray[Any, Any]
_Rule = Callable[[Any, Sequence[_Array]], _Array | None]


def settle_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with what `main` computes of constants alone as constants, as far as there are rules for it."""
    return relax.transform.CanonicalizeBindings()(rewritten(mod, _Settler(mod)))


def settled(function: relax.Function, weights: Sequence[_Array]) -> list[_Array] | None:
    """What a function of one tuple of weights returns, a tuple as well; None when it does what has no rule here."""
    (given,) = function.params
    bindings = [each for block in function.body.blocks for each in block.bindings]
    last = {var: place for place, each in enumerate(bindings) for var in variables_of(each.value)}
    last.update(dict.fromkeys(variables_of(function.body.body), len(bindings)))
    values: dict[Any, Any] = {given: [_plain(each) for each in weights]}
    for place, binding in enumerate(bindings):
        read = variables_of(binding.value)
        if (value := _value(binding.value, values)) is None:
            return None
        values[binding.var] = value
        # large models have no room for what nobody reads any more
        for var in read:
            if last[var] == place:
                values.pop(var, None)
    result = _value(function.body.body, values)
    is_known = isinstance(result, list) and all(isinstance(each, np.ndarray) for each in result)
    return [np.asarray(each, order="C") for each in result] if is_known else None


def _value(expr: Any, values: Mapping[Any, Any]) -> Any:
    """An array, or a list of them for a tuple; None where there is no rule."""
    if isinstance(expr, relax.Var):
        return values.get(expr)
    if isinstance(expr, tvm.ir.Constant):
        return _constant(expr)
    if isinstance(expr, relax.Tuple):
        fields = [_value(each, values) for each in expr.fields]
        return None if any(each is None for each in fields) else fields
    if isinstance(expr, relax.TupleGetItem):
        return _value(expr.tuple_value, values)[expr.index]
    if not isinstance(expr, relax.Call):
        return None
    return _result(expr, [_value(each, values) for each in _tensors(expr)])


def _constant(expr: tvm.ir.Constant) -> _Array | None:
    """The array; None for a plain number, such as an axis, which is a constant of another kind."""
    return _plain(expr.value.numpy()) if isinstance(expr.value, tvm.runtime.Tensor) else None


def _plain(array: _Array) -> _Array | None:
    """An array of numbers that numpy knows by itself; None for bfloat16 and its like."""
    return array if array.dtype.kind in "fiub" else None


def _result(call: Any, arrays: Sequence[Any]) -> _Array | None:
    rule = _RULES.get(str(getattr(call.op, "name", "")))
    if rule is None or not arrays or not all(isinstance(each, np.ndarray) for each in arrays):
        return None
    # infinities and NaN are results like others
    with np.errstate(all="ignore"):
        result = rule(call, arrays)
    # of single numbers numpy makes what is no array
    return None if result is None else np.asarray(result)


@mutator
class _Settler(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        found = [self._array(each) for each in _tensors(made)]
        result = _result(call, found)
        if result is None:
            return made
        return relax.const(np.asarray(result, order="C"), str(result.dtype))

    def _array(self, expr: Any) -> _Array | None:
        expr = origin_of(expr, self.lookup_binding)
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return _constant(value) if isinstance(value, tvm.ir.Constant) else None


def _tensors(call: Any) -> list[Any]:
    """The arguments of a call that are no shapes."""
    return [each for each in call.args if not isinstance(each, relax.ShapeExpr)]


# ---------------------------------------------------------------- rules


def _reshape(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    shape = shape_of(call)
    return None if shape is None else arrays[0].reshape(shape)


def _permute(call: Any, arrays: Sequence[_Array]) -> _Array:
    axes = call.attrs.axes
    return arrays[0].transpose(None if axes is None else [int(axis) for axis in axes])


def _pad(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    if call.attrs.pad_mode != "constant":
        return None
    widths = np.array([int(each) for each in call.attrs.pad_width]).reshape(-1, 2)
    return np.pad(arrays[0], widths, constant_values=float(call.attrs.pad_value))


def _flip(call: Any, arrays: Sequence[_Array]) -> _Array:
    return np.flip(arrays[0], int(call.attrs.axis))


def _astype(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    dtype = str(call.ty.dtype.dtype)
    return arrays[0].astype(dtype, copy=False) if dtype in _DTYPES else None


def _dequantize(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, *parts = arrays
    if data.dtype.kind not in "iu" or call.attrs.out_dtype != "float32":
        return None
    along = [1] * data.ndim
    along[int(call.attrs.axis)] = -1
    scale, zero = (part.reshape(along if part.size > 1 else ()) for part in parts)
    whole = data.astype("int32") - zero.astype("int32")
    return np.multiply(whole.astype("float32"), scale)


def _elementwise(function: Callable[..., _Array]) -> _Rule:
    def rule(_: Any, arrays: Sequence[_Array]) -> _Array | None:
        is_float = all(each.dtype == np.float32 for each in arrays)
        return function(*arrays) if is_float else None

    return rule


def _rsqrt(x: _Array) -> _Array:
    # as TVM computes it: rounded twice
    return np.float32(1) / np.sqrt(x)


def _matmul(_: Any, arrays: Sequence[_Array]) -> _Array | None:
    """The sum in the order of its terms, as TVM's loop makes it; a library for it would have orders of its own."""
    left, right = arrays
    if left.dtype != np.float32 or min(left.ndim, right.ndim) < 2 or left.shape[-1] > _MOST_TERMS:
        return None
    total = np.zeros((), np.float32)
    for term in range(left.shape[-1]):
        total = total + left[..., :, term, None] * right[..., None, term, :]
    return total


_DTYPES: Final = frozenset(
    (*(f"float{bits}" for bits in (16, 32, 64)), *(f"int{bits}" for bits in (8, 16, 32, 64)))
)
# The transforms of Winograd's algorithm have 3 or so.
_MOST_TERMS: Final = 8

_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("relax.reshape", "relax.expand_dims", "relax.squeeze"), _reshape),
    "relax.permute_dims": _permute,
    "relax.nn.pad": _pad,
    "relax.flip": _flip,
    "relax.astype": _astype,
    "relax.dequantize": _dequantize,
    "relax.matmul": _matmul,
    "relax.add": _elementwise(np.add),
    "relax.subtract": _elementwise(np.subtract),
    "relax.multiply": _elementwise(np.multiply),
    "relax.divide": _elementwise(np.divide),
    "relax.negative": _elementwise(np.negative),
    "relax.sqrt": _elementwise(np.sqrt),
    "relax.rsqrt": _elementwise(_rsqrt),
}
