"""Moves convolutions, and what lies between them, to layouts whose innermost axis is one vector.

`NCHW[b]c` for data and `OIHW[b]i[b]o` for weights, as in oneDNN and in Liu et al., "Optimizing
CNN Model Inference on CPUs" (USENIX ATC 2019). Data are packed where the first convolution
needs it and unpacked where an operator without a road here reads it; everything between
stays packed. Weights are packed when the library is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes import compute
from tvmflow.passes._function import TAKES_EPILOGUE, Facts, is_float, is_straight, shape_of

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


class Blocked(NamedTuple):
    """The blocked form (n, ⌈c/b⌉, h, w, b) of a plain tensor with `channels` channels."""

    var: Any
    channels: int


def block_layouts(mod: tvm.IRModule, block: int) -> tvm.IRModule:
    """The module with convolutions on blocked layouts, `block` float32 lanes to a vector."""
    if not is_straight(mod):
        return mod
    main = mod["main"]
    blocker = _Blocker(mod, Facts(main), block)
    made = blocker.visit_expr(main)
    blocker.builder_.update_func(mod.get_global_var("main"), made)
    return relax.transform.DeadCodeElimination(["main"])(blocker.builder_.get())


@mutator
class _Blocker(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, facts: Facts, block: int) -> None:
        super().__init__(mod)
        self._facts = facts
        self._block = block
        self._forms: dict[Any, Blocked] = {}
        self._packed: dict[Any, Blocked] = {}
        self._roads: Mapping[str, Callable[[Any, Any], Any]] = {
            "relax.nn.conv2d": self._conv2d,
            "relax.nn.max_pool2d": self._pool2d,
            "relax.nn.avg_pool2d": self._pool2d,
            "relax.mean": self._mean,
            "relax.concat": self._concat,
            **dict.fromkeys(_SAFE | _EXACT, self._elementwise),
        }

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        road = self._roads.get(getattr(call.op, "name", ""))
        if road is None or self._is_weight(call) or not is_float(call):
            return made
        arguments = [self._origin(argument) for argument in made.args]
        found = road(call, relax.Call(made.op, arguments, made.attrs))
        return made if found is None else self._plain(found)

    # ---- roads: the original call and the same with its new arguments; None declines

    def _conv2d(self, call: Any, made: Any) -> Blocked | None:
        data, kernel = made.args
        sizes, weights = shape_of(call.args[0]), shape_of(call.args[1])
        attrs = call.attrs
        if (
            sizes is None
            or weights is None
            or not self._facts.is_weight(call.args[1])
            or (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW")
            or attrs.out_layout != "NCHW"
            or not is_float(data)
        ):
            return None
        groups, channels = int(attrs.groups), weights[0]
        names = ("strides", "padding", "dilation")
        options = [[int(each) for each in getattr(attrs, name)] for name in names]
        if groups == sizes[1] == channels:
            return self._depthwise(data, kernel, channels, options)
        sides = (sizes[1] // groups, channels // groups)
        if groups > 1 and any(side % self._block for side in sides):
            return None
        if sizes[1] <= self._block // 2 and data not in self._forms:
            x, lanes = data, 1
        else:
            x, lanes = self._blocked(data), self._block
        w = self._pack_kernel(kernel, lanes)
        result = self._emit(compute.conv2d, "conv2d", x, w, *options, groups)
        return Blocked(result, channels)

    def _depthwise(
        self, data: Any, kernel: Any, channels: int, options: Sequence[list[int]]
    ) -> Blocked:
        emit, block = self.builder_.emit, self._block
        kernel = self._filled(kernel, 0)
        outer, _, height, width = shape_of(kernel)  # type: ignore[misc]
        shape = [outer // block, block, height, width]
        kernel = emit(relax.op.reshape(kernel, relax.ShapeExpr(shape)))
        kernel = emit(relax.op.permute_dims(kernel, [0, 2, 3, 1]))
        x = self._blocked(data)
        made = self._emit(compute.depthwise_conv2d, "depthwise_conv2d", x, kernel, *options)
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

    def _mean(self, call: Any, made: Any) -> Blocked | None:
        form = self._forms.get(made.args[0])
        axes = sorted(int(axis) % 4 for axis in call.attrs.axis or ())
        if form is None or axes != [2, 3] or not call.attrs.keepdims:
            return None
        emit = self.builder_.emit
        return Blocked(emit(relax.op.mean(form.var, [2, 3], keepdims=True)), form.channels)

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
        new = self._filled(new, 1)
        n, c, height, width = shape_of(new)  # type: ignore[misc]
        new = self._reshaped(new, [n, c // self._block, self._block, height, width])
        return self.builder_.emit(relax.op.permute_dims(new, [0, 1, 3, 4, 2]))

    def _pack_kernel(self, kernel: Any, lanes: int) -> Any:
        """OIHW as (o/b, i/lanes, h, w, lanes of i, b of o); without the axis of lanes where they are 1."""
        emit, block = self.builder_.emit, self._block
        kernel = self._filled(kernel, 0)
        kernel = kernel if lanes == 1 else self._filled(kernel, 1)
        o, i, height, width = shape_of(kernel)  # type: ignore[misc]
        if lanes == 1:
            kernel = self._reshaped(kernel, [o // block, block, i, height, width])
            return emit(relax.op.permute_dims(kernel, [0, 2, 3, 4, 1]))
        split = [o // block, block, i // lanes, lanes, height, width]
        return emit(relax.op.permute_dims(self._reshaped(kernel, split), [0, 2, 4, 5, 3, 1]))

    def _filled(self, tensor: Any, axis: int) -> Any:
        """A tensor with zeros behind it along an axis, up to a multiple of the block."""
        shape = shape_of(tensor)
        missing = -shape[axis] % self._block  # type: ignore[index]
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
        return [self._origin(each) for each in value.fields] if is_tuple else []

    def _origin(self, expr: Any) -> Any:
        """The variable that an argument was first bound to."""
        while isinstance(expr, relax.Var):
            value = self.lookup_binding(expr)
            if not isinstance(value, relax.Var):
                break
            expr = value
        return expr

    def _is_weight(self, call: Any) -> bool:
        return all(self._facts.is_weight(arg) for arg in call.args)
