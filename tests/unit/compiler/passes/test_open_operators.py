"""Scans, scatters, sorts and reductions of open sizes have the kernels of fixed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tests.support.open_networks import Input, make_network
from tvmflow.core.types import Dimension

SEQ = Dimension("seq", 1, 512, 1, (128,))
BATCH = Dimension("batch", 1, 16)
DIMENSIONS = (BATCH, SEQ)
SIZES = [{"batch": batch, "seq": seq} for batch, seq in ((1, 1), (3, 37), (1, 128), (16, 511))]


def test_sums_along_an_open_axis() -> None:
    def body(emit: Any, x: Any, y: Any) -> Any:
        positions = emit(relax.op.cumsum(x, 1))
        return [positions, emit(relax.op.cumsum(y, 1))]

    inputs = {"x": Input(("batch", "seq"), "int64"), "y": Input(("batch", "seq", 70))}
    network = make_network(DIMENSIONS, inputs, {}, body)
    assert [name for name in network.list_kernels() if "scan" in name] == ["scan", "scan1"]
    network.agrees(lambda x, y: [x.cumsum(1), y.cumsum(1)], SIZES, tolerance=1e-3)


def test_rows_of_an_open_number_are_sorted() -> None:
    def body(emit: Any, x: Any) -> Any:
        return emit(relax.op.topk(x, 5, -1, "values", True, "int32"))

    network = make_network(DIMENSIONS, {"x": Input(("batch", "seq", 30))}, {}, body)
    assert "sort" in network.list_kernels()
    network.agrees(lambda x: np.sort(x, -1)[..., :-6:-1], SIZES)


def test_scatters_of_an_open_number_of_rows() -> None:
    def body(emit: Any, x: Any, places: Any, rows: Any) -> Any:
        return emit(relax.op.scatter_nd(x, places, rows, "add"))

    def reference(x: Any, places: Any, rows: Any) -> Any:
        result = x.copy()
        np.add.at(result, places[:, 0], rows)
        return result

    inputs = {
        "x": Input((100, 24)),
        "places": Input(("batch", 1), "int64"),
        "rows": Input(("batch", 24)),
    }

    network = make_network(DIMENSIONS, inputs, {}, body)
    assert "scatter" in network.list_kernels()
    network.agrees(reference, SIZES)


def test_reductions_to_one_number_are_split() -> None:
    def body(emit: Any, x: Any) -> Any:
        return emit(relax.op.max(x))

    network = make_network(DIMENSIONS, {"x": Input(("batch", "seq", 96))}, {}, body)
    assert network.list_kernels() == ["max", "max1"]
    network.agrees(lambda x: np.asarray(x.max()), SIZES)
