"""The lowering of non-maximum suppression: ONNX's, and MXNet's box_nms and MultiBoxDetection.

On a CPU, or the host of a GPU, a kernel compares each box with the kept boxes. Without a CPU, the first launch on the
GPU compares all boxes with each other; a thread compares one box with 32 others. Then a thread for each class or image
selects boxes by the resulting bits, and the last launches write the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

from tvm import relax, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as B

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.contraction.packed import allocate_registers, loop_over
from tvmflow.compiler.passes.sorts import Order, Variable, Words, bind, precedes
from tvmflow.compiler.tir_kernels.definitions import (
    declare_buffer,
    define_flat_kernel,
    define_kernel,
    launch_threads,
    when,
)
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import is_dynamic, known_sizes
from tvmflow.graph.ir_operators import (
    SELECTED_COLUMNS,
    BoxNms,
    MultiboxDetection,
    NonMaxSuppression,
)

# With fewer scores, a second core saves no time.
_MIN_PARALLEL_SCORES: Final = 1 << 12


_OPERATORS: Final = {kind.NAME: kind for kind in (NonMaxSuppression, MultiboxDetection, BoxNms)}


class NmsRewriter(TargetRewriter):
    """Lowers non-maximum suppression for the target."""

    OPERATORS = tuple(_OPERATORS)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        operator: Any = _OPERATORS[ir.operator_name(call)]
        # GPU kernels that handle boxes sequentially are slower than the host
        has_threads = not self._context.is_cpu() and not self._context.is_mixed()
        is_gpu = has_threads and self.depends_on_inputs(call)
        operands, own = list(rewritten.args), operator.read(call)
        if operator is NonMaxSuppression and is_gpu:
            order = relax.op.argsort(operands[1], axis=-1, descending=True, dtype="int32")
            operands.insert(2, self.emit(order))
            function = _make_onnx_kernel_for_gpu(own, *operands)
        elif operator is NonMaxSuppression:
            cores = self._context.cpu.cores if self._context.cpu else 1
            function = _make_onnx_kernel(cores, own, *operands)
        else:
            make = _make_box_kernel if operator is BoxNms else _make_multibox_kernel
            function = make(is_gpu, own, *operands)
        name = operator.NAME.rpartition(".")[2]
        callee = self.builder_.add_func(function.with_attrs(ir.SCHEDULED), name)
        types = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else call.ty
        return self.emit(relax.call_tir(callee, operands, types))


# ---------------------------------------------------------------- overlaps


def _sides(values: Sequence[Any], is_centered: bool) -> list[tuple[Any, Any]]:
    """Return the lower and the higher bound of an ONNX box along each axis."""
    pairs = zip(values[:2], values[2:], strict=True)
    if is_centered:
        halves = [(middle, size / T.float32(2)) for middle, size in pairs]
        return [(middle - half, middle + half) for middle, half in halves]
    return [(T.min(one, other), T.max(one, other)) for one, other in pairs]


def _overlaps(one: Sequence[Any], other: Sequence[Any], threshold: Any) -> Any:
    """Return whether two boxes (four sides and the area) overlap by more than a threshold."""
    zero = T.float32(0)
    shared = [T.min(one[n + 1], other[n + 1]) - T.max(one[n], other[n]) for n in (0, 2)]
    common = shared[0] * shared[1]
    union = one[4] + other[4] - common
    is_positive = [value > zero for value in (*shared, one[4], other[4], common, union)]
    return T.And(tirx.all(*is_positive), common / union > threshold)


def _shared_length(start: Any, end: Any, other_start: Any, other_end: Any, dtype: str) -> Any:
    """Return the length that two intervals share, or 0."""
    return T.max(T.min(end, other_end) - T.max(start, other_start), T.Cast(dtype, 0))


def _multibox_overlap(operator: MultiboxDetection, dtype: str, one: Any, other: Any) -> list[Any]:
    """Return the conditions for an overlap of rows (class, score, left, top, right, bottom)."""
    w = _shared_length(one[2], one[4], other[2], other[4], dtype)
    h = _shared_length(one[3], one[5], other[3], other[5], dtype)
    areas = [(row[4] - row[2]) * (row[5] - row[3]) for row in (one, other)]
    union = areas[0] + areas[1] - w * h
    is_large = w * h / union >= T.Cast(dtype, operator.threshold)
    overlaps = tirx.all(union > T.Cast(dtype, 0), is_large)
    return [overlaps] if operator.ignores_class else [one[0] == other[0], overlaps]


def _read_box(row: Sequence[Any], operator: BoxNms, dtype: str) -> list[Any]:
    """Return left, top, right, bottom and area of a row's box, and its class if classes are compared."""
    x, y, x2, y2 = row[operator.first : operator.first + 4]
    zero, column = T.Cast(dtype, 0), operator.class_column
    kind = [row[column]] if column >= 0 else []
    if operator.is_centered:
        half_w, half_h = x2 / T.Cast(dtype, 2), y2 / T.Cast(dtype, 2)
        area = T.max(x2, zero) * T.max(y2, zero)
        return [x - half_w, y - half_h, x + half_w, y + half_h, area, *kind]
    return [x, y, x2, y2, T.max(x2 - x, zero) * T.max(y2 - y, zero), *kind]


def _box_overlap(operator: BoxNms, dtype: str, one: Any, other: Any) -> list[Any]:
    """Return the conditions for an overlap of boxes that `_read_box` returns."""
    w = _shared_length(one[0], one[2], other[0], other[2], dtype)
    h = _shared_length(one[1], one[3], other[1], other[3], dtype)
    overlaps = w * h / (one[4] + other[4] - w * h) > T.Cast(dtype, operator.threshold)
    kinds = [tuple(T.Cast("int32", kind) for kind in box[5:]) for box in (one, other)]
    return [*(a == b for a, b in zip(*kinds, strict=True)), overlaps]


# ---------------------------------------------------------------- CPUs
# The kernel selects the same boxes as ONNX Runtime.


def _make_onnx_kernel(cores: int, operator: NonMaxSuppression, *operands: Any) -> Any:
    """Return the kernel; its results are the selected rows, and how many there are.

    The boxes of each class with scores above the threshold become a heap. Each popped box is compared with all selected
    ones in one loop, until enough are selected. Classes are independent of each other.
    """
    batch, classes, n = ir.known_shape(operands[1])
    groups = batch * classes
    most = operator.rows // groups
    kinds = {
        "boxes": ((batch, n, 4), "float32"),
        "scores": ((batch, classes, n), "float32"),
        "limit": ((1,), "int64"),
        "overlap": ((1,), "float32"),
        "threshold": ((1,), "float32"),
        "selected": ((operator.rows, SELECTED_COLUMNS), "int64"),
        "count": ((1,), "int64"),
    }
    is_parallel = cores > 1 and groups > 1 and groups * n >= _MIN_PARALLEL_SCORES
    with define_flat_kernel("non_max_suppression", kinds) as (builder, buffers):
        *inputs, selected, count = buffers
        kept = B.buffer_proxy(B.alloc_buffer((groups * most,), "int32"))
        counts = B.buffer_proxy(B.alloc_buffer((groups,), "int32"))
        with loop_over(groups, is_parallel) as group:
            counts[group] = _emit_group(operator, inputs, group, (classes, n, most), kept)
        total = Variable.allocate(tirx.const(0, "int32"))
        with B.serial(groups) as group:
            with B.serial(counts[group]) as position:
                row = (total.get() + position) * SELECTED_COLUMNS
                values = (group // classes, group % classes, kept[group * most + position])
                for column, value in enumerate(values):
                    selected[row + column] = tirx.Cast("int64", value)
            total.set(total.get() + counts[group])
        with B.serial((operator.rows - total.get()) * SELECTED_COLUMNS) as position:
            selected[total.get() * SELECTED_COLUMNS + position] = tirx.const(0, "int64")
        count[0] = tirx.Cast("int64", total.get())
    return builder.get()


def _emit_group(
    operator: NonMaxSuppression,
    inputs: Sequence[Any],
    group: Any,
    sizes: tuple[int, int, int],
    kept: Any,
) -> Any:
    """Emit NMS for a group (a class of an image); return how many boxes are selected.

    `sizes` are the classes, the boxes, and the most selected boxes of a group, for which `kept` has room.
    """
    boxes, scores, limit, overlap, threshold = inputs
    classes, n, most = sizes
    heap = _Heap(Order("float32", n, descending=True), n)
    with B.serial(n) as box:
        score = B.Bind(scores[group * n + box])
        is_high = score > threshold[0]
        if operator.takes_all_scores:
            is_high = tirx.any(is_high, tirx.EQ(score, threshold[0]))
        heap.append(score, box, is_high)
    heap.order()
    # the sides of the kept boxes, and their areas
    corners = [B.buffer_proxy(B.alloc_buffer((most,), "float32")) for _ in range(5)]
    wanted = B.Bind(tirx.Cast("int32", tirx.min(limit[0], tirx.const(most, "int64"))))
    number = Variable.allocate(tirx.const(0, "int32"))
    with B.While(tirx.all(heap.size.get() > 0, number.get() < wanted)):
        box = B.Bind(heap.pop())
        first = (group // classes * n + box) * 4
        values = [boxes[first + column] for column in range(4)]
        sides = [B.Bind(side) for pair in _sides(values, operator.is_centered) for side in pair]
        own = [*sides, B.Bind((sides[1] - sides[0]) * (sides[3] - sides[2]))]
        is_out = Variable.allocate(tirx.const(0, "int32"))
        with B.serial(number.get()) as position:
            other = [corner[position] for corner in corners]
            is_out.set(is_out.get() | tirx.Cast("int32", _overlaps(own, other, overlap[0])))
        with when(tirx.EQ(is_out.get(), 0)):
            for corner, value in zip(corners, own, strict=True):
                corner[number.get()] = value
            kept[group * most + number.get()] = box
            number.set(number.get() + 1)
    return number.get()


class _Heap:
    """A heap of candidates' words (see `sorts`), with the highest score first."""

    def __init__(self, order: Order, most: int) -> None:
        self._order, self._words = order, Words.allocate(order, most)
        self.size = Variable.allocate(tirx.const(0, "int32"))
        self._position = Variable.allocate(tirx.const(0, "int32"))

    def append(self, score: Any, box: Any, condition: Any) -> None:
        self._words[self.size.get()] = self._order.word(score, box)
        self.size.add(condition)

    def order(self) -> None:
        half = B.Bind(self.size.get() // 2)
        with B.serial(half) as step:
            start = B.Bind(half - 1 - step)
            self._sink(bind(self._words[start]), start)

    def pop(self) -> Any:
        first = bind(self._words[0])
        self.size.set(self.size.get() - 1)
        self._sink(bind(self._words[self.size.get()]), tirx.const(0, "int32"))
        return self._order.index(first)

    def _sink(self, word: Any, start: Any) -> None:
        """Emit the moves that sink a word from `start` to its position in the heap."""
        position, size = self._position, B.Bind(self.size.get())
        position.set(start)
        is_moving = Variable.allocate(tirx.const(1, "int32"))
        with B.While(tirx.all(tirx.EQ(is_moving.get(), 1), position.get() * 2 + 1 < size)):
            left = B.Bind(position.get() * 2 + 1)
            right = B.Bind(tirx.min(left + 1, size - 1))
            is_right = precedes(bind(self._words[right]), bind(self._words[left]))
            child = B.Bind(tirx.Select(is_right, right, left))
            below = bind(self._words[child])
            is_moving.set(tirx.Cast("int32", precedes(below, word)))
            with when(tirx.EQ(is_moving.get(), 1)):
                self._words[position.get()] = below
                position.set(child)
        self._words[position.get()] = word


# ---------------------------------------------------------------- GPUs

_BITS: Final = 32


class _Groups(NamedTuple):
    """Groups of candidates, sorted by descending score; an image may have several groups.

    Attributes:
        boxes: The number of boxes of an image, which is also the number of candidates of a group.
        box: Group, candidate -> its box.
        may_keep: Group, candidate, number of kept candidates before it -> whether it may be kept.
        overlap: Image and two boxes -> whether they overlap.
    """

    groups: int
    images: int
    boxes: int
    box: Callable[[Any, Any], Any]
    may_keep: Callable[[Any, Any, Any], Any]
    overlap: Callable[[Any, Any, Any], Any]

    def emit_selection(self) -> tuple[Any, Any]:
        """Emit the comparison of boxes and the selection.

        Return the indices of each group's kept candidates (groups, candidates), and how many it keeps (groups,).
        """
        words = -(-self.boxes // _BITS)
        # each word has a bit for each of 32 boxes: whether it overlaps a box
        masks = _allocate((self.images, self.boxes, words), "uint32")
        with launch_threads(self.images, self.boxes, words) as (image, box, word):
            bits = allocate_registers(1, dtype="uint32")
            bits[0] = T.uint32(0)
            with B.serial(_BITS) as position:
                other = word * _BITS + position
                with when(other < self.boxes), when(self.overlap(image, box, other)):
                    bits[0] = bits[0] | _bit(position)
            masks[image, box, word] = bits[0]
        removed = _allocate((self.groups, words), "uint32")
        kept = _allocate((self.groups, self.boxes), "int32")
        counts = _allocate((self.groups,), "int32")
        with launch_threads(self.groups) as (group,):
            image = group // (self.groups // self.images)
            counts[group] = T.int32(0)
            with B.serial(words) as word:
                removed[group, word] = T.uint32(0)
            with (
                B.serial(self.boxes) as position,
                when(self.may_keep(group, position, counts[group])),
            ):
                box = B.Bind(self.box(group, position))
                is_removed = removed[group, box // _BITS] & _bit(box % _BITS)
                with when(tirx.EQ(is_removed, T.uint32(0))):
                    kept[group, counts[group]] = position
                    counts[group] = counts[group] + 1
                    with B.serial(words) as word:
                        removed[group, word] = removed[group, word] | masks[image, box, word]
        return kept, counts


def _bit(position: Any) -> Any:
    return tirx.const(1, "uint32") << tirx.Cast("uint32", position)


def _allocate(shape: Sequence[int], dtype: str) -> Any:
    return B.buffer_proxy(B.sblock_alloc_buffer(shape, dtype))


def _list_extents(rows: Any) -> list[Any]:
    """Return the counts of images, rows and columns; dynamic ones as variables of the kernel."""
    named = zip(("images", "rows", "columns"), known_sizes(rows), strict=True)
    return [tirx.Var(name, "int64") if is_dynamic(size) else size for name, size in named]


@contextmanager
def _define(name: str, operands: Any, results: Any, sizes: Sequence[Any] = ()) -> Iterator[Any]:
    """Define a kernel; yield its builder and buffers. A rank-r operand has the first r `sizes`, if given."""
    shapes = [sizes[: len(known_sizes(o))] or ir.known_shape(o) for o in operands]
    specs = [*zip(shapes, map(ir.dtype_of, operands), strict=True), *results]
    with define_kernel(name) as builder:
        arguments = [B.arg(f"p{n}", declare_buffer(*spec)) for n, spec in enumerate(specs)]
        with B.sblock("root"):
            yield builder, list(map(B.buffer_proxy, arguments))


def _make_onnx_kernel_for_gpu(operator: NonMaxSuppression, *operands: Any) -> Any:
    batch, classes, n = ir.known_shape(operands[1])
    results = [((operator.rows, SELECTED_COLUMNS), "int64"), ((1,), "int64")]
    with _define("non_max_suppression", operands, results) as (builder, buffers):
        boxes, scores, order, limit, overlap, threshold, selected, count = buffers

        def corners(image: Any, box: Any) -> list[Any]:
            values = [boxes[image, box, column] for column in range(4)]
            (top, bottom), (left, right) = _sides(values, operator.is_centered)
            return [top, bottom, left, right, (bottom - top) * (right - left)]

        def overlaps(image: Any, one: Any, other: Any) -> Any:
            return _overlaps(corners(image, one), corners(image, other), overlap[0])

        def box_of(group: Any, position: Any) -> Any:
            return order[group // classes, group % classes, position]

        def may_keep(group: Any, position: Any, number: Any) -> Any:
            score = scores[group // classes, group % classes, box_of(group, position)]
            is_high = score >= threshold[0] if operator.takes_all_scores else score > threshold[0]
            return tirx.all(is_high, tirx.Cast("int64", number) < limit[0])

        groups = _Groups(
            groups=batch * classes,
            images=batch,
            boxes=n,
            box=box_of,
            may_keep=may_keep,
            overlap=overlaps,
        )
        kept, counts = groups.emit_selection()
        with launch_threads(operator.rows) as (row,):
            start = allocate_registers(1, dtype="int32")
            start[0] = T.int32(0)
            for column in range(SELECTED_COLUMNS):
                selected[row, column] = T.int64(0)
            with B.serial(batch * classes) as group:
                position = row - start[0]
                with when(tirx.all(position >= 0, position < counts[group])):
                    box = box_of(group, kept[group, position])
                    values = (group // classes, group % classes, box)
                    for column, value in enumerate(values):
                        selected[row, column] = tirx.Cast("int64", value)
                start[0] = start[0] + counts[group]
            with when(tirx.EQ(row, 0)):
                count[0] = tirx.Cast("int64", start[0])
    return builder.get()


# ---------------------------------------------------------------- MXNet's operators
# They follow MXNet's CPU code (`src/operator/contrib/multibox_detection.cc` and `bounding_box-inl.h`): candidates have
# descending scores, equal scores keep the order of the data, and the remaining rows are -1.


def _make_multibox_kernel(is_gpu: bool, operator: MultiboxDetection, *operands: Any) -> Any:
    (batch, n, columns), dtype = sizes = _list_extents(operands[0]), ir.dtype_of(operands[0])
    iterate = launch_threads if is_gpu else B.grid
    with _define("multibox_detection", operands, [sizes], sizes[0]) as (builder, buffers):
        rows, order, written, count, out = buffers

        def kept_count(b: Any) -> Any:
            return tirx.min(count[b], operator.top) if operator.top > 0 else count[b]

        def read(image: Any, row: Any) -> list[Any]:
            return [rows[image, row, column] for column in range(columns)]

        with iterate(batch, n, columns) as (b, i, c):
            out[b, i, c] = tirx.const(-1, dtype)
            with when(tirx.all(i < count[b], tirx.any(c > 0, not operator.suppresses))):
                # beyond the top k, candidates are unsorted, and MXNet removes only their class
                position = tirx.Select(i < kept_count(b), order[b, i], written[b, i])
                out[b, i, c] = rows[b, position, c]
        if operator.suppresses:
            overlap = functools.partial(_multibox_overlap, operator, dtype)
            kept, counts = _select_rows(is_gpu, order, kept_count, read, overlap)
            with iterate(batch, n) as (b, i), when(i < counts[b]):
                position = kept[b, i]
                out[b, position, 0] = rows[b, order[b, position], 0]
    return builder.get()


def _make_box_kernel(is_gpu: bool, operator: BoxNms, *operands: Any) -> Any:
    (batch, n, width), dtype = sizes = _list_extents(operands[0]), ir.dtype_of(operands[0])
    iterate = launch_threads if is_gpu else B.grid
    with _define("box_nms", operands, [sizes], sizes[0]) as (builder, buffers):
        rows, order, count, out = buffers

        def read(image: Any, row: Any) -> list[Any]:
            return _read_box([rows[image, row, c] for c in range(width)], operator, dtype)

        def kept_count(b: Any) -> Any:
            return tirx.min(count[b], operator.top)

        overlap = functools.partial(_box_overlap, operator, dtype)
        kept, counts = _select_rows(is_gpu, order, kept_count, read, overlap)
        with iterate(batch, n, width) as (b, i, c):
            out[b, i, c] = tirx.const(-1, dtype)
            with when(i < counts[b]):
                out[b, i, c] = rows[b, order[b, kept[b, i]], c]
    return builder.get()


def _select_rows(
    is_gpu: bool,
    order: Any,
    count: Callable[[Any], Any],
    read: Callable[[Any, Any], list[Any]],
    overlap: Callable[[list[Any], list[Any]], list[Any]],
) -> tuple[Any, Any]:
    """Emit the greedy selection among the first `count` rows of each image, in the order `order`.

    Returns what `_Groups.emit_selection` returns. `read` returns a row's compared values; the later of two rows is
    removed if all conditions of `overlap` are true.
    """
    batch, n = order.shape
    if is_gpu:
        groups = _Groups(
            groups=int(batch),
            images=int(batch),
            boxes=int(n),
            box=lambda b, i: order[b, i],
            may_keep=lambda b, i, _: i < count(b),
            overlap=lambda b, i, j: tirx.all(*overlap(read(b, i), read(b, j))),
        )
        return groups.emit_selection()
    kept, counts = _allocate((batch, n), "int32"), _allocate((batch,), "int32")
    removed = _allocate((n,), "int32")
    with B.serial(batch) as b:
        counts[b] = T.int32(0)
        values = read(b, order[b, 0])
        compared = _allocate((n, len(values)), str(values[0].ty.dtype))
        with B.serial(count(b)) as i:
            removed[i] = T.int32(0)
            for position, value in enumerate(read(b, order[b, i])):
                compared[i, position] = value

        def find(i: Any) -> list[Any]:
            return [compared[i, position] for position in range(len(values))]

        with B.serial(count(b)) as i, when(tirx.EQ(removed[i], 0)):
            kept[b, counts[b]] = i
            counts[b] = counts[b] + 1
            with B.serial(count(b) - i - 1) as k, ExitStack() as guard:
                j = B.Bind(i + 1 + k)
                for condition in (tirx.EQ(removed[j], 0), *overlap(find(i), find(j))):
                    guard.enter_context(when(condition))
                removed[j] = T.int32(1)
    return kept, counts
