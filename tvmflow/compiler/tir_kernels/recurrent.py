"""The kernels of recurrent layers (LSTM, GRU and plain RNN), which loop over time.

One matmul before the kernel multiplies all inputs with their weights. Each step multiplies the state with
the recurrent weights, in which a tile of hidden units with all its gates is contiguous. Gates are in ONNX's order:
input, output, forget, cell (LSTM); update, reset, hidden (GRU).

On a CPU, one kernel computes several sequences of a batch at once. On a GPU, each step is a launch, with a thread
for each hidden unit of each sequence, and one tile has all units.

Recurrent weights may be int8 with a scale for each unit of each gate, by which accumulators are multiplied. They are
promoted to float in registers, unless the state is rounded to integers, too: then int8 dot products are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import divide_accumulators, largest_divisor
from tvmflow.compiler.contraction.machine import DOT_INSTRUCTIONS
from tvmflow.compiler.contraction.packed import allocate_registers, iterate_row, loop_over
from tvmflow.compiler.tir_kernels.definitions import (
    add_pair_products,
    call_llvm,
    launch_threads,
    round_to_integer,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, plain
from tvmflow.graph.ir_operators import STATE_STEPS, Activation, Recurrent

TERMS: Final = 4
"""The number of int8 products that an instruction adds to an accumulator."""

# 64-bit Arm: multiply int8, add neighboring products, and add neighboring accumulators as int32.
_NEON_INSTRUCTIONS: Final = (
    "llvm.aarch64.neon.smull.v8i16",
    "llvm.aarch64.neon.addp.v8i16",
    "llvm.aarch64.neon.saddlp.v4i32.v8i16",
)
# The number of independent accumulators that hides the latency of the multiply-add.
_ACCUMULATORS: Final = 8
# The same for by-element FMA, which needs no broadcast loads.
_SUMS_OF_LANES: Final = 16
# The maximum number of sequences that share each load of the weights.
_MAX_ROWS: Final = 4
# The minimum number of multiplications for parallel execution: over groups in all steps, and over tiles in one step.
_MIN_PARALLEL: Final = 1 << 20
_MIN_PARALLEL_STEP: Final = 1 << 17


class Dots(NamedTuple):
    """The int8 dot products with which a CPU multiplies the state.

    Attributes:
        dtype: The dtype of data, whose zero point is the middle of its range; weights are int8.
        lanes: The number of accumulators in a vector.
        has_pairs: Whether `PAIR_INSTRUCTIONS` compute them, which need 7-bit weights.
        has_quads: Whether one instruction adds four products; otherwise two (64-bit Arm without `dotprod`).
    """

    dtype: str
    lanes: int
    has_pairs: bool = False
    has_quads: bool = True

    @property
    def zero_point(self) -> int:
        """The integer that stands for a state of 0."""
        return 128 if self.dtype == "uint8" else 0

    def add(self, accumulators: Any, data: Any, weights: Any) -> Any:
        """Return int32 accumulators, each plus the dot product of its four bytes of data and weights."""
        wide, narrow = f"int32x{self.lanes}", f"int16x{2 * self.lanes}"
        if self.has_pairs:
            return add_pair_products(accumulators, data, weights, self.lanes)
        if self.has_quads:
            instruction = DOT_INSTRUCTIONS[self.dtype, self.lanes]
            return call_llvm(instruction, wide, accumulators, data, weights)
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
        steps: The number of time steps, which may be dynamic.
        batch: The number of sequences, which may be dynamic.
        units: The number of hidden units, padded to whole tiles.
        lanes: The number of hidden units in a tile, a divisor of `units`.
        factors: The number of state values that are lanes of one multiplicand vector; 1 if each is broadcast.
        typical: The steps and the batch, with tuning sizes for dynamic ones.
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
        product_bias: The bias of a GRU's product with the state, if it `resets_product`: (d, units).
        lengths: The length of each sequence: (n,).
        scales: The scales of integer weights, by which accumulators are multiplied: (d, gates, units).
        starts: The initial int32 accumulators, which subtract the state's zero point: (d, gates, units).
        rounding: The weights with which the unrounded and the rounded state are mixed: (2,).
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


def recurrent(
    layer: RecurrentLayer, is_gpu: bool, names: Sequence[str], *tensors: Any
) -> Sequence[Any]:
    """Return the hidden states of all steps (steps, d, n, hidden), and the last states (d, n, hidden).

    The tensors are the fields of `RecurrentInputs` with these names.
    """
    dtype, kind = str(tensors[0].dtype), layer.operator.kind
    # the kernel has its own variables for dynamic dimensions
    steps, batch = map(plain, tensors[0].shape[:2])
    layer = layer._replace(steps=steps, batch=batch)
    last = (layer.operator.directions, batch, layer.hidden)
    shapes = [(steps, *last), *[last] * (2 if kind == "LSTM" else 1)]

    def body(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        named = RecurrentInputs(**dict(zip(names, inputs, strict=True)))
        return (_GpuLoops if is_gpu else _CpuLoops)(layer, named, outputs, dtype).build()

    dtypes = [dtype] * len(shapes)
    return list(te.extern(shapes, tensors, body, dtype=dtypes, name=kind.lower()))


class _StepIndex(NamedTuple):
    """A time step of a group of sequences: direction, activations, first sequence, step."""

    direction: Any
    activations: Sequence[Activation]
    first: Any
    step: Any


class _Buffers(NamedTuple):
    """The buffers of a group of sequences, each (rows, units); `following` is the next hidden state.

    `cell` is an LSTM's cell state or a GRU's update gate, `scaled` a GRU's hidden state times its reset gate.
    """

    hidden: Any
    following: Any
    cell: Any
    scaled: Any
    integers: Any = None

    @property
    def operand(self) -> Any:
        """The hidden state in the form that is multiplied: rounded to integers for dot products."""
        return self.hidden if self.integers is None else self.integers


class _Loops:
    """Emits the equations of one layer; subclasses emit loops and allocate accumulators."""

    _rows = 1
    """The sequences that are computed at once."""
    _build_loop: Callable[[range, Sequence[Activation]], Any]
    _lanes: Callable[[], AbstractContextManager[Any]]
    """Emits the loop over the units of a tile, and yields the unit."""
    _allocate_accumulators: Callable[[int, int], Any]
    """Emits the allocation of accumulators (rows, gates, lanes)."""

    def __init__(
        self, layer: RecurrentLayer, inputs: RecurrentInputs, outputs: Sequence[Any], dtype: str
    ) -> None:
        proxies = (None if tensor is None else T.buffer_proxy(tensor) for tensor in inputs)
        self._layer, self._inputs = layer, RecurrentInputs(*proxies)
        self._outputs, self._dtype = list(map(T.buffer_proxy, outputs)), dtype

    def build(self) -> Any:
        """Return the loops over directions, which are independent of each other."""
        functions = self._layer.operator.activations
        if len(set(functions)) == 1:
            return self._build_loop(range(len(functions)), functions[0])
        loops = [self._build_loop(range(d, d + 1), own) for d, own in enumerate(functions)]
        return tirx.SeqStmt(loops)

    def _list_phases(self) -> list[Callable[[_StepIndex, _Buffers, Any], None]]:
        """Return the functions that compute a tile of a step; each runs for all tiles before the next."""
        operator = self._layer.operator
        if operator.kind != "GRU":
            return [self._compute_lstm if operator.kind == "LSTM" else self._compute_rnn]
        if operator.resets_product:
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
            update, new = gates[row, 0, lane], gates[row, 2, lane]
            state.following[row, unit] = _mix(update, state.hidden[row, unit], new)

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
            update, new = state.cell[row, unit], gates[row, 0, lane]
            state.following[row, unit] = _mix(update, state.hidden[row, unit], new)

    def _gates(
        self,
        at: _StepIndex,
        source: Any,
        tile: Any,
        gates: Sequence[int],
        inputs: Sequence[int] | None = None,
    ) -> Any:
        """Emit the pre-activations of `gates` for one tile; return them as (rows, gates, lanes).

        They are the products of the state `source` and the recurrent weights, plus the projected inputs for the gates
        listed in `inputs` (None: all of them).
        """
        with_input = [gate for gate in gates if inputs is None or gate in inputs]
        if self._layer.dots is not None:
            accumulators = self._add_dots(at, source, tile, gates)
        else:
            # accumulators start with the projected inputs, unless they are scaled afterwards
            starts = with_input if self._inputs.scales is None else []
            accumulators = self._add_products(at, source, tile, gates, starts)
        if self._inputs.scales is None:
            return accumulators
        totals = self._allocate_accumulators(self._rows, len(gates))
        for row, index, gate, lane, unit in self._each_gate(tile, gates):
            scale = self._inputs.scales[at.direction, gate, unit]
            total = accumulators[row, index, lane].astype(self._dtype) * scale
            if gate in with_input:
                total = total + self._projected(at, row, unit, gate)
            totals[row, index, lane] = total
        return totals

    def _add_products(
        self, at: _StepIndex, source: Any, tile: Any, gates: Sequence[int], starts: Sequence[int]
    ) -> Any:
        """Emit float products; accumulators of the gates in `starts` begin with the projected inputs."""
        rows, count, layer = self._rows, len(gates), self._layer
        if layer.factors == 1:
            parts = together = divide_accumulators(layer.units, count * rows, _ACCUMULATORS)
        else:
            vectors, together = count * rows * -(-layer.lanes // layer.factors), layer.factors
            parts = divide_accumulators(together, vectors, _SUMS_OF_LANES)
        accumulators = self._allocate_accumulators(parts * rows, count)
        for part in range(parts):
            for row, index, gate, lane, unit in self._each_gate(tile, gates):
                is_start = part == 0 and gate in starts
                start = self._projected(at, row, unit, gate) if is_start else self._const(0)
                accumulators[part * rows + row, index, lane] = start
        with T.serial(0, layer.units // together) as k:
            for step in range(together):
                part, operand = step % parts, k * together + step
                for row, index, gate, lane, _ in self._each_gate(tile, gates):
                    weight = self._inputs.weights[at.direction, tile, operand, gate, lane]
                    product = self._round(source[row, operand]) * weight.astype(self._dtype)
                    accumulators[part * rows + row, index, lane] += product
        return self._add_parts(accumulators, parts, tile, gates)

    def _each_gate(
        self, tile: Any, gates: Sequence[int]
    ) -> Iterator[tuple[int, int, int, Any, Any]]:
        """Emit loops over the units of a tile for each row and gate; yield row, index, gate, lane, unit."""
        for row in range(self._rows):
            for index, gate in enumerate(gates):
                with self._lanes() as lane:
                    yield row, index, gate, lane, tile * self._layer.lanes + lane

    def _add_parts(self, accumulators: Any, parts: int, tile: Any, gates: Sequence[int]) -> Any:
        """Emit the addition of all partial sums to the first one; return the accumulators."""
        for part in range(1, parts):
            for row, index, _, lane, _ in self._each_gate(tile, gates):
                accumulators[row, index, lane] += accumulators[part * self._rows + row, index, lane]
        return accumulators

    def _round(self, value: Any) -> Any:
        """Return the operand of float32 products: the state and its rounded form, weighted by `rounding`."""
        if self._inputs.rounding is None:
            return value
        kept, rounded = (self._inputs.rounding[at] for at in range(2))
        steps = tirx.Cast(self._dtype, _to_integer(value))
        return kept * value + rounded * (steps * self._const(1 / STATE_STEPS))

    def _to_operand(self, value: Any) -> Any:
        """Return a value of the state in the form that is multiplied: an integer for dot products."""
        dots = self._layer.dots
        return (
            value if dots is None else tirx.Cast(dots.dtype, _to_integer(value) + dots.zero_point)
        )

    def _add_dots(self, at: _StepIndex, source: Any, tile: Any, gates: Sequence[int]) -> Any:
        """Emit int8 dot products with int32 accumulation."""
        layer, dots, rows = self._layer, self._layer.dots, self._rows
        assert dots is not None
        vectors = range(0, layer.lanes, dots.lanes)
        quads, count = layer.units // TERMS, len(gates) * len(vectors) * rows
        parts = divide_accumulators(quads, count, _ACCUMULATORS)
        accumulators = allocate_registers(parts * rows, len(gates), layer.lanes, dtype="int32")
        outputs = [(row, *own) for row in range(rows) for own in enumerate(gates)]
        for part in range(parts):
            for row, index, gate, lane, unit in self._each_gate(tile, gates):
                start = tirx.const(0, "int32")
                if part == 0 and self._inputs.starts is not None:
                    start = self._inputs.starts[at.direction, gate, unit]
                accumulators[part * rows + row, index, lane] = start
        with T.serial(0, quads // parts) as k:
            for part in range(parts):
                quad = k * parts + part
                terms = tirx.Ramp(quad * TERMS, 1, TERMS)
                for row, index, gate in outputs:
                    word = tirx.reinterpret("int32", source[row, terms])
                    for first in vectors:
                        lanes = tirx.Ramp(T.int32(first), 1, dots.lanes)
                        bytes_of_lanes = tirx.Ramp(T.int32(first * TERMS), 1, dots.lanes * TERMS)
                        index_of_weights = at.direction, tile, quad, gate, bytes_of_lanes
                        words = tirx.Broadcast(word, dots.lanes)
                        data = tirx.reinterpret(f"{dots.dtype}x{dots.lanes * TERMS}", words)
                        accumulators[part * rows + row, index, lanes] = dots.add(
                            accumulators[part * rows + row, index, lanes],
                            data,
                            self._inputs.weights[index_of_weights],
                        )
        return self._add_parts(accumulators, parts, tile, gates)

    def _projected(self, at: _StepIndex, row: int, unit: Any, gate: int) -> Any:
        position = self._position(at, row)
        return self._inputs.projected[position, at.first + row, at.direction, gate, unit]

    def _position(self, at: _StepIndex, row: int) -> Any:
        """Return the position in the row's sequence that a step reads and writes."""
        step, lengths = at.step, self._inputs.lengths
        if lengths is None:
            backward = self._layer.steps - 1 - step
        else:
            # steps beyond a sequence's end write the positions after it in forward order
            backward = self._if_active(at, row, lengths[at.first + row] - 1 - step, step)
        if self._layer.operator.directions == 1:
            return backward if self._layer.operator.is_reversed[0] else step
        return tirx.Select(tirx.EQ(at.direction, 1), backward, step)

    def _if_active(self, at: _StepIndex, row: int, value: Any, otherwise: Any) -> Any:
        """Return `value` within a sequence, `otherwise` beyond its end."""
        lengths = self._inputs.lengths
        if lengths is None:
            return value
        return tirx.Select(at.step < lengths[at.first + row], value, otherwise)

    def _write(self, at: _StepIndex, row: int, unit: Any, state: Any) -> None:
        """Emit the store of the next hidden state to the result; 0 beyond a sequence's end."""
        result = self._if_active(at, row, state, self._const(0))
        self._outputs[0][self._position(at, row), at.direction, at.first + row, unit] = result

    def _last(self, sequence: Any, state: Any) -> Any:
        if self._inputs.lengths is None:
            return state
        # the last state of an empty sequence is 0, as in ONNX Runtime
        return tirx.Select(self._inputs.lengths[sequence] > 0, state, self._const(0))

    def _activate(self, at: _StepIndex, function: int, value: Any, *, clips: bool = True) -> Any:
        if clips and self._layer.operator.clip is not None:
            limit = self._layer.operator.clip
            value = tirx.max(tirx.min(value, self._const(limit)), self._const(-limit))
        name, *parameters = at.activations[function]
        return _FUNCTIONS[name](value, *map(self._const, (*parameters, 0, 1)))

    def _allocate(self, *shape: int, scope: str = "global", dtype: str = "") -> Any:
        return T.buffer_proxy(T.alloc_buffer(shape, dtype or self._dtype, scope=scope))

    def _const(self, value: float) -> Any:
        return tirx.const(value, self._dtype)


class _CpuLoops(_Loops):
    def __init__(self, layer: RecurrentLayer, *buffers: Any) -> None:
        super().__init__(layer, *buffers)
        directions, (steps, batch) = layer.operator.directions, layer.typical
        self._rows = _MAX_ROWS if is_dynamic(layer.batch) else count_rows(batch)
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
        with IRBuilder() as builder:
            with loop_over(len(directions) * groups, self._has_parallel_groups) as group:
                direction = directions.start + tirx.floordiv(group, groups)
                self._emit_group(direction, activations, group % groups * self._rows)
            return builder.get()

    def _build_dynamic_loop(self, directions: range, activations: Sequence[Activation]) -> Any:
        """Return the loop over a dynamic batch: whole groups of sequences, then the remainder."""
        batch, whole = self._layer.batch, self._rows
        sizes = [whole >> shift for shift in range(whole.bit_length())]
        counts = [batch // whole, *(batch % (2 * rows) // rows for rows in sizes[1:])]
        with IRBuilder() as builder:
            with loop_over(sum(counts) * len(directions), self._has_parallel_groups) as part:
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
                with loop_over(layer.tiles, self._has_parallel_tiles) as tile:
                    compute(at, state, tile)
            self._advance(at, state)
        for output, buffer in zip(self._outputs[1:], (state.hidden, state.cell), strict=False):
            for row in range(self._rows):
                with self._units(layer.hidden) as unit:
                    last = self._last(first + row, buffer[row, unit])
                    output[direction, first + row, unit] = last

    def _advance(self, at: _StepIndex, state: _Buffers) -> None:
        """Emit the copy of the next hidden state to the current one and to the result."""
        for row in range(self._rows):
            with self._units(self._layer.hidden) as unit:
                self._write(at, row, unit, state.following[row, unit])
            with self._units(self._layer.units) as unit:
                following, before = state.following[row, unit], state.hidden[row, unit]
                state.hidden[row, unit] = self._if_active(at, row, following, before)
                if state.integers is not None:
                    state.integers[row, unit] = self._to_operand(state.hidden[row, unit])

    def _lanes(self) -> AbstractContextManager[Any]:
        lanes: AbstractContextManager[Any] = T.vectorized(0, self._layer.lanes)
        return lanes

    def _allocate_accumulators(self, rows: int, gates: int) -> Any:
        return self._allocate(rows, gates, self._layer.lanes, scope="local")

    def _units(self, count: int) -> AbstractContextManager[Any]:
        return iterate_row(count, self._layer.lanes)


@dataclass(frozen=True)
class _View:
    """The part of a buffer of a sequence or a thread; `index` maps its indices to the buffer's."""

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
                # hidden states alternate between two buffers: a launch reads one while it writes the other
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
        """Emit the stores of a unit's next state: to the buffer of the next step and to the result."""
        following = state.following[0, self._unit]
        self._write(at, 0, self._unit, following)
        new = self._if_active(at, 0, following, state.hidden[0, self._unit])
        hidden[(at.step + 1) % 2, d, at.first, self._unit] = new

    @contextmanager
    def _lanes(self) -> Iterator[Any]:
        yield self._unit

    def _allocate_accumulators(self, rows: int, gates: int) -> Any:
        return _View(self._allocate(rows, gates, scope="local"), lambda row, gate, _: (row, gate))

    def _allocate_state(self, *shape: int) -> Any:
        return T.buffer_proxy(T.sblock_alloc_buffer(shape, self._dtype))


def _mix(update: Any, old: Any, new: Any) -> Any:
    return (1 - update) * new + update * old


def _to_integer(value: Any) -> Any:
    """Return a value of the state, clamped to [-1, 1], as int32 in steps of 1 / `STATE_STEPS`."""
    one = tirx.const(1, "float32")
    limited = tirx.max(tirx.min(value.astype("float32"), one), -one)
    return round_to_integer(limited * tirx.const(STATE_STEPS, "float32"))


# ---------------------------------------------------------------- activation functions

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "affine": lambda x, a, b, _, __: a * x + b,
    "elu": lambda x, a, _, zero, one: tirx.Select(x >= zero, x, a * (tirx.exp(x) - one)),
    "hardsigmoid": lambda x, a, b, zero, one: tirx.min(tirx.max(a * x + b, zero), one),
    "leakyrelu": lambda x, a, _, zero, __: tirx.Select(x >= zero, x, a * x),
    "relu": lambda x, _, __, zero, ___: tirx.max(x, zero),
    "scaledtanh": lambda x, a, b, _, __: a * tirx.tanh(b * x),
    "sigmoid": lambda x, *_: tirx.sigmoid(x),
    # log(1 + eˣ) without overflow for large x
    "softplus": lambda x, _, __, zero, one: (
        tirx.max(x, zero) + tirx.log(one + tirx.exp(zero - tirx.abs(x)))
    ),
    "softsign": lambda x, _, __, ___, one: x / (one + tirx.abs(x)),
    "tanh": lambda x, *_: tirx.tanh(x),
    "thresholdedrelu": lambda x, a, _, zero, __: tirx.Select(x >= a, x, zero),
}
"""Name -> the activation function of x, its two parameters, and the constants 0 and 1."""
