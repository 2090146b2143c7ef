"""The forms for linkers and compilers, each made into a library again that gives the same scores."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import exports
from tests.support.exports import Array, Exported, scores_of
from tvmflow.core.errors import StageError
from tvmflow.exporters import EXPORTERS
from tvmflow.stages import export
from tvmflow.targets.linking import archive_static


@pytest.fixture(scope="module")
def expected_scores(exported: Exported) -> Array:
    """The scores of every form, to the last bit unless another compiler compiled it."""
    scores = exports.reference(exported)
    assert exports.accuracy(scores) >= 0.95
    return scores


def whole(output: Path, *libraries: Path) -> Path:
    """Link static libraries completely into a shared library; undefined symbols are resolved when it is loaded."""
    command = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", "-o", str(output)]
    subprocess.run([*command, "--whole-archive", *map(str, libraries)], check=True)
    return output


@pytest.mark.parametrize(
    ("triple", "others"),
    [
        ("wasm32-wasi", {"web"}),
        ("arm64-apple-ios13.0", {"xcframework"}),
        ("thumbv7em-none-eabihf", set()),
    ],
)
def test_what_is_not_loaded_is_linked(triple: str, others: set[str]) -> None:
    """Where no program loads libraries there are those for linkers and compilers, and nothing for TVM's runtime."""
    request = export.make_request(exports.recipe(), exports.target(triple))
    reasons = {name: exporter.unsupported_reason(request) for name, exporter in EXPORTERS.items()}
    assert {name for name, reason in reasons.items() if not reason} == {
        "archive",
        "c-library",
        "c-library-weights",
        "c-source",
        *others,
    }
    assert reasons["bundle"] == f"programs cannot load libraries on {triple}: use c-library"


def test_the_shared_library_is_one_of_tvms(exported: Exported, expected_scores: Array) -> None:
    """TVM loads it without tvmflow."""
    import tvm

    library = tvm.runtime.load_module(str(exported.dist / "digits.so"))
    np.testing.assert_array_equal(scores_of(library), expected_scores)


@pytest.mark.slow
def test_tvm_links_the_objects_where_it_loads_them(
    exported: Exported, expected_scores: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler on the path, the tar is as good as a library."""
    import tvm

    tar = tmp_path / "digits.tar"
    tar.write_bytes((exported.dist / "digits.tar").read_bytes())
    monkeypatch.setenv("PATH", exports.compiler(tmp_path / "bin", "c++", "g++")["PATH"])
    monkeypatch.setenv("CXX", "g++")
    library = tvm.runtime.load_module(str(tar))
    np.testing.assert_array_equal(scores_of(library), expected_scores)


def test_the_static_library_becomes_part_of_another(
    exported: Exported, expected_scores: Array, tmp_path: Path
) -> None:
    """Linked whole, it is the shared library again."""
    import tvm

    library = whole(tmp_path / "mine.so", exported.dist / "libdigits.a")
    np.testing.assert_array_equal(scores_of(tvm.runtime.load_module(str(library))), expected_scores)


def test_two_models_live_in_one_program(
    exported: Exported, expected_scores: Array, tmp_path: Path
) -> None:
    """Each is found by its prefix, and each gives its own scores."""
    import tvm

    other = exports.make(tmp_path / "other-2", "other-2", "system-library", "bundle", bias=3.0)
    libraries = (exported.dist / "libdigits-system.a", other.dist / "libother-2-system.a")
    # in a program the libraries are present from its start
    ctypes.CDLL(str(whole(tmp_path / "both.so", *libraries)), ctypes.RTLD_GLOBAL)
    other_scores = exports.reference(other)
    assert not np.array_equal(other_scores, expected_scores)
    assert '#define OTHER_2_PREFIX "other_2_"' in (other.dist / "other-2-system.h").read_text()
    np.testing.assert_array_equal(scores_of(tvm.runtime.system_lib("digits_")), expected_scores)
    np.testing.assert_array_equal(scores_of(tvm.runtime.system_lib("other_2_")), other_scores)


def test_the_c_files_compile_as_their_readme_says(
    exported: Exported, expected_scores: Array, tmp_path: Path
) -> None:
    """The command in it, with the compiler that is called cc."""
    import tvm

    with tarfile.open(exported.dist / "digits-c.tar.gz") as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            (tmp_path / Path(member.name).name).write_bytes(content.read())
    readme = (tmp_path / "README.md").read_text()
    command = readme.partition("```sh\n")[2].partition("```")[0]
    environment = exports.compiler(tmp_path / "bin", "cc")
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environment, check=True)
    library = tvm.runtime.load_module(str(tmp_path / "digits.so"))
    np.testing.assert_allclose(scores_of(library), expected_scores, rtol=1e-4, atol=1e-6)


def test_an_error_of_the_archiver_is_reported(tmp_path: Path) -> None:
    """The message for a missing file holds the archiver's error."""
    with pytest.raises(StageError, match=r"archiving a static library failed: .*gone\.o"):
        archive_static([tmp_path / "gone.o"], tmp_path / "x.a", "x86_64-linux-gnu")


@pytest.mark.parametrize(
    "triple", ["x86_64-linux-gnu", "arm64-apple-macos13", "x86_64-pc-windows-msvc"]
)
def test_static_libraries_are_the_same_whatever_the_order(
    exported: Exported, tmp_path: Path, triple: str
) -> None:
    """For every system's layout: no time, no owner, one order."""
    objects = sorted((exported.folder / "build").glob("*.o"))
    archive_static(objects, tmp_path / "a", triple)
    archive_static(objects[::-1], tmp_path / "b", triple)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().startswith(b"!<arch>\n")
