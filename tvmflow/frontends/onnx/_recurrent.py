"""Converts ONNX's recurrent operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.ir_operators import GATES, NOTHING, Activation, Recurrent, RecurrentOperands
from tvmflow.compiler.open_sizes import sizes_of
from tvmflow.compiler.tir_kernels.activations import DEFAULTS

OPERATORS: Final = frozenset(GATES)
"""The operators that this module converts."""

_DIRECTIONS: Final = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}


def convert(
    kind: str, builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> relax.Expr:
    """Convert an LSTM, GRU or RNN.

    Args:
        kind: The operator.
        builder: The builder of the model.
        inputs: The operands of the node; None for missing ones.
        attributes: Its attributes.

    Returns:
        All hidden states, the last ones, and of an LSTM the last cell states.
    """
    operands = RecurrentOperands(*(NOTHING if value is None else value for value in inputs))
    sizes, expected = sizes_of(operands.x), ir.known_shape(operands.weights)[2]
    size = sizes[2] if sizes and len(sizes) == 3 else None
    if size != expected:
        raise ValueError(f"its input has {size} values a step, and its weights are for {expected}")
    directions, rows, _ = ir.known_shape(operands.recurrent)
    bias = sizes_of(operands.bias)
    if bias is not None and bias != (directions, 2 * rows):
        raise ValueError(f"its bias has the shape {list(bias)}, not {[directions, 2 * rows]}")
    layer = Recurrent(
        kind=kind,
        is_reversed=_DIRECTIONS[_text(attributes.get("direction", "forward"))],
        activations=_activations(kind, attributes),
        clip=float(attributes["clip"]) if "clip" in attributes else None,
        has_coupled_gates=bool(attributes.get("input_forget", 0)),
        resets_product=bool(attributes.get("linear_before_reset", 0)),
        is_batch_first=bool(attributes.get("layout", 0)),
    )
    # nothing is rounded
    results = builder.emit(layer.call(*operands[:-1]))
    return relax.Tuple([builder.emit(results[index]) for index in range(len(results.ty.fields))])


def _activations(kind: str, attributes: Mapping[str, Any]) -> tuple[tuple[Activation, ...], ...]:
    """Return the activations of each direction; the attributes hold those of all directions in a row."""
    directions = len(_DIRECTIONS[_text(attributes.get("direction", "forward"))])
    count = len(_ACTIVATIONS[kind])
    names = [_text(name) for name in attributes.get("activations", ())]
    names = names or list(_ACTIVATIONS[kind]) * directions
    if unknown := [name for name in names if name not in DEFAULTS]:
        raise ValueError(f"ONNX has no activation {unknown[0]}")
    parameters = [list(attributes.get(f"activation_{name}", ())) for name in ("alpha", "beta")]
    functions = []
    for name in names:
        # Functions without a parameter leave it to the next one.
        values = [
            numbers.pop(0) if numbers else default
            for numbers, default in zip(parameters, DEFAULTS[name], strict=False)
        ]
        functions.append(Activation(name, *map(float, values)))
    return tuple(
        tuple(functions[index * count : (index + 1) * count]) for index in range(directions)
    )


def _text(value: str | bytes) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else value).lower()
