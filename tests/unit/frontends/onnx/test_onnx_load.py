"""Importing ONNX models: right numbers, names as they are, and refusals that name the node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import agree, classifier, draw, load, model, save, value
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS

node = helper.make_node


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 21])
def test_all_opsets_compute_the_same(tmp_path: Path, opset: int) -> None:
    """From the oldest supported opset to a recent one; weights are parameters."""
    made = classifier(opset=opset)
    loaded = agree(made, tmp_path, {"data": draw(1, 3, 8, 8)})
    assert {"w", "dense"} <= set(loaded.params)
    assert loaded.inputs == (TensorSpec("data", (1, 3, 8, 8), "float32"),)


def test_inputs_and_outputs_keep_their_order(tmp_path: Path) -> None:
    """It is that of the model, whatever the order in the recipe."""
    made = model(
        [node("Sub", ["b", "a"], ["d"]), node("Add", ["b", "a"], ["s"])],
        [value("b", [2]), value("a", [2])],
        [value("s", [2]), value("d", [2])],
    )
    loaded = agree(made, tmp_path, {"a": draw(2), "b": draw(2, seed=1)})
    assert [spec.name for spec in loaded.inputs] == ["b", "a"]


@pytest.mark.parametrize("name", ["a/b:0", "with space", "größe", "0", "class", "x.y-z", "main"])
def test_all_names_are_kept(tmp_path: Path, name: str) -> None:
    """Inputs, weights and outputs have their names in the model."""
    made = model(
        [node("Mul", [name, f"{name}_w"], [f"{name}_out"], name=f"{name}_node")],
        [value(name, [2])],
        [value(f"{name}_out", [2])],
        {f"{name}_w": draw(2)},
    )
    loaded = agree(made, tmp_path, {name: draw(2, seed=1)})
    assert (loaded.inputs[0].name, loaded.outputs[0].name) == (name, f"{name}_out")


def test_inputs_weights_and_repeated_tensors_may_be_outputs(tmp_path: Path) -> None:
    """Outputs that no node computes, and one tensor as two outputs."""
    made = model(
        [
            node("Relu", ["x"], ["y"]),
            node("Identity", ["y"], ["z"]),
            node("Identity", ["x"], ["x2"]),
        ],
        [value("x", [3])],
        [value("x2", [3]), value("w", [2]), value("y", [3]), value("z", [3])],
        {"w": draw(2)},
    )
    agree(made, tmp_path, {"x": draw(3)})


def test_scalars_integers_and_booleans(tmp_path: Path) -> None:
    """Inputs and outputs may have rank 0, and be int64, bool or uint8."""
    made = model(
        [
            node("ReduceSum", ["x"], ["total"], keepdims=0),
            node("Greater", ["x", "i"], ["more"]),
            node("Cast", ["more"], ["byte"], to=onnx.TensorProto.UINT8),
            node("And", ["more", "flag"], ["both"]),
        ],
        [value("x", [3], "int64"), value("i", [], "int64"), value("flag", [3], "bool")],
        [value("total", [], "int64"), value("byte", [3], "uint8"), value("both", [3], "bool")],
    )
    agree(
        made,
        tmp_path,
        {
            "x": np.array([1, 5, 9], np.int64),
            "i": np.array(4, np.int64),
            "flag": np.array([True, True, False]),
        },
    )


def test_prelu_slopes_of_every_shape(tmp_path: Path) -> None:
    """One slope for all, per channel, per column or per pixel."""
    slopes = {"one": (1,), "channel": (3, 1, 1), "column": (5,), "pixel": (4, 5)}
    nodes = [
        node("PRelu", [x, name], [f"{name}_out"])
        for x, name in zip(["x", *(f"{n}_out" for n in slopes)], slopes, strict=False)
    ]
    shape = [2, 3, 4, 5]
    made = model(
        nodes,
        [value("x", shape)],
        [value("pixel_out", shape)],
        {name: draw(*size, seed=len(name)) for name, size in slopes.items()},
    )
    agree(made, tmp_path, {"x": draw(*shape)})


def test_a_vector_of_slopes_that_only_fits_the_channels(tmp_path: Path) -> None:
    """It is per channel, as in old exports; slopes that fit nothing are rejected with the name of the node."""
    shape, slopes = [2, 3, 4, 5], draw(3)
    nodes = [node("PRelu", ["x", "slopes"], ["y"], name="face/relu1")]
    made = model(nodes, [value("x", shape)], [value("y", shape)], {"slopes": slopes}, opset=13)
    x = draw(*shape, seed=1)
    loaded = load(made, tmp_path, {"x": x})
    (actual,) = compute(loaded, {"x": x})
    np.testing.assert_allclose(actual, np.where(x < 0, slopes[:, None, None] * x, x), rtol=1e-6)
    wrong = model(nodes, [value("x", shape)], [value("y", shape)], {"slopes": draw(7)}, opset=13)
    with pytest.raises(ImportFailed, match=r"face/relu1.*slopes of shape \[7\] do not fit"):
        load(wrong, tmp_path, {"x": x})


def test_half_precision(tmp_path: Path) -> None:
    """float16 inputs and outputs."""
    made = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", [2, 3], "float16")],
        [value("y", [2, 2], "float16")],
        {"w": draw(3, 2).astype(np.float16)},
    )
    agree(made, tmp_path, {"x": draw(2, 3, seed=1).astype(np.float16)}, rtol=1e-2)


def test_a_quantized_model(tmp_path: Path) -> None:
    """QuantizeLinear and DequantizeLinear around a convolution (QDQ)."""
    made = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            node("DequantizeLinear", ["wq", "ws"], ["w"]),
            node("Conv", ["d", "w"], ["y"], pads=[1, 1, 1, 1]),
        ],
        [value("x", [1, 2, 4, 4])],
        [value("y", [1, 3, 4, 4])],
        {
            "s": np.array(0.05, np.float32),
            "z": np.array(3, np.int8),
            "wq": np.random.default_rng(0).integers(-9, 9, (3, 2, 3, 3)).astype(np.int8),
            "ws": np.array(0.1, np.float32),
        },
        opset=13,
    )
    agree(made, tmp_path, {"x": draw(1, 2, 4, 4)})


def test_optional_inputs_may_be_omitted(tmp_path: Path) -> None:
    """By an empty name: Clip with a maximum and no minimum."""
    made = model(
        [node("Clip", ["x", "", "top"], ["y"])],
        [value("x", [4])],
        [value("y", [4])],
        {"top": np.array(0.5, np.float32)},
    )
    agree(made, tmp_path, {"x": draw(4)})


# ---------------------------------------------------------------- what cannot be


def test_an_unknown_operator_is_named_with_its_node(tmp_path: Path) -> None:
    """The message has the operator, its domain, its first node and the number of others."""
    made = model(
        [
            node("Frobnicate", ["x"], ["a"], name="first", domain="com.example"),
            node("Frobnicate", ["a"], ["y"], domain="com.example"),
        ],
        [value("x", [2])],
        [value("y", [2])],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)],
    )
    with pytest.raises(ImportFailed) as caught:
        load(made, tmp_path)
    assert "com.example.Frobnicate (node 'first' and 1 more)" in caught.value.message
    assert caught.value.fix


def test_a_node_that_tvm_cannot_import_is_named(tmp_path: Path) -> None:
    """The message has the operator and its output."""
    made = model(
        [node("NonZero", ["x"], ["where"]), node("Cast", ["where"], ["y"], to=1)],
        [value("x", [4])],
        [value("y", [1, None])],
    )
    with pytest.raises(ImportFailed) as caught:
        load(made, tmp_path)
    assert "'y'" in caught.value.message or "NonZero" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07\x12\x04abcd", b"\xff" * 40])
def test_other_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    """Any bytes give an error with a message."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ImportFailed):
        FRONTENDS["onnx"].load({"model": path}, ())


# ---------------------------------------------------------------- what decides the result


def text(loaded: Any) -> str:
    return str(tvm.ir.save_json(loaded.mod))


def test_the_module_has_only_the_architecture(tmp_path: Path) -> None:
    """Other weights, producers, texts and node names give a byte-identical module."""
    first = text(load(classifier(), tmp_path))
    for other in (
        classifier(seed=1),
        classifier(producer="somebody else"),
        classifier(doc="a long story"),
        classifier(prefix="other/"),
    ):
        assert text(load(other, tmp_path)) == first


def test_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    """The module does not depend on hash seeds or addresses."""
    files = save(classifier(), tmp_path)
    code = (
        "import sys, tvm; from pathlib import Path; from tvmflow.frontends import FRONTENDS; "
        "sys.stdout.write(tvm.ir.save_json(FRONTENDS['onnx'].load({'model': Path(sys.argv[1])}, ()).mod))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code, str(files["model"])],
        env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == text(load(classifier(), tmp_path))
