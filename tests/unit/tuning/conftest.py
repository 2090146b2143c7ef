"""What tests of several modules of tuning share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tvmflow.core.fork_server import ForkServer

PRELOADED: Final = (
    "tests.support.tuning",
    "tvm.s_tir.meta_schedule",
    "tvmflow.compiler.c_program",
    "tvmflow.tuning.measurer",
    "tvmflow.tuning.rpc_device",
)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A process that has imported TVM and what tunes, once for all modules."""
    with ForkServer.start(PRELOADED) as server:
        yield server
