"""The layers of quantized models: their bits, and what each costs alone, in a chart and a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tvmflow.core.formatting import count_text
from tvmflow.core.generated_text import Child, Markup, element
from tvmflow.pages.content import QuantizedModel
from tvmflow.pages.plot import Axis, Mark, draw_marks, make_frame, plot
from tvmflow.pages.tables import Cell, Column, accuracy, format_known, table
from tvmflow.stages.quantize.facts import LayerFacts

_LABELLED: Final = 5
_INTEGERS, _FLOATS = 0, 1
# The smallest error that the chart shows.
_LEAST: Final = 1e-6
_FLOAT_BITS: Final = 32
_COLUMNS: Final = (
    Column("layer"),
    Column("operator"),
    Column("bits of weights", is_number=True),
    Column("bits of data", is_number=True),
    Column("error alone", is_number=True),
    Column("time saved", is_number=True),
    Column("why float"),
)
_EXPLANATION: Final = (
    "The error of the outputs, relative to them, when one layer alone is computed with integers, over the place of the "
    "layer in the model. Filled: computed with integers; hollow: stays float."
)


def draw_layers(model: QuantizedModel) -> Iterator[Child]:
    """Yield what a quantized model lost, the chart and the table of its layers."""
    yield element("h3", model.label)
    yield element("p", _describe(model))
    measured = [
        (place, layer.damage, layer)
        for place, layer in enumerate(model.layers, 1)
        if layer.damage is not None
    ]
    if len(measured) > 1:
        yield element(
            "figure",
            element("figcaption", element("p", _EXPLANATION)),
            _draw(model.label, measured),
        )
    yield table(f"Layers of {model.label}", _COLUMNS, map(_row, model.layers))


def _describe(model: QuantizedModel) -> str:
    integers = sum(layer.weight_bits < _FLOAT_BITS for layer in model.layers)
    text = f"{integers} of {count_text(len(model.layers), 'layer')} with integers."
    if model.accuracy is not None and model.float_accuracy is not None:
        both = f"{accuracy(model.accuracy)}, of the float model {accuracy(model.float_accuracy)}"
        text += f" Accuracy {both}."
    return text if model.error is None else f"{text} Error of the outputs {model.error:.2%}."


def _draw(label: str, measured: list[tuple[int, float, LayerFacts]]) -> Markup:
    x = Axis("layer", tuple(float(place) for place, *_ in measured), "{:.0f}".format)
    heights = tuple(max(damage, _LEAST) for _, damage, _ in measured)
    y = Axis("error of the outputs", heights, "{:.3%}".format, is_log=True)
    worst = sorted(measured, key=lambda entry: -entry[1])[:_LABELLED]
    labelled = {place for place, *_ in worst}
    marks = [
        Mark(
            *(float(place), max(damage, _LEAST)),
            f"{layer.name}: {damage:.3%}" + (f", float: {layer.reason}" if layer.reason else ""),
            label=layer.name if place in labelled else "",
            series=_FLOATS if layer.reason else _INTEGERS,
            is_hollow=bool(layer.reason),
        )
        for place, damage, layer in measured
    ]
    return plot(f"Error of each layer of {label}", x, y, draw_marks(marks, make_frame(x, y)))


def _row(layer: LayerFacts) -> list[Cell]:
    return [
        Cell(element("code", layer.name), layer.name),
        Cell(layer.operator, layer.operator),
        Cell(layer.weight_bits, layer.weight_bits),
        Cell(layer.data_bits, layer.data_bits),
        Cell(format_known(layer.damage, "{:.3%}".format), layer.damage),
        Cell(format_known(layer.gain, "{:.1%}".format), layer.gain),
        Cell(layer.reason, layer.reason),
    ]
