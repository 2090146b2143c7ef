"""Code generation: kernels and lowered models become machine code by TVM's pipeline, for CPUs with passes of our own.

TVM 0.27 allocates every buffer of a kernel with its runtime's allocator, also the accumulators of a
tile, once a tile. Small buffers stay on the stack here, where LLVM keeps them in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import SBlockRealize
from tvm.s_tir import pipeline as s_tir_pipeline
from tvm.tirx import compilation_pipeline

from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.counts import cut_outputs
from tvmflow.compiler.cpu_model import is_cpu
from tvmflow.compiler.float16_conversions import expand_float16_conversions
from tvmflow.compiler.ir import find_nodes
from tvmflow.compiler.overlapping_vectors import overlap_last_vectors
from tvmflow.compiler.split_loops import split_loops_where_indices_repeat
from tvmflow.compiler.stack_lets import keep_lets_on_stack
from tvmflow.compiler.strided_loads import shuffle_strided_loads

_CPU_PIPELINE: Final = "tvmflow_cpu"

# Enough for many cores; each costs 20 ms.
_MAX_GROUPS: Final = 16

# Some C libraries give threads a stack of 128 KiB, and parallel loops are nested in a kernel's frames.
_MAX_STACK_BYTES: Final = 4096
# The annotation by which LowerTVMBuiltin leaves a buffer to the code generator (src/tirx/transform).
_ON_STACK: Final = "disable_lower_builtin"
# The attribute of a loop whose first or last iterations LoopPartition takes apart.
_PARTITION_HINT: Final = "pragma_loop_partition_hint"


def compile_model(mod: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a lowered model: its kernels, and `main` for TVM's virtual machine."""
    mod = compile_c_sources(cut_outputs(mod), target)
    with target:
        return tvm.compile(mod, target, tir_pipeline=pipeline_for(target))


def build_kernels(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile scheduled kernels."""
    # the target of a `with` block is that of its thread alone
    with target:
        return tvm.tirx.build(mod, target=target, pipeline=pipeline_for(target))


def split_kernels(mod: tvm.IRModule) -> list[tvm.IRModule]:
    """Return the kernels in groups to compile at once: they do not depend on the machine, so that objects do not either.

    There is at least one: what else is linked is for the system of its object.
    """
    functions = sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint))
    count = max(1, min(len(functions), _MAX_GROUPS))
    return [tvm.IRModule(dict(functions[first::count]), attrs=mod.attrs) for first in range(count)]


def pipeline_for(target: tvm.target.Target) -> str:
    """Return the name of the pipeline that kernels are compiled with."""
    return _CPU_PIPELINE if is_cpu(target) else "default"


def _make_cpu_pipeline() -> tuple[Any, Any, Any]:
    transform = tirx.transform
    *_, finalize_device = s_tir_pipeline.default_s_tir_pipeline()

    def finalize() -> tvm.transform.Pass:
        own = [keep_small_buffers_on_stack(), split_loops_where_indices_repeat()]
        return tvm.transform.Sequential([*own, s_tir_pipeline.finalize_host_passes()])

    to_packed_functions = (
        transform.AnnotateEntryFunc,
        transform.SplitHostDevice,
        transform.MakePackedAPI,
        transform.FP8StorageLegalize,
        transform.BF16StorageLegalize,
    )
    passes = [make_pass() for make_pass in (*CPU_PASSES, *to_packed_functions)]
    return tvm.transform.Sequential(passes), finalize, finalize_device


def _map_nodes(kind: type, rewrite: Callable[[Any], Any], name: str) -> tvm.transform.Pass:
    """Return a pass that rewrites the nodes of a kind in each kernel."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return function.with_body(tvm_ffi.structural_map(function.body, (kind, rewrite)))

    return tirx.transform.prim_func_pass(transform, opt_level=0, name=name)


def _renew_partition_hints() -> tvm.transform.Pass:
    """Return a pass that lets hints name the variables of their loops: NarrowDataType replaces these alone (apache-tvm 0.27)."""

    def renew(hint: tirx.AttrStmt) -> tirx.AttrStmt:
        if hint.attr_key != _PARTITION_HINT or not isinstance(hint.body, tirx.For):
            return hint
        return tirx.AttrStmt(hint.body.loop_var, hint.attr_key, hint.value, hint.body)

    return _map_nodes(tirx.AttrStmt, renew, "RenewPartitionHints")


def _simplify_predicates() -> tvm.transform.Pass:
    """Return a pass that simplifies the conditions of blocks.

    `loop % 32 // 16 < 1`, 32 being the extent of the loop, makes CompactBufferAllocation divide by zero (apache-tvm 0.27).
    """

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        analyzer = tvm.sym.Analyzer()
        for loop in find_nodes(function.body, tirx.For):
            analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))

        def simplify(realize: SBlockRealize) -> SBlockRealize:
            predicate = analyzer.simplify(realize.predicate)
            if predicate.same_as(realize.predicate):
                return realize
            return SBlockRealize(realize.iter_values, predicate, realize.block)

        return function.with_body(tvm_ffi.structural_map(function.body, (SBlockRealize, simplify)))

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="SimplifyPredicates")


def _compare_loaded_conditions() -> tvm.transform.Pass:
    """Return a pass that compares loads of bool with false.

    LLVM's code generator takes vectors of them for bytes: it inverts all bits of each, and cannot combine
    them with the results of comparisons (apache-tvm 0.27).
    """

    def compare(load: Any) -> Any:
        if str(load.source.dtype) != "bool":
            return load
        return tirx.NE(load.astype("int8"), tirx.const(0, "int8"))

    def compare_in(store: tirx.BufferStore) -> tirx.BufferStore:
        if isinstance(store.value, tvm.ir.TensorLoad):
            return store
        value = tvm_ffi.structural_map(store.value, (tvm.ir.TensorLoad, compare))
        return tirx.BufferStore(store.buffer, value, store.indices)

    return _map_nodes(tirx.BufferStore, compare_in, "CompareLoadedConditions")


def _vectorize_loops() -> tvm.transform.Pass:
    """Return TVM's pass that makes vectors of loops; where it fails, loops with lets stay for LLVM to vectorize.

    It computes a product whose operands it has not made vectors twice, and then refuses a let in it as a second
    binding (apache-tvm 0.27). Such operands have a condition on the loop's variable, as those of a concatenation.
    """

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        try:
            return _vectorize(function)
        except tvm.error.InternalError:
            rest = tvm_ffi.structural_map(function.body, (tirx.For, _without_vectors_of_lets))
            return _vectorize(function.with_body(rest))

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="VectorizeLoops")


def _vectorize(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return tirx.transform.VectorizeLoop(True)(tvm.IRModule({"kernel": function}))["kernel"]


def _without_vectors_of_lets(loop: tirx.For) -> tirx.For:
    if loop.kind != tirx.ForKind.VECTORIZED or not find_nodes(loop.body, tirx.Let):
        return loop
    serial = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, serial, loop.body)


CPU_PASSES: Final = (
    # Copies of an expression with a let bind one variable twice, which vectorization refuses.
    tirx.transform.ConvertSSA,
    s_tir.transform.CanonicalizeLoop,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    _simplify_predicates,
    overlap_last_vectors,
    s_tir.transform.CompactBufferAllocation,
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
    _vectorize_loops,
    s_tir.transform.InjectDoubleBuffer,
    tirx.transform.StorageRewrite,
    s_tir.transform.HoistIfThenElse,
    tirx.transform.UnrollLoop,
    s_tir.transform.RenormalizeSplitPattern,
    tirx.transform.StmtSimplify,
    shuffle_strided_loads,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
    tirx.transform.CommonSubexprElim,
    keep_lets_on_stack,
    tirx.transform.FP8ComputeLegalize,
    tirx.transform.VerifyMemory,
)
"""The passes of TVM's pipeline `s_tir` that a CPU needs, until kernels are functions for a host and a device."""


def keep_small_buffers_on_stack() -> tvm.transform.Pass:
    """Return a pass that leaves small buffers of kernels to the code generator, which makes them on the stack."""
    return _map_nodes(tirx.AllocBuffer, _mark_small_buffer, "KeepSmallBuffersOnStack")


def _mark_small_buffer(allocation: tirx.AllocBuffer) -> tirx.AllocBuffer:
    """Return an allocation that LLVM makes on the stack if its size is known and small."""
    buffer = allocation.buffer.ty
    extents = list(buffer.shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return allocation
    dtype = buffer.dtype.dtype
    size = prod(map(int, extents)) * dtype.lanes * -(-dtype.bits // 8)
    if size > _MAX_STACK_BYTES:
        return allocation
    annotations = {**dict(allocation.annotations.items()), _ON_STACK: tirx.const(True, "bool")}
    return tirx.AllocBuffer(allocation.buffer, annotations=annotations)


compilation_pipeline.register_tir_pipeline(_CPU_PIPELINE, _make_cpu_pipeline)
