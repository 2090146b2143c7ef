"""PyTorch archives, imported and verified with PyTorch itself; without it, what the command says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvmflow
from tests.support.kernels import outputs as compute
from tests.support.project import Project
from tests.support.pytorch_archives import graph, write_archive
from tests.support.shared import folder_made_by
from tvmflow.core import packages
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["pytorch"]

HAS_TORCH = importlib.util.find_spec("torch") and importlib.util.find_spec("onnxscript")
with_torch = pytest.mark.skipif(
    not HAS_TORCH, reason="PyTorch is not installed (pip install 'tvmflow[pytorch]')"
)
RECIPE = """\
recipe: 1
name: net
model: {pytorch: net.pt2}
targets: [host]
outputs: [c-library]
verify: {repeat: 2}
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_made_by(tmp_path_factory, "tests.e2e.make_archives")


def float_spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32")


NETS = {
    "convolutions": (
        (float_spec("image", 3, 3, 16, 16), float_spec("scale", 1)),
        ["scores", "inner_0", "inner_1_0"],
    ),
    "text": (
        (TensorSpec("batch_ids", (1, 4), "int64"), TensorSpec("batch_mask", (1, 4), "bool")),
        ["output_0", "output_1", "output_3"],
    ),
    "wrapped": (
        (
            float_spec("x", 1, 3),
            float_spec("before_scores", 1, 3),
            float_spec("before_states_0", 1, 2),
        ),
        ["scores", "states_0", "states_1"],
    ),
    "lstm": ((float_spec("x", 2, 7, 10),), ["output_0", "output_1_0", "output_1_1"]),
    "gru": ((float_spec("x", 2, 7, 10),), ["output_0", "output_1"]),
    "block": ((float_spec("src", 2, 9, 32),), ["output"]),
}


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize("name", NETS)
def test_an_archive_computes_what_pytorch_computes(
    archives: Path, name: str, tmp_path: Path
) -> None:
    """With the names of the archive, in its order, for the shapes of the recipe."""
    inputs, outputs = NETS[name]
    files = {"model": archives / f"{name}.pt2"}
    free = inputs if name == "convolutions" else ()
    inner = ("relu_",) if name == "convolutions" else ()
    model = frontend.load(files, free, inner)
    assert model.inputs == inputs
    assert [spec.name for spec in model.outputs] == outputs
    assert tuple(spec.name for spec in model.tensors) == inner
    random = np.random.default_rng(0)
    feed = {spec.name: (random.random(spec.shape) * 2).astype(spec.dtype) for spec in model.inputs}
    results = compute(model, feed)
    with frontend.reference(
        files, model.inputs, model.outputs, tensors=model.tensors, threads=1, scratch=tmp_path
    ) as reference:
        assert reference.name == f"PyTorch {packages.find_package('torch').version}"
        expected = reference.run(feed)
        assert min(reference.latency(feed, repeat=2, min_seconds=0.01)) > 0
    assert list(expected) == [*outputs, *inner]
    for result, array in zip(results, expected.values(), strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_allclose(result, array, rtol=1e-4, atol=1e-5)


MASK = np.array([[True] * 5, [True, False, True, True, False], [False] * 5])


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize(("name", "scale"), [("masked", 1.0), ("half", 300.0), ("half", 8000.0)])
def test_masked_rows_and_large_halves(
    archives: Path, name: str, scale: float, tmp_path: Path
) -> None:
    """A query without a visible key has a result of 0 or NaN, as in PyTorch; sums of float16 are float32."""
    files = {"model": archives / f"{name}.pt2"}
    model = frontend.load(files, ())
    random = np.random.default_rng(0)
    spec = model.inputs[0]
    feed = {spec.name: (random.standard_normal(spec.shape) * scale).astype(spec.dtype)}
    feed |= {other.name: MASK for other in model.inputs[1:]}
    with frontend.reference(
        files, model.inputs, model.outputs, threads=1, scratch=tmp_path
    ) as reference:
        expected = reference.run(feed)
    rtol = 1e-5 if spec.dtype == "float32" else 4e-3
    for result, (output, array) in zip(compute(model, feed), expected.items(), strict=True):
        assert result.dtype == array.dtype
        largest = np.abs(array[np.isfinite(array)], dtype=np.float64).max()
        np.testing.assert_allclose(result, array, rtol, rtol * largest, err_msg=output)


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("counter", r"the model changes its own state when it runs \(count\)"),
        (
            "large",
            "the buffer 'state' has 80,000 bytes of initial values that are not all 0, and the limit is 65,536",
        ),
        ("svd", "PyTorch cannot export the archive to ONNX: No ONNX function found for .*svd"),
    ],
)
def test_models_that_cannot_be_exported(archives: Path, name: str, sentence: str) -> None:
    """The message has PyTorch's reason."""
    with pytest.raises(ImportFailed, match=sentence):
        frontend.load({"model": archives / f"{name}.pt2"}, ())


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("running", ["cell.state", "cell.count"]),
        ("streaming", ["past", "window"]),
        ("cached", ["cache_0", "cache_1"]),
        ("stored", ["lifted_tensor_0", "lifted_tensor_1"]),
    ],
)
def test_buffers_that_a_model_changes_are_states(
    archives: Path, project: Project, name: str, states: list[str]
) -> None:
    """Each step computes what the module does, which begins with its own values, also after a reset."""
    shutil.copy(archives / f"{name}.pt2", project.folder / "net.pt2")
    recipe = RECIPE.replace("[c-library]", "[bundle]\ntune: {trials: 0}")
    (project.folder / "tiny.yaml").write_text(recipe)
    ran = project.run()
    assert ran.code == 0, ran.out + ran.err
    assert ran.stages["verify/host"]["facts"]["states"]["passed"]
    session = tvmflow.load(project.folder / "dist/net/host/net.tvmflow").session()
    assert list(session.states) == states
    initial = session.states
    with np.load(archives / f"{name}.npz") as steps:
        for _ in range(2):
            for step in range(5):
                feed = {s.name: steps[f"input_{n}/{step}"] for n, s in enumerate(session.inputs)}
                for place, array in enumerate(session.run(feed).values()):
                    expected = steps[f"output_{place}/{step}"]
                    np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
            session.reset()
    for state, array in session.states.items():
        np.testing.assert_array_equal(array, initial[state])


@pytest.mark.pytorch
@with_torch
def test_an_unknown_inner_tensor(archives: Path) -> None:
    """The remedy is the command that shows the names."""
    with pytest.raises(ImportFailed, match="the model has no tensor 'relu7'") as caught:
        frontend.load({"model": archives / "block.pt2"}, (), ("relu7",))
    assert "torch.export.load(FILE).graph" in caught.value.fix


def _hostile(document: dict[str, Any], kind: str, command: str) -> tuple[Any, dict[str, bytes]]:
    """Return a graph, and further files, from which `torch.export.load` or its module would run a command."""
    code = f"__import__('os').system({command!r})"
    constants = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
    config = {"config": {"evil": {**constants, "tensor_meta": None}}}
    files = {
        "constants/model_constants_config.json": json.dumps(config).encode(),
        # os.system, its argument, and a call of it
        "constants/opaque_obj_0": f"cos\nsystem\n(V{command}\ntR.".encode(),
    }
    if kind == "guard":
        return {**document, "guards_code": [f"{code} == 0"]}, {}
    if kind == "pickle":
        return document, files
    text = json.dumps(document).replace(
        '{"as_int": 4}', json.dumps({"as_expr": {"expr_str": code}})
    )
    return json.loads(text), {}


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize("kind", ["size", "guard", "pickle"])
def test_no_archive_runs_code(archives: Path, tmp_path: Path, kind: str) -> None:
    """PyTorch alone would; tvmflow refuses it, or gives PyTorch what is left without the code."""
    trace, path = tmp_path / "trace", tmp_path / "evil.pt2"
    with zipfile.ZipFile(archives / "block.pt2") as old, zipfile.ZipFile(path, "w") as new:
        [name] = [name for name in old.namelist() if name.endswith("models/model.json")]
        data = name.replace("models/model.json", "data/")
        document, files = _hostile(json.loads(old.read(name)), kind, f"touch {trace}")
        files = {name: json.dumps(document).encode(), **{f"{data}{n}": c for n, c in files.items()}}
        for entry in old.namelist():
            new.writestr(entry, files.pop(entry, old.read(entry)))
        for entry, content in files.items():
            new.writestr(entry, content)
    with contextlib.suppress(ImportFailed):
        loaded = frontend.load({"model": path}, ())
        feed = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in loaded.inputs}
        with frontend.reference(
            {"model": path}, loaded.inputs, loaded.outputs, threads=1, scratch=tmp_path
        ) as reference:
            assert reference.run(feed)
    assert not trace.exists()
    code = "import sys, torch; p = torch.export.load(sys.argv[1]); p.module()(*p.example_inputs[0])"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True)
    assert trace.exists()


@pytest.mark.pytorch
@with_torch
def test_an_archive_of_a_newer_pytorch(archives: Path, tmp_path: Path) -> None:
    """When it cannot be loaded, the message says which version wrote it, and what to install."""
    path = tmp_path / "newer.pt2"
    with zipfile.ZipFile(archives / "block.pt2") as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(("models/model.json", "serialized_exported_program.json")):
                document = json.loads(content)
                document["torch_version"] = "99.1.0"
                document["schema_version"]["major"] += 1
                content = json.dumps(document).encode()
            new.writestr(entry, content)
    with pytest.raises(
        ImportFailed, match=r"cannot load the archive, which PyTorch 99\.1\.0 wrote"
    ) as caught:
        frontend.load({"model": path}, ())
    assert caught.value.fix.startswith("pip install 'torch>=99.1'")


@pytest.mark.pytorch
@with_torch
def test_a_recipe_from_an_archive_to_a_verified_library(archives: Path, project: Project) -> None:
    """A second run does nothing; another PyTorch would import again."""
    shutil.copy(archives / "block.pt2", project.folder / "net.pt2")
    (project.folder / "tiny.yaml").write_text(RECIPE)
    ran = project.run()
    assert ran.code == 0, ran.out + ran.err
    assert ran.stages["verify/host"]["facts"]["reference"].startswith("PyTorch ")
    assert project.run().ran == []
    explained = project.tvmflow("explain", "tiny.yaml", "import")
    assert "torch" in explained.out and "onnxscript" in explained.out


@pytest.mark.pytorch
@with_torch
def test_an_archive_keeps_the_batch_open(archives: Path, project: Project) -> None:
    """One library is verified with PyTorch at the sizes of the recipe; the limits of the archive hold."""
    shutil.copy(archives / "convolutions.pt2", project.folder / "net.pt2")
    sizes = "dimensions: {batch: {max: 8}}\ninputs: {image: {shape: [batch, 3, 16, 16]}}\n"
    recipe = project.folder / "tiny.yaml"
    recipe.write_text(RECIPE + sizes)
    ran = project.run()
    assert ran.code == 0, ran.out + ran.err
    verified = ran.stages["verify/host"]["facts"]["sizes"]
    assert {"batch": 1}.items() <= verified[0]["sizes"].items()
    assert max(entry["sizes"]["batch"] for entry in verified) == 8
    recipe.write_text(RECIPE + sizes.replace("max: 8", "max: 17"))
    refused = project.tvmflow("plan", "tiny.yaml")
    assert refused.code == 2
    assert "exported for" in refused.err


@pytest.mark.skipif(bool(HAS_TORCH), reason="PyTorch is installed")
def test_a_plan_without_pytorch_says_what_to_install(project: Project) -> None:
    """Only for recipes that name an archive, and before anything runs."""
    write_archive(project.folder / "net.pt2", graph())
    (project.folder / "tiny.yaml").write_text(RECIPE)
    ran = project.tvmflow("plan", "tiny.yaml")
    assert ran.code == 4
    assert "net:import: onnx-ir is not installed" in ran.err
    assert "fix: pip install 'tvmflow[pytorch]'" in ran.err


FACTORIES = """\
import os
import torch

class Branch(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def make():
    print("making it")
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.ReLU())
    return net, {"input": torch.ones(2, 4)}

def branch():
    return Branch(), torch.ones(3)

def dies():
    os._exit(7)
"""


@pytest.mark.pytorch
@with_torch
def test_a_factory_becomes_an_archive_and_a_recipe(project: Project) -> None:
    """In evaluation mode, in a process of its own, whose output is on standard error; and it builds."""
    (project.folder / "nets").mkdir()
    (project.folder / "nets/small.py").write_text(FACTORIES)
    words = ["--archive", "models/small.pt2", "--output", "small.yaml", "--minutes", "0"]
    ran = project.tvmflow("init", "nets.small:make", *words)
    assert ran.code == 0, ran.err
    assert "making it" in ran.err and "making it" not in ran.out
    assert "models/small.pt2: what nets.small:make returns, exported by PyTorch" in ran.err
    assert [
        spec.name
        for spec in frontend.read_facts({"model": project.folder / "models/small.pt2"}).inputs
    ] == ["input"]
    ran = project.tvmflow("run", "small.yaml", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert list((project.folder / "dist/small/host").glob("*.tvmflow"))


@pytest.mark.pytorch
@with_torch
@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("branch", 1, "torch.export cannot export the module: GuardOnDataDependentSymNode: "),
        ("dies", 2, "nets:dies: its process ended with code 7\n  fix: run it by itself: `python -c 'import nets; nets.dies()'`"),
    ],
)  # fmt: skip
def test_a_factory_that_gives_no_archive_leaves_no_file(
    project: Project, function: str, code: int, message: str
) -> None:
    (project.folder / "nets.py").write_text(FACTORIES)
    before = {path.name for path in project.folder.iterdir()}
    ran = project.tvmflow("init", f"nets:{function}", "--archive", "net.pt2")
    assert ran.code == code and message in ran.err
    assert {path.name for path in project.folder.iterdir()} - before <= {"__pycache__"}


@pytest.mark.skipif(bool(HAS_TORCH), reason="PyTorch is installed")
def test_a_factory_without_pytorch_says_what_to_install(project: Project) -> None:
    ran = project.tvmflow("init", "nets:make", "--archive", "net.pt2")
    assert ran.code == 4
    assert "fix: pip install 'tvmflow[pytorch]'" in ran.err
    assert not (project.folder / "net.pt2").exists()
