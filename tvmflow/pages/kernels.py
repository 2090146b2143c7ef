"""Roofline charts of kernels (Williams et al. 2009), search progress, and layers of quantized models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tvmflow.core.formatting import count_text, duration_text, latency_text
from tvmflow.core.generated_text import Child, Markup, element, join
from tvmflow.pages.content import Kernel, LibraryKernels
from tvmflow.pages.plot import (
    Axis,
    Cell,
    Mark,
    Row,
    accuracy,
    draw_line,
    draw_marks,
    format_known,
    latency,
    make_frame,
    plain,
    plot,
    ratio,
    share,
    swatch,
    table,
)
from tvmflow.stages.quantize import LayerFacts, QuantizeFacts

_LABELLED: Final = 8
_SHOWN_NODES: Final = 3
_TUNED, _BY_RULE = 0, 1
_KERNEL, _TIME, _SHARE = "kernel", "time", "share of the library's time"


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
    yield table(f"Kernels of {library.label}", rows)
    yield from (element("p", note, class_="note") for note in library.notes)


_EXPLANATION: Final = (
    "Arithmetic speed over operations for each byte of parameters. Filled: tuned; hollow: the "
    "schedule of a rule. The line above a kernel ends at the roofline of the machine for its size; "
    "the dashed line is the peak of arithmetic."
)
_IN_LIBRARY: Final = (
    "The time of all calls of a kernel in one call of the library as it was verified: all rows add up to its "
    "latency. The speedup by tuning is that of a kernel in isolation, interleaved with the untuned one."
)
_ALONE: Final = (
    "Each kernel was measured in isolation: the times do not add up to the latency of the library."
)


def _total_s(kernel: Kernel) -> float:
    return kernel.calls * (kernel.seconds or 0.0)


def _gflops(kernel: Kernel) -> float | None:
    return kernel.flops / kernel.seconds / 1e9 if kernel.flops and kernel.seconds else None


def _row(kernel: Kernel) -> Row:
    is_tuned = kernel.tuned_s is not None and kernel.untuned_s is not None
    speedup = kernel.untuned_s / kernel.tuned_s if is_tuned else None  # type: ignore[operator]
    gflops = _gflops(kernel)
    return {
        _KERNEL: Cell(element("code", kernel.name), kernel.name, _nodes(kernel)),
        "calls": Cell(kernel.calls, kernel.calls),
        _TIME: Cell(latency(_total_s(kernel) or None), _total_s(kernel)),
        _SHARE: Cell(_share(kernel.share), kernel.share),
        "speedup by tuning": Cell(ratio(speedup), speedup),
        "GFLOPS": Cell(format_known(gflops, plain), gflops),
        "of its roofline": Cell(share(kernel.roofline_share), kernel.roofline_share),
        "trials": Cell(kernel.trials or "", kernel.trials),
    }


def _share(value: float | None) -> str:
    return format_known(value, "{:.1%}".format)


def _rest_row(kernels: Sequence[Kernel]) -> Row:
    """Return the row of the time between kernels, so that all rows add up to one call."""
    timed = [kernel for kernel in kernels if kernel.library_s is not None]
    shares = sum(kernel.share or 0.0 for kernel in timed)
    rest = max(1 - shares, 0.0)
    seconds = sum(map(_total_s, timed)) / shares * rest if shares else None
    return {
        _KERNEL: Cell("between kernels", "~"),
        _TIME: Cell(latency(seconds), seconds),
        _SHARE: Cell(_share(rest), rest),
    }


def _nodes(kernel: Kernel) -> Child:
    if not kernel.nodes:
        return None
    shown = ", ".join(kernel.nodes[:_SHOWN_NODES])
    more = len(kernel.nodes) - _SHOWN_NODES
    return f"from {shown}" + (f" and {count_text(more, 'more node')}" if more > 0 else "")


def _draw(library: LibraryKernels, kernels: list[Kernel]) -> Markup:
    points = [(kernel.flops / kernel.bytes, _gflops(kernel) or 0.0, kernel) for kernel in kernels]  # type: ignore[operator]
    bounds = [
        one.flops / one.least_s / 1e9 if one.flops and one.least_s else None for one in kernels
    ]
    peak = library.peak_gflops
    heights = [*(y for _, y, _ in points), *filter(None, (*bounds, peak))]
    x = Axis("operations for each byte", tuple(x for x, *_ in points), plain, is_log=True)
    y = Axis("GFLOPS", tuple(heights), plain, is_log=True)
    frame = make_frame(x, y)
    longest = sorted(kernels, key=_total_s, reverse=True)[:_LABELLED]
    marks = [
        Mark(
            *(intensity, speed),
            f"{kernel.name}: {plain(speed)} GFLOPS, {latency_text(kernel.seconds or 0.0)} per call"
            + ("" if (part := kernel.roofline_share) is None else f", {part:.0%} of its roofline"),
            label=kernel.name if kernel in longest else "",
            series=_BY_RULE if kernel.tuned_s is None else _TUNED,
            is_hollow=kernel.tuned_s is None,
        )
        for intensity, speed, kernel in points
    ]
    stems = []
    for (intensity, speed, _), bound in zip(points, bounds, strict=True):
        if bound:
            px, top = frame.x.at(intensity), frame.y.at(bound)
            path = f"M{px:.1f} {frame.y.at(speed):.1f}V{top:.1f}M{px - 5:.1f} {top:.1f}h10"
            stems.append(element("path", d=path, class_="stem"))
    roof = peak and element(
        "path", d=f"M{frame.x.start} {frame.y.at(peak):.1f}H{frame.x.end}", class_="peak"
    )
    title = f"Roofline of the kernels of {library.label}"
    return plot(title, x, y, roof or None, stems, draw_marks(marks, frame))


# Further kernels are only in the table.
_MAX_CURVES: Final = 24
_CURVE_WIDTH: Final = 170
_CURVE_HEIGHT: Final = 52
_MARGIN: Final = 4


def draw_search(tuned: Sequence[LibraryKernels]) -> Iterator[Markup]:
    """Yield a chart and table of all libraries' searches, and the curves of each library's kernels."""
    for library in tuned:
        if library.kept == 0:
            kernels = count_text(len(library.kernels), "kernel")
            vain = f"{library.label}: accepted tuned schedules for 0 of {kernels}: those of the rules are the fastest."
            yield element("p", vain, class_="note")
    searched = [library for library in tuned if len(library.progress) > 1]
    gained = [library for library in searched if library.kept]
    if gained:
        plots = [_draw_over(gained, "trials", False)]
        if all(library.progress[-1].measuring_s for library in gained):
            plots.append(_draw_over(gained, "seconds of measuring", True))
        yield element(
            "figure",
            element("figcaption", element("p", _SEARCH_EXPLANATION)),
            element("div", plots, class_="plots"),
            table("Tuning of each library", map(_search_row, gained, range(len(gained)))),
        )
    for library in searched:
        yield _draw_kernels(library)


_SEARCH_EXPLANATION: Final = (
    "The time of all kernels that were tuned, each measured in isolation and at its best so far, relative to the "
    "untuned ones; kernels that stayed untuned do not change. The speedup is that of the whole library, "
    "measured interleaved with the same model untuned."
)


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
    # Enough digits to distinguish the tick marks of a small gain.
    digits = max(0, math.ceil(-math.log10(max(1 - min(values), 1e-4))) - 1)
    y = Axis("time of all kernels", (min(values), 1.0), f"{{:.{digits}%}}".format)
    frame = make_frame(x, y)
    marks = [
        Mark(
            *curve[-1],
            f"{library.label}: {curve[-1][1]:.1%} of the untuned time after "
            + count_text(library.progress[-1].trials, "trial")
            + (
                f" and {duration_text(s)} of measuring"
                if (s := library.progress[-1].measuring_s)
                else ""
            ),
            series=index,
        )
        for index, (library, curve) in enumerate(zip(searched, curves, strict=True))
    ]
    lines = (draw_line(curve, frame, index) for index, curve in enumerate(curves))
    title = f"Time of all kernels over {label}"
    return plot(title, x, y, lines, draw_marks(marks, frame))


def _search_row(library: LibraryKernels, index: int) -> Row:
    last, speedup = library.progress[-1], library.speedup
    measuring = duration_text(last.measuring_s) if last.measuring_s else ""
    gain = speedup.median if speedup and speedup.judgement != "unclear" else None
    return {
        "library": Cell(join(swatch(index), library.label), library.label),
        "trials": Cell(last.trials, last.trials),
        "measuring": Cell(measuring, last.measuring_s),
        "tuned kernels": Cell(f"{library.kept} of {len(library.kernels)}", library.kept),
        "speedup by tuning": Cell(ratio(gain), gain),
    }


def _draw_kernels(library: LibraryKernels) -> Markup:
    curves = [kernel for kernel in library.kernels if kernel.curve]
    more = max(len(curves) - _MAX_CURVES, 0)
    note = f" {count_text(more, 'further kernel')} in the table of kernels." if more else ""
    return element(
        "details",
        element("summary", f"Kernels of {library.label}"),
        element("p", f"Best time over trials; dashed: untuned, dotted: the roofline.{note}"),
        element("ul", map(_draw_kernel, curves[:_MAX_CURVES]), class_="curves"),
    )


def _draw_kernel(kernel: Kernel) -> Markup:
    best = min(kernel.curve)
    untuned = "" if kernel.untuned_s is None else f"{latency_text(kernel.untuned_s)} untuned, "
    text = f"{untuned}{latency_text(best)} best of {count_text(kernel.trials, 'trial')}"
    if kernel.tuned_s is None:
        text += ", which was no faster in an interleaved measurement"
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


# ---------------------------------------------------------------- layers of quantized models

_LABELLED_LAYERS: Final = 5
_INTEGERS, _FLOATS = 0, 1
# The smallest error that the chart shows.
_MIN_ERROR: Final = 1e-6
_FLOAT_BITS: Final = 32
_LAYER_EXPLANATION: Final = (
    "Relative error of the outputs if only one layer is computed with integers, by the layer's position in the model. "
    "Filled: computed with integers; hollow: stays float."
)


def draw_layers(label: str, model: QuantizeFacts) -> Iterator[Child]:
    """Yield the loss of a quantized model, and chart and table of its layers."""
    yield element("h3", label)
    yield element("p", _describe_layers(model))
    measured = [
        (number, layer.damage, layer)
        for number, layer in enumerate(model.layers, 1)
        if layer.damage is not None
    ]
    if len(measured) > 1:
        yield element(
            "figure",
            element("figcaption", element("p", _LAYER_EXPLANATION)),
            _draw_damage(label, measured),
        )
    yield table(f"Layers of {label}", map(_layer_row, model.layers))


def _describe_layers(model: QuantizeFacts) -> str:
    integers = sum(layer.weight_bits < _FLOAT_BITS for layer in model.layers)
    text = f"{integers} of {count_text(len(model.layers), 'layer')} with integers."
    if model.accuracy is not None and model.float_accuracy is not None:
        both = f"{accuracy(model.accuracy)}, of the float model {accuracy(model.float_accuracy)}"
        text += f" Accuracy {both}."
    return text if model.error is None else f"{text} Error of the outputs {model.error:.2%}."


def _draw_damage(label: str, measured: list[tuple[int, float, LayerFacts]]) -> Markup:
    x = Axis("layer", tuple(float(number) for number, *_ in measured), "{:.0f}".format)
    heights = tuple(max(damage, _MIN_ERROR) for _, damage, _ in measured)
    y = Axis("error of the outputs", heights, "{:.3%}".format, is_log=True)
    worst = sorted(measured, key=lambda entry: -entry[1])[:_LABELLED_LAYERS]
    labelled = {number for number, *_ in worst}
    marks = [
        Mark(
            *(float(number), max(damage, _MIN_ERROR)),
            f"{layer.name}: {damage:.3%}" + (f", float: {layer.reason}" if layer.reason else ""),
            label=layer.name if number in labelled else "",
            series=_FLOATS if layer.reason else _INTEGERS,
            is_hollow=bool(layer.reason),
        )
        for number, damage, layer in measured
    ]
    return plot(f"Error of each layer of {label}", x, y, draw_marks(marks, make_frame(x, y)))


def _layer_row(layer: LayerFacts) -> Row:
    return {
        "layer": Cell(element("code", layer.name), layer.name),
        "operator": Cell(layer.operator, layer.operator),
        "bits of weights": Cell(layer.weight_bits, layer.weight_bits),
        "bits of data": Cell(layer.data_bits, layer.data_bits),
        "error alone": Cell(format_known(layer.damage, "{:.3%}".format), layer.damage),
        "time saved": Cell(format_known(layer.gain, "{:.1%}".format), layer.gain),
        "why float": Cell(layer.reason, layer.reason),
    }
