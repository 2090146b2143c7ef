"""Code generation: TVM's pipeline, with further passes for CPUs, compiles kernels and lowered models.

TVM 0.27 allocates every buffer of a kernel with its runtime's allocator, even a tile's accumulators, once per tile.
Here small buffers stay on the stack, and LLVM promotes them to registers.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.s_tir import pipeline as s_tir_pipeline
from tvm.tirx import compilation_pipeline

from tvmflow.compiler import dynamic_tiles, vector_code
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.contraction.machine import converts_float16, is_cpu
from tvmflow.compiler.tail_vectors import mask_last_vectors, overlap_last_vectors
from tvmflow.graph import ir
from tvmflow.graph.counts import cut_outputs

# LowerTVMBuiltin leaves buffers with this annotation to the code generator (src/tirx/transform).
STAYS_ON_STACK: Final = "disable_lower_builtin"


# ---------------------------------------------------------------- stack lets
# Variables of let expressions become buffers on the stack. TVM's code generator simplifies the value of every let with
# the values of all its variables substituted (apache-tvm 0.27). So the time doubles with each let that another let
# reads twice: `log` of `log` took 11 s to compile. Loads of buffers are not substituted, and LLVM makes them registers.


@ir.node_pass(tirx.BufferStore, lambda function: bool(ir.find_nodes(function.body, tirx.Let)))
def keep_lets_on_stack(store: tirx.BufferStore) -> tirx.Stmt:
    """Store the values of lets in buffers of one element before the store that reads them."""
    lets = _Lets(store.value)
    value = lets.take_out(store.value)
    last = tirx.BufferStore(store.buffer, value, store.indices)
    return tirx.SeqStmt([*lets.stores, last]) if lets.stores else store


class _Lets:
    """Collects the stores of lets, in topological order."""

    def __init__(self, value: Any) -> None:
        self.stores: list[tirx.Stmt] = []
        self._loads: dict[Any, Any] = {}
        # These are let expressions in conditional expressions: their values are computed only if the condition is true.
        self._conditional = {
            let.var
            for call in ir.find_nodes(value, tvm.ir.Call)
            if ir.operator_name(call) == ir.IF_THEN_ELSE
            for branch in call.args[1:]
            for let in ir.find_nodes(branch, tirx.Let)
        }

    def take_out(self, expr: Any) -> Any:
        """Return an expression without lets that are always evaluated."""
        callbacks = ((tirx.Let, self._replace), (tirx.Var, self._load))
        return tvm_ffi.structural_map(expr, callbacks, order="pre")

    def _replace(self, let: Any) -> Any:
        while isinstance(let, tirx.Let) and let.var not in self._conditional:
            buffer = tirx.decl_buffer((1,), let.value.ty.dtype, let.var.name, scope="local")
            store = tirx.BufferStore(buffer, self.take_out(let.value), [0])
            self.stores += [tirx.AllocBuffer(buffer), store]
            self._loads[let.var] = tirx.BufferLoad(buffer, [0])
            let = let.body
        return self._load(let)

    def _load(self, expr: Any) -> Any:
        return self._loads.get(expr, expr) if isinstance(expr, tirx.Var) else expr


@ir.node_pass(tirx.Bind, lambda function: any(map(ir.is_size, function.params)))
def keep_dynamic_indices_on_stack(bind: tirx.Bind) -> Any:
    """Store products and quotients of dynamic sizes in buffers, so that TVM does not expand them."""
    stores: list[Any] = []

    def store(value: Any) -> Any:
        buffer = tirx.decl_buffer((1,), value.ty.dtype, bind.var.name, scope="local")
        on_stack = {STAYS_ON_STACK: tirx.const(True, "bool")}
        stores.append(tirx.AllocBuffer(buffer, annotations=on_stack))
        stores.append(tirx.BufferStore(buffer, value, [0]))
        return tirx.BufferLoad(buffer, [0])

    def take_out(value: Any) -> Any:
        is_product = isinstance(value, tirx.Mul)
        if isinstance(value, tirx.Add | tirx.Sub) or (
            is_product and isinstance(value.b, tirx.IntImm)
        ):
            return type(value)(take_out(value.a), take_out(value.b))
        if is_product or isinstance(value, tirx.FloorDiv | tirx.FloorMod | tvm.ir.Call):
            return store(value)
        return value

    if str(bind.var.ty.dtype) not in dynamic_tiles.SIZE_TYPES:
        return bind
    value = take_out(bind.value)
    return tirx.SeqStmt([*stores, tirx.Bind(bind.var, value)]) if stores else bind


# ---------------------------------------------------------------- float16 conversions
# Conversions of float16 by integer operations, for CPUs without instructions for them. LLVM itself would call a
# function for each element, and does not terminate for some vectors of WebAssembly (LLVM 22).

_FLOAT16: Final = "float16"
_FLOAT32: Final = "float32"
_BITS: Final = "int32"

# float16 has a sign bit, 5 exponent bits and 10 mantissa bits; float32 has 8 exponent bits and 23 mantissa bits.
_SIGN: Final = 0x8000
_MAGNITUDE: Final = 0x7FFF
_SMALLEST_NORMAL: Final = 0x0400
_INFINITY: Final = 0x7C00
_NAN: Final = 0x7E00
_SHIFT: Final = 23 - 10
# The differences of the exponent biases of float32 and float16, as float32 bits: for finite values, and for infinity.
_REBIAS: Final = (127 - 15) << 23
_REBIAS_INFINITY: Final = (255 - 31) << 23
# The step between subnormal float16 values, and a float32 value with the same step to the next value.
_STEP: Final = 2.0**-24
_WITH_STEP: Final = 0.5
_WITH_STEP_BITS: Final = 0x3F000000
_FLOAT32_MAGNITUDE: Final = 0x7FFFFFFF
_FLOAT32_INFINITY: Final = 0x7F800000
_FLOAT32_SMALLEST_NORMAL: Final = (_SMALLEST_NORMAL << _SHIFT) + _REBIAS


def _lacks_conversions(function: tirx.PrimFunc) -> bool:
    target = function.attrs.get("target")
    return target is not None and not converts_float16(target)


@ir.node_pass(tirx.Cast, _lacks_conversions)
def expand_float16_conversions(cast: tirx.Cast) -> Any:
    """Convert float16 by integer operations where a CPU has no instruction for it."""
    source, target = str(cast.value.ty.dtype), str(cast.ty.dtype)
    if source == target or "float64" in (source, target):
        # unchanged, because a conversion via float32 would round twice
        return cast
    if source == _FLOAT16:
        wide = to_float32(cast.value)
        return wide if target == _FLOAT32 else tirx.Cast(target, wide)
    if target == _FLOAT16:
        return to_float16(cast.value if source == _FLOAT32 else tirx.Cast(_FLOAT32, cast.value))
    return cast


def to_float32(value: Any) -> Any:
    """Return the float32 value that equals a float16 value."""

    def magnitude(bits: Any) -> Any:
        bias = tirx.Select(bits < _INFINITY, tirx.const(_REBIAS, _BITS), _REBIAS_INFINITY)
        normal = tirx.reinterpret(_FLOAT32, (bits << _SHIFT) + bias)
        # It is computed from integers, because some CPUs flush subnormal operands to 0.
        small = tirx.Cast(_FLOAT32, bits) * tirx.const(_STEP, _FLOAT32)
        return tirx.Select(bits < _SMALLEST_NORMAL, small, normal)

    def signed(bits: Any) -> Any:
        absolute = ir.let(bits & _MAGNITUDE, magnitude)
        return tirx.reinterpret(_FLOAT32, tirx.reinterpret(_BITS, absolute) | (bits & _SIGN) << 16)

    return ir.let(tirx.Cast(_BITS, tirx.reinterpret("uint16", value)), signed)


def to_float16(value: Any) -> Any:
    """Return the float16 value nearest to a float32 value, ties to even."""

    def magnitude(bits: Any) -> Any:
        half = (1 << _SHIFT - 1) - 1
        rounded = (bits - _REBIAS + half + (bits >> _SHIFT & 1)) >> _SHIFT
        # the addition rounds to a multiple of the step
        steps = tirx.reinterpret(_FLOAT32, bits) + tirx.const(_WITH_STEP, _FLOAT32)
        small = tirx.reinterpret(_BITS, steps) - _WITH_STEP_BITS
        finite = tirx.Select(
            bits < _FLOAT32_SMALLEST_NORMAL, small, tirx.min(rounded, tirx.const(_INFINITY, _BITS))
        )
        return tirx.Select(bits > _FLOAT32_INFINITY, tirx.const(_NAN, _BITS), finite)

    def signed(bits: Any) -> Any:
        absolute = ir.let(bits & _FLOAT32_MAGNITUDE, magnitude)
        return tirx.reinterpret(_FLOAT16, tirx.Cast("uint16", bits >> 16 & _SIGN | absolute))

    return ir.let(tirx.reinterpret(_BITS, value), signed)


_CPU_PIPELINE: Final = "tvmflow_cpu"

# Groups are compiled in parallel: this many suffice for many cores, and each costs 20 ms.
_MAX_GROUPS: Final = 16

# Some C libraries give threads a stack of only 128 KiB, and the frames of nested parallel loops share it.
_MAX_STACK_BYTES: Final = 4096


def compile_model(mod: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a lowered model: its kernels, and `main` for TVM's virtual machine."""
    mod = compile_c_sources(cut_outputs(mod), target)
    with target:
        return tvm.compile(mod, target, tir_pipeline=pipeline_for(target))


def build_kernels(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile scheduled kernels."""
    # the current target belongs to a thread, and this function may run in another one
    with target:
        return tvm.tirx.build(mod, target=target, pipeline=pipeline_for(target))


def split_kernels(mod: tvm.IRModule) -> list[tvm.IRModule]:
    """Return one or more groups of kernels to compile in parallel; they do not depend on the machine."""
    functions = sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint))
    count = max(1, min(len(functions), _MAX_GROUPS))
    return [tvm.IRModule(dict(functions[first::count]), attrs=mod.attrs) for first in range(count)]


def pipeline_for(target: tvm.target.Target) -> str:
    """Return the name of the pipeline that kernels are compiled with."""
    return _CPU_PIPELINE if is_cpu(target) else "default"


def _make_cpu_pipeline() -> tuple[Any, Any, Any]:
    *_, finalize_device = s_tir_pipeline.default_s_tir_pipeline()

    def finalize() -> tvm.transform.Pass:
        own = [keep_small_buffers_on_stack(), split_loops_where_indices_repeat()]
        return tvm.transform.Sequential([*own, s_tir_pipeline.finalize_host_passes()])

    to_packed_functions = (
        tirx.transform.AnnotateEntryFunc,
        tirx.transform.SplitHostDevice,
        tirx.transform.MakePackedAPI,
        tirx.transform.FP8StorageLegalize,
        tirx.transform.BF16StorageLegalize,
    )
    passes = [make_pass() for make_pass in (*CPU_PASSES, *to_packed_functions)]
    return tvm.transform.Sequential(passes), finalize, finalize_device


@ir.node_pass(tirx.AttrStmt)
def _renew_partition_hints(hint: tirx.AttrStmt) -> tirx.AttrStmt:
    """Make hints refer to their loops' new variables: NarrowDataType keeps the old ones (apache-tvm 0.27)."""
    if hint.attr_key != dynamic_tiles.PARTITION_HINT or not isinstance(hint.body, tirx.For):
        return hint
    return tirx.AttrStmt(hint.body.loop_var, hint.attr_key, hint.value, hint.body)


@ir.kernel_pass
def _simplify_predicates(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Simplify the conditions of blocks.

    CompactBufferAllocation divides by zero for `loop % 32 // 16 < 1` in a loop of 32 (apache-tvm 0.27).
    """
    analyzer = vector_code.know_loops(function)

    def simplify(realize: SBlockRealize) -> SBlockRealize:
        predicate = analyzer.simplify(realize.predicate)
        if predicate.same_as(realize.predicate):
            return realize
        return ir.with_fields(realize, predicate=predicate)

    return ir.rewrite_nodes(function, SBlockRealize, simplify)


@ir.node_pass(tirx.BufferStore)
def _compare_loaded_conditions(store: tirx.BufferStore) -> tirx.BufferStore:
    """Compare loads of bool with false.

    TVM's code generator treats vectors of bool as bytes (apache-tvm 0.27): `not` inverts all 8 bits of each element, and
    the vectors cannot be combined with results of comparisons.
    """

    def compare(load: Any) -> Any:
        if str(load.source.dtype) != "bool":
            return load
        return tirx.NE(load.astype("int8"), tirx.const(0, "int8"))

    if isinstance(store.value, tvm.ir.TensorLoad):
        return store
    value = tvm_ffi.structural_map(store.value, (tvm.ir.TensorLoad, compare))
    return ir.with_fields(store, value=value)


@ir.kernel_pass
def _vectorize_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Vectorize loops; if TVM fails, loops with lets are left for LLVM to vectorize.

    TVM visits a product of scalar operands twice, and then rejects a let in it as a second binding (apache-tvm 0.27).
    Such operands have a condition on the loop's variable, as in a concatenation.
    """

    def vectorize(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        return tirx.transform.VectorizeLoop(True)(tvm.IRModule({"kernel": kernel}))["kernel"]

    def make_serial(loop: tirx.For) -> tirx.For:
        has_lets = loop.kind == tirx.ForKind.VECTORIZED and ir.find_nodes(loop.body, tirx.Let)
        return ir.with_fields(loop, kind=tirx.ForKind.SERIAL) if has_lets else loop

    try:
        return vectorize(function)
    except tvm.error.InternalError:
        return vectorize(ir.rewrite_nodes(function, tirx.For, make_serial))


_MAXIMA: Final = "pool_max"
_PADDING: Final = "pad_temp"


@ir.kernel_pass
def _start_pools_at_infinity(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Start and pad max pooling with -∞ in place of TVM's lowest finite value."""
    names = {str(block.name_hint) for block in ir.find_nodes(function.body, SBlock)}
    if not any(name.startswith(_MAXIMA) for name in names):
        return function

    def replace(limit: tirx.FloatImm) -> tirx.FloatImm:
        dtype = str(limit.ty.dtype)
        # float16 maxima are computed in float32, so their limit is float16's lowest value
        lowest = {float(tirx.min_value(kind).value) for kind in (dtype, "float16")}
        return tirx.FloatImm(dtype, -math.inf) if float(limit.value) in lowest else limit

    def change(block: SBlock) -> SBlock:
        name = str(block.name_hint)
        if not name.startswith((_MAXIMA, _PADDING)):
            return block
        return tvm_ffi.structural_map(block, (tirx.FloatImm, replace))

    return ir.rewrite_nodes(function, SBlock, change)


CPU_PASSES: Final = (
    # If an expression with a let was copied, its variable is bound twice, which vectorization rejects.
    tirx.transform.ConvertSSA,
    s_tir.transform.CanonicalizeLoop,
    _start_pools_at_infinity,
    dynamic_tiles.start_dynamic_reductions,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    _simplify_predicates,
    dynamic_tiles.split_dynamic_tiles,
    overlap_last_vectors,
    s_tir.transform.CompactBufferAllocation,
    dynamic_tiles.name_dynamic_lengths,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.StmtSimplify,
    s_tir.transform.AnnotateIrregularLoop,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    tirx.transform.BF16ComputeLegalize,
    expand_float16_conversions,
    lambda: tirx.transform.NarrowDataType(32),
    _renew_partition_hints,
    s_tir.transform.LoopPartition,
    _compare_loaded_conditions,
    mask_last_vectors,
    _vectorize_loops,
    s_tir.transform.InjectDoubleBuffer,
    tirx.transform.StorageRewrite,
    s_tir.transform.HoistIfThenElse,
    tirx.transform.UnrollLoop,
    s_tir.transform.RenormalizeSplitPattern,
    tirx.transform.StmtSimplify,
    vector_code.prefetch_weights,
    vector_code.shuffle_strided_loads,
    vector_code.select_multiplicand_lanes,
    vector_code.start_accumulators_at_offsets,
    vector_code.order_matrix_accumulators,
    vector_code.keep_product_loops,
    vector_code.join_narrow_stores,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
    tirx.transform.CommonSubexprElim,
    keep_lets_on_stack,
    tirx.transform.FP8ComputeLegalize,
    tirx.transform.VerifyMemory,
)
"""The passes of TVM's pipeline `s_tir` that a CPU needs, up to the split of host and device functions."""


@ir.node_pass(tirx.AllocBuffer)
def keep_small_buffers_on_stack(allocation: tirx.AllocBuffer) -> tirx.AllocBuffer:
    """Leave a buffer of known, small size to the code generator, which puts it on the stack."""
    buffer = allocation.buffer.ty
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        return allocation
    dtype = buffer.dtype.dtype
    if prod(map(int, buffer.shape)) * dtype.lanes * -(-dtype.bits // 8) > _MAX_STACK_BYTES:
        return allocation
    annotations = {**dict(allocation.annotations.items()), STAYS_ON_STACK: tirx.const(True, "bool")}
    return tirx.AllocBuffer(allocation.buffer, annotations=annotations)


compilation_pipeline.register_tir_pipeline(_CPU_PIPELINE, _make_cpu_pipeline)


# ---------------------------------------------------------------- split loops
# Splits loops at the periods of their indices, because LLVM's loop vectorizer miscompiles them. In `for i in range(16)`
# with `a[i % 8]` in a condition, LLVM may read 16 consecutive elements of `a`: it assumes that the modulo by a power of
# 2 never wraps. This happens where its vectors are longer than the period, as for `znver4` and `znver5`.

# The number of elements in the longest vectors, times the number that LLVM interleaves: longer periods are safe.
_MAX_PERIOD: Final = 512


@ir.node_pass(
    tirx.For, lambda function: bool(ir.find_nodes(function.body, tirx.FloorMod, tirx.Mod))
)
def split_loops_where_indices_repeat(loop: tirx.For) -> tirx.For:
    """Split loops in which an index is taken modulo a divisor that is below its range."""
    return _split(loop)


def _split(loop: tirx.For) -> tirx.For:
    period = _find_period(loop)
    if not period:
        return loop
    dtype, extent = loop.loop_var.ty.dtype, loop.extent
    outer, inner = (tirx.Var(f"{loop.loop_var.name}_{name}", dtype) for name in ("outer", "inner"))
    body = ir.replace_variables(loop.body, {loop.loop_var: outer * period + inner})
    length = tvm.sym.Analyzer().simplify(extent % period)
    is_whole = isinstance(length, tirx.IntImm) and int(length) == 0
    own = tirx.IntImm(dtype, period) if is_whole else tirx.min(period, extent - outer * period)
    nested = tirx.For(inner, loop.min, own, tirx.ForKind.SERIAL, body)
    count = tvm.sym.Analyzer().simplify((extent + period - 1) // period)
    # indices may also repeat in the outer loop
    return _split(tirx.For(outer, loop.min, count, loop.kind, nested, annotations=loop.annotations))


def _find_period(loop: tirx.For) -> int:
    """Return the number of iterations after which an index repeats; 0 if no vector is longer."""
    is_known = isinstance(loop.extent, tirx.IntImm)
    limit = min(_MAX_PERIOD, int(loop.extent) if is_known else _MAX_PERIOD)
    starts_at_zero = isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0
    # a loop with ramps is vectorized already
    if not starts_at_zero or ir.find_nodes(loop.body, tirx.Ramp):
        return 0
    values = {bind.var: bind.value for bind in ir.find_nodes(loop.body, tirx.Bind)}
    periods = (
        _period_of(node, loop.loop_var, values)
        for node in ir.find_nodes(loop.body, tirx.FloorMod, tirx.Mod)
    )
    return min((p for p in periods if 1 < p < limit), default=0)


def _period_of(modulo: Any, var: Any, values: dict[Any, Any]) -> int:
    """Return the period of a modulo by a power of 2 that is linear in a variable; 0 for others."""
    divisor = int(modulo.b) if isinstance(modulo.b, tirx.IntImm) else 0
    if divisor < 1 or divisor & (divisor - 1):
        return 0
    index = modulo.a
    while values.keys() & (bound := set(ir.find_nodes(index, tirx.Var))):
        index = ir.replace_variables(index, {v: values[v] for v in bound & values.keys()})
    step = tvm.sym.Analyzer().simplify(ir.replace_variables(index, {var: var + 1}) - index)
    return divisor // math.gcd(divisor, int(step)) if isinstance(step, tirx.IntImm) else 0
