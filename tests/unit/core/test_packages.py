"""The identity of a package: its version and its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.core import packages

RECORD = "pkg/__init__.py,sha256=aa,10\npkg/lib.so,sha256=bb,20\npkg-1.0.dist-info/RECORD,,\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder with one package."""
    folder = tmp_path / "some_pkg-1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text(RECORD)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    return folder


def test_an_identity_has_version_and_digest(site: Path) -> None:
    """Names are normalized: `some_pkg` is `some-pkg`."""
    assert packages.identity("some-pkg").startswith("1.0+")
    assert len(packages.identity("some-pkg")) == len("1.0+") + 12


def test_another_build_of_a_version_has_another_identity(site: Path) -> None:
    """A rebuilt wheel has other digests in its RECORD."""
    before = packages.identity("some-pkg")
    (site / "RECORD").write_text(RECORD.replace("=bb", "=cc"))
    assert packages.identity("some-pkg") != before


def test_files_that_are_not_code_do_not_matter(site: Path) -> None:
    """The installer, compiled files, scripts, and the order of lines."""
    before = packages.identity("some-pkg")
    lines = RECORD.splitlines(keepends=True)
    extra = [
        "pkg-1.0.dist-info/INSTALLER,sha256=zz,4\n",
        "pkg/__pycache__/__init__.cpython-311.pyc,,\n",
        "../../../bin/pkg,sha256=dd,200\n",
    ]
    (site / "RECORD").write_text("".join([*reversed(lines), *extra]))
    assert packages.identity("some-pkg") == before


def test_a_package_that_is_not_installed_is_absent(site: Path) -> None:
    """An optional tool may be."""
    assert packages.identity("nothing") == "absent"
    with pytest.raises(packages.NotInstalled):
        packages.record_file("nothing")
