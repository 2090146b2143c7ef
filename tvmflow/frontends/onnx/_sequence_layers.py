"""Converts attention and normalization operators of the domain com.microsoft, and recurrent layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax, te

from tvmflow.core.formatting import names_text
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem, shape_text
from tvmflow.frontends.onnx._arithmetic import NodeToConvert, list_sizes
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import same_sizes, sizes_of
from tvmflow.graph.ir_operators import (
    ACTIVATION_DEFAULTS,
    NOTHING,
    Activation,
    Recurrent,
    RecurrentOperands,
)

# The rank of operands that are already split into heads, and of queries, keys and values packed in one tensor.
_HEADS_RANK: Final = 4
_PACKED_RANK: Final = 5
# The rank of a mask with one row for each query.
_ROWS_RANK: Final = 3
_MASKED: Final = -10000.0


def _refuse(node: NodeToConvert, names: Sequence[str], operands: Mapping[int, str]) -> None:
    found = [name for name in names if node.attributes.get(name, 0)]
    found += [name for index, name in operands.items() if node.operand(index) is not None]
    if found:
        raise ValueError(f"it has {found[0]}, which is not supported")


def _add(node: NodeToConvert, *terms: Any) -> Any:
    """Return the sum of the terms that are not None; None if all are None."""
    terms = tuple(term for term in terms if term is not None)
    return functools.reduce(lambda x, y: node.emit(relax.op.add(x, y)), terms) if terms else None


def _take(node: NodeToConvert, x: Any, index: int, axis: int = 0) -> Any:
    """Return a tensor's slice at one index of an axis, without this axis."""
    return node.emit(relax.op.take(x, relax.const(index, "int64"), axis=axis))


def _split(node: NodeToConvert, x: Any, cuts: Sequence[int], axis: int) -> list[Any]:
    parts = node.builder.emit(relax.op.split(x, cuts, axis))
    return [node.emit(relax.TupleGetItem(parts, n)) for n in range(len(cuts) + 1)]


# ---------------------------------------------------------------- norms


def convert_skip_layer_norm(node: NodeToConvert) -> Any:
    """Return the norm of a sum; further results: mean, inverse deviation, and the sum itself."""
    x, skip, scale, shift, bias = (node.operand(index) for index in range(5))
    if shift is None:
        shift = relax.const(np.zeros(list_sizes(scale), ir.dtype_of(scale)))
    epsilon = node.number("epsilon", 1e-12)
    total = node.builder.emit(_add(node, x, skip, bias))
    result = node.emit(relax.op.nn.layer_norm(total, scale, shift, axes=-1, epsilon=epsilon))
    if node.count_outputs() == 1:
        return result
    mean = node.emit(relax.op.mean(total, axis=-1, keepdims=True))
    variance = node.emit(relax.op.variance(total, axis=-1, keepdims=True))
    raised = variance + relax.const(epsilon, ir.dtype_of(total))
    return relax.Tuple([result, mean, node.emit(relax.op.rsqrt(raised)), total])


def convert_embed_layer_norm(node: NodeToConvert) -> Any:
    """Return the layer norm of the summed embeddings, the lengths that the mask gives, and the sum."""
    ids, segments, words, positions, kinds, scale, shift, mask, position_ids = (
        node.operand(index) for index in range(9)
    )
    batch, steps = list_sizes(ids)
    if not isinstance(steps, int):
        raise ValueError("its sequences must have a fixed length")
    if position_ids is None:
        position_ids = relax.const(np.arange(steps), "int64")
    total = _add(
        node,
        node.emit(relax.op.take(words, ids, axis=0)),
        node.emit(relax.op.take(positions, position_ids, axis=0)),
        None if segments is None else node.emit(relax.op.take(kinds, segments, axis=0)),
    )
    total, epsilon = node.builder.emit(total), node.number("epsilon", 1e-12)
    result = node.emit(relax.op.nn.layer_norm(total, scale, shift, axes=-1, epsilon=epsilon))
    if mask is None:
        lengths = relax.op.zeros([batch], "int32")
    else:
        is_one = relax.op.equal(mask, relax.const(1, ir.dtype_of(mask)))
        lengths = relax.op.sum(relax.op.astype(is_one, "int32"), axis=1)
    return relax.Tuple([result, node.emit(lengths), total])


# ---------------------------------------------------------------- attention


def _split_heads(node: NodeToConvert, x: Any, heads: int) -> Any:
    """Return data (batch, steps, heads · width) as (batch, heads, steps, width)."""
    batch, steps, units = list_sizes(x)
    split = node.emit(relax.op.reshape(x, [batch, steps, heads, units // heads]))
    return node.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


def _find_mask(node: NodeToConvert, mask: Any, batch: Any, steps: Any, length: Any) -> Any:
    """Return the mask as an addend for scores (batch, heads, steps, length); None without a mask.

    A mask either selects keys, for each sequence or for each row of scores. Or it lists the length of each sequence,
    perhaps followed by their starts.
    """
    if mask is None:
        return None
    sizes = list_sizes(mask)
    has_starts = isinstance(batch, int) and sizes == [2 * batch] != [batch]
    if has_starts or sizes == [batch]:
        columns = relax.op.arange(length, dtype="int32")
        bounds = node.emit(relax.op.reshape(mask, [1 + has_starts, batch, 1]))
        visible = node.emit(relax.op.less(columns, _take(node, bounds, 0)))
        if has_starts:
            from_start = relax.op.greater_equal(columns, _take(node, bounds, 1))
            visible = node.emit(relax.op.logical_and(visible, from_start))
    elif sizes in ([batch, length], [batch, steps, length]):
        visible = node.emit(relax.op.greater(mask, relax.const(0, ir.dtype_of(mask))))
    else:
        raise ValueError(f"a mask of shape {sizes} is not supported")
    rows = sizes[1] if len(sizes) == _ROWS_RANK else 1
    visible = node.emit(relax.op.reshape(visible, [batch, 1, rows, length]))
    dtype = ir.dtype_of(node.inputs[0])
    masked = node.number("mask_filter_value", _MASKED)
    return node.emit(relax.op.where(visible, relax.const(0.0, dtype), relax.const(masked, dtype)))


def _causal_mask(node: NodeToConvert, steps: Any, length: Any, past: Any) -> Any:
    """Return the causal mask with `past` keys before the first query; None if every query sees all keys.

    As in ONNX Runtime, the last query sees all keys.
    """
    if not node.is_set("unidirectional"):
        return None
    if not all(isinstance(size, int) for size in (steps, length, past)):
        raise ValueError("unidirectional attention needs a fixed number of steps")
    dtype = np.dtype(ir.dtype_of(node.inputs[0]))
    hidden = np.arange(length) > np.arange(steps)[:, None] + past
    hidden[-1] = False
    return relax.const(np.where(hidden, np.finfo(dtype).min, 0).astype(dtype))


def _attend(
    node: NodeToConvert, queries: Any, keys: Any, values: Any, mask: Any, bias: Any, past: Any
) -> Any:
    """Return attention (batch, steps, heads · width).

    Queries, keys and values have the shape (batch, heads, steps, width). The keys in `past`, if it is not None,
    come first. The bias is added to the scores.
    """
    batch, heads, steps, width = list_sizes(queries)
    length = list_sizes(keys)[2]
    fit = same_sizes(list_sizes(keys), [batch, heads, length, width])
    if not (fit and same_sizes(list_sizes(values)[:3], [batch, heads, length])):
        shapes = names_text([shape_text(list_sizes(part)) for part in (queries, keys, values)])
        raise DynamicShapeProblem(
            "batches, heads and widths of queries and keys, or lengths of keys and values, can differ: "
            f"as heads they have the shapes {shapes}"
        )
    transposed = node.emit(relax.op.permute_dims(keys, [0, 1, 3, 2]))
    scores = relax.op.matmul(queries, transposed)
    scale = node.number("scale", 0.0) or 1 / math.sqrt(width)
    scores = node.emit(scores * relax.const(scale, ir.dtype_of(queries)))
    if cap := node.number("softcap", 0.0):
        limit = relax.const(cap, ir.dtype_of(queries))
        scores = node.emit(relax.op.tanh(node.emit(scores / limit)) * limit)
    hidden = _find_mask(node, mask, batch, steps, length)
    earlier = 0 if past is None else list_sizes(past)[2]
    causal = _causal_mask(node, steps, length, earlier)
    scores = _add(node, scores, _add(node, bias, hidden, causal))
    if sizes_of(scores) is None:
        raise DynamicShapeProblem(
            "the sizes of its mask or bias can differ from those of its scores"
        )
    mixed = relax.op.matmul(relax.op.nn.softmax(scores, axis=-1), values)
    moved = node.emit(relax.op.permute_dims(mixed, [0, 2, 1, 3]))
    return node.emit(relax.op.reshape(moved, [batch, steps, heads * list_sizes(values)[3]]))


def convert_attention(node: NodeToConvert) -> Any:
    """Convert Attention with weights; the second result has all keys and values, past ones first."""
    names = ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim")
    _refuse(node, names, {6: "past_sequence_length"})
    x, weights, offsets, mask, past, bias = (node.operand(index) for index in range(6))
    heads, units = int(node.attributes["num_heads"]), list_sizes(weights)[1]
    sizes = [int(n) for n in node.attributes.get("qkv_hidden_sizes", ())] or [units // 3] * 3
    product = _add(node, node.emit(relax.op.matmul(x, weights)), offsets)
    parts = _split(node, product, np.cumsum(sizes)[:2].tolist(), 2)
    queries, keys, values = (_split_heads(node, part, heads) for part in parts)
    past_keys = None
    if past is not None:
        past_keys, past_values = (node.builder.emit(_take(node, past, n)) for n in range(2))
        keys, values = _prepend(node, past_keys, keys), _prepend(node, past_values, values)
    result = _attend(node, queries, keys, values, mask, bias, past_keys)
    if node.count_outputs() == 1:
        return result
    both = [node.emit(relax.op.expand_dims(part, 0)) for part in (keys, values)]
    return relax.Tuple([result, node.emit(relax.op.concat(both, axis=0))])


def _prepend(node: NodeToConvert, past: Any, new: Any) -> Any:
    """Return keys or values (batch, heads, steps, width) after past ones, which may be None."""
    return node.builder.emit(new if past is None else relax.op.concat([past, new], axis=2))


def convert_multi_head_attention(node: NodeToConvert) -> Any:
    """Convert MultiHeadAttention; its further results are all keys and values, including past ones."""
    _refuse(node, (), {8: "past_sequence_length", 9: "cache_indirection"})
    queries, keys, values, offsets, mask, bias, past_keys, past_values = map(node.operand, range(8))
    heads = int(node.attributes["num_heads"])
    if keys is None or values is None or len(list_sizes(queries)) == _PACKED_RANK:
        raise ValueError("queries, keys and values in one tensor are not supported")
    if offsets is not None:
        units = list_sizes(queries)[2]
        own = _split(node, offsets, [units, 2 * units], 0)
        queries = _add(node, queries, own[0])
        if len(list_sizes(keys)) != _HEADS_RANK:
            keys, values = _add(node, keys, own[1]), _add(node, values, own[2])
    queries, keys, values = (
        part if len(list_sizes(part)) == _HEADS_RANK else _split_heads(node, part, heads)
        for part in (queries, keys, values)
    )
    keys, values = _prepend(node, past_keys, keys), _prepend(node, past_values, values)
    result = _attend(node, queries, keys, values, mask, bias, past_keys)
    return relax.Tuple([result, keys, values])


def convert_group_query_attention(node: NodeToConvert) -> Any:
    """Convert GroupQueryAttention; its further results are all keys and values, past ones first.

    ONNX Runtime's CPU kernel is the reference. `seqlens_k` holds the index of each sequence's last key. It must be
    the last index of all keys, past and new, so a run with padded sequences fails.
    """
    _refuse(node, ("smooth_softmax", "qk_output"), {11: "head_sink"})
    queries, keys, values, past_keys, past_values, ends = map(node.operand, range(6))
    heads, shared = (int(node.attributes[name]) for name in ("num_heads", "kv_num_heads"))
    if keys is None:
        width = list_sizes(queries)[2] // (heads + 2 * shared)
        cuts = [heads * width, (heads + shared) * width]
        queries, keys, values = _split(node, queries, cuts, 2)
    queries = _split_heads(node, queries, heads)
    keys, values = (_split_heads(node, part, shared) for part in (keys, values))
    batch, _, steps, _ = list_sizes(queries)
    first = 0 if past_keys is None else list_sizes(past_keys)[2]
    length = first + steps
    positions = _find_positions(node, ends, batch, steps, first, length)
    if node.is_set("do_rotary"):
        given = positions if node.operand(9) is None else node.operand(9)
        tables = (node.operand(7), node.operand(8))
        is_interleaved = node.is_set("rotary_interleaved")
        queries, keys = (
            _rotate(node, part, given, tables, is_interleaved) for part in (queries, keys)
        )
    keys, values = _prepend(node, past_keys, keys), _prepend(node, past_values, values)
    mask = _hide_later_keys(node, positions, length)
    wide = [_repeat_heads(node, part, heads // shared) for part in (keys, values)]
    bias = _add(node, node.operand(10), mask)
    result = _attend(node, queries, wide[0], wide[1], None, bias, None)
    return relax.Tuple([result, keys, values])


def _find_positions(
    node: NodeToConvert, ends: Any, batch: Any, steps: Any, first: Any, length: Any
) -> Any:
    """Return the positions (batch, steps) of new tokens; a run fails for padded sequences."""
    ends = node.builder.emit(relax.op.reshape(node.cast(ends, "int64"), [batch, 1]))

    def surplus(indices: Any, last: Any) -> Any:
        return te.compute(indices.shape, lambda *position: indices(*position) - last)

    def positions(zeros: Any, first: Any) -> Any:
        return te.compute((batch, steps), lambda row, step: zeros(row, 0) + first + step)

    def emit(function: Any, *operands: Any) -> Any:
        # TVM cannot fuse a kernel with a dimension as a scalar (apache-tvm 0.27)
        name = function.__name__
        return node.builder.emit_te(
            function, *operands, primfunc_name_hint=name, primfunc_attrs=ir.OPAQUE
        )

    # an axis of one element has only the index 0
    checked = relax.op.take(
        relax.const(np.zeros(1), "int64"), emit(surplus, ends, length - 1), axis=0
    )
    return emit(positions, node.builder.emit(checked), first)


def _hide_later_keys(node: NodeToConvert, positions: Any, length: Any) -> Any:
    """Return the mask that hides keys after each query, and before its window, as an addend for scores."""
    keys = node.emit(relax.op.arange(length, dtype="int64"))
    queries = node.emit(relax.op.expand_dims(positions, [-1]))
    is_seen = node.emit(relax.op.less_equal(keys, queries))
    window = node.integer("local_window_size", -1)
    if window > 0:
        first = node.emit(relax.op.subtract(queries, relax.const(window, "int64")))
        is_seen = node.emit(relax.op.logical_and(is_seen, node.emit(relax.op.greater(keys, first))))
    dtype = ir.dtype_of(node.inputs[0])
    lowest = relax.const(float(np.finfo(dtype).min), dtype)
    mask = node.emit(relax.op.where(is_seen, relax.const(0.0, dtype), lowest))
    return node.emit(relax.op.expand_dims(mask, 1))


def _repeat_heads(node: NodeToConvert, x: Any, repeats: int) -> Any:
    """Return each head (batch, heads, steps, width) several times in a row."""
    batch, heads, steps, width = list_sizes(x)
    apart = node.emit(relax.op.expand_dims(x, 2))
    wide = relax.ShapeExpr([batch, heads, repeats, steps, width])
    repeated = node.emit(relax.op.broadcast_to(apart, wide))
    return node.emit(relax.op.reshape(repeated, [batch, heads * repeats, steps, width]))


def convert_rotary_embedding(node: NodeToConvert) -> Any:
    """Convert RotaryEmbedding, which rotates pairs of values by angles that depend on their positions."""
    _refuse(node, ("is_packed_batching",), {})
    x, position_ids, cosines, sines = node.inputs
    width, heads = 2 * list_sizes(cosines)[1], node.integer("num_heads", 0)
    has_heads = len(list_sizes(x)) == _HEADS_RANK
    if not has_heads:
        x = _split_heads(node, x, heads or list_sizes(x)[2] // width)
    batch, heads, steps, size = list_sizes(x)
    if list_sizes(position_ids) == [1]:
        if not isinstance(steps, int):
            raise ValueError("a first position needs a fixed number of steps")
        position_ids = node.emit(relax.op.add(position_ids, relax.const(np.arange(steps), "int64")))
        position_ids = node.emit(relax.op.reshape(position_ids, [1, steps]))
    whole = _rotate(node, x, position_ids, (cosines, sines), node.is_set("interleaved"))
    if has_heads:
        return whole
    moved = node.emit(relax.op.permute_dims(whole, [0, 2, 1, 3]))
    return relax.op.reshape(moved, [batch, steps, heads * size])


def _rotate(
    node: NodeToConvert, x: Any, positions: Any, tables: tuple[Any, Any], is_interleaved: bool
) -> Any:
    """Return data (batch, heads, steps, width) whose first values are rotated in pairs.

    `tables` are the cosines and sines (positions, pairs) of the angles.
    """
    batch, heads, steps, size = list_sizes(x)
    width = 2 * list_sizes(tables[0])[1]
    turned, rest = x, []
    if size != width:
        turned, *rest = _split(node, x, [width], 3)
    rows = [relax.op.take(table, positions, axis=0) for table in tables]
    turn = [node.emit(relax.op.expand_dims(table, 1)) for table in rows]
    pairs = [width // 2, 2] if is_interleaved else [2, width // 2]
    axis = 4 if is_interleaved else 3
    paired = node.emit(relax.op.reshape(turned, [batch, heads, steps, *pairs]))
    halves = [_take(node, paired, n, axis) for n in range(2)]
    products = [[node.emit(relax.op.multiply(half, by)) for by in turn] for half in halves]
    (one_cos, one_sin), (two_cos, two_sin) = products
    results = (relax.op.subtract(one_cos, two_sin), relax.op.add(one_sin, two_cos))
    wide = [node.emit(relax.op.expand_dims(part, axis)) for part in map(node.emit, results)]
    stacked = node.emit(relax.op.concat(wide, axis))
    flat = node.emit(relax.op.reshape(stacked, [batch, heads, steps, width]))
    return node.emit(relax.op.concat([flat, *rest], axis=3)) if rest else flat


# ---------------------------------------------------------------- recurrent layers


_DIRECTIONS: Final = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}


def convert_recurrent(node: NodeToConvert, kind: str) -> Any:
    """Convert an LSTM, GRU or RNN; results: all hidden states, the last ones, and the last cell states."""
    attributes = node.attributes
    operands = RecurrentOperands(*(NOTHING if value is None else value for value in node.inputs))
    sizes, expected = sizes_of(operands.x), ir.known_shape(operands.weights)[2]
    size = sizes[2] if sizes and len(sizes) == 3 else None
    if size != expected:
        raise ValueError(f"its input has {size} values a step, and its weights are for {expected}")
    directions, rows, _ = ir.known_shape(operands.recurrent)
    bias = sizes_of(operands.bias)
    if bias is not None and bias != (directions, 2 * rows):
        raise ValueError(f"its bias has the shape {list(bias)}, not {[directions, 2 * rows]}")
    layer = Recurrent(
        kind=kind,
        is_reversed=_DIRECTIONS[_text(attributes.get("direction", "forward"))],
        activations=_activations(kind, attributes),
        clip=float(attributes["clip"]) if "clip" in attributes else None,
        has_coupled_gates=node.is_set("input_forget"),
        resets_product=node.is_set("linear_before_reset"),
        is_batch_first=node.is_set("layout"),
    )
    # The last operand is left out, because it requests rounding.
    results = node.builder.emit(layer.call(*operands[:-1]))
    return relax.Tuple([node.builder.emit(results[n]) for n in range(len(results.ty.fields))])


def _activations(kind: str, attributes: Mapping[str, Any]) -> tuple[tuple[Activation, ...], ...]:
    """Return the activations of each direction; the attributes are flat lists over all directions."""
    directions = len(_DIRECTIONS[_text(attributes.get("direction", "forward"))])
    count = len(_ACTIVATIONS[kind])
    names = [_text(name) for name in attributes.get("activations", ())]
    names = names or list(_ACTIVATIONS[kind]) * directions
    if unknown := [name for name in names if name not in ACTIVATION_DEFAULTS]:
        raise ValueError(f"ONNX has no activation {unknown[0]}")
    parameters = [list(attributes.get(f"activation_{name}", ())) for name in ("alpha", "beta")]
    functions = []
    for name in names:
        # Parameters are listed without gaps: a function without one leaves the entry to the next function.
        pairs = zip(parameters, ACTIVATION_DEFAULTS[name], strict=False)
        values = [numbers.pop(0) if numbers else default for numbers, default in pairs]
        functions.append(Activation(name, *map(float, values)))
    return tuple(tuple(functions[n * count : (n + 1) * count]) for n in range(directions))


def _text(value: str | bytes) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else value).lower()
