"""What tests of several modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import make_bundle


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that adds 1 to `x` and doubles it: float32 (2, 3) to `plus_one` and `twice`."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small.tvmflow")


@pytest.fixture(scope="session")
def vm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for TVM's virtual machine."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small.tvmflow", runtime="vm")


@pytest.fixture(params=["small_bundle", "vm_bundle"], ids=["c", "vm"])
def any_bundle(request: pytest.FixtureRequest) -> Path:
    """The same model with each runtime."""
    bundle: Path = request.getfixturevalue(request.param)
    return bundle


@pytest.fixture(scope="session")
def file_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with outputs of the names `file` and `twice`."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "file.tvmflow", ("file", "twice"))
