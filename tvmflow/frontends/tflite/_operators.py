"""The operators of TFLite: their names, and the options of those that are imported. Imports no framework.

Numbers and fields are those of TensorFlow's `lite/schema/schema.fbs`, version 3 (LiteRT 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvmflow.frontends.tflite._flatbuffer import Table

# The operators in the order of `BuiltinOperator`.
NAMES: Final = (
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE "
    "EMBEDDING_LOOKUP FLOOR FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D "
    "LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 "
    "RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS "
    "SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER "
    "BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE "
    "UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT "
    "LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG "
    "PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE "
    "EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD "
    "REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV "
    "REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU "
    "SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS WHERE "
    "RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE "
    "NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM "
    "BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D "
    "IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL "
    "CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS "
    "RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU DYNAMIC_UPDATE_SLICE "
    "RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 "
    "UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD "
    "STABLEHLO_DIVIDE STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP "
    "STABLEHLO_CONCATENATE STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE "
    "STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE "
    "STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM STABLEHLO_NEGATE "
    "STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT "
    "STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT "
    "STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA "
    "STABLEHLO_DOT_GENERAL STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE "
    "STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW "
    "STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT "
).split()
"""The operators in the order of their numbers."""

CUSTOM: Final = NAMES.index("CUSTOM")
"""The number of operators that are not TFLite's own."""

_WINDOW: Final = "padding:b stride_w:i stride_h:i"
_DILATION: Final = "dilation_w:i=1 dilation_h:i=1"
_VECTOR_LIMIT: Final = 16

# Each field as NAME:TYPE=DEFAULT in the order of its table. Types are those of `struct`, and `v` for a vector of int32.
_FIELDS: Final[Mapping[str, str]] = {
    "ADD": "activation:b",
    "ADD_N": "",
    "ABS": "",
    "ARG_MAX": "",
    "ARG_MIN": "",
    "AVERAGE_POOL_2D": f"{_WINDOW} filter_w:i filter_h:i activation:b",
    "BATCH_MATMUL": "adj_x:? adj_y:?",
    "BATCH_TO_SPACE_ND": "",
    "BROADCAST_TO": "",
    "CAST": "",
    "CEIL": "",
    "CONCATENATION": "axis:i activation:b",
    "CONV_2D": f"{_WINDOW} activation:b {_DILATION}",
    "CONV_3D": "padding:b stride_d:i stride_w:i stride_h:i activation:b "
    "dilation_d:i=1 dilation_w:i=1 dilation_h:i=1",
    "COS": "",
    "CUMSUM": "exclusive:? reverse:?",
    "DEPTHWISE_CONV_2D": f"{_WINDOW} depth_multiplier:i activation:b {_DILATION}",
    "DEPTH_TO_SPACE": "block_size:i",
    "DEQUANTIZE": "",
    "DIV": "activation:b",
    "ELU": "",
    "EMBEDDING_LOOKUP": "",
    "EQUAL": "",
    "EXP": "",
    "EXPAND_DIMS": "",
    "FILL": "",
    "FLOOR": "",
    "FLOOR_DIV": "",
    "FLOOR_MOD": "",
    "FULLY_CONNECTED": "activation:b weights_format:b keep_num_dims:?",
    "GATHER": "axis:i batch_dims:i",
    "GATHER_ND": "",
    "GELU": "approximate:?",
    "GREATER": "",
    "GREATER_EQUAL": "",
    "HARD_SWISH": "",
    "L2_NORMALIZATION": "activation:b",
    "L2_POOL_2D": f"{_WINDOW} filter_w:i filter_h:i activation:b",
    "LEAKY_RELU": "alpha:f",
    "LESS": "",
    "LESS_EQUAL": "",
    "LOCAL_RESPONSE_NORMALIZATION": "radius:i bias:f alpha:f beta:f",
    "LOG": "",
    "LOGICAL_AND": "",
    "LOGICAL_NOT": "",
    "LOGICAL_OR": "",
    "LOGISTIC": "",
    "LOG_SOFTMAX": "",
    "MAXIMUM": "",
    "MAX_POOL_2D": f"{_WINDOW} filter_w:i filter_h:i activation:b",
    "MEAN": "keep_dims:?",
    "MINIMUM": "",
    "MIRROR_PAD": "mode:b",
    "MUL": "activation:b",
    "NEG": "",
    "NOT_EQUAL": "",
    "ONE_HOT": "axis:i",
    "PACK": "count:i axis:i",
    "PAD": "",
    "PADV2": "",
    "POW": "",
    "PRELU": "",
    "QUANTIZE": "",
    "RANGE": "",
    "RANK": "",
    "REDUCE_ALL": "keep_dims:?",
    "REDUCE_ANY": "keep_dims:?",
    "REDUCE_MAX": "keep_dims:?",
    "REDUCE_MIN": "keep_dims:?",
    "REDUCE_PROD": "keep_dims:?",
    "RELU": "",
    "RELU6": "",
    "RELU_0_TO_1": "",
    "RELU_N1_TO_1": "",
    "RESHAPE": "new_shape:v",
    "RESIZE_BILINEAR": "_:i _:i align_corners:? half_pixel_centers:?",
    "RESIZE_NEAREST_NEIGHBOR": "align_corners:? half_pixel_centers:?",
    "REVERSE_V2": "",
    "ROUND": "",
    "RSQRT": "",
    "SELECT": "",
    "SELECT_V2": "",
    "SHAPE": "",
    "SIGN": "",
    "SIN": "",
    "SLICE": "",
    "SOFTMAX": "beta:f",
    "SPACE_TO_BATCH_ND": "",
    "SPACE_TO_DEPTH": "block_size:i",
    "SPLIT": "",
    "SPLIT_V": "",
    "SQRT": "",
    "SQUARE": "",
    "SQUARED_DIFFERENCE": "",
    "SQUEEZE": "axes:v",
    "STRIDED_SLICE": "begin_mask:i end_mask:i ellipsis_mask:i new_axis_mask:i shrink_axis_mask:i offset:?",
    "SUB": "activation:b",
    "SUM": "keep_dims:?",
    "TANH": "",
    "TILE": "",
    "TOPK_V2": "",
    "TRANSPOSE": "",
    "TRANSPOSE_CONV": f"{_WINDOW} activation:b",
    "UNPACK": "count:i axis:i",
    "ZEROS_LIKE": "",
}

FIX: Final = "replace the operator in the model, or end the model before it"
"""The remedy for an operator that is not imported."""

SUPPORTED: Final = frozenset(_FIELDS)
"""The operators that are imported."""


def read_options(name: str, table: Table | None) -> dict[str, Any]:
    """Return the options of an operator by name: numbers, and tuples of integers."""
    options: dict[str, Any] = {}
    for number, field in enumerate(_FIELDS.get(name, "").split()):
        key, _, kind = field.partition(":")
        code, _, default = kind.partition("=")
        if code == "v":
            options[key] = table.integers(number, "i", _VECTOR_LIMIT) if table else ()
        elif code == "f":
            options[key] = table.scalar(number, "f", 0.0) if table else 0.0
        else:
            value = int(default or 0)
            options[key] = table.integer(number, code, value) if table else value
    return options
