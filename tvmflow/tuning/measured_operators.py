"""Operators whose choices were measured, read from the ledger, and what rules estimate their times by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.compiler.choices import DIRECT, WINOGRAD, choice_key
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.tir_kernels.winograd import (
    Convolution,
    Costs,
    Geometry,
    Work,
    costs_by_rule,
    list_tiles,
)
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders, read_records

if TYPE_CHECKING:
    from tvmflow.tuning.trials import ChoiceTimes

NOISE: Final = 0.02
"""Times that differ by a smaller part are equally good."""

_ARCHS: Final = ("x86_64", "aarch64", "arm64")
# The fields of a target that say which vectors its CPU has.
_CPU_FIELDS: Final = ("kind", "mtriple", "mcpu", "mattr")
# What is so many times slower or faster was not measured.
_MAX_RATIO: Final = 100.0
# The times of one library are recorded within so many seconds of each other, those of the next one later.
_SECONDS_OF_LIBRARY: Final = 1.0
_TEXT: Final = re.compile(
    r"conv {0} by {0} to {0}, strides {0}, padding {0}, dilation {0}".replace(
        "{0}", r"(\d{1,6}(?:×\d{1,6}){1,5})"
    )
)


class MeasuredOperator(NamedTuple):
    """A convolution whose choices were measured.

    Attributes:
        text: Its description.
        works: What it takes with each tile.
        seconds: A call with each tile that was measured, in a library.
        moments: When it was measured, in seconds since 1970.
    """

    text: str
    works: Mapping[int, Work]
    seconds: Mapping[int, float]
    moments: tuple[float, ...]

    @property
    def fastest(self) -> int:
        """The tile that was measured to be fastest."""
        return min(self.seconds, key=lambda tile: self.seconds[tile])

    def choose(self, costs: Costs) -> int:
        """Return the measured tile that some constants estimate to be fastest."""
        return min(self.seconds, key=lambda tile: self.works[tile].estimate(costs))

    def is_right(self, tile: int) -> bool:
        """Return whether none was measured to be faster beyond the noise."""
        return self.seconds[tile] <= (1 + NOISE) * self.seconds[self.fastest]


class DeviceClass(NamedTuple):
    """Devices whose times are compared: of one model, and with code of the same vectors.

    Attributes:
        device: The model.
        lanes: The float32 values of a vector.
        has_few_registers: There are 16 registers for vectors, not 32.
        takes_lanes: Instructions take lanes as factors.
    """

    device: str
    lanes: int
    has_few_registers: bool
    takes_lanes: bool = False

    @property
    def rule(self) -> Costs:
        """The constants of the rules."""
        return costs_by_rule(self.has_few_registers, self.takes_lanes)


def read_operators(
    root: Path, targets: Sequence[str] = ()
) -> dict[DeviceClass, list[MeasuredOperator]]:
    """Return the operators of a ledger whose choices were measured, by the class of the device.

    Records of other operators, of folders without a usable description and of CPUs without rules are left out.

    Args:
        root: The ledger.
        targets: Prefixes of target keys; all targets when empty.

    Raises:
        UsageError: No target has a key with one of the prefixes.
    """
    classes: dict[DeviceClass, list[MeasuredOperator]] = {}
    for folder in list_target_folders(root, targets):
        kind = _classify(folder)
        if kind is None:
            continue
        for key, path in folder.workload_files():
            text = folder.ledger.description(key).name
            if choice_key(text) == key and (choices := read_records(path).records.choices):
                operator = measured_operator(
                    text, list(choices.values()), kind.lanes, kind.takes_lanes
                )
                if operator is not None:
                    classes.setdefault(kind, []).append(operator)
    return classes


def _classify(folder: TargetFolder) -> DeviceClass | None:
    if folder.description is None:
        return None
    target = folder.description.target
    # TVM crashes when it is asked for the features of a triple that LLVM does not know.
    if str(target.get("mtriple", "")).partition("-")[0] not in _ARCHS:
        return None
    try:
        cpu = CpuModel.from_target({name: target[name] for name in _CPU_FIELDS if name in target})
    except Exception:  # a target that this build of TVM does not take
        return None
    device = folder.description.device
    name = device.get("class") or device.get("kind", "")
    if cpu is None:
        return None
    return DeviceClass(name, cpu.lanes, cpu.has_few_registers, cpu.factor_lanes > 0)


def measured_operator(
    text: str, records: Sequence[ChoiceTimes], lanes: int, takes_lanes: bool = False
) -> MeasuredOperator | None:
    """Return what is known of a convolution; None if it cannot be compared.

    Args:
        text: Its description.
        records: The times of its choices, each beside those of the rules.
        lanes: The float32 values of a vector.
        takes_lanes: Instructions take lanes as factors.
    """
    works = _count_works(text, lanes, (DIRECT, *list_tiles(takes_lanes)))
    if works is None:
        return None
    seconds: dict[int, float] = {}
    ordered = sorted(filter(_is_plausible, records), key=lambda times: times.when)
    for times in ordered:
        tile, rule = times.choice[WINOGRAD], times.rule[WINOGRAD]
        seconds = seconds or {rule: min(times.rule_seconds) / times.calls}
        # A ratio holds within a turn alone: other turns had another clock rate and other neighbors.
        if rule in seconds:
            seconds.setdefault(tile, seconds[rule] * times.ratio)
        elif tile in seconds:
            seconds.setdefault(rule, seconds[tile] / times.ratio)
    seconds = {tile: time for tile, time in seconds.items() if tile in works}
    if len(seconds) <= 1:
        return None
    moments = tuple(datetime.fromisoformat(times.when).timestamp() for times in ordered)
    return MeasuredOperator(text, works, seconds, moments)


def _is_plausible(times: ChoiceTimes) -> bool:
    seconds = (*times.seconds, *times.rule_seconds)
    is_possible = all(0 < value < float("inf") for value in seconds)
    return is_possible and 1 / _MAX_RATIO < times.ratio < _MAX_RATIO


def _count_works(text: str, lanes: int, tiles: Sequence[int]) -> dict[int, Work] | None:
    """Return what a convolution takes with each tile; None for another operator."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    data, kernel, result, strides, _, dilation = (
        [int(size) for size in group.split("×")] for group in match.groups()
    )
    image = kernel[2:]
    is_supported = (
        len(data) == len(kernel) == len(result) == len(strides) + 2 == len(dilation) + 2
        and len(image) > 1
        and image[-2:] == [3, 3]
        and strides[-2:] in ([1, 1], [2, 2])
        and min(*data, *kernel, *result) > 0
    )
    if not is_supported:
        return None
    taps, stride, spread = ([1, *sizes][-3] for sizes in (image, strides, dilation))
    depth, height, width = [1, *result[2:]][-3:]
    shape = (result[0], depth, height, width)
    geometry = Geometry(
        tile=max(tiles),
        shape=shape,
        padding=(0, 0, 0),
        taps=taps,
        stride=stride,
        dilation=spread,
        step=strides[-1],
    )
    convolution = Convolution(
        geometry, out=kernel[0], inner=kernel[1], lanes=lanes, groups=data[1] // kernel[1]
    )
    return {tile: convolution.count_work(tile) for tile in tiles}


def group_models(operators: Sequence[MeasuredOperator]) -> list[int]:
    """Return a number for each operator, the same for those of one model.

    A record does not name the model, but operators that were recorded together were measured in one library. Equal
    operators that were measured with other threads count as those of one model, too.
    """
    first: dict[str, int] = {}
    numbers = [first.setdefault(operator.text, n) for n, operator in enumerate(operators)]
    moments = sorted(
        (moment, place) for place, operator in enumerate(operators) for moment in operator.moments
    )
    for (earlier, one), (later, other) in pairwise(moments):
        if later - earlier <= _SECONDS_OF_LIBRARY and numbers[one] != numbers[other]:
            numbers = [numbers[one] if n == numbers[other] else n for n in numbers]
    return numbers
