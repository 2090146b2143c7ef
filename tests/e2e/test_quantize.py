"""A float model to a verified library of int8, through the real command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.project import Project
from tvmflow.targets.host import read_host

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"
RECIPE = """\
recipe: 1
name: digits
model: {onnx: digits.onnx}
inputs:
  data: {shape: [1, 1, 8, 8], dtype: float32}
targets: [host]
pipeline: compile
variants:
  full: {}
  int8:
    quantize: {data: calibration.npz, max_accuracy_drop: 1}
outputs: [c-library, bundle]
verify: {data: digits-test.npz, min_accuracy: 0.95, repeat: 2}
"""

pytestmark = pytest.mark.skipif(
    not read_host().flags & {"avx512_vnni", "avx_vnni", "asimddp"},
    reason="this machine has no int8 dot products",
)


@pytest.mark.slow
def test_float_and_int8_side_by_side(project: Project) -> None:
    """Both variants are delivered, the drop is told, other data run the stage again, and a lock
    gives the same bytes from an empty store."""
    folder = project.folder
    shutil.copy(MODELS / "digits.onnx", folder)
    for name in ("digits-test.npz", "calibration.npz"):
        shutil.copy(MODELS / "digits-test.npz", folder / name)
    (folder / "tiny.yaml").write_text(RECIPE)
    done = project.tvmflow("run", "tiny.yaml", "--json")
    assert done.code == 0, done.out + done.err
    assert [name for name in done.ran if name.startswith("quantize")] == ["quantize/host"]
    facts = done.stages["quantize/host"]["facts"]
    assert facts["float_accuracy"] - facts["accuracy"] <= 0.01
    integers = [layer["weight_bits"] for layer in facts["layers"] if "reason" not in layer]
    assert len(integers) >= 2 and set(integers) == {8}
    path = folder / "dist/digits-int8/host/measurements.json"
    measured = json.loads(path.read_text())
    assert measured["tolerance"]["for"] == "quantized"
    assert 0 < measured["float_error"] < 0.02
    assert measured["accuracy"] >= 0.95 <= measured["reference_accuracy"]
    explained = project.tvmflow("explain", "tiny.yaml", "digits-int8:quantize/host").out
    assert "weights 8 bits, data 8 bits" in explained
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    assert project.tvmflow("run", "tiny.yaml", "--locked", "--json").ran == []
    words = ("--locked", "--store", "empty", "--dist", "again", "--json")
    locked = project.tvmflow("run", "tiny.yaml", *words)
    assert locked.code == 0, locked.out + locked.err
    assert "quantize/host" in locked.ran
    built, rebuilt = (
        {
            path.name: path.read_bytes()
            for path in (folder / name).rglob("*")
            if path.suffix in (".tvmflow", ".so", ".a", ".h")
        }
        for name in ("dist/digits-int8", "again/digits-int8")
    )
    assert built and built == rebuilt
    shutil.rmtree(folder / "cache", ignore_errors=True)
    project.edit_recipe("data: calibration.npz", "data: calibration.npz, samples: 20")
    again = project.tvmflow("run", "tiny.yaml", "--json")
    assert again.code == 0, again.out + again.err
    assert "quantize/host" in again.ran and "import" not in again.ran
