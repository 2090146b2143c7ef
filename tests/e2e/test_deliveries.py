"""Stories of what a run delivers: every form, again when it is gone, and nothing built anew for a form more."""

from __future__ import annotations

from tests.support.exports import files_below
from tests.support.project import Project
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters._base import Asked
from tvmflow.targets.host import read_host

BESIDE = ("tiny.cdx.json", "tiny.intoto.jsonl")


def test_every_form_arrives_and_one_more_builds_nothing(project: Project) -> None:
    """All at once, folders too; then one less, one back, and a file that somebody removed."""
    project.edit_recipe("[shared-library, bundle]", f"[{', '.join(EXPORTERS)}]")
    project.edit_recipe("name: tiny", 'name: tiny\nversion: "1.0"')
    assert project.run("--pipeline", "compile").code == 0
    dist = project.folder / "dist" / "tiny" / "host"
    asked = Asked("tiny", "1.0", "host", "llvm", f"{read_host().arch}-linux-gnu")
    wanted = {name for exporter in EXPORTERS.values() for name in exporter.files(asked)}
    assert set(files_below(dist)) == wanted | {"verify.json", *BESIDE}
    assert project.tvmflow("verify", str(dist)).code == 0
    (packed,) = project.tvmflow("inspect", str(dist / "tiny.host.tar.gz"), "--json").events
    assert packed["says"]["name"] == "tiny" and packed["provenance"]["good"]

    removed = dist / "tiny-cpp" / "include" / "tvmflow" / "model.hpp"
    content = removed.read_bytes()
    removed.unlink()
    project.edit_recipe("wheel, ", "")
    assert project.run("--pipeline", "compile").ran == ["export/host"]
    assert removed.read_bytes() == content
    project.edit_recipe('version: "1.0"', 'version: "1.1"')
    project.edit_recipe("cpp, ", "cpp, wheel, ")
    assert project.run("--pipeline", "compile").ran == ["export/host", "verify/host"]
    assert any(name.startswith("tiny_model-1.1-") for name in files_below(dist))
    assert project.run("--pipeline", "compile").ran == []
