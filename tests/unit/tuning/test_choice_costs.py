"""Constants of the rules fitted to the times of choices, and what of a ledger they are fitted to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.choices import (
    COSTS,
    LANES,
    TARGET,
    choice_times,
    convolution_text,
    measure_model,
    write_operators,
)
from tests.support.trials import DEVICE
from tvmflow.compiler.choices import choice_key
from tvmflow.compiler.contraction.winograd import Costs
from tvmflow.core.types import Json
from tvmflow.tuning import choice_costs
from tvmflow.tuning.choice_costs import (
    Constant,
    DeviceClass,
    MeasuredOperator,
    group_models,
    measured_operator,
    read_operators,
)
from tvmflow.tuning.ledger import Ledger, WorkloadDescription
from tvmflow.tuning.trials import record_to_json

KIND = DeviceClass("any", LANES, has_few_registers=False)

TILE_2, TILE_4 = (f"transform of a tile of {tile}×{tile}, stride 1" for tile in (2, 4))
SMALL = ((64, 4), (128, 6), (256, 8), (512, 7), (96, 10), (192, 5))
LARGE = ((8, 56), (16, 112), (24, 64), (48, 60), (64, 56), (128, 56), (32, 80), (16, 70))


def models(
    sizes: Sequence[tuple[int, int]], costs: Costs = COSTS, noise: float = 0.0
) -> list[MeasuredOperator]:
    """Return operators of three models that take the time that `costs` say."""
    generator = np.random.default_rng(3)
    return [
        operator
        for model in range(3)
        for operator in measure_model(
            sizes[model::3], costs, hour=model, noise=noise, generator=generator
        )
    ]


def constants(operators: Sequence[MeasuredOperator]) -> dict[str, Constant]:
    fit = choice_costs.learn(KIND, operators).fit
    assert fit is not None
    return {constant.name: constant for constant in fit.constants}


def test_times_by_known_constants_give_these() -> None:
    fitted = constants(models([*SMALL, *LARGE]))
    values = [fitted[name].fitted for name in (TILE_2, TILE_4, "memory", "gain")]
    assert values == pytest.approx([31.0, 90.0, 8.0, 1.4], rel=0.05)
    strided = [name for name, constant in fitted.items() if not constant.is_known]
    assert len(fitted) == 6 and all("stride 2" in name for name in strided) and len(strided) == 2


def test_a_fit_to_noisy_times_chooses_better_than_the_rules() -> None:
    """Each model by a fit to the other ones."""
    learnt = choice_costs.learn(KIND, models([*SMALL, *LARGE], noise=0.05))
    assert learnt.fit is not None and learnt.models == 3
    assert learnt.fit.ranking.right > learnt.rule.right
    assert learnt.fit.ranking.lost < learnt.rule.lost
    gains = [entry.speedup for entry in learnt.disagreements]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == learnt.operators - learnt.rule.right
    fitted = {constant.name: constant.fitted for constant in learnt.fit.constants}
    assert fitted["gain"] == pytest.approx(1.4, rel=0.2)


def test_a_single_wrong_time_changes_little() -> None:
    operators = models([*SMALL, *LARGE])
    wrong = operators[5]._replace(seconds={**operators[5].seconds, 4: 50 * operators[5].seconds[4]})
    fitted = constants([*operators[:5], wrong, *operators[6:]])
    assert fitted[TILE_4].fitted == pytest.approx(90.0, rel=0.25)
    assert fitted["gain"].fitted == pytest.approx(1.4, rel=0.1)


def test_a_constant_that_no_time_depends_on_stays_as_it_is() -> None:
    """Weights of large images are read once for many multiplications."""
    fitted = constants(models(LARGE))
    assert not fitted["memory"].is_known
    assert fitted["memory"].fitted == pytest.approx(fitted["memory"].rule)
    assert fitted[TILE_4].fitted == pytest.approx(90.0, rel=0.15)


def test_times_as_the_rules_estimate_them_change_nothing() -> None:
    learnt = choice_costs.learn(KIND, models([*SMALL, *LARGE], KIND.rule))
    assert learnt.rule == (learnt.operators, 0.0) and not learnt.disagreements
    assert learnt.fit is not None
    for constant in learnt.fit.constants:
        assert constant.fitted == pytest.approx(constant.rule, rel=1e-6)


@pytest.mark.parametrize("operators", [models([*SMALL, *LARGE])[::5], measure_model(LARGE, COSTS)])
def test_a_fit_takes_several_operators_and_models(operators: list[MeasuredOperator]) -> None:
    """What is known of the rules is said in any case."""
    learnt = choice_costs.learn(KIND, operators)
    assert learnt.fit is None
    assert learnt.rule.right < learnt.operators == len(operators)
    assert all(entry.fitted == "" for entry in learnt.disagreements)


def test_operators_that_were_recorded_together_are_those_of_one_model() -> None:
    first = measure_model(SMALL, COSTS, hour=1)
    second = measure_model(LARGE, COSTS, hour=2)
    # with other threads, at another time
    again = measure_model(SMALL[:1], COSTS, hour=3)
    numbers = group_models([*first, *second, *again])
    assert len(set(numbers[: len(first)])) == 1
    assert len(set(numbers)) == 2
    assert numbers[-1] == numbers[0]


@pytest.mark.parametrize(
    ("seconds", "rule_seconds"),
    [(0.0, 1.0), (-1.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1e9)],
)
def test_impossible_times_are_ignored(seconds: float, rule_seconds: float) -> None:
    text = convolution_text(16, 28)
    wrong = choice_times(4, seconds, rule_seconds)
    assert measured_operator(text, [wrong], LANES) is None
    operator = measured_operator(text, [choice_times(0, 3.0, 2.0), wrong], LANES)
    assert operator is not None and operator.seconds == {2: 2.0, 0: 3.0}


@pytest.mark.parametrize(
    "text",
    [
        *("", "matmul 4×4", convolution_text(16, 28).replace("16×16×3×3", "16×16×5×5")),
        convolution_text(16, 28).replace("16×16×3×3", "16×0×3×3"),
        convolution_text(16, 28).replace("1×16×28×28", "1×16×28"),
        convolution_text(16, 28).replace("28", "9" * 50),
    ],
)
def test_other_operators_are_ignored(text: str) -> None:
    assert measured_operator(text, [choice_times(4, 1.0, 2.0)], LANES) is None


def test_records_beside_other_rules_are_put_together() -> None:
    """By their ratios: times of other turns are not compared."""
    text = convolution_text(16, 28)
    later = choice_times(0, 30.0, 10.0, rule=4)._replace(when="2024-01-03T00:00:00.000+00:00")
    operator = measured_operator(text, [later, choice_times(4, 1.0, 2.0)], LANES)
    assert operator is not None
    assert operator.seconds == {2: 2.0, 4: 1.0, 0: 3.0}


def test_volumes_are_read() -> None:
    text = (
        "conv 1×8×4×14×14 by 8×8×3×3×3 to 1×8×4×14×14, strides 1×1×1, "
        "padding 1×1×1×1×1×1, dilation 1×1×1"
    )
    operator = measured_operator(text, [choice_times(0, 1.0, 2.0)], LANES)
    assert operator is not None
    assert operator.works[0].products == 27 * LANES * 4 * 14 * 14


def test_strides_have_constants_of_their_own() -> None:
    text = "conv 1×8×56×56 by 8×8×3×3 to 1×8×28×28, strides 2×2, padding 1×1×1×1, dilation 1×1"
    operator = measured_operator(text, [choice_times(0, 1.0, 2.0)], LANES)
    assert operator is not None
    assert operator.works[2].products == 25 * LANES * 14 * 14
    costs = COSTS._replace(transforms={**COSTS.transforms, (2, 2): 1e-3})
    assert (operator.choose(COSTS), operator.choose(costs)) == (0, 2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path, TARGET, "0", DEVICE)


def only(operators: Iterator[list[MeasuredOperator]]) -> list[MeasuredOperator]:
    [found] = operators
    return found


def test_a_ledger_may_hold_anything(ledger: Ledger, tmp_path: Path) -> None:
    """Damaged lines, other workloads and descriptions of other operators are left out."""
    write_operators(ledger, SMALL[:2])
    text = convolution_text(*SMALL[0])
    wrong = json.dumps({**record_to_json(choice_times(4, 1.0, 2.0)), "seconds": [-1.0]})
    path = ledger.workload(choice_key(text)).path
    path.write_text(path.read_text() + wrong + "\nnonsense\n")
    stranger = choice_key("stranger")
    ledger.workload(stranger).add([choice_times(4, 1.0, 2.0)])
    ledger.describe(stranger, WorkloadDescription(name=text))
    (tmp_path / ("0" * 32)).mkdir()
    operators = only(iter(read_operators(tmp_path).values()))
    assert sorted(operator.text for operator in operators) == sorted(
        convolution_text(*size) for size in SMALL[:2]
    )


@pytest.mark.parametrize(
    "target",
    [
        {"kind": "abacus"},
        {"kind": "opencl"},
        {**TARGET, "mtriple": "abacus-linux-gnu"},
        {**TARGET, "mcpu": 5},
        {**TARGET, "kind": "cuda"},
    ],
)
def test_a_target_that_is_unknown_here_is_left_out(tmp_path: Path, target: Json) -> None:
    write_operators(Ledger.open(tmp_path, target, "0", DEVICE), SMALL[:2])
    assert read_operators(tmp_path) == {}
