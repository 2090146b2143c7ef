"""Converts NonMaxSuppression to an operator of static shape, which counts the boxes that it selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler.ir_operators import SELECTED_COLUMNS, NonMaxSuppression


def convert(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> Any:
    """Return the selected boxes, and in the rows after them zeros: as many rows as can be selected.

    As in ONNX Runtime, boxes come class by class, by falling score, equal scores in the order of the
    boxes, and one is left out that overlaps a selected one by more than the threshold. A score that is
    NaN is never selected.
    """
    boxes, scores = inputs[:2]
    limit, overlap, threshold = [*inputs[2:], None, None, None][:3]
    batch, classes, count = (int(extent) for extent in scores.ty.shape)
    most = count
    if limit is None:
        most = 0
    elif isinstance(limit, tvm.ir.Constant):
        # "All boxes" is often written as the largest number.
        most = min(max(int(limit.value.numpy().item()), 0), count)
    rows = batch * classes * most
    if rows == 0:
        return relax.const(np.zeros((0, SELECTED_COLUMNS), np.int64), "int64")
    operands = [
        _as_vector(builder, value, default)
        for value, default in (
            (limit, np.int64(0)),
            (overlap, np.float32(0)),
            (threshold, np.float32(-np.inf)),
        )
    ]
    operator = NonMaxSuppression(
        rows=rows,
        is_centered=bool(attributes.get("center_point_box", 0)),
        takes_all_scores=threshold is None,
    )
    result = builder.emit(operator.call(boxes, scores, *operands))
    return builder.emit(relax.TupleGetItem(result, 0))


def _as_vector(builder: relax.BlockBuilder, value: Any, default: Any) -> Any:
    """Return an operand, or the default of a missing one, as a tensor of one number."""
    if value is None:
        return relax.const(default.reshape(1), str(default.dtype))
    if isinstance(value, tvm.ir.Constant):
        number = value.value.numpy().astype(default.dtype).reshape(1)
        return relax.const(number, str(default.dtype))
    number = builder.emit(relax.op.astype(value, str(default.dtype)))
    return builder.emit(relax.op.reshape(number, (1,)))
