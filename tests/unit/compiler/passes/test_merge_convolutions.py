"""Sums of convolutions of the same data become one convolution, and compute what ONNX Runtime computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import dot_target, host_level, kernels_of, outputs
from tests.support.onnx_models import Array, draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.passes import fold_convolutions

SEEDS = seeds(12, 42, 120)


def added(
    branches: list[dict[str, Any]],
    shape: tuple[int, ...],
    results: int,
    *,
    scaled: int = 0,
    plain: int = 0,
) -> onnx.ModelProto:
    """Return the activation of a sum: of convolutions with a bias, of scaled data, and of the data themselves."""
    nodes, terms, weights = [], [], {}
    for n, branch in enumerate(branches):
        kernel = branch.pop("kernel")
        groups = branch.get("group", 1)
        weights[f"w{n}"] = draw(results, shape[1] // groups, *kernel, seed=n)
        weights[f"b{n}"] = draw(results, seed=n + 50)
        nodes.append(node("Conv", ["x", f"w{n}", f"b{n}"], [f"c{n}"], **branch))
        terms.append(f"c{n}")
    for n in range(scaled):
        weights |= {
            f"{name}{n}": np.abs(draw(shape[1], seed=n + m)) + 0.5
            for m, name in enumerate(("gamma", "beta", "mean", "variance"))
        }
        names = [f"{name}{n}" for name in ("gamma", "beta", "mean", "variance")]
        nodes.append(node("BatchNormalization", ["x", *names], [f"s{n}"]))
        terms.append(f"s{n}")
    terms += ["x"] * plain
    total = terms[0]
    for n, term in enumerate(terms[1:]):
        nodes.append(node("Add", [total, term], [f"t{n}"]))
        total = f"t{n}"
    nodes.append(node("Relu", [total], ["y"]))
    return model(nodes, [value("x", shape)], [value("y", None)], weights)


def count(made: onnx.ModelProto, folder: Path, data: Array) -> int:
    """Check a model, and return the number of kernels that are convolutions."""
    loaded = load(made, folder, {"x": data})
    [actual] = outputs(loaded, {"x": data})
    session = onnxruntime.InferenceSession(made.SerializeToString())
    [expected] = session.run(None, {"x": data})
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(actual / largest, expected / largest, rtol=0, atol=1e-5)
    return sum("conv" in name for name in kernels_of(loaded.mod, host_level()))


def random_branches(random: np.random.Generator) -> tuple[list[dict[str, Any]], int, int]:
    """Return branches of the same stride, whose kernels have odd sizes, with their channels."""
    rank, groups = int(random.integers(1, 4)), int(random.choice([1, 1, 2, 8]))
    channels = groups * int(random.choice([1, 3, 8]))
    results = channels if random.integers(2) else groups * int(random.choice([2, 5]))
    strides = [int(n) for n in random.integers(1, 3, rank)]
    branches = []
    for _ in range(int(random.integers(2, 5))):
        kernel = [int(n) for n in random.choice([1, 3, 5], rank)]
        gaps = [int(n) for n in random.integers(1, 3, rank)]
        pads = [gap * (size // 2) for gap, size in zip(gaps, kernel, strict=True)]
        branches.append(
            {
                **{"kernel": kernel, "dilations": gaps, "pads": pads * 2, "strides": strides},
                "group": groups if random.integers(5) else 1,
            }
        )
    return branches, channels, results


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sums_agree_with_onnxruntime(seed: int, tmp_path: Path) -> None:
    """Kernels of several sizes, dilations, groups and strides, which fit into each other or not."""
    random = np.random.default_rng(seed)
    branches, channels, results = random_branches(random)
    size = [int(n) for n in random.choice([7, 9, 12], len(branches[0]["kernel"]))]
    is_same = channels == results and set(branches[0]["strides"]) == {1}
    scaled, plain = (int(n) * is_same for n in random.integers(0, 3, 2))
    shape = (int(random.integers(1, 3)), channels, *size)
    made = added(branches, shape, results, scaled=scaled, plain=plain)
    count(made, tmp_path, draw(*shape, seed=seed))


SQUARE = {"kernel": (3, 3), "pads": [1] * 4}
POINT = {"kernel": (1, 1)}


@pytest.mark.parametrize(
    ("branches", "more", "kernels"),
    [
        ([SQUARE, POINT], {"scaled": 1}, 1),
        ([SQUARE, SQUARE, SQUARE, POINT], {"scaled": 1, "plain": 1}, 1),
        ([SQUARE], {"plain": 1}, 1),
        ([{**SQUARE, "group": 16}, {**POINT, "group": 16}], {"plain": 1}, 1),
        ([SQUARE, {"kernel": (1, 3), "pads": [0, 1, 0, 1]}], {}, 1),
        ([SQUARE, {"kernel": (5, 5), "pads": [2] * 4}], {}, 1),
        (
            [{"kernel": (3, 1), "pads": [1, 0, 1, 0]}, {"kernel": (1, 3), "pads": [0, 1, 0, 1]}],
            {},
            2,
        ),
        ([SQUARE, {**SQUARE, "group": 16}], {}, 2),
        ([SQUARE, {**SQUARE, "pads": [2] * 4, "dilations": [2, 2]}], {}, 2),
    ],
    ids=["RepVGG", "MobileOne", "one", "depthwise", "row", "larger", "cross", "groups", "dilated"],
)
def test_kernels_within_another_take_no_time(
    branches: list[dict[str, Any]], more: dict[str, int], kernels: int, tmp_path: Path
) -> None:
    """Two that only overlap would make a larger kernel, and stay."""
    shape = (1, 16, 12, 12)
    made = added([dict(branch) for branch in branches], shape, 16, **more)
    assert count(made, tmp_path, draw(*shape)) == kernels


def test_a_convolution_that_something_else_reads_stays(tmp_path: Path) -> None:
    weights = {"w": draw(16, 16, 3, 3), "v": draw(16, 16, 1, 1)}
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        node("Conv", ["x", "v"], ["b"]),
        node("Add", ["a", "b"], ["t"]),
        node("Mul", ["t", "b"], ["y"]),
    ]
    shape = (1, 16, 12, 12)
    made = model(nodes, [value("x", shape)], [value("y", None)], weights)
    assert count(made, tmp_path, draw(*shape)) == 2


def test_weights_of_narrow_numbers_are_not_added(tmp_path: Path) -> None:
    """One plus a small number has fewer digits left for it."""
    shape = (1, 16, 12, 12)
    loaded = load(added([dict(SQUARE), dict(POINT)], shape, 16), tmp_path)
    names = kernels_of(loaded.mod, host_level(), LoweringOptions(precision="mixed"))
    assert sum("conv" in name for name in names) == 2


@pytest.mark.parametrize("second", ["conv", "data"])
def test_quantized_weights_stay_bytes(second: str, tmp_path: Path) -> None:
    """Their sum would be float32, which no instruction for bytes multiplies."""
    random = np.random.default_rng(0)
    weights = {
        "a": random.integers(-128, 128, (16, 16, 3, 3), "int8"),
        "b": random.integers(-128, 128, (16, 16, 1, 1), "int8"),
        "scale": np.abs(draw(16)) / 100,
        "zero": np.zeros(16, np.int8),
        "qs": np.asarray(0.02, np.float32),
        "qz": np.asarray(128, np.uint8),
    }
    nodes = [
        node("QuantizeLinear", ["x", "qs", "qz"], ["q"]),
        node("DequantizeLinear", ["q", "qs", "qz"], ["data"]),
        node("DequantizeLinear", ["a", "scale", "zero"], ["wa"], axis=0),
        node("DequantizeLinear", ["b", "scale", "zero"], ["wb"], axis=0),
        node("Conv", ["data", "wa"], ["first"], pads=[1] * 4),
        node("Conv", ["data", "wb"], ["conv"]),
        node("Add", ["first", second], ["y"]),
    ]
    shape = (1, 16, 12, 12)
    made = model(nodes, [value("x", shape)], [value("y", None)], weights)
    names = kernels_of(load(made, tmp_path).mod, dot_target("avx512_vnni"))
    convolutions = [name for name in names if "conv2d" in name]
    assert len(convolutions) == (2 if second == "conv" else 1), names
    assert all("quantized_" in name for name in convolutions), names


def test_a_long_sum_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts have no terms that it has not."""
    looked = []
    list_leaves = fold_convolutions.ConvolutionMerger._list_leaves

    def counted(self: Any, total: Any) -> Any:
        looked.append(total)
        return list_leaves(self, total)

    monkeypatch.setattr(fold_convolutions.ConvolutionMerger, "_list_leaves", counted)
    shape = (1, 8, 6, 6)
    assert count(added([dict(SQUARE) for _ in range(9)], shape, 8), tmp_path, draw(*shape)) == 1
    assert len(looked) == 2, "once in each of the two compilations"
