"""Products of data with weights of 4 or 8 bits, groups of which share a scale and a zero point.

A tile has some columns. Its weights are one piece of memory, which is read from its beginning to its
end: words of 32 bits, one for each column, with neighboring terms of a sum. They become numbers in
registers. Zero points are subtracted from the sums of a group, so that weights stay as they are. On x86-64, what is
read later is prefetched.

The data are arranged first. For sums of float32, each number is divided by the power of two by which its weight is
too large: a weight is masked within its word, and not moved. For sums of integers, the numbers of a row that meet
one group of weights are rounded to int8 with a scale of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
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
from tvmflow.compiler.contraction.packed import allocate_registers
from tvmflow.compiler.tir_kernels import bfloat16
from tvmflow.compiler.tir_kernels.definitions import (
    call_llvm,
    declare_buffer,
    define_kernel,
    round_to_integer,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic
from tvmflow.graph.ir_operators import BlockQuantizedWeights

WORD_BITS: Final = 32
"""The bits of the words in which weights are read."""
TILE_COLUMNS: Final = 64
"""The most columns of a tile: so many words are next to each other."""

_FLOAT: Final = "float32"
# Where words are masked, numbers of the lower and the upper half of a word are computed alike.
_HALF_BITS: Final = 16
# The most rows that are multiplied with a weight while it is in a register.
_MAX_POINTS: Final = 4
# The terms of a dot product of bytes.
_TERMS: Final = 4
# The words of 4-bit weights whose products an int16 holds, two of each half: 2 · 2 · 15 · 128 · 4 is below 2¹⁵.
_PAIR_WORDS: Final = 4
# Words are prefetched so far ahead (8 KiB): instructions wait for memory otherwise, because no more than a few hundred
# are in flight, and the CPU's own prefetching ends with each page.
_WORDS_AHEAD: Final = 2048
# Rows of data that are apart by a power of two would share sets of the cache: a line is between them.
_LINE_QUADS: Final = 16
_BYTE: Final = 8
_LOW_HALVES: Final = 0x0F0F0F0F
# The highest bits of four bytes, as a signed number.
_SIGNS: Final = 0x80808080 - (1 << WORD_BITS)
# The largest number that data are rounded to; of several digits, the largest first one.
_LARGEST: Final = 127
_LARGEST_DIGIT: Final = 63
# The digits of data whose sums are as exact as those of float32.
_DIGITS: Final = 3
# The bits of a float32 but its sign.
_ABSOLUTE: Final = 0x7FFFFFFF


class BlockQuantizedMatmul(NamedTuple):
    """A product of a matrix (rows, depth) and weights (depth, columns).

    Attributes:
        rows: The number of rows, which may be open.
        depth: The length of a sum.
        columns: The number of columns.
        bits: The bits of a weight, 4 or 8.
        group: The terms of a sum whose weights share a scale.
        zero: The zero point of all weights; None where each group has its own.
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
        """The groups of a column."""
        return -(-self.depth // self.group)

    @property
    def terms(self) -> int:
        """The weights of a word."""
        return WORD_BITS // self.bits

    @property
    def words(self) -> int:
        """The words of a group of a column."""
        return self.group // self.terms

    @property
    def padded_depth(self) -> int:
        """The length of a sum in whole groups."""
        return self.groups * self.group

    @property
    def width(self) -> int:
        """The columns of a tile."""
        return min(TILE_COLUMNS, -(-self.columns // 16) * 16)

    @property
    def words_ahead(self) -> int:
        """The words of a column between those that are read and those that are prefetched."""
        return _WORDS_AHEAD // self.width

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.columns // self.width)


class Machine(NamedTuple):
    """The CPU of a kernel.

    Instructions multiply bytes of a dtype with int8 weights, or add the products of two bytes each as int16.
    """

    lanes: int
    registers: int
    dot_dtype: str | None
    has_pairs: bool = False
    prefetches: bool = False

    @classmethod
    def of(cls, cpu: CpuModel, features: Collection[str]) -> Machine:
        """Return what kernels know of a CPU, by LLVM's names of its features."""
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
    """Return the kernel; its data are rounded to int8 where that is asked for.

    Its parameters are data, words, scales, zero points if each group has one, and the result.
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
        digits = 1 if rounds_data else _DIGITS
        if machine.dot_dtype is not None:
            _IntegerSums(product, machine, digits, buffers, out).emit()
        elif not machine.has_pairs or product.bits == _BYTE:
            # int16 holds no sums with weights of 8 bits
            _FloatSums(product, machine, 1, buffers, out).emit()
        elif rounds_data:
            _PairSums(product, machine, 1, buffers, out).emit()
        else:
            _emit_digits_or_floats(product, machine, buffers, out)
    return builder.get()


def _emit_digits_or_floats(
    product: BlockQuantizedMatmul, machine: Machine, buffers: Sequence[Any], out: Any
) -> None:
    """Emit sums of three digits for a single row, of float32 for several, which share conversions."""
    single = product._replace(rows=1)
    if not is_dynamic(product.rows):
        is_single = product.rows == 1
        kind, digits = (_PairSums, _DIGITS) if is_single else (_FloatSums, 1)
        kind(product, machine, digits, buffers, out).emit()
        return
    with T.If(product.rows == 1):
        with T.Then():
            _PairSums(single, machine, _DIGITS, buffers, out).emit()
        with T.Else():
            _FloatSums(product, machine, 1, buffers, out).emit()


class _Vector(NamedTuple):
    """A vector of columns of a tile, for some rows and one group of terms.

    The column and the row are the first ones; of the sums of the group, its own are at `vector`.
    """

    sums: Any
    vector: int
    tile: Any
    column: Any
    first: Any
    group: Any


class _Sums:
    """Emits a kernel. Subclasses know how data are arranged, and how the sums of a group are computed.

    They have `_allocate_data`, `_arrange_group` for a group of a row, and `_start`, `_add` and `_finish` for the sums of
    a vector.
    """

    _dtype: str
    """The dtype of the sums of a group."""
    _allocate_data: Callable[[], None]
    _arrange_group: Callable[[Any, Any], None]
    _start: Callable[[_Vector], None]
    _add: Callable[[_Vector, Any], None]
    _finish: Callable[[_Vector, int, Any], Any]

    def __init__(
        self, product: BlockQuantizedMatmul, machine: Machine, digits: int, buffers: Any, out: Any
    ) -> None:
        self._product, self._machine, self._digits = product, machine, digits
        self._data, self._words, self._scales, *zeros = map(T.buffer_proxy, buffers)
        self._zeros = zeros[0] if zeros else None
        self._out = T.buffer_proxy(out)

    def emit(self) -> None:
        rows = self._product.rows
        self._allocate_data()
        self._arrange()
        most = fill_registers((1, 2, _MAX_POINTS), self._digits, self._machine.registers)
        with T.parallel(self._product.tiles) as tile:
            for first, points in _iterate_rows(rows, most):
                self._emit_tile(tile, first, points)

    def _arrange(self) -> None:
        """Emit the arrangement of the data, several rows of them on all cores."""
        rows = self._product.rows
        has_many: Any = rows > _MAX_POINTS
        if is_dynamic(rows):
            for condition, loop in ((has_many, T.parallel), (tirx.Not(has_many), T.serial)):
                with T.If(condition), T.Then():
                    self._arrange_rows(loop)
        else:
            self._arrange_rows(T.parallel if has_many else T.serial)

    def _arrange_rows(self, loop: Any) -> None:
        with loop(self._product.rows) as row, T.serial(self._product.groups) as group:
            self._arrange_group(row, group)

    def _emit_tile(self, tile: Any, first: Any, points: int) -> None:
        product, lanes = self._product, self._machine.lanes
        self._points = points
        widest = product.width // lanes
        divisors = (n for n in range(1, widest + 1) if widest % n == 0)
        vectors = fill_registers(divisors, points * self._digits, self._machine.registers)
        totals = allocate_registers(points, product.width, dtype=_FLOAT)
        for point in range(points):
            for column in self._columns():
                totals[point, column] = T.float32(0)
        parts = product.width // lanes // vectors
        with T.serial(product.groups) as group, T.serial(parts) as part:
            sums = allocate_registers(points * self._digits, vectors, lanes, dtype=self._dtype)
            own = [
                _Vector(
                    sums=sums,
                    vector=vector,
                    tile=tile,
                    column=(part * vectors + vector) * lanes,
                    first=first,
                    group=group,
                )
                for vector in range(vectors)
            ]
            for at in own:
                self._start(at)
            if product.scales_dtype == _FLOAT:
                ahead = -(-product.words_ahead // product.words)
                self._prefetch(self._scales, own, group, ahead)
            self._add_words(own)
            for at in own:
                for point in range(points):
                    with T.vectorized(lanes) as lane:
                        column = at.column + lane
                        scale = _to_float(self._scales[tile, group, column])
                        value = self._finish(at, point, lane)
                        totals[point, column] = totals[point, column] + scale * value
        columns = tile * product.width
        for point in range(points):
            for column in self._columns(product.columns % product.width != 0):
                with ExitStack() as guard:
                    if product.columns % product.width:
                        guard.enter_context(T.If(columns + column < product.columns))
                        guard.enter_context(T.Then())
                    self._out[first + point, columns + column] = totals[point, column]

    def _add_words(self, vectors: Sequence[_Vector]) -> None:
        """Emit the sums of a group."""
        with T.serial(self._product.words) as index:
            self._prefetch_words(vectors, index)
            for at in vectors:
                self._add(at, index)

    def _prefetch(self, tensor: Any, vectors: Sequence[_Vector], row: Any, ahead: int) -> None:
        """Emit the prefetching of a later row of a tensor, which may be beyond its end: nothing is read there."""
        if self._machine.prefetches:
            # words have the size of a float32
            for at in vectors[:: max(1, LINE_FLOATS // self._machine.lanes)]:
                address = T.address_of(tensor[at.tile, row + ahead, at.column])
                # for reading, into all caches, as data
                flags = map(T.int32, (0, 3, 1))
                T.evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *flags))

    def _prefetch_words(self, vectors: Sequence[_Vector], index: Any) -> None:
        row = vectors[0].group * self._product.words + index
        self._prefetch(self._words, vectors, row, self._product.words_ahead)

    def _columns(self, is_ragged: bool = False) -> Iterator[Any]:
        width, lanes = self._product.width, self._machine.lanes
        if is_ragged:
            with T.serial(width) as column:
                yield column
        else:
            with T.serial(width // lanes) as vector, T.vectorized(lanes) as lane:
                yield vector * lanes + lane

    def _word(self, at: _Vector, index: Any, lanes: Any) -> Any:
        return self._words[at.tile, at.group * self._product.words + index, lanes]

    def _read(self, row: Any, term: Any) -> Any:
        """Return a number of the data, 0 beyond the end of a sum."""
        if self._product.padded_depth == self._product.depth:
            return self._data[row, term]
        inside = term < self._product.depth
        return tirx.if_then_else(
            inside, self._data[row, tirx.min(term, self._product.depth - 1)], T.float32(0)
        )


class _FloatSums(_Sums):
    _dtype = _FLOAT

    def _allocate_data(self) -> None:
        product = self._product
        self._arranged = _allocate_rows(product.rows, (product.padded_depth,), _FLOAT)
        self._totals = _allocate_rows(product.rows, (product.groups,), _FLOAT)

    def _arrange_group(self, row: Any, group: Any) -> None:
        """Emit the division of data by powers of two, and the sum of a group."""
        product = self._product
        total = allocate_registers(product.terms, dtype=_FLOAT)
        with T.vectorized(product.terms) as lane:
            total[lane] = T.float32(0)
        with T.serial(product.words) as index:
            for term in range(product.terms):
                place = group * product.group + index * product.terms + term
                value = self._read(row, place)
                total[term] = total[term] + value
                power = 2.0 ** -(term * product.bits % _HALF_BITS)
                self._arranged[row, place] = value * T.float32(power)
        size = product.terms
        while size > 1:
            size //= 2
            for term in range(size):
                total[term] = total[term] + total[term + size]
        self._totals[row, group] = total[0]

    def _start(self, at: _Vector) -> None:
        for point in range(self._points):
            with T.vectorized(self._machine.lanes) as lane:
                at.sums[point, at.vector, lane] = T.float32(0)

    def _add(self, at: _Vector, index: Any) -> None:
        product, sums = self._product, at.sums
        for term in range(product.terms):
            shift = term * product.bits
            mask = ((1 << product.bits) - 1) << (shift % _HALF_BITS)
            with T.vectorized(self._machine.lanes) as lane:
                word = self._word(at, index, at.column + lane)
                if shift >= _HALF_BITS:
                    word = word >> T.int32(_HALF_BITS)
                weight = tirx.Cast(_FLOAT, tirx.bitwise_and(word, T.int32(mask)))
                place = at.group * product.group + index * product.terms + term
                for point in range(self._points):
                    number = self._arranged[at.first + point, place]
                    own = sums[point, at.vector, lane]
                    sums[point, at.vector, lane] = own + number * weight

    def _finish(self, at: _Vector, point: int, lane: Any) -> Any:
        total = self._totals[at.first + point, at.group]
        zero: Any = T.float32(self._product.zero or 0)
        if self._zeros is not None:
            zero = _to_float(self._zeros[at.tile, at.group, at.column + lane])
        return at.sums[point, at.vector, lane] - zero * total


class _IntegerSums(_Sums):
    """Sums of int32, of data that are rounded to integers whose digits are bytes."""

    _dtype = "int32"

    def _allocate_data(self) -> None:
        product, digits = self._product, self._digits
        quads = product.padded_depth // _TERMS + _LINE_QUADS
        self._arranged = _allocate_rows(product.rows, (quads, digits, _TERMS), "int8")
        self._totals = _allocate_rows(product.rows, (product.groups, digits), "int32")
        self._data_scales = _allocate_rows(product.rows, (product.groups,), _FLOAT)

    def _arrange_group(self, row: Any, group: Any) -> None:
        """Emit the rounding of a group of the data, its scale, and the sums of its digits."""
        product, digits = self._product, self._digits
        limit = _LARGEST if digits == 1 else _LARGEST_DIGIT << _BYTE * (digits - 1)
        # as integers, the bits of a NaN or an infinity are larger than those of all numbers
        largest = allocate_registers(product.terms, dtype="int32")
        with T.vectorized(product.terms) as lane:
            largest[lane] = T.int32(0)
        with T.serial(product.words) as index, T.vectorized(product.terms) as lane:
            value = self._read(row, group * product.group + index * product.terms + lane)
            bits = tirx.bitwise_and(tirx.reinterpret("int32", value), T.int32(_ABSOLUTE))
            largest[lane] = tirx.max(largest[lane], bits)
        size = product.terms
        while size > 1:
            size //= 2
            for term in range(size):
                largest[term] = tirx.max(largest[term], largest[term + size])
        extreme, factor = allocate_registers(1, dtype=_FLOAT), allocate_registers(1, dtype=_FLOAT)
        extreme[0] = tirx.reinterpret(_FLOAT, largest[0])
        is_zero = extreme[0] <= T.float32(limit * 2.0**-126)
        factor[0] = tirx.Select(is_zero, T.float32(0), T.float32(limit) / extreme[0])
        self._data_scales[row, group] = extreme[0] * T.float32(1 / limit)
        totals = allocate_registers(digits, dtype="int32")
        for digit in range(digits):
            totals[digit] = T.int32(0)
        number = allocate_registers(1, dtype="int32")
        with T.serial(product.words) as index:
            for place in range(product.terms):
                start = group * product.group + index * product.terms
                value = self._read(row, start + self._term_at(place)) * factor[0]
                number[0] = round_to_integer(value)
                for digit in reversed(range(digits)):
                    low = tirx.Cast("int8", number[0]) if digit else number[0]
                    totals[digit] = totals[digit] + tirx.Cast("int32", low)
                    quad = tirx.floordiv(start, _TERMS) + place // _TERMS
                    self._arranged[row, quad, digit, place % _TERMS] = tirx.Cast("int8", low)
                    if digit:
                        number[0] = (number[0] - tirx.Cast("int32", low)) >> T.int32(_BYTE)
        for digit in range(digits):
            self._totals[row, group, digit] = totals[digit]

    def _term_at(self, place: int) -> int:
        """Return the term of a word whose number is at a place: those of one mask are neighbors."""
        halves = self._product.terms // _TERMS
        return place % _TERMS * halves + place // _TERMS

    def _start(self, at: _Vector) -> None:
        for point, digit in self._iterate_sums():
            with T.vectorized(self._machine.lanes) as lane:
                start = T.int32(0)
                if self._zeros is None or self._product.zeros_dtype != _FLOAT:
                    total = self._totals[at.first + point, at.group, digit]
                    start = T.int32(0) - self._integer_zero(at, lane) * total
                at.sums[point * self._digits + digit, at.vector, lane] = start

    @property
    def _shift(self) -> int:
        """The number subtracted from weights, where an instruction takes all bytes as signed."""
        is_signed = self._machine.dot_dtype == "int8" and self._product.bits == _BYTE
        return 1 << (_BYTE - 1) if is_signed else 0

    def _iterate_sums(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self._points), range(self._digits))

    def _integer_zero(self, at: _Vector, lane: Any) -> Any:
        if self._zeros is None:
            return T.int32((self._product.zero or 0) - self._shift)
        zero = self._zeros[at.tile, at.group, at.column + lane]
        return tirx.Cast("int32", zero) - T.int32(self._shift)

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
            for point, digit in self._iterate_sums():
                numbers = self._arranged[at.first + point, quad, digit, terms]
                numbers = tirx.Broadcast(tirx.reinterpret("int32", numbers), lanes)
                row = point * self._digits + digit
                self._add_products(at.sums, row, at.vector, word, numbers)

    def _add_products(self, sums: Any, row: int, vector: int, weights: Any, data: Any) -> None:
        """Emit the sums of the products of four bytes each."""
        lanes, dtype = self._machine.lanes, self._machine.dot_dtype
        assert dtype is not None, "there is an instruction for dot products"
        all_lanes = tirx.Ramp(T.int32(0), 1, lanes)
        sums[row, vector, all_lanes] = call_llvm(
            DOT_INSTRUCTIONS[dtype, lanes],
            f"int32x{lanes}",
            sums[row, vector, all_lanes],
            tirx.reinterpret(f"{dtype}x{lanes * _TERMS}", weights),
            tirx.reinterpret(f"int8x{lanes * _TERMS}", data),
        )

    def _finish(self, at: _Vector, point: int, lane: Any) -> Any:
        row, group = at.first + point, at.group
        real: Any = None
        total: Any = None
        for digit in range(self._digits):
            own = tirx.Cast(_FLOAT, at.sums[point * self._digits + digit, at.vector, lane])
            all_own = tirx.Cast(_FLOAT, self._totals[row, group, digit])
            weight = T.float32(float(1 << _BYTE))
            real = own if real is None else real * weight + own
            total = all_own if total is None else total * weight + all_own
        if self._zeros is not None and self._product.zeros_dtype == _FLOAT:
            zero = self._zeros[at.tile, group, at.column + lane] - T.float32(self._shift)
            real = real - zero * total
        return real * self._data_scales[row, group]


class _PairSums(_IntegerSums):
    """The same where an instruction adds two products at a time, as int16, which hold a few of these."""

    def _add_words(self, vectors: Sequence[_Vector]) -> None:
        words, lanes, sums = self._product.words, self._machine.lanes, vectors[0].sums
        together = largest_divisor(words, _PAIR_WORDS)
        rows, narrow = self._points * self._digits, tirx.Ramp(T.int32(0), 1, 2 * lanes)
        places = [(row, vector) for row in range(rows) for vector in range(len(vectors))]
        ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
        all_lanes = tirx.Ramp(T.int32(0), 1, lanes)
        with T.serial(words // together) as part:
            pairs = allocate_registers(rows, len(vectors), 2 * lanes, dtype="int16")
            for row, vector in places:
                pairs[row, vector, narrow] = tirx.Broadcast(tirx.const(0, "int16"), 2 * lanes)
            with T.serial(together) as step:
                index = part * together + step
                self._prefetch_words(vectors, index)
                for at in vectors:
                    self._add(at._replace(sums=pairs), index)
            for row, vector in places:
                operands = pairs[row, vector, narrow], ones
                widen = PAIR_INSTRUCTIONS[lanes].widen
                total = call_llvm(widen, f"int32x{lanes}", *operands)
                sums[row, vector, all_lanes] = sums[row, vector, all_lanes] + total

    def _add_products(self, sums: Any, row: int, vector: int, weights: Any, data: Any) -> None:
        lanes = self._machine.lanes
        narrow = tirx.Ramp(T.int32(0), 1, 2 * lanes)
        products = call_llvm(
            PAIR_INSTRUCTIONS[lanes].multiply,
            f"int16x{2 * lanes}",
            tirx.reinterpret(f"uint8x{lanes * _TERMS}", weights),
            tirx.reinterpret(f"int8x{lanes * _TERMS}", data),
        )
        sums[row, vector, narrow] = sums[row, vector, narrow] + products


def make_row_kernel(
    operator: BlockQuantizedWeights, rows: int, count: IrSize, dtypes: Sequence[str]
) -> tirx.PrimFunc:
    """Return the kernel that converts some rows (`count`) of weights.

    Its parameters are the numbers of the rows, the operands, and the result; the dtypes are those of the operands and
    of the numbers.
    """
    per_byte, groups = _BYTE // operator.bits, operator.groups
    *operands, index_dtype = dtypes
    sizes = [(rows, groups, operator.group // per_byte), *[(rows, groups)] * (len(operands) - 1)]
    with define_kernel("grouped_take") as builder:
        indices = T.buffer_proxy(T.arg("indices", declare_buffer((count,), index_dtype)))
        packed, scales, *zeros = (
            T.buffer_proxy(T.arg(f"operand{place}", declare_buffer(size, dtype)))
            for place, (size, dtype) in enumerate(zip(sizes, operands, strict=True))
        )
        out = T.buffer_proxy(T.arg("out", declare_buffer((count, operator.depth), _FLOAT)))
        with T.parallel(count) as place:
            # a negative number counts from the end; others are limited, as those of other lookups are
            index = tirx.Cast("int64", indices[place])
            index = tirx.Select(index < 0, index + rows, index)
            row = tirx.max(tirx.min(index, T.int64(rows - 1)), T.int64(0))
            with T.serial(operator.depth) as column:
                group, term = column // operator.group, column % operator.group
                number = tirx.Cast("int32", packed[row, group, term // per_byte])
                if per_byte > 1:
                    number = (number >> (term % per_byte * operator.bits)) & (
                        (1 << operator.bits) - 1
                    )
                zero = _to_float(zeros[0][row, group]) if zeros else T.float32(operator.zero)
                real = (tirx.Cast(_FLOAT, number) - zero) * _to_float(scales[row, group])
                out[place, column] = real
    return builder.get()


def _to_float(value: Any) -> Any:
    """Return a scale or a zero point as float32."""
    dtype = str(value.ty.dtype)
    if dtype.startswith(bfloat16.DTYPE):
        return bfloat16.to_float32(value)
    return value if dtype == _FLOAT else tirx.Cast(_FLOAT, value)


def _allocate_rows(rows: IrSize, shape: Sequence[int], dtype: str) -> Any:
    """Emit an allocation of something for each row."""
    buffer = T.alloc_buffer((rows, *shape), dtype)
    if is_dynamic(rows):
        # by another name, or TVM would replace the size by a formula of all accesses (apache-tvm 0.27)
        buffer = T.decl_buffer((rows, *shape), dtype, data=buffer.data)
    return T.buffer_proxy(buffer)


def _iterate_rows(rows: IrSize, most: int) -> Iterator[tuple[Any, int]]:
    """Emit loops over all rows; yield the first of some that are computed together, and how many they are."""
    first: Any = 0
    for points in (most >> shift for shift in range(most.bit_length())):
        if is_dynamic(rows):
            count = (rows - first) // points
        else:
            count = int(rows - first) // points
        if is_dynamic(count) or count > 1:
            with T.serial(count) as index:
                yield first + index * points, points
        elif count:
            yield first, points
        first = first + count * points
