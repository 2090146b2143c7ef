"""The kernels of recurrent layers (LSTM, GRU and plain RNN), which loop over time.

The products of all inputs with their weights are one matrix product before it. What is left for
each step is a product of the state with the recurrent weights, of which a tile of hidden units
with all its gates is one piece of memory, read from its beginning to its end. Gates are in ONNX's
order: input, output, forget, cell (LSTM); update, reset, hidden (GRU).

On a CPU, one kernel computes the sequences of a batch at once. On a GPU, each step is a launch,
with a thread for each hidden unit of each sequence, and one tile has all units.

Recurrent weights may be int8 with a scale for each unit of each gate, which multiplies sums. Then the products of a
step are of floats that registers make of these integers, or, where the state is rounded to integers too, sums of four
int8 products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import divide_accumulators, largest_divisor
from tvmflow.compiler.contraction.machine import DOT_INSTRUCTIONS
from tvmflow.compiler.contraction.packed import allocate_registers
from tvmflow.compiler.tir_kernels.activations import apply_activation
from tvmflow.compiler.tir_kernels.definitions import (
    add_pair_products,
    call_llvm,
    launch_threads,
    round_to_integer,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, plain
from tvmflow.graph.ir_operators import STATE_STEPS, Activation, Recurrent

TERMS: Final = 4
"""The int8 products that an instruction adds to an accumulator."""

# 64-bit Arm: multiply int8, add neighboring products, and add neighboring accumulators as int32.
_NEON_INSTRUCTIONS: Final = (
    "llvm.aarch64.neon.smull.v8i16",
    "llvm.aarch64.neon.addp.v8i16",
    "llvm.aarch64.neon.saddlp.v4i32.v8i16",
)
# Independent accumulators, which hide the latency of the multiply-add.
_ACCUMULATORS: Final = 8
# The same with by-element FMA lanes as multiplicands, which need no broadcast load.
_SUMS_OF_LANES: Final = 16
# Sequences of a batch that share each load of the weights.
_MAX_ROWS: Final = 4
# Minimum number of multiplications for parallel execution: in all steps, and in one step.
_MIN_PARALLEL: Final = 1 << 20
_MIN_PARALLEL_STEP: Final = 1 << 17


class Dots(NamedTuple):
    """The int8 dot products with which a CPU multiplies the state.

    Attributes:
        dtype: The dtype of data, whose zero point is the middle one; weights are int8.
        lanes: The accumulators of a vector.
        has_pairs: Whether `PAIR_INSTRUCTIONS` compute them, whose weights have 7 bits.
        has_quads: Whether one instruction adds four products to each accumulator; products are added in pairs
            otherwise, as 64-bit ARM does without `dotprod`.
    """

    dtype: str
    lanes: int
    has_pairs: bool = False
    has_quads: bool = True

    @property
    def zero_point(self) -> int:
        """The integer of a state of 0."""
        return 128 if self.dtype == "uint8" else 0

    def add(self, accumulators: Any, data: Any, weights: Any) -> Any:
        """Return a vector of accumulators plus the products of four bytes each."""
        wide, narrow = f"int32x{self.lanes}", f"int16x{2 * self.lanes}"
        if self.has_pairs:
            return add_pair_products(accumulators, data, weights, self.lanes)
        if self.has_quads:
            return call_llvm(
                DOT_INSTRUCTIONS[self.dtype, self.lanes], wide, accumulators, data, weights
            )
        # two products of int8 fit into int16
        multiply, add, promote = _NEON_INSTRUCTIONS
        terms = self.lanes * TERMS
        halves = [range(terms // 2), range(terms // 2, terms)]
        parts = [[tirx.Shuffle([v], list(half)) for v in (weights, data)] for half in halves]
        products = [call_llvm(multiply, narrow, *part) for part in parts]
        return accumulators + call_llvm(promote, wide, call_llvm(add, narrow, *products))


class RecurrentLayer(NamedTuple):
    """A recurrent layer and the layout of its tensors.

    Attributes:
        operator: The layer, in the terms of ONNX's operators.
        steps: The number of time steps, which may be dynamic.
        batch: The number of sequences, which may be dynamic.
        hidden: The number of hidden units.
        units: That number with those of padding.
        lanes: The hidden units of a tile, which divide `units`.
        factors: The state values that are lanes of one multiplicand vector; 1 if each is broadcast.
        typical: Steps and batch, with tuning sizes in place of dynamic ones.
        dots: The int8 dot products; None for float32 products.
    """

    operator: Recurrent
    steps: IrSize
    batch: IrSize
    hidden: int
    units: int
    lanes: int
    factors: int
    typical: tuple[int, int]
    dots: Dots | None = None

    @property
    def tiles(self) -> int:
        """The number of tiles of hidden units."""
        return self.units // self.lanes


def count_rows(batch: int) -> int:
    """Return how many sequences of a batch are computed at once on a CPU."""
    return largest_divisor(batch, _MAX_ROWS)


class RecurrentInputs(NamedTuple):
    """The kernel's arguments: `d` directions, `n` sequences, `units` hidden units padded to whole tiles.

    Attributes:
        projected: Inputs times weights, plus biases: (steps, n, d, gates, units).
        weights: The recurrent weights: (d, tiles, units, gates, lanes), zero where a unit is padding; for dot
            products int8 (d, tiles, units/4, gates, 4 lanes).
        hidden: The initial hidden state: (d, n, units).
        cell: The initial cell state of an LSTM: (d, n, units).
        peepholes: The weights of an LSTM's cell state in its input, output and forget gate: (d, 3, units).
        product_bias: What a GRU with `resets_product` adds to the product with the state: (d, units).
        lengths: The length of each sequence: (n,).
        scales: The factors of accumulators of integer weights: (d, gates, units).
        starts: What dot products add to, for the zero point of the state, as int32: (d, gates, units).
        rounding: The parts of the state that products read unrounded, and rounded: (2,).
    """

    projected: Any
    weights: Any
    hidden: Any
    cell: Any = None
    peepholes: Any = None
    product_bias: Any = None
    lengths: Any = None
    scales: Any = None
    starts: Any = None
    rounding: Any = None


def recurrent(layer: RecurrentLayer, is_gpu: bool, *tensors: Any) -> Sequence[Any]:
    """Return the hidden states of all steps (steps, d, n, hidden), and the last states (d, n, hidden).

    The tensors are the fields of `RecurrentInputs`; None if the layer lacks them.
    """
    dtype = str(tensors[0].dtype)
    # dynamic shapes are variables of this kernel's own
    steps, batch = map(plain, tensors[0].shape[:2])
    layer = layer._replace(steps=steps, batch=batch)
    names = [
        name
        for name, tensor in zip(RecurrentInputs._fields, tensors, strict=True)
        if tensor is not None
    ]
    last = (layer.operator.directions, layer.batch, layer.hidden)
    shapes = [(layer.steps, *last), *[last] * (2 if layer.operator.kind == "LSTM" else 1)]

    def body(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        named = RecurrentInputs(**dict(zip(names, inputs, strict=True)))
        return (_GpuLoops if is_gpu else _CpuLoops)(layer, named, outputs, dtype).build()

    present = [tensor for tensor in tensors if tensor is not None]
    results = te.extern(
        shapes, present, body, dtype=[dtype] * len(shapes), name=layer.operator.kind.lower()
    )
    return list(results)


class _StepIndex(NamedTuple):
    """The position of a step: the direction and its activations, the group's first sequence, and the step."""

    direction: Any
    activations: Sequence[Activation]
    first: Any
    step: Any


class _Buffers(NamedTuple):
    """The buffers of a group of sequences, each (rows, units).

    `hidden` is the hidden state, `following` that of the next step. `cell` is an LSTM's cell state or a GRU's
    update gate. `scaled` is a GRU's hidden state times its reset gate, `integers` the int8 hidden state.
    """

    hidden: Any
    following: Any
    cell: Any
    scaled: Any
    integers: Any = None

    @property
    def operand(self) -> Any:
        """The hidden state as products read it."""
        return self.hidden if self.integers is None else self.integers


class _Loops:
    """Emits the equations of one layer; a subclass emits the loops around them."""

    _rows = 1
    """The sequences that are computed at once."""

    def __init__(
        self, layer: RecurrentLayer, inputs: RecurrentInputs, outputs: Sequence[Any], dtype: str
    ) -> None:
        self._layer = layer
        self._inputs = RecurrentInputs(
            *(None if tensor is None else T.buffer_proxy(tensor) for tensor in inputs)
        )
        self._outputs = list(map(T.buffer_proxy, outputs))
        self._dtype = dtype

    def build(self) -> Any:
        """Return the loops over directions, which do not depend on each other."""
        functions = self._layer.operator.activations
        if len(set(functions)) == 1:
            return self._build_loop(range(len(functions)), functions[0])
        return tirx.SeqStmt(
            [self._build_loop(range(d, d + 1), own) for d, own in enumerate(functions)]
        )

    def _build_loop(self, directions: range, activations: Sequence[Activation]) -> Any:
        raise NotImplementedError

    def _lanes(self) -> AbstractContextManager[Any]:
        """Emit the loop over the units of a tile, and yield the unit."""
        raise NotImplementedError

    def _allocate_accumulators(self, rows: int, gates: int) -> Any:
        """Emit an allocation of accumulators: (rows, gates, lanes)."""
        raise NotImplementedError

    def _list_phases(self) -> list[Callable[[_StepIndex, _Buffers, Any], None]]:
        """Return the functions that compute a tile of a step; each needs the one before it for all tiles."""
        if self._layer.operator.kind == "LSTM":
            return [self._compute_lstm]
        if self._layer.operator.kind == "RNN":
            return [self._compute_rnn]
        if self._layer.operator.resets_product:
            return [self._compute_gru]
        return [self._compute_gru_gates, self._compute_gru_state]

    def _each(self, tile: Any) -> Iterator[tuple[int, Any, Any]]:
        """Emit loops over the units of a tile; yield row, lane and unit."""
        for row in range(self._rows):
            with self._lanes() as lane:
                yield row, lane, tile * self._layer.lanes + lane

    def _compute_rnn(self, at: _StepIndex, state: _Buffers, tile: Any) -> None:
        gates = self._gates(at, state.operand, tile, [0])
        for row, lane, unit in self._each(tile):
            state.following[row, unit] = self._activate(at, 0, gates[row, 0, lane])

    def _compute_lstm(self, at: _StepIndex, state: _Buffers, tile: Any) -> None:
        gates = self._gates(at, state.operand, tile, [0, 1, 2, 3])
        for row, lane, unit in self._each(tile):
            cell = state.cell[row, unit]
            entry = gates[row, 0, lane] + self._peek(at, 0, unit, cell)
            gates[row, 0, lane] = self._activate(at, 0, entry)
            if self._layer.operator.has_coupled_gates:
                gates[row, 2, lane] = 1 - gates[row, 0, lane]
            else:
                forget = gates[row, 2, lane] + self._peek(at, 2, unit, cell)
                gates[row, 2, lane] = self._activate(at, 0, forget)
            new = gates[row, 0, lane] * self._activate(at, 1, gates[row, 3, lane])
            gates[row, 3, lane] = gates[row, 2, lane] * cell + new
            result = gates[row, 1, lane] + self._peek(at, 1, unit, gates[row, 3, lane])
            gates[row, 1, lane] = self._activate(at, 0, result)
            squashed = self._activate(at, 2, gates[row, 3, lane], clips=False)
            state.following[row, unit] = gates[row, 1, lane] * squashed
            state.cell[row, unit] = self._if_active(at, row, gates[row, 3, lane], cell)

    def _peek(self, at: _StepIndex, gate: int, unit: Any, cell: Any) -> Any:
        """Return the peephole term of an LSTM gate."""
        if self._inputs.peepholes is None:
            return 0
        return self._inputs.peepholes[at.direction, gate, unit] * cell

    def _compute_gru(self, at: _StepIndex, state: _Buffers, tile: Any) -> None:
        gates = self._gates(at, state.operand, tile, [0, 1, 2], inputs=[0, 1])
        for row, lane, unit in self._each(tile):
            gates[row, 0, lane] = self._activate(at, 0, gates[row, 0, lane])
            product = gates[row, 2, lane] + self._inputs.product_bias[at.direction, unit]
            reset = self._activate(at, 0, gates[row, 1, lane])
            gates[row, 2, lane] = reset * product + self._projected(at, row, unit, 2)
            gates[row, 2, lane] = self._activate(at, 1, gates[row, 2, lane])
            state.following[row, unit] = _mix(
                gates[row, 0, lane], state.hidden[row, unit], gates[row, 2, lane]
            )

    def _compute_gru_gates(self, at: _StepIndex, state: _Buffers, tile: Any) -> None:
        gates = self._gates(at, state.operand, tile, [0, 1])
        for row, lane, unit in self._each(tile):
            state.cell[row, unit] = self._activate(at, 0, gates[row, 0, lane])
            reset = self._activate(at, 0, gates[row, 1, lane])
            state.scaled[row, unit] = self._to_operand(reset * state.hidden[row, unit])

    def _compute_gru_state(self, at: _StepIndex, state: _Buffers, tile: Any) -> None:
        gates = self._gates(at, state.scaled, tile, [2])
        for row, lane, unit in self._each(tile):
            gates[row, 0, lane] = self._activate(at, 1, gates[row, 0, lane])
            state.following[row, unit] = _mix(
                state.cell[row, unit], state.hidden[row, unit], gates[row, 0, lane]
            )

    def _gates(
        self,
        at: _StepIndex,
        source: Any,
        tile: Any,
        gates: Sequence[int],
        inputs: Sequence[int] | None = None,
    ) -> Any:
        """Emit the accumulators of some gates of a tile, and return them: (rows, gates, lanes).

        The state `source` is multiplied with the weights. The projected inputs are added to the gates of `inputs`;
        None for all.
        """
        with_input = [gate for gate in gates if inputs is None or gate in inputs]
        if self._layer.dots is not None:
            accumulators = self._add_dots(at, source, tile, gates)
        else:
            # float accumulators start with the inputs, and scaled ones do not
            starts = with_input if self._inputs.scales is None else []
            accumulators = self._add_products(at, source, tile, gates, starts)
        if self._inputs.scales is None:
            return accumulators
        totals = self._allocate_accumulators(self._rows, len(gates))
        for row, index, gate, lane in self._each_gate(gates):
            unit = tile * self._layer.lanes + lane
            scale = self._inputs.scales[at.direction, gate, unit]
            total = accumulators[row, index, lane].astype(self._dtype) * scale
            if gate in with_input:
                total = total + self._projected(at, row, unit, gate)
            totals[row, index, lane] = total
        return totals

    def _add_products(
        self, at: _StepIndex, source: Any, tile: Any, gates: Sequence[int], starts: Sequence[int]
    ) -> Any:
        """Emit float products; the accumulators of the gates of `starts` begin with the projected inputs."""
        rows, count, depth = self._rows, len(gates), self._layer.units
        parts, together = self._divide_accumulators(count * rows)
        accumulators = self._allocate_accumulators(parts * rows, count)
        for part in range(parts):
            for row, index, gate, lane in self._each_gate(gates):
                start = self._const(0)
                if part == 0 and gate in starts:
                    unit = tile * self._layer.lanes + lane
                    start = self._projected(at, row, unit, gate)
                accumulators[part * rows + row, index, lane] = start
        with T.serial(0, depth // together) as k:
            for step in range(together):
                part, unit = step % parts, k * together + step
                for row, index, gate, lane in self._each_gate(gates):
                    weight = self._inputs.weights[at.direction, tile, unit, gate, lane]
                    number = self._round(source[row, unit])
                    accumulators[part * rows + row, index, lane] += number * weight.astype(
                        self._dtype
                    )
        return self._add_parts(accumulators, parts, gates)

    def _each_gate(self, gates: Sequence[int]) -> Iterator[tuple[int, int, int, Any]]:
        """Emit loops over the units of a tile for each row and gate; yield these, and the lane."""
        for row in range(self._rows):
            for index, gate in enumerate(gates):
                with self._lanes() as lane:
                    yield row, index, gate, lane

    def _add_parts(self, accumulators: Any, parts: int, gates: Sequence[int]) -> Any:
        """Emit the addition of all parts of accumulators; return these."""
        for part in range(1, parts):
            for row, index, _, lane in self._each_gate(gates):
                accumulators[row, index, lane] += accumulators[part * self._rows + row, index, lane]
        return accumulators

    def _round(self, number: Any) -> Any:
        """Return a value of the state as float32 products read it."""
        if self._inputs.rounding is None:
            return number
        kept, rounded = (self._inputs.rounding[at] for at in range(2))
        steps = tirx.Cast(self._dtype, self._to_integer(number))
        return kept * number + rounded * (steps * self._const(1 / STATE_STEPS))

    def _to_integer(self, number: Any) -> Any:
        """Return a number of the state, limited to those from -1 to 1, as one of its integers."""
        one = tirx.const(1, "float32")
        limited = tirx.max(tirx.min(number.astype("float32"), one), -one)
        return round_to_integer(limited * tirx.const(STATE_STEPS, "float32"))

    def _to_operand(self, number: Any) -> Any:
        """Return a value of the state in the form that products read."""
        dots = self._layer.dots
        if dots is None:
            return number
        return tirx.Cast(dots.dtype, self._to_integer(number) + dots.zero_point)

    def _add_dots(self, at: _StepIndex, source: Any, tile: Any, gates: Sequence[int]) -> Any:
        """Emit int8 dot products with int32 accumulation."""
        layer, dots, rows = self._layer, self._layer.dots, self._rows
        assert dots is not None
        vectors = [vector * dots.lanes for vector in range(layer.lanes // dots.lanes)]
        count = len(gates) * len(vectors) * rows
        quads = layer.units // TERMS
        parts = divide_accumulators(quads, count, _ACCUMULATORS)
        accumulators = allocate_registers(parts * rows, len(gates), layer.lanes, dtype="int32")
        outputs = [(row, *own) for row in range(rows) for own in enumerate(gates)]
        for part in range(parts):
            for row, index, gate, lane in self._each_gate(gates):
                start = tirx.const(0, "int32")
                if part == 0 and self._inputs.starts is not None:
                    start = self._inputs.starts[at.direction, gate, tile * layer.lanes + lane]
                accumulators[part * rows + row, index, lane] = start
        with T.serial(0, quads // parts) as k:
            for part in range(parts):
                quad = k * parts + part
                terms = tirx.Ramp(quad * TERMS, 1, TERMS)
                for row, index, gate in outputs:
                    word = tirx.reinterpret("int32", source[row, terms])
                    for first in vectors:
                        lanes = tirx.Ramp(tirx.const(first, "int32"), 1, dots.lanes)
                        begin = tirx.const(first * TERMS, "int32")
                        terms_of_lanes = tirx.Ramp(begin, 1, dots.lanes * TERMS)
                        weights = self._inputs.weights[
                            at.direction, tile, quad, gate, terms_of_lanes
                        ]
                        data = tirx.reinterpret(
                            f"{dots.dtype}x{dots.lanes * TERMS}", tirx.Broadcast(word, dots.lanes)
                        )
                        own = accumulators[part * rows + row, index, lanes]
                        accumulators[part * rows + row, index, lanes] = dots.add(own, data, weights)
        return self._add_parts(accumulators, parts, gates)

    def _divide_accumulators(self, gates: int) -> tuple[int, int]:
        """Return the number of parts of some gates' accumulators, and the terms that are added at a time."""
        layer = self._layer
        if layer.factors == 1:
            parts = divide_accumulators(layer.units, gates, _ACCUMULATORS)
            return parts, parts
        vectors = gates * -(-layer.lanes // layer.factors)
        return divide_accumulators(layer.factors, vectors, _SUMS_OF_LANES), layer.factors

    def _projected(self, at: _StepIndex, row: int, unit: Any, gate: int) -> Any:
        position = self._position(at, row)
        return self._inputs.projected[position, at.first + row, at.direction, gate, unit]

    def _position(self, at: _StepIndex, row: int) -> Any:
        """Return the position in its sequence at which a step reads and writes."""
        step, lengths = at.step, self._inputs.lengths
        if lengths is None:
            backward = self._layer.steps - 1 - step
        else:
            # beyond its end, a sequence is filled in its order
            backward = self._if_active(at, row, lengths[at.first + row] - 1 - step, step)
        if self._layer.operator.directions == 1:
            return backward if self._layer.operator.is_reversed[0] else step
        return tirx.Select(tirx.EQ(at.direction, 1), backward, step)

    def _if_active(self, at: _StepIndex, row: int, value: Any, otherwise: Any) -> Any:
        """Return a value within a sequence, and another one beyond its end."""
        lengths = self._inputs.lengths
        if lengths is None:
            return value
        return tirx.Select(at.step < lengths[at.first + row], value, otherwise)

    def _last(self, sequence: Any, state: Any) -> Any:
        if self._inputs.lengths is None:
            return state
        # an empty sequence has no last state; ONNX Runtime gives zeros for it
        return tirx.Select(self._inputs.lengths[sequence] > 0, state, self._const(0))

    def _activate(self, at: _StepIndex, function: int, value: Any, *, clips: bool = True) -> Any:
        if clips and self._layer.operator.clip is not None:
            limit = self._layer.operator.clip
            value = tirx.max(tirx.min(value, self._const(limit)), self._const(-limit))
        return apply_activation(at.activations[function], value, self._dtype)

    def _allocate(self, *shape: int, scope: str = "global", dtype: str = "") -> Any:
        return T.buffer_proxy(T.alloc_buffer(shape, dtype or self._dtype, scope=scope))

    def _const(self, value: float) -> Any:
        return tirx.const(value, self._dtype)


class _CpuLoops(_Loops):
    def __init__(self, layer: RecurrentLayer, *buffers: Any) -> None:
        super().__init__(layer, *buffers)
        directions, (steps, batch) = layer.operator.directions, layer.typical
        if is_dynamic(layer.batch):
            self._rows = _MAX_ROWS
        else:
            self._rows = count_rows(batch)
        step = layer.operator.gates * layer.hidden * layer.hidden
        groups = directions * max(batch // self._rows, 1)
        work = step * steps * batch * directions
        self._has_parallel_groups = groups > 1 and work >= _MIN_PARALLEL
        rows = min(batch, self._rows)
        self._has_parallel_tiles = groups == 1 and step * rows >= _MIN_PARALLEL_STEP

    def _build_loop(self, directions: range, activations: Sequence[Activation]) -> Any:
        if is_dynamic(self._layer.batch):
            return self._build_dynamic_loop(directions, activations)
        groups = self._layer.batch // self._rows
        loop = T.parallel if self._has_parallel_groups else T.serial
        with IRBuilder() as builder:
            with loop(0, len(directions) * groups) as group:
                direction = directions.start + tirx.floordiv(group, groups)
                self._emit_group(direction, activations, group % groups * self._rows)
            return builder.get()

    def _build_dynamic_loop(self, directions: range, activations: Sequence[Activation]) -> Any:
        """Return the loop over a dynamic batch: whole groups of sequences, then the remainder."""
        batch, whole = self._layer.batch, self._rows
        loop = T.parallel if self._has_parallel_groups else T.serial
        sizes = [whole >> shift for shift in range(whole.bit_length())]
        counts = [batch // whole, *(batch % (2 * rows) // rows for rows in sizes[1:])]
        with IRBuilder() as builder:
            with loop(0, sum(counts) * len(directions)) as part:
                direction = tirx.Cast("int32", directions.start + part % len(directions))
                group, begin, before = part // len(directions), 0, 0
                for self._rows, count in zip(sizes, counts, strict=True):
                    with T.If(tirx.all(group >= before, group < before + count)), T.Then():
                        first = begin + (group - before) * self._rows
                        self._emit_group(direction, activations, first)
                    begin, before = begin + count * self._rows, before + count
            self._rows = whole
            return builder.get()

    def _emit_group(self, direction: Any, activations: Sequence[Activation], first: Any) -> None:
        layer, inputs = self._layer, self._inputs
        sizes, integers = (self._rows, layer.units), layer.dots.dtype if layer.dots else ""
        state = _Buffers(
            hidden=self._allocate(*sizes),
            following=self._allocate(*sizes),
            cell=self._allocate(*sizes),
            scaled=self._allocate(*sizes, dtype=integers),
            integers=self._allocate(*sizes, dtype=integers) if integers else None,
        )
        for row in range(self._rows):
            with self._units(layer.units) as unit:
                state.hidden[row, unit] = inputs.hidden[direction, first + row, unit]
                if state.integers is not None:
                    state.integers[row, unit] = self._to_operand(state.hidden[row, unit])
                if inputs.cell is not None:
                    state.cell[row, unit] = inputs.cell[direction, first + row, unit]
        with T.serial(0, layer.steps) as step:
            at = _StepIndex(direction, activations, first, step)
            for compute in self._list_phases():
                with (T.parallel if self._has_parallel_tiles else T.serial)(0, layer.tiles) as tile:
                    compute(at, state, tile)
            self._advance(at, state)
        for output, buffer in zip(self._outputs[1:], (state.hidden, state.cell), strict=False):
            for row in range(self._rows):
                with self._units(layer.hidden) as unit:
                    output[direction, first + row, unit] = self._last(
                        first + row, buffer[row, unit]
                    )

    def _advance(self, at: _StepIndex, state: _Buffers) -> None:
        """Emit the copy of the next hidden state to the present one and to the result."""
        for row in range(self._rows):
            with self._units(self._layer.hidden) as unit:
                result = self._if_active(at, row, state.following[row, unit], self._const(0))
                position = self._position(at, row)
                self._outputs[0][position, at.direction, at.first + row, unit] = result
            with self._units(self._layer.units) as unit:
                state.hidden[row, unit] = self._if_active(
                    at, row, state.following[row, unit], state.hidden[row, unit]
                )
                if state.integers is not None:
                    state.integers[row, unit] = self._to_operand(state.hidden[row, unit])

    def _lanes(self) -> AbstractContextManager[Any]:
        lanes: AbstractContextManager[Any] = T.vectorized(0, self._layer.lanes)
        return lanes

    def _allocate_accumulators(self, rows: int, gates: int) -> Any:
        return self._allocate(rows, gates, self._layer.lanes, scope="local")

    @contextmanager
    def _units(self, count: int) -> Iterator[Any]:
        """Emit a loop over hidden units, by vectors if they are whole, and yield the unit."""
        lanes = self._layer.lanes
        if count % lanes:
            with T.serial(0, count) as unit:
                yield unit
        else:
            with T.serial(0, count // lanes) as tile, T.vectorized(0, lanes) as lane:
                yield tile * lanes + lane


@dataclass(frozen=True)
class _View:
    """The numbers of a sequence or a thread in a buffer, which a function gives the indices of."""

    buffer: Any
    index: Callable[..., tuple[Any, ...]]

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self.buffer[self.index(*key)]

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        self.buffer[self.index(*key)] = value


class _GpuLoops(_Loops):
    _unit: Any
    """The hidden unit of a thread."""

    def _build_loop(self, directions: range, activations: Sequence[Activation]) -> Any:
        layer, inputs = self._layer, self._inputs
        sizes = (len(directions), layer.batch, layer.hidden)
        with IRBuilder() as builder:
            with T.sblock("steps"):
                # what one launch writes, the next one reads: hidden states alternate between two buffers
                hidden = self._allocate_state(2, *sizes)
                cell, scaled = self._allocate_state(*sizes), self._allocate_state(*sizes)
                with launch_threads(*sizes) as (d, n, unit):
                    direction = directions.start + d
                    hidden[0, d, n, unit] = inputs.hidden[direction, n, unit]
                    if inputs.cell is not None:
                        cell[d, n, unit] = inputs.cell[direction, n, unit]
                phases = self._list_phases()
                with T.serial(0, layer.steps) as step:
                    for compute in phases:
                        with launch_threads(*sizes) as (d, n, self._unit):
                            at = _StepIndex(directions.start + d, activations, n, step)
                            state = self._view(hidden, cell, scaled, d, at)
                            compute(at, state, 0)
                            if compute is phases[-1]:
                                self._advance(at, state, hidden, d)
                with launch_threads(*sizes) as (d, n, unit):
                    states = (hidden[layer.steps % 2, d, n, unit], cell[d, n, unit])
                    for output, value in zip(self._outputs[1:], states, strict=False):
                        output[directions.start + d, n, unit] = self._last(n, value)
            return builder.get()

    def _view(self, hidden: Any, cell: Any, scaled: Any, d: Any, at: _StepIndex) -> _Buffers:
        """Return the state of a thread's sequence."""
        following = self._allocate(1, scope="local")
        return _Buffers(
            _View(hidden, lambda _, unit: (at.step % 2, d, at.first, unit)),
            _View(following, lambda *_: (0,)),
            *(_View(b, lambda _, unit: (d, at.first, unit)) for b in (cell, scaled)),
        )

    def _advance(self, at: _StepIndex, state: _Buffers, hidden: Any, d: Any) -> None:
        """Emit the copy of a unit's next state to where the next step reads it, and to the result."""
        following = state.following[0, self._unit]
        result = self._if_active(at, 0, following, self._const(0))
        position = self._position(at, 0)
        self._outputs[0][position, at.direction, at.first, self._unit] = result
        hidden[(at.step + 1) % 2, d, at.first, self._unit] = self._if_active(
            at, 0, following, state.hidden[0, self._unit]
        )

    @contextmanager
    def _lanes(self) -> Iterator[Any]:
        yield self._unit

    def _allocate_accumulators(self, rows: int, gates: int) -> Any:
        return _View(self._allocate(rows, gates, scope="local"), lambda row, gate, _: (row, gate))

    def _allocate_state(self, *shape: int) -> Any:
        return T.buffer_proxy(T.sblock_alloc_buffer(shape, self._dtype))


def _mix(update: Any, old: Any, new: Any) -> Any:
    return (1 - update) * new + update * old
