"""Random inputs beside the usual ones: magnitudes, branches, and what they tell of a wrong library."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.verification import settings
from tvmflow.core.errors import StageError
from tvmflow.stages.verify import draws
from tvmflow.stages.verify.comparison import DEFAULTS
from tvmflow.stages.verify.draws import MoreDraws, list_unexercised
from tvmflow.stages.verify.inputs import load_samples, run_reference_on
from tvmflow.stages.verify.libraries import compare_threads
from tvmflow.stages.verify.verdict import Exercise
from tvmflow.stages.verify_settings import VerifySettings

TOLERANCE = DEFAULTS["float32"]

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]


def draw_more(
    function: Function,
    made: VerifySettings | None = None,
    *,
    condition: Function | None = None,
    dtype: str = "float32",
) -> MoreDraws:
    """Return the further draws for a model of one input, which takes a branch by a condition."""
    made = made or settings()
    made = made.model_copy(update={"precision": "model", "quantized": False})
    signature = {"inputs": [{"name": "x", "shape": [400], "dtype": dtype}]}

    def run(feed: Any) -> Any:
        with np.errstate(all="ignore"):
            return {"y": function(feed["x"])}

    def observe(feed: Any) -> list[Exercise]:
        assert condition is not None
        share = float(condition(feed["x"]).mean())
        return [{"node": "n", "operator": "Where", "branches": {"true": share, "false": 1 - share}}]

    results = run_reference_on(run, load_samples(signature, made, None), ["y"], TOLERANCE)
    drawn = draws.RandomDraws(run, results, made)
    return drawn.draw_more(observe if condition else None, ["y"], TOLERANCE)


def list_failed(more: MoreDraws, wrong: Function) -> list[str]:
    """Return the draws for which a library is rejected."""
    library: Any = SimpleNamespace(
        run_all=lambda feeds: [{"y": wrong(feed["x"])} for feed in feeds]
    )
    return [entry["inputs"] for entry in draws.compare_draws(library, more) if not entry["passed"]]


def test_magnitudes_find_what_overflows_and_what_vanishes() -> None:
    """Each is compared by itself, so that small outputs are not judged by the tolerance of large ones."""
    more = draw_more(lambda x: x * 2)
    assert [draw.inputs for draw in more.draws] == [
        "inputs of magnitude 0.001",
        "inputs of magnitude 100",
    ]
    assert more.exercises is None
    assert list_failed(more, lambda x: x * 2) == []
    assert list_failed(more, lambda x: np.clip(x, -100, 100) * 2) == ["inputs of magnitude 100"]
    assert list_failed(more, lambda x: x * 2 + np.float32(1e-5)) == ["inputs of magnitude 0.001"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: np.exp(x), "the reference gives NaN or infinities"),
        (
            lambda x: np.sin(x * 1e6),
            "roundings of the inputs change its outputs by more than the tolerance",
        ),
    ],
)
def test_draws_that_tell_nothing_are_left_out(function: Function, reason: str) -> None:
    more = draw_more(function)
    assert f"inputs of magnitude 100 are not compared: {reason}" in more.left_out
    assert "inputs of magnitude 100" not in [draw.inputs for draw in more.draws]


def test_positive_inputs_stay_positive() -> None:
    """Where the reference gives no numbers for negative ones."""
    more = draw_more(np.sqrt)
    assert len(more.draws) == 2
    assert all((draw.feed["x"] >= 0).all() for draw in more.draws)


@pytest.mark.parametrize(
    ("condition", "inputs"),
    [
        (lambda x: np.full(1, x.sum() < -100), "low inputs"),
        (lambda x: np.full(1, np.abs(x).max() > 1e6), ""),
    ],
)
def test_inputs_are_drawn_for_branches(condition: Function, inputs: str) -> None:
    """Until one reaches the branch; else it is said that none does."""
    made = settings({"x": (-1.0, 1.0)})
    more = draw_more(lambda x: x, made, condition=condition)
    assert [draw.inputs for draw in more.draws] == [inputs] * bool(inputs)
    assert more.exercises is not None
    missing = list_unexercised(more.exercises)
    assert missing == ([] if inputs else ["true of 1 of 1 Where (n)"])
    assert all(np.abs(draw.feed["x"]).max() <= 1 for draw in more.draws)


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_integers_and_ranges_have_no_magnitudes(dtype: str) -> None:
    """Both of their ends are reached, and integers of both signs are drawn once."""
    more = draw_more(lambda x: x, dtype=dtype, condition=lambda x: np.full(1, (x == 1).all()))
    wide = [] if dtype == "bool" else ["integers of both signs"]
    assert [draw.inputs for draw in more.draws] == [*wide, "high inputs"]
    assert {int(n) for n in more.draws[-1].feed["x"]} == {1}
    ranged = draw_more(lambda x: x, settings({"x": (2.0, 3.0)}))
    assert ranged.draws == ()


def test_unexercised_branches_are_named() -> None:
    def entry(node: str, operator: str, **branches: float) -> Exercise:
        return {"node": node, "operator": operator, "branches": branches}

    entries = [
        entry("w", "Where", true=0.0, false=1.0),
        *(entry(f"r{n}", "Relu", negative=0.0, positive=1.0) for n in range(4)),
        entry("r4", "Relu", negative=0.5, positive=0.5),
    ]
    assert list_unexercised(entries) == [
        "negative of 4 of 5 Relu (r0, r1, r2, …)",
        "true of 1 of 1 Where (w)",
    ]


def test_a_class_that_is_scaled_is_found_over_many_batches() -> None:
    """Three batches of (1, 10) have three values of each class; rounding and a step of the model are not a cause."""
    weights = np.random.default_rng(0).normal(size=(20, 10)).astype(np.float32)
    factors = np.ones(10, np.float32)
    factors[3] = 1.001

    def run(feed: Any) -> Any:
        return {"y": feed["x"] @ weights}

    made = settings()
    signature = {"inputs": [{"name": "x", "shape": [1, 20], "dtype": "float32"}]}
    results = run_reference_on(run, load_samples(signature, made, None), ["y"], TOLERANCE)
    few = MoreDraws(names=("y",))
    more = draws.RandomDraws(run, results, made).draw_repeats(few, 230, TOLERANCE)
    noise = np.random.default_rng(1).normal(1, 1e-6, 10).astype(np.float32)

    def judge(wrong: Function) -> Any:
        library: Any = SimpleNamespace(
            run_all=lambda feeds: [{"y": wrong(run(feed)["y"])} for feed in feeds]
        )
        [verdict] = draws.compare_draws(library, more)
        return verdict

    for right in (lambda y: y * noise, lambda y: np.where(np.abs(y) > 9, y + 1, y)):
        assert judge(right) == {
            "inputs": "64 more random inputs",
            "passed": True,
            "scaled": {},
            "outputs": {},
        }
    found = judge(lambda y: y * factors)
    assert not found["passed"]
    assert (found["scaled"]["y"]["axis"], found["scaled"]["y"]["index"]) == (1, 3)
    assert found["scaled"]["y"]["scale"] == pytest.approx(1.001, abs=1e-5)
    for large in (0, 2**21):
        assert draws.RandomDraws(run, results, made).draw_repeats(few, large, TOLERANCE) is few


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("int32", np.abs, lambda x: x),
        ("int64", lambda x: np.fmod(x, 5), lambda x: np.mod(x, 5)),
        ("uint8", lambda x: x, lambda x: np.minimum(x, 200)),
    ],
)
def test_a_fault_of_large_or_negative_integers_is_found(
    dtype: str, right: Function, wrong: Function
) -> None:
    """Zeros and ones, the usual integers without a range, tell neither a sign nor a bound."""
    assert list_failed(draw_more(right, dtype=dtype), wrong) == ["integers of both signs"]
    ranged = draw_more(right, settings({"x": (0.0, 1.0)}), dtype=dtype)
    assert list_failed(ranged, wrong) == []


def test_integers_that_the_reference_refuses_are_not_needed() -> None:
    """A count, say, that cannot be negative: nothing is reported of it."""

    def fail(x: Array) -> Array:
        if x.min() < 0:
            raise StageError("no")
        return x

    more = draw_more(fail, dtype="int64")
    assert (more.draws, more.left_out) == ((), ())


@pytest.mark.parametrize("row", [0, 700, 999])
def test_each_row_of_a_table_is_read(row: int) -> None:
    """Tokens without a range are the indices that the model has a row for; many batches read all of them."""
    table = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    spoiled = table.copy()
    spoiled[row] *= -1
    made = settings({"x": (0.0, 999.0)})
    signature = {"inputs": [{"name": "x", "shape": [1, 20], "dtype": "int64"}]}

    def run(feed: Any) -> Any:
        return {"y": table[feed["x"]]}

    results = run_reference_on(run, load_samples(signature, made, None), ["y"], TOLERANCE)
    more = draws.RandomDraws(run, results, made).draw_repeats(
        MoreDraws(names=("y",)), 4000, TOLERANCE
    )
    read = {int(n) for draw in more.repeats for n in draw.feed["x"].flat}
    assert read == {*range(1000)}
    assert list_failed(more, lambda x: table[x]) == []
    assert list_failed(more, lambda x: spoiled[x]) == ["64 more random inputs"]


def test_libraries_with_other_numbers_of_threads_must_have_the_same_bits() -> None:
    """One whose last step is lost with three threads, beside right ones."""

    def compute(threads: int) -> Any:
        def run_all(feeds: Any) -> Any:
            [x] = (feed["x"] for feed in feeds)
            return [{"y": x * (1 - (threads == 3) * (x == x.max()))}]

        return SimpleNamespace(run_all=run_all)

    feed = {"x": np.arange(8, dtype=np.float32)}
    others = {count: compute(count) for count in (1, 3)}
    assert compare_threads(compute(2), others.items(), feed) == {"1": True, "3": False}
    assert compare_threads(compute(2), (), feed) == {}
