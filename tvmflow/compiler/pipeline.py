"""The lowering pipeline: the passes from imported Relax to kernels, in phases.

To add a pass, write a module in `passes/` and add a line here. The pipeline runs once for
`extract_tasks` and once for `build`: a tuned record finds its kernel by the structure of the
lowered function, so both must lower alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.ir_dump import IRDump
from tvmflow.compiler.node_tracking import NodeTracker
from tvmflow.compiler.passes.batched_matmuls import pack_batched_matmuls
from tvmflow.compiler.passes.blocked_layout import use_blocked_layouts
from tvmflow.compiler.passes.byte_tables import use_byte_tables
from tvmflow.compiler.passes.constant_evaluation import evaluate_constants, fold_constants
from tvmflow.compiler.passes.dynamic_quantization import convert_integer_products
from tvmflow.compiler.passes.fold_norms import fold_norms
from tvmflow.compiler.passes.fuse_attention import fuse_attention
from tvmflow.compiler.passes.group_norm import rewrite_group_norms
from tvmflow.compiler.passes.grouped_weights import lower_grouped_weights
from tvmflow.compiler.passes.legalize import make_operator_kernels
from tvmflow.compiler.passes.lift_weights import hoist_weights, lift_weights, split_inference
from tvmflow.compiler.passes.limit_fusion import limit_fusion
from tvmflow.compiler.passes.merge_convolutions import merge_convolutions
from tvmflow.compiler.passes.move_dequantize import move_dequantize
from tvmflow.compiler.passes.narrow_data import narrow_data
from tvmflow.compiler.passes.narrow_integers import narrow_constants, narrow_integers
from tvmflow.compiler.passes.open_reshapes import group_open_reshapes
from tvmflow.compiler.passes.operand_checks import check_operands, keep_divisions_from_trapping
from tvmflow.compiler.passes.outline_branches import outline_branches
from tvmflow.compiler.passes.own_sizes import give_own_sizes, order_sizes
from tvmflow.compiler.passes.pack_matmuls import pack_matmuls
from tvmflow.compiler.passes.place_reductions import vectorize_place_reductions
from tvmflow.compiler.passes.pooling import split_pools
from tvmflow.compiler.passes.quantization import fold_weight_dequantize, fuse_requantize
from tvmflow.compiler.passes.recurrent import lower_recurrent
from tvmflow.compiler.passes.resize import convert_resize
from tvmflow.compiler.passes.scans import vectorize_scans
from tvmflow.compiler.passes.scatters import vectorize_scatters
from tvmflow.compiler.passes.sorts import replace_sorts
from tvmflow.compiler.passes.split_reductions import split_reductions
from tvmflow.compiler.passes.suppression import lower_suppression
from tvmflow.compiler.passes.tap_weights import move_tap_weights
from tvmflow.compiler.passes.vector_math import vectorize_math
from tvmflow.compiler.passes.widen_float16 import widen_float16

_log = logging.getLogger(__name__)

Condition = Callable[[LoweringContext], bool]


class LoweringPass(NamedTuple):
    """A named transformation of a module, and when it runs.

    Attributes:
        name: Its name.
        transform: The transformation.
        when: Whether it runs for a target and the options; None for always.
        operators: The operators that it looks for: a model without a call of one is left as it is. Empty for others.
    """

    name: str
    transform: Callable[[tvm.IRModule, LoweringContext], tvm.IRModule]
    when: Condition | None = None
    operators: frozenset[str] = frozenset()

    def looks_for(self, *names: str) -> LoweringPass:
        """Return the same pass, which does not run for models without a call of these operators."""
        return self._replace(operators=frozenset(f"relax.{name}" for name in names))


Phases = Mapping[str, tuple[LoweringPass, ...]]
"""The name of a phase -> its passes, in order."""


def _pass(
    name: str, transform: Callable[[tvm.IRModule], tvm.IRModule], when: Condition | None = None
) -> LoweringPass:
    """Return a pass that depends on the module alone, such as TVM's own passes."""
    return LoweringPass(name, lambda mod, _: transform(mod), when)


def _vectorize_math(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    cpu = context.cpu
    return vectorize_math(
        mod,
        has_few_units=cpu is not None and cpu.factor_lanes > 0,
        divides_slowly=cpu is not None and cpu.divides_slowly,
    )


def _widen_float16(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    return widen_float16(mod, adds_products=context.computes_float16())


GRAPH_PHASES: Final[Phases] = {
    "operators": (
        LoweringPass("recurrent", lower_recurrent),
        LoweringPass("suppression", lower_suppression),
        LoweringPass("grouped_weights", lower_grouped_weights),
        LoweringPass("operand_checks", check_operands),
    ),
    "inference form": (
        _pass("fold_norms", fold_norms),
        LoweringPass("merge_convolutions", merge_convolutions, LoweringContext.has_full_precision),
        _pass("decompose_ops", relax.transform.DecomposeOpsForInference()),
        _pass("canonicalize", relax.transform.CanonicalizeBindings()),
        _pass("remove_dead_code", relax.transform.DeadCodeElimination()),
    ),
    "layouts": (
        _pass(
            "convert_integer_products", convert_integer_products, LoweringContext.has_cpu_model
        ).looks_for("astype"),
        _pass(
            "fold_weight_dequantize", fold_weight_dequantize, LoweringContext.has_cpu_model
        ).looks_for("dequantize"),
        LoweringPass(
            "move_dequantize", move_dequantize, LoweringContext.has_dot_products
        ).looks_for("quantize", "dequantize"),
        LoweringPass("fuse_attention", fuse_attention, LoweringContext.fuses_attention).looks_for(
            "matmul"
        ),
        _pass("narrow_data", narrow_data, LoweringContext.computes_float16),
        _pass("group_norm", rewrite_group_norms, LoweringContext.has_blocked_layout).looks_for(
            "variance", "nn.group_norm"
        ),
        LoweringPass("blocked_layout", use_blocked_layouts, LoweringContext.has_blocked_layout),
        _pass("resize", convert_resize, LoweringContext.has_cpu_model).looks_for(
            *("image.resize2d", "image.resize3d")
        ),
        LoweringPass("pooling", split_pools, LoweringContext.has_cpu_model).looks_for(
            *("nn.avg_pool2d", "nn.max_pool2d")
        ),
        _pass("split_reductions", split_reductions, LoweringContext.has_cpu_model).looks_for(
            *("max", "min", "sum", "mean", "prod")
        ),
        LoweringPass("scans", vectorize_scans, LoweringContext.has_cpu_model).looks_for(
            *("cumsum", "cumprod")
        ),
        LoweringPass(
            "place_reductions", vectorize_place_reductions, LoweringContext.has_cpu_model
        ).looks_for("argmax", "argmin"),
        LoweringPass("scatters", vectorize_scatters, LoweringContext.has_cpu_model).looks_for(
            "scatter_nd"
        ),
        LoweringPass(
            "pack_batched_matmuls", pack_batched_matmuls, LoweringContext.has_packed_weights
        ).looks_for("matmul"),
        LoweringPass("pack_matmuls", pack_matmuls, LoweringContext.has_packed_weights),
        _pass("tap_weights", move_tap_weights, LoweringContext.has_tap_weights),
    ),
    "precision": (
        LoweringPass("byte_tables", use_byte_tables, LoweringContext.looks_up_bytes).looks_for(
            "quantize"
        ),
        LoweringPass("fuse_requantize", fuse_requantize, LoweringContext.has_cpu_model).looks_for(
            "quantize", "dequantize", "astype"
        ),
        _pass(
            "canonicalize", relax.transform.CanonicalizeBindings(), LoweringContext.has_cpu_model
        ),
        _pass(
            "mixed_precision", relax.transform.ToMixedPrecision(), LoweringContext.has_mixed_data
        ),
    ),
    "weights": (
        _pass("hoist_weights", hoist_weights),
        # A model with an If has no dataflow blocks yet, which the passes from here on work on.
        _pass("convert_to_dataflow", relax.transform.ConvertToDataflow(min_size=1)),
        _pass("lift_weights", lift_weights),
    ),
}
"""The passes over the graph; afterwards the module has a function that computes the weights."""

KERNEL_PHASES: Final[Phases] = {
    "constants": (
        _pass("split_inference", split_inference),
        _pass("evaluate_constants", evaluate_constants),
        _pass("narrow_integers", narrow_integers, LoweringContext.has_small_integers),
    ),
    "legalize": (
        LoweringPass("sorts", replace_sorts, LoweringContext.sorts_on_cpu),
        _pass("dispatch_sampling", relax.backend.DispatchSampling()),
        _pass("dispatch_sort_scan", relax.backend.DispatchSortScan()),
        _pass("open_reshapes", group_open_reshapes),
        LoweringPass("legalize_ops", make_operator_kernels),
        _pass("order_sizes", order_sizes),
    ),
    "fuse": (
        _pass("annotate_op_patterns", relax.transform.AnnotateTIROpPattern()),
        _pass("fold_constants", fold_constants),
        _pass("narrow_constants", narrow_constants, LoweringContext.has_small_integers),
        _pass("limit_fusion", limit_fusion, LoweringContext.has_cpu_model),
        _pass("outline_branches", outline_branches),
        _pass("fuse_ops", relax.transform.FuseOps()),
        _pass("fuse_tir", relax.transform.FuseTIR()),
        _pass("own_sizes", give_own_sizes),
        _pass("remove_dead_code", relax.transform.DeadCodeElimination()),
    ),
    "kernels": (
        LoweringPass("safe_divisions", keep_divisions_from_trapping),
        LoweringPass("widen_float16", _widen_float16, LoweringContext.is_cpu),
        LoweringPass("vectorize_math", _vectorize_math, LoweringContext.has_vector_math),
    ),
}
"""The passes that make kernels of the graph without the function that computes the weights."""


def run_phases(
    phases: Phases,
    mod: tvm.IRModule,
    context: LoweringContext,
    tracker: NodeTracker,
    dump: IRDump | None = None,
) -> tvm.IRModule:
    """Run the passes of some phases.

    Args:
        phases: The phases, in order.
        mod: The module to transform.
        context: The target and options.
        tracker: Follows the bindings of the imported model.
        dump: Where to write the module after each pass; None to write nothing.
    """
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
