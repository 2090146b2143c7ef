"""What every test gets: the checkout on the path of the processes that tests start, and one model in every form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.exports import Exported

ROOT = Path(__file__).resolve().parent.parent


# Workers import the tests' own support modules, wherever pytest was started.
os.environ["PYTHONPATH"] = str(ROOT)
# Nobody's own keys sign what tests make, or judge it.
for name in ("TVMFLOW_SIGNING_KEY", "TVMFLOW_TRUSTED_KEYS"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The digits in every form, made once for all tests that load them."""
    from tests.support import exports

    return exports.make(tmp_path_factory.mktemp("exports") / "digits")


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process gets that is to find the stand-in GPU, an sm_90."""
    from tests.support import gpu

    folder = tmp_path_factory.mktemp("gpu")
    gpu.make_driver(folder)
    return dict(gpu.environment(folder))
