"""Models with states: the library holds a KV cache or a recurrent state from step to step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.support import caches
from tests.support.caches import Array
from tests.support.project import Project

pytestmark = pytest.mark.slow

STATE = "state:\n  past_*: present_*\ntargets:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deliveries of attention with a KV cache."""
    project = Project(tmp_path_factory.mktemp("cached"))
    caches.write_cached_attention(project.folder / "cached.onnx")
    recipe = caches.RECIPE.replace("targets:", STATE)
    (project.folder / "tiny.yaml").write_text(recipe)
    done = project.run()
    assert done.code == 0, done.out + done.err
    return project.folder / "dist/cached/host"


def feed(seq: int, length: int, seed: int = 0) -> dict[str, Array]:
    x = np.random.default_rng(seed).standard_normal((1, seq, caches.WIDTH)).astype(np.float32)
    return {"x": x, "mask": np.ones((1, length + seq), np.float32)}


def test_steps_are_calls_that_are_handed_the_states(folder: Path) -> None:
    """Bit for bit; the verdict says so, and the header names the states."""
    verdict = json.loads((folder / "verify.json").read_text())
    assert verdict["states"]["passed"] and verdict["states"]["steps"] == 5
    assert "#define CACHED_STATES 2" in (folder / "cached-c-library/cached.h").read_text()
    module = tvmflow.load(folder / "cached.tvmflow")
    session = module.session()
    empty = np.zeros((1, caches.HEADS, 0, caches.DEPTH), np.float32)
    past = {"past_key": empty, "past_value": empty}
    for seed, seq in enumerate((5, 1, 1, 12, 3)):
        given = feed(seq, session.length, seed)
        expected = module.run({**given, **past})
        np.testing.assert_array_equal(session.run(given)["y"], expected["y"])
        past = {"past_key": expected["present_key"], "past_value": expected["present_value"]}
        for name, array in session.states.items():
            np.testing.assert_array_equal(array, past[name])
    assert session.length == 22


def test_states_are_forked_truncated_saved_and_reset(folder: Path) -> None:
    """Each way back gives the bits that the states gave before; sessions do not disturb each other."""
    module = tvmflow.load(folder / "cached.tvmflow")
    session = module.session()
    session.run(feed(7, 0))
    saved, copy = session.save(), session.fork()
    following = feed(2, 7, seed=5)
    expected = session.run(following)["y"]
    np.testing.assert_array_equal(copy.run(following)["y"], expected)
    session.truncate(7)
    np.testing.assert_array_equal(session.run(following)["y"], expected)
    copy.load(saved)
    assert copy.length == 7
    np.testing.assert_array_equal(copy.run(following)["y"], expected)
    copy.truncate(3)
    np.testing.assert_array_equal(copy.states["past_key"], session.states["past_key"][:, :, :3])
    copy.reset()
    assert (copy.length, session.length) == (0, 9)
    np.testing.assert_array_equal(copy.run(feed(7, 0))["y"], module.session().run(feed(7, 0))["y"])


def damage(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_what_is_wrong_is_refused_and_changes_nothing(folder: Path) -> None:
    """Damaged states, those of another model, steps that are too long, wrong masks."""
    session = tvmflow.load(folder / "cached.tvmflow").session()
    session.run(feed(6, 0))
    saved = session.save()
    before = session.states
    wrong = [b"", saved[:-1], saved + b"0", saved[: len(saved) // 2]]
    wrong += [damage(saved, place) for place in (0, 9, 20, 25, 33, 41, 50, len(saved) - 1)]
    calls: list[tuple[str, Callable[[], object]]] = [
        *(("damaged, or that of another", lambda data=data: session.load(data)) for data in wrong),
        ("cannot have this length", lambda: session.truncate(7)),
        ("cannot have this length", lambda: session.truncate(-1)),
        ("size 1 of input 'mask' is 9, and past", lambda: session.run(feed(1, 8))),
        ("there is no input 'past_key'", lambda: session.run({**feed(1, 6), **before})),
    ]
    for message, call in calls:
        with pytest.raises(tvmflow.TvmflowError, match=message):
            call()
        assert session.length == 6
    with pytest.raises(tvmflow.TvmflowError, match="cannot have this length"):
        for _ in range(9):
            session.run(feed(12, session.length))
    assert session.length == 30
    session.truncate(6)
    for name, array in session.states.items():
        np.testing.assert_array_equal(array, before[name])


def test_a_recurrent_state_is_replaced_by_each_step(project: Project) -> None:
    """It begins with 0, and cannot be truncated."""
    caches.write_lstm(project.folder / "recurrent.onnx")
    (project.folder / "tiny.yaml").write_text(caches.RECURRENT)
    done = project.run()
    assert done.code == 0, done.out + done.err
    module = tvmflow.load(project.folder / "dist/recurrent/host/recurrent.tvmflow")
    session = module.session()
    held = {name: np.zeros((1, 1, 8), np.float32) for name in "hc"}
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((1, 1, 6)).astype(np.float32)
        expected = module.run({"x": x, **held})
        np.testing.assert_array_equal(session.run({"x": x})["y"], expected["y"])
        held = {"h": expected["hn"], "c": expected["cn"]}
    copy = session.fork()
    np.testing.assert_array_equal(copy.states["h"], held["h"])
    assert session.length == 0
    session.reset()
    assert not session.states["c"].any()
    np.testing.assert_array_equal(copy.states["c"], held["c"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("past_*: present_*", "past_*: present"), r"`\*` must be in both names"),
        (("past_*: present_*", "cache: present_key"), "the model has no input 'cache'"),
        (("past_*: present_*", "past_*: now_*"), "the model has no output 'now_key'"),
        (("past_*: present_*", "x: y"), r"'x' and 'y': a state has fixed sizes but for"),
        (("past: {min: 0,", "past: {min: 1,"), r"write `past: \{min: 0, max: 40\}`"),
        (("targets: [host]", "targets: [cortex-m7]"), "cannot have the recipe's `state`"),
        (("targets: [host]", "targets: [x86-64-any]"), "with several ISA levels holds none yet"),
    ],
)
def test_what_no_library_can_hold_is_told(
    project: Project, edit: tuple[str, str], message: str
) -> None:
    caches.write_cached_attention(project.folder / "cached.onnx")
    recipe = caches.RECIPE.replace("targets:", STATE).replace(
        "verify:", "verify: {against: none}\nx:"
    )
    (project.folder / "tiny.yaml").write_text(recipe.replace("\nx: {repeat: 2}", "").replace(*edit))
    done = project.tvmflow("run", "tiny.yaml", "--until", "export")
    assert done.code in (1, 2)
    assert re.search(message, done.out + done.err), done.out + done.err
