"""The identity of a package: its code, not its version alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow import tools

RECORD = "pkg/__init__.py,sha256=aa,10\npkg/lib.so,sha256=bb,20\npkg-1.0.dist-info/RECORD,,\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with one package."""
    folder = tmp_path / "some_pkg-1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text(RECORD)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    return folder


def test_it_has_version_and_digest(site: Path) -> None:
    """Under the name in any of its spellings."""
    assert tools.identity("some-pkg").startswith("1.0+")
    assert len(tools.identity("some-pkg")) == len("1.0+") + 12


def test_another_build_of_one_version_is_another_tool(site: Path) -> None:
    """A wheel that was rebuilt has other digests in its RECORD."""
    before = tools.identity("some-pkg")
    (site / "RECORD").write_text(RECORD.replace("=bb", "=cc"))
    assert tools.identity("some-pkg") != before


def test_what_is_no_code_does_not_count(site: Path) -> None:
    """How and where it was installed, compiled files, scripts, and the order of lines."""
    before = tools.identity("some-pkg")
    lines = RECORD.splitlines(keepends=True)
    extra = [
        "pkg-1.0.dist-info/INSTALLER,sha256=zz,4\n",
        "pkg/__pycache__/__init__.cpython-311.pyc,,\n",
        "../../../bin/pkg,sha256=dd,200\n",
    ]
    (site / "RECORD").write_text("".join([*reversed(lines), *extra]))
    assert tools.identity("some-pkg") == before


def test_a_package_that_is_not_there_is_absent(site: Path) -> None:
    """An optional one may be."""
    assert tools.identity("nothing") == "absent"
    with pytest.raises(tools.NotInstalled):
        tools.record_file("nothing")
