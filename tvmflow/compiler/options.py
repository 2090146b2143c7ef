"""The recipe's lowering options, and the versions of lowering and schedules, for the keys of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tvmflow.core.types import Json, Precision

LOWERING_VERSION: Final = 44
"""Raise it when a change of the lowering pipeline or of a pass produces different kernels."""

SCHEDULES_VERSION: Final = 34
"""Raise it when a change of the schedule rules produces different schedules."""

_FLOAT_BITS: Final = 32


class VectorWidth(NamedTuple):
    """The vectors of a model's code.

    Attributes:
        bits: The width of a vector.
        costs: Width -> the estimated vector operations, weighted by their time; empty if nothing was estimated.
    """

    bits: int
    costs: Mapping[int, float]

    @property
    def lanes(self) -> int:
        """The number of float32 values in a vector."""
        return self.bits // _FLOAT_BITS

    @classmethod
    def of_lanes(cls, lanes: int, costs: Mapping[int, float]) -> VectorWidth:
        """Return the width of vectors of this many float32 values; `costs` are keyed by lanes."""
        bits = {count * _FLOAT_BITS: cost for count, cost in costs.items()}
        return cls(lanes * _FLOAT_BITS, bits)


@dataclass(frozen=True, kw_only=True)
class LoweringOptions:
    """The options that kernels depend on: a recipe's `kernels` without `schedules`.

    Attributes:
        version: The version of the lowering pipeline.
        precision: `mixed` to keep weights as float16, and on a GPU to compute with float16 data; `float16` to compute
            convolutions and matmuls in float16; `bfloat16` to round their data and weights to bfloat16.
        layout: `blocked` for convolutions on `NCHW[x]c` data, `plain` for the model's own layout.
        weights: `packed` for matmuls with packed weights.
        plain: The operators (see `core.types.OPTIMIZED_OPERATORS`) that keep the model's layout and weights.
        winograd: The largest Winograd tile; 0 for direct convolutions, `auto` to choose by CPU and precision.
        vector_bits: The width of vectors; None to choose it for the model.
        shares_weights: Whether code for other ISA levels shares the weights.
        math: `vector` for vectorized exp, log, sigmoid, tanh and erf, `libm` for the C library's.
        checks: Whether indices and integer divisors are checked when the model runs.
    """

    version: int = LOWERING_VERSION
    precision: Precision = "model"
    layout: Literal["blocked", "plain"] = "blocked"
    weights: Literal["packed", "plain"] = "packed"
    plain: tuple[str, ...] = ()
    winograd: Literal["auto", 0, 2, 4] = "auto"
    math: Literal["vector", "libm"] = "vector"
    vector_bits: Literal[128, 256, 512] | None = None
    shares_weights: bool = False
    checks: bool = True

    def to_json(self) -> dict[str, Json]:
        """Return the options for a stage's settings; `shares_weights` and `checks` only if not default."""
        options = {**vars(self), "plain": list(self.plain)}
        for name, usual in (("shares_weights", False), ("checks", True)):
            if options[name] == usual:
                del options[name]
        return options
