"""Scans, scatters, sorts and reductions of dynamic shape have the kernels of fixed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tests.support.dynamic_networks import Input, make_network, make_weights
from tests.support.kernels import dot_target
from tvmflow.core.types import Dimension

SEQ = Dimension("seq", 1, 512, 1, (128,))
BATCH = Dimension("batch", 1, 16)
DIMENSIONS = (BATCH, SEQ)
SIZES = [{"batch": batch, "seq": seq} for batch, seq in ((1, 1), (3, 37), (1, 128), (16, 511))]


def test_sums_along_a_dynamic_axis() -> None:
    def body(emit: Any, x: Any, y: Any) -> Any:
        positions = emit(relax.op.cumsum(x, 1))
        return [positions, emit(relax.op.cumsum(y, 1))]

    inputs = {"x": Input(("batch", "seq"), "int64"), "y": Input(("batch", "seq", 70))}
    network = make_network(DIMENSIONS, inputs, {}, body)
    assert [name for name in network.list_kernels() if "scan" in name] == ["scan", "scan1"]
    network.agrees(lambda x, y: [x.cumsum(1), y.cumsum(1)], SIZES, tolerance=1e-3)


def test_rows_of_a_dynamic_number_are_sorted() -> None:
    def body(emit: Any, x: Any) -> Any:
        return emit(relax.op.topk(x, 5, -1, "values", True, "int32"))

    network = make_network(DIMENSIONS, {"x": Input(("batch", "seq", 30))}, {}, body)
    assert "sort" in network.list_kernels()
    network.agrees(lambda x: np.sort(x, -1)[..., :-6:-1], SIZES)


def test_scatters_of_dynamic_row_counts() -> None:
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


def test_windows_of_a_dynamic_image_are_fused_with_transposes() -> None:
    """That an image has whole windows follows from what its sides are multiples of."""

    def body(emit: Any, x: Any) -> Any:
        op = relax.op
        n, h, w, channels = x.ty.shape.values
        split = emit(op.reshape(x, relax.ShapeExpr([n, h // 4, 4, w // 4, 4, channels])))
        windows = emit(op.permute_dims(split, [0, 1, 3, 2, 4, 5]))
        rows = emit(op.permute_dims(emit(op.exp(windows)), [0, 5, 1, 3, 2, 4]))
        return [windows, emit(op.reshape(rows, relax.ShapeExpr([n, channels, h, w])))]

    def reference(x: Any) -> list[Any]:
        n, h, w, _ = x.shape
        windows = x.reshape(n, h // 4, 4, w // 4, 4, 3).transpose(0, 1, 3, 2, 4, 5)
        return [windows, np.exp(x).transpose(0, 3, 1, 2)]

    sides = (Dimension("h", 4, 64, 4), Dimension("w", 8, 64, 8))
    network = make_network((BATCH, *sides), {"x": Input(("batch", "h", "w", 3))}, {}, body)
    kernels = network.list_kernels()
    assert len(kernels) == 2 and all("transpose" in name for name in kernels)
    network.agrees(
        reference, [{"batch": n, "h": h, "w": w} for n, h, w in ((1, 4, 8), (3, 20, 56))]
    )


def test_dynamically_quantized_products() -> None:
    """The scale of the data comes from all of them, whatever their number is."""
    rng = np.random.default_rng(3)
    integers = rng.integers(-127, 128, (40, 48)).astype(np.int8)

    def body(emit: Any, x: Any, w: Any) -> Any:
        op, zero, last = relax.op, relax.const(0.0, "float32"), relax.const(255.0, "float32")
        low = emit(op.minimum(emit(op.min(x)), zero))
        high = emit(op.maximum(emit(op.max(x)), zero))
        scale = emit(op.divide(emit(op.subtract(high, low)), last))
        start = emit(op.round(emit(op.divide(emit(op.negative(low)), scale))))
        moved = emit(op.add(emit(op.round(emit(op.divide(x, scale)))), start))
        data = emit(op.astype(emit(op.clip(moved, 0, 255)), "uint8"))
        start = emit(op.astype(start, "uint8"))
        difference = emit(
            op.subtract(emit(op.astype(data, "int32")), emit(op.astype(start, "int32")))
        )
        sums = emit(op.matmul(difference, emit(op.astype(w, "int32"))))
        return emit(op.multiply(emit(op.astype(sums, "float32")), scale))

    def reference(x: Any, w: Any) -> Any:
        low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
        scale = (high - low) / np.float32(255)
        start = np.rint(-low / scale)
        data = np.clip(np.rint(x / scale) + start, 0, 255).astype(np.int32) - int(start)
        return (data @ w.astype(np.int32)).astype(np.float32) * scale

    network = make_network(DIMENSIONS, {"x": Input(("batch", "seq", 40))}, {"w": integers}, body)
    target = dot_target("avx512_vnni")
    assert any("quantized_dense" in name for name in network.list_kernels(target))
    network.agrees(reference, SIZES, target, tolerance=1e-3)


def test_float16() -> None:
    """A norm and a product of float16 are computed with float32."""

    def body(emit: Any, x: Any, w: Any) -> Any:
        rows = emit(relax.op.nn.softmax(x, -1))
        return emit(relax.op.matmul(rows, emit(relax.op.astype(w, "float16"))))

    def reference(x: Any, w: Any) -> Any:
        x = x.astype(np.float32)
        weights = np.exp(x - x.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ w).astype(np.float16)

    inputs = {"x": Input(("batch", "seq", 40), "float16")}
    network = make_network(DIMENSIONS, inputs, make_weights(w=[40, 48]), body)
    network.agrees(reference, SIZES, tolerance=1e-2)
