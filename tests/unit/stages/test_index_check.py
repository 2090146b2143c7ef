"""Outputs that are indices: of what, how many elements they reach, ties, and what a verdict says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.kernels import level
from tests.support.onnx_models import frontend, model, save, value
from tests.support.verification import Verified
from tvmflow.compiler import lowering
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.compiler.schedules import schedule_untuned
from tvmflow.core.errors import VerifyFailed
from tvmflow.recipe.sections import Verify
from tvmflow.stages import verify
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.verify import verdict_text
from tvmflow.stages.verify.comparison import DEFAULTS
from tvmflow.stages.verify.draws import RandomDraws
from tvmflow.stages.verify.inner_tensors import Index, InnerLibrary, find_index, settle_ties
from tvmflow.stages.verify.inputs import ReferenceOutputs, load_samples
from tvmflow.stages.verify.verdict import FLOAT32, ZEROS, Verdict, verdict_without_measurements
from tvmflow.stages.verify_settings import CheckSettings, InputSettings, VerifySettings
from tvmflow.targets.tvm_target import make_target

SCORES = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
CHECKS = CheckSettings(**{**Verify().model_dump(), "data": False})


def order(scores: Any, axis: int, count: int) -> Any:
    return np.take(np.argsort(-scores, axis=axis), range(count), axis=axis)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (SCORES.argmax(axis=1), Index("s", 1, is_largest=True)),
        (SCORES.argmin(axis=2)[..., None], Index("s", 2, is_largest=False)),
        (order(SCORES, 1, 3), Index("s", 1, is_largest=True)),
        (np.argsort(SCORES, axis=2).astype(np.float32), Index("s", 2, is_largest=False)),
        (SCORES.argmax(axis=1) + 1, None),
        (np.zeros((2, 5), np.int64), None),
        (np.full((2, 4), 7), None),
        (np.zeros(3, np.int64), None),
    ],
    ids=["argmax", "argmin", "topk", "argsort", "from 1", "others", "out of range", "shape"],
)
def test_what_an_output_is_an_index_of_is_told_by_its_numbers(indices: Any, expected: Any) -> None:
    """A frontend may compute the index with any operators."""
    assert find_index("i", ["s"], [{"i": indices, "s": SCORES}]) == expected


def settle(actual: Any, own: Any, right: Any) -> Any:
    """Return the index of a library with scores of its own, settled."""
    own, right = np.asarray(own, np.float32), np.asarray(right, np.float32)
    expected = right.argmax(axis=1)
    index = Index("s", 1, is_largest=True)
    return settle_ties(np.asarray(actual), expected, {"s": own}, {"s": right}, index).tolist()


def test_an_index_of_equal_scores_is_settled_and_a_wrong_one_is_not() -> None:
    """It must be right for the library's own scores, as far as these are off."""
    right = [[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]]
    assert settle([2, 0], right, right) == [1, 0]
    assert settle([2, 2], right, right) == [1, 2], "the second score is not a tie"
    close = [[1.0, 3.0, 3.00001], [5.0, 1.0, 2.0]]
    assert settle([2, 0], close, right) == [1, 0]
    assert settle([0, 0], close, right) == [0, 0]
    assert settle([3, 0], right, right) == [3, 0], "it is out of range"
    pairs = np.array([[1.0, 1.0, 0.5]], np.float32)
    index = Index("s", 1, is_largest=True)
    twice = settle_ties(np.array([[0, 0]]), np.array([[0, 1]]), {"s": pairs}, {"s": pairs}, index)
    assert twice.tolist() == [[0, 0]], "one element cannot be two of the largest"


def test_more_inputs_are_drawn_until_no_other_class_is_reached() -> None:
    """Those that reach one are added to the samples; a range is never left, and data stay as they are."""

    def run(feed: Any) -> Any:
        return {"i": np.array([int(abs(feed["x"][0]) * 2) % 4])}

    def reach(made: VerifySettings, *, can_settle_ties: bool = True) -> ReferenceOutputs:
        signature = {"inputs": [{"name": "x", "shape": [1], "dtype": "float32"}]}
        _, data = next(load_samples(signature, made, None))
        results = ReferenceOutputs(data, [run(feed) for feed in data.batches], {})
        drawn = RandomDraws(run, results, made)
        drawn.reach_more(["i"], can_settle_ties=can_settle_ties)
        return drawn.results

    more = reach(VerifySettings.model_construct(verify=CHECKS, inputs={}))
    assert {int(batch["i"][0]) for batch in more.outputs} == set(range(4))
    assert len(more.samples.batches) == more.samples.total == len(more.outputs) == 3 + more.added
    ranges = {"x": InputSettings(range=(0.0, 1.0))}
    held = reach(VerifySettings.model_construct(verify=CHECKS, inputs=ranges))
    assert all(0 <= batch["x"][0] <= 1 for batch in held.samples.batches)
    data = CHECKS.model_copy(update={"data": True})
    assert reach(VerifySettings.model_construct(verify=data, inputs={})).added == 0


def test_large_inputs_are_not_drawn_where_ties_cannot_be_told_from_errors() -> None:
    """Scores of large inputs are all 1: a right detector under qemu was rejected for the order of equal ones."""
    drawn: list[float] = []

    def run(feed: Any) -> Any:
        drawn.append(float(np.abs(feed["x"]).max()))
        return {"i": np.array([len(drawn)])}

    signature = {"inputs": [{"name": "x", "shape": [500], "dtype": "float32"}]}
    made = VerifySettings.model_construct(verify=CHECKS, inputs={})
    _, data = next(load_samples(signature, made, None))
    largest = {}
    for can_settle_ties in (True, False):
        results = ReferenceOutputs(data, [run(feed) for feed in data.batches], {})
        drawn.clear()
        RandomDraws(run, results, made).reach_more(["i"], can_settle_ties=can_settle_ties)
        largest[can_settle_ties] = max(drawn)
    assert largest[True] > 10 > largest[False] > 1


@pytest.mark.parametrize(
    ("data", "limits", "chooses", "is_reached"),
    [
        (False, None, lambda x: x.mean() > 5, True),
        (False, None, lambda x: x.mean() < -5, True),
        (False, (0.0, 1.0), lambda x: x.min() > 0.6, True),
        (False, (0.0, 1.0), lambda x: x.max() > 1, False),
        (False, None, lambda _: False, False),
        (True, None, lambda x: x.mean() > 5, False),
    ],
    ids=["high", "low", "within a range", "outside of it", "never", "data"],
)
def test_an_index_that_is_0_gets_inputs_that_change_it(
    data: bool, limits: Any, chooses: Any, is_reached: bool
) -> None:
    """Of both signs and other magnitudes, within the recipe's ranges; data stay as they are."""

    def run(feed: Any) -> Any:
        return {"i": np.array([int(chooses(feed["x"]))])}

    inputs = {"x": InputSettings(range=limits)} if limits else {}
    checks = CHECKS.model_copy(update={"data": data})
    made = VerifySettings.model_construct(
        verify=checks, inputs=inputs, quantized=False, precision="model"
    )
    signature = {"inputs": [{"name": "x", "shape": [16], "dtype": "float32"}]}
    _, drawn = next(load_samples(signature, made, None))
    results = ReferenceOutputs(drawn, [run(feed) for feed in drawn.batches], {})
    random_draws = RandomDraws(run, results, made)
    random_draws.vary_indices(["i"], ["i"], DEFAULTS[FLOAT32])
    varied = random_draws.results
    assert varied.added == int(is_reached)
    assert len(varied.samples.batches) == varied.samples.total == len(varied.outputs)
    assert [int(batch["i"][0]) for batch in varied.outputs[len(results.outputs) :]] == (
        [1] if is_reached else []
    )


def test_an_index_that_is_0_for_all_inputs_is_delivered_with_a_warning(tmp_path: Path) -> None:
    """A right classifier may choose the first class alone."""
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
    ]
    outputs = [value("best", [1], "int64")]
    bias = {"bias": np.array([[3e3, 0, 0, 0]], np.float32)}
    files = save(model(nodes, [value("x", [1, 4])], outputs, bias), tmp_path)
    made = Verified(tmp_path / "stages", {"onnx": "model.onnx"}, files).verify()
    assert not isinstance(made, VerifyFailed), made
    assert made["passed"] and made["warnings"] == [
        "output 'best' is an index that is 0 for all inputs, so that a library that never computes it would pass: "
        "give inputs that the model is made for (inputs.NAME.range, verify.data)"
    ]
    alone = verdict(
        outputs={"best": {**GOOD, "reached": 1, "undetected": ZEROS, "elements": 1}},
        index_inputs_not_compared="the model is in parts",
    )
    assert verdict_text.list_failures(alone, CHECKS) == []
    assert len(verdict_text.list_warnings(alone, CHECKS)) == 2


GOOD: Any = {
    "passed": True, "atol": 0.0, "rtol": 0.0, "max_abs_error": 0.0, "max_rel_error": 0.0,
    "error_of_largest": 0.0,
}  # fmt: skip


def verdict(**fields: Any) -> Verdict:
    output: Any = {**GOOD, "reached": 3, "classes": 10}
    made: Any = {"passed": True, "against": "reference", "reference": "ORT", "samples": 5}
    made |= {"outputs": {"best": output}, "tolerance": {"for": "float32"}, **fields}
    return made  # type: ignore[no-any-return]


def test_what_goes_into_a_checked_index_is_compared(tmp_path: Path) -> None:
    """The check of an index, which names its node, does not make it another model."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["scores"]),
        helper.make_node("TopK", ["scores", "two"], ["best", "places"]),
        helper.make_node("Sigmoid", ["x"], ["rows"]),
        helper.make_node("Gather", ["rows", "places"], ["found"]),
    ]
    outputs = [value("found", [2])]
    files = save(model(nodes, [value("x", [9])], outputs, {"two": np.array([2])}), tmp_path)
    verdict = Verified(tmp_path / "stages", {"onnx": "model.onnx"}, files).verify()
    assert isinstance(verdict, dict)
    assert {"scores", "rows"} <= verdict["index_inputs"].keys()
    assert "index_inputs_not_compared" not in verdict


def test_a_verdict_says_what_was_compared_and_how_many_classes_were_reached() -> None:
    seen = verify.describe(verdict(index_inputs={"scores": {**GOOD, "seen": True}}), KnownFacts())
    assert seen[1:3] == [
        "scores, the scores of an index, agrees with ORT (largest error: absolute 0, relative 0, 0 of the largest "
        "value); the library has the same bits in its memory",
        "best takes 3 of 10 possible values",
    ]
    unseen = verify.describe(
        verdict(index_inputs={"scores": {**GOOD, "seen": False}}), KnownFacts()
    )
    assert unseen[1].endswith(
        "in a library of the same kernels that returns it: this one computes it within a larger kernel"
    )


def test_an_index_of_which_only_itself_is_compared_has_a_warning() -> None:
    made = verdict(index_inputs_not_compared="the library runs on another machine")
    assert verdict_text.list_failures(made, CHECKS) == []
    assert verdict_text.list_warnings(made, CHECKS) == [
        "the scores of the index 'best' (3 different values in the samples) are not compared, so that a wrong library "
        "could go undetected: the library runs on another machine"
    ]
    lasting = verdict_without_measurements(made)
    assert lasting["index_inputs_not_compared"] == "the library runs on another machine"


def test_a_wrong_tensor_before_an_index_and_a_wrong_layer_have_a_sentence() -> None:
    missing: Any = {**GOOD, "passed": False, "seen": False, "is_missing": True}
    layers = {
        "passed": False, "tensors": 3, "max_steps": 7, "differing": 0.1, "allowed_steps": 1,
        "wrong": {"u": {"steps": 7, "elements": 12}}, "outputs": {},
    }  # fmt: skip
    assert verdict_text.list_failures(
        verdict(index_inputs={"s": missing}, layers=layers), CHECKS
    ) == [
        "'s' (the scores of an index) is not in the library's memory as the same kernels compute it in a library "
        "that returns it",
        "'u' is up to 7 steps off in 12 elements where it is computed from the tensors that ORT gives, more than 1",
    ]


def test_an_input_in_another_shape_is_in_no_memory_of_the_library(tmp_path: Path) -> None:
    """The executor gives it another shape where it is, in the caller's memory; with several axes, too."""
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axes"], ["scores"]),
        helper.make_node("Exp", ["scores"], ["weights"]),
        helper.make_node("ArgMax", ["weights"], ["best"], axis=3),
    ]
    made = model(
        nodes,
        [value("x", [3, 5])],
        [value("best", [1, 1, 3, 1], "int64")],
        {"axes": np.array([0, 1])},
    )
    loaded = frontend.load(save(made, tmp_path), (), ("scores", "weights"))
    target = make_target(level("x86-64-v3"))
    lowered = lowering.lower(loaded.mod, target, LoweringOptions())
    scheduled, _ = schedule_untuned(lowered.mod, level("x86-64-v3"), SCHEDULES_VERSION)
    library = InnerLibrary(loaded, lowered, ScheduledModel(scheduled, [], target))
    assert library.list_shared(lowered.mod) == {"weights"}
