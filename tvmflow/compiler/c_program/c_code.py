"""The C code of a program: direct calls of kernels, and the memory of dynamic shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.prim.expr import BinaryOpExpr

from tvmflow.compiler.c_program.c_kernels import named_size_text
from tvmflow.compiler.c_program.program import (
    Branch,
    Copy,
    KernelCall,
    Program,
    Step,
    Storage,
    list_kernel_calls,
    multiply,
)
from tvmflow.core.dimensions import (
    Language,
    WrongSize,
    find_axes,
    find_bounds,
    list_names,
    substitute,
    write_code,
)
from tvmflow.core.errors import StageError
from tvmflow.core.generated_text import c_string
from tvmflow.core.types import Dimension, Size
from tvmflow.graph.dynamic_shapes import NoSize, list_symbols
from tvmflow.graph.ir import operator_name
from tvmflow.targets.c_runtime.isa_levels import constant_place
from tvmflow.targets.linking import padded


class KernelTraits(NamedTuple):
    """A kernel's symbol in C, its work in parallel loops, and the bytes of its scratch memory.

    With dynamic shapes, work and scratch memory are expressions of the kernel's size arguments, named in `sizes`.
    `failure` is the error message for an operand with a wrong value; empty if the kernel checks none.
    """

    symbol: str
    work: tuple[ParallelWork, ...]
    scratch: Size
    sizes: tuple[str, ...] = ()
    failure: str = ""


def place_constants(program: Program) -> list[int]:
    """Return the offset of each constant in the file of constants, followed by the size of the file."""
    return [0, *accumulate(padded(array.nbytes) for array in program.constants)]


def generate_code(
    program: Program, kernels: Mapping[str, KernelTraits], prefix: str, address_bits: int = 64
) -> str:
    """Return the C code of a program; StageError if memory for the largest sizes is not addressable."""
    if not program.dimensions:
        return Writer(program, kernels, prefix).write()
    try:
        return _DynamicWriter(program, kernels, prefix, address_bits).write()
    except WrongSize as error:
        raise StageError(
            f"this model has a size that a library cannot compute: {error}",
            fix="choose a smaller `max` in `dimensions`",
        ) from error


def _define_sizes(direction: str, sizes: Sequence[int]) -> list[str]:
    return [f"#define TF_{direction}_BYTES{index} {size}u" for index, size in enumerate(sizes)]


class Writer:
    """Writes the C code of a program of fixed sizes."""

    def __init__(self, program: Program, kernels: Mapping[str, KernelTraits], prefix: str) -> None:
        self._program = program
        self._kernels = kernels
        self._prefix = prefix
        self._offsets = place_constants(program)
        self._numbers: dict[str, int] = {}
        self._arities: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._tasks = count_useful_tasks(
            {name: kernel.work for name, kernel in kernels.items()},
            [name for name in list_kernel_calls(program.steps) if name in kernels],
        )

    def write(self) -> str:
        """Return the code."""
        program, kernels = self._program, self._kernels
        steps = self._write_steps(program.steps, "  ")
        declarations = []
        for name, arity in self._arities.items():
            types = ["void *"] * arity + ["int64_t"] * len(kernels[name].sizes)
            declarations.append(f"int32_t {kernels[name].symbol}({', '.join(types) or 'void'});")
        failures = ", ".join(map(c_string, self._failures))
        weights = f"{self._prefix}weights"
        has_symbol = program.has_placed_constants
        return "\n".join(
            (
                *([f"#define TF_WEIGHTS {weights}"] if has_symbol else []),
                *self._write_memory(),
                *_define_sizes("INPUTS", list(map(self._largest_size, program.inputs))),
                *_define_sizes("OUTPUTS", list(map(self._largest_size, program.outputs))),
                *self._write_counts(),
                *self._write_plan(),
                *([f"#define TF_FAILURES {failures}"] if failures else []),
                "",
                f"extern const unsigned char {weights if has_symbol else 'TF_WEIGHTS'}[];",
                *declarations,
                "",
                "static const char *const tf_kernel_names[TF_KERNELS + 1] = {",
                *(f'    "{name}",' for name in self._numbers),
                "    NULL,",
                "};",
                "",
                "static int tf_steps(tf_context *tf, unsigned char *arena, const unsigned char *weights,",
                "                    unsigned char *const *in, unsigned char *const *out) {",
                "  TF_BEGIN(tf, arena, weights, in, out);",
                *self._write_start(),
                *steps,
                "  return 0;",
                "}",
                "",
            )
        )

    def _write_memory(self) -> list[str]:
        program, kernels = self._program, self._kernels
        staging = sum(padded(storage.bytes) for storage in (*program.inputs, *program.outputs))
        scratch = max((int(kernel.scratch) for kernel in kernels.values()), default=0)
        return [
            f"#define TF_ARENA {program.arena}u",
            f"#define TF_STAGING {staging}u",
            f"#define TF_SCRATCH {scratch}u",
            f"#define TF_KERNELS {len(self._numbers)}u",
            f"#define TF_MOST_TASKS {max(self._tasks.values(), default=1)}u",
        ]

    def _largest_size(self, storage: Storage) -> int:
        return storage.bytes

    def _write_plan(self) -> list[str]:
        return []

    def _write_start(self) -> list[str]:
        return []

    def _write_counts(self) -> list[str]:
        """Return the table of the outputs that have a count; the counts themselves are the last outputs."""
        entries = {entry.output: entry for entry in self._program.counts}
        described = self._program.count_described()
        rows = [
            f"{{{entry.axis}, {entry.count_index}}}" if (entry := entries.get(index)) else "{-1, 0}"
            for index in range(described)
        ]
        return [
            f"#define TF_COUNTS {len(self._program.outputs) - described}u",
            f"static const tf_output_count tf_output_counts[] = {{{', '.join([*rows, '{-1, 0}'])}}};",
        ]

    def _write_steps(self, steps: Sequence[Step], indent: str) -> list[str]:
        return [line for step in steps for line in self._write_step(step, indent)]

    def _write_step(self, step: Step, indent: str) -> list[str]:
        if isinstance(step, Copy):
            target, source = self._address(step.target), self._address(step.source)
            if step.offset:
                target += f" + {self._bytes(step.offset)}"
            return [f"{indent}memcpy({target}, {source}, {self._size(step.source)});"]
        if isinstance(step, Branch):
            condition = f"*(const unsigned char *)({self._address(step.condition)})"
            return [
                f"{indent}if ({condition}) {{",
                *self._write_steps(step.if_true, f"{indent}  "),
                f"{indent}}} else {{",
                *self._write_steps(step.if_false, f"{indent}  "),
                f"{indent}}}",
            ]
        return [f"{indent}{self._write_call(step)}"]

    def _write_call(self, call: KernelCall) -> str:
        kernel = self._kernels[call.kernel]
        number = self._numbers.setdefault(call.kernel, len(self._numbers))
        self._arities[call.kernel] = len(call.tensors)
        arguments = [f"(void *)({self._address(tensor)})" for tensor in call.tensors]
        arguments += self._list_sizes(call)
        text = f"TF_CALL({number}, {self._count_tasks(call)}, {kernel.symbol}({', '.join(arguments)}));"
        if not kernel.failure:
            return text
        failure = self._failures.setdefault(kernel.failure, len(self._failures))
        return f"{text} TF_CHECK({failure}, {self._address(call.tensors[-1])});"

    def _list_sizes(self, _call: KernelCall) -> list[str]:
        return []

    def _count_tasks(self, call: KernelCall) -> str:
        return str(self._tasks[call.kernel])

    def _size(self, storage: Storage) -> str:
        return self._bytes(storage.size)

    def _bytes(self, size: Size) -> str:
        return f"{size}u"

    def _address(self, storage: Storage) -> str:
        storage = storage.resolve()
        if storage.scope == "input":
            return f"in[{storage.index}]"
        if storage.scope == "output":
            return f"out[{storage.index}]"
        if storage.scope == "constant":
            if not self._program.has_placed_constants:
                return f"weights + {constant_place(storage.index)}"
            return f"weights + {self._offsets[storage.index]}u"
        return self._place_in_arena(storage)

    def _place_in_arena(self, storage: Storage) -> str:
        return f"arena + {storage.offset}u"


class _DynamicWriter(Writer):
    """Writes the C code of a program with dynamic dimensions: a context computes sizes and offsets."""

    def __init__(
        self, program: Program, kernels: Mapping[str, KernelTraits], prefix: str, address_bits: int
    ) -> None:
        super().__init__(program, kernels, prefix)
        self._address_bits = address_bits
        self._values = Values(program.dimensions)
        self._calls: list[str] = []
        self._most_tasks = 1
        self._scratch: dict[Size, None] = {}
        tensors = list(program.above)
        indices = {storage: index for index, storage in enumerate(tensors)}
        order = [[indices[other] for other in program.above[storage]] for storage in tensors]
        offsets, self._arena, self._largest_arena = place_tensors(
            [storage.size for storage in tensors], reduce_order(order), self._values
        )
        self._arena_offsets = dict(zip(tensors, offsets, strict=True))

    def _largest_size(self, storage: Storage) -> int:
        return self._values.find_largest(storage.size)

    def _write_memory(self) -> list[str]:
        return [f"#define TF_KERNELS {len(self._kernels)}u"]

    def _write_plan(self) -> list[str]:
        program, values = self._program, self._values
        # states to which steps append are always aligned, so they need no staging copy
        appended = [s.resolve() for state in program.appended for s in (state.before, state.after)]
        outer = [s for s in (*program.inputs, *program.outputs) if s not in appended]
        staging = " + ".join(padded_code(values, storage.size) for storage in outer)
        largest_staging = sum(padded(values.find_largest(storage.size)) for storage in outer)
        scratch = largest(map(values.code, self._scratch))
        largest_scratch = max(map(values.find_largest, self._scratch), default=0)
        self._check_memory(self._largest_arena + largest_staging + largest_scratch)
        negative = [
            f"{values.code(size)} < 0"
            for size in sorted(program.axes)
            if values.find_least(size) < 0
        ]
        sizes = [
            f"  memory->{name}[{index}] = (size_t){values.code(storage.size)};"
            for name, storages in (
                ("inputs", program.inputs),
                ("outputs", program.outputs[: program.count_described()]),
            )
            for index, storage in enumerate(storages)
        ]
        shapes = [
            *write_shapes("tf_input_shape", program.input_shapes, values),
            *write_shapes("tf_output_shape", program.output_shapes, values),
        ]
        known = [entry.name for entry in program.dimensions]
        input_axes = [find_axes(shape, known) for shape in program.input_shapes]
        axes_names = ", ".join([*(f"tf_axes{index}" for index in range(len(input_axes))), "NULL"])
        return [
            f"#define TF_VALUES {values.count}u",
            f"#define TF_CALLS {len(self._calls)}u",
            f"#define TF_MOST_TASKS {self._most_tasks}u",
            f"#define TF_LARGEST_TENSORS {self._largest_arena + largest_staging}u",
            f"#define TF_LARGEST_SCRATCH {largest_scratch}u",
            f"#define TF_MAX_RANK {max(1, *map(len, program.output_shapes))}u",
            f'_Static_assert(TF_DIMENSIONS == {len(program.dimensions)}, "the signature has others");',
            *self._write_appended(),
            # the limits that decide into how many tasks a loop is divided
            f"#define TF_TASK_OPERATIONS {_TASK_OPERATIONS}",
            f"#define TF_PROGRAM_OPERATIONS {_PROGRAM_OPERATIONS}",
            f"#define TF_MAX_TASKS {_MAX_TASKS}",
            "",
            "static const tf_dimension tf_dimensions[] = {",
            *(
                f"    {{{c_string(entry.name)}, {entry.min}, {entry.max}, {entry.multiple_of}}},"
                for entry in program.dimensions
            ),
            "    {NULL, 0, 0, 0},",
            "};",
            # the dimension of each axis of each input (see `find_axes`)
            *(
                f"static const int tf_axes{index}[] = {{{', '.join(map(str, axes)) or '-1'}}};"
                for index, axes in enumerate(input_axes)
            ),
            f"static const int *const tf_input_axes[] = {{{axes_names}}};",
            "",
            "/* Computes all values from the first ones, the dimensions. False where a tensor would have less than nothing. */",
            "static bool tf_plan(int64_t *v, uint32_t *tasks, tf_memory *memory) {",
            "  int64_t work = 0;",
            *(f"  {line}" for line in values.lines),
            f"  if ({' || '.join(negative) or 'false'}) return false;",
            f"  memory->arena = (uint64_t)({self._arena});",
            f"  memory->staging = (uint64_t)({staging or '0'});",
            f"  memory->scratch = (uint64_t)({scratch});",
            *sizes,
            *(f"  {line}" for line in self._calls),
            "  tf_choose_tasks(tasks, TF_CALLS, work);",
            "  return true;",
            "}",
            "",
            *shapes,
        ]

    def _check_memory(self, size: int) -> None:
        """Raise StageError if a program cannot address the memory that the largest sizes need."""
        if size <= 1 << (self._address_bits - 2):
            return
        program = self._program
        tensors = (*program.above, *program.outputs, *program.inputs)
        largest_size = max((tensor.size for tensor in tensors), key=self._values.find_largest)
        names = " and ".join(list_names(largest_size))
        raise StageError(
            f"with the largest sizes, the model takes {size:,} bytes of memory, more than programs of {self._address_bits} bits "
            f"can use for it, because of {names}",
            fix=f"choose a smaller `max` of {names} in `dimensions`",
        )

    def _write_appended(self) -> list[str]:
        """Return the C table of the states to which steps append; empty for a program without them."""
        program = self._program
        pairs = [(state.before.index, state.after.resolve().index) for state in program.appended]
        if not pairs:
            return []
        rows = [
            f"{{{before}, {after}, {state.outer}, {state.row}}}"
            for (before, after), state in zip(pairs, program.appended, strict=True)
        ]
        flags = [
            ", ".join(str(int(index in indices)) for index in range(count))
            for indices, count in zip(
                zip(*pairs, strict=True),
                (len(program.inputs), program.count_described()),
                strict=True,
            )
        ]
        return [
            "#define TF_APPENDED_STATES",
            f"static const tf_appended tf_appended_states[] = {{{', '.join(rows)}}};",
            f"static const bool tf_appends_to[] = {{{flags[0]}}};",
            f"static const bool tf_is_appended[] = {{{flags[1]}}};",
        ]

    def _write_start(self) -> list[str]:
        return ["  const int64_t *v = tf->values;", "  (void)v;"]

    def _list_sizes(self, call: KernelCall) -> list[str]:
        return [
            f"INT64_C({size})" if isinstance(size, int) else self._values.code(size)
            for size in call.sizes
        ]

    def _count_tasks(self, call: KernelCall) -> str:
        kernel = self._kernels[call.kernel]
        sizes = dict(zip(kernel.sizes, call.sizes, strict=True))
        number = len(self._calls)
        line, most = write_tasks(number, kernel.work, sizes, self._values)
        self._calls.append(line)
        self._most_tasks = max(self._most_tasks, most)
        self._scratch[substitute(kernel.scratch, sizes)] = None
        return f"tf->useful[{number}]"

    def _bytes(self, size: Size) -> str:
        return f"(size_t){self._values.code(size)}"

    def _place_in_arena(self, storage: Storage) -> str:
        return f"arena + {self._arena_offsets[storage]}"


# ---------------------------------------------------------------- memory of dynamic shape
# C code that computes sizes and offsets when a dimension changes. The plan at the tuning sizes fixes the order of the
# tensors in memory. With other sizes, each tensor begins where the last of the tensors below it ends: none overlap.

# This many operations take minutes; a larger count would not change the number of threads.
_MAX_OPERATIONS: Final = 1 << 50


class Values:
    """The values `v[0]`, `v[1]`, … of a context in C: dimensions, then values that `lines` compute."""

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        self._bounds = {entry.name: (entry.min, entry.max) for entry in dimensions}
        variables = {entry.name: f"v[{index}]" for index, entry in enumerate(dimensions)}
        self._codes: dict[Size, str] = dict(variables.items())
        self._language = Language(
            name=variables.__getitem__,
            divide="tf_divide({a}, {b})",
            remainder="tf_remainder({a}, {b})",
            least="tf_least({a}, {b})",
            largest="tf_largest({a}, {b})",
        )
        self.count = len(variables)
        self.lines: list[str] = []

    def find_largest(self, size: Size) -> int:
        """Return an upper bound of a size; WrongSize if it does not fit 64 bits."""
        return max(find_bounds(size, self._bounds)[1], 0)

    def find_least(self, size: Size) -> int:
        """Return a lower bound of a size; errors are those of `find_largest`."""
        return find_bounds(size, self._bounds)[0]

    def code(self, size: Size) -> str:
        """Return the C code that reads a size, an integer or one of the values."""
        if isinstance(size, int):
            return str(size)
        if size not in self._codes:
            self.find_largest(size)
            self._codes[size] = self.add(write_code(size, self._language))
        return self._codes[size]

    def add(self, code: str) -> str:
        """Add a value that this C code computes; return the C code that reads it."""
        variable = f"v[{self.count}]"
        self.lines.append(f"{variable} = {code};")
        self.count += 1
        return variable


def largest(codes: Iterable[str]) -> str:
    """Return the C code of the maximum of some values; `0` if there are none."""
    result = ""
    for code in codes:
        result = f"tf_largest({result}, {code})" if result else code
    return result or "0"


def padded_code(values: Values, size: Size) -> str:
    """Return the C code of a tensor's bytes, including the padding before the next tensor."""
    return str(padded(size)) if isinstance(size, int) else f"tf_pad({values.code(size)})"


def place_tensors(
    sizes: Sequence[Size], below: Sequence[Sequence[int]], values: Values
) -> tuple[list[str], str, int]:
    """Return the C code of each tensor's offset, the C code of the arena's size, and its maximum size.

    Sizes are in bytes. `below[i]` has the indices of the tensors that lie below tensor i in the arena; all are less
    than i.
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
    """Return, for each tensor, the tensors directly below it (the transitive reduction of `order`).

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
    number: int, work: Sequence[ParallelWork], sizes: Mapping[str, Size], values: Values
) -> tuple[str, int]:
    """Return C code that computes the number of tasks for a kernel call, and this number's maximum."""
    if not sizes:
        most = count_tasks(work)
        operations, loops = str(min(_count(work)[0], _MAX_OPERATIONS)), str(_count(work)[1])
    else:
        limit = 0
        terms: tuple[list[str], list[str]] = [], []
        for part in work:
            extents = multiply(*(substitute(extent, sizes) for extent in part.extents))
            count = values.code(extents)
            limit += values.find_largest(multiply(part.operations, extents))
            for own, factor in zip(terms, (part.operations, part.loops), strict=True):
                own += [f"{factor} * (int64_t){count}"] if factor else []
        operations, loops = (" + ".join(own) or "0" for own in terms)
        if limit > _MAX_OPERATIONS:
            operations, limit = str(_MAX_OPERATIONS), _MAX_OPERATIONS
        most = min(max(limit // _TASK_OPERATIONS, 1), _MAX_TASKS)
    return f"tasks[{number}] = tf_count_tasks({operations}, {loops}, &work);", most


def write_shapes(name: str, shapes: Sequence[Sequence[Size]], values: Values) -> list[str]:
    """Return a C function that writes the shape of a tensor."""
    lines = [
        f"static void {name}(const int64_t *v, size_t tensor, int64_t *shape) {{",
        "  (void)v;",
        "  switch (tensor) {",
    ]
    for index, shape in enumerate(shapes):
        lines.append(f"    case {index}:")
        lines += [f"      shape[{axis}] = {values.code(size)};" for axis, size in enumerate(shape)]
        lines.append("      break;")
    return [*lines, "    default:", "      (void)shape;", "  }", "}"]


# ---------------------------------------------------------------- work in parallel loops
# The number of threads for a kernel call. Passing a part of a loop to a spinning thread takes tenths of a microsecond,
# waking a sleeping thread several. So short loops, and programs with only short loops, run on the caller's thread.

# Vector operations and loads of a fast core in a nanosecond: 30 were measured in matmuls whose data are in the caches,
# 5 to 10 where kernels wait for memory.
_OPERATIONS_PER_NS: Final = 16
# The cost of a call of a math function such as erf, in operations.
_CALL_OPERATIONS: Final = 16
_LANES: Final = 16
_UNKNOWN_EXTENT: Final = 8
# The assumed cost of a call of a user's C function: large, because its author asked for threads.
_EXTERN_OPERATIONS: Final = 1 << 17

# The minimum work of a task, and the minimum work of a program for which other threads are woken.
_MIN_TASK_NS: Final = 2_500
_MIN_PROGRAM_NS: Final = 100_000
_MAX_TASKS: Final = 1024
_TASK_OPERATIONS: Final = _MIN_TASK_NS * _OPERATIONS_PER_NS
_PROGRAM_OPERATIONS: Final = _MIN_PROGRAM_NS * _OPERATIONS_PER_NS


class ParallelWork(NamedTuple):
    """A part of a kernel's work in parallel loops: operations and loop starts, to multiply by `extents`."""

    extents: tuple[str, ...]
    operations: int
    loops: int


def estimate_parallel_work(
    function: tirx.PrimFunc, names: Mapping[Any, str]
) -> tuple[ParallelWork, ...]:
    """Return the work of a scheduled kernel in parallel loops; `names` are those of its dynamic sizes."""
    work = _count_operations(function.body, _Repeats(1.0), names, is_parallel=False)
    return tuple(ParallelWork(key, int(total), int(loops)) for key, (total, loops) in work.items())


def _count(work: Sequence[ParallelWork]) -> tuple[int, int]:
    """Return the operations of a kernel of fixed sizes, and how often its parallel loops start."""
    return sum(part.operations for part in work), sum(part.loops for part in work)


def count_tasks(work: Sequence[ParallelWork]) -> int:
    """Return the number of tasks for each parallel loop of a kernel of fixed sizes; 1 for short loops."""
    operations, loops = _count(work)
    ns = operations / _OPERATIONS_PER_NS / max(loops, 1)
    return min(max(int(ns / _MIN_TASK_NS), 1), _MAX_TASKS)


def count_useful_tasks(
    works: Mapping[str, Sequence[ParallelWork]], calls: Iterable[str]
) -> dict[str, int]:
    """Return the number of tasks for each kernel's parallel loops; 1 where threads do not pay off.

    >>> works = {"dense": [ParallelWork((), 1_920_000, 1)], "gru": [ParallelWork((), 960_000, 50)]}
    >>> count_useful_tasks(works, ["dense", "gru"])
    {'dense': 48, 'gru': 1}
    >>> count_useful_tasks({"dense": [ParallelWork((), 320_000, 1)]}, ["dense", "dense"])
    {'dense': 1}
    """
    tasks = {name: count_tasks(work) for name, work in works.items()}
    operations = sum(_count(works[name])[0] for name in calls if tasks[name] > 1)
    return tasks if operations >= _PROGRAM_OPERATIONS else dict.fromkeys(tasks, 1)


class _Repeats(NamedTuple):
    """How often a statement runs: a constant factor times the extents that are dynamic."""

    times: float
    extents: tuple[str, ...] = ()

    def inside(self, extent: float | Size) -> _Repeats:
        if isinstance(extent, str):
            return _Repeats(self.times, tuple(sorted((*self.extents, extent))))
        return _Repeats(self.times * extent, self.extents)


# Dynamic extents, to be multiplied -> the operations in parallel loops, and the loop starts.
_Work = dict[tuple[str, ...], tuple[float, float]]


def _count_operations(
    body: Any, repeats: _Repeats, names: Mapping[Any, str], *, is_parallel: bool
) -> _Work:
    """Return the operations in parallel loops, and the loop starts, of a statement run `repeats` times."""
    work: _Work = {}

    def add(extents: tuple[str, ...], operations: float, loops: float) -> None:
        before = work.get(extents, (0.0, 0.0))
        work[extents] = (before[0] + operations, before[1] + loops)

    def visit_loop(loop: tirx.For) -> Any:
        extent = _read_extent(loop.extent, names)
        if loop.kind == tirx.ForKind.VECTORIZED and not isinstance(extent, str):
            extent = -(-extent // _LANES)
        is_first = loop.kind == tirx.ForKind.PARALLEL and not is_parallel
        inner = _count_operations(
            loop.body, repeats.inside(extent), names, is_parallel=is_parallel or is_first
        )
        for extents, (operations, loops) in inner.items():
            add(extents, operations, 0 if is_first else loops)
        if is_first:
            add(repeats.extents, 0, repeats.times)
        return tvm_ffi.WalkResult.SKIP

    def visit_store(store: tirx.BufferStore) -> Any:
        if is_parallel:
            add(repeats.extents, repeats.times * _cost_of(store.value), 0)
        return tvm_ffi.WalkResult.SKIP

    def visit_call(call: tvm.ir.Call) -> None:
        if is_parallel and operator_name(call) == "tirx.call_extern":
            add(repeats.extents, repeats.times * _EXTERN_OPERATIONS, 0)

    callbacks = ((tirx.For, visit_loop), (tirx.BufferStore, visit_store), (tvm.ir.Call, visit_call))
    tvm_ffi.structural_walk(body, callbacks, order="pre")
    return work


def _read_extent(extent: Any, names: Mapping[Any, str]) -> float | Size:
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    try:
        # an unknown extent depends on the variable of another loop
        is_known = set(list_symbols(extent)) <= names.keys()
        return named_size_text(extent, names) if is_known else _UNKNOWN_EXTENT
    except NoSize:
        return _UNKNOWN_EXTENT


def _cost_of(value: Any) -> int:
    cost = 1

    def visit(node: Any) -> Any:
        nonlocal cost
        is_call = isinstance(node, tvm.ir.Call)
        is_load = isinstance(node, tvm.ir.TensorLoad)
        cost += _CALL_OPERATIONS if is_call else is_load or isinstance(node, BinaryOpExpr)
        return tvm_ffi.WalkResult.SKIP if is_load else None

    tvm_ffi.structural_walk(value, (object, visit), order="pre")
    return cost
