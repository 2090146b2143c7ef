"""What every exporter in the registry promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.exporters import EXPORTERS
from tvmflow.exporters._base import Built

each_exporter = pytest.mark.parametrize("name", EXPORTERS)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + bytes(range(256)))
    return Built("net", library, {"inputs": [], "outputs": []}, {"bundle": 1, "b": 2, "a": 1})


@each_exporter
def test_the_same_library_gives_the_same_bytes(name: str, built: Built, tmp_path: Path) -> None:
    """Whenever it is written, from wherever, and in whatever order its description is."""
    one, two = tmp_path / "one", tmp_path / "two"
    EXPORTERS[name].export(built, one)
    elsewhere = tmp_path / "elsewhere.so"
    elsewhere.write_bytes(built.library.read_bytes())
    turned = dict(reversed(list(built.manifest.items())))
    EXPORTERS[name].export(built._replace(library=elsewhere, manifest=turned), two)
    assert one.read_bytes() == two.read_bytes()
    assert built.library.read_bytes() in one.read_bytes()


def test_no_two_write_the_same_file() -> None:
    """Their suffixes tell them apart in one folder."""
    suffixes = [exporter.SUFFIX for exporter in EXPORTERS.values()]
    assert len(set(suffixes)) == len(suffixes)
    assert all(suffix.startswith(".") for suffix in suffixes)
