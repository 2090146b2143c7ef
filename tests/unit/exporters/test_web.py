"""`web`: a package for browsers. Node runs its modules, and Chromium the whole of it, where they are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support import exports
from tests.support.browser import read_modules, run_script
from tests.support.recipes import ROOT
from tvmflow.core.types import TensorSpec
from tvmflow.exporters import web
from tvmflow.exporters.exporter import BuiltModel, ExportRequest
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.labels import Labels
from tvmflow.targets import browser

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")

SIGNATURE: Final = {
    "inputs": [{"name": "data", "shape": [2, 3, 28, 28], "dtype": "float32"}],
    "outputs": [{"name": "scores", "shape": [2, 3], "dtype": "float32"}],
}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
IMAGES: Final[list[tuple[TensorSpec, dict[str, Any]]]] = [
    (TensorSpec("data", (2, 3, 28, 28), "float32"), {"resize": 32, "crop": 28, "mean": MEAN, "std": STD}),
    (TensorSpec("data", (1, 20, 33, 3), "int8"), {"colour": "BGR", "mean": 128}),
    (TensorSpec("data", (1, 1, 41, 26), "float64"), {"crop": [41, 26]}),
    (TensorSpec("data", (1, 3, 17, 90), "float16"), {"interpolation": "bicubic", "mean": 0.5, "std": 0.5}),
    (TensorSpec("data", (1, 3, 64, 48), "float32"), {"pad": 114, "scale": 1}),
]  # fmt: skip


def model(signature: Any = SIGNATURE, version: str = "1.0", **manifest: Any) -> BuiltModel:
    """A model without a library."""
    request = ExportRequest("net", version, "web", "llvm", "wasm32-wasi")
    manifest = {"target": {"features": []}, **manifest}
    return BuiltModel(request, Path(), {}, signature, manifest, Path(), {})


def node(folder: Path, script: str) -> Any:
    """What a script prints as JSON, beside the modules of a package."""
    for name, text in read_modules().items():
        (folder / name).with_suffix(".mjs").write_text(text.replace('.js";', '.mjs";'))
    (folder / "main.mjs").write_text(script)
    command = ["node", "main.mjs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_inputs_have_the_bits_of_python(tmp_path: Path) -> None:
    """Every layout, colour and dtype, resized up and down, cropped and padded."""
    rng = np.random.default_rng(0)
    sizes = [(8, 9), (61, 40), (37, 150), (1, 1), (200, 301)]
    pixels = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    pixels.append(np.where(pixels[1] > 127, 255, 0).astype(np.uint8))
    for number, image in enumerate(pixels):
        alpha = np.full((*image.shape[:2], 1), 255, np.uint8)
        np.concatenate([image, alpha], 2).tofile(tmp_path / f"{number}.rgba")
    cases = []
    for spec, fields in IMAGES:
        signature = {"inputs": [spec.to_json()], "outputs": SIGNATURE["outputs"]}
        described = web._describe_model(model(signature, images={"data": fields}))
        array = f"{spec.dtype.capitalize()}Array" if spec.dtype != "float16" else "Uint16Array"
        cases.append([described, array, int(np.prod(spec.shape))])
    script = """
import { readFileSync, writeFileSync } from "node:fs";
import { preprocess } from "./images.mjs";
const [cases, sizes] = %s;
cases.forEach(([description, type, length], number) => {
  const [settings] = description.images;
  const table = new globalThis[type](Uint8Array.from(Buffer.from(settings.table, "base64")).buffer);
  sizes.forEach(([height, width], image) => {
    const data = new Uint8ClampedArray(readFileSync(`${image}.rgba`));
    const values = new globalThis[type](length);
    const batch = description.inputs[0].shape[0];
    preprocess({ ...settings, batch, table }, [{ data, width, height }], values);
    writeFileSync(`${number}-${image}.bin`, new Uint8Array(values.buffer));
  });
});
console.log(cases.length);
"""
    shapes = [image.shape[:2] for image in pixels]
    assert node(tmp_path, script % json.dumps([cases, shapes])) == len(IMAGES)
    for number, (spec, fields) in enumerate(IMAGES):
        entry = Preprocessing.of(fields, spec)
        for place, rgb in enumerate(pixels):
            actual = np.fromfile(tmp_path / f"{number}-{place}.bin", spec.dtype)
            expected = entry.tensor([entry.fit(rgb)])
            np.testing.assert_array_equal(actual.reshape(spec.shape), expected)


@needs_node
@pytest.mark.parametrize("activation", ["", "softmax"])
def test_classes_have_the_probabilities_of_python(tmp_path: Path, activation: str) -> None:
    """Of logits, of probabilities, of equal scores, and without a finite one."""
    names = ("<b>", "__proto__", "third")
    labels = Labels(names, activation, "")
    described = web._describe_model(model(labels=labels.to_json()))
    rows = [[1.0, 3.0, 3.0], [0.2, 0.5, 0.3], [-5.0, float("nan"), 2.0]]
    script = """
import { openModel } from "./runtime.mjs";
const program = { inputs: [], outputs: [], run: () => ({}) };
const model = await openModel(%s, {}, { wasm: async () => ({ open: () => program }) });
const rows = %s.map((row) => row.map((value) => value ?? NaN));
const ranked = rows.flatMap((row) => model.rank({ scores: Float32Array.from(row) }));
console.log(JSON.stringify(ranked.map((best) => best.map(({ label, probability }) => [label, probability]))));
"""
    described["outputs"][0]["shape"] = [1, 3]
    plain = [[None if value != value else value for value in row] for row in rows]
    ranked = node(tmp_path, script % (json.dumps(described), json.dumps(plain)))
    for row, best in zip(rows, ranked, strict=True):
        (expected,) = labels.rank(np.array([row], np.float32))
        known = [entry for entry in expected if entry.probability == entry.probability]
        assert [label for label, _ in best][: len(known)] == [entry.label for entry in known]
        probabilities = [probability for _, probability in best][: len(known)]
        assert probabilities == pytest.approx([entry.probability for entry in known], rel=1e-6)


@needs_node
def test_programs_have_hostile_names(tmp_path: Path) -> None:
    """The module finds inputs by such names, and types have them as text."""
    names = ["__proto__", "constructor", "</script><b>", "a*/b", "\u2028`${x}`", '"\\']
    signature = {
        "inputs": [{"name": name, "shape": [1], "dtype": "float32"} for name in names],
        "outputs": [{"name": name, "shape": [1], "dtype": "float32"} for name in names],
    }
    fetched = {"wasm": web.FetchedFile("net.wasm", "00" * 32, 1)}
    built = model(signature)
    text = web.write_module(built, fetched)
    (tmp_path / "net.mjs").write_text(text.replace("./runtime.js", "./runtime.mjs"))
    script = """
import { openModel } from "./runtime.mjs";
import * as net from "./net.mjs";
const names = %s;
const inputs = names.map((name) => ({ name, dtype: "float32", shape: [1] }));
const run = (values) => Object.fromEntries(names.map((name) => [name, values[name].map((value) => value + 1)]));
const program = { inputs, outputs: inputs, run };
const model = await openModel({ images: [] }, {}, { wasm: async () => ({ open: () => program }) });
const values = Object.fromEntries(names.map((name, place) => [name, Float32Array.of(place)]));
const outputs = await model.run(values);
const errors = [];
for (const wrong of [{}, { ...values, x: 1 }]) await model.run(wrong).catch((error) => errors.push(error.message));
console.log(JSON.stringify([names.map((name) => outputs[name][0]), errors, net.backends]));
"""
    assert node(tmp_path, script % json.dumps(names)) == [
        [1, 2, 3, 4, 5, 6],
        ["input __proto__ must be a Float32Array of 1 elements", "the model has no input x"],
        ["wasm"],
    ]
    example = web.write_readme(built, fetched).partition("model.run(")[2].partition(");")[0]
    shown = node(
        tmp_path, f"const given = {example}; console.log(JSON.stringify(Object.keys(given)));"
    )
    assert shown == names
    types = web.write_types(built, fetched)
    assert [json.loads(line.split(": Float")[0]) for line in types.splitlines() if ": Float" in line] == names * 2  # fmt: skip


RECIPE: Final = """
recipe: 1
name: digits
version: 1.2.0
model: {onnx: %(models)s/digits.onnx}
inputs: {data: {shape: [1, 1, 8, 8], image: {interpolation: bicubic}}}
labels: %(models)s/digits-labels.txt
targets: [browser]
outputs: [web]
tune: {trials: 0}
verify: %(verify)s
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the digits, with WebGPU and WebAssembly, verified where Chromium is installed."""
    folder = tmp_path_factory.mktemp("web")
    shutil.copy(ROOT / "recipes" / "models" / "digits-test.npz", folder / "test.npz")
    verify = "{against: none}"
    if browser.find_chromium():
        verify = "{run_on: chromium, data: test.npz, min_accuracy: 0.95}"
    values = {"models": exports.MODELS, "verify": verify}
    (folder / "digits.yaml").write_text(RECIPE % values)
    command = [sys.executable, "-m", "tvmflow", "run", "digits.yaml", "--store", "store"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist" / "digits" / "browser" / "digits-web"


@pytest.mark.gpu
@pytest.mark.skipif(browser.find_chromium() is None, reason="needs Chromium")
def test_the_package_is_verified_in_chromium(package: Path) -> None:
    """By WebGPU, and as the WebAssembly that other browsers run."""
    measured = json.loads((package.parent / "measurements.json").read_text())
    assert measured["passed"] and measured["accuracy"] >= 0.95
    assert "WebGPU" in measured["ran_on"] and "WebAssembly" in measured["fallback"]["ran_on"]
    assert measured["latency_not_measured"].startswith("a GPU that the CPU stands for")
    fallback = measured["fallback"]["outputs"]
    assert [output["passed"] for output in fallback.values()] == [True]


SCRIPT: Final = """
const { load } = await import("./digits.js");
const model = await load();
const images = %s;
const pixels = images.map((gray) => ({
  width: 8, height: 8, data: Uint8ClampedArray.from(gray.flatMap((level) => [level, level, level, 255])),
}));
const found = [];
for (const image of pixels) found.push((await model.classify(image, 1))[0].label);
const names = [model.name, model.version, model.backend, model.imageInputs, model.labels.length];
model.destroy();
const late = await model.run({ data: new Float32Array(64) }).catch((error) => error.message);
return { names, found, late };
"""


def images_and_classes() -> tuple[list[list[int]], list[str]]:
    """Ten images as levels, and what they show."""
    images, labels = exports.held_out()
    words = (exports.MODELS / "digits-labels.txt").read_text().split()
    levels = np.rint(images[:10].reshape(10, 64) * 255).astype(int)
    return levels.tolist(), [words[label] for label in labels[:10]]


def _run_in_node(package: Path, script: str) -> Any:
    wrapped = f"const run = async () => {{{script}}};\nconsole.log(JSON.stringify(await run()));"
    (package / "main.mjs").write_text(wrapped)
    done = subprocess.run(
        ["node", "main.mjs"], cwd=package, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "run", [pytest.param(_run_in_node, marks=needs_node, id="node"), pytest.param(run_script, id="chromium")]
)  # fmt: skip
def test_images_are_classified(package: Path, run: Callable[[Path, str], Any]) -> None:
    """By the labels of the recipe."""
    images, classes = images_and_classes()
    found = run(package, SCRIPT % json.dumps(images))
    assert found["names"][:2] == ["digits", "1.2.0"] and found["names"][3:] == [["data"], 10]
    assert found["names"][2] == ("wasm" if run is _run_in_node else "webgpu")
    assert np.mean(np.array(found["found"]) == classes) >= 0.9
    assert found["late"] == "the model was destroyed"


@pytest.mark.gpu
def test_the_page_shows_an_image_of_ones_own(package: Path) -> None:
    """A file is chosen; the classes are shown, and nothing is fetched from elsewhere."""
    script = r"""
const frame = document.body.appendChild(document.createElement("iframe"));
frame.src = "index.html";
await new Promise((resolve) => (frame.onload = resolve));
const page = frame.contentDocument;
const until = async (done) => { while (!done()) await new Promise((resolve) => setTimeout(resolve, 20)); };
await until(() => page.body.dataset.ready);
const canvas = Object.assign(document.createElement("canvas"), { width: 20, height: 20 });
const context = canvas.getContext("2d");
context.fillStyle = "white";
context.fillRect(8, 2, 4, 16);
const blob = await new Promise((resolve) => canvas.toBlob(resolve));
const files = new frame.contentWindow.DataTransfer();
files.items.add(new frame.contentWindow.File([blob], "one.png", { type: "image/png" }));
const input = page.querySelector("input[type=file]");
input.files = files.files;
input.dispatchEvent(new frame.contentWindow.Event("change"));
await until(() => !page.getElementById("results").hidden);
return [
  page.querySelector(".classes .name").textContent,
  page.querySelector("td").textContent,
  page.getElementById("status").className,
  page.getElementById("time").textContent.replace(/^[\d.]+ ms /, ""),
  performance.getEntriesByType("resource").concat(frame.contentWindow.performance.getEntriesByType("resource"))
    .filter((entry) => new URL(entry.name).origin !== location.origin).length,
];
"""
    assert run_script(package, script) == [
        "one", "softmax_output", "", "by WebGPU on google swiftshader", 0,
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_npm_packs_the_folder(package: Path) -> None:
    """With all that the plan names, under a name and a version that npm takes."""
    command = ["npm", "pack", "--dry-run", "--json", "--offline"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    (packed,) = json.loads(done.stdout)
    assert (packed["name"], packed["version"]) == ("digits-model", "1.2.0")
    request = ExportRequest("digits", "1.2.0", "web", "llvm", "wasm32-wasi", has_webgpu=True)
    assert {f"digits-web/{file['path']}" for file in packed["files"]} == set(web.files(request))
