"""What tests of several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.bundles import make_bundle
from tests.support.shared import shared_folder

if TYPE_CHECKING:
    from tests.support.cache_server import Cache
    from tests.support.dynamic_programs import DynamicBundles


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cache() -> Iterator[Cache]:
    """An empty remote cache on this machine."""
    from tests.support.cache_server import cache_server

    with cache_server() as server:
        yield server


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that adds 1 to `x` and doubles it: float32 (2, 3) to `plus_one` and `twice`."""
    return _shared_bundle(tmp_path_factory, "small")


@pytest.fixture(scope="session")
def vm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for TVM's virtual machine."""
    return _shared_bundle(tmp_path_factory, "small-vm", runtime="vm")


@pytest.fixture(params=["small_bundle", "vm_bundle"], ids=["c", "vm"])
def any_bundle(request: pytest.FixtureRequest) -> Path:
    """The same model with each runtime."""
    bundle: Path = request.getfixturevalue(request.param)
    return bundle


@pytest.fixture(scope="session")
def file_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with outputs of the names `file` and `twice`."""
    return _shared_bundle(tmp_path_factory, "file", outputs=("file", "twice"))


def _shared_bundle(factory: pytest.TempPathFactory, name: str, **options: Any) -> Path:
    folder = shared_folder(
        factory, f"bundle-{name}", lambda folder: make_bundle(folder / "small.tvmflow", **options)
    )
    return folder / "small.tvmflow"


@pytest.fixture(scope="session")
def dynamic_bundles(tmp_path_factory: pytest.TempPathFactory) -> DynamicBundles:
    """Random networks with dynamic shapes, compiled once."""
    from tests.support import dynamic_programs

    folder = shared_folder(tmp_path_factory, "open-bundles", dynamic_programs.make_bundles)
    return dynamic_programs.DynamicBundles(folder)


@pytest.fixture
def one_fork_server() -> Iterator[None]:
    """Load TVM once for all commands that tests call in this process."""
    from tests.support.project import shared_fork_server

    with shared_fork_server():
        yield
