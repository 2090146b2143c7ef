"""Networks of convolutions get the kernels of fixed images whatever batch, height and width are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import DynamicNetwork, Input, make_network, make_weights
from tests.support.kernels import LEVELS_HERE, PLAIN, level
from tvmflow.core.types import Dimension
from tvmflow.graph import ir

BATCH = Dimension("batch", 1, 16)
HEIGHT = Dimension("h", 16, 256)
WIDTH = Dimension("w", 16, 256)
DIMENSIONS = (BATCH, HEIGHT, WIDTH)
IMAGE = ("batch", 16, "h", "w")
ALL_SIZES = [
    {"batch": batch, "h": h, "w": w}
    for batch, h, w in [(1, 16, 16), (3, 37, 53), (7, 17, 24), (2, 64, 31)]
]
op = relax.op


def make_image_network(
    body: Callable[..., Any], image: Sequence[int | str] = IMAGE, **shapes: Sequence[int]
) -> DynamicNetwork:
    """Return a network over images with weights of some shapes."""
    dimensions = [entry for entry in DIMENSIONS if entry.name in image]
    return make_network(dimensions, {"x": Input(image)}, make_weights(**shapes), body)


def check(
    network: DynamicNetwork,
    kernels: Sequence[str],
    mcpu: str = LEVELS_HERE[-1],
    tolerance: float = 1e-4,
    all_sizes: Sequence[dict[str, int]] = ALL_SIZES,
) -> None:
    """Check that a network has kernels of some names, and computes what TVM's own kernels do."""
    target = level(mcpu)
    names = network.list_kernels(target)
    for kernel in kernels:
        assert any(kernel in name for name in names), (kernel, names)
    fast, plain = network.compile(target), network.compile(target, PLAIN)
    names_open = {size for entry in network.inputs.values() for size in entry.sizes}
    for sizes in all_sizes:
        feed = network.draw({name: n for name, n in sizes.items() if name in names_open})
        for actual, expected in zip(fast(**feed), plain(**feed), strict=True):
            assert actual.shape == expected.shape, sizes
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(
                actual / largest, expected / largest, rtol=0, atol=tolerance, err_msg=str(sizes)
            )


def bottleneck(emit: Any, x: Any, a: Any, b: Any, c: Any, s: Any) -> Any:
    """A block of ResNet: 1×1, 3×3, 1×1, and the data themselves."""
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, a))))
    y = emit(op.nn.relu(emit(op.nn.conv2d(y, b, padding=1))))
    y = emit(op.add(emit(op.multiply(emit(op.nn.conv2d(y, c)), s)), x))
    return emit(op.nn.relu(y))


@pytest.mark.parametrize("image", [("batch", 16, 17, 24), (1, 16, "h", "w"), IMAGE], ids=str)
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_a_residual_block_stays_blocked(mcpu: str, image: Sequence[int | str]) -> None:
    network = make_image_network(
        bottleneck, image, a=[8, 16, 1, 1], b=[8, 8, 3, 3], c=[16, 8, 1, 1], s=[1, 16, 1, 1]
    )
    check(network, ["conv2d_NCHWc", "_relu"], mcpu)
    assert not any(
        "conv2d" in name and "NCHWc" not in name for name in network.list_kernels(level(mcpu))
    )


def mobile_block(emit: Any, x: Any, a: Any, d: Any, e: Any, f: Any) -> Any:
    """Depthwise, strided and dilated convolutions, pools, and a squeeze of the whole image."""
    y = emit(op.nn.relu6(emit(op.nn.conv2d(x, a, padding=1, strides=2))))
    y = emit(op.nn.conv2d(y, d, padding=1, groups=24))
    y = emit(op.nn.max_pool2d(y, [3, 3], strides=[2, 2], padding=[1, 1, 1, 1]))
    y = emit(op.nn.conv2d(y, e, padding=2, dilation=2, groups=2))
    y = emit(op.nn.avg_pool2d(y, [2, 2], strides=[1, 1]))
    scale = emit(op.sigmoid(emit(op.nn.conv2d(emit(op.mean(y, [2, 3], keepdims=True)), f))))
    return emit(op.multiply(y, scale))


def test_depthwise_and_grouped_convolutions_and_pools_stay_blocked() -> None:
    network = make_image_network(
        mobile_block, a=[24, 16, 3, 3], d=[24, 1, 3, 3], e=[16, 12, 3, 3], f=[16, 16, 1, 1]
    )
    check(network, ["depthwise_conv2d_NCHWc", "max_pool2d", "avg_pool2d", "mean"])


def channel_block(emit: Any, x: Any, a: Any, b: Any) -> Any:
    """Channels that are concatenated, shuffled, split and sliced between convolutions."""
    y = emit(op.nn.conv2d(x, a, padding=1))
    y = emit(op.concat([y, x, y], 1))
    n, _, h, w = y.ty.shape.values
    pairs = emit(op.permute_dims(emit(op.reshape(y, (n, 2, 14, h, w))), [0, 2, 1, 3, 4]))
    y = emit(op.reshape(pairs, (n, 28, h, w)))
    parts = emit(op.split(y, [10], 1))
    left, right = emit(relax.TupleGetItem(parts, 0)), emit(relax.TupleGetItem(parts, 1))
    right = emit(op.strided_slice(right, [1], [1], [11]))
    return emit(op.nn.conv2d(emit(op.add(left, right)), b))


@pytest.mark.slow
def test_channels_are_moved_in_images_of_dynamic_shapes() -> None:
    network = make_image_network(channel_block, a=[6, 16, 3, 3], b=[16, 10, 1, 1])
    check(network, ["copy_channels"])


def upsample(stride: int, padding: int, groups: int = 1) -> Callable[..., Any]:
    """Return a transposed convolution between two convolutions."""

    def body(emit: Any, x: Any, a: Any, t: Any, b: Any) -> Any:
        y = emit(op.nn.relu(emit(op.nn.conv2d(x, a))))
        strides, pads = [stride, stride], [padding, padding]
        y = op.nn.conv2d_transpose(y, t, strides=strides, padding=pads, groups=groups)
        return emit(op.nn.conv2d(emit(y), b))

    return body


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "channels", "groups"),
    [
        (4, 2, 1, 16, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2, 0, 16, 1), (3, 2, 1, 3, 1), (4, 2, 1, 1, 24))
        ),
    ],
)
def test_transposed_convolutions_are_interleaved(
    taps: int, stride: int, padding: int, channels: int, groups: int
) -> None:
    """All phases together, each by itself, in shared blocks, and depthwise."""
    network = make_image_network(
        upsample(stride, padding, groups),
        a=[24, 16, 1, 1],
        t=[24, channels, taps, taps],
        b=[8, channels * groups, 1, 1],
    )
    check(network, ["d_transpose_NCHWc", "interleave"])


def joined(emit: Any, x: Any, a: Any, t: Any, b: Any) -> Any:
    """An image that is halved, enlarged and joined with itself, if its sizes are even."""
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, a, padding=1, strides=2))))
    y = emit(op.nn.conv2d_transpose(y, t, strides=[2, 2]))
    y = emit(op.reshape(y, relax.ShapeExpr(x.ty.shape.values)))
    return emit(op.nn.conv2d(emit(op.nn.relu(emit(op.concat([y, x], 1)))), b))


def test_sizes_that_are_equal_as_multiples_stay_blocked() -> None:
    """The reshape between them is computed along with what is before it."""
    sides = (Dimension("h", 16, 64, multiple_of=2), Dimension("w", 16, 64, multiple_of=2))
    weights = make_weights(a=[8, 16, 3, 3], t=[8, 16, 2, 2], b=[8, 32, 1, 1])
    network = make_network((BATCH, *sides), {"x": Input(IMAGE)}, weights, joined)
    sizes = [
        {"batch": batch, "h": h, "w": w} for batch, h, w in [(1, 16, 16), (3, 38, 62), (2, 64, 20)]
    ]
    check(network, ["interleave_with_sizes"], all_sizes=sizes)
    assert not any("reshape" in name for name in network.list_kernels(level(LEVELS_HERE[-1])))


def resized(size: Callable[[Any, Any], tuple[Any, Any]], **mode: str) -> Callable[..., Any]:
    """Return a resize between two convolutions, and one of the result."""

    def body(emit: Any, x: Any, a: Any, b: Any) -> Any:
        y = emit(op.nn.relu(emit(op.nn.conv2d(x, a))))
        for _ in range(2):
            height, width = size(*y.ty.shape.values[2:])
            y = emit(op.image.resize2d(y, relax.ShapeExpr([height, width]), **mode))
            y = y if y.ty.shape.values[1] == 8 else emit(op.nn.conv2d(y, b))
        return y

    return body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factors", "mode", "has_tables"),
    [
        ((2, 1), {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric"}, False),
        ((2, 1), {"method": "linear", "coordinate_transformation_mode": "half_pixel"}, True),
        ((1, 2), {"method": "linear", "coordinate_transformation_mode": "align_corners"}, True),
        ((3, 2), {"method": "nearest_neighbor", "rounding_method": "round_prefer_floor"}, True),
    ],
    ids=str,
)  # fmt: skip
def test_open_images_are_resized_in_blocks(
    factors: tuple[int, int], mode: dict[str, str], has_tables: bool
) -> None:
    """Pixels are repeated, or read by the tables that a kernel computes from the sizes of a call."""
    times, parts = factors
    network = make_image_network(
        resized(lambda h, w: (h * times // parts, w * times // parts), **mode),
        a=[20, 16, 1, 1],
        b=[8, 20, 1, 1],
    )
    names = network.list_kernels(level(LEVELS_HERE[-1]))
    assert any("resize_tables" in name for name in names) == has_tables, names
    check(network, ["resize"])


def normed(emit: Any, x: Any, a: Any, g: Any, b: Any, c: Any) -> Any:
    """A group norm as the importer writes it, and an instance norm, between convolutions."""

    def normalize(y: Any, axes: list[int]) -> Any:
        mean, variance = (emit(f(y, axes, keepdims=True)) for f in (op.mean, op.variance))
        root = emit(op.sqrt(emit(op.add(variance, relax.const(1e-5, "float32")))))
        return emit(op.divide(emit(op.subtract(y, mean)), root))

    y = emit(op.nn.conv2d(x, a))
    n, channels, height, width = y.ty.shape.values
    groups = emit(op.reshape(y, (n, 4, 4 * height * width)))
    scaled = emit(op.add(emit(op.multiply(normalize(groups, [2]), g)), b))
    y = emit(op.reshape(scaled, (n, channels, height, width)))
    return normalize(emit(op.nn.conv2d(y, c)), [2, 3])


@pytest.mark.slow
def test_norms_of_groups_and_channels_keep_images_blocked() -> None:
    network = make_image_network(normed, a=[16, 16, 1, 1], g=[4, 1], b=[4, 1], c=[8, 16, 1, 1])
    check(network, ["group_mean"])


def few_channels(emit: Any, x: Any, a: Any, b: Any) -> Any:
    """A dilated convolution, then one with three channels and a stride, as networks that draw images end with."""
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, a, padding=4, dilation=4))))
    return emit(op.nn.conv2d(y, b, padding=3, strides=2))


def test_neighboring_pixels_become_channels() -> None:
    network = make_image_network(few_channels, a=[8, 16, 3, 3], b=[3, 8, 7, 7])
    check(network, ["interleave"], "x86-64-v3")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_sequences_and_volumes_of_dynamic_shapes_are_blocked(rank: int) -> None:
    image = ("batch", 16, "w") if rank == 1 else ("batch", 16, 5, "h", "w")
    taps = [3] * rank

    def body(emit: Any, x: Any, a: Any, b: Any) -> Any:
        convolve = op.nn.conv1d if rank == 1 else op.nn.conv3d
        y = emit(op.nn.relu(emit(convolve(x, a, padding=[1] * 2 * rank))))
        return emit(convolve(y, b, strides=[2] * rank))

    network = make_image_network(body, image, a=[12, 16, *taps], b=[8, 12, *taps])
    check(network, [f"conv{rank}d_NCHWc"])


def two_stages(emit: Any, x: Any, a: Any, b: Any, c: Any) -> Any:
    """The same kernel on images of half and of a quarter of the height and width."""
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, a, strides=2, padding=1))))
    y = emit(op.nn.relu(emit(op.nn.conv2d(y, b, padding=2))))
    y = emit(op.nn.max_pool2d(y, [3, 3], strides=[2, 2], padding=[1, 1, 1, 1]))
    return emit(op.nn.relu(emit(op.nn.conv2d(y, c, padding=2))))


def test_stages_of_other_sizes_share_a_kernel() -> None:
    """Its sizes are variables of its own, which the shapes of its tensors give it, in a fixed order."""
    network = make_image_network(two_stages, a=[16, 16, 3, 3], b=[16, 16, 5, 5], c=[16, 16, 5, 5])
    main = network.lower(level(LEVELS_HERE[-1])).mod["main"]
    calls = [
        binding.value
        for binding in ir.list_bindings(main.body)
        if ir.operator_name(binding.value) == "relax.call_tir"
    ]
    kernels = Counter(call.args[0] for call in calls if "conv2d" in str(call.args[0].name_hint))
    assert sorted(kernels.values()) == [1, 2]
    assert all(isinstance(field.ty, relax.TensorType) for call in calls for field in call.args[1])
    check(network, [])
