"""Operators over tokens (batch, tokens, features), and between images and tokens."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tests.support.random_networks.network import Network, Operator


def _are_tokens(net: Network, x: str) -> bool:
    return len(net.shape(x)) == 3


def tokens_of_image(net: Network, x: str) -> str | None:
    """Add the pixels of an image as tokens."""
    if len(net.shape(x)) < 4:
        return None
    n, channels, *_ = net.shape(x)
    return net.add(
        "Transpose", net.add("Reshape", x, net.constant([n, channels, -1])), perm=[0, 2, 1]
    )


def image_of_tokens(net: Network, x: str) -> str | None:
    """Add tokens as the pixels of an image."""
    if not _are_tokens(net, x):
        return None
    n, tokens, features = net.shape(x)
    rows = net.choice([r for r in range(1, tokens + 1) if tokens % r == 0])
    turned = net.add("Transpose", x, perm=[0, 2, 1])
    return net.add("Reshape", turned, net.constant([n, features, rows, tokens // rows]))


def dense(net: Network, x: str) -> str | None:
    """Add a product with weights, or a gated one."""
    depth = net.shape(x)[-1]
    columns = net.choice((1, 2, 7, 8, 16, 29, 32, 33, 64))
    if not 2 <= len(net.shape(x)) <= 4 or depth == 1:
        return None
    kind = net.choice(("plain", "bias", "gated"))
    if kind == "gated":
        both = net.add("MatMul", x, net.weight(depth, 2 * columns, terms=depth))
        left, right = net.add_many("Split", 2, both, net.constant([columns] * 2), axis=-1)
        return net.add("Mul", left, net.add("Sigmoid", right))
    product = net.add("MatMul", x, net.weight(depth, columns, terms=depth))
    bias = net.weight(columns)
    return (
        net.add("Add", *net.choice(((product, bias), (bias, product))))
        if kind == "bias"
        else product
    )


def gemm(net: Network, x: str) -> str | None:
    """Add a Gemm of flattened data."""
    flat = net.add("Flatten", x)
    depth, columns = net.shape(flat)[1], net.choice((1, 3, 10, 16, 31, 64))
    if depth > 4000 or depth == 1:
        return None
    turned = net.chance(0.5)
    shape = (columns, depth) if turned else (depth, columns)
    weights = (net.weight(*shape, terms=depth), net.weight(columns))
    return net.add("Gemm", flat, *weights, transB=int(turned), alpha=net.choice((1.0, 0.5)))


def layer_norm(net: Network, x: str) -> str | None:
    """Add a norm of each row: of mean and variance, or of squares, as one node or as many."""
    features = net.shape(x)[-1]
    if features < 5:
        return None
    kind = net.choice(("node", "squares", "parts"))
    if kind == "node":
        weights = (net.weight(features), net.weight(features))
        return net.add("LayerNormalization", x, *weights, axis=-1, epsilon=1e-3)
    epsilon = net.constant(1e-3, "float32")
    if kind == "parts":
        x = net.add("Sub", x, net.add("ReduceMean", x, axes=[-1]))
    squares = net.add("ReduceMean", net.add("Pow", x, net.constant(2.0, "float32")), axes=[-1])
    root = net.add("Sqrt", net.add("Add", squares, epsilon))
    if net.chance(0.5):
        normed = net.add("Div", x, root)
    else:
        normed = net.add("Mul", x, net.add("Reciprocal", root))
    return net.add("Mul", net.weight(features), normed)


def attention(net: Network, x: str) -> str | None:
    """Add self-attention with some heads, a mask, and a residual sum."""
    if not _are_tokens(net, x) or net.shape(x)[1] > 100:
        return None
    n, tokens, features = net.shape(x)
    heads, size = net.choice((1, 2, 3, 4)), net.choice((3, 4, 8, 16, 20))
    shared = net.choice([h for h in (1, heads) if heads % h == 0])
    q = _heads(net, x, heads, size)
    k, v = _heads(net, x, shared, size), _heads(net, x, shared, size)
    if shared != heads:
        k, v = (_repeat(net, part, heads) for part in (k, v))
    scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 1, 3, 2]))
    scale = net.constant(1 / math.sqrt(size), "float32")
    scores = net.add("Mul", scores, scale)
    if net.chance(0.5):
        mask = np.where(np.tri(tokens, dtype=bool), 0.0, net.choice((-1e4, -np.inf)))
        scores = net.add("Add", scores, net.constant(mask, "float32"))
    elif net.chance(0.3):
        scores = net.add("Add", scores, net.weight(1, heads, tokens, tokens))
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    joined = net.add("Transpose", mixed, perm=[0, 2, 1, 3])
    joined = net.add("Reshape", joined, net.constant([n, tokens, heads * size]))
    out = net.add("MatMul", joined, net.weight(heads * size, features, terms=heads * size))
    return net.add("Add", *net.choice(((x, out), (out, x)))) if net.chance(0.8) else out


def _heads(net: Network, x: str, heads: int, size: int) -> str:
    """Add a projection (n, heads, tokens, size)."""
    n, tokens, features = net.shape(x)
    product = net.add("MatMul", x, net.weight(features, heads * size, terms=features))
    product = net.add("Add", product, net.weight(heads * size))
    split = net.add("Reshape", product, net.constant([n, tokens, heads, size]))
    return net.add("Transpose", split, perm=[0, 2, 1, 3])


def _repeat(net: Network, part: str, heads: int) -> str:
    """Add keys or values that several heads share."""
    n, shared, tokens, size = net.shape(part)
    wide = net.add("Unsqueeze", part, net.constant([2]))
    shape = [n, shared, heads // shared, tokens, size]
    wide = net.add("Expand", wide, net.constant(shape))
    return net.add("Reshape", wide, net.constant([n, heads, tokens, size]))


def product(net: Network, x: str) -> str | None:
    """Add the product of a value with itself transposed, or of two of its projections."""
    shape = net.shape(x)
    if not 2 <= len(shape) <= 4 or max(shape[-2:]) > 100:
        return None
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    turned = net.add("Transpose", net.add("Tanh", x), perm=order)
    left, right = net.choice(((x, turned), (turned, x)))
    scale = net.constant(1 / math.sqrt(net.shape(left)[-1]), "float32")
    result = net.add("Mul", net.add("MatMul", left, right), scale)
    return net.add("Softmax", result, axis=-1) if net.chance(0.4) else result


def recurrent(net: Network, x: str) -> str | None:
    """Add a recurrent layer over the tokens."""
    if not _are_tokens(net, x) or net.shape(x)[1] > 40:
        return None
    n, tokens, features = net.shape(x)
    kind, gates = net.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    hidden, ways = net.choice((3, 8, 16, 20)), net.choice((1, 2))
    first = net.add("Transpose", x, perm=[1, 0, 2])
    weights = (
        net.weight(ways, gates * hidden, features, terms=features),
        net.weight(ways, gates * hidden, hidden, terms=hidden),
        net.weight(ways, 2 * gates * hidden),
    )
    direction = "bidirectional" if ways == 2 else net.choice(("forward", "reverse"))
    attributes = {"hidden_size": hidden, "direction": direction}
    if kind == "GRU":
        attributes["linear_before_reset"] = net.choice((0, 1))
    y = net.add(kind, first, *weights, **attributes)
    last = net.add("Transpose", y, perm=[2, 0, 1, 3])
    return net.add("Reshape", last, net.constant([n, tokens, ways * hidden]))


OPERATORS: Final[tuple[Operator, ...]] = (
    *(tokens_of_image,) * 2,
    image_of_tokens,
    *(dense,) * 3,
    gemm,
    *(layer_norm,) * 2,
    *(attention,) * 2,
    product,
    recurrent,
)
"""Each operator as often as it is likely."""
