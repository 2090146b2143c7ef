"""Analysis of a model in Relax: calls, shapes, and the values that depend only on weights."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
import tvm_ffi.serialization
from tvm import relax, tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.graph.dynamic_shapes import is_dynamic, sizes_of


def load_json(text: str) -> Any:
    """Load the output of `tvm.ir.save_json` of this version of TVM.

    TVM's own `load_json` takes ten times as long, because it upgrades output of earlier versions in Python.
    """
    return tvm_ffi.serialization.from_json_graph_str(text)


def load_module(path: Path) -> tvm.IRModule:
    """Return the imported model in a file that the stage `import` wrote."""
    return load_json(path.read_text())


def operators(*names: str) -> frozenset[str]:
    """Return the full names of Relax operators from strings of names without `relax.`, split at spaces."""
    return frozenset(f"relax.{name}" for words in names for name in words.split())


OPAQUE: Final = {"op_pattern": 8}
"""The attribute of a kernel that is not fused with anything (TVM's kOpaque)."""

CONVOLUTIONS: Final = {f"relax.nn.conv{rank}d": rank for rank in (1, 2, 3)}
"""Convolutions -> the number of their spatial axes."""
TRANSPOSED_CONVOLUTIONS: Final = {f"{name}_transpose": n for name, n in CONVOLUTIONS.items()}
"""Transposed convolutions -> the number of their spatial axes."""

WEIGHT_RANKS: Final = {
    "relax.matmul": 2,
    **{name: 2 + n for name, n in {**CONVOLUTIONS, **TRANSPOSED_CONVOLUTIONS}.items()},
}
"""Operators with constant weights that have integer kernels -> the rank of their weights."""
SELECTIONS: Final = operators("reshape permute_dims squeeze expand_dims flatten nn.max_pool2d")
"""Operators that only select or rearrange elements, so that they can be applied to quantized data."""

_IS_SCHEDULED: Final = "tirx.is_scheduled"
SCHEDULED: Final = {_IS_SCHEDULED: True}
"""The attribute of a kernel that has a schedule already: no rule or search schedules it."""

WINOGRAD_COLUMNS: Final = ("winograd_data_columns", "winograd_image_columns")
"""The names of the Winograd transform blocks that read constant indices."""

IF_THEN_ELSE: Final = "prim.if_then_else"
"""The operator that computes only one of its branches."""

WEIGHTS_FUNCTION: Final = "main_transform_params"
"""The name that TVM's pass LiftTransformParams gives the function that computes the weights."""

SEVEN_BIT_WEIGHTS: Final = "tvmflow.narrow_weights"
"""The attribute of a `main` whose int8 weights are all from -64 to 64."""
LARGEST_SEVEN_BIT: Final = 64
"""The largest absolute value of such weights: int16 holds the sum of two of their products with uint8."""
_KEEPING: Final = operators("permute_dims reshape concat")
"""Operators that only rearrange the elements of their operands."""


def mark_seven_bit_weights(
    mod: tvm.IRModule, weights: Mapping[str, np.ndarray[Any, Any]]
) -> tvm.IRModule:
    """Return a model with the attribute `SEVEN_BIT_WEIGHTS` set or removed according to its weights."""
    main = mod["main"]
    has_seven_bits = _has_seven_bit_weights(main, weights)
    if has_seven_bits == (SEVEN_BIT_WEIGHTS in dict(main.attrs or {})):
        return mod
    mod = copy_module(mod)
    mod["main"] = (
        main.with_attr(SEVEN_BIT_WEIGHTS, True)
        if has_seven_bits
        else main.without_attr(SEVEN_BIT_WEIGHTS)
    )
    return mod


def _has_seven_bit_weights(
    main: relax.Function, weights: Mapping[str, np.ndarray[Any, Any]]
) -> bool:
    """Return whether the model has int8 matrices, and all of them are given weights from -64 to 64."""
    given = [array for array in weights.values() if array.dtype == np.int8 and array.ndim > 1]
    if not given or not all(map(_has_seven_bits, given)):
        return False
    flow = DataFlow(main)
    values = [(var, call) for var, call in flow.values.items() if isinstance(call, relax.Call)]
    return all(
        (operator_name(call) in _KEEPING or not (_is_matrix_of_bytes(var) and flow.is_weight(var)))
        and not any(
            isinstance(arg, tvm.ir.Constant) and _is_matrix_of_bytes(arg) for arg in call.args
        )
        for var, call in values
    )


def _has_seven_bits(array: np.ndarray[Any, Any]) -> bool:
    least, most = array.min(initial=0), array.max(initial=0)
    return bool(least >= -LARGEST_SEVEN_BIT and most <= LARGEST_SEVEN_BIT)


def _is_matrix_of_bytes(expr: Any) -> bool:
    if not isinstance(expr.ty, relax.TensorType) or dtype_of(expr) != "int8":
        return False
    sizes = sizes_of(expr)
    return sizes is None or len(sizes) > 1


class DataFlow:
    """The definitions and uses of a function's variables, including those in branches.

    It knows which variables depend only on weights.
    """

    def __init__(self, function: relax.Function) -> None:
        # Keyed by hash, which identifies the object: comparing variables, above all those with dynamic shapes, would
        # take longer than everything else here. The function keeps the variables alive.
        self._function = function
        self._weights = set(map(hash, list_weights(function)))
        self.values: dict[Any, Any] = {}
        self._uses: Counter[int] = Counter()
        self._readers: dict[int, list[Any]] = {}
        # A loop over the bindings, because recursion through a deep model would exceed Python's stack.
        for binding in list_bindings(function.body):
            value = binding.value
            used = [
                *map(hash, list_variables(value.cond if isinstance(value, relax.If) else value))
            ]
            self._uses.update(used)
            for variable in used:
                self._readers.setdefault(variable, []).append(value)
            if isinstance(binding, relax.VarBinding):
                self.values[binding.var] = value
                if isinstance(value, relax.Call) and self._weights.issuperset(used):
                    self._weights.add(hash(binding.var))
        self._bound = {value: var for var, value in self.values.items()}
        self._uses.update(
            hash(var) for body in _list_bodies(function.body) for var in list_variables(body)
        )

    def is_weight(self, expr: Any) -> bool:
        """Return whether an expression can be computed when the library is built."""
        return isinstance(expr, tvm.ir.Constant) or hash(expr) in self._weights

    def list_readers(self, value: Any) -> list[Any]:
        """Return the values that read a value directly."""
        return self._readers.get(hash(self._bound.get(value)), [])

    def is_read_by(self, value: Any, name: str) -> bool:
        """Return whether a value is read only by calls of one operator, and is not an output."""
        readers = self.list_readers(value)
        is_only_read = len(readers) == self.count_uses(self._bound.get(value))
        return is_only_read and all(as_call(reader, name) is not None for reader in readers)

    def resolve(self, expr: Any) -> Any:
        """Return the variable that an expression was first bound to."""
        return resolve_alias(expr, self.values.get)

    def find_call(self, var: Any, *names: str) -> Any:
        """Return the call that a variable is bound to, if it is of one of these operators; else None."""
        return as_call(self.values.get(var), *names)

    def find_call_used_once(self, var: Any, *names: str) -> Any:
        """Return the call as `find_call` does, if the variable is used exactly once; else None."""
        return as_call(self.value_if_used_once(var), *names)

    def value_if_used_once(self, var: Any) -> Any:
        """Return the value of a variable that is used exactly once; None for others."""
        return self.value_if_used(var, 1)

    def value_if_used(self, var: Any, times: int) -> Any:
        """Return the value of a variable that is used this many times; None for others."""
        return self.values.get(var) if self.count_uses(var) == times else None

    def count_uses(self, var: Any) -> int:
        """Return how often a variable is used."""
        return self._uses[hash(var)]


def list_bindings(sequence: relax.SeqExpr) -> list[Any]:
    """Return the bindings of a sequence in order; the bindings in an If's branches precede the If."""
    bindings: list[Any] = []
    # slicing makes a Python list, which is four times as fast as TVM's iterator
    for block in sequence.blocks[:]:
        for binding in block.bindings[:]:
            for branch in branches_of(binding.value):
                bindings += list_bindings(branch)
            bindings.append(binding)
    return bindings


def branches_of(expr: Any) -> tuple[relax.SeqExpr, ...]:
    """Return the branches of an If; none for other expressions."""
    return (expr.true_branch, expr.false_branch) if isinstance(expr, relax.If) else ()


def _list_bodies(sequence: relax.SeqExpr) -> list[Any]:
    """Return the results of a sequence and of the branches in it."""
    branches = (
        branch
        for block in sequence.blocks[:]
        for binding in block.bindings[:]
        for branch in branches_of(binding.value)
    )
    return [sequence.body, *(body for branch in branches for body in _list_bodies(branch))]


def list_weights(function: relax.Function) -> list[Any]:
    """Return the weights among the parameters of a model's `main`; they follow the inputs."""
    return list(function.params[int(function.attrs["num_input"]) :])


def list_variables(expr: Any) -> list[Any]:
    """Return the variables that an expression reads, with repetitions."""
    variables: list[Any] = []

    def collect(node: Any) -> None:
        if isinstance(node, relax.Var):
            variables.append(node)

    relax.analysis.post_order_visit(expr, collect)
    return variables


def list_outputs(function: relax.Function) -> list[Any]:
    """Return the outputs of a function, with aliases resolved."""
    values = DataFlow(function).values
    result = resolve_alias(function.body.body, values.get)
    result = values.get(result, result)
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [function.body.body]
    return [resolve_alias(field, values.get) for field in fields]


def resolve_alias(expr: Any, lookup: Callable[[Any], Any]) -> Any:
    """Return the variable that a variable was first bound to; other expressions unchanged."""
    while isinstance(expr, relax.Var) and isinstance(value := lookup(expr), relax.Var):
        expr = value
    return expr


def copy_module(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a new module with the same functions: some of TVM's passes change their argument in place."""
    return tvm.IRModule(dict(mod.functions_items()), mod.attrs, mod.global_infos)


def kernels_of(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    """Return the kernels of a lowered module by variable."""
    functions = mod.functions_items()
    return {var: kernel for var, kernel in functions if isinstance(kernel, tirx.PrimFunc)}


def list_kernels(mod: tvm.IRModule) -> list[str]:
    """Return the names of the kernels in a lowered module, sorted."""
    return sorted(str(var.name_hint) for var in kernels_of(mod))


def is_scheduled(kernel: tirx.PrimFunc) -> bool:
    """Return whether a kernel has a schedule, so that no rule or search schedules it."""
    return bool(kernel.attrs.get(_IS_SCHEDULED, False))


def replace_kernel(original: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled kernel with the attributes of the unscheduled one."""
    fields = (scheduled.params, scheduled.body, scheduled.ret_type)
    return tirx.PrimFunc(*fields, original.attrs).with_attrs(SCHEDULED)


def rewrite_kernel_calls(mod: tvm.IRModule, rewrite: Callable[[Any], Any]) -> tvm.IRModule:
    """Return a module with every call in its kernels rewritten, innermost calls first."""
    return rewrite_kernels(mod, lambda kernel: rewrite_nodes(kernel, tvm.ir.Call, rewrite))


def rewrite_kernels(
    mod: tvm.IRModule, rewrite: Callable[[tirx.PrimFunc], tirx.PrimFunc]
) -> tvm.IRModule:
    """Return a module with rewritten kernels; the same module if no kernel's body changed."""
    changed = {
        var: kernel
        for var, original in kernels_of(mod).items()
        if not (kernel := rewrite(original)).body.same_as(original.body)
    }
    rewritten = copy_module(mod) if changed else mod
    for var, kernel in changed.items():
        rewritten[var] = kernel
    return rewritten


def is_straight_line(mod: tvm.IRModule) -> bool:
    """Return whether `main` is one sequence of bindings without control flow."""
    blocks = mod["main"].body.blocks
    return len(blocks) == 1 and isinstance(blocks[0], relax.DataflowBlock)


def has_branches(mod: tvm.IRModule) -> bool:
    """Return whether `main` has an If."""
    return any(isinstance(value, relax.If) for value in DataFlow(mod["main"]).values.values())


def shape_of(expr: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None if it is symbolic or `expr` is not a tensor."""
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    extents = list(shape.values)
    is_static = all(isinstance(extent, tvm.tirx.IntImm) for extent in extents)
    return tuple(map(int, extents)) if is_static else None


def known_shape(expr: Any) -> tuple[int, ...]:
    """Return the shape of a tensor that must have one."""
    shape = shape_of(expr)
    assert shape is not None, f"{expr} has no static shape"
    return shape


def dtype_of(expr: Any) -> str:
    """Return the dtype of a tensor."""
    return str(expr.ty.dtype.dtype)


def is_float32(expr: Any) -> bool:
    """Return whether an expression is a tensor of float32."""
    return isinstance(expr.ty, relax.TensorType) and dtype_of(expr) == "float32"


def is_depthwise(call: Any) -> bool:
    """Return whether each group of a convolution has one input and one output channel, all fixed."""
    channels = {shape[1] for expr in (call, call.args[0]) if (shape := sizes_of(expr))}
    return channels == {int(call.attrs.groups)}


def convolution_kind(call: Any) -> str:
    """Return the name of a convolution in `core.types.OPTIMIZED_OPERATORS`."""
    name = str(call.op.name).removeprefix("relax.nn.")
    if name != "conv2d" or int(call.attrs.groups) == 1:
        return name
    return f"{'depthwise' if is_depthwise(call) else 'grouped'}_{name}"


def rename_parameters(mod: tvm.IRModule, rename: Callable[[str], str]) -> tvm.IRModule:
    """Return a module with the parameters of `main` renamed; the same module if no name changed."""
    main = mod["main"]
    values = {
        var: relax.Var(rename(str(var.name)), var.ty)
        for var in main.params
        if rename(str(var.name)) != str(var.name)
    }
    if not values:
        return mod
    params = [values.get(var, var) for var in main.params]
    body = replace_variables(main.body, values)
    renamed = relax.Function(params, body, main.ret_ty, main.is_pure).with_attrs(dict(main.attrs))
    made = copy_module(mod)
    made.update_func(made.get_global_var("main"), renamed)
    return made


def is_size(param: Any) -> bool:
    """Return whether a parameter of a kernel is a size, not a tensor."""
    return isinstance(param.ty, tvm.ir.PrimType)


def is_view(function: tirx.PrimFunc) -> bool:
    """Return whether a kernel only copies its single input to its output, so that both can share memory.

    False if TVM's analysis fails, as for some kernels with dynamic shapes (apache-tvm 0.27).
    """
    tensors = [param for param in function.params if not is_size(param)]
    # a copy of only the first elements, which removes the padding of blocks, also matches the pattern of a reshape
    if len(tensors) != 2 or not _have_same_length(*(param.ty.shape for param in tensors)):
        return False
    try:
        return bool(relax.analysis.has_reshape_pattern(function))
    except RuntimeError:
        return False


def _have_same_length(first: Any, second: Any) -> bool:
    """Return whether two shapes have the same number of elements for all values of dynamic dimensions."""
    if not any(map(is_dynamic, (*first, *second))):
        return prod(map(int, first)) == prod(map(int, second))
    lengths = [prod(shape, start=tirx.const(1, "int64")) for shape in (first, second)]
    return bool(tvm.sym.Analyzer().can_prove_equal(*lengths))


def find_nodes(tree: Any, *kinds: type) -> list[Any]:
    """Return the nodes of some kinds in a statement or an expression of TIR."""
    nodes: list[Any] = []
    tvm_ffi.structural_walk(tree, tuple((kind, nodes.append) for kind in kinds))
    return nodes


def replace_variables(tree: Any, values: Mapping[Any, Any]) -> Any:
    """Return a statement or an expression of TIR with variables replaced."""
    return tvm_ffi.structural_map(tree, (tirx.Var, lambda var: values.get(var, var)))


def rewrite_nodes(
    function: tirx.PrimFunc, kind: type | tuple[type, ...], rewrite: Callable[[Any], Any]
) -> tirx.PrimFunc:
    """Return a kernel with all nodes of one or several kinds rewritten, innermost nodes first."""
    return function.with_body(tvm_ffi.structural_map(function.body, (kind, rewrite)))


def kernel_pass(
    transform: Callable[[tirx.PrimFunc], tirx.PrimFunc],
) -> Callable[[], tvm.transform.Pass]:
    """Turn a function from kernel to kernel into a function that makes a TVM pass (decorator)."""

    def apply(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return transform(function)

    name = transform.__name__
    return lambda: tirx.transform.prim_func_pass(apply, opt_level=0, name=name)


def node_pass(
    kind: type, applies_to: Callable[[tirx.PrimFunc], bool] = lambda _: True
) -> Callable[[Callable[[Any], Any]], Callable[[], tvm.transform.Pass]]:
    """Return a decorator like `kernel_pass` for functions that rewrite the nodes of a kind."""

    def decorate(rewrite: Callable[[Any], Any]) -> Callable[[], tvm.transform.Pass]:
        def transform(function: tirx.PrimFunc) -> tirx.PrimFunc:
            return rewrite_nodes(function, kind, rewrite) if applies_to(function) else function

        return kernel_pass(functools.wraps(rewrite)(transform))

    return decorate


_FIELDS: Final[Mapping[type, Sequence[str]]] = {
    tirx.For: ("loop_var", "min", "extent", "kind", "body", "thread_binding", "annotations"),
    tirx.BufferStore: ("buffer", "value", "indices"),
    SBlockRealize: ("iter_values", "predicate", "block"),
    SBlock: (
        *("iter_vars", "reads", "writes", "name_hint", "body"),
        *("init", "alloc_buffers", "match_buffers", "annotations"),
    ),
}


def with_fields(node: Any, **fields: Any) -> Any:
    """Return a statement of TIR with some of its fields replaced."""
    kind = type(node)
    return kind(**{name: fields.get(name, getattr(node, name)) for name in _FIELDS[kind]})


def with_shape(buffer: Any, shape: Any) -> Any:
    """Return the declaration of a buffer in another shape."""
    return tirx.decl_buffer(shape, buffer.dtype, buffer.name, scope=buffer.scope())


def let(value: Any, body: Callable[[Any], Any]) -> Any:
    """Return `body(value)`, with the value bound to a name because `body` uses it more than once."""
    var = tirx.Var("m", value.ty.dtype)
    return tirx.Let(var, value, body(var))


def rewrite_indices(tree: Any, rewrite: Callable[[Any, Sequence[Any]], list[Any]]) -> Any:
    """Return a statement of TIR with `rewrite(buffer, indices)` as the indices of loads and stores."""

    def load(node: Any) -> Any:
        return tirx.BufferLoad(node.source, rewrite(node.source, node.indices))

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return with_fields(node, indices=rewrite(node.buffer, node.indices))

    return tvm_ffi.structural_map(tree, ((tvm.ir.TensorLoad, load), (tirx.BufferStore, store)))


def simplify_indices(tree: Any) -> Any:
    """Return a statement of TIR in which the indices of loads and stores are simplified."""
    simplify = tvm.sym.Analyzer().simplify
    return rewrite_indices(tree, lambda _, indices: list(map(simplify, indices)))


def operator_name(expr: Any) -> str:
    """Return the name of the operator that an expression calls; empty if it calls none."""
    return str(getattr(getattr(expr, "op", None), "name", ""))


def list_operators(mod: tvm.IRModule) -> set[str]:
    """Return the names of the operators that `main` calls."""
    return {operator_name(binding.value) for binding in list_bindings(mod["main"].body)}


def calls_operator(mod: tvm.IRModule, *names: str) -> bool:
    """Return whether `main` calls one of some operators."""
    return not list_operators(mod).isdisjoint(names)


def as_call(expr: Any, *names: str) -> Any:
    """Return the expression if it calls one of some operators, else None."""
    return expr if operator_name(expr) in names else None


def constant_array(expr: Any) -> np.ndarray[Any, Any] | None:
    """Return the elements of a constant; None for other expressions."""
    is_tensor = isinstance(expr, tvm.ir.Constant) and isinstance(expr.value, tvm.runtime.Tensor)
    return expr.value.numpy() if is_tensor else None


def is_zero(expr: Any) -> bool:
    """Return whether an expression is a constant of zeros."""
    array = constant_array(expr)
    return array is not None and not array.any()


def has_default_layouts(call: Any, kernel: str = "OI") -> bool:
    """Return whether a convolution has the layouts that frontends use.

    Data are NCDHW, NCHW or NCW; the layout of the weights starts with `kernel`.
    """
    attrs = call.attrs
    axes = "DHW"[-len(attrs.strides) :]
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    return layouts == (f"NC{axes}", f"{kernel}{axes}", f"NC{axes}")
