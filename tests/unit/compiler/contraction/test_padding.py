"""Rows of products and columns of convolutions are padded to whole tiles where that saves time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.helper import make_node as node

from tests.support.onnx_models import agree, draw, model, value


def check_columns(columns: int, stride: int, pad: int, folder: Path, *, transposed: bool) -> None:
    taps, channels = 3, 32
    size = (columns - 1) * stride + taps - 2 * pad
    weights = {"w": draw(channels, 32, taps), "b": draw(32, seed=1)}
    kind, source, result = (
        ("ConvTranspose", columns, size) if transposed else ("Conv", size, columns)
    )
    nodes = [
        node("Relu", ["x"], ["r"]),
        node(kind, ["r", "w", "b"], ["c"], strides=[stride], pads=[pad, pad]),
        node("Relu", ["c"], ["y"]),
    ]
    inputs, outputs = value("x", [2, channels, source]), value("y", [2, 32, result])
    feed = {"x": draw(2, channels, source)}
    agree(model(nodes, [inputs], [outputs], weights), folder, feed)


@pytest.mark.parametrize(
    ("columns", "stride", "pad", "transposed"), [(199, 2, 0, False), (37, 1, 1, True)]
)
def test_columns_of_convolutions(
    columns: int, stride: int, pad: int, transposed: bool, tmp_path: Path
) -> None:
    check_columns(columns, stride, pad, tmp_path, transposed=transposed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_columns_of_random_convolutions(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    columns = int(random.choice([5, 7, 11, 23, 29, 37, 41, 58, 61, 73, 74, 82, 101, 122, 193]))
    transposed = bool(random.integers(2))
    check_columns(
        columns,
        int(random.integers(1, 4)),
        int(random.integers(2)),
        tmp_path,
        transposed=transposed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 9, 37, 41, 58, 61, 73, 74, 82, 101, 122, 193])
def test_rows_of_products(rows: int, tmp_path: Path) -> None:
    made = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", [rows, 96])],
        [value("y", [rows, 50])],
        {"w": draw(96, 50)},
    )
    agree(made, tmp_path, {"x": draw(rows, 96)})
