"""Keys: what they depend on, and how a change is described."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.keys import UNLIMITED_TRIALS, list_changes, stage_key
from tvmflow.core.types import InputFile, StageSpec

MACHINE = "linux-x86_64"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def spec(**changes: Any) -> StageSpec:
    """A tune stage, with some fields changed."""
    base = StageSpec(
        id="digits:tune/host",
        stage="tune",
        recipe="digits",
        target="host",
        version=1,
        settings={"tune": {"trials": 4, "seed": 0}, "target": {"tvm": {"mcpu": "znver4"}}},
        files=(),
        needs=(),
        tools=("apache-tvm",),
        timeout_s=1.0,
    )
    return base._replace(**changes)


def key(stage: StageSpec, inputs: dict[str, str] | None = None, tvm: str = "0.27+aa") -> Any:
    return stage_key(
        stage, inputs or {"extract_tasks/tasks.json": "1" * 64}, {"apache-tvm": tvm}, MACHINE
    )


def test_paths_names_and_positions_do_not_matter() -> None:
    """The same stage of another recipe in another folder has the same key."""
    other = spec(
        id="x:tune/y", recipe="x", target="y", timeout_s=9.0,
        files=(InputFile("model", "/elsewhere", "a.yaml:1:1"),),
    )  # fmt: skip
    assert key(spec()).digest == key(other).digest


@given(JSON)
def test_key_order_does_not_matter(value: Any) -> None:
    """Equal JSON values have equal canonical bytes, whatever the order of their fields."""

    def reverse(inner: Any) -> Any:
        if isinstance(inner, dict):
            return {name: reverse(inner[name]) for name in reversed(list(inner))}
        return [reverse(item) for item in inner] if isinstance(inner, list) else inner

    assert canonical(value) == canonical(reverse(value))


@given(JSON, JSON)
def test_different_settings_have_different_digests(one: Any, two: Any) -> None:
    """Two values have one digest only when their canonical bytes are equal."""
    assert (digest_of(one) == digest_of(two)) == (canonical(one) == canonical(two))


def test_swapped_inputs_are_another_key() -> None:
    """The role of each content is part of the key."""
    one = key(spec(), {"symbol": "1" * 64, "params": "2" * 64})
    two = key(spec(), {"symbol": "2" * 64, "params": "1" * 64})
    assert one.digest != two.digest


def test_changes_are_described_in_the_words_of_the_recipe() -> None:
    """Each cause is one phrase that names the field, file, stage or tool."""
    before = key(spec(), {"import/model.json": "1" * 64, "data": "3" * 64, "symbol": "5" * 64})
    settings = {"tune": {"trials": 8, "seed": 0}, "target": {"tvm": {"mcpu": "znver5"}}, "k": 1}
    after = key(
        spec(version=2, settings=settings),
        {"import/model.json": "2" * 64, "data": "4" * 64, "external/w": "6" * 64},
        tvm="0.27+bb",
    )
    assert list_changes(before.preimage, after.preimage) == [
        "this version of tvmflow runs tune differently",
        "tune: 4 trials -> 8 trials",
        'target.tvm.mcpu "znver4" -> "znver5"',
        "the content of file 'data' changed (33333333 -> 44444444)",
        "file 'external/w' is new",
        "file 'symbol' is no longer used",
        "model.json of import changed",
        'apache-tvm "0.27+aa" -> "0.27+bb"',
        "tune.k (not set) -> 1",
    ]


def test_equal_keys_have_no_changes() -> None:
    """Nothing is described."""
    assert list_changes(key(spec()).preimage, key(spec()).preimage) == []


def test_settings_that_appear_together_share_one_phrase() -> None:
    """After raising trials from 0, the budget says it all; without another cause, the settings are named."""
    before = key(spec(settings={"tune": {"trials": 0}}), {"tune/a": "1" * 64, "tune/b": "1" * 64})
    tuned = {"tune": {"trials": 4, "seed": 0, "repeat": 3}, "device": {"kind": "cpu"}}
    after = key(spec(settings=tuned), {"tune/a": "2" * 64, "tune/b": "2" * 64})
    assert list_changes(before.preimage, after.preimage) == [
        "tune: no search -> 4 trials",
        "a and b of tune changed",
    ]
    alone = key(
        spec(settings={"tune": {"trials": 0}, "a": 1, "b": 2, "c": 3}), before.preimage["inputs"]
    )
    assert list_changes(before.preimage, alone.preimage) == [
        "3 settings were added: tune.a, tune.b, tune.c"
    ]
    assert list_changes(alone.preimage, before.preimage) == [
        "3 settings were removed: tune.a, tune.b, tune.c"
    ]


def test_many_files_that_change_together_are_counted() -> None:
    """As the images of a folder are."""
    before = key(spec(), {f"data/{i}.png": "1" * 64 for i in range(9)})
    after = key(spec(), {f"data/{i}.png": "2" * 64 for i in range(9)})
    [change] = list_changes(before.preimage, after.preimage)
    assert change == "0.png, 1.png and 7 more of data changed"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({"trials": 12}, {"trials": UNLIMITED_TRIALS, "minutes": 4.0}, "12 trials -> 4 minutes"),
        ({"trials": 1, "minutes": 1.0}, {"trials": 0}, "1 trial in at most 1 minute -> no search"),
        ({"trials": 8, "minutes": None}, {"trials": 8, "minutes": 0.5}, "8 trials -> 8 trials in at most 0.5 minutes"),
    ],
)  # fmt: skip
def test_a_budget_is_said_as_a_recipe_sets_it(before: Any, after: Any, text: str) -> None:
    """Not with the number of trials that stands for any."""
    keys = (key(spec(settings={"tune": tune})) for tune in (before, after))
    assert list_changes(*(own.preimage for own in keys))[0] == f"tune: {text}"


def test_a_changed_digest_is_not_shown() -> None:
    """Of code that is part of a setting, two numbers say nothing."""
    keys = (key(spec(settings={"sources": digit * 64})) for digit in "ab")
    assert list_changes(*(own.preimage for own in keys)) == ["tune.sources changed"]
