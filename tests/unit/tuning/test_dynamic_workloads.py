"""Kernels with dynamic shapes as workloads: their keys, their records, and the schedule that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from tvm import relax

from tests.support.dynamic_networks import Input, make_network, make_weights
from tests.support.trials import TARGET, trial
from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.schedules.rules import generate_for_cpu
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import Dimension
from tvmflow.stages import pick_best
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.pick_best import Finalist, choose_finalist, judge_finalists
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.libraries import LibraryTimes
from tvmflow.tuning.measure import Timing, build
from tvmflow.tuning.measurer import (
    FinalistsRequest,
    FinalistTimes,
    find_wrong_values,
    read_or_measure,
)
from tvmflow.tuning.trials import FinalistsRecord, LibraryRecord, parse_line, record_to_json
from tvmflow.tuning.workloads import Workload, extract_workloads, shapes_text

WHEN = "2024-01-01T00:00:00.000+00:00"


def product(rows: Dimension, columns: int = 16) -> Workload:
    """The workload of a product with a dynamic number of rows, and a size that follows from it."""
    network = make_network(
        [rows],
        {"x": Input((rows.name, 8))},
        make_weights(w=(8, columns)),
        lambda emit, x, w: emit(relax.op.matmul(x, w)),
    )
    [workload] = extract_workloads(network.lower(TARGET).mod)
    return workload


@pytest.fixture(scope="module")
def rows() -> Workload:
    return product(Dimension("rows", 1, 64, 1, (4, 24)))


def test_the_key_of_dynamic_shapes_has_the_sizes_to_tune_at_and_no_name(rows: Workload) -> None:
    """Another name or range is the same workload; other sizes or columns are another one."""
    assert (rows.untunable_reason, rows.has_dynamic_shape) == ("", True)
    assert product(Dimension("seq", 1, 200, 1, (4, 24))).key == rows.key
    other = product(Dimension("rows", 1, 64, 1, (4, 32, 40)))
    assert other.key != rows.key != product(Dimension("rows", 1, 64, 1, (4, 24)), 32).key


def test_dynamic_shapes_are_listed_and_counted_as_they_are_measured(rows: Workload) -> None:
    """The arithmetic is the geometric mean."""
    [x, _, y] = shapes_text(tvm.ir.load_json(rows.mod))
    assert (x, y) == ("float32[4|24×8]", "float32[4|24×16]")
    assert rows.flops == pytest.approx(2 * 8 * 16 * (4 * 24) ** 0.5)


def test_a_schedule_that_is_wrong_at_a_size_between_is_found(rows: Workload) -> None:
    """It may be right at all sizes that are measured: it is called at one that no tile divides."""
    mod = tvm.ir.load_json(rows.mod)
    cpu = cpu_model_for(TARGET, 1)
    assert cpu is not None
    choices = generate_for_cpu(mod, cpu)
    untuned, other = (build(next(choices).schedule.mod, TARGET) for _ in range(2))
    assert find_wrong_values(mod, untuned, other) == ""

    def wrong(*arguments: tvm.runtime.Tensor) -> None:
        untuned(*arguments)
        if arguments[0].shape[0] == 23:
            values = arguments[-1].numpy()
            values[22] = 0
            arguments[-1].copyfrom(values)

    assert find_wrong_values(mod, untuned, wrong) == "its values are wrong at sizes 23"


def test_a_schedule_with_wrong_values_is_banned(tmp_path: Path) -> None:
    """Before its times are recorded: no later search chooses it."""
    ledger = WorkloadLedger(tmp_path / "x.jsonl")
    ledger.append(trial(1))
    request = FinalistsRequest(
        mod="",
        target=TARGET,
        rules_version=1,
        timing=Timing(number=1, repeat=1, min_repeat_ms=1),
        traces=[trial(1).trace],
        rounds=3,
    )
    times = FinalistTimes("none", (2.0,), ((),), wrong={0: "its values are wrong at sizes 23"})
    read_or_measure(request, ledger, lambda: times)
    assert WorkloadLedger(ledger.path).valid() == []
    [ban] = ledger.bans.values()
    assert ban.reason == "its values are wrong at sizes 23"


def test_what_was_gained_at_each_size_and_what_was_wrong_is_told() -> None:
    """The winner's times of each size, and a schedule that is banned."""
    task = {
        "key": "k",
        "names": ["dense"],
        "weight": 1,
        "flops": 1e6,
        "sizes": ["rows=4", "rows=16"],
    }
    trials = [{"id": "a", "trace": [], "seconds": 1.0}]
    both = (((1.0,) * 9, (4.0,) * 9), ((0.5,) * 9, (2.0,) * 9))
    times = FinalistTimes("register_tiles", (2.0,) * 9, ((1.0,) * 9,), sizes=both)
    judgement = judge_finalists(task, times, trials)
    judgement["wrong"] = ["its values are wrong at sizes 23"]
    facts = pick_best._make_facts(1, {"k": judgement}, None, {})
    assert facts.size_speedups == {"dense": {"rows=4": 2.0, "rows=16": 2.0}}
    assert from_json(pick_best.PickBestFacts, to_json(facts)) == facts
    lines = pick_best.describe(facts, KnownFacts())
    assert "dense at each size: 2× (rows=4), 2× (rows=16)" in lines
    assert "BANNED: a schedule of dense: its values are wrong at sizes 23" in lines
    fixed = to_json(facts._replace(size_speedups={}, wrong={}))
    assert not {"size_speedups", "wrong"} & fixed.keys()


def test_a_trial_keeps_the_times_of_each_size() -> None:
    """One without sizes has no field for them."""
    opened = trial(1)._replace(run_secs=(2.0, 4.0), size_secs=((1.0, 2.0), (4.0, 8.0)))
    assert parse_line(canonical(record_to_json(opened))) == opened
    assert "size_secs" not in record_to_json(trial(1))
    odd = opened._replace(size_secs=((1.0,), (4.0, 8.0)))
    with pytest.raises(ValueError, match="repeats differs between sizes"):
        parse_line(canonical(record_to_json(odd)))


def test_records_of_comparisons_have_as_many_times_at_each_size_as_turns() -> None:
    """Of a finalist that was not measured there are none."""
    request, times = digest_of("request"), (1.0, 1.0)
    finalists = FinalistsRecord(request, "none", (1.0,), (times, ()), WHEN)
    rows = (((1.0,), (1.0,)), (times, times), ())
    libraries = LibraryRecord(request, (), times, times, WHEN)
    both = ((times, times), (times, times))
    for record, sizes in ((finalists, rows), (libraries, both)):
        opened = record._replace(sizes=sizes)
        assert parse_line(canonical(record_to_json(opened))) == opened
        assert "sizes" not in record_to_json(record)
        for odd in (sizes[:1], (((1.0, 1.0, 1.0),), *sizes[1:])):
            with pytest.raises(ValueError, match="sizes"):
                parse_line(canonical(record_to_json(record._replace(sizes=odd))))


def test_a_schedule_that_is_slower_at_one_size_is_not_kept() -> None:
    """However fast it is at the other one; the next best is."""
    untuned = ((4.0,) * 9, (4.0,) * 9)
    uneven = Finalist("a", 1.0, (2.2,) * 9, ((1.0,) * 9, (4.8,) * 9))
    even = Finalist("b", 1.0, (3.0,) * 9, ((3.0,) * 9, (3.0,) * 9))
    assert choose_finalist([uneven, even], (4.0,) * 9, untuned) == even
    assert choose_finalist([uneven], (4.0,) * 9, untuned) is None


def test_a_library_that_is_slower_at_one_size_stays_untuned() -> None:
    """Its geometric mean does not count then."""
    times = LibraryTimes((), (1.0,) * 9, (2.0,) * 9)
    assert times.keeps_tuned
    slower = (((0.5,) * 9, (4.4,) * 9), ((2.0,) * 9, (4.0,) * 9))
    assert not times._replace(sizes=slower).keeps_tuned
