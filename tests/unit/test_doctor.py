"""The doctor: each piece is tried, and a broken one has a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow import cli, doctor
from tvmflow.stores.local import LocalStore


def test_a_sound_installation_is_found_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every finding is good here, MXNet apart, which may be missing."""
    assert cli.main(["doctor", "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("TVM compiles, links and runs" in line for line in lines)
    assert not [line for line in lines if line.startswith("BAD") and "MXNet" not in line]


def test_a_probe_that_dies_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash in native code, as a wrong tvm-ffi gives, ends the probe and not the doctor."""
    crash = doctor._Probe("a crash", "probe_crash", "mend it")
    missing = doctor._Probe("not needed", "probe_missing", "install it", optional=True)
    monkeypatch.setattr(doctor, "_PROBES", (crash, missing))
    monkeypatch.setattr(doctor, "__name__", "tests.unit.test_doctor")
    assert cli.main(["doctor", "--store", str(tmp_path)]) == 4
    out = capsys.readouterr().out
    assert "BAD  a crash: crashed in native code (SIGSEGV" in out
    assert "     fix: mend it" in out
    assert "BAD  not needed: ImportError: no such thing" in out


def probe_crash(_: object, emit: object) -> None:
    import ctypes

    ctypes.string_at(0)


def probe_missing(_: object, emit: object) -> None:
    raise ImportError("no such thing")


def test_damage_in_the_store_is_told(tmp_path: Path) -> None:
    """Files that were set aside are counted, with their place."""
    store = LocalStore(str(tmp_path))
    store.create()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "abc").touch()
    found = {finding.what: finding.found for finding in doctor._machine(store)}
    assert found["store"] == f"1 damaged files were set aside in {tmp_path / 'damaged'}"
