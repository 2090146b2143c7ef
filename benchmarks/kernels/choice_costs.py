"""The constants by which rules choose how operators are computed, fitted to the times of choices.

    python benchmarks/kernels/choice_costs.py LEDGER [--target-key PREFIX]

The ledger has the times of convolutions computed directly and by Winograd's method, each in a whole library. Of
each operator the logarithms of estimated and measured times are compared, without their means: an estimate has
no unit. The constants are those with the least squares of these differences; large differences count less (a smooth
form of Huber's loss), and each constant costs a little for its distance from that of the rules, where it stays if no
time depends on it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.contraction.winograd import (
    Convolution,
    Costs,
    Geometry,
    Work,
    costs_by_rule,
    list_tiles,
)
from tvmflow.core.choices import DIRECT, WINOGRAD, choice_key, describe_choice, tile_size
from tvmflow.core.text import table
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders, read_records

if TYPE_CHECKING:
    Numbers = np.ndarray[Any, np.dtype[np.float64]]
    from tvmflow.tuning.trials import ChoiceTimes

NOISE: Final = 0.02
"""Times that differ by a smaller part are equally good."""

_ARCHS: Final = ("x86_64", "aarch64", "arm64")
# The fields of a target that say which vectors its CPU has.
_CPU_FIELDS: Final = ("kind", "mtriple", "mcpu", "mattr")
# Ratios beyond this factor were not measured.
_MAX_RATIO: Final = 100.0
# The times of one library are recorded within this many seconds of each other, those of the next one later.
_SECONDS_OF_LIBRARY: Final = 1.0
_TEXT: Final = re.compile(
    r"conv {0} by {0} to {0}, strides {0}, padding {0}, dilation {0}".replace(
        "{0}", r"(\d{1,6}(?:×\d{1,6}){1,5})"
    )
)


class MeasuredOperator(NamedTuple):
    """A convolution whose choices were measured.

    Attributes:
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
    return DeviceClass(name, cpu.lanes, cpu.has_few_registers, cpu.multiplicand_lanes > 0)


def measured_operator(
    text: str, records: Sequence[ChoiceTimes], lanes: int, takes_lanes: bool = False
) -> MeasuredOperator | None:
    """Return what is known of a convolution; None if it cannot be compared."""
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


MIN_OPERATORS: Final = 8
"""Fewer operators are not fitted to."""
MIN_MODELS: Final = 2
"""Fewer models are not fitted to: each is judged by a fit to the others."""

# From this relative difference on, it counts by its size and not by its square. Smaller ones are noise.
_LARGE: Final = 0.1
# A constant that is e times as large as that of the rules counts as this difference.
_DISTANCE: Final = 0.1
# With an error of this size no time depends on a constant.
_MAX_ERROR: Final = 0.5
_STARTS: Final = (0.25, 1.0, 4.0)


class Ranking(NamedTuple):
    """The outcome of choosing by an estimate.

    Attributes:
        right: Of how many operators the choice is the fastest, within the noise.
        lost: By which part all take longer than with the fastest choice of each.
    """

    right: int
    lost: float


class Constant(NamedTuple):
    """A constant of the estimate.

    Attributes:
        error: The standard deviation of the logarithm of the fitted value.
    """

    name: str
    rule: float
    fitted: float
    error: float

    @property
    def is_known(self) -> bool:
        """True if measured times depend on it."""
        return self.error < _MAX_ERROR


class Fit(NamedTuple):
    """The constants that fit the operators of several models best.

    Attributes:
        ranking: The outcome of choosing for each model by constants that were fitted to the others.
        tiles: What these choose for each operator.
    """

    constants: tuple[Constant, ...]
    ranking: Ranking
    tiles: tuple[int, ...]


class Disagreement(NamedTuple):
    """An operator for which the rules do not choose what was measured to be fastest.

    Attributes:
        fitted: What a fit to the other models chooses; empty without a fit.
        speedup: By how much the fastest is faster than what the rules choose.
    """

    operator: str
    rule: str
    fastest: str
    fitted: str
    speedup: float


class Learnt(NamedTuple):
    """The rules, judged by the measured choices of a class of devices.

    Attributes:
        fit: The fit; None where too few operators were measured.
        disagreements: The operators for which the rules choose another way, the largest gain first.
    """

    kind: DeviceClass
    operators: int
    models: int
    rule: Ranking
    fit: Fit | None
    disagreements: tuple[Disagreement, ...]


def learn(kind: DeviceClass, operators: Sequence[MeasuredOperator]) -> Learnt:
    """Compare the rules with the times of operators, and fit their constants to these if they are enough."""
    numbers = group_models(operators)
    models, by_rule = len(set(numbers)), [operator.choose(kind.rule) for operator in operators]
    is_enough = len(operators) >= MIN_OPERATORS and models >= MIN_MODELS
    learnt = _fit_models(operators, numbers, kind.rule) if is_enough else None
    disagreements = [
        Disagreement(
            operator=operator.text,
            rule=_describe(tile),
            fastest=_describe(operator.fastest),
            fitted=_describe(learnt.tiles[place]) if learnt else "",
            speedup=operator.seconds[tile] / operator.seconds[operator.fastest],
        )
        for place, (operator, tile) in enumerate(zip(operators, by_rule, strict=True))
        if not operator.is_right(tile)
    ]
    disagreements.sort(key=lambda entry: -entry.speedup)
    return Learnt(
        kind=kind,
        operators=len(operators),
        models=models,
        rule=_rank(operators, by_rule),
        fit=learnt,
        disagreements=tuple(disagreements),
    )


def _describe(tile: int) -> str:
    return describe_choice({WINOGRAD: tile})


def _fit_models(operators: Sequence[MeasuredOperator], numbers: Sequence[int], rule: Costs) -> Fit:
    """Return the fit to all operators, judged by those to all but one model; `numbers` are the models'."""
    owned = list(zip(operators, numbers, strict=True))
    others = {
        model: fit([operator for operator, number in owned if number != model], rule)[0]
        for model in set(numbers)
    }
    tiles = [operator.choose(others[number]) for operator, number in owned]
    costs, errors = fit(operators, rule)
    values = zip(_names(rule), _to_vector(rule), _to_vector(costs), errors, strict=True)
    constants = tuple(Constant(name, *map(float, figures)) for name, *figures in values)
    return Fit(constants, _rank(operators, tiles), tuple(tiles))


def _rank(operators: Sequence[MeasuredOperator], choices: Sequence[int]) -> Ranking:
    pairs = list(zip(operators, choices, strict=True))
    best = sum(operator.seconds[operator.fastest] for operator in operators)
    total = sum(operator.seconds[tile] for operator, tile in pairs)
    return Ranking(sum(operator.is_right(tile) for operator, tile in pairs), total / best - 1)


def fit(operators: Sequence[MeasuredOperator], rule: Costs) -> tuple[Costs, Numbers]:
    """Return the constants that fit the measured times best, and the relative error of each.

    Returns:
        The constants; the errors of those of transforms, of `memory` and of `gain`, each one standard deviation of
        its logarithm.
    """
    # The import takes 0.2 s.
    from scipy.optimize import least_squares

    problem = _Problem(operators, rule)
    memory = np.eye(len(problem.origin))[-2]
    fits = [
        least_squares(
            problem.residuals,
            problem.origin + np.log(factor) * memory,
            loss="soft_l1",
            f_scale=_LARGE,
        )
        for factor in _STARTS
    ]
    best = min(fits, key=lambda fit: fit.cost)
    # a time has at least the noise `_LARGE`
    noise = max(float(np.sqrt(np.mean(problem.differences(best.x) ** 2))), _LARGE)
    errors: Numbers = noise * np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
    return _to_costs(np.exp(best.x), rule), errors


def _names(costs: Costs) -> list[str]:
    sizes = [(*tile_size(tile), step) for tile, step in costs.transforms]
    transforms = [f"transform of a tile of {r}×{c}, stride {step}" for r, c, step in sizes]
    return [*transforms, "memory", "gain"]


def _to_vector(costs: Costs) -> Numbers:
    return np.array([*costs.transforms.values(), costs.memory, costs.gain])


def _to_costs(vector: Numbers, rule: Costs) -> Costs:
    *transforms, memory, gain = map(float, vector)
    return Costs(dict(zip(rule.transforms, transforms, strict=True)), memory, gain)


class _Problem:
    """The differences of the logarithms of estimated and measured times, to be made small."""

    def __init__(self, operators: Sequence[MeasuredOperator], rule: Costs) -> None:
        self.origin = np.log(_to_vector(rule))
        self._owner = np.array(
            [n for n, operator in enumerate(operators) for _ in operator.seconds]
        )
        rows = [(op.works[tile], op.seconds[tile]) for op in operators for tile in op.seconds]
        self._is_tiled = np.array([work.tile > 0 for work, _ in rows])
        self._loads = np.array([(work.products, work.weights) for work, _ in rows], np.float64).T
        # of each constant of a transform, how often it counts
        self._transforms = np.array(
            [
                [work.transforms * ((work.tile, work.step) == form) for work, _ in rows]
                for form in rule.transforms
            ],
            np.float64,
        )
        self._measured = np.log([seconds for _, seconds in rows])

    def differences(self, theta: Numbers) -> Numbers:
        """Return estimated minus measured logarithms, of each operator without their mean."""
        constants = np.exp(theta)
        transforms, (memory, gain) = constants[:-2], constants[-2:]
        products, weights = self._loads
        time = np.maximum(products, memory * weights) + transforms @ self._transforms
        times = np.log(np.where(self._is_tiled, gain * time, time)) - self._measured
        means = np.bincount(self._owner, times) / np.bincount(self._owner)
        result: Numbers = times - means[self._owner]
        return result

    def residuals(self, theta: Numbers) -> Numbers:
        """Return the differences, and after them what the distances of constants from the rules' count as."""
        return np.concatenate([self.differences(theta), _DISTANCE * (theta - self.origin)])


def main() -> None:
    """Print what a fit to the measured choices of each class of devices would change."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger", type=Path, help="the folder `ledger` of a store")
    parser.add_argument("--target-key", action="append", default=[])
    options = parser.parse_args()
    classes = read_operators(options.ledger, options.target_key)
    for kind in sorted(classes):
        learnt = learn(kind, classes[kind])
        print(
            f"{kind.device}, vectors of {kind.lanes}: {learnt.operators} operators of {learnt.models} models"
        )
        print(f"  fastest choice by the rules: {_describe_ranking(learnt.rule, learnt)}")
        if learnt.fit is not None:
            rows = [
                {
                    "constant": constant.name,
                    "rules": f"{constant.rule:.3g}",
                    "fit": f"{constant.fitted:.3g}" if constant.is_known else "not known",
                    "error": f"±{constant.error:.0%}" if constant.is_known else "",
                }
                for constant in learnt.fit.constants
            ]
            print(*table(rows, right=("rules", "fit", "error")), sep="\n")
            print(
                f"  by a fit to the other models: {_describe_ranking(learnt.fit.ranking, learnt)}"
            )
        for choice in learnt.disagreements:
            print(
                f"  {choice.speedup:.2f}×  {choice.operator}: {choice.fastest}, by rule {choice.rule}"
            )


def _describe_ranking(ranking: Ranking, learnt: Learnt) -> str:
    return f"{ranking.right} of {learnt.operators}; all take {ranking.lost:.1%} longer than with the fastest"


if __name__ == "__main__":
    main()
