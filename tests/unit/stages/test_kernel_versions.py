"""Kernels that come out differently must carry another version, or stores would give old ones for new."""

from __future__ import annotations

import json

import pytest

from tests.support import golden


@pytest.fixture(scope="module")
def now() -> dict[str, object]:
    return golden.found()


@pytest.mark.parametrize("part", ["lowering", "schedules"])
def test_kernels_are_those_that_the_version_stands_for(part: str, now: dict[str, object]) -> None:
    """The same kernels and schedules for the same models, on every machine, until somebody raises the version."""
    recorded = json.loads(golden.FILE.read_text())
    if recorded["tvm"] != now["tvm"]:
        pytest.skip(f"the digests are of TVM {recorded['tvm']}")
    assert now[part] == recorded[part], (
        f"{part} changed: raise its version in tvmflow/stages/_kernels.py "
        "and run `python -m tests.support.golden`"
    )
