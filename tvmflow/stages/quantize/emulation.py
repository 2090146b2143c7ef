"""Emulation of a quantized model in float (fake quantization).

Layer weights, activation scales and bias corrections are parameters of the emulating model. One set of values computes
the float model; another one lets layers read rounded data and rounded weights. So the model is compiled only once,
before any scale is known. It may accumulate floats in a different order than the float or the quantized library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.core.types import Array
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes
from tvmflow.graph.ir_operators import RecurrentOperands, RoundedData
from tvmflow.graph.rewriter import rewrite_main
from tvmflow.stages.quantize.channels import broadcast, channel_axis, input_axis
from tvmflow.stages.quantize.insertion import (
    DataScale,
    LayerRewriter,
    LayerWeights,
    Quantization,
    add_parameters,
    free_name,
)
from tvmflow.stages.quantize.points import EXACT, ROUNDED, FloatModel, Integers, Layer
from tvmflow.stages.quantize.weights import BlockQuantizedIntegers

_EXACT: Final = (1.0, 1.0, -1.0, 1.0, 0.0)
"""The values of `_Rounding` that leave data unchanged."""


class _Rounding(NamedTuple):
    """The parameters that round data: the operands of `RoundedData` after the data."""

    kept: Any
    inverse: Any
    low: Any
    high: Any
    scale: Any


class _Operands(NamedTuple):
    """The parameters of a layer; a recurrent layer takes `rounding` as an operand."""

    rounding: Any
    weights: Any
    correction: Any = None


class Emulation:
    """A float model with additional parameters that emulate integers.

    `floats` holds the known weights, by the variable of their layer. Other operators may read `tensors` as integers,
    too, and smoothing may divide the channels of `divided`.

    Attributes:
        model: The model with these parameters; it keeps the float model's variables.
    """

    def __init__(
        self,
        model: FloatModel,
        layers: Sequence[Layer],
        floats: Mapping[Any, Array],
        tensors: Sequence[Any],
        divided: Sequence[Any],
    ) -> None:
        self._names = {str(var.name) for var in model.main.params}
        self._exact: dict[Any, Array] = {}
        self._layers, self._tensors = layers, tensors
        self._flow = ir.DataFlow(model.main)
        self._operands = {
            layer.var: self._add_operands(layer, floats[layer.var], layer.data in set(divided))
            for layer in layers
            if layer.var in floats
        }
        self._roundings = {
            var: _Rounding(*(self._add(f"{var.name}.rounded", np.array(v)) for v in _EXACT))
            for var in tensors
        }
        mod = add_parameters(model.mod, [], list(self._exact))
        mod = rewrite_main(mod, _Emulator, self._operands, self._roundings)
        exact = {str(var.name): array for var, array in self._exact.items()}
        self.model = FloatModel(mod, {**model.params, **exact}, ())

    def _add(self, name: str, value: Array) -> Any:
        kind = relax.TensorType(value.shape, "float32")
        var = relax.Var(free_name(name, self._names), kind)
        self._exact[var] = value.astype(np.float32, copy=False)
        return var

    def _add_operands(self, layer: Layer, weights: Array, is_divided: bool) -> _Operands:
        if layer.is_recurrent:
            rounding = self._add(f"{layer.name}.rounded", EXACT)
            return _Operands(rounding, self._add(f"{layer.name}.weights", weights))
        values = [np.array(value) for value in _EXACT]
        if is_divided:
            axis, shape = channel_axis(layer), known_sizes(layer.data)
            for position in (1, 4):
                own = np.full(int(shape[axis]), values[position])
                values[position] = broadcast(own, len(shape), axis)
        roundings = _Rounding(*(self._add(f"{layer.name}.rounded", own) for own in values))
        result = known_sizes(layer.var)
        axis = -1 if layer.operator == "matmul" else 1
        channels = [1] * len(result)
        channels[axis] = int(result[axis])
        return _Operands(
            roundings,
            self._add(f"{layer.name}.weights", weights),
            self._add(f"{layer.name}.correction", np.zeros(channels)),
        )

    def find_weights(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[Any],
        quantization: Quantization,
        factors: Mapping[Any, Array],
    ) -> dict[str, Array]:
        """Return the parameter values that let the model emulate a quantized model.

        `layers` and `tensors` belong to the quantized model, and have the same order as this model's. `factors` holds
        the smoothing factors by tensor of this model, which is not smoothed.
        """
        found = {**self.model.params}

        def put(var: Any, value: Array) -> None:
            name = str(var.name)
            found[name] = np.broadcast_to(value, found[name].shape).astype(np.float32)

        def put_rounding(own: _Rounding, scale: DataScale, factor: Array) -> None:
            for var, value in zip(
                own, _round_by(scale, quantization.integers, factor), strict=True
            ):
                put(var, value)

        for ours, theirs in zip(self._layers, layers, strict=True):
            rounded = quantization.weights.get(theirs.var)
            if rounded is None:
                continue
            operands, factor = self._operands[ours.var], np.ones(())
            if isinstance(rounded, BlockQuantizedIntegers):
                weights = rounded.to_float().T
            else:
                weights = rounded.to_real(ours.axis)
            if (own := factors.get(ours.data)) is not None:
                axis = input_axis(ours, self._flow) or 0
                weights = weights / broadcast(own, weights.ndim, axis)
                factor = broadcast(own, len(known_sizes(ours.data)), channel_axis(ours))
            put(operands.weights, weights)
            if ours.is_recurrent:
                if theirs.var in quantization.states:
                    put(operands.rounding, ROUNDED)
                continue
            if isinstance(rounded, LayerWeights) and theirs.source in quantization.data:
                put_rounding(operands.rounding, quantization.data[theirs.source], factor)
            if (correction := quantization.corrections.get(theirs.var)) is not None:
                put(operands.correction, correction)
        for ours_var, theirs_var in zip(self._tensors, tensors, strict=True):
            if theirs_var in quantization.data:
                put_rounding(self._roundings[ours_var], quantization.data[theirs_var], np.ones(()))
        return found


def _round_by(scale: DataScale, integers: Integers, factor: Array) -> _Rounding:
    """Return the parameters that fake-quantize data with a scale, a smoothing factor and a range."""
    limits, zero_point = np.iinfo(integers.dtype), scale.zero_point
    return _Rounding(
        kept=np.zeros(()),
        inverse=1 / (scale.scale * factor),
        low=np.array(limits.min - zero_point),
        high=np.array(limits.max - zero_point),
        scale=scale.scale * factor,
    )


class _Emulator(LayerRewriter):
    """Lets layers read parameter weights and rounded data, and `FOLLOWERS` the rounded data."""

    def __init__(
        self, mod: Any, operands: Mapping[Any, _Operands], roundings: Mapping[Any, _Rounding]
    ) -> None:
        super().__init__(mod, operands)
        self._roundings = roundings
        self._rounded: dict[Any, Any] = {}

    def rewrite_layer(self, call: relax.Call, rewritten: relax.Call, layer: _Operands) -> Any:
        if layer.correction is None:
            operands = RecurrentOperands(*rewritten.args)
            operands = operands._replace(recurrent=layer.weights, rounding=layer.rounding)
            return relax.Call(call.op, list(operands), call.attrs, call.ty_args)
        data = self._round(rewritten.args[0], layer.rounding)
        product = relax.Call(call.op, [data, layer.weights], call.attrs, call.ty_args)
        return relax.op.add(self.emit(product), layer.correction)

    def replace(self, var: Any) -> Any:
        if (own := self._roundings.get(var)) is None:
            return None
        if var not in self._rounded:
            self._rounded[var] = self._round(self.visit_expr(var), own)
        return self._rounded[var]

    def _round(self, data: Any, own: _Rounding) -> Any:
        return self.emit(RoundedData().call(data, *own))
