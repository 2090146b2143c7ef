"""Deliveries as users load them: each output in a new process, compared with the verified library."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from tests.support.onnx_models import draw, model, save, value
from tests.support.verification import Verified, negate_largest
from tvmflow.core.errors import VerifyFailed

OUTPUTS = ("bundle", "c-library", "c-library-weights", "wheel")


def write_dense(folder: Path) -> dict[str, Path]:
    """Write a model with a scalar among its inputs, and one among its outputs."""
    nodes = [
        helper.make_node("MatMul", ["data", "w"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
        helper.make_node("ReduceMax", ["scores"], ["best"], keepdims=0),
    ]
    inputs = [value("data", [2, 8]), value("scale", [])]
    shapes = inputs, [value("scores", [2, 5]), value("best", [])]
    return save(model(nodes, *shapes, {"w": draw(8, 5)}), folder)


def verified(folder: Path, *outputs: str) -> Verified:
    made = Verified(
        folder / "stages", {"onnx": "model.onnx"}, write_dense(folder), outputs=[*outputs]
    )
    right = made.verify()
    assert not isinstance(right, VerifyFailed), right
    assert right["deliveries"] == {
        output: {"passed": True, "is_equal": True} for output in sorted(outputs)
    }
    return made


def test_what_a_user_would_load_is_loaded(tmp_path: Path) -> None:
    """A delivered file that is damaged, or computes something else, is rejected, though the library is right."""
    made = verified(tmp_path, *OUTPUTS)
    right = made.exported
    others = made.deliver(negate_largest(made.params, "w"))
    wheel = next(name for name in right if name.endswith(".whl"))
    library = "export/net-c-library"
    weights = f"{library}-weights/net.weights"
    damaged = tmp_path / "damaged.tvmflow"
    damaged.write_bytes(right["export/net.tvmflow"].read_bytes()[:-40])
    computes_wrong = ["export/net.tvmflow", f"{library}/libnet.a", weights, wheel]
    shared_library = f"{library}/libnet.so"
    for replaced, count in (
        ({role: others[role] for role in computes_wrong}, 4),
        ({shared_library: others[shared_library], "export/net.tvmflow": damaged}, 2),
    ):
        failed = made.verify(replaced=replaced)
        assert isinstance(failed, VerifyFailed)
        assert failed.message.count("loaded in a new process as users do: ") == count


@pytest.mark.slow
def test_libraries_for_tvm_are_loaded_by_tvm(tmp_path: Path) -> None:
    """With and without weights inside, and as part of a program."""
    verified(tmp_path, "params", "shared-library", "static-library", "system-library")
