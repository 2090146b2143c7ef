"""Tuning curves: the best time of all kernels over the trials of a search, and of each kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tvmflow.core.formatting import count_text, duration_text, latency_text
from tvmflow.core.markup import Markup, element, join
from tvmflow.pages.content import Kernel, LibraryKernels, Progress
from tvmflow.pages.plot import Axis, Mark, draw_line, draw_marks, make_frame, plot, swatch
from tvmflow.pages.tables import Cell, Column, plain, ratio, table

# Kernels beyond these have a row in the table, and no curve.
_MAX_CURVES: Final = 24
_CURVE_WIDTH: Final = 170
_CURVE_HEIGHT: Final = 52
_MARGIN: Final = 4

_COLUMNS: Final = (
    Column("library"),
    Column("trials", is_number=True),
    Column("measuring", is_number=True),
    Column("tuned kernels", is_number=True),
    Column("speedup by tuning", is_number=True),
)


def draw_search(tuned: Sequence[LibraryKernels]) -> Iterator[Markup]:
    """Yield the curves of all libraries in one chart, their table, and the curves of the kernels of each."""
    yield from (element("p", _describe_vain(lib), class_="note") for lib in tuned if lib.kept == 0)
    searched = [library for library in tuned if len(library.progress) > 1]
    gained = [library for library in searched if library.kept]
    if gained:
        yield element(
            "figure",
            element("figcaption", element("p", _EXPLANATION)),
            element("div", list(_draw_progress(gained)), class_="plots"),
            table("Tuning of each library", _COLUMNS, map(_row, gained, range(len(gained)))),
        )
    for library in searched:
        yield _draw_kernels(library)


_EXPLANATION: Final = (
    "The time of all kernels that were tuned, each measured by itself and at its best so far, relative to the "
    "untuned ones; kernels that stayed untuned do not change. The speedup is that of the whole library, "
    "measured in turns with the same model untuned."
)


def _describe_vain(library: LibraryKernels) -> str:
    """Return what is said of a search that gained nothing; it has no speedup."""
    kernels = count_text(len(library.kernels), "kernel")
    return f"{library.label}: tuning kept 0 of {kernels}; the rules were already fastest."


def _draw_progress(searched: Sequence[LibraryKernels]) -> Iterator[Markup]:
    yield _draw_over(searched, "trials", False)
    if all(library.progress[-1].measuring_s for library in searched):
        yield _draw_over(searched, "seconds of measuring", True)


def _draw_over(searched: Sequence[LibraryKernels], label: str, is_over_time: bool) -> Markup:
    curves = [
        [
            (entry.measuring_s if is_over_time else float(entry.trials), entry.best_s / start)
            for entry in library.progress
        ]
        for library in searched
        for start in (library.progress[0].best_s,)
    ]
    values = [y for curve in curves for _, y in curve]
    ends = tuple(curve[-1][0] for curve in curves)
    x = Axis(label, (0.0, *ends), plain, starts_at_zero=True)
    # as many digits as tell the marks of a small gain apart
    digits = max(0, math.ceil(-math.log10(max(1 - min(values), 1e-4))) - 1)
    y = Axis("time of all kernels", (min(values), 1.0), f"{{:.{digits}%}}".format)
    frame = make_frame(x, y)
    marks = [
        Mark(
            *curve[-1],
            f"{library.label}: {curve[-1][1]:.1%} of the untuned time after {_describe(library.progress[-1])}",
            series=index,
        )
        for index, (library, curve) in enumerate(zip(searched, curves, strict=True))
    ]
    lines = (draw_line(curve, frame, index) for index, curve in enumerate(curves))
    title = f"Time of all kernels over {label}"
    return plot(title, x, y, lines, draw_marks(marks, frame))


def _describe(progress: Progress) -> str:
    time = (
        f" and {duration_text(progress.measuring_s)} of measuring" if progress.measuring_s else ""
    )
    return f"{count_text(progress.trials, 'trial')}{time}"


def _row(library: LibraryKernels, index: int) -> list[Cell]:
    last, speedup = library.progress[-1], library.speedup
    measuring = duration_text(last.measuring_s) if last.measuring_s else ""
    gain = speedup.median if speedup and speedup.judgement != "unclear" else None
    return [
        Cell(join(swatch(index), library.label), library.label),
        Cell(last.trials, last.trials),
        Cell(measuring, last.measuring_s),
        Cell(f"{library.kept} of {len(library.kernels)}", library.kept),
        Cell(ratio(gain), gain),
    ]


# ---------------------------------------------------------------- kernels


def _draw_kernels(library: LibraryKernels) -> Markup:
    curves = [kernel for kernel in library.kernels if kernel.curve][:_MAX_CURVES]
    more = sum(1 for kernel in library.kernels if kernel.curve) - len(curves)
    note = f" {count_text(more, 'further kernel')} in the table of kernels." if more else ""
    return element(
        "details",
        element("summary", f"Kernels of {library.label}"),
        element("p", f"Best time over trials; dashed: untuned, dotted: the roofline.{note}"),
        element("ul", map(_draw_kernel, curves), class_="curves"),
    )


def _draw_kernel(kernel: Kernel) -> Markup:
    best = min(kernel.curve)
    untuned = "" if kernel.untuned_s is None else f"{latency_text(kernel.untuned_s)} untuned, "
    text = f"{untuned}{latency_text(best)} best of {count_text(kernel.trials, 'trial')}"
    if kernel.tuned_s is None:
        text += ", which was no faster when measured again in turns"
    return element("li", element("b", kernel.name), _draw_curve(kernel), element("small", text))


def _draw_curve(kernel: Kernel) -> Markup:
    references = [value for value in (kernel.untuned_s, kernel.least_s) if value]
    high = max([kernel.curve[0], *references])
    high = min(high, 2.5 * max([min(kernel.curve), *references]))

    def at(value: float) -> float:
        part = min(value / high, 1.0)
        return round(_CURVE_HEIGHT - _MARGIN - part * (_CURVE_HEIGHT - 2 * _MARGIN), 1)

    step = (_CURVE_WIDTH - 2 * _MARGIN) / max(len(kernel.curve), 1)
    path, height = f"M{_MARGIN} {at(kernel.curve[0])}", at(kernel.curve[0])
    for index, value in enumerate(kernel.curve):
        if at(value) != height:
            height = at(value)
            path += f"H{_MARGIN + index * step:.1f}V{height}"
    path += f"H{_CURVE_WIDTH - _MARGIN}"
    return element(
        "svg",
        _reference(kernel.untuned_s, at, "untuned"),
        _reference(kernel.least_s, at, "least"),
        element("path", d=path, class_="line s0"),
        viewBox=f"0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}",
        aria_hidden="true",
    )


def _reference(value: float | None, at: Callable[[float], float], name: str) -> Markup | None:
    if not value:
        return None
    return element("path", d=f"M{_MARGIN} {at(value)}H{_CURVE_WIDTH - _MARGIN}", class_=name)
