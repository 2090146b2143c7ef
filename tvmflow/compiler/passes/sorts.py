"""CPU kernels for sorting and top-k selection, which replace calls to TVM's runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.contraction import packed
from tvmflow.compiler.contraction.machine import MIN_LANES
from tvmflow.compiler.passes.reductions import (
    COMPARED_DTYPES,
    ArgReduction,
    has_vectors,
    make_argreduce_kernel,
)
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel, when
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    TuningSizes,
    is_dynamic,
    sizes_of,
    with_kernel_symbols,
)


class SortRewriter(TargetRewriter):
    """Rewrites `sort`, `argsort` and `topk` of rows of fixed length."""

    OPERATORS = ir.operators("sort argsort topk")

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        sort, cpu = _as_sort(call, self.tuning_sizes), self._context.cpu
        if sort is None:
            return None
        cores, lanes = (cpu.cores, cpu.lanes) if cpu else (1, _NARROW_LANES)
        function, sizes = with_kernel_symbols(_make_kernel(sort, cores, lanes))
        if sizes:
            return None
        if self._context.is_mixed():
            # runs on the host: without this mark, the kernel would be bound to the device's threads
            function = function.with_attrs(ir.SCHEDULED)
        variable = self.builder_.add_func(function, "sort")
        types = [relax.TensorType(sort.result_shape, dtype) for dtype in sort.result_dtypes]
        results = types if len(types) > 1 else types[0]
        return self.emit(relax.call_tir(variable, [rewritten.args[0]], results))


def _as_sort(call: Any, tuning_sizes: TuningSizes) -> Sort | None:
    """Return the sort that an operator computes; None for a dynamic row length or another dtype."""
    name, attrs, data = ir.operator_name(call), call.attrs, call.args[0]
    shape, typical = sizes_of(data), tuning_sizes.shape(data)
    if not shape or not typical:
        return None
    axis, is_top = int(attrs.axis) % len(shape), name == "relax.topk"
    if is_dynamic(shape[axis]):
        return None
    results = str(attrs.ret_type) if is_top else "indices" if name == "relax.argsort" else "values"
    count = int(attrs.k) if is_top else 0
    sort = Sort(
        shape=shape,
        typical=typical,
        dtype=ir.dtype_of(data),
        axis=axis,
        k=count if count > 0 else shape[axis],
        descending=bool(attrs.largest if is_top else attrs.descending),
        has_values=results != "indices",
        index_dtype=None if results == "values" else str(attrs.dtype),
    )
    is_supported = 0 < sort.k <= sort.length and 0 < math.prod(typical) < 1 << 31
    return sort if is_supported and sort.dtype in _BITS else None


# ---------------------------------------------------------------- sorting
# Sorting and top-k selection without a branch that depends on the data.
#
# An element becomes a *word*: an unsigned integer whose high bits are its key, in the wanted order, and whose low bits
# are its index in the row. No two words of a row are equal, so any sort of words is stable. NaN is greater than every
# other value, as in numpy and PyTorch, and -0.0 equals 0.0. Single-integer words are compared by one instruction; keys
# of 64 bits need a second integer for the index.
#
# Short runs are sorted by Batcher's odd-even merge network (Knuth, The Art of Computer Programming 3, 5.3.4), then
# merged pairwise from both ends at once, as in quadsort: neither end can exhaust a run, and both are computed in
# parallel. For a small k, each next word is the vectorized minimum of the words greater than the previous one.

# Runs up to this many words are sorted by a network; longer ones are merged from shorter ones.
_MAX_NETWORK: Final = 16
# At most this many words are selected one by one. LLVM vectorizes the loops over rows from a minimum length, and unrolls
# loops over shorter rows. There, selection must read fewer vectors than a sort costs; the costs were measured.
_MAX_LEAST: Final = 8
_MIN_ROW_FOR_LOOP: Final = 64
_SORTED_AT_ONCE: Final = 8
_VECTORS_PER_WORD: Final = 1.5
# In longer rows, candidates are gathered first. Narrow vectors hold few words, and most lack a 64-bit minimum.
_MAX_ROW_FOR_LEAST: Final = 2048
_ROW_OF_LANES: Final = 16
_NARROW_LANES: Final = 4
# The number of elements that are tested together for whether any belongs to the first k.
_BLOCK: Final = 64
# If a row is shorter than this times k, sorting it costs less than selecting k elements.
_MIN_ROW_FOR_SELECTION: Final = 4
# The number of vectors of columns that are computed together for k = 1; fewer for a larger k.
_COLUMN_VECTORS: Final = 4
_COLUMN_DTYPES: Final = frozenset(
    ("float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32")
)
# With fewer elements, a second core saves no time.
_MIN_PARALLEL_ELEMENTS: Final = 1 << 12

_ZERO: Final = tirx.const(0, "int32")

_BITS: Final = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "bool": 8}
_BITS.update({f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)})
_MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


class Sort(NamedTuple):
    """A stable sort along one axis.

    Attributes:
        shape: The shape of the data, in which all axes but the sorted one may be dynamic.
        typical: The same with tuning sizes in place of dynamic ones.
        axis: The axis, not negative.
        k: How many elements of each sorted row are returned.
        has_values: Whether the sorted elements are a result.
        index_dtype: The dtype of the elements' indices, the last result; None if these are not a result.
    """

    shape: tuple[IrSize, ...]
    typical: tuple[int, ...]
    dtype: str
    axis: int
    k: int
    descending: bool
    has_values: bool
    index_dtype: str | None

    @property
    def length(self) -> int:
        """The number of elements of a row."""
        return self.typical[self.axis]

    @property
    def result_shape(self) -> tuple[IrSize, ...]:
        """The shape of every result."""
        return (*self.shape[: self.axis], self.k, *self.shape[self.axis + 1 :])

    @property
    def result_dtypes(self) -> tuple[str, ...]:
        """The dtypes of the results."""
        values = (self.dtype,) if self.has_values else ()
        return (*values, self.index_dtype) if self.index_dtype else values


def _make_kernel(sort: Sort, cores: int, lanes: int) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data and the results. Vectors have `lanes` of 32 bits."""
    is_argreduction = sort.k == 1 and sort.axis == len(sort.shape) - 1
    if is_argreduction and sort.dtype in COMPARED_DTYPES and has_vectors(sort.length, lanes):
        reduction = ArgReduction(
            shape=sort.shape,
            rows=math.prod(sort.shape[:-1]),
            length=sort.length,
            typical=math.prod(sort.typical),
            dtype=sort.dtype,
            result_dtype=sort.index_dtype,
            is_largest=sort.descending,
            has_values=sort.has_values,
            orders_nan=True,
        )
        return make_argreduce_kernel(reduction, sort.result_shape, cores, lanes)
    parameters = {"data": (sort.shape, sort.dtype)}
    parameters |= {f"out{i}": (sort.result_shape, d) for i, d in enumerate(sort.result_dtypes)}
    with define_flat_kernel("sort", parameters) as (builder, buffers):
        data, *results = buffers
        emit = _emit_columns if _selects_in_columns(sort) else _emit_rows
        emit(sort, data, results, cores, lanes)
    return builder.get()


def _emit_rows(sort: Sort, data: Any, results: list[Any], cores: int, lanes: int) -> None:
    inner = math.prod(sort.shape[sort.axis + 1 :])
    rows = math.prod(sort.shape[: sort.axis]) * inner
    several = math.prod(sort.typical) // sort.length
    is_parallel = cores > 1 and several > 1 and several * sort.length >= _MIN_PARALLEL_ELEMENTS
    order = Order(sort.dtype, sort.length, sort.descending, lanes)
    is_short = sort.length <= min(_ROW_OF_LANES * lanes**2, _MAX_ROW_FOR_LEAST)
    is_selection = sort.length >= max(_MIN_ROW_FOR_SELECTION * sort.k, 2 * _BLOCK) and not (
        is_short and _finds_least(order, sort.length, sort.k)
    )
    with packed.loop_over(rows, is_parallel) as row:

        def offset_of(index: Any, length: int) -> Any:
            part = packed.positive(inner)
            return row // part * (length * inner) + index * inner + row % part

        source = _Row(order, lambda index: data[offset_of(index, sort.length)])
        words = (_emit_selection if is_selection else _emit_whole_sort)(sort, source)
        with T.serial(sort.k) as position:
            index = T.Bind(order.index(words[position]))
            outputs = [source.element(index)] if sort.has_values else []
            outputs += [tirx.Cast(sort.index_dtype, index)] if sort.index_dtype else []
            for result, value in zip(results, outputs, strict=True):
                result[offset_of(position, sort.k)] = value


# ---------------------------------------------------------------- columns
# The first few elements along an axis that is not the last: neighboring columns are lanes of vectors, and a lane
# keeps the first values of its column so far, in order.


def _selects_in_columns(sort: Sort) -> bool:
    """Return whether the first few elements along an axis are found for vectors of columns."""
    inner = sort.shape[sort.axis + 1 :]
    has_vectors_of_columns = not any(map(is_dynamic, inner)) and math.prod(inner) >= MIN_LANES
    return has_vectors_of_columns and sort.k <= _MAX_LEAST and sort.dtype in _COLUMN_DTYPES


def _emit_columns(sort: Sort, data: Any, results: list[Any], cores: int, lanes: int) -> None:
    inner = math.prod(sort.shape[sort.axis + 1 :])
    outer = math.prod(sort.shape[: sort.axis])
    width = min(max(1, _COLUMN_VECTORS // sort.k) * lanes, 1 << inner.bit_length() - 1)
    groups = -(-inner // width)
    order = Order(sort.dtype, sort.length, sort.descending)
    is_parallel = cores > 1 and math.prod(sort.typical) >= _MIN_PARALLEL_ELEMENTS
    with packed.loop_over(outer * groups, is_parallel) as part:
        row = part // groups
        # the last columns overlap those before them
        column = tirx.min(part % groups * width, inner - width)

        def load(index: Any, lane: Any) -> Any:
            return data[(row * sort.length + index) * inner + column + lane]

        # the keys and indices of the first elements of each column, in order
        new_key = packed.allocate_registers(width, dtype="uint32")
        keys = [packed.allocate_registers(width, dtype="uint32") for _ in range(sort.k)]
        first = [packed.allocate_registers(width, dtype="int32") for _ in range(sort.k)]

        def insert(index: Any, *, filled: int) -> None:
            """Emit the insertion of each column's element at `index` into its `filled` first elements."""
            with T.vectorized(width) as lane:
                new_key[lane] = tirx.Cast("uint32", order.key(load(index, lane)))
            new_index = tirx.Cast("int32", index)
            # from the end, so that each element is read before it is replaced
            for position in reversed(range(min(filled + 1, sort.k))):
                for kept in (first, keys):
                    with T.vectorized(width) as lane:
                        new = new_key[lane]
                        moved = new_index if kept is first else new
                        if position:
                            before, last = keys[position - 1][lane], kept[position - 1][lane]
                            moved = tirx.Select(new < before, last, moved)
                        if position < filled:
                            own, stays = keys[position][lane], kept[position][lane]
                            moved = tirx.Select(new < own, moved, stays)
                        kept[position][lane] = moved

        for index in range(sort.k):
            insert(index, filled=index)
        with T.serial(sort.length - sort.k) as index:
            insert(sort.k + index, filled=sort.k)
        for position, positions in enumerate(first):
            for result in results:
                with T.vectorized(width) as lane:
                    index = positions[lane]
                    is_index = sort.index_dtype and result is results[-1]
                    value = tirx.Cast(sort.index_dtype, index) if is_index else load(index, lane)
                    result[(row * sort.k + position) * inner + column + lane] = value


# ---------------------------------------------------------------- words


Word = tuple[Any, ...]
"""The key and the index of an element: one integer with both, or one for each."""


class Order:
    """The order of a row's elements, as words, on a CPU whose vectors have `lanes` of 32 bits."""

    def __init__(
        self, dtype: str, length: int, descending: bool, lanes: int = _NARROW_LANES
    ) -> None:
        self._dtype, self._descending, self._lanes = dtype, descending, lanes
        bits, index_bits = _BITS[dtype], length.bit_length()
        fitting = [width for width in (32, 64) if bits + index_bits < width]
        self.dtypes = (f"uint{fitting[0]}",) if fitting else ("uint64", "uint32")
        self._shift = index_bits if fitting else 0
        self.key_dtype = f"uint{bits}"

    def key(self, value: Any) -> Any:
        """Return an unsigned integer of the dtype's width that grows in the wanted order."""
        bits, dtype = _BITS[self._dtype], self.key_dtype
        sign = tirx.const(1 << (bits - 1), dtype)
        if self._dtype in _MANTISSA_BITS:
            # bound, because TVM makes a branch of a selection between loaded values
            key = self._float_key(T.Bind(tirx.reinterpret(dtype, value)), sign)
        elif self._dtype.startswith("int"):
            key = tirx.reinterpret(dtype, value) ^ sign
        else:
            key = tirx.Cast(dtype, value)
        return ~key if self._descending else key

    def _float_key(self, pattern: Any, sign: Any) -> Any:
        """Return the key of a float's bits: greater values have greater keys."""
        bits, dtype, mantissa = _BITS[self._dtype], self.key_dtype, _MANTISSA_BITS[self._dtype]
        magnitude = pattern & tirx.const((1 << (bits - 1)) - 1, dtype)
        infinity = tirx.const(((1 << (bits - 1 - mantissa)) - 1) << mantissa, dtype)
        is_negative = tirx.all(pattern >= sign, magnitude > tirx.const(0, dtype))
        key = tirx.Select(is_negative, ~pattern, magnitude | sign)
        return tirx.Select(magnitude > infinity, tirx.const((1 << bits) - 1, dtype), key)

    def word(self, value: Any, index: Any) -> Word:
        """Return the word of an element."""
        key = tirx.Cast(self.dtypes[0], self.key(value))
        position = tirx.Cast(self.dtypes[-1], index)
        if len(self.dtypes) > 1:
            return key, position
        return (key << tirx.const(self._shift, self.dtypes[0]) | position,)

    def index(self, word: Word) -> Any:
        """Return the position of a word's element."""
        mask = tirx.const((1 << self._shift) - 1, self.dtypes[0])
        return tirx.Cast("int32", word[1] if len(word) > 1 else word[0] & mask)

    def word_lanes(self, size: int) -> int:
        """Return how many words a vector of the search has; 1 if LLVM vectorizes the loop over `size`."""
        if size >= _MIN_ROW_FOR_LOOP:
            return 1
        return max(self._lanes * 32 // int(self.dtypes[0][4:]), 1)

    def whole_vectors(self, size: int) -> int:
        """Return the size rounded up to whole vectors of words."""
        return size + -size % self.word_lanes(size)

    def last(self) -> Word:
        """Return a sentinel word that sorts after all others."""
        return tuple(tirx.const((1 << int(dtype[4:])) - 1, dtype) for dtype in self.dtypes)

    def may_precede(self, key: Any, word: Word) -> Any:
        """Return whether a later element with a key may come before a word."""
        key = tirx.Cast(self.dtypes[0], key)
        # the sentinel of `last` has a greater key than all elements only if the word has spare bits
        return key <= word[0] if len(word) > 1 else key < word[0] >> self._shift


class _Row(NamedTuple):
    """The order of a row's elements, and a function that returns an element by index."""

    order: Order
    element: Callable[[Any], Any]

    def word(self, index: Any) -> Word:
        return self.order.word(self.element(index), index)

    def key(self, index: Any) -> Any:
        return self.order.key(self.element(index))


class Words(NamedTuple):
    """Words in memory."""

    buffers: tuple[Any, ...]

    @classmethod
    def allocate(cls, order: Order, size: int) -> Words:
        """Emit the allocation of this many words."""
        return cls(tuple(T.alloc_buffer((size,), dtype) for dtype in order.dtypes))

    def __getitem__(self, index: Any) -> Word:
        return tuple(tirx.BufferLoad(buffer, [index]) for buffer in self.buffers)

    def __setitem__(self, index: Any, word: Word) -> None:
        for buffer, part in zip(self.buffers, word, strict=True):
            T.buffer_store(buffer, part, [index])

    def fill(self, start: Any, end: Any, word: Callable[[Any], Word]) -> None:
        """Emit a loop that sets the words at positions from `start` to before `end`."""
        with T.serial(end - start) as offset:
            self[start + offset] = word(start + offset)


class Variable(NamedTuple):
    """A variable in a register."""

    buffer: Any

    @classmethod
    def allocate(cls, value: Any) -> Variable:
        """Emit a variable with an initial value."""
        variable = cls(T.alloc_buffer((1,), str(value.ty.dtype), scope="local"))
        variable.set(value)
        return variable

    def get(self) -> Any:
        """Return the value."""
        return tirx.BufferLoad(self.buffer, [0])

    def set(self, value: Any) -> None:
        """Emit an assignment."""
        T.buffer_store(self.buffer, value, [0])

    def add(self, condition: Any) -> None:
        """Emit the addition of 1 where a condition is true."""
        self.set(self.get() + tirx.Cast("int32", condition))


def bind(word: Word) -> Word:
    """Return a word whose integers are bound to variables."""
    return tuple(T.Bind(part) for part in word)


def precedes(a: Word, b: Word) -> Any:
    """Return whether a word comes before another one."""
    if len(a) == 1:
        return a[0] < b[0]
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _select(condition: Any, a: Word, b: Word) -> Word:
    return tuple(tirx.Select(condition, x, y) for x, y in zip(a, b, strict=True))


def _split_size(size: int) -> tuple[int, int]:
    """Return the length of a run, rounded up, and the number of merge passes for `size` words."""
    passes = 0
    while size > _MAX_NETWORK << passes:
        passes += 1
    return -(-size // (1 << passes)), passes


def _padded_size(size: int) -> int:
    """Return `size` rounded up to whole runs of words."""
    run, passes = _split_size(size)
    return run << passes


def _emit_whole_sort(sort: Sort, row: _Row) -> Words:
    """Emit the sort of a row, or a search for its first few words; return the words in order."""
    order, length = row.order, sort.length
    finds_least = _finds_least(order, length, sort.k)
    room = order.whole_vectors(length) if finds_least else _padded_size(length)
    words = Words.allocate(order, room)
    words.fill(0, length, row.word)
    words.fill(length, room, lambda _: order.last())
    if finds_least:
        return _emit_least(order, words, length, sort.k)
    return _emit_sort(order, words, room)


def _emit_selection(sort: Sort, row: _Row) -> Words:
    """Emit the selection of the first words of a row; return them in order.

    Words that precede the last of the first `k` words so far are gathered, sorted and merged with these.
    """
    order, count, length = row.order, sort.k, sort.length
    size = _padded_size(count + _BLOCK)
    room = order.whole_vectors(size)
    first, merged, gathered = (Words.allocate(order, n) for n in (count, count, room))
    first.fill(0, count, lambda _: order.last())
    filled, greatest = Variable.allocate(_ZERO), tirx.max_value(order.key_dtype)
    blocks = -(-length // _BLOCK)
    with T.serial(blocks) as block:
        start = block * _BLOCK
        least, tested = Variable.allocate(greatest), tirx.min(start, length - _BLOCK)
        with T.serial(_BLOCK) as offset:
            least.set(tirx.min(least.get(), row.key(tested + offset)))
        limit = bind(first[count - 1])
        has_candidates = order.may_precede(least.get(), limit)
        elements = tirx.min(_BLOCK, length - start)
        with when(has_candidates), T.serial(elements) as offset:
            word = bind(row.word(start + offset))
            gathered[filled.get()] = word
            filled.add(precedes(word, limit))
        with when(tirx.any(filled.get() > size - _BLOCK, block == blocks - 1)):
            gathered.fill(filled.get(), room, lambda _: order.last())
            if _finds_least(order, size, count):
                ordered = _emit_least(order, gathered, size, count)
            else:
                ordered = _emit_sort(order, gathered, size)
            _emit_front_merge(first, ordered, merged, count)
            first.fill(0, count, lambda k: merged[k])
            filled.set(_ZERO)
    return first


def _emit_front_merge(left: Words, right: Words, target: Words, count: int) -> None:
    """Emit a merge of two sorted lists that stops after `count` words; each list has at least `count`."""
    taken = Variable.allocate(_ZERO)
    with T.serial(count) as k:
        a, b = bind(left[taken.get()]), bind(right[k - taken.get()])
        is_left = T.Bind(precedes(a, b))
        target[k] = _select(is_left, a, b)
        taken.add(is_left)


def _finds_least(order: Order, size: int, count: int) -> bool:
    """Return whether finding the first `count` of `size` words one by one is faster than sorting all."""
    if count > _MAX_LEAST or len(order.dtypes) > 1:
        return False
    vectors = count * -(-size // order.word_lanes(size))
    return size >= _MIN_ROW_FOR_LOOP or vectors <= _VECTORS_PER_WORD * (size - _SORTED_AT_ONCE)


def _emit_least(order: Order, words: Words, size: int, count: int) -> Words:
    """Emit the search for the first `count` words; return them in order.

    Words are single integers, padded with sentinels to whole vectors.
    """
    (last,), width = order.last(), order.word_lanes(size)
    first = Words.allocate(order, count)
    # words are compared with `start`, not subtracted: TVM tells LLVM that differences do not wrap around
    start = Variable.allocate(tirx.const(0, order.dtypes[0]))
    with T.serial(count) as k:
        begin = T.Bind(start.get())
        found = T.Bind(_search(words, size, width, begin, last))
        first[k] = (found,)
        # if there are no more words, the sentinel is found again
        start.set(tirx.Select(found < last, found + tirx.const(1, order.dtypes[0]), last))
    return first


def _search(words: Words, size: int, width: int, begin: Any, last: Any) -> Any:
    """Emit the search for the smallest word that is at least `begin`, in vectors; return it."""
    if width == 1:
        variable = Variable.allocate(last)
        with T.serial(size) as position:
            word = T.Bind(words[position][0])
            variable.set(tirx.min(variable.get(), tirx.Select(word < begin, last, word)))
        return variable.get()
    least = packed.allocate_registers(width, dtype=str(last.ty.dtype))
    with T.vectorized(width) as lane:
        least[lane] = last
    with T.serial(-(-size // width)) as part, T.vectorized(width) as lane:
        (word,) = words[part * width + lane]
        least[lane] = tirx.min(least[lane], tirx.Select(word < begin, last, word))
    packed.reduce_lanes(least, tirx.min, width)
    return least[0]


def _emit_sort(order: Order, words: Words, size: int) -> Words:
    """Emit the sort of words, a `_padded_size` of them; return the sorted words."""
    run, passes = _split_size(size)
    with T.serial(1 << passes) as part:
        _emit_network(order, words, part * run, run)
    other = Words.allocate(order, size) if passes else words
    for level in range(passes):
        with T.serial(size // (run << level + 1)) as pair:
            _emit_merge(words, other, pair * (run << level + 1), run << level)
        words, other = other, words
    return words


def _emit_merge(source: Words, target: Words, base: Any, run: int) -> None:
    """Emit the merge of two runs: the smaller half from their starts, the greater from their ends."""
    # how many words of each half come from the left run
    low, high = Variable.allocate(_ZERO), Variable.allocate(_ZERO)
    end = base + run - 1
    with T.serial(run) as k:
        a, b = bind(source[base + low.get()]), bind(source[base + run + k - low.get()])
        is_left = T.Bind(precedes(a, b))
        target[base + k] = _select(is_left, a, b)
        low.add(is_left)
        a, b = bind(source[end - high.get()]), bind(source[end + run - k + high.get()])
        is_left = T.Bind(precedes(b, a))
        target[end + run - k] = _select(is_left, a, b)
        high.add(is_left)


def _emit_network(order: Order, words: Words, base: Any, size: int) -> None:
    """Emit Batcher's network on a few words."""
    registers = Words(tuple(T.alloc_buffer((size,), d, scope="local") for d in order.dtypes))
    for k in range(size):
        registers[k] = words[base + k]
    for low, high in _list_comparators(size):
        a, b = bind(registers[low]), bind(registers[high])
        swaps = T.Bind(precedes(b, a))
        registers[low], registers[high] = _select(swaps, b, a), _select(swaps, a, b)
    for k in range(size):
        words[base + k] = registers[k]


def _list_comparators(size: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of positions that Batcher's network compares, in order (Knuth's algorithm 5.2.2M)."""
    top = 1 << max(size - 1, 0).bit_length() - 1 if size > 1 else 0
    part = top
    while part > 0:
        step, remainder, distance = top, 0, part
        while True:
            for low in range(size - distance):
                if low & part == remainder:
                    yield low, low + distance
            if step == part:
                break
            distance, remainder, step = step - part, part, step >> 1
        part >>= 1
