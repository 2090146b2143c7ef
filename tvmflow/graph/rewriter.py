"""The base class of passes that rewrite `main`, with methods for expressions that several passes emit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.core.types import Dimension
from tvmflow.graph import bfloat16, ir, marks
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    TuningSizes,
    known_sizes,
    read_dimensions,
    with_kernel_symbols,
)

# Attributes of kernels: TVM's kOutEWiseFusable (fusion may append elementwise operators), kElemWise, and kInjective
# (moves or repeats elements).
TAKES_EPILOGUE: Final = {"op_pattern": 4}
ELEMENTWISE: Final = {"op_pattern": 0}
INJECTIVE: Final = {"op_pattern": 2}


class MainRewriter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the expressions of a module's `main`.

    `_replace` and `_rewrite` get the calls of `OPERATORS`. `tuning_sizes` holds the tuning sizes for dynamic shapes.
    """

    OPERATORS: ClassVar[Collection[str]] = frozenset()

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._main = mod["main"]
        self.tuning_sizes = TuningSizes(mod["main"])
        self._memos: list[dict[Any, Any]] = []
        self._rounded = self.new_memo()

    @functools.cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The dimensions of `main`."""
        return read_dimensions(self._main)

    @functools.cached_property
    def flow(self) -> ir.DataFlow:
        """The data flow of the original `main`."""
        return ir.DataFlow(self._main)

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite one call."""
        is_own = ir.operator_name(call) in self.OPERATORS
        if is_own and (replaced := self._replace(call)) is not None:
            return replaced
        rewritten = super().visit_call_(call)
        result = self._rewrite(call, rewritten) if is_own else None
        return rewritten if result is None else result

    def _replace(self, call: Any) -> Any:
        """Return a replacement for a call with its original arguments; None to go on with `_rewrite`."""

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        """Return a replacement for a call with rewritten arguments; None to keep that call."""

    def visit_if_(self, op: relax.If) -> Any:
        """Rewrite both branches; bindings of one branch are not visible in the other."""
        condition = self.visit_expr(op.cond)
        branches = []
        for branch in ir.branches_of(op):
            before = [dict(memo) for memo in self._memos]
            branches.append(self.visit_with_new_scope(branch))
            for memo, entries in zip(self._memos, before, strict=True):
                memo.clear()
                memo.update(entries)
        return relax.If(condition, *branches)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite a binding, and copy its marks to the emitted bindings."""
        super().visit_var_binding_(binding)
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            value = self.flow.values.get(value.tuple_value)
        if own := marks.read_marks(value):
            marks.mark_new(self.visit_expr(binding.var), own, self.lookup_binding)

    def depends_on_inputs(self, call: relax.Call) -> bool:
        """Return whether a call of the original `main` depends on inputs, so that it is computed at run time."""
        return not all(map(self.flow.is_weight, ir.list_variables(call)))

    def new_memo(self) -> dict[Any, Any]:
        """Return a dictionary for emitted variables; entries made in a branch are dropped at its end."""
        self._memos.append({})
        return self._memos[-1]

    def emit(self, expr: Any) -> Any:
        """Bind an expression to a new variable."""
        return self.builder_.emit(expr)

    def resolve(self, expr: Any) -> Any:
        """Return the variable that a rewritten expression was first bound to."""
        return ir.resolve_alias(expr, self.lookup_binding)

    def find_value(self, expr: Any) -> Any:
        """Return the rewritten value of a variable, through its aliases; other expressions unchanged."""
        source = self.resolve(expr)
        return self.lookup_binding(source) if isinstance(source, relax.Var) else source

    def list_fields(self, expr: Any) -> list[Any]:
        """Return the fields of a rewritten tuple, through aliases; none for other expressions."""
        value = self.find_value(expr)
        return list(map(self.resolve, value.fields)) if isinstance(value, relax.Tuple) else []

    def reshape(self, tensor: Any, shape: Sequence[IrSize]) -> Any:
        """Emit a tensor in another shape."""
        return self.emit(relax.op.reshape(tensor, relax.ShapeExpr(list(shape))))

    def rearrange(
        self, tensor: Any, shape: Sequence[IrSize], axes: Sequence[int], flipped: Sequence[int] = ()
    ) -> Any:
        """Emit a tensor reshaped to `shape`, with the axes `flipped` reversed, then permuted to `axes`."""
        tensor = self.reshape(tensor, shape)
        for axis in flipped:
            tensor = self.emit(relax.op.flip(tensor, axis))
        return self.emit(relax.op.permute_dims(tensor, list(axes)))

    def pad_to_multiples(self, tensor: Any, multiples: Sequence[int]) -> Any:
        """Emit a tensor whose first axes are zero-padded to multiples; the tensor itself if none needs it."""
        shape = known_sizes(tensor)
        widths = [0] * (2 * len(shape))
        for axis, multiple in enumerate(multiples):
            # dynamic sizes only occur with multiples of 1, and are not padded
            widths[2 * axis + 1] = -shape[axis] % multiple if multiple > 1 else 0
        return self.emit(relax.op.nn.pad(tensor, widths)) if any(widths) else tensor

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        """Emit some slices of a tensor along an axis."""
        chosen = relax.const(np.asarray(indices, "int64"), "int64")
        return self.emit(relax.op.take(tensor, chosen, axis))

    def cast(self, tensor: Any, dtype: str) -> Any:
        """Emit a tensor in another dtype; itself if it has that dtype."""
        return tensor if ir.dtype_of(tensor) == dtype else self.emit(relax.op.astype(tensor, dtype))

    def split_terms(self, packed: Any, terms: int) -> Any:
        """Emit packed weights (…, k, b) as (…, k/t, b, t), for instructions that add t = `terms` products."""
        *outer, depth, block = ir.known_shape(packed)
        rank = len(outer)
        axes = [*range(rank + 1), rank + 2, rank + 1]
        return self.rearrange(packed, [*outer, depth // terms, terms, block], axes)

    def round_weights(self, weights: Any) -> Any:
        """Emit float32 weights rounded to bfloat16, by operators that `evaluation` can compute."""
        constants = (bfloat16.BITS, bfloat16.QUIET_NAN, 1, bfloat16.ROUNDING_BIAS)
        half, quiet, even, bias = (relax.const(constant, "uint32") for constant in constants)
        op, emit = relax.op, self.emit
        bits = emit(op.memory.view(weights, dtype="uint32"))
        parity = emit(op.bitwise_and(emit(op.right_shift(bits, half)), even))
        nearest = emit(op.add(emit(op.add(bits, bias)), parity))
        nan = emit(op.bitwise_or(bits, quiet))
        rounded = emit(op.where(emit(op.isnan(weights)), nan, nearest))
        return self.cast(emit(op.right_shift(rounded, half)), bfloat16.DTYPE)

    def round_data(self, data: Any) -> Any:
        """Emit float32 data rounded to bfloat16, once for each tensor."""
        if data not in self._rounded:
            rounded = self.kernel(bfloat16.round_data, "to_bfloat16", data, pattern=None)
            self._rounded[data] = rounded
        return self._rounded[data]

    def kernel(
        self,
        function: Callable[..., Any],
        name: str,
        *args: Any,
        pattern: Mapping[str, Any] | None = TAKES_EPILOGUE,
    ) -> Any:
        """Emit a call of a kernel from a tensor expression; if `pattern` is None, TVM finds the pattern."""
        attributes = {"primfunc_attrs": pattern} if pattern else {}
        return self.builder_.emit_te(function, *args, primfunc_name_hint=name, **attributes)

    def call_function(
        self,
        function: tvm.tirx.PrimFunc,
        name: str,
        args: Sequence[Any],
        shape: Sequence[IrSize],
        dtype: str = "float32",
    ) -> Any:
        """Emit a call of a TIR function with one result of this shape and dtype."""
        function, sizes = with_kernel_symbols(function)
        variable = self.builder_.add_func(function, name)
        result = relax.TensorType(shape, dtype)
        return self.emit(relax.call_tir(variable, [*args, *sizes], result))


def rewrite_main(mod: tvm.IRModule, rewriter: type[MainRewriter], *options: Any) -> tvm.IRModule:
    """Return a module with `main` rewritten by `rewriter(mod, *options)`, without dead code."""
    return rewrite_functions(mod, [mod.get_global_var("main")], rewriter, *options)


def rewrite_functions(
    mod: tvm.IRModule, functions: Sequence[Any], rewriter: type[MainRewriter], *options: Any
) -> tvm.IRModule:
    """Return a module with these Relax functions rewritten in order, as `rewrite_main` does."""
    instance = mutator(rewriter)(mod, *options)
    for variable in functions:
        instance.builder_.update_func(variable, instance.visit_expr(mod[variable]))
    return relax.transform.DeadCodeElimination(["main"])(instance.builder_.get())
