"""Kernels against the roofline of the machine (Williams et al. 2009).

They are drawn in a chart, and listed with their nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tvmflow.core.formatting import count_text, latency_text
from tvmflow.core.markup import Child, Markup, element
from tvmflow.pages.content import Kernel, LibraryKernels
from tvmflow.pages.plot import Axis, Frame, Mark, draw_marks, make_frame, plot
from tvmflow.pages.tables import Cell, Column, format_known, latency, plain, ratio, share, table

_LABELLED: Final = 8
_SHOWN_NODES: Final = 3
_TUNED, _BY_RULE = 0, 1
_COLUMNS: Final = (
    Column("kernel"),
    Column("calls", is_number=True),
    Column("time", is_number=True),
    Column("share of the library's time", is_number=True),
    Column("speedup by tuning", is_number=True),
    Column("GFLOPS", is_number=True),
    Column("of its roofline", is_number=True),
    Column("trials", is_number=True),
)


def draw_kernels(library: LibraryKernels) -> Iterator[Markup]:
    """Yield the chart and the table of the kernels of one library."""
    computing = [kernel for kernel in library.kernels if _gflops(kernel) and kernel.bytes]
    if len(computing) > 1:
        yield element(
            "figure", element("figcaption", element("p", _EXPLANATION)), _draw(library, computing)
        )
    rows = list(map(_row, library.kernels))
    if any(kernel.library_s is not None for kernel in library.kernels):
        rows.append(_rest_row(library.kernels))
        yield element("p", _IN_LIBRARY)
    elif rows:
        yield element("p", _ALONE)
    yield table(f"Kernels of {library.label}", _COLUMNS, rows)
    yield from (element("p", note, class_="note") for note in library.notes)


_EXPLANATION: Final = (
    "Arithmetic speed over operations for each byte of parameters. Filled: tuned; hollow: the "
    "schedule of a rule. The line above a kernel ends at the roofline of the machine for its size; "
    "the dashed line is the peak of arithmetic."
)
_IN_LIBRARY: Final = (
    "The time of all calls of a kernel in one call of the library as it was verified: all rows add up to its "
    "latency. The speedup by tuning is that of a kernel by itself, measured in turns with the untuned one."
)
_ALONE: Final = (
    "Each kernel was measured by itself: the times do not add up to the latency of the library."
)


def _total_s(kernel: Kernel) -> float:
    return kernel.calls * (kernel.seconds or 0.0)


def _gflops(kernel: Kernel) -> float | None:
    return kernel.flops / kernel.seconds / 1e9 if kernel.flops and kernel.seconds else None


def _row(kernel: Kernel) -> list[Cell]:
    is_tuned = kernel.tuned_s is not None and kernel.untuned_s is not None
    speedup = kernel.untuned_s / kernel.tuned_s if is_tuned else None  # type: ignore[operator]
    gflops = _gflops(kernel)
    return [
        Cell(element("code", kernel.name), kernel.name, _nodes(kernel)),
        Cell(kernel.calls, kernel.calls),
        Cell(latency(_total_s(kernel) or None), _total_s(kernel)),
        Cell(_share(kernel.share), kernel.share),
        Cell(ratio(speedup), speedup),
        Cell(format_known(gflops, plain), gflops),
        Cell(share(kernel.roofline_share), kernel.roofline_share),
        Cell(kernel.trials or "", kernel.trials),
    ]


def _share(value: float | None) -> str:
    return format_known(value, "{:.1%}".format)


def _rest_row(kernels: Sequence[Kernel]) -> list[Cell]:
    """Return the row of what is no kernel, so that all rows add up to a call of the library."""
    timed = [kernel for kernel in kernels if kernel.library_s is not None]
    shares = sum(kernel.share or 0.0 for kernel in timed)
    rest = max(1 - shares, 0.0)
    seconds = sum(map(_total_s, timed)) / shares * rest if shares else None
    cells = [Cell("between kernels", "~"), Cell(""), Cell(latency(seconds), seconds)]
    return [*cells, Cell(_share(rest), rest), *(Cell("") for _ in range(len(_COLUMNS) - 4))]


def _nodes(kernel: Kernel) -> Child:
    if not kernel.nodes:
        return None
    shown = ", ".join(kernel.nodes[:_SHOWN_NODES])
    more = len(kernel.nodes) - _SHOWN_NODES
    return f"from {shown}" + (f" and {count_text(more, 'more node')}" if more > 0 else "")


def _draw(library: LibraryKernels, kernels: list[Kernel]) -> Markup:
    points = [(kernel.flops / kernel.bytes, _gflops(kernel) or 0.0, kernel) for kernel in kernels]  # type: ignore[operator]
    bounds = [_bound_gflops(kernel) for kernel in kernels]
    peak = library.peak_gflops
    heights = [*(y for _, y, _ in points), *filter(None, (*bounds, peak))]
    x = Axis("operations for each byte", tuple(x for x, *_ in points), plain, is_log=True)
    y = Axis("GFLOPS", tuple(heights), plain, is_log=True)
    frame = make_frame(x, y)
    longest = sorted(kernels, key=_total_s, reverse=True)[:_LABELLED]
    marks = [
        Mark(
            *(intensity, speed),
            _describe(kernel, speed),
            label=kernel.name if kernel in longest else "",
            series=_BY_RULE if kernel.tuned_s is None else _TUNED,
            is_hollow=kernel.tuned_s is None,
        )
        for intensity, speed, kernel in points
    ]
    stems = [
        _draw_stem(frame, intensity, speed, bound)
        for (intensity, speed, _), bound in zip(points, bounds, strict=True)
        if bound
    ]
    roof = peak and element(
        "path", d=f"M{frame.x.start} {frame.y.at(peak):.1f}H{frame.x.end}", class_="peak"
    )
    title = f"Roofline of the kernels of {library.label}"
    return plot(title, x, y, roof or None, stems, draw_marks(marks, frame))


def _bound_gflops(kernel: Kernel) -> float | None:
    return kernel.flops / kernel.least_s / 1e9 if kernel.flops and kernel.least_s else None


def _draw_stem(frame: Frame, x: float, y: float, bound: float) -> Markup:
    px, top = frame.x.at(x), frame.y.at(bound)
    path = f"M{px:.1f} {frame.y.at(y):.1f}V{top:.1f}M{px - 5:.1f} {top:.1f}h10"
    return element("path", d=path, class_="stem")


def _describe(kernel: Kernel, speed: float) -> str:
    text = f"{kernel.name}: {plain(speed)} GFLOPS, {latency_text(kernel.seconds or 0.0)} a call"
    reached = kernel.roofline_share
    return text if reached is None else f"{text}, {reached:.0%} of its roofline"
