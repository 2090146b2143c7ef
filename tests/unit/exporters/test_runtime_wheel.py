"""The wheel of the runtime alone: it loads a bundle without tvmflow."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

from tvmflow.core.version import VERSION
from tvmflow.exporters.wheel import write_runtime_wheel


def test_it_runs_a_bundle_with_copies_alone(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its modules imports tvmflow."""
    wheel = write_runtime_wheel(tmp_path / "dist")
    monkeypatch.syspath_prepend(str(wheel))
    before = set(sys.modules)
    import tvmflow_runtime  # type: ignore[import-not-found]

    module = tvmflow_runtime.load(small_bundle)
    outputs = module.run(np.ones((2, 3), "float32"))
    np.testing.assert_array_equal(outputs["twice"], np.full((2, 3), 2, "float32"))
    assert type(module).__module__ == "tvmflow_runtime._tvmflow.runtime.module"
    assert not [name for name in set(sys.modules) - before if name.startswith("tvmflow.")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tvmflow_runtime"]:
        monkeypatch.delitem(sys.modules, name)


def test_make_writes_it(tmp_path: Path) -> None:
    """`make runtime-wheel` calls the module as a program, which shows the path."""
    command = [sys.executable, "-m", "tvmflow.exporters.wheel", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert zipfile.is_zipfile(done.stdout.strip())


def test_it_sees_a_capped_cpu(tmp_path: Path) -> None:
    """With `TVMFLOW_CPU`, as tvmflow itself does."""
    wheel = write_runtime_wheel(tmp_path)
    program = (
        "from tvmflow_runtime._tvmflow.targets.host import read_host; print(read_host().capped_to)"
    )
    level = "x86-64-v2" if platform.machine() == "x86_64" else "armv8-a"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(wheel), "TVMFLOW_CPU": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{level}\n", done.stderr


def test_it_needs_numpy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is an extra. Twice written, it has the same bytes, whatever SOURCE_DATE_EPOCH is."""
    first = write_runtime_wheel(tmp_path / "a")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    second = write_runtime_wheel(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        text = archive.read(f"tvmflow_runtime-{VERSION}.dist-info/METADATA").decode()
    needs = Parser().parsestr(text).get_all("Requires-Dist") or []
    assert [need for need in needs if "extra" not in need] == ["numpy >=1.26"]
    assert {need.partition(" ")[0] for need in needs} == {
        "numpy", "pillow", "cryptography", "apache-tvm"
    }  # fmt: skip
    assert f"tvmflow_runtime-{VERSION}.dist-info/RECORD" in names
