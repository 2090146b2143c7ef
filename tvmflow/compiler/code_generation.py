"""Code generation: TVM's pipeline makes machine code of kernels and lowered models.

For CPUs it has passes of our own.

TVM 0.27 allocates every buffer of a kernel with its runtime's allocator, also the accumulators of a
tile, once a tile. Small buffers stay on the stack here, where LLVM keeps them in registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.s_tir import pipeline as s_tir_pipeline
from tvm.target import codegen
from tvm.tirx import compilation_pipeline

from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.counts import cut_outputs
from tvmflow.compiler.cpu_model import (
    MATRIX_INSTRUCTION,
    converts_float16,
    find_factor_lanes,
    is_cpu,
)
from tvmflow.compiler.ir import (
    IF_THEN_ELSE,
    find_nodes,
    kernel_pass,
    node_pass,
    operator_name,
    replace_variables,
    rewrite_nodes,
    simplify_indices,
)
from tvmflow.compiler.open_tiles import (
    PARTITION_HINT,
    STAYS_ON_STACK,
    list_terms,
    mask_last_vectors,
    name_open_lengths,
    split_open_tiles,
    start_empty_reductions,
    start_open_reductions,
)


def _know_loops(function: tirx.PrimFunc) -> Any:
    """Return an analyzer that knows the range of each loop's variable."""
    analyzer = tvm.sym.Analyzer()
    for loop in find_nodes(function.body, tirx.For):
        analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    return analyzer


def _takes_factors_from_lanes(function: tirx.PrimFunc) -> bool:
    """Return whether a kernel is for a CPU whose instructions take factors from lanes, such as 64-bit ARM."""
    target = function.attrs.get("target")
    return target is not None and bool(find_factor_lanes(target.attrs))


# ---------------------------------------------------------------- strided loads
# Loads of every second, third or fourth number, or of each number twice: whole vectors of which
# numbers are selected.
#
# TVM loads such numbers one by one. Pooling with stride 2 and slices with steps read the former,
# and resizing to nearest pixels the latter.


MAX_STRIDE: Final = 4
"""With larger strides, numbers are loaded one by one: so many vectors would have few of them."""


@kernel_pass
def shuffle_strided_loads(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Load numbers with a small stride as vectors."""
    analyzer = _know_loops(function)

    def shuffle(load: Any) -> Any:
        index = load.indices[-1]
        if isinstance(index, tirx.Ramp):
            return _select(load, index, analyzer)
        return _repeat(load, index, analyzer)

    return rewrite_nodes(function, tvm.ir.TensorLoad, shuffle)


def _repeat(load: Any, index: Any, analyzer: Any) -> Any:
    """Return the numbers that a load reads several times each, from one vector."""
    terms = _list_summands(index)
    quotients = [term for term in terms if isinstance(term, tirx.FloorDiv)]
    others = [term.value for term in terms if isinstance(term, tirx.Broadcast)]
    if len(quotients) != 1 or len(others) + 1 != len(terms):
        return load
    ramp, count = quotients[0].a, quotients[0].b
    is_ramp = isinstance(ramp, tirx.Ramp) and _as_number(ramp.stride) == 1
    count = _as_number(count.value) if isinstance(count, tirx.Broadcast) else 0
    lanes = int(ramp.lanes) if is_ramp else 0
    if count < 2 or lanes % count or lanes < 2 * count:
        return load
    steps = analyzer.modular_set(ramp.base)
    if int(steps.coeff) % count or int(steps.base) % count:
        # the first number of a vector may have been read for the one before it
        return load
    start = sum(others, ramp.base // count)
    vector = tirx.BufferLoad(load.source, [*load.indices[:-1], tirx.Ramp(start, 1, lanes // count)])
    # TVM selects at most as many numbers as there are
    return tirx.Shuffle([vector] * count, [lane // count for lane in range(lanes)])


def _list_summands(index: Any) -> list[Any]:
    """Return the terms of a sum."""
    if isinstance(index, tirx.Add):
        return [*_list_summands(index.a), *_list_summands(index.b)]
    return [index]


def _as_number(expr: Any) -> int:
    """Return a constant; 0 for other expressions."""
    return int(expr) if isinstance(expr, tirx.IntImm) else 0


def _select(load: Any, index: tirx.Ramp, analyzer: Any) -> Any:
    """Return the numbers that a load reads, selected from vectors that do not reach beyond the tensor."""
    stride, lanes = _as_number(index.stride), int(index.lanes)
    if not 1 < stride <= MAX_STRIDE:
        return load
    end, extent = stride * lanes, load.source.ty.shape[-1]
    is_known = isinstance(extent, tirx.IntImm)
    if not is_known or analyzer.const_int_bound(index.base).max_value + end > int(extent):
        end -= stride - 1
    # whole vectors, so that loads of the numbers between them read the same ones
    starts = [min(n * lanes, end - lanes) for n in range(stride)]
    outer = list(load.indices[:-1])
    vectors = [
        tirx.BufferLoad(load.source, [*outer, tirx.Ramp(index.base + start, 1, lanes)])
        for start in starts
    ]
    places = [
        number // lanes * lanes + number - starts[number // lanes]
        for number in range(0, end, stride)
    ]
    return tirx.Shuffle(vectors, places)


# ---------------------------------------------------------------- factors in lanes
# Loads of single factors of whole vectors, as a tile of a matrix product has them: four factors that
# lie together become one load, where an instruction takes any lane of a vector as its factor.
#
# LLVM 22 loads each by itself. On a Neoverse N1, a tile of 7 x 2 vectors takes 29 cycles in place of 39.


# The factors that take the place of one float32.
_FACTORS_OF_FLOAT32: Final = {"float32": 1, "float16": 2}


@kernel_pass
def take_factors_from_lanes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Load factors of whole vectors together, for CPUs that take one from a lane."""
    if not _takes_factors_from_lanes(function):
        return function
    lanes = find_factor_lanes(function.attrs["target"].attrs)
    analyzer = _know_loops(function)

    def take(factor: tirx.Broadcast) -> Any:
        return _take_from_lane(factor, lanes, analyzer)

    body = tvm_ffi.structural_map(function.body, (tirx.Broadcast, take))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.For, _take_words_from_lanes)))


def _take_from_lane(factor: tirx.Broadcast, lanes: int, analyzer: Any) -> Any:
    """Return a vector of one loaded number, selected from a vector whose place is a multiple of its lanes.

    It is the same expression where the lane is not known, or the tensor may end within that vector.
    """
    load = factor.value
    dtype = str(load.source.dtype) if isinstance(load, tvm.ir.TensorLoad) else ""
    lanes *= _FACTORS_OF_FLOAT32.get(dtype, 0)
    count = _as_number(factor.lanes)
    # several vectors that a loop computes side by side have one factor
    if not lanes or not count or count % lanes:
        return factor
    *outer, index = load.indices
    lane = _find_rest(index, lanes, analyzer)
    if lane is None or _find_rest(load.source.ty.shape[-1], lanes, analyzer) != 0:
        return factor
    start = analyzer.simplify(index - lane)
    vector = tirx.BufferLoad(load.source, [*outer, tirx.Ramp(start, 1, lanes)])
    # TVM selects no more lanes than there are
    return tirx.Shuffle([vector] * (count // lanes), [lane] * count)


_VECTOR_BYTES: Final = 16
_WORD_BYTES: Final = (2, 4)
_FLOAT_BYTES: Final = 4
_FLOAT_LANES: Final = 4
_BYTE_BITS: Final = 8
_REINTERPRET: Final = "tirx.reinterpret"


class _Word(NamedTuple):
    """Bytes, or one float32, that are loaded and moved to all lanes of a vector.

    Attributes:
        load: The load.
        index: The place of the first byte, in elements of the tensor.
        size: The number of bytes; an element is one of them, or all.
        element: The bytes of an element.
    """

    load: Any
    index: Any
    size: int
    element: int

    @property
    def is_float(self) -> bool:
        """It is one float32; there are vectors of several such, or none."""
        return str(self.load.ty.dtype) == "float32"

    @classmethod
    def read(cls, factor: tirx.Broadcast) -> _Word | None:
        """Return the word in all lanes of a vector; None for other vectors."""
        is_word = operator_name(factor.value) == _REINTERPRET
        load = factor.value.args[0] if is_word else factor.value
        if not isinstance(load, tvm.ir.TensorLoad):
            return None
        dtype, index = load.ty.dtype, load.indices[-1]
        if not is_word:
            is_float = str(dtype) == "float32" and _as_number(factor.lanes) == _FLOAT_LANES
            return cls(load, index, _FLOAT_BYTES, _FLOAT_BYTES) if is_float else None
        if dtype.bits != _BYTE_BITS or dtype.lanes not in _WORD_BYTES:
            return None
        if not isinstance(index, tirx.Ramp):
            # TVM makes tensors of words
            return cls(load, index, dtype.lanes, dtype.lanes)
        return cls(load, index.base, dtype.lanes, 1) if _as_number(index.stride) == 1 else None

    def distance(self, other: _Word, analyzer: Any) -> int | None:
        """Return the bytes from another word to this one; None where they are not always as many."""
        if not self.load.source.same_as(other.load.source):
            return None
        steps = analyzer.simplify(self.index - other.index)
        return int(steps) * self.element if isinstance(steps, tirx.IntImm) else None


def _take_words_from_lanes(loop: tirx.For) -> tirx.For:
    """Return an innermost loop in which words of bytes, and single float32, come from whole vectors.

    Words of one tensor at known distances are loaded together, from the first to the last of them.
    """
    if find_nodes(loop.body, tirx.For, tirx.IfThenElse):
        return loop
    found = [(factor, _Word.read(factor)) for factor in find_nodes(loop.body, tirx.Broadcast)]
    # numbers that a condition guards are not read without it
    is_guarded = any(operator_name(c) == IF_THEN_ELSE for c in find_nodes(loop.body, tvm.ir.Call))
    words = {
        factor: word
        for factor, word in found
        if word is not None and not (is_guarded and word.is_float)
    }
    analyzer, lanes = tvm.sym.Analyzer(), {}
    for group in _group_words(words, analyzer):
        first = min(group, key=group.__getitem__)
        places = _place_vectors(sorted(set(group.values())), words[first].size)
        if words[first].is_float and len(set(places.values())) == len(places):
            continue
        for factor, offset in group.items() if places else ():
            word, start = words[factor], places[offset]
            index = analyzer.simplify(words[first].index + start // word.element)
            ramp = tirx.Ramp(index, 1, _VECTOR_BYTES // word.element)
            whole = tirx.BufferLoad(word.load.source, [*word.load.indices[:-1], ramp])
            lane = (offset - start) // word.size
            if operator_name(factor.value) == _REINTERPRET:
                dtype = f"{factor.value.ty.dtype}x{_VECTOR_BYTES // word.size}"
                whole = tirx.reinterpret(dtype, whole)
            lanes[factor] = tirx.Shuffle([whole], [lane] * _as_number(factor.lanes))
    if not lanes:
        return loop
    return tvm_ffi.structural_map(loop, (tirx.Broadcast, lambda factor: lanes.get(factor, factor)))


def _group_words(
    words: Mapping[tirx.Broadcast, _Word], analyzer: Any
) -> list[dict[tirx.Broadcast, int]]:
    """Return words of one tensor at known distances, each with the bytes from the first of them."""
    groups: list[dict[tirx.Broadcast, int]] = []
    for factor, word in words.items():
        for group in groups:
            distance = word.distance(words[next(iter(group))], analyzer)
            if distance is not None:
                group[factor] = distance
                break
        else:
            groups.append({factor: 0})
    return [
        {factor: offset - min(group.values()) for factor, offset in group.items()}
        for group in groups
    ]


def _place_vectors(offsets: Sequence[int], size: int) -> dict[int, int]:
    """Return where the vector of the word at each offset begins; nothing where they fill no vector.

    No vector reaches beyond the first or the last word.
    """
    end = offsets[-1] + size
    if end < _VECTOR_BYTES:
        return {}
    places: dict[int, int] = {}
    start = -_VECTOR_BYTES
    for offset in offsets:
        is_inside = offset + size <= start + _VECTOR_BYTES and (offset - start) % size == 0
        if not is_inside:
            beyond = max(0, offset + _VECTOR_BYTES - end)
            start = offset - -(-beyond // size) * size
        if start < 0:
            return {}
        places[offset] = start
    return places


def _find_rest(value: Any, divisor: int, analyzer: Any) -> int | None:
    """Return an integer modulo a number; None where it is not always the same."""
    steps = analyzer.modular_set(value)
    return None if int(steps.coeff) % divisor else int(steps.base) % divisor


# ---------------------------------------------------------------- first values of sums
# Sums of products from which numbers are subtracted at the end, as the zero point of quantized data asks for: they
# begin at these numbers in place of 0, which costs no instruction.


class _Place(NamedTuple):
    """A place of a buffer."""

    buffer: Any
    number: int

    @classmethod
    def of(cls, buffer: Any, indices: Sequence[Any]) -> _Place | None:
        """Return a vector of integers at a known place of a buffer; None for others."""
        is_known = len(indices) == 1 and isinstance(indices[0], tirx.IntImm)
        is_vector = str(buffer.dtype) == f"int32x{_WORD_BYTES[-1]}"
        return cls(buffer, int(indices[0])) if is_known and is_vector else None

    @classmethod
    def of_load(cls, load: Any) -> _Place | None:
        """Return the place that an expression loads; None for others."""
        is_load = isinstance(load, tvm.ir.TensorLoad)
        return cls.of(load.source, load.indices) if is_load else None


@node_pass(tirx.SeqStmt, _takes_factors_from_lanes)
def start_sums_at_offsets(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Let sums begin at what is subtracted from them, for 64-bit ARM."""
    statements = list(sequence)
    zeros = [(place, at) for at, s in enumerate(statements) if (place := _find_zero(s)) is not None]
    starts = dict(zeros)
    if not starts or len(starts) < len(zeros):
        return sequence
    offsets = _find_offsets(statements, starts)
    for at, statement in enumerate(statements if offsets else ()):
        if not isinstance(statement, tirx.BufferStore):
            continue
        place = _Place.of(statement.buffer, statement.indices)
        if place is not None and starts.get(place) == at and place in offsets:
            start = 0 - offsets[place]
            statements[at] = tirx.BufferStore(statement.buffer, start, statement.indices)
        else:
            statements[at] = _replace_differences(statement, offsets, lambda sub: sub.a)
    return tirx.SeqStmt(statements)


def _find_offsets(statements: Sequence[Any], starts: Mapping[_Place, int]) -> dict[_Place, Any]:
    """Return what is subtracted from sums wherever they are read, but by their own updates.

    Args:
        statements: Statements after each other.
        starts: Which of them set which sums to 0.
    """
    offsets: dict[_Place, Any] = {}
    refused: set[_Place | None] = set()
    stored: set[Any] = set()
    loose: set[Any] = set()
    for at, statement in enumerate(statements):
        if find_nodes(statement, tirx.Evaluate, tirx.IfThenElse, tirx.Bind):
            return {}
        stores = find_nodes(statement, tirx.BufferStore)
        stored.update(store.buffer for store in stores)
        if isinstance(statement, tirx.BufferStore):
            for difference in find_nodes(statement.value, tirx.Sub):
                place = _Place.of_load(difference.a)
                if place is not None and place in starts:
                    first = offsets.setdefault(place, difference.b)
                    if not tvm_ffi.structural_equal(first, difference.b):
                        refused.add(place)
            stores = [_replace_differences(statement, starts, lambda sub: sub.b)]
        for store in stores:
            own = _Place.of(store.buffer, store.indices)
            loads = find_nodes(store.value, tvm.ir.TensorLoad)
            read = {_Place.of_load(load) for load in loads}
            loose.update(load.source for load in loads if _Place.of_load(load) is None)
            refused |= read - {own}
            if own is None:
                loose.add(store.buffer)
            elif own not in read and starts.get(own) != at:
                refused.add(own)
    return {
        place: offset
        for place, offset in offsets.items()
        if place not in refused
        and place.buffer not in loose
        and stored.isdisjoint(load.source for load in find_nodes(offset, tvm.ir.TensorLoad))
    }


def _find_zero(statement: Any) -> _Place | None:
    """Return the place where a statement stores zeros; None for other statements."""
    value = statement.value if isinstance(statement, tirx.BufferStore) else None
    if not isinstance(value, tirx.Broadcast):
        return None
    number = value.value
    is_zero = isinstance(number, tirx.IntImm) and int(number) == 0
    return _Place.of(statement.buffer, statement.indices) if is_zero else None


def _replace_differences(
    store: tirx.BufferStore, places: Mapping[_Place, Any], choose: Callable[[Any], Any]
) -> tirx.BufferStore:
    """Return a store with an operand in place of what is subtracted from sums at some places."""

    def replace(difference: Any) -> Any:
        return choose(difference) if _Place.of_load(difference.a) in places else difference

    value = tvm_ffi.structural_map(store.value, (tirx.Sub, replace))
    return tirx.BufferStore(store.buffer, value, store.indices)


# ---------------------------------------------------------------- sums of matrices
# Instructions that multiply matrices of two rows leave two sums of one pixel and two of the next in a vector: what
# else stores or reads these sums has to do so, too.


# A loop with a body of so many sums of products is not worth unrolling, and LLVM does not unroll more in all.
_MIN_LONG_BODY: Final = 36
_MAX_UNROLLED: Final = 240
# Those of a depthwise convolution, whose data are vectors.
_MIN_WINDOW_BODY: Final = 24
# LLVM knows of no value of it.
_ADDITION: Final = "llvm.aarch64.neon.uqadd"


@node_pass(tirx.For, _takes_factors_from_lanes)
def keep_product_loops(loop: tirx.For) -> tirx.For:
    """Keep LLVM from unrolling short loops with long bodies, for 64-bit ARM.

    Of all rounds together it loads factors so early that it must store some of them and of the sums.
    """
    rounds = _as_number(loop.extent)
    if loop.kind != tirx.ForKind.SERIAL or rounds <= 1 or find_nodes(loop.body, tirx.For):
        return loop
    stores = find_nodes(loop.body, tirx.BufferStore)
    least, count = _MIN_LONG_BODY, sum(bool(find_nodes(s.value, tirx.Shuffle)) for s in stores)
    if not count:
        least, count = _MIN_WINDOW_BODY, sum(map(_adds_product, stores))
    if count < least or count * rounds > _MAX_UNROLLED:
        return loop
    dtype = str(loop.loop_var.ty.dtype)
    extent = tirx.call_llvm_pure_intrin(dtype, _ADDITION, loop.extent, tirx.const(0, dtype))
    return tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body)


def _adds_product(store: tirx.BufferStore) -> bool:
    """Return whether a statement adds a product of vectors to a sum."""
    sums = store.value
    return (
        isinstance(sums, tirx.Add)
        and isinstance(sums.a, tvm.ir.TensorLoad)
        and sums.a.source.same_as(store.buffer)
        and isinstance(sums.b, tirx.Mul)
    )


@kernel_pass
def order_matrix_sums(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Select the sums of each pixel or row from those of two, for 64-bit ARM."""
    stores = find_nodes(function.body, tirx.BufferStore)
    sums = _measure_distances(store for store in stores if _multiplies_matrices(store))
    if not sums:
        return function

    begun = {
        (store.buffer, _find_pair(store, sums)[0]): store.value
        for store in stores
        if store.buffer in sums and not _multiplies_matrices(store)
        if not isinstance(store.value, tirx.Broadcast)
    }

    def order(store: tirx.BufferStore) -> tirx.BufferStore:
        if _multiplies_matrices(store):
            return store
        value = tvm_ffi.structural_map(
            store.value, (tvm.ir.TensorLoad, lambda load: _select_sums(load, sums))
        )
        if store.buffer in sums:
            first, own = _find_pair(store, sums)
            # both pixels begin alike, also where nothing reads the second one
            value = begun.get((store.buffer, first), value)
            if not isinstance(value, tirx.Broadcast):
                value = tirx.Shuffle([value, value], _PIXEL_LANES[own])
        return tirx.BufferStore(store.buffer, value, store.indices)

    return rewrite_nodes(function, tirx.BufferStore, order)


_VECTOR_SUMS: Final = 4
_PIXEL_LANES: Final = ([0, 1, 4, 5], [2, 3, 6, 7])
"""The lanes of two vectors that belong to each of two pixels."""


def _multiplies_matrices(store: tirx.BufferStore) -> bool:
    """Return whether a store adds products of matrices to sums."""
    if operator_name(store.value) != "tirx.call_llvm_pure_intrin":
        return False
    return int(store.value.args[0]) == _find_matrix_instruction()


@functools.cache
def _find_matrix_instruction() -> int:
    """Return the number of LLVM's intrinsic that multiplies matrices of bytes."""
    return int(codegen.llvm_lookup_intrinsic_id(MATRIX_INSTRUCTION))


def _find_sums(buffer: Any, indices: Sequence[Any]) -> int:
    """Return the place of the first sum at some indices of a buffer of sums, or of vectors of these."""
    (index,) = indices
    first = index.base if isinstance(index, tirx.Ramp) else index
    assert isinstance(first, tirx.IntImm), "tiles are unrolled"
    return int(first) * int(buffer.dtype.lanes)


def _measure_distances(products: Iterable[tirx.BufferStore]) -> dict[Any, int]:
    """Return the buffers of sums, with the vectors from a pixel's or row's sums to the next one's."""
    places: dict[Any, list[int]] = {}
    for store in products:
        place = _find_sums(store.buffer, store.indices) // _VECTOR_SUMS
        places.setdefault(store.buffer, []).append(place)
    # an instruction for the first two results is followed by one for the others
    return {buffer: second - first for buffer, (first, second, *_) in places.items()}


def _find_pair(access: Any, sums: Mapping[Any, int]) -> tuple[int, int]:
    """Return the first vector of the sums of two pixels or rows, and which of the two is loaded or stored."""
    buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
    place, distance = _find_sums(buffer, access.indices) // _VECTOR_SUMS, sums[buffer]
    own = place // distance % 2
    return place - own * distance, own


def _select_sums(load: Any, sums: Mapping[Any, int]) -> Any:
    """Return the sums of a pixel or row that a load reads: a vector, half of one, or one sum."""
    if load.source not in sums:
        return load
    distance, lanes = sums[load.source], int(load.source.dtype.lanes)
    first, own = _find_pair(load, sums)
    lane = _find_sums(load.source, load.indices) % _VECTOR_SUMS
    if int(load.ty.dtype.lanes) < _VECTOR_SUMS:
        # two neighbors are in one vector
        vector = first + lane // 2 * distance
        start = tirx.const(vector * _VECTOR_SUMS + own * 2 + lane % 2, "int32")
        ramp = isinstance(load.indices[0], tirx.Ramp)
        return tirx.BufferLoad(load.source, [tirx.Ramp(start, 1, 2) if ramp else start])
    places = [(first + n * distance) * _VECTOR_SUMS // lanes for n in range(2)]
    pair = [
        tirx.BufferLoad(load.source, [n if lanes > 1 else tirx.Ramp(n, 1, _VECTOR_SUMS)])
        for n in places
    ]
    return tirx.Shuffle(pair, _PIXEL_LANES[own])


# ---------------------------------------------------------------- narrow stores
# Stores of words of bytes that lie next to each other, as points of a tile are stored after rounding: the numbers
# are narrowed in whole vectors, and stored together.
#
# LLVM 22 narrows each word by itself, with three instructions; four words together take three, too.


_STORED_WORDS: Final = (4, 2)


@node_pass(tirx.SeqStmt, _takes_factors_from_lanes)
def join_narrow_stores(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Store neighboring words of bytes together, for 64-bit ARM."""
    statements: list[Any] = []
    run: list[tirx.BufferStore] = []
    for statement in sequence:
        is_word = _is_word_of_bytes(statement)
        if run and not (is_word and statement.buffer.same_as(run[0].buffer)):
            statements += _join_run(run)
            run = []
        if is_word:
            run.append(statement)
        else:
            statements.append(statement)
    statements += _join_run(run)
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def _is_word_of_bytes(statement: Any) -> bool:
    """Return whether a statement stores four bytes that were integers of 32 bits."""
    if not isinstance(statement, tirx.BufferStore) or not isinstance(statement.value, tirx.Cast):
        return False
    index, narrow = statement.indices[-1], statement.value.ty.dtype
    is_whole = not isinstance(index, tirx.Ramp) or _as_number(index.stride) == 1
    is_read = any(
        load.source.same_as(statement.buffer)
        for load in find_nodes(statement.value, tvm.ir.TensorLoad)
    )
    return (
        (narrow.bits, narrow.lanes) == (_BYTE_BITS, _WORD_BYTES[-1])
        and str(statement.value.value.ty.dtype) == f"int32x{narrow.lanes}"
        and len(statement.indices) == 1
        and is_whole
        and not is_read
    )


def _join_run(run: Sequence[tirx.BufferStore]) -> list[tirx.BufferStore]:
    """Return stores of words in one buffer, neighbors as one store."""
    if not run:
        return []
    words = _WORD_BYTES[-1]
    starts = [
        index.base if isinstance(index, tirx.Ramp) else index
        for (index,) in (s.indices for s in run)
    ]
    width = words if isinstance(run[0].indices[0], tirx.Ramp) else 1
    analyzer = tvm.sym.Analyzer()
    steps = [analyzer.simplify(start - starts[0]) for start in starts]
    known = [int(step) for step in steps if isinstance(step, tirx.IntImm)]
    if len(set(known)) < len(run):
        return list(run)
    rest = sorted(zip(known, range(len(run)), strict=True))
    joined = []
    while rest:
        first = rest[0][0]
        ends = {n: first + (n - 1) * width for n in _STORED_WORDS if n <= len(rest)}
        count = next((n for n, end in ends.items() if rest[n - 1][0] == end), 1)
        group = [run[position] for _, position in rest[:count]]
        joined.append(_join(group, starts[rest[0][1]], width) if count > 1 else group[0])
        rest = rest[count:]
    return joined


def _join(stores: Sequence[tirx.BufferStore], start: Any, width: int) -> tirx.BufferStore:
    """Return one store of words that follow each other from a place, each of so many elements."""
    vectors = [store.value.value for store in stores]
    dtype, bits = stores[0].value.ty.dtype, 32
    while bits > _BYTE_BITS:
        # halves of numbers are selected, because LLVM narrows four vectors at once by a table of registers
        bits //= 2
        narrow = f"int{bits}x{_VECTOR_BYTES * _BYTE_BITS // bits}"
        halves = [tirx.reinterpret(narrow, vector) for vector in vectors]
        lanes = list(range(0, _VECTOR_BYTES * _BYTE_BITS // bits * min(2, len(halves)), 2))
        vectors = [tirx.Shuffle(halves[n : n + 2], lanes) for n in range(0, len(halves), 2)]
    name = str(dtype).partition("x")[0]
    value = tirx.reinterpret(f"{name}x{_WORD_BYTES[-1] * len(stores)}", vectors[0])
    index = tirx.Ramp(start, 1, width * len(stores))
    return tirx.BufferStore(stores[0].buffer, value, [index])


# ---------------------------------------------------------------- stack lets
# Variables of expressions become buffers on the stack, because LLVM's code generator in TVM
# analyzes them in place.
#
# It simplifies the value of every let with the values of all variables in it put in their places,
# apache-tvm 0.27: time doubles with each let that another one's value reads twice, and `log` of
# `log` took 11 s to compile. It does not look into buffers, and LLVM makes registers of them.


@kernel_pass
def keep_lets_on_stack(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Store the values of lets in buffers before the store that reads them.

    Each of the buffers has one element.
    """
    if not find_nodes(function.body, tirx.Let):
        return function
    return rewrite_nodes(function, tirx.BufferStore, _store_lets_first)


def _store_lets_first(store: tirx.BufferStore) -> tirx.Stmt:
    """Return the stores of the lets in the value of a store, and the store itself."""
    lets = _Lets(store.value)
    value = lets.take_out(store.value)
    if not lets.stores:
        return store
    last = tirx.BufferStore(store.buffer, value, store.indices)
    return tirx.SeqStmt([*lets.stores, last])


class _Lets:
    """Collects the stores of lets, each after those of the variables that its value reads."""

    def __init__(self, value: Any) -> None:
        self.stores: list[tirx.Stmt] = []
        self._loads: dict[Any, Any] = {}
        # their values may not be computed where the condition is false
        self._conditional = {
            let.var
            for call in find_nodes(value, tvm.ir.Call)
            if operator_name(call) == IF_THEN_ELSE
            for branch in call.args[1:]
            for let in find_nodes(branch, tirx.Let)
        }

    def take_out(self, expr: Any) -> Any:
        """Return an expression without lets that are always evaluated."""
        callbacks = ((tirx.Let, self._replace), (tirx.Var, self._load))
        return tvm_ffi.structural_map(expr, callbacks, order="pre")

    def _replace(self, let: Any) -> Any:
        while isinstance(let, tirx.Let) and let.var not in self._conditional:
            buffer = tirx.decl_buffer((1,), let.value.ty.dtype, let.var.name, scope="local")
            store = tirx.BufferStore(buffer, self.take_out(let.value), [0])
            self.stores += [tirx.AllocBuffer(buffer), store]
            self._loads[let.var] = tirx.BufferLoad(buffer, [0])
            let = let.body
        return self._load(let)

    def _load(self, expr: Any) -> Any:
        return self._loads.get(expr, expr) if isinstance(expr, tirx.Var) else expr


# ---------------------------------------------------------------- overlapping vectors
# Moves the last vector of a row that no vector divides back, so that it ends where the row ends.
#
# A row of 97 numbers is six vectors of 16 and one number. A schedule computes it in seven vectors,
# and a condition in the last one leaves out what is beyond the end: TVM computes a vector with
# such a condition number by number. Here the last vector begins at 81 instead: it computes 15
# numbers a second time, and has no condition. So does that of a search for the greatest or least
# number, which may meet a number twice.


# The statements of a reduction.
_START_AND_STEP: Final = 2


class _End(NamedTuple):
    """The condition that keeps a vector within its row: `start + lane < extent`."""

    start: Any
    extent: int


@kernel_pass
def overlap_last_vectors(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the last vector of a row back, if computing numbers twice changes nothing."""
    loops = find_nodes(function.body, tirx.For)
    if not any(map(_is_conditional, loops)):
        return function
    scopes = _list_inner_loops(function)

    def overlap(loop: tirx.For) -> tirx.For:
        return _overlap(loop, loops, scopes) if _is_conditional(loop) else loop

    return rewrite_nodes(function, tirx.For, overlap)


def _is_conditional(loop: tirx.For) -> bool:
    """Return whether a loop is a vector that is stored under a condition."""
    return (
        int(loop.kind) == tirx.ForKind.VECTORIZED
        and isinstance(loop.body, SBlockRealize)
        and (
            isinstance(loop.body.block.body, tirx.BufferStore)
            or _find_searched(loop.body.block.body) is not None
        )
        and not isinstance(loop.body.predicate, tirx.IntImm)
    )


def _find_searched(body: Any) -> Any:
    """Return the numbers among which a reduction finds the greatest or least ones; None for another body."""
    if not (
        isinstance(body, tirx.SeqStmt)
        and len(body) == _START_AND_STEP
        and isinstance(body[0], tirx.IfThenElse)
        and isinstance(body[1], tirx.BufferStore)
        and isinstance(body[1].value, tirx.Max | tirx.Min)
    ):
        return None
    store, kept, searched = body[1], body[1].value.a, body[1].value.b
    is_kept = (
        isinstance(kept, tvm.ir.TensorLoad)
        and kept.source.same_as(store.buffer)
        and all(map(tvm_ffi.structural_equal, kept.indices, store.indices))
    )
    loads = find_nodes(searched, tvm.ir.TensorLoad)
    reads_itself = any(load.source.same_as(store.buffer) for load in loads)
    return searched if is_kept and not reads_itself else None


def _list_inner_loops(function: tirx.PrimFunc) -> dict[Any, set[Any]]:
    """Return, for each buffer but parameters, the loop variables within the block that allocates it."""
    scopes: dict[Any, set[Any]] = {}
    for block in find_nodes(function.body, SBlock):
        if block.alloc_buffers:
            inner = {loop.loop_var for loop in find_nodes(block.body, tirx.For)}
            scopes.update(dict.fromkeys(block.alloc_buffers, inner))
    return scopes


def _overlap(loop: tirx.For, loops: Sequence[tirx.For], scopes: Mapping[Any, set[Any]]) -> tirx.For:
    """Return a vector without the condition that it ends within its row.

    It is the same loop where that is not safe.

    Args:
        loop: The loop over the lanes of the vector.
        loops: All loops of the kernel.
        scopes: See `_list_inner_loops`.
    """
    lane, lanes = loop.loop_var, int(loop.extent)
    realize = loop.body
    conditions = list_terms(realize.predicate)
    ends = [end for condition in conditions if (end := _find_end(condition, lane)) is not None]
    others = [condition for condition in conditions if _find_end(condition, lane) is None]
    if len(ends) != 1 or ends[0].extent < lanes or any(_uses(other, lane) for other in others):
        return loop
    start, extent = ends[0]
    around = set(find_nodes(start, tirx.Var))
    nest = [other for other in loops if other.loop_var in around]
    # in a loop that is unrolled, vectors are registers, which have no computed index
    is_unrolled = any(int(other.kind) == tirx.ForKind.UNROLLED for other in nest)
    back = {lane: lane + tirx.min(start, tirx.IntImm(start.ty.dtype, extent - lanes)) - start}
    searched = _find_searched(realize.block.body)
    if searched is not None:
        first, step = realize.block.body
        if is_unrolled or any(
            _uses(index, other.loop_var) for index in step.indices for other in nest
        ):
            return loop
        value = type(step.value)(step.value.a, replace_variables(searched, back))
        step = tirx.BufferStore(step.buffer, value, step.indices)
        own, body = realize.block, tirx.SeqStmt([first, step])
        reads = [replace_variables(region, back) for region in own.reads]
        block = simplify_indices(SBlock([], reads, own.writes, own.name_hint, body))
    elif is_unrolled or not _may_repeat(realize.block.body, lane, nest, scopes):
        return loop
    else:
        block = simplify_indices(replace_variables(realize.block, back))
    predicate = functools.reduce(tirx.all, others, tirx.const(True, "bool"))
    body = SBlockRealize([], predicate, block)
    return tirx.For(lane, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations)


def _find_end(condition: Any, lane: Any) -> _End | None:
    """Return the end of a row that a condition on a lane of a vector is about; None for other conditions."""
    if not (isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm)):
        return None
    start = tvm.sym.Analyzer().simplify(condition.a - lane)
    return None if _uses(start, lane) else _End(start, int(condition.b))


def _may_repeat(
    store: tirx.BufferStore, lane: Any, nest: Sequence[tirx.For], scopes: Mapping[Any, set[Any]]
) -> bool:
    """Return whether numbers of a row may be computed a second time, after its other vectors.

    Args:
        store: What stores a vector.
        lane: The variable of its lanes.
        nest: The loops over the vectors of the row.
        scopes: See `_list_inner_loops`.
    """
    target = store.buffer
    if target in scopes and scopes[target].isdisjoint(loop.loop_var for loop in nest):
        # each vector has a buffer of its own, where nothing is stored for another
        return True
    loads = find_nodes(store.value, tvm.ir.TensorLoad)
    sources = [load.source for load in loads]
    vectors = [load.source for load in loads if any(_uses(index, lane) for index in load.indices)]
    others = [
        other
        for loop in nest
        for other in find_nodes(loop.body, tirx.BufferStore)
        if other.buffer.same_as(target) and not other.same_as(store)
    ]
    # buffers that are no parameters may share their memory, if the vectors of one are read but once
    is_kept = target not in scopes or not any(source in scopes for source in vectors)
    return is_kept and not others and not any(source.same_as(target) for source in sources)


def _uses(expr: Any, variable: Any) -> bool:
    return any(var.same_as(variable) for var in find_nodes(expr, tirx.Var))


# ---------------------------------------------------------------- float16 conversions
# Conversions of float16 with operations on integers, for CPUs without instructions for them.
#
# LLVM calls a function for each number there, and does not end for some vectors of WebAssembly
# (LLVM 22).


_NARROW: Final = "float16"
_WIDE: Final = "float32"
_BITS: Final = "int32"

# float16 has a sign, 5 bits of exponent and 10 of mantissa; float32 8 and 23.
_SIGN: Final = 0x8000
_MAGNITUDE: Final = 0x7FFF
_SMALLEST_NORMAL: Final = 0x0400
_INFINITY: Final = 0x7C00
_NAN: Final = 0x7E00
_SHIFT: Final = 23 - 10
# The difference of the exponents of a number, and of infinity.
_REBIAS: Final = (127 - 15) << 23
_REBIAS_INFINITY: Final = (255 - 31) << 23
# The step of numbers below the smallest normal one, and the float32 number whose last bit has this value.
_STEP: Final = 2.0**-24
_WITH_STEP: Final = 0.5
_WITH_STEP_BITS: Final = 0x3F000000
_WIDE_MAGNITUDE: Final = 0x7FFFFFFF
_WIDE_INFINITY: Final = 0x7F800000
_WIDE_SMALLEST_NORMAL: Final = (_SMALLEST_NORMAL << _SHIFT) + _REBIAS


@kernel_pass
def expand_float16_conversions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Convert float16 with operations on integers.

    It is for kernels whose CPU has no instruction for that.
    """
    target = function.attrs.get("target")
    if target is None or converts_float16(target):
        return function
    return rewrite_nodes(function, tirx.Cast, _expand)


def _expand(cast: tirx.Cast) -> Any:
    source, target = str(cast.value.ty.dtype), str(cast.ty.dtype)
    if source == target or "float64" in (source, target):
        # rounding twice could give another number
        return cast
    if source == _NARROW:
        wide = widen(cast.value)
        return wide if target == _WIDE else tirx.Cast(target, wide)
    if target == _NARROW:
        return narrow(cast.value if source == _WIDE else tirx.Cast(_WIDE, cast.value))
    return cast


def _let(dtype: str, value: Any, body: Callable[[Any], Any]) -> Any:
    """Return `body` of a value that it uses more than once."""
    var = tirx.Var("h", dtype)
    return tirx.Let(var, value, body(var))


def widen(value: Any) -> Any:
    """Return the float32 number that equals a float16 number."""

    def magnitude(bits: Any) -> Any:
        bias = tirx.Select(bits < _INFINITY, tirx.const(_REBIAS, _BITS), _REBIAS_INFINITY)
        normal = tirx.reinterpret(_WIDE, (bits << _SHIFT) + bias)
        # as integers, because some CPUs take such float32 numbers as 0
        small = tirx.Cast(_WIDE, bits) * tirx.const(_STEP, _WIDE)
        return tirx.Select(bits < _SMALLEST_NORMAL, small, normal)

    def signed(bits: Any) -> Any:
        absolute = _let(_BITS, bits & _MAGNITUDE, magnitude)
        return tirx.reinterpret(_WIDE, tirx.reinterpret(_BITS, absolute) | (bits & _SIGN) << 16)

    return _let(_BITS, tirx.Cast(_BITS, tirx.reinterpret("uint16", value)), signed)


def narrow(value: Any) -> Any:
    """Return the float16 number that is nearest to a float32 number, of two the even one."""

    def magnitude(bits: Any) -> Any:
        half = (1 << _SHIFT - 1) - 1
        rounded = (bits - _REBIAS + half + (bits >> _SHIFT & 1)) >> _SHIFT
        # the addition rounds to steps
        steps = tirx.reinterpret(_WIDE, bits) + tirx.const(_WITH_STEP, _WIDE)
        small = tirx.reinterpret(_BITS, steps) - _WITH_STEP_BITS
        finite = tirx.Select(
            bits < _WIDE_SMALLEST_NORMAL, small, tirx.min(rounded, tirx.const(_INFINITY, _BITS))
        )
        return tirx.Select(bits > _WIDE_INFINITY, tirx.const(_NAN, _BITS), finite)

    def signed(bits: Any) -> Any:
        absolute = _let(_BITS, bits & _WIDE_MAGNITUDE, magnitude)
        return tirx.reinterpret(_NARROW, tirx.Cast("uint16", bits >> 16 & _SIGN | absolute))

    return _let(_BITS, tirx.reinterpret(_BITS, value), signed)


_CPU_PIPELINE: Final = "tvmflow_cpu"

# Enough for many cores; each costs 20 ms.
_MAX_GROUPS: Final = 16

# Some C libraries give threads a stack of 128 KiB, and parallel loops are nested in a kernel's frames.
_MAX_STACK_BYTES: Final = 4096


def compile_model(mod: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a lowered model: its kernels, and `main` for TVM's virtual machine."""
    mod = compile_c_sources(cut_outputs(mod), target)
    with target:
        return tvm.compile(mod, target, tir_pipeline=pipeline_for(target))


def build_kernels(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile scheduled kernels."""
    # the target of a `with` block is that of its thread alone
    with target:
        return tvm.tirx.build(mod, target=target, pipeline=pipeline_for(target))


def split_kernels(mod: tvm.IRModule) -> list[tvm.IRModule]:
    """Return the kernels in groups to compile at once.

    The groups do not depend on the machine, so that objects do not either.

    There is at least one: what else is linked is for the system of its object.
    """
    functions = sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint))
    count = max(1, min(len(functions), _MAX_GROUPS))
    return [tvm.IRModule(dict(functions[first::count]), attrs=mod.attrs) for first in range(count)]


def pipeline_for(target: tvm.target.Target) -> str:
    """Return the name of the pipeline that kernels are compiled with."""
    return _CPU_PIPELINE if is_cpu(target) else "default"


def _make_cpu_pipeline() -> tuple[Any, Any, Any]:
    transform = tirx.transform
    *_, finalize_device = s_tir_pipeline.default_s_tir_pipeline()

    def finalize() -> tvm.transform.Pass:
        own = [keep_small_buffers_on_stack(), split_loops_where_indices_repeat()]
        return tvm.transform.Sequential([*own, s_tir_pipeline.finalize_host_passes()])

    to_packed_functions = (
        transform.AnnotateEntryFunc,
        transform.SplitHostDevice,
        transform.MakePackedAPI,
        transform.FP8StorageLegalize,
        transform.BF16StorageLegalize,
    )
    passes = [make_pass() for make_pass in (*CPU_PASSES, *to_packed_functions)]
    return tvm.transform.Sequential(passes), finalize, finalize_device


@node_pass(tirx.AttrStmt)
def _renew_partition_hints(hint: tirx.AttrStmt) -> tirx.AttrStmt:
    """Let hints name the variables of their loops: NarrowDataType replaces these alone (apache-tvm 0.27)."""
    if hint.attr_key != PARTITION_HINT or not isinstance(hint.body, tirx.For):
        return hint
    return tirx.AttrStmt(hint.body.loop_var, hint.attr_key, hint.value, hint.body)


@kernel_pass
def _simplify_predicates(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Simplify the conditions of blocks.

    `loop % 32 // 16 < 1`, 32 being the extent of the loop, makes CompactBufferAllocation divide by zero (apache-tvm 0.27).
    """
    analyzer = _know_loops(function)

    def simplify(realize: SBlockRealize) -> SBlockRealize:
        predicate = analyzer.simplify(realize.predicate)
        if predicate.same_as(realize.predicate):
            return realize
        return SBlockRealize(realize.iter_values, predicate, realize.block)

    return rewrite_nodes(function, SBlockRealize, simplify)


@node_pass(tirx.BufferStore)
def _compare_loaded_conditions(store: tirx.BufferStore) -> tirx.BufferStore:
    """Compare loads of bool with false.

    LLVM's code generator takes vectors of them for bytes: it inverts all bits of each, and cannot combine
    them with the results of comparisons (apache-tvm 0.27).
    """

    def compare(load: Any) -> Any:
        if str(load.source.dtype) != "bool":
            return load
        return tirx.NE(load.astype("int8"), tirx.const(0, "int8"))

    if isinstance(store.value, tvm.ir.TensorLoad):
        return store
    value = tvm_ffi.structural_map(store.value, (tvm.ir.TensorLoad, compare))
    return tirx.BufferStore(store.buffer, value, store.indices)


@kernel_pass
def _vectorize_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return TVM's pass that makes vectors of loops.

    Where it fails, loops with lets stay for LLVM to vectorize.

    It computes a product whose operands it has not made vectors twice, and then refuses a let in it as a second
    binding (apache-tvm 0.27). Such operands have a condition on the loop's variable, as those of a concatenation.
    """
    try:
        return _vectorize(function)
    except tvm.error.InternalError:
        rest = tvm_ffi.structural_map(function.body, (tirx.For, _without_vectors_of_lets))
        return _vectorize(function.with_body(rest))


def _vectorize(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return tirx.transform.VectorizeLoop(True)(tvm.IRModule({"kernel": function}))["kernel"]


def _without_vectors_of_lets(loop: tirx.For) -> tirx.For:
    if loop.kind != tirx.ForKind.VECTORIZED or not find_nodes(loop.body, tirx.Let):
        return loop
    serial = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, serial, loop.body)


_MAXIMA: Final = "pool_max"
_PADDING: Final = "pad_temp"


@kernel_pass
def _start_pools_at_infinity(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let maxima of windows begin with -∞, and their padding be that; TVM's are the lowest finite value."""
    names = {str(block.name_hint) for block in find_nodes(function.body, SBlock)}
    if not any(name.startswith(_MAXIMA) for name in names):
        return function

    def replace(limit: tirx.FloatImm) -> tirx.FloatImm:
        dtype = str(limit.ty.dtype)
        # that of float16 also in float32, in which it is computed
        lowest = {float(tirx.min_value(kind).value) for kind in (dtype, "float16")}
        return tirx.FloatImm(dtype, -math.inf) if float(limit.value) in lowest else limit

    def change(block: SBlock) -> SBlock:
        name = str(block.name_hint)
        if not name.startswith((_MAXIMA, _PADDING)):
            return block
        return tvm_ffi.structural_map(block, (tirx.FloatImm, replace))

    return rewrite_nodes(function, SBlock, change)


CPU_PASSES: Final = (
    # Copies of an expression with a let bind one variable twice, which vectorization refuses.
    tirx.transform.ConvertSSA,
    s_tir.transform.CanonicalizeLoop,
    _start_pools_at_infinity,
    start_empty_reductions,
    start_open_reductions,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    _simplify_predicates,
    split_open_tiles,
    overlap_last_vectors,
    s_tir.transform.CompactBufferAllocation,
    name_open_lengths,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.StmtSimplify,
    s_tir.transform.AnnotateIrregularLoop,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    tirx.transform.BF16ComputeLegalize,
    expand_float16_conversions,
    lambda: tirx.transform.NarrowDataType(32),
    _renew_partition_hints,
    s_tir.transform.LoopPartition,
    _compare_loaded_conditions,
    mask_last_vectors,
    _vectorize_loops,
    s_tir.transform.InjectDoubleBuffer,
    tirx.transform.StorageRewrite,
    s_tir.transform.HoistIfThenElse,
    tirx.transform.UnrollLoop,
    s_tir.transform.RenormalizeSplitPattern,
    tirx.transform.StmtSimplify,
    shuffle_strided_loads,
    take_factors_from_lanes,
    start_sums_at_offsets,
    order_matrix_sums,
    keep_product_loops,
    join_narrow_stores,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
    tirx.transform.CommonSubexprElim,
    keep_lets_on_stack,
    tirx.transform.FP8ComputeLegalize,
    tirx.transform.VerifyMemory,
)
"""The passes of TVM's pipeline `s_tir` that a CPU needs, until kernels are functions for a host and a device."""


@node_pass(tirx.AllocBuffer)
def keep_small_buffers_on_stack(allocation: tirx.AllocBuffer) -> tirx.AllocBuffer:
    """Leave a buffer to the code generator, which makes it on the stack, if its size is known and small."""
    buffer = allocation.buffer.ty
    extents = list(buffer.shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return allocation
    dtype = buffer.dtype.dtype
    size = prod(map(int, extents)) * dtype.lanes * -(-dtype.bits // 8)
    if size > _MAX_STACK_BYTES:
        return allocation
    annotations = {**dict(allocation.annotations.items()), STAYS_ON_STACK: tirx.const(True, "bool")}
    return tirx.AllocBuffer(allocation.buffer, annotations=annotations)


compilation_pipeline.register_tir_pipeline(_CPU_PIPELINE, _make_cpu_pipeline)


# ---------------------------------------------------------------- split loops
# Splits loops at the periods of their indices, because LLVM's loop vectorizer miscompiles them.
#
# In `for i in range(16)` with `a[i % 8]` in a condition, LLVM may read 16 consecutive elements of
# `a`: it takes the modulo by a power of 2, which is a cast to a few bits for it, for one that
# never wraps. It does so where its vectors are longer than the period, as those of `znver4` and
# `znver5` are. In a loop of 8 iterations nothing wraps.


# Elements of the longest vectors, times the vectors that LLVM computes in turns.
_MAX_PERIOD: Final = 512


@kernel_pass
def split_loops_where_indices_repeat(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split loops in which an index is taken modulo less than it reaches."""
    if not find_nodes(function.body, tirx.FloorMod, tirx.Mod):
        return function
    return rewrite_nodes(function, tirx.For, _split)


def _split(loop: tirx.For) -> tirx.For:
    """Return a loop, or nested ones, of which none has an index that repeats."""
    period = _find_period(loop)
    if not period:
        return loop
    dtype, extent = loop.loop_var.ty.dtype, loop.extent
    outer, inner = (tirx.Var(f"{loop.loop_var.name}_{name}", dtype) for name in ("outer", "inner"))
    body = replace_variables(loop.body, {loop.loop_var: outer * period + inner})
    length = tvm.sym.Analyzer().simplify(extent % period)
    is_whole = isinstance(length, tirx.IntImm) and int(length) == 0
    own = tirx.IntImm(dtype, period) if is_whole else tirx.min(period, extent - outer * period)
    nested = tirx.For(inner, loop.min, own, tirx.ForKind.SERIAL, body)
    count = tvm.sym.Analyzer().simplify((extent + period - 1) // period)
    # indices may repeat in the outer loop, too
    return _split(tirx.For(outer, loop.min, count, loop.kind, nested, annotations=loop.annotations))


def _find_period(loop: tirx.For) -> int:
    """Return the number of iterations after which an index of a loop first repeats.

    It is 0 unless vectors may reach beyond them.
    """
    is_known = isinstance(loop.extent, tirx.IntImm)
    limit = min(_MAX_PERIOD, int(loop.extent) if is_known else _MAX_PERIOD)
    if not (isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0):
        return 0
    if find_nodes(loop.body, tirx.Ramp):
        # it is in vectors already
        return 0
    values = {bind.var: bind.value for bind in find_nodes(loop.body, tirx.Bind)}
    periods = (
        _period_of(node, loop.loop_var, values)
        for node in find_nodes(loop.body, tirx.FloorMod, tirx.Mod)
    )
    return min((p for p in periods if 1 < p < limit), default=0)


def _period_of(modulo: Any, var: Any, values: dict[Any, Any]) -> int:
    """Return the period of a modulo by a power of 2 in a variable; 0 for others.

    It is 0, too, if the modulo is not linear in the variable.

    Args:
        modulo: The modulo.
        var: The variable.
        values: What other variables are bound to.
    """
    divisor = int(modulo.b) if isinstance(modulo.b, tirx.IntImm) else 0
    if divisor < 1 or divisor & (divisor - 1):
        return 0
    index = modulo.a
    while values.keys() & (bound := set(find_nodes(index, tirx.Var))):
        index = replace_variables(index, {v: values[v] for v in bound & values.keys()})
    step = tvm.sym.Analyzer().simplify(replace_variables(index, {var: var + 1}) - index)
    return divisor // math.gcd(divisor, int(step)) if isinstance(step, tirx.IntImm) else 0
