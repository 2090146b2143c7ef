"""Moves convolutions, and the operators between them, to layouts whose innermost axis is one vector.

`NCHW[b]c` for data and `OIHW[b]i[b]o` for weights, as in oneDNN and in Liu et al., "Optimizing
CNN Model Inference on CPUs" (USENIX ATC 2019). Data are packed where the first convolution
reads them and unpacked where an operator without a handler reads them; everything between
stays blocked. Weights are packed when the library is built. A new operator is a handler in
one of the modules here and a line in `HANDLERS`.
"""

from __future__ import annotations

import tvm

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes._rewriter import rewrite_straight_line
from tvmflow.compiler.passes.blocked_layout import (
    convolutions,
    elementwise,
    pooling,
    resizing,
    transposed_convolutions,
)
from tvmflow.compiler.passes.blocked_layout.rewriter import Handlers, LayoutRewriter

HANDLERS: Handlers = {
    "relax.nn.conv2d": convolutions.rewrite_conv2d,
    "relax.nn.conv2d_transpose": transposed_convolutions.rewrite_conv2d_transpose,
    "relax.nn.max_pool2d": pooling.rewrite_pool2d,
    "relax.nn.avg_pool2d": pooling.rewrite_pool2d,
    "relax.nn.adaptive_avg_pool2d": pooling.rewrite_adaptive_pool2d,
    **dict.fromkeys(pooling.IMAGE_REDUCTIONS, pooling.rewrite_image_reduction),
    "relax.image.resize2d": resizing.rewrite_resize,
    "relax.concat": elementwise.rewrite_concat,
    **dict.fromkeys(("relax.quantize", "relax.dequantize"), elementwise.rewrite_quantize),
    **dict.fromkeys(elementwise.ELEMENTWISE, elementwise.rewrite_elementwise),
}


def use_blocked_layouts(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Move convolutions and the operators between them to blocked layouts."""
    return rewrite_straight_line(mod, LayoutRewriter, context, HANDLERS)
