"""Choices: how else an operator can be computed, measured in libraries and kept in the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tests.support.trials import DEVICE, TARGET
from tests.support.tuning import conv, dense, model, recipe, relu, resolved_target
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.canonical_json import canonical
from tvmflow.core.choices import Choice, Operator, choice_key, is_within_tolerance
from tvmflow.core.fork_server import ForkServer
from tvmflow.graph import ir
from tvmflow.recipe import Kernels
from tvmflow.stages import choose
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.choose import ChooseFacts
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning import libraries
from tvmflow.tuning.ledger import Ledger, WorkloadLedger
from tvmflow.tuning.trials import ChoiceTimes, parse_line, record_to_json

OPERATOR = "conv 1×16×8×8 by 16×16×3×3"
WHEN = "2024-01-01T00:00:00.000+00:00"
ALTERNATIVES: tuple[Choice, ...] = ({"winograd": 4}, {"winograd": 2}, {"winograd": 0})


def times(tile: int, seconds: float, rule_seconds: float = 1e-3) -> ChoiceTimes:
    return ChoiceTimes({"winograd": tile}, {"winograd": 2}, (seconds,), (rule_seconds,), 1, WHEN)


def groups(by_rule: int = 2, size: int = 1) -> dict[str, list[Operator]]:
    operator = Operator(
        text=OPERATOR,
        nodes=frozenset({3}),
        by_rule={"winograd": by_rule},
        alternatives=ALTERNATIVES,
        weight_bytes=(36 * size, 16 * size, 9 * size),
    )
    return libraries.group_operators([operator, operator])


@pytest.fixture
def records(tmp_path: Path) -> WorkloadLedger:
    return Ledger.open(tmp_path, TARGET, "0", DEVICE).workload(choice_key(OPERATOR))


def test_a_ledger_keeps_the_times_of_choices(records: WorkloadLedger) -> None:
    """The earlier ones count, and they travel with the other records."""
    records.add([times(4, 5e-4)])
    records.add([times(4, 9e-4)._replace(when="2024-01-02T00:00:00.000+00:00"), times(0, 2e-3)])
    again = WorkloadLedger(records.path)
    assert again.notes() == [times(0, 2e-3), times(4, 5e-4)]
    assert not again.repairs


@pytest.mark.parametrize(
    "choice",
    [
        *(
            {"winograd": 5},
            {"winograd": 4.0},
            {"winograd": True},
            {"pragma_import_c": 4},
            {},
            [4],
            "4",
        ),
        *({"rows": 8}, {"rows": 0, "columns": 8}, {"rows": 8, "columns": 1 << 40}),
        {"rows": 8, "columns": 8, "winograd": 4},
    ],
)
def test_what_tvmflow_does_not_choose_is_refused(choice: Any) -> None:
    """A ledger may come from anybody: such a line is quarantined."""
    line = canonical({**record_to_json(times(4, 1e-3)), "choice": choice})
    with pytest.raises(ValueError, match="choice"):
        parse_line(line)


def test_times_of_other_numbers_of_turns_are_refused() -> None:
    line = canonical({**record_to_json(times(4, 1e-3)), "seconds": [1e-3, 1e-3]})
    with pytest.raises(ValueError, match="does not have one time per round"):
        parse_line(line)


def test_only_what_the_ledger_lacks_is_measured(records: WorkloadLedger) -> None:
    """Each library has one alternative of every operator, ranked by estimated cost."""
    ledgers = {OPERATOR: records}
    unknown = libraries.list_unknown(groups(), ledgers, lambda _: True)
    assert unknown == [{OPERATOR: {"winograd": 4}}, {OPERATOR: {"winograd": 0}}]
    records.add([times(4, 5e-4)])
    unknown = libraries.list_unknown(groups(), ledgers, lambda _: True)
    assert unknown == [{OPERATOR: {"winograd": 0}}]
    # the times beside another choice of the rules say nothing
    assert len(libraries.list_unknown(groups(by_rule=0), ledgers, lambda _: True)) == 2


def test_the_fastest_choice_that_is_within_tolerance_is_tried_in_the_library(
    records: WorkloadLedger,
) -> None:
    ledgers = {OPERATOR: records}
    records.add([times(4, 5e-4), times(0, 7e-4)])

    def choose_tile(rtol: float | None) -> list[int]:
        chosen = libraries.choose(groups(), ledgers, lambda c: is_within_tolerance(c, rtol))
        return [found.choice["winograd"] for found in chosen.values()]

    assert (choose_tile(None), choose_tile(1e-3), choose_tile(2e-5)) == ([4], [4], [0])


def test_a_choice_within_the_noise_is_none(records: WorkloadLedger) -> None:
    records.add([times(4, 0.99e-3), times(0, 2e-3)])
    assert libraries.choose(groups(), {OPERATOR: records}, lambda _: True) == {}


def test_larger_weights_must_save_more(records: WorkloadLedger) -> None:
    """Other processes may need the memory's bandwidth: 2 % for each MiB."""
    records.add([times(4, 0.7e-3)])
    for size, count in ((1 << 15, 1), (1 << 20, 0)):
        chosen = libraries.choose(groups(size=size), {OPERATOR: records}, lambda _: True)
        assert len(chosen) == count


def test_a_gain_is_counted_for_every_call() -> None:
    """Also where another model measured it, which had fewer calls."""
    gain = libraries.find_gain({OPERATOR: times(4, 5e-4)}, {OPERATOR: 2}, rule_s=3e-3)
    assert gain == pytest.approx(1.5)


def test_a_kernel_of_several_operators_counts_for_each_by_its_calls() -> None:
    """As where their channels fill the same blocks."""
    [both] = groups().values()
    other = [both[0]._replace(text="other", nodes=frozenset({5}))]
    nodes = {"shared": [[3], [3, 4], [5], [5, 6]], "own": [[5]], "none": [[7]]}
    kernels = libraries.find_kernels({OPERATOR: both, "other": other}, nodes)
    assert kernels == {OPERATOR: {"shared": 0.5}, "other": {"shared": 0.5, "own": 1.0}}


def test_a_chosen_tile_is_lowered_and_computes_the_same() -> None:
    """What was not chosen is lowered as before."""
    mod = model(conv(16), relu, conv(16), shape=(1, 16, 8, 8))
    target, options = make_target(TARGET), LoweringOptions()
    rule = lowering.lower(mod, target, options)
    texts = {operator.text for operator in rule.operators}
    assert len(rule.operators) == 2 and len(texts) == 1
    tiled = lowering.lower(mod, target, options, choices={text: {"winograd": 4} for text in texts})
    direct = lowering.lower(mod, target, options, choices={text: {"winograd": 0} for text in texts})
    assert any("winograd" in name for name in ir.list_kernels(tiled.mod))
    assert not any("winograd" in name for name in ir.list_kernels(direct.mod))
    random = np.random.default_rng(1)
    weights = {
        name: random.standard_normal((16, 16, 3, 3)).astype("float32") for name in rule.weight_names
    }
    data = tvm.runtime.tensor(random.standard_normal((1, 16, 8, 8)).astype("float32"))
    results = []
    for lowered in (tiled, direct):
        computed = map(tvm.runtime.tensor, lowered.compute_weights(weights))
        machine = relax.VirtualMachine(tvm.compile(lowered.mod, target), tvm.cpu())
        results.append(machine["main"](data, *computed).numpy())
    tiled_result, result = results
    np.testing.assert_allclose(tiled_result, result, atol=1e-5 * np.abs(result).max())


def test_a_product_computed_with_other_padding_gives_the_same() -> None:
    """Padded rows and columns are alternatives of a product; others than those are not taken."""
    mod = model(dense(70), shape=(31, 48))
    target, options = make_target(TARGET), LoweringOptions()
    rule = lowering.lower(mod, target, options)
    [operator] = rule.operators
    assert len(operator.alternatives) > 1
    foreign = lowering.lower(
        mod, target, options, choices={operator.text: {"rows": 9, "columns": 9}}
    )
    assert tvm_ffi.structural_equal(foreign.mod, rule.mod)
    random = np.random.default_rng(1)
    data = random.standard_normal((31, 48)).astype("float32")
    weights = {
        name: random.standard_normal((48, 70)).astype("float32") for name in rule.weight_names
    }
    for choice in operator.alternatives:
        lowered = lowering.lower(mod, target, options, choices={operator.text: choice})
        is_by_rule = tvm_ffi.structural_equal(lowered.mod, rule.mod)
        assert is_by_rule == (choice == operator.by_rule)
        computed = map(tvm.runtime.tensor, lowered.compute_weights(weights))
        machine = relax.VirtualMachine(tvm.compile(lowered.mod, target), tvm.cpu())
        result = machine["main"](tvm.runtime.tensor(data), *computed).numpy()
        np.testing.assert_allclose(result, data @ next(iter(weights.values())), atol=1e-4)


def test_a_summary_says_what_the_library_gains() -> None:
    """With the estimate from single operators; a slower library is not a gain."""
    chosen = choose.ChosenOperator(
        OPERATOR, 2, "direct", "Winograd with tiles of 4×4", 9.0, 5.0, True
    )
    facts = ChooseFacts(
        *(3, 4, 2, (chosen,), True),
        found=1.21,
        speedup=1.2,
        low=1.15,
        high=1.25,
        pairs=12,
    )
    [line] = choose.describe(facts, KnownFacts())
    assert line == (
        "1 of 3 operators with an alternative lowering: speedup of the library 1.2 (1.15 to 1.25, "
        "12 interleaved pairs), estimated 1.21 (4 alternatives measured, 2 from the ledger)"
    )
    lost = facts._replace(chosen=(chosen._replace(is_kept=False),), is_kept=False, speedup=0.99)
    assert "which is not a gain" in choose.describe(lost, KnownFacts())[0]
    [line] = choose.describe(ChooseFacts(3, 6), KnownFacts())
    assert "0 of 3 operators with an alternative lowering: the rules were already fastest" in line


@pytest.mark.slow
def test_a_second_run_measures_nothing_and_chooses_alike(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The ledger has the times of operators and of the library."""
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(model(conv(16), relu, conv(16), shape=(1, 16, 24, 24))))
    settings = choose.settings(recipe(Kernels(), trials=128), resolved_target()).to_json()
    facts, texts = [], []
    for run in ("first", "second"):
        outcome = fork_server.call(
            "tests.support.tuning:run_stage",
            {
                "name": "choose",
                "settings": settings,
                "inputs": {"import/model.json": str(path)},
                "folder": str(tmp_path / run),
                "ledger": str(tmp_path / "ledger"),
            },
            timeout_s=120,
            log=tmp_path / "log",
            emit=lambda _: None,
        )
        assert outcome.kind == "ok", outcome.message + (tmp_path / "log").read_text()
        facts.append(outcome.value)
        texts.append((tmp_path / run / "out" / "choices.json").read_text())
    assert [(fact["measured"], fact["reused"]) for fact in facts] == [(2, 0), (0, 2)]
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) <= {row["operator"] for row in facts[0]["chosen"]}
