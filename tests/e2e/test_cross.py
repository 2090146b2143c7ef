"""Libraries for other CPUs, built on this machine, run under qemu, and compared with the reference: `make test-cross`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.conftest import ROOT
from tests.support import caches, onnx_models
from tests.support.project import Project
from tvmflow.core.types import Json
from tvmflow.runtime import bundles, loading
from tvmflow.stages.verify import libraries
from tvmflow.stages.verify_settings import MachineSettings
from tvmflow.targets.emulation import (
    EMULATED_ARCHS,
    QEMU_VARIABLE,
    EmulatedArch,
    emulator_for,
    find_emulated_arch,
    find_qemu,
)
from tvmflow.targets.host import read_host
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.tvm_target import cpu_triple, split_threads

pytestmark = pytest.mark.cross

DIGITS: Final = f"""\
recipe: 1
name: digits
model:
  onnx: {ROOT}/recipes/models/digits.onnx
inputs:
  data: {{shape: [1, 1, 8, 8], dtype: float32}}
targets:
  - {{name: board, threads: 2, tvm: TARGET}}
verify:
  run_on: qemu
  data: {ROOT}/recipes/models/digits-test.npz
  min_accuracy: 0.95
  AGAINST
pipeline: compile
"""


def preset(name: str) -> dict[str, Json]:
    """Return the target of a preset, without its number of threads."""
    return split_threads(PRESETS[name].tvm or {})[0]


RISCV: Final = {**preset("riscv64-v"), "mattr": ["+m", "+a", "+f", "+d", "+c"]}
BOARDS: Final[dict[str, dict[str, Json]]] = {
    **{
        name: preset(name)
        for name, listed in PRESETS.items()
        if listed.tvm and listed.tvm["kind"] == "llvm"
        if find_emulated_arch(cpu_triple(listed.tvm)) and name != "x86-64-v4"
    },
    "riscv64": RISCV,
    "cortex-a9": {**preset("armv7-neon"), "mcpu": "cortex-a9", "mattr": ["+neon"]},
}
"""What qemu runs: every preset but that with AVX-512, and CPUs without the vectors of presets."""


def needs_qemu(target: Json) -> EmulatedArch:
    arch = find_emulated_arch(cpu_triple(target))
    assert arch is not None
    if find_qemu(arch) is None:
        pytest.skip(
            f"there is no {arch.program} on PATH; without root: `apt-get download "
            "qemu-user-static && dpkg -x qemu-user-static_*.deb /tmp/qemu`, then "
            f"{QEMU_VARIABLE}=/tmp/qemu/usr/bin"
        )
    return arch


@pytest.fixture(scope="session")
def emulation_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of all tests here, so that the C library of an architecture is compiled once; also the next time, where TVMFLOW_TEST_STORE names one."""
    kept = os.environ.get("TVMFLOW_TEST_STORE")
    if kept:
        return Path(kept).absolute()
    folder = tmp_path_factory.getbasetemp()
    # the folder of a worker of xdist lies in that of the run, in which all workers share a store
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "store"


@pytest.fixture
def crossing(project: Project, emulation_store: Path) -> Project:
    project.environment["TVMFLOW_STORE"] = str(emulation_store)
    if folder := os.environ.get(QEMU_VARIABLE):
        project.environment[QEMU_VARIABLE] = folder
    return project


def write(project: Project, target: Json, against: str = "reference") -> None:
    text = DIGITS.replace("TARGET", json.dumps(target)).replace("AGAINST", f"against: {against}")
    (project.folder / "digits.yaml").write_text(text)


def verdict_of(project: Project) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads(
        (project.folder / "dist/digits/board/measurements.json").read_text()
    )
    return verdict


@pytest.mark.parametrize("board", BOARDS)
def test_the_digits_are_recognized_on_another_cpu(crossing: Project, board: str) -> None:
    """The bundle passes verify under qemu: it agrees with ONNX Runtime on the images that training did not see."""
    target = BOARDS[board]
    arch = needs_qemu(target)
    qemu = str(emulator_for(target))
    if "+v" in target.get("mattr", ()) and re.search(r"qemu-riscv64 [67]\.", qemu):
        pytest.skip(f"{qemu} crashes on vector instructions")
    write(crossing, target)
    ran = crossing.tvmflow("run", "digits.yaml", "-v")
    assert ran.code == 0, ran.out + ran.err
    verdict = verdict_of(crossing)
    assert verdict["passed"] and verdict["against"] == "reference"
    assert verdict["samples"] == 360
    assert verdict["accuracy"] == verdict["reference_accuracy"] >= 0.95
    assert verdict["ran_on"].startswith(f"{arch.program} ")
    assert "latency" not in verdict and verdict["latency_not_measured"]
    assert f"verify/board: ran on {verdict['ran_on']}" in ran.out
    assert "verify/board: latency is not measured" in ran.out
    again = crossing.tvmflow("run", "digits.yaml")
    assert "nothing to run" in again.out


def quantized_network() -> onnx.ModelProto:
    """Return int8 products of Arm kernels: with few channels, of points, of kernel positions, padded and strided, and an odd number of rows."""
    node = helper.make_node
    widths = {"stem": (24, 3, 3), "up": (40, 24, 1), "taps": (40, 1, 3), "far": (40, 1, 5)}
    widths |= {"down": (40, 1, 3), "square": (40, 40, 3), "back": (40, 40, 1), "half": (20, 40, 1)}
    weights = {
        name: onnx_models.draw(out, inner, size, size, seed=seed) / size
        for seed, (name, (out, inner, size)) in enumerate(widths.items())
    }
    weights |= {f"{name}_b": onnx_models.draw(weights[name].shape[0]) for name in ("stem", "taps")}
    weights |= {"rows": np.array([20, 25], np.int64), "last": onnx_models.draw(20, 26)}
    nodes = [
        node("Conv", ["x", "stem", "stem_b"], ["a"], pads=[1] * 4, strides=[2, 2]),
        node("Relu", ["a"], ["r"]),
        node("Conv", ["r", "up"], ["u"]),
        node("HardSwish", ["u"], ["h"]),
        node("Conv", ["h", "taps", "taps_b"], ["t"], pads=[1] * 4, group=40),
        node("Conv", ["t", "far"], ["f"], pads=[2] * 4, group=40),
        node("Conv", ["f", "back"], ["k"]),
        node("Add", ["k", "t"], ["s"]),
        node("Conv", ["s", "down"], ["d"], pads=[0, 0, 1, 1], strides=[2, 2], group=40),
        node("Conv", ["d", "square"], ["q"], pads=[1] * 4),
        node("GlobalAveragePool", ["q"], ["g"]),
        node("Add", ["q", "g"], ["m"]),
        node("Conv", ["m", "half"], ["n"], strides=[2, 2]),
        node("Reshape", ["n", "rows"], ["c"]),
        node("Transpose", ["c"], ["e"], perm=[1, 0]),
        node("MatMul", ["e", "last"], ["p"]),
        node("Tanh", ["p"], ["y"]),
    ]
    data, result = onnx_models.value("x", (1, 3, 42, 38)), onnx_models.value("y", None)
    return onnx_models.model(nodes, [data], [result], weights)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("mattr", [[], ["+dotprod"], ["+dotprod", "+i8mm"]])
def test_bytes_are_multiplied_and_rounded_as_the_nodes_say(
    crossing: Project, tmp_path: Path, mattr: list[str], symmetric: bool
) -> None:
    """On ARM CPUs with products of matrices, with dot products and without; signed and unsigned bytes."""
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon", *mattr]}
    needs_qemu(target)
    made = onnx_models.quantized(quantized_network(), tmp_path, signed=symmetric)
    onnx.save(made, crossing.folder / "bytes.onnx")
    (crossing.folder / "bytes.yaml").write_text(
        f"recipe: 1\nname: bytes\nmodel: {{onnx: bytes.onnx}}\npipeline: compile\n"
        f"targets: [{{name: board, tvm: {json.dumps(target)}}}]\n"
        "verify: {run_on: qemu, against: reference, samples: 4}\n"
    )
    ran = crossing.tvmflow("run", "bytes.yaml", "-v")
    assert ran.code == 0, ran.out + ran.err
    assert "verify/board: ran on qemu-aarch64" in ran.out


def convolutional_network() -> onnx.ModelProto:
    """Return 3×3 convolutions with all tiles of Winograd's method: odd images, paddings and channels, with strides and without."""
    node, images = helper.make_node, "abcdef"
    sizes = {
        "a": (64, 33),
        "b": (72, 64),
        "c": (65, 72),
        "d": (128, 72),
        "e": (64, 64),
        "f": (96, 64),
    }
    weights: dict[str, np.ndarray[Any, Any]] = {
        f"w{name}": onnx_models.draw(*size, 3, 3, seed=seed) / 20
        for seed, (name, size) in enumerate(sizes.items())
    }
    weights["flat"] = np.array([2, -1], np.int64)
    nodes = [
        node("Conv", ["x", "wa"], ["a"], pads=[1, 1, 1, 1]),
        node("Conv", ["a", "wb"], ["b"], pads=[0, 1, 2, 1]),
        node("Conv", ["b", "wc"], ["c"]),
        node("Conv", ["b", "wd"], ["d"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Conv", ["a", "we"], ["e"], pads=[4, 0, 9, 2]),
        node("Conv", ["e", "wf"], ["f"], pads=[1, 0, 1, 1], strides=[2, 2]),
        *(node("Reshape", [name, "flat"], [f"{name}_f"]) for name in images),
        node("Concat", [f"{name}_f" for name in images], ["y"], axis=1),
    ]
    data, result = onnx_models.value("x", (2, 33, 7, 7)), onnx_models.value("y", None)
    return onnx_models.model(nodes, [data], [result], weights)


@pytest.mark.parametrize("board", ["cortex-a72", "aarch64-any"])
def test_winograd_tiles_of_all_forms(crossing: Project, board: str) -> None:
    """Of 64-bit ARM: 4×4, 4×2 and 2×2, by two threads."""
    needs_qemu(BOARDS["cortex-a72"])
    onnx.save(convolutional_network(), crossing.folder / "images.onnx")
    (crossing.folder / "images.yaml").write_text(
        "recipe: 1\nname: images\nmodel: {onnx: images.onnx}\npipeline: compile\n"
        f"targets: [{{name: board, preset: {board}, threads: 2}}]\n"
        "verify: {run_on: qemu, against: reference, samples: 2, rtol: 1e-4}\n"
    )
    ran = crossing.tvmflow("run", "images.yaml", "-v")
    assert ran.code == 0, ran.out + ran.err
    assert "verify/board: ran on qemu-aarch64" in ran.out


def test_float16_is_added_under_qemu(crossing: Project) -> None:
    """`precision: float16` passes verify within the tolerance of its arithmetic."""
    target = BOARDS["neoverse-n1"]
    needs_qemu(target)
    write(crossing, target)
    crossing.edit_recipe("verify:", "kernels: {precision: float16}\nverify:", "digits.yaml")
    ran = crossing.tvmflow("run", "digits.yaml")
    assert ran.code == 0, ran.out + ran.err
    verdict = verdict_of(crossing)
    (output,) = verdict["outputs"].values()
    assert verdict["accuracy"] >= 0.95
    assert 0 < output["error_of_largest"] < 0.01


def test_emulation_changes_no_bit(crossing: Project, tmp_path: Path) -> None:
    """What this CPU computes natively, qemu computes with the same kernels."""
    host, target = read_host(), BOARDS["x86-64-v3"]
    needs_qemu(target)
    if host.arch != "x86_64" or "avx2" not in host.flags:
        pytest.skip("this machine does not run x86-64-v3 natively")
    write(crossing, target, against="none")
    # the tests of other processes run `digits` in the same store
    recipe = (crossing.folder / "digits.yaml").read_text()
    (crossing.folder / "bits.yaml").write_text(recipe.replace("name: digits", "name: bits"))
    ran = crossing.tvmflow("run", "bits.yaml", "--json")
    assert ran.code == 0, ran.out + ran.err
    bundle = crossing.folder / "dist/bits/board/bits.tvmflow"
    native = loading.load(bundle)
    content = bundles.read_bundle(bundle)
    subject = libraries.EmulatedLibrary(
        *libraries.read_specs(content.signature),
        MachineSettings(tvm=target, threads=2, device={"kind": "cpu"}),
        tmp_path,
        program_of(crossing, "bits"),
    )
    rng = np.random.default_rng(0)
    feeds = [{"data": rng.random((1, 1, 8, 8), np.float32)} for _ in range(20)]
    for actual, expected in zip(subject.run_all(feeds), map(native.run, feeds), strict=True):
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array)


def program_of(project: Project, recipe: str) -> Path:
    """Return the emulation program of the last run of a recipe."""
    from tvmflow.store.local import LocalStore

    store = LocalStore(project.environment["TVMFLOW_STORE"])
    artifact = store.find(store.last_key(recipe, "emulation_program/board") or "")
    assert artifact is not None
    (file,) = artifact.files
    return Path(store.blobs.path(file.digest))


def test_a_library_for_a_newer_cpu_fails(crossing: Project) -> None:
    """AVX2 on a CPU without it gives a message with the feature's name, and nothing is delivered."""
    target = BOARDS["x86-64-v3"]
    needs_qemu(target)
    write(crossing, {**target, "mcpu": "x86-64-v2", "mattr": ["+avx2", "+fma"]}, against="none")
    ran = crossing.tvmflow("run", "digits.yaml")
    assert ran.code == 1, ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err
    assert "verify/board: failed: the library does not run under qemu-x86_64" in ran.out
    assert "-cpu Nehalem: this CPU lacks an instruction set" in ran.out
    assert not (crossing.folder / "dist/digits/board/digits.tvmflow").exists()


def test_without_qemu_the_fix_names_the_package(crossing: Project, tmp_path: Path) -> None:
    """The library is built; only its verification needs qemu."""
    empty = tmp_path / "empty"
    empty.mkdir()
    crossing.environment[QEMU_VARIABLE] = str(empty)
    needs_qemu(BOARDS["x86-64-v3"])
    write(crossing, BOARDS["x86-64-v3"], against="none")
    shutil.rmtree(crossing.folder / "dist", ignore_errors=True)
    crossing.edit_recipe("min_accuracy: 0.95", "min_accuracy: 0.9", "digits.yaml")
    ran = crossing.tvmflow("run", "digits.yaml")
    assert ran.code == 4, ran.out + ran.err
    assert (
        f"there is no qemu-x86_64 (nor qemu-x86_64-static) in ${QEMU_VARIABLE} ({empty})" in ran.out
    )
    assert "apt-get download qemu-user-static" in ran.out


CREATE: Final = """\
#include <stdio.h>
#include "digits.h"
int main(void) {
  digits_context *context = NULL;
  const int status = digits_create(NULL, &context);
  printf("%d %s", status == DIGITS_MISSING_FEATURE, digits_message(status));
  digits_destroy(context);
  return status != 0;
}
"""
LACKS: Final = "this CPU lacks an instruction set that the library was built for"
LOAD: Final = "import sys, tvmflow; tvmflow.load(sys.argv[1]); print('loaded')"


@pytest.mark.parametrize(
    ("level", "cpus"),
    [
        ("x86-64-v3", {"qemu64": False, "Nehalem": False, "Haswell": True, "max": True}),
        ("x86-64-v4", {"qemu64": False, "Haswell": False, "max": False}),
    ],
)
def test_a_cpu_that_lacks_instructions_is_told_so(
    crossing: Project, tmp_path: Path, level: str, cpus: dict[str, bool]
) -> None:
    """`create` returns a code with a text, and `tvmflow.load` raises, before an instruction that the CPU does not know."""
    needs_qemu(BOARDS["x86-64-v3"])
    compiler = shutil.which("cc")
    if read_host().arch != "x86_64" or compiler is None:
        pytest.skip("it needs an x86-64 machine with a C compiler")
    write(crossing, {**BOARDS["x86-64-v3"], "mcpu": level}, against="none")
    crossing.edit_recipe("run_on: qemu", "run_on: auto", "digits.yaml")
    crossing.edit_recipe("  min_accuracy: 0.95\n", "", "digits.yaml")
    crossing.edit_recipe("pipeline:", "outputs: [bundle, c-library]\npipeline:", "digits.yaml")
    ran = crossing.tvmflow("run", "digits.yaml")
    assert ran.code == 0, ran.out + ran.err
    delivered = crossing.folder / "dist/digits/board"
    source, program = tmp_path / "create.c", tmp_path / "create"
    source.write_text(CREATE)
    library = delivered / "digits-c-library"
    words = [str(source), str(library / "libdigits.a"), "-lm", "-lpthread", "-o", str(program)]
    subprocess.run([compiler, f"-I{library}", *words], check=True)
    emulator = find_qemu(EMULATED_ARCHS["x86_64"])
    assert emulator is not None
    for cpu, runs in cpus.items():
        done = subprocess.run(
            [str(emulator), "-cpu", cpu, str(program)], capture_output=True, text=True, check=False
        )
        assert done.returncode == (not runs), (cpu, done)
        assert done.stdout == ("0 no error" if runs else f"1 {LACKS}"), (cpu, done)
    python = [str(emulator), "-cpu", "qemu64", sys.executable, "-c", LOAD]
    loaded = subprocess.run(
        [*python, str(delivered / "digits.tvmflow")],
        # numpy's OpenBLAS takes some emulated CPUs for larger ones
        env={**os.environ, "OPENBLAS_CORETYPE": "Prescott"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 1, loaded
    assert "lacks" in loaded.stderr and "Illegal" not in loaded.stderr, loaded


def test_a_size_may_depend_on_an_input_that_follows(crossing: Project) -> None:
    """The mask of a model with states comes before the cache, whose length its size depends on."""
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    needs_qemu(target)
    caches.write_cached_attention(crossing.folder / "cached.onnx")
    board = {"name": "board", "tvm": target, "verify": {"run_on": "qemu"}}
    recipe = caches.RECIPE.replace("[host]", f"[{json.dumps(board)}]\nstate: {{past_*: present_*}}")
    (crossing.folder / "cached.yaml").write_text(recipe.replace("c-library, bundle", "c-library"))
    done = crossing.tvmflow("run", "cached.yaml")
    assert done.code == 0, done.out + done.err
    verdict = json.loads((crossing.folder / "dist/cached/board/measurements.json").read_text())
    sizes = [case["sizes"] for case in verdict["sizes"]]
    assert {"past": 0, "seq": 1} in sizes and {"past": 40, "seq": 12} in sizes
