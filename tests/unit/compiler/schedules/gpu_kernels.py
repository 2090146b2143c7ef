"""Kernels for GPUs, scheduled and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from tests.support.onnx_models import draw, model, value

Made = tuple[ModelProto, dict[str, Any]]


def one(
    kind: str,
    data: Sequence[int],
    weights: Mapping[str, Any] | None = None,
    *,
    then: str = "",
    dtype: str = "float32",
    **attributes: Any,
) -> Made:
    """Return a model of one operator, and of a function of its result, with its input."""
    names = ["data", *(weights or {})]
    nodes = [helper.make_node(kind, names, ["result"], **attributes)]
    if then:
        nodes.append(helper.make_node(then, ["result"], ["end"]))
    result = value("end" if then else "result", None, dtype)
    typed = {
        name: np.asarray(array).astype(_type_of(array, dtype))
        for name, array in (weights or {}).items()
    }
    made = model(nodes, [value("data", data, dtype)], [result], typed)
    return made, {"data": draw(*data, seed=3).astype(dtype)}


def _type_of(array: Any, dtype: str) -> str:
    own = str(np.asarray(array).dtype)
    return dtype if own.startswith("float") else own


def conv(
    data: Sequence[int],
    weights: Sequence[int],
    *,
    bias: bool = True,
    then: str = "Relu",
    **more: Any,
) -> Made:
    arrays = {"w": draw(*weights, seed=1)}
    if bias:
        arrays["b"] = draw(weights[0], seed=2)
    return one("Conv", data, arrays, then=then, **more)


def product(*shapes: Sequence[int], then: str = "") -> Made:
    """Return the product of two inputs."""
    nodes = [helper.make_node("MatMul", ["a", "b"], ["result"])]
    if then:
        nodes.append(helper.make_node(then, ["result"], ["end"]))
    inputs = [value(name, shape) for name, shape in zip("ab", shapes, strict=True)]
    made = model(nodes, inputs, [value("end" if then else "result", None)])
    return made, {
        name: draw(*shape, seed=i) for i, (name, shape) in enumerate(zip("ab", shapes, strict=True))
    }
