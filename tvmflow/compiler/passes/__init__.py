"""Passes over a model's graph and kernels.

Each module holds one topic. The order is that of `compiler.pipeline`.

May import compiler.ir, compiler.tir_kernels, compiler.context and core.
"""

from __future__ import annotations

from typing import Final

OPERATORS: Final = {
    "conv1d": "a convolution over a sequence",
    "conv2d": "a convolution over an image",
    "conv3d": "a convolution over a volume, such as a video",
    "grouped_conv2d": "a convolution over an image whose groups have several channels each",
    "depthwise_conv2d": "a convolution over an image of each channel by itself",
    "conv1d_transpose": "a transposed convolution over a sequence",
    "conv2d_transpose": "a transposed convolution over an image",
    "conv3d_transpose": "a transposed convolution over a volume",
    "matmul": "a matrix product with weights",
    "attention": "softmax of the product of queries and keys, times values",
}
"""The operators that have optimized kernels for CPUs, and that a recipe can exempt (`kernels.plain`)."""
