"""Bundles that are damaged or meant to do harm: one kind of error, and no code of theirs runs."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.unit.runtime.damage import damages, described, read_entries, write_entries
from tvmflow.core.errors import BundleError
from tvmflow.exporters.bundle import write_partitioned
from tvmflow.runtime import bundles, loading


def failures(bundle: bytes, folder: Path, count: int, seed: int) -> Iterator[str]:
    """Name the changes after which loading raises something else, or gives another model."""
    path = folder / "net.tvmflow"
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for name, content in damages(bundle, count, seed):
        path.write_bytes(content)
        try:
            module = tvmflow.load(path)
        except BundleError as error:
            if str(path) not in error.message or not error.fix:
                yield f"{name}: {error}"
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"
        else:
            # the change is one that no reader sees, such as that of a time in the zip
            same = [(spec.name, spec.shape) for spec in module.inputs] == [("x", (2, 3))]
            if not same and "describe" not in name:
                yield f"{name}: loaded as {module}"
            elif same:
                np.testing.assert_array_equal(next(iter(module.run({"x": x}).values())), x + 1)


def test_a_damaged_bundle_is_an_error_with_its_path(small_bundle: Path, tmp_path: Path) -> None:
    """Whatever is changed, the error is BundleError, with the path and what to do."""
    assert [*failures(small_bundle.read_bytes(), tmp_path, 84, seed=1)] == []


@pytest.mark.slow
def test_many_damaged_bundles(small_bundle: Path, tmp_path: Path) -> None:
    assert [*failures(small_bundle.read_bytes(), tmp_path, 600, seed=2)] == []


def partitioned(bundle: Path, path: Path) -> Path:
    """A bundle whose parts are twice the same."""
    with zipfile.ZipFile(bundle) as archive:
        signature = json.loads(archive.read("signature.json"))
    manifest = {"name": "two", "tvm": "0", "target": {"name": "x"}}
    write_partitioned(manifest, signature, {"a": bundle, "b": bundle}, path)
    return path


def test_a_damaged_part_is_an_error_before_any_part_is_loaded(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part is for another CPU: the code of the first is not loaded."""
    loaded: list[Path] = []
    monkeypatch.setattr(loading, "NativeProgram", lambda library, *_: loaded.append(library))
    entries = read_entries(small_bundle.read_bytes())
    manifest = json.loads(entries["manifest.json"])
    manifest["target"]["features"] = ["quantum"]
    other = tmp_path / "other.tvmflow"
    other.write_bytes(write_entries({**entries, "manifest.json": json.dumps(manifest).encode()}))
    path = tmp_path / "two.tvmflow"
    signature = json.loads(entries["signature.json"])
    write_partitioned({"name": "two"}, signature, {"a": small_bundle, "b": other}, path)
    with pytest.raises(BundleError, match=r"two\.tvmflow, part 'b', uses CPU instructions"):
        tvmflow.load(path)
    assert loaded == []


def test_damaged_bundles_of_parts(small_bundle: Path, tmp_path: Path) -> None:
    path = partitioned(small_bundle, tmp_path / "two.tvmflow")
    content = path.read_bytes()
    for name, damaged in damages(content, 63, seed=3):
        path.write_bytes(damaged)
        try:
            bundles.read_bundle(path)
        except BundleError as error:
            assert str(path) in error.message and error.fix, name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: os.mkfifo(path), "is not a file"),
        (lambda path: path.symlink_to(path.with_name("gone")), "there is no file"),
        (lambda path: path.write_bytes(gzip.compress(b"x")), "it is a compressed archive; unpack"),
        (
            lambda path: path.write_bytes(write_entries({"net-1.dist-info/WHEEL": b""})),
            "it is a wheel; install it with pip",
        ),
    ],
)
def test_something_else_than_a_bundle_is_named(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    """A folder, a pipe without a writer, a broken link, an archive, a wheel."""
    path = tmp_path / "net.tvmflow"
    make(path)
    with pytest.raises(BundleError, match=words):
        tvmflow.load(path)


def test_a_name_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        tvmflow.load(f"{tmp_path}/a\0b")
    with pytest.raises(BundleError, match="cannot be read"):
        tvmflow.load(tmp_path / ("x" * 5000))


def test_the_caller_limits_what_is_read(small_bundle: Path, tmp_path: Path) -> None:
    """By the size of the file, which nothing in it exceeds, and by that of the tensors."""
    size = small_bundle.stat().st_size
    with pytest.raises(BundleError, match=f"has {size} bytes, more than the limit of {size - 1}"):
        tvmflow.load(small_bundle, max_bytes=size - 1)
    assert tvmflow.load(small_bundle, max_bytes=size).inputs[0].shape == (2, 3)
    entries = read_entries(small_bundle.read_bytes())
    tensor = {"name": "x", "shape": [1 << 40], "dtype": "float32"}
    entries["signature.json"] = json.dumps({"inputs": [tensor], "outputs": []}).encode()
    path = tmp_path / "large.tvmflow"
    path.write_bytes(write_entries(described(entries)))
    with pytest.raises(BundleError, match=f"inputs and outputs of .* have {4 << 40} bytes"):
        tvmflow.load(path)


def test_a_compressed_library_is_not_unpacked(small_bundle: Path, tmp_path: Path) -> None:
    """Many zeros in a small file, as described: it is refused by its header."""
    entries = read_entries(small_bundle.read_bytes())
    manifest = json.loads(entries["manifest.json"])
    zeros = 128 << 20
    manifest["files"]["library.so"] = {"bytes": zeros, "sha256": "0" * 64}
    path = tmp_path / "bomb.tvmflow"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("signature.json", entries["signature.json"])
        with archive.open("library.so", "w") as stream:
            for _ in range(zeros >> 24):
                stream.write(bytes(1 << 24))
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match=r"'manifest\.json' is compressed, as no bundle's is"):
            tvmflow.load(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
