"""Lowering of imported models to kernels, and their compilation to libraries."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlockRealize

from tvmflow.compiler import pipeline, schedules
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.code_generation import compile_model
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.options import LoweringOptions, VectorWidth
from tvmflow.compiler.passes.lift_weights import split_weights
from tvmflow.compiler.passes.recurrent import padded_units
from tvmflow.compiler.tir_kernels.blocked import Groups
from tvmflow.core.choices import Choices, Operator
from tvmflow.core.types import Array, Json
from tvmflow.graph import dynamic_shapes, ir
from tvmflow.graph.dynamic_shapes import TuningSizes
from tvmflow.graph.evaluation import evaluate_fields, evaluate_function
from tvmflow.graph.ir_dump import IRDump
from tvmflow.graph.ir_operators import Recurrent, RecurrentOperands
from tvmflow.graph.marks import KernelNodes, NodeTracker
from tvmflow.targets.tvm_target import make_target

# ---------------------------------------------------------------- vector width
# Blocked layouts pad channels to whole vectors. With 8 channels, vectors of 16 compute four times as many products as
# needed; vectors of 8 compute only the needed ones. The estimate counts vector multiplications. Nothing is measured, so
# every build machine generates the same code for a target.

_MIN_LANES: Final = 4
# Shorter vectors must save this share of the cost, because work that is not counted takes longer with them.
_MIN_SAVING: Final = 0.1

_Cost = Callable[[int], int]
"""Lanes -> vector multiplications."""


def choose_vector_width(mod: tvm.IRModule, cpu: CpuModel, bits: int | None) -> VectorWidth:
    """Return the vector width for a model: the recipe's `bits`, or the width with the lowest cost."""
    if bits is not None:
        widest = VectorWidth.of_lanes(cpu.lanes, {})
        return VectorWidth(min(bits, widest.bits), {})
    operators = list(_list_costs(mod))
    widths = [cpu.lanes >> shift for shift in range(3) if cpu.lanes >> shift >= _MIN_LANES]
    costs = {lanes: float(sum(cost(lanes) for cost in operators)) for lanes in widths}
    costs[cpu.lanes] *= cpu.full_vector_cost
    # the widest of widths with equal costs
    best = min(widths, key=lambda lanes: (costs[lanes], -lanes))
    if costs[best] > (1 - _MIN_SAVING) * costs[cpu.lanes]:
        best = cpu.lanes
    _log.debug("vectors of %d float32; estimated products of vectors: %s", best, costs)
    return VectorWidth.of_lanes(best, costs)


def _list_costs(mod: tvm.IRModule) -> Iterator[_Cost]:
    """Yield the cost of each convolution, matmul and recurrent layer whose shapes are known."""
    function = mod["main"]
    inputs = set(function.params)
    flow, sizes = ir.DataFlow(function), TuningSizes(function)
    for value in flow.values.values():
        rule = _RULES.get(ir.operator_name(value))
        if rule is None:
            continue
        is_tensor = [isinstance(e.ty, relax.TensorType) for e in value.args]
        shapes = [sizes.shape(e) for e in value.args]
        result = sizes.shape(value) if isinstance(value.ty, relax.TensorType) else ()
        if result is None or any(t and s is None for t, s in zip(is_tensor, shapes, strict=True)):
            continue
        is_input = flow.resolve(value.args[0]) in inputs
        yield functools.partial(rule, value, is_input, [*(s or () for s in shapes), result])


def _count_of_convolution(
    call: relax.Call, is_input: bool, shapes: Sequence[tuple[int, ...]], lanes: int
) -> int:
    """Return the vector products of a convolution; model inputs with few channels keep the plain layout."""
    data, weights, result = shapes
    out, inner, kernel = result[1], data[1], math.prod(weights[2:])
    # one product per weight and pixel (of the data if transposed, else of the result)
    image = data if "transpose" in ir.operator_name(call) else result
    points = image[0] * math.prod(image[2:])
    groups = int(call.attrs.groups)
    if groups == out == inner:
        return math.ceil(out / lanes) * kernel * points
    data_lanes = 1 if is_input and inner <= lanes // 2 else lanes
    reads = Groups(inner // groups, out // groups, data_lanes, lanes, groups)
    return math.ceil(out / lanes) * reads.width * data_lanes * kernel * points


def _count_of_product(
    _call: relax.Call, _is_input: bool, shapes: Sequence[tuple[int, ...]], lanes: int
) -> int:
    """Return the number of vector products in a matmul, whose columns are in vectors."""
    rows, columns = math.prod(shapes[-1][:-1]), math.prod(shapes[-1][-1:])
    return rows * shapes[0][-1] * math.ceil(columns / lanes)


def _count_of_recurrent(
    call: relax.Call, _is_input: bool, shapes: Sequence[tuple[int, ...]], lanes: int
) -> int:
    """Return the number of vector products for the inputs; the state's do not depend on the width."""
    operands = RecurrentOperands(*shapes[:-1])
    if not operands.weights:
        # a separate matmul multiplies the inputs by their weights
        return 0
    steps, batch, size = operands.x
    directions, gate_units, _ = operands.weights
    gates = Recurrent.read(call).gates
    columns = directions * gates * padded_units(gate_units // gates)
    return int(steps * batch * size * math.ceil(columns / lanes))


_RULES: Final[Mapping[str, Callable[..., int]]] = {
    **dict.fromkeys((*ir.CONVOLUTIONS, *ir.TRANSPOSED_CONVOLUTIONS), _count_of_convolution),
    "relax.matmul": _count_of_product,
    Recurrent.NAME: _count_of_recurrent,
}


_log = logging.getLogger(__name__)

Weights = Mapping[str, Array]

# Names that TVM's code generators turn into identifiers; in other names, they leave invalid characters.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][\w.:-]*", re.ASCII)

_QUANTIZED_OPERATORS: Final = ("relax.quantize", "relax.dequantize")

# Weights are computed with code for the baseline of x86-64 and without fused multiply-add, so that all build machines
# compute the same bytes.
_WEIGHTS_TARGET: Final = {"kind": "llvm"}


@dataclass(frozen=True)
class LoweredModel:
    """A lowered model.

    Attributes:
        mod: The kernels, and `main`, which calls them and takes the computed weights after its inputs.
        weight_names: The names of the imported model's weights, in the order of its `main`.
        weight_mod: A module whose `main` computes the weights; None if they are used unchanged.
        width: The vector width; None without a CPU model. It is not written to files: the kernels have it.
        kernel_nodes: Kernel -> for each of its calls, the bindings of the imported `main` that the call computes.
        operators: The operators with alternatives. They are not written to files.
    """

    mod: tvm.IRModule
    weight_names: tuple[str, ...]
    weight_mod: tvm.IRModule | None
    width: VectorWidth | None = None
    kernel_nodes: KernelNodes = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()

    def compute_weights(self, params: Weights) -> list[Array]:
        """Compute the weights that `main` takes, in order, from the imported model's weights by name."""
        arrays = [params[name] for name in self.weight_names]
        if self.weight_mod is None:
            return arrays
        weights = evaluate_function(self.weight_mod["main"], arrays)
        if weights is not None:
            return weights
        _log.debug("the weights need an operator without a numpy rule: compiling their function")
        target = tvm.target.Target(_WEIGHTS_TARGET)
        library = tvm.compile(compile_c_sources(self.weight_mod, target), target)
        tensors = list(map(tvm.runtime.tensor, arrays))
        computed = relax.VirtualMachine(library, tvm.cpu())["main"](tensors)
        return [weight.numpy() for weight in computed]

    def recompute_weights(self, params: Weights, before: Weights) -> Mapping[int, Array]:
        """Compute the weights affected by parameters that differ from `before`; return them by index."""
        arrays = [params[name] for name in self.weight_names]
        pairs = enumerate(zip(arrays, self.weight_names, strict=True))
        changed = {position for position, (array, name) in pairs if array is not before[name]}
        if self.weight_mod is None:
            return {position: arrays[position] for position in changed}
        found = evaluate_fields(self.weight_mod["main"], arrays, changed)
        return dict(enumerate(self.compute_weights(params))) if found is None else found

    def schedule_untuned(
        self, params: Weights, target: Mapping[str, Json], rules_version: int
    ) -> ScheduledModel:
        """Compute the weights, and schedule the kernels with rules only (see `schedules.schedule_untuned`)."""
        scheduled = schedules.schedule_untuned(self.mod, target, rules_version)
        return ScheduledModel(scheduled.mod, self.compute_weights(params), make_target(target))

    def estimate_shares(self, unscheduled: Collection[str]) -> dict[str, float | None]:
        """Return the estimated share of the time, from 0 to 1, that each kernel without a schedule takes.

        The estimate counts the values that each kernel computes: 0 if they are few, None if loops depend on data. The
        kernels of this model must not be scheduled yet.
        """
        times: dict[str, float] = {}
        for name in ir.list_kernels(self.mod):
            calls = len(self.kernel_nodes.get(name, ())) or 1
            gain = 1 if name in unscheduled else _GAIN
            times[name] = _count_steps(self.mod[name].body) * calls / gain
        known = sum(filter(math.isfinite, times.values()))
        shares: dict[str, float | None] = {}
        for name in sorted(unscheduled):
            is_small = times[name] < _MIN_STEPS
            shares[name] = (
                0.0 if is_small else times[name] / known if times[name] < math.inf else None
            )
        return shares

    def write(self, path: Path) -> None:
        """Write the model as one JSON document that TVM reads; equal models give equal bytes."""
        document = {
            "mod": self.mod,
            "weight_names": self.weight_names,
            "weight_mod": self.weight_mod,
            "kernel_nodes": dict(self.kernel_nodes),
        }
        path.write_text(tvm.ir.save_json(tvm_ffi.convert(document)))

    @classmethod
    def read(cls, path: Path) -> LoweredModel:
        """Return the model that `write` wrote."""
        document = ir.load_json(path.read_text())
        return cls(
            mod=document["mod"],
            weight_names=tuple(map(str, document["weight_names"])),
            weight_mod=document["weight_mod"],
            kernel_nodes={
                str(name): [list(map(int, call)) for call in calls]
                for name, calls in document["kernel_nodes"].items()
            },
        )


def lower(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    options: LoweringOptions,
    dump: IRDump | None = None,
    choices: Choices = MappingProxyType({}),
) -> LoweredModel:
    """Lower an imported model to fused kernels.

    The dump gets the module after each pass. `choices` are measured choices for operators.
    """
    names = tuple(str(var.name) for var in ir.list_weights(mod["main"]))
    has_seven_bit_weights = ir.SEVEN_BIT_WEIGHTS in dict(mod["main"].attrs or {})
    mod = ir.rename_parameters(mod, _name_in_code)
    cpu = CpuModel.from_target(target.export())
    if cpu and has_seven_bit_weights:
        cpu = cpu.for_seven_bit_weights()
    if options.precision == "float16" and ir.calls_operator(mod, *_QUANTIZED_OPERATORS):
        # the matmuls and convolutions of quantized models are int8; everything else stays float32
        options = replace(options, precision="model")
    width = choose_vector_width(mod, cpu, options.vector_bits) if cpu else None
    chosen_cpu = cpu._replace(lanes=width.lanes) if cpu and width else None
    context = LoweringContext(target, chosen_cpu, options, choices)
    if chosen_cpu and context.computes_float16():
        context = LoweringContext(target, chosen_cpu.for_float16(), options, choices)
    tracker = NodeTracker(mod)
    graph = pipeline.run_phases(pipeline.GRAPH_PHASES, mod, context, tracker, dump)
    with target, tvm.transform.PassContext(opt_level=3):
        kernels = pipeline.run_phases(pipeline.KERNEL_PHASES, graph, context, tracker, dump)
    return LoweredModel(
        mod=dynamic_shapes.with_tuning_sizes(kernels),
        weight_names=names,
        weight_mod=split_weights(graph),
        width=width,
        kernel_nodes=tracker.list_kernels(),
        operators=tuple(context.operators),
    )


def _name_in_code(name: str) -> str:
    """Return a valid name for C and CUDA: TVM's code generators do not escape names (apache-tvm 0.27)."""
    is_plain = _PLAIN_NAME.fullmatch(name)
    return name if is_plain else "v_" + re.sub(r"\W", "_", name, flags=re.ASCII)


class ScheduledModel(NamedTuple):
    """A lowered module with scheduled kernels, the weights that follow its inputs, and the target."""

    mod: tvm.IRModule
    weights: Sequence[Array]
    target: tvm.target.Target

    def compile(self) -> relax.VMExecutable:
        """Return a library for TVM's runtime that contains the weights, so that `main` takes only inputs."""
        params = ir.list_weights(self.mod["main"])
        if len(params) != len(self.weights):
            raise AssertionError(
                f"main takes {len(params)} weights, but {len(self.weights)} were computed"
            )
        # By variable, not by name, because lifting may give two parameters the same name.
        values = dict(zip(params, map(tvm.runtime.tensor, self.weights), strict=True))
        return compile_model(relax.transform.BindParams("main", values)(self.mod), self.target)

    def compile_without_weights(self) -> relax.VMExecutable:
        """Return a library for TVM's runtime whose `main` takes the weights after the inputs."""
        return compile_model(self.mod, self.target)


# ---------------------------------------------------------------- unscheduled kernels

# The speedup by a schedule: it computes a vector in the time of one element.
_GAIN: Final = 16
# Kernels with fewer steps take microseconds, and are neglected.
_MIN_STEPS: Final = 1 << 15


def _count_steps(stmt: Any) -> float:
    """Return how many statements run in all iterations of loops; infinity if that depends on data."""
    if isinstance(stmt, tirx.For):
        is_known = isinstance(stmt.extent, tirx.IntImm)
        return _count_steps(stmt.body) * int(stmt.extent) if is_known else math.inf
    if isinstance(stmt, tirx.SeqStmt):
        return sum(map(_count_steps, stmt.seq))
    if isinstance(stmt, tirx.IfThenElse):
        return sum(
            _count_steps(case) for case in (stmt.then_case, stmt.else_case) if case is not None
        )
    if isinstance(stmt, SBlockRealize | tirx.AttrStmt):
        return _count_steps(stmt.block.body if isinstance(stmt, SBlockRealize) else stmt.body)
    return math.inf if isinstance(stmt, tirx.While) else 1.0
