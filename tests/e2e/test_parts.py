"""A partitioned model: its parts are built and verified separately and together, and run as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvmflow
from tests.support.exports import compile_cpp, files_below, program_of
from tests.support.project import Project, Ran
from tests.support.recipes import ROOT
from tvmflow.core.errors import BundleError

RECIPE = """\
recipe: 1
name: tiny
model: {onnx: tiny.onnx}
outputs: [bundle, cpp]
targets:
  - host
  - name: split
    outputs: [bundle, wheel, cpp, shared-library, archive]
    parts:
      - {name: features, until: [r], preset: x86-64-v2}
      - {name: scores, preset: host}
verify: {repeat: 2, samples: 2}
pipeline: compile
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("parts"))
    (made.folder / "tiny.yaml").write_text(RECIPE)
    return made


@pytest.fixture(scope="module")
def ran(project: Project) -> Ran:
    done = project.run()
    assert done.code == 0, done.out + done.err
    return done


@pytest.fixture
def split(project: Project, ran: Ran) -> Path:
    return project.folder / "dist/tiny/split"


def feed() -> dict[str, Any]:
    return {"data": np.random.default_rng(0).uniform(size=(1, 3, 8, 8)).astype(np.float32)}


@pytest.mark.slow
def test_all_is_delivered_together(project: Project, split: Path) -> None:
    """The whole as bundle, wheel, C++ project and archive, which holds the rest; a library for each part."""
    names = {name for name in files_below(split) if not name.startswith("tiny-cpp/")}
    project_files = set(files_below(split)) - names
    wheel = next(name for name in names if name.endswith(".whl"))
    libraries = {"tiny-features.so", "tiny-scores.so"}
    sidecar_files = {"tiny.cdx.json", "tiny.intoto.jsonl", "tiny.measurements.intoto.jsonl"}
    assert names == {
        "tiny.tvmflow",
        "tiny.split.tar.gz",
        "verify.json",
        "measurements.json",
        wheel,
        *libraries,
        *sidecar_files,
        "README.md",
    }
    assert {name for name in project_files if "/lib/lib" in name} == {
        f"tiny-cpp/lib/libtiny-{part}.so" for part in ("features", "scores")
    }
    assert project.tvmflow("verify", str(split)).code == 0
    with tarfile.open(split / "tiny.split.tar.gz") as archive:
        assert {name.removeprefix("tiny/") for name in archive.getnames()} == {
            "tiny.tvmflow",
            wheel,
            *libraries,
            *project_files,
        }


@pytest.mark.slow
def test_it_runs_as_one(project: Project, split: Path) -> None:
    """The numbers of the whole, of the parts one after the other, and of the library that was never cut."""
    joined = tvmflow.load(split / "tiny.tvmflow")
    whole = tvmflow.load(project.folder / "dist/tiny/host/tiny.tvmflow")
    assert list(joined.parts) == ["features", "scores"]
    assert not whole.parts
    expected = whole.run(feed())["scores"]
    np.testing.assert_allclose(joined.run(feed())["scores"], expected, rtol=1e-4, atol=1e-5)
    middle = joined.parts["features"].run(feed())
    assert list(middle) == ["r"]
    np.testing.assert_array_equal(
        joined.parts["scores"].run(middle)["scores"], joined.run(feed())["scores"]
    )
    assert "tiny" in repr(joined)


@pytest.mark.slow
def test_it_is_timed_and_profiled_as_one(split: Path) -> None:
    """Latency of the whole; operators under the names of their parts."""
    joined = tvmflow.load(split / "tiny.tvmflow")
    assert all(seconds > 0 for seconds in joined.latency(feed(), repeat=2, min_seconds=0.0))
    parts = {row.name.partition(": ")[0] for row in joined.profile(feed(), repeat=2)}
    assert parts == {"features", "scores"}


@pytest.mark.slow
def test_each_part_is_verified_by_itself(split: Path, ran: Ran) -> None:
    """On the reference's tensors at the cut; the facts list the tensors that parts exchange."""
    verdict = json.loads((split / "measurements.json").read_text())
    assert list(verdict["outputs"]) == ["scores"]
    assert {name: list(part["outputs"]) for name, part in verdict["parts"].items()} == {
        "features": ["r"],
        "scores": ["scores"],
    }
    assert all("median" in part["latency"] for part in verdict["parts"].values())
    (handed,) = ran.stages["join/split"]["facts"]["transfers"]
    assert handed == {
        "tensor": "r",
        "bytes": 4 * 4 * 8 * 8,
        "from": "features",
        "to": "scores",
        "devices": ["cpu", "cpu"],
    }


@pytest.mark.slow
def test_new_weights_of_one_part_leave_the_other_as_it_was(project: Project, ran: Ran) -> None:
    """Also the library that nobody needs twice: a part whose weights are the same is not built again."""
    before = (project.folder / "tiny.onnx").read_bytes()
    import onnx

    model = onnx.load(str(project.folder / "tiny.onnx"))
    (dense,) = (tensor for tensor in model.graph.initializer if tensor.name == "dense")
    values = np.frombuffer(dense.raw_data, np.float32) * 2
    dense.raw_data = values.astype(np.float32).tobytes()
    onnx.save(model, str(project.folder / "tiny.onnx"))
    again = project.run("--target", "split")
    assert again.code == 0, again.out + again.err
    assert again.ran == [
        "import/split",
        "cut/split.features",
        "cut/split.scores",
        "build/split.scores",
        "export/split.scores",
        "join/split",
        "verify/split",
    ]
    (project.folder / "tiny.onnx").write_bytes(before)
    assert project.run().ran == []


@pytest.mark.slow
def test_the_wheel_needs_nothing_else(split: Path, tmp_path: Path) -> None:
    """Unpacked anywhere it runs the parts, without tvmflow."""
    (wheel,) = split.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys, numpy as np, tiny_model\n"
        "out = tiny_model.run({'data': np.ones((1, 3, 8, 8), 'float32')})\n"
        "assert 'tvmflow' not in sys.modules\n"
        "print(list(out), list(tiny_model.load().parts))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "['scores'] ['features', 'scores']\n", done.stderr


@pytest.mark.slow
def test_a_program_in_cpp_runs_it_as_any_model(project: Project, split: Path) -> None:
    """The numbers of the bundle, without TVM; its parts one after the other give the same."""
    np.savez(project.folder / "in.npz", **feed())
    scores = {}
    for target in ("host", "split"):
        program = program_of(
            project.folder / f"dist/tiny/{target}/tiny-cpp", project.folder / target
        )
        words = [program, project.folder / "in.npz", project.folder / "out.npz"]
        subprocess.run(words, check=True, env={})
        with np.load(project.folder / "out.npz") as archive:
            scores[target] = archive["scores"]
        bundle = tvmflow.load(project.folder / f"dist/tiny/{target}/tiny.tvmflow")
        np.testing.assert_array_equal(scores[target], bundle.run(feed())["scores"])
    np.testing.assert_allclose(scores["split"], scores["host"], rtol=1e-4, atol=1e-5)
    source = ROOT / "tests" / "support" / "cpp" / "tiny_parts.cpp"
    program = compile_cpp(source, project.folder / "parts", split / "tiny-cpp")
    done = subprocess.run([program], capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "tiny: output 'scores' shares memory with 'data'\n"


@pytest.mark.slow
def test_it_takes_no_weights(split: Path) -> None:
    """As any bundle that includes its weights."""
    with pytest.raises(BundleError, match="includes its weights"):
        tvmflow.load(split / "tiny.tvmflow", params={})


@pytest.mark.slow
@pytest.mark.parametrize("torn", [64, -8, -200, -100_000])
def test_a_truncated_bundle_is_rejected(split: Path, tmp_path: Path, torn: int) -> None:
    """Wherever it was cut off."""
    path = tmp_path / "torn.tvmflow"
    path.write_bytes((split / "tiny.tvmflow").read_bytes()[:torn])
    with pytest.raises(BundleError, match="is not a complete tvmflow bundle"):
        tvmflow.load(path)


@pytest.mark.slow
def test_run_model_takes_it(project: Project, split: Path) -> None:
    """As any bundle."""
    done = project.tvmflow("run-model", "dist/tiny/split/tiny.tvmflow", "--profile", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["target"] == "split"
    assert {row["name"].partition(":")[0] for row in report["operators"]} == {
        "features",
        "scores",
    }


@pytest.mark.slow
def test_a_wrong_cut_is_reported(project: Project, ran: Ran) -> None:
    """With what to do about it, and nothing else runs."""
    (project.folder / "wrong.yaml").write_text(RECIPE.replace("[r]", "[scores]"))
    done = project.tvmflow("run", "wrong.yaml", "--target", "split")
    assert done.code == 1
    assert "the last part has nothing to do" in done.out + done.err
    assert "Traceback" not in done.out + done.err


@pytest.mark.slow
def test_a_part_for_another_machine_is_rejected_where_it_would_run(project: Project) -> None:
    """The message names the part's target and the remedy."""
    text = RECIPE.replace("preset: x86-64-v2", "preset: cortex-a72")
    (project.folder / "board.yaml").write_text(text)
    done = project.tvmflow("plan", "board.yaml")
    assert done.code == 2
    assert "'split.features' cannot be verified" in done.err
    (project.folder / "board.yaml").write_text(
        text.replace("verify: {", "verify: {against: none, ").replace("wheel, cpp, ", "")
    )
    built = project.tvmflow("run", "board.yaml", "--target", "split", "--json")
    assert built.code == 0, built.out + built.err
    assert "it is for aarch64" in built.stages["verify/split"]["facts"]["not_run"]
    with pytest.raises(BundleError, match=r"part 'features', was built for aarch64"):
        tvmflow.load(project.folder / "dist/tiny/split/tiny.tvmflow")
