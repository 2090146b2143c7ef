"""The emulation program: its C code, compiled for this machine and run without an emulator."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np
import pytest

from tests.support import dynamic_programs, exports
from tests.support.c_library import divide_loops
from tests.support.exports import Array, Exported
from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.targets import emulation, form_names
from tvmflow.targets.c_runtime import PROGRAM, DescribedModel
from tvmflow.targets.emulation import read_tensors, write_tensors
from tvmflow.targets.host import read_host
from tvmflow.targets.linking import link_c_library
from tvmflow.targets.linking.zig import Interface

# Calls `main` of a library with the other arguments: an executable would need a C library to link.
CALL: Final = """\
import ctypes, sys
words = [word.encode() for word in sys.argv[1:]]
sys.exit(ctypes.CDLL(sys.argv[1]).main(len(words), (ctypes.c_char_p * len(words))(*words)))
"""
PREFIX: Final = "tvmflow-emulation-program: "
# A feature that no CPU of these tests has.
MISSING: Final = {"x86_64": "xop", "aarch64": "sme2"}


def signature_of(exported: Exported) -> dict[str, Json]:
    return cast(
        "dict[str, Json]", json.loads((exported.folder / "import/signature.json").read_text())
    )


def link(
    exported: Exported, folder: Path, features: Sequence[str] = (), code: str | None = None
) -> Path:
    """The program of the digits for this machine; `code` is other C code than the model's."""
    compiled = {
        path.name: path for path in (exported.folder / "build" / form_names.C_LIBRARY).iterdir()
    }
    if code is not None:
        compiled[PROGRAM] = folder / "other.c"
        compiled[PROGRAM].write_text(code)
    model = DescribedModel(
        "digits", signature_of(exported), features, exports.target().tvm["mtriple"]
    )
    main = emulation.compile_main(model, compiled, folder)
    objects = [main, *(path for name, path in compiled.items() if name.endswith(".o"))]
    program = folder / "program.so"
    link_c_library(objects, program, model.triple, Interface(program.name, ["main"]))
    return program


def parallel_code(exported: Exported) -> str:
    """The C code of the digits, which are too small for threads, with kernels divided into tasks."""
    return divide_loops((exported.folder / "build" / form_names.C_LIBRARY / PROGRAM).read_text())


@pytest.fixture(scope="module")
def program(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the digits, with threads."""
    folder = tmp_path_factory.mktemp("program")
    return link(exported, folder, code=parallel_code(exported))


def call(program: Path, *arguments: Path | str) -> tuple[int, str]:
    """Return the exit code and what it says."""
    words = [sys.executable, "-c", CALL, program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


def images(count: int) -> list[list[Array]]:
    return [[image[None].astype("float32")] for image in exports.held_out()[0][:count]]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_gives_the_outputs_of_the_library(
    exported: Exported, program: Path, tmp_path: Path, threads: int
) -> None:
    """Of each batch, to the last bit, with any number of threads."""
    write_tensors(tmp_path / "in", images(20))
    assert call(program, tmp_path / "in", tmp_path / "out", str(threads)) == (0, "")
    scores = np.concatenate([output for (output,) in read_tensors(tmp_path / "out")])
    np.testing.assert_array_equal(scores, exports.reference(exported)[:20])


def test_no_batches_are_no_outputs(program: Path, tmp_path: Path) -> None:
    write_tensors(tmp_path / "in", [])
    assert call(program, tmp_path / "in", tmp_path / "out") == (0, "")
    assert read_tensors(tmp_path / "out") == []


def test_a_file_that_does_not_fit_is_an_error(program: Path, tmp_path: Path) -> None:
    """The message says what is wrong."""
    image = images(1)[0][0]
    path, out = tmp_path / "in", tmp_path / "out"
    cases: list[tuple[list[Array], str]] = [
        ([image.astype("float64")], "input 'data' is float64, not float32"),
        ([image[0]], "input 'data' has 3 dimensions, not 4"),
        ([image[..., :7]], "dimension 3 of input 'data' is 7, not 8"),
        ([image, image], f"{path} has 2 tensors in a batch, and the model has 1 inputs"),
        ([image.astype("M8[ns]")], f"input 'data' is {np.dtype('M8[ns]')}, not float32"),
    ]
    for batch, message in cases:
        write_tensors(path, [batch])
        assert call(program, path, out) == (1, PREFIX + message)
    write_tensors(path, images(2))
    content = path.read_bytes()
    for size in (0, 7, 12, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert call(program, path, out) == (1, f"{PREFIX}{path} ends too early")
    path.write_bytes(b"another" + content)
    assert call(program, path, out) == (1, f"{PREFIX}{path} is not a file of tensors")


def test_arguments_that_do_not_fit_are_errors(program: Path, tmp_path: Path) -> None:
    """Files that cannot be opened, and numbers that are none."""
    path, missing = tmp_path / "in", tmp_path / "missing"
    write_tensors(path, images(1))
    cannot = "cannot be opened: No such file or directory"
    assert call(program, missing, tmp_path / "out") == (1, f"{PREFIX}{missing} {cannot}")
    assert call(program, path, missing / "out") == (1, f"{PREFIX}{missing / 'out'} {cannot}")
    for threads in ("0", "-1", "many", "5000"):
        message = f"{PREFIX}{threads} is not a number of threads"
        assert call(program, path, tmp_path / "out", threads) == (1, message)
    assert call(program) == (2, f"usage: {program} INPUTS OUTPUTS [THREADS]")


def test_a_full_disk_is_an_error(program: Path, tmp_path: Path) -> None:
    """And no success with half a file."""
    write_tensors(tmp_path / "in", images(1))
    code, text = call(program, tmp_path / "in", "/dev/full")
    assert (code, text) == (1, f"{PREFIX}/dev/full cannot be written: No space left on device")


def test_outputs_that_depend_on_the_threads_are_an_error(
    exported: Exported, tmp_path: Path
) -> None:
    """Of a model whose last step writes the number of threads into an output."""
    head, end, tail = parallel_code(exported).rpartition("  return 0;\n")
    wrong = f"{head}  out[0][0] = (unsigned char)tf->threads;\n{end}{tail}"
    program = link(exported, tmp_path, code=wrong)
    write_tensors(tmp_path / "in", images(1))
    for threads, other in (("1", "2"), ("3", "1")):
        code_text = call(program, tmp_path / "in", tmp_path / "out", threads)
        (name,) = [tensor["name"] for tensor in signature_of(exported)["outputs"]]
        message = f"output '{name}' differs with the number of threads: {threads} or {other}"
        assert code_text == (1, PREFIX + message)


@pytest.mark.skipif(platform.machine() not in MISSING, reason="no feature is known to be missing")
def test_a_cpu_without_a_feature_is_an_error(exported: Exported, tmp_path: Path) -> None:
    """Before a kernel runs, with the name of the feature."""
    feature = MISSING[platform.machine()]
    if feature in read_host().flags:
        pytest.skip(f"this CPU has {feature}")
    program = link(exported, tmp_path, [feature])
    write_tensors(tmp_path / "in", images(1))
    assert call(program, tmp_path / "in", tmp_path / "out") == (
        1,
        f"{PREFIX}this CPU lacks an instruction set that the library was built for: {feature}",
    )


def test_a_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    """Of the C library: the message holds its error."""
    with pytest.raises(
        StageError, match=r"the C library for nowhere-linux-musl cannot be compiled: "
    ):
        emulation.build_libc("nowhere-linux-musl", tmp_path, tmp_path)


def test_inputs_choose_the_sizes_that_a_model_leaves_open(tmp_path: Path) -> None:
    """Each batch its own; the first one is also computed with another number of threads."""
    built = dynamic_programs.build(dynamic_programs.draw_network(3), tmp_path)
    objects = {path.name: path for path in (tmp_path / "objects").iterdir()}
    main = emulation.compile_main(built.described, objects, tmp_path)
    linked = [main, *(path for name, path in objects.items() if name.endswith(".o"))]
    program = tmp_path / "program.so"
    link_c_library(linked, program, built.described.triple, Interface(program.name, ["main"]))
    sizes = [{"batch": 2, "seq": 38}, {"batch": 6, "seq": 96}, {"batch": 1, "seq": 2}]
    batches = [built.model.draw(each) for each in sizes]
    write_tensors(tmp_path / "in", batches)
    assert call(program, tmp_path / "in", tmp_path / "out", "3") == (0, "")
    for batch, outputs in zip(batches, read_tensors(tmp_path / "out"), strict=True):
        for actual, expected in zip(outputs, built.run_machine(batch), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    write_tensors(tmp_path / "in", [built.model.draw({"batch": 2, "seq": 3})])
    code, message = call(program, tmp_path / "in", tmp_path / "out")
    assert (code, message) == (
        1,
        f"{PREFIX}a dimension has a size that it cannot have: batch is 1 to 6; seq is 2 to 96, multiples of 2",
    )
