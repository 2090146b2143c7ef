"""Computes convolutions over sequences as those over images of one row, so that they have the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.blocked_layout.elementwise import ELEMENTWISE

# The operator on images, and the layout of the weights of the operator on sequences.
_CONVOLUTIONS: Final = {
    "relax.nn.conv1d": (relax.op.nn.conv2d, "OIW"),
    "relax.nn.conv1d_transpose": (relax.op.nn.conv2d_transpose, "IOW"),
}
_POOLS: Final = {
    "relax.nn.max_pool1d": relax.op.nn.max_pool2d,
    "relax.nn.avg_pool1d": relax.op.nn.avg_pool2d,
}


def convert_conv1d(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Convert convolutions and pooling of (n, c, w) data, and elementwise operators between them, to (n, c, 1, w)."""
    return mod if context.is_plain("conv1d") else rewrite_main(mod, _Conv1dRewriter)


class _Conv1dRewriter(MainRewriter):
    """Rewrites operators on sequences, and remembers the image of each sequence."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._images = self.new_memo()
        self._handlers: Mapping[str, Callable[[Any, list[Any]], Any]] = {
            **dict.fromkeys(_CONVOLUTIONS, self._rewrite_convolution),
            **dict.fromkeys(_POOLS, self._rewrite_pool1d),
            **dict.fromkeys(ELEMENTWISE, self._rewrite_elementwise),
        }

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        handler = self._handlers.get(ir.operator_name(call))
        if handler is None or len(ir.shape_of(call) or ()) != 3 or not ir.is_float32(call):
            return rewritten
        arguments = [ir.resolve_alias(argument, self.lookup_binding) for argument in rewritten.args]
        image = handler(call, arguments)
        if image is None:
            return rewritten
        image = self.builder_.emit(image)
        # Dead code unless an operator without a handler reads the sequence.
        sequence = self.builder_.emit(relax.op.squeeze(image, [2]))
        self._images[sequence] = image
        return sequence

    def _rewrite_convolution(self, call: Any, arguments: list[Any]) -> Any:
        function, kernel_layout = _CONVOLUTIONS[call.op.name]
        if ir.layouts_of(call) != ("NCW", kernel_layout, "NCW"):
            return None
        images = map(self._to_image, arguments)
        return function(*images, **_options(call), groups=call.attrs.groups)

    def _rewrite_pool1d(self, call: Any, arguments: list[Any]) -> Any:
        attrs = call.attrs
        if arguments[0] not in self._images or attrs.layout != "NCW":
            return None
        return _POOLS[call.op.name](
            self._images[arguments[0]],
            pool_size=[1, int(attrs.pool_size[0])],
            **_options(call),
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
        )

    def _rewrite_elementwise(self, call: Any, arguments: list[Any]) -> Any:
        shapes = [ir.shape_of(argument) for argument in arguments]
        if not any(argument in self._images for argument in arguments) or None in shapes:
            return None
        images = [
            self._to_image(argument) if len(shape or ()) > 1 else argument
            for argument, shape in zip(arguments, shapes, strict=True)
        ]
        return relax.Call(call.op, images, call.attrs)

    def _to_image(self, sequence: Any) -> Any:
        """Return a tensor (…, w) as (…, 1, w)."""
        if sequence in self._images:
            return self._images[sequence]
        *outer, width = ir.known_shape(sequence)
        return self.reshape(sequence, [*outer, 1, width])


def _options(call: Any) -> dict[str, list[int]]:
    """Return strides, padding and dilation of an operator on sequences as those on images of one row."""
    left, right = (int(pad) for pad in call.attrs.padding)
    options = {"padding": [0, left, 0, right]}
    for name, neutral in (("strides", 1), ("dilation", 1), ("output_padding", 0)):
        if hasattr(call.attrs, name):
            options[name] = [neutral, int(getattr(call.attrs, name)[0])]
    return options
