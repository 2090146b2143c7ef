"""Computation in float16 if the CPU has float16 arithmetic and the recipe asks for it, else float32."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.graph import ir
from tvmflow.graph.rewriter import MainRewriter

_FLOAT16: Final = "float16"
_FLOAT32: Final = "float32"

# ---------------------------------------------------------------- graphs

_PRODUCTS: Final = frozenset({*ir.CONVOLUTIONS, *ir.TRANSPOSED_CONVOLUTIONS})
_MATMUL: Final = "relax.matmul"
# Operators that compute in float16 if their data are float16 already.
_FOLLOWERS: Final = ir.operators(
    "add subtract multiply divide maximum minimum clip negative abs sigmoid tanh erf nn.relu",
    "nn.leakyrelu nn.relu6 nn.prelu nn.gelu nn.gelu_tanh nn.silu nn.layer_norm nn.pad flip",
    "reshape permute_dims concat split strided_slice squeeze expand_dims broadcast_to mean max min",
    *(f"nn.max_pool{n}d nn.avg_pool{n}d nn.adaptive_avg_pool{n}d" for n in (1, 2, 3)),
)


class Float16Caster(MainRewriter):
    """Lets convolutions and matmuls read and write float16, on CPUs with float16 arithmetic.

    Data are cast before the first convolution or matmul, and stay float16 through later operators that do not enlarge
    values much. All others compute float32. `promote_float16` decides which kernels accumulate in float16.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        # the float16 form of each tensor that has one
        self._to_float16 = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite one call."""
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if not self.depends_on_inputs(call) or not self._is_supported(name, call, rewritten):
            return rewritten
        operands = [self._float16_operand(arg) for arg in rewritten.args]
        result = self.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
        return self._to_float32(result)

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        """Rewrite one field of a tuple."""
        rewritten = super().visit_tuple_getitem_(item)
        source = self.resolve(rewritten.tuple_value)
        if source not in self._to_float16:
            return rewritten
        return self._to_float32(self.emit(relax.TupleGetItem(self._to_float16[source], item.index)))

    def _to_float32(self, result: Any) -> Any:
        """Emit the float32 form of a result: dead code unless something reads it."""
        if isinstance(result.ty, relax.TupleType):
            parts = (relax.TupleGetItem(result, n) for n in range(len(result.ty.fields)))
            wide = self.emit(relax.Tuple([self.cast(self.emit(p), _FLOAT32) for p in parts]))
        else:
            wide = self.cast(result, _FLOAT32)
        self._to_float16[wide] = result
        return wide

    def _float16_operand(self, operand: Any) -> Any:
        """Return the float16 form of a float32 operand, and other operands unchanged."""
        if fields := self.list_fields(operand):
            return relax.Tuple([self._float16_operand(field) for field in fields])
        if not ir.is_float32(operand):
            return operand
        source = self.resolve(operand)
        if isinstance(source, tvm.ir.Constant):
            return relax.const(source.value.numpy().astype(_FLOAT16), _FLOAT16)
        if source not in self._to_float16:
            self._to_float16[source] = self.cast(source, _FLOAT16)
        return self._to_float16[source]

    def _is_supported(self, name: str, call: Any, rewritten: Any) -> bool:
        operands = [each for arg in rewritten.args for each in self.list_fields(arg) or [arg]]
        tensors = [arg for arg in operands if isinstance(arg.ty, relax.TensorType)]
        if not all(map(ir.is_float32, tensors)) or not all(map(_fits, tensors)):
            return False
        if name in _PRODUCTS or name == _MATMUL:
            weights = call.args[1]
            is_matrix = name in _PRODUCTS or len(ir.shape_of(weights) or ()) == 2
            return is_matrix and self.flow.is_weight(weights)
        return name in _FOLLOWERS and any(self.resolve(arg) in self._to_float16 for arg in tensors)


def _fits(tensor: Any) -> bool:
    """Return whether float16 can hold a constant: no overflow, no denormal scalar; true for variables."""
    array, limits = ir.constant_array(tensor), np.finfo(_FLOAT16)
    values = np.abs([] if array is None else array)
    is_tiny = values.size == 1 and 0 < float(values.max()) < float(limits.tiny)
    return not is_tiny and bool(values.max(initial=0) <= limits.max)


# ---------------------------------------------------------------- kernels
# Values are promoted when they are loaded, and rounded when results are stored. Few CPUs have float16 arithmetic. On
# others, LLVM converts before and after each operation, for some CPUs one element at a time. For WebAssembly, LLVM 22
# does not terminate when it compiles comparisons of float16 vectors.

# The name of the block around all others of a kernel.
_ROOT: Final = "root"
_LARGEST: Final = 65504.0
_OPERATIONS: Final = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)
_SELECTIONS: Final = {ir.IF_THEN_ELSE, "prim.likely"}
_FLOAT16_CALLS: Final = {*_SELECTIONS, "tirx.fabs"}
# Their results are bits, or depend on the width of the type.
_FIXED_CALLS: Final = {"tirx.reinterpret", "tirx.call_extern", "tirx.call_llvm_pure_intrin"}


def promote_float16(mod: tvm.IRModule, *, adds_products: bool = False) -> tvm.IRModule:
    """Let kernels that compute in float16 use float32; moves and conversions of float16 stay.

    With `adds_products`, kernels stay in float16 if all their reductions are sums of products, minima or maxima.
    Functions in them, such as exponentials, are computed in float32.
    """

    def to_float32(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        if not computes_float16(kernel.body):
            return kernel
        reductions = [b for b in ir.find_nodes(kernel.body, SBlock) if b.init is not None]
        if not adds_products or not all(map(_is_float16_sum, reductions)):
            return kernel.with_body(_to_float32(kernel))
        rules = ((tvm.ir.Call, _promote_function), (tirx.Div, _invert_constant))
        return kernel.with_body(tvm_ffi.structural_map(kernel.body, rules))

    return ir.rewrite_kernels(mod, to_float32)


def _is_float16_sum(block: SBlock) -> bool:
    """Return whether a reduction adds products of different tensors, or is a minimum or maximum."""
    value = block.body.value if isinstance(block.body, tirx.BufferStore) else None
    if isinstance(value, tirx.Min | tirx.Max):
        return True
    product = value.b if isinstance(value, tirx.Add) else None
    if not isinstance(product, tirx.Mul):
        return False
    # a sum of squares may overflow float16
    factors = (ir.find_nodes(factor, tvm.ir.TensorLoad) for factor in (product.a, product.b))
    first, second = ({load.source for load in loads} for loads in factors)
    return first.isdisjoint(second)


def _promote_function(call: Any) -> Any:
    if not _is_float16(call) or ir.operator_name(call) in _FLOAT16_CALLS | _FIXED_CALLS:
        return call
    arguments = [tirx.Cast(_FLOAT32, arg) if _is_float16(arg) else arg for arg in call.args]
    wide = tvm.ir.Call(call.op, arguments, call.attrs, call.ty_args, ret_ty=_FLOAT32)
    return tirx.Cast(_FLOAT16, wide)


def _invert_constant(division: tirx.Div) -> Any:
    """Return a division of float16 by a constant as a multiplication: faster, but rounded once more."""
    divisor = division.b
    if not _is_float16(divisor) or not isinstance(divisor, tirx.FloatImm) or not divisor.value:
        return division
    return division.a * tirx.FloatImm(_FLOAT16, 1 / float(divisor.value))


def _is_float16(expr: Any) -> bool:
    return str(getattr(expr.ty, "dtype", "")) == _FLOAT16


def computes_float16(body: Any) -> bool:
    """Return whether a kernel computes with float16, not only selects values."""
    calls = {
        ir.operator_name(call)
        for call in ir.find_nodes(body, tvm.ir.Call)
        if any(map(_is_float16, call.args))
    } - _SELECTIONS
    computed = ir.find_nodes(body, *_OPERATIONS)
    is_computed = bool(calls) or any(_is_float16(operation.a) for operation in computed)
    has_names = any(_is_float16(let.var) for let in ir.find_nodes(body, tirx.Let, tirx.Bind))
    return is_computed and calls.isdisjoint(_FIXED_CALLS) and not has_names


def _to_float32(function: tirx.PrimFunc) -> Any:
    """Return the body of a kernel that computes with float32."""
    body = function.body
    inner = [buffer for block in ir.find_nodes(body, SBlock) for buffer in block.alloc_buffers]
    inner += [allocation.buffer for allocation in ir.find_nodes(body, tirx.AllocBuffer)]
    # accumulators are read again before the last store
    loaded = {load.source for load in ir.find_nodes(body, tvm.ir.TensorLoad)}
    stored = {store.buffer for store in ir.find_nodes(body, tirx.BufferStore)}
    has_root = isinstance(body, SBlockRealize) and body.block.name_hint == _ROOT
    sums = [param for param in function.params if has_root and param in loaded & stored]
    wide = {
        old: tirx.decl_buffer(old.ty.shape, _FLOAT32, f"{old.name}_wide", scope=old.scope())
        for old in (*inner, *sums)
        if _has_float16(old)
    }
    results = {param: wide[param] for param in sums if param in wide}
    body = tvm_ffi.structural_map(ir.replace_variables(body, wide), _RULES)
    if not results:
        return body
    root = body.block
    rounding = [_make_rounding(result, own) for result, own in results.items()]
    buffers = [*root.alloc_buffers, *results.values()]
    block = ir.with_fields(root, body=tirx.SeqStmt([root.body, *rounding]), alloc_buffers=buffers)
    return ir.with_fields(body, block=block)


def _has_float16(buffer: Any) -> bool:
    return isinstance(buffer.ty, tirx.BufferType) and str(buffer.ty.dtype.dtype) == _FLOAT16


def _make_rounding(result: Any, wide: Any) -> Any:
    """Return the loops that round a buffer to a result of the kernel."""
    shape = list(result.ty.shape)
    loops = [tirx.Var(f"i{n}", extent.ty.dtype) for n, extent in enumerate(shape)]
    axes = [tirx.Var(f"v{n}", extent.ty.dtype) for n, extent in enumerate(shape)]
    points = [tvm.ir.Range.from_min_extent(axis, 1) for axis in axes]
    block = SBlock(
        [tirx.IterVar(tvm.ir.Range(0, n), axis, 0) for n, axis in zip(shape, axes, strict=True)],
        [tirx.BufferRegion(wide, points)],
        [tirx.BufferRegion(result, points)],
        f"{result.name}_rounded",
        tirx.BufferStore(result, tirx.Cast(_FLOAT16, tirx.BufferLoad(wide, axes)), axes),
    )
    nest: Any = SBlockRealize(loops, True, block)
    for loop, extent in reversed(list(zip(loops, shape, strict=True))):
        nest = tirx.For(loop, 0, extent, tirx.ForKind.SERIAL, nest)
    return nest


def _promote_load(load: Any) -> Any:
    if _has_float16(load.source):
        return tirx.Cast(_FLOAT32, load)
    return tirx.BufferLoad(load.source, list(load.indices)) if _is_float16(load) else load


def _promote_cast(cast: tirx.Cast) -> Any:
    # the conversion to float16 stays, because it rounds and may overflow, whatever the dtype of the stored result
    if _is_float16(cast):
        return tirx.Cast(_FLOAT32, cast)
    return cast.value if cast.value.ty.dtype == cast.ty.dtype else cast


def _promote_call(call: Any) -> Any:
    if not _is_float16(call):
        return call
    return tvm.ir.Call(call.op, call.args, call.attrs, call.ty_args, ret_ty=_FLOAT32)


def _promote_store(store: tirx.BufferStore) -> Any:
    dtype = str(store.buffer.ty.dtype.dtype)
    if dtype != _FLOAT16 or _is_float16(store.value):
        return store
    value = store.value
    # data that are only moved are not converted
    is_moved = isinstance(value, tirx.Cast) and _is_float16(value.value)
    return ir.with_fields(store, value=value.value if is_moved else tirx.Cast(_FLOAT16, value))


def _promote_limits(block: SBlock) -> SBlock:
    """Return a block whose minimum or maximum begins with float32's limit, which TVM recognizes."""
    init, limit = block.init, None
    if isinstance(init, tirx.BufferStore) and isinstance(init.value, tirx.FloatImm):
        limits = {-_LARGEST: tirx.min_value(_FLOAT32), _LARGEST: tirx.max_value(_FLOAT32)}
        limit = limits.get(float(init.value.value))
    if limit is None or _has_float16(init.buffer):
        return block
    return ir.with_fields(block, init=tirx.BufferStore(init.buffer, limit, list(init.indices)))


def _promote_constant(node: tirx.FloatImm) -> tirx.FloatImm:
    return tirx.FloatImm(_FLOAT32, node.value) if _is_float16(node) else node


_RULES: Final = (
    (tvm.ir.TensorLoad, _promote_load),
    (tirx.FloatImm, _promote_constant),
    (tirx.Cast, _promote_cast),
    (_OPERATIONS, lambda operation: type(operation)(operation.a, operation.b)),
    (tirx.Select, lambda node: tirx.Select(node.condition, node.true_value, node.false_value)),
    (tvm.ir.Call, _promote_call),
    (tirx.BufferStore, _promote_store),
    (SBlock, _promote_limits),
)
