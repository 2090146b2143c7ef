"""Matmuls with block-quantized weights: 4 or 8 bits, a scale and zero point for each group.

The weights of a tile of columns are contiguous: 32-bit words, one for each column, with neighboring terms of the
reduction. They are dequantized in registers. Zero points are subtracted from the accumulators of a group instead of
each weight. On x86-64, later words are prefetched.

The data are rearranged first. For float32 accumulators, weights are masked within their words but not shifted; to
compensate, each data value is divided by the power of two that scales its weight. For int32 accumulators, the data of
each row and group are rounded to int8 with a scale of their own, or to several int8 limbs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import fill_registers, largest_divisor
from tvmflow.compiler.contraction.machine import (
    DOT_INSTRUCTIONS,
    LINE_FLOATS,
    PAIR_INSTRUCTIONS,
    CpuModel,
)
from tvmflow.compiler.contraction.packed import allocate, allocate_registers, iterate_row
from tvmflow.compiler.tir_kernels.definitions import (
    call_llvm,
    declare_buffer,
    define_kernel,
    if_else,
    round_to_integer,
    when,
)
from tvmflow.graph import bfloat16
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic
from tvmflow.graph.ir_operators import BlockQuantizedWeights

WORD_BITS: Final = 32
"""The number of bits in the words in which weights are read."""
# The maximum number of columns of a tile, whose words are contiguous.
_TILE_COLUMNS: Final = 64

_FLOAT: Final = "float32"
# The upper half of a word is shifted down by this many bits, so that both halves use the same masks.
_HALF_BITS: Final = 16
# The maximum number of rows of a register tile, which share each dequantized weight in a register.
_MAX_TILE_ROWS: Final = 4
# The number of terms in an int8 dot product.
_TERMS: Final = 4
# The number of words of 4-bit weights whose products fit an int16 accumulator: 4 words · 2 halves · 2 · 15 · 128 is
# below 2¹⁵.
_PAIR_WORDS: Final = 4
# The prefetch distance in words (8 KiB). Hardware prefetching ends with each page, and out-of-order execution, with a
# few hundred instructions in flight, does not reach far enough.
_WORDS_AHEAD: Final = 2048
# The padding of each row of data, at least a cache line: rows a power of two apart would share cache sets.
_LINE_QUADS: Final = 16
_BYTE: Final = 8
_LOW_HALVES: Final = 0x0F0F0F0F
# The highest bits of four bytes, as a signed integer.
_SIGNS: Final = 0x80808080 - (1 << WORD_BITS)
# The largest magnitude of data rounded to one int8, and of the highest limb of data split into several.
_LARGEST: Final = 127
_LARGEST_LIMB: Final = 63
# With this many int8 limbs, results are as exact as with float32 data.
_LIMBS: Final = 3
# All bits of a float32 except its sign.
_ABSOLUTE: Final = 0x7FFFFFFF


class BlockQuantizedMatmul(NamedTuple):
    """A matmul of data (rows, depth), whose rows may be dynamic, and weights (depth, columns).

    Attributes:
        bits: The number of bits in a weight, 4 or 8.
        group: The group size: the terms whose weights share a scale.
        zero: The zero point of all weights; None if each group has its own.
        scales_dtype: The dtype of scales: float32, float16, or bfloat16 as uint16.
        zeros_dtype: The dtype of zero points of groups.
    """

    rows: IrSize
    depth: int
    columns: int
    bits: int
    group: int
    zero: int | None
    scales_dtype: str = "float32"
    zeros_dtype: str = "uint8"

    @property
    def groups(self) -> int:
        """The number of groups in a column."""
        return -(-self.depth // self.group)

    @property
    def terms(self) -> int:
        """The number of weights in a word."""
        return WORD_BITS // self.bits

    @property
    def words(self) -> int:
        """The number of words in a group of a column."""
        return self.group // self.terms

    @property
    def padded_depth(self) -> int:
        """The length of the reduction in whole groups."""
        return self.groups * self.group

    @property
    def width(self) -> int:
        """The number of columns in a tile."""
        return min(_TILE_COLUMNS, -(-self.columns // 16) * 16)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.columns // self.width)


class Machine(NamedTuple):
    """The CPU that a kernel is built for; `has_pairs`: whether it has `PairInstructions`."""

    lanes: int
    registers: int
    dot_dtype: str | None
    has_pairs: bool = False
    prefetches: bool = False

    @classmethod
    def of(cls, cpu: CpuModel, features: Collection[str]) -> Machine:
        """Return the machine of a CPU with some features, by LLVM's names."""
        pairs = PAIR_INSTRUCTIONS.get(cpu.lanes)
        return cls(
            lanes=cpu.lanes,
            registers=cpu.registers,
            dot_dtype=cpu.dot_dtype if cpu.dot_instruction else None,
            has_pairs=pairs is not None and pairs.feature in features,
            prefetches="sse2" in features,
        )


def make_kernel(
    product: BlockQuantizedMatmul, machine: Machine, *, rounds_data: bool
) -> tirx.PrimFunc:
    """Return the kernel; with `rounds_data`, it rounds data to int8.

    Its parameters are data, words, scales, zero points (if groups have their own), and the result.
    """
    with define_kernel("grouped_matmul") as builder:
        tiled = (product.tiles, product.groups, product.width)
        words = (product.tiles, product.groups * product.words, product.width)
        buffers = [
            T.arg("data", declare_buffer((product.rows, product.depth), _FLOAT)),
            T.arg("words", declare_buffer(words, "int32")),
            T.arg("scales", declare_buffer(tiled, product.scales_dtype)),
        ]
        if product.zero is None:
            buffers.append(T.arg("zeros", declare_buffer(tiled, product.zeros_dtype)))
        out = T.arg("out", declare_buffer((product.rows, product.columns), _FLOAT))
        limbs = 1 if rounds_data else _LIMBS

        def emit_floats() -> None:
            _FloatEmitter(product, machine, 1, buffers, out).emit()

        if machine.dot_dtype is not None:
            _IntegerEmitter(product, machine, limbs, buffers, out).emit()
        elif not machine.has_pairs or product.bits == _BYTE:
            # products with 8-bit weights overflow int16
            emit_floats()
        elif rounds_data or (not is_dynamic(product.rows) and product.rows == 1):
            _PairEmitter(product, machine, limbs, buffers, out).emit()
        elif not is_dynamic(product.rows):
            # in float32, several rows share the conversion of weights
            emit_floats()
        else:
            single = _PairEmitter(product._replace(rows=1), machine, limbs, buffers, out)
            if_else(product.rows == 1, single.emit, emit_floats)
    return builder.get()


class _Vector(NamedTuple):
    """A vector of a tile for one group: its first column, first row and index in the accumulators."""

    accumulators: Any
    vector: int
    tile: Any
    column: Any
    first: Any
    group: Any


class _Emitter:
    """Emits a kernel. Subclasses rearrange the data, and accumulate a group's products for a vector."""

    _dtype: str
    _allocate_data: Callable[[], None]
    _arrange_group: Callable[[Any, Any], None]
    _start: Callable[[_Vector], None]
    _add: Callable[[_Vector, Any], None]
    _finish: Callable[[_Vector, int, Any], Any]

    def __init__(
        self, product: BlockQuantizedMatmul, machine: Machine, limbs: int, buffers: Any, out: Any
    ) -> None:
        self._product, self._machine, self._limbs = product, machine, limbs
        self._data, self._words, self._scales, *zeros = map(T.buffer_proxy, buffers)
        self._zeros = zeros[0] if zeros else None
        self._out = T.buffer_proxy(out)

    def emit(self) -> None:
        rows = self._product.rows
        self._allocate_data()
        self._arrange()
        most = fill_registers((1, 2, _MAX_TILE_ROWS), self._limbs, self._machine.registers)
        with T.parallel(self._product.tiles) as tile:
            for first, tile_rows in _iterate_rows(rows, most):
                self._emit_tile(tile, first, tile_rows)

    def _arrange(self) -> None:
        """Emit the rearrangement of the data, in parallel if there are many rows."""
        rows = self._product.rows
        has_many: Any = rows > _MAX_TILE_ROWS
        cases = (
            ((True, T.parallel if has_many else T.serial),)
            if not is_dynamic(rows)
            else ((has_many, T.parallel), (tirx.Not(has_many), T.serial))
        )
        for condition, loop in cases:
            with when(condition), loop(rows) as row, T.serial(self._product.groups) as group:
                self._arrange_group(row, group)

    def _emit_tile(self, tile: Any, first: Any, tile_rows: int) -> None:
        product, lanes = self._product, self._machine.lanes
        self._tile_rows, rows = tile_rows, tile_rows * self._limbs
        widest = product.width // lanes
        divisors = (n for n in range(1, widest + 1) if widest % n == 0)
        vectors = fill_registers(divisors, rows, self._machine.registers)
        totals = allocate_registers(tile_rows, product.width, dtype=_FLOAT)
        for tile_row in range(tile_rows):
            with iterate_row(product.width, lanes) as column:
                totals[tile_row, column] = T.float32(0)
        with T.serial(product.groups) as group, T.serial(widest // vectors) as part:
            accumulators = allocate_registers(rows, vectors, lanes, dtype=self._dtype)
            group_vectors = [
                _Vector(
                    accumulators=accumulators,
                    vector=vector,
                    tile=tile,
                    column=(part * vectors + vector) * lanes,
                    first=first,
                    group=group,
                )
                for vector in range(vectors)
            ]
            for at in group_vectors:
                self._start(at)
            if product.scales_dtype == _FLOAT:
                ahead = -(-(_WORDS_AHEAD // product.width) // product.words)
                self._prefetch(self._scales, group_vectors, group, ahead)
            self._add_words(group_vectors)
            for at in group_vectors:
                for tile_row in range(tile_rows):
                    with T.vectorized(lanes) as lane:
                        column = at.column + lane
                        scale = _to_float(self._scales[tile, group, column])
                        value = self._finish(at, tile_row, lane)
                        totals[tile_row, column] = totals[tile_row, column] + scale * value
        columns, is_whole = tile * product.width, product.columns % product.width == 0
        for tile_row in range(tile_rows):
            loop = iterate_row(product.width, lanes) if is_whole else T.serial(product.width)
            with loop as column, when(is_whole or columns + column < product.columns):
                self._out[first + tile_row, columns + column] = totals[tile_row, column]

    def _add_words(self, vectors: Sequence[_Vector]) -> None:
        """Emit the products of a group."""
        with T.serial(self._product.words) as index:
            self._prefetch_words(vectors, index)
            for at in vectors:
                self._add(at, index)

    def _prefetch(self, tensor: Any, vectors: Sequence[_Vector], row: Any, ahead: int) -> None:
        """Emit the prefetch of a later row of a tensor; beyond the tensor's end, it is harmless."""
        if self._machine.prefetches:
            # words have the size of a float32
            for at in vectors[:: max(1, LINE_FLOATS // self._machine.lanes)]:
                address = T.address_of(tensor[at.tile, row + ahead, at.column])
                # the prefetch flags: read, into all cache levels, data
                flags = map(T.int32, (0, 3, 1))
                T.evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *flags))

    def _prefetch_words(self, vectors: Sequence[_Vector], index: Any) -> None:
        row = vectors[0].group * self._product.words + index
        self._prefetch(self._words, vectors, row, _WORDS_AHEAD // self._product.width)

    def _word(self, at: _Vector, index: Any, lanes: Any) -> Any:
        return self._words[at.tile, at.group * self._product.words + index, lanes]

    def _read(self, row: Any, term: Any) -> Any:
        """Return a value of the data, or 0 beyond the depth."""
        depth = self._product.depth
        if self._product.padded_depth == depth:
            return self._data[row, term]
        value = self._data[row, tirx.min(term, depth - 1)]
        return tirx.if_then_else(term < depth, value, T.float32(0))


class _FloatEmitter(_Emitter):
    _dtype = _FLOAT

    def _allocate_data(self) -> None:
        product = self._product
        self._arranged = allocate(product.rows, product.padded_depth, dtype=_FLOAT)
        self._totals = allocate(product.rows, product.groups, dtype=_FLOAT)

    def _arrange_group(self, row: Any, group: Any) -> None:
        """Emit the division of a group's data by powers of two, and the sum of these data."""
        product = self._product
        total = allocate_registers(product.terms, dtype=_FLOAT)
        with T.vectorized(product.terms) as lane:
            total[lane] = T.float32(0)
        with T.serial(product.words) as index:
            for term in range(product.terms):
                position = group * product.group + index * product.terms + term
                value = self._read(row, position)
                total[term] = total[term] + value
                power = 2.0 ** -(term * product.bits % _HALF_BITS)
                self._arranged[row, position] = value * T.float32(power)
        _reduce(total, tirx.Add, product.terms)
        self._totals[row, group] = total[0]

    def _start(self, at: _Vector) -> None:
        for tile_row in range(self._tile_rows):
            with T.vectorized(self._machine.lanes) as lane:
                at.accumulators[tile_row, at.vector, lane] = T.float32(0)

    def _add(self, at: _Vector, index: Any) -> None:
        product, accumulators = self._product, at.accumulators
        for term in range(product.terms):
            shift = term * product.bits
            mask = ((1 << product.bits) - 1) << (shift % _HALF_BITS)
            with T.vectorized(self._machine.lanes) as lane:
                word = self._word(at, index, at.column + lane)
                if shift >= _HALF_BITS:
                    word = word >> T.int32(_HALF_BITS)
                weight = tirx.Cast(_FLOAT, tirx.bitwise_and(word, T.int32(mask)))
                position = at.group * product.group + index * product.terms + term
                for tile_row in range(self._tile_rows):
                    value = self._arranged[at.first + tile_row, position]
                    before = accumulators[tile_row, at.vector, lane]
                    accumulators[tile_row, at.vector, lane] = before + value * weight

    def _finish(self, at: _Vector, tile_row: int, lane: Any) -> Any:
        total = self._totals[at.first + tile_row, at.group]
        zero: Any = T.float32(self._product.zero or 0)
        if self._zeros is not None:
            zero = _to_float(self._zeros[at.tile, at.group, at.column + lane])
        return at.accumulators[tile_row, at.vector, lane] - zero * total


class _IntegerEmitter(_Emitter):
    """int32 accumulation of data that are rounded to one or several int8 limbs."""

    _dtype = "int32"

    def _allocate_data(self) -> None:
        product, limbs = self._product, self._limbs
        quads = product.padded_depth // _TERMS + _LINE_QUADS
        self._arranged = allocate(product.rows, quads, limbs, _TERMS, dtype="int8")
        self._totals = allocate(product.rows, product.groups, limbs, dtype="int32")
        self._data_scales = allocate(product.rows, product.groups, dtype=_FLOAT)

    def _arrange_group(self, row: Any, group: Any) -> None:
        """Emit the rounding of a group of the data, its scale, and the totals of its limbs."""
        product, limbs = self._product, self._limbs
        limit = _LARGEST if limbs == 1 else _LARGEST_LIMB << _BYTE * (limbs - 1)
        # as integers, the bits of NaN and infinity are larger than those of finite values
        largest = allocate_registers(product.terms, dtype="int32")
        with T.vectorized(product.terms) as lane:
            largest[lane] = T.int32(0)
        with T.serial(product.words) as index, T.vectorized(product.terms) as lane:
            value = self._read(row, group * product.group + index * product.terms + lane)
            bits = tirx.bitwise_and(tirx.reinterpret("int32", value), T.int32(_ABSOLUTE))
            largest[lane] = tirx.max(largest[lane], bits)
        _reduce(largest, tirx.max, product.terms)
        extreme, factor = (allocate_registers(1, dtype=_FLOAT) for _ in range(2))
        extreme[0] = tirx.reinterpret(_FLOAT, largest[0])
        is_zero = extreme[0] <= T.float32(limit * 2.0**-126)
        factor[0] = tirx.Select(is_zero, T.float32(0), T.float32(limit) / extreme[0])
        self._data_scales[row, group] = extreme[0] * T.float32(1 / limit)
        totals = allocate_registers(limbs, dtype="int32")
        for limb in range(limbs):
            totals[limb] = T.int32(0)
        rounded = allocate_registers(1, dtype="int32")
        with T.serial(product.words) as index:
            for position in range(product.terms):
                start = group * product.group + index * product.terms
                # terms that one mask selects are adjacent
                term = position % _TERMS * (product.terms // _TERMS) + position // _TERMS
                rounded[0] = round_to_integer(self._read(row, start + term) * factor[0])
                for limb in reversed(range(limbs)):
                    low = tirx.Cast("int8", rounded[0]) if limb else rounded[0]
                    totals[limb] = totals[limb] + tirx.Cast("int32", low)
                    quad = tirx.floordiv(start, _TERMS) + position // _TERMS
                    self._arranged[row, quad, limb, position % _TERMS] = tirx.Cast("int8", low)
                    if limb:
                        rounded[0] = (rounded[0] - tirx.Cast("int32", low)) >> T.int32(_BYTE)
        for limb in range(limbs):
            self._totals[row, group, limb] = totals[limb]

    def _start(self, at: _Vector) -> None:
        for tile_row, limb in self._iterate_accumulators():
            with T.vectorized(self._machine.lanes) as lane:
                start = T.int32(0)
                if self._zeros is None or self._product.zeros_dtype != _FLOAT:
                    zero = T.int32((self._product.zero or 0) - self._shift)
                    if self._zeros is not None:
                        own = self._zeros[at.tile, at.group, at.column + lane]
                        zero = tirx.Cast("int32", own) - T.int32(self._shift)
                    start = start - zero * self._totals[at.first + tile_row, at.group, limb]
                at.accumulators[tile_row * self._limbs + limb, at.vector, lane] = start

    @property
    def _shift(self) -> int:
        """The offset that makes 8-bit weights signed, if the instruction takes only signed operands."""
        is_signed = self._machine.dot_dtype == "int8" and self._product.bits == _BYTE
        return 1 << (_BYTE - 1) if is_signed else 0

    def _iterate_accumulators(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self._tile_rows), range(self._limbs))

    def _add(self, at: _Vector, index: Any) -> None:
        product, lanes = self._product, self._machine.lanes
        for half in range(product.terms // _TERMS):
            word = self._word(at, index, tirx.Ramp(at.column, 1, lanes))
            if half:
                word = word >> tirx.Broadcast(T.int32(product.bits), lanes)
            if product.bits < _BYTE:
                word = tirx.bitwise_and(word, tirx.Broadcast(T.int32(_LOW_HALVES), lanes))
            elif self._shift:
                word = tirx.bitwise_xor(word, tirx.Broadcast(T.int32(_SIGNS), lanes))
            begin = at.group * product.group + index * product.terms
            quad, terms = tirx.floordiv(begin, _TERMS) + half, tirx.Ramp(T.int32(0), 1, _TERMS)
            for tile_row, limb in self._iterate_accumulators():
                values = self._arranged[at.first + tile_row, quad, limb, terms]
                values = tirx.Broadcast(tirx.reinterpret("int32", values), lanes)
                row = tile_row * self._limbs + limb
                self._add_products(at.accumulators, row, at.vector, word, values)

    def _add_products(
        self, accumulators: Any, row: int, vector: int, weights: Any, data: Any
    ) -> None:
        """Emit dot products of four bytes each, added to the accumulators of a row."""
        lanes, dtype = self._machine.lanes, self._machine.dot_dtype
        assert dtype is not None, "there is an instruction for dot products"
        all_lanes = tirx.Ramp(T.int32(0), 1, lanes)
        accumulators[row, vector, all_lanes] = call_llvm(
            DOT_INSTRUCTIONS[dtype, lanes],
            f"int32x{lanes}",
            accumulators[row, vector, all_lanes],
            tirx.reinterpret(f"{dtype}x{lanes * _TERMS}", weights),
            tirx.reinterpret(f"int8x{lanes * _TERMS}", data),
        )

    def _finish(self, at: _Vector, tile_row: int, lane: Any) -> Any:
        row, group = at.first + tile_row, at.group
        real: Any = None
        total: Any = None
        for limb in range(self._limbs):
            accumulator = at.accumulators[tile_row * self._limbs + limb, at.vector, lane]
            part = tirx.Cast(_FLOAT, accumulator)
            all_limbs = tirx.Cast(_FLOAT, self._totals[row, group, limb])
            weight = T.float32(float(1 << _BYTE))
            real = part if real is None else real * weight + part
            total = all_limbs if total is None else total * weight + all_limbs
        if self._zeros is not None and self._product.zeros_dtype == _FLOAT:
            zero = self._zeros[at.tile, group, at.column + lane] - T.float32(self._shift)
            real = real - zero * total
        return real * self._data_scales[row, group]


class _PairEmitter(_IntegerEmitter):
    """Adds pairs of products to int16 accumulators, which are promoted to int32 before they overflow."""

    def _add_words(self, vectors: Sequence[_Vector]) -> None:
        words, lanes, totals = (self._product.words, self._machine.lanes, vectors[0].accumulators)
        together = largest_divisor(words, _PAIR_WORDS)
        rows, int16_lanes = self._tile_rows * self._limbs, tirx.Ramp(T.int32(0), 1, 2 * lanes)
        positions = [(row, vector) for row in range(rows) for vector in range(len(vectors))]
        ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
        all_lanes = tirx.Ramp(T.int32(0), 1, lanes)
        with T.serial(words // together) as part:
            pairs = allocate_registers(rows, len(vectors), 2 * lanes, dtype="int16")
            for row, vector in positions:
                pairs[row, vector, int16_lanes] = tirx.Broadcast(tirx.const(0, "int16"), 2 * lanes)
            with T.serial(together) as step:
                index = part * together + step
                self._prefetch_words(vectors, index)
                for at in vectors:
                    self._add(at._replace(accumulators=pairs), index)
            for row, vector in positions:
                promote, operand = PAIR_INSTRUCTIONS[lanes].promote, pairs[row, vector, int16_lanes]
                total = call_llvm(promote, f"int32x{lanes}", operand, ones)
                totals[row, vector, all_lanes] = totals[row, vector, all_lanes] + total

    def _add_products(
        self, accumulators: Any, row: int, vector: int, weights: Any, data: Any
    ) -> None:
        lanes = self._machine.lanes
        int16_lanes = tirx.Ramp(T.int32(0), 1, 2 * lanes)
        products = call_llvm(
            PAIR_INSTRUCTIONS[lanes].multiply,
            f"int16x{2 * lanes}",
            tirx.reinterpret(f"uint8x{lanes * _TERMS}", weights),
            tirx.reinterpret(f"int8x{lanes * _TERMS}", data),
        )
        accumulators[row, vector, int16_lanes] = accumulators[row, vector, int16_lanes] + products


def make_row_kernel(
    operator: BlockQuantizedWeights, rows: int, count: IrSize, dtypes: Sequence[str]
) -> tirx.PrimFunc:
    """Return the kernel that gathers and dequantizes `count` rows of weights.

    Its parameters are the indices of the rows, the operands, and the result. `dtypes` holds the dtypes of the operands,
    then the dtype of the indices.
    """
    per_byte, groups = _BYTE // operator.bits, operator.groups
    *operands, index_dtype = dtypes
    sizes = [(rows, groups, operator.group // per_byte), *[(rows, groups)] * (len(operands) - 1)]
    with define_kernel("grouped_take") as builder:
        indices = T.buffer_proxy(T.arg("indices", declare_buffer((count,), index_dtype)))
        packed, scales, *zeros = (
            T.buffer_proxy(T.arg(f"operand{position}", declare_buffer(size, dtype)))
            for position, (size, dtype) in enumerate(zip(sizes, operands, strict=True))
        )
        out = T.buffer_proxy(T.arg("out", declare_buffer((count, operator.depth), _FLOAT)))
        with T.parallel(count) as position:
            # a negative index counts from the end; others are clamped, as in other gathers
            index = tirx.Cast("int64", indices[position])
            index = tirx.Select(index < 0, index + rows, index)
            row = tirx.max(tirx.min(index, T.int64(rows - 1)), T.int64(0))
            with T.serial(operator.depth) as column:
                group, term = column // operator.group, column % operator.group
                value = tirx.Cast("int32", packed[row, group, term // per_byte])
                if per_byte > 1:
                    mask = (1 << operator.bits) - 1
                    value = (value >> (term % per_byte * operator.bits)) & mask
                zero = _to_float(zeros[0][row, group]) if zeros else T.float32(operator.zero)
                real = (tirx.Cast(_FLOAT, value) - zero) * _to_float(scales[row, group])
                out[position, column] = real
    return builder.get()


def _reduce(values: Any, function: Callable[[Any, Any], Any], size: int) -> None:
    """Emit a pairwise reduction of `size` values, a power of two, into the first one."""
    while size > 1:
        size //= 2
        for term in range(size):
            values[term] = function(values[term], values[term + size])


def _to_float(value: Any) -> Any:
    """Return a scale or a zero point as float32."""
    dtype = str(value.ty.dtype)
    if dtype.startswith(bfloat16.DTYPE):
        return bfloat16.to_float32(value)
    return value if dtype == _FLOAT else tirx.Cast(_FLOAT, value)


def _iterate_rows(rows: IrSize, most: int) -> Iterator[tuple[Any, int]]:
    """Emit loops over all rows; yield the first row and the number of rows of each register tile."""
    first: Any = 0
    for tile_rows in (most >> shift for shift in range(most.bit_length())):
        count = (rows - first) // tile_rows
        if is_dynamic(count) or count > 1:
            with T.serial(count) as index:
                yield first + index * tile_rows, tile_rows
        elif count:
            yield first, tile_rows
        first = first + count * tile_rows
