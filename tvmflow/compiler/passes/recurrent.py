"""Lowers recurrent layers to a matmul for all time steps, and a kernel that loops over time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.tir_kernels.recurrent import (
    TERMS,
    Dots,
    RecurrentInputs,
    RecurrentLayer,
    count_rows,
    recurrent,
)
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, plain, sizes_of
from tvmflow.graph.ir import OPAQUE
from tvmflow.graph.ir_operators import STATE_STEPS, Recurrent, RecurrentOperands
from tvmflow.graph.rewriter import MainRewriter

# Hidden units on CPUs are padded to a multiple of this, so that the order of additions does not depend on the
# vector length.
_UNIT_MULTIPLE: Final = 16
# Number of sequences computed together -> how many vectors of units have accumulators that fit the registers.
_VECTORS_OF_ROWS: Final = {1: 4, 2: 2}


def padded_units(hidden: int) -> int:
    """Return the number of hidden units on CPUs, including padding."""
    return -(-hidden // _UNIT_MULTIPLE) * _UNIT_MULTIPLE


class RecurrentRewriter(TargetRewriter):
    """Lowers recurrent layers for the target."""

    OPERATORS = (Recurrent.NAME,)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        is_gpu = not self._context.is_cpu() and self.depends_on_inputs(call)
        operator, operands = Recurrent.read(call), RecurrentOperands(*rewritten.args)
        sizes, hidden = sizes_of(operands.x), ir.known_shape(operands.recurrent)[-1]
        assert sizes is not None, "the rank of a layer's data is known"
        steps, batch = sizes[1::-1] if operator.is_batch_first else sizes[:2]
        units = hidden if is_gpu else padded_units(hidden)
        lanes = units if is_gpu else self._choose_lanes(operator, batch)
        cpu = self._context.cpu
        integers = None if is_gpu else self._find_integers(call)
        layer = RecurrentLayer(
            operator=operator,
            steps=steps,
            batch=batch,
            hidden=hidden,
            units=units,
            lanes=lanes,
            factors=1 if is_gpu or cpu is None else max(1, cpu.multiplicand_lanes),
            typical=(self.tuning_sizes.size(steps), self.tuning_sizes.size(batch)),
            dots=None if integers is None else self._find_dots(operands, lanes),
        )
        return _Lowering(self, layer, operands, integers).lower(is_gpu)

    def _find_integers(self, call: relax.Call) -> tuple[Any, Any] | None:
        """Return int8 recurrent weights (d·g·h, h) and the scale of each row; None for other weights."""
        var = self.flow.resolve(RecurrentOperands(*call.args).recurrent)
        real = self.flow.find_call(var, "relax.dequantize")
        if real is None or not ir.is_float32(real):
            return None
        (integers, scales, zeros), shape = real.args, ir.known_shape(real)
        is_along_rows = len(shape) == 2 and int(real.attrs.axis) in (0, -2)
        if not is_along_rows or ir.known_shape(scales) != shape[:1]:
            return None
        if ir.dtype_of(integers) != "int8" or not ir.is_zero(zeros):
            return None
        return self.visit_expr(integers), self.visit_expr(scales)

    def _find_dots(self, operands: RecurrentOperands, lanes: int) -> Dots | None:
        """Return the dot products for a layer whose state is rounded; None if it multiplies in float32."""
        cpu, rounding = self._context.cpu, operands.rounding
        array = ir.constant_array(rounding)
        is_rounded = array is not None and array[0] == 0
        # `dot_dtype` is None if the weights have too many bits for the target's instructions
        if not is_rounded or cpu is None or cpu.dot_dtype is None or lanes % cpu.lanes:
            return None
        return Dots(cpu.dot_dtype, cpu.lanes, cpu.has_pair_dots, cpu.has_quads)

    def _choose_lanes(self, operator: Recurrent, batch: IrSize) -> int:
        """Return the number of hidden units in a tile on a CPU.

        With one vector for each of its four gates, an LSTM keeps all accumulators in registers. With fewer gates, several
        vectors for each gate are faster, because they share loads of the state. On CPUs with by-element FMA, several
        vectors are also faster for an LSTM with few sequences, because activation functions are computed independently.
        """
        cpu = self._context.cpu
        if cpu is None or operator.kind != "LSTM":
            return _UNIT_MULTIPLE
        if not cpu.multiplicand_lanes or is_dynamic(batch):
            return cpu.lanes
        vectors = _VECTORS_OF_ROWS.get(count_rows(plain(batch)), 1)
        return cpu.lanes * vectors


class _Lowering:
    """The lowering of a layer: `d` directions, `g` gates, `h` units, and `u` units with padding."""

    def __init__(
        self,
        rewriter: MainRewriter,
        layer: RecurrentLayer,
        operands: RecurrentOperands,
        integers: tuple[Any, Any] | None,
    ) -> None:
        self._rewriter, self._emit, self._reshape = rewriter, rewriter.emit, rewriter.reshape
        self._layer, self._operator = layer, layer.operator
        self._operands, self._integers = operands, integers
        self._dtype = ir.dtype_of(operands.x)
        # float16 accumulators would lose most of their bits.
        self._sum_dtype = "float32" if self._dtype == "float16" else self._dtype

    def lower(self, is_gpu: bool) -> relax.Expr:
        operator, operands = self._operator, self._operands
        is_lstm = operator.kind == "LSTM"
        bias, product_bias = self._biases()
        has_peepholes = is_lstm and _is_given(operands.peepholes)
        gates_of_peepholes = [operator.directions, 3]
        # int8 dot products round the state themselves, so they do not read `rounding`
        has_rounding = _is_given(operands.rounding) and self._layer.dots is None
        inputs = RecurrentInputs(
            projected=self._project(bias),
            weights=self._pack_recurrent(),
            hidden=self._initial(operands.hidden),
            cell=self._initial(operands.cell) if is_lstm else None,
            peepholes=self._pad_units(operands.peepholes, gates_of_peepholes)
            if has_peepholes
            else None,
            product_bias=product_bias,
            lengths=operands.lengths if _is_given(operands.lengths) else None,
            scales=self._scales(),
            starts=self._starts(),
            rounding=self._cast(operands.rounding) if has_rounding else None,
        )

        given = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None}
        kernel = functools.partial(recurrent, self._layer, is_gpu, list(given))
        pattern = {**ir.SCHEDULED, **OPAQUE}
        results = self._rewriter.kernel(
            kernel, operator.kind.lower(), *given.values(), pattern=pattern
        )
        fields = [self._emit(results[index]) for index in range(len(results.ty.fields))]
        states, *last = (self._rewriter.cast(field, self._dtype) for field in fields)
        if operator.is_batch_first:
            states = self._emit(relax.op.permute_dims(states, [2, 0, 1, 3]))
            last = [self._emit(relax.op.permute_dims(state, [1, 0, 2])) for state in last]
        return relax.Tuple([states, *last])

    def _project(self, bias: Any) -> Any:
        """Return the inputs times their weights, plus biases (d, g, h), as (steps, n, d, g, u)."""
        layer, operator = self._layer, self._operator
        x = self._operands.x
        if operator.is_batch_first:
            x = self._emit(relax.op.permute_dims(x, [1, 0, 2]))
        outer, inner = [layer.steps, layer.batch], [operator.directions, operator.gates]
        units = layer.units
        if _is_given(self._operands.weights):
            size = ir.known_shape(self._operands.weights)[2]
            weights = self._pad_units(self._operands.weights, inner, [size])
            weights = self._reshape(weights, [math.prod(inner) * units, size])
            weights = self._emit(relax.op.permute_dims(weights))
            rows = self._reshape(x, [layer.steps * layer.batch, size])
            product = self._emit(relax.op.matmul(self._cast(rows), weights))
            bias = None if bias is None else self._pad_units(bias, inner)
        else:
            product, units = x, layer.hidden
        if bias is not None:
            bias = self._reshape(bias, [math.prod(inner) * units])
            product = self._emit(relax.op.add(product, bias))
        if units == layer.units:
            return self._reshape(product, [*outer, *inner, units])
        return self._pad_units(product, [*outer, *inner])

    def _pack_recurrent(self) -> Any:
        """Return the recurrent weights (d·g·h, h) as the kernel reads them, see `RecurrentInputs`."""
        layer, operator = self._layer, self._operator
        weights = self._operands.recurrent if self._integers is None else self._integers[0]
        outer = [operator.directions, operator.gates]
        weights = self._pad_units(weights, outer, [layer.hidden])
        if missing := layer.units - layer.hidden:
            weights = self._emit(relax.op.nn.pad(weights, [0] * 7 + [missing]))
        tiled = [*outer, layer.tiles, layer.lanes]
        if layer.dots is None:
            return self._rewriter.rearrange(weights, [*tiled, layer.units], [0, 2, 4, 1, 3])
        quads = [layer.units // TERMS, TERMS]
        packed = self._rewriter.rearrange(weights, [*tiled, *quads], [0, 2, 4, 1, 3, 5])
        shape = [operator.directions, layer.tiles, quads[0], operator.gates, layer.lanes * TERMS]
        return self._reshape(packed, shape)

    def _scales(self) -> Any:
        """Return the factors (d, g, u) of accumulators of integer weights; None for float weights."""
        if self._integers is None:
            return None
        scales = self._integers[1]
        if self._layer.dots is not None:
            step = self._constant(np.asarray(1 / STATE_STEPS))
            scales = self._emit(relax.op.multiply(scales, step))
        return self._pad_units(scales, [self._operator.directions, self._operator.gates])

    def _starts(self) -> Any:
        """Return initial accumulators (d, g, u) that correct for the state's zero point; None without one."""
        dots = self._layer.dots
        if self._integers is None or dots is None or not dots.zero_point:
            return None
        wide = self._rewriter.cast(self._integers[0], "int32")
        sums = self._emit(relax.op.sum(wide, 1))
        moved = self._emit(relax.op.multiply(sums, relax.const(-dots.zero_point, "int32")))
        return self._pad_units(moved, [self._operator.directions, self._operator.gates])

    def _biases(self) -> tuple[Any, Any]:
        """Return the sum of the biases (d, g, h), and a GRU's bias (d, u) of its product with the state."""
        layer, operator = self._layer, self._operator
        directions, gates = operator.directions, operator.gates
        needs_product_bias = operator.kind == "GRU" and operator.resets_product
        if not _is_given(self._operands.bias):
            zeros = self._constant(np.zeros((directions, layer.units)))
            return None, zeros if needs_product_bias else None
        sizes = [directions, 2, gates, layer.hidden]
        biases = self._reshape(self._cast(self._operands.bias), sizes)
        of_input, of_state = (
            self._reshape(self._slice(biases, index), [directions, gates, layer.hidden])
            for index in range(2)
        )
        product_bias = None
        if needs_product_bias:
            product_bias = self._slice(of_state, 2)
            # The biases of the other two gates stay in the sum, because the reset gate does not multiply them.
            keep = self._constant(np.reshape([1, 1, 0], (3, 1)))
            of_state = self._emit(relax.op.multiply(of_state, keep))
            product_bias = self._pad_units(product_bias, [directions])
        return self._emit(relax.op.add(of_input, of_state)), product_bias

    def _initial(self, state: Any) -> Any:
        """Return an initial state as (d, n, u)."""
        outer = [self._operator.directions, self._layer.batch]
        if not _is_given(state):
            if not is_dynamic(self._layer.batch):
                return self._constant(np.zeros((*outer, self._layer.units)))
            sizes = relax.ShapeExpr([*outer, self._layer.units])
            return self._emit(relax.op.zeros(sizes, self._sum_dtype))
        if self._operator.is_batch_first:
            state = self._emit(relax.op.permute_dims(state, [1, 0, 2]))
        return self._pad_units(state, outer)

    def _pad_units(self, tensor: Any, outer: Sequence[IrSize], inner: Sequence[int] = ()) -> Any:
        """Return a tensor (outer·h, inner) as (outer, u, inner), with zeros for missing units."""
        layer = self._layer
        if ir.dtype_of(tensor).startswith("float"):
            tensor = self._cast(tensor)
        tensor = self._reshape(tensor, [*outer, layer.hidden, *inner])
        if missing := layer.units - layer.hidden:
            widths = [0] * (2 * len(outer) + 1) + [missing] + [0] * (2 * len(inner))
            tensor = self._emit(relax.op.nn.pad(tensor, widths))
        return tensor

    def _constant(self, array: np.ndarray[Any, Any]) -> Any:
        # the dtype is given, because TVM would convert float64 to float32
        return relax.const(array.astype(self._sum_dtype), self._sum_dtype)

    def _slice(self, tensor: Any, index: int) -> Any:
        return self._emit(relax.op.strided_slice(tensor, [1], [index], [index + 1]))

    def _cast(self, tensor: Any) -> Any:
        return self._rewriter.cast(tensor, self._sum_dtype)


def _is_given(operand: Any) -> bool:
    return not isinstance(operand, relax.Tuple)
