"""From a recipe with images and labels to programs that name what is in a file."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support.exports import MODELS, compile_cpp
from tests.support.project import Project
from tests.support.recipes import ROOT
from tvmflow.runtime import loading

REAL_MODELS: Final = os.environ.get("TVMFLOW_TEST_MODELS", "")
SCORES_OVER: Final = 0.9


def python(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_digits_as_png_are_named_by_every_program(project: Project) -> None:
    """By run-model, the wheel and the C++ tool in the same lines; an image that changes is verified again."""
    shutil.copytree(MODELS, project.folder / "models")
    shutil.copy(ROOT / "recipes/digits-images.yaml", project.folder / "r.yaml")
    done = project.tvmflow("run", "r.yaml", "--json")
    assert done.code == 0, done.out + done.err
    dist = project.folder / "dist/digits-images/host"
    readme = (dist / "README.md").read_text()
    assert readme.count('classes = model.classify("image.png")') == 2 and "np." not in readme
    facts = done.stages["verify/host"]["facts"]
    assert facts["accuracy"] == 0.9 and facts["samples"] == 20
    assert facts["images"]["data"]["max_level_error"] == 0

    image = project.folder / "models/digits-images/nine/0.png"
    shown = project.tvmflow("run-model", str(dist / "digits-images.tvmflow"), str(image))
    lines = shown.out.splitlines()[2:]
    assert lines[0] == "probabilities: the output 'softmax_output'"
    assert lines[2].endswith("%  nine")
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        archive.extractall(project.folder / "site")
    wheel = python(project.folder / "site", "-m", "digits_images_model", str(image))
    assert wheel.splitlines() == lines
    cpp = dist / "digits-images-cpp"
    tool = compile_cpp(cpp / "image.cpp", project.folder / "tool", cpp)
    printed = subprocess.run([tool, image], capture_output=True, text=True, check=True, env={})
    assert printed.stdout.splitlines() == [lines[0], *lines[2:]]

    image.write_bytes((image.parent / "1.png").read_bytes())
    again = project.tvmflow("run", "r.yaml", "--json")
    assert again.code == 3 and "accuracy 0.8500" in again.out + again.err
    assert [stage for stage, report in again.stages.items() if report["outcome"] != "hit"] == [
        "verify/host"
    ]
    (image.parent / "1.png").write_bytes(b"no image")
    again = project.tvmflow("run", "r.yaml")
    assert again.code == 2 and "1.png cannot be read as an image" in again.out + again.err


# ---------------------------------------------------------------- UltraFace


def _photograph() -> Path | None:
    """NASA's photograph of the astronaut Eileen Collins, public domain, that comes with scikit-image."""
    spec = importlib.util.find_spec("skimage")
    path = Path(spec.origin).parent / "data/astronaut.png" if spec and spec.origin else None
    return path if path and path.is_file() else None


def _best_box(outputs: dict[str, Any]) -> tuple[float, Any]:
    """The score of the likeliest face, and its box: left, top, right, bottom as parts of width and height."""
    scores, boxes = outputs["scores"][0, :, 1], outputs["boxes"][0]
    return float(scores.max()), boxes[scores.argmax()]


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODELS, reason="TVMFLOW_TEST_MODELS names no folder of models")
@pytest.mark.skipif(
    _photograph() is None, reason="scikit-image, with its photograph, is not installed"
)
def test_ultraface_finds_the_face_in_a_photograph(project: Project) -> None:
    """From a PNG of 512×512 pixels to the box of the one face in it, in Python and in C++."""
    photograph = _photograph()
    assert photograph is not None
    (model,) = Path(REAL_MODELS, "ultraface").glob("version-RFB-320.onnx")
    shutil.copy(model, project.folder / "face.onnx")
    (project.folder / "photographs").mkdir()
    shutil.copy(photograph, project.folder / "photographs")
    (project.folder / "r.yaml").write_text(
        "recipe: 1\nname: face\nmodel: {onnx: face.onnx}\n"
        "inputs:\n  input:\n    shape: [1, 3, 240, 320]\n"
        "    image: {resize: [240, 320], scale: 1, mean: 127, std: 128}\n"
        "pipeline: compile\noutputs: [bundle, cpp]\nverify: {data: photographs, repeat: 1}\n"
    )
    done = project.tvmflow("run", "r.yaml")
    assert done.code == 0, done.out + done.err
    dist = project.folder / "dist/face/host"
    module = loading.load(dist / "face.tvmflow")
    outputs = module.run(module.preprocess(photograph))
    score, (left, top, right, bottom) = _best_box(outputs)
    # the face is around column 225 and row 110 of 512
    assert score > SCORES_OVER
    assert left < 225 / 512 < right and top < 110 / 512 < bottom
    assert 0.1 < right - left < 0.3 and 0.1 < bottom - top < 0.4

    cpp = dist / "face-cpp"
    tool = compile_cpp(cpp / "image.cpp", project.folder / "tool", cpp)
    subprocess.run([tool, photograph, project.folder / "out.npz"], check=True, env={})
    with np.load(project.folder / "out.npz") as arrays:
        for name, expected in outputs.items():
            np.testing.assert_array_equal(arrays[name], expected)
