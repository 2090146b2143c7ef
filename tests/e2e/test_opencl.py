"""Libraries whose kernels OpenCL's driver runs: any, such as PoCL, which runs them on the CPU."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, version_converter

from tests.support.binaries import read_elf
from tests.support.detectors import constants
from tests.support.devices import TARGET, Array, DeviceLibrary, run_program
from tests.support.onnx_models import (
    draw,
    load,
    load_benchmark_networks,
    model,
    open_session,
    value,
)
from tests.support.project import Project
from tests.support.recipes import ROOT
from tvmflow.exporters.cpp import Library
from tvmflow.exporters.cpp import write_header as cpp_header
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import BACKENDS

MODELS: Final = os.environ.get("TVMFLOW_TEST_MODELS", "")
_PROBLEM = BACKENDS["opencl"].unrunnable_reason(TARGET, in_this_process=False)
pytestmark = pytest.mark.skipif(bool(_PROBLEM), reason=f"needs a driver for OpenCL: {_PROBLEM}")

# A program that makes contexts in two threads, again and again, each with a profile.
MAIN = r"""
#include "library.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static float first[64];
static void add(void *user, size_t kernel, uint64_t nanoseconds) { *(uint64_t *)user += nanoseconds + kernel * 0; }

static void *work(void *argument) {
  float image[64], scores[10];
  for (int i = 0; i < 64; ++i) image[i] = (float)i / 64;
  const net_buffer input = {image, sizeof image}, output = {scores, sizeof scores};
  for (int round = 0; round < 3; ++round) {
    net_context *contexts[2];
    uint64_t total = 0;
    for (int i = 0; i < 2; ++i) {
      const int status = net_create(NULL, &contexts[i]);
      if (status) return fprintf(stderr, "create: %s: %s\n", net_message(status), net_device_error()), argument;
    }
    net_profile(contexts[1], add, &total);
    for (int i = 0; i < 20; ++i) {
      const int status = net_run(contexts[i % 2], &input, 1, &output, 1);
      if (status) return fprintf(stderr, "run: %s: %s\n", net_message(status), net_device_error()), argument;
      if (memcmp(scores, first, sizeof scores)) return fprintf(stderr, "other scores\n"), argument;
    }
    if (!total) return fprintf(stderr, "no times\n"), argument;
    for (int i = 0; i < 2; ++i) net_destroy(contexts[i]);
  }
  return NULL;
}

int main(int count, char **arguments) {
  net_context *context;
  const net_device device = {.number = count > 1 ? (uint32_t)atoi(arguments[1]) : 0};
  const int status = net_create_on(NULL, &device, &context);
  if (status) return printf("%d %s: %s\n", status, net_message(status), net_device_error()), 1;
  float image[64];
  for (int i = 0; i < 64; ++i) image[i] = (float)i / 64;
  const net_buffer input = {image, sizeof image}, output = {first, 10 * sizeof(float)};
  if (net_run(context, &input, 1, &output, 1)) return 2;
  const pid_t child = fork();
  if (child == 0) _exit(net_run(context, &input, 1, &output, 1) == NET_DEVICE_LOST ? net_destroy(context) : 1);
  int left = 1;
  if (waitpid(child, &left, 0) != child || left) return 4;
  net_destroy(context);
  pthread_t threads[2];
  void *failed = NULL;
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, work, arguments);
  for (int i = 0; i < 2; ++i) {
    void *result;
    pthread_join(threads[i], &result);
    if (result) failed = result;
  }
  return failed ? 3 : 0;
}
"""
USE_WHEEL = """
import sys, numpy, tiny_model
scores = tiny_model.run({"data": numpy.ones((1, 3, 8, 8), "float32")})["scores"]
print(scores.shape, "tvm" in sys.modules)
"""
# Each model of a process in a thread of its own, again and again.
USE_TWO = """
import threading
from pathlib import Path
import numpy as np
from tvmflow.runtime.c_loader import NativeProgram

def call(path, signature):
    program = NativeProgram(Path(path), "net", 2, signature)
    data = np.ones(signature["inputs"][0]["shape"], "float32")
    results.append([program.main(data)[0] for _ in range(50)])

results = []
threads = [threading.Thread(target=call, args=model) for model in MODELS]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert [len(result) for result in results] == [50, 50]
for result in results: np.testing.assert_array_equal(result, [result[0]] * 50)
assert not np.array_equal(results[0][0], results[1][0])
"""
CPP_MAIN = """
#include "net.hpp"
#include <cstdio>

int main() {
  try {
    net::Model model;
  } catch (const net::Error& error) {
    std::puts(error.what());
  }
}
"""
# What drivers keep until their process ends.
SUPPRESSED = (
    "leak:libpocl\nleak:libOpenCL\nleak:libLLVM\nleak:clang\nleak:lt_\nleak:libhwloc\nleak:dlopen\n"
)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DeviceLibrary:
    """The trained net of the digits."""
    folder = tmp_path_factory.mktemp("digits")
    return DeviceLibrary.build(load(onnx.load(ROOT / "recipes/models/digits.onnx"), folder), folder)


def check(built: DeviceLibrary, made: onnx.ModelProto, feed: dict[str, Array]) -> None:
    """Check the outputs against ONNX Runtime."""
    outputs, _ = built.run(feed)
    for actual, expected in zip(outputs, open_session(made).run(None, feed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_digits_need_nothing_but_a_driver(digits: DeviceLibrary) -> None:
    """No TVM, and no library of OpenCL when they are linked; each kernel has its time."""
    feed = {"data": draw(1, 1, 8, 8)}
    check(digits, onnx.load(ROOT / "recipes/models/digits.onnx"), feed)
    _, kernels = digits.run(feed)
    assert len(kernels) == 5 and all(seconds > 0 for seconds in kernels.values())
    assert digits.library.stat().st_size < 300_000
    needed = {name.split(".")[0] for name in read_elf(digits.library).needed}
    assert needed <= {"libc", "libm", "libpthread", "libdl"}


@pytest.mark.gpu
def test_what_a_driver_refuses_is_a_code_with_its_words(
    digits: DeviceLibrary, tmp_path: Path
) -> None:
    """No driver, no such device, code that is no OpenCL C, and more memory than there is."""
    program = digits.compile_program(tmp_path / "as-it-is", MAIN, {})
    (tmp_path / "empty").mkdir()
    absent = run_program(program, OCL_ICD_VENDORS=f"{tmp_path}/empty/")
    assert absent.stdout.startswith("20 the driver of the device is not installed"), absent.stdout
    (tmp_path / "net.h").write_text(c_runtime.write_header(digits.described))
    (tmp_path / "net.hpp").write_text(cpp_header(digits.described, [Library(digits.described)]))
    (tmp_path / "main.cpp").write_text(CPP_MAIN)
    command = ["c++", "-std=c++17", "main.cpp", str(digits.library), "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = {"OCL_ICD_VENDORS": f"{tmp_path}/empty/"}
    environment["LD_LIBRARY_PATH"] = str(digits.library.parent)
    thrown = run_program(tmp_path / "main", **environment)
    assert re.search(r"the driver of the device is not installed.*: OpenCL has no", thrown.stdout)
    other = run_program(program, "99")
    assert re.match(r"21 there is no such device.*: OpenCL has \d+ devices", other.stdout)

    size = re.findall(r"#define TF_DEVICE_CODE_BYTES (\d+)u", digits.program)[0]
    edit = {f"CODE_BYTES {size}u": f"CODE_BYTES {int(size) // 2}u"}
    refused = run_program(digits.compile_program(tmp_path / "half", MAIN, edit))
    assert refused.stdout.startswith("22 the driver of the device does not build or start")
    assert "clBuildProgram failed with error -11: " in refused.stdout

    arena = re.findall(r"#define TF_DEVICE_ARENA UINT64_C\((\d+)\)", digits.program)[0]
    edit = {f"ARENA UINT64_C({arena})": f"ARENA UINT64_C({1 << 50})"}
    large = run_program(digits.compile_program(tmp_path / "large", MAIN, edit))
    assert large.stdout.startswith("8 there is not enough memory: OpenCL: the device has no memory")


# Makes a context with a folder for what the driver builds, and says how many seconds that took.
CREATE = """
import ctypes, sys, time
class Device(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint32), *((name, ctypes.c_void_p) for name in ("context", "device", "queue")),
                ("cache", ctypes.c_char_p)]
library, handle = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
folder = sys.argv[2].encode() if len(sys.argv) > 2 else None
started = time.monotonic()
assert library.net_create_on(None, ctypes.byref(Device(cache=folder)), ctypes.byref(handle)) == 0
print(time.monotonic() - started)
library.net_destroy(handle)
"""


@pytest.mark.gpu
def test_what_the_driver_built_is_kept_and_checked(digits: DeviceLibrary, tmp_path: Path) -> None:
    """In a folder that the program or the environment names; a damaged file, or one of others, is replaced."""
    kept, number = tmp_path / "kept", itertools.count()
    kept.mkdir()

    def create(*arguments: str, **environment: str) -> float:
        # the driver's own cache is empty
        environment["POCL_CACHE_DIR"] = str(tmp_path / f"pocl{next(number)}")
        command = [sys.executable, "-c", CREATE, str(digits.library), *arguments]
        env = {**os.environ, **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return float(done.stdout)

    def check_replaced(content: bytes) -> None:
        file.write_bytes(content)
        before = file.stat().st_ino
        create(str(kept))
        assert list(kept.iterdir()) == [file]
        assert file.stat().st_ino != before and file.read_bytes()[:8] == good[:8]

    built_s = create(str(kept))
    (file,) = kept.iterdir()
    good, inode = file.read_bytes(), file.stat().st_ino
    assert create(NET_DEVICE_CACHE=str(kept)) < built_s / 2
    assert (file.read_bytes(), file.stat().st_ino) == (good, inode)
    check_replaced(good[:-1] + bytes([good[-1] ^ 1]))
    check_replaced(b"")
    # the size of the identity, which then would be longer than any
    check_replaced(good[:8] + b"\xff" * 8 + good[16:])
    file.chmod(0o666)
    create(str(kept))
    assert file.stat().st_ino != inode and file.stat().st_mode & 0o777 == 0o600
    create(str(tmp_path / "nowhere"))


def run_sanitized(
    digits: DeviceLibrary,
    folder: Path,
    main: str,
    arguments: Sequence[str],
    *flags: str,
    keeps_binaries: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program with the sanitizers of memory and of undefined behavior."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler of the system")
    flags += ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = digits.compile_program(folder / "sanitized", main, {}, *flags)
    (folder / "suppressed").write_text(SUPPRESSED)
    options = f"suppressions={folder}/suppressed:print_suppressions=0"
    environment = {"NET_DEVICE_CACHE": str(folder)} if keeps_binaries else {}
    return run_program(program, *arguments, LSAN_OPTIONS=options, **environment)


@pytest.mark.gpu
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("99",), 1)])
def test_sanitizers_are_silent(
    digits: DeviceLibrary, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    """Two threads with two contexts each, made three times, and a child that cannot use its parent's; nothing is leaked."""
    done = run_sanitized(digits, tmp_path, MAIN, arguments)
    assert (done.returncode, done.stderr) == (code, "")
    assert (done.stdout == "") == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "keeps_binaries"),
    [
        pytest.param(("-5", "0"), False, id="one call has no resources", marks=pytest.mark.slow),
        pytest.param(
            ("-36", "1"), True, id="the device is lost from then on", marks=pytest.mark.gpu
        ),
    ],
)
def test_each_call_of_a_driver_may_fail(
    digits: DeviceLibrary, tmp_path: Path, arguments: tuple[str, str], *, keeps_binaries: bool
) -> None:
    """An error is a code with a text; nothing of hundreds of contexts is left, and another one works afterwards."""
    faults = (ROOT / "tests/support/gpu/opencl_faults.c").read_text()
    flag = "-Wl,--wrap=dlsym"
    done = run_sanitized(digits, tmp_path, faults, arguments, flag, keeps_binaries=keeps_binaries)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    failed, passed = map(int, re.findall(r"\d+", done.stdout))
    assert failed > passed > 0


@pytest.mark.gpu
def test_two_models_share_a_process(digits: DeviceLibrary, tmp_path: Path) -> None:
    """In a thread each, on one device."""
    node = helper.make_node("MatMul", ["data", "w"], ["y"])
    made = model([node], [value("data", [1, 64])], [value("y", [1, 10])], {"w": draw(64, 10)})
    other = DeviceLibrary.build(load(made, tmp_path), tmp_path)
    models = [(str(built.library), built.described.signature) for built in (digits, other)]
    done = run_program(Path(sys.executable), "-c", USE_TWO.replace("MODELS", repr(models)))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
def test_a_detector_selects_its_boxes_on_the_cpu(tmp_path: Path) -> None:
    """Convolutions are launched, sorts and suppression called, with a copy where a tensor changes sides."""
    weights = {"w": draw(8, 3, 3, 3), "b": draw(4, 8, 1, 1), "s": draw(2, 8, 1, 1) / 16}
    weights |= constants(limit=[20], overlap=[0.4], threshold=[0.1])
    weights |= {"rows": np.array([1, 4, 256]), "classes": np.array([1, 2, 256])}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["f"]),
        helper.make_node("Conv", ["f", "b"], ["b4"]),
        helper.make_node("Conv", ["f", "s"], ["s4"]),
        helper.make_node("Reshape", ["b4", "rows"], ["br"]),
        helper.make_node("Reshape", ["s4", "classes"], ["sr"]),
        helper.make_node("Transpose", ["br"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("Sigmoid", ["sr"], ["scores"]),
        helper.make_node(
            "NonMaxSuppression", ["boxes", "scores", "limit", "overlap", "threshold"], ["chosen"]
        ),
    ]
    outputs = [value("chosen", [None, 3], "int64"), value("scores", [1, 2, 256])]
    made = model(nodes, [value("x", [1, 3, 16, 16])], outputs, weights)
    built = DeviceLibrary.build(load(made, tmp_path), tmp_path)
    feed = {"x": draw(1, 3, 16, 16, seed=1)}
    (chosen, scores), kernels = built.run(feed)
    expected = open_session(made).run(None, feed)
    assert 0 < len(chosen) <= 40
    np.testing.assert_array_equal(chosen, expected[0])
    np.testing.assert_allclose(scores, expected[1], rtol=1e-5)
    assert "non_max_suppression" in kernels
    assert built.program.count("TF_CALL(") == 1
    # the image goes to the device, boxes and scores come back
    assert built.program.count("tf_copy_in(") == 1
    assert built.program.count("tf_copy_out(") == 2


@pytest.mark.gpu
def test_branches_choose_what_is_launched(tmp_path: Path) -> None:
    """A condition comes back from the device, and each side launches its own kernels."""

    def side(name: str, factor: float) -> onnx.GraphProto:
        weight = helper.make_tensor("f", onnx.TensorProto.FLOAT, [1], [factor])
        node = helper.make_node("Mul", ["x", "f"], [name])
        return helper.make_graph([node], name, [], [value(name, [4, 8])], [weight])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["chosen"], then_branch=side("a", 2), else_branch=side("b", -3)
        ),
        helper.make_node("Add", ["chosen", "x"], ["y"]),
    ]
    weights = {"zero": np.array(0, np.float32)}
    made = model(nodes, [value("x", [4, 8])], [value("y", [4, 8])], weights)
    built = DeviceLibrary.build(load(made, tmp_path), tmp_path)
    for sign in (1, -1):
        check(built, made, {"x": sign * np.abs(draw(4, 8))})


@pytest.mark.gpu
def test_a_recipe_for_opencl_is_built_verified_and_delivered(project: Project) -> None:
    """All forms of a C library; the wheel needs numpy alone, and a second run does nothing."""
    project.write_recipe(targets=["opencl"])
    project.edit_recipe("outputs: [", "outputs: [c-library, c-library-weights, cpp, wheel, ")
    text = (project.folder / "tiny.yaml").read_text()
    (project.folder / "tiny.yaml").write_text(re.sub(r"shared-library,? ?", "", text))
    ran = project.run()
    assert ran.code == 0, ran.out
    assert ran.stages["verify/opencl"]["facts"]["outputs"]["scores"]["passed"]
    assert project.run().ran == []
    dist = project.folder / "dist/tiny/opencl"
    header = (dist / "tiny-c-library/tiny.h").read_text()
    assert "tiny_create_on" in header and "the driver of the device; nothing else" in header
    (wheel,) = dist.glob("*.whl")
    shutil.unpack_archive(wheel, project.folder / "unpacked", "zip")
    done = subprocess.run(
        [sys.executable, "-c", USE_WHEEL],
        env={**project.environment, "PYTHONPATH": str(project.folder / "unpacked")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(1, 5) False\n"


@pytest.mark.gpu
def test_kernels_are_tuned_on_the_device(project: Project, tmp_path: Path) -> None:
    """The ledger resumes a search, the whole libraries are compared, and a lock file gives the same bytes elsewhere."""
    project.write_recipe(targets=["opencl"], trials=2)
    project.edit_recipe("{trials: 2", "{trials: 2, only: [conv2d], cost_model: random")
    project.edit_recipe("shared-library", "c-library")
    assert project.run("--until", "tune").stages["tune/opencl"]["facts"]["measured"] == 2
    project.edit_recipe("trials: 2", "trials: 3")
    ran = project.run()
    assert ran.code == 0, ran.out
    tuned, picked, verdict = (
        ran.stages[f"{stage}/opencl"]["facts"] for stage in ("tune", "pick_best", "verify")
    )
    assert (tuned["measured"], tuned["reused"], tuned["failed"]) == (1, 2, 0)
    assert len(project.trials()) == 3
    # the rule's tiles are too large for 64 pixels; which library is faster depends on what else runs here
    assert picked["kernels"][0]["name"] == "fused_conv2d_add_relu" and not picked["errors"]
    assert not picked["library"] or picked["library"]["pairs"] > 0
    assert verdict["outputs"]["scores"]["passed"]
    assert project.run().ran == []
    assert "setting  by_driver" in project.tvmflow("explain", "tiny.yaml", "tune/opencl").out

    locked = project.tvmflow("lock", "tiny.yaml")
    assert locked.code == 0, locked.err
    folder = tmp_path / "other"
    folder.mkdir()
    other = Project(folder)
    for file in project.folder.glob("tiny*"):
        shutil.copy(file, folder)
    again = other.run("--locked")
    assert "tune/opencl" not in again.ran and "build/opencl" in again.ran
    library = "dist/tiny/opencl/tiny-c-library/libtiny.so"
    assert (folder / library).read_bytes() == (project.folder / library).read_bytes()


# A program with a context, a queue and memory of its own.
OWN_DEVICE = r"""
#include "library.h"
#include <stdio.h>
#include <string.h>

typedef void *object;
int clGetPlatformIDs(unsigned, object *, unsigned *);
int clGetDeviceIDs(object, unsigned long, unsigned, object *, unsigned *);
object clCreateContext(const void *, unsigned, const object *, void *, void *, int *);
object clCreateCommandQueue(object, object, unsigned long, int *);
object clCreateBuffer(object, unsigned long, size_t, void *, int *);
int clEnqueueWriteBuffer(object, object, unsigned, size_t, size_t, const void *, unsigned, const void *, object *);
int clEnqueueReadBuffer(object, object, unsigned, size_t, size_t, void *, unsigned, const void *, object *);

#define CHECK(call) \
  if ((call) != net_OK) return printf("%s: %s\n", #call, net_device_error()), 1

int main(void) {
  object platform, device;
  if (clGetPlatformIDs(1, &platform, NULL) || clGetDeviceIDs(platform, 0xFFFFFFFF, 1, &device, NULL)) return 2;
  object own = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
  object queue = clCreateCommandQueue(own, device, 0, NULL);
  float image[64], scores[2][10] = {{0}};
  object memory[] = {clCreateBuffer(own, 1, sizeof image, NULL, NULL), clCreateBuffer(own, 1, sizeof scores[0], NULL, NULL)};
  for (int i = 0; i < 64; ++i) image[i] = (float)i / 64;
  net_context *context;
  const net_device choice = {.context = own, .device = device, .queue = queue};
  CHECK(net_create_on(NULL, &choice, &context));
  const net_buffer input = {image, sizeof image}, output = {scores[0], sizeof scores[0]}, none = {NULL, 0};
  CHECK(net_run(context, &input, 1, &output, 1));
  if (net_enqueue(context) != NET_NULL_ARGUMENT) return 3;
  CHECK(net_use_device_memory(context, 0, memory[0]));
  CHECK(net_use_device_memory(context, NET_INPUTS, memory[1]));
  if (net_use_device_memory(context, 2, memory[0]) != NET_WRONG_COUNT) return 4;
  clEnqueueWriteBuffer(queue, memory[0], 1, 0, sizeof image, image, 0, NULL, NULL);
  CHECK(net_enqueue(context));
  CHECK(net_wait(context));
  clEnqueueReadBuffer(queue, memory[1], 1, 0, sizeof scores[1], scores[1], 0, NULL, NULL);
  if (memcmp(scores[0], scores[1], sizeof scores[0])) return 5;
  /* the output on the device, the input on the host */
  for (int i = 0; i < 64; ++i) image[i] = 1 - image[i];
  CHECK(net_use_device_memory(context, 0, NULL));
  CHECK(net_run(context, &input, 1, &none, 1));
  clEnqueueReadBuffer(queue, memory[1], 1, 0, sizeof scores[1], scores[1], 0, NULL, NULL);
  if (!memcmp(scores[0], scores[1], sizeof scores[0])) return 6;
  CHECK(net_use_device_memory(context, NET_INPUTS, NULL));
  CHECK(net_run(context, &input, 1, &output, 1));
  if (memcmp(scores[0], scores[1], sizeof scores[0])) return 7;
  CHECK(net_destroy(context));
  return 0;
}
""".replace("net_OK", "NET_OK")


@pytest.mark.gpu
def test_a_program_has_its_own_queue_and_memory(digits: DeviceLibrary, tmp_path: Path) -> None:
    """Inputs and outputs stay on the device, and a call returns before its end."""
    program = digits.compile_program(tmp_path / "own", OWN_DEVICE, {}, "-l:libOpenCL.so.1")
    done = run_program(program)
    assert (done.returncode, done.stdout) == (0, "")


# ---------------------------------------------------------------- networks


def add_suppression(made: onnx.ModelProto) -> onnx.ModelProto:
    """Return UltraFace with a selection of its boxes: the scores of faces are the second ones."""
    made = version_converter.convert_version(made, 11)
    weights = constants(limit=[50], overlap=[0.3], threshold=[0.05])
    made.graph.initializer.extend(
        numpy_helper.from_array(array, name)
        for name, array in {**weights, "face": np.array([1])}.items()
    )
    made.graph.node.extend(
        [
            helper.make_node("Gather", ["scores", "face"], ["faces"], axis=2),
            helper.make_node("Transpose", ["faces"], ["by_class"], perm=[0, 2, 1]),
            helper.make_node(
                "NonMaxSuppression",
                ["boxes", "by_class", "limit", "overlap", "threshold"],
                ["chosen"],
            ),
        ]
    )
    made.graph.output.append(value("chosen", [None, 3], "int64"))
    return made


NETS: dict[str, Callable[[Any], onnx.ModelProto]] = {
    "bert": lambda nets: nets.encoder(layers=2, tokens=64, width=128, heads=2),
    "lstm": lambda nets: nets.lstm(size=40, hidden=64, steps=30),
    "mobilenet": lambda nets: nets.mobilenet(),
    "u_net": lambda nets: make_u_net(nets),
    "ultraface": lambda nets: add_suppression(
        onnx.load(f"{MODELS}/ultraface/version-RFB-320.onnx")
    ),
}


def make_u_net(nets: Any) -> onnx.ModelProto:
    """Return a small U-Net of two levels for images of 64×64."""
    net = nets._Net()
    net.channels["x"] = 3

    def grow(y: str, channels: int, skip: str) -> str:
        weight = net.weight(net.channels[y], channels, 2, 2)
        z = net.op("Concat", net.op("ConvTranspose", y, weight, strides=[2, 2]), skip, axis=1)
        net.channels[z] = channels + net.channels[skip]
        return str(net.relu(net.conv(z, channels, 3, 1, 1)))

    full = net.relu(net.conv("x", 16, 3, 1, 1))
    half = net.relu(net.conv(full, 32, 3, 2, 1))
    quarter = net.relu(net.conv(half, 64, 3, 2, 1))
    y = grow(grow(quarter, 32, half), 16, full)
    made: onnx.ModelProto = net.model({"x": (1, 3, 64, 64)}, net.conv(y, 2, 1))
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETS)
def test_networks_agree_with_onnx_runtime(name: str, tmp_path: Path) -> None:
    """Convolutions, attention, recurrent layers, transposed convolutions, and a detector with its boxes."""
    if name == "ultraface" and not MODELS:
        pytest.skip("TVMFLOW_TEST_MODELS names no folder of models")
    made = NETS[name](load_benchmark_networks())
    session = open_session(made)
    feed = {entry.name: draw(*entry.shape, seed=1) for entry in session.get_inputs()}
    built = DeviceLibrary.build(load(made, tmp_path), tmp_path)
    outputs, kernels = built.run(feed)
    for actual, expected in zip(outputs, session.run(None, feed), strict=True):
        assert actual.shape == expected.shape
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1.0, largest))
    assert ("non_max_suppression" in kernels) == (name == "ultraface")
