"""The table of ONNX operators that need more than TVM's importer, with one record each."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

from tvmflow.core.formatting import excerpt
from tvmflow.frontends._dynamic_shapes import SizeRanges
from tvmflow.frontends.onnx import _arithmetic as arithmetic
from tvmflow.frontends.onnx import _classical as classical
from tvmflow.frontends.onnx import _converters as converters
from tvmflow.frontends.onnx import _rewrites as rewrites
from tvmflow.frontends.onnx import _sequence_layers as layers
from tvmflow.frontends.onnx import _size_rules as rules
from tvmflow.frontends.onnx._arithmetic import Converter, NodeToConvert, Reduction, in_float32
from tvmflow.frontends.onnx._block_quantized import DOMAIN as BLOCK_QUANTIZED_DOMAIN
from tvmflow.frontends.onnx._block_quantized import OPERATOR as BLOCK_QUANTIZED_WEIGHTS
from tvmflow.frontends.onnx._header import NARROW_TYPES, name_of
from tvmflow.frontends.onnx._inlining import MAX_UNROLLED_NODES
from tvmflow.frontends.onnx._rewrites import Context, Rewrite, Rewriting, trains
from tvmflow.frontends.onnx.graph import (
    CUSTOM_DOMAIN,
    OWN_DOMAIN,
    KnownValues,
    attributes_of,
    element_types,
    is_standard,
    known_values,
    opset_of,
    replace_nodes,
)
from tvmflow.frontends.onnx.sizes import SizeRule, Sizes, SizeValue, apply_rule
from tvmflow.graph.ir_operators import GATES, BoxNms, MultiboxDetection

# Older models are converted to this opset if possible. As of this opset, Dropout's mask is boolean.
_MIN_OPSET: Final = 13
_CAST_LIKE_OPSET: Final = 15


class Operator(NamedTuple):
    """How an operator is imported; TVM's importer does everything for which there is no function here.

    Attributes:
        convert: Converts a node to Relax.
        rewrite: Rewrites a node as other ONNX nodes.
        evaluate: Returns a node's result for operands that are constants or expressions of dimensions.
        follow: Converts a node with dynamic shapes; returns None to leave the node to `convert`.
        miscomputed: Returns the case in which TVM's importer miscomputes this node, or an empty string.
        parameters: The operands that are parameters of the node and not weights, even if they are floats.
        format: The group of operators of the domain com.microsoft (or of none; "classical": ai.onnx.ml) that only
            `rewrite` supports.
    """

    convert: Converter | None = None
    rewrite: Rewrite | None = None
    evaluate: SizeRule | None = None
    follow: Callable[[Sizes, NodeProto], Any] | None = None
    miscomputed: Callable[[NodeProto, KnownValues], str] | None = None
    parameters: tuple[int, ...] = ()
    format: Literal["", "classical", "fused", "quantized"] = ""


# ---------------------------------------------------------------- cases that TVM 0.27's importer miscomputes


def _has_operand(node: NodeProto, position: int) -> bool:
    return position < len(node.input) and bool(node.input[position])


def _has_output(node: NodeProto, position: int) -> bool:
    return position < len(node.output) and bool(node.output[position])


def _find_narrow_cast(node: NodeProto, _: KnownValues) -> str:
    """TVM neither rounds nor saturates as ONNX does in casts to float8 or sub-byte types."""
    to = attributes_of(node).get("to", 0)
    return f"to {name_of(to)}" if to in NARROW_TYPES else ""


def _find_training(node: NodeProto, _: KnownValues) -> str:
    is_training = attributes_of(node).get("training_mode", 0) or _has_output(node, 1)
    return "in training mode" if is_training else ""


def _find_active_dropout(node: NodeProto, known: KnownValues) -> str:
    if _has_output(node, 1):
        return "with its mask"
    return "in training mode" if trains(node, known) else ""


def _find_small_indices(node: NodeProto, known: KnownValues) -> str:
    """Find indices whose sizes differ from the data's: TVM assumes equal sizes along other axes."""
    data, indices = (known.shapes.get(name, ()) for name in node.input[:2])
    axis = attributes_of(node).get("axis", 0) % max(len(data), 1)
    counted = (slice(1, axis), slice(axis + 2, None))
    differs = any(data[part] != indices[part] for part in counted)
    return "with indices of fewer rows than the data" if differs else ""


def _find_norm_of_all(node: NodeProto, known: KnownValues) -> str:
    axis, shape = attributes_of(node).get("axis", -1), known.shapes.get(node.input[0], ())
    return "over all axes" if axis in (0, -len(shape)) else ""


def _find_zero_count(node: NodeProto, known: KnownValues) -> str:
    """Find a K of 0, for which TVM returns all elements."""
    count = known.constants.get(node.input[1]) if len(node.input) > 1 else None
    return "with K = 0" if count is not None and not count.any() else ""


def _case(
    text: str, applies: Callable[[NodeProto], object]
) -> Callable[[NodeProto, KnownValues], str]:
    """Return a function of a node that returns `text` if `applies(node)`, else an empty string."""
    return lambda node, _: text if applies(node) else ""


# ---------------------------------------------------------------- the table


def _reduction(
    reduce: Callable[..., Any], evaluate: SizeRule | None = None, **steps: Any
) -> Operator:
    reduction = Reduction(reduce, **steps)
    convert = functools.partial(arithmetic.convert_reduction, reduction=reduction)
    return Operator(convert, evaluate=evaluate)


def _extreme(reduce: Callable[..., Any], empty: float) -> Operator:
    return Operator(
        functools.partial(arithmetic.convert_reduce_extreme, reduce=reduce, empty=empty)
    )


def _windows(convert: Converter | None = None, parameters: tuple[int, ...] = ()) -> Operator:
    rewrite, follow = rewrites.rewrite_windows, rules.follow_windows
    return Operator(convert, rewrite, follow=follow, parameters=parameters)


def _fused(rewrite: Rewrite) -> Operator:
    return Operator(rewrite=rewrite, format="fused")


def _classical(rewrite: Rewrite) -> Operator:
    return Operator(rewrite=rewrite, format="classical")


def _quantized(result_scale: int, rewrite: Rewrite) -> Operator:
    """Return the record of a QOperator; `result_scale` is the operand with the result's scale."""
    own = functools.partial(rewrites.rewrite_quantized, scale=result_scale, rewrite=rewrite)
    return Operator(rewrite=own, format="quantized")


def _pairwise(of_data: Callable[[Any, Any], Any], evaluate: SizeRule | None = None) -> Operator:
    convert = functools.partial(arithmetic.convert_pairwise, operator=of_data)
    return Operator(convert, evaluate=evaluate)


def _indexing(of_data: Callable[..., Any], **others: Any) -> Operator:
    return Operator(functools.partial(converters.convert_index, operator=of_data), **others)


def _order(node: NodeToConvert) -> tuple[Any, int, bool]:
    """Return the data of a sort, its axis, and whether it is descending."""
    return node.inputs[0], node.integer("axis", -1), node.is_set("descending")


_FUSED_MATMUL: Final = _fused(rewrites.rewrite_matmul)
_POOL: Final = "auto_pad ceil_mode count_include_pad kernel_shape pads strides".split()

OPERATORS: Final[Mapping[str, Operator]] = {
    "Add": Operator(evaluate=rules.pairwise_integers(operator.add)),
    "AffineGrid": Operator(converters.convert_affine_grid),
    "ArgMax": Operator(arithmetic.convert_arg_extreme),
    "ArgMin": Operator(arithmetic.convert_arg_extreme),
    "ArrayFeatureExtractor": _classical(classical.rewrite_feature_extractor),
    "Attention": Operator(in_float32(layers.convert_attention)),
    "AveragePool": _windows(arithmetic.convert_average_pool),
    "BatchNormalization": Operator(arithmetic.convert_batch_norm, miscomputed=_find_training),
    "Binarizer": _classical(classical.rewrite_binarizer),
    "BitCast": Operator(arithmetic.convert_bit_cast),
    "BitShift": Operator(arithmetic.convert_bit_shift),
    "Cast": Operator(evaluate=rules.evaluate_cast, miscomputed=_find_narrow_cast),
    "CastLike": Operator(rewrite=rewrites.rewrite_cast_like),
    "Ceil": Operator(evaluate=rules.elementwise(rules.ceil)),
    "Celu": Operator(arithmetic.convert_celu),
    "Clip": Operator(arithmetic.convert_clip, parameters=(1, 2)),
    "Col2Im": Operator(converters.convert_col2im),
    "Concat": Operator(rewrite=rewrites.rewrite_concat, evaluate=rules.evaluate_concat),
    "ConcatFromSequence": Operator(converters.convert_concat_from_sequence),
    "ConstantOfShape": Operator(
        evaluate=rules.evaluate_constant_of_shape, follow=rules.follow_constant_of_shape
    ),
    "Conv": _windows(),
    "ConvInteger": _windows(converters.convert_conv_integer, parameters=(3,)),
    "ConvTranspose": Operator(
        rewrite=rewrites.rewrite_conv_transpose,
        miscomputed=_case("with output_shape", lambda n: "output_shape" in attributes_of(n)),
    ),
    "Cosh": Operator(arithmetic.convert_cosh),
    "CumProd": Operator(arithmetic.convert_cum_prod),
    "CumSum": Operator(arithmetic.convert_cum_sum),
    "DFT": Operator(converters.convert_dft, parameters=(1, 2)),
    "DequantizeLinear": Operator(parameters=(1, 2)),
    "Det": Operator(converters.convert_det),
    "Div": Operator(evaluate=rules.pairwise(rules.divide)),
    "Dropout": Operator(rewrite=rewrites.rewrite_dropout, miscomputed=_find_active_dropout),
    "DynamicQuantizeLinear": Operator(arithmetic.convert_dynamic_quantize_linear),
    "DynamicQuantizeMatMul": _fused(rewrites.rewrite_dynamic_matmul),
    "Einsum": Operator(rewrite=rewrites.rewrite_einsum),
    "Elu": Operator(arithmetic.convert_elu),
    "EmbedLayerNormalization": Operator(in_float32(layers.convert_embed_layer_norm)),
    "Equal": Operator(
        arithmetic.convert_equal, evaluate=rules.comparison(operator.lt, operator.gt)
    ),
    "Expand": Operator(evaluate=rules.evaluate_expand, follow=rules.follow_expand),
    "EyeLike": Operator(rewrite=rewrites.rewrite_eye_like),
    "Floor": Operator(evaluate=rules.elementwise(rules.floor)),
    "FusedConv": _fused(rewrites.rewrite_fused_convolution),
    "FusedGemm": _fused(rewrites.rewrite_fused_gemm),
    "FusedMatMul": _FUSED_MATMUL,
    "Gather": _indexing(relax.op.take, evaluate=rules.evaluate_gather),
    "GatherElements": _indexing(relax.op.gather_elements),
    "GatherND": _indexing(relax.op.gather_nd),
    "Gemm": Operator(follow=rules.follow_matrix_product),
    "GlobalAveragePool": Operator(arithmetic.refuse_empty_images(NodeToConvert.by_tvm)),
    "GlobalLpPool": Operator(
        arithmetic.refuse_empty_images(in_float32(arithmetic.convert_global_lp_pool))
    ),
    "GlobalMaxPool": Operator(arithmetic.refuse_empty_images(NodeToConvert.by_tvm)),
    "Greater": Operator(evaluate=rules.comparison(operator.le, holds=operator.gt)),
    "GreaterOrEqual": Operator(evaluate=rules.comparison(operator.lt, holds=operator.ge)),
    "GroupQueryAttention": Operator(in_float32(layers.convert_group_query_attention)),
    "GridSample": Operator(converters.convert_grid_sample),
    "Hardmax": Operator(arithmetic.convert_hardmax),
    "Identity": Operator(evaluate=lambda call: call.array(0)),
    "Imputer": _classical(classical.rewrite_imputer),
    "InstanceNormalization": Operator(in_float32(NodeToConvert.by_tvm)),
    "IsInf": Operator(arithmetic.convert_is_inf),
    "LRN": Operator(in_float32(NodeToConvert.by_tvm)),
    "LayerNormalization": Operator(
        arithmetic.convert_layer_norm,
        miscomputed=_case(
            "with its mean and deviation", lambda n: _has_output(n, 1) or _has_output(n, 2)
        ),
    ),
    "Less": Operator(evaluate=rules.comparison(operator.ge, holds=operator.lt)),
    "LessOrEqual": Operator(evaluate=rules.comparison(operator.gt, holds=operator.le)),
    "LinearClassifier": _classical(classical.rewrite_linear_classifier),
    "LinearRegressor": _classical(classical.rewrite_linear_regressor),
    "Log": Operator(rewrite=rewrites.rewrite_log),
    "LpNormalization": Operator(in_float32(arithmetic.convert_lp_normalization)),
    "LpPool": _windows(in_float32(arithmetic.convert_lp_pool)),
    "MatMul": Operator(follow=rules.follow_matrix_product),
    "MatMulInteger": Operator(parameters=(3,)),
    "MatMulIntegerToFloat": _fused(rewrites.rewrite_matmul_to_float),
    "Max": _pairwise(relax.op.maximum, rules.extreme(max, tirx.max)),
    "MaxPool": _windows(converters.convert_max_pool),
    "MaxUnpool": Operator(converters.convert_max_unpool),
    "Mean": Operator(arithmetic.convert_mean),
    "MeanVarianceNormalization": Operator(in_float32(arithmetic.convert_mean_variance_norm)),
    "Min": _pairwise(relax.op.minimum, rules.extreme(min, tirx.min)),
    "Mish": Operator(rewrite=rewrites.rewrite_mish),
    "Mod": Operator(arithmetic.convert_mod, evaluate=rules.pairwise(rules.modulo)),
    "Mul": Operator(evaluate=rules.pairwise(rules.multiply)),
    "MultiHeadAttention": Operator(in_float32(layers.convert_multi_head_attention)),
    "Neg": Operator(evaluate=rules.elementwise(lambda sizes, x: sizes.simplify(0 - x))),
    "NonMaxSuppression": Operator(converters.convert_non_max_suppression, parameters=(2, 3, 4)),
    "Normalizer": _classical(classical.rewrite_normalizer),
    "Not": Operator(evaluate=rules.elementwise(lambda _, x: not x)),
    "OneHot": Operator(converters.convert_one_hot, parameters=(1, 2)),
    "OneHotEncoder": _classical(classical.rewrite_one_hot_encoder),
    "PRelu": Operator(arithmetic.convert_prelu),
    "Pad": Operator(follow=rules.follow_pad, parameters=(2,)),
    "Pow": Operator(arithmetic.convert_pow, parameters=(1,)),
    "QGemm": _quantized(7, rewrites.rewrite_quantized_gemm),
    "QLinearAdd": _quantized(6, rewrites.rewrite_binary("Add")),
    "QLinearAveragePool": _quantized(3, rewrites.rewrite_unary("AveragePool", *_POOL)),
    "QLinearConcat": _quantized(0, rewrites.rewrite_quantized_concat),
    "QLinearConv": _quantized(6, rewrites.rewrite_quantized_convolution),
    "QLinearGlobalAveragePool": _quantized(3, rewrites.rewrite_unary("GlobalAveragePool")),
    "QLinearLeakyRelu": _quantized(3, rewrites.rewrite_unary("LeakyRelu", "alpha")),
    "QLinearMatMul": _quantized(6, rewrites.rewrite_quantized_product),
    "QLinearMul": _quantized(6, rewrites.rewrite_binary("Mul")),
    "QLinearSigmoid": _quantized(3, rewrites.rewrite_unary("Sigmoid")),
    "QLinearSoftmax": _quantized(3, rewrites.rewrite_quantized_softmax),
    "QuantizeLinear": Operator(parameters=(1, 2)),
    "QuickGelu": _fused(rewrites.rewrite_quick_gelu),
    "RMSNormalization": Operator(miscomputed=_find_norm_of_all),
    "Range": Operator(follow=rules.follow_range, parameters=(0, 1, 2)),
    "ReduceL1": _reduction(relax.op.sum, before=relax.op.abs),
    "ReduceL2": _reduction(
        relax.op.sum,
        before=arithmetic.square,
        after=relax.op.sqrt,
        alone=relax.op.abs,
        has_float_result=True,
    ),
    "ReduceLogSum": _reduction(relax.op.sum, after=relax.op.log, has_float_result=True),
    "ReduceLogSumExp": _reduction(
        arithmetic.log_sum_exp, alone=lambda x: x, has_float_result=True, empty=-math.inf
    ),
    "ReduceMax": _extreme(relax.op.max, empty=-math.inf),
    "ReduceMean": Operator(arithmetic.convert_reduce_mean),
    "ReduceMin": _extreme(relax.op.min, empty=math.inf),
    "ReduceProd": _reduction(relax.op.prod, rules.evaluate_reduce_prod, empty=1.0),
    "ReduceSum": _reduction(relax.op.sum),
    "ReduceSumSquare": _reduction(relax.op.sum, before=arithmetic.square),
    "Reshape": Operator(evaluate=rules.evaluate_reshape, follow=rules.follow_reshape),
    "Resize": Operator(converters.convert_resize, follow=rules.follow_resize, parameters=(1, 2, 3)),
    "ReverseSequence": Operator(converters.convert_reverse_sequence),
    "RoiAlign": Operator(converters.convert_roi_align),
    "RotaryEmbedding": Operator(layers.convert_rotary_embedding),
    "STFT": Operator(converters.convert_stft, parameters=(1, 2, 3)),
    "Scaler": _classical(classical.rewrite_scaler),
    "ScatterElements": _indexing(relax.op.scatter_elements, miscomputed=_find_small_indices),
    "ScatterND": Operator(converters.convert_scatter),
    "Selu": Operator(arithmetic.convert_selu),
    "SequenceErase": Operator(miscomputed=_case("at a position", lambda n: _has_operand(n, 1))),
    "SequenceInsert": Operator(miscomputed=_case("at a position", lambda n: _has_operand(n, 2))),
    "Shape": Operator(evaluate=rules.evaluate_shape),
    "Shrink": Operator(arithmetic.convert_shrink),
    "Sign": Operator(arithmetic.convert_sign),
    "SimplifiedLayerNormalization": _fused(rewrites.rewrite_rms_norm),
    "Sinh": Operator(arithmetic.convert_sinh),
    "Size": Operator(evaluate=lambda call: call.sizes.simplify(math.prod(call.array(0)))),
    "SkipLayerNormalization": Operator(in_float32(layers.convert_skip_layer_norm)),
    "SkipSimplifiedLayerNormalization": _fused(rewrites.rewrite_skip_rms_norm),
    "Slice": Operator(
        converters.convert_slice, evaluate=rules.evaluate_slice, follow=rules.follow_slice
    ),
    "SpaceToDepth": Operator(
        follow=rules.follow_space_to_depth,
        miscomputed=_case("with mode CRD", lambda n: attributes_of(n).get("mode", "DCR") != "DCR"),
    ),
    "Split": Operator(rewrite=rewrites.rewrite_split, follow=rules.follow_split),
    "SplitToSequence": Operator(converters.convert_split_to_sequence),
    "Squeeze": Operator(evaluate=rules.evaluate_squeeze),
    "Sub": Operator(evaluate=rules.pairwise_integers(operator.sub)),
    "Sum": _pairwise(relax.op.add),
    "Swish": Operator(arithmetic.convert_swish),
    "Tanh": Operator(rewrite=rewrites.rewrite_tanh),
    "ThresholdedRelu": Operator(arithmetic.convert_thresholded_relu, parameters=(1,)),
    "Tile": Operator(converters.convert_tile, follow=rules.follow_tile),
    "TopK": Operator(
        arithmetic.convert_top_k,
        rewrites.rewrite_top_k,
        follow=rules.follow_top_k,
        miscomputed=_find_zero_count,
    ),
    "TreeEnsembleClassifier": _classical(classical.rewrite_tree_classifier),
    "TreeEnsembleRegressor": _classical(classical.rewrite_tree_regressor),
    "TransposeMatMul": _FUSED_MATMUL,
    "Unsqueeze": Operator(
        evaluate=lambda call: np.expand_dims(call.array(0), tuple(call.integers(1, "axes")))
    ),
    "Upsample": Operator(parameters=(1,)),
    "Where": Operator(evaluate=rules.evaluate_where),
    **{kind: Operator(functools.partial(layers.convert_recurrent, kind=kind)) for kind in GATES},
    BLOCK_QUANTIZED_WEIGHTS: Operator(converters.convert_block_quantized),
}

EXTENSION_OPERATORS: Final[Mapping[str, Operator]] = {
    "AdaptiveAveragePool": Operator(
        lambda node: relax.op.nn.adaptive_avg_pool2d(
            node.inputs[0], output_size=node.attributes["output_size"]
        )
    ),
    "ArgSort": Operator(lambda node: relax.op.argsort(*_order(node), "int32")),
    "BoxNms": Operator(functools.partial(converters.convert_own, operator=BoxNms)),
    "MultiboxDetection": Operator(
        functools.partial(converters.convert_own, operator=MultiboxDetection)
    ),
    "Sort": Operator(lambda node: relax.op.sort(*_order(node))),
    "Take": Operator(converters.convert_take),
}
"""The operators in OWN_DOMAIN, which the MXNet frontend uses; files cannot have them."""

_NONE: Final = Operator()


def operator_of(node: NodeProto) -> Operator:
    """Return the record of a node's operator in any domain; an empty record if there is none."""
    return OPERATORS.get(node.op_type, _NONE)


# ---------------------------------------------------------------- applications


def rewrite_nodes(model: ModelProto) -> ModelProto:
    """Rewrite nodes of the main graph, where the needed shapes and types are known."""
    opset = opset_of(model)
    # Einsum is the same in all opsets, and so can be rewritten in older ones, too.
    names = {n for n, o in OPERATORS.items() if o.rewrite} if opset >= _MIN_OPSET else {"Einsum"}
    if names.isdisjoint(node.op_type for node in model.graph.node):
        return model
    producers = {name: node for node in model.graph.node for name in node.output}
    context = Context(opset, known_values(model), element_types(model), producers)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes += _rewrite(node, context) if node.op_type in names else [node]
    replace_nodes(model.graph, nodes)
    return model


def _rewrite(node: NodeProto, context: Context) -> list[NodeProto]:
    entry = operator_of(node)
    own_domain = classical.DOMAIN if entry.format == "classical" else "com.microsoft"
    is_known = is_standard(node) or (bool(entry.format) and node.domain == own_domain)
    if not is_known or entry.rewrite is None:
        return [node]
    rewriting = Rewriting(node, context)
    # Constants with an operand's type can only be added once this type is known.
    waits = context.opset < _CAST_LIKE_OPSET and not rewriting.element_type
    if entry.format == "fused" and waits:
        return [node]
    result = entry.rewrite(rewriting)
    return [node] if result is None else rewriting.finish(result)


def compute_sizes(
    ranges: SizeRanges, node: NodeProto, operands: Sequence[SizeValue | None]
) -> SizeValue | None:
    """Return a node's result for constants and expressions of dimensions; see `apply_rule`."""
    rule = operator_of(node).evaluate if is_standard(node) else None
    return apply_rule(rule, ranges, node, operands) if rule else None


_UNROLLED: Final[Mapping[str, str]] = {
    "Loop": "a number of iterations that is constant or has a constant limit, at most "
    f"{MAX_UNROLLED_NODES:,} nodes in all, and no stacked outputs where a condition is computed",
    "Scan": f"opset 9, a known length, and at most {MAX_UNROLLED_NODES:,} nodes in all",
}
"""What a loop needs in order to be unrolled."""

# The converters under these names are for operators of the domain com.microsoft only.
_MICROSOFT_ONLY: Final = frozenset({"Attention", "RotaryEmbedding"})


@functools.cache
def supported_operators() -> frozenset[str]:
    """Return the operators that TVM's importer or tvmflow can convert."""
    own = (name for name, entry in OPERATORS.items() if entry.convert)
    return frozenset(("If", "Constant", *_get_convert_map(), *own))


def unsupported_reason(node: NodeProto, known: KnownValues) -> str:
    """Return why a node cannot be imported correctly, or an empty string."""
    if node.domain in (CUSTOM_DOMAIN, OWN_DOMAIN, BLOCK_QUANTIZED_DOMAIN):
        return ""
    if is_standard(node) and node.op_type in _UNROLLED:
        return f"{node.op_type} is unrolled, which needs {_UNROLLED[node.op_type]}"
    name = excerpt(f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type))
    if operator_of(node).format == "classical" and node.domain == classical.DOMAIN:
        return f"{name} is imported {classical.NEEDS}"
    has_converter = node.op_type in supported_operators() and (
        is_standard(node) or node.domain == "com.microsoft"
    )
    if not has_converter or (is_standard(node) and node.op_type in _MICROSOFT_ONLY):
        return f"TVM has no operator {name}"
    find = operator_of(node).miscomputed
    case = find(node, known) if find else ""
    return f"TVM miscomputes {name} {case}" if case else ""
