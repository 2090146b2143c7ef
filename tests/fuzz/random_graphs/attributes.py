"""Values of attributes, and what the rules of several families draw."""

# a rule in few lines, as a table has it
# fmt: off
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from onnx import TensorProto, helper

from tests.fuzz.random_graphs.drawing import Graph, Value, _np

Rule = Callable[[Graph], object]

FLOATS: Final = "float32 float16 float64"
_FLAG: Final = (1, 0)

ATTRIBUTES: Final[Mapping[str, tuple[Any, ...]]] = {
    "alpha": (0.5, 1.0, 0.0, -0.3, 2.0),
    "beta": (0.5, 0.0, 1.5, -1.0),
    "gamma": (1.5, 0.5),
    "lambd": (0.5, 0.0, 1.5),
    "bias": (0.25, 0.0, 2.0),
    "epsilon": (1e-3, 1e-5, 0.1),
    "momentum": (0.5,),
    "keepdims": _FLAG,
    "noop_with_empty_axes": _FLAG,
    "select_last_index": _FLAG,
    "exclusive": _FLAG,
    "reverse": _FLAG,
    "largest": _FLAG,
    "sorted": _FLAG,
    "fmod": _FLAG,
    "detect_negative": _FLAG,
    "detect_positive": _FLAG,
    "saturate": _FLAG,
    "upper": _FLAG,
    "allowzero": _FLAG,
    "stash_type": (1,),
    "training_mode": (0,),
    "approximate": ("tanh", "none"),
    "Cast.round_mode": ("up", "down", "nearest"),
    "CastLike.round_mode": ("up",),
    "BitShift.direction": ("LEFT", "RIGHT"),
    "LpNormalization.p": (1, 2),
    "p": (1, 2, 3),
    "EyeLike.k": (0, 1, -1, 3, -9),
    "EyeLike.dtype": (TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE),
    "align_corners": _FLAG,
    "output_datatype": (TensorProto.FLOAT, TensorProto.DOUBLE),
    "periodic": _FLAG,
    "onesided": _FLAG,
    "inverse": _FLAG,
    "interleaved": _FLAG,
    "reduction": ("mean", "sum", "none"),
    "ignore_index": (0, 1, -100),
    "ScatterElements.reduction": ("none", "add", "mul", "max", "min"),
    "ScatterND.reduction": ("none", "add", "mul", "max", "min"),
    "mode": (),
    "Dropout.seed": (1, 7),
    "is_causal": _FLAG,
    "scale": (0.5, 1.0, 0.1),
    "softcap": (0.0, 2.0),
    "softmax_precision": (TensorProto.FLOAT,),
    "activations": (),
    "center_point_box": _FLAG,
}
"""Values of attributes, for one operator or for all; what a rule gives itself is not drawn from here."""


def drawn(g: Graph, *excluded: str) -> dict[str, Any]:
    """Return some of the attributes that the schema has and the table knows."""
    found = {}
    for name, attribute in sorted(g.schema.attributes.items()):
        values = ATTRIBUTES.get(f"{g.operator}.{name}", ATTRIBUTES.get(name, ()))
        if values and name not in excluded and (attribute.required or g.draw.chance(40)):
            found[name] = g.draw.choice(values)
    return found


def is_float(dtype: str) -> bool:
    return "float" in dtype


def element_of(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(_np(dtype)))


def with_input(g: Graph) -> None:
    """Add an input and an output of it to a graph of constants: there must be something to run."""
    if not g.inputs:
        x = g.tensor([2], "float32", constant=False)
        g.outputs = [*g.outputs, *g.then("Neg", x.name)]


def quantized_operands(g: Graph, dtype: str, shape: list[int] | None = None) -> list[Value]:
    """Return a scale and a zero point."""
    shape = shape or []
    scales = g.rng.choice([0.05, 0.1, 0.25, 0.03], shape)
    zeros = g.rng.integers(0, 4, shape)
    return [g.tensor(shape, "float32", values=scales, constant=True), g.tensor(shape, dtype, values=zeros, constant=True)]
