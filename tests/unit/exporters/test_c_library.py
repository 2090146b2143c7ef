"""`c-library`: the model as plain C, called from Python and from a C program without TVM."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.support import exports
from tests.support.binaries import read_elf
from tests.support.c_library import CLibrary, buffer_of, link_parallel, write_parallel_sources
from tests.support.exports import Array, Exported
from tests.support.seeds import one_of_many
from tests.unit.exporters.c_programs import EMPTY, PROGRAM
from tvmflow.runtime.c_loader import Buffer, Options
from tvmflow.targets import c_runtime

# The numbers in the header.
NULL_ARGUMENT, WRONG_VERSION, WRONG_OPTION, WRONG_COUNT = range(1, 5)
OVERLAP, BUSY, WRONG_SIZE = 6, 7, 65536
NO_MEMORY, KERNEL_FAILED, MISALIGNED_MEMORY = 8, 11, 17


def folder_of(exported: Exported) -> Path:
    return exported.dist / "digits-c-library"


def load(exported: Exported, threads: int = 2) -> CLibrary:
    library = CLibrary(folder_of(exported) / "libdigits.so", "digits", threads)
    assert library.status == 0
    return library


@pytest.fixture(scope="module")
def parallel(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with loops that are divided among threads, though they are too short for it."""
    return link_parallel(exported, tmp_path_factory.mktemp("parallel"))


def load_parallel(parallel: Path, threads: int) -> CLibrary:
    library = CLibrary(parallel, "digits", threads)
    assert library.status == 0
    return library


def scores_of(library: CLibrary, offset: int = 0) -> Array:
    images = exports.held_out()[0]
    return np.concatenate([library.run({"data": x[None]}, offset=offset)[0] for x in images])


@pytest.mark.parametrize(("threads", "offset"), [(1, 0), (2, 0), (7, 0), (2, 4)])
def test_it_gives_the_scores_of_the_bundle(
    exported: Exported, parallel: Path, threads: int, offset: int
) -> None:
    """To the last bit, with any number of threads and any alignment."""
    library = load_parallel(parallel, threads) if threads > 1 else load(exported)
    scores = scores_of(library, offset)
    np.testing.assert_array_equal(scores, exports.reference(exported))


def test_it_needs_the_c_library_alone(exported: Exported) -> None:
    """And programs see nothing but the functions of its header."""
    path = folder_of(exported) / "libdigits.so"
    library = read_elf(path)
    assert set(library.needed) == {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    header = (folder_of(exported) / "digits.h").read_text()
    declared = set(re.findall(r"DIGITS_API [\w ]+?\*?(digits_\w+)\(", header))
    assert library.exports == declared
    assert path.stat().st_size < 300_000


def test_it_describes_the_model(exported: Exported) -> None:
    """Names, dtypes, shapes, sizes, kernels, and a sentence for every status."""
    library = load(exported)
    (data,) = library.tensors("inputs", 1)
    (scores,) = library.tensors("outputs", 1)
    assert (data.name, data.dtype, data.shape[:4], data.bytes) == (
        b"data",
        b"float32",
        [1, 1, 8, 8],
        256,
    )
    assert (scores.dtype, scores.shape[: scores.rank], scores.bytes) == (b"float32", [1, 10], 40)
    messages = [library.function("message")(status) for status in (*range(-1, 12), 17, 18)]
    assert len(set(messages)) == 13 and messages[0] == messages[-1] == b"unknown error"


def test_short_loops_stay_on_the_callers_thread(exported: Exported, parallel: Path) -> None:
    """No thread is started that no kernel is worth."""
    library, divided = load(exported, threads=8), load_parallel(parallel, threads=8)
    assert library.function("threads")(library.context) == 1
    assert divided.function("threads")(divided.context) == 8


ALLOCATE: Final = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)(lambda _user, _bytes, _alignment: None)
RELEASE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda _user, _memory: 1)
NO_ALLOCATION: Final = ctypes.cast(ALLOCATE, ctypes.c_void_p)
NO_RELEASE: Final = ctypes.cast(RELEASE, ctypes.c_void_p)


BODY: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
PARALLEL_FOR: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, BODY, ctypes.c_void_p
)


def test_every_misuse_has_its_status(exported: Exported) -> None:
    """Nothing crashes, and the context is usable afterwards."""
    library = load(exported)
    data, scores = np.zeros(64, "float32"), np.zeros(10, "float32")
    source, target = buffer_of(data), buffer_of(scores)
    run = library.run_buffers
    assert run([], [target]) == WRONG_COUNT
    assert run([source], [target, target]) == WRONG_COUNT
    huge = ctypes.c_size_t(2**64 - 1)
    assert library.function("run")(library.context, None, huge, None, huge) == WRONG_COUNT
    assert run([Buffer(source.data, 255)], [target]) == WRONG_SIZE
    assert run([source], [Buffer(target.data, 44)]) == WRONG_SIZE + 1
    message = library.function("message")
    texts = [message(WRONG_SIZE + place).decode() for place in range(3)]
    assert texts == [
        "input 'data' has another size than float32 [1, 1, 8, 8], 256 bytes",
        "output 'softmax_output' has another size than float32 [1, 10], 40 bytes",
        "unknown error",
    ]
    assert message(5) == message(-(2**31)) == message(2**31 - 1) == b"unknown error"
    assert run([Buffer(None, 256)], [target]) == NULL_ARGUMENT
    assert run([source], [Buffer(source.data, 40)]) == OVERLAP
    assert library.function("run")(None, None, 0, None, 0) == NULL_ARGUMENT
    one = ctypes.c_size_t(1)
    assert library.function("run")(library.context, None, one, None, one) == NULL_ARGUMENT
    assert library.function("profile")(None, None, None) == NULL_ARGUMENT
    assert library.function("threads")(None) == 0
    assert library.function("kernel_name")(huge) is None
    assert library.function("create")(None, None) == NULL_ARGUMENT
    assert library.function("destroy")(None) == 0
    assert run([source], [target]) == 0 and scores.sum() == pytest.approx(1, rel=1e-4)
    for options, status in (
        (Options(abi=2), WRONG_VERSION),
        (Options(abi=1 << 31), WRONG_VERSION),
        (Options(abi=1, threads=1025), WRONG_OPTION),
        (Options(abi=1, threads=1 << 31), WRONG_OPTION),
        (Options(abi=1, allocate=1), WRONG_OPTION),
        (Options(abi=1, release=1), WRONG_OPTION),
        (Options(abi=1, allocate=NO_ALLOCATION, release=NO_RELEASE), NO_MEMORY),
    ):
        assert library.create(options) == status
        assert library.context.value is None


@pytest.mark.parametrize("offset", [1, 8, 64])
def test_misaligned_memory_has_its_status(exported: Exported, offset: int) -> None:
    """A program's `allocate` may forget the alignment; the memory goes back to it."""
    library = load(exported)
    memory: list[Array] = []
    released: list[int] = []

    def allocate(_user: int, size: int, alignment: int) -> int:
        memory.append(np.empty(size + 2 * alignment, np.uint8))
        address: int = memory[-1].ctypes.data
        return address + -address % alignment + offset

    callbacks = (type(ALLOCATE)(allocate), type(RELEASE)(lambda _, place: released.append(place)))
    allocate_memory, release = (ctypes.cast(callback, ctypes.c_void_p) for callback in callbacks)
    options = Options(abi=1, allocate=allocate_memory, release=release)
    assert library.create(options) == MISALIGNED_MEMORY
    assert library.context.value is None
    assert len(released) == len(memory) == 1
    assert b"allocate" in library.function("message")(MISALIGNED_MEMORY)


def test_each_thread_has_a_context_of_its_own(exported: Exported, parallel: Path) -> None:
    """Eight at once share the weights and disturb nobody."""
    expected = exports.reference(exported)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: scores_of(load_parallel(parallel, 2)), range(8)))
    assert all(np.array_equal(scores, expected) for scores in results)


def test_the_program_brings_its_own_threads(exported: Exported, parallel: Path) -> None:
    """With `parallel_for`, every task of every kernel runs where the program says."""
    tasks: list[int] = []

    def parallel_for(_user: int, count: int, body: object, argument: int) -> None:
        for task in reversed(range(count)):
            tasks.append(task)
            body(argument, task)  # type: ignore[operator]

    library = load_parallel(parallel, 1)
    loop = PARALLEL_FOR(parallel_for)
    pointer = ctypes.cast(loop, ctypes.c_void_p)
    assert library.create(Options(abi=1, threads=3, parallel_for=pointer)) == 0
    np.testing.assert_array_equal(scores_of(library), exports.reference(exported))
    assert set(tasks) == {0, 1, 2}


@pytest.mark.parametrize("tasks", [[0, 1], [0, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3], [2**32 - 1], []])
def test_a_loop_that_does_not_do_each_task_once_is_an_error(
    parallel: Path, tasks: list[int]
) -> None:
    """Whatever a program's `parallel_for` calls, no memory is touched but that of the tasks that there are."""
    is_right = False

    def parallel_for(_user: int, count: int, body: object, argument: int) -> None:
        for task in range(count) if is_right else tasks:
            body(argument, task)  # type: ignore[operator]

    library = load_parallel(parallel, 1)
    loop = PARALLEL_FOR(parallel_for)
    pointer = ctypes.cast(loop, ctypes.c_void_p)
    assert library.create(Options(abi=1, threads=3, parallel_for=pointer)) == 0
    data, scores = np.zeros(64, "float32"), np.zeros(10, "float32")
    assert library.run_buffers([buffer_of(data)], [buffer_of(scores)]) == KERNEL_FAILED
    is_right = True
    assert library.run_buffers([buffer_of(data)], [buffer_of(scores)]) == 0
    assert scores.sum() == pytest.approx(1, rel=1e-4)


def test_a_profile_names_the_kernels(exported: Exported) -> None:
    """The hook is called after each kernel, and no more once it is taken away."""
    library = load(exported)
    calls: list[bytes] = []

    def hook(_user: int, kernel: int, _nanoseconds: int) -> None:
        calls.append(library.function("kernel_name")(ctypes.c_size_t(kernel)))

    pointer = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)(hook)
    assert library.function("profile")(library.context, pointer, None) == 0
    library.run({"data": np.zeros((1, 1, 8, 8), "float32")})
    count = len(calls)
    assert count >= 4 and any(b"softmax" in name for name in calls)
    assert library.function("profile")(library.context, None, None) == 0
    library.run({"data": np.zeros((1, 1, 8, 8), "float32")})
    assert len(calls) == count


def test_a_context_in_use_is_busy(exported: Exported) -> None:
    """A call in the middle of another one is refused, whatever it asks for; the other one goes on."""
    library = load(exported)
    data, scores = np.zeros(64, "float32"), np.zeros(10, "float32")
    statuses: set[int] = set()

    def hook(_user: int, _kernel: int, _nanoseconds: int) -> None:
        statuses.add(library.run_buffers([buffer_of(data)], [buffer_of(np.zeros_like(scores))]))
        statuses.add(library.function("profile")(library.context, None, None))
        statuses.add(library.function("destroy")(library.context))

    pointer = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)(hook)
    assert library.function("profile")(library.context, pointer, None) == 0
    assert library.run_buffers([buffer_of(data)], [buffer_of(scores)]) == 0
    assert statuses == {BUSY} and scores.sum() == pytest.approx(1, rel=1e-4)


def link_empty(folder: Path, program: str = EMPTY) -> Path:
    """Link the library of a program without kernels, beside its header `empty.h`, and return it."""
    tensors = [
        {"name": "none", "dtype": "float32", "shape": [0, 4]},
        {"name": "two", "dtype": "float32", "shape": [2]},
    ]
    (folder / "empty.c").write_text(program)
    triple = exports.target().tvm["mtriple"]
    model = c_runtime.DescribedModel("empty", {"inputs": tensors, "outputs": tensors}, (), triple)
    library, compiled = folder / "libempty.so", {c_runtime.PROGRAM: folder / "empty.c"}
    c_runtime.link(model, compiled, library, header=folder / "empty.h")
    return library


def test_tensors_without_elements_need_no_memory(tmp_path: Path) -> None:
    """They may be NULL, and overlap nothing; others of the same call are as usual."""
    library = CLibrary(link_empty(tmp_path), "empty")
    source, target = np.array([1, 2], "float32"), np.zeros(2, "float32")
    for nothing in (Buffer(None, 0), Buffer(source.ctypes.data + 4, 0)):
        target[:] = 0
        status = library.run_buffers([nothing, buffer_of(source)], [nothing, buffer_of(target)])
        assert status == 0
        np.testing.assert_array_equal(target, source)
    full, two = buffer_of(target), buffer_of(source)
    assert library.run_buffers([full, two], [Buffer(None, 0), full]) == WRONG_SIZE


CONSTANT: Final = """
#include "empty.h"

static const float data[2] = {1, 2};

/* as programs were written before there was a way for constant memory */
static int run_buffers(empty_context *context, float *copy, float *result) {
  const empty_buffer inputs[2] = {{0, 0}, {copy, sizeof data}}, outputs[2] = {{0, 0}, {result, sizeof data}};
  return empty_run(context, inputs, EMPTY_INPUTS, outputs, EMPTY_OUTPUTS);
}

int main(void) {
  float copy[2] = {1, 2}, first[2] = {0, 0}, second[2] = {0, 0};
  const empty_input inputs[2] = {{0, 0}, {data, sizeof data}};
  const empty_buffer outputs[2] = {{0, 0}, {first, sizeof data}};
  empty_context *context;
  if (empty_create(0, &context) != EMPTY_OK) return 1;
  if (empty_run_const(context, inputs, 1, outputs, EMPTY_OUTPUTS) != EMPTY_WRONG_COUNT) return 2;
  if (empty_run_const(context, 0, EMPTY_INPUTS, outputs, EMPTY_OUTPUTS) != EMPTY_NULL_ARGUMENT) return 3;
  if (empty_run_const(context, inputs, EMPTY_INPUTS, outputs, EMPTY_OUTPUTS) != EMPTY_OK) return 4;
  if (run_buffers(context, copy, second) != EMPTY_OK) return 5;
  if (first[0] != data[0] || first[1] != data[1] || second[0] != first[0] || second[1] != first[1]) return 6;
  return empty_destroy(context);
}
"""


# zig compiles its C++ library first
@pytest.mark.parametrize(
    "language",
    [
        ("cc", "c", "-std=c99"),
        pytest.param(("c++", "cpp", "-std=c++17"), marks=pytest.mark.slow),
    ],
)
def test_inputs_may_be_constant(tmp_path: Path, language: tuple[str, str, str]) -> None:
    """Without a cast and a warning, in C and C++; programs for buffers alone still compile."""
    compiler, suffix, standard = language
    library = link_empty(tmp_path)
    (tmp_path / f"main.{suffix}").write_text(CONSTANT)
    flags = ["-Wall", "-Wextra", "-Wcast-qual", "-Wconversion", "-Werror", "-pedantic"]
    command = [sys.executable, "-m", "ziglang", compiler, standard, *flags, f"main.{suffix}"]
    subprocess.run([*command, str(library), "-o", "program"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "program"], check=True, env={"LD_LIBRARY_PATH": str(tmp_path)})


def test_more_memory_than_there_are_addresses_is_not_asked_for(tmp_path: Path) -> None:
    """The scratch memory of many threads may be more than a size counts, and then all but nothing."""
    program = EMPTY.replace("TF_SCRATCH 0u", f"TF_SCRATCH {1 << 61}u")
    library = link_empty(tmp_path, program.replace("TF_MOST_TASKS 1u", "TF_MOST_TASKS 8u"))
    assert CLibrary(library, "empty", threads=7).status == NO_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("system", ["gnu", pytest.param("musl", marks=pytest.mark.nightly)])
def test_a_c_program_names_the_digits(exported: Exported, tmp_path: Path, system: str) -> None:
    """Linked with the static library, also completely static: 360 images, without TVM and without Python."""
    images, labels = exports.held_out()
    (tmp_path / "main.c").write_text(PROGRAM)
    (tmp_path / "images").write_bytes(images.astype("float32").tobytes())
    folder = folder_of(exported)
    arch = "x86_64" if sys.maxsize > 2**32 else "x86"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{folder}"]
    static = ["-static"] if system == "musl" else []
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-{system}", *static]
    program = tmp_path / "program"
    files = ["main.c", str(folder / "libdigits.a"), "-lm", "-lpthread", "-o", str(program)]
    subprocess.run([*command, *flags, *files], cwd=tmp_path, check=True)
    done = subprocess.run(
        [program, tmp_path / "images"], capture_output=True, text=True, check=True, env={}
    )
    named = np.array(list(map(int, done.stdout.split())))
    assert float(np.mean(named == labels)) == exports.accuracy(exports.reference(exported))


THREADS: Final = """
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "library.h"

static void *call_often(void *failures) {
  float data[64], scores[10], first[10];
  digits_context *context;
  const digits_options options = {.abi = DIGITS_ABI, .threads = 3};
  if (digits_create(&options, &context) != DIGITS_OK) return failures;
  for (int i = 0; i < 64; ++i) data[i] = (float)(i % 17);
  const digits_buffer input = {data, sizeof data}, output = {scores, sizeof scores};
  for (int call = 0; call < 1000; ++call) {
    if (digits_run(context, &input, 1, &output, 1) != DIGITS_OK) return failures;
    if (call == 0) memcpy(first, scores, sizeof first);
    if (memcmp(first, scores, sizeof first) != 0) return failures;
    if (call % 100 == 0) usleep(300);
  }
  return digits_destroy(context) == DIGITS_OK ? NULL : failures;
}

int main(void) {
  pthread_t threads[8];
  int failed = 0;
  for (int i = 0; i < 8; ++i) pthread_create(&threads[i], NULL, call_often, &failed);
  for (int i = 0; i < 8; ++i) {
    void *result;
    pthread_join(threads[i], &result);
    failed += result != NULL;
  }
  return failed;
}
"""


# The compiler in `ziglang` has no runtime for the address sanitizer.
SANITIZERS: Final = {
    "thread": (sys.executable, "-m", "ziglang", "cc", "-fno-sanitize-trap=all"),
    "undefined": (sys.executable, "-m", "ziglang", "cc", "-fno-sanitize-trap=all"),
    "address": ("cc", "-fno-omit-frame-pointer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", [one_of_many(name, name != "thread") for name in SANITIZERS])
def test_sanitizers_are_silent(exported: Exported, tmp_path: Path, sanitizer: str) -> None:
    """Eight threads with a context of three threads each, and 8,000 calls that give the same bits."""
    compiler = SANITIZERS[sanitizer]
    if shutil.which(compiler[0]) is None:
        pytest.skip("needs a C compiler of the system")
    objects = list(map(str, write_parallel_sources(exported, tmp_path)))
    (tmp_path / "main.c").write_text(THREADS)
    flags = ["-std=gnu11", "-O1", "-g", f"-fsanitize={sanitizer}"]
    command = [*compiler, *flags, "main.c", c_runtime.SOURCE, *objects]
    libraries = ["-lm", "-lpthread", "-o", "program"]
    subprocess.run([*command, *libraries], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
