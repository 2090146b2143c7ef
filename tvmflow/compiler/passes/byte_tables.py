"""Looks up functions of one byte in tables that are computed when the library is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.open_sizes import same_sizes, sizes_of
from tvmflow.compiler.passes.quantization import BYTES
from tvmflow.compiler.passes.rewriter import OPAQUE, MainRewriter, rewrite_main

_QUANTIZE: Final = "relax.quantize"
_DEQUANTIZE: Final = "relax.dequantize"
# Operators that take many instructions; a table saves nothing for the others alone.
_FUNCTIONS: Final = frozenset(
    f"relax.{name}"
    for name in (
        *("erf", "exp", "log", "power", "sigmoid", "sqrt", "rsqrt", "tanh", "sin", "cos"),
        *("nn.gelu", "nn.gelu_tanh", "nn.silu"),
    )
)
_ELEMENTWISE: Final = _FUNCTIONS | {
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "clip", "abs"),
        *("negative", "square", "nn.relu", "nn.leakyrelu", "quantize", "dequantize"),
    )
}
_BYTES: Final = 256


def use_byte_tables(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace functions of one tensor of bytes, which are rounded to bytes again, by lookups.

    The GELU of a quantized model, with a rounding after each of its operators, is one: of 256 numbers.
    """
    del context
    return rewrite_main(mod, _FunctionReplacer)


class _FunctionReplacer(MainRewriter):
    """Rewrites quantization of what depends on one tensor of bytes, element by element."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._sources: dict[Any, tuple[Any, list[Any]] | None] = {}

    def visit_call_(self, call: relax.Call) -> Any:
        if ir.operator_name(call) == _QUANTIZE and (found := self._find_source(call)) is not None:
            source, calls = found
            if any(ir.operator_name(each) in _FUNCTIONS for each in calls):
                return self._look_up(call, source, calls)
        return super().visit_call_(call)

    def _find_source(self, call: Any) -> tuple[Any, list[Any]] | None:
        """Return the bytes on which a quantize depends, and the calls between, in order; None for others."""
        if call not in self._sources:
            self._sources[call] = self._search(call)
        return self._sources[call]

    def _search(self, call: Any) -> tuple[Any, list[Any]] | None:
        is_byte = ir.dtype_of(call) in BYTES or ir.is_float32(call)
        if ir.operator_name(call) not in _ELEMENTWISE or not is_byte:
            return None
        shape = sizes_of(call)
        sources: set[Any] = set()
        # in order
        calls: dict[Any, None] = {}
        for argument in call.args:
            if self._is_number(argument):
                continue
            variable = ir.resolve_alias(argument, self.flow.values.get)
            own, value = sizes_of(variable), self.flow.values.get(variable)
            is_alike = shape is not None and own is not None and same_sizes(own, shape)
            if not is_alike or self.flow.is_weight(variable):
                return None
            found = self._find_source(value) if isinstance(value, relax.Call) else None
            if found is None and (
                ir.operator_name(call) != _DEQUANTIZE or ir.dtype_of(variable) not in BYTES
            ):
                return None
            source, before = (variable, []) if found is None else found
            sources.add(source)
            calls.update(dict.fromkeys(before))
        return (sources.pop(), [*calls, call]) if len(sources) == 1 else None

    def _is_number(self, argument: Any) -> bool:
        """Return whether an argument is one number that the library has, or none that tensors depend on."""
        if isinstance(argument, (tirx.IntImm, tirx.FloatImm)):
            return True
        shape = ir.shape_of(argument)
        is_one = shape is not None and all(extent == 1 for extent in shape)
        return is_one and self.flow.is_weight(argument)

    def _look_up(self, call: Any, source: Any, calls: Sequence[Any]) -> Any:
        """Emit the table of a function, and what it has for each byte."""
        rank, dtype = len(sizes_of(source) or ()), np.dtype(ir.dtype_of(source))
        limits = np.iinfo(dtype)
        every = np.arange(limits.min, limits.max + 1).astype(dtype)
        values = {self._name_of(source): relax.const(every.reshape(*[1] * (rank - 1), _BYTES))}
        for each in calls:
            names = [(argument, self._name_of(argument)) for argument in each.args]
            arguments = [
                values[name] if name in values else self.visit_expr(argument)
                for argument, name in names
            ]
            values[self._name_of(each)] = self.emit(relax.Call(each.op, arguments, each.attrs))
        table = self.reshape(values[self._name_of(call)], [_BYTES])
        return self.kernel(_read, "look_up", self.visit_expr(source), table, pattern=OPAQUE)

    def _name_of(self, expr: Any) -> Any:
        """Return what stands for an expression: the variable of an alias, the call of a variable."""
        variable = ir.resolve_alias(expr, self.flow.values.get)
        value = self.flow.values.get(variable)
        return value if isinstance(value, relax.Call) else variable


def _read(x: Any, table: Any) -> Any:
    """Return the numbers of a table (256) for bytes, the least byte first."""
    least = int(np.iinfo(str(x.dtype)).min)
    return te.compute(
        x.shape, lambda *index: table(x(*index).astype("int32") - least), name="look_up"
    )
