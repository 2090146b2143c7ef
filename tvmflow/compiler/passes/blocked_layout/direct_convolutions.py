"""Direct convolutions on blocked layouts: of float32, or of bfloat16 where the recipe asks for it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Contraction, RegisterTile, multiply_add
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_PRODUCTS, CpuModel
from tvmflow.compiler.contraction.packed import FLOAT, Accumulators, allocate, loop_over
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import BYTES
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import BFLOAT16, Groups, Window
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel, if_else
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, known_sizes
from tvmflow.graph.ir import OPAQUE


def is_plain_data(rewriter: LayoutRewriter, data: Any) -> bool:
    """Return whether a convolution reads plain data because they have few channels."""
    few = known_sizes(data)[1] <= rewriter.block // 2
    return few and rewriter.blocked_form(data) is None


def block_data(rewriter: LayoutRewriter, data: Any, weight_dtype: str) -> tuple[Any, int]:
    """Return a convolution's data and the channels in a block: 1 if plain, few if packed for dot products."""
    if not is_plain_data(rewriter, data):
        return rewriter.to_blocked(data), rewriter.block
    if ir.dtype_of(data) in BYTES:
        terms = rewriter.context.integers.terms
    elif _uses_bfloat16(rewriter, weight_dtype):
        data, terms = rewriter.round_data(data), BFLOAT16.terms
    else:
        return data, 1
    channels = known_sizes(data)[1]
    lanes = channels + -channels % terms
    return rewriter.pack(data, lanes), lanes


def shorten(rewriter: LayoutRewriter, groups: Groups, weight_dtype: str, *, joins: bool) -> Groups:
    """Return groups that multiply fewer empty lanes (see `blocked.shorten`), where the CPU allows it.

    By-element FMA and instructions that add several products need whole blocks, and ISA levels can
    share only weights for whole blocks.
    """
    takes_blocks = (
        rewriter.cpu.multiplicand_lanes
        or count_terms(rewriter, weight_dtype) > 1
        or rewriter.context.options.shares_weights
    )
    return groups if takes_blocks else blocked.shorten(groups, joins=joins)


def emit(
    rewriter: LayoutRewriter,
    name: str,
    x: Any,
    packed: Any,
    window: Window,
    reads: Groups,
    weight_dtype: str,
    image: Image | None = None,
) -> Any:
    """Emit a convolution of data as `block_data` returns them.

    The packed weights are (o/b, blocks of data, …, lanes of i, b of o), without the axis of lanes if there is one
    lane. They are cast to `weight_dtype`, or rounded to bfloat16. With `image`, each kernel position may become a
    separate convolution.
    """
    convolve: Callable[..., Any] = blocked.conv
    if _uses_bfloat16(rewriter, weight_dtype):
        convolve, name = functools.partial(blocked.dot_conv, BFLOAT16), f"bfloat16_{name}"
        x = x if reads.lanes < rewriter.block else rewriter.round_data(x)
        weights = rewriter.round_weights(rewriter.split_terms(packed, BFLOAT16.terms))
    else:
        weights = rewriter.cast(packed, weight_dtype)
    kernel = ir.known_shape(packed)[2 : 2 + len(window.strides)]
    if image is not None and image.is_fixed and _are_separate_faster(image, kernel, window):
        return _emit_positions(rewriter, image, x, weights, window, reads, convolve)
    if convolve is blocked.conv:
        columns = _find_tile_columns(rewriter, x, weights, window)
        convolve = functools.partial(blocked.conv, tile_columns=columns)
    return rewriter.kernel(lambda x, w: convolve(x, w, window, reads), name, x, weights)


def _find_tile_columns(rewriter: LayoutRewriter, x: Any, weights: Any, window: Window) -> int:
    """Return the multiple to which the rows of a result are padded, so that tiles divide them."""
    cpu, rank = rewriter.cpu, len(window.strides)
    blocks, *reads, lanes = ir.known_shape(weights)
    size = known_sizes(x)[1 + rank]
    if is_dynamic(size):
        return 1
    padded = size + sum(window.padding[rank - 1 :: rank])
    reach = (reads[rank] - 1) * window.dilation[-1]
    columns = (padded - reach - 1) // window.strides[-1] + 1
    problem = Contraction(columns, blocks, math.prod(reads), multiply_add(cpu), is_product=False)
    return candidates.pad_rows(problem, cpu._replace(lanes=lanes))


def count_terms(rewriter: LayoutRewriter, weight_dtype: str) -> int:
    """Return how many products an instruction of a direct convolution adds to each result."""
    return BFLOAT16.terms if _uses_bfloat16(rewriter, weight_dtype) else 1


def _uses_bfloat16(rewriter: LayoutRewriter, weight_dtype: str) -> bool:
    """Return whether a convolution computes in bfloat16; int8 weights are smaller, and stay int8."""
    return rewriter.context.uses_bfloat16() and weight_dtype == "float32"


# ---------------------------------------------------------------- plain data
# A pointwise convolution without convolutions next to it would pack its data and unpack its result. Instead, its
# weights are multiplied with the plain data, whose columns are pixels. Then ragged channels fill no lanes with zeros,
# and only a few columns are packed at a time. The kernel is opaque to fusion, so it is emitted again with each bias
# or activation that follows.

_MIN_RAGGED_CHANNELS: Final = 32
# Threads divide the columns, and each reads all weights: with fewer columns, some threads idle, and weights dominate.
_MIN_COLUMNS: Final = 256
# With fewer columns, plain data are faster only if channels do not fill whole vectors and there are at most this many
# input channels per output channel.
_MAX_DEPTH_SHARE: Final = 2


class PlainProduct(NamedTuple):
    """A matmul of weights (outputs, depth) with several matrices, then bias and activations in order.

    The columns of a matrix are the pixels of an image, at least as many as a vector has lanes.
    """

    number: int
    outputs: int
    depth: int
    image: tuple[int, ...]
    has_bias: bool = False
    activations: tuple[Callable[[Any], Any], ...] = ()

    @property
    def pixels(self) -> int:
        """The number of columns in each matrix."""
        return math.prod(self.image)


def emit_plain_product(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any, window: Window
) -> Any:
    """Emit a pointwise convolution of plain data (n, c, …); None if blocked data are faster."""
    context, cpu = rewriter.context, rewriter.cpu
    outputs, inputs, *positions = ir.known_shape(kernel)
    sizes, result = known_sizes(data), known_sizes(call)
    is_whole = outputs % context.lanes == 0 and inputs % context.lanes == 0
    # pools read blocks of channels in vectors, which is faster where few lanes are empty
    pools_are_faster = outputs % context.lanes == 0 or min(inputs, outputs) < _MIN_RAGGED_CHANNELS
    if (
        # not measured on 64-bit ARM; without FMA, it is not faster
        cpu.multiplicand_lanes
        or not cpu.has_fma
        or context.weight_dtype != "float32"
        or context.uses_bfloat16()
        # ISA levels cannot share these weights, because their layout depends on the lanes
        or context.options.shares_weights
        or any(map(is_dynamic, (*sizes, *result)))
        or {*positions, *window.strides, *window.dilation, int(call.attrs.groups)} != {1}
        or any(window.padding)
        or math.prod(sizes[2:]) < context.lanes
        or (
            sizes[0] * math.prod(sizes[2:]) < _MIN_COLUMNS
            and (is_whole or inputs > _MAX_DEPTH_SHARE * outputs)
        )
        or rewriter.blocked_form(data) is not None
        or len(rewriter.flow.list_readers(call.args[0])) > 1
        or rewriter.is_read_blocked(call, by_pools=pools_are_faster)
    ):
        return None
    product = PlainProduct(sizes[0], outputs, inputs, tuple(sizes[2:]))
    points = candidates.choose_packing_tile(product.outputs, product.pixels, cpu).rows
    rows = rewriter.pad_to_multiples(rewriter.reshape(kernel, [outputs, inputs]), [points])
    packed = rewriter.rearrange(rows, [-(-outputs // points), points, inputs], [0, 2, 1])
    return _emit_product(rewriter, product, [packed, data])


def _emit_product(rewriter: LayoutRewriter, product: PlainProduct, arguments: list[Any]) -> Any:
    kernel = _make_plain_kernel(product, rewriter.cpu)
    shape = (product.number, product.outputs, *product.image)
    plain = rewriter.call_function(kernel, f"conv{len(product.image)}d_plain", arguments, shape)
    rewriter.products[plain] = product, arguments
    return plain


def _make_plain_kernel(product: PlainProduct, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return a matrix multiplication kernel that packs the columns of a tile once for all rows.

    Its parameters are the weights (⌈outputs/rows of a tile⌉, depth, rows), the matrices (number, depth, …), the bias
    (outputs) if there is one, and the result (number, outputs, …).
    """
    number, outputs, depth, image = product[:4]
    pixels = product.pixels
    tile_rows, vectors = candidates.choose_packing_tile(outputs, pixels, cpu)
    parameters = {
        "weights": ((-(-outputs // tile_rows), depth, tile_rows), FLOAT),
        "data": ((number, depth, *image), FLOAT),
        **({"bias": ((outputs,), FLOAT)} if product.has_bias else {}),
        "out": ((number, outputs, *image), FLOAT),
    }
    tiles, rest = divmod(-(-pixels // cpu.lanes), vectors)
    count = tiles + (rest > 0)
    is_parallel = cpu.cores > 1 and number * outputs * depth * pixels >= MIN_PARALLEL_PRODUCTS
    with define_flat_kernel("plain_product", parameters, has_root=False) as (builder, buffers):
        weights, data, *others, out = buffers

        def multiply(corner: tuple[Any, Any], packed: Any, group: Any, shape: RegisterTile) -> None:
            """Emit the product of a group's first rows and the tile at a corner (matrix, first column)."""
            matrix, start = corner
            sums = Accumulators.allocate(*shape, cpu.lanes)
            for index, _, _ in sums.iterate():
                sums.buffer[index] = T.float32(0)
            with T.serial(depth) as k:
                sums.add(
                    lambda row: weights[(group * depth + k) * tile_rows + row],
                    lambda column: packed[k * (shape.vectors * cpu.lanes) + column],
                )
            for index, tile_row, column in sums.iterate():
                row = group * tile_rows + tile_row
                value = sums.buffer[index]
                for bias in others:
                    value = value + bias[row]
                for activation in product.activations:
                    value = activation(value)
                out[(matrix * outputs + row) * pixels + start + column] = value

        def emit(matrix: Any, start: Any, vectors: int) -> None:
            """Emit the product of all rows and this many vectors of columns from `start` on."""
            width = vectors * cpu.lanes
            packed = allocate(depth * width)
            with T.serial(depth) as k, T.unroll(vectors) as v, T.vectorized(cpu.lanes) as lane:
                column = v * cpu.lanes + lane
                packed[k * width + column] = data[(matrix * depth + k) * pixels + start + column]
            groups, rows = divmod(outputs, tile_rows)
            with T.serial(groups) as group:
                multiply((matrix, start), packed, group, RegisterTile(tile_rows, vectors))
            if rows:
                multiply((matrix, start), packed, groups, RegisterTile(rows, vectors))

        with loop_over(number * count, is_parallel) as part:
            matrix, tile = part // count, part % count
            # the tail tile ends at the last column, so it may overlap the tile before it
            width = vectors * cpu.lanes
            if not rest:
                emit(matrix, tirx.min(tile * width, pixels - width), vectors)
            else:
                if_else(
                    tile < tiles,
                    lambda: emit(matrix, tile * width, vectors),
                    lambda: emit(matrix, pixels - rest * cpu.lanes, rest),
                )
    return builder.get()


def append_to_product(rewriter: LayoutRewriter, call: relax.Call, *arguments: Any) -> Any:
    """Emit a product of plain data again with its bias or an activation; None for other operators."""
    operands = list(zip(call.args, arguments, strict=True))
    if call.op.name == "relax.add" and arguments[0] not in rewriter.products:
        operands.reverse()
    (original, operand), *others = operands
    product, kept = rewriter.products.get(operand) or (None, [])
    if product is None or rewriter.flow.value_if_used_once(original) is None:
        return None
    if call.op.name == "relax.add":
        bias = _find_bias(rewriter, product, *others[0])
        if bias is None:
            return None
        return _emit_product(rewriter, product._replace(has_bias=True), [*kept, bias])
    limits = _find_limits(call)
    if limits is None:
        return None
    low, high = limits

    def limit(value: Any) -> Any:
        # minimum before maximum, as in TVM's operator, so that NaN has the same result
        lowered = value if high == math.inf else tirx.min(value, T.float32(high))
        return lowered if low == -math.inf else tirx.max(lowered, T.float32(low))

    product = product._replace(activations=(*product.activations, limit))
    return _emit_product(rewriter, product, kept)


def _find_bias(rewriter: LayoutRewriter, product: PlainProduct, original: Any, operand: Any) -> Any:
    """Return a weight with one value for each channel, as (outputs,); None for other operands."""
    channels = (product.outputs, *[1] * len(product.image))
    has_epilogue = product.has_bias or product.activations
    is_bias = ir.shape_of(operand) in (channels, (1, *channels))
    if has_epilogue or not is_bias or not rewriter.flow.is_weight(original):
        return None
    return rewriter.reshape(operand, [product.outputs])


def _find_limits(call: relax.Call) -> tuple[float, float] | None:
    if call.op.name == "relax.clip":
        low, high = (float(limit.value) for limit in call.args[1:])
        return low, high
    return {"relax.nn.relu": (0.0, math.inf), "relax.nn.relu6": (0.0, 6.0)}.get(call.op.name)


# ---------------------------------------------------------------- kernel positions
# Some kernel positions read only padding, for parts of the result or for all of it. With dilation 24 over an image of
# 20×20, only the middle position reads the image, so the others are removed. With dilation 12, only a third of the
# multiplications read the image. Then each position becomes a separate convolution of the part of the image that it
# reads, and the results are added.

# Separate convolutions read and write the result once per position, so they must save many multiplications.
_MAX_SHARE: Final = 0.6
_MAX_POSITIONS: Final = 16


class Image(NamedTuple):
    """The spatial extents of a convolution's data and of its result."""

    data: Sequence[IrSize]
    result: Sequence[IrSize]

    @property
    def is_fixed(self) -> bool:
        """True if no extent is dynamic."""
        return not any(map(is_dynamic, (*self.data, *self.result)))


def crop_kernel(
    rewriter: LayoutRewriter, image: Image, kernel: Any, window: Window
) -> tuple[Any, Window]:
    """Return weights (o, i, …) and window without outer positions that read only padding of fixed images."""
    if not image.is_fixed:
        return kernel, window
    padding, rank = list(window.padding), len(window.strides)
    size = ir.known_shape(kernel)[2:]
    for axis, parts in enumerate(_list_parts(image, size, window)):
        used = [position for position, part in enumerate(parts) if part]
        if not used or len(used) == len(parts):
            continue
        kernel = rewriter.take(kernel, range(used[0], used[-1] + 1), 2 + axis)
        padding[axis] -= used[0] * window.dilation[axis]
        padding[rank + axis] -= (len(parts) - 1 - used[-1]) * window.dilation[axis]
    return kernel, window._replace(padding=padding)


def _are_separate_faster(image: Image, kernel: Sequence[int], window: Window) -> bool:
    """Return whether a convolution per kernel position is faster, because most products read padding."""
    read = math.prod(sum(map(len, axis)) for axis in _list_parts(image, kernel, window))
    positions, pixels = math.prod(kernel), math.prod(image.result)
    return positions <= _MAX_POSITIONS and 0 < read < _MAX_SHARE * positions * pixels


def _emit_positions(
    rewriter: LayoutRewriter,
    image: Image,
    x: Any,
    weights: Any,
    window: Window,
    groups: Groups,
    convolve: Callable[..., Any],
) -> Any:
    """Emit a convolution of blocked or plain data as the sum over kernel positions of packed weights."""
    rank = len(window.strides)
    kernel = ir.known_shape(weights)[2 : 2 + rank]
    name = f"conv{rank}d_tap_NCHWc"
    corners, results = [], []
    axes = [list(enumerate(parts)) for parts in _list_parts(image, kernel, window)]
    for position in itertools.product(*axes):
        if not all(part for _, part in position):
            continue
        own, before, after = weights, [], []
        for axis, (index, part) in enumerate(position):
            own = rewriter.take(own, [index], 2 + axis)
            # negative padding crops the data to the part that the position reads
            step, offset = window.strides[axis], index * window.dilation[axis]
            first = part.start * step + offset - window.padding[axis]
            before.append(-first)
            after.append(first + (len(part) - 1) * step + 1 - image.data[axis])
        moved = Window(window.strides, before + after, [1] * rank)
        function = functools.partial(convolve, window=moved, groups=groups)
        results.append(rewriter.kernel(function, name, x, own, pattern=OPAQUE))
        corners.append([part.start for _, part in position])
    add = functools.partial(blocked.add_parts, image.result, corners)
    return rewriter.kernel(add, "add_taps", *results, pattern=None)


def _list_parts(image: Image, kernel: Sequence[int], window: Window) -> list[list[range]]:
    """Return, by axis and kernel position, the range of results for which it reads data, not padding."""

    def find(data: int, result: int, step: int, offset: int) -> range:
        """Return the indices y of a result for which y·step + offset lies within the data."""
        return range(max(0, -(offset // step)), min(result, -(-(data - offset) // step)))

    sizes = (image.data, image.result, kernel)
    steps = (window.strides, window.dilation, window.padding[: len(kernel)])
    return [
        [find(data, result, step, position * gap - pad) for position in range(size)]
        for data, result, size, step, gap, pad in zip(*sizes, *steps, strict=True)
    ]
