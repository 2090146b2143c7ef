"""What installed packages say of themselves: licenses and wheels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvmflow.core import packages
from tvmflow.core.types import Json
from tvmflow.provenance.statement import Tool, find_license, wheel_digest


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The metadata folder of an installed package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site/some_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    folder = tmp_path / "site/some_pkg-1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text("\nsome_pkg/__init__.py,,0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    packages.forget()
    yield folder
    packages.forget()


def installed() -> Tool:
    version, _, record = packages.identity("some-pkg").partition("+")
    return Tool("some-pkg", version, record)


def expression(text: str) -> dict[str, Json]:
    return {"licenses": [{"expression": text}]}


def name(text: str) -> dict[str, Json]:
    return {"licenses": [{"license": {"name": text}}]}


BSD = "Classifier: License :: OSI Approved :: BSD License"


@pytest.mark.parametrize(
    ("metadata", "licenses"),
    [
        ("License-Expression: MIT OR Apache-2.0", expression("MIT OR Apache-2.0")),
        ("License: Apache 2.0", expression("Apache-2.0")),
        ("License: bsd-3-clause", expression("BSD-3-Clause")),
        ("Classifier: License :: OSI Approved :: MIT License", expression("MIT")),
        ("License: Ours\nClassifier: License :: OSI Approved :: MIT License", expression("MIT")),
        (BSD, name("BSD License")),
        (f"License: Copyright\n of many\n lines\n{BSD}", name("BSD License")),
        ("Summary: nothing of a license", {}),
    ],
)
def test_a_license_is_an_spdx_expression_where_its_meaning_is_certain(
    metadata: str, licenses: dict[str, Json], info: Path
) -> None:
    """Classifiers such as `BSD License` mean several: their name stays."""
    (info / "METADATA").write_text(f"Name: some-pkg\n{metadata}\n\nThe text.\n")
    assert find_license(installed()) == licenses


def test_nothing_is_said_of_another_build_than_the_installed_one(info: Path) -> None:
    """Or of a package that is not installed, or has no metadata."""
    (info / "METADATA").write_text("License-Expression: MIT\n")
    note = {"archive_info": {"hashes": {"sha256": "0" * 64}}}
    (info / "direct_url.json").write_text(json.dumps(note))
    assert find_license(installed()) and wheel_digest(installed())
    for other in (installed()._replace(record="0" * 12), Tool("no-such-package", "1", "0" * 12)):
        assert find_license(other) == {}
        assert wheel_digest(other) == ""
    (info / "METADATA").unlink()
    assert find_license(installed()) == {}


def test_the_digest_of_a_wheel_is_what_pip_noted(info: Path) -> None:
    """Which it does for a file or a URL, and not for a package index."""
    assert wheel_digest(installed()) == ""
    (info / "direct_url.json").write_text("no JSON")
    assert wheel_digest(installed()) == ""
    note = {"url": "file:///w.whl", "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    (info / "direct_url.json").write_text(json.dumps(note))
    assert wheel_digest(installed()) == "ab" * 32


def test_a_package_url_is_that_of_the_index_or_generic() -> None:
    """A source folder is not a release; the version of a purl is percent-encoded."""
    assert Tool("apache-tvm", "0.27.0+cu13", "0").purl == "pkg:pypi/apache-tvm@0.27.0%2Bcu13"
    assert Tool("onnx", packages.UNVERSIONED, "0").purl == "pkg:generic/onnx@unversioned"
