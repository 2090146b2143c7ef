"""The vector width for a model: the one with which its convolutions and matrix products take least time.

Blocked layouts pad channels to whole vectors. With 8 channels, vectors of 16 compute four times
the products that are needed, and vectors of 8 just these, on the same CPU and in as many
registers. The estimate counts products of vectors; nothing is measured, so that any machine that
builds for the target gives the same code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators.blocked import Groups
from tvmflow.core.types import Json

_MIN_LANES: Final = 4
# Narrow vectors must save this share: all that is not counted takes longer with them.
_MIN_SAVING: Final = 0.1
_BITS: Final = 32
_log = logging.getLogger(__name__)

_Cost = Callable[[int], int]
"""Number of lanes -> products of vectors."""


class VectorWidth(NamedTuple):
    """The vectors of a model's code.

    Attributes:
        lanes: How many float32 values a vector has.
        costs: For each number of lanes, the products of vectors, weighted by their time; empty where nothing was estimated.
    """

    lanes: int
    costs: Mapping[int, float]

    def to_json(self) -> Json:
        """Return the width and the costs by width in bits."""
        costs = {str(lanes * _BITS): cost for lanes, cost in self.costs.items()}
        return {"bits": self.lanes * _BITS, "costs": costs}


def choose_width(mod: tvm.IRModule, cpu: CpuModel, bits: int | None) -> VectorWidth:
    """Return the vector width for a model.

    Args:
        mod: The imported model.
        cpu: The CPU; its vectors are the widest.
        bits: The width that the recipe asks for; None to choose it.
    """
    if bits is not None:
        return VectorWidth(min(bits // _BITS, cpu.lanes), {})
    operators = list(_list_costs(mod))
    widths = [cpu.lanes >> shift for shift in range(3) if cpu.lanes >> shift >= _MIN_LANES]
    costs = {lanes: float(sum(cost(lanes) for cost in operators)) for lanes in widths}
    costs[cpu.lanes] *= cpu.full_vector_cost
    # of equally fast ones the widest
    best = min(widths, key=lambda lanes: (costs[lanes], -lanes))
    if costs[best] > (1 - _MIN_SAVING) * costs[cpu.lanes]:
        best = cpu.lanes
    _log.debug("vectors of %d float32; estimated products of vectors: %s", best, costs)
    return VectorWidth(best, costs)


def _list_costs(mod: tvm.IRModule) -> Iterator[_Cost]:
    """Yield the cost of each convolution and matrix product whose shapes are known."""
    function = mod["main"]
    inputs = set(function.params)
    flow = ir.DataFlow(function)
    for value in flow.values.values():
        rule = _RULES.get(ir.operator_name(value))
        if rule is not None and None not in map(ir.shape_of, (value, *value.args)):
            data = ir.resolve_alias(value.args[0], flow.values.get)
            yield rule(value, data in inputs)


def _cost_of_convolution(call: relax.Call, is_input: bool) -> _Cost:
    """Return the cost of a convolution; data that are an input and have few channels stay plain."""
    data, weights, result = map(ir.known_shape, (*call.args[:2], call))
    out, inner, kernel = result[1], data[1], math.prod(weights[2:])
    # each element of data meets each weight once, as does each element of a result where nothing is transposed
    image = data if "transpose" in ir.operator_name(call) else result
    points = image[0] * math.prod(image[2:])
    groups = int(call.attrs.groups)

    def cost(lanes: int) -> int:
        if groups == out == inner:
            return math.ceil(out / lanes) * kernel * points
        data_lanes = 1 if is_input and inner <= lanes // 2 else lanes
        reads = Groups(inner // groups, out // groups, data_lanes, lanes, groups)
        return math.ceil(out / lanes) * reads.width * data_lanes * kernel * points

    return cost


def _cost_of_product(call: relax.Call, _: bool) -> _Cost:
    """Return the cost of a matrix product, whose columns are vectors."""
    shape, depth = ir.known_shape(call), ir.known_shape(call.args[0])[-1]
    rows, columns = math.prod(shape[:-1]), math.prod(shape[-1:])
    return lambda lanes: rows * depth * math.ceil(columns / lanes)


_RULES: Final[Mapping[str, Callable[[relax.Call, bool], _Cost]]] = {
    **{f"relax.nn.conv{rank}d": _cost_of_convolution for rank in (1, 2, 3)},
    **{f"relax.nn.conv{rank}d_transpose": _cost_of_convolution for rank in (1, 2, 3)},
    "relax.matmul": _cost_of_product,
}
