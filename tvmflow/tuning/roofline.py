"""The roofline: the speed of kernels against the machine's peak (Williams et al. 2009).

The bandwidth depends on the kernel's working set: it is the bandwidth of the cache (or memory) that the data fit
into, as in the cache-aware roofline of Ilic et al. (2014). A kernel that is timed in isolation finds its data there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.fork_server import Emit
from tvmflow.core.generated_text import Markup, element
from tvmflow.core.statistics import geometric_means
from tvmflow.core.types import Json

if TYPE_CHECKING:
    import tvm

# The sizes of a matmul whose data stay in the registers and the L1 cache of each core.
_ROWS: Final = 60
_DEPTH: Final = 64
_VECTORS: Final = 4
_PIECES_PER_CORE: Final = 16
_TILES: Final = 6
# The fastest of many short repeats counts: on a busy machine, some of them are not interrupted.
_REPEATS: Final = 50
# The bandwidth kernel adds four arrays, because most kernels read more than they write. `_TRANSFERRED_BYTES` is the
# size of all five arrays.
_SUMMED: Final = 4
_TRANSFERRED_BYTES: Final = tuple(4**power << 18 for power in range(5))
_FLOAT_BYTES: Final = 4

# Heights and widths in the chart in pixels, and the maximum numbers of bars and characters.
_ROW_HEIGHT: Final = 22
_LABEL_WIDTH: Final = 330
_BAR_WIDTH: Final = 420
_MAX_BARS: Final = 40
_MAX_LABEL: Final = 46
_TITLE: Final = "GFLOPS of each kernel, the one that takes longest first"
_LEGEND: Final = "green: tuned schedule; blue: schedule of a rule"
_PEAK_COLOR: Final = "#c04040"
_TUNED_COLOR: Final = "#48a868"
_UNTUNED_COLOR: Final = "#4878a8"
_NEWLINE: Final = Markup("\n")


class Roofline(NamedTuple):
    """The peak speeds of a machine.

    Attributes:
        gflops: The peak of arithmetic in float32, in GFLOPS.
        bandwidths: (working set in bytes, bandwidth in bytes per second), sorted by size, for data that is read and
            written repeatedly.
    """

    gflops: float
    bandwidths: tuple[tuple[float, float], ...]

    def bandwidth(self, size: float) -> float:
        """Return the peak bandwidth in bytes per second for `size` bytes of data."""
        largest = self.bandwidths[-1][0]
        return max(speed for known, speed in self.bandwidths if known >= min(size, largest))

    def least_seconds(self, mod: str, flops: float) -> float:
        """Return the seconds per call of a saved workload at the roofline.

        `flops` counts the arithmetic operations of a call; for dynamic shapes, they are counted at each size instead.
        """
        import tvm

        from tvmflow.tuning.workloads import count_operations, list_measured_sizes

        kernel = tvm.ir.load_json(mod)
        seconds = [
            self._least_seconds_at(
                kernel, sizes, count_operations(kernel, sizes) if sizes else flops
            )
            for sizes in list_measured_sizes(kernel)
        ]
        return geometric_means([[value] for value in seconds])[0]

    def _least_seconds_at(self, mod: tvm.IRModule, sizes: Mapping[Any, int], flops: float) -> float:
        import tvm

        from tvmflow.tuning.workloads import argument_shapes

        tensors = [entry for entry in argument_shapes(mod, sizes) if not isinstance(entry, int)]
        bits = [math.prod(shape) * tvm.DataType(dtype).bits for shape, dtype in tensors]
        transferred = sum(bits) / 8
        # The peak is measured in float32, and other types have other peaks.
        is_float32 = all(dtype == "float32" for _, dtype in tensors)
        computing_s = flops / (self.gflops * 1e9) if is_float32 else 0.0
        return float(max(computing_s, transferred / self.bandwidth(transferred)))


def measure_peak(payload: Json, emit: Emit) -> Json:
    """Measure a matmul for `target` in each core's L1 cache. This is the entry point of a child process.

    Returns:
        `gflops`: The peak in GFLOPS; None for a target without a model of its CPU.
    """
    import tvm
    from tvm import te

    from tvmflow.compiler import SCHEDULES_VERSION, CpuModel, generate_schedules
    from tvmflow.tuning import measure

    del emit
    target = payload["target"]
    cpu_model = CpuModel.from_target(target)
    if cpu_model is None:
        return {"gflops": None}
    pieces = _PIECES_PER_CORE * cpu_model.cores
    x = te.placeholder((pieces, _ROWS, _DEPTH), name="x")
    w = te.placeholder((_VECTORS, _DEPTH, cpu_model.lanes), name="w")
    columns, lanes = _VECTORS * cpu_model.lanes, cpu_model.lanes
    k = te.reduce_axis((0, _DEPTH), "k")
    product = te.compute(
        (pieces, _ROWS, columns),
        lambda i, row, column: te.sum(x[i, row, k] * w[column // lanes, k, column % lanes], [k]),
    )
    function = te.create_prim_func([x, w, product])
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    flops = 2 * pieces * _ROWS * _DEPTH * columns
    peak = 0.0
    timing = measure.Timing(1, _REPEATS, 0)
    measure.use_threads(target)
    arguments = measure.make_arguments(mod)
    choices = generate_schedules(mod, target, SCHEDULES_VERSION)
    for choice, _ in zip(choices, range(_TILES), strict=False):
        kernel = measure.build(choice.schedule.mod, target)
        seconds = measure.time_kernel(kernel, arguments, timing)
        peak = max(peak, flops / min(seconds) / 1e9)
    return {"gflops": round(peak, 1)}


def measure_roofline(payload: Json, emit: Emit) -> Json:
    """Measure the peak and the bandwidths. This is the entry point of a child process.

    `payload` holds `target`, TVM's mapping of the target, and `rules_version`, the version of the schedule rules.

    Returns:
        The fields of a `Roofline`; `gflops` is None for a target without a model of its CPU.
    """
    peak = measure_peak(payload, emit)
    if peak["gflops"] is None:
        return peak
    sizes = [float(size) for size in _TRANSFERRED_BYTES]
    return {**peak, "bandwidths": [[size, _measure_bandwidth(payload, size)] for size in sizes]}


def _measure_bandwidth(payload: Json, size: float) -> float:
    """Return the bytes per second when adding arrays; inputs and result take `size` bytes together."""
    import tvm
    from tvm import te

    from tvmflow.compiler import schedule_untuned
    from tvmflow.tuning import measure

    length = int(size) // _FLOAT_BYTES // (_SUMMED + 1) // 64 * 64
    arrays = [te.placeholder((length,), name=f"x{index}") for index in range(_SUMMED)]
    total = te.compute((length,), lambda i: sum((x[i] for x in arrays[1:]), arrays[0][i]))
    function = te.create_prim_func([*arrays, total]).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": function})
    scheduled, _ = schedule_untuned(mod, payload["target"], payload["rules_version"])
    kernel = measure.build(scheduled, payload["target"])
    timing = measure.Timing(1, _REPEATS, 0)
    seconds = measure.time_kernel(kernel, measure.make_arguments(mod), timing)
    return (_SUMMED + 1) * length * _FLOAT_BYTES / min(seconds)


class MeasuredKernel(NamedTuple):
    """The times of a kernel that was measured in isolation.

    Attributes:
        untuned_us: The µs per call with the untuned schedule.
        tuned_us: The µs per call with the chosen schedule; None if it stays untuned.
        flops: The arithmetic operations per call; None or 0 if there are none.
    """

    name: str
    calls: int
    untuned_us: float
    tuned_us: float | None
    flops: float | None = None

    @property
    def call_us(self) -> float:
        """The µs per call with the schedule that the library uses."""
        return self.untuned_us if self.tuned_us is None else self.tuned_us


def gflops(kernel: MeasuredKernel) -> float | None:
    """Return the GFLOPS of a kernel; None if it has no arithmetic operations."""
    return kernel.flops / kernel.call_us / 1e3 if kernel.flops and kernel.call_us else None


def gflops_text(value: float, peak: float | None) -> str:
    """Format GFLOPS, with the share of the machine's peak if `peak` is known."""
    return f"{value:.0f} ({value / peak:.0%})" if peak else f"{value:.0f}"


def render_roofline(kernels: Sequence[MeasuredKernel], peak: float | None) -> str:
    """Render an SVG with a bar for each kernel that has arithmetic operations, and a line at the peak."""
    ordered = sorted(kernels, key=lambda kernel: (-kernel.calls * kernel.untuned_us, kernel.name))
    rows = [(kernel, value) for kernel in ordered if (value := gflops(kernel))][:_MAX_BARS]
    top = max([peak or 0.0, *(value for _, value in rows), 1e-9])
    height = _ROW_HEIGHT * len(rows) + 70
    content = [
        element("rect", width="100%", height="100%", fill="white"),
        element("text", _TITLE, x=10, y=22, font_size=14),
        _NEWLINE,
    ]
    for index, (kernel, value) in enumerate(rows):
        content += _draw_bar(kernel, value, 40 + index * _ROW_HEIGHT, top, peak)
    if peak:
        content += _draw_peak(peak, f"{_LABEL_WIDTH + _BAR_WIDTH * peak / top:.1f}", height)
    content.append(element("text", _LEGEND, x=10, y=height - 10, fill="#606060"))
    image = element(
        "svg",
        _NEWLINE,
        content,
        xmlns="http://www.w3.org/2000/svg",
        width=_LABEL_WIDTH + _BAR_WIDTH + 110,
        height=height,
        font_family="sans-serif",
        font_size=12,
    )
    return f"{image}\n"


def _draw_bar(
    kernel: MeasuredKernel, value: float, y: int, top: float, peak: float | None
) -> Iterator[Markup]:
    name = kernel.name
    label = name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 3]}..."
    width = max(1.0, _BAR_WIDTH * value / top)
    yield element("text", label, x=_LABEL_WIDTH - 8, y=y + 15, text_anchor="end")
    yield _NEWLINE
    yield element(
        "rect",
        element("title", f"{name}: {value:.1f} GFLOPS, {kernel.calls} calls"),
        x=_LABEL_WIDTH,
        y=y + 3,
        width=f"{width:.1f}",
        height=_ROW_HEIGHT - 6,
        fill=_UNTUNED_COLOR if kernel.tuned_us is None else _TUNED_COLOR,
    )
    yield _NEWLINE
    yield element("text", gflops_text(value, peak), x=f"{_LABEL_WIDTH + width + 6:.1f}", y=y + 15)
    yield _NEWLINE


def _draw_peak(peak: float, x: str, height: int) -> Iterator[Markup]:
    style = {"stroke": _PEAK_COLOR, "stroke_dasharray": "4"}
    yield element("line", x1=x, y1=34, x2=x, y2=height - 26, **style)
    text = f"peak of this machine: {peak:.0f}"
    yield element("text", text, x=x, y=height - 10, text_anchor="middle", fill=_PEAK_COLOR)
    yield _NEWLINE
