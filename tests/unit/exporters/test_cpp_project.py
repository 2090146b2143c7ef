"""`cpp`: the project compiles, its program agrees with Python, and its errors have messages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import exports
from tests.support.exports import Exported, package_folder
from tvmflow.exporters import bundle, cpp
from tvmflow.exporters._base import PartitionedModel


@pytest.fixture(scope="module")
def program(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled."""
    return exports.program_of(exported.dist / "digits-cpp", tmp_path_factory.mktemp("cpp") / "run")


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)


def model_of(exported: Exported) -> Path:
    return exported.dist / "digits-cpp" / "model"


@pytest.mark.slow
def test_it_finds_the_digits_that_python_finds(
    program: Path, exported: Exported, tmp_path: Path
) -> None:
    """The 360 held-out images from one npz: every score is the same, and so is the accuracy."""
    images, labels = exports.held_out()
    np.savez(tmp_path / "in.npz", data=images, label=labels)
    done = run(program, model_of(exported), tmp_path / "in.npz", tmp_path / "out.npz")
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(tmp_path / "out.npz") as archive:
        assert archive.files == ["softmax_output"]
        scores = archive["softmax_output"]
    np.testing.assert_array_equal(scores, exports.reference(exported))
    assert exports.accuracy(scores) >= 0.95


def test_it_reads_raw_values(program: Path, exported: Exported, tmp_path: Path) -> None:
    """Two images from a file without a header."""
    images = exports.held_out()[0][:2]
    (tmp_path / "two.bin").write_bytes(images.tobytes())
    words = (f"data={tmp_path / 'two.bin'}", tmp_path / "out.npz")
    assert run(program, model_of(exported), *words).returncode == 0
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["softmax_output"], exports.reference(exported)[:2])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"other": np.zeros(3, "float32")}, "no array for the input data: float32[1, 1, 8, 8]"),
        (
            {"data": np.zeros((1, 1, 8, 9), "float32")},
            "does not fit the array data: float32[1, 1, 8, 9]",
        ),
        ({"data": np.zeros((1, 1, 8, 8), "float64")}, "does not fit the array data: float64"),
        ({"data": np.zeros((0, 1, 8, 8), "float32")}, "does not fit the array"),
        ({"data": np.zeros((1, 1, 8, 8), "complex64")}, "arrays of type <c8 are not supported"),
        ({"data": np.asfortranarray(np.zeros((8, 8), "float32"))}, "is in Fortran order"),
    ],
)
def test_inputs_that_do_not_fit_are_named(
    program: Path, exported: Exported, tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    """The message has the model's input and the array."""
    np.savez(tmp_path / "in.npz", **arrays)
    done = run(program, model_of(exported), tmp_path / "in.npz", tmp_path / "out.npz")
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / "out.npz").exists()


def test_invalid_input_files_are_named(program: Path, exported: Exported, tmp_path: Path) -> None:
    """Compressed, truncated, missing, of a wrong length."""
    images = exports.held_out()[0][:1]
    np.savez_compressed(tmp_path / "packed.npz", data=images)
    np.savez(tmp_path / "torn.npz", data=images)
    content = (tmp_path / "torn.npz").read_bytes()
    (tmp_path / "torn.npz").write_bytes(content[: len(content) // 2])
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(bytes(flipped))
    (tmp_path / "odd.bin").write_bytes(b"123")
    for word, sentence in {
        "packed.npz": "it is compressed: write it with numpy.savez",
        "torn.npz": "it is not a zip",
        "flipped.npz": "data.npy is damaged",
        "gone.npz": "there is no file",
        f"data={tmp_path}/odd.bin": "has 3 bytes; data: float32[1, 1, 8, 8] takes 256",
        f"date={tmp_path}/odd.bin": "there is no input 'date'",
    }.items():
        name = word if "=" in word else str(tmp_path / word)
        done = run(program, model_of(exported), name, tmp_path / "out.npz")
        assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "vax"}, "was built for vax, this program is for"),
        (
            {"target": {"features": ["quantum"]}},
            "uses CPU instructions that this machine lacks: quantum",
        ),
        ({"bundle": 3}, "has a format that this header does not read"),
        ({"bundle": 2}, "is not complete"),
        ({"tvm_ffi": "9.9.1"}, "was built with tvm_ffi 9.9, the runtime here has"),
        ({"library": "gone.so"}, "there is no file"),
        ({"library": "model.json"}, "cannot be loaded"),
        ({"inputs": None}, "is not complete"),
    ],
)
def test_an_unrunnable_library_is_rejected_before_it_is_loaded(
    program: Path, exported: Exported, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Another CPU, runtime or format is an error, not a crash."""
    shutil.copytree(model_of(exported), tmp_path / "model")
    described = json.loads((tmp_path / "model" / "model.json").read_text())
    (tmp_path / "model" / "model.json").write_text(json.dumps({**described, **changes}))
    done = run(program, tmp_path / "model", "in.npz", "out.npz")
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_parts_are_in_folders_of_their_own(exported: Exported, tmp_path: Path) -> None:
    """A part's folder is the `model` folder of a project of that part alone; the rest is the same for all models."""
    built = exports.built_of(exported, exports.recipe(), exports.target())
    manifest = {"tvm": built.manifest["tvm"]}
    parts, partitioned_bundle = (
        {"first": built.bundle, "second": built.bundle},
        tmp_path / "module.tvmflow",
    )
    bundle.write_partitioned(manifest, built.signature, parts, partitioned_bundle)
    request = built.request._replace(
        parts=tuple(built.request._replace(name=name) for name in parts)
    )
    cpp.export(
        PartitionedModel(request, built.signature, manifest, partitioned_bundle, {}), tmp_path
    )
    model, alone = tmp_path / "digits-cpp" / "model", model_of(exported)
    described = json.loads((model / "model.json").read_text())
    assert described.pop("parts") == [{"name": n, "folder": f"parts/{n}"} for n in parts]
    assert described == {"bundle": 2, **manifest, **built.signature}
    for name in parts:
        for file in exports.files_below(alone):
            assert (model / "parts" / name / file).read_bytes() == (alone / file).read_bytes()
    for file in ("main.cpp", "include/tvmflow/model.hpp", "CMakeLists.txt"):
        content = (model.parent / file).read_bytes()
        assert content == (exported.dist / "digits-cpp" / file).read_bytes()
    assert "(`parts/first`, `parts/second`)" in (model.parent / "README.md").read_text()


def test_a_folder_without_a_model_is_named(program: Path, tmp_path: Path) -> None:
    """An empty folder, and a file that is no JSON; without arguments, the usage."""
    assert "there is no file" in run(program, tmp_path, "in.npz", "out.npz").stderr
    (tmp_path / "model.json").write_text("{")
    assert "cannot be read" in run(program, tmp_path, "in.npz", "out.npz").stderr
    assert run(program).returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"
)
def test_cmake_builds_it_as_the_readme_says(exported: Exported, tmp_path: Path) -> None:
    """With the runtime of the Python that comes first on the path, and with one that is named."""
    project = tmp_path / "project"
    shutil.copytree(exported.dist / "digits-cpp", project)
    environment = exports.compiler(tmp_path / "bin")
    named = f"-DTVM_RUNTIME_DIR={package_folder('tvm').parent}"
    for options, build in (([], "build"), ([named], "named")):
        subprocess.run(["cmake", "-B", build, *options], cwd=project, env=environment, check=True)
        subprocess.run(["cmake", "--build", build], cwd=project, env=environment, check=True)
        np.savez(project / "in.npz", data=exports.held_out()[0])
        words = (project / "model", project / "in.npz", project / f"{build}.npz")
        done = run(project / build / "digits_run", *words)
        assert done.returncode == 0, done.stderr
        with np.load(project / f"{build}.npz") as archive:
            assert exports.accuracy(archive["softmax_output"]) >= 0.95
    without = subprocess.run(
        ["cmake", "-B", "without", f"-DTVM_RUNTIME_DIR={tmp_path}"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert without.returncode != 0
    assert "TVM_FFI_INCLUDE_DIR was not found below" in without.stderr
