"""WebGPU: programs of steps and WGSL compute in headless Chromium what ONNX Runtime does; errors say what happened."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.browser import read_modules, run_script
from tests.support.kernels import FAST
from tests.support.onnx_models import (
    draw,
    load,
    load_benchmark_networks,
    model,
    open_session,
    value,
)
from tests.unit.compiler.networks import attention
from tests.unit.frontends.onnx.models import layer
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import web_program
from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.exporters import web
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.tvm_target import make_target

TARGET: Final = BACKENDS["webgpu"].complete_target(PRESETS["browser"].tvm or {})
# What each script begins with: a function that opens the program of a folder.
_OPEN: Final = """
const files = (folder, sizes) => Object.fromEntries(Object.entries(sizes).map(([name, [file, sha256, bytes]]) =>
  [name, { url: new URL(`./${folder}/${file}`, location), sha256, bytes }]));
const openProgram = async (folder, options = {}) => {
  const { openModel } = await import("./runtime.js");
  const { description, fetched } = await (await fetch(`${folder}/described.json`)).json();
  const backends = { webgpu: () => import("./webgpu.js") };
  return openModel(description, files(folder, fetched), backends, { backend: "webgpu", ...options });
};
const fail = (promise) => promise.then(() => "nothing failed", (error) => [error.name, error.code, error.message]);
"""


class Compiled(NamedTuple):
    """A folder with a program, and inputs for it."""

    folder: Path
    program: Json
    feed: dict[str, Any]
    expected: list[Any]


def compile_network(made: onnx.ModelProto, folder: Path, feed: dict[str, Any]) -> Compiled:
    """Compile a model into a folder, in which it is described as a package describes it."""
    folder.mkdir()
    loaded = load(made, folder, feed)
    lowered = lowering.lower(loaded.mod, make_target(TARGET), FAST)
    scheduled = lowered.schedule_untuned(loaded.params, TARGET, 1)
    web_program.compile_web_program(scheduled, folder)
    tensors = {
        direction: [{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in specs]
        for direction, specs in (("inputs", loaded.inputs), ("outputs", loaded.outputs))
    }
    fetched = {
        name: web.FetchedFile.read(folder / file) for name, file in web._WEBGPU_FILES.items()
    }
    described = {"description": {**tensors, "images": []}, "fetched": fetched}
    (folder / "described.json").write_text(json.dumps(described))
    for name, text in read_modules().items():
        (folder.parent / name).write_text(text)
    program = json.loads((folder / "program.json").read_text())
    return Compiled(folder, program, feed, open_session(made).run(None, dict(feed)))


def run_all(networks: dict[str, Compiled], root: Path) -> dict[str, Any]:
    """Return the outputs of each network, each called three times at once."""
    feeds = {
        name: {
            tensor: [web._ARRAYS[str(array.dtype)], array.ravel().tolist()]
            for tensor, array in network.feed.items()
        }
        for name, network in networks.items()
    }
    script = f"{_OPEN}\nconst feeds = {json.dumps(feeds)};" + """
const found = {};
for (const [name, feed] of Object.entries(feeds)) {
  const model = await openProgram(name);
  const values = Object.fromEntries(Object.entries(feed).map(([tensor, [type, data]]) =>
    [tensor, globalThis[type].from(data, type.startsWith("Big") ? BigInt : Number)]));
  const calls = [];
  for (let call = 0; call < 3; call++) {
    calls.push(model.run(values));
    // what a call takes is what the arrays have when it begins
    if (call === 1) for (const array of Object.values(values)) array.fill(array instanceof BigInt64Array ? 0n : 0);
  }
  const results = await Promise.all(calls);
  found[name] = results.map((outputs) => model.outputs.map((tensor) => Array.from(outputs[tensor.name], Number)));
  model.destroy();
}
return found;
"""  # fmt: skip
    found = run_script(root, script)
    assert isinstance(found, dict)
    return found


def check_outputs(network: Compiled, results: list[list[list[float]]]) -> None:
    """The first two calls have the inputs, the third one zeros."""
    first, second, third = results
    assert first == second != third
    for actual, expected in zip(first, network.expected, strict=True):
        atol = 1e-5 * max(0.1, np.abs(expected).max())
        np.testing.assert_allclose(actual, np.ravel(expected), rtol=1e-4, atol=atol)


def test_a_recurrent_layer_runs_in_chromium(tmp_path: Path) -> None:
    """Each step of it is a launch that passes its number; its states are buffers of their own."""
    made, feed = layer("LSTM", hidden=5)
    network = compile_network(made, tmp_path / "lstm", feed)
    grids = [step[3] for step in network.program["steps"] if isinstance(step[1], list)]
    assert [[number, 0] for number in range(4)] == [
        numbers for numbers in grids if len(numbers) == 2
    ]
    assert network.program["limits"] == {} and network.program["features"] == []
    check_outputs(network, run_all({"lstm": network}, tmp_path)["lstm"])


def encoder() -> tuple[onnx.ModelProto, dict[str, Any]]:
    """BERT in small: ids of words and a mask, as int64; what each word has, and its id plus 1."""
    networks, tokens, width = load_benchmark_networks(), 16, 32
    net = networks._Net()
    words = net.op("Gather", net.weight(50, width), "ids")
    x = networks._encode(net, net.op("Add", words, net.weight(1, tokens, width)), 2, width, 4)
    mask = net.op("Unsqueeze", net.op("Cast", "mask", to=1), net.constant(np.array([2])))
    y = net.op("Mul", x, mask)
    inputs = [value(name, [1, tokens], "int64") for name in ("ids", "mask")]
    own = net.op("Add", "ids", net.constant(np.array([1])))
    outputs = [value(y, [1, tokens, width]), value(own, [1, tokens], "int64")]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in net._weights}
    ids = np.arange(tokens)[None] * 3
    feed = {"ids": np.where(ids > 30, ids - 50, ids), "mask": (ids < 40).astype(np.int64)}
    return model(net._nodes, inputs, outputs, weights), feed


@pytest.mark.gpu
def test_an_encoder_takes_ids_of_64_bits(tmp_path: Path) -> None:
    """They have 32 bits on the GPU, in outputs too; larger ones are refused."""
    made, feed = encoder()
    network = compile_network(made, tmp_path / "bert", feed)
    check_outputs(network, run_all({"bert": network}, tmp_path)["bert"])
    script = (
        _OPEN
        + """
const model = await openProgram("bert");
const values = { ids: new BigInt64Array(16).fill(-(1n << 31n)), mask: new BigInt64Array(16).fill(1n << 31n) };
return fail(model.run(values));
"""
    )
    name, _, message = run_script(tmp_path, script)
    assert name == "RangeError" and message.startswith("input mask has 2147483648, and WebGPU has")


@pytest.mark.gpu
def test_places_masks_and_the_first_k_run_in_chromium(tmp_path: Path) -> None:
    """The memory of a GPU has neither bools nor int64: inputs and outputs are converted."""
    weights = {
        "w": draw(5, 3, 3, 3),
        "bound": np.array(0.5, np.float32),
        "k": np.array([3]),
        "low": np.array([True, False] * 4),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("ArgMax", ["c"], ["classes"], axis=1, keepdims=0),
        helper.make_node("ArgMin", ["c"], ["columns"], axis=-1),
        helper.make_node("TopK", ["c", "k"], ["best", "places"], axis=1),
        helper.make_node("Greater", ["c", "bound"], ["high"]),
        helper.make_node("And", ["high", "mask"], ["both"]),
        helper.make_node("Or", ["both", "low"], ["kept"]),
        helper.make_node("Where", ["kept", "c", "bound"], ["chosen"]),
        helper.make_node("Not", ["both"], ["others"]),
    ]
    shape, whole = [1, 3, 8, 8], [1, 5, 8, 8]
    outputs = [
        value("classes", [1, 8, 8], "int64"),
        value("columns", [1, 5, 8, 1], "int64"),
        value("best", shape),
        value("places", shape, "int64"),
        value("chosen", whole),
        value("others", whole, "bool"),
    ]
    made = model(nodes, [value("x", shape), value("mask", [8], "bool")], outputs, weights)
    feed = {"x": draw(*shape), "mask": np.arange(8) % 3 != 0}
    network = compile_network(made, tmp_path / "places", feed)
    check_outputs(network, run_all({"places": network}, tmp_path)["places"])


@pytest.mark.gpu
def test_attention_runs_in_chromium(tmp_path: Path) -> None:
    """In one launch, whose threads wait for each other; 33 queries and keys fill no tile."""
    made, feed = attention(18)
    network = compile_network(made, tmp_path / "attention", feed)
    assert len(network.program["steps"]) == 1
    check_outputs(network, run_all({"attention": network}, tmp_path)["attention"])


@pytest.mark.gpu
@pytest.mark.slow
def test_mobilenet_runs_in_chromium(tmp_path: Path) -> None:
    """With depthwise convolutions and residuals, each kernel many times; memory of tensors is used again."""
    made = load_benchmark_networks().mobilenet()
    network = compile_network(made, tmp_path / "mobile", {"x": draw(1, 3, 224, 224)})
    assert len([buffer for buffer in network.program["buffers"] if buffer[0] == "tensor"]) <= 4
    check_outputs(network, run_all({"mobile": network}, tmp_path)["mobile"])


def test_code_is_compiled_quickly(tmp_path: Path) -> None:
    """SwiftShader takes twice as long for each branch more in a loop: a padded convolution has none there."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": draw(32, 16, 3, 3), "b": draw(32)}
    made = model(nodes, [value("x", [1, 16, 8, 8])], [value("y", [1, 32, 8, 8])], weights)
    network = compile_network(made, tmp_path / "net", {"x": draw(1, 16, 8, 8)})
    source = (network.folder / "kernels.wgsl").read_text()
    assert "workgroupBarrier" in source and "select(" in source
    assert not re.search(r"&&|\|\||else", source)
    for name in re.findall(r"let (\w+)", source):
        assert len(re.findall(rf"\b{name}\b", source)) > 1, name


@pytest.mark.gpu
def test_errors_say_what_happened(tmp_path: Path) -> None:
    """Of a device that is lost, limits, features, code that is refused, wrong inputs, other files."""
    made = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [4])], [value("y", [4])])
    compile_network(made, tmp_path / "net", {"x": np.ones(4, np.float32)})
    for name, change in (
        ("limit", {"limits": {"maxBufferSize": 1 << 50}}),
        ("feature", {"features": ["no-such-feature"]}),
    ):
        shutil.copytree(tmp_path / "net", tmp_path / name)
        path = tmp_path / name / "program.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    shutil.copytree(tmp_path / "net", tmp_path / "code")
    (tmp_path / "code" / "kernels.wgsl").write_text("fn v0( {")
    for name in ("limit", "feature", "code"):
        path = tmp_path / name / "described.json"
        described = json.loads(path.read_text())
        for key, file in web._WEBGPU_FILES.items():
            described["fetched"][key] = web.FetchedFile.read(tmp_path / name / file)
        path.write_text(json.dumps(described))
    shutil.copytree(tmp_path / "net", tmp_path / "other")
    (tmp_path / "other" / "weights.bin").write_bytes(b"other")
    script = (
        _OPEN
        + """
const found = {};
for (const name of ["limit", "feature", "code", "other"]) found[name] = await fail(openProgram(name));
const progress = [];
(await openProgram("net", { onprogress: ({ loaded, total }) => progress.push(loaded / total) })).destroy();
found.progress = progress.at(-1);
found.short = await fail(openProgram("other", { onprogress() {} }));
const adapter = await navigator.gpu.requestAdapter();
const device = await adapter.requestDevice();
const model = await openProgram("net", { device });
found.inputs = await fail(model.run({ x: new Float32Array(3) }));
found.before = Array.from((await model.run({ x: Float32Array.of(-1, 2, -3, 4) })).y);
const other = await openProgram("net", { device });
other.destroy();
found.destroyed = await fail(other.run({ x: new Float32Array(4) }));
// the device is the program's, and is not destroyed with a model
found.still = Array.from((await model.run({ x: Float32Array.of(1, 2, 3, 4) })).y);
const running = fail(model.run({ x: new Float32Array(4) }));
device.destroy();
found.running = await running;
found.lost = await fail(model.run({ x: new Float32Array(4) }));
return found;
"""
    )
    found = run_script(tmp_path, script)
    assert found["limit"][:2] == ["ModelError", "limit"]
    assert f"maxBufferSize {1 << 50}, and this one has" in found["limit"][2]
    assert found["feature"][1:] == [
        "limit",
        "the GPU has no no-such-feature, which this model needs",
    ]
    assert found["code"][1] == "kernel"
    assert "the browser does not compile the kernel 0: 1:" in found["code"][2]
    assert found["other"][1] == "fetch"
    assert found["other"][2].startswith("weights.bin cannot be fetched, or is not the file that")
    assert found["other"][2].endswith("with this module: its SHA-256 is another one")
    assert found["short"][1] == "fetch"
    assert found["progress"] == 1
    assert found["inputs"][2] == "input x must be a Float32Array of 4 elements"
    assert (found["before"], found["still"]) == ([0, 2, 0, 4], [1, 2, 3, 4])
    assert found["destroyed"][1:] == ["destroyed", "the model was destroyed"]
    assert found["lost"] == found["running"] and found["lost"][1] == "lost"
    assert found["lost"][2].startswith("the GPU was lost: its device was destroyed; load the model")


def test_what_webgpu_lacks_is_named_when_it_is_built(tmp_path: Path) -> None:
    """Numbers of 64 bits that 32 cannot hold, and branches."""
    for dtype, number in (("float64", 1.0), ("int64", 1 << 40)):
        node = helper.make_node("Add", ["x", "one"], ["y"])
        tensors = [value("x", [4], dtype)], [value("y", [4], dtype)]
        made = model([node], *tensors, {"one": np.array(number, dtype)})
        with pytest.raises(StageError, match="cannot run by WebGPU"):
            compile_network(made, tmp_path / dtype, {"x": np.ones(4, dtype)})
    condition = model(
        [
            helper.make_node(
                "If", ["flag"], ["y"],
                then_branch=helper.make_graph([helper.make_node("Relu", ["x"], ["a"])], "t", [], [value("a", [4])]),
                else_branch=helper.make_graph([helper.make_node("Neg", ["x"], ["b"])], "e", [], [value("b", [4])]),
            )
        ],
        [value("x", [4]), value("flag", [], "bool")], [value("y", [4])],
    )  # fmt: skip
    feed = {"x": np.ones(4, np.float32), "flag": np.bool_(True)}
    with pytest.raises(StageError, match="it has a branch that depends on data"):
        compile_network(condition, tmp_path / "if", {**feed, "flag": np.array(True)})


def test_needs_above_what_each_gpu_has_are_counted(tmp_path: Path) -> None:
    """A kernel of more tensors than 8; the workgroups of a long axis are a grid."""
    names = [f"x{number}" for number in range(9)]
    node = helper.make_node("Concat", names, ["y"], axis=0)
    inputs = [value(name, [1 << 21]) for name in names]
    made = model([node], inputs, [value("y", [9 << 21])])
    feed = {name: np.zeros(1 << 21, np.float32) for name in names}
    network = compile_network(made, tmp_path / "wide", feed)
    assert network.program["limits"] == {"maxStorageBuffersPerShaderStage": 10}
    ((_, _, grid, (last,)),) = network.program["steps"]
    assert grid[0] <= 65535 and grid[0] * grid[2] > last >= grid[0] * (grid[2] - 1)
