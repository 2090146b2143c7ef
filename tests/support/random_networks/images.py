"""Operators over sequences, images and volumes (n, c, …)."""

from __future__ import annotations

import math
from typing import Any, Final

from tests.support.random_networks.network import Network, Operator

_MAX_PRODUCTS: Final = 12_000_000
_CUBIC_RANK: Final = 4


def _is_image(net: Network, x: str) -> bool:
    return 3 <= len(net.shape(x)) <= 5


def _window(net: Network, size: list[int], edges: tuple[int, ...]) -> dict[str, Any] | None:
    """Return kernel, strides, dilation and padding that give at least one pixel."""
    rank = len(size)
    kernel = [net.choice(edges) for _ in range(rank)]
    strides = [net.choice((1, 1, 1, 2, 3)) for _ in range(rank)]
    dilations = [net.choice((1, 1, 1, 1, 2, 3, 7)) for _ in range(rank)]
    pads = [net.integer(0, max(0, edge // 2)) for edge in kernel + kernel]
    if net.chance(0.5):
        pads = [(edge - 1) * gap // 2 for edge, gap in zip(kernel, dilations, strict=True)] * 2
    for axis, (edge, gap) in enumerate(zip(kernel, dilations, strict=True)):
        if size[axis] + pads[axis] + pads[rank + axis] < (edge - 1) * gap + 1:
            return None
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}


def conv(net: Network, x: str) -> str | None:
    """Add a convolution: dense, grouped, depthwise, or 1×1, with an activation or not."""
    if not _is_image(net, x):
        return None
    channels, size = net.shape(x)[1], net.shape(x)[2:]
    window = _window(net, size, net.choice(((1,), (3,), (1, 2, 3, 4, 5, 7))))
    if window is None:
        return None
    groups = net.choice([n for n in range(1, channels + 1) if channels % n == 0])
    groups = net.choice((1, 1, groups, channels))
    out = groups * net.choice((1, 1, 2, 3)) if groups > 1 else net.channels()
    inner = channels // groups
    products = out * inner * math.prod(size) * math.prod(window["kernel_shape"])
    if products > _MAX_PRODUCTS:
        return None
    terms = inner * math.prod(window["kernel_shape"])
    weights = [net.weight(out, inner, *window["kernel_shape"], terms=terms)]
    if net.chance(0.6):
        weights.append(net.weight(out))
    return net.add("Conv", x, *weights, **window, group=groups)


def conv_transpose(net: Network, x: str) -> str | None:
    """Add a transposed convolution."""
    if not _is_image(net, x):
        return None
    channels, size = net.shape(x)[1], net.shape(x)[2:]
    rank = len(size)
    groups = net.choice((1, 1, 1, channels))
    out = net.choice((1, 2)) if groups > 1 else net.channels()
    kernel = [net.choice((1, 2, 3, 4)) for _ in size]
    strides = [net.choice((1, 2, 2, 3)) for _ in size]
    pads = [net.integer(0, (edge - 1) // 2) for edge in kernel + kernel]
    extra = [net.choice((0, 0, step - 1)) for step in strides]
    if channels * out * math.prod(size) * math.prod(kernel) > _MAX_PRODUCTS:
        return None
    terms = channels // groups * math.prod(kernel) // math.prod(strides)
    weights = [net.weight(channels, out, *kernel, terms=terms)]
    if net.chance(0.6):
        weights.append(net.weight(out * groups))
    window = {"kernel_shape": kernel, "strides": strides, "pads": pads, "output_padding": extra}
    if any(size[i] == 1 and pads[i] + pads[rank + i] for i in range(rank)):
        return None
    return net.add("ConvTranspose", x, *weights, group=groups, **window)


def pool(net: Network, x: str) -> str | None:
    """Add max or average pooling."""
    window = _window(net, net.shape(x)[2:], (1, 2, 3, 5)) if _is_image(net, x) else None
    if window is None:
        return None
    kernel, pads, rank = window["kernel_shape"], window["pads"], len(window["kernel_shape"])
    if any(pads[i] >= kernel[i] or pads[rank + i] >= kernel[i] for i in range(rank)):
        return None
    steps = window["strides"], window["dilations"]
    if not all(map(_reads_data, net.shape(x)[2:], kernel, pads, pads[rank:], *steps)):
        # ONNX leaves the maximum of padding alone open: runtimes return -inf or the lowest finite value
        return None
    # Old opsets count windows that begin in the padding after the data; runtimes do not.
    can_ceil = all(edge > 1 for edge in kernel) and max(window["dilations"]) == 1
    can_ceil &= all(step <= edge for step, edge in zip(window["strides"], kernel, strict=True))
    window["ceil_mode"] = int(can_ceil and not any(pads[rank:]) and net.chance(0.5))
    if net.chance(0.5):
        return net.add("MaxPool", x, **window)
    del window["dilations"]
    return net.add("AveragePool", x, **window, count_include_pad=int(net.chance(0.5)))


def _reads_data(
    size: int, kernel: int, before: int, after: int, stride: int, dilation: int
) -> bool:
    """Return whether each window along an axis reads some data, and not padding alone."""
    last = size + before + after - (kernel - 1) * dilation - 1
    return all(
        any(0 <= start - before + tap * dilation < size for tap in range(kernel))
        for start in range(0, last + 1, stride)
    )


def global_pool(net: Network, x: str) -> str | None:
    """Add pooling over the whole image, of which mostly the image is scaled, as by squeeze and excitation."""
    if not _is_image(net, x):
        return None
    pooled = net.add(net.choice(("GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool")), x)
    if net.chance(0.3):
        return pooled
    channels, ones = net.shape(x)[1], [1] * (len(net.shape(x)) - 2)
    squeezed = max(1, channels // net.choice((1, 2, 4)))
    hidden = net.add("Conv", pooled, net.weight(squeezed, channels, *ones, terms=channels))
    hidden = net.add("Relu", hidden)
    weights = (net.weight(channels, squeezed, *ones, terms=squeezed), net.weight(channels))
    scale = net.add(net.choice(("Sigmoid", "HardSigmoid")), net.add("Conv", hidden, *weights))
    return net.add("Mul", *net.choice(((x, scale), (scale, x))))


def batch_norm(net: Network, x: str) -> str | None:
    """Add a norm with constant means and variances."""
    if not _is_image(net, x):
        return None
    channels = net.shape(x)[1]
    variance = net.constant([net.integer(1, 9) / 4 for _ in range(channels)], "float32")
    weights = [net.weight(channels) for _ in range(3)]
    return net.add("BatchNormalization", x, *weights, variance)


def group_norm(net: Network, x: str) -> str | None:
    """Add a norm of groups or of channels, as PyTorch exports it."""
    if not _is_image(net, x):
        return None
    n, channels, *size = net.shape(x)
    groups = net.choice([g for g in (1, 2, 4, 8, channels) if channels % g == 0])
    if channels // groups * math.prod(size) < 5:
        return None
    flat = net.add("Reshape", x, net.constant([0, groups, -1]))
    ones = (
        net.constant([1.0] * groups, "float32"),
        net.constant([0.0] * groups, "float32"),
    )
    normed = net.add("InstanceNormalization", flat, *ones, epsilon=1e-3)
    normed = net.add("Reshape", normed, net.constant([n, channels, *size]))
    weights = [net.weight(channels, *[1] * len(size)) for _ in range(2)]
    return net.add("Add", net.add("Mul", normed, weights[0]), weights[1])


def channels_last_norm(net: Network, x: str) -> str | None:
    """Add a layer norm over the channels, which moves them to the end and mostly back."""
    if not _is_image(net, x) or net.shape(x)[1] < 5:
        return None
    rank, channels = len(net.shape(x)), net.shape(x)[1]
    last = net.add("Transpose", x, perm=[0, *range(2, rank), 1])
    weights = (net.weight(channels), net.weight(channels))
    normed = net.add("LayerNormalization", last, *weights, axis=-1, epsilon=1e-3)
    if net.chance(0.5):
        product = net.add("MatMul", normed, net.weight(channels, channels, terms=channels))
        normed = net.add("Relu", net.add("Add", product, net.weight(channels)))
    return net.add("Transpose", normed, perm=[0, rank - 1, *range(1, rank - 1)])


def resize(net: Network, x: str) -> str | None:
    """Add a resize to a multiple or another size."""
    if not _is_image(net, x):
        return None
    n, channels, *size = net.shape(x)
    modes = ["nearest", "linear"] + ["cubic"] * (len(net.shape(x)) == _CUBIC_RANK)
    mode = net.choice(modes)
    transform = net.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "nearest":
        factor = net.choice((1, 2, 3))
        attributes["coordinate_transformation_mode"] = "asymmetric"
        attributes["nearest_mode"] = "floor"
        sizes = [extent * factor for extent in size]
    else:
        # Shrinking by half pixels is as exact as anything else.
        sizes = [
            max(2, extent * net.choice((1, 2, 2, 3)) // net.choice((1, 1, 2))) for extent in size
        ]
    return net.add("Resize", x, "", "", net.constant([n, channels, *sizes]), **attributes)


def shuffle(net: Network, x: str) -> str | None:
    """Add a shuffle of channels, or a move of pixels between channels and image."""
    if not _is_image(net, x):
        return None
    n, channels, *size = net.shape(x)
    rank = len(size)
    kind = net.choice(("channels", "depth", "space"))
    if kind == "channels" and channels % 2 == 0:
        split = net.add("Reshape", x, net.constant([n, 2, channels // 2, *size]))
        moved = net.add("Transpose", split, perm=[0, 2, 1, *range(3, 3 + rank)])
        return net.add("Reshape", moved, net.constant([n, channels, *size]))
    if rank == 2 and kind == "depth" and channels % 4 == 0:
        return net.add("DepthToSpace", x, blocksize=2, mode=net.choice(("DCR", "CRD")))
    if rank == 2 and kind == "space" and not size[0] % 2 and not size[1] % 2:
        return net.add("SpaceToDepth", x, blocksize=2)
    return None


def residual(net: Network, x: str) -> str | None:
    """Add a block of two convolutions, whose result is added to the data or concatenated with them."""
    if not _is_image(net, x):
        return None
    channels, size = net.shape(x)[1], net.shape(x)[2:]
    inner = net.channels()
    kernel = [3] * len(size)
    if 2 * channels * inner * math.prod(size) * math.prod(kernel) > _MAX_PRODUCTS:
        return None
    first = net.weight(inner, channels, *[1] * len(size), terms=channels)
    hidden = net.add(net.choice(("Relu", "Sigmoid")), net.add("Conv", x, first))
    weights = net.weight(channels, inner, *kernel, terms=inner * math.prod(kernel))
    pads = [1] * (2 * len(size))
    result = net.add("Conv", hidden, weights, net.weight(channels), pads=pads)
    if net.chance(0.4):
        return net.add(
            "Concat", *net.choice(((x, result), (result, x), (result, x, hidden))), axis=1
        )
    total = net.add("Add", *net.choice(((x, result), (result, x))))
    return net.add("Relu", total) if net.chance(0.5) else total


OPERATORS: Final[tuple[Operator, ...]] = (
    *(conv,) * 5,
    *(residual,) * 3,
    conv_transpose,
    *(pool,) * 2,
    global_pool,
    batch_norm,
    group_norm,
    channels_last_norm,
    *(resize,) * 2,
    shuffle,
)
"""Each operator as often as it is likely."""
