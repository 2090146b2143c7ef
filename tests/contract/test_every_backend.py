"""The promises of every backend in the registry, and what others derive from it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tvmflow.executors import cluster_worker
from tvmflow.planning import environment
from tvmflow.targets import c_runtime, devices
from tvmflow.targets.backends import BACKENDS, backend_for, is_supported
from tvmflow.targets.backends.backend import Backend
from tvmflow.targets.host import Host
from tvmflow.targets.presets import PRESETS

every_backend = pytest.mark.parametrize("kind", BACKENDS)
X86 = Host("x86_64", "cpu", frozenset(), 8)
TARGETS: dict[str, dict[str, Any]] = {
    "llvm": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
    "cuda": {
        "kind": "cuda",
        "arch": "sm_90",
        "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
    },
    "opencl": {"kind": "opencl", "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}},
    "webgpu": {"kind": "webgpu", "host": {"kind": "llvm", "mtriple": "wasm32-wasi"}},
}


def double(number: int) -> int:
    """A function that a backend calls."""
    return 2 * number


@every_backend
def test_it_has_the_functions_of_the_protocol(kind: str) -> None:
    """With the same parameters, and a docstring each; its kind is its key in the registry."""
    backend: Any = BACKENDS[kind]
    assert kind == backend.KIND and is_supported(kind)
    for name, function in inspect.getmembers(Backend, inspect.isfunction):
        if name.startswith("_"):
            continue
        implemented = getattr(backend, name)
        expected = list(inspect.signature(function).parameters)[1:]
        assert list(inspect.signature(implemented).parameters) == expected, name
        assert (implemented.__doc__ or "").strip(), name


@every_backend
def test_its_traits_are_unique_or_complete(kind: str) -> None:
    """Devices differ in name and number, so that locks and tensors do; exactly one backend runs on the host's CPU."""
    backend = BACKENDS[kind]
    others = [other for other in BACKENDS.values() if kind != other.KIND]
    assert backend.DEVICE not in {other.DEVICE for other in others}
    assert backend.DLPACK_DEVICE_TYPE not in {other.DLPACK_DEVICE_TYPE for other in others}
    assert {"kind": backend.DEVICE} in devices.ALL_DEVICES
    assert sum(other.RUNS_ON_HOST_CPU for other in BACKENDS.values()) == 1
    assert (
        not backend.no_tvm_runtime_reason({"kind": backend.KIND})
        or backend.EXECUTOR
        or backend.IS_BESIDE_HOST
    )
    assert not backend.EXECUTOR or (c_runtime._FOLDER / backend.EXECUTOR).is_file()


@every_backend
def test_a_target_of_its_kind_is_complete(kind: str) -> None:
    """Completing it changes no field, and completing it again changes nothing."""
    backend, target = backend_for(TARGETS[kind]), TARGETS[kind]
    assert backend is BACKENDS[kind]
    assert backend.target_problem(target) == ""
    completed = backend.complete_target(target)
    assert target.items() <= completed.items()
    assert backend.complete_target(completed) == completed
    assert backend.tensor_intrinsics(target) or backend.IS_BESIDE_HOST
    assert backend.device(target, X86, runs_here=False)["kind"] == backend.DEVICE


@every_backend
def test_every_reason_is_a_clause(kind: str) -> None:
    """Without a capital letter and a full stop: it ends a message."""
    backend, target = BACKENDS[kind], TARGETS[kind]
    for reason in (
        backend.unbuildable_reason(target),
        backend.unrunnable_reason(target, in_this_process=False),
        backend.slow_float16_reason(target, ()),
        backend.no_bfloat16_reason(target, ()),
    ):
        assert reason == reason.strip() and not reason.endswith(".")


@every_backend
def test_others_know_its_tools_and_its_environment(kind: str) -> None:
    """A worker reports its tools, and a cached plan depends on the variables that choose its device."""
    assert set(BACKENDS[kind].TOOLS) <= set(cluster_worker.list_tools())
    assert set(BACKENDS[kind].ENVIRONMENT_VARIABLES) <= set(environment._VARIABLES)


def test_a_cpu_is_built_for_in_this_process() -> None:
    """Its tensors stay where they are, too."""
    backend = BACKENDS["llvm"]
    assert backend.call_builder(double, 4) == 8
    assert backend.place_arguments(("a", "b")) == ["a", "b"]
    assert backend.has_device()


@pytest.mark.parametrize(
    ("tvm", "problem"),
    [
        ({"kind": "cuda"}, "needs the GPU's architecture, such as `arch: sm_90`"),
        ({"kind": "cuda", "arch": "90"}, "needs the GPU's architecture, such as `arch: sm_90`"),
        ({"kind": "cuda", "arch": "sm_90"}, "needs the CPU that runs the GPU, such as"),
        ({"kind": "cuda", "arch": "sm_90", "host": {"kind": "llvm"}}, "needs the CPU that runs"),
        ({"kind": "opencl"}, "needs the CPU that runs the GPU, such as"),
        ({"kind": "webgpu"}, "needs the code of browsers without WebGPU, such as"),
        ({**TARGETS["opencl"], "thread_warp_size": 0}, "thread_warp_size must be a number of"),
        ({**TARGETS["opencl"], "max_threads_per_block": 8}, "max_threads_per_block must be at"),
    ],
)
def test_an_incomplete_gpu_is_a_problem(tvm: dict[str, Any], problem: str) -> None:
    """Its architecture and the triple of its host cannot be guessed."""
    assert backend_for(tvm).target_problem(tvm).startswith(problem)


def test_every_preset_has_a_backend() -> None:
    """And is a complete target of it."""
    for name, preset in PRESETS.items():
        if preset.tvm is not None:
            assert is_supported(preset.tvm["kind"]), name
            assert backend_for(preset.tvm).target_problem(preset.tvm) == "", name


def test_kinds_without_a_backend_are_compiled_as_for_a_cpu() -> None:
    """`c` is built and runs nowhere; `metal` is not built."""
    assert not is_supported("c")
    assert backend_for({"kind": "c"}).unbuildable_reason({"kind": "c"}) == ""
    assert "its kind is c" in backend_for({"kind": "c"}).unrunnable_reason(
        {"kind": "c"}, in_this_process=False
    )
    assert "its kind is metal" in backend_for({"kind": "metal"}).unbuildable_reason(
        {"kind": "metal"}
    )
