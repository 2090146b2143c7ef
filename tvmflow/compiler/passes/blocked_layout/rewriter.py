"""The rewriter that moves operators to blocked layouts, and the conversion between layouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes, same_sizes, sizes_of
from tvmflow.graph.ir import OPAQUE

_log = logging.getLogger(__name__)

# Operators that take blocked data at any shape.
_READERS: Final = frozenset({*ir.CONVOLUTIONS, *ir.TRANSPOSED_CONVOLUTIONS})
# Operators that reduce blocked data, or before which a function can move into a convolution's kernel.
_POOLS: Final = ir.operators(
    *(f"nn.max_pool{n}d nn.avg_pool{n}d nn.adaptive_avg_pool{n}d" for n in (1, 2, 3)),
    "max mean min sum permute_dims",
)

# Functions that a kernel computes in vectors, and arithmetic through which they are fused.
_FUNCTIONS: Final = ir.operators("erf exp log sigmoid tanh nn.gelu nn.gelu_tanh nn.silu quantize")
_ARITHMETIC: Final = ir.operators("add divide maximum minimum multiply negative subtract")

Handler = Callable[..., relax.Expr | None]
"""A function that rewrites the calls of an operator: takes the rewriter, the original call and the rewritten arguments; returns the blocked form of the result, the result itself, or None to decline."""
Handlers = Mapping[str, Handler]
"""Operator -> its handler."""

MOVES: Final = ir.operators("reshape permute_dims")
"""Operators that move values. They move only the channels of an image if its other axes stay."""


class LayoutRewriter(TargetRewriter):
    """Rewrites calls that have a handler, and stores the blocked form (n, ⌈c/b⌉, …, b) of each tensor.

    Attributes:
        block: The number b of channels in a block.
        selections: Blocked tensor -> the channels of other blocked tensors that are copied to it.
        products: Tensor -> the matmul of unblocked data that computes it, and the arguments of the matmul's kernel.
    """

    def __init__(self, mod: tvm.IRModule, context: LoweringContext, handlers: Handlers) -> None:
        super().__init__(mod, context)
        self.context, self.cpu = context, self._cpu
        self.block = context.lanes
        self.selections = self.new_memo()
        self.products = self.new_memo()
        self._handlers = handlers
        self._blocked = self.new_memo()
        self._packed = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite one call."""
        rewritten = super().visit_call_(call)
        name, shape = ir.operator_name(call), sizes_of(call)
        handler, is_weight = self._handlers.get(name), all(map(self.flow.is_weight, call.args))
        if handler is None or shape is None or self.tuning_sizes.shape(call) is None or is_weight:
            return rewritten
        arguments = list(map(self.resolve, rewritten.args))
        if not any(map(self.is_float, (call, *call.args[:1]))):
            # operators on integers, such as pools and concatenations, are rewritten only if these are blocked
            data = arguments[0]
            tensors = self.list_fields(data) if name == "relax.concat" else [data]
            if not any(tensor in self._blocked for tensor in tensors):
                return rewritten
        result = handler(self, call, *arguments)
        if result is None:
            _log.debug("%s keeps its layout", name)
            return rewritten
        is_plain = same_sizes(known_sizes(result), shape)
        return result if is_plain else self.unpack(result, shape[1])

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        """Rewrite one part of a split tensor."""
        result = self._handlers["relax.split"](self, item)
        if result is None:
            return super().visit_tuple_getitem_(item)
        return self.unpack(result, known_sizes(item)[1])

    def unpack(self, tensor: Any, channels: int) -> Any:
        """Emit the plain form of a blocked tensor: dead code unless an operator without a handler reads it."""
        plain = self.kernel(blocked.unpack, "unpack", tensor, channels, pattern=None)
        self._blocked[plain] = tensor
        return plain

    def blocked_form(self, var: Any) -> relax.Expr | None:
        """Return the blocked form of a tensor that a handler made; None for others."""
        return self._blocked.get(var)

    def to_blocked(self, data: Any) -> Any:
        """Return the blocked form of a tensor; pack the tensor if it has none."""
        if data in self._blocked:
            return self._blocked[data]
        if data not in self._packed:
            self._packed[data] = self.pack(data, self.block)
        return self._packed[data]

    def pack(self, data: Any, lanes: int) -> Any:
        """Emit data packed in blocks of this many channels."""
        # opaque, because a function fused with a transposition is computed one element at a time
        pattern = OPAQUE if self._calls_function(data) else None
        return self.kernel(blocked.pack, "pack", data, lanes, pattern=pattern)

    def _calls_function(self, data: Any) -> bool:
        """Return whether the kernel that computes a tensor has a function such as exp among its operators."""
        pending, seen = [data], set()
        while pending:
            source = pending.pop()
            value: Any = self.lookup_binding(source) if isinstance(source, relax.Var) else None
            name = ir.operator_name(value)
            if name in _FUNCTIONS:
                return True
            if name in _ARITHMETIC and value not in seen:
                seen.add(value)
                pending.extend(value.args)
        return False

    def is_read_blocked(self, expr: Any, *, by_pools: bool = False) -> bool:
        """Return whether a convolution reads a value, directly or through operators with a handler.

        With `by_pools`, the reader may also be a pool, a reduction or a transposition.
        """
        blocked_readers = _READERS | _POOLS if by_pools else _READERS
        pending, seen = [expr], set()
        while pending:
            value = pending.pop()
            for reader in self.flow.list_readers(value):
                name = ir.operator_name(reader)
                if name in blocked_readers:
                    return True
                if reader not in seen and self._passes_blocked(reader):
                    seen.add(reader)
                    pending.append(reader)
        return False

    def _passes_blocked(self, reader: Any) -> bool:
        """Return whether the result of an expression is blocked if its operand is."""
        name = ir.operator_name(reader)
        if name in MOVES:
            before, after = sizes_of(reader.args[0]), sizes_of(reader)
            return (
                before is not None
                and after is not None
                and min(len(before), len(after)) > 3
                and same_sizes((before[0], *before[-2:]), (after[0], *after[-2:]))
            )
        return name in self._handlers or isinstance(reader, relax.Tuple | relax.TupleGetItem)
