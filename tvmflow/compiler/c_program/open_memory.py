"""The memory of a program with open sizes: C code that computes sizes and offsets.

The code runs when a dimension changes. A plan for one size of each dimension says which tensor lies below which. With other sizes, a tensor begins where
all of those end: so none that live at the same time overlap, and the order fits all sizes about as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tvmflow.compiler.c_program.parallel_work import (
    MAX_TASKS,
    PROGRAM_OPERATIONS,
    TASK_OPERATIONS,
    OpenWork,
    ParallelWork,
)
from tvmflow.core.dimensions import Language, find_bounds, substitute, write_code
from tvmflow.core.errors import StageError
from tvmflow.core.generated_text import c_string
from tvmflow.core.types import Dimension, Size
from tvmflow.targets.linking import padded

# More operations than this take minutes: their number says no more about threads.
_MAX_OPERATIONS: Final = 1 << 50


def multiply(*sizes: Size) -> Size:
    """Return the product of sizes, with one number at most.

    >>> multiply(4, "seq", 3, "h + 1"), multiply(4, 3)
    ('12 * seq * (h + 1)', 12)
    """
    number = 1
    factors: list[Size] = []
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            factors.append(f"({size})")
    if not factors or number == 0:
        return number
    named = {f"f{index}": str(factor) for index, factor in enumerate(factors)}
    return substitute(" * ".join([*([str(number)] if number != 1 else []), *named]), named)


class Values:
    """The numbers that a context computes when a dimension changes: `v[0]`, `v[1]`, … in C.

    The first ones are the dimensions.

    Args:
        dimensions: The dimensions.

    Attributes:
        lines: The C code that computes the others.
    """

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        self._bounds = {entry.name: (entry.min, entry.max) for entry in dimensions}
        places = {entry.name: f"v[{index}]" for index, entry in enumerate(dimensions)}
        self._codes: dict[Size, str] = dict(places.items())
        self._language = Language(
            name=lambda name: places[name],
            divide="tf_divide({a}, {b})",
            remainder="tf_remainder({a}, {b})",
            least="tf_least({a}, {b})",
            largest="tf_largest({a}, {b})",
        )
        self.count = len(places)
        self.lines: list[str] = []

    def find_largest(self, size: Size) -> int:
        """Return a number that a size is never above.

        Raises:
            WrongSize: when it does not fit 64 bits.
        """
        return max(find_bounds(size, self._bounds)[1], 0)

    def may_be_negative(self, size: Size) -> bool:
        """Return whether a size is not known to be at least 0; errors are those of `find_largest`."""
        return find_bounds(size, self._bounds)[0] < 0

    def code(self, size: Size) -> str:
        """Return the C code of a size where the values are known."""
        if isinstance(size, int):
            return str(size)
        if size not in self._codes:
            self.find_largest(size)
            self._codes[size] = self.add(write_code(size, self._language))
        return self._codes[size]

    def add(self, code: str) -> str:
        """Return the C code of another value, of which this is the code that computes it."""
        place = f"v[{self.count}]"
        self.lines.append(f"{place} = {code};")
        self.count += 1
        return place


def largest(codes: Iterable[str]) -> str:
    """Return the C code of the largest of some values; 0 for none."""
    result = ""
    for code in codes:
        result = f"tf_largest({result}, {code})" if result else code
    return result or "0"


def padded_code(values: Values, size: Size) -> str:
    """Return the C code of the bytes that a tensor takes with what lies before the next one."""
    return str(padded(size)) if isinstance(size, int) else f"tf_pad({values.code(size)})"


def place_tensors(
    sizes: Sequence[Size], below: Sequence[Sequence[int]], values: Values
) -> tuple[list[str], str, int]:
    """Return the C code of the offset of each tensor, of the size of the arena, and the largest one.

    Args:
        sizes: The size of each tensor in bytes.
        below: The tensors that each one lies above; all of them come before it.
        values: Takes the code.
    """
    offsets: list[str] = []
    ends: list[str] = []
    limits: list[int] = []
    for size, others in zip(sizes, below, strict=True):
        code = largest(ends[other] for other in others)
        offsets.append(code if code.isdigit() else values.add(code))
        end = padded_code(values, size)
        ends.append(_sum(offsets[-1], end))
        start = max((limits[other] for other in others), default=0)
        limits.append(start + padded(values.find_largest(size)))
    covered = {other for others in below for other in others}
    tops = [end for index, end in enumerate(ends) if index not in covered]
    return offsets, largest(tops), max(limits, default=0)


def _sum(left: str, right: str) -> str:
    if left.isdigit() and right.isdigit():
        return str(int(left) + int(right))
    return right if left == "0" else f"{left} + {right}"


def reduce_order(order: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return which tensors each one lies above, without those that lie below another one of them.

    >>> reduce_order([[], [0], [0, 1]])
    [[], [0], [1]]
    """
    reached: list[int] = []
    reduced = []
    for others in order:
        kept: list[int] = []
        covered = 0
        for other in sorted(others, reverse=True):
            if not covered >> other & 1:
                kept.append(other)
                covered |= 1 << other | reached[other]
        reached.append(covered)
        reduced.append(sorted(kept))
    return reduced


def write_tasks(
    place: int,
    work: ParallelWork,
    open_work: Sequence[OpenWork],
    sizes: Mapping[str, Size],
    values: Values,
) -> tuple[str, int]:
    """Return the C code that computes the useful tasks of a call, and the most of them.

    Args:
        place: The number of the call.
        work: The work of its kernel, if all of that is of fixed sizes.
        open_work: The work of its kernel otherwise.
        sizes: The sizes that the call gives to its kernel.
        values: Knows the sizes.
    """
    if not open_work:
        most = work.useful_tasks
        operations, loops = str(min(work.operations, _MAX_OPERATIONS)), str(int(work.loops))
    else:
        terms = list(_list_terms(open_work, sizes, values))
        operations = " + ".join(term[0] for term in terms if term[0]) or "0"
        loops = " + ".join(term[1] for term in terms if term[1]) or "0"
        limit = sum(term[2] for term in terms)
        if limit > _MAX_OPERATIONS:
            operations, limit = str(_MAX_OPERATIONS), _MAX_OPERATIONS
        most = min(max(limit // TASK_OPERATIONS, 1), MAX_TASKS)
    return f"tasks[{place}] = tf_count_tasks({operations}, {loops}, &work);", most


def _list_terms(
    open_work: Sequence[OpenWork], sizes: Mapping[str, Size], values: Values
) -> Iterator[tuple[str, str, int]]:
    """Yield the code of operations, of loops, and the most operations of each part of the work of a call."""
    for part in open_work:
        extents = multiply(*(substitute(extent, sizes) for extent in part.extents))
        count = values.code(extents)
        limit = values.find_largest(multiply(part.operations, extents))
        yield (
            f"{part.operations} * (int64_t){count}" if part.operations else "",
            f"{part.loops} * (int64_t){count}" if part.loops else "",
            limit,
        )


def write_dimensions(dimensions: Sequence[Dimension]) -> list[str]:
    """Return the C code of the ranges of dimensions."""
    rows = [
        f"    {{{c_string(entry.name)}, {entry.min}, {entry.max}, {entry.multiple_of}}},"
        for entry in dimensions
    ]
    return [
        "static const tf_dimension tf_dimensions[] = {",
        *rows,
        "    {NULL, 0, 0, 0},",
        "};",
    ]


def write_shapes(name: str, shapes: Sequence[Sequence[Size]], values: Values) -> list[str]:
    """Return a C function that writes the shape of a tensor."""
    lines = [
        f"static void {name}(const int64_t *v, size_t tensor, int64_t *shape) {{",
        "  (void)v;",
    ]
    lines.append("  switch (tensor) {")
    for index, shape in enumerate(shapes):
        lines.append(f"    case {index}:")
        lines += [f"      shape[{axis}] = {values.code(size)};" for axis, size in enumerate(shape)]
        lines.append("      break;")
    return [*lines, "    default:", "      (void)shape;", "  }", "}"]


def write_axes(shapes: Sequence[Sequence[Size]], dimensions: Sequence[Dimension]) -> list[str]:
    """Return the C code that says which dimension, if any, each axis of each input has."""
    places = {entry.name: index for index, entry in enumerate(dimensions)}
    lines = [
        f"static const int tf_axes{index}[] = {{{', '.join(str(places.get(str(size), -1)) for size in shape) or '-1'}}};"
        for index, shape in enumerate(shapes)
    ]
    names = ", ".join([*(f"tf_axes{index}" for index in range(len(shapes))), "NULL"])
    return [*lines, f"static const int *const tf_input_axes[] = {{{names}}};"]


def check_memory(bytes_: int, address_bits: int, causes: Iterable[Any]) -> None:
    """Check that programs can address the memory of a model with the largest sizes.

    Raises:
        StageError: when they cannot; it names the dimensions.
    """
    if bytes_ <= 1 << (address_bits - 2):
        return
    names = " and ".join(dict.fromkeys(map(str, causes)))
    raise StageError(
        f"with the largest sizes, the model takes {bytes_:,} bytes of memory, more than programs of {address_bits} bits "
        f"can use for it, because of {names}",
        fix=f"choose a smaller `max` of {names} in `dimensions`",
    )


def task_constants() -> list[str]:
    """Return the C code of the limits by which a loop is divided into tasks."""
    return [
        f"#define TF_TASK_OPERATIONS {TASK_OPERATIONS}",
        f"#define TF_PROGRAM_OPERATIONS {PROGRAM_OPERATIONS}",
        f"#define TF_MAX_TASKS {MAX_TASKS}",
    ]
