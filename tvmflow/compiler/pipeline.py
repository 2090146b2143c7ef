"""The lowering pipeline: the passes from imported Relax to kernels, in phases.

To add a pass, write a module in `passes/` and add a line here. The pipeline runs once for `extract_tasks` and once for
`build`. Both must give the same kernels, because tuning records are matched by the structure of the lowered function.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.passes import dequantize, fusion, matmuls, reductions
from tvmflow.compiler.passes.append_states import append_states
from tvmflow.compiler.passes.blocked_layout import use_blocked_layouts
from tvmflow.compiler.passes.cast_integers import cast_constants, cast_integers
from tvmflow.compiler.passes.float16 import Float16Caster, promote_float16
from tvmflow.compiler.passes.fold_convolutions import ChannelsLastWeightMover, ConvolutionMerger
from tvmflow.compiler.passes.fuse_attention import fuse_attention
from tvmflow.compiler.passes.group_norm import GroupNormRewriter
from tvmflow.compiler.passes.legalize import make_operator_kernels
from tvmflow.compiler.passes.lift_weights import (
    fold_constants,
    hoist_weights,
    lift_weights,
    split_inference,
)
from tvmflow.compiler.passes.nms import NmsRewriter
from tvmflow.compiler.passes.operand_checks import check_operands, keep_divisions_from_trapping
from tvmflow.compiler.passes.plain_images import PoolRewriter, ResizeRewriter
from tvmflow.compiler.passes.quantization import RequantizeFuser, WeightDequantizeFolder
from tvmflow.compiler.passes.recurrent import RecurrentRewriter
from tvmflow.compiler.passes.sorts import SortRewriter
from tvmflow.compiler.passes.vector_math import vectorize_math
from tvmflow.graph import ir
from tvmflow.graph.evaluation import evaluate_constants
from tvmflow.graph.ir_dump import IRDump
from tvmflow.graph.ir_operators import BlockQuantizedWeights
from tvmflow.graph.marks import NodeTracker
from tvmflow.graph.norms import fold_norms
from tvmflow.graph.rewriter import MainRewriter, rewrite_main

_log = logging.getLogger(__name__)

Condition = Callable[[LoweringContext], bool]


class LoweringPass(NamedTuple):
    """A named transformation of a module, and when it runs.

    It runs if `when` is None or true for the context, and `operators` is empty or the model calls one of them.
    """

    name: str
    transform: Callable[[tvm.IRModule, LoweringContext], tvm.IRModule]
    when: Condition | None = None
    operators: frozenset[str] = frozenset()


Phases = Mapping[str, tuple[LoweringPass, ...]]
"""The name of a phase -> its passes, in order."""


def _pass(
    name: str,
    transform: Callable[[tvm.IRModule], tvm.IRModule],
    when: Condition | None = None,
    operators: Collection[str] = (),
) -> LoweringPass:
    """Return a pass that depends only on the module, such as TVM's own passes."""
    return LoweringPass(name, lambda mod, _: transform(mod), when, frozenset(operators))


def _rewriting(
    name: str,
    rewriter: type[MainRewriter],
    when: Condition | None = None,
    operators: Collection[str] = (),
) -> LoweringPass:
    """Return the pass that applies a rewriter to `main`; `operators` defaults to those of the rewriter."""

    def transform(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
        takes_context = issubclass(rewriter, TargetRewriter)
        return rewrite_main(mod, rewriter, *([context] if takes_context else []))

    return LoweringPass(name, transform, when, frozenset(operators or rewriter.OPERATORS))


def _vectorize_math(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    cpu = context.cpu
    assert cpu is not None
    has_few_units = cpu.multiplicand_lanes > 0
    return vectorize_math(mod, has_few_units=has_few_units, divides_slowly=cpu.divides_slowly)


_FOR_CPUS: Final = LoweringContext.has_cpu_model
_WITH_BLOCKS: Final = LoweringContext.has_blocked_layout
_WITH_DOTS: Final = LoweringContext.has_dot_products
_PACKED: Final = LoweringContext.packs_matmuls

_BLOCK_QUANTIZED: Final = (BlockQuantizedWeights.NAME,)

GRAPH_PHASES: Final[Phases] = {
    "operators": (
        _rewriting("recurrent", RecurrentRewriter),
        _rewriting("nms", NmsRewriter),
        _rewriting("block_quantized", matmuls.BlockQuantizedRewriter, None, _BLOCK_QUANTIZED),
        LoweringPass("operand_checks", check_operands),
    ),
    "inference form": (
        _pass("fold_norms", fold_norms),
        _rewriting(
            *("merge_convolutions", ConvolutionMerger, LoweringContext.has_full_precision),
            operators=ir.CONVOLUTIONS.keys(),
        ),
        _pass("decompose_ops", relax.transform.DecomposeOpsForInference()),
        _pass("canonicalize", relax.transform.CanonicalizeBindings()),
        _pass("remove_dead_code", relax.transform.DeadCodeElimination()),
    ),
    "layouts": (
        _rewriting("convert_integer_products", dequantize.IntegerProductRewriter, _FOR_CPUS),
        _rewriting(
            "fold_weight_dequantize", WeightDequantizeFolder, _FOR_CPUS, ["relax.dequantize"]
        ),
        _rewriting(
            *("move_dequantize", dequantize.DequantizeMover, _WITH_DOTS),
            ir.operators("quantize dequantize"),
        ),
        _pass("append_states", append_states, LoweringContext.is_cpu, ["relax.concat"]),
        LoweringPass(
            *("fuse_attention", fuse_attention, LoweringContext.fuses_attention),
            operators=ir.operators("matmul"),
        ),
        _rewriting("cast_data", Float16Caster, LoweringContext.computes_float16),
        _rewriting(
            "group_norm", GroupNormRewriter, _WITH_BLOCKS, ir.operators("variance nn.group_norm")
        ),
        LoweringPass("blocked_layout", use_blocked_layouts, _WITH_BLOCKS),
        _rewriting("resize", ResizeRewriter, _FOR_CPUS),
        _rewriting("pooling", PoolRewriter, _FOR_CPUS),
        _rewriting("split_reductions", reductions.ReductionSplitter, _FOR_CPUS),
        _rewriting("scans", reductions.ScanRewriter, _FOR_CPUS),
        _rewriting(
            "argreduce", reductions.ArgReduceRewriter, _FOR_CPUS, ir.operators("argmax argmin")
        ),
        _rewriting("scatters", reductions.ScatterRewriter, _FOR_CPUS),
        _rewriting("pack_batched_matmuls", matmuls.BatchedMatmulPacker, _PACKED),
        _rewriting("pack_matmuls", matmuls.MatmulPacker, _PACKED),
        _rewriting(
            "channels_last_weights",
            ChannelsLastWeightMover,
            LoweringContext.has_channels_last_weights,
        ),
    ),
    "precision": (
        _rewriting(
            "lookup_tables", dequantize.LookupTableRewriter, LoweringContext.uses_lookup_tables
        ),
        _rewriting(
            *("fuse_requantize", RequantizeFuser, _FOR_CPUS),
            operators=ir.operators("quantize dequantize astype"),
        ),
        _pass("canonicalize", relax.transform.CanonicalizeBindings(), _FOR_CPUS),
        _pass(
            "mixed_precision", relax.transform.ToMixedPrecision(), LoweringContext.has_mixed_data
        ),
    ),
    "weights": (
        _pass("hoist_weights", hoist_weights),
        # A model with an If has no dataflow blocks yet. The passes from here on need them.
        _pass("convert_to_dataflow", relax.transform.ConvertToDataflow(min_size=1)),
        _pass("lift_weights", lift_weights),
    ),
}
"""The passes over the graph; afterwards the module has a function that computes the weights."""

KERNEL_PHASES: Final[Phases] = {
    "constants": (
        _pass("split_inference", split_inference),
        _pass("evaluate_constants", evaluate_constants),
        _pass("cast_integers", cast_integers, LoweringContext.has_small_integers),
    ),
    "legalize": (
        _rewriting("sorts", SortRewriter, LoweringContext.sorts_on_cpu),
        _pass("dispatch_sampling", relax.backend.DispatchSampling()),
        _pass("dispatch_sort_scan", relax.backend.DispatchSortScan()),
        _pass("dynamic_reshapes", fusion.group_dynamic_reshapes, operators=["relax.reshape"]),
        LoweringPass("legalize_ops", make_operator_kernels),
        _pass("order_sizes", fusion.order_sizes),
    ),
    "fuse": (
        _pass("annotate_op_patterns", relax.transform.AnnotateTIROpPattern()),
        _pass("fold_constants", fold_constants),
        _pass("cast_constants", cast_constants, LoweringContext.has_small_integers),
        _pass("limit_fusion", fusion.limit_fusion, _FOR_CPUS),
        _pass("outline_branches", fusion.outline_branches),
        _pass("fuse_ops", relax.transform.FuseOps()),
        _pass("fuse_tir", relax.transform.FuseTIR()),
        _pass("empty_buffers", fusion.give_empty_buffers_room),
        _pass("kernel_symbols", fusion.give_kernel_symbols),
        LoweringPass("merge_pixels", fusion.merge_fixed_pixels, _FOR_CPUS),
        _pass("remove_dead_code", relax.transform.DeadCodeElimination()),
    ),
    "kernels": (
        LoweringPass("safe_divisions", keep_divisions_from_trapping),
        LoweringPass(
            "promote_float16",
            lambda mod, own: promote_float16(mod, adds_products=own.computes_float16()),
            LoweringContext.is_cpu,
        ),
        LoweringPass("vectorize_math", _vectorize_math, LoweringContext.has_vector_math),
    ),
}
"""The passes that lower the graph to kernels, without the function that computes the weights."""


def run_phases(
    phases: Phases,
    mod: tvm.IRModule,
    context: LoweringContext,
    tracker: NodeTracker,
    dump: IRDump | None = None,
) -> tvm.IRModule:
    """Run the passes of some phases in order; after each pass, update the tracker and write to the dump."""
    called: set[str] | None = None
    for phase, steps in phases.items():
        for step in steps:
            if step.when and not step.when(context):
                _log.debug("%s: %s does not run for this target and recipe", phase, step.name)
                continue
            if step.operators and called is None:
                called = ir.list_operators(mod)
            if step.operators and step.operators.isdisjoint(called or ()):
                _log.debug("%s: %s has nothing to do in this model", phase, step.name)
                continue
            started = time.perf_counter()
            before, mod = mod, step.transform(mod, context)
            seconds = time.perf_counter() - started
            if not mod.same_as(before):
                tracker.follow(mod)
                called = None
            _log.debug("%s: %s took %.1f ms", phase, step.name, seconds * 1e3)
            if dump is not None:
                dump.write(step.name, mod, seconds)
    return mod
