"""Verifying a library with dimensions: at which sizes, on which data, and what is said of a wrong size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmflow.core.errors import StageError
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.recipe.sections import Verify
from tvmflow.runtime.samples import make_samples
from tvmflow.stages.verify import comparison, verdict_text
from tvmflow.stages.verify.comparison import tolerance_for
from tvmflow.stages.verify.inputs import (
    ReferenceOutputs,
    SizeOutputs,
    Sizes,
    choose_sizes,
    load_samples,
    make_element_count,
    read_dimensions,
)
from tvmflow.stages.verify.reference_run import ReferenceRun
from tvmflow.stages.verify.verdict import FLOAT32, SizeVerdict, Verdict
from tvmflow.stages.verify.verification import compare_sizes
from tvmflow.stages.verify_settings import CheckSettings, InputSettings, VerifySettings

BATCH = Dimension("batch", 1, 8)
SEQ = Dimension("seq", 1, 512, 1, (16, 128))
TOLERANCE = tolerance_for(FLOAT32, rtol=None, atol=None)
INPUT = TensorSpec("x", (8, 512), "float32", None, ("batch", "seq"))
SIGNATURE = {
    "inputs": [INPUT.to_json()],
    "dimensions": [
        {"name": "batch", "min": 1, "max": 8, "multiple_of": 1},
        {"name": "seq", "min": 1, "max": 512, "multiple_of": 1},
    ],
}


# ---------------------------------------------------------------- which sizes


def choose(*dimensions: Dimension, cost: int = 1) -> list[tuple[int, ...]]:
    chosen = choose_sizes(dimensions, lambda sizes: cost * math.prod(sizes.values()), 0)
    assert chosen.left_out == ()
    return [tuple(sizes.values()) for sizes in chosen.combinations]


def test_sizes_are_the_ends_those_to_tune_at_primes_and_random_ones() -> None:
    """Eight combinations, the same whenever the recipe is; primes differ between dimensions."""
    sizes = choose(BATCH, SEQ)
    assert sizes[:6] == [(1, 1), (8, 512), (3, 16), (3, 128), (2, 19), (7, 509)]
    assert len(sizes) == len(set(sizes)) == 8
    assert sizes == choose(BATCH, SEQ)
    assert all(1 <= batch <= 8 and 1 <= seq <= 512 for batch, seq in sizes)


def test_all_sizes_to_tune_at_are_verified_however_many_there_are() -> None:
    tune_at = tuple(range(10, 130, 10))
    sizes = choose(Dimension("seq", 1, 512, 1, tune_at))
    assert {size for (size,) in sizes} >= {1, 512, *tune_at}


def test_sizes_are_multiples_and_no_tile_divides_their_factor() -> None:
    sizes = [size for (size,) in choose(Dimension("height", 64, 640, 32))]
    assert all(64 <= size <= 640 and size % 32 == 0 for size in sizes)
    assert {5 * 32, 19 * 32} <= set(sizes)


def test_a_dimension_of_one_size_or_two_has_no_more() -> None:
    assert choose(Dimension("batch", 4, 4)) == [(4,)]
    assert sorted(choose(Dimension("batch", 8, 16, 8))) == [(8,), (16,)]


def test_sizes_that_are_too_large_are_left_out_and_named() -> None:
    """In place of the largest: smaller ones, and the largest of each dimension by itself."""
    chosen = choose_sizes((BATCH, SEQ), lambda s: s["batch"] * s["seq"] * 2**20, 0)
    assert {"batch": 8, "seq": 128} in chosen.combinations
    assert {"batch": 1, "seq": 512} in chosen.combinations
    assert all(s["batch"] * s["seq"] <= 1024 for s in chosen.combinations)
    assert chosen.left_out == (
        "batch=8, seq=512 is not verified: the tensors of the model have 4,294,967,296 elements there, "
        "more than 1,073,741,824; batch=8, seq=128 is, instead",
    )


def test_the_least_sizes_are_verified_whatever_they_cost() -> None:
    chosen = choose_sizes((Dimension("n", 4, 8, 1, (6,)),), lambda _: 2**40, 0)
    assert chosen.combinations == ({"n": 4},)
    assert [sentence.split(" is not")[0] for sentence in chosen.left_out] == ["n=8", "n=6"]


def test_elements_are_those_of_all_tensors() -> None:
    """Also of inner ones: attention over a long text has few inputs and large scores."""
    seq = tvm.tirx.Var("seq", "int64")
    x = relax.Var("x", relax.TensorType((seq, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            scores = builder.emit(relax.op.matmul(x, relax.op.permute_dims(x)))
            out = builder.emit_output(scores)
        builder.emit_func_output(out)
    count = make_element_count(builder.get())
    # x, its transpose, and the scores twice: as the output, too
    assert count({"seq": 10}) == 2 * 10 * 4 + 2 * 10 * 10
    assert count({"seq": 1000}) > 10**6


# ---------------------------------------------------------------- data


def test_random_inputs_have_the_representative_sizes() -> None:
    """The largest size to tune at, or the geometric middle: there, latency is measured, too."""
    checks = CheckSettings(**{**Verify().model_dump(), "data": False})
    made = VerifySettings.model_construct(
        verify=checks, inputs={"x": InputSettings()}, tune_at={"seq": (16, 128)}
    )
    _, data = next(load_samples(SIGNATURE, made, None))
    assert [batch["x"].shape for batch in data.batches] == [(3, 128)] * 3


def samples(arrays: Mapping[str, Any], **fields: Any) -> Any:
    dimensions = read_dimensions(SIGNATURE, VerifySettings.model_construct())
    return make_samples([INPUT], arrays, source="data.npz", dimensions=dimensions, **fields)


def test_data_have_the_sizes_of_their_arrays() -> None:
    """More samples than a batch may have are divided; the last batch has those that are left."""
    data = samples({"x": np.ones((4, 37), "float32")})
    assert [batch["x"].shape for batch in data.batches] == [(4, 37)]
    data = samples({"x": np.ones((19, 5)), "label": np.zeros(19)})
    assert [batch["x"].shape for batch in data.batches] == [(8, 5), (8, 5), (3, 5)]
    assert (data.total, data.batches[0]["x"].dtype) == (19, np.float32)


def test_data_of_several_sizes_are_numbered() -> None:
    arrays = {"10/x": np.ones((1, 7)), "9/x": np.ones((9, 3)), "label": np.zeros(10)}
    data = samples(arrays)
    assert [batch["x"].shape for batch in data.batches] == [(8, 3), (1, 3), (1, 7)]
    assert (data.total, len(data.labels)) == (10, 10)


def test_data_that_do_not_fit_name_the_dimension() -> None:
    problems: dict[str, dict[str, Any]] = {
        "the dimension seq is 600, and its sizes are 1 to 512": {"x": np.ones((1, 600))},
        "data.npz, batch 1 does not fit": {"0/x": np.ones((1, 5)), "1/x": np.ones((1, 0))},
        "there is no array 'x'": {"y": np.ones((1, 5))},
        "has 1 dimensions": {"x": np.ones(5)},
        "4 samples and 3 labels": {"x": np.ones((4, 5)), "label": np.zeros(3)},
        "'x' is int64": {"x": np.ones((4, 5), np.int64)},
    }
    for problem, arrays in problems.items():
        with pytest.raises(StageError, match=problem):
            samples(arrays)


def test_outputs_of_several_sizes_are_compared_size_by_size() -> None:
    """The figures are the worst of all sizes, and the element that is furthest off is named."""
    data = samples({"0/x": np.ones((1, 3)), "1/x": np.ones((2, 300)), "2/x": np.ones((1, 3))})
    expected = [{"y": batch["x"] * 2} for batch in data.batches]
    actual = [{"y": batch["y"].copy()} for batch in expected]
    same = comparison.compare_batches(["y"], actual, expected, data, TOLERANCE)["y"]
    assert (same["passed"], same["elements"], same["max_abs_error"]) == (True, 606, 0)
    actual[1]["y"][1, 7] = 3
    wrong = comparison.compare_batches(["y"], actual, expected, data, TOLERANCE)["y"]
    assert (wrong["passed"], wrong["mismatched"], wrong["max_abs_error"]) == (False, 1, 1)
    assert wrong["worst"]["index"] == [1, 7]
    actual[2]["y"] = actual[2]["y"][:, :2]
    shape = comparison.compare_batches(["y"], actual, expected, data, TOLERANCE)["y"]
    assert "instead of" in shape["shape"]


# ---------------------------------------------------------------- the library at all sizes


class NumpyLibrary:
    """A library that doubles its input, or what a test has it do."""

    timed = None
    ran_on = "this machine"
    parts: Mapping[str, Any] = {}
    inputs = (INPUT,)
    outputs = (TensorSpec("y", (8, 512), "float32", None, ("batch", "seq")),)

    def __init__(self, double: Callable[[Any], Any]) -> None:
        self._double = double

    def run_all(self, feeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"y": self._double(feed["x"])} for feed in feeds]


def compare_with(double: Callable[[Any], Any], *sizes: Sizes) -> list[SizeVerdict]:
    rng = np.random.default_rng(0)
    feeds = [rng.random((s["batch"], s["seq"]), np.float32) for s in sizes]
    runs = [SizeOutputs(s, {"x": x}, {"y": x * 2}) for s, x in zip(sizes, feeds, strict=True)]
    reference = ReferenceRun(
        name="ONNX Runtime",
        note="",
        results=cast(ReferenceOutputs, None),
        tolerance=TOLERANCE,
        timed=None,
        indices=None,
        sized=tuple(runs),
    )
    return compare_sizes(NumpyLibrary(double), reference)


SMALL, LARGE = {"batch": 3, "seq": 37}, {"batch": 8, "seq": 512}


def failures_of(sizes: list[SizeVerdict]) -> list[str]:
    verdict: Verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime",
        "sizes": sizes,
    }
    return verdict_text.list_failures(
        verdict, CheckSettings(**{**Verify().model_dump(), "data": False})
    )


def test_a_right_library_passes_at_all_sizes() -> None:
    verdicts = compare_with(lambda x: x * 2, SMALL, LARGE)
    assert [(v["sizes"], v["passed"]) for v in verdicts] == [(SMALL, True), (LARGE, True)]
    assert failures_of(verdicts) == []


def test_a_wrong_size_is_named() -> None:
    def double(x: Any) -> Any:
        return np.where(np.arange(x.shape[1]) == 36, 0, x * 2).astype("float32")

    verdicts = compare_with(double, {"batch": 1, "seq": 16}, SMALL)
    assert [v["passed"] for v in verdicts] == [True, False]
    [sentence] = failures_of(verdicts)
    assert sentence.startswith("wrong at batch=3, seq=37: output 'y': 3 of 111 elements")


def test_a_library_that_fails_at_a_size_is_no_crash() -> None:
    def double(x: Any) -> Any:
        if x.shape[1] == 512:
            raise StageError("there is no memory")
        return x * 2

    verdicts = compare_with(double, LARGE, SMALL)
    assert [v["passed"] for v in verdicts] == [False, True]
    assert failures_of(verdicts) == ["fails at batch=8, seq=512: there is no memory"]


def test_what_the_calls_before_leave_must_not_change_the_outputs() -> None:
    """Within the tolerance, so that only the comparison of bits finds it."""
    largest = [0]

    def double(x: Any) -> Any:
        largest[0] = max(largest[0], x.size)
        return (x * 2 * (1 + (largest[0] > x.size) * 1e-6)).astype("float32")

    [small, large] = compare_with(double, SMALL, LARGE)
    assert not small["passed"] and large["passed"]
    assert failures_of([small, large]) == [
        "wrong at batch=3, seq=37: the library computes other bits after calls with other sizes, or with another number of threads"
    ]


def test_reports_show_all_sizes_in_a_table() -> None:
    sizes: list[SizeVerdict] = [
        {
            "sizes": LARGE,
            "passed": True,
            "outputs": {"y": {"passed": True, "max_abs_error": 1e-6}},
            "latency_s": 0.002,
            "reference_latency_s": 0.0031,
        },
        {
            "sizes": SMALL,
            "passed": False,
            "outputs": {"y": {"passed": False, "max_abs_error": 2.0}},
        },
    ]
    facts: Verdict = {
        "passed": False,
        "against": "reference",
        "reference": "ONNX Runtime",
        "samples": 3,
        "at": {"batch": 3, "seq": 128},
        "sizes": sizes,
        "sizes_left_out": ["batch=64 is not verified: too large"],
    }
    [table, left_out, at] = verdict_text.describe(facts, cast(Any, None))
    assert [line.rstrip() for line in table.splitlines()] == [
        "verified at 2 sizes against ONNX Runtime",
        "                     largest error this library    reference",
        "    batch=3, seq=37        WRONG 2",
        "    batch=8, seq=512         1e-06         2 ms       3.1 ms",
    ]
    assert left_out == "WARNING: batch=64 is not verified: too large"
    assert at == "all other checks ran at batch=3, seq=128"
    sizes[0]["fixed_speedup"] = {
        "median": 0.8,
        "low": 0.79,
        "high": 0.81,
        "pairs": 5,
        "is_slower": True,
    }
    [table, beside, *_] = verdict_text.describe(facts, cast(Any, None))
    assert table.splitlines()[1].endswith("reference one size only")
    assert table.splitlines()[3].endswith("2 ms       3.1 ms        1.6 ms")
    assert beside == (
        "latency beside libraries of one size: 1.25 times as long "
        "(geometric mean; most at batch=8, seq=512: 1.25)"
    )
