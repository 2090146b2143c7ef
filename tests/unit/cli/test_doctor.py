"""`tvmflow doctor`: each piece of the installation is tried, and a broken one is shown with its fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tvmflow.cli import doctor, machines, main
from tvmflow.cli.doctor import Finding, examine_disks
from tvmflow.core import packages
from tvmflow.core.packages import REQUIREMENTS, NotInstalled, install_command
from tvmflow.frontends.peers import PEERS
from tvmflow.store.local import LocalStore
from tvmflow.targets.resolve import Capabilities


@pytest.mark.slow
def test_a_complete_installation_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every finding is good here; frameworks that extras install may be missing."""
    assert main.main(["doctor", "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("TVM compiles, links and runs" in line for line in lines)
    assert not [line for line in lines if line.startswith("BAD")]


def test_a_probe_that_crashes_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash in native code, as a wrong tvm-ffi gives, ends the probe and not the doctor."""
    crash = doctor._Probe("a crash", "probe_crash", "mend it")
    missing = doctor._Probe("not needed", "probe_missing", "install it", optional=True)
    monkeypatch.setattr(doctor, "_PROBES", (crash, missing))
    monkeypatch.setattr(doctor, "_list_reference_probes", list)
    monkeypatch.setattr(doctor, "__name__", "tests.unit.cli.test_doctor")
    assert main.main(["doctor", "--store", str(tmp_path)]) == 4
    out = capsys.readouterr().out
    assert "BAD  a crash: crashed in native code (SIGSEGV" in out
    assert "     fix: mend it" in out
    assert "--   not needed: ImportError: no such thing" in out


def test_each_finding_is_shown_as_soon_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, all of them take a minute; with `--json` they come at the end, as one value."""

    def examine(*_: object) -> Iterator[Finding]:
        yield Finding("the first", False, "missing", "install it", optional=True)
        shown.append("the first: missing" in capsys.readouterr().out)
        yield Finding("the second", False, "broken", "mend it")

    monkeypatch.setattr(doctor, "examine", examine)
    shown: list[bool] = []
    assert main.main(["doctor", "--store", str(tmp_path)]) == 4
    assert main.main(["doctor", "--store", str(tmp_path), "--json"]) == 4
    assert shown == [True, False]
    result = json.loads(capsys.readouterr().out)
    assert result["ready"] is False
    assert result["findings"][-1] == {
        "subject": "the second",
        "good": False,
        "detail": "broken",
        "fix": "mend it",
        "optional": False,
    }


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


def test_advice_names_the_versions_that_work() -> None:
    """Each requirement is that of pyproject.toml; no advice installs a package without one."""
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    for requirement in REQUIREMENTS.values():
        assert f'"{requirement}"' in text or f'"{requirement};' in text
    tvm_probe, *_ = doctor._PROBES
    assert "'apache-tvm-ffi>=0.1.14.post0,<0.1.15'" in tvm_probe.fix
    for name in doctor._CORE_PACKAGES:
        assert install_command(name) == f"pip install '{REQUIREMENTS[name]}'"


def test_a_version_that_crashes_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its files are complete."""
    package = packages.find_package("apache-tvm-ffi")._replace(version="0.1.15")
    monkeypatch.setattr(packages, "find_package", lambda name: package)
    finding = doctor._examine_package("apache-tvm-ffi")
    assert not finding.good
    assert "tvmflow needs apache-tvm-ffi<0.1.15,>=0.1.14.post0" in finding.detail
    assert finding.fix == "pip install 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'"


def test_targets_and_doctor_agree_about_emulators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four is installed: both say so, and how to install the others."""
    program = tmp_path / "qemu-aarch64-static"
    program.touch(0o755)
    monkeypatch.setenv("TVMFLOW_QEMU", str(tmp_path))
    finding = doctor._examine_emulators()
    missing = "qemu-arm, qemu-riscv64, qemu-x86_64"
    assert finding.detail == f"{program}; not installed in $TVMFLOW_QEMU ({tmp_path}): {missing}"
    assert finding.optional and not finding.good and "qemu-user-static" in finding.fix
    capabilities = Capabilities("", "", "it is for aarch64", "it is for aarch64")
    rows = [
        machines._Row(arch, "t", "c", "", capabilities, f"qemu-{arch}")
        for arch in ("aarch64", "arm")
    ]
    table = machines._format_table(rows)
    assert "qemu-aarch64" in table[1] and "no (qemu-arm)" in table[2]
    assert "no (" not in table[1]
    reasons = list(machines._format_reasons(rows))
    assert "not installed, for `verify.run_on: qemu`: qemu-arm" in reasons


def test_runtimes_for_comparisons_are_listed_without_importing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their versions, whichever distribution installed them, or the command that installs them."""
    installed = {"onnxruntime": packages.Package("onnxruntime-gpu", "1.31.1", "/env", "", "")}

    def find_package(name: str) -> packages.Package:
        if name not in installed:
            raise packages.NotInstalled(f"{name} is not installed", fix="")
        return installed[name]

    monkeypatch.setattr(packages, "find_package", find_package)
    finding = doctor._examine_peer(PEERS["tensorrt"])
    assert finding == Finding(
        "TensorRT, for verify.compare of ONNX models on NVIDIA GPUs",
        False,
        "tensorrt is not installed",
        "pip install onnxruntime-gpu tensorrt",
        optional=True,
    )
    installed["tensorrt"] = packages.Package("tensorrt", "10.1", "/env", "", "")
    finding = doctor._examine_peer(PEERS["tensorrt"])
    assert (finding.good, finding.detail) == (True, "onnxruntime-gpu 1.31.1, tensorrt 10.1")


def test_every_runtime_for_comparisons_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PROBES", ())
    monkeypatch.setattr(doctor, "_list_reference_probes", list)
    findings = list(doctor.examine(LocalStore(str(tmp_path)), tmp_path / "dist"))
    listed = [finding for finding in findings if "verify.compare" in finding.subject]
    assert [finding.subject.partition(",")[0] for finding in listed] == [
        peer.traits.name for peer in PEERS.values()
    ]
    assert all(finding.good or finding.fix.startswith("pip install ") for finding in listed)


def test_a_framework_that_is_absent_is_named_by_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by the errors of an import that cannot succeed."""

    def find(name: str) -> NoReturn:
        raise NotInstalled(f"{name} is not installed")

    monkeypatch.setattr("tvmflow.core.packages.find_package", find)
    with pytest.raises(NotInstalled, match=r"^mxnet is not installed"):
        doctor.probe_reference("mxnet", lambda **_: None)
