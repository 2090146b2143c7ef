"""Moves convolutions, and what lies between them, to layouts whose innermost axis is one vector.

`NCHW[b]c` for data and `OIHW[b]i[b]o` for weights, as in oneDNN and in Liu et al., "Optimizing
CNN Model Inference on CPUs" (USENIX ATC 2019). Data are packed where the first convolution
needs it and unpacked where an operator without a road here reads it; everything between
stays packed. Weights are packed when the library is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes import compute, winograd
from tvmflow.passes._function import (
    ALONE,
    TAKES_EPILOGUE,
    Facts,
    is_depthwise,
    is_float,
    kept_as,
    kind_of,
    origin_of,
    rewritten,
    shape_of,
)
from tvmflow.passes.quantised import whole_dtype

# What gives no NaN and no infinity for lanes that hold zeros, or what the others here made of zeros.
_SAFE: Final = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "maximum", "minimum", "clip", "negative", "abs"),
        *("sigmoid", "tanh", "erf", "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.silu"),
        *("nn.gelu_tanh", "nn.relu6"),
    )
)
# What may be done to blocked data only where no lane is empty.
_EXACT: Final = frozenset(
    f"relax.{name}"
    for name in ("divide", "exp", "log", "sqrt", "rsqrt", "power", "nn.softplus", "square")
)


BETWEEN: Final = _SAFE | _EXACT
"""Operators that work element by element on blocked data as on plain ones."""

# What makes one number of each channel's image.
_OVER_IMAGES: Final = {
    f"relax.{name}": getattr(relax.op, name) for name in ("mean", "sum", "max", "min")
}


class Blocked(NamedTuple):
    """The blocked form (n, ⌈c/b⌉, h, w, b) of a plain tensor with `channels` channels."""

    var: Any
    channels: int


def block_layouts(
    mod: tvm.IRModule,
    block: int,
    plain: Collection[str] = (),
    tile: int = 0,
    kept: str = "float32",
) -> tvm.IRModule:
    """The module with convolutions on blocked layouts, `block` float32 lanes to a vector; those of the kinds in `plain` stay.

    Those of 3×3 work on tiles of `tile` times `tile` results (see `winograd`), 0: none do.
    Packed weights are kept in the dtype `kept`, or as the whole numbers that they are, and multiplied in that of the data.
    """
    return rewritten(mod, _Blocker(mod, Facts(mod["main"]), block, plain, tile, kept))


@mutator
class _Blocker(PyExprMutator):  # type: ignore[misc]
    def __init__(
        self,
        mod: tvm.IRModule,
        facts: Facts,
        block: int,
        plain: Collection[str],
        tile: int,
        kept: str,
    ) -> None:
        super().__init__(mod)
        self._facts = facts
        self._block = block
        self._kept = kept
        self._plain_kinds = plain
        self._tile = tile
        self._forms: dict[Any, Blocked] = {}
        self._packed: dict[Any, Blocked] = {}
        self._roads: Mapping[str, Callable[[Any, Any], Any]] = {
            "relax.nn.conv2d": self._conv2d,
            "relax.nn.conv2d_transpose": self._conv2d_transpose,
            "relax.nn.max_pool2d": self._pool2d,
            "relax.nn.avg_pool2d": self._pool2d,
            "relax.nn.adaptive_avg_pool2d": self._adaptive_pool2d,
            **dict.fromkeys(_OVER_IMAGES, self._over_image),
            "relax.concat": self._concat,
            **dict.fromkeys(("relax.quantize", "relax.dequantize"), self._rounded),
            **dict.fromkeys(BETWEEN, self._elementwise),
        }

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        road = self._roads.get(getattr(call.op, "name", ""))
        is_ours = is_float(call) or (bool(call.args) and is_float(call.args[0]))
        if road is None or self._is_weight(call) or not is_ours:
            return made
        arguments = [origin_of(argument, self.lookup_binding) for argument in made.args]
        found = road(call, relax.Call(made.op, arguments, made.attrs))
        return made if found is None else self._plain(found)

    # ---- roads: the original call and the same with its new arguments; None declines

    def _conv2d(self, call: Any, made: Any) -> Blocked | None:
        data, kernel = made.args
        options = [_pair(call, name) for name in ("strides", "padding", "dilation")]
        if not self._fits(call, "OIHW"):
            return None
        groups, channels = int(call.attrs.groups), shape_of(kernel)[0]  # type: ignore[index]
        if is_depthwise(call):
            kernel = self._filled(kernel, 0, self._block)
            outer, _, height, width = shape_of(kernel)  # type: ignore[misc]
            shape = [outer // self._block, self._block, height, width]
            w = self._moved(self._reshaped(kernel, shape), [0, 2, 3, 1])
            w = kept_as(self.builder_, w, self._kept_of(call))
            return self._depthwise("depthwise_conv2d", data, w, channels, options)
        if not self._has_full_groups(call):
            return None
        x, lanes = self._data(data)
        if lanes > 1 and self._pays_in_tiles(call, options):
            return Blocked(self._winograd(call, x, kernel, options[1]), channels)
        w = kept_as(self.builder_, self._pack_kernel(kernel, lanes), self._kept_of(call))
        result = self._emit(compute.conv2d, "conv2d_NCHWc", x, w, *options, groups)
        return Blocked(result, channels)

    def _pays_in_tiles(self, call: Any, options: Sequence[list[int]]) -> bool:
        """Whether a convolution has the one kernel for which there are transforms, and work enough to pay for them."""
        strides, _, dilation = options
        out, inner, *kernel = shape_of(call.args[1])  # type: ignore[misc]
        n, _, *sizes = shape_of(call)  # type: ignore[misc]
        return (
            bool(self._tile)
            and (kernel, strides, dilation) == ([3, 3], [1, 1], [1, 1])
            and int(call.attrs.groups) == 1
            and winograd.pays(self._tile, out, inner, (n, *sizes), self._block)
        )

    def _winograd(self, call: Any, x: Any, kernel: Any, padding: list[int]) -> Any:
        n, _, height, width = shape_of(call)  # type: ignore[misc]
        block = self._block
        kernel = self._filled(self._filled(kernel, 0, block), 1, block)
        o, i = shape_of(kernel)[:2]  # type: ignore[index]
        matrix = winograd.TRANSFORMS[self._tile].weights.astype("float32")
        emit, size = self.builder_.emit, len(matrix)
        left = emit(relax.op.matmul(relax.const(matrix), kernel))
        made = emit(relax.op.matmul(left, relax.const(matrix.T.copy())))
        made = self._reshaped(made, [o // block, block, i // block, block, size, size])
        w = kept_as(self.builder_, self._moved(made, [4, 5, 0, 2, 3, 1]), self._kept)
        data = self._emit(
            *(winograd.transformed_data, f"{winograd.DATA}_NCHWc", x, self._tile, padding),
            attrs=ALONE,
        )
        product = self._emit(winograd.product, f"{winograd.PRODUCT}_NCHWc", data, w, attrs=ALONE)
        shape = (n, height, width)
        return self._emit(winograd.image, f"{winograd.IMAGE}_NCHWc", product, self._tile, shape)

    def _conv2d_transpose(self, call: Any, made: Any) -> Blocked | None:
        """As a convolution that gives all pixels between two of its data as channels of one.

        Rows s·q to s·q + s − 1 of the result read the same ⌈k/s⌉ rows of data, each with other
        rows of the weights.
        """
        data, kernel = made.args
        result = shape_of(call)
        if not self._fits(call, "IOHW") or result is None or _pair(call, "dilation") != [1, 1]:
            return None
        strides, padding = _pair(call, "strides"), _pair(call, "padding")
        groups, channels = int(call.attrs.groups), result[1]
        sizes = shape_of(data)[2:]  # type: ignore[index]
        reach = [-(-size // step) for size, step in zip(shape_of(kernel)[2:], strides, strict=True)]  # type: ignore[index]
        skips = [
            min(pad // step, far - 1)
            for pad, step, far in zip(padding, strides, reach, strict=False)
        ]
        offsets = [
            pad - skip * step for pad, skip, step in zip(padding, skips, strides, strict=False)
        ]
        rows = [
            max(-(-(out + offset) // step), size - skip)
            for out, offset, step, size, skip in zip(
                result[2:], offsets, strides, sizes, skips, strict=True
            )
        ]
        around = [far - 1 - skip for far, skip in zip(reach, skips, strict=True)]
        around += [row - size + skip for row, size, skip in zip(rows, sizes, skips, strict=True)]
        options = [[1, 1], around, [1, 1]]
        if is_depthwise(call):
            w = self._pack_transposed(kernel, groups, strides, reach, None)
            w = kept_as(self.builder_, w, self._kept)
            name = "depthwise_conv2d_transpose"
            full: Any = self._depthwise(name, data, w, channels, options).var
        elif self._has_full_groups(call):
            x, lanes = self._data(data)
            w = kept_as(
                self.builder_,
                self._pack_transposed(kernel, groups, strides, reach, lanes),
                self._kept,
            )
            full = self._emit(compute.conv2d, "conv2d_transpose_NCHWc", x, w, *options, groups)
        else:
            return None
        if strides != [1, 1] or any(offsets) or rows != list(result[2:]):
            full = self._emit(
                compute.interleave, "interleave", full, strides, offsets, result[2:], attrs=None
            )
        return Blocked(full, channels)

    def _fits(self, call: Any, kernel_layout: str) -> bool:
        """Whether a convolution has shapes that are known, the layouts of every importer, and weights."""
        attrs = call.attrs
        return (
            all(shape_of(each) is not None for each in call.args)
            and kind_of(call) not in self._plain_kinds
            and self._facts.is_weight(call.args[1])
            and (attrs.data_layout, attrs.kernel_layout) == ("NCHW", kernel_layout)
            and attrs.out_layout == "NCHW"
            and is_float(call.args[0])
        )

    def _has_full_groups(self, call: Any) -> bool:
        """Whether the channels of each group, if there are several, fill vectors."""
        groups = int(call.attrs.groups)
        sides = [shape_of(each)[1] // groups for each in (call, call.args[0])]  # type: ignore[index]
        return groups == 1 or not any(side % self._block for side in sides)

    def _data(self, data: Any) -> tuple[Any, int]:
        """A convolution's data, and their lanes: 1 for those that come plain and have few channels."""
        if shape_of(data)[1] <= self._block // 2 and data not in self._forms:  # type: ignore[index]
            return data, 1
        return self._blocked(data), self._block

    def _depthwise(
        self, name: str, data: Any, kernel: Any, channels: int, options: Sequence[list[int]]
    ) -> Blocked:
        x = self._blocked(data)
        made = self._emit(compute.depthwise_conv2d, f"{name}_NCHWc", x, kernel, *options)
        return Blocked(made, channels)

    def _elementwise(self, call: Any, made: Any) -> Blocked | None:
        shape = shape_of(call)
        forms = [self._forms.get(arg) for arg in made.args]
        if shape is None or len(shape) != 4 or not any(forms):
            return None
        channels = shape[1]
        if not any(form and form.channels == channels for form in forms):
            return None
        if call.op.name not in _SAFE and channels % self._block:
            return None
        shapes = [shape_of(arg) for arg in made.args]
        if any(each is None or len(each) > 4 for each in shapes):
            return None
        arguments = [
            self._aligned(old, new, tuple(each or ()), channels)
            for old, new, each in zip(call.args, made.args, shapes, strict=True)
        ]
        return Blocked(self.builder_.emit(relax.Call(call.op, arguments, call.attrs)), channels)

    def _rounded(self, call: Any, made: Any) -> Blocked | None:
        """To whole numbers and back, by one scale for the whole tensor: zeros come back as zeros."""
        data, *scale = made.args
        form = self._forms.get(data)
        shapes = [shape_of(each) for each in scale]
        if form is None or any(each is None or math.prod(each) != 1 for each in shapes):
            return None
        found = relax.Call(call.op, [form.var, *scale], call.attrs)
        return Blocked(self.builder_.emit(found), form.channels)

    def _pool2d(self, call: Any, made: Any) -> Blocked | None:
        form = self._forms.get(made.args[0])
        attrs = call.attrs
        if form is None or (attrs.layout, attrs.out_layout) != ("NCHW", "NCHW"):
            return None
        kind = "max" if "max" in call.op.name else "avg"
        options: dict[str, Any] = {
            "kernel": attrs.pool_size,
            "stride": attrs.strides,
            "dilation": attrs.dilation,
            "padding": attrs.padding,
            "pool_type": kind,
            "ceil_mode": bool(attrs.ceil_mode),
            "layout": f"NCHW{self._block}c",
        }
        if kind == "avg":
            options["count_include_pad"] = bool(attrs.count_include_pad)
        name = f"{kind}_pool2d"
        made = self.builder_.emit_te(topi.nn.pool2d, form.var, **options, primfunc_name_hint=name)
        return Blocked(made, form.channels)

    def _adaptive_pool2d(self, call: Any, made: Any) -> Blocked | None:
        form, shape = self._forms.get(made.args[0]), shape_of(call)
        if form is None or shape is None or call.attrs.layout != "NCHW":
            return None
        layout = f"NCHW{self._block}c"
        made = self.builder_.emit_te(
            topi.nn.adaptive_pool,
            *(form.var, shape[2:], "avg", layout),
            primfunc_name_hint="adaptive_avg_pool2d",
        )
        return Blocked(made, form.channels)

    def _over_image(self, call: Any, made: Any) -> Blocked | None:
        form = self._forms.get(made.args[0])
        axes = sorted(int(axis) % 4 for axis in call.attrs.axis or ())
        if form is None or axes != [2, 3] or not call.attrs.keepdims:
            return None
        reduced = _OVER_IMAGES[call.op.name](form.var, [2, 3], keepdims=True)
        return Blocked(self.builder_.emit(reduced), form.channels)

    def _concat(self, call: Any, made: Any) -> Blocked | None:
        fields = self._fields(made.args[0])
        forms = [self._forms.get(each) for each in fields]
        if int(call.attrs.axis) % 4 != 1 or not forms or any(f is None for f in forms):
            return None
        found = [form for form in forms if form is not None]
        if any(form.channels % self._block for form in found[:-1]):
            return None
        parts = relax.Tuple([form.var for form in found])
        joined = self.builder_.emit(relax.op.concat(parts, axis=1))
        return Blocked(joined, sum(form.channels for form in found))

    # ---- forms

    def _plain(self, form: Blocked) -> Any:
        """The plain tensor of a blocked one: a variable that stands for it, and is computed only if it is read."""
        var = self._emit(compute.unpack, "unpack", form.var, form.channels, attrs=None)
        self._forms[var] = form
        return var

    def _blocked(self, data: Any) -> Any:
        form = self._forms.get(data) or self._packed.get(data)
        if form is None:
            channels = shape_of(data)[1]  # type: ignore[index]
            var = self._emit(compute.pack, "pack", data, self._block, attrs=None)
            form = self._packed[data] = Blocked(var, channels)
        return form.var

    def _aligned(self, old: Any, new: Any, shape: tuple[int, ...], channels: int) -> Any:
        """An operand of an element-wise operator in the shape that broadcasts over blocked data."""
        if (form := self._forms.get(new)) and form.channels == channels:
            return form.var
        if all(extent == 1 for extent in shape):
            return new if len(shape) == 0 else self._reshaped(new, [1] * 5)
        full = [1] * (4 - len(shape)) + list(shape)
        if full[1] == 1:
            return self._reshaped(new, [*full, 1])
        new = new if len(shape) == 4 else self._reshaped(new, full)
        if not self._facts.is_weight(old):
            return self._blocked(new)
        new = self._filled(new, 1, self._block)
        n, c, height, width = shape_of(new)  # type: ignore[misc]
        new = self._reshaped(new, [n, c // self._block, self._block, height, width])
        return self._moved(new, [0, 1, 3, 4, 2])

    def _pack_kernel(self, kernel: Any, lanes: int) -> Any:
        """OIHW as (o/b, i/lanes, h, w, lanes of i, b of o); without the axis of lanes where they are 1."""
        block = self._block
        kernel = self._filled(self._filled(kernel, 0, block), 1, lanes)
        o, i, height, width = shape_of(kernel)  # type: ignore[misc]
        if lanes == 1:
            kernel = self._reshaped(kernel, [o // block, block, i, height, width])
            return self._moved(kernel, [0, 2, 3, 4, 1])
        split = [o // block, block, i // lanes, lanes, height, width]
        return self._moved(self._reshaped(kernel, split), [0, 2, 4, 5, 3, 1])

    def _pack_transposed(
        self, kernel: Any, groups: int, strides: list[int], reach: list[int], lanes: int | None
    ) -> Any:
        """IOHW as the weights of the convolution that gives `strides` pixels for each, in the order of `_pack_kernel`.

        `lanes` is None for the weights of a depthwise one. The kernel is turned round: what a
        transposed convolution spreads, a convolution gathers.
        """
        block, (s, t), (h, w) = self._block, strides, reach
        for axis, extent in ((2, s * h), (3, t * w)):
            kernel = self._filled(kernel, axis, extent)
        kernel = self._filled(kernel, 0, block if lanes in (None, block) else 1)
        if lanes is None:
            blocks = shape_of(kernel)[0] // block  # type: ignore[index]
            split = self._turned(self._reshaped(kernel, [blocks, block, h, s, w, t]), (2, 4))
            split = self._moved(split, [0, 3, 5, 2, 4, 1])
            return self._reshaped(split, [blocks * s * t, h, w, block])
        kernel = self._filled(kernel, 1, block)
        i, o = (int(n) for n in shape_of(kernel)[:2])  # type: ignore[index]
        i, o = i // groups // lanes, o // block
        split = self._reshaped(kernel, [groups, i, lanes, o, block, h, s, w, t])
        split = self._moved(self._turned(split, (5, 7)), [0, 3, 6, 8, 1, 5, 7, 2, 4])
        inner = [lanes, block] if lanes > 1 else [block]
        return self._reshaped(split, [groups * o * s * t, i, h, w, *inner])

    def _kept_of(self, call: Any) -> str:
        """The dtype in which the library keeps a convolution's packed weights."""
        return whole_dtype(self._facts, call.args[1]) or self._kept

    def _turned(self, tensor: Any, axes: Sequence[int]) -> Any:
        for axis in axes:
            tensor = self.builder_.emit(relax.op.flip(tensor, axis))
        return tensor

    def _moved(self, tensor: Any, axes: Sequence[int]) -> Any:
        return self.builder_.emit(relax.op.permute_dims(tensor, list(axes)))

    def _filled(self, tensor: Any, axis: int, multiple: int) -> Any:
        """A tensor with zeros behind it along an axis, up to a multiple."""
        shape = shape_of(tensor)
        missing = -shape[axis] % multiple  # type: ignore[index]
        if not missing:
            return tensor
        width = [0] * (2 * len(shape))  # type: ignore[arg-type]
        width[2 * axis + 1] = missing
        return self.builder_.emit(relax.op.nn.pad(tensor, width))

    def _reshaped(self, tensor: Any, shape: Sequence[int]) -> Any:
        return self.builder_.emit(relax.op.reshape(tensor, relax.ShapeExpr(list(shape))))

    def _emit(self, function: Any, name: str, *args: Any, attrs: Any = TAKES_EPILOGUE) -> Any:
        hints = {"primfunc_name_hint": name, **({"primfunc_attrs": attrs} if attrs else {})}
        return self.builder_.emit_te(function, *args, **hints)

    def _fields(self, expr: Any) -> list[Any]:
        value = expr if isinstance(expr, relax.Tuple) else self.lookup_binding(expr)
        is_tuple = isinstance(value, relax.Tuple)
        return [origin_of(each, self.lookup_binding) for each in value.fields] if is_tuple else []

    def _is_weight(self, call: Any) -> bool:
        return all(self._facts.is_weight(arg) for arg in call.args)


def _pair(call: Any, name: str) -> list[int]:
    """An attribute of a convolution that is a list of numbers."""
    return [int(each) for each in getattr(call.attrs, name)]
