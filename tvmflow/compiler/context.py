"""The target and the options of a lowering, for its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler.contraction import machine, winograd
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.tir_kernels.blocked import INTEGERS, PAIRS, Products
from tvmflow.core.choices import Choice, Choices, Operator, tile_size
from tvmflow.graph import ir
from tvmflow.graph.marks import Marks
from tvmflow.graph.rewriter import MainRewriter
from tvmflow.targets.backends import backend_for, has_host_kernels


@dataclass(frozen=True)
class LoweringContext:
    """The target and options of one lowering.

    Attributes:
        target: TVM's target.
        cpu: The target's CPU; None for a GPU, or a CPU that has no optimized kernels.
        options: The options of the recipe.
        choices: Measured choices for operators; rules choose for all other operators.
        operators: The operators with alternatives that passes have met so far.
    """

    target: tvm.target.Target
    cpu: machine.CpuModel | None
    options: LoweringOptions
    choices: Choices = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """The number of float32 values in a vector register; 1 without a CPU model."""
        return self.cpu.lanes if self.cpu is not None else 1

    @property
    def dot_dtype(self) -> str | None:
        """The data dtype of the CPU's dot product instructions for vectors of `lanes`; None without them."""
        dtype = self.cpu.dot_dtype if self.cpu is not None else None
        return dtype if (dtype, self.lanes) in machine.DOT_INSTRUCTIONS else None

    @property
    def integers(self) -> Products:
        """How many int8 products an instruction adds to one accumulator: quads or pairs."""
        return INTEGERS if self.cpu is None or self.cpu.has_quads else PAIRS

    @property
    def weight_dtype(self) -> str:
        """The dtype in which the library stores packed float weights."""
        return "float16" if self.options.precision in ("mixed", "float16") else "float32"

    @property
    def data_dtypes(self) -> tuple[str, ...]:
        """The dtypes of data that can use blocked layouts and packed weights."""
        return ("float32", "float16") if self.computes_float16() else ("float32",)

    @property
    def winograd_tiles(self) -> tuple[int, ...]:
        """The Winograd tile sizes that each layer may have; none if all convolutions are direct.

        By default, large tiles are used only with full float32 precision, or on CPUs with by-element FMA. A recipe can
        request them.
        """
        if self.cpu is None:
            return ()
        is_exact = self.has_full_precision() or self.cpu.multiplicand_lanes
        by_rule = (max if is_exact else min)(winograd.SQUARES)
        largest = by_rule if self.options.winograd == "auto" else self.options.winograd
        tiles = winograd.list_tiles(self.cpu.multiplicand_lanes > 0)
        return tuple(tile for tile in tiles if max(tile_size(tile)) <= largest)

    @property
    def measured_tiles(self) -> tuple[int, ...]:
        """The Winograd tiles that a search may measure; empty if weights are rounded."""
        return self.winograd_tiles if self.has_full_precision() else ()

    def choose(self, text: str, nodes: Marks, ranked: Sequence[tuple[Choice, int]]) -> Choice:
        """Return how an operator is computed: the measured choice if there is one, else the rules' choice.

        Args:
            text: The description of the operator.
            nodes: The bindings that it came from.
            ranked: The alternatives, ranked by estimated cost, each with the size of its weights in bytes.
        """
        alternatives, weight_bytes = zip(*ranked, strict=True)
        by_rule: Choice = alternatives[0]
        self.operators.append(Operator(text, nodes, by_rule, alternatives, weight_bytes))
        choice = self.choices.get(text, by_rule)
        return choice if choice in alternatives else by_rule

    def uses_bfloat16(self) -> bool:
        """Return whether the recipe asks for bfloat16, and the CPU has dot product instructions for it."""
        return (
            self.options.precision == "bfloat16"
            and self.cpu is not None
            and (self.cpu.bfloat16_arch, self.lanes) in machine.BFLOAT16_INSTRUCTIONS
        )

    def computes_float16(self) -> bool:
        """Return whether convolutions and matmuls are computed in float16."""
        return self.options.precision == "float16" and self.cpu is not None and self.cpu.has_float16

    def is_plain(self, operator: str) -> bool:
        """Return whether an operator (of `OPTIMIZED_OPERATORS`) keeps the model's layout and weights."""
        return operator in self.options.plain

    def is_cpu(self) -> bool:
        """Return whether the target is a CPU, with or without optimized kernels."""
        return machine.is_cpu(self.target)

    def is_mixed(self) -> bool:
        """Return whether a library may mix kernels for the CPU with kernels for a device."""
        return has_host_kernels(self.target.export())

    def sorts_on_cpu(self) -> bool:
        """Return whether a CPU sorts: the target, or the host of a device."""
        return self.is_cpu() or self.is_mixed()

    def has_small_integers(self) -> bool:
        """Return whether the device lacks 64-bit integers."""
        return not backend_for(self.target.export()).HAS_INT64

    def has_cpu_model(self) -> bool:
        """Return whether kernels are optimized for a CPU."""
        return self.cpu is not None

    def has_dot_products(self) -> bool:
        """Return whether the CPU has int8 dot product instructions."""
        return self.dot_dtype is not None

    def uses_lookup_tables(self) -> bool:
        """Return whether unary int8 functions use lookup tables: on 64-bit Arm, which has table lookups."""
        return self.has_dot_products() and self.cpu is not None and self.cpu.multiplicand_lanes > 0

    def has_blocked_layout(self) -> bool:
        """Return whether convolutions on a CPU use blocked layouts."""
        return self.has_cpu_model() and self.options.layout == "blocked"

    def packs_matmuls(self) -> bool:
        """Return whether matmuls use kernels with packed weights."""
        is_packed = self.has_cpu_model() and self.options.weights == "packed"
        return is_packed and not self.is_plain("matmul")

    def has_channels_last_weights(self) -> bool:
        """Return whether convolutions on a GPU use channels-last weights."""
        return not self.is_cpu() and self.options.weights == "packed"

    def has_vector_math(self) -> bool:
        """Return whether a CPU computes exp, log, sigmoid, tanh, erf, sin and cos in vectors."""
        return self.has_cpu_model() and self.options.math == "vector"

    def has_full_precision(self) -> bool:
        """Return whether weights keep the precision of the model."""
        return self.options.precision == "model"

    def fuses_attention(self) -> bool:
        """Return whether attention is one kernel: for a CPU with a model, or for a GPU with float32 data."""
        return self.has_cpu_model() or not (self.is_cpu() or self.has_mixed_data())

    def has_mixed_data(self) -> bool:
        """Return whether data become float16 like the weights: with precision `mixed` and no CPU model."""
        return not self.has_cpu_model() and self.options.precision == "mixed"


class TargetRewriter(MainRewriter):
    """A rewriter that depends on the target and the options."""

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod)
        self._context = context

    @property
    def _cpu(self) -> machine.CpuModel:
        """The target's CPU model; only for passes that run if there is one."""
        assert self._context.cpu is not None
        return self._context.cpu

    def is_float(self, expr: Any) -> bool:
        """Return whether an expression is a float tensor of a dtype that has optimized kernels."""
        is_tensor = isinstance(expr.ty, relax.TensorType)
        return is_tensor and ir.dtype_of(expr) in self._context.data_dtypes
