"""Vector code: strided loads, prefetches and, for 64-bit Arm, accumulators, stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import codegen

from tvmflow.compiler.contraction.machine import (
    LINE_FLOATS,
    MATRIX_INSTRUCTION,
    find_multiplicand_lanes,
)
from tvmflow.compiler.tail_vectors import as_int
from tvmflow.graph import ir


def know_loops(function: tirx.PrimFunc) -> Any:
    """Return an analyzer that knows the range of each loop's variable."""
    analyzer = tvm.sym.Analyzer()
    for loop in ir.find_nodes(function.body, tirx.For):
        analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    return analyzer


def _has_by_element_fma(function: tirx.PrimFunc) -> bool:
    """Return whether a kernel is for a CPU with by-element FMA, such as 64-bit Arm."""
    target = function.attrs.get("target")
    return target is not None and bool(find_multiplicand_lanes(target.attrs))


# ---------------------------------------------------------------- strided loads
# Loads of every second, third or fourth element (pooling, slices) or of each element twice (resizing) become loads of
# whole vectors and selections from them. TVM would load such elements one by one.

MAX_STRIDE: Final = 4
"""With larger strides, elements are loaded one by one: a vector would contain too few of them."""


@ir.kernel_pass
def shuffle_strided_loads(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Load elements with a small stride as vectors."""
    analyzer = know_loops(function)

    def shuffle(load: Any) -> Any:
        index = load.indices[-1]
        return (_select if isinstance(index, tirx.Ramp) else _repeat)(load, index, analyzer)

    return ir.rewrite_nodes(function, tvm.ir.TensorLoad, shuffle)


def _repeat(load: Any, index: Any, analyzer: Any) -> Any:
    """Return the values of a load that reads each element several times, selected from one vector."""
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
        # the first element of a vector may be the last one of the vector before
        return load
    start = sum(others, ramp.base // count)
    vector = tirx.BufferLoad(load.source, [*load.indices[:-1], tirx.Ramp(start, 1, lanes // count)])
    # TVM selects no more values than the operands have, so the vector is repeated
    return tirx.Shuffle([vector] * count, [lane // count for lane in range(lanes)])


def _list_summands(index: Any) -> list[Any]:
    if isinstance(index, tirx.Add):
        return [*_list_summands(index.a), *_list_summands(index.b)]
    return [index]


def _as_number(expr: Any) -> int:
    """Return the value of an integer constant; 0 for other expressions."""
    return as_int(expr) or 0


def _select(load: Any, index: tirx.Ramp, analyzer: Any) -> Any:
    """Return the values of a strided load, selected from vectors that do not reach beyond the tensor."""
    stride, lanes = _as_number(index.stride), int(index.lanes)
    if not 1 < stride <= MAX_STRIDE:
        return load
    end, extent = stride * lanes, load.source.ty.shape[-1]
    is_known = isinstance(extent, tirx.IntImm)
    if not is_known or analyzer.const_int_bound(index.base).max_value + end > int(extent):
        end -= stride - 1
    # Contiguous vectors are loaded, so that the strided loads of the elements in between share them.
    starts = [min(n * lanes, end - lanes) for n in range(stride)]
    outer = list(load.indices[:-1])
    vectors = [
        tirx.BufferLoad(load.source, [*outer, tirx.Ramp(index.base + start, 1, lanes)])
        for start in starts
    ]
    addresses = [
        number // lanes * lanes + number - starts[number // lanes]
        for number in range(0, end, stride)
    ]
    return tirx.Shuffle(vectors, addresses)


# ---------------------------------------------------------------- prefetches
# Loops over tiles use the weights of one tile for many rows. The first rows would wait for weights that are not in the
# second-level cache, so the rows before them prefetch these weights.

PREFETCH_HINT: Final = "tvmflow.prefetches_weights"
"""The annotation of a loop over tiles; its value is the number of consecutive tiles that share their weights."""

# for reading, into the second-level cache, data
_PREFETCH_FLAGS: Final = (0, 2, 1)


@ir.node_pass(tirx.For)
def prefetch_weights(loop: tirx.For) -> tirx.For:
    """Prefetch the weights of later tiles, evenly spread over the tiles that share earlier weights."""
    if PREFETCH_HINT not in loop.annotations:
        return loop
    tiles = int(loop.annotations[PREFETCH_HINT])
    serial = {
        each.loop_var: each
        for each in ir.find_nodes(loop.body, tirx.For)
        if each.kind == tirx.ForKind.SERIAL
    }

    def prefetch(inner: tirx.For) -> tirx.For:
        around = [each for each in ir.find_nodes(inner.body, tirx.For) if each.loop_var in serial]
        if inner.loop_var not in serial or around:
            return inner
        used = set(ir.find_nodes(inner.body, tirx.Var))
        nest = [each for var, each in reversed(serial.items()) if var in used]
        return ir.with_fields(inner, body=_prefetch_in(inner.body, loop.loop_var, tiles, nest))

    body = tvm_ffi.structural_map(loop.body, (tirx.For, prefetch))
    others = {key: value for key, value in loop.annotations.items() if key != PREFETCH_HINT}
    return ir.with_fields(loop, body=body, annotations=others)


def _prefetch_in(body: tirx.Stmt, tile: Any, tiles: int, nest: Sequence[tirx.For]) -> tirx.Stmt:
    """Return the body of the innermost loop of a nest, which prefetches weights if it reads any."""
    group, member = (tirx.Var(name, tile.ty.dtype) for name in ("group", "member"))
    analyzer = tvm.sym.Analyzer()
    analyzer.bind(member, tvm.ir.Range(0, tiles))
    first = {tile: group * tiles + member, **{each.loop_var: each.min for each in nest}}
    reads = {}
    for load in ir.find_nodes(body, tvm.ir.TensorLoad):
        index = load.indices[-1]
        if isinstance(index, tirx.Ramp) and _as_number(index.stride) == 1:
            start = analyzer.simplify(ir.replace_variables(index.base, first))
            used = set(ir.find_nodes(start, tirx.Var))
            if group in used and member not in used:
                reads[str(index.base)] = (load, start)
    lengths = {each.loop_var: _as_number(each.extent) for each in nest}
    if not reads or not all(lengths.values()):
        return body
    load, start = next(iter(reads.values()))
    used = set(ir.find_nodes(load.indices[-1].base, tirx.Var))
    repeats = math.prod(length for var, length in lengths.items() if var not in used)
    # each iteration of a tile prefetches an equal share of the elements
    step = -(-len(reads) * _as_number(load.indices[-1].lanes) // (tiles * repeats))
    position: Any = tile % tiles
    for var, length in lengths.items():
        position = position * length + var
    start = ir.replace_variables(start, {group: tile // tiles + 1}) + position * step
    prefetches = [_prefetch(load.source, start + line) for line in range(0, step, LINE_FLOATS)]
    return tirx.SeqStmt([*prefetches, body])


def _prefetch(tensor: Any, index: Any) -> tirx.Stmt:
    address = tirx.call_intrin("handle", "tirx.address_of", tirx.BufferLoad(tensor, [index]))
    flags = (tirx.const(flag, "int32") for flag in _PREFETCH_FLAGS)
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *flags))


# ---------------------------------------------------------------- multiplicands in lanes
# Four adjacent multiplicands, as in a tile of a matmul, become one load for by-element FMA. LLVM 22 loads each of them
# separately. On a Neoverse N1, a tile of 7 x 2 vectors takes 29 cycles in place of 39.

# The multiplicands in the space of one float32.
_LANES_PER_FLOAT32: Final = {"float32": 1, "float16": 2}


@ir.kernel_pass
def select_multiplicand_lanes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Load multiplicands as vectors, and select lanes (by-element FMA)."""
    if not _has_by_element_fma(function):
        return function
    lanes = find_multiplicand_lanes(function.attrs["target"].attrs)
    analyzer = know_loops(function)

    def take(multiplicand: tirx.Broadcast) -> Any:
        return _take_from_lane(multiplicand, lanes, analyzer)

    function = ir.rewrite_nodes(function, tirx.Broadcast, take)
    return ir.rewrite_nodes(function, tirx.For, _take_words_from_lanes)


def _take_from_lane(multiplicand: tirx.Broadcast, lanes: int, analyzer: Any) -> Any:
    """Return the broadcast of a loaded element, selected from an aligned vector.

    The expression is unchanged if the lane is not known, or if the tensor may end within that vector.
    """
    load = multiplicand.value
    dtype = str(load.source.dtype) if isinstance(load, tvm.ir.TensorLoad) else ""
    lanes *= _LANES_PER_FLOAT32.get(dtype, 0)
    count = _as_number(multiplicand.lanes)
    # a broadcast may fill several vectors, which a loop computes together
    if not lanes or not count or count % lanes:
        return multiplicand
    *outer, index = load.indices
    lane = _find_tail(index, lanes, analyzer)
    if lane is None or _find_tail(load.source.ty.shape[-1], lanes, analyzer) != 0:
        return multiplicand
    start = analyzer.simplify(index - lane)
    vector = tirx.BufferLoad(load.source, [*outer, tirx.Ramp(start, 1, lanes)])
    # TVM selects no more lanes than the operands have, so the vector is repeated
    return tirx.Shuffle([vector] * (count // lanes), [lane] * count)


_VECTOR_BYTES: Final = 16
_WORD_BYTES: Final = (2, 4)
_FLOAT_BYTES: Final = 4
_FLOAT_LANES: Final = 4
_BYTE_BITS: Final = 8
_REINTERPRET: Final = "tirx.reinterpret"


class _Word(NamedTuple):
    """A word of bytes, or one float32, that is loaded and broadcast to all lanes of a vector.

    It has `size` bytes. The index is the offset of the first byte, in elements of `element` bytes.
    """

    load: Any
    index: Any
    size: int
    element: int

    @property
    def is_float(self) -> bool:
        """Whether the word is one float32; only vectors with several such words are loaded."""
        return str(self.load.ty.dtype) == "float32"

    @classmethod
    def read(cls, multiplicand: tirx.Broadcast) -> _Word | None:
        """Return the word that is broadcast to all lanes; None if it is not a load of adjacent bytes."""
        is_word = ir.operator_name(multiplicand.value) == _REINTERPRET
        load = multiplicand.value.args[0] if is_word else multiplicand.value
        if not isinstance(load, tvm.ir.TensorLoad):
            return None
        dtype, index = load.ty.dtype, load.indices[-1]
        if not is_word:
            is_float = str(dtype) == "float32" and _as_number(multiplicand.lanes) == _FLOAT_LANES
            return cls(load, index, _FLOAT_BYTES, _FLOAT_BYTES) if is_float else None
        if dtype.bits != _BYTE_BITS or dtype.lanes not in _WORD_BYTES:
            return None
        if not isinstance(index, tirx.Ramp):
            # the element type of the tensor is a word already
            return cls(load, index, dtype.lanes, dtype.lanes)
        return cls(load, index.base, dtype.lanes, 1) if _as_number(index.stride) == 1 else None

    def distance(self, other: _Word, analyzer: Any) -> int | None:
        """Return the bytes from another word to this one; None if the distance is not constant."""
        if not self.load.source.same_as(other.load.source):
            return None
        steps = analyzer.simplify(self.index - other.index)
        return int(steps) * self.element if isinstance(steps, tirx.IntImm) else None


def _take_words_from_lanes(loop: tirx.For) -> tirx.For:
    """Return an innermost loop whose words of bytes and float32 multiplicands come from whole vectors."""
    if ir.find_nodes(loop.body, tirx.For, tirx.IfThenElse):
        return loop
    found = [(operand, _Word.read(operand)) for operand in ir.find_nodes(loop.body, tirx.Broadcast)]
    # if a condition guards loads, float32 words are skipped: their loads must not run without it
    is_guarded = any(
        ir.operator_name(c) == ir.IF_THEN_ELSE for c in ir.find_nodes(loop.body, tvm.ir.Call)
    )
    words = {
        operand: word
        for operand, word in found
        if word is not None and not (is_guarded and word.is_float)
    }
    analyzer, lanes = tvm.sym.Analyzer(), {}
    for group in _group_words(words, analyzer):
        first = min(group, key=group.__getitem__)
        addresses = _arrange_vectors(sorted(set(group.values())), words[first].size)
        if words[first].is_float and len(set(addresses.values())) == len(addresses):
            continue
        for operand, offset in group.items() if addresses else ():
            word, start = words[operand], addresses[offset]
            index = analyzer.simplify(words[first].index + start // word.element)
            ramp = tirx.Ramp(index, 1, _VECTOR_BYTES // word.element)
            whole = tirx.BufferLoad(word.load.source, [*word.load.indices[:-1], ramp])
            lane = (offset - start) // word.size
            if ir.operator_name(operand.value) == _REINTERPRET:
                dtype = f"{operand.value.ty.dtype}x{_VECTOR_BYTES // word.size}"
                whole = tirx.reinterpret(dtype, whole)
            lanes[operand] = tirx.Shuffle([whole], [lane] * _as_number(operand.lanes))
    if not lanes:
        return loop
    return tvm_ffi.structural_map(
        loop, (tirx.Broadcast, lambda operand: lanes.get(operand, operand))
    )


def _group_words(
    words: Mapping[tirx.Broadcast, _Word], analyzer: Any
) -> list[dict[tirx.Broadcast, int]]:
    """Group words of one tensor at constant distances; each has its offset in bytes from the first."""
    groups: list[dict[tirx.Broadcast, int]] = []
    for multiplicand, word in words.items():
        for group in groups:
            distance = word.distance(words[next(iter(group))], analyzer)
            if distance is not None:
                group[multiplicand] = distance
                break
        else:
            groups.append({multiplicand: 0})
    return [
        {multiplicand: offset - min(group.values()) for multiplicand, offset in group.items()}
        for group in groups
    ]


def _arrange_vectors(offsets: Sequence[int], size: int) -> dict[int, int]:
    """Return word offset -> the offset of the vector that contains it; empty if there are too few words."""
    end = offsets[-1] + size
    if end < _VECTOR_BYTES:
        return {}
    addresses: dict[int, int] = {}
    start = -_VECTOR_BYTES
    for offset in offsets:
        is_inside = offset + size <= start + _VECTOR_BYTES and (offset - start) % size == 0
        if not is_inside:
            beyond = max(0, offset + _VECTOR_BYTES - end)
            start = offset - -(-beyond // size) * size
        if start < 0:
            return {}
        addresses[offset] = start
    return addresses


def _find_tail(value: Any, divisor: int, analyzer: Any) -> int | None:
    """Return an integer modulo the divisor; None if the result is not constant."""
    steps = analyzer.modular_set(value)
    return None if int(steps.coeff) % divisor else int(steps.base) % divisor


# ---------------------------------------------------------------- first values of accumulators
# An accumulator from which a value is subtracted at the end, as for a zero point, starts at minus that value, not 0.


class _Address(NamedTuple):
    """A vector's position in a buffer of accumulators."""

    buffer: Any
    number: int

    @classmethod
    def of(cls, buffer: Any, indices: Sequence[Any]) -> _Address | None:
        """Return the position of a vector of int32 accumulators; None for other vectors or a variable index."""
        is_known = len(indices) == 1 and isinstance(indices[0], tirx.IntImm)
        is_vector = str(buffer.dtype) == f"int32x{_WORD_BYTES[-1]}"
        return cls(buffer, int(indices[0])) if is_known and is_vector else None

    @classmethod
    def of_load(cls, load: Any) -> _Address | None:
        """Return the position that a load reads; None for other expressions."""
        is_load = isinstance(load, tvm.ir.TensorLoad)
        return cls.of(load.source, load.indices) if is_load else None


@ir.node_pass(tirx.SeqStmt, _has_by_element_fma)
def start_accumulators_at_offsets(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Start accumulators at the values that are later subtracted from them, for 64-bit Arm."""
    statements = list(sequence)
    zeros = [
        (address, at)
        for at, s in enumerate(statements)
        if isinstance(s, tirx.BufferStore) and isinstance(s.value, tirx.Broadcast)
        if as_int(s.value.value) == 0 and (address := _Address.of(s.buffer, s.indices))
    ]
    starts = dict(zeros)
    if not starts or len(starts) < len(zeros):
        return sequence
    offsets = _find_offsets(statements, starts)
    for at, statement in enumerate(statements if offsets else ()):
        if not isinstance(statement, tirx.BufferStore):
            continue
        address = _Address.of(statement.buffer, statement.indices)
        if address is not None and starts.get(address) == at and address in offsets:
            statements[at] = ir.with_fields(statement, value=0 - offsets[address])
        else:
            statements[at] = _replace_differences(statement, offsets, lambda sub: sub.a)
    return tirx.SeqStmt(statements)


def _find_offsets(statements: Sequence[Any], starts: Mapping[_Address, int]) -> dict[_Address, Any]:
    """Return accumulator -> the value that every read except an update subtracts from it."""
    offsets: dict[_Address, Any] = {}
    refused: set[_Address | None] = set()
    stored: set[Any] = set()
    loose: set[Any] = set()
    for at, statement in enumerate(statements):
        if ir.find_nodes(statement, tirx.Evaluate, tirx.IfThenElse, tirx.Bind):
            return {}
        stores = ir.find_nodes(statement, tirx.BufferStore)
        stored.update(store.buffer for store in stores)
        if isinstance(statement, tirx.BufferStore):
            for difference in ir.find_nodes(statement.value, tirx.Sub):
                address = _Address.of_load(difference.a)
                if address is not None and address in starts:
                    first = offsets.setdefault(address, difference.b)
                    if not tvm_ffi.structural_equal(first, difference.b):
                        refused.add(address)
            stores = [_replace_differences(statement, starts, lambda sub: sub.b)]
        for store in stores:
            own = _Address.of(store.buffer, store.indices)
            loads = ir.find_nodes(store.value, tvm.ir.TensorLoad)
            read = {_Address.of_load(load) for load in loads}
            loose.update(load.source for load in loads if _Address.of_load(load) is None)
            refused |= read - {own}
            if own is None:
                loose.add(store.buffer)
            elif own not in read and starts.get(own) != at:
                refused.add(own)
    return {
        address: offset
        for address, offset in offsets.items()
        if address not in refused
        and address.buffer not in loose
        and stored.isdisjoint(load.source for load in ir.find_nodes(offset, tvm.ir.TensorLoad))
    }


def _replace_differences(
    store: tirx.BufferStore, addresses: Mapping[_Address, Any], choose: Callable[[Any], Any]
) -> tirx.BufferStore:
    """Return a store in which `choose` replaces each difference whose minuend is at one of `addresses`."""

    def replace(difference: Any) -> Any:
        return choose(difference) if _Address.of_load(difference.a) in addresses else difference

    return ir.with_fields(store, value=tvm_ffi.structural_map(store.value, (tirx.Sub, replace)))


# ---------------------------------------------------------------- accumulators of int8 matrix multiply
# The instruction (smmla) leaves two accumulators of one pixel and two of the next pixel in a vector. The other loads
# and stores of these accumulators are adapted.

# Unrolling a loop does not pay off with this many dot products in its body. LLVM unrolls to at most `_MAX_UNROLLED`.
_MIN_LONG_BODY: Final = 36
_MAX_UNROLLED: Final = 240
# The same limit for the vector products of a depthwise convolution.
_MIN_WINDOW_BODY: Final = 24
# LLVM does not evaluate this intrinsic, so it does not know the extent of the loop.
_ADDITION: Final = "llvm.aarch64.neon.uqadd"


@ir.node_pass(tirx.For, _has_by_element_fma)
def keep_product_loops(loop: tirx.For) -> tirx.For:
    """Keep LLVM from unrolling short loops with long bodies, for 64-bit Arm.

    LLVM would load the multiplicands of all iterations so early that it must spill registers.
    """
    rounds = _as_number(loop.extent)
    if loop.kind != tirx.ForKind.SERIAL or rounds <= 1 or ir.find_nodes(loop.body, tirx.For):
        return loop
    stores = ir.find_nodes(loop.body, tirx.BufferStore)
    least, count = _MIN_LONG_BODY, sum(bool(ir.find_nodes(s.value, tirx.Shuffle)) for s in stores)
    if not count:
        # count the stores that add a product of vectors to an accumulator
        least, count = (
            _MIN_WINDOW_BODY,
            sum(
                isinstance(store.value, tirx.Add)
                and isinstance(store.value.a, tvm.ir.TensorLoad)
                and store.value.a.source.same_as(store.buffer)
                and isinstance(store.value.b, tirx.Mul)
                for store in stores
            ),
        )
    if count < least or count * rounds > _MAX_UNROLLED:
        return loop
    dtype = str(loop.loop_var.ty.dtype)
    extent = tirx.call_llvm_pure_intrin(dtype, _ADDITION, loop.extent, tirx.const(0, dtype))
    return ir.with_fields(loop, extent=extent)


@ir.kernel_pass
def order_matrix_accumulators(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Select each pixel's or row's accumulators from the vectors that two of them share, for 64-bit Arm."""
    stores = ir.find_nodes(function.body, tirx.BufferStore)
    addresses: dict[Any, list[int]] = {}
    for store in filter(_multiplies_matrices, stores):
        address = _find_accumulators(store.buffer, store.indices) // _VECTOR_ACCUMULATORS
        addresses.setdefault(store.buffer, []).append(address)
    if not addresses:
        return function
    # the distance between the two vectors of a pair: the first two results are computed before the other two
    accumulators = {buffer: second - first for buffer, (first, second, *_) in addresses.items()}
    begun = {
        (store.buffer, _find_pair(store, accumulators)[0]): store.value
        for store in stores
        if store.buffer in accumulators and not _multiplies_matrices(store)
        if not isinstance(store.value, tirx.Broadcast)
    }

    def order(store: tirx.BufferStore) -> tirx.BufferStore:
        if _multiplies_matrices(store):
            return store
        value = tvm_ffi.structural_map(
            store.value, (tvm.ir.TensorLoad, lambda load: _select_accumulators(load, accumulators))
        )
        if store.buffer in accumulators:
            first, own = _find_pair(store, accumulators)
            # both pixels start at the same values, even if nothing reads the second one
            value = begun.get((store.buffer, first), value)
            if not isinstance(value, tirx.Broadcast):
                value = tirx.Shuffle([value, value], _PIXEL_LANES[own])
        return ir.with_fields(store, value=value)

    return ir.rewrite_nodes(function, tirx.BufferStore, order)


_VECTOR_ACCUMULATORS: Final = 4
_PIXEL_LANES: Final = ([0, 1, 4, 5], [2, 3, 6, 7])
"""The lanes of two vectors that belong to each of two pixels."""


def _multiplies_matrices(store: tirx.BufferStore) -> bool:
    """Return whether a store is an int8 matrix multiply into accumulators."""
    if ir.operator_name(store.value) != "tirx.call_llvm_pure_intrin":
        return False
    own = int(codegen.llvm_lookup_intrinsic_id(MATRIX_INSTRUCTION))
    return int(store.value.args[0]) == own


def _find_accumulators(buffer: Any, indices: Sequence[Any]) -> int:
    """Return the offset in int32 accumulators of an index; a buffer's elements may be vectors of them."""
    (index,) = indices
    first = index.base if isinstance(index, tirx.Ramp) else index
    assert isinstance(first, tirx.IntImm), "tiles are unrolled"
    return int(first) * int(buffer.dtype.lanes)


def _find_pair(access: Any, accumulators: Mapping[Any, int]) -> tuple[int, int]:
    """Return the first vector of a pair of pixels or rows, and the accessed pixel or row (0 or 1)."""
    buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
    address = _find_accumulators(buffer, access.indices) // _VECTOR_ACCUMULATORS
    own = address // accumulators[buffer] % 2
    return address - own * accumulators[buffer], own


def _select_accumulators(load: Any, accumulators: Mapping[Any, int]) -> Any:
    """Return the accumulators of a pixel or row that a load reads: a vector, half a vector, or a lane."""
    if load.source not in accumulators:
        return load
    distance, lanes = accumulators[load.source], int(load.source.dtype.lanes)
    first, own = _find_pair(load, accumulators)
    lane = _find_accumulators(load.source, load.indices) % _VECTOR_ACCUMULATORS
    if int(load.ty.dtype.lanes) < _VECTOR_ACCUMULATORS:
        # two adjacent accumulators of a pixel are in one vector
        vector = first + lane // 2 * distance
        start = tirx.const(vector * _VECTOR_ACCUMULATORS + own * 2 + lane % 2, "int32")
        ramp = isinstance(load.indices[0], tirx.Ramp)
        return tirx.BufferLoad(load.source, [tirx.Ramp(start, 1, 2) if ramp else start])
    addresses = [(first + n * distance) * _VECTOR_ACCUMULATORS // lanes for n in range(2)]
    pair = [
        tirx.BufferLoad(load.source, [n if lanes > 1 else tirx.Ramp(n, 1, _VECTOR_ACCUMULATORS)])
        for n in addresses
    ]
    return tirx.Shuffle(pair, _PIXEL_LANES[own])


# ---------------------------------------------------------------- stores of cast integers
# Adjacent stores of words of bytes, such as rounded rows of a tile, are cast as whole vectors and stored together.
# LLVM 22 casts each word separately with three instructions; four words together also take three.

_STORED_WORDS: Final = (4, 2)


@ir.node_pass(tirx.SeqStmt, _has_by_element_fma)
def join_narrow_stores(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Store adjacent words of bytes together, for 64-bit Arm."""
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
    """Return whether a statement stores four bytes that are cast from int32."""
    if not isinstance(statement, tirx.BufferStore) or not isinstance(statement.value, tirx.Cast):
        return False
    index, narrow = statement.indices[-1], statement.value.ty.dtype
    is_whole = not isinstance(index, tirx.Ramp) or _as_number(index.stride) == 1
    is_read = any(
        load.source.same_as(statement.buffer)
        for load in ir.find_nodes(statement.value, tvm.ir.TensorLoad)
    )
    return (
        (narrow.bits, narrow.lanes) == (_BYTE_BITS, _WORD_BYTES[-1])
        and str(statement.value.value.ty.dtype) == f"int32x{narrow.lanes}"
        and len(statement.indices) == 1
        and is_whole
        and not is_read
    )


def _join_run(run: Sequence[tirx.BufferStore]) -> list[tirx.BufferStore]:
    """Return stores of words in one buffer, with adjacent words joined to one store."""
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
    tail = sorted(zip(known, range(len(run)), strict=True))
    joined = []
    while tail:
        first = tail[0][0]
        ends = {n: first + (n - 1) * width for n in _STORED_WORDS if n <= len(tail)}
        count = next((n for n, end in ends.items() if tail[n - 1][0] == end), 1)
        group = [run[position] for _, position in tail[:count]]
        joined.append(_join(group, starts[tail[0][1]], width) if count > 1 else group[0])
        tail = tail[count:]
    return joined


def _join(stores: Sequence[tirx.BufferStore], start: Any, width: int) -> tirx.BufferStore:
    """Return one store of adjacent words from a position on; `width` is the elements of a word."""
    vectors = [store.value.value for store in stores]
    dtype, bits = stores[0].value.ty.dtype, 32
    while bits > _BYTE_BITS:
        # narrowed by selecting half of the bytes: LLVM would cast four vectors at once with a register table lookup
        bits //= 2
        narrow = f"int{bits}x{_VECTOR_BYTES * _BYTE_BITS // bits}"
        halves = [tirx.reinterpret(narrow, vector) for vector in vectors]
        lanes = list(range(0, _VECTOR_BYTES * _BYTE_BITS // bits * min(2, len(halves)), 2))
        vectors = [tirx.Shuffle(halves[n : n + 2], lanes) for n in range(0, len(halves), 2)]
    name = str(dtype).partition("x")[0]
    value = tirx.reinterpret(f"{name}x{_WORD_BYTES[-1] * len(stores)}", vectors[0])
    index = tirx.Ramp(start, 1, width * len(stores))
    return tirx.BufferStore(stores[0].buffer, value, [index])
