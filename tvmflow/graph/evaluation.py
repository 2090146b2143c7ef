"""Evaluation of constants and weights by numpy, which is faster than compiling kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import tvm
from tvm import relax

from tvmflow.graph import ir
from tvmflow.graph.rewriter import MainRewriter, rewrite_main

# A result with more elements is folded only if it is no larger than its operands: a broadcast, for example, stays.
_MAX_GROWN_ELEMENTS: Final = 1 << 16


def evaluate_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Fold calls of operators with a rule whose operands are all constants."""
    return relax.transform.CanonicalizeBindings()(rewrite_main(mod, _ConstantEvaluator))


def evaluate_function(function: relax.Function, weights: Sequence[_Array]) -> list[_Array] | None:
    """Evaluate all results of a function of a tuple of weights; None if an operator has no rule."""
    fields = evaluate_fields(function, weights, range(len(weights)))
    return None if fields is None else list(fields.values())


def evaluate_fields(
    function: relax.Function, weights: Sequence[_Array], changed: Collection[int]
) -> dict[int, _Array] | None:
    """Evaluate the results that depend on the weights with the indices `changed`.

    If all weights changed, all results are evaluated. Return the results by index; None if an operator has no rule.
    """
    (parameter,) = function.params
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    result = _find_result(function, bindings)
    if result.same_as(parameter):
        # TVM returns the parameter itself if there is nothing to compute
        return {position: np.asarray(weights[position], order="C") for position in changed}
    reads = [_list_read(binding.value) for binding in bindings]
    if not isinstance(result, relax.Tuple):
        return None
    wanted = {position: _list_read(field) for position, field in enumerate(result.fields)}
    if len(changed) < len(weights):
        dependent: set[Any] = set()
        for binding, read in zip(bindings, reads, strict=True):
            value = binding.value
            is_field = isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(
                parameter
            )
            if value.index in changed if is_field else not dependent.isdisjoint(read):
                dependent.add(binding.var)
        wanted = {n: read for n, read in wanted.items() if not dependent.isdisjoint(read)}
    last_uses = {var: len(bindings) for read in wanted.values() for var in read}
    for step in reversed(range(len(bindings))):
        if bindings[step].var in last_uses:
            for var in reads[step]:
                last_uses.setdefault(var, step)
    values: dict[Any, Any] = {parameter: [_supported_array(array) for array in weights]}
    for step, binding in enumerate(bindings):
        if binding.var not in last_uses or isinstance(binding.var.ty, relax.ShapeType):
            continue
        if (value := _evaluate(binding.value, values)) is None:
            return None
        values[binding.var] = value
        # free values after their last use, because all values of a large model do not fit into memory together
        for var in reads[step]:
            if last_uses[var] == step:
                values.pop(var, None)
    fields = {position: _evaluate(result.fields[position], values) for position in wanted}
    if not all(isinstance(array, np.ndarray) for array in fields.values()):
        return None
    return {position: np.asarray(array, order="C") for position, array in fields.items()}


def _find_result(function: relax.Function, bindings: Sequence[Any]) -> Any:
    """Return the result of a function; if that is the last bound variable, the value bound to it."""
    result = function.body.body
    return bindings[-1].value if bindings and result.same_as(bindings[-1].var) else result


def _list_read(expr: Any) -> list[Any]:
    """Return the variables that an expression reads, without symbolic sizes in the type of a tuple."""
    if isinstance(expr, relax.TupleGetItem) and isinstance(expr.tuple_value, relax.Var):
        return [expr.tuple_value]
    return ir.list_variables(expr)


def evaluate_weight(expr: Any, flow: ir.DataFlow, weights: Mapping[Any, _Array]) -> _Array | None:
    """Evaluate a constant, or a variable that depends only on weights; None if an operator has no rule."""
    values: dict[Any, Any] = dict(weights)
    pending = [expr]
    while pending:
        var = pending[-1]
        value = flow.values.get(var)
        if value is None or var in values:
            pending.pop()
            continue
        missing = [other for other in ir.list_variables(value) if other not in values]
        if missing:
            pending += missing
            continue
        values[var] = _evaluate(value, values)
    result = _evaluate(expr, values)
    return result if isinstance(result, np.ndarray) else None


def _evaluate(expr: Any, values: Mapping[Any, Any]) -> Any:
    """Return an array, or a list of arrays for a tuple; None if there is no rule."""
    if isinstance(expr, relax.Var):
        return values.get(expr)
    if isinstance(expr, tvm.ir.Constant):
        return _supported_array(ir.constant_array(expr))
    if isinstance(expr, relax.Tuple):
        fields = [_evaluate(field, values) for field in expr.fields]
        return None if any(field is None for field in fields) else fields
    if isinstance(expr, relax.TupleGetItem):
        return _evaluate(expr.tuple_value, values)[expr.index]
    if not isinstance(expr, relax.Call):
        return None
    arrays = [_evaluate(argument, values) for argument in _list_tensors(expr)]
    return _apply_rule(expr, _flatten(arrays))


def _supported_array(array: _Array | None) -> _Array | None:
    """Return an array; None for dtypes that numpy lacks, such as bfloat16."""
    return array if array is not None and array.dtype.kind in "fiub" else None


def _apply_rule(call: Any, arrays: Sequence[Any]) -> _Array | None:
    rule = RULES.get(ir.operator_name(call))
    if rule is None or not all(isinstance(array, np.ndarray) for array in arrays):
        return None
    # Infinities and NaN are valid results, so numpy must not warn of them.
    with np.errstate(all="ignore"):
        result = rule(call, arrays)
    # numpy returns scalars for operations on arrays of rank 0.
    return None if result is None else np.asarray(result)


class _ConstantEvaluator(MainRewriter):
    """Replaces calls whose tensors are all constants."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        arrays = _flatten([self._find_value(argument) for argument in _list_tensors(rewritten)])
        result = _apply_rule(call, arrays)
        if result is None or result.size > max(_MAX_GROWN_ELEMENTS, sum(a.size for a in arrays)):
            return rewritten
        return relax.const(np.asarray(result, order="C"), str(result.dtype))

    def _find_value(self, expr: Any) -> _Array | list[Any] | None:
        fields = self.list_fields(expr)
        array = ir.constant_array(self.find_value(expr))
        return [*map(self._find_value, fields)] or _supported_array(array)


def _list_tensors(call: Any) -> list[Any]:
    """Return the arguments of a call that are tensors or tuples of tensors."""

    def is_tensor(kind: Any) -> bool:
        if isinstance(kind, relax.TupleType):
            return len(kind.fields) > 0 and all(map(is_tensor, kind.fields))
        return isinstance(kind, relax.TensorType)

    return [argument for argument in call.args if is_tensor(argument.ty)]


def _flatten(values: Sequence[Any]) -> list[Any]:
    """Return the values with nested lists replaced by their items."""
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


# ---------------------------------------------------------------- rules that move values
# Each rule computes the same bits as TVM's operator on a CPU without fused multiply-add: it moves values, or rounds
# them once as IEEE 754 defines. It returns None for calls for which it cannot guarantee that.

_Array = np.ndarray[Any, Any]
_Rule = Callable[[Any, Sequence[_Array]], _Array | None]


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


def _strided_slice(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    steps = (_integer(step) for arg in call.args[4:] for step in getattr(arg, "fields", ()))
    if any(step is not None and step < 1 for step in steps):
        return None
    result = read_slice(call, arrays[0])
    return result if result is not None and result.shape == ir.shape_of(call) else None


def read_slice(call: Any, array: _Array) -> _Array | None:
    """Return a `strided_slice` of an array; None if its limits are unknown."""
    columns = [[_integer(field) for field in getattr(arg, "fields", ())] for arg in call.args[1:]]
    axes, begins, ends, *strides = columns
    steps = strides[0] if strides else [1] * len(axes)
    if not len(axes) == len(begins) == len(ends) == len(steps):
        return None
    window: list[slice] = [slice(None)] * array.ndim
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        if axis is None or None in (begin, end, step):
            return None
        window[axis] = slice(begin, end, step)
    return np.asarray(array[tuple(window)])


def read_split(call: Any, array: _Array, index: int) -> _Array:
    """Return one part of an array, divided as by a call of `split`."""
    sections, axis = call.attrs.indices_or_sections, int(call.attrs.axis)
    if isinstance(sections, int | tvm.tirx.IntImm):
        # as in TVM, the last section may be shorter
        size = -(-array.shape[axis] // int(sections))
        sections = range(size, array.shape[axis], size)
    return np.asarray(np.split(array, list(map(int, sections)), axis)[index])


def list_positions(
    read: Callable[[_Array], _Array | None], shape: Sequence[int], axis: int
) -> _Array | None:
    """Return the positions along an axis that `read` selects from a tensor of a shape; None if it fails."""
    line = np.arange(shape[axis]).reshape([-1 if n == axis else 1 for n in range(len(shape))])
    positions = read(np.broadcast_to(line, shape))
    if positions is None or not positions.size:
        return None
    window = tuple(slice(None) if n == axis else 0 for n in range(positions.ndim))
    return np.asarray(positions[window])


def _take(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, indices = arrays
    mode, axis = str(call.attrs.mode), call.attrs.axis
    modes: dict[str, Literal["wrap", "clip"]] = {"wrap": "wrap", "clip": "clip"}
    if axis is None or (mode not in modes and not _are_inside(indices, data.shape[int(axis)])):
        return None
    return np.take(data, indices, int(axis), mode=modes.get(mode, "raise"))


def _gather_elements(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, indices = arrays
    axis = int(call.attrs.axis)
    # numpy needs equal sizes along all other axes; TVM does not
    sizes = [list(tensor.shape) for tensor in arrays]
    size, _ = (shape.pop(axis) for shape in sizes)
    is_inside = sizes[0] == sizes[1] and _are_inside(indices, size)
    return np.take_along_axis(data, indices, axis) if is_inside else None


def _are_inside(indices: _Array, size: int) -> bool:
    return bool(((indices >= 0) & (indices < size)).all())


def _broadcast_to(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    shape = ir.shape_of(call)
    return None if shape is None else np.broadcast_to(arrays[0], shape)


def _where(_: Any, arrays: Sequence[_Array]) -> _Array | None:
    condition, then, otherwise = arrays
    return np.where(condition, then, otherwise) if then.dtype == otherwise.dtype else None


def _shape_to_tensor(call: Any, _: Sequence[_Array]) -> _Array | None:
    values = call.args[0].ty.values
    if values is None or not all(isinstance(value, tvm.tirx.IntImm) for value in values):
        return None
    return np.array([int(value) for value in values], np.int64)


def _integer(expr: Any) -> int | None:
    value = getattr(expr, "value", expr)
    return int(value) if isinstance(value, int | tvm.tirx.IntImm) else None


# ---------------------------------------------------------------- rules that compute values


def _astype(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    dtype = ir.dtype_of(call)
    return arrays[0].astype(dtype, copy=False) if dtype in _DTYPES else None


def _view(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    """Reinterpret the bits as another dtype (bitcast); only the last axis may change its size."""
    shape, dtype = ir.shape_of(call), np.dtype(ir.dtype_of(call))
    array = np.ascontiguousarray(arrays[0])
    if shape is None or not array.ndim or array.nbytes != dtype.itemsize * math.prod(shape):
        return None
    if array.dtype.itemsize == dtype.itemsize or shape[:-1] == array.shape[:-1]:
        return array.view(dtype).reshape(shape)
    return None


def _dequantize(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    data, *parameters = arrays
    if data.dtype.kind not in "iu" or call.attrs.out_dtype != "float32":
        return None

    def spread(parameter: _Array) -> _Array:
        # a scalar parameter has no axis: the attribute `axis` may exceed the rank of the data
        shape = [1] * data.ndim if parameter.size > 1 else []
        if shape:
            shape[int(call.attrs.axis)] = -1
        return parameter.reshape(shape)

    scale, zero_point = map(spread, parameters)
    difference = data.astype("int32") - zero_point.astype("int32")
    return np.multiply(difference.astype("float32"), scale)


def _elementwise(function: Callable[..., _Array], dtypes: str = "float32") -> _Rule:
    """Return the rule of an elementwise function, for operands of one dtype out of `dtypes`."""

    def rule(_: Any, arrays: Sequence[_Array]) -> _Array | None:
        (dtype, *others) = {str(array.dtype) for array in arrays}
        return function(*arrays) if dtype in dtypes.split() and not others else None

    return rule


def _sum(call: Any, arrays: Sequence[_Array]) -> _Array | None:
    """Return a sum of int32; None for other dtypes, whose sum depends on the order of additions."""
    axes, keepdims = call.attrs.axis, bool(call.attrs.keepdims)
    if arrays[0].dtype != np.int32 or axes is None:
        return None
    return np.asarray(arrays[0].sum(tuple(map(int, axes)), dtype=np.int32, keepdims=keepdims))


def _matmul(_: Any, arrays: Sequence[_Array]) -> _Array | None:
    """Return a float32 matmul, accumulated in the order of TVM's loop and not as BLAS libraries do."""
    left, right = arrays
    if left.dtype != np.float32 or min(left.ndim, right.ndim) < 2 or left.shape[-1] > _MAX_TERMS:
        return None
    total = np.zeros((), np.float32)
    for term in range(left.shape[-1]):
        total = total + left[..., :, term, None] * right[..., None, term, :]
    return total


_DTYPES: Final = "float16 float32 float64 int8 int16 int32 int64 uint16 uint32".split()
_INTEGERS: Final = "int8 int16 int32 int64 uint32"
# The depth limit of matmuls that are evaluated: enough for Winograd transforms, which have 3 terms.
_MAX_TERMS: Final = 8

# The Relax operators have the same names as these numpy functions.
_FLOAT_FUNCTIONS: Final = (np.divide, np.sqrt, np.isnan)
_BIT_FUNCTIONS: Final = (np.bitwise_and, np.bitwise_or, np.right_shift)
_EXACT_FUNCTIONS: Final = (np.add, np.subtract, np.multiply, np.negative)
_COMPARISONS: Final = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
_LOGICAL_FUNCTIONS: Final = (np.logical_and, np.logical_or, np.logical_not)

RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("relax.reshape", "relax.expand_dims", "relax.squeeze"), _reshape),
    "relax.permute_dims": _permute,
    "relax.nn.pad": _pad,
    "relax.flip": lambda call, arrays: np.flip(arrays[0], int(call.attrs.axis)),
    "relax.astype": _astype,
    "relax.dequantize": _dequantize,
    "relax.matmul": _matmul,
    "relax.concat": lambda call, arrays: np.concatenate(arrays, int(call.attrs.axis)),
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.gather_elements": _gather_elements,
    "relax.broadcast_to": _broadcast_to,
    "relax.where": _where,
    "relax.shape_to_tensor": _shape_to_tensor,
    **{f"relax.{f.__name__}": _elementwise(f) for f in _FLOAT_FUNCTIONS},
    **{
        f"relax.{f.__name__}": _elementwise(f, f"float32 {_INTEGERS}")
        for f in (*_EXACT_FUNCTIONS, *_COMPARISONS)
    },
    **{f"relax.{f.__name__}": _elementwise(f, "bool") for f in _LOGICAL_FUNCTIONS},
    **{f"relax.{f.__name__}": _elementwise(f, "uint32") for f in _BIT_FUNCTIONS},
    "relax.memory.view": _view,
    "relax.sum": _sum,
    # like TVM, which rounds twice: the square root and the quotient
    "relax.rsqrt": _elementwise(lambda x: np.float32(1) / np.sqrt(x)),
}
"""Operator -> its rule, which computes a call from arrays, or returns None for unsupported calls."""
