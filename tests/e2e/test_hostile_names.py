"""A model of a stranger: what it names is text in every delivered file, and never code."""

from __future__ import annotations

import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support import exports
from tests.support.hostile_names import MARKER
from tests.support.project import Project

INCLUDED: Final = f'x\n#include <cstdlib>\nstatic int {MARKER} = std::system("touch INJECTED");\n//'
"""A name that, in a comment of C++, was compiled into programs."""

OUTPUTS: Final = (
    *("archive", "bundle", "c-library", "c-library-weights", "c-source", "cpp", "objects"),
    *("params", "shared-library", "static-library", "system-library", "wheel"),
)


def hostile(place: str) -> str:
    """A name that ends strings, comments and blocks of all languages."""
    return f"{place}\"'*/ int {MARKER}; /* ??/ --> ]]> ```|<b>$(touch {MARKER})${{{MARKER}}}#{{%s&\u202e\\"


def write_model(path: Path, data: str, scores: str) -> None:
    """Write a classifier of images in which everything that has a name has a hostile one."""
    nodes = [
        helper.make_node("GlobalAveragePool", [data], [hostile("inner")], name=hostile("node")),
        helper.make_node("Flatten", [hostile("inner")], [hostile("flat")], name=hostile("node2")),
        helper.make_node("MatMul", [hostile("flat"), hostile("weight")], [scores]),
    ]
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32), hostile("weight"))
    inputs = [helper.make_tensor_value_info(data, TensorProto.FLOAT, [hostile("batch"), 3, 8, 8])]
    outputs = [helper.make_tensor_value_info(scores, TensorProto.FLOAT, [hostile("batch"), 3])]
    graph = helper.make_graph(nodes, hostile("graph"), inputs, outputs, [weight])
    graph.doc_string = hostile("graph document")
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    model.producer_name, model.doc_string = hostile("producer"), hostile("document")
    helper.set_model_props(model, {hostile("key"): hostile("value")})
    onnx.save(model, str(path))


def write_recipe(project: Project, folder: Path, name: str) -> Path:
    model = folder / f"{hostile('file').replace('/', '')}.onnx"
    write_model(model, name, hostile("scores"))
    labels = folder / f"{hostile('labels').replace('/', '')}.txt"
    # labels with characters that no terminal shows are refused
    classes = (hostile(f"class {i}").replace("\u202e", "") for i in range(3))
    labels.write_text("\n".join(classes), encoding="utf-8")
    spec = {"shape": [1, 3, 8, 8], "image": {"resize": [8, 8], "scale": "1/255"}}
    recipe = folder / "tiny.yaml"
    # JSON is YAML
    fields = {
        "recipe": 1,
        "name": "tiny",
        "model": {"onnx": model.name},
        "inputs": {name: spec},
        "labels": labels.name,
        "targets": ["host"],
        "tune": {"trials": 0},
        "outputs": list(OUTPUTS),
        "verify": {"rtol": 1e-3, "atol": 1e-4},
    }
    recipe.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return recipe


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """All files below a folder that are text, those in archives included."""
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        contents = {str(file): file.read_bytes()}
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents = {f"{file}/{name}": archive.read(name) for name in archive.namelist()}
        elif file.name.endswith(".tar.gz"):
            with tarfile.open(file) as archive:
                members = [member for member in archive.getmembers() if member.isfile()]
                streams = {member.name: archive.extractfile(member) for member in members}
                contents = {name: stream.read() for name, stream in streams.items() if stream}
        for name, content in contents.items():
            if b"\0" not in content:
                yield name, content.decode()


@pytest.mark.slow
def test_no_delivered_text_has_a_name_as_it_is(project: Project) -> None:
    """All forms are delivered, verified; the C++ project compiles, and its program knows the names."""
    folder = project.folder / hostile("folder").replace("/", "")
    folder.mkdir()
    data = hostile("data")
    recipe = write_recipe(project, folder, data)
    summary, junit = project.folder / "summary.md", project.folder / "junit.xml"
    project.environment["GITHUB_ACTIONS"] = "true"
    written = ("--summary", str(summary), "--junit", str(junit))
    run = project.tvmflow("run", str(recipe), *written)
    assert run.code == 0, run.err
    for command in (
        ("report", "-o", "report.html"),
        ("plan", str(recipe), "--graph", "svg"),
    ):
        assert project.tvmflow(*command).code == 0
    made = [*texts(project.folder / "dist")]
    for path in (summary, junit, project.folder / "report.html"):
        made.append((path.name, path.read_text()))
    mentioned = [name for name, text in made if MARKER in text]
    assert len(mentioned) > 10
    # it has characters that every language must write otherwise
    end = hostile("")
    assert [name for name, text in made if end in text] == []
    target = project.folder / "dist/tiny/host"
    program = exports.program_of(target / "tiny-cpp", project.folder / "program")
    (project.folder / "in.bin").write_bytes(np.ones((1, 3, 8, 8), np.float32).tobytes())
    words = [str(program), f"{data}={project.folder / 'in.bin'}", "out.npz"]
    subprocess.run(words, cwd=project.folder, check=True)
    with np.load(project.folder / "out.npz") as arrays:
        assert arrays.files == [hostile("scores")]
        np.testing.assert_allclose(arrays[hostile("scores")], np.ones((1, 3)), rtol=1e-5)
    assert not list(project.folder.rglob(MARKER))


@pytest.mark.slow
def test_a_name_that_would_be_code_is_refused_by_plan(project: Project) -> None:
    """Nothing is imported, built or delivered; `init` and `build` refuse it as well."""
    recipe = write_recipe(project, project.folder, INCLUDED)
    for words in (("plan", recipe), ("run", recipe)):
        ran = project.tvmflow(*map(str, words))
        assert ran.code == 2
        assert "has the control character U+000A in its name: rename it" in ran.err
        assert r"x\n#include <cstdlib>\nstatic int" in ran.err
    model = json.loads(recipe.read_text())["model"]["onnx"]
    for command in ("init", "build"):
        ran = project.tvmflow(command, model)
        assert ran.code == 2 and "has the control character U+000A in its name" in ran.err
    assert not (project.folder / "dist").exists()
    assert not list(project.folder.rglob(MARKER))
