"""`cpp`: the project compiles without TVM, its program agrees with Python, and its errors have messages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import exports
from tests.support.c_library import link_parallel
from tests.support.exports import Exported
from tests.unit.exporters.cpp_projects import PROGRAMS, project_of, run
from tvmflow.core.errors import StageError
from tvmflow.exporters import bundle, cpp
from tvmflow.exporters.cpp import Library
from tvmflow.exporters.exporter import ExportRequest, PartitionedModel
from tvmflow.targets.c_runtime import DescribedModel


@pytest.fixture(scope="module")
def program(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command line tool, compiled."""
    return exports.program_of(project_of(exported), tmp_path_factory.mktemp("cpp") / "run")


def test_it_finds_the_digits_that_python_finds(
    program: Path, exported: Exported, tmp_path: Path
) -> None:
    """The 360 held-out images from one npz: every score is the same, and so is the accuracy that it prints."""
    images, labels = exports.held_out()
    np.savez(tmp_path / "in.npz", data=images, label=labels)
    words = ("--threads", 2, "--labels", "label", tmp_path / "in.npz", tmp_path / "out.npz")
    done = run(program, *words)
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(tmp_path / "out.npz") as archive:
        assert archive.files == ["softmax_output"]
        scores = archive["softmax_output"]
    np.testing.assert_array_equal(scores, exports.reference(exported))
    accuracy = exports.accuracy(scores)
    assert accuracy >= 0.95
    assert done.stdout == f"accuracy: {accuracy:.4f} ({round(accuracy * 360)} of 360)\n"


def test_it_reads_raw_values(program: Path, exported: Exported, tmp_path: Path) -> None:
    """Two images from a file without a header, and the time of each kernel."""
    images = exports.held_out()[0][:2]
    (tmp_path / "two.bin").write_bytes(images.tobytes())
    done = run(program, "--profile", f"data={tmp_path / 'two.bin'}", tmp_path / "out.npz")
    assert done.returncode == 0
    assert " us  softmax\n" in done.stdout
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["softmax_output"], exports.reference(exported)[:2])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"other": np.zeros(3, "float32")}, "no array for the input data: float32 [1, 1, 8, 8]"),
        (
            {"data": np.zeros((1, 1, 8, 9), "float32")},
            "does not fit the array data: float32 [1, 1, 8, 9]",
        ),
        ({"data": np.zeros((1, 1, 8, 8), "float64")}, "does not fit the array data: float64"),
        ({"data": np.zeros((0, 1, 8, 8), "float32")}, "does not fit the array"),
        ({"data": np.zeros((1, 1, 8, 8), "complex64")}, "arrays of type <c8 are not supported"),
        ({"data": np.asfortranarray(np.zeros((8, 8), "float32"))}, "is in Fortran order"),
    ],
)
def test_inputs_that_do_not_fit_are_named(
    program: Path, tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    """The message has the model's input and the array."""
    np.savez(tmp_path / "in.npz", **arrays)
    done = run(program, tmp_path / "in.npz", tmp_path / "out.npz")
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / "out.npz").exists()


def test_invalid_arguments_are_named(program: Path, tmp_path: Path) -> None:
    """Files that are compressed, truncated, missing, of a wrong length; labels and threads that cannot be."""
    images = exports.held_out()[0][:1]
    np.savez(tmp_path / "in.npz", data=images, texts=np.zeros(1, "uint16"), two=np.zeros(3, "int8"))
    np.savez_compressed(tmp_path / "packed.npz", data=images)
    np.savez(tmp_path / "torn.npz", data=images)
    content = (tmp_path / "torn.npz").read_bytes()
    (tmp_path / "torn.npz").write_bytes(content[: len(content) // 2])
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(bytes(flipped))
    (tmp_path / "odd.bin").write_bytes(b"123")
    good, out = tmp_path / "in.npz", tmp_path / "out.npz"
    for words, sentence in (
        ([tmp_path / "packed.npz"], "it is compressed: write it with numpy.savez"),
        ([tmp_path / "torn.npz"], "it is not a zip"),
        ([tmp_path / "flipped.npz"], "data.npy is damaged"),
        ([tmp_path / "gone.npz"], "there is no file"),
        ([f"data={tmp_path}/odd.bin"], "has 3 bytes; data: float32 [1, 1, 8, 8] takes 256"),
        ([f"date={tmp_path}/odd.bin"], "there is no input 'date'"),
        (["--threads", "many", good], "--threads takes a number, not 'many'"),
        (["--threads", "99999", good], "digits: an option has a value that it cannot have"),
        (["--labels", "label", good], "there is no array 'label' with labels"),
        (["--labels", "texts", good], "'texts' is uint16: labels and scores are"),
        (["--labels", "two", good], "there are 3 labels for 10 scores"),
    ):
        done = run(program, *words, out)
        assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr
    assert not out.exists()
    usage = run(program)
    assert (usage.returncode, usage.stderr.startswith("usage: ")) == (2, True)


def test_a_program_uses_every_part_of_the_interface(exported: Exported, tmp_path: Path) -> None:
    """Calls by place, by name and in the model's own memory; options; every misuse is an error with a status."""
    project = tmp_path / "digits-cpp"
    shutil.copytree(project_of(exported), project)
    # the loops of the digits are too short for threads, so that `parallel_for` would not be called
    divided = link_parallel(exported, tmp_path).with_suffix(".a")
    shutil.copyfile(divided, project / "lib" / divided.name)
    program = exports.compile_cpp(PROGRAMS / "digits.cpp", tmp_path / "run", project)
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "-2 digits: input 'data' is float32 [1, 1, 8, 8], not float64",
        "-2 digits: input 'data' is float32 [1, 1, 8, 8], not uint32",
        "-2 digits: output 'softmax_output' is float32 [1, 10], not int64",
        "65536 digits: input 'data' is float32 [1, 1, 8, 8]: 64 values, not 63",
        "65536 digits: output 'softmax_output' is float32 [1, 10]: 10 values, not 11",
        "4 digits: takes 1 input, not 2",
        "4 digits: takes 1 output, not 0",
        "4 digits: there is no output 1 (there are 1, counted from 0)",
        "-1 digits: there is no input 'date' (there is 'data')",
        "6 digits: an output shares memory with an input or another output",
        "3 digits: an option has a value that it cannot have: more threads than the library allows, "
        "or allocate without release",
        "8 digits: there is not enough memory",
        "7 digits: the model is in use by another thread: make one for each thread",
        "1 digits: this model was moved to another variable",
    ]


@pytest.mark.slow
def test_two_models_are_in_one_program(exported: Exported, tmp_path: Path) -> None:
    """Each has a namespace and scores of its own, on threads of its own; a keyword is a model's name too."""
    other = exports.make(tmp_path / "class", "class", "cpp", "bundle", bias=3.0)
    images = exports.held_out()[0][:8]
    (tmp_path / "images").write_bytes(images.tobytes())
    projects = (project_of(exported), other.dist / "class-cpp")
    program = exports.compile_cpp(PROGRAMS / "two_models.cpp", tmp_path / "run", *projects)
    done = run(program, tmp_path / "images")
    assert (done.returncode, done.stderr) == (0, "")
    scores = np.array(list(map(float, done.stdout.split())), "float32").reshape(2, 8, 10)
    np.testing.assert_array_equal(scores[0], exports.reference(exported)[:8])
    np.testing.assert_array_equal(scores[1], exports.reference(other)[:8])
    assert not np.array_equal(scores[0], scores[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "triple", ["aarch64-linux-gnu", "arm-linux-gnueabihf", "x86_64-windows-gnu", "aarch64-macos"]
)
def test_other_systems_compile_it(exported: Exported, tmp_path: Path, triple: str) -> None:
    """The same sources: only the libraries differ."""
    project = project_of(exported)
    command = [sys.executable, "-m", "ziglang", "c++", "-target", triple, "-std=c++17", "-O0"]
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", f"-I{project / 'include'}", "-c"]
    output = ["-o", str(tmp_path / "main.o")]
    subprocess.run([*command, *flags, str(project / "main.cpp"), *output], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs GNU's compiler")
def test_the_compiler_of_the_system_has_no_complaint(exported: Exported, tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers; warnings of compiler and linker are errors."""
    project, program = project_of(exported), tmp_path / "run"
    flags = (
        "-std=c++17 -g -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -Wl,--fatal-warnings"
    )
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    files = [PROGRAMS / "digits.cpp", project / "lib" / "libdigits.a", "-lpthread", "-o", program]
    command = ["g++", *flags.split(), *sanitizers, f"-I{project / 'include'}", *map(str, files)]
    subprocess.run(command, check=True)
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"
)
def test_cmake_builds_installs_and_finds_it(exported: Exported, tmp_path: Path) -> None:
    """The tool with both libraries; programs that add the folder, find it, or find what was installed."""
    np.savez(tmp_path / "in.npz", data=exports.held_out()[0], label=exports.held_out()[1])
    words = ("--labels", "label", tmp_path / "in.npz", tmp_path / "out.npz")
    project = project_of(exported)
    for shared in ("OFF", "ON"):
        build, prefix = tmp_path / f"build-{shared}", tmp_path / f"prefix-{shared}"
        cmake("-S", project, "-B", build, f"-DDIGITS_SHARED={shared}")
        cmake("--build", build)
        cmake("--install", build, "--prefix", prefix)
        for tool in (build / "digits_run", prefix / "bin" / "digits_run"):
            assert run(tool, *words).stdout.startswith("accuracy: 0.9")
    user = tmp_path / "user"
    user.mkdir()
    shutil.copyfile(PROGRAMS / "digits.cpp", user / "program.cpp")
    shutil.copy(PROGRAMS / "checks.hpp", user)
    for index, (lines, options) in enumerate(
        (
            (f"add_subdirectory({project} digits)", []),
            ("find_package(digits 1.2 REQUIRED)", [f"-DCMAKE_PREFIX_PATH={project}"]),
            (
                "find_package(digits 1.1 REQUIRED)",
                [f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix-ON'}", "-DDIGITS_SHARED=ON"],
            ),
        )
    ):
        (user / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.16)\nproject(user LANGUAGES CXX)\n"
            f"{lines}\nadd_executable(program program.cpp)\n"
            "target_link_libraries(program PRIVATE digits::digits)\n"
        )
        build = tmp_path / f"user-{index}"
        cmake("-S", user, "-B", build, *options)
        cmake("--build", build)
        assert run(build / "program").returncode == 0
    (user / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user)\nfind_package(digits 1.3 REQUIRED)\n"
    )
    newer = ["cmake", "-S", str(user), "-B", str(tmp_path / "newer")]
    newer.append(f"-DCMAKE_PREFIX_PATH={project}")
    refused = subprocess.run(newer, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "version: 1.2.0" in refused.stderr


def cmake(*words: object) -> None:
    subprocess.run(["cmake", *map(str, words)], check=True, capture_output=True)


def tensor(name: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": list(shape)}


def test_parts_hand_each_other_their_tensors() -> None:
    """An output that a later part reads, one that is an input, one that is there twice, and one between parts."""
    x, y, z, w = tensor("x", 2), tensor("y", 3), tensor("z", 4), tensor("w", 5)
    parts = [
        Library(DescribedModel("net-a", {"inputs": [x], "outputs": [z, y]}, (), ""), "a"),
        Library(DescribedModel("net-b", {"inputs": [y, z, x], "outputs": [w]}, (), ""), "b"),
    ]
    model = DescribedModel("net", {"inputs": [x], "outputs": [w, y, x, w]}, (), "")
    tensors = cpp._place_tensors(model.signature, parts)
    # 0: x; 1 to 4: the outputs; 5: z
    assert tensors.table == [x, w, y, x, w, z]
    assert tensors.arguments == [[0], [2, 5, 0]]
    assert tensors.results == [[5, 2], [1]]
    assert tensors.copies == [(3, 0), (4, 1)]


def test_a_part_for_the_virtual_machine_is_refused(exported: Exported, tmp_path: Path) -> None:
    """The message names the part, and what to do."""
    built = exports.built_of(exported, exports.recipe(), exports.target())
    manifest = {**built.manifest, "runtime": "vm"}
    part, joined = tmp_path / "part.tvmflow", tmp_path / "joined.tvmflow"
    bundle.write(built._replace(manifest=manifest), part)
    bundle.write_partitioned(manifest, built.signature, {"first": part}, joined)
    triple = built.request.triple
    parts = (ExportRequest("first", "1", "split.first", "llvm", triple),)
    request = ExportRequest("digits", "1", "split", "llvm", triple, parts=parts)
    model = PartitionedModel(request, built.signature, manifest, joined, {})
    with pytest.raises(StageError, match="the part 'first' needs TVM's runtime") as caught:
        cpp.export(model, tmp_path)
    assert "leave `cpp` out of `outputs`" in caught.value.fix


@pytest.mark.parametrize("file", ["main.cpp", "model.hpp"])
def test_a_project_that_does_not_compile_is_not_delivered(
    file: str, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning is enough; the message is the compiler's."""
    project = tmp_path / "project"
    shutil.copytree(cpp.FOLDER, project)
    with (project / file).open("a") as stream:
        stream.write(
            "\nint twice;\nint twice;\n" if file == "model.hpp" else "\nstatic int twice;\n"
        )
    monkeypatch.setattr(cpp, "FOLDER", project)
    built = exports.built_of(exported, exports.recipe(), exports.target())
    with pytest.raises(
        StageError,
        match=rf"(?s)the C\+\+ project does not compile: .*{file.replace('model', 'digits')}:.*twice",
    ):
        cpp.export(built, tmp_path)


def test_some_systems_have_no_project() -> None:
    """Microcontrollers, and parts on Windows, whose DLLs have no import libraries."""
    windows = ExportRequest("net", "1", "pc", "llvm", "x86_64-pc-windows-msvc")
    assert cpp.unsupported_reason(windows) == ""
    assert "net-cpp/lib/net_static.lib" in cpp.files(windows)
    chip = windows._replace(triple="thumbv7em-none-eabihf")
    assert cpp.unsupported_reason(chip).startswith(
        "no C++ project is made for a target without a system"
    )
    joined = windows._replace(parts=(windows._replace(name="first"),))
    assert "no libraries that programs for Windows are linked with" in cpp.unsupported_reason(
        joined
    )
