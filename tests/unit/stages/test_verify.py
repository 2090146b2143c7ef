"""Comparing a library with the reference: tolerances, messages, accuracy and speedup."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
from tvm import relax

from tests.support.tuning import model, relu
from tvmflow.core.statistics import PairedTimes
from tvmflow.core.types import Precision, TensorSpec
from tvmflow.graph.ir_operators import BlockQuantizedOperands, BlockQuantizedWeights, PackRows
from tvmflow.recipe.sections import Verify
from tvmflow.runtime.arrays import pack_rows, unpack_rows
from tvmflow.runtime.samples import Samples, random_samples, top1_accuracy
from tvmflow.stages import verify
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.verify import comparison, verdict_text, verification
from tvmflow.stages.verify.comparison import (
    Tolerance,
    compare_batches,
    find_arithmetic,
    tolerance_for,
)
from tvmflow.stages.verify.latency import (
    make_latency,
    make_profile,
    make_speedup,
    measure_profile,
)
from tvmflow.stages.verify.verdict import (
    BFLOAT16,
    FLOAT16,
    FLOAT16_SUMS,
    FLOAT32,
    INT8_STATES,
    QUANTIZED,
    AllowedDifference,
    ComparedRuntime,
    OutputComparison,
    Verdict,
    verdict_without_measurements,
)
from tvmflow.stages.verify_settings import CheckSettings

F = np.float32


def compare(actual: Any, expected: Any, arithmetic: str = FLOAT32) -> OutputComparison:
    tolerance = tolerance_for(arithmetic, rtol=None, atol=None)
    return comparison.compare(np.asarray(actual, F), np.asarray(expected, F), tolerance)


def checks(**fields: Any) -> CheckSettings:
    return CheckSettings(**{**Verify().model_dump(), "data": False, **fields})


def module(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> Any:
    return SimpleNamespace(inputs=inputs, outputs=outputs)


# ---------------------------------------------------------------- numbers


def test_equal_outputs_have_no_error() -> None:
    """NaN is NaN and infinity is infinity."""
    result = compare([1, np.nan, np.inf, -np.inf, 0], [1, np.nan, np.inf, -np.inf, 0])
    assert result["passed"]
    assert (result["max_abs_error"], result["max_rel_error"], result["mismatched"]) == (0, 0, 0)


def test_an_output_without_numbers_is_not_agreement() -> None:
    """Both sides may have NaN alone; nothing was compared then, and the message says what to do."""
    result = compare([np.nan, np.inf], [np.nan, np.inf])
    assert result == {"passed": False, "incomparable": "no finite number"}
    [sentence] = verdict_text.list_mismatches({"y": result}, "ONNX Runtime 1.31.1")
    assert sentence.startswith("output 'y' of ONNX Runtime 1.31.1 has no finite number, so that")


def test_the_tolerance_follows_the_size_of_the_output() -> None:
    """rtol for large values, and a share of the largest one for those near 0, however small all of them are."""
    for size in (1.0, 1e-13, 1e13):
        expected = np.concatenate([np.full(600, size), [0.0]]).reshape(1, 601)
        for error, passes in ((5e-5, True), (2e-4, False)):
            actual = expected.copy()
            actual[0, -1] += error * size
            assert compare(actual, expected)["passed"] == passes
        result = compare(expected * 1.0005, expected)
        assert (result["mismatched"], list(result["exceeded"])) == (0, ["rms"])
        assert compare(expected * 1.00005, expected)["passed"]
        assert compare(expected * 1.002, expected)["mismatched"] == 600


def test_numbers_of_several_kinds_in_one_output_are_judged_by_their_own_size() -> None:
    """Probabilities beside pixels: a channel whose numbers are small has a small tolerance."""
    expected = np.ones((1, 2, 600))
    expected[0, 0] *= 300
    expected[0, 1] *= 0.01
    wrong = expected.copy()
    wrong[0, 1] = 0
    result = compare(wrong, expected)
    assert result["mismatched"] == 600
    assert result["error_of_largest"] == pytest.approx(0.01 / 300)
    wrong[0, 1] = 0.01 + 300 * 3e-6
    assert compare(wrong, expected)["passed"], "the rounding of large values reaches small ones"


def test_integers_and_booleans_are_equal_or_not() -> None:
    """Also those that no float64 has; a tolerance of the recipe holds for them too."""
    exact = tolerance_for(FLOAT32, rtol=None, atol=None)
    big = 2**60
    for dtype, one, other in (("int64", big, big + 1), ("int32", 5000, 5001), ("bool", 0, 1)):
        a, b = np.array([one], dtype), np.array([other], dtype)
        assert comparison.compare(a, a, exact)["passed"]
        assert comparison.compare(a, b, exact)["mismatched"] == 1
    loose = tolerance_for(FLOAT32, rtol=0.01, atol=None)
    assert comparison.compare(np.array([5000]), np.array([5001]), loose)["passed"]


def test_an_integer_of_a_quantized_model_may_be_some_steps_off() -> None:
    """One of 8 bits; indices may not."""
    tolerance = tolerance_for(QUANTIZED, rtol=None, atol=None)
    for dtype, passes in (("uint8", True), ("int8", True), ("int64", False), ("bool", False)):
        a, b = np.array([100, 0], dtype), np.array([101, 1], dtype)
        if dtype == "bool":
            a = np.array([True, False])
        assert comparison.compare(a, b, tolerance)["passed"] == passes, dtype


def test_how_an_output_agrees_on_the_whole() -> None:
    """The cosine similarity, the scale, and the best class of each row, whatever the size; none of zeros."""
    for size in (1e-30, 1.0, 1e30):
        expected = np.array([[1, 2, 3], [3, 1, 2]]) * size
        same = compare(expected, expected)
        assert (same["cosine_similarity"], same["scale"], same["rms_error"]) == (1, 1, 0)
        assert (same["error_of_largest"], same["best_class_agreement"]) == (0, 1)
        flipped = compare(expected[:, ::-1] * 2, expected)
        assert flipped["best_class_agreement"] == 0
        assert flipped["cosine_similarity"] == pytest.approx(23 / 28)
        assert flipped["scale"] == pytest.approx(23 / 14)
    zeros = compare(np.zeros((2, 3)), expected)
    assert zeros["rms_error"] == 1 and zeros["error_of_largest"] == 1
    assert "cosine_similarity" not in zeros and zeros["mismatched"] == 6
    assert compare(expected, np.zeros((2, 3)))["error_of_largest"] == "inf"
    image = np.ones((1, 3, 4, 4))
    assert "best_class_agreement" not in compare(image, image)


def test_the_tolerance_of_coarse_rounding_follows_the_largest_value() -> None:
    """The error of a result near 0 follows the results next to it; infinities are left out."""
    for arithmetic, allowed in (
        (FLOAT16, 1000 * 10 / 2**11),
        (BFLOAT16, 1000 * 10 / 2**8),
        (QUANTIZED, 1000 * 16 / 2**8),
    ):
        expected = [1000, 0, np.inf]
        assert compare([1000, 0.99 * allowed, np.inf], expected, arithmetic)["passed"]
        result = compare([1000, 1.01 * allowed, np.inf], expected, arithmetic)
        assert (result["mismatched"], result["rtol"], result["atol"]) == (1, 0.01, allowed)
    assert not compare([1000, 0.1], [1000, 0])["passed"]


def test_a_tolerance_that_the_recipe_gives_is_the_one_that_counts() -> None:
    """Each by itself; an absolute one holds whatever the outputs are, and nothing is asked of the whole."""
    for arithmetic in (FLOAT32, QUANTIZED):
        default = tolerance_for(arithmetic, rtol=None, atol=None)
        assert default.rms and default.exact_integers
        relative = tolerance_for(arithmetic, rtol=0.5, atol=None)
        assert relative == default._replace(
            rtol=0.5, rms=None, scale=None, exact_integers=False, slice_scale=None
        )
        assert tolerance_for(arithmetic, rtol=0.5, atol=1e-4) == Tolerance(0.5, 1e-4)


def test_the_tolerance_follows_what_is_computed_in() -> None:
    """By the imported model, and by the precision of its recipe."""
    one = relax.const(np.float32(0.5))
    zero = relax.const(np.int8(0))

    def quantized(value: Any, _: Any) -> Any:
        return relax.op.quantize(value, one, zero, axis=0, out_dtype="int8")

    def half(value: Any, _: Any) -> Any:
        return relax.op.astype(value, "float16")

    def rows(value: Any, _: Any) -> Any:
        return PackRows().call(value)

    def block_quantized(value: Any, _: Any, *, rounds_data: bool) -> Any:
        depth = int(value.ty.shape[-1])
        weights = BlockQuantizedWeights(
            bits=8, group=depth, depth=depth, zero=128, rounds_data=rounds_data
        )
        packed = relax.const(np.zeros((depth, 1, depth), np.uint8))
        scales = relax.const(np.ones((depth, 1), F))
        return relax.op.matmul(value, weights.call(*BlockQuantizedOperands(packed, scales)))

    result = {}
    layers: dict[str, Callable[[Any, Any], Any]] = {
        "plain": relu,
        "half": half,
        "bfloat16": lambda value, _: relax.op.astype(
            relax.op.astype(value, BFLOAT16), str(value.ty.dtype)
        ),
        "whole": quantized,
        "rows": rows,
        "float data": functools.partial(block_quantized, rounds_data=False),
        "rounded data": functools.partial(block_quantized, rounds_data=True),
    }
    for name, layer in layers.items():
        result[name] = [find_arithmetic(model(layer), p) for p in get_args(Precision)]
    assert result == {
        "plain": [FLOAT32, FLOAT16, FLOAT16_SUMS, BFLOAT16],
        "half": [FLOAT16, FLOAT16, FLOAT16_SUMS, BFLOAT16],
        "bfloat16": [BFLOAT16, BFLOAT16, FLOAT16_SUMS, BFLOAT16],
        "whole": [QUANTIZED] * 4,
        "rows": [INT8_STATES, INT8_STATES, FLOAT16_SUMS, BFLOAT16],
        "float data": [FLOAT32, FLOAT16, FLOAT16_SUMS, BFLOAT16],
        "rounded data": [QUANTIZED] * 4,
    }


def test_rows_of_int8_are_compared_as_float32() -> None:
    """Alone, and in batches; a wrong scale is found."""
    expected = np.random.default_rng(0).normal(size=(1, 2, 5, 16)).astype(F)
    tolerance = tolerance_for(INT8_STATES, rtol=None, atol=None)
    tolerance = tolerance_for(INT8_STATES, rtol=None, atol=None)
    rows = pack_rows(expected)
    assert comparison.compare(rows, expected, tolerance)["passed"]
    batches = [{"x": rows}], [{"x": expected}]
    data = Samples([{}], 1, None, 0)
    assert compare_batches(["x"], *batches, data, tolerance)["x"]["passed"]
    doubled = pack_rows(2 * expected)
    moved = np.concatenate([rows[..., :-4], doubled[..., -4:]], -1)
    assert not comparison.compare(moved, expected, tolerance)["passed"]


def test_random_states_of_int8_have_valid_scales() -> None:
    """As float32 states have: of the usual distribution, and of the range of a recipe."""
    spec = TensorSpec("past", (1, 2, 50, 20), "int8", row_scales=True)
    [feed] = random_samples([spec], {}, batches=1, seed=0, deviation=1.0).batches
    assert feed["past"].shape == spec.shape
    values = unpack_rows(feed["past"])
    assert 0.8 < values.std() < 1.2
    [feed] = random_samples([spec], {"past": (2, 3)}, batches=1, seed=0).batches
    assert 1.9 < unpack_rows(feed["past"]).min() < unpack_rows(feed["past"]).max() < 3.1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 7.0])
def test_the_worst_element_is_reported(wrong: float) -> None:
    """Its index, the actual and the expected value."""
    actual = np.ones((2, 3), F)
    actual[1, 2] = wrong
    actual[0, 0] = 1.5
    result = compare(actual, np.ones((2, 3)))
    assert not result["passed"]
    assert result["mismatched"] == 2
    assert result["worst"]["index"] == [1, 2]
    assert result["worst"]["expected"] == 1


def test_another_shape_fails_whatever_the_numbers_are() -> None:
    """Broadcasting must not make two shapes one."""
    assert compare(np.ones((2, 1)), np.ones((2, 3))) == {
        "passed": False,
        "shape": "(2, 1) instead of (2, 3)",
    }


def test_an_empty_output_and_a_scalar_can_be_compared() -> None:
    """No elements are not errors."""
    assert compare(np.ones((0, 3)), np.ones((0, 3)))["passed"]
    assert compare(2.0, 2.0)["passed"]
    assert not compare(2.0, 3.0)["passed"]


def test_every_failed_output_has_a_sentence() -> None:
    """How many, by which tolerance, and the worst."""
    verdict: Verdict = {
        "passed": False,
        "against": "reference",
        "reference": "ONNX Runtime 1.31.1",
        "outputs": {
            "good": {"passed": True},
            "bad": compare([1, 5], [1, 2]),
            "odd": compare([1], [1, 2]),
            "half": compare(np.full(256, 1.01), np.ones(256), BFLOAT16),
            "coarse": compare(np.full(256, 1.0005), np.ones(256)),
        },
    }
    failures = verdict_text.list_failures(verdict, checks())
    assert failures == [
        "output 'bad': 1 of 2 elements are out of tolerance (rtol 0.001, atol 0.0002); "
        "the worst, at [1], is 5.0 where ONNX Runtime 1.31.1 gives 2.0",
        "output 'odd' has shape (1,) instead of (2,)",
        "output 'half': on the whole it is 1.01 times what ONNX Runtime 1.31.1 gives, more than 0.75% from 1",
        "output 'coarse': the root mean square of its errors is 0.05% of that of ONNX Runtime 1.31.1, "
        "more than 0.01%",
    ]
    assert verdict_text.list_warnings(verdict, checks()) == []


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("OpenVINO 2026.4.1", "OpenVINO 2026.4.1 differs from ONNX Runtime 1.31.1"),
        (
            "ONNX Runtime 1.31.1",
            "ONNX Runtime 1.31.1 with its rewrites of the graph differs from itself without them",
        ),
    ],
)
def test_a_runtime_that_differs_from_the_reference_is_a_warning(name: str, subject: str) -> None:
    """Its numbers are judged as those of the library are, and fail nothing."""
    verdict: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.31.1",
        "outputs": {"y": compare([1, 2], [1, 2])},
        "compared": {
            "right": {"name": "Right 1.0", "outputs": {"y": compare([1, 2], [1, 2])}},
            "wrong": {"name": name, "outputs": {"y": compare([1, 5], [1, 2])}},
            "absent": {"name": "Absent", "not_timed": "it is not installed"},
        },
    }
    assert verdict_text.list_failures(verdict, checks()) == []
    assert verdict_text.list_warnings(verdict, checks()) == [
        f"{subject}, so that its latency is that of other results: output 'y': 1 of 2 elements are out of "
        "tolerance (rtol 0.001, atol 0.0002); the worst, at [1], is 5.0 where ONNX Runtime 1.31.1 gives 2.0"
    ]


def test_accuracy_below_the_gate_fails() -> None:
    """Top-1 on the first output, whatever its trailing shape."""
    scores = np.array([[[0], [9], [0]], [[1], [0], [0]]], F)
    labels = np.array([[1], [2]])
    accuracy = top1_accuracy({"scores": scores}, "scores", labels)
    assert accuracy == 0.5
    failures = verdict_text.list_failures(
        {"passed": True, "against": "reference", "accuracy": accuracy}, checks(min_accuracy=0.9)
    )
    assert failures == ["accuracy 0.5000 is below verify.min_accuracy 0.9"]


def test_the_gate_on_speed() -> None:
    """The whole library against the same one untuned; without a tuned kernel it is the same one."""
    times = PairedTimes((1.0,) * 8, (3.0,) * 8)
    tuned: Verdict = {"passed": True, "against": "none", "speedup": make_speedup(times)}
    assert verification.list_slowdowns(tuned, None) == []
    assert verification.list_slowdowns(tuned, 2.5) == []
    assert verification.list_slowdowns(tuned, 3.5) == [
        "the speedup of the tuned library over the untuned one is 3, below tune.min_speedup 3.5"
    ]
    untuned_only: Verdict = {"passed": True, "against": "none"}
    assert "the untuned one is 1, " in verification.list_slowdowns(untuned_only, 3.5)[0]


def test_a_tuned_library_that_is_slower_than_the_untuned_one_stands_out() -> None:
    """The summary says by how much, and how sure that is."""
    slower = make_speedup(PairedTimes((2.0,) * 8, (1.0,) * 8))
    facts: Verdict = {"passed": True, "against": "reference", "speedup": slower}
    assert verify.describe(facts, KnownFacts()) == [
        "SLOWER THAN UNTUNED: speedup over untuned 0.5 (0.5 to 0.5, interleaved, 8 pairs); "
        "`--minutes 0` delivers the untuned library"
    ]
    faster = make_speedup(PairedTimes((1.0,) * 8, (2.0,) * 8))
    [line] = verify.describe({**facts, "speedup": faster}, KnownFacts())
    assert line.startswith("speedup over untuned 2 ")


def test_kernels_that_no_rule_fits_are_listed_with_their_share_of_the_time() -> None:
    """Steps of the runtime are between kernels; `explain` has all of them, and the share of each rule."""
    rules = {"conv": "register_tiles", "nms": "none", "gather": "generic_loops", "pad": "none"}
    seconds = {"conv": 5e-3, "nms": 1e-3, "gather": 4e-3, "pad": 0.0, "vm.builtin.copy": 9e-3}
    profile = make_profile(seconds, rules, call_s=20e-3)
    assert profile == {
        "kernels": {"conv": 0.25, "gather": 0.2, "nms": 0.05, "pad": 0.0},
        "rules": {"register_tiles": 0.25, "none": 0.05, "generic_loops": 0.2},
        "without_rule": {"gather": 0.2, "nms": 0.05, "pad": 0.0},
        "between_kernels": 0.5,
    }
    facts: Verdict = {"passed": True, "against": "reference", "profile": profile}
    assert verify.describe(facts, KnownFacts()) == [
        "3 kernels that no schedule rule fits take 25.0% of the time: "
        "gather 20.0%, nms 5.0%, pad 0.0%"
    ]
    assert verify.explain(facts) == [
        "time by schedule rule: register_tiles 25.0%, generic_loops 20.0%, none 5.0%, "
        "between kernels 50.0%",
        "kernels that no schedule rule fits",
        "  gather 20.0%",
        "  nms 5.0%",
        "  pad 0.0%",
    ]
    assert make_profile({}, rules, call_s=1.0) is None


def test_kernels_never_take_longer_than_the_call_that_they_are_part_of() -> None:
    """Reports of kernels take time: 19 µs in all are not part of a call of 7 µs."""
    profile = make_profile(
        {"conv": 15e-6, "dense": 4e-6}, {"conv": "tuned", "dense": "tuned"}, 7e-6
    )
    assert profile is not None
    assert sum(profile["kernels"].values()) == pytest.approx(1, abs=1e-3)
    assert profile["kernels"]["conv"] == pytest.approx(15 / 19, abs=1e-3)
    assert profile["between_kernels"] == 0


class _Profiled:
    """A library whose kernels take the seconds of one round after the other; the last ones repeat."""

    def __init__(self, *rounds: tuple[float, float]) -> None:
        self.rounds, self.profiled = rounds, 0

    def profile(self, feed: Any) -> dict[str, float]:
        seconds = self.rounds[min(self.profiled, len(self.rounds) - 1)]
        self.profiled += 1
        return dict(zip(("conv", "dense"), seconds, strict=True))

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        return [3.0] * repeat


@pytest.mark.parametrize(
    ("rounds", "measured"),
    [
        (((1.0, 1.0),), 3),
        # the whole machine is slower, and shares stay the same
        (((1.0, 1.0), (2.0, 2.0)), 3),
        (((1.0, 3.0), (1.0, 1.0)), 4),
        (((1.0, 1.0), (1.0, 2.0)) * 5, 9),
    ],
)
def test_a_profile_ends_when_rounds_agree_about_the_shares_of_kernels(
    rounds: tuple[tuple[float, float], ...], measured: int
) -> None:
    """It says how many there were, and nine are enough on a noisy machine."""
    library = _Profiled(*rounds)
    rules = {"conv": "register_tiles", "dense": "register_tiles"}
    profile = measure_profile(cast(Any, library), {}, rules)
    assert profile is not None
    assert (library.profiled, profile["rounds"]) == (measured, measured)
    facts: Verdict = {"passed": True, "against": "reference", "profile": profile}
    assert verify.explain(facts)[0].startswith(
        f"time by schedule rule ({measured} rounds of calls)"
    )


def test_latencies_in_a_table_have_the_ratio_that_was_measured_interleaved() -> None:
    """Though the machine was slower when the other runtime was measured than when the library was alone."""

    equal = make_speedup(PairedTimes((31e-3,) * 8, (32e-3,) * 8))
    other: ComparedRuntime = {
        "name": "ORT",
        "latency": make_latency([32e-3]),
        "library": make_latency([31e-3]),
        "speedup": equal,
    }
    facts: Verdict = {
        "passed": True,
        "against": "none",
        "latency": {"library": make_latency([12e-3])},
        "compared": {"ort": other},
    }
    text = "\n".join(verify.describe(facts, KnownFacts()))
    assert "32 ms" not in text
    assert "speedup over ORT 1.03" in text and "12.4 ms" in text


def test_a_speedup_that_is_not_known_is_not_shown() -> None:
    """A ratio of 2.7 is not within the noise: the machine was too noisy."""
    noisy = make_speedup(PairedTimes((1.0,) * 8, (0.5, 0.6, 2.0, 2.5, 2.7, 2.8, 3.0, 4.0)))
    facts: Verdict = {"passed": True, "against": "reference", "speedup": noisy}
    [line] = verify.describe(facts, KnownFacts())
    assert line == (
        "the machine was too noisy for the speedup over untuned (0.5 to 4, interleaved, 8 pairs)"
    )


def test_the_verdict_on_a_library_that_passed_has_no_figure_of_this_machine() -> None:
    """Another CPU makes the reference compute in another order, and every run has other times."""
    output: OutputComparison = {"passed": True, "max_abs_error": 1e-7, "atol": 1e-4, "elements": 5}
    tolerance: AllowedDifference = {"for": "float32", "rtol": 1e-3, "atol": 1e-4, "of_largest": 0.0}
    measured: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.0",
        "samples": 3,
        "tolerance": tolerance,
        "outputs": {"y": output},
        "parts": {"first": {"outputs": {"z": output}, "latency": make_latency([1e-3])}},
        "accuracy": 0.9,
        "reference_accuracy": 0.9,
        "ran_on": "qemu 9.9",
        "latency": {"library": make_latency([1e-3])},
        "failures": [],
    }
    assert verdict_without_measurements(measured) == {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.0",
        "samples": 3,
        "tolerance": tolerance,
        "outputs": {"y": {"passed": True}},
        "parts": {"first": {"outputs": {"z": {"passed": True}}}},
    }


def test_a_library_without_a_reference_has_the_same_verdict_on_machines_that_cannot_run_it() -> (
    None
):
    ran: Verdict = {"passed": True, "against": "none", "samples": 3, "failures": []}
    not_run: Verdict = {"passed": True, "against": "none", "not_run": "no such CPU"}
    assert verdict_without_measurements(ran) == {"passed": True, "against": "none"}
    assert verdict_without_measurements(not_run) == {"passed": True, "against": "none"}
