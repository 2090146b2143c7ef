"""Deliveries of a run: every form, again after it was removed, and no build for one more form."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.exports import files_below
from tests.support.project import Project
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters.exporter import ExportRequest
from tvmflow.targets.host import read_host

SIDECAR_FILES = (
    *("tiny.cdx.json", "tiny.intoto.jsonl", "tiny.measurements.intoto.jsonl"),
    "README.md",
)


@pytest.mark.slow
def test_every_form_is_delivered_and_one_more_builds_nothing(project: Project) -> None:
    """All together, folders too; then one fewer, one more, and a file that was removed."""
    request = ExportRequest("tiny", "1.0", "host", "llvm", f"{read_host().arch}-linux-gnu")
    forms = {name: e for name, e in EXPORTERS.items() if not e.unsupported_reason(request)}
    project.edit_recipe("[shared-library, bundle]", f"[{', '.join(forms)}]")
    project.edit_recipe("name: tiny", 'name: tiny\nversion: "1.0"')
    assert project.run("--pipeline", "compile").code == 0
    dist = project.folder / "dist" / "tiny" / "host"
    expected = {name for exporter in forms.values() for name in exporter.files(request)}
    assert set(files_below(dist)) == expected | {"verify.json", "measurements.json", *SIDECAR_FILES}
    assert project.tvmflow("verify", str(dist)).code == 0
    (packed,) = project.tvmflow("inspect", str(dist / "tiny.host.tar.gz"), "--json").events
    assert packed["content"]["name"] == "tiny" and packed["provenance"]["good"]

    removed = dist / "tiny-cpp" / "include" / "tiny.hpp"
    content = removed.read_bytes()
    removed.unlink()
    project.edit_recipe("wheel, ", "")
    assert project.run("--pipeline", "compile").ran == ["export/host", "verify/host"]
    assert removed.read_bytes() == content
    project.edit_recipe('version: "1.0"', 'version: "1.1"')
    project.edit_recipe("cpp, ", "cpp, wheel, ")
    assert project.run("--pipeline", "compile").ran == ["export/host", "verify/host"]
    assert any(name.startswith("tiny_model-1.1-") for name in files_below(dist))
    assert project.run("--pipeline", "compile").ran == []


@pytest.mark.slow
def test_a_plan_checks_what_is_delivered_too(finished_project: Project) -> None:
    """A fresh clone with the results of others has nothing to run, and everything to deliver."""
    project = finished_project
    assert project.run().ran == []
    assert project.tvmflow("plan", "tiny.yaml", "--check").code == 0
    bundle = project.folder / "dist/tiny/host/tiny.tvmflow"
    content = bundle.read_bytes()
    for change in (bundle.unlink, lambda: bundle.write_bytes(content + b"x")):
        change()
        for _ in range(2):
            checked = project.tvmflow("plan", "tiny.yaml", "--check")
            assert checked.code == 1
            assert (
                "to deliver: 1 file missing or changed: dist/tiny/host/tiny.tvmflow" in checked.out
            )
        planned = json.loads(project.tvmflow("plan", "tiny.yaml", "--json").out)
        assert planned["deliver"] == ["dist/tiny/host/tiny.tvmflow"]
        assert {stage["kind"] for stage in planned["stages"]} == {"hit"}
        assert project.run().ran == []
        assert project.tvmflow("plan", "tiny.yaml", "--check").code == 0
    shutil.rmtree(project.folder / "dist")
    checked = project.tvmflow("plan", "tiny.yaml", "--check")
    assert checked.code == 1 and "files missing or changed" in checked.out
    assert not (project.folder / "dist").exists()
    assert project.tvmflow("plan", "tiny.yaml", "--check", "--dist", "elsewhere").code == 1
