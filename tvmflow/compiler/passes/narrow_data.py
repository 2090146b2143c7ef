"""Computation of convolutions and matrix products in float16, for CPUs that multiply and add it.

Data become float16 before the first of them, and stay so through the operators behind it that keep the size of
numbers; all others compute float32. Which kernels then add in float16, `widen_float16` decides.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_FLOAT16: Final = "float16"
_FLOAT32: Final = "float32"
_PRODUCTS: Final = frozenset(
    f"relax.nn.conv{rank}d{suffix}" for rank in (1, 2, 3) for suffix in ("", "_transpose")
)
_MATMUL: Final = "relax.matmul"
# They compute float16 of data that are float16 already.
_FOLLOWERS: Final = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "clip", "negative", "abs"),
        *("sigmoid", "tanh", "erf", "nn.relu", "nn.leakyrelu", "nn.relu6", "nn.prelu"),
        *("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.layer_norm"),
        *("reshape", "permute_dims", "concat", "split", "strided_slice", "squeeze", "expand_dims"),
        *("nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d", "nn.avg_pool1d", "nn.avg_pool2d"),
        *("nn.avg_pool3d", "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d"),
        *("nn.adaptive_avg_pool3d", "mean", "max", "min", "nn.pad", "broadcast_to", "flip"),
    )
)


def narrow_data(mod: tvm.IRModule) -> tvm.IRModule:
    """Let convolutions and matrix products, and what follows them, read and write float16."""
    return rewrite_main(mod, _Narrower)


class _Narrower(MainRewriter):
    """Rewrites calls of float32, and remembers the float16 form of each tensor that has one."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._narrow = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if not self.depends_on_inputs(call) or not self._is_supported(name, call, rewritten):
            return rewritten
        operands = [self._narrow_operand(arg) for arg in rewritten.args]
        result = self.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
        return self._widen(result)

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        rewritten = super().visit_tuple_getitem_(item)
        source = ir.resolve_alias(rewritten.tuple_value, self.lookup_binding)
        if source not in self._narrow:
            return rewritten
        return self._widen(self.emit(relax.TupleGetItem(self._narrow[source], item.index)))

    def _widen(self, result: Any) -> Any:
        """Emit the float32 form of a result: dead code unless something reads it."""
        if isinstance(result.ty, relax.TupleType):
            parts = [relax.TupleGetItem(result, n) for n in range(len(result.ty.fields))]
            wide = self.emit(relax.Tuple([self.cast(self.emit(p), _FLOAT32) for p in parts]))
        else:
            wide = self.cast(result, _FLOAT32)
        self._narrow[wide] = result
        return wide

    def _narrow_operand(self, operand: Any) -> Any:
        """Return the float16 form of an operand; others than tensors of float32 as they are."""
        if (fields := self._list_fields(operand)) is not None:
            return relax.Tuple([self._narrow_operand(field) for field in fields])
        if not ir.is_float32(operand):
            return operand
        source = ir.resolve_alias(operand, self.lookup_binding)
        if isinstance(source, tvm.ir.Constant):
            return relax.const(source.value.numpy().astype(_FLOAT16), _FLOAT16)
        if source not in self._narrow:
            self._narrow[source] = self.cast(source, _FLOAT16)
        return self._narrow[source]

    def _list_fields(self, operand: Any) -> list[Any] | None:
        """Return the fields of a tuple that an operator takes; None for other operands."""
        source = ir.resolve_alias(operand, self.lookup_binding)
        value = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        return list(value.fields) if isinstance(value, relax.Tuple) else None

    def _is_supported(self, name: str, call: Any, rewritten: Any) -> bool:
        """Return whether a call computes float16."""
        operands = []
        for arg in rewritten.args:
            operands += self._list_fields(arg) or [arg]
        tensors = [arg for arg in operands if isinstance(arg.ty, relax.TensorType)]
        if not all(map(ir.is_float32, tensors)) or not all(map(_fits, tensors)):
            return False
        if name in _PRODUCTS or name == _MATMUL:
            weights = call.args[1]
            is_matrix = name in _PRODUCTS or len(ir.shape_of(weights) or ()) == 2
            return is_matrix and self.flow.is_weight(weights)
        sources = (ir.resolve_alias(arg, self.lookup_binding) for arg in tensors)
        return name in _FOLLOWERS and any(source in self._narrow for source in sources)


def _fits(tensor: Any) -> bool:
    """Return whether a constant is no number that float16 cannot hold, or only with fewer bits."""
    if not isinstance(tensor, tvm.ir.Constant):
        return True
    values, limits = np.abs(tensor.value.numpy()), np.finfo(_FLOAT16)
    is_tiny = values.size == 1 and 0 < float(values.max()) < float(limits.tiny)
    return not is_tiny and bool(values.max(initial=0) <= limits.max)
