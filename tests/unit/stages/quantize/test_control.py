"""Control of the accuracy: few evaluations, the culprits go back, the others stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmflow.core.errors import StageError
from tvmflow.runtime.samples import Samples
from tvmflow.stages.quantize.control import (
    NOT_FASTER,
    TOO_HARMFUL,
    Choice,
    Comparison,
    Evaluation,
    Limits,
    choose_layers,
)

_Array = np.ndarray[Any, Any]


class _Products:
    """Matrix products in a row whose results are rounded to steps where a layer has integers."""

    def __init__(self, steps: Sequence[float]) -> None:
        random = np.random.default_rng(0)
        self._steps = steps
        self._weights = [np.linalg.qr(random.standard_normal((8, 8)))[0] for _ in range(len(steps))]

    def choose(
        self, chosen: Collection[int]
    ) -> Callable[[Mapping[str, _Array]], dict[str, _Array]]:
        return lambda feed: self.run(feed, chosen)

    def run(self, feed: Mapping[str, _Array], chosen: Collection[int] = ()) -> dict[str, _Array]:
        values = feed["x"]
        for place, (weights, step) in enumerate(zip(self._weights, self._steps, strict=True)):
            values = values @ weights
            if place in chosen:
                values = np.rint(values / step) * step if step else values * np.nan
        return {"y": values.astype(np.float32)}


def _make(steps: Sequence[float], *, labels: bool = True) -> tuple[Evaluation, dict[int, str]]:
    model = _Products(steps)
    random = np.random.default_rng(1)
    batches = [{"x": random.standard_normal((1, 8)) * 3} for _ in range(200)]
    classes = np.array([model.run(batch, ())["y"].argmax() for batch in batches])
    data = Samples(batches, len(batches), classes if labels else None, 1)
    return Evaluation(model.run, model.choose, data, "y"), {
        place: f"product{place}" for place in range(len(steps))
    }


def _choose(steps: Sequence[float], limits: Limits, gains: Sequence[float] = ()) -> Choice:
    evaluation, names = _make(steps)
    return choose_layers(evaluation, names, limits, dict(enumerate(gains)))


def test_without_limits_all_layers_are_chosen_and_each_is_measured() -> None:
    """The damage of each layer alone is known, in the order of the model."""
    choice = _choose([0.01, 1.0, 0.1], Limits())
    assert choice.chosen == (0, 1, 2) and not choice.reasons and choice.evaluations == 1
    errors = list(choice.damage.values())
    assert errors[0] < errors[2] < errors[1] < choice.everything.error * 1.5
    assert choice.cost.drop is not None and choice.cost.drop > 1


def test_a_comparison_goes_on_with_the_batches_that_it_lacks() -> None:
    """No batch is computed twice, and the cost is that of all at once."""
    evaluation, _ = _make([0.1, 0.5])
    model, fed = _Products([0.1, 0.5]), list[Mapping[str, _Array]]()

    def run(feed: Mapping[str, _Array]) -> dict[str, _Array]:
        fed.append(feed)
        return model.run(feed, [0, 1])

    expected = evaluation.compare_more(Comparison(run))
    fed.clear()
    comparison = Comparison(run)
    assert evaluation.compare_more(comparison, 64).drop is None and len(fed) == 64
    assert evaluation.compare_more(comparison) == expected and len(fed) == 200


@pytest.mark.parametrize(
    ("limits", "compared"),
    [
        (Limits(error=10.0), 32),
        (Limits(error=1e-5), 32),
        (Limits(accuracy_drop=0.1), 32),
        (Limits(accuracy_drop=99.0), 200),
        (Limits(accuracy_drop=99.0, error=10.0), 200),
        (Limits(accuracy_drop=99.0, error=1e-5), 32),
        (Limits(), 200),
    ],
)
def test_few_samples_tell_whether_a_far_limit_holds(limits: Limits, compared: int) -> None:
    """That a drop in accuracy is allowed all of them have to tell, because one image more may be too many."""
    steps = [3.0, 8.0]
    evaluation, _ = _make(steps)
    fed: list[Any] = []
    model = _Products(steps)

    def run(feed: Mapping[str, _Array]) -> dict[str, _Array]:
        fed.append(feed)
        return model.run(feed, [0, 1])

    comparison = Comparison(run)
    cost = evaluation.compare_more(comparison, limits=limits)
    assert len(fed) == compared
    whole = evaluation.measure([0, 1])
    assert limits.hold(cost) == limits.hold(whole)
    assert cost.error == pytest.approx(whole.error, rel=0.2)
    near = Limits(error=whole.error * 1.001)
    assert evaluation.measure([0, 1], near) == whole


def _label(batches: Sequence[int], **fields: Any) -> Samples:
    """Return samples with labels, in batches of so many."""
    random, model = np.random.default_rng(1), _Products([0.1, 0.5])
    feeds = [{"x": random.standard_normal((size, 8)) * 3} for size in batches]
    rows = [model.run(feed, ())["y"] for feed in feeds]
    labels = np.concatenate(rows).argmax(axis=1)
    return Samples(feeds, len(labels), labels, fields.pop("batch_size", 0), **fields)


@pytest.mark.parametrize(
    ("data", "compared"),
    [
        (_label([200]), 1),
        (_label([3] * 50), 50),
        (_label([1] * 200, is_stacked=True), 32),
        (_label([4] * 50, batch_size=4), 32),
    ],
    ids=["one batch", "several sizes", "stacked", "batches"],
)
def test_labels_meet_their_samples_in_batches_of_any_kind(data: Samples, compared: int) -> None:
    """Where batches do not say how many samples they have, all of them decide."""
    model, fed = _Products([0.1, 0.5]), list[Any]()
    evaluation = Evaluation(model.run, model.choose, data, "y")
    assert evaluation.accuracy == 1.0

    def run(feed: Mapping[str, _Array]) -> dict[str, _Array]:
        fed.append(feed)
        return {"y": -model.run(feed, [0, 1])["y"]}

    cost = evaluation.compare_more(Comparison(run), limits=Limits(accuracy_drop=1.0))
    assert cost.drop == 100.0 and len(fed) == compared
    assert data.count_samples(len(data.batches)) == data.total


def test_the_layer_that_costs_the_accuracy_goes_back() -> None:
    """One layer of 30 is harmful: it is found with few evaluations, and no other one goes back."""
    steps = [0.001] * 30
    steps[17] = 6.0
    choice = _choose(steps, Limits(accuracy_drop=0.5))
    assert choice.reasons == {17: TOO_HARMFUL}
    assert choice.cost.drop is not None and choice.cost.drop <= 0.5 < 10 < (
        choice.everything.drop or 0
    )
    assert choice.evaluations <= 7


def test_a_layer_without_gain_stays_float() -> None:
    """It costs nothing either; what the others cost is said without it."""
    choice = _choose([0.01, 1.0, 0.1], Limits(error=0.1), [1.0, -0.1, 0.2])
    assert choice.chosen == (0, 2) and choice.reasons == {1: NOT_FASTER}


def test_an_innocent_layer_is_tried_again() -> None:
    """Layers go back by damage for each gain; one that was not needed for the limits is quantized again."""
    steps = [0.3, 1.5, 0.9, 0.01]
    choice = _choose(steps, Limits(error=0.1), [1e-6, 1.0, 1.0, 1.0])
    assert choice.reasons == {1: TOO_HARMFUL} and choice.evaluations == 4


def test_a_layer_that_makes_nan_goes_back() -> None:
    """Its damage is infinite, and the limits hold without it."""
    choice = _choose([0.01, 0.0, 0.01], Limits(error=0.05))
    assert choice.chosen == (0, 2) and choice.damage[1] == float("inf")


def test_limits_that_no_layer_holds_are_refused() -> None:
    """The message says by how much, and which layers are the most harmful."""
    with pytest.raises(StageError) as caught:
        _choose([2.0, 8.0], Limits(accuracy_drop=0.5, error=0.001))
    assert (
        "product1" in caught.value.message
        and "points (max_accuracy_drop 0.5)" in caught.value.message
    )
    assert "(max_error 0.10%)" in caught.value.message


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0.01, 0.1, 0.5, 2.0, 8.0]), min_size=1, max_size=8),
    st.sampled_from([0.01, 0.1, 0.4]),
)
def test_a_choice_holds_its_limits(steps: list[float], error: float) -> None:
    """Whatever the layers do, the choice is within the limits, or there is none."""
    evaluation, names = _make(steps, labels=False)
    limits = Limits(error=error)
    try:
        choice = choose_layers(evaluation, names, limits)
    except StageError:
        return
    assert limits.hold(evaluation.measure(choice.chosen))
    assert sorted([*choice.chosen, *choice.reasons]) == list(range(len(steps)))
