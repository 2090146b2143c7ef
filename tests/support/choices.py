"""Times of choices for tests: convolutions that take the time that some constants say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvmflow.compiler.choices import choice_key
from tvmflow.compiler.contraction.winograd import Costs
from tvmflow.tuning.choice_costs import MeasuredOperator, measured_operator
from tvmflow.tuning.ledger import Ledger, WorkloadDescription
from tvmflow.tuning.trials import ChoiceTimes

TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
LANES = 8
"""The float32 values of a vector of the target."""

COSTS = Costs({(2, 1): 31.0, (4, 1): 90.0, (2, 2): 25.0, (4, 2): 110.0}, memory=8.0, gain=1.4)
"""Constants that are not those of the rules."""

_WORK_S = 1e-9


def convolution_text(channels: int, size: int) -> str:
    """Return the description of a convolution from and to so many channels of square images."""
    image = f"1×{channels}×{size}×{size}"
    sizes = f"{image} by {channels}×{channels}×3×3 to {image}"
    return f"conv {sizes}, strides 1×1, padding 1×1×1×1, dilation 1×1"


def choice_times(
    tile: int, seconds: float, rule_seconds: float, *, rule: int = 2, hour: int = 0
) -> ChoiceTimes:
    """Return a record of one turn."""
    when = f"2024-01-01T{hour:02d}:00:{tile:02d}.000+00:00"
    return ChoiceTimes({"winograd": tile}, {"winograd": rule}, (seconds,), (rule_seconds,), 1, when)


def measure_model(
    sizes: Sequence[tuple[int, int]],
    costs: Costs,
    *,
    hour: int = 0,
    noise: float = 0.0,
    generator: np.random.Generator | None = None,
) -> list[MeasuredOperator]:
    """Return operators (channels and size) that take the time that `costs` say, each with some noise."""
    generator = generator or np.random.default_rng(0)
    operators = []
    for channels, size in sizes:
        text = convolution_text(channels, size)
        guess = [choice_times(tile, 1.0, 1.0, hour=hour) for tile in (0, 4)]
        operator = measured_operator(text, guess, LANES)
        assert operator is not None
        seconds = {
            tile: _WORK_S * work.estimate(costs) * float(np.exp(noise * generator.normal()))
            for tile, work in operator.works.items()
        }
        operators.append(operator._replace(seconds=seconds))
    return operators


def write_operators(
    ledger: Ledger, sizes: Sequence[tuple[int, int]], costs: Costs = COSTS, hour: int = 0
) -> None:
    """Write the times of operators into a ledger, as measured for one model."""
    for operator in measure_model(sizes, costs):
        key, seconds = choice_key(operator.text), operator.seconds
        ledger.describe(key, WorkloadDescription(name=operator.text))
        ledger.workload(key).add(
            [choice_times(tile, seconds[tile], seconds[2], hour=hour) for tile in (0, 4)]
        )
