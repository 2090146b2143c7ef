"""Bundles of dynamic shape: arrays of any allowed sizes in, outputs of their own sizes out, with each runtime."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvmflow
from tests.support.dynamic_programs import DynamicBundles
from tests.unit.runtime.damage import described, read_entries, write_entries
from tvmflow.core.errors import BundleError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.arrays import OutputArrays

Array = np.ndarray[Any, Any]
ORDER = ((1, 16), (6, 96), (1, 4), (2, 32), (6, 2), (1, 16), (3, 94))


@pytest.fixture(params=["c", "vm"])
def bundle(request: pytest.FixtureRequest, dynamic_bundles: DynamicBundles) -> Path:
    """The network with each runtime."""
    path: Path = getattr(dynamic_bundles, request.param)
    return path


def feed(batch: int, seq: int) -> dict[str, Array]:
    rng = np.random.default_rng(batch * 1000 + seq)
    return {
        "x": rng.standard_normal((batch, seq, 24), dtype=np.float32),
        "y": rng.standard_normal((batch, 24), dtype=np.float32),
    }


def same(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


def test_both_runtimes_give_the_same_at_sizes_in_any_order(dynamic_bundles: DynamicBundles) -> None:
    compiled = tvmflow.load(dynamic_bundles.c, threads=2)
    machine = tvmflow.load(dynamic_bundles.vm, threads=1)
    for batch, seq in ORDER:
        given = feed(batch, seq)
        outputs = compiled.run(given)
        assert same(outputs, machine.run(given))
        assert outputs["out0"].shape == (batch, (seq - 1) // 4 + 1, 24)
        assert outputs["out1"].shape == (batch, 24)


def test_arrays_of_a_caller_take_outputs(bundle: Path) -> None:
    """They have the shapes of this call."""
    module = tvmflow.load(bundle)
    given, expected = feed(2, 16), module_outputs(bundle, 2, 16)
    out = {"out0": np.zeros((2, 4, 24), np.float32)}
    outputs = module.run(given, out)
    assert outputs["out0"] is out["out0"] and same(outputs, expected)
    with pytest.raises(BundleError, match=r"has shape \(2, 9, 24\), not \(2, 4, 24\)"):
        module.run(given, {"out0": np.zeros((2, 9, 24), np.float32)})


def module_outputs(bundle: Path, batch: int, seq: int) -> dict[str, Array]:
    return tvmflow.load(bundle).run(feed(batch, seq))


@pytest.mark.parametrize(
    ("x", "y", "problem"),
    [
        ((7, 16, 24), (7, 24), "the dimension batch is 7, and its sizes are 1 to 6"),
        (
            (1, 98, 24),
            (1, 24),
            "the dimension seq is 98, and its sizes are 2 to 96, multiples of 2",
        ),
        (
            (1, 15, 24),
            (1, 24),
            "the dimension seq is 15, and its sizes are 2 to 96, multiples of 2",
        ),
        ((1, 0, 24), (1, 24), "the dimension seq is 0"),
        ((2, 16, 24), (1, 24), "the dimension batch has two sizes"),
        ((2, 16, 25), (2, 24), "size 2 of input 'x' is 25"),
        ((2, 16), (2, 24), "input 'x' has 2 dimensions"),
    ],
)
def test_a_wrong_size_is_named(
    bundle: Path, x: tuple[int, ...], y: tuple[int, ...], problem: str
) -> None:
    """Before the library is called; it serves the next call."""
    module = tvmflow.load(bundle)
    given = {"x": np.zeros(x, np.float32), "y": np.zeros(y, np.float32)}
    for call in (module.run, module.latency, module.profile):
        with pytest.raises(BundleError, match=problem) as raised:
            call(given)
        assert "seq is 2 to 96, multiples of 2" in raised.value.fix
    assert same(module.run(feed(1, 16)), module_outputs(bundle, 1, 16))


def test_other_mistakes_are_named_as_for_fixed_sizes(bundle: Path) -> None:
    module = tvmflow.load(bundle)
    with pytest.raises(BundleError, match="input 'y' is missing"):
        module.run({"x": feed(1, 16)["x"]})
    with pytest.raises(BundleError, match="dtype float64"):
        module.run({**feed(1, 16), "x": np.zeros((1, 16, 24))})


def test_arrays_that_are_not_dense_or_aligned_are_read(bundle: Path) -> None:
    module = tvmflow.load(bundle)
    given = feed(2, 16)
    turned = {"x": np.asfortranarray(given["x"]), "y": given["y"][::-1][::-1]}
    assert same(module.run(turned), module.run(given))
    shifted = np.empty(given["x"].nbytes + 68, np.uint8)[4:-64].view(np.float32).reshape(2, 16, 24)
    shifted[...] = given["x"]
    assert same(module.run({**given, "x": shifted}), module.run(given))
    assert module.latency({**given, "x": shifted}, repeat=1, min_seconds=0.001)
    assert sum(entry.calls for entry in module.profile(given, repeat=1)) > 3


def test_calls_of_several_threads_have_sizes_of_their_own(dynamic_bundles: DynamicBundles) -> None:
    module = tvmflow.load(dynamic_bundles.c, threads=1)
    expected = {sizes: module.run(feed(*sizes)) for sizes in ORDER}
    failures = []

    def work(offset: int) -> None:
        for i in range(20):
            sizes = ORDER[(i + offset) % len(ORDER)]
            if not same(module.run(feed(*sizes)), expected[sizes]):
                failures.append(sizes)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_of_results_is_used_again_for_smaller_ones() -> None:
    """While somebody has a result, its memory is not touched."""
    arrays = OutputArrays()
    large, small = (arrays.maker(TensorSpec("y", (size, 4096), "float32")) for size in (64, 8))
    first = large()
    address, first = first.ctypes.data, np.empty(0)
    second = small()
    assert second.shape == (8, 4096) and second.ctypes.data == address
    third = small()
    assert third.ctypes.data != address
    assert first.size == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda signature: signature["dimensions"][1].update(max=128),
        lambda signature: signature["inputs"][0]["sizes"].__setitem__(1, 96),
        lambda signature: signature.pop("dimensions"),
    ],
)
def test_dimensions_are_those_of_the_library(
    dynamic_bundles: DynamicBundles, tmp_path: Path, change: Any
) -> None:
    """It is trusted with the sizes of arrays."""
    path = _change(dynamic_bundles.c, tmp_path, change)
    with pytest.raises(BundleError, match=r"signature"):
        tvmflow.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda signature: signature["dimensions"][1].update(max=2**40),
        lambda signature: signature["dimensions"][1].update(min=-1),
        lambda signature: signature["dimensions"][1].update(name="batch"),
        lambda signature: signature["dimensions"][1].update(other=1),
        lambda signature: signature["dimensions"].extend([signature["dimensions"][0]] * 70),
        lambda signature: signature["outputs"][0]["sizes"].__setitem__(1, "seq ** 9"),
        lambda signature: signature["outputs"][0]["sizes"].__setitem__(1, "unknown"),
        lambda signature: signature["outputs"][0]["sizes"].__setitem__(1, "8 // (seq - 2)"),
        lambda signature: signature["inputs"][0]["sizes"].__setitem__(1, "seq - 999"),
        lambda signature: signature["inputs"][0]["sizes"].pop(),
        lambda signature: signature["inputs"][0]["sizes"].__setitem__(1, None),
    ],
)
def test_hostile_dimensions_are_refused(bundle: Path, tmp_path: Path, change: Any) -> None:
    """Before the library is loaded."""
    with pytest.raises(BundleError, match=r"its manifest or signature is damaged"):
        tvmflow.load(_change(bundle, tmp_path, change))


def test_the_limit_is_about_the_largest_tensors(bundle: Path, tmp_path: Path) -> None:
    def change(signature: Any) -> None:
        signature["dimensions"][1]["max"] = 2**30

    with pytest.raises(BundleError, match=r"the inputs and outputs .* more than the limit"):
        tvmflow.load(_change(bundle, tmp_path, change))


def _change(source: Path, folder: Path, change: Any) -> Path:
    """Return the bundle with another signature."""
    entries = read_entries(source.read_bytes())
    signature = json.loads(entries["signature.json"])
    change(signature)
    entries["signature.json"] = json.dumps(signature).encode()
    path = folder / "other.tvmflow"
    path.write_bytes(write_entries(described(entries)))
    return path
