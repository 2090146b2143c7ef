"""C libraries in Python: no more memory is touched than the signature says, and nothing of them stays."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvmflow
from tests.unit.runtime.damage import described, read_entries, write_entries
from tvmflow.core.errors import BundleError
from tvmflow.core.types import TensorSpec
from tvmflow.exporters import bundle
from tvmflow.runtime import c_loader
from tvmflow.runtime.arrays import match_inputs
from tvmflow.runtime.virtual_machine import VirtualMachine

needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are read from /proc"
)


def with_signature(source: Path, path: Path, change: Callable[[Any], None]) -> Path:
    """The bundle with another signature, which the manifest describes."""
    entries = read_entries(source.read_bytes())
    signature = json.loads(entries["signature.json"])
    change(signature)
    entries["signature.json"] = json.dumps(signature).encode()
    path.write_bytes(write_entries(described(entries)))
    return path


@pytest.mark.parametrize(
    ("direction", "field", "value"),
    [
        ("inputs", "shape", [1, 1]),
        ("outputs", "shape", [2, 2]),
        ("outputs", "dtype", "float16"),
        ("inputs", "name", "y"),
    ],
)
def test_the_tensors_of_a_library_are_those_of_the_signature(
    small_bundle: Path, tmp_path: Path, direction: str, field: str, value: Any
) -> None:
    """The library trusts the sizes of arrays: with smaller ones it would write over other memory."""

    def change(signature: Any) -> None:
        signature[direction][0][field] = value

    path = with_signature(small_bundle, tmp_path / "other.tvmflow", change)
    with pytest.raises(BundleError, match=f"other.tvmflow: the {direction} in its signature"):
        tvmflow.load(path)


def test_a_tensor_between_parts_has_one_size(small_bundle: Path, tmp_path: Path) -> None:
    """A part reads what is there before it, as the model's signature and the parts describe it."""

    def rename(signature: Any) -> None:
        signature["inputs"][0] = {**signature["inputs"][0], "name": "plus_one", "shape": [2, 4]}

    second = with_signature(small_bundle, tmp_path / "second.tvmflow", rename)
    signature = json.loads(read_entries(small_bundle.read_bytes())["signature.json"])
    path = tmp_path / "two.tvmflow"
    bundle.write_partitioned({"name": "two"}, signature, {"a": small_bundle, "b": second}, path)
    with pytest.raises(BundleError, match=r"two\.tvmflow is .*nothing before part 'b' gives"):
        tvmflow.load(path)
    signature["outputs"][0]["shape"] = [4]
    bundle.write_partitioned({"name": "two"}, signature, {"a": small_bundle}, path)
    with pytest.raises(BundleError, match="no part gives the output"):
        tvmflow.load(path)


def test_a_bundle_has_a_library(small_bundle: Path, tmp_path: Path) -> None:
    entries = read_entries(small_bundle.read_bytes())
    manifest = json.loads(entries["manifest.json"])
    del entries["library.so"], manifest["files"]["library.so"]
    path = tmp_path / "none.tvmflow"
    path.write_bytes(write_entries({**entries, "manifest.json": json.dumps(manifest).encode()}))
    with pytest.raises(BundleError, match=r"none\.tvmflow is not .*it has no 'library\.so'"):
        tvmflow.load(path)


def test_a_library_of_another_version_is_not_read(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptions may have another layout."""
    monkeypatch.setattr(c_loader, "ABI", 2)
    monkeypatch.setattr(c_loader.NativeProgram, "_describe", lambda *_: pytest.fail("was read"))
    with pytest.raises(BundleError, match="another version") as raised:
        tvmflow.load(small_bundle)
    assert "the tvmflow that made it" in raised.value.fix


def test_a_library_without_a_place_is_explained(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is gone, or nothing in it may be executed, for which a damaged library stands."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        BundleError, match=r"no place for the library of .*small\.tvmflow"
    ) as raised:
        tvmflow.load(small_bundle)
    assert "$TMPDIR" in raised.value.fix
    monkeypatch.undo()
    entries = {**read_entries(small_bundle.read_bytes()), "library.so": b"no library"}
    path = tmp_path / "other.tvmflow"
    path.write_bytes(write_entries(described(entries)))
    with pytest.raises(
        BundleError, match=r"library of .*other\.tvmflow cannot be loaded"
    ) as raised:
        tvmflow.load(path)
    assert "noexec" in raised.value.fix


def test_any_number_of_threads_will_do(small_bundle: Path) -> None:
    """A number in the environment may be meant for something else."""
    assert tvmflow.load(small_bundle, threads=5000).run(np.ones((2, 3), "float32"))


def test_outputs_are_taken_by_name(small_bundle: Path) -> None:
    x = np.ones((2, 3), "float32")
    with pytest.raises(BundleError, match="`out` is a list, not arrays by name"):
        tvmflow.load(small_bundle).run(x, out=[x])  # type: ignore[arg-type]


def count_libraries() -> int:
    return Path("/proc/self/maps").read_text().count("library.so")


def count_resources() -> tuple[int, ...]:
    """Mapped pieces of libraries, threads, and open files."""
    folders = (Path("/proc/self", name) for name in ("task", "fd"))
    return count_libraries(), *(len(list(folder.iterdir())) for folder in folders)


@needs_maps
def test_a_module_that_is_gone_leaves_nothing(small_bundle: Path) -> None:
    """Neither its mapped file, which keeps its place on the disk, nor threads; also as garbage in a cycle."""
    gc.collect()
    before = count_resources()
    x = np.ones((2, 3), "float32")
    for _ in range(5):
        module: Any = tvmflow.load(small_bundle, threads=2)
        module.run(x)
        module.itself = module
        del module
    gc.collect()
    assert count_resources() == before


@needs_maps
def test_results_and_calls_outlive_a_module(small_bundle: Path) -> None:
    """A call keeps the library."""
    module = tvmflow.load(small_bundle)
    x = np.ones((2, 3), "float32")
    with module.program.bound([x]) as call:
        del module
        gc.collect()
        call()
        assert count_libraries() > 0


def test_a_scalar_has_no_dimensions() -> None:
    """TVM's runtime counts them."""
    scalar = TensorSpec("s", (), "float32")
    for value in (np.float32(2), np.array(2, "float32"), np.array(2, ">f4").astype("<f4")):
        (array,) = match_inputs((scalar,), {"s": value}, "")
        assert (array.shape, float(array)) == ((), 2.0)


def test_a_tensor_of_tvms_runtime_is_read_in_place(small_bundle: Path, vm_bundle: Path) -> None:
    """The part after one on TVM's virtual machine copies nothing."""
    before, after = (tvmflow.load(path).program for path in (vm_bundle, small_bundle))
    assert isinstance(before, VirtualMachine)
    assert isinstance(after, c_loader.NativeProgram)
    spec = after.inputs[0]
    tensor = before.main(before.place(np.ones((2, 3), "float32"), spec))[0]
    array = after.place(tensor, spec)
    assert np.shares_memory(array, before.fetch(tensor))
    np.testing.assert_array_equal(after.main(array)[1], np.full((2, 3), 4))
