"""`tvmflow doctor`: each piece of the installation is tried, and a broken one is shown with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.cli import doctor, main
from tvmflow.cli.doctor_disks import examine_disks
from tvmflow.store.local import LocalStore


def test_a_complete_installation_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every finding is good here; frameworks that extras install may be missing."""
    assert main.main(["doctor", "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("TVM compiles, links and runs" in line for line in lines)
    bad = [line for line in lines if line.startswith("BAD")]
    optional = ("MXNet", "PyTorch", "LiteRT")
    assert not [line for line in bad if not any(name in line for name in optional)]


def test_a_probe_that_crashes_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash in native code, as a wrong tvm-ffi gives, ends the probe and not the doctor."""
    crash = doctor._Probe("a crash", "probe_crash", "mend it")
    missing = doctor._Probe("not needed", "probe_missing", "install it", optional=True)
    monkeypatch.setattr(doctor, "_PROBES", (crash, missing))
    monkeypatch.setattr(doctor, "__name__", "tests.unit.cli.test_doctor")
    assert main.main(["doctor", "--store", str(tmp_path)]) == 4
    out = capsys.readouterr().out
    assert "BAD  a crash: crashed in native code (SIGSEGV" in out
    assert "     fix: mend it" in out
    assert "BAD  not needed: ImportError: no such thing" in out


def probe_crash(_: object, emit: object) -> None:
    import ctypes

    ctypes.string_at(0)


def probe_missing(_: object, emit: object) -> None:
    raise ImportError("no such thing")


def test_damage_in_the_store_is_reported(tmp_path: Path) -> None:
    """Damaged files are counted, with their folder."""
    store = LocalStore(str(tmp_path))
    store.create()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "abc").touch()
    details = {
        finding.subject: finding.detail for finding in examine_disks(store, tmp_path / "dist")
    }
    assert details["store"] == f"1 damaged file in {tmp_path / 'damaged'}"


def test_the_supported_python_versions_are_those_of_the_package() -> None:
    """pyproject.toml excludes the version after the newest one."""
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    (major, minor), (last_major, last_minor) = doctor._PYTHON_VERSIONS
    assert f'requires-python = ">={major}.{minor},<{last_major}.{last_minor + 1}"' in text
