"""What the passes ask about a model's `main`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax

# Fusion may append element-wise operators to what is marked so (TVM's kOutEWiseFusable).
TAKES_EPILOGUE: Final = {"op_pattern": 4}
# Nothing is fused with what is marked so (TVM's kOpaque).
ALONE: Final = {"op_pattern": 8}


class Facts:
    """Who defines and who reads each variable of a function, and what depends on weights alone."""

    def __init__(self, function: relax.Function) -> None:
        inputs = int(function.attrs["num_input"])
        self._weights = set(function.params[inputs:])
        self.values: dict[Any, Any] = {
            binding.var: binding.value
            for block in function.body.blocks
            for binding in block.bindings
            if isinstance(binding, relax.VarBinding)
        }
        self._uses: dict[Any, int] = {}
        # in the order of the bindings, since to ask back through a deep model is more than Python's stack holds
        for bound, value in self.values.items():
            read = variables_of(value)
            if isinstance(value, relax.Call) and self._weights.issuperset(read):
                self._weights.add(bound)
            for var in read:
                self._uses[var] = self._uses.get(var, 0) + 1
        for var in variables_of(function.body.body):
            self._uses[var] = self._uses.get(var, 0) + 1

    def is_weight(self, expr: Any) -> bool:
        """Whether an expression can be computed when the library is built."""
        return isinstance(expr, tvm.ir.Constant) or expr in self._weights

    def only_use(self, var: Any) -> Any:
        """What is bound to a variable that is read once; None for others."""
        return self.values.get(var) if self._uses.get(var) == 1 else None


def variables_of(expr: Any) -> list[Any]:
    """The variables that an expression reads, each as often as it does."""
    found: list[Any] = []

    def keep(each: Any) -> None:
        if isinstance(each, relax.Var):
            found.append(each)

    relax.analysis.post_order_visit(expr, keep)
    return found


def outputs_of(function: relax.Function) -> list[Any]:
    """What a function returns, each with the names that it was given on the way taken off."""
    values = Facts(function).values

    def origin(expr: Any) -> Any:
        return origin_of(expr, values.get)

    result = origin(function.body.body)
    result = values.get(result, result)
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [function.body.body]
    return [origin(field) for field in fields]


def origin_of(expr: Any, lookup: Callable[[Any], Any]) -> Any:
    """The variable that an expression was first bound to; `lookup` gives what a variable is bound to."""
    while isinstance(expr, relax.Var) and isinstance(value := lookup(expr), relax.Var):
        expr = value
    return expr


def rewritten(mod: tvm.IRModule, rewriter: Any) -> tvm.IRModule:
    """The module with `main` as a PyExprMutator that was made for it leaves it, without what nobody reads any more."""
    made = rewriter.visit_expr(mod["main"])
    rewriter.builder_.update_func(mod.get_global_var("main"), made)
    return relax.transform.DeadCodeElimination(["main"])(rewriter.builder_.get())


def with_calls(mod: tvm.IRModule, rewrite: Callable[[Any], Any]) -> tvm.IRModule:
    """The module with every call in its kernels as `rewrite` leaves it, the innermost first."""
    changed = tvm.IRModule(dict(mod.functions_items()), mod.attrs, mod.global_infos)
    for var, function in mod.functions_items():
        if isinstance(function, tvm.tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tvm.ir.Call, rewrite))
            if not body.same_as(function.body):
                changed[var] = tvm.tirx.PrimFunc(
                    function.params, body, function.ret_type, function.attrs
                )
    return changed


def is_straight(mod: tvm.IRModule) -> bool:
    """Whether `main` is one sequence of bindings without control flow."""
    blocks = mod["main"].body.blocks
    return len(blocks) == 1 and isinstance(blocks[0], relax.DataflowBlock)


def shape_of(expr: Any) -> tuple[int, ...] | None:
    """A tensor's shape; None where it is not one or not known."""
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    if shape is None or not isinstance(shape, relax.ShapeExpr):
        return None
    if not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape.values):
        return None
    return tuple(int(extent) for extent in shape.values)


def is_float(expr: Any) -> bool:
    """Whether a tensor is of float32."""
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype.dtype) == "float32"


def kept_as(builder: relax.BlockBuilder, tensor: Any, dtype: str) -> Any:
    """The tensor in this dtype: itself where it is of it already, else what the builder makes of it."""
    if str(tensor.ty.dtype.dtype) == dtype:
        return tensor
    return builder.emit(relax.op.astype(tensor, dtype))


def is_depthwise(call: Any) -> bool:
    """Whether a convolution makes each channel of its result from one channel of its data, and all have known shapes."""
    sides = {shape[1] for each in (call, call.args[0]) if (shape := shape_of(each))}
    return sides == {int(call.attrs.groups)}


def kind_of(call: Any) -> str:
    """What a convolution is called in `passes.OPERATORS`."""
    name = str(call.op.name).removeprefix("relax.nn.")
    if name != "conv2d" or int(call.attrs.groups) == 1:
        return name
    return f"{'depthwise' if is_depthwise(call) else 'grouped'}_conv2d"


def call_of(expr: Any, name: str) -> Any:
    """The expression if it calls the operator `name`, else None."""
    is_call = isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op)
    return expr if is_call and expr.op.name == name else None
