"""Other kernels must have another version: otherwise stores would return old kernels for new ones."""

from __future__ import annotations

import json

import pytest

from tests.support import golden


@pytest.fixture(scope="module")
def digests() -> dict[str, object]:
    """Return the versions and the digests of the kernels."""
    return golden.digest_kernels()


@pytest.mark.parametrize("part", ["lowering", "schedules"])
def test_kernels_are_those_of_the_version(part: str, digests: dict[str, object]) -> None:
    """The same models give the same kernels and schedules on every machine, until the version is raised."""
    recorded = json.loads(golden.FILE.read_text())
    if recorded["tvm"] != digests["tvm"]:
        pytest.skip(f"the digests are of TVM {recorded['tvm']}")
    assert digests[part] == recorded[part], (
        f"{part} changed: raise its version in tvmflow/compiler/options.py "
        "and run `python -m tests.support.golden`"
    )
