"""Lowers recurrent layers to a matrix product of all time steps, and a kernel that loops over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.ir_operators import Recurrent, RecurrentOperands
from tvmflow.compiler.open_sizes import IrSize, is_open, plain, sizes_of
from tvmflow.compiler.passes.rewriter import OPAQUE, MainRewriter, TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.recurrent import RecurrentLayer, count_rows, recurrent

# Hidden units on CPUs are padded to a multiple of this, so that sums are alike whatever the vectors.
_UNIT_MULTIPLE: Final = 16
# Sequences side by side -> the vectors of units whose sums registers hold.
_VECTORS_OF_ROWS: Final = {1: 4, 2: 2}


def padded_units(hidden: int) -> int:
    """Return the number of hidden units with those of padding on CPUs."""
    return -(-hidden // _UNIT_MULTIPLE) * _UNIT_MULTIPLE


def lower_recurrent(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Lower the recurrent layers of a model for the target."""
    if not ir.calls_operator(mod, Recurrent.NAME):
        return mod
    return rewrite_main(mod, _RecurrentRewriter, context)


class _RecurrentRewriter(TargetRewriter):
    """Rewrites recurrent layers."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.as_call(call, Recurrent.NAME) is None:
            return rewritten
        is_gpu = not self._context.is_cpu() and self.depends_on_inputs(call)
        operator, operands = Recurrent.read(call), RecurrentOperands(*rewritten.args)
        sizes, hidden = sizes_of(operands.x), ir.known_shape(operands.recurrent)[2]
        assert sizes is not None, "the rank of a layer's data is known"
        steps, batch = sizes[1::-1] if operator.is_batch_first else sizes[:2]
        units = hidden if is_gpu else padded_units(hidden)
        lanes = units if is_gpu else self._choose_lanes(operator, batch)
        cpu = self._context.cpu
        layer = RecurrentLayer(
            operator=operator,
            steps=steps,
            batch=batch,
            hidden=hidden,
            units=units,
            lanes=lanes,
            factors=1 if is_gpu or cpu is None else max(1, cpu.factor_lanes),
            typical=(self.numbers.size(steps), self.numbers.size(batch)),
        )
        return _Lowering(self, layer, operands).lower(is_gpu)

    def _choose_lanes(self, operator: Recurrent, batch: IrSize) -> int:
        """Return the hidden units of a tile on a CPU.

        With one vector for each of its four gates, an LSTM keeps all sums in registers. With fewer gates,
        more vectors for each are faster: they share what is read of the state. So are more vectors of an LSTM
        where factors are lanes and few sequences are computed side by side; its functions have other vectors
        to compute while they wait, too.
        """
        cpu = self._context.cpu
        if cpu is None or operator.kind != "LSTM":
            return _UNIT_MULTIPLE
        if not cpu.factor_lanes or is_open(batch):
            return cpu.lanes
        vectors = _VECTORS_OF_ROWS.get(count_rows(plain(batch)), 1)
        return cpu.lanes * vectors


class _Lowering:
    """The lowering of a layer: `d` directions, `g` gates, `h` units, `u` with padding (tiles of lanes)."""

    def __init__(
        self, rewriter: MainRewriter, layer: RecurrentLayer, operands: RecurrentOperands
    ) -> None:
        self._rewriter = rewriter
        self._layer, self._operator = layer, layer.operator
        self._operands = operands
        self._dtype = ir.dtype_of(operands.x)
        # Sums of float16 would lose most of their bits.
        self._sum_dtype = "float32" if self._dtype == "float16" else self._dtype

    def lower(self, is_gpu: bool) -> relax.Expr:
        """Emit the layer, and return its results."""
        operator, operands = self._operator, self._operands
        is_lstm = operator.kind == "LSTM"
        bias, product_bias = self._biases()
        arguments = (
            self._project(bias),
            self._pack_recurrent(),
            self._initial(operands.hidden),
            self._initial(operands.cell) if is_lstm else None,
            self._peepholes() if is_lstm and _is_given(operands.peepholes) else None,
            product_bias,
            operands.lengths if _is_given(operands.lengths) else None,
        )

        def kernel(*tensors: Any) -> Any:
            places = iter(tensors)
            present = (None if argument is None else next(places) for argument in arguments)
            return recurrent(self._layer, is_gpu, *present)

        results = self._rewriter.builder_.emit_te(
            kernel,
            *(argument for argument in arguments if argument is not None),
            primfunc_name_hint=operator.kind.lower(),
            primfunc_attrs={"tirx.is_scheduled": True, **OPAQUE},
        )
        fields = [self._emit(results[index]) for index in range(len(results.ty.fields))]
        states, *last = (self._rewriter.cast(field, self._dtype) for field in fields)
        if operator.is_batch_first:
            states = self._emit(relax.op.permute_dims(states, [2, 0, 1, 3]))
            last = [self._emit(relax.op.permute_dims(state, [1, 0, 2])) for state in last]
        return relax.Tuple([states, *last])

    def _project(self, bias: Any) -> Any:
        """Return the inputs times their weights, plus biases: (steps, n, d, tiles, g, lanes)."""
        layer, operator = self._layer, self._operator
        x = self._operands.x
        if operator.is_batch_first:
            x = self._emit(relax.op.permute_dims(x, [1, 0, 2]))
        size = ir.known_shape(self._operands.weights)[2]
        columns = operator.directions * operator.gates * layer.units
        weights = self._split_units(
            self._operands.weights, [operator.directions, operator.gates], [size]
        )
        weights = self._emit(relax.op.permute_dims(weights, [4, 0, 2, 1, 3]))
        weights = self._reshape(weights, [size, columns])
        rows = self._reshape(x, [layer.steps * layer.batch, size])
        product = self._emit(relax.op.matmul(self._cast(rows), weights))
        if bias is not None:
            bias = self._emit(relax.op.permute_dims(bias, [0, 2, 1, 3]))
            product = self._emit(relax.op.add(product, self._reshape(bias, [columns])))
        outer = [layer.steps, layer.batch, operator.directions]
        return self._reshape(product, [*outer, layer.tiles, operator.gates, layer.lanes])

    def _pack_recurrent(self) -> Any:
        """Return the recurrent weights (d, g·h, h) as (d, tiles, u, g, lanes)."""
        layer, operator = self._layer, self._operator
        weights = self._split_units(
            self._operands.recurrent, [operator.directions, operator.gates], [layer.hidden]
        )
        if missing := layer.units - layer.hidden:
            weights = self._emit(relax.op.nn.pad(weights, [0] * 9 + [missing]))
        return self._emit(relax.op.permute_dims(weights, [0, 2, 4, 1, 3]))

    def _biases(self) -> tuple[Any, Any]:
        """Return the sum of the biases (d, g, tiles, lanes), and a GRU's bias of the state's product (d, u)."""
        layer, operator = self._layer, self._operator
        directions, gates = operator.directions, operator.gates
        needs_product_bias = operator.kind == "GRU" and operator.resets_product
        if not _is_given(self._operands.bias):
            zeros = self._constant(np.zeros((directions, layer.units)))
            return None, zeros if needs_product_bias else None
        biases = self._split_units(self._operands.bias, [directions, 2, gates], [])
        sizes = [directions, gates, layer.tiles, layer.lanes]
        of_input, of_state = (
            self._reshape(self._slice(biases, 1, index, index + 1), sizes) for index in range(2)
        )
        if not needs_product_bias:
            return self._emit(relax.op.add(of_input, of_state)), None
        product_bias = self._slice(of_state, 1, 2, 3)
        # The reset gate does not multiply the other two.
        keep = self._constant(np.reshape([1, 1, 0], (3, 1, 1)))
        of_state = self._emit(relax.op.multiply(of_state, keep))
        product_bias = self._reshape(product_bias, [directions, layer.units])
        return self._emit(relax.op.add(of_input, of_state)), product_bias

    def _peepholes(self) -> Any:
        directions = self._operator.directions
        weights = self._split_units(self._operands.peepholes, [directions, 3], [])
        return self._reshape(weights, [directions, 3, self._layer.units])

    def _initial(self, state: Any) -> Any:
        """Return an initial state as (d, n, u)."""
        outer = [self._operator.directions, self._layer.batch]
        if not _is_given(state):
            if not is_open(self._layer.batch):
                return self._constant(np.zeros((*outer, self._layer.units)))
            sizes = relax.ShapeExpr([*outer, self._layer.units])
            return self._emit(relax.op.zeros(sizes, self._sum_dtype))
        if self._operator.is_batch_first:
            state = self._emit(relax.op.permute_dims(state, [1, 0, 2]))
        return self._reshape(self._split_units(state, outer, []), [*outer, self._layer.units])

    def _split_units(self, tensor: Any, outer: Sequence[IrSize], inner: Sequence[int]) -> Any:
        """Return a tensor (outer·h, inner) as (outer, tiles, lanes, inner), with zeros for missing units."""
        layer = self._layer
        tensor = self._reshape(self._cast(tensor), [*outer, layer.hidden, *inner])
        if missing := layer.units - layer.hidden:
            widths = [0] * (2 * len(outer) + 1) + [missing] + [0] * (2 * len(inner))
            tensor = self._emit(relax.op.nn.pad(tensor, widths))
        return self._reshape(tensor, [*outer, layer.tiles, layer.lanes, *inner])

    def _constant(self, array: np.ndarray[Any, Any]) -> Any:
        # without a dtype, TVM would make float64 float32
        return relax.const(array.astype(self._sum_dtype), self._sum_dtype)

    def _slice(self, tensor: Any, axis: int, begin: int, end: int) -> Any:
        return self._emit(relax.op.strided_slice(tensor, [axis], [begin], [end]))

    def _reshape(self, tensor: Any, shape: Sequence[IrSize]) -> Any:
        return self._rewriter.reshape(tensor, shape)

    def _cast(self, tensor: Any) -> Any:
        return self._rewriter.cast(tensor, self._sum_dtype)

    def _emit(self, expr: Any) -> Any:
        return self._rewriter.emit(expr)


def _is_given(operand: Any) -> bool:
    return not isinstance(operand, relax.Tuple)
