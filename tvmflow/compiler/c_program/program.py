"""`main` of a lowered model as a list of steps over tensors with planned memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx

from tvmflow.compiler.c_program.c_kernels import list_size_parameters
from tvmflow.core.dimensions import choose_tuning_size, evaluate, substitute
from tvmflow.core.errors import StageError
from tvmflow.core.types import Array, Dimension, Size
from tvmflow.graph import dynamic_shapes, ir
from tvmflow.graph.counts import SIZES_NEEDED, OutputCount, read_counts
from tvmflow.graph.states import APPEND, ENTER, EXIT, ROLE, read_states
from tvmflow.targets.linking import padded

StorageScope = Literal["input", "output", "constant", "arena", "device"]
"""`device`: in the arena on a device."""


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of a tensor, which views of it share.

    Attributes:
        bytes: Its size; with dynamic shapes, its size at the tuning sizes.
        index: The index of the input, output or constant.
        offset: Its offset in the arena; with dynamic shapes, its offset at the tuning sizes.
        replacement: The storage that replaced it.
        symbolic_bytes: With dynamic shapes, its size as an expression of the dimensions.
    """

    scope: StorageScope
    bytes: int
    index: int = 0
    offset: int = 0
    replacement: Storage | None = None
    symbolic_bytes: str = ""

    @property
    def size(self) -> Size:
        """Its size in bytes."""
        return self.symbolic_bytes or self.bytes

    def resolve(self) -> Storage:
        """Follow the replacements to the last one; return the storage itself if there is none."""
        storage = self
        while storage.replacement is not None:
            storage = storage.replacement
        return storage


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel with its tensors and sizes; it reads the first `inputs` tensors."""

    kernel: str
    tensors: tuple[Storage, ...]
    inputs: int
    sizes: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a whole tensor into another tensor, at an offset in bytes."""

    source: Storage
    target: Storage
    offset: Size = 0

    @property
    def tensors(self) -> tuple[Storage, ...]:
        """Both tensors."""
        return (self.source, self.target)


@dataclass(frozen=True, slots=True)
class Branch:
    """The steps of both branches of an If; the condition is a tensor of one boolean."""

    condition: Storage
    if_true: tuple[Step, ...]
    if_false: tuple[Step, ...]

    @property
    def tensors(self) -> tuple[Storage, ...]:
        """The condition; the steps of the branches list their own tensors."""
        return (self.condition,)


Step = KernelCall | Copy | Branch


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield each step; a branch is followed by the steps of its true side, then of its false side."""
    for step in steps:
        yield step
        if isinstance(step, Branch):
            yield from walk((*step.if_true, *step.if_false))


class AppendedState(NamedTuple):
    """A state to which a step appends in place.

    Attributes:
        outer: The number of blocks.
        row: The size of a row in a block, in bytes.
    """

    before: Storage
    after: Storage
    outer: int
    row: int


@dataclass(slots=True)
class Program:
    """A model as steps in order, and its tensors.

    Attributes:
        outputs: The outputs of `main`, followed by the counts of outputs with `counts`.
        constants: The constants; equal ones are stored once.
        arena: The size of the memory for all other tensors, in bytes; `device_arena` for tensors on a device.
        input_shapes: With dynamic dimensions, the shapes of the inputs.
        axes: All dynamic sizes of tensors.
        above: With dynamic dimensions, the tensors below each tensor in the arena.
        has_placed_constants: Whether constants have offsets already; otherwise linking places them.
        appended: The states whose input and output share memory, with the axis along which they grow outermost.
    """

    steps: tuple[Step, ...] = ()
    inputs: list[Storage] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)
    counts: tuple[OutputCount, ...] = ()
    constants: list[Array] = field(default_factory=list)
    arena: int = 0
    device_arena: int = 0
    dimensions: tuple[Dimension, ...] = ()
    input_shapes: list[tuple[Size, ...]] = field(default_factory=list)
    output_shapes: list[tuple[Size, ...]] = field(default_factory=list)
    axes: set[str] = field(default_factory=set)
    above: dict[Storage, list[Storage]] = field(default_factory=dict)
    has_placed_constants: bool = True
    appended: list[AppendedState] = field(default_factory=list)

    def count_described(self) -> int:
        """Return the number of the model's own outputs, without the counts that follow them."""
        return len(self.outputs) - 1 - max((entry.count_index for entry in self.counts), default=-1)


Value = Any
"""A Storage, or a tuple of values."""


def read_program(mod: tvm.IRModule, weights: Sequence[Array]) -> Program:
    """Return `main` of a lowered model as steps; UnsupportedProgram if it needs TVM's runtime."""
    mod = relax.transform.ToNonDataflow()(mod)
    try:
        return _Reader(mod).read(weights)
    except UnsupportedProgram as error:
        # the frontend's reason is in terms of the user's model
        if known := (mod["main"].attrs or {}).get(SIZES_NEEDED):
            raise UnsupportedProgram(str(known)) from error
        raise


def find_runtime(mod: tvm.IRModule, setting: str, *, requires_c: bool = False) -> tuple[str, str]:
    """Return the runtime of a lowered model, scheduled or not: `c`, or `vm` and the reason for it.

    Raises UnsupportedProgram if a C library is required and the model needs TVM's runtime.
    """
    if setting != "auto" and not requires_c:
        return setting, ""
    try:
        read_program(mod, [np.empty(0)] * len(ir.list_weights(mod["main"])))
    except UnsupportedProgram as error:
        if requires_c:
            raise
        return "vm", error.reason
    return ("c" if setting == "auto" else setting), ""


class UnsupportedProgram(StageError):
    """A model needs TVM's runtime, for a `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"this model needs TVM's runtime for {reason}",
            fix="leave c-library and cpp out of `outputs`, and choose `runtime: auto`. Instead of "
            "`verify.run_on: qemu`, which runs the C library, choose `verify.run_on: rpc`",
        )
        self.reason = reason


class _Reader:
    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._program = Program()
        self._values: dict[Any, Value] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Storage] = {}
        self._is_view = functools.cache(lambda var: ir.is_view(mod[var]))
        self._checked: set[str] = set()
        main = mod["main"]
        dimensions = dynamic_shapes.read_dimensions(main)
        names = {entry.name for entry in dimensions}
        self._program.dimensions = dimensions
        # the variables of the dimensions; other variables may have the same names
        self._symbols = {
            symbol
            for param in main.params
            for size in _sizes_of_type(param.ty) or ()
            for symbol in dynamic_shapes.list_symbols(size)
            if symbol.name in names
        }
        self._representative = {entry.name: choose_tuning_size(entry) for entry in dimensions}
        self._axes = {state.input: state.axis for state in read_states(main)}
        # symbols of the functions that `main` calls -> expressions of the dimensions
        self._bound: dict[Any, Any] = {}

    def read(self, weights: Sequence[Array]) -> Program:
        main = self._mod["main"]
        program = self._program
        program.counts = read_counts(main)
        first_weight = len(main.params) - len(weights)
        for index, param in enumerate(main.params[:first_weight]):
            program.inputs.append(self._make_storage("input", param.ty, index))
            if program.dimensions:
                program.input_shapes.append(self._read_shape(param.ty))
            self._values[param] = program.inputs[-1]
        for param, weight in zip(main.params[first_weight:], weights, strict=True):
            self._values[param] = self._add_constant(weight)
        steps: list[Step] = []
        for index, source in enumerate(list(_flatten(self._read_sequence(main.body, steps)))):
            # a result is computed in the output's memory if possible, else copied there
            output, source = _like(source, "output", index), source.resolve()
            if source.scope == "arena":
                source.replacement = output
            else:
                steps.append(Copy(source, output))
            program.outputs.append(output)
        program.steps = tuple(steps)
        if program.dimensions:
            types = _flatten_type(main.body.body.ty)
            program.output_shapes = [self._read_shape(ty) for ty in types]
        return program

    def _read_shape(self, ty: Any) -> tuple[Size, ...]:
        sizes = _sizes_of_type(ty)
        if sizes is None:
            raise UnsupportedProgram(_DATA_DEPENDENT_SHAPES)
        shape = tuple(map(self._read_size, sizes))
        self._program.axes.update(size for size in shape if isinstance(size, str))
        return shape

    def _read_size(self, size: Any) -> Size:
        if not dynamic_shapes.is_dynamic(size):
            return int(size)
        size = ir.replace_variables(size, self._bound)
        if not set(dynamic_shapes.list_symbols(size)) <= self._symbols:
            raise UnsupportedProgram(_DATA_DEPENDENT_SHAPES)
        try:
            return dynamic_shapes.size_text(size)
        except dynamic_shapes.NoSize as error:
            raise UnsupportedProgram(_DATA_DEPENDENT_SHAPES) from error

    def _make_storage(self, scope: StorageScope, ty: Any, index: int = 0) -> Storage:
        shape = self._read_shape(ty)
        size = multiply(_item_bytes(ty), *shape)
        if isinstance(size, int):
            return Storage(scope, size, index)
        return Storage(scope, evaluate(size, self._representative), index, symbolic_bytes=size)

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
        joined = [_like(storage, "arena") for storage in _flatten(true_result)]
        for branch, result in ((if_true, true_result), (if_false, false_result)):
            made = {
                storage.resolve()
                for step in walk(branch)
                if not isinstance(step, Branch)
                for storage in step.tensors[step.inputs if isinstance(step, KernelCall) else 1 :]
            }
            for source, target in zip(_flatten(result), joined, strict=True):
                source = source.resolve()
                if source.size != target.size:
                    raise UnsupportedProgram("a condition whose results differ in size")
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
            raise UnsupportedProgram(_DATA_DEPENDENT_SHAPES)
        kernel, values = call.args[0].name_hint, call.args[1]
        self._check_kernel(call.args[0])
        # the type of each tensor, or the size that is an argument itself
        types: list[Any] = []
        arguments = []
        for item in values.fields if isinstance(values, relax.Tuple) else [values]:
            if isinstance(item.ty, tvm.ir.PrimType):
                types.append(getattr(item, "value", item))
            else:
                arguments.append(item)
                types += _flatten_type(item.ty)
        inputs = tuple(_flatten(tuple(self._read_value(item, steps) for item in arguments)))
        # input and output of such a kernel are one tensor
        role = str(self._mod[call.args[0]].attrs.get(ROLE, ""))
        if role in (ENTER, EXIT) or self._is_view(call.args[0]):
            return inputs[0]
        is_tuple = isinstance(call.ty, relax.TupleType)
        results = _flatten_type(call.ty)
        outputs = tuple(self._make_storage("arena", ty) for ty in results)
        if role == APPEND:
            before, rows = inputs
            axis = self._axes[before.index]
            sizes = self._program.input_shapes[before.index]
            outer, inner = (multiply(*part) for part in (sizes[:axis], sizes[axis + 1 :]))
            row = multiply(inner, _item_bytes(types[0]))
            appended = AppendedState(before, outputs[0], int(outer), int(row))
            self._program.appended.append(appended)
            steps.append(Copy(rows, outputs[0], before.size))
            return outputs[0]
        sizes = self._read_kernel_sizes(call.args[0], [*types, *results])
        steps.append(KernelCall(kernel, inputs + outputs, len(inputs), sizes))
        return outputs if is_tuple else outputs[0]

    def _read_kernel_sizes(self, var: tvm.ir.GlobalVar, types: Sequence[Any]) -> tuple[Size, ...]:
        function = self._mod[var]
        parameters = list_size_parameters(function)
        if not parameters:
            return ()
        bound: dict[Any, Any] = {}
        for param, ty in zip(function.params, types, strict=True):
            if ir.is_size(param):
                bound[param] = ty
            else:
                _match(param.ty.shape, _sizes_of_type(ty), bound)
        if not bound.keys() >= set(parameters):
            # some arguments, such as the result of an If, have no shape in their type
            raise UnsupportedProgram(_DATA_DEPENDENT_SHAPES)
        return tuple(self._read_size(bound[variable]) for variable in parameters)

    def _read_function(self, call: Any, steps: list[Step]) -> Value:
        function = self._mod[call.op]
        bound: dict[Any, Any] = {}
        for param, argument in zip(function.params, call.args, strict=True):
            if ir.is_size(param):
                bound[param] = argument
            else:
                self._values[param] = self._read_value(argument, steps)
                _match(_sizes_of_type(param.ty), _sizes_of_type(argument.ty), bound)
        before = self._bound
        self._bound = {
            symbol: ir.replace_variables(size, before) if dynamic_shapes.is_dynamic(size) else size
            for symbol, size in bound.items()
        }
        result = self._read_sequence(function.body, steps)
        self._bound = before
        return result

    def _check_kernel(self, var: tvm.ir.GlobalVar) -> None:
        """Raise UnsupportedProgram if a kernel calls a function of TVM's runtime."""
        if var.name_hint in self._checked:
            return
        self._checked.add(var.name_hint)
        for call in ir.find_nodes(self._mod[var].body, tvm.ir.Call):
            if ir.operator_name(call) in _PACKED_CALLS:
                raise UnsupportedProgram(
                    f"the function {call.args[0].value}, which the kernel {var.name_hint} calls"
                )


# The bytes up to which constants are compared, so that equal ones are stored once.
_MAX_COMPARED: Final = 1 << 16
_DATA_DEPENDENT_SHAPES: Final = "shapes that are known only when it runs"
_PACKED_CALLS: Final = frozenset({"tirx.tvm_call_packed", "tirx.tvm_call_cpacked"})
_VIEWS: Final = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})


def list_kernel_calls(steps: Sequence[Step]) -> list[str]:
    """Return the names of the kernels that steps call, once for each call."""
    return [step.kernel for step in walk(steps) if isinstance(step, KernelCall)]


def list_called_kernels(mod: tvm.IRModule, program: Program) -> dict[str, tirx.PrimFunc]:
    """Return the kernels of a module that a program calls, by name."""
    names = set(list_kernel_calls(program.steps))
    kernels = ir.kernels_of(mod).items()
    return {var.name_hint: kernel for var, kernel in kernels if var.name_hint in names}


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


def _like(storage: Storage, scope: StorageScope, index: int = 0) -> Storage:
    return Storage(scope, storage.bytes, index, symbolic_bytes=storage.symbolic_bytes)


def multiply(*sizes: Size) -> Size:
    """Return the product of sizes, with at most one integer factor.

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


def _sizes_of_type(ty: Any) -> list[Any] | None:
    shape = getattr(ty, "shape", None)
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def _item_bytes(ty: Any) -> int:
    return np.dtype(str(ty.dtype.dtype).replace("bfloat", "float")).itemsize


def _flatten_type(ty: Any) -> list[Any]:
    if not isinstance(ty, relax.TupleType):
        return [ty]
    return [tensor for part in ty.fields for tensor in _flatten_type(part)]


def _match(sizes: Any, actual: Any, bound: dict[Any, Any]) -> None:
    for size, value in zip(sizes or (), actual or (), strict=False):
        if isinstance(size, tvm.ir.Var):
            bound.setdefault(size, value)


def _describe(call: Any, name: str) -> str:
    """Return a phrase for the function or operator of TVM's runtime that a call needs."""
    if "packed" in name and call.args and hasattr(call.args[0], "global_symbol"):
        return f"the function {call.args[0].global_symbol} of TVM's runtime"
    return f"the operator {name.removeprefix('relax.')}"


# ---------------------------------------------------------------- memory plan
# Tensors with disjoint lifetimes share memory in the arena. The plan is greedy by size: it places the largest tensor
# first, each at the lowest offset that no tensor with an overlapping lifetime occupies (Pisarchyk and Lee, "Efficient
# Memory Management for Deep Neural Net Inference", 2020).


class _Lifetime(NamedTuple):
    storage: Storage
    first: int
    last: int

    def overlaps(self, other: _Lifetime) -> bool:
        return other.first <= self.last and self.first <= other.last


def plan_memory(program: Program) -> None:
    """Plan the arena: assign an offset to each tensor, and set the arena's size."""
    placed, program.arena = plan_arena(program.steps, "arena", padded)
    if program.dimensions:
        # a tensor that is empty at the tuning sizes may share its offset with others
        ordered = sorted(placed, key=lambda entry: (entry.storage.offset, entry.storage.bytes))
        program.above = {
            entry.storage: [other.storage for other in ordered[:index] if entry.overlaps(other)]
            for index, entry in enumerate(ordered)
        }


def plan_arena(
    steps: Sequence[Step], scope: StorageScope, pad: Callable[[int], int]
) -> tuple[list[_Lifetime], int]:
    """Assign an offset to each tensor, with bytes padded by `pad`; return the tensors and all bytes."""
    # the first and the last step that touch each tensor
    spans: dict[Storage, tuple[int, int]] = {}
    for number, step in enumerate(walk(steps)):
        for storage in (tensor.resolve() for tensor in step.tensors):
            if storage.scope == scope:
                spans[storage] = (spans.get(storage, (number,))[0], number)
    lifetimes = [_Lifetime(storage, *span) for storage, span in spans.items()]
    placed: list[_Lifetime] = []
    for lifetime in sorted(lifetimes, key=lambda entry: (-entry.storage.bytes, entry.first)):
        others = sorted(
            (other.storage.offset, other.storage.offset + pad(other.storage.bytes))
            for other in placed
            if lifetime.overlaps(other)
        )
        offset = 0
        for begin, end in others:
            if offset + pad(lifetime.storage.bytes) <= begin:
                break
            offset = max(offset, end)
        lifetime.storage.offset = offset
        placed.append(lifetime)
    ends = (entry.storage.offset + pad(entry.storage.bytes) for entry in placed)
    return placed, max(ends, default=0)
