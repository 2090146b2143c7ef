"""The identity of a package: its version and the content of what would be imported."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.support.file_edits import write_with_old_times
from tvmflow.core import packages
from tvmflow.core.errors import EXIT_ENVIRONMENT, EnvironmentProblem

FILES = {
    "some_pkg/__init__.py": b"one = 1\n",
    "some_pkg/inner/__init__.py": b"two = 2\n",
    "some_pkg/lib/libsome.so": b"\x7fELF",
    "some_pkg/data.txt": b"text\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that comes first on the import path, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TVM_LIBRARY_PATH", raising=False)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    packages.forget()
    yield site
    packages.forget()


def write_files(site: Path, module: str = "some_pkg") -> None:
    for name, content in FILES.items():
        path = site / name.replace("some_pkg", module, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def install(site: Path, name: str = "some_pkg-1.0", module: str = "some_pkg") -> Path:
    """Install the package as pip does: RECORD is written last. Return its RECORD."""
    write_files(site, module)
    info = site / f"{name}.dist-info"
    info.mkdir()
    lines = [f"{name}.dist-info/RECORD,,", f"{module}/__pycache__/__init__.cpython-311.pyc,,"]
    for file, content in FILES.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{file.replace('some_pkg', module, 1)},sha256={digest},{len(content)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return info / "RECORD"


def identity(name: str = "some-pkg") -> str:
    """Return the identity as a new process would."""
    packages.forget()
    return packages.identity(name)


def refusal(name: str = "some-pkg") -> EnvironmentProblem:
    packages.forget()
    with pytest.raises(EnvironmentProblem) as caught:
        packages.identity(name)
    assert caught.value.exit_code == EXIT_ENVIRONMENT and caught.value.fix
    return caught.value


def test_the_identity_is_the_version_and_the_content(folder: Path) -> None:
    """Both are needed: a rebuilt wheel can have the same version."""
    install(folder)
    version, _, digest = identity().partition("+")
    assert version == "1.0" and len(digest) == 12
    (folder / "some_pkg-1.0.dist-info").rename(folder / "some_pkg-1.1.dist-info")
    assert identity() == f"1.1+{digest}"


def add_package(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "an edited module": lambda site: (site / "some_pkg/__init__.py").write_text("one = 3\n"),
    "a module of another size": lambda site: (site / "some_pkg/__init__.py").write_text("one=1\n"),
    "an edited library": lambda site: (site / "some_pkg/lib/libsome.so").write_bytes(b"\x7fexe"),
    "edited data": lambda site: (site / "some_pkg/data.txt").write_text("TEXT\n"),
    "a removed module": lambda site: (site / "some_pkg/inner/__init__.py").unlink(),
    "a new module": lambda site: (site / "some_pkg/new.py").write_text(""),
    "a new package": lambda site: add_package(site / "some_pkg/new"),
}


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_changes_the_identity(change: str, has_record: bool, folder: Path) -> None:
    """Of an installed package, and of a folder without metadata."""
    (install if has_record else write_files)(folder)
    before = identity()
    # The clock of the file system may be coarser than these few lines are long.
    time.sleep(0.02)
    CHANGES[change](folder)
    assert identity() != before


def test_an_edit_that_keeps_size_and_time_changes_the_identity(folder: Path) -> None:
    """As `cp -p` or rsync make it: the change time tells."""
    install(folder)
    path = folder / "some_pkg/__init__.py"
    before = identity()
    write_with_old_times(path, b"one = 9\n")
    assert identity() != before


def test_what_python_leaves_in_a_package_does_not_change_the_identity(folder: Path) -> None:
    """Bytecode and caches come and go; a file that was only touched has the same content."""
    install(folder)
    before = identity()
    time.sleep(0.02)
    (folder / "some_pkg/__pycache__").mkdir()
    (folder / "some_pkg/__pycache__/__init__.cpython-311.pyc").touch()
    (folder / "some_pkg/__init__.pyc").touch()
    (folder / "some_pkg/.mypy_cache").mkdir()
    (folder / "some_pkg/__init__.py").touch()
    assert identity() == before


def test_the_same_content_has_the_same_identity_anywhere(folder: Path, tmp_path: Path) -> None:
    """In another folder, installed at another time: keys hold on other machines."""
    install(folder)
    before = identity()
    folder.rename(tmp_path / "elsewhere")
    install(folder)
    assert identity() == before
    (folder / "some_pkg-1.0.dist-info/RECORD").touch()
    os.utime(folder / "some_pkg-1.0.dist-info/RECORD", ns=(0, 0))
    assert identity() == before


def test_a_package_without_metadata_is_identified_by_its_files(folder: Path) -> None:
    """A copy in a folder on PYTHONPATH, and what its source says of its version."""
    write_files(folder)
    assert identity().startswith("unversioned+")
    (folder / "some_pkg/_version.py").write_text('version = "2.0.dev1"\n')
    assert identity().startswith("2.0.dev1+")


def test_an_editable_installation_has_its_version_and_its_source(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its RECORD lists no source, and its source may change at any time."""
    source = tmp_path / "source folder"
    write_files(source)
    monkeypatch.syspath_prepend(str(source))
    info = folder / "some_pkg-1.2.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("_some_pkg.pth,sha256=a,1\n")
    url = source.as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    before = identity()
    assert before.startswith("1.2+")
    (source / "some_pkg/__init__.py").write_text("one = 3\n")
    assert identity() != before


def test_the_first_folder_on_the_path_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build in front of the installed one is another package, with no metadata of the installed one."""
    install(folder)
    installed = identity()
    write_files(tmp_path / "other")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert identity() != installed
    assert packages.find_package("some-pkg").folder == str(tmp_path / "other")


def test_a_distribution_of_another_name_may_own_the_module(folder: Path) -> None:
    """Such as a build for GPUs; its version is the one that counts."""
    install(folder, "pkg_gpu-3.0")
    assert identity().startswith("3.0+")
    assert packages.find_package("some-pkg").distribution == "pkg-gpu"


def test_two_distributions_of_one_module_are_reported(folder: Path) -> None:
    """Their files overwrite each other; those that only one of them lists count too."""
    install(folder)
    before = identity()
    record = install(folder, "some_pkg_gpu-1.0")
    extra = folder / "some_pkg/lib/extra.so"
    extra.touch()
    os.utime(folder / "some_pkg/lib", ns=(0, 0))
    record.write_text(f"{record.read_text()}some_pkg/lib/extra.so,,\n")
    assert identity() != before
    assert packages.find_package("some-pkg").rivals == ("some-pkg-gpu",)


def test_a_package_that_is_not_installed_is_an_error(folder: Path) -> None:
    """With what to install; so is a folder that only has its name."""
    assert refusal().message == "some-pkg is not installed"
    assert refusal().fix == "pip install 'some-pkg'"
    (folder / "some_pkg").mkdir()
    assert "is only a folder of the same name" in refusal().message
    assert refusal("nvidia-cuda-none").fix == "pip install 'tvmflow[cuda]'"


def test_a_file_in_place_of_a_package_is_an_error(folder: Path) -> None:
    """It lies in a folder that comes before the installed package."""
    (folder / "some_pkg.py").touch()
    problem = refusal()
    assert problem.message == (
        f"{folder}/some_pkg.py would be imported in place of the package some-pkg"
    )
    assert problem.fix == "rename that file, or take its folder out of PYTHONPATH"


def test_an_archive_on_the_path_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native libraries cannot be loaded from it."""
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
        archive.writestr("some_pkg/__init__.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "packages.zip"))
    assert "would be imported from an archive" in refusal().message


def test_a_file_that_cannot_be_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown identity is never taken for a known one."""
    write_files(folder)
    (folder / "some_pkg/loop.py").symlink_to("loop.py")
    assert "cannot be identified" in refusal().message


def test_libraries_that_tvm_loads_from_elsewhere_are_part_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of one's own is named with TVM_LIBRARY_PATH, or lies beside the source."""
    write_files(folder / "python", "tvm")
    monkeypatch.setattr(packages, "find_spec", lambda _: spec_of(folder / "python/tvm"))
    before = identity("apache-tvm")
    libraries = tmp_path / "build"
    libraries.mkdir()
    (libraries / "libtvm_runtime.so").write_bytes(b"1")
    (libraries / "libother.so").write_bytes(b"1")
    monkeypatch.setenv("TVM_LIBRARY_PATH", str(libraries))
    named = identity("apache-tvm")
    assert named != before
    (libraries / "libother.so").write_bytes(b"2")
    assert identity("apache-tvm") == named
    (libraries / "libtvm_runtime.so").write_bytes(b"2")
    assert identity("apache-tvm") != named
    assert str(libraries) in packages.files_to_watch("apache-tvm")


def spec_of(module: Path) -> ModuleSpec:
    spec = ModuleSpec(module.name, None, origin=str(module / "__init__.py"), is_package=True)
    spec.submodule_search_locations = [str(module)]
    return spec


def test_digests_are_remembered_while_a_file_stays_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TVM's libraries have hundreds of megabytes: they are read once."""
    write_files(folder)
    monkeypatch.setattr("tvmflow.core.packages.RACY_NS", 0)
    before = identity()
    [path] = (tmp_path / "cache/tvmflow/packages").iterdir()
    remembered = json.loads(path.read_text())
    assert remembered.keys() == FILES.keys()
    forged = {name: [stamp, "sha256=forged"] for name, (stamp, _) in remembered.items()}
    path.write_text(json.dumps(forged))
    assert identity() != before
    path.write_text("damaged")
    assert identity() == before


def test_where_nothing_can_be_remembered_files_are_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be read-only, or missing."""
    write_files(folder)
    before = identity()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert identity() == before


def test_an_identity_is_determined_once_in_a_process(folder: Path) -> None:
    """A process imports a package once, too; one that lives long asks anew."""
    install(folder)
    before = identity()
    time.sleep(0.02)
    (folder / "some_pkg/__init__.py").write_text("one = 3\n")
    assert packages.identity("some-pkg") == before
    packages.forget()
    assert packages.identity("some-pkg") != before
    assert packages.identify_installed(["some-pkg", "nothing"]).keys() == {"some-pkg"}
