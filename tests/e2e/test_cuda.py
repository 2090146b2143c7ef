"""Libraries for NVIDIA GPUs from a machine that has none: machine code inside, nothing left to be compiled by users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.gpu import ptxas
from tests.support.project import Project
from tvmflow.core.errors import StageError
from tvmflow.targets.backends.cuda import gpu, nvrtc
from tvmflow.targets.presets import PRESETS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not nvrtc.is_installed(), reason="needs the extra tvmflow[cuda]"),
]

# e_machine of the code in a cubin, behind ELF's magic number, class, and type
_CUBIN = b"\xbe\x00"


def cubins(library: bytes) -> int:
    """How many files of machine code for NVIDIA's GPUs a library holds."""
    starts = [at for at in range(len(library)) if library.startswith(b"\x7fELF", at)]
    return sum(library[at + 18 : at + 20] == _CUBIN for at in starts)


def test_one_recipe_gives_libraries_for_a_server_and_for_a_board(project: Project) -> None:
    """Kernels are compiled here for both GPUs, hosts for x86-64 and for ARM; a second run does nothing."""
    project.write_recipe(targets=["cuda-sm90", "jetson-orin"])
    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    ran = project.run()
    assert ran.code == 0, ran.out
    machines = {}
    for target in ("cuda-sm90", "jetson-orin"):
        library = (project.folder / f"dist/tiny/{target}/tiny.so").read_bytes()
        assert cubins(library) == 1 and b"__global__" not in library
        machines[target] = library[18]
        rules = ran.stages[f"build/{target}"]["facts"]["schedule_rules"]
        assert rules and "none" not in rules
    assert machines == {"cuda-sm90": 62, "jetson-orin": 183}
    assert project.run().ran == []


def test_every_gpu_has_a_library_that_needs_its_driver_alone(
    project: Project, tmp_path: Path
) -> None:
    """PTX for those that CUDA 13 does not know, which ptxas assembles; machine code and PTX for the others."""
    gpus = {name: str((PRESETS[name].tvm or {})["arch"]) for name in PRESETS if is_gpu(name)}
    project.write_recipe(targets=list(gpus))
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [c-library]")
    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    ran = project.run()
    assert ran.code == 0, ran.out
    for name, arch in gpus.items():
        folder = project.folder / f"dist/tiny/{name}/tiny-c-library"
        library = (folder / "libtiny.so").read_bytes()
        start = library.index(b".version ")
        ptx = library[start : library.index(b"\0", start)]
        assert f".target {arch}\n".encode() in ptx
        is_old = gpu.is_unknown_to_nvrtc(arch)
        assert cubins(library) == (0 if is_old else 1)
        if is_old:
            kernels = ptxas.assemble(ptx, arch, tmp_path)
            assert kernels and all(usage.spilled == 0 for usage in kernels.values())


def is_gpu(name: str) -> bool:
    """Whether a preset is for an NVIDIA GPU."""
    return (PRESETS[name].tvm or {}).get("kind") == "cuda"


def test_tensor_cores_have_all_the_headers_that_they_need(project: Project) -> None:
    """Matrix products of float16 are compiled with more of CUDA than others."""
    project.write_recipe(targets=["cuda-sm90"])
    project.write_products()
    project.edit_recipe("model:", "kernels: {precision: mixed}\nmodel:")
    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    ran = project.run()
    assert ran.code == 0, ran.out
    library = (project.folder / "dist/tiny/cuda-sm90/tiny.so").read_bytes()
    assert cubins(library) == 1


def test_a_kernel_that_the_compiler_refuses_is_a_sentence() -> None:
    """With the compiler's words, and the GPUs that it knows."""
    tools = nvrtc.find_toolkit()
    good = 'extern "C" __global__ void f(float* x) { x[0] = INFINITY; }'
    assert nvrtc.compile_kernels(good, "sm_90", tools).cubin.startswith(b"\x7fELF")
    with pytest.raises(StageError, match=r"rejects a kernel for sm_90: .*undefined") as caught:
        nvrtc.compile_kernels('extern "C" __global__ void f() { g(); }', "sm_90", tools)
    assert "sm_75" in caught.value.fix and "sm_90" in caught.value.fix
    with pytest.raises(StageError, match="rejects a kernel for sm_20"):
        nvrtc.compile_kernels(good, "sm_20", tools)


def test_errors_come_back_from_the_process_that_builds() -> None:
    """As what they were there; a process that ends without a word is told too."""
    with pytest.raises(StageError, match="rejects a kernel for sm_20"):
        nvrtc.call(reject, "sm_20")
    with pytest.raises(StageError, match="the process that builds for CUDA ended with exit code 7"):
        nvrtc.call(end_without_answer, 7)


def end_without_answer(code: int) -> None:
    """Called in the process that builds."""
    os._exit(code)


def reject(arch: str) -> None:
    """Called in the process that builds."""
    nvrtc.compile_kernels("", arch, nvrtc.find_toolkit())
