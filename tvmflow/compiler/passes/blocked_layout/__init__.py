"""Moves convolutions, and the operators between them, to layouts whose innermost axis is one vector.

Data become `NCHW[b]c` and weights `OIHW[b]i[b]o` (the same with one or three spatial axes), as in oneDNN and in Liu
et al., "Optimizing CNN Model Inference on CPUs" (USENIX ATC 2019). Data are packed where the first convolution reads
them and unpacked where an operator without a handler reads them; everything between stays blocked. Weights are packed
when the library is built. A new operator needs a handler in one of the modules here and a line in `HANDLERS`.
"""

from __future__ import annotations

import tvm

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes.blocked_layout import (
    channels,
    convolutions,
    elementwise,
    transposed_convolutions,
)
from tvmflow.compiler.passes.blocked_layout.rewriter import Handler, Handlers, LayoutRewriter
from tvmflow.compiler.passes.plain_images import RESIZES
from tvmflow.graph.rewriter import rewrite_main


def _for_each_rank(name: str, handler: Handler) -> dict[str, Handler]:
    """Return the operators for sequences, images and volumes (`name` with 1, 2, 3) -> one handler."""
    return {f"relax.nn.{name.format(rank)}": handler for rank in (1, 2, 3)}


HANDLERS: Handlers = {
    **_for_each_rank("conv{}d", convolutions.rewrite_conv),
    **_for_each_rank("conv{}d_transpose", transposed_convolutions.rewrite_conv_transpose),
    **_for_each_rank("max_pool{}d", elementwise.rewrite_pool),
    **_for_each_rank("avg_pool{}d", elementwise.rewrite_pool),
    **_for_each_rank("adaptive_avg_pool{}d", elementwise.rewrite_adaptive_pool),
    **dict.fromkeys(elementwise.IMAGE_REDUCTIONS, elementwise.rewrite_image_reduction),
    **dict.fromkeys(RESIZES, elementwise.rewrite_resize),
    "relax.concat": channels.rewrite_concat,
    "relax.split": channels.rewrite_split,
    "relax.strided_slice": channels.rewrite_slice,
    "relax.reshape": channels.rewrite_reshape,
    **dict.fromkeys(("relax.quantize", "relax.dequantize"), elementwise.rewrite_quantize),
    **dict.fromkeys(elementwise.ELEMENTWISE, elementwise.rewrite_elementwise),
    "relax.astype": elementwise.rewrite_conversion,
}


def use_blocked_layouts(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Move convolutions and the operators between them to blocked layouts."""
    return rewrite_main(mod, LayoutRewriter, context, HANDLERS)
