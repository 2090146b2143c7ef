"""The digits model, delivered in every form, for tests that load each form."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tests.support.recipes import ROOT
from tvmflow.core.files import write_atomically
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters.c_library import write_library
from tvmflow.exporters.exporter import BuiltModel
from tvmflow.recipe import Recipe
from tvmflow.runtime.bundles import read_bundle
from tvmflow.stages import STAGES, export
from tvmflow.stages.base import StageContext
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime.weights import write_weights
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import ResolvedTarget

MODELS: Final = ROOT / "recipes" / "models"
VERSION: Final = "1.2.0"

Array = np.ndarray[Any, Any]


def recipe(name: str = "digits", *outputs: str, **fields: Any) -> Recipe:
    """The recipe of the digits, with these outputs or all."""
    return Recipe.model_validate(
        {
            "recipe": 1,
            "name": name,
            "version": VERSION,
            "license": "mit or apache-2.0",
            "model": {"mxnet": {"prefix": "digits", "epoch": 10}},
            "inputs": {"data": {"shape": [1, 1, 8, 8], "image": {"interpolation": "bicubic"}}},
            "labels": "digits-labels.txt",
            "outputs": list(outputs or EXPORTERS),
            **fields,
        }
    )


def target(triple: str = "") -> ResolvedTarget:
    """A plain CPU of this machine's architecture, or of the triple's."""
    tvm = {"kind": "llvm", "mtriple": triple or f"{read_host().arch}-linux-gnu", "num-cores": 2}
    return ResolvedTarget("host", tvm, 2, (), {"kind": "cpu", "class": "any"}, "")


class Exported(NamedTuple):
    """A folder with one folder for each stage, and `dist`, what the recipe asked for."""

    folder: Path

    @property
    def dist(self) -> Path:
        return self.folder / "export"

    def stage(self, name: str, made: Recipe, where: ResolvedTarget) -> None:
        """Run a stage on what those before it left here."""
        stage = STAGES[name]
        self.folder.mkdir(parents=True, exist_ok=True)
        inputs = {
            f"{other.name}/{path.relative_to(other)}": path
            for other in self.folder.iterdir()
            if other.name in stage.TRAITS.needs
            for path in other.rglob("*")
            if path.is_file()
        }
        source = {"symbol": MODELS / "digits-symbol.json", "params": MODELS / "digits-0010.params"}
        out, work = self.folder / name, self.folder / "work" / name
        for path in (out, work):
            path.mkdir(parents=True)
        inputs |= source if name == "import" else {}
        inputs |= {"labels": MODELS / "digits-labels.txt"} if name == "export" else {}
        nothing = self.folder / "nothing"
        ctx = StageContext(inputs, out, work, nothing, nothing, lambda event: None)
        # a stage of the model is planned without a target
        stage_target = None if stage.TRAITS.scope == "model" else where
        stage.run(stage.settings(made, stage_target), ctx)


def make(
    folder: Path, name: str = "digits", *outputs: str, bias: float = 0.0, triple: str = ""
) -> Exported:
    """Import, build and export the digits in a process of its own; `bias` is added to the last layer's first class."""
    words = [str(folder), name, str(bias), triple, *outputs]
    subprocess.run([sys.executable, "-m", "tests.support.exports", *words], check=True)
    return Exported(folder)


class Attributes(NamedTuple):
    """A target that this machine does not run: its triple, and other attributes of TVM's target."""

    triple: str
    tvm: dict[str, Any]


def link_c_library(
    folder: Path, attributes: Attributes, *, is_without_weights: bool = False
) -> Path:
    """Import and build the digits in a process of its own, link its C library here, and return the library's folder."""
    words = [
        str(folder),
        json.dumps({"kind": "llvm", "mtriple": attributes.triple, **attributes.tvm}),
    ]
    code = "import sys; from tests.support import exports; exports.build_c_library(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    signature = json.loads((folder / "import" / "signature.json").read_text())
    model = c_runtime.DescribedModel("digits", signature, (), attributes.triple)
    files = c_runtime.LibraryFiles.of("digits", attributes.triple)
    compiled = {path.name: path for path in (folder / "build" / "c-library").iterdir()}
    place = folder / "library"
    place.mkdir()
    if is_without_weights:
        head = write_weights(compiled.pop(c_runtime.CONSTANTS), place / "digits.weights")
        model = model._replace(weights_head=head)
    write_library(model, compiled, files, place, place)
    return place


def build_c_library(folder: str, tvm: str) -> None:
    """Import and build the digits as a C library for a target of TVM."""
    where = target()._replace(tvm=json.loads(tvm))
    made, exported = recipe("digits", "c-library"), Exported(Path(folder))
    for stage in ("import", "lower", "build"):
        exported.stage(stage, made, where)


def held_out() -> tuple[Array, Array]:
    """`(images, labels)` that training did not see: (360, 1, 8, 8) and (360,)."""
    with np.load(MODELS / "digits-test.npz") as archive:
        return archive["data"].astype("float32"), archive["label"]


def accuracy(scores: Array) -> float:
    """The share of the held-out images whose class these scores find."""
    _, labels = held_out()
    return float(np.mean(scores.reshape(len(labels), -1).argmax(1) == labels))


def reference(exported: Exported) -> Array:
    """The bundle's scores for the held-out images, (360, 10)."""
    import tvmflow

    module = tvmflow.load(exported.dist / f"{exported.folder.name}.tvmflow")
    return np.concatenate([module.run({"data": x[None]})["softmax_output"] for x in held_out()[0]])


def scores_of(library: Any, *weights: Any) -> Array:
    """The scores of a library that TVM has loaded; `weights` are what its `main` takes besides."""
    import tvm
    from tvm import relax

    main = relax.VirtualMachine(library, tvm.cpu())["main"]
    images = [tvm.runtime.tensor(x[None]) for x in held_out()[0]]
    return np.concatenate([main(image, *weights).numpy() for image in images])


def compiler(folder: Path, *names: str) -> dict[str, str]:
    """An environment with a compiler on the path, under these names: that of the `ziglang` wheel where there is none.

    `cc`, `gcc` and so on compile C, names with `+` C++.
    """
    folder.mkdir(exist_ok=True)
    for name in filterfalse(shutil.which, names):
        kind = "c++" if "+" in name else "cc"
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {kind} "$@"\n')
        script.chmod(0o755)
    python = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{python}{os.pathsep}{os.environ['PATH']}"}


def program_of(project: Path, made: Path) -> Path:
    """The command line tool of a C++ project, compiled, which also checks for undefined behaviour."""
    return compile_cpp(project / "main.cpp", made, project)


def compile_cpp(source: Path, made: Path, *projects: Path) -> Path:
    """A program with the models of these C++ projects, compiled in the same way; static libraries where there are any."""
    # which checks for undefined behaviour by itself, and first compiles a library of C++ for minutes
    compiler = [sys.executable, "-m", "ziglang", "c++"]
    if shutil.which("g++"):
        compiler = ["g++", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command = [*compiler, "-std=c++17", "-O0"]
    command += ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", str(source)]
    for project in projects:
        libraries = list(project.glob("lib/*.a")) or list(project.glob("lib/*.so"))
        command += [f"-I{project}/include", *map(str, libraries), f"-Wl,-rpath,{project}/lib"]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def package_folder(name: str) -> Path:
    """Where an installed package lies."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def built_of(exported: Exported, made: Recipe, where: ResolvedTarget) -> BuiltModel:
    """What exporters are given, from what `build` and `export` left: as the stage itself puts it together."""
    with_manifest = exported.folder / "export" / export.BUNDLE
    return _built(exported, export.make_request(made, where), with_manifest)


def _built(exported: Exported, request: Any, bundle: Path) -> BuiltModel:
    with zipfile.ZipFile(bundle) as archive:
        manifest, signature = (
            json.loads(archive.read(f"{name}.json")) for name in ("manifest", "signature")
        )
    build = exported.folder / "build"
    forms = {
        form.name: {path.name: path for path in sorted(form.iterdir())}
        for form in build.iterdir()
        if form.is_dir()
    }
    others = {
        name: exported.dist / name
        for output, exporter in EXPORTERS.items()
        if output != "archive"
        for name in exporter.files(request)
    }
    library, bundle = exported.folder / "library.so", exported.dist / "digits.tvmflow"
    # another worker may have loaded it
    write_atomically(library, read_bundle(bundle).library)
    return BuiltModel(
        request, library, forms, signature, manifest, bundle, others, exported.dist / "digits.so"
    )


def files_below(folder: Path) -> Iterator[str]:
    """The names of all files in a folder, with slashes."""
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _make(folder: Path, name: str, bias: float, triple: str, outputs: list[str]) -> None:
    from safetensors.numpy import load_file, save_file

    made, where, exported = recipe(name, *outputs), target(triple), Exported(folder)
    exported.stage("import", made, where)
    if bias:
        path = folder / "import" / "params.safetensors"
        params = load_file(path)
        (last,) = (key for key, value in params.items() if value.shape == (10,))
        params[last][0] += bias
        save_file(params, path)
    for stage in ("lower", "build", "export"):
        exported.stage(stage, made, where)


if __name__ == "__main__":
    _make(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
