"""The runtime: loads libraries for this machine, rejects others with a message, and never loads the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvmflow
from tests.unit.runtime.damage import rewritten
from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.types import TensorSpec
from tvmflow.runtime import loading
from tvmflow.targets.host import Host


def test_a_bundle_has_a_signature_and_runs(any_bundle: Path) -> None:
    """Inputs and outputs carry name, shape and dtype; run maps names to arrays."""
    module = tvmflow.load(any_bundle)
    assert module.inputs == (TensorSpec("x", (2, 3), "float32"),)
    assert [spec.name for spec in module.outputs] == ["plus_one", "twice"]
    x = np.arange(6, dtype="float32").reshape(2, 3)
    result = module.run({"x": x})
    np.testing.assert_array_equal(result["plus_one"], x + 1)
    np.testing.assert_array_equal(result["twice"], x * 2)


def test_results_stay_when_the_module_runs_again(any_bundle: Path) -> None:
    """An output belongs to the caller: the next call does not write into it."""
    module = tvmflow.load(any_bundle)
    first = module.run({"x": np.zeros((2, 3), "float32")})["plus_one"]
    module.run({"x": np.full((2, 3), 9, "float32")})
    np.testing.assert_array_equal(first, np.ones((2, 3)))


def test_inputs_may_be_strided_views(any_bundle: Path) -> None:
    """Any numpy array of the right shape will do, however it lies in memory."""
    wide = np.arange(12, dtype="float32").reshape(3, 4).T[::2]
    np.testing.assert_array_equal(tvmflow.load(any_bundle).run({"x": wide})["twice"], wide * 2)


def test_every_mismatch_is_named(any_bundle: Path) -> None:
    """One error lists all that is wrong with a call, and says what the model takes."""
    module = tvmflow.load(any_bundle)
    with pytest.raises(ValueError, match="there is no input") as raised:
        module.run({"x": np.zeros((2, 4)), "y": np.zeros(1)})
    assert str(raised.value) == (
        "there is no input 'y'; input 'x' has shape (2, 4), not (2, 3); "
        "input 'x' has dtype float64, not float32\n"
        "  fix: this model takes small (x: float32[2, 3]) -> "
        "(plus_one: float32[2, 3], twice: float32[2, 3])"
    )
    with pytest.raises(BundleError, match="input 'x' is missing"):
        module.run({})


def test_only_the_runtime_is_imported(any_bundle: Path, small_bundle: Path) -> None:
    """A program that loads a bundle never loads the compiler, nor what tvmflow builds with; TVM's runtime if it must."""
    code = (
        "import sys, tvmflow, numpy as np; m = tvmflow.load(sys.argv[1]); "
        "m.run({'x': np.zeros((2, 3), 'float32')}); "
        "print([n for n in sys.argv[2:] if n in sys.modules])"
    )
    names = ["tvm", "onnx", "mxnet", "doit", "yaml", "pydantic"]
    if any_bundle == small_bundle:
        names.append("tvm_ffi")
    done = subprocess.run(
        [sys.executable, "-c", code, str(any_bundle), *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_tvm_can_be_imported_after_a_library(vm_bundle: Path) -> None:
    """TVM registers functions under names that libraries need, and refuses names that are taken."""
    code = (
        "import sys, tvmflow, numpy as np; m = tvmflow.load(sys.argv[1]); "
        "x = {'x': np.ones((2, 3), 'float32')}; before = m.run(x); import tvm; "
        "print(np.array_equal(before['twice'], tvmflow.load(sys.argv[1]).run(x)['twice']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(vm_bundle)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


def test_functions_that_libraries_call_need_no_compiler() -> None:
    """TVM defines these in Python, beside its compiler."""
    code = """
import sys, numpy as np, tvm_ffi
from tvmflow.runtime.virtual_machine import CPU, _registered_functions, view_tensor
CPU.load_runtime()
registered = _registered_functions()
registered.__enter__()
def call(name, array, *rest):
    found = tvm_ffi.get_global_func(f"relax.run.{name}")(view_tensor(array), *rest)
    return [np.from_dlpack(t).tolist() for t in ([found] if hasattr(found, "shape") else found)]
x = np.array([[0, 3], [2, 0]])
print(call("nonzero", x), call("nonzero", x[:1] * 0), call("unique", np.array([5, 2, 5]), 0, 1, 1, 1))
print(call("unique", x, 1, 0, 0, 0), call("unique", np.array([[1, 2], [1, 2]]), 1, 0, 1, 0, 0))
print(np.from_dlpack(tvm_ffi.get_global_func("relax.run.shape_to_tensor")(tvm_ffi.Shape([2, 3]))))
assert "tvm" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[[[0, 1], [1, 0]]] [[[], []]] [[5, 2], [0, 1], [0, 1, 0], [2, 1]]",
        "[[0, 2, 3]] [[[1, 2]], [0, 0]]",
        "[2 3]",
    ], done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundle": 9}, "bundle format 9, and this tvmflow reads 3 and 4; load it with"),
        ({"tvm": "0.99.0"}, r"built with TVM 0\.99\.0, the runtime here is"),
        (
            {"target": {"tvm": {"mtriple": "vax-linux-gnu"}, "features": []}},
            "was built for vax, this machine is",
        ),
        (
            {"target": {"tvm": {"kind": "metal"}, "features": []}},
            "was built for metal, and this runtime runs libraries for CPUs and NVIDIA GPUs",
        ),
        (
            {"target": {"tvm": {}, "features": ["sse2", "quantum"]}},
            "CPU instructions that this machine lacks: quantum",
        ),
        ({"files": {}}, "its manifest does not name its 'library.so'"),
    ],
)
def test_an_unrunnable_library_is_rejected_before_it_is_loaded(
    vm_bundle: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Another CPU, runtime or format is an error at load, not a crash later."""
    if "features" in changes.get("target", {}) and not Path("/proc/cpuinfo").exists():
        pytest.skip("CPU features are read from /proc/cpuinfo")
    with pytest.raises(BundleError, match=words):
        tvmflow.load(rewritten(vm_bundle, tmp_path / "other.tvmflow", **changes))


@pytest.mark.parametrize(
    ("tvm", "features", "words"),
    [
        ({"mtriple": "aarch64-linux-gnu"}, ["asimd", "sve"], "machine lacks: sve"),
        ({"mtriple": "arm64-apple-macos13"}, [], "was built for macos, this machine runs linux"),
        ({"mtriple": "armv7-linux-gnueabihf"}, [], "was built for armv7, this machine is aarch64"),
        (
            {"mtriple": "aarch64-linux-musl"},
            [],
            "for Linux with musl, this machine runs Linux with g",
        ),
    ],
)
def test_a_board_rejects_a_library_for_another(
    small_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tvm: dict[str, str],
    features: list[str],
    words: str,
) -> None:
    """The message for a Raspberry Pi 4 names what it lacks, before an illegal instruction ends the program."""
    board = Host("aarch64", "Cortex-A72", frozenset({"fp", "asimd", "crc32"}), 4)
    monkeypatch.setattr(loading, "read_host", lambda: board)
    target = {"tvm": tvm, "features": features}
    with pytest.raises(BundleError, match=words):
        tvmflow.load(rewritten(small_bundle, tmp_path / "other.tvmflow", target=target))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not really", b"\x7fELF"])
def test_a_damaged_bundle_is_rejected(tmp_path: Path, content: bytes) -> None:
    """A truncated or foreign file is named."""
    path = tmp_path / "x.tvmflow"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="is not a complete tvmflow bundle"):
        tvmflow.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No file, no traceback."""
    with pytest.raises(BundleError, match="there is no file"):
        tvmflow.load(tmp_path / "none.tvmflow")


def test_latency_gives_the_seconds_of_each_repeat(any_bundle: Path) -> None:
    """As many positive numbers as repeats were asked for."""
    seconds = tvmflow.load(any_bundle).latency(
        {"x": np.zeros((2, 3), "float32")}, repeat=4, min_seconds=0.001
    )
    assert len(seconds) == 4
    assert min(seconds) > 0


@pytest.mark.parametrize("repeat", [0, -1, "3", 1.5, True])
def test_nothing_is_measured_less_than_once(small_bundle: Path, repeat: Any) -> None:
    """Times that were never measured would be an empty list."""
    module = tvmflow.load(small_bundle)
    for measure in (module.latency, module.profile):
        with pytest.raises(BundleError, match="which is not a number of measurements"):
            measure({"x": np.zeros((2, 3), "float32")}, repeat=repeat)


def test_a_profile_has_every_kernel(any_bundle: Path) -> None:
    """Its calls and seconds, the slowest first; the module itself stays without an instrument."""
    module = tvmflow.load(any_bundle)
    operators = module.profile({"x": np.zeros((2, 3), "float32")}, repeat=3)
    assert {row.name: row.calls for row in operators if "vm." not in row.name} == {
        "add": 1,
        "multiply": 1,
    }
    assert [row.seconds for row in operators] == sorted(
        (e.seconds for e in operators), reverse=True
    )
    assert min(row.seconds for row in operators) > 0


# ---------------------------------------------------------------- threads


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a Python thread of its own, which has its own pool."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_program_chooses_the_number_of_threads(vm_bundle: Path) -> None:
    """The library is the same; each Python thread has a pool, which later calls may use in part."""
    import tvm_ffi

    feed = {"x": np.zeros((2, 3), "float32")}
    models = {count: tvmflow.load(vm_bundle, threads=count) for count in (1, 2, 3)}

    def call(*counts: int) -> list[int]:
        used = []
        for count in counts:
            models[count].run(feed)
            used.append(int(tvm_ffi.get_global_func("runtime.NumThreads")()))
        return used

    assert in_a_thread(lambda: call(3, 1, 2, 3)) == [3, 1, 2, 3]
    with pytest.raises(EnvironmentProblem, match="3 threads are requested, and the pool") as raised:
        in_a_thread(lambda: call(2, 3))
    assert "first call the model that uses most threads" in raised.value.fix


def test_threads_come_from_the_environment_without_a_request(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is read when a library is loaded; a smaller pool is then no error."""
    monkeypatch.setenv("TVM_NUM_THREADS", "5")
    module = tvmflow.load(small_bundle)
    assert module.threads == 5
    module.run({"x": np.zeros((2, 3), "float32")})


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
def test_no_number_of_threads_is_rejected(small_bundle: Path, threads: Any) -> None:
    with pytest.raises(BundleError, match="which is not a number of threads"):
        tvmflow.load(small_bundle, threads=threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_a_model_stays_on_the_cpus_that_its_process_may_use(vm_bundle: Path) -> None:
    """TVM would bind the calling thread to the machine's first CPU, so that all processes shared it."""
    module = tvmflow.load(vm_bundle, threads=1)

    def call_on_last_cpu() -> tuple[set[int], set[int]]:
        last = {max(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, last)
        module.run({"x": np.zeros((2, 3), "float32")})
        return last, os.sched_getaffinity(0)

    before, after = in_a_thread(call_on_last_cpu)
    assert after == before


# ---------------------------------------------------------------- the C runtime


def test_calls_from_several_threads_run_at_once(small_bundle: Path) -> None:
    """Each in a context of its own: none waits, and none sees another's tensors."""
    module = tvmflow.load(small_bundle, threads=1)

    def call(number: int) -> bool:
        x = np.full((2, 3), number, "float32")
        return all((module.run(x)["plus_one"] == number + 1).all() for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_is_forked_has_contexts_of_its_own(small_bundle: Path) -> None:
    module = tvmflow.load(small_bundle, threads=2)
    x = np.ones((2, 3), "float32")
    module.run(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if (module.run(x)["twice"] == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (module.run(x)["twice"] == 2).all()


def test_outputs_are_written_where_the_caller_says(any_bundle: Path) -> None:
    """Others are new arrays; all come back by name."""
    module = tvmflow.load(any_bundle)
    mine = np.zeros((2, 3), "float32")
    results = module.run(np.ones((2, 3), "float32"), out={"twice": mine})
    assert results["twice"] is mine
    np.testing.assert_array_equal(mine, np.full((2, 3), 2, "float32"))
    np.testing.assert_array_equal(results["plus_one"], mine)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ({"other": np.zeros((2, 3), "float32")}, "there is no output 'other'"),
        (
            {"twice": np.zeros((3, 2), "float32")},
            r"output 'twice' has shape \(3, 2\), not \(2, 3\)",
        ),
        ({"twice": np.zeros((2, 3))}, "output 'twice' has dtype float64, not float32"),
        ({"twice": np.zeros((3, 2), "float32").T}, "for output 'twice' is not writable and dense"),
        ({"twice": bytes(24)}, "output 'twice' has shape"),
        (
            {"twice": None},
            "output 'twice' is a NoneType, which NumPy cannot read in the CPU's memory",
        ),
    ],
)
def test_arrays_that_cannot_take_an_output_are_named(
    small_bundle: Path, out: dict[str, Any], words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        tvmflow.load(small_bundle).run(np.ones((2, 3), "float32"), out=out)


def test_an_output_must_not_overlap_the_input(small_bundle: Path) -> None:
    """Kernels read the input while they write."""
    x = np.ones((2, 3), "float32")
    with pytest.raises(BundleError, match="an output shares memory with an input"):
        tvmflow.load(small_bundle).run(x, out={"twice": x})


class Exported:
    """A tensor that is known by DLPack alone."""

    def __init__(self, array: Any, device: int = 1) -> None:
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)


def test_tensors_of_other_libraries_are_read_in_place(small_bundle: Path) -> None:
    """By DLPack or as buffers; those on a GPU are refused."""
    module = tvmflow.load(small_bundle)
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for tensor in (Exported(x), memoryview(x.data)):
        np.testing.assert_array_equal(module.run(tensor)["plus_one"], x + 1)
    with pytest.raises(BundleError, match="input 'x' is a Exported, which NumPy cannot read"):
        module.run(Exported(x, device=2))


class Unreadable(Exported):
    """A tensor of a type that NumPy does not have."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("bfloat16 is not supported")


def test_a_tensor_that_numpy_cannot_read_is_named(small_bundle: Path) -> None:
    x = np.ones((2, 3), "float32")
    with pytest.raises(BundleError, match="input 'x' is a Unreadable, which NumPy cannot read"):
        tvmflow.load(small_bundle).run(Unreadable(x))


def test_one_tensor_is_enough_for_one_input(small_bundle: Path) -> None:
    assert (tvmflow.load(small_bundle).run(np.ones((2, 3), "float32"))["twice"] == 2).all()
