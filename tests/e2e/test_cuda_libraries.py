"""C libraries for NVIDIA GPUs, on a machine with a GPU (the strict stand-in): they need its driver and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import gpu
from tests.support.gpu import ptxas
from tests.support.project import Project
from tests.support.recipes import ROOT

pytestmark = pytest.mark.skipif(
    ptxas.ASSEMBLER is None, reason="needs the package nvidia-cuda-nvcc-cu12"
)

# A process without TVM: two contexts, and two calls of each.
PROGRAM = """
import sys
import numpy as np
import tvmflow
images = np.load(sys.argv[2])["data"][:2, None]
models = [tvmflow.load(sys.argv[1]) for _ in range(2)]
rows = [[*model.run({"data": image}).values()] for model in models for image in images]
assert "tvm" not in sys.modules
assert np.array_equal(rows[:2], rows[2:]) and not np.array_equal(rows[0], rows[1])
del models
"""

# A program with a context, a stream and memory of its own on the GPU.
OWN_MEMORY = """
import ctypes, sys
import numpy as np
library, driver = ctypes.CDLL(sys.argv[1]), ctypes.CDLL("libcuda.so.1")
class Device(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint32), *((name, ctypes.c_void_p) for name in ("context", "device", "queue"))]
def check(code):
    assert code == 0, (code, ctypes.c_char_p(library.digits_device_error()).value)
image = np.load(sys.argv[2])["data"][:1].copy()
scores = np.zeros((1, 10), np.float32)
context, stream, handle = (ctypes.c_void_p() for _ in range(3))
memory = [ctypes.c_uint64() for _ in range(2)]
check(driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or driver.cuCtxPushCurrent_v2(context))
check(driver.cuStreamCreate(ctypes.byref(stream), 1))
for place, array in zip(memory, (image, scores)):
    check(driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(array.nbytes)))
check(driver.cuMemcpyHtoDAsync_v2(memory[0], image.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(image.nbytes), stream))
check(library.digits_create_on(None, ctypes.byref(Device(0, context, None, stream)), ctypes.byref(handle)))
for tensor, place in enumerate(memory):
    check(library.digits_use_device_memory(handle, ctypes.c_size_t(tensor), ctypes.c_void_p(place.value)))
check(library.digits_enqueue(handle) or library.digits_wait(handle))
check(driver.cuMemcpyDtoHAsync_v2(scores.ctypes.data_as(ctypes.c_void_p), memory[1], ctypes.c_size_t(scores.nbytes), stream))
check(driver.cuStreamSynchronize(stream) or library.digits_destroy(handle))
for place in memory:
    check(driver.cuMemFree_v2(place))
check(driver.cuStreamDestroy_v2(stream) or driver.cuCtxPopCurrent_v2(ctypes.byref(context)) or driver.cuDevicePrimaryCtxRelease(0))
assert abs(scores.sum() - 1) < 1e-5 and scores.argmax() == np.load(sys.argv[2])["label"][0]
"""


# As with PyTorch, which a program has asked for a GPU.
FORKED = """
import ctypes, os, sys
import tvmflow
ctypes.CDLL("libcuda.so.1").cuInit(0)
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
tvmflow.load(sys.argv[1])
"""


def write_digits(project: Project, target: str) -> None:
    text = (ROOT / "recipes/digits.yaml").read_text()
    for old, new in (
        ("  - host", f"  - {target}"),
        ("trials: 64", "trials: 0"),
        ("models/", f"{ROOT}/recipes/models/"),
    ):
        assert old in text
        text = text.replace(old, new)
    (project.folder / "tiny.yaml").write_text(text)


def call(library: Path, environment: Mapping[str, str], program: str = PROGRAM) -> str:
    """Return what a process wrote that loads a bundle or a library and calls it."""
    images = ROOT / "recipes/models/digits-test.npz"
    command = [sys.executable, "-c", program, str(library), str(images)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stderr.strip()


@pytest.mark.slow
def test_digits_are_read_with_the_driver_alone(project: Project, tmp_path: Path) -> None:
    """By a GPU of 2016, whose PTX LLVM writes; what is wrong with a GPU is said, and nothing is left on it."""
    gpu.make_driver(tmp_path)
    project.environment.update(gpu.environment(tmp_path, 61))
    write_digits(project, "cuda-sm61")
    ran = project.run()
    assert ran.code == 0, ran.out
    assert ran.stages["build/cuda-sm61"]["facts"]["runtime"] == "c"
    verdict = ran.stages["verify/cuda-sm61"]["facts"]
    assert verdict["samples"] == 360
    assert verdict["accuracy"] == verdict["reference_accuracy"] > 0.95

    bundle = project.folder / "dist/digits/cuda-sm61/digits.tvmflow"
    environment = {**project.environment, "STAND_IN_REPORT": "1"}
    nothing = "left 0 blocks, 0 modules, 0 streams, 0 events, 0 contexts, 0 entered"
    # PTX is for later GPUs, too
    assert call(bundle, {**environment, "STAND_IN_GPU": "86"}) == f"stand-in GPU: {nothing}"
    library = bundle.with_name("digits-c-library") / "libdigits.so"
    assert call(library, environment, OWN_MEMORY) == f"stand-in GPU: {nothing}"
    assert "was started before this process was forked" in call(bundle, environment, FORKED)
    for change, message in (
        ({"STAND_IN_MEMORY": "0"}, "the GPU has no memory of "),
        ({"STAND_IN_LAUNCHES": "3"}, "NVIDIA's driver cannot start a kernel"),
        ({"STAND_IN_GPU": "53"}, "the kernels are not for this GPU, which is sm_53"),
    ):
        assert message in call(bundle, {**environment, **change})


@pytest.mark.slow
def test_kernels_are_tuned_by_the_driver_alone(project: Project, tmp_path: Path) -> None:
    """For a GPU that TVM's runtime does not know; a launch that fails is a failed trial with the driver's words."""
    gpu.make_driver(tmp_path)
    project.environment.update(gpu.environment(tmp_path, 61))
    project.write_recipe(targets=["cuda-sm61"], trials=2)
    project.edit_recipe("{trials: 2", "{trials: 2, only: [conv2d], cost_model: random")
    project.edit_recipe("shared-library", "c-library")
    ran = project.run()
    assert ran.code == 0, ran.out
    tuned, picked, verdict = (
        ran.stages[f"{stage}/cuda-sm61"]["facts"] for stage in ("tune", "pick_best", "verify")
    )
    assert (tuned["measured"], tuned["failed"]) == (2, 0)
    assert picked["kernels"][0]["name"] == "fused_conv2d_add_relu" and not picked["errors"]
    assert verdict["outputs"]["scores"]["passed"]

    project.environment["STAND_IN_LAUNCHES"] = "1"
    project.edit_recipe("trials: 2", "trials: 3")
    failed = project.run("--until", "tune").stages["tune/cuda-sm61"]["facts"]
    assert (failed["reused"], failed["failed"]) == (2, 1)
    (kernel,) = failed["workloads"]
    assert kernel["first_failure"].startswith("run: ")
    assert "NVIDIA's driver cannot start a kernel" in kernel["first_failure"]
