"""Converts ONNX's recurrent operators: a matrix product of all time steps, and a kernel that loops over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler.passes.rewriter import OPAQUE
from tvmflow.compiler.tir_kernels.activations import DEFAULTS, Activation
from tvmflow.compiler.tir_kernels.recurrent import GATES, LANES, RecurrentLayer, recurrent

OPERATORS: Final = frozenset(GATES)
"""The operators that this module converts."""

_DIRECTIONS: Final = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}


class _Operands(NamedTuple):
    """The inputs of a node; None for missing ones."""

    x: Any
    weights: Any
    recurrent: Any
    bias: Any = None
    lengths: Any = None
    hidden: Any = None
    cell: Any = None
    peepholes: Any = None


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
    return _Converter(kind, builder, _Operands(*inputs), attributes).convert()


class _Converter:
    """Converts one node. Letters: `d` directions, `g` gates, `h` hidden units, `u` those padded to tiles of `LANES`."""

    def __init__(
        self,
        kind: str,
        builder: relax.BlockBuilder,
        operands: _Operands,
        attributes: Mapping[str, Any],
    ) -> None:
        self._builder = builder
        self._operands = operands
        self._dtype = _dtype(operands.x)
        # Sums of float16 would lose most of their bits.
        self._sum_dtype = "float32" if self._dtype == "float16" else self._dtype
        self._is_batch_first = bool(attributes.get("layout", 0))
        x = _shape(operands.x)
        self._layer = RecurrentLayer(
            kind=kind,
            steps=x[1] if self._is_batch_first else x[0],
            batch=x[0] if self._is_batch_first else x[1],
            hidden=_shape(operands.recurrent)[2],
            is_reversed=_DIRECTIONS[_text(attributes.get("direction", "forward"))],
            activations=_activations(kind, attributes),
            clip=float(attributes["clip"]) if "clip" in attributes else None,
            has_coupled_gates=bool(attributes.get("input_forget", 0)),
            resets_product=bool(attributes.get("linear_before_reset", 0)),
        )

    def convert(self) -> relax.Expr:
        """Emit the layer, and return its results."""
        layer, operands = self._layer, self._operands
        is_lstm = layer.kind == "LSTM"
        bias, product_bias = self._biases()
        arguments = (
            self._project(bias),
            self._pack_recurrent(),
            self._initial(operands.hidden),
            self._initial(operands.cell) if is_lstm else None,
            self._peepholes() if is_lstm and operands.peepholes is not None else None,
            product_bias,
            operands.lengths,
        )

        def kernel(*tensors: Any) -> Any:
            places = iter(tensors)
            return recurrent(layer, *(None if a is None else next(places) for a in arguments))

        results = self._builder.emit_te(
            kernel,
            *(argument for argument in arguments if argument is not None),
            primfunc_name_hint=layer.kind.lower(),
            primfunc_attrs={"tirx.is_scheduled": True, **OPAQUE},
        )
        count = len(results.ty.fields) if isinstance(results.ty, relax.TupleType) else 0
        fields = [self._emit(relax.TupleGetItem(results, index)) for index in range(count)]
        states, *last = (self._cast(field, self._dtype) for field in fields)
        if self._is_batch_first:
            states = self._emit(relax.op.permute_dims(states, [2, 0, 1, 3]))
            last = [self._emit(relax.op.permute_dims(state, [1, 0, 2])) for state in last]
        return relax.Tuple([states, *last])

    def _project(self, bias: Any) -> Any:
        """Return the inputs times their weights, plus biases: (steps, n, d, tiles, g, LANES)."""
        layer = self._layer
        x = self._operands.x
        if self._is_batch_first:
            x = self._emit(relax.op.permute_dims(x, [1, 0, 2]))
        size, expected = _shape(x)[2], _shape(self._operands.weights)[2]
        if size != expected:
            raise ValueError(
                f"its input has {size} values a step, and its weights are for {expected}"
            )
        columns = layer.directions * layer.gates * layer.tiles * LANES
        weights = self._split_units(self._operands.weights, [layer.directions, layer.gates], [size])
        weights = self._emit(relax.op.permute_dims(weights, [4, 0, 2, 1, 3]))
        weights = self._reshape(weights, [size, columns])
        rows = self._cast(self._reshape(x, [layer.steps * layer.batch, size]), self._sum_dtype)
        product = self._emit(relax.op.matmul(rows, weights))
        if bias is not None:
            bias = self._emit(relax.op.permute_dims(bias, [0, 2, 1, 3]))
            product = self._emit(relax.op.add(product, self._reshape(bias, [columns])))
        shape = [layer.steps, layer.batch, layer.directions, layer.tiles, layer.gates, LANES]
        return self._reshape(product, shape)

    def _pack_recurrent(self) -> Any:
        """Return the recurrent weights (d, g·h, h) as (d, tiles, u, g, LANES)."""
        layer = self._layer
        weights = self._split_units(
            self._operands.recurrent, [layer.directions, layer.gates], [layer.hidden]
        )
        missing = layer.tiles * LANES - layer.hidden
        if missing:
            weights = self._emit(relax.op.nn.pad(weights, [0] * 9 + [missing]))
        return self._emit(relax.op.permute_dims(weights, [0, 2, 4, 1, 3]))

    def _biases(self) -> tuple[Any, Any]:
        """Return the sum of the biases (d, g, tiles, LANES), and that of a GRU's product with its state (d, u)."""
        layer = self._layer
        needs_product_bias = layer.kind == "GRU" and layer.resets_product
        if self._operands.bias is None:
            zeros = self._constant(np.zeros((layer.directions, layer.tiles * LANES)))
            return None, zeros if needs_product_bias else None
        biases = self._split_units(self._operands.bias, [layer.directions, 2, layer.gates], [])
        sizes = [layer.directions, layer.gates, layer.tiles, LANES]
        of_input, of_state = (
            self._reshape(self._slice(biases, 1, index, index + 1), sizes) for index in range(2)
        )
        if not needs_product_bias:
            return self._emit(relax.op.add(of_input, of_state)), None
        product_bias = self._slice(of_state, 1, 2, 3)
        # The reset gate does not multiply the other two.
        keep = self._constant(np.reshape([1, 1, 0], (3, 1, 1)))
        of_state = self._emit(relax.op.multiply(of_state, keep))
        product_bias = self._reshape(product_bias, [layer.directions, layer.tiles * LANES])
        return self._emit(relax.op.add(of_input, of_state)), product_bias

    def _peepholes(self) -> Any:
        layer = self._layer
        weights = self._split_units(self._operands.peepholes, [layer.directions, 3], [])
        return self._reshape(weights, [layer.directions, 3, layer.tiles * LANES])

    def _initial(self, state: Any) -> Any:
        """Return an initial state as (d, n, u)."""
        layer = self._layer
        width = layer.tiles * LANES
        if state is None:
            return self._constant(np.zeros((layer.directions, layer.batch, width)))
        if self._is_batch_first:
            state = self._emit(relax.op.permute_dims(state, [1, 0, 2]))
        split = self._split_units(state, [layer.directions, layer.batch], [])
        return self._reshape(split, [layer.directions, layer.batch, width])

    def _split_units(self, tensor: Any, outer: Sequence[int], inner: Sequence[int]) -> Any:
        """Return a tensor (outer·h, inner) as (outer, tiles, LANES, inner), with zeros for units that are missing."""
        layer = self._layer
        tensor = self._cast(tensor, self._sum_dtype)
        tensor = self._reshape(tensor, [*outer, layer.hidden, *inner])
        missing = layer.tiles * LANES - layer.hidden
        if missing:
            widths = [0] * (2 * len(outer) + 1) + [missing] + [0] * (2 * len(inner))
            tensor = self._emit(relax.op.nn.pad(tensor, widths))
        return self._reshape(tensor, [*outer, layer.tiles, LANES, *inner])

    def _constant(self, array: np.ndarray[Any, Any]) -> Any:
        # without a dtype, TVM would make float64 float32
        return relax.const(array.astype(self._sum_dtype), self._sum_dtype)

    def _slice(self, tensor: Any, axis: int, begin: int, end: int) -> Any:
        return self._emit(relax.op.strided_slice(tensor, [axis], [begin], [end]))

    def _reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return self._emit(relax.op.reshape(tensor, list(shape)))

    def _cast(self, tensor: Any, dtype: str) -> Any:
        if _dtype(tensor) == dtype:
            return tensor
        return self._emit(relax.op.astype(tensor, dtype))

    def _emit(self, expr: Any) -> Any:
        return self._builder.emit(expr)


def _activations(kind: str, attributes: Mapping[str, Any]) -> tuple[tuple[Activation, ...], ...]:
    """Return the activations of each direction; those of all directions stand one after the other in the attributes."""
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


def _shape(tensor: Any) -> list[int]:
    return [int(size) for size in tensor.ty.shape]


def _dtype(tensor: Any) -> str:
    return str(tensor.ty.dtype.dtype)
