"""What stages say of their results, in summaries and explanations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.facts import kernel_facts, pick_best_facts, tune_facts, workload_facts
from tvmflow.compiler.options import VectorWidth
from tvmflow.core.codec import from_json
from tvmflow.core.statistics import PairedTimes
from tvmflow.stages import (
    STAGES,
    build,
    extract_tasks,
    join,
    lower,
    pick_best,
    tune,
    verify,
)
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.build import BuildFacts
from tvmflow.stages.extract_tasks import ExtractTasksFacts
from tvmflow.stages.join import JoinFacts
from tvmflow.stages.lower import LowerFacts
from tvmflow.stages.pick_best import Finalist, PickBestFacts, choose_finalist
from tvmflow.stages.verify.latency import make_latency, make_speedup
from tvmflow.stages.verify.verdict import OutputComparison, Verdict
from tvmflow.tuning.libraries import LibraryTimes
from tvmflow.tuning.measurer import FinalistTimes
from tvmflow.tuning.tuning_job import TuneFacts, WorkloadFacts

COMPARISON: OutputComparison = {
    "passed": True,
    "rtol": 1e-3,
    "atol": 1e-4,
    "max_abs_error": 7e-7,
    "max_rel_error": 2e-5,
}


def tuned(**changes: Any) -> TuneFacts:
    return from_json(TuneFacts, tune_facts(**changes))


def test_tasks_that_cannot_be_tuned_are_named_with_their_reasons() -> None:
    """The first of them, and how many more there are."""
    reasons = dict.fromkeys("abcde", "it comes with a schedule")
    facts = ExtractTasksFacts(workloads=6, tunable=1, not_tunable=reasons)
    assert extract_tasks.describe(facts, KnownFacts()) == [
        "6 workloads, 1 tunable; not tunable: a (it comes with a schedule), "
        "b (it comes with a schedule), c (it comes with a schedule) and 2 more"
    ]
    only = facts._replace(workloads=1, not_tunable={})
    assert extract_tasks.describe(only, KnownFacts()) == ["1 workload, 1 tunable"]


def test_kernels_are_counted_by_schedule_rule() -> None:
    """Those without a schedule are named; there is a warning for those that take much of the time."""
    facts = BuildFacts(
        kernels=1,
        schedule_rules={"none": ("nms", "scatter", "sort", "unique"), "winograd": ("conv",)},
        unscheduled_shares={"nms": None, "scatter": 0.049, "sort": 0.06, "unique": 0.5},
    )
    generic = BuildFacts(kernels=1, schedule_rules={"generic_loops": ("gather",)})
    assert build.describe(generic, KnownFacts()) == [
        "1 kernel: 1 with generic loops",
        "no rule fits, so with generic loops: gather",
    ]
    assert build.describe(facts, KnownFacts()) == [
        "1 kernel: 1 with Winograd transforms",
        "WITHOUT A SCHEDULE, and an estimated 56 % of the time: unique, sort",
        "without a schedule, but with little work: scatter",
        "WITHOUT A SCHEDULE, in a time that depends on sizes or data: nms",
    ]
    assert build.explain(facts) == [
        "kernels without a schedule",
        "  nms",
        "  scatter",
        "  sort",
        "  unique",
        "kernels with Winograd transforms",
        "  conv",
    ]


def test_an_exhausted_search_space_is_named() -> None:
    """Raising the budget would measure nothing more for it."""
    facts = tuned(trials=8, measured=0, reused=5, exhausted=["softmax"], stopped="exhausted")
    assert tune.describe(facts, KnownFacts()) == [
        "5 of 8 trials (0 measured, 5 from the ledger)",
        "stopped before the budget was spent: every search space was exhausted",
        "search space exhausted: softmax",
    ]


def test_transfers_between_parts_say_whether_they_are_copied() -> None:
    """Between devices they are; on one they stay where they are."""
    transfer: dict[str, Any] = {"tensor": "middle", "bytes": 2048, "from": "a", "to": "b"}
    facts = from_json(
        JoinFacts,
        {
            "transfers": [
                {**transfer, "devices": ["cpu", "cuda"]},
                {**transfer, "devices": ["cpu", "cpu"]},
            ]
        },
    )
    assert join.describe(facts, KnownFacts()) == [
        "a gives middle to b: 2.0 kB, copied from cpu to cuda",
        "a gives middle to b: 2.0 kB, not copied (cpu)",
    ]


def test_a_verdict_describes_outputs_parts_accuracy_and_latency() -> None:
    """With the reference, the tolerance in numbers, and a table of latencies."""
    facts: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.31.1",
        "samples": 1,
        "outputs": {"scores": COMPARISON},
        "parts": {"head": {"latency": make_latency([2e-3])}},
        "accuracy": 0.5,
        "reference_accuracy": 0.75,
        "ran_on": "tx2 at board:9090",
        "latency": {"library": make_latency([1e-3, 3e-3]), "reference": make_latency([5e-3])},
        "reference_speedup": make_speedup(PairedTimes((1e-3,) * 8, (5e-3,) * 8)),
    }
    agreement, ran_on, accuracy, latency, speedup = verify.describe(facts, KnownFacts())
    assert agreement == (
        "scores agrees with ONNX Runtime 1.31.1 on 1 sample (largest error: absolute 7e-07, "
        "relative 2e-05; allowed: atol 0.0001, rtol 0.001)"
    )
    assert ran_on == "ran on tx2 at board:9090"
    assert accuracy == "accuracy 50.00% on 1 held-out sample (the reference: 75.00%)"
    rows = [line.split() for line in latency.splitlines()[2:]]
    assert [" ".join(row[:-10]) for row in rows] == [
        "this library",
        "ONNX Runtime 1.31.1",
        "its part head",
    ]
    assert rows[0][-10:-8] == ["2", "ms"]
    # the library's latency times the ratio of their turns
    assert rows[1][-10:-8] == ["10", "ms"]
    assert speedup == "speedup over ONNX Runtime 1.31.1 5 (5 to 5, interleaved, 8 pairs)"


def test_runtimes_beside_the_library_have_latencies_or_reasons() -> None:
    """A reference that was measured interleaved has one row; what is not installed is named with its command."""
    facts: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.31.1",
        "latency": {"library": make_latency([1e-3]), "reference": make_latency([5e-3])},
        "compared": {
            "onnxruntime": {
                "name": "ONNX Runtime 1.31.1",
                "latency": make_latency([2e-3]),
                "library": make_latency([1e-3]),
                "speedup": make_speedup(PairedTimes((1e-3,) * 8, (2e-3,) * 8)),
                "outputs": {"scores": COMPARISON},
            },
            "tensorrt": {
                "name": "TensorRT 10",
                "latency": make_latency([2e-3]),
                "library": make_latency([1e-3]),
                "speedup": make_speedup(PairedTimes((1e-3,) * 8, (2e-3,) * 8)),
                "outputs": {"scores": COMPARISON},
            },
            "openvino": {
                "name": "OpenVINO",
                "not_timed": "it is not installed (pip install openvino)",
            },
        },
    }
    latency, *lines = verify.describe(facts, KnownFacts())
    rows = [line.split("  ")[2].strip() for line in latency.splitlines()[2:]]
    assert rows == ["this library", "ONNX Runtime 1.31.1", "TensorRT 10"]
    assert "5 ms" not in latency
    assert lines == [
        "speedup over ONNX Runtime 1.31.1 2 (2 to 2, interleaved, 8 pairs)",
        "speedup over TensorRT 10 2 (2 to 2, interleaved, 8 pairs)",
        "TensorRT 10 agrees with ONNX Runtime 1.31.1, too (largest error: 7e-07)",
        "OpenVINO is not timed: it is not installed (pip install openvino)",
    ]


@pytest.mark.parametrize(
    ("arithmetic", "text"),
    [
        ("float16", "float16, entirely or in part"),
        ("bfloat16", "bfloat16"),
        ("quantized", "quantized integers"),
    ],
)
def test_the_tolerance_is_explained_by_the_arithmetic(arithmetic: str, text: str) -> None:
    """With the share of the largest value that it allows."""
    facts: Verdict = {
        "passed": True,
        "against": "reference",
        "tolerance": {"for": arithmetic, "rtol": 0.01, "atol": 0.005, "of_largest": 0.0625},
    }
    assert verify.explain(facts) == [
        "outputs may differ by atol 0.005, or 6.25% of an output's largest value where that is more, "
        f"and rtol 0.01 (the model computes in {text})"
    ]
    facts["tolerance"].update({"of_slice": 1e-4, "rms": 0.05, "scale": 0.005})
    assert verify.explain(facts) == [
        "outputs may differ by atol 0.005, or 6.25% of an output's largest value, or 0.01% of the largest value "
        f"of its rows, columns or channels where that is more, and rtol 0.01 (the model computes in {text})",
        "an output as a whole may differ by 5.00% (root mean square of errors) and by 0.50% in scale",
    ]


def test_a_verdict_describes_how_outputs_agree_on_the_whole() -> None:
    """With the warnings first, and the inputs where they are not the usual ones."""
    whole: OutputComparison = {
        "error_of_largest": 3e-6,
        "cosine_similarity": 1 - 1e-9,
        "best_class_agreement": 2 / 3,
    }
    facts: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.31.1",
        "samples": 3,
        "random_inputs": "normally distributed with standard deviation 10",
        "outputs": {"scores": {**COMPARISON, **whole}},
        "warnings": ["output 'boxes' is empty"],
    }
    assert verify.describe(facts, KnownFacts()) == [
        "WARNING: output 'boxes' is empty",
        "scores agrees with ONNX Runtime 1.31.1 on 3 samples (largest error: absolute 7e-07, relative 2e-05, "
        "3e-06 of the largest value, cosine similarity 1.000000, same best class 66.7%; "
        "allowed: atol 0.0001, rtol 0.001)",
        "inputs are normally distributed with standard deviation 10: others did not reach every output, or gave no finite values",
    ]


def test_stages_without_a_description_say_nothing() -> None:
    """Whatever their facts are."""
    for name in ("import", "cut", "export", "emulation_libc", "emulation_program"):
        assert STAGES[name].describe(None, KnownFacts()) == []
        assert STAGES[name].explain(None) == []


# ---------------------------------------------------------------- pick_best


TASK = {"key": "k", "names": ["conv"], "weight": 2, "flops": 3e6, "tunable": True}
TRIALS: list[dict[str, Any]] = [
    {"id": "a", "trace": [], "seconds": 4e-6},
    {"id": "b", "trace": [], "seconds": 2e-6},
]


def test_the_fastest_finalist_wins_if_it_beats_the_untuned_kernel() -> None:
    """Medians in µs, the rule of the untuned kernel, and all samples are kept."""
    times = FinalistTimes("register_tiles", (8e-6,) * 3, ((4e-6,) * 3, (2e-6,) * 3))
    judgement = pick_best.judge_finalists(TASK, times, TRIALS)
    assert (judgement["winner"], judgement["rule"]) == ("b", "register_tiles")
    assert judgement["untuned_us"] == pytest.approx(8)
    assert judgement["tuned_us"] == pytest.approx(2)
    assert [len(samples["samples_us"]) for samples in judgement["finalists"]] == [3, 3]


def test_a_finalist_that_is_no_faster_than_the_untuned_kernel_is_not_chosen() -> None:
    """Nor one that could not be measured."""
    slow = FinalistTimes("elementwise", (2e-6,), ((4e-6,) * 3, ()))
    assert pick_best.judge_finalists(TASK, slow, TRIALS)["winner"] is None
    failed = pick_best.judge_finalists(TASK, FinalistTimes(error="it hung"), TRIALS)
    assert (failed["winner"], failed["untuned_us"], failed["error"]) == (None, None, "it hung")
    assert choose_finalist([], (1.0,)) is None


def test_finalists_that_the_noise_does_not_separate_are_chosen_by_the_ledger() -> None:
    """So that measuring again does not change the choice, and `build` stays up to date."""
    finalists = [Finalist("a", 1.0, (1.00,) * 4), Finalist("b", 0.9, (1.01,) * 4)]
    winner = choose_finalist(finalists, (2.0,))
    assert winner is not None and winner.id == "b"


def test_facts_of_a_choice_cover_kernels_that_have_a_schedule() -> None:
    """By tuning or by rule; kernels are ordered by their time in one inference."""
    faster = FinalistTimes("none", (8e-6,), ((4e-6,) * 3, (2e-6,) * 3))
    untuned = FinalistTimes("none", (1e-6,), ((4e-6,) * 3, ()))
    judgements = {
        "k": pick_best.judge_finalists(TASK, untuned, TRIALS),
        "l": pick_best.judge_finalists(TASK, faster, TRIALS),
    }
    facts = pick_best._make_facts(2, judgements, None, {})
    assert (facts.tuned, facts.tunable, facts.untried) == (1, 2, 0)
    assert facts.coverage == pytest.approx(16 / 18, abs=1e-4)
    assert facts.speedup == pytest.approx(18 / 6)
    assert [kernel.untuned_us for kernel in facts.kernels] == [8.0, 1.0]


def test_the_summary_says_what_trials_could_gain() -> None:
    """At most, by the roofline, and what the workloads without trials could; nothing where a time is not known."""
    rows = (
        WorkloadFacts("conv", "conv", 9, 2, 1000.0, None, roofline_us=900.0),
        WorkloadFacts("pool", "pool", 0, 1, 100.0, None, roofline_us=75.0),
        WorkloadFacts("relu", "relu", 0, 1, 10.0, None, roofline_us=0.0),
    )
    assert tune._describe_roofline(rows) == [
        "1 of 3 workloads could gain at most 200 µs of 2.11 ms; those without a trial 35 µs together",
    ]
    assert tune._describe_roofline(rows[:1]) == [
        "1 of 1 workload could gain at most 200 µs of 2 ms"
    ]
    assert tune._describe_roofline((*rows, rows[0]._replace(roofline_us=None))) == []


def test_workloads_at_the_roofline_are_counted() -> None:
    """The gain of trials is not told here: it is measured again, interleaved."""
    near = WorkloadFacts("k", "conv", 0, 2, 1000.0, None, roofline_us=980.0, at_roofline=True)
    far = WorkloadFacts("l", "pool", 9, 1, 1000.0, 900.0, roofline_us=500.0)
    assert tune._describe_roofline((far, near)) == [
        "1 of 2 workloads could gain at most 500 µs of 3 ms; those without a trial 40 µs together",
        "1 of 2 workloads reaches 95% of the roofline and is not tuned further",
    ]
    assert tune._describe_roofline(()) == []
    assert tune.explain(tuned()._replace(workloads=(far, near))) == [
        "workloads against the roofline of this machine",
        "  conv: 0 trials, 1 ms per call, 98% of its roofline",
        "  pool: 9 trials, 900 µs per call, 56% of its roofline",
    ]


def test_the_possible_gain_is_that_of_all_kernels_at_the_roofline() -> None:
    """A kernel that is faster than its estimate has nothing to gain; without all times there is no figure."""
    row = WorkloadFacts("k", "conv", 9, 2, 1000.0, 500.0)
    rows = [row._replace(roofline_us=400.0), row._replace(calls=1, roofline_us=800.0)]
    assert tune._make_gain(rows) == {"found": 2.0, "possible": round(3.0 / 1.3, 4)}
    assert tune._make_gain([row]) == {} == tune._make_gain([])


def judge_two() -> dict[str, pick_best.Judgement]:
    """Two workloads with a winner each."""
    times = FinalistTimes("register_tiles", (8e-6,) * 3, ((4e-6,) * 3, (2e-6,) * 3))
    return {
        key: pick_best.judge_finalists({**TASK, "key": key, "names": [name]}, times, TRIALS)
        for key, name in (("k", "conv"), ("l", "dense"))
    }


def test_a_kernel_that_loses_in_the_library_is_left_untuned() -> None:
    """The summary names it; the gain of the whole library is what `verify` measures."""
    judgements = judge_two()
    times = LibraryTimes(("k",), (3e-3,) * 8, (6e-3,) * 8)
    pick_best.drop_slower(judgements, times)
    assert [judgement["winner"] for judgement in judgements.values()] == [None, "b"]
    assert [judgement["tuned_us"] for judgement in judgements.values()] == [None, 2.0]
    facts = pick_best.make_facts(judgements, times)
    assert facts["overruled"] == {pick_best.SLOWER_IN_LIBRARY: ["conv"]}
    assert pick_best.describe_libraries(facts, 57) == [
        "1 kernel is faster tuned in isolation, but slower in the library, so left untuned: conv",
    ]


def test_a_library_that_is_not_faster_is_left_untuned() -> None:
    """All its kernels are, and the summary says how many schedules were tried for that."""
    judgements = judge_two()
    times = LibraryTimes((), (11.2e-3,) * 8, (6.1e-3,) * 8)
    pick_best.drop_slower(judgements, times)
    assert [judgement["winner"] for judgement in judgements.values()] == [None, None]
    facts = pick_best.make_facts(judgements, times)
    assert pick_best.describe_libraries(facts, 57) == [
        "after 57 tried schedules, the untuned library is the fastest: tuned kernels give it a "
        "speedup of 0.545 (0.545 to 0.545, interleaved, 8 pairs), so all kernels stay untuned"
    ]


def test_a_library_that_cannot_be_compared_keeps_what_won_alone() -> None:
    """With the reason; a target that is not timed here says nothing."""
    judgements = judge_two()
    for times in (LibraryTimes(error="it crashed"), None):
        pick_best.drop_slower(judgements, times)
    assert [judgement["winner"] for judgement in judgements.values()] == ["b", "b"]
    facts = pick_best.make_facts(judgements, LibraryTimes(error="it crashed"))
    assert pick_best.describe_libraries(facts, 57) == [
        "the tuned library was not compared with the untuned one: it crashed"
    ]
    assert pick_best.describe_libraries(pick_best.make_facts(judgements, None), 57) == []


def test_the_time_of_a_tuning_is_told_with_the_speedup_at_the_roofline() -> None:
    """Nothing where that is not known."""
    workloads = [
        workload_facts("conv", roofline_us=2.0),
        workload_facts("dense", roofline_us=4.0),
    ]
    search = tuned(measured=9, seconds=240.0, workloads=workloads)
    kernels = [
        kernel_facts("conv", untuned_us=8.0, tuned_us=4.0),
        kernel_facts("dense", calls=2, untuned_us=4.0, tuned_us=None),
    ]
    facts = from_json(PickBestFacts, pick_best_facts(kernels=kernels, untuned_us=16.0))
    assert pick_best.describe_roofline(facts, search) == [
        "4 min 00 s of tuning; by the roofline of this machine, "
        "at most a speedup of 1.6 over untuned is possible"
    ]
    assert pick_best.describe_roofline(facts, None) == []


def test_tuning_that_kept_nothing_has_no_speedup() -> None:
    """The rules were fastest, unless a trial failed or the library was slower: then that is said."""
    facts = from_json(PickBestFacts, pick_best_facts(tuned=0, tunable=6, speedup=1.61))
    [line] = pick_best.describe(facts, KnownFacts())
    assert line.startswith(
        "accepted tuned schedules for 0 of 6 workloads: those of the rules are the fastest; "
    )
    assert "speedup" not in line and "1.61" not in line
    [line, _] = pick_best.describe(facts._replace(untried=2), KnownFacts())
    assert line.startswith("accepted tuned schedules for 0 of 6 workloads; ")


def test_the_vector_width_is_told_where_it_is_not_the_widest() -> None:
    """With the estimate behind it; `explain` has it for every width. A GPU has none."""
    costs = {512: 24.0, 256: 16.0, 128: 32.0}
    facts = LowerFacts(kernels=1)
    narrow = facts._replace(vectors=VectorWidth(256, costs))
    line = (
        "vectors of 256 bits by the channels of the model; weighted operations on vectors: "
        "1.50 times as many with 512, 2.00 times as many with 128"
    )
    assert lower.describe(narrow, KnownFacts()) == ["1 kernel", line]
    assert lower.explain(narrow) == [line]
    wide = facts._replace(vectors=VectorWidth(512, {**costs, 512: 12.0}))
    assert lower.describe(wide, KnownFacts()) == ["1 kernel"]
    assert lower.explain(wide)[0].startswith("vectors of 512 bits by the channels")
    fixed = facts._replace(vectors=VectorWidth(128, {}))
    assert lower.explain(fixed) == ["vectors of 128 bits, as kernels.vector_bits says"]
    assert lower.explain(facts) == []


def test_the_threads_of_a_tuning_and_its_starting_points_are_told() -> None:
    """Also that a shell or a container left less than the machine; times of elsewhere are not among them."""
    facts = tuned(
        threads=1,
        usable_cpus=1,
        cpus=2,
        starting_points=5,
        near_targets=["llvm znver5, 2 threads"],
    )
    assert tune.describe(facts, KnownFacts())[1:] == [
        "measured with 1 thread; the run might use 1 of this machine's 2 CPUs (the target's `threads` sets another number)",
        "5 schedules measured first: the best on llvm znver5, 2 threads",
    ]
    whole = facts._replace(threads=2, usable_cpus=2, starting_points=0, near_targets=())
    assert tune.describe(whole, KnownFacts())[1:] == ["measured with 2 threads"]


def test_a_stand_in_is_never_taken_for_the_framework() -> None:
    """What ran is what outputs agree with; who refused the model is said beside it, with the reason."""
    facts: Verdict = {
        "passed": True,
        "against": "reference",
        "samples": 3,
        "reference": "the ONNX reference evaluator 1.23.2",
        "reference_note": "ONNX Runtime 1.31.1 refuses this model: opset 28 is under development; "
        "the ONNX reference evaluator 1.23.2 ran it instead",
        "outputs": {"y": COMPARISON},
    }
    agreement, note = verify.describe(facts, KnownFacts())
    assert agreement.startswith("y agrees with the ONNX reference evaluator 1.23.2 on 3 samples")
    assert note == (
        "ONNX Runtime 1.31.1 refuses this model: opset 28 is under development; "
        "the ONNX reference evaluator 1.23.2 ran it instead"
    )
