"""ONNX Runtime as the reference, in a process that may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import classifier, draw, model, save, specs, value
from tvmflow.core.errors import ImportFailed, StageError
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import Reference

frontend = FRONTENDS["onnx"]

INPUTS = (TensorSpec("data", (1, 3, 8, 8), "float32"),)
OUTPUTS = (TensorSpec("prob", (1, 4), "float32"),)


def start(files: dict[str, Path], folder: Path):  # type: ignore[no-untyped-def]
    return frontend.reference(files, INPUTS, OUTPUTS, threads=1, scratch=folder)


def test_it_runs_the_unmodified_model(tmp_path: Path) -> None:
    """It returns outputs by name and latencies in seconds, and its name has a version."""
    import onnxruntime

    files = save(classifier(), tmp_path)
    feed = {"data": draw(1, 3, 8, 8)}
    (scratch := tmp_path / "scratch").mkdir()
    reference: Reference
    with start(files, scratch) as reference:
        assert reference.name == f"ONNX Runtime {onnxruntime.__version__}"
        actual_value = reference.run(feed)
        seconds = reference.latency(feed, repeat=3, min_seconds=0.001)
    expected = onnxruntime.InferenceSession(str(files["model"])).run(None, feed)[0]
    np.testing.assert_allclose(actual_value["prob"], expected, rtol=1e-4)
    assert len(seconds) == 3 and all(0 < item < 1 for item in seconds)


def test_its_process_imports_hardly_anything() -> None:
    """Fields of recipes and the store would double the time that the process takes to start."""
    unused = ("pydantic", "onnx", "tvmflow.frontends.frontend", "tvmflow.recipe", "tvmflow.store")
    code = (
        "import sys, tvmflow.frontends.onnx._reference_worker; "
        f"print([name for name in {unused!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_wrong_input_is_named(tmp_path: Path) -> None:
    """It is checked before it reaches the framework."""
    (scratch := tmp_path / "scratch").mkdir()
    with start(save(classifier(), tmp_path), scratch) as reference:
        with pytest.raises(StageError, match="'data' has shape"):
            reference.run({"data": draw(1, 3, 9, 9)})
        with pytest.raises(StageError, match="'data'"):
            reference.run({})


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        (helper.make_node("Div", ["a", "null"], ["y"]), 0),
        (helper.make_node("Mod", ["a", "null"], ["y"]), 0),
        (helper.make_node("Gather", ["a", "null"], ["y"]), 4),
        (helper.make_node("GatherElements", ["a", "null"], ["y"]), 4),
    ],
)
def test_an_integer_that_no_operator_takes_is_fixed_by_a_range(
    node: onnx.NodeProto, wrong: int, tmp_path: Path
) -> None:
    """The line to write has the name of an input, as YAML has it."""
    made = model(
        [node], [value(name, (2,), "int64") for name in ("a", "null")], [value("y", (2,), "int64")]
    )
    inputs = tuple(TensorSpec(name, (2,), "int64") for name in ("a", "null"))
    outputs = (TensorSpec("y", (2,), "int64"),)
    (scratch := tmp_path / "scratch").mkdir()
    feed = {"a": np.ones(2, "int64"), "null": np.full(2, wrong)}
    with (
        frontend.reference(
            save(made, tmp_path), inputs, outputs, threads=1, scratch=scratch
        ) as reference,
        pytest.raises(StageError, match="cannot run the model on these inputs") as caught,
    ):
        reference.run(feed)
    assert caught.value.fix == (
        "give integers that the model is made for (its inputs with integers are a, null), "
        "such as `inputs: {a: {range: [1, 9]}}`, or set verify.data"
    )


def test_a_crash_is_reported(tmp_path: Path) -> None:
    """The next request fails with the exit status and the path of the log."""
    (scratch := tmp_path / "scratch").mkdir()
    with start(save(classifier(), tmp_path), scratch) as reference:
        os.kill(reference._process.pid, signal.SIGKILL)
        with pytest.raises(StageError, match="SIGKILL") as caught:
            reference.run({"data": draw(1, 3, 8, 8)})
    assert "log" in caught.value.fix


def test_a_model_that_it_rejects_is_reported(tmp_path: Path) -> None:
    """The message names the framework and how to disable the comparison."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"nothing")
    (scratch := tmp_path / "scratch").mkdir()
    with (
        pytest.raises(StageError, match="ONNX Runtime cannot run the model") as caught,
        start({"model": path}, scratch),
    ):
        raise AssertionError("it started")
    assert "against: none" in caught.value.fix


def test_inner_tensors_are_those_of_the_import(tmp_path: Path) -> None:
    """Import and reference return the same tensors after the outputs, in the requested order, without repeating outputs."""
    files = save(classifier(), tmp_path)
    model = onnx.load(str(files["model"]))
    inner = [node.output[0] for node in model.graph.node][:2]
    feed = {"data": draw(1, 3, 8, 8)}
    loaded = frontend.load(files, INPUTS, (inner[1], "prob", inner[0]))
    assert [spec.name for spec in loaded.outputs] == ["prob"]
    assert [spec.name for spec in loaded.tensors] == [inner[1], inner[0]]
    (scratch := tmp_path / "scratch").mkdir()
    with frontend.reference(
        files, INPUTS, loaded.outputs, tensors=loaded.tensors, threads=1, scratch=scratch
    ) as reference:
        expected = reference.run(feed)
    actual = compute(loaded, feed)
    for spec, values in zip((*loaded.outputs, *loaded.tensors), actual, strict=True):
        np.testing.assert_allclose(expected[spec.name], values, rtol=1e-4, atol=1e-5)


def test_an_unknown_tensor_is_reported(tmp_path: Path) -> None:
    """With the nearest name; names of nodes are not names of tensors."""
    files = save(classifier(), tmp_path)
    with pytest.raises(ImportFailed, match=r"the model has no tensor 'prop'; did you mean 'prob"):
        frontend.load(files, INPUTS, ("prop",))


def test_a_model_that_onnx_runtime_refuses_is_run_by_the_stand_in(tmp_path: Path) -> None:
    """Its name is that of what ran the model, and a note says who refused it, and why."""
    import onnxruntime

    made = classifier(opset=onnx.defs.onnx_opset_version())
    try:
        onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        pass
    else:
        pytest.skip("this ONNX Runtime knows the newest opset")
    (scratch := tmp_path / "scratch").mkdir()
    reference: Reference
    with start(save(made, tmp_path), scratch) as reference:
        assert reference.name == f"the ONNX reference evaluator {onnx.__version__}"
        assert reference.note.startswith(
            f"ONNX Runtime {onnxruntime.__version__} refuses this model: ONNX Runtime only"
        )
        assert str(tmp_path) not in reference.note
        outputs = reference.run({"data": draw(1, 3, 8, 8)})
    assert outputs["prob"].shape == (1, 4)


def test_nodes_are_computed_as_they_are_written(tmp_path: Path) -> None:
    """ONNX Runtime merges a `Pad` with zeros into a `MaxPool`, which pads with the lowest number."""
    nodes = [
        helper.make_node("Pad", ["data", "pads"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[2, 2]),
    ]
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    sides = [value("data", [1, 1, 2, 2])], [value("y", [1, 1, 3, 3])]
    made = model(nodes, *sides, {"pads": pads})
    (scratch := tmp_path / "scratch").mkdir()
    feed = {"data": np.full((1, 1, 2, 2), -1, np.float32)}
    with frontend.reference(
        save(made, tmp_path),
        specs(feed),
        (TensorSpec("y", (1, 1, 3, 3), "float32"),),
        threads=1,
        scratch=scratch,
    ) as reference:
        expected = np.zeros((3, 3), np.float32)
        expected[1, 1] = -1
        np.testing.assert_array_equal(reference.run(feed)["y"][0, 0], expected)
        assert reference.latency(feed, repeat=1, min_seconds=0)[0] > 0
        np.testing.assert_array_equal(reference.run(feed)["y"][0, 0], expected)
