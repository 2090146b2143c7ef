"""How close kernels come to the machine: its measured peak, and a picture of the two (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tvmflow.values import Json

# A product that stays in the registers and the first cache of each core.
_ROWS: Final = 60
_DEPTH: Final = 64
_VECTORS: Final = 4
_PIECES_PER_CORE: Final = 16
_TILES: Final = 6
_REPEATS: Final = 5
_MIN_REPEAT_MS: Final = 20

_BAR: Final = 22
_LEFT: Final = 330
_WIDTH: Final = 420
_MOST_BARS: Final = 40


def measure_peak(payload: Json, send: Callable[[dict[str, Any]], None]) -> Json:
    """The GFLOPS of a matrix product in each core's first cache; takes `target`, gives `{"gflops": number or None}`."""
    import tvm
    from tvm import te

    from tvmflow import schedules
    from tvmflow.passes import compute
    from tvmflow.tuning import measure

    del send
    target = payload["target"]
    machine = schedules.Machine.of(target)
    if machine is None:
        return {"gflops": None}
    pieces = _PIECES_PER_CORE * machine.cores
    x = te.placeholder((pieces, _ROWS, _DEPTH), name="x")
    w = te.placeholder((_VECTORS, _DEPTH, machine.lanes), name="w")
    columns = _VECTORS * machine.lanes
    function = te.create_prim_func([x, w, compute.dense(x, w, columns)])
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    flops = 2 * pieces * _ROWS * _DEPTH * columns
    best = 0.0
    timing = measure.Timing(1, _REPEATS, _MIN_REPEAT_MS)
    measure.use_threads(target)
    arguments = measure.arguments_for(mod)
    for choice, _ in zip(schedules.candidates(mod, machine), range(_TILES), strict=False):
        kernel = measure.build(choice.schedule.mod, target)
        seconds = measure.time_kernel(kernel, arguments, timing)
        best = max(best, flops / min(seconds) / 1e9)
    return {"gflops": round(best, 1)}


def gflops(kernel: Mapping[str, Any]) -> float | None:
    """What a kernel reaches, by the facts of `pick_best`; None for one that does no arithmetic to speak of."""
    us = kernel["untuned_us"] if kernel["tuned_us"] is None else kernel["tuned_us"]
    return kernel["flops"] / us / 1e3 if kernel.get("flops") and us else None


def gflops_text(value: float, peak: float | None) -> str:
    """GFLOPS, and their share of the machine's peak where that is known."""
    return f"{value:.0f} ({value / peak:.0%})" if peak else f"{value:.0f}"


def picture(kernels: Sequence[Mapping[str, Any]], peak: float | None) -> str:
    """An SVG with a bar for each kernel that does arithmetic, the longest-running first, and a line at the peak."""
    # its import brings all of urllib, and an up-to-date run only wants a number from here
    from xml.sax.saxutils import escape

    rows = [(each, reached) for each in kernels if (reached := gflops(each))][:_MOST_BARS]
    top = max([peak or 0.0, *(reached for _, reached in rows), 1e-9])
    height = _BAR * len(rows) + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 110}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/><text x="10" y="22" font-size="14">'
        "GFLOPS of each kernel, the one that takes longest first</text>",
    ]
    for place, (kernel, reached) in enumerate(rows):
        y = 40 + place * _BAR
        name = str(kernel["name"])
        shown = name if len(name) <= 46 else f"{name[:43]}..."
        width = max(1.0, _WIDTH * reached / top)
        colour = "#4878a8" if kernel["tuned_us"] is None else "#48a868"
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(shown)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 6}" fill="{colour}">'
            f"<title>{escape(name)}: {reached:.1f} GFLOPS, {kernel['calls']} calls</title></rect>",
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{gflops_text(reached, peak)}</text>',
        ]
    if peak:
        x = _LEFT + _WIDTH * peak / top
        lines.append(
            f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{height - 26}" stroke="#c04040" stroke-dasharray="4"/>'
            f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" fill="#c04040">'
            f"peak of this machine: {peak:.0f}</text>"
        )
    key = "green: a schedule that tuning found; blue: one by rule"
    lines.append(f'<text x="10" y="{height - 10}" fill="#606060">{key}</text></svg>')
    return "\n".join(lines) + "\n"
