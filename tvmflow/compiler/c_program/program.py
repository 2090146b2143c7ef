"""`main` of a lowered model as a list of steps over tensors whose places are planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.c_program.c_kernels import padded
from tvmflow.compiler.c_program.parallel_work import ParallelWork, count_useful_tasks
from tvmflow.compiler.counts import SIZES_NEEDED, OutputCount, read_counts
from tvmflow.core.errors import StageError

Array = np.ndarray[Any, Any]
Place = Literal["input", "output", "constant", "arena"]


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of a tensor, which views of it share.

    Attributes:
        place: What it is part of.
        bytes: Its size.
        index: The number of the input, output or constant.
        offset: Where it begins in the arena, in bytes.
        replacement: The storage that took its place.
    """

    place: Place
    bytes: int
    index: int = 0
    offset: int = 0
    replacement: Storage | None = None

    def resolve(self) -> Storage:
        """Return the storage that took its place last; itself if none did."""
        storage = self
        while storage.replacement is not None:
            storage = storage.replacement
        return storage


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel with pointers to its tensors: first the `inputs` ones that it reads."""

    kernel: str
    tensors: tuple[Storage, ...]
    inputs: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a whole tensor."""

    source: Storage
    target: Storage


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps for a condition, a tensor of one boolean, that is true, and for one that is false."""

    condition: Storage
    if_true: tuple[Step, ...]
    if_false: tuple[Step, ...]


Step = KernelCall | Copy | Branch


@dataclass(slots=True)
class Program:
    """A model as steps.

    Attributes:
        steps: The steps, in order.
        inputs: The inputs of the model.
        outputs: Its outputs: those of the steps, or in the order of `main`; then its counts.
        counts: The outputs that have a count.
        constants: The weights and other constants, each once.
        arena: The size of the memory for all other tensors, in bytes.
    """

    steps: tuple[Step, ...] = ()
    inputs: list[Storage] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)
    counts: tuple[OutputCount, ...] = ()
    constants: list[Array] = field(default_factory=list)
    arena: int = 0


Value = Any  # a Storage, or a tuple of values


def read_program(mod: tvm.IRModule, weights: Sequence[Array]) -> Program:
    """Return `main` of a lowered model as steps.

    Args:
        mod: The lowered module with scheduled kernels.
        weights: The weights that `main` takes after its inputs.

    Raises:
        UnsupportedProgram: It needs TVM's runtime.
    """
    mod = relax.transform.ToNonDataflow()(mod)
    try:
        return _Reader(mod).read(weights)
    except UnsupportedProgram as error:
        # what the frontend knows is closer to the user's model
        if known := (mod["main"].attrs or {}).get(SIZES_NEEDED):
            raise UnsupportedProgram(str(known)) from error
        raise


def check_program(mod: tvm.IRModule) -> None:
    """Check that a lowered model, scheduled or not, can become a C library.

    Raises:
        UnsupportedProgram: It needs TVM's runtime.
    """
    read_program(mod, [np.empty(0)] * len(ir.list_weights(mod["main"])))


def find_runtime(mod: tvm.IRModule, setting: str) -> tuple[str, str]:
    """Return the runtime of a lowered model: `c`, or `vm` and what made `auto` choose it."""
    if setting != "auto":
        return setting, ""
    try:
        check_program(mod)
    except UnsupportedProgram as error:
        return "vm", error.reason
    return "c", ""


class UnsupportedProgram(StageError):
    """A model does what a plain C library cannot.

    Attributes:
        reason: What it needs TVM's runtime for.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"this model needs TVM's runtime for {reason}",
            fix="leave c-library and cpp out of `outputs`, and choose `runtime: auto`. Instead of "
            "`verify.run_on: qemu`, which runs the C library, choose `verify.run_on: rpc`",
        )
        self.reason = reason


class _Reader:
    """Reads Relax functions; see `read_program`."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._program = Program()
        self._values: dict[Any, Value] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Storage] = {}
        self._is_view: dict[str, bool] = {}
        self._checked: set[str] = set()

    def read(self, weights: Sequence[Array]) -> Program:
        main = self._mod["main"]
        program = self._program
        program.counts = read_counts(main)
        first_weight = len(main.params) - len(weights)
        for index, param in enumerate(main.params[:first_weight]):
            storage = Storage("input", _bytes_of(param), index)
            program.inputs.append(storage)
            self._values[param] = storage
        for param, weight in zip(main.params[first_weight:], weights, strict=True):
            self._values[param] = self._add_constant(weight)
        steps: list[Step] = []
        result = self._read_sequence(main.body, steps)
        results = list(_flatten(result))
        program.outputs = [
            self._make_output(index, storage, steps) for index, storage in enumerate(results)
        ]
        program.steps = tuple(steps)
        return program

    def _make_output(self, index: int, source: Storage, steps: list[Step]) -> Storage:
        """Let a result be computed in an output's own memory, or copy it there."""
        output = Storage("output", source.bytes, index)
        source = source.resolve()
        if source.place == "arena":
            source.replacement = output
        else:
            steps.append(Copy(source, output))
        return output

    def _add_constant(self, array: Array) -> Storage:
        array = np.ascontiguousarray(array)
        small = array.tobytes() if array.nbytes <= _MAX_COMPARED else bytes(str(id(array)), "ascii")
        key = (str(array.dtype), array.shape, small)
        if key not in self._constants:
            self._constants[key] = Storage("constant", array.nbytes, len(self._program.constants))
            self._program.constants.append(array)
        return self._constants[key]

    def _read_sequence(self, sequence: relax.SeqExpr, steps: list[Step]) -> Value:
        for block in sequence.blocks:
            for binding in block.bindings:
                if not isinstance(binding, relax.VarBinding):
                    raise UnsupportedProgram("a cast of shapes")
                self._values[binding.var] = self._read_value(binding.value, steps)
        return self._read_value(sequence.body, steps)

    def _read_value(self, value: Any, steps: list[Step]) -> Value:
        if isinstance(value, relax.Var):
            return self._values[value]
        if isinstance(value, tvm.ir.Constant) or hasattr(value, "value"):
            return self._add_constant(value.value.numpy())
        if isinstance(value, relax.Tuple):
            return tuple(self._read_value(item, steps) for item in value.fields)
        if isinstance(value, relax.TupleGetItem):
            return self._read_value(value.tuple_value, steps)[value.index]
        if isinstance(value, relax.SeqExpr):
            return self._read_sequence(value, steps)
        if isinstance(value, relax.If):
            return self._read_if(value, steps)
        if isinstance(value, tvm.ir.Call):
            return self._read_call(value, steps)
        raise UnsupportedProgram(f"an expression of the kind {type(value).__name__}")

    def _read_if(self, value: relax.If, steps: list[Step]) -> Value:
        condition = self._read_value(value.cond, steps)
        sides: list[tuple[list[Step], Value]] = []
        for sequence in (value.true_branch, value.false_branch):
            branch: list[Step] = []
            sides.append((branch, self._read_sequence(sequence, branch)))
        (if_true, true_result), (if_false, false_result) = sides
        joined = [Storage("arena", storage.bytes) for storage in _flatten(true_result)]
        for branch, result in ((if_true, true_result), (if_false, false_result)):
            made = _written_by(branch)
            for source, target in zip(_flatten(result), joined, strict=True):
                source = source.resolve()
                if source in made and source is not target:
                    source.replacement = target
                    made.remove(source)
                elif source is not target:
                    branch.append(Copy(source, target))
        steps.append(Branch(condition, tuple(if_true), tuple(if_false)))
        return _unflatten(true_result, iter(joined))

    def _read_call(self, call: Any, steps: list[Step]) -> Value:
        if isinstance(call.op, tvm.ir.GlobalVar):
            return self._read_function(call, steps)
        name = str(getattr(call.op, "name", call.op))
        if name in _VIEWS:
            return self._read_value(call.args[0], steps)
        if name != "relax.call_tir":
            raise UnsupportedProgram(_describe(call, name))
        if len(call.args) > 2:
            raise UnsupportedProgram("shapes that are known only when it runs")
        kernel = call.args[0].name_hint
        self._check_kernel(call.args[0])
        inputs = tuple(_flatten(self._read_value(call.args[1], steps)))
        if self._views(call.args[0]):
            return inputs[0]
        is_tuple = isinstance(call.ty, relax.TupleType)
        types = list(call.ty.fields) if is_tuple else [call.ty]
        outputs = tuple(Storage("arena", _bytes_of_type(ty)) for ty in types)
        steps.append(KernelCall(kernel, inputs + outputs, len(inputs)))
        return outputs if is_tuple else outputs[0]

    def _read_function(self, call: Any, steps: list[Step]) -> Value:
        function = self._mod[call.op]
        arguments = [self._read_value(argument, steps) for argument in call.args]
        self._values.update(zip(function.params, arguments, strict=True))
        return self._read_sequence(function.body, steps)

    def _check_kernel(self, var: tvm.ir.GlobalVar) -> None:
        """Raise UnsupportedProgram where a kernel calls a function of TVM's runtime."""
        if var.name_hint in self._checked:
            return
        self._checked.add(var.name_hint)
        for call in ir.find_nodes(self._mod[var].body, tvm.ir.Call):
            if ir.operator_name(call) in _PACKED_CALLS:
                raise UnsupportedProgram(
                    f"the function {call.args[0].value}, which the kernel {var.name_hint} calls"
                )

    def _views(self, var: tvm.ir.GlobalVar) -> bool:
        """Return whether a kernel only copies its one input to its output, so that both can be one tensor."""
        name = var.name_hint
        if name not in self._is_view:
            function = self._mod[var]
            sizes = {prod(map(int, param.ty.shape)) for param in function.params}
            # A copy of the first elements, as of blocks without their padding, has that pattern too.
            self._is_view[name] = len(function.params) == 2 and (
                len(sizes) == 1 and bool(relax.analysis.has_reshape_pattern(function))
            )
        return self._is_view[name]


# Constants up to this size are compared, so that equal ones are stored once, in bytes.
_MAX_COMPARED: Final = 1 << 16
_PACKED_CALLS: Final = frozenset({"tirx.tvm_call_packed", "tirx.tvm_call_cpacked"})
_VIEWS: Final = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})


def list_kernel_calls(steps: Sequence[Step]) -> list[str]:
    """Return the names of the kernels that steps call, once for each call."""
    names: list[str] = []
    for step in steps:
        if isinstance(step, KernelCall):
            names.append(step.kernel)
        elif isinstance(step, Branch):
            names += list_kernel_calls(step.if_true) + list_kernel_calls(step.if_false)
    return names


def _written_by(steps: Sequence[Step]) -> set[Storage]:
    """Return the storages in the arena that steps write."""
    written: set[Storage] = set()
    for step in steps:
        if isinstance(step, KernelCall):
            written.update(storage.resolve() for storage in step.tensors[step.inputs :])
        elif isinstance(step, Copy):
            written.add(step.target.resolve())
        else:
            written |= _written_by(step.if_true) | _written_by(step.if_false)
    return written


def _flatten(value: Value) -> Iterator[Storage]:
    if isinstance(value, Storage):
        yield value
        return
    for item in value:
        yield from _flatten(item)


def _unflatten(like: Value, storages: Iterator[Storage]) -> Value:
    if isinstance(like, Storage):
        return next(storages)
    return tuple(_unflatten(item, storages) for item in like)


def _bytes_of(expr: Any) -> int:
    return _bytes_of_type(expr.ty)


def _bytes_of_type(ty: Any) -> int:
    shape = getattr(ty, "shape", None)
    extents = list(shape.values) if isinstance(shape, relax.ShapeExpr) else None
    if extents is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in extents):
        raise UnsupportedProgram("shapes that are known only when it runs")
    return prod(map(int, extents)) * _itemsize(str(ty.dtype.dtype))


def _itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    return 1 if dtype == "bool" else (np.dtype(dtype).itemsize if dtype != "bfloat16" else 2)


def _describe(call: Any, name: str) -> str:
    if "packed" in name and call.args and hasattr(call.args[0], "global_symbol"):
        return f"the function {call.args[0].global_symbol} of TVM's runtime"
    return f"the operator {name.removeprefix('relax.')}"


# ---------------------------------------------------------------- c code
# The C code of a program: its steps as direct calls of kernels.


class KernelTraits(NamedTuple):
    """The needs of a call of a kernel.

    Attributes:
        symbol: Its name in C.
        work: Its work in parallel loops.
        scratch: The bytes of memory that it allocates.
    """

    symbol: str
    work: ParallelWork
    scratch: int


def place_constants(program: Program) -> list[int]:
    """Return the offset of each constant in the file of constants, and that file's size as the last one."""
    return [0, *accumulate(padded(array.nbytes) for array in program.constants)]


def generate_code(program: Program, kernels: Mapping[str, KernelTraits], prefix: str) -> str:
    """Return the C code of a program.

    Args:
        program: The program, with planned memory.
        kernels: The traits of the kernels that it calls, by name.
        prefix: The prefix of the library's symbols.
    """
    return _Writer(program, kernels, prefix).write()


def _define_sizes(direction: str, storages: Sequence[Storage]) -> list[str]:
    return [
        f"#define TF_{direction}_BYTES{index} {storage.bytes}u"
        for index, storage in enumerate(storages)
    ]


class _Writer:
    def __init__(self, program: Program, kernels: Mapping[str, KernelTraits], prefix: str) -> None:
        self._program = program
        self._kernels = kernels
        self._prefix = prefix
        self._offsets = place_constants(program)
        self._numbers: dict[str, int] = {}
        self._arities: dict[str, int] = {}
        self._tasks = count_useful_tasks(
            {name: kernel.work for name, kernel in kernels.items()},
            list_kernel_calls(program.steps),
        )

    def write(self) -> str:
        program, kernels = self._program, self._kernels
        steps = self._write_steps(program.steps, "  ")
        staging = sum(padded(storage.bytes) for storage in (*program.inputs, *program.outputs))
        declarations = [
            f"int32_t {kernels[name].symbol}({', '.join(['void *'] * arity) or 'void'});"
            for name, arity in self._arities.items()
        ]
        names = [f'    "{name}",' for name in self._numbers]
        return "\n".join(
            (
                f"#define TF_WEIGHTS {self._prefix}weights",
                f"#define TF_ARENA {program.arena}u",
                f"#define TF_STAGING {staging}u",
                f"#define TF_SCRATCH {max((kernel.scratch for kernel in kernels.values()), default=0)}u",
                f"#define TF_KERNELS {len(kernels)}u",
                f"#define TF_MOST_TASKS {max(self._tasks.values(), default=1)}u",
                *_define_sizes("INPUTS", program.inputs),
                *_define_sizes("OUTPUTS", program.outputs),
                *self._write_counts(),
                "",
                f"extern const unsigned char {self._prefix}weights[];",
                *declarations,
                "",
                "static const char *const tf_kernel_names[TF_KERNELS + 1] = {",
                *names,
                "    NULL,",
                "};",
                "",
                "static int tf_steps(tf_context *tf, unsigned char *arena, const unsigned char *weights,",
                "                    unsigned char *const *in, unsigned char *const *out) {",
                "  TF_BEGIN(tf, arena, weights, in, out);",
                *steps,
                "  return 0;",
                "}",
                "",
            )
        )

    def _write_counts(self) -> list[str]:
        """Return the code that says which outputs have a count; the counts are the last outputs."""
        entries = {entry.output: entry for entry in self._program.counts}
        number = 1 + max((entry.place for entry in entries.values()), default=-1)
        rows = [
            f"{{{entries[index].axis}, {entries[index].place}}}" if index in entries else "{-1, 0}"
            for index in range(len(self._program.outputs) - number)
        ]
        return [
            f"#define TF_COUNTS {number}u",
            f"static const tf_output_count tf_output_counts[] = {{{', '.join([*rows, '{-1, 0}'])}}};",
        ]

    def _write_steps(self, steps: Sequence[Step], indent: str) -> list[str]:
        lines: list[str] = []
        for step in steps:
            lines += self._write_step(step, indent)
        return lines

    def _write_step(self, step: Step, indent: str) -> list[str]:
        if isinstance(step, Copy):
            target, source = self._address(step.target), self._address(step.source)
            return [f"{indent}memcpy({target}, {source}, {step.source.bytes}u);"]
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
        arguments = ", ".join(f"(void *)({self._address(tensor)})" for tensor in call.tensors)
        return f"TF_CALL({number}, {self._tasks[call.kernel]}, {kernel.symbol}({arguments}));"

    def _address(self, storage: Storage) -> str:
        storage = storage.resolve()
        if storage.place == "input":
            return f"in[{storage.index}]"
        if storage.place == "output":
            return f"out[{storage.index}]"
        if storage.place == "constant":
            return f"weights + {self._offsets[storage.index]}u"
        return f"arena + {storage.offset}u"


# ---------------------------------------------------------------- memory plan
# The arena: where tensors that live at different times share memory.
#
# The plan is greedy by size: the largest tensor first, each at the lowest place where nothing lies
# that lives at the same time (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
# Inference", 2020).


class _Lifetime(NamedTuple):
    storage: Storage
    first: int
    last: int


def plan_memory(program: Program) -> None:
    """Give each tensor in the arena its offset, and the arena its size."""
    lifetimes = _find_lifetimes(program.steps)
    placed: list[_Lifetime] = []
    for lifetime in sorted(lifetimes, key=lambda entry: (-entry.storage.bytes, entry.first)):
        others = sorted(
            (other.storage.offset, other.storage.offset + padded(other.storage.bytes))
            for other in placed
            if other.first <= lifetime.last and lifetime.first <= other.last
        )
        lifetime.storage.offset = _find_gap(others, padded(lifetime.storage.bytes))
        placed.append(lifetime)
    program.arena = max(
        (entry.storage.offset + padded(entry.storage.bytes) for entry in placed), default=0
    )


def _find_gap(occupied: Sequence[tuple[int, int]], size: int) -> int:
    """Return the lowest offset at which `size` bytes are free, given ranges ordered by their begin."""
    offset = 0
    for begin, end in occupied:
        if offset + size <= begin:
            break
        offset = max(offset, end)
    return offset


def _find_lifetimes(steps: Sequence[Step]) -> list[_Lifetime]:
    """Return for each tensor in the arena the numbers of the first and the last step that touches it."""
    spans: dict[Storage, tuple[int, int]] = {}
    for number, touched in enumerate(_touched(steps)):
        for storage in touched:
            storage = storage.resolve()
            if storage.place == "arena":
                first, _ = spans.get(storage, (number, number))
                spans[storage] = (first, number)
    return [_Lifetime(storage, first, last) for storage, (first, last) in spans.items()]


def _touched(steps: Sequence[Step]) -> Iterator[tuple[Storage, ...]]:
    """Give the tensors of each step, those of branches one after the other."""
    for step in steps:
        if isinstance(step, KernelCall):
            yield step.tensors
        elif isinstance(step, Copy):
            yield (step.source, step.target)
        elif isinstance(step, Branch):
            yield (step.condition,)
            yield from _touched(step.if_true)
            yield from _touched(step.if_false)
