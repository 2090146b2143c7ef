"""What happens to the graph of a model on its way to kernels for a CPU: each module has one pass."""

from __future__ import annotations

from typing import Final

OPERATORS: Final = {
    "conv1d": "a convolution over a sequence, as one over an image of one row",
    "conv2d": "a convolution over an image",
    "grouped_conv2d": "one whose groups have several channels each",
    "depthwise_conv2d": "one of each channel by itself",
    "conv2d_transpose": "a transposed convolution, grouped and depthwise ones too",
    "matmul": "a matrix product with weights",
}
"""The operators that these passes have a road for, and that a recipe can leave as they are (`kernels.plain`)."""
