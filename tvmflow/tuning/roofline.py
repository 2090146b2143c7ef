"""The roofline: measured speed of kernels against the machine's peak (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json

# A matrix product that stays in the registers and the first cache of each core.
_ROWS: Final = 60
_DEPTH: Final = 64
_VECTORS: Final = 4
_PIECES_PER_CORE: Final = 16
_TILES: Final = 6
_REPEATS: Final = 5
_MIN_REPEAT_MS: Final = 20

# Pixels of the chart.
_ROW_HEIGHT: Final = 22
_LABEL_WIDTH: Final = 330
_BAR_WIDTH: Final = 420
_MAX_BARS: Final = 40
_MAX_LABEL: Final = 46
_TUNED_COLOR: Final = "#48a868"
_UNTUNED_COLOR: Final = "#4878a8"

MEASURE_PEAK: Final = f"{__name__}:measure_peak"
"""The function for the fork server."""


def measure_peak(payload: Json, emit: Emit) -> Json:
    """Measure a matrix product in each core's first cache: the entry point of a child.

    Args:
        payload: `target`, TVM's mapping of the target.
        emit: Not used.

    Returns:
        `gflops`: The peak in GFLOPS; None for a target without a model of its CPU.
    """
    import tvm
    from tvm import te

    from tvmflow.compiler.cpu_model import CpuModel
    from tvmflow.compiler.operators import blocked
    from tvmflow.compiler.schedules import rules
    from tvmflow.tuning import measure

    del emit
    target = payload["target"]
    cpu_model = CpuModel.from_target(target)
    if cpu_model is None:
        return {"gflops": None}
    pieces = _PIECES_PER_CORE * cpu_model.cores
    x = te.placeholder((pieces, _ROWS, _DEPTH), name="x")
    w = te.placeholder((_VECTORS, _DEPTH, cpu_model.lanes), name="w")
    columns = _VECTORS * cpu_model.lanes
    function = te.create_prim_func([x, w, blocked.dense(x, w, columns)])
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    flops = 2 * pieces * _ROWS * _DEPTH * columns
    peak = 0.0
    timing = measure.Timing(1, _REPEATS, _MIN_REPEAT_MS)
    measure.use_threads(target)
    arguments = measure.make_arguments(mod)
    choices = rules.generate_schedules(mod, cpu_model)
    for choice, _ in zip(choices, range(_TILES), strict=False):
        kernel = measure.build(choice.schedule.mod, target)
        seconds = measure.time_kernel(kernel, arguments, timing)
        peak = max(peak, flops / min(seconds) / 1e9)
    return {"gflops": round(peak, 1)}


def gflops(kernel: Mapping[str, Any]) -> float | None:
    """Return the GFLOPS of a kernel, from the facts of `pick_best`; None without arithmetic."""
    us = kernel["untuned_us"] if kernel["tuned_us"] is None else kernel["tuned_us"]
    return kernel["flops"] / us / 1e3 if kernel.get("flops") and us else None


def gflops_text(value: float, peak: float | None) -> str:
    """Return GFLOPS, with their share of the machine's peak where that is known."""
    return f"{value:.0f} ({value / peak:.0%})" if peak else f"{value:.0f}"


def render_roofline(kernels: Sequence[Mapping[str, Any]], peak: float | None) -> str:
    """Return an SVG with a bar for each kernel that does arithmetic, and a line at the peak.

    Args:
        kernels: The kernels in the facts of `pick_best`, in any order.
        peak: The peak of the machine in GFLOPS; None when not known.
    """
    ordered = sorted(
        kernels, key=lambda kernel: (-kernel["calls"] * kernel["untuned_us"], kernel["name"])
    )
    rows = [(kernel, value) for kernel in ordered if (value := gflops(kernel))][:_MAX_BARS]
    top = max([peak or 0.0, *(value for _, value in rows), 1e-9])
    height = _ROW_HEIGHT * len(rows) + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL_WIDTH + _BAR_WIDTH + 110}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/><text x="10" y="22" font-size="14">'
        "GFLOPS of each kernel, the one that takes longest first</text>",
    ]
    for index, (kernel, value) in enumerate(rows):
        lines += _bar(kernel, value, 40 + index * _ROW_HEIGHT, top, peak)
    if peak:
        x = _LABEL_WIDTH + _BAR_WIDTH * peak / top
        lines.append(
            f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{height - 26}" stroke="#c04040" stroke-dasharray="4"/>'
            f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" fill="#c04040">'
            f"peak of this machine: {peak:.0f}</text>"
        )
    legend = "green: tuned schedule; blue: schedule of a rule"
    lines.append(f'<text x="10" y="{height - 10}" fill="#606060">{legend}</text></svg>')
    return "\n".join(lines) + "\n"


def _bar(
    kernel: Mapping[str, Any], value: float, y: int, top: float, peak: float | None
) -> list[str]:
    """Return the SVG elements of one kernel.

    Args:
        kernel: The kernel in the facts of `pick_best`.
        value: Its GFLOPS.
        y: The upper edge of its row in pixels.
        top: The GFLOPS at the right edge.
        peak: The peak of the machine in GFLOPS; None when not known.
    """
    # The import loads all of urllib, and an up-to-date run needs only `gflops` of this module.
    from xml.sax.saxutils import escape

    name = str(kernel["name"])
    label = name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 3]}..."
    width = max(1.0, _BAR_WIDTH * value / top)
    color = _UNTUNED_COLOR if kernel["tuned_us"] is None else _TUNED_COLOR
    return [
        f'<text x="{_LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{_LABEL_WIDTH}" y="{y + 3}" width="{width:.1f}" height="{_ROW_HEIGHT - 6}" fill="{color}">'
        f"<title>{escape(name)}: {value:.1f} GFLOPS, {kernel['calls']} calls</title></rect>",
        f'<text x="{_LABEL_WIDTH + width + 6:.1f}" y="{y + 15}">{gflops_text(value, peak)}</text>',
    ]
