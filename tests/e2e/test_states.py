"""Models with states: the library holds a KV cache or a recurrent state from step to step."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmflow
from tests.support import caches
from tests.support.browser import run_script
from tests.support.caches import Array
from tests.support.exports import compile_cpp
from tests.support.project import Project
from tests.support.recipes import ROOT
from tvmflow.runtime.arrays import unpack_rows
from tvmflow.targets.host import read_host

pytestmark = pytest.mark.slow

STATE = "state:\n  past_*: present_*\ntargets:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deliveries of attention with a KV cache."""
    project = Project(tmp_path_factory.mktemp("cached"))
    caches.write_cached_attention(project.folder / "cached.onnx")
    recipe = caches.RECIPE.replace("targets:", STATE).replace("outputs: [", "outputs: [cpp, ")
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


def test_forks_that_share_memory_do_not_disturb_each_other(folder: Path) -> None:
    """Whoever appends first goes on in the shared memory; also after a truncation or the end of the others."""
    module = tvmflow.load(folder / "cached.tvmflow")

    def replay(*seeds: int) -> Array:
        session, results = module.session(), np.empty(0)
        for place, seed in enumerate(seeds):
            results = session.run(feed(4, 4 * place, seed))["y"]
        return results

    first = module.session()
    first.run(feed(4, 0, 1)), first.run(feed(4, 4, 2))
    second = first.fork()
    third = second.fork()
    for session, seed in ((second, 3), (first, 4), (third, 5)):
        np.testing.assert_array_equal(session.run(feed(4, 8, seed))["y"], replay(1, 2, seed))
    fourth = first.fork()
    first.truncate(4)
    np.testing.assert_array_equal(first.run(feed(4, 4, 6))["y"], replay(1, 6))
    np.testing.assert_array_equal(fourth.run(feed(4, 12, 7))["y"], replay(1, 2, 4, 7))
    del first, second, third
    np.testing.assert_array_equal(fourth.run(feed(4, 16, 8))["y"], replay(1, 2, 4, 7, 8))


STEPS = 200


def test_dropped_rows_are_forgotten(folder: Path) -> None:
    """A step gives what a call gives with only the last rows, also after a fork, and after saving and loading."""
    module = tvmflow.load(folder / "cached.tvmflow")
    session, other = module.session(), module.session()
    session.run(feed(12, 0))
    before, copy = session.states, session.fork()
    session.drop(0)
    session.drop(5)
    assert (session.length, session.dropped, session.fork().dropped) == (7, 5, 5)
    rest = {name: array[:, :, 5:] for name, array in before.items()}
    other.load(session.save())
    assert other.dropped == 5
    for seed, dropping in enumerate((session, session.fork(), other)):
        given = feed(3, 7, seed)
        np.testing.assert_array_equal(dropping.run(given)["y"], module.run({**given, **rest})["y"])
    for name, array in copy.states.items():
        np.testing.assert_array_equal(array, before[name])
    # this fork has the rows alone, and its next step is beside them
    copy.drop(12)
    assert copy.length == 0
    np.testing.assert_array_equal(copy.run(feed(4, 0))["y"], module.session().run(feed(4, 0))["y"])
    for steps in range(20):
        session.drop(max(0, session.length + 7 - 40))
        session.run(feed(7, session.length, steps))
    assert (session.length, session.length + session.dropped) == (40, 12 + 3 + 20 * 7)
    session.reset()
    assert session.dropped == 0


def test_rows_of_states_that_are_copied_are_dropped(project: Project) -> None:
    """A model that also reads the past does not append in place; its states have the layout of the model."""
    sides: dict[str, list[int | str]] = {
        "past": [1, 2, "past", 4],
        "new": [1, 2, "seq", 4],
        "present": [1, 2, "past + seq", 4],
        "y": [1, 2, "past", 4],
    }
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sides.items()]
    nodes = [
        helper.make_node("Concat", ["past", "new"], ["present"], axis=2),
        helper.make_node("Neg", ["past"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "copied", infos[:2], infos[2:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=opsets),
        project.folder / "copied.onnx",
    )
    (project.folder / "tiny.yaml").write_text(COPIED)
    done = project.run()
    assert done.code == 0, done.out + done.err
    session = tvmflow.load(project.folder / "dist/copied/host/copied.tvmflow").session()
    new = np.random.default_rng(0).standard_normal((1, 2, 7, 4)).astype(np.float32)
    for part in np.split(new, [4], axis=2):
        session.run({"new": part})
    session.drop(2)
    np.testing.assert_array_equal(session.states["past"], new[:, :, 2:])
    session.truncate(3)
    np.testing.assert_array_equal(session.states["past"], new[:, :, 2:5])


COPIED = """\
recipe: 1
name: copied
model: {onnx: copied.onnx}
dimensions:
  seq: {max: 4}
  past: {min: 0, max: 30}
inputs:
  past: {shape: [1, 2, past, 4]}
  new: {shape: [1, 2, seq, 4]}
state: {past: present}
targets: [host]
tune: {trials: 0}
outputs: [bundle]
"""


# dtype -> the tolerance, the error of an output and of a state as shares of the largest value, the bytes of a row
SMALLER: Final[Mapping[str, tuple[str, float, float, int]]] = {
    "float16": ("float16", 10 / 2**11, 2.0**-11, 2 * caches.DEPTH),
    "int8": ("int8 states", 16 / 2**8, 0.51 / 127, caches.DEPTH + 4),
}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("dtype", SMALLER)
def test_a_smaller_cache_follows_a_float32_cache(
    project: Project, tmp_path: Path, dtype: str
) -> None:
    """Over 200 steps; C and Python give the same bits, and a saved state has half of the bytes, or a third."""
    arithmetic, of_largest, rounding, row = SMALLER[dtype]
    weights = caches.write_cached_attention(project.folder / "cached.onnx")
    state = STATE.replace("present_*", f"{{output: present_*, dtype: {dtype}}}")
    recipe = caches.RECIPE.replace("targets:", state).replace("max: 40", f"max: {STEPS}")
    (project.folder / "tiny.yaml").write_text(recipe)
    done = project.run()
    assert done.code == 0, done.out + done.err
    dist = project.folder / "dist/cached/host"
    verdict = json.loads((dist / "verify.json").read_text())
    assert verdict["states"]["passed"]
    assert verdict["tolerance"]["for"] == arithmetic
    assert verdict["swept"]["failed"] == []

    session = tvmflow.load(dist / "cached.tvmflow").session()
    past = tuple(np.zeros((2, 1, caches.HEADS, 0, caches.DEPTH), np.float32))
    inputs, outputs = [], []
    for seed in range(STEPS):
        given = feed(1, seed, seed)
        expected, *present = caches.attend(weights, given["x"], given["mask"], past)
        past = (present[0], present[1])
        inputs.append(given["x"])
        outputs.append(session.run(given)["y"])
        largest = abs(expected).max()
        np.testing.assert_allclose(outputs[-1], expected, 1e-2, of_largest * largest)
    for array, wanted in zip(session.states.values(), past, strict=True):
        assert array.dtype == dtype
        # an error of float16 is relative to the value, one of int8 to the largest value of its row
        found, limits = array.astype("f4"), rounding * abs(wanted) * 1.02 + 1e-6
        if dtype == "int8":
            found, limits = unpack_rows(array), rounding * abs(wanted).max(-1, keepdims=True) + 1e-6
        assert (abs(found - wanted) <= limits).all()

    library = dist / "cached-c-library"
    command = ["gcc", "-std=c11", "-Wall", "-Werror", f"-I{library}"]
    command += [str(ROOT / "tests/support/c_programs/steps.c"), str(library / "libcached.a")]
    program = tmp_path / "steps"
    subprocess.run([*command, "-lm", "-lpthread", "-o", str(program)], check=True)
    given_bytes = b"".join(array.tobytes() for array in inputs)
    ran = subprocess.run([program], input=given_bytes, capture_output=True, check=True)
    made = b"".join(array.tobytes() for array in outputs)
    assert ran.stdout[: len(made)] == made
    assert int(ran.stdout[len(made) :]) == len(session.save())
    head = len(tvmflow.load(dist / "cached.tvmflow").session().save())
    assert len(session.save()) - head == STEPS * 2 * caches.HEADS * row


def pattern(seq: int, length: int) -> dict[str, Array]:
    x = (np.arange(seq * caches.WIDTH) % 13 / 16 - 0.5).astype(np.float32)
    return {**feed(seq, length), "x": x.reshape(1, seq, -1)}


def test_a_program_in_cpp_gives_what_a_session_gives(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with states of either; a wrong call throws, and leaves the states."""

    def step(seq: int) -> Array:
        return session.run(pattern(seq, session.length))["y"]

    session = tvmflow.load(folder / "cached.tvmflow").session()
    session.run(feed(9, 0))
    (tmp_path / "python").write_bytes(session.save())
    cpp = folder / "cached-cpp"
    program = compile_cpp(ROOT / "tests/support/cpp/states.cpp", tmp_path / "program", cpp)
    words = [program, *(tmp_path / name for name in ("out", "python", "saved"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 12
    assert "input 'mask' is float32 [1, 8]: 8 values, not 1" in messages[4]

    session.reset()
    expected = [step(seq) for seq in (5, 1, 12)]
    expected += session.states.values()
    assert session.save() == (tmp_path / "saved").read_bytes()
    expected.append(step(2))
    expected.append(session.states["past_value"][:, :, 13:])
    session.truncate(7)
    expected.append(session.states["past_value"])
    expected.append(step(3))
    session.load((tmp_path / "python").read_bytes())
    expected.append(step(4))
    session.reset()
    expected.append(step(5))
    assert (tmp_path / "out").read_bytes() == b"".join(array.tobytes() for array in expected)


@pytest.fixture(scope="module")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deliveries of the same model as WebAssembly."""
    project = Project(tmp_path_factory.mktemp("wasm"))
    caches.write_cached_attention(project.folder / "cached.onnx")
    recipe = caches.RECIPE.replace("targets: [host]", "targets: [wasm32-wasi]")
    recipe = recipe.replace("targets:", STATE).replace("{repeat: 2}", "{against: none}")
    (project.folder / "tiny.yaml").write_text(recipe.replace(", bundle]", ", web]"))
    done = project.run()
    assert done.code == 0, done.out + done.err
    return project.folder / "dist/cached/wasm32-wasi"


BROWSER = """
const { load } = await import("./cached.js");
const model = await load();
const step = async (stream, seq) => {
  stream.setDimensions({ seq });
  const mask = new Float32Array(stream.inputs[1].shape[1]).fill(1);
  const x = Float32Array.from({ length: seq * 32 }, (_, i) => (i % 13) / 16 - 0.5);
  const result = stream.step({ x, mask });
  x.fill(0);
  return [...(await result).y];
};
const results = [await step(model, 5), await step(model, 1)];
const saved = await model.saveState();
const copy = await model.fork();
results.push(await step(model, 3));
const repeated = [await step(copy, 3)];
const lengths = [copy.length];
copy.destroy();
const [loading, truncating] = [model.loadState(saved), model.truncate(7).catch((error) => error.message)];
saved.fill(0);
const wrong = [await truncating, await model.loadState(saved).catch((error) => error.message)];
wrong.push(await model.state("x").catch((error) => error.message), await model.step({}).catch((error) => error.message));
await loading;
lengths.push(model.length);
repeated.push(await step(model, 3));
await model.drop(4);
lengths.push(model.length, model.dropped);
const state = [...(await model.state("past_value"))];
const logits = Float32Array.of(0, 1, 3, 2);
const draw = async () => {
  const tokens = [];
  for (let i = 0; i < 20; ++i) tokens.push(await model.sample(logits, { temperature: 1, topK: 3 }));
  return tokens;
};
await model.seed(7);
const other = await model.fork();
const tokens = [await draw(), await draw()];
const chosen = [await model.sample(logits), await model.sample(logits, { repetitionPenalty: 2 }, [2])];
chosen.push(await other.sample(logits, { topK: 2000 }).catch((error) => error.message));
await model.seed(7n);
tokens.push(await draw());
await model.reset();
lengths.push(model.length, model.dropped);
repeated.push(await step(model, 5));
return { results, repeated, lengths, wrong, state, tokens, chosen };
"""


def test_a_web_package_takes_steps(folder: Path, wasm: Path) -> None:
    """In Chromium: the class of the package has the states of WebAssembly, and calls are done in turn."""
    package = wasm / "cached-web"
    found = run_script(package, BROWSER)
    session = tvmflow.load(folder / "cached.tvmflow").session()
    for seq, values in zip((5, 1, 3), found["results"], strict=True):
        expected = session.run(pattern(seq, session.length))["y"]
        np.testing.assert_allclose(np.reshape(values, expected.shape), expected, 1e-4, 1e-5)
    assert found["repeated"] == [found["results"][place] for place in (2, 2, 0)]
    assert found["lengths"] == [9, 6, 5, 4, 0, 0]
    session.drop(4)
    state = session.states["past_value"]
    np.testing.assert_allclose(np.reshape(found["state"], state.shape), state, 1e-4, 1e-5)
    first, second, again = found["tokens"]
    assert first == again != second and set(first) <= {1, 2, 3}
    assert found["chosen"][:2] == [2, 3] and "is out of its range" in found["chosen"][2]
    texts = ("cannot have this length", "damaged", "has no state x", "input x must be")
    for message, text in zip(found["wrong"], texts, strict=True):
        assert text in message
    types = (package / "cached.d.ts").read_text()
    assert 'export type State = "past_key" | "past_value";' in types
    assert types.index("step(values: StepInputs)") > types.index("export class Model {")


NODE = """
import { load } from "./cached.js";

const model = await load();
const step = (seq, stream = model) => {
  stream.setDimensions({ seq });
  const [x, mask] = stream.inputs;
  const values = Float32Array.from({ length: x.bytes / 4 }, (_, i) => (i % 13) / 16 - 0.5);
  return [...stream.step({ x: values, mask: new Float32Array(mask.bytes / 4).fill(1) }).y];
};
const results = [5, 1, 12].map((seq) => step(seq));
const saved = model.saveState();
results.push(step(2));
model.truncate(18);
const repeated = [step(2)];
model.loadState(saved);
repeated.push(step(2));
const damaged = saved.slice();
damaged[saved.length - 1] ^= 1;
const wrong = [
  () => model.loadState(damaged),
  () => model.truncate(21),
  () => model.drop(21),
  () => model.step({ x: new Float32Array(64), mask: new Float32Array(3) }),
  () => model.step({ past_key: new Float32Array(64) }),
];
const errors = wrong.map((call) => {
  try {
    return call();
  } catch (error) {
    return [error.message, model.length];
  }
});
repeated.push((model.truncate(18), step(2)));
model.truncate(18);
const copy = model.fork();
step(3);
repeated.push(step(2, copy));
copy.destroy();
model.reset();
const again = step(5);
step(3);
model.drop(3);
const rest = [model.length, model.dropped, step(3)];
model.destroy();
console.log(JSON.stringify({ results, repeated, errors, again, rest, bytes: saved.length }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript_takes_steps(folder: Path, wasm: Path) -> None:
    """The outputs are those of this machine's session, up to roundings; a wrong call leaves the states."""
    library = wasm / "cached-c-library"
    (library / "main.mjs").write_text(NODE)
    ran = subprocess.run(["node", "main.mjs"], cwd=library, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    session = tvmflow.load(folder / "cached.tvmflow").session()
    for seq, values in zip((5, 1, 12, 2), found["results"], strict=True):
        expected = session.run(pattern(seq, session.length))["y"]
        np.testing.assert_allclose(np.reshape(values, expected.shape), expected, 1e-4, 1e-5)
    assert found["repeated"] == [found["results"][3]] * 4
    assert found["again"] == found["results"][0]
    messages = [message for message, _ in found["errors"]]
    assert (
        messages[0] == "the saved state is damaged, or that of another model or version of tvmflow"
    )
    assert messages[1].startswith("the states cannot have this length: ")
    assert messages[2] == messages[1]
    session.reset()
    for seq in (5, 3):
        session.run(pattern(seq, session.length))
    session.drop(3)
    values = session.run(pattern(3, 5))["y"]
    assert found["rest"][:2] == [5, 3]
    np.testing.assert_allclose(np.reshape(found["rest"][2], values.shape), values, 1e-4, 1e-5)
    assert messages[3:] == [
        "input mask must be a Float32Array of 22 elements",
        "the model has no input past_key",
    ]
    assert {length for _, length in found["errors"]} == {20}


def damage(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_what_is_wrong_is_refused_and_changes_nothing(folder: Path) -> None:
    """Damaged states, those of another model, steps that are too long, wrong masks."""
    session = tvmflow.load(folder / "cached.tvmflow").session()
    session.run(feed(6, 0))
    saved = session.save()
    before = session.states
    wrong = [b"", saved[:-1], saved + b"0", saved[: len(saved) // 2]]
    wrong += [damage(saved, place) for place in (0, 9, 20, 25, 33, 41, 50, 58, len(saved) - 1)]
    calls: list[tuple[str, Callable[[], object]]] = [
        *(("damaged, or that of another", lambda data=data: session.load(data)) for data in wrong),
        ("cannot have this length", lambda: session.truncate(7)),
        ("cannot have this length", lambda: session.truncate(-1)),
        ("cannot have this length", lambda: session.drop(7)),
        ("cannot have this length", lambda: session.drop(-1)),
        ("cannot have this length", lambda: session.drop(-(1 << 63))),
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


@pytest.mark.skipif(read_host().arch != "x86_64", reason="needs an x86-64 CPU")
def test_all_levels_share_states(
    folder: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that one level of CPUs has saved goes on at another; forks have the level of their original."""
    caches.write_cached_attention(project.folder / "cached.onnx")
    recipe = caches.RECIPE.replace("targets: [host]", "targets: [x86-64-any]")
    (project.folder / "tiny.yaml").write_text(recipe.replace("targets:", STATE))
    done = project.run()
    assert done.code == 0, done.out + done.err
    dist = project.folder / "dist/cached/x86-64-any"
    verified = json.loads((dist / "measurements.json").read_text())["levels"]
    levels = [name for name, entry in verified.items() if "not_verified" not in entry]
    session, saved = tvmflow.load(folder / "cached.tvmflow").session(), b""
    for seq, level in enumerate(levels * 2, 1):
        monkeypatch.setenv("CACHED_LEVEL", level)
        module = tvmflow.load(dist / "cached.tvmflow")
        stream = module.session()
        if saved:
            stream.load(saved)
        stream = stream.fork()
        given = pattern(seq, session.length)
        expected = session.run(given)["y"]
        np.testing.assert_allclose(stream.run(given)["y"], expected, 1e-4, 1e-5)
        stream.drop(seq // 3)
        session.drop(seq // 3)
        assert (stream.length, stream.dropped) == (session.length, session.dropped)
        saved = stream.save()


def test_a_recurrent_state_is_replaced_by_each_step(project: Project) -> None:
    """It begins with 0, and has no rows to drop."""
    caches.write_lstm(project.folder / "recurrent.onnx")
    recipe = caches.RECURRENT.replace("outputs: [", "outputs: [cpp, ")
    (project.folder / "tiny.yaml").write_text(recipe)
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
    with pytest.raises(tvmflow.TvmflowError, match="cannot be shortened: reset it"):
        session.drop(1)
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


WORDS = 20


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[tvmflow.Module, dict[str, Array]]:
    """A language model of one layer, and its weights."""
    project = Project(tmp_path_factory.mktemp("words"))
    weights = caches.write_cached_attention(project.folder / "words.onnx", words=WORDS)
    (project.folder / "tiny.yaml").write_text(caches.LANGUAGE)
    done = project.run()
    assert done.code == 0, done.out + done.err
    return tvmflow.load(project.folder / "dist/words/host/words.tvmflow"), weights


def predict(weights: dict[str, Array], tokens: list[int], start: int = 0) -> Array:
    """The logits after some tokens, by NumPy and without a cache; tokens before `start` are hidden."""
    x = (weights["tokens"][tokens] + weights["positions"][: len(tokens)])[None, start:]
    empty = np.zeros((1, caches.HEADS, 0, caches.DEPTH), np.float32)
    # the last query sees all tokens, as a decoder does; those before are not used
    y, _, _ = caches.attend(
        weights, x, np.ones((1, len(tokens) - start), np.float32), (empty, empty)
    )
    return np.array(y[0, -1] @ weights["head"])


def test_tokens_are_generated_as_without_a_cache(
    language: tuple[tvmflow.Module, dict[str, Array]],
) -> None:
    """The most likely ones; a prompt is longer than a step, and a later call goes on."""
    module, weights = language
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    expected = list(tokens)
    for _ in range(8):
        expected.append(int(predict(weights, expected).argmax()))
    session = module.session()
    first = list(session.generate(tokens, max_tokens=5))
    assert first == expected[16:21]
    assert list(session.generate(first[-1:], max_tokens=3)) == expected[21:]
    session.reset()
    stopped = list(session.generate(tokens, stop=[first[2]]))
    assert stopped == first[: first.index(first[2]) + 1]
    session.reset()
    assert len(list(session.generate(tokens))) + len(tokens) == caches.LENGTH
    with pytest.raises(tvmflow.TvmflowError, match="cannot have this length"):
        list(session.generate([1]))


def test_generation_goes_on_where_the_cache_is_full(project: Project) -> None:
    """The oldest tokens are dropped: each token follows from the others; positions go on, also in a later call."""
    weights = caches.write_cached_attention(project.folder / "words.onnx", words=WORDS)
    (project.folder / "tiny.yaml").write_text(caches.LANGUAGE.replace("max: 39}", "max: 15}"))
    done = project.run()
    assert done.code == 0, done.out + done.err
    session = tvmflow.load(project.folder / "dist/words/host/words.tvmflow").session()
    tokens, start = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 0
    for _ in range(20):
        # one more does not fit: the next step drops 4
        start += 4 * (len(tokens) - start > 15)
        tokens.append(int(predict(weights, tokens, start).argmax()))
    first = list(session.generate(tokens[:15], max_tokens=12, drop=4))
    assert first == tokens[15:27]
    assert (session.length, session.dropped) == (14, 12)
    copy = session.fork()
    assert list(session.generate(first[-1:], max_tokens=8, drop=4)) == tokens[27:35]
    loaded = session.fork()
    loaded.load(copy.save())
    following = loaded.generate(first[-1:], max_tokens=8, drop=4)
    assert list(following) == tokens[27:35]
    session.reset()
    assert len(list(session.generate(tokens[:10]))) == 6


def test_sampled_tokens_follow_their_probabilities(
    language: tuple[tvmflow.Module, dict[str, Array]],
) -> None:
    """With each limit; the random state is saved and forked, and a seed repeats them."""
    module, weights = language
    session = module.session()
    logits = predict(weights, [7]).astype(np.float64)
    ordered = np.argsort(-logits)

    def share(temperature: float, kept: Array) -> Array:
        weight = np.zeros(WORDS)
        weight[kept] = np.exp((logits[kept] - logits.max()) / temperature)
        return np.array(weight / weight.sum())

    everything = share(3.0, ordered)
    nucleus = int(np.searchsorted(np.cumsum(everything[ordered]), 0.6)) + 1
    cases: list[tuple[dict[str, Any], Array]] = [
        ({}, everything),
        ({"top_k": 3}, share(3.0, ordered[:3])),
        ({"top_p": 0.6}, share(3.0, ordered[:nucleus])),
    ]
    for settings, probabilities in cases:
        counts = np.zeros(WORDS)
        for seed in range(600):
            session.reset()
            [token] = session.generate([7], max_tokens=1, temperature=3.0, seed=seed, **settings)
            counts[token] += 1
        assert np.abs(counts / 600 - probabilities).max() < 0.08, settings
    session.reset()
    warm: dict[str, Any] = {"temperature": 2.0, "repetition_penalty": 1.3, "max_tokens": 6}
    first = list(session.generate([7, 2], seed=5, **warm))
    saved, copy = session.save(), session.fork()
    following = list(session.generate(first[-1:], **warm))
    assert list(copy.generate(first[-1:], **warm)) == following
    copy.load(saved)
    assert list(copy.generate(first[-1:], **warm)) == following


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "is out of its range"),
        ({"temperature": float("nan")}, "is out of its range"),
        ({"top_p": 1.5, "temperature": 1.0}, "is out of its range"),
        ({"top_k": 1025, "temperature": 1.0}, "is out of its range"),
        ({"tokens": list[int]()}, "there are no tokens to begin with"),
        ({"tokens": [20]}, "index out of range"),
    ],
)
def test_wrong_ways_to_generate_are_refused(
    language: tuple[tvmflow.Module, dict[str, Array]], arguments: dict[str, Any], message: str
) -> None:
    session = language[0].session()
    tokens = arguments.pop("tokens", [1])
    with pytest.raises(tvmflow.TvmflowError, match=message):
        list(session.generate(tokens, max_tokens=1, **arguments))


def test_other_models_generate_no_tokens(folder: Path) -> None:
    session = tvmflow.load(folder / "cached.tvmflow").session()
    with pytest.raises(tvmflow.TvmflowError, match="one must be tokens, and others masks or pos"):
        session.generate([1])
