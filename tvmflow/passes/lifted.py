"""Convolutions over sequences as those over images of one row, so that they have the same roads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes._function import is_float, origin_of, rewritten, shape_of
from tvmflow.passes.blocked import BETWEEN

_POOLS: Final = {
    "relax.nn.max_pool1d": relax.op.nn.max_pool2d,
    "relax.nn.avg_pool1d": relax.op.nn.avg_pool2d,
}


def lift_sequences(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with convolutions and pooling of (n, c, w) data, and what lies between them, on (n, c, 1, w)."""
    return rewritten(mod, _Lifter(mod))


@mutator
class _Lifter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._images: dict[Any, Any] = {}
        self._roads: Mapping[str, Callable[[Any, list[Any]], Any]] = {
            "relax.nn.conv1d": self._conv1d,
            "relax.nn.conv1d_transpose": self._conv1d_transpose,
            **dict.fromkeys(_POOLS, self._pool1d),
            **dict.fromkeys(BETWEEN, self._between),
        }

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        road = self._roads.get(getattr(call.op, "name", ""))
        shape = shape_of(call)
        if road is None or shape is None or len(shape) != 3 or not is_float(call):
            return made
        image = road(call, [origin_of(argument, self.lookup_binding) for argument in made.args])
        if image is None:
            return made
        image = self.builder_.emit(image)
        # read only by what has no road here
        row = self.builder_.emit(relax.op.squeeze(image, [2]))
        self._images[row] = image
        return row

    def _conv1d(self, call: Any, args: list[Any]) -> Any:
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "OIW", "NCW"):
            return None
        return relax.op.nn.conv2d(
            self._image(args[0]), self._image(args[1]), **_options(attrs), groups=attrs.groups
        )

    def _conv1d_transpose(self, call: Any, args: list[Any]) -> Any:
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "IOW", "NCW"):
            return None
        return relax.op.nn.conv2d_transpose(
            self._image(args[0]),
            self._image(args[1]),
            **_options(attrs),
            output_padding=[0, int(attrs.output_padding[0])],
            groups=attrs.groups,
        )

    def _pool1d(self, call: Any, args: list[Any]) -> Any:
        attrs = call.attrs
        if args[0] not in self._images or attrs.layout != "NCW":
            return None
        return _POOLS[call.op.name](
            self._images[args[0]],
            pool_size=[1, int(attrs.pool_size[0])],
            **_options(attrs),
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
        )

    def _between(self, call: Any, args: list[Any]) -> Any:
        shapes = [shape_of(argument) for argument in args]
        if not any(argument in self._images for argument in args) or None in shapes:
            return None
        images = [
            self._image(argument) if len(shape or ()) > 1 else argument
            for argument, shape in zip(args, shapes, strict=True)
        ]
        return relax.Call(call.op, images, call.attrs)

    def _image(self, row: Any) -> Any:
        """A tensor (…, w) as (…, 1, w)."""
        if row in self._images:
            return self._images[row]
        *outer, width = shape_of(row)  # type: ignore[misc]
        return self.builder_.emit(relax.op.reshape(row, relax.ShapeExpr([*outer, 1, width])))


def _options(attrs: Any) -> dict[str, list[int]]:
    """Strides, padding and dilation, with those of the one row before them."""
    left, right = (int(each) for each in attrs.padding)
    return {
        "strides": [1, int(attrs.strides[0])],
        "padding": [0, left, 0, right],
        "dilation": [1, int(attrs.dilation[0])],
    }
