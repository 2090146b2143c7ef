"""Rewrites linear models, decision trees and preprocessing (ai.onnx.ml) as standard operators.

Results are those of ONNX Runtime where the specification leaves a choice, such as the scores of two classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from tvmflow.core.types import Array
from tvmflow.frontends.onnx._rewrites import Rewriting

DOMAIN: Final = "ai.onnx.ml"
NEEDS: Final = "with numbers as labels and categories, sums or averages of trees, and the post_transform NONE, LOGISTIC or SOFTMAX"
_MAX_DEPTH: Final = 512
_MAX_WEIGHTS: Final = 1 << 26
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE)
_TRANSFORMS: Final = {"LOGISTIC": "Sigmoid", "NONE": "", "SOFTMAX": "Softmax"}

# ---------------------------------------------------------------- preprocessing


def rewrite_scaler(node: Rewriting) -> str | None:
    offset = node.constant(_numbers(node, "offset", 0))
    scale = node.constant(_numbers(node, "scale", 1))
    return node.add("Mul", node.add("Sub", _float_data(node), offset), scale)


def rewrite_normalizer(node: Rewriting) -> str | None:
    """Divide rows by their norm, except rows whose norm is 0."""
    data, axes, norm = _float_data(node), node.constant([-1]), node.attributes.get("norm", "MAX")
    if norm == "MAX":
        largest = node.add("TopK", data, node.constant([1]), axis=-1)
        # TopK has a second result
        node.nodes[-1].output.append(f"{largest}.indices")
        size = largest
    elif norm == "L1":
        size = node.add("ReduceSum", node.add("Abs", data), axes)
    else:
        size = node.add("Sqrt", node.add("ReduceSum", node.add("Mul", data, data), axes))
    is_zero = node.add("Equal", size, node.constant(np.float32(0)))
    return node.add("Div", data, node.add("Where", is_zero, node.constant(np.float32(1)), size))


def rewrite_binarizer(node: Rewriting) -> str | None:
    element_type = node.type_of(0)
    if not element_type:
        return None
    limit = node.number(node.attributes.get("threshold", 0.0))
    return node.add("Cast", node.add("Greater", node.name(0), limit), to=element_type)


def rewrite_imputer(node: Rewriting) -> str | None:
    """Replace one value, which may be NaN."""
    kind = "float" if node.type_of(0) in _FLOATS else "int64"
    values = node.attributes.get(f"imputed_value_{kind}s")
    if not node.type_of(0) or not values:
        return None
    data, replaced = node.name(0), node.attributes.get(f"replaced_value_{kind}", 0)
    if np.isnan(replaced):
        is_missing = node.add("IsNaN", data)
    else:
        is_missing = node.add("Equal", data, node.number(replaced))
    dtype = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}
    filler = np.asarray(values, dtype.get(node.type_of(0), np.int64))
    return node.add("Where", is_missing, node.constant(filler), data)


def rewrite_feature_extractor(node: Rewriting) -> str | None:
    """Select columns; of a vector, as a matrix of one row."""
    indices = node.add("Reshape", node.name(1), node.constant([-1]))
    selected = node.add("Gather", node.name(0), indices, axis=-1)
    is_vector = len(node.shape(0) or (0, 0)) == 1
    return node.add("Unsqueeze", selected, node.constant([0])) if is_vector else selected


def rewrite_one_hot_encoder(node: Rewriting) -> str | None:
    categories = node.attributes.get("cats_int64s")
    if not categories or not node.attributes.get("zeros", 1):
        return None
    data = node.cast(node.name(0), node.type_of(0), TensorProto.INT64)
    column = node.add("Unsqueeze", data, node.constant([-1]))
    is_equal = node.add("Equal", column, node.constant(np.asarray(categories, np.int64)))
    return node.add("Cast", is_equal, to=TensorProto.FLOAT)


# ---------------------------------------------------------------- linear models


def rewrite_linear_regressor(node: Rewriting) -> str | None:
    targets = node.attributes.get("targets", 1)
    return _transform(node, _linear_scores(node, targets))


def rewrite_linear_classifier(node: Rewriting) -> str | None:
    labels = node.attributes.get("classlabels_ints")
    if not labels:
        return None
    rows = len(node.attributes.get("intercepts", labels))
    scores = _linear_scores(node, rows)
    if rows == 1 and len(labels) == 2:
        return _choose_of_two(node, scores, labels, threshold=0.0, adds_to_one=True)
    return _choose_class(node, scores, labels)


def _linear_scores(node: Rewriting, rows: int) -> str:
    coefficients = _numbers(node, "coefficients", 0).reshape(rows, -1)
    data = _float_data(node)
    scores = node.add("MatMul", data, node.constant(np.ascontiguousarray(coefficients.T)))
    bias = node.attributes.get("intercepts")
    return node.add("Add", scores, node.constant(np.asarray(bias, np.float32))) if bias else scores


# ---------------------------------------------------------------- decision trees


class _Trees(NamedTuple):
    """The nodes of all trees. From node n, x goes to `left[n]` if `x[features[n]] <= thresholds[n]`.

    Attributes:
        roots: The first node of each tree.
        nan_left: The nodes from which NaN goes left.
        left: A leaf's own index, as in `right`.
        depth: The maximum number of steps from a root to a leaf.
        node_indices: The index of each node by the ids of its tree and node.
    """

    roots: Array
    features: Array
    thresholds: Array
    nan_left: Array
    left: Array
    right: Array
    depth: int
    node_indices: Mapping[tuple[int, int], int]


def rewrite_tree_regressor(node: Rewriting) -> str | None:
    attributes, targets = node.attributes, node.attributes.get("n_targets", 1)
    aggregate = attributes.get("aggregate_function", "SUM")
    trees = _read_trees(node) if aggregate in ("SUM", "AVERAGE") else None
    if trees is None:
        return None
    divisor = len(trees.roots) if aggregate == "AVERAGE" else 1
    entries = [attributes.get(f"target_{name}", ()) for name in ("treeids", "nodeids", "ids")]
    scores = _tree_scores(node, trees, entries, _numbers(node, "target_weights") / divisor, targets)
    return scores and _transform(node, _with_base(node, scores))


def rewrite_tree_classifier(node: Rewriting) -> str | None:
    attributes, labels = node.attributes, node.attributes.get("classlabels_int64s")
    trees = _read_trees(node) if labels else None
    if labels is None or trees is None:
        return None
    entries = [attributes.get(f"class_{name}", ()) for name in ("treeids", "nodeids", "ids")]
    weights = _numbers(node, "class_weights")
    is_binary = len(labels) == 2 and len(set(entries[2])) == 1
    columns = 1 if is_binary else len(labels)
    if is_binary:
        entries[2] = [0] * len(entries[2])
    scores = _tree_scores(node, trees, entries, weights, columns)
    if not scores:
        return None
    if not is_binary:
        return _choose_class(node, _with_base(node, scores), labels)
    base = _numbers(node, "base_values")[-1:]
    biased = node.add("Add", scores, node.constant(base)) if base.size else scores
    are_shares = bool((weights >= 0).all())
    threshold = 0.5 if are_shares else 0.0
    return _choose_of_two(node, biased, labels, threshold=threshold, adds_to_one=are_shares)


def _read_trees(node: Rewriting) -> _Trees | None:
    """Return the trees with comparisons of one kind; None if they are not valid."""
    attributes = node.attributes
    trees, nodes, features, true, false, modes = (
        attributes.get(f"nodes_{name}", ())
        for name in ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids", "modes")
    )
    dtype = np.float64 if node.type_of(0) == TensorProto.DOUBLE else np.float32
    values = _numbers(node, "nodes_values").astype(dtype)
    lengths = {len(column) for column in (trees, nodes, features, true, false, modes, values)}
    if len(lengths) != 1:
        return None
    tracks = attributes.get("nodes_missing_value_tracks_true") or [0] * len(nodes)
    index = {pair: n for n, pair in enumerate(zip(trees, nodes, strict=False))}
    below = np.nextafter(values, dtype(-np.inf))
    # no number is below -inf
    below[values == -np.inf] = np.nan
    # node, threshold, whether NaN goes left, left, right
    steps: list[tuple[int, Any, bool, int, int]] = []
    extra = len(nodes)
    try:
        for n, mode in enumerate(m.decode() if isinstance(m, bytes) else m for m in modes):
            if mode == "LEAF":
                steps.append((n, dtype(0), True, n, n))
                continue
            yes, no = index[trees[n], true[n]], index[trees[n], false[n]]
            nan = bool(tracks[n])
            if mode in ("BRANCH_LEQ", "BRANCH_LT"):
                limit = values[n] if mode == "BRANCH_LEQ" else below[n]
                steps.append((n, limit, nan, yes, no))
            elif mode in ("BRANCH_GT", "BRANCH_GTE"):
                limit = values[n] if mode == "BRANCH_GT" else below[n]
                steps.append((n, limit, not nan, no, yes))
            elif mode in ("BRANCH_EQ", "BRANCH_NEQ"):
                equal, other, nan_equal = (
                    (yes, no, nan) if mode == "BRANCH_EQ" else (no, yes, not nan)
                )
                # equal: not above the value, and not below it, which a second node decides
                steps.append((n, values[n], nan_equal, extra, other))
                steps.append((extra, below[n], False, other, equal))
                extra += 1
            else:
                return None
    except (KeyError, IndexError):
        return None
    numbers, thresholds, nan_left, left, right = zip(
        *sorted(steps, key=lambda s: s[0]), strict=True
    )
    if numbers != tuple(range(extra)):
        return None
    by_node = [*features, *(0 for _ in range(extra - len(nodes)))]
    for n, target in enumerate(left):
        if target >= len(nodes):
            by_node[target] = features[n]
    children = np.array([left, right])
    roots = np.array(sorted({tree: n for n, tree in reversed([*enumerate(trees)])}.values()))
    reached, depth = roots, 0
    while (children[:, reached] != reached).any():
        reached, depth = np.unique(children[:, reached]), depth + 1
        if depth > _MAX_DEPTH:
            return None
    return _Trees(
        roots=roots,
        features=np.array(by_node, np.int64),
        thresholds=np.array(thresholds, dtype),
        nan_left=np.array(nan_left),
        left=children[0].astype(np.int64),
        right=children[1].astype(np.int64),
        depth=depth,
        node_indices=index,
    )


def _tree_scores(
    node: Rewriting,
    trees: _Trees,
    entries: Sequence[Sequence[int]],
    weights: Array,
    columns: int,
) -> str | None:
    """Add nodes that descend all trees step by step, and return the sums of leaves' weights.

    Args:
        node: The node to rewrite.
        trees: The trees.
        entries: The tree, node and column of each weight.
        weights: The weights.
        columns: The number of columns of the result.
    """
    if len(trees.features) * columns > _MAX_WEIGHTS:
        return None
    table = np.zeros((len(trees.features), columns), trees.thresholds.dtype)
    try:
        leaves = [trees.node_indices[pair] for pair in zip(entries[0], entries[1], strict=True)]
        np.add.at(table, (leaves, list(entries[2])), weights)
    except (KeyError, IndexError, ValueError):
        return None
    is_float = node.type_of(0) in _FLOATS
    data = node.name(0) if is_float else node.add("Cast", node.name(0), to=TensorProto.FLOAT)
    place = node.constant(trees.roots)
    tables = {name: node.constant(getattr(trees, name)) for name in trees._fields[1:6]}
    for depth in range(trees.depth):
        if depth == 0:
            now = {name: node.constant(getattr(trees, name)[trees.roots]) for name in tables}
            value = node.add("Gather", data, now["features"], axis=1)
        else:
            now = {name: node.add("Gather", entry, place) for name, entry in tables.items()}
            value = node.add("GatherElements", data, now["features"], axis=1)
        goes_left = node.add("LessOrEqual", value, now["thresholds"])
        is_nan = node.add("And", node.add("IsNaN", value), now["nan_left"])
        place = node.add("Where", node.add("Or", goes_left, is_nan), now["left"], now["right"])
    if not trees.depth:
        # the results of trees that are leaves have the rows of the data
        zeros = node.add(
            "Mul", node.add("Gather", data, node.constant([0]), axis=1), node.number(0)
        )
        sums = node.constant(table[trees.roots].sum(axis=0))
        zeros = node.add("Where", node.add("IsNaN", zeros), node.number(0), zeros)
        return node.cast(node.add("Add", zeros, sums), 0, TensorProto.FLOAT)
    scores = node.add("Gather", node.constant(table), place)
    sums = node.add("ReduceSum", scores, node.constant([1]), keepdims=0)
    return node.cast(sums, node.type_of(0) if is_float else TensorProto.FLOAT, TensorProto.FLOAT)


def _with_base(node: Rewriting, scores: str) -> str:
    base = _numbers(node, "base_values")
    return node.add("Add", scores, node.constant(base)) if base.size else scores


# ---------------------------------------------------------------- scores and labels


def _choose_class(node: Rewriting, scores: str, labels: Sequence[int]) -> str | None:
    """Add the transformed scores, and return the label of the largest."""
    if _transform(node, scores, node.result(1)) is None:
        return None
    largest = node.add("ArgMax", scores, axis=1, keepdims=0)
    return node.add("Gather", node.constant(np.asarray(labels, np.int64)), largest)


def _choose_of_two(
    node: Rewriting, score: str, labels: Sequence[int], *, threshold: float, adds_to_one: bool
) -> str | None:
    """Add the scores of both classes, given one of them, and return the label."""
    kind = node.attributes.get("post_transform", "NONE")
    if kind not in _TRANSFORMS:
        return None
    if kind == "LOGISTIC" and not (adds_to_one and threshold):
        pair = [node.add("Sigmoid", node.add("Neg", score)), node.add("Sigmoid", score)]
    elif adds_to_one:
        pair = [node.add("Sub", node.constant(np.float32(1)), score), score]
    else:
        pair = [node.add("Neg", score), score]
    node.add("Concat", *pair, output=node.result(1), axis=1)
    is_second = node.add("Greater", score, node.constant(np.float32(threshold)))
    first, second = (node.constant(np.int64(label)) for label in labels)
    chosen = node.add("Where", is_second, second, first)
    return node.add("Squeeze", chosen, node.constant([1]))


def _transform(node: Rewriting, scores: str, output: str = "") -> str | None:
    kind = node.attributes.get("post_transform", "NONE")
    if kind not in _TRANSFORMS:
        return None
    return node.add(_TRANSFORMS[kind] or "Identity", scores, output=output)


def _float_data(node: Rewriting) -> str:
    return node.cast(node.name(0), node.type_of(0), TensorProto.FLOAT)


def _numbers(node: Rewriting, name: str, default: float | None = None) -> Array:
    """Return a list of numbers among the attributes, which may be a tensor."""
    tensor = node.attributes.get(f"{name}_as_tensor")
    if tensor is not None:
        return np.asarray(numpy_helper.to_array(tensor))
    empty = () if default is None else (default,)
    return np.asarray(node.attributes.get(name, empty), np.float32)
