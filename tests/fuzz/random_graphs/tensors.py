"""How elementwise operators, reductions, and operators that move or select elements are drawn."""

# a rule in few lines, as a table has it
# fmt: off
from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from tests.fuzz.random_graphs.attributes import (
    FLOATS,
    drawn,
    element_of,
    is_float,
    with_input,
)
from tests.fuzz.random_graphs.drawing import NO_VALUE, Graph, Rejected, Value

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
    dtype = g.dtype("T")
    # the reference evaluator's sums of 64 bits overflow
    x = g.tensor(g.shape(), dtype, tame=g.operator == "ReduceMean" and "int64" in dtype)
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
    values = g.numbers(g.shape(), source, tame=not is_float(to))
    if is_float(source) and not is_float(to) and to != "bool":
        values = np.clip(values, 0 if to.startswith("u") else -7, 7)
    x = g.tensor(values.shape, source, values=values)
    attributes = drawn(g, *([] if "float8" in to else ["saturate", "round_mode"]))
    if g.operator == "CastLike":
        g.node(x, g.tensor(g.shape(), to), **attributes)
    else:
        g.node(x, to=element_of(to), **attributes)


def bit_cast(g: Graph) -> None:
    same = g.draw.choice((("int32", "float32"), ("float32", "uint32"), ("float16", "int16"), ("int64", "float64")))
    g.node(g.tensor(g.shape(), same[0]), to=element_of(same[1]))


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
    value = helper.make_tensor("v", element_of(dtype), [1], g.numbers([1], dtype).tolist())
    g.node(g.ints(g.shape()), value=g.maybe(value))


def constant(g: Graph) -> None:
    dtype = g.dtype("T")
    value = g.numbers(g.shape(), dtype)
    kind = g.draw.choice(("value", "value_float", "value_floats", "value_int", "value_ints"))
    if kind == "value":
        tensor = helper.make_tensor("v", element_of(dtype), value.shape, value.tobytes(), raw=True)
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
    with_input(g)


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


def sizes_of_parts(g: Graph, total: int, count: int) -> list[int]:
    cuts = sorted(g.draw.between(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def split(g: Graph) -> None:
    x = g.tensor(g.shape(1), g.dtype("T"))
    axis = g.axis(x.rank)
    size, count = x.shape[axis], g.draw.between(1, 3)
    if g.draw.chance(60):
        g.node(x, g.ints(sizes_of_parts(g, size, count)), outputs=count, axis=axis)
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
