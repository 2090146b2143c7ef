"""`runtime:` in a recipe: what executes a library, who chooses it, and what programs need then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.project import Project
from tests.support.recipes import ROOT

RUN: Final = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("tvm", "tvm_ffi", "pydantic", "yaml", "doit", "onnx", "psutil"):
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
import numpy as np, tvmflow
module = tvmflow.load(sys.argv[1])
result = module.run({spec.name: np.ones(spec.shape, spec.dtype) for spec in module.inputs})
print([array.shape == spec.shape for array, spec in zip(result.values(), module.outputs)])
"""


def manifest_of(bundle: Path) -> dict[str, Any]:
    with zipfile.ZipFile(bundle) as archive:
        manifest: dict[str, Any] = json.loads(archive.read("manifest.json"))
    return manifest


def test_a_bundle_runs_where_no_tvm_is(finished_project: Project) -> None:
    """And the library for TVM's virtual machine, which is delivered beside it, is verified too."""
    folder = finished_project.folder / "dist/tiny/host"
    assert manifest_of(folder / "tiny.tvmflow")["runtime"] == "c"
    verdict = json.loads((folder / "verify.json").read_text())
    assert verdict["vm"]["outputs"].keys() == verdict["outputs"].keys()
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "tiny.tvmflow")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[True]", done.stderr


@pytest.mark.slow
def test_the_virtual_machine_runs_what_asks_for_it(project: Project) -> None:
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [bundle]\nruntime: vm")
    assert project.run().code == 0
    bundle = project.folder / "dist/tiny/host/tiny.tvmflow"
    assert manifest_of(bundle)["runtime"] == "vm"
    assert "prefix" not in manifest_of(bundle)


def test_a_target_without_the_c_runtime_is_refused_when_a_run_is_planned(project: Project) -> None:
    """With the position and the remedy."""
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [bundle]\nruntime: c")
    project.edit_recipe(
        "targets:\n  - host",
        "targets: [{name: server, tvm: {kind: llvm, mtriple: aarch64-unknown-freebsd}}]",
    )
    ran = project.call("plan", "tiny.yaml")
    assert ran.code == 2
    text = "no C library is made for the system of aarch64-unknown-freebsd"
    assert f"'server' cannot have the C runtime: {text}" in ran.err
    assert "give it `runtime: vm`" in ran.err


def test_a_target_without_tvms_runtime_is_refused_when_a_run_is_planned(project: Project) -> None:
    """There are C libraries for more systems than libraries that TVM's runtime loads."""
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [c-library]\nruntime: vm")
    project.edit_recipe("targets:\n  - host", "targets: [ios]")
    ran = project.call("plan", "tiny.yaml")
    assert ran.code == 2
    assert "'ios' cannot have a library for TVM's runtime: no linker is set up for arm64" in ran.err
    assert "leave `runtime: vm` out" in ran.err


@pytest.mark.slow
def test_a_wheel_needs_numpy_alone(project: Project, tmp_path: Path) -> None:
    """In a fresh environment, where nothing but numpy is installed with it."""
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [wheel]")
    assert project.run().code == 0
    (wheel,) = (project.folder / "dist/tiny/host").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"],
        check=True,
        capture_output=True,
        text=True,
    )
    names = {entry["name"] for entry in json.loads(listed.stdout)}
    assert names - {"pip", "setuptools"} == {"numpy", "tiny-model"}
    code = (
        "import numpy as np, tiny_model as m; model = m.load(); "
        "feed = {s.name: np.ones(s.shape, s.dtype) for s in model.inputs}; "
        "print(sorted(m.run(feed)) == sorted(s.name for s in model.outputs))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
