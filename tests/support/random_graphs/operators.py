"""How each operator is drawn: shapes of its operands, and values of its attributes that the schema cannot say."""

# a rule in few lines, as a table has it
# fmt: off
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.random_graphs.drawing import NO_VALUE, Graph, Rejected, Value, _np

Rule = Callable[[Graph], object]

FLOATS: Final = "float32 float16 float64"
_FLAG: Final = (1, 0)

ATTRIBUTES: Final[Mapping[str, tuple[Any, ...]]] = {
    "alpha": (0.5, 1.0, 0.0, -0.3, 2.0),
    "beta": (0.5, 0.0, 1.5, -1.0),
    "gamma": (1.5, 0.5),
    "lambd": (0.5, 0.0, 1.5),
    "bias": (0.25, 0.0, 2.0),
    "epsilon": (1e-3, 1e-5, 0.1),
    "momentum": (0.5,),
    "keepdims": _FLAG,
    "noop_with_empty_axes": _FLAG,
    "select_last_index": _FLAG,
    "exclusive": _FLAG,
    "reverse": _FLAG,
    "largest": _FLAG,
    "sorted": _FLAG,
    "fmod": _FLAG,
    "detect_negative": _FLAG,
    "detect_positive": _FLAG,
    "saturate": _FLAG,
    "upper": _FLAG,
    "allowzero": _FLAG,
    "stash_type": (1,),
    "training_mode": (0,),
    "approximate": ("tanh", "none"),
    "Cast.round_mode": ("up", "down", "nearest"),
    "CastLike.round_mode": ("up",),
    "BitShift.direction": ("LEFT", "RIGHT"),
    "LpNormalization.p": (1, 2),
    "p": (1, 2, 3),
    "EyeLike.k": (0, 1, -1, 3, -9),
    "EyeLike.dtype": (TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE),
    "align_corners": _FLAG,
    "output_datatype": (TensorProto.FLOAT, TensorProto.DOUBLE),
    "periodic": _FLAG,
    "onesided": _FLAG,
    "inverse": _FLAG,
    "interleaved": _FLAG,
    "reduction": ("mean", "sum", "none"),
    "ignore_index": (0, 1, -100),
    "ScatterElements.reduction": ("none", "add", "mul", "max", "min"),
    "ScatterND.reduction": ("none", "add", "mul", "max", "min"),
    "mode": (),
    "Dropout.seed": (1, 7),
    "is_causal": _FLAG,
    "scale": (0.5, 1.0, 0.1),
    "softcap": (0.0, 2.0),
    "softmax_precision": (TensorProto.FLOAT,),
    "activations": (),
    "center_point_box": _FLAG,
}
"""Values of attributes, for one operator or for all; what a rule gives itself is not drawn from here."""


def drawn(g: Graph, *excluded: str) -> dict[str, Any]:
    """Return some of the attributes that the schema has and the table knows."""
    found = {}
    for name, attribute in sorted(g.schema.attributes.items()):
        values = ATTRIBUTES.get(f"{g.operator}.{name}", ATTRIBUTES.get(name, ()))
        if values and name not in excluded and (attribute.required or g.draw.chance(40)):
            found[name] = g.draw.choice(values)
    return found


# ---------------------------------------------------------------- elementwise


def unary(g: Graph) -> None:
    operand = g.schema.inputs[0]
    g.node(g.tensor(g.shape(), g.dtype(operand.type_str)), **drawn(g))


def _pair(g: Graph, variables: tuple[str, str]) -> tuple[Value, Value]:
    shape = g.shape()
    shapes = [g.broadcast(shape), g.broadcast(shape)]
    if g.draw.chance(50):
        shapes[g.draw.below(2)] = shape
    first = g.dtype(variables[0])
    second = first if variables[0] == variables[1] else g.dtype(variables[1])
    return g.tensor(shapes[0], first), g.tensor(shapes[1], second)


def binary(g: Graph) -> None:
    left, right = (operand.type_str for operand in g.schema.inputs)
    g.node(*_pair(g, (left, right)), **drawn(g))


def division(g: Graph) -> None:
    """Divide; integers never by zero, nor their least number by -1, which ONNX leaves open."""
    shape, dtype = g.shape(), g.dtype("T")
    left, right = g.numbers(shape, dtype), g.numbers(g.broadcast(shape), dtype)
    if dtype in ("bfloat16", *FLOATS.split()):
        attributes = {"fmod": 1} if g.operator == "Mod" else {}
    else:
        right = np.where(right == 0, np.ones_like(right), right)
        if "u" not in dtype:
            left = np.maximum(left, np.iinfo(left.dtype).min + 1)
        attributes = drawn(g)
    g.node(g.tensor(left.shape, dtype, values=left), g.tensor(right.shape, dtype, values=right), **attributes)


def power(g: Graph) -> None:
    """Raise to powers; integers to small ones that are not negative."""
    shape, base, exponent = g.shape(), g.dtype("T"), g.dtype("T1")
    values = g.numbers(g.broadcast(shape), exponent, tame=True)
    if exponent not in FLOATS.split() or base not in FLOATS.split():
        values = np.abs(np.round(values)) % 4
    g.node(g.tensor(shape, base, tame=base not in FLOATS), g.tensor(values.shape, exponent, values=values))


def shift(g: Graph) -> None:
    shape, dtype = g.shape(), g.dtype("T")
    values = g.rng.integers(0, 8, g.broadcast(shape))
    g.node(g.tensor(shape, dtype), g.tensor(values.shape, dtype, values=values), **drawn(g))


def variadic(g: Graph) -> None:
    shape, dtype = g.shape(), g.dtype(g.schema.inputs[0].type_str)
    g.node(*[g.tensor(g.broadcast(shape), dtype) for _ in range(g.draw.between(1, 3))])


def where(g: Graph) -> None:
    shape, dtype = g.shape(), g.dtype("T")
    g.node(g.tensor(g.broadcast(shape), "bool"), g.tensor(shape, dtype), g.tensor(g.broadcast(shape), dtype))


def clip(g: Graph) -> None:
    dtype = g.dtype("T")
    x = g.tensor(g.shape(), dtype)
    low, high = (0, 3) if dtype.startswith("u") else (-1, 2)
    bounds = [g.tensor([], dtype, values=v) if g.draw.chance(70) else NO_VALUE for v in (low, high)]
    g.node(x, *bounds)


def prelu(g: Graph) -> None:
    shape, dtype = g.shape(1), g.dtype("T")
    g.node(g.tensor(shape, dtype), g.tensor(g.broadcast(shape), dtype))


# ---------------------------------------------------------------- along axes


def reduction(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    axes = None
    if g.draw.chance(70) and x.rank:
        axes = [a - x.rank if g.draw.chance(30) else a for a in g.draw.subset(range(x.rank))]
    if len(g.schema.inputs) == 1:
        g.node(x, axes=axes or None, **drawn(g))
    else:
        g.node(x, NO_VALUE if axes is None else g.ints(axes), **drawn(g))


def along_axis(g: Graph) -> None:
    """Softmax, ArgMax and the like: an attribute `axis`."""
    x = g.tensor(g.shape(1), g.dtype(g.schema.inputs[0].type_str))
    g.node(x, axis=g.maybe(g.axis(x.rank)), **drawn(g, "axis"))


def cumulative(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    g.node(x, g.ints(g.axis(x.rank)), **drawn(g))


def mean_variance(g: Graph) -> None:
    x = g.tensor(g.shape(4), g.dtype("T"), tame=True)
    g.node(x, axes=g.maybe(g.draw.choice(([0, 2, 3], [1], [2, 3], [0, 1, 2, 3]))))


def top_k(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    attributes = {**drawn(g), "sorted": 1} if "sorted" in g.schema.attributes else {}
    g.node(x, g.ints([g.draw.between(0, x.shape[axis])]), outputs=2, axis=axis, **attributes)


def layer_norm(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"), tame=True)
    axis = g.axis(x.rank)
    shape = x.shape[axis:]
    operands = [g.tensor(shape, g.dtype("T", among=str(x.array.dtype)), tame=True)]
    if g.operator == "LayerNormalization" and g.draw.chance(50):
        operands.append(g.tensor(shape, str(x.array.dtype), tame=True))
    g.node(x, *operands, axis=axis, **drawn(g))


def channel_norm(g: Graph) -> None:
    """InstanceNormalization, GroupNormalization, BatchNormalization, LRN."""
    g.wildness = 0
    channels = g.draw.choice((2, 4, 6))
    shape = [g.size(), channels, *g.shape(*((2, 2) if g.operator == "LRN" else (1, 3)))]
    dtype = g.dtype("T")
    x, attributes = g.tensor(shape, dtype), drawn(g)
    vector = [channels]
    if g.operator == "LRN":
        attributes.pop("bias", None)
        attributes["alpha"] = g.draw.choice((0.5, 1e-4))
        g.node(x, size=g.draw.choice((3, 1, 5)), **attributes)
        return
    if g.operator == "GroupNormalization":
        attributes["num_groups"] = g.draw.choice((1, 2, channels))
        vector = [channels if g.since(21) else attributes["num_groups"]]
    operands = [g.tensor(vector, dtype) for _ in range(2)]
    if g.operator == "BatchNormalization":
        variance = np.abs(g.numbers(vector, dtype)) + 0.5
        operands += [g.tensor(vector, dtype), g.tensor(vector, dtype, values=variance)]
    g.node(x, *operands, **attributes)


# ---------------------------------------------------------------- moving and selecting


def cast(g: Graph) -> None:
    """Cast; floats to integers only in their range, beyond which ONNX leaves it open."""
    source, to = g.dtype("T1"), g.dtype("T2")
    values = g.numbers(g.shape(), source, tame=not _is_float(to))
    if _is_float(source) and not _is_float(to) and to != "bool":
        values = np.clip(values, 0 if to.startswith("u") else -7, 7)
    x = g.tensor(values.shape, source, values=values)
    attributes = drawn(g, *([] if "float8" in to else ["saturate", "round_mode"]))
    if g.operator == "CastLike":
        g.node(x, g.tensor(g.shape(), to), **attributes)
    else:
        g.node(x, to=_element(to), **attributes)


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _element(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(_np(dtype)))


def bit_cast(g: Graph) -> None:
    same = g.draw.choice((("int32", "float32"), ("float32", "uint32"), ("float16", "int16"), ("int64", "float64")))
    g.node(g.tensor(g.shape(), same[0]), to=_element(same[1]))


def concat(g: Graph) -> None:
    shape, dtype = g.shape(1), g.dtype("T")
    axis = g.axis(len(shape))
    parts = []
    for _ in range(g.draw.between(1, 3)):
        part = list(shape)
        part[axis] = g.size()
        parts.append(g.tensor(part, dtype))
    g.node(*parts, axis=axis)


def constant_of_shape(g: Graph) -> None:
    dtype = g.dtype("T2")
    value = helper.make_tensor("v", _element(dtype), [1], g.numbers([1], dtype).tolist())
    g.node(g.ints(g.shape()), value=g.maybe(value))


def constant(g: Graph) -> None:
    dtype = g.dtype("T")
    value = g.numbers(g.shape(), dtype)
    kind = g.draw.choice(("value", "value_float", "value_floats", "value_int", "value_ints"))
    if kind == "value":
        tensor = helper.make_tensor("v", _element(dtype), value.shape, value.tobytes(), raw=True)
        g.node(value=tensor)
    else:
        values: dict[str, Any] = {"value_float": 0.5, "value_floats": [1.5, -2.0], "value_int": 3, "value_ints": [4, 5]}
        g.node(**{kind: values[kind]})
    # without an input, there is nothing to run
    x = g.tensor([1], "float32", constant=False)
    g.outputs = ["y0", *g.then("Neg", x.name)]


def space(g: Graph) -> None:
    block = g.draw.choice((2, 1, 3))
    n, c, h, w = g.size(), g.draw.between(1, 3), g.draw.between(1, 4), g.draw.between(1, 4)
    if g.operator == "DepthToSpace":
        c *= block * block
    else:
        h, w = h * block, w * block
    mode = g.maybe(g.draw.choice(("DCR", "CRD")))
    g.node(g.tensor([n, c, h, w], g.dtype("T")), blocksize=block, mode=mode)


def expand(g: Graph) -> None:
    shape = g.shape()
    x = g.tensor(g.broadcast(shape), g.dtype("T"))
    g.node(x, g.ints(shape if g.draw.chance(70) else g.broadcast(shape)))


def eye_like(g: Graph) -> None:
    g.node(g.tensor(g.shape(2, 2), g.dtype("T1")), **drawn(g))


def flatten(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    g.node(x, axis=g.maybe(g.draw.between(-x.rank, x.rank)))


def gather(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    indices = g.indices(g.shape(0, 3), x.shape[axis], g.dtype("Tind"))
    g.node(x, indices, axis=g.maybe(axis) if axis == 0 else axis)


def gather_elements(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    shape = [g.draw.between(0 if n == 0 else 1, n) if g.draw.chance(40) else n for n in x.shape]
    shape[axis] = g.size()
    g.node(x, g.indices(shape, x.shape[axis], g.dtype("Tind")), axis=axis)


def gather_nd(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    batch = g.draw.between(0, x.rank - 1)
    last = g.draw.between(1, x.rank - batch)
    middle = g.shape(0, 2)
    parts = [g.rng.integers(-n if g.draw.chance(30) else 0, n, [*x.shape[:batch], *middle]) if n else None for n in x.shape[batch : batch + last]]
    if any(part is None for part in parts):
        raise Rejected("no index is valid")
    indices = np.stack([part for part in parts if part is not None], -1)
    g.node(x, g.tensor(indices.shape, "int64", values=indices), batch_dims=batch or None)


def compress(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.maybe(g.axis(x.rank))
    many = x.array.size if axis is None else x.shape[axis]
    g.node(x, g.tensor([g.draw.between(0, many) if g.draw.chance(30) else many], "bool"), axis=axis)


def one_hot(g: Graph) -> None:
    depth = g.draw.between(1, 5)
    indices = g.numbers(g.shape(0, 3), g.dtype("T1"), tame=True).round()
    values = g.tensor([2], g.dtype("T3"))
    x = g.tensor(indices.shape, str(indices.dtype), values=indices)
    operand = depth if g.draw.chance(50) else [depth]
    g.node(x, g.ints(operand, g.dtype("T2", among="int64 int32 float32")), values, axis=g.maybe(g.axis(x.rank + 1)))


def pad(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    mode = g.maybe(g.draw.choice(("constant", "edge", "reflect", *(["wrap"] if g.since(19) else []))))
    low, high = (-1, 3)
    axes = list(range(x.rank))
    if g.since(18) and g.draw.chance(30):
        axes = g.draw.subset(axes)
    limits = [min(high, max(0, x.shape[a] - 1)) if mode in ("reflect", "wrap") else high for a in axes]
    if mode in ("edge", "wrap") and 0 in x.shape:
        raise Rejected("nothing to repeat")
    least = 0 if mode and mode != "constant" else low
    pads = [g.draw.between(least if x.shape[a] > 2 else 0, limit) for a, limit in zip(axes * 2, limits * 2, strict=True)]
    operands = [g.ints(pads)]
    is_partial = len(axes) < x.rank
    operands.append(g.tensor([], str(x.array.dtype)) if g.draw.chance(40) else NO_VALUE)
    if is_partial:
        operands.append(g.ints([a - x.rank if g.draw.chance(30) else a for a in axes]))
    g.node(x, *operands, mode=mode)


def range_(g: Graph) -> None:
    dtype = g.dtype("T", among="float32 float64 int64 int32 int16")
    start, delta = g.draw.between(-3, 3), g.draw.choice((1, 2, -1, 3))
    limit = start + delta * g.draw.between(0, 6) - (1 if g.draw.chance(30) else 0)
    g.node(*(g.tensor([], dtype, values=v, constant=not g.draw.chance(15)) for v in (start, limit, delta)))
    _with_input(g)


def _with_input(g: Graph) -> None:
    """Add an input and an output of it to a graph of constants: there must be something to run."""
    if not g.inputs:
        x = g.tensor([2], "float32", constant=False)
        g.outputs = [*g.outputs, *g.then("Neg", x.name)]


def reshape(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    order = g.draw.choice(("flat", "split", "keep", "merge"))
    size = x.array.size
    allow = 0
    if order == "flat" or not x.rank:
        shape = [-1] if size else [0]
        allow = int(not size)
    elif order == "split":
        first = g.draw.choice([d for d in range(1, size + 1) if size % d == 0] or [1])
        shape = [first, -1] if size else [0, 3]
        allow = int(not size)
    elif order == "keep":
        shape = [0, *([-1] if size else x.shape[1:])]
    else:
        shape = [*x.shape[2:], -1] if size else list(x.shape)
        allow = int(not size)
    g.node(x, g.ints(shape), allowzero=allow or None)


def resize(g: Graph) -> None:
    rank = g.draw.choice((4, 3, 5, 2))
    shape = [g.draw.between(1, 3), g.draw.between(1, 3), *(g.draw.between(1, 7) for _ in range(rank))][:rank]
    x = g.tensor(shape, g.dtype("T1", among="float32 float16 uint8 int8 float64 int32"), tame=True)
    mode = g.draw.choice(("nearest", "linear", "cubic"))
    attributes: dict[str, Any] = {"mode": mode}
    spatial = list(range(2, rank)) if rank > 2 else [0, 1]
    modes = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_crop_and_resize"]
    modes += ["half_pixel_symmetric"] if g.since(19) else []
    transform = g.draw.choice(modes)
    if g.draw.chance(70):
        attributes["coordinate_transformation_mode"] = transform
    else:
        transform = "half_pixel"
    if mode == "nearest" and g.draw.chance(60):
        attributes["nearest_mode"] = g.draw.choice(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
    if mode == "cubic":
        attributes |= {k: v for k, v in (("cubic_coeff_a", -0.5), ("exclude_outside", 1)) if g.draw.chance(40)}
    if g.since(18) and mode != "nearest" and g.draw.chance(20):
        attributes["antialias"] = 1
    if g.draw.chance(20):
        attributes["extrapolation_value"] = 2.5
    axes = None
    if g.since(18) and g.draw.chance(30):
        axes = [a - rank if g.draw.chance(20) else a for a in spatial]
        attributes["axes"] = axes
    full = [i in spatial for i in range(rank)]
    roi = NO_VALUE
    if transform == "tf_crop_and_resize":
        count = len(spatial) if axes else rank
        inner = [True] * count if axes else full
        roi = g.tensor([2 * count], "float32", values=[0.1 if f else 0.0 for f in inner] + [0.8 if f else 1.0 for f in inner], constant=True)
    if g.draw.chance(50):
        sizes = [g.draw.between(1, 9) if f else n for f, n in zip(full, shape, strict=True)]
        if g.since(18) and axes and g.draw.chance(30):
            attributes["keep_aspect_ratio_policy"] = g.draw.choice(("stretch", "not_larger", "not_smaller"))
        g.node(x, roi, NO_VALUE, g.ints([sizes[a] for a in spatial] if axes else sizes), **attributes)
    else:
        scales = [g.draw.choice((2.0, 1.0, 0.5, 1.5, 0.7, 2.3)) if f else 1.0 for f in full]
        if any(int(s * n) < 1 for s, n in zip(scales, shape, strict=True)):
            raise Rejected("an empty result")
        values = [scales[a] for a in spatial] if axes else scales
        g.node(x, roi, g.tensor([len(values)], "float32", values=values, constant=True), **attributes)


def reverse_sequence(g: Graph) -> None:
    time, batch = g.draw.between(1, 6), g.draw.between(1, 5)
    time_axis = g.draw.choice((0, 1))
    shape = [0, 0, *g.shape(0, 2)]
    shape[time_axis], shape[1 - time_axis] = time, batch
    lengths = g.tensor([batch], "int64", values=g.rng.integers(1, time + 1, batch))
    g.node(g.tensor(shape, g.dtype("T")), lengths, time_axis=time_axis, batch_axis=1 - time_axis)


def scatter_elements(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    shape = [g.draw.between(min(n, 1), n) if g.draw.chance(40) else n for n in x.shape]
    attributes = drawn(g)
    if attributes.get("reduction", "none") == "none" or 0 in shape:
        # no place twice: the order is open
        lines = np.argsort(g.rng.random(x.shape), axis)
        cut = tuple(slice(0, n) for n in shape)
        values = lines[cut]
    else:
        values = g.rng.integers(0, x.shape[axis], shape)
    if g.draw.chance(30):
        values = values - x.shape[axis]
    indices = g.tensor(shape, g.dtype("Tind"), values=values)
    g.node(x, indices, g.tensor(shape, str(x.array.dtype)), axis=axis, **attributes)


def scatter_nd(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    last = g.draw.between(1, x.rank)
    places = int(np.prod(x.shape[:last]))
    count = min(g.draw.between(1, 4), places)
    rows = g.unique_rows(count, x.shape[:last])
    if g.draw.chance(30):
        rows = rows - np.array(x.shape[:last])
    updates = g.tensor([count, *x.shape[last:]], str(x.array.dtype))
    g.node(x, g.tensor([count, last], "int64", values=rows), updates, **drawn(g))


def shape_of(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"), constant=False)
    if g.operator == "Size" or not g.since(15):
        g.node(x)
    else:
        bounds = {name: g.maybe(g.draw.between(-x.rank - 1, x.rank + 1), 30) for name in ("start", "end")}
        g.node(x, **bounds)


def slice_(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axes = g.draw.subset(range(x.rank)) or [0]
    starts, ends, steps = [], [], []
    for axis in axes:
        n = x.shape[axis]
        starts.append(g.draw.between(-n - 1, n + 1))
        ends.append(g.draw.choice((n, g.draw.between(-n - 1, n + 1), (1 << 31) - 1, -(1 << 31))))
        steps.append(g.draw.choice((1, 2, -1, 3, -2)))
    dtype = g.dtype("Tind")
    operands = [g.ints(starts, dtype), g.ints(ends, dtype)]
    has_steps = any(step != 1 for step in steps)
    if axes != list(range(len(axes))) or has_steps or g.draw.chance(40):
        operands.append(g.ints([a - x.rank if g.draw.chance(30) else a for a in axes], dtype))
    if has_steps:
        operands.append(g.ints(steps, dtype))
    g.node(x, *operands)


def _parts(g: Graph, total: int, count: int) -> list[int]:
    cuts = sorted(g.draw.between(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def split(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    size, count = x.shape[axis], g.draw.between(1, 3)
    if g.draw.chance(60):
        g.node(x, g.ints(_parts(g, size, count)), outputs=count, axis=axis)
    elif g.since(18):
        if size < count:
            raise Rejected("fewer rows than parts")
        g.node(x, outputs=count, axis=axis, num_outputs=count)
    else:
        count = g.draw.choice([n for n in (1, 2, 3) if size and size % n == 0] or [1])
        g.node(x, outputs=count, axis=axis)


def squeeze(g: Graph) -> None:
    shape = [1 if g.draw.chance(50) else n for n in g.shape(1)]
    ones = [a for a, n in enumerate(shape) if n == 1]
    x = g.tensor(shape, g.dtype("T"))
    axes = [a - x.rank if g.draw.chance(30) else a for a in g.draw.subset(ones)]
    g.node(x, *([g.ints(axes)] if axes else []))


def unsqueeze(g: Graph) -> None:
    x = g.tensor(g.shape(0, 3), g.dtype("T"))
    count = g.draw.between(1, 2)
    axes = g.draw.permutation(x.rank + count)[:count]
    g.node(x, g.ints([a - x.rank - count if g.draw.chance(30) else a for a in axes]))


def tile(g: Graph) -> None:
    x = g.tensor(g.shape(0, 3), g.dtype("T"))
    g.node(x, g.ints([g.draw.choice((2, 1, 3, 0)) for _ in x.shape]))


def transpose(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    g.node(x, perm=g.maybe(g.draw.permutation(x.rank), 80) or None)


def trilu(g: Graph) -> None:
    x = g.tensor(g.shape(2), g.dtype("T"))
    g.node(x, g.ints(g.draw.choice((0, 1, -1, 2, -7))) if g.draw.chance(60) else NO_VALUE, **drawn(g))


def unique(g: Graph) -> None:
    x = g.tensor(g.shape(1, 2), g.dtype("T", among="float32 int64 int32 int8"), tame=True)
    g.node(x, outputs=g.draw.choice((1, 4)), axis=g.maybe(g.axis(x.rank), 30), **drawn(g))


def center_crop_pad(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axes = g.maybe(g.draw.subset(range(x.rank)) or [0])
    g.node(x, g.ints([g.draw.between(1, 8) for _ in (axes or x.shape)]), axes=axes)


def col2im(g: Graph) -> None:
    image, block = [g.draw.between(3, 6) for _ in range(2)], [g.draw.between(1, 3) for _ in range(2)]
    strides, dilations = [g.draw.between(1, 2) for _ in range(2)], [1, 1]
    pads = [g.draw.below(2) for _ in range(4)]
    counts = [(n + pads[i] + pads[i + 2] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i, n in enumerate(image)]
    shape = [g.draw.between(1, 2), g.draw.between(1, 2) * block[0] * block[1], counts[0] * counts[1]]
    g.node(g.tensor(shape, g.dtype("T", among=FLOATS)), g.ints(image), g.ints(block), strides=g.maybe(strides, 0 if strides == [1, 1] else 100), pads=pads, dilations=g.maybe(dilations))


# ---------------------------------------------------------------- products


def matmul(g: Graph) -> None:
    m, k, n = g.size(), g.size(), g.size()
    batch = g.shape(0, 2)
    left, right = [*g.broadcast(batch), m, k], [*g.broadcast(batch), k, n]
    if g.draw.chance(15):
        left = [k]
    if g.draw.chance(15):
        right = [k]
    if g.operator == "MatMul":
        dtype = g.dtype("T")
        g.node(g.tensor(left, dtype), g.tensor(right, dtype))
        return
    a, b = g.dtype("T1"), g.dtype("T2")
    zeros = [NO_VALUE, NO_VALUE]
    if g.draw.chance(50):
        # one for each row, or for each column
        zeros[0] = g.tensor([], a)
        per_column = len(right) == 2 and g.draw.chance(40)
        zeros[1] = g.tensor([n] if per_column else [], b) if g.draw.chance(60) else NO_VALUE
    g.node(g.tensor(left, a), g.tensor(right, b), *zeros)


def gemm(g: Graph) -> None:
    m, k, n = g.size(), g.size(), g.size()
    attributes = {name: g.maybe(1) for name in ("transA", "transB")} | drawn(g)
    dtype = g.dtype("T")
    a = [k, m] if attributes["transA"] else [m, k]
    b = [n, k] if attributes["transB"] else [k, n]
    bias = [g.tensor(g.broadcast([m, n]), dtype)] if g.draw.chance(60) else []
    g.node(g.tensor(a, dtype), g.tensor(b, dtype), *bias, **attributes)


EQUATIONS: Final = "ij,jk->ik ij->ji bij,bjk->bik ii->i ij-> i,j->ij ...ij,...jk->...ik ij,ij->i bhwk,hkc->bwhc ij,jk ii".split()


def einsum(g: Graph) -> None:
    equation = g.draw.choice(EQUATIONS)
    sizes: dict[str, list[int]] = {"...": [g.size()]}
    operands, dtype = [], g.dtype("T")
    for term in equation.split("->")[0].split(","):
        shape = list(sizes["..."]) if "..." in term else []
        for label in term.replace("...", ""):
            shape += sizes.setdefault(label, [g.size()])
        operands.append(g.tensor(shape, dtype))
    g.node(*operands, equation=equation)


def det(g: Graph) -> None:
    n = g.draw.between(1, 4)
    g.node(g.tensor([*g.shape(0, 2), n, n], g.dtype("T"), tame=True))


def dft(g: Graph) -> None:
    g.wildness = 0
    shape, attributes = [g.draw.between(1, 3), g.draw.between(1, 8), g.draw.between(2, 5), 1], drawn(g)
    if attributes.get("inverse"):
        attributes.pop("onesided", None)
        shape[-1] = 2
    axis = g.draw.choice((1, 2, -2, -3))
    x = g.tensor(shape, g.dtype("T1", among=FLOATS))
    length = g.ints(g.draw.between(1, 8)) if g.draw.chance(30) else NO_VALUE
    if g.since(20):
        g.node(x, length, g.ints(axis) if g.draw.chance(70) else NO_VALUE, **attributes)
    else:
        g.node(x, length, axis=axis % 4, **attributes)


def stft(g: Graph) -> None:
    g.wildness = 0
    frame = g.draw.between(2, 8)
    dtype = g.dtype("T1", among=FLOATS)
    signal = g.tensor([g.draw.between(1, 2), frame + g.draw.between(0, 9), 1], dtype)
    window = g.tensor([frame], dtype) if g.draw.chance(60) else NO_VALUE
    length = g.ints(frame) if not window.name or g.draw.chance(50) else NO_VALUE
    g.node(signal, g.ints(g.draw.between(1, 4)), window, length, **drawn(g))


def window(g: Graph) -> None:
    g.node(g.tensor([], g.dtype("T1"), values=g.draw.between(1, 9), constant=True), **drawn(g))
    _with_input(g)


def mel(g: Graph) -> None:
    values = (("int64", 8), ("int64", 16), ("int64", 8192), ("float32", 10.0), ("float32", 4000.0))
    g.node(*(g.tensor([], dtype, values=v, constant=True) for dtype, v in values), **drawn(g))
    _with_input(g)


# ---------------------------------------------------------------- windows


def _spatial(g: Graph, kernel: list[int], *, ceil: bool = False, dilates: bool = True) -> tuple[list[int], dict[str, Any]]:
    """Return sizes of an image that a kernel fits, and attributes of windows."""
    rank = len(kernel)
    strides = [g.draw.choice((1, 2, 3)) for _ in kernel] if g.draw.chance(50) else None
    dilations = [g.draw.choice((1, 2)) for _ in kernel] if dilates and g.draw.chance(30) else None
    attributes: dict[str, Any] = {"strides": strides}
    if "dilations" in g.schema.attributes:
        attributes["dilations"] = dilations
    reach = [(k - 1) * (attributes.get("dilations") or [1] * rank)[i] + 1 for i, k in enumerate(kernel)]
    padding = g.draw.choice(("none", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"))
    if padding == "pads":
        attributes["pads"] = [g.draw.between(0, k - 1) for k in kernel * 2]
    elif padding != "none":
        attributes["auto_pad"] = padding
    if ceil and "ceil_mode" in g.schema.attributes and "auto_pad" not in attributes:
        attributes["ceil_mode"] = g.maybe(1, 30)
    return [n + g.draw.between(0, 6) for n in reach], attributes


def _kernel(g: Graph) -> list[int]:
    return [g.draw.choice((1, 2, 3, 5)) for _ in range(g.draw.choice((2, 1, 3)))]


def convolution(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel)
    groups = g.draw.choice((1, 2, 3)) if g.draw.chance(30) else 1
    per_group, out = g.draw.choice((1, 2, 3, 8)), g.draw.choice((1, 2, 4, 8)) * groups
    x, w = [g.draw.between(1, 2), per_group * groups, *sizes], [out, per_group, *kernel]
    attributes |= {"group": groups if groups > 1 else None, "kernel_shape": g.maybe(kernel)}
    if g.operator == "Conv":
        dtype = g.dtype("T")
        bias = [g.tensor([out], dtype)] if g.draw.chance(50) else []
        g.node(g.tensor(x, dtype), g.tensor(w, dtype), *bias, **attributes)
    elif g.operator == "ConvInteger":
        a, b = g.dtype("T1"), g.dtype("T2")
        zeros = [g.tensor([], a), g.tensor([out] if g.draw.chance(30) else [], b)] if g.draw.chance(60) else []
        g.node(g.tensor(x, a), g.tensor(w, b), *zeros, **attributes)
    else:
        # QLinearConv
        a, b = g.dtype("T1"), g.dtype("T2")
        bias = [g.tensor([out], "int32")] if g.draw.chance(50) else []
        per_channel = g.draw.chance(30)
        scales = _quantized(g, b, [out] if per_channel else [])
        if b == "int8" and per_channel:
            scales[1].array[...] = 0
        g.node(g.tensor(x, a), *_quantized(g, a), g.tensor(w, b), *scales, *_quantized(g, a), *bias, **attributes)


def transposed_convolution(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel)
    groups = g.draw.choice((1, 2)) if g.draw.chance(30) else 1
    channels, out, dtype = g.draw.choice((1, 2, 4)) * groups, g.draw.choice((1, 2, 3)), g.dtype("T")
    sizes = [min(n, 5) for n in sizes]
    strides = attributes["strides"]
    if strides and g.draw.chance(30):
        attributes["output_padding"] = [g.draw.between(0, s - 1) for s in strides]
    if g.draw.chance(15) and "pads" not in attributes:
        attributes["output_shape"] = [n * (strides or [1] * len(kernel))[i] for i, n in enumerate(sizes)]
    bias = [g.tensor([out * groups], dtype)] if g.draw.chance(50) else []
    attributes |= {"group": groups if groups > 1 else None, "kernel_shape": g.maybe(kernel)}
    g.node(g.tensor([1, channels, *sizes], dtype), g.tensor([channels, out, *kernel], dtype), *bias, **attributes)


def pool(g: Graph) -> None:
    kernel = _kernel(g)
    sizes, attributes = _spatial(g, kernel, ceil=True)
    if g.operator == "AveragePool":
        attributes["count_include_pad"] = g.maybe(1, 30)
    if g.operator == "LpPool":
        attributes |= drawn(g)
    x = g.tensor([g.size(), g.draw.between(1, 3), *sizes], g.dtype("T"))
    outputs = 1
    if g.operator == "MaxPool":
        outputs = g.draw.choice((1, 1, 2))
        attributes["storage_order"] = g.maybe(1, 10)
    g.node(x, kernel_shape=kernel, outputs=outputs, **attributes)


def global_pool(g: Graph) -> None:
    g.node(g.tensor([g.size(), g.size(), *g.shape(1, 3)], g.dtype("T")), **drawn(g))


def max_unpool(g: Graph) -> None:
    n, c, h, w = 1, g.draw.between(1, 2), g.draw.between(1, 3), g.draw.between(1, 3)
    places = np.stack([g.rng.permutation(4 * h * w)[: h * w].reshape(h, w) for _ in range(n * c)]).reshape(n, c, h, w)
    places = places + (np.arange(n * c) * 4 * h * w).reshape(n, c, 1, 1)
    x = g.tensor([n, c, h, w], g.dtype("T1", among=FLOATS))
    size = [g.ints([n, c, 2 * h, 2 * w])] if g.draw.chance(30) else []
    g.node(x, g.tensor(places.shape, "int64", values=places), *size, kernel_shape=[2, 2], strides=[2, 2])


def _boxes(g: Graph, count: int, dtype: str, *, batch: bool) -> Value:
    corners = g.rng.random((count, 2)) * 3
    rows = np.concatenate([corners, corners + 0.5 + g.rng.random((count, 2)) * 3], 1)
    if batch:
        rows = np.concatenate([np.zeros((count, 1)), rows], 1)
    return g.tensor(rows.shape, dtype, values=rows)


def roi_pool(g: Graph) -> None:
    dtype = g.dtype("T")
    x = g.tensor([1, g.draw.between(1, 2), 6, 7], dtype, tame=True)
    g.node(x, _boxes(g, g.draw.between(1, 3), dtype, batch=True), pooled_shape=[g.draw.between(1, 3), 2], spatial_scale=g.maybe(0.5))


def roi_align(g: Graph) -> None:
    dtype, count = g.dtype("T1"), g.draw.between(1, 3)
    n = g.draw.between(1, 2)
    x = g.tensor([n, g.draw.between(1, 2), 6, 7], dtype, tame=True)
    attributes = {
        "mode": g.maybe(g.draw.choice(("avg", "max"))),
        "output_height": g.maybe(g.draw.between(1, 3)),
        "output_width": g.maybe(g.draw.between(1, 3)),
        "sampling_ratio": g.maybe(g.draw.choice((2, 1))),
        "spatial_scale": g.maybe(0.5),
        "coordinate_transformation_mode": g.maybe(g.draw.choice(("half_pixel", "output_half_pixel"))),
    }
    g.node(x, _boxes(g, count, dtype, batch=False), g.indices([count], n), **attributes)


def grid_sample(g: Graph) -> None:
    rank = g.draw.choice((2, 2, 3)) if g.since(20) else 2
    names = ("linear", "nearest", "cubic") if g.since(20) else ("bilinear", "nearest", "bicubic")
    mode = g.draw.choice(names if rank == 2 else names[:2])
    dtype = g.dtype("T1", among="float32 float64")
    n = g.draw.between(1, 2)
    x = g.tensor([n, g.draw.between(1, 2), *(g.draw.between(2, 6) for _ in range(rank))], dtype, tame=True)
    shape = [n, *(g.draw.between(1, 4) for _ in range(rank)), rank]
    values = g.rng.random(shape) * 2.6 - 1.3
    padding = g.maybe(g.draw.choice(("zeros", "border", "reflection")))
    g.node(x, g.tensor(shape, dtype, values=values), mode=g.maybe(mode, 80 if mode == names[0] else 100), padding_mode=padding, **drawn(g, "mode"))


def affine_grid(g: Graph) -> None:
    n, rank = g.draw.between(1, 2), g.draw.choice((2, 3))
    size = [n, 2, *(g.draw.between(1, 4) for _ in range(rank))]
    g.node(g.tensor([n, rank, rank + 1], g.dtype("T1", among=FLOATS), tame=True), g.ints(size), **drawn(g))


def suppression(g: Graph) -> None:
    n, classes, count = g.draw.between(1, 2), g.draw.between(1, 2), g.draw.between(1, 6)
    corners = g.rng.random((n, count, 2))
    boxes = np.concatenate([corners, corners + g.rng.random((n, count, 2))], -1)
    # no equal scores
    scores = g.rng.permutation(n * classes * count).reshape(n, classes, count) / 10
    operands = [g.tensor([1], "int64", values=[g.draw.between(0, 4)], constant=True), NO_VALUE, NO_VALUE]
    operands[1:] = [g.tensor([1], "float32", values=[v], constant=True) if g.draw.chance(60) else NO_VALUE for v in (0.4, 0.25)]
    g.node(g.tensor(boxes.shape, "float32", values=boxes), g.tensor(scores.shape, "float32", values=scores), *operands, **drawn(g))


# ---------------------------------------------------------------- recurrent layers, attention


ACTIVATIONS: Final = {"Sigmoid": (), "Tanh": (), "Relu": (), "HardSigmoid": (0.3, 0.4), "Softsign": (), "LeakyRelu": (0.1,), "Affine": (0.5, 0.2), "Elu": (0.7,), "ThresholdedRelu": (0.6,), "ScaledTanh": (0.9, 0.8)}
"""Activations of recurrent layers: alpha and beta that are not the defaults."""


def recurrent(g: Graph) -> None:
    g.wildness = 0
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[g.operator]
    direction = g.draw.choice(("forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    layout = g.maybe(1, 15) if "layout" in g.schema.attributes else None
    steps, batch, width, hidden = (g.draw.between(1, 4) for _ in range(4))
    # ONNX Runtime has no other dtype, and the reference evaluator ignores attributes
    dtype = g.dtype("T", among="float32" if g.draw.chance(70) else FLOATS)
    shape = [batch, steps, width] if layout else [steps, batch, width]
    first = [batch, ways, hidden] if layout else [ways, batch, hidden]
    operands = [
        g.tensor(shape, dtype),
        g.tensor([ways, gates * hidden, width], dtype, constant=g.draw.chance(80)),
        g.tensor([ways, gates * hidden, hidden], dtype, constant=g.draw.chance(80)),
        g.tensor([ways, 2 * gates * hidden], dtype) if g.draw.chance(60) else NO_VALUE,
        g.tensor([batch], "int32", values=g.rng.integers(1, steps + 1, batch)) if g.draw.chance(20) else NO_VALUE,
    ]
    if operands[-1].name:
        g.attributes.add("sequence_lens")
    states = 2 if g.operator == "LSTM" else 1
    operands += [g.tensor(first, dtype) if g.draw.chance(30) else NO_VALUE for _ in range(states)]
    attributes: dict[str, Any] = {"direction": direction, "layout": layout, "hidden_size": hidden}
    if g.operator == "LSTM":
        operands.append(g.tensor([ways, 3 * hidden], dtype) if g.draw.chance(20) else NO_VALUE)
        attributes["input_forget"] = g.maybe(1, 10)
    if g.operator == "GRU":
        attributes["linear_before_reset"] = g.maybe(1)
    attributes["clip"] = g.maybe(0.7, 15)
    if g.draw.chance(25):
        count = ways * {"LSTM": 3, "GRU": 2, "RNN": 1}[g.operator]
        names = [g.draw.choice(tuple(ACTIVATIONS)) for _ in range(count)]
        attributes["activations"] = names
        # only functions that have a parameter take one
        for place, parameter in enumerate(("activation_alpha", "activation_beta")):
            values = [ACTIVATIONS[name][place] for name in names if len(ACTIVATIONS[name]) > place]
            attributes[parameter] = values or None
    g.node(*operands, outputs=1 + states, **attributes)


def attention(g: Graph) -> None:
    g.wildness = 0
    batch, heads, size, value_size = g.draw.between(1, 2), g.draw.choice((2, 1, 4)), g.draw.choice((4, 2, 8)), g.draw.choice((4, 3))
    groups = g.draw.choice([h for h in (heads, 1, 2) if heads % h == 0])
    queries, keys = g.draw.between(1, 5), g.draw.between(1, 5)
    dtype = g.dtype("T1", among=FLOATS)
    is_flat = g.draw.chance(30)
    attributes = drawn(g, "scale")
    attributes["scale"] = g.maybe(0.5, 30)

    def part(count: int, length: int, width: int) -> Value:
        return g.tensor([batch, length, count * width] if is_flat else [batch, count, length, width], dtype)

    operands = [part(heads, queries, size), part(groups, keys, size), part(groups, keys, value_size)]
    if is_flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups}
    past = g.draw.between(1, 3) if g.draw.chance(20) else 0
    mask = NO_VALUE
    if g.draw.chance(50):
        shape = [*g.draw.choice(([], [1, 1], [batch, 1], [1, heads], [batch, heads])), queries, keys + past]
        kind = g.draw.choice((dtype, "bool"))
        if kind == "bool":
            values = g.rng.random(shape) < 0.7
            values[..., 0] = True
            mask = g.tensor(shape, "bool", values=values)
        else:
            mask = g.tensor(shape, kind)
    operands.append(mask)
    outputs = 1
    if past:
        operands += [g.tensor([batch, groups, past, w], dtype) for w in (size, value_size)]
        outputs = 3
    g.node(*operands, outputs=outputs, **attributes)


def rotary(g: Graph) -> None:
    g.wildness = 0
    batch, heads, length, size = g.draw.between(1, 2), g.draw.between(1, 3), g.draw.between(1, 4), g.draw.choice((4, 8))
    dtype, attributes = g.dtype("T", among=FLOATS), drawn(g)
    half = size // 2
    if g.draw.chance(30):
        half //= 2
        attributes["rotary_embedding_dim"] = 2 * half
    shape = [batch, heads, length, size]
    if g.draw.chance(30):
        shape = [batch, length, heads * size]
        attributes["num_heads"] = heads
    if g.draw.chance(60):
        caches = [g.tensor([6, half], dtype) for _ in range(2)]
        g.node(g.tensor(shape, dtype), *caches, g.tensor([batch, length], "int64", values=g.rng.integers(0, 6, (batch, length))), **attributes)
    else:
        g.node(g.tensor(shape, dtype), *(g.tensor([batch, length, half], dtype) for _ in range(2)), **attributes)


def dropout(g: Graph) -> None:
    x = g.tensor(g.shape(), g.dtype("T"))
    operands = [g.tensor([], "float32", values=0.3, constant=True), g.tensor([], "bool", values=False, constant=True)]
    g.node(x, *operands[: g.draw.below(3)], outputs=g.draw.choice((1, 2)), **drawn(g))


def loss(g: Graph) -> None:
    g.wildness = 0
    batch, classes, more = g.draw.between(1, 4), g.draw.between(2, 4), g.shape(0, 2)
    dtype = g.dtype("T", among=FLOATS)
    if 0 in more:
        raise Rejected("a mean of nothing")
    labels = g.tensor([batch, *more], "int64", values=g.rng.integers(0, classes, (batch, *more)))
    weights = [g.tensor([classes], dtype, values=np.arange(1, classes + 1) / 2)] if g.draw.chance(40) else []
    g.node(g.tensor([batch, classes, *more], dtype), labels, *weights, **drawn(g))


# ---------------------------------------------------------------- quantization


def _quantized(g: Graph, dtype: str, shape: list[int] | None = None) -> list[Value]:
    """Return a scale and a zero point."""
    shape = shape or []
    scales = g.rng.choice([0.05, 0.1, 0.25, 0.03], shape)
    zeros = g.rng.integers(0, 4, shape)
    return [g.tensor(shape, "float32", values=scales, constant=True), g.tensor(shape, dtype, values=zeros, constant=True)]


def quantize(g: Graph) -> None:
    """QuantizeLinear and DequantizeLinear: of a tensor, along an axis, or in blocks."""
    is_quantize = g.operator == "QuantizeLinear"
    shape = g.shape(1)
    kind = g.draw.choice(("tensor", "axis", "block")) if g.since(21) else g.draw.choice(("tensor", "axis"))
    axis, block = g.axis(len(shape)), g.draw.between(1, 3)
    attributes: dict[str, Any] = {}
    scales: list[int] = []
    if kind != "tensor":
        attributes["axis"] = axis
        scales = [shape[axis]]
    if kind == "block":
        attributes["block_size"] = block
        scales = list(shape)
        scales[axis] = -(-shape[axis] // block)
    quantized = g.dtype("T2" if is_quantize and not g.since(21) else "T3" if is_quantize else ("T" if not g.since(19) else "T1"))
    real = "float32" if not g.since(19) else g.dtype("T1" if is_quantize else "T2", among="float32 float16")
    numbers = np.asarray(g.rng.choice([0.05, 0.1, 0.25, 0.03, 1.0], scales))
    scale = g.tensor(scales, real, values=numbers, constant=not g.draw.chance(15))
    zero = NO_VALUE
    if quantized != "int32" and g.draw.chance(60):
        zero = g.tensor(scales, quantized, values=g.rng.integers(0, 4 if "float8" not in quantized else 1, scales), constant=not g.draw.chance(15))
    elif is_quantize and quantized != "uint8":
        if g.since(21):
            attributes["output_dtype"] = _element(quantized)
        else:
            zero = g.tensor(scales, quantized, values=np.zeros(scales), constant=True)
    x = g.tensor(shape, real if is_quantize else quantized)
    g.node(x, scale, zero, **attributes)


def dynamic_quantize(g: Graph) -> None:
    g.node(g.tensor(g.shape(1), "float32", tame=True), outputs=3)


def quantized_matmul(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    a, b, c = g.dtype("T1", among="uint8 int8"), g.dtype("T2", among="uint8 int8"), g.dtype("T3", among="uint8 int8")
    batch = g.shape(0, 1)
    g.node(g.tensor([*batch, m, k], a), *_quantized(g, a), g.tensor([*batch, k, n], b), *_quantized(g, b), *_quantized(g, c))


# ---------------------------------------------------------------- sequences


def sequence(g: Graph) -> None:
    """Build a sequence, change it, and take tensors from it: all operators of sequences in one rule."""
    shape, dtype = g.shape(1, 3), g.draw.choice(("float32", "int64"))
    parts = [g.tensor(shape, dtype) for _ in range(g.draw.between(1, 3))]
    count, axis = len(parts), 0
    last = ["s"]
    nodes = g.nodes
    if g.operator == "SplitToSequence":
        given = _parts(g, shape[0], count) if g.draw.chance(60) else g.draw.between(1, 4)
        sizes = g.maybe(g.ints(given), 70)
        operands = [parts[0].name, *([sizes.name] if sizes else [])]
        keepdims = g.maybe(g.draw.below(2), 30) if not sizes else None
        attributes = {} if keepdims is None else {"keepdims": keepdims}
        nodes.append(helper.make_node("SplitToSequence", operands, last, axis=axis, **attributes))
        g.attributes |= {"axis", *attributes}
        if not sizes or not isinstance(given, list):
            count = -(-shape[0] // int(given)) if sizes and isinstance(given, int) else shape[0]
    else:
        nodes.append(helper.make_node("SequenceConstruct", [p.name for p in parts], last))
    if g.operator == "SequenceInsert":
        position = [g.ints(g.draw.between(-count, count)).name] if g.draw.chance(50) else []
        nodes.append(helper.make_node("SequenceInsert", ["s", parts[0].name, *position], ["t"]))
        last, count = ["t"], count + 1
    if g.operator == "SequenceErase":
        position = [g.ints(g.draw.between(-count, count - 1)).name] if g.draw.chance(50) else []
        nodes.append(helper.make_node("SequenceErase", ["s", *position], ["t"]))
        last, count = ["t"], count - 1
    if g.operator == "SequenceEmpty":
        g.attributes.add("dtype")
        nodes.append(helper.make_node("SequenceEmpty", [], ["e"], dtype=_element(dtype)))
        nodes.append(helper.make_node("SequenceInsert", ["e", parts[0].name], ["t"]))
        last, count = ["t"], 1
    if g.operator in ("SequenceLength", "SequenceErase"):
        g.then("SequenceLength", *last)
    elif g.operator in ("ConcatFromSequence", "SplitToSequence", "SequenceInsert") and g.draw.chance(60):
        if count == 0:
            raise Rejected("an empty sequence")
        new = g.maybe(1, 30) if g.operator == "ConcatFromSequence" else None
        attributes = {} if new is None else {"new_axis": new}
        g.attributes |= {"axis", "new_axis"}
        g.then("ConcatFromSequence", *last, axis=axis, **attributes)
    else:
        if count == 0:
            raise Rejected("an empty sequence")
        g.then("SequenceAt", *last, g.ints(g.draw.between(-count, count - 1)).name)


def optional(g: Graph) -> None:
    x = g.tensor(g.shape(), "float32", constant=False)
    g.nodes.append(helper.make_node("Optional", [x.name], ["o"]))
    g.attributes.add("type")
    g.then("OptionalHasElement" if g.operator == "OptionalHasElement" else "OptionalGetElement", "o")


def upsample(g: Graph) -> None:
    """The oldest form that has scales as an operand."""
    g.opset = 9
    g.schema = onnx.defs.get_schema("Upsample", 9, "")
    x = g.tensor([1, 2, g.draw.between(1, 4), g.draw.between(1, 4)], "float32")
    scales = [1.0, 1.0, g.draw.choice((2.0, 1.0, 3.0)), g.draw.choice((2.0, 1.5))]
    g.node(x, g.tensor([4], "float32", values=scales, constant=True), mode=g.maybe(g.draw.choice(("nearest", "linear"))))


# ---------------------------------------------------------------- operators of com.microsoft


def _floats(g: Graph, *shapes: list[int]) -> list[Value]:
    return [g.tensor(shape, "float32", tame=True) for shape in shapes]


def ms_elementwise(g: Graph) -> None:
    shape = g.shape(1, 3)
    if g.operator == "QuickGelu":
        g.node(*_floats(g, shape), alpha=g.maybe(1.5))
    else:
        has_bias = g.operator == "BiasGelu" or g.draw.chance(50)
        g.node(*_floats(g, shape, *([shape[-1:]] if has_bias else [])))


def ms_norm(g: Graph) -> None:
    batch, length, width = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(2, 8)
    shape = [batch, length, width]
    attributes: dict[str, Any] = {"epsilon": g.maybe(1e-3)}
    operands = _floats(g, shape, [width])
    if g.operator == "SimplifiedLayerNormalization":
        g.node(*operands, axis=-1, **attributes)
        return
    more = [[width]] if g.operator == "SkipLayerNormalization" and g.draw.chance(60) else []
    g.node(*_floats(g, shape, shape, [width], *more), **attributes)


def ms_products(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    if g.operator == "FusedConv":
        operands = _floats(g, [1, 2, 5, 5], [3, 2, 3, 3], [3])
        g.node(*operands, activation=g.draw.choice(("Relu", "Sigmoid", "Tanh")), pads=g.maybe([1] * 4))
        return
    turns = {name: g.maybe(1) for name in ("transA", "transB")}
    a, b = [k, m] if turns["transA"] else [m, k], [n, k] if turns["transB"] else [k, n]
    turns["alpha"] = g.maybe(0.5)
    if g.operator == "FusedGemm":
        g.node(*_floats(g, a, b, [n]), activation=g.draw.choice(("Relu", "Sigmoid", "Tanh")), **turns)
    else:
        g.node(*_floats(g, a, b), **turns)


def ms_integer_products(g: Graph) -> None:
    m, k, n = (g.draw.between(1, 6) for _ in range(3))
    weights = g.tensor([k, n], "uint8", constant=g.draw.chance(70))
    scale = g.tensor([], "float32", values=0.1, constant=True)
    zero = g.tensor([], "uint8", values=3, constant=True) if g.draw.chance(60) else NO_VALUE
    bias = g.tensor([n], "float32", tame=True) if g.draw.chance(50) else NO_VALUE
    if g.operator == "DynamicQuantizeMatMul":
        g.node(*_floats(g, [m, k]), weights, scale, zero, bias)
    else:
        a = g.tensor([m, k], "uint8")
        g.node(a, weights, scale, scale, zero, zero, bias)


def ms_quantized(g: Graph) -> None:
    dtype = g.draw.choice(("uint8", "int8"))
    g.result = np.zeros(0, dtype)
    shape = [g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(2, 5), g.draw.between(2, 5)]

    def part(sizes: list[int]) -> list[Value]:
        return [g.tensor(sizes, dtype), *_quantized(g, dtype)]

    if g.operator in ("QLinearAdd", "QLinearMul"):
        g.node(*part(shape), *part(g.broadcast(shape)), *_quantized(g, dtype))
    elif g.operator == "QLinearConcat":
        g.node(*_quantized(g, dtype), *part(shape), *part(shape), axis=g.draw.below(4))
    elif g.operator == "QGemm":
        m, k, n = (g.draw.between(1, 6) for _ in range(3))
        g.node(*part([m, k]), *part([k, n]), NO_VALUE, *_quantized(g, dtype))
    elif g.operator == "QLinearAveragePool":
        g.node(*part(shape), *_quantized(g, dtype), kernel_shape=[2, 2], strides=g.maybe([2, 2]))
    elif g.operator == "QLinearSoftmax":
        g.node(*part(shape), *_quantized(g, dtype), axis=-1, opset=13)
    elif g.operator == "QLinearLeakyRelu":
        g.node(*part(shape), *_quantized(g, dtype), alpha=0.1)
    elif g.operator == "QLinearGlobalAveragePool":
        g.node(*part(shape), *_quantized(g, dtype), channels_last=0)
    else:
        g.node(*part(shape), *_quantized(g, dtype))


def ms_attention(g: Graph) -> None:
    batch, length, heads, size = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.choice((2, 1)), g.draw.choice((4, 2))
    width = heads * size
    if g.operator == "Attention":
        g.node(*_floats(g, [batch, length, width], [width, 3 * width], [3 * width]), num_heads=heads, unidirectional=g.maybe(1))
    else:
        keys = g.draw.between(1, 4)
        g.node(*_floats(g, [batch, length, width], [batch, keys, width], [batch, keys, width]), num_heads=heads, scale=g.maybe(0.3))


def ms_rotary(g: Graph) -> None:
    batch, length, heads, size = g.draw.between(1, 2), g.draw.between(1, 4), g.draw.between(1, 2), 4
    x, cos, sin = _floats(g, [batch, length, heads * size], [8, 2], [8, 2])
    places = g.tensor([batch, length], "int64", values=g.rng.integers(0, 8, (batch, length)))
    g.node(x, places, cos, sin, interleaved=g.maybe(1))


def ms_embedding(g: Graph) -> None:
    batch, length, width = g.draw.between(1, 2), g.draw.between(1, 4), 4
    ids = [g.tensor([batch, length], "int32", values=g.rng.integers(0, n, (batch, length)), constant=False) for n in (7, 2)]
    tables = [g.tensor(s, "float32", constant=True) for s in ([7, width], [6, width], [2, width], [width], [width])]
    g.node(*ids, *tables)


def ms_grouped(g: Graph) -> None:
    """MatMulNBits: 4-bit weights in groups of 16 or 32, packed."""
    n, groups, size = g.draw.between(1, 5), g.draw.between(1, 2), g.draw.choice((16, 32))
    k = groups * size
    packed = g.rng.integers(0, 256, (n, groups, size // 2))
    scales = g.rng.random(n * groups) + 0.1
    operands = [*_floats(g, [g.draw.between(1, 3), k]), g.tensor(packed.shape, "uint8", values=packed, constant=True)]
    operands.append(g.tensor(scales.shape, "float32", values=scales, constant=True))
    if g.draw.chance(50):
        zeros = g.rng.integers(0, 256, n * ((groups + 1) // 2))
        operands.append(g.tensor(zeros.shape, "uint8", values=zeros, constant=True))
    g.node(*operands, K=k, N=n, bits=4, block_size=size)


# ---------------------------------------------------------------- all


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Final[Mapping[str, Rule]] = {
    **_named(
        unary,
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
        "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid "
        "Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu NonZero",
    ),
    **_named(
        binary,
        "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Xor",
    ),
    **_named(division, "Div Mod"),
    "Pow": power,
    "BitShift": shift,
    **_named(variadic, "Max Mean Min Sum"),
    "Where": where,
    "Clip": clip,
    "PRelu": prelu,
    **_named(
        reduction,
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare",
    ),
    **_named(along_axis, "ArgMax ArgMin Hardmax LogSoftmax LpNormalization Softmax"),
    **_named(cumulative, "CumProd CumSum"),
    "MeanVarianceNormalization": mean_variance,
    "TopK": top_k,
    **_named(layer_norm, "LayerNormalization RMSNormalization"),
    **_named(channel_norm, "BatchNormalization GroupNormalization InstanceNormalization LRN"),
    **_named(cast, "Cast CastLike"),
    "BitCast": bit_cast,
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Constant": constant,
    **_named(space, "DepthToSpace SpaceToDepth"),
    "Expand": expand,
    "EyeLike": eye_like,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Compress": compress,
    "OneHot": one_hot,
    "Pad": pad,
    "Range": range_,
    "Reshape": reshape,
    "Resize": resize,
    "ReverseSequence": reverse_sequence,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    **_named(shape_of, "Shape Size"),
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unique": unique,
    "Upsample": upsample,
    "CenterCropPad": center_crop_pad,
    "Col2Im": col2im,
    **_named(matmul, "MatMul MatMulInteger"),
    "Gemm": gemm,
    "Einsum": einsum,
    "Det": det,
    "DFT": dft,
    "STFT": stft,
    **_named(window, "BlackmanWindow HammingWindow HannWindow"),
    "MelWeightMatrix": mel,
    **_named(convolution, "Conv ConvInteger QLinearConv"),
    "ConvTranspose": transposed_convolution,
    **_named(pool, "AveragePool LpPool MaxPool"),
    **_named(global_pool, "GlobalAveragePool GlobalLpPool GlobalMaxPool"),
    "MaxUnpool": max_unpool,
    "MaxRoiPool": roi_pool,
    "RoiAlign": roi_align,
    "GridSample": grid_sample,
    "AffineGrid": affine_grid,
    "NonMaxSuppression": suppression,
    **_named(recurrent, "GRU LSTM RNN"),
    "Attention": attention,
    "RotaryEmbedding": rotary,
    "Dropout": dropout,
    **_named(loss, "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"),
    **_named(quantize, "DequantizeLinear QuantizeLinear"),
    "DynamicQuantizeLinear": dynamic_quantize,
    "QLinearMatMul": quantized_matmul,
    **_named(
        sequence,
        "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
        "SplitToSequence",
    ),
    **_named(optional, "Optional OptionalGetElement OptionalHasElement"),
    **_named(ms_elementwise, "ms.BiasGelu ms.FastGelu ms.QuickGelu"),
    **_named(ms_norm, "SimplifiedLayerNormalization ms.SkipLayerNormalization ms.SkipSimplifiedLayerNormalization"),
    **_named(ms_products, "ms.FusedConv ms.FusedGemm ms.FusedMatMul ms.TransposeMatMul"),
    **_named(ms_integer_products, "ms.DynamicQuantizeMatMul ms.MatMulIntegerToFloat"),
    **_named(
        ms_quantized,
        "ms.QGemm ms.QLinearAdd ms.QLinearAveragePool ms.QLinearConcat ms.QLinearGlobalAveragePool ms.QLinearLeakyRelu "
        "ms.QLinearMul ms.QLinearSigmoid ms.QLinearSoftmax",
    ),
    **_named(ms_attention, "ms.Attention ms.MultiHeadAttention"),
    "ms.RotaryEmbedding": ms_rotary,
    "ms.EmbedLayerNormalization": ms_embedding,
    "ms.MatMulNBits": ms_grouped,
}
"""Operator -> how it is drawn; `ms.` stands for the domain com.microsoft."""


def name_of(seed: int) -> str:
    """Return the operator of a seed: all take turns."""
    names = sorted(RULES)
    return names[seed % len(names)]
