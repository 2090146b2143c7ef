"""The facts of a quantized model, and the lines that reports say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.core.codec import without_empty
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.stages.base import KnownFacts, name_some


class LayerFacts(NamedTuple):
    """A layer and its outcome.

    Attributes:
        weight_bits: The bits of its weights; 32 if they stay float.
        data_bits: The bits of its data; 32 if they stay float.
        reason: Why it stays float; empty for one of integers.
        damage: The error of the outputs when it alone is of integers, relative to them; None if it was not
            measured, or an output is not a number.
        gain: The part of the time of all layers that it saves, by the model of the CPU; None if it is not known.
        weight_error: The root of the mean squared error of its weights of 4 bits, relative to the weights; None for
            others.
    """

    name: str
    operator: str
    weight_bits: int
    data_bits: int
    reason: str = ""
    damage: float | None = None
    gain: float | None = None
    weight_error: float | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the facts as plain JSON."""
        return without_empty(self._asdict(), ("reason", "damage", "gain", "weight_error"))


class QuantizeFacts(NamedTuple):
    """The facts of a quantized model; the first ones are those of an imported one.

    Attributes:
        float_bytes: The size of the weights before.
        samples: How many samples were calibrated with.
        error: The largest root mean square of the error of an output, relative to that of the output.
        compared: How many samples of `verify.data`, or of the calibration data, it was measured with.
        float_accuracy: The top-1 accuracy of the float model on `verify.data`; None without labels.
        accuracy: That of the quantized model.
    """

    weights: int = 0
    weight_bytes: int | None = None
    operators: Mapping[str, int] = {}
    nodes: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    bound: tuple[Json, ...] = ()
    dimensions: tuple[Dimension, ...] = ()
    float_bytes: int = 0
    layers: tuple[LayerFacts, ...] = ()
    samples: int = 0
    error: float | None = None
    compared: int = 0
    float_accuracy: float | None = None
    accuracy: float | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the facts as plain JSON."""
        return without_empty(
            self._asdict(),
            ("bound", "dimensions", "error", "compared", "float_accuracy", "accuracy"),
        )


# This many of the most harmful layers are shown by `run`; `explain` and reports show all of them.
_SHOWN: Final = 3


def describe(facts: QuantizeFacts, inputs: KnownFacts) -> list[str]:
    """Return how many layers are quantized, the cost, and which stay float."""
    integers = [layer for layer in facts.layers if not layer.reason]
    lines = [f"{len(integers)} of {count_text(len(facts.layers), 'layer')} with integers"]
    if facts.float_accuracy is not None and facts.accuracy is not None:
        drop = 100 * (facts.float_accuracy - facts.accuracy)
        lines.append(
            f"accuracy {facts.accuracy:.2%}, of the float model {facts.float_accuracy:.2%} "
            f"(drop {drop:.2f} points)"
        )
    if facts.error is not None:
        samples = f" ({count_text(facts.compared, 'sample')})" if facts.compared else ""
        lines.append(f"error of outputs {facts.error:.2%}{samples}")
    by_reason: dict[str, list[str]] = {}
    for layer in facts.layers:
        if layer.reason:
            by_reason.setdefault(layer.reason, []).append(layer.name)
    measured = sorted(
        (layer for layer in facts.layers if layer.damage), key=lambda layer: -(layer.damage or 0.0)
    )
    if measured:
        shown = ", ".join(f"{layer.name} {layer.damage:.2%}" for layer in measured[:_SHOWN])
        lines.append(f"largest error of one layer alone: {shown}")
    lines += [f"float: {name_some(names)} ({reason})" for reason, names in by_reason.items()]
    return lines


def cost_text(facts: QuantizeFacts) -> str:
    """Return cost and gain of quantization, in one line."""
    integers = [layer for layer in facts.layers if not layer.reason]
    layers = f"{len(integers)} of {count_text(len(facts.layers), 'layer')} with integers"
    reasons = Counter(layer.reason for layer in facts.layers if layer.reason)
    if reasons:
        floats = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        layers += f" (float: {floats})"
    parts = [layers]
    if facts.weight_bytes and facts.float_bytes:
        parts.append(f"weights {facts.weight_bytes / facts.float_bytes:.0%} of their size")
    saved = sum(layer.gain or 0.0 for layer in integers)
    if saved > 0:
        parts.append(f"an estimated {saved:.0%} of the layers' time saved")
    if facts.float_accuracy is not None and facts.accuracy is not None:
        drop = 100 * (facts.float_accuracy - facts.accuracy)
        parts.append(f"accuracy drop {drop:.2f} points")
    if facts.error is not None:
        parts.append(f"error of outputs {facts.error:.2%}")
    return ", ".join(parts)


def explain(facts: QuantizeFacts) -> list[str]:
    """Return each layer with its bits and, where it stays float, the reason."""
    return [
        f"{layer.name} ({layer.operator}): weights {layer.weight_bits} bits"
        + (f" (error {layer.weight_error:.1%})" if layer.weight_error is not None else "")
        + f", data {layer.data_bits} bits"
        + (f", error {layer.damage:.3%}" if layer.damage is not None else "")
        + (f", saves {layer.gain:.1%}" if layer.gain is not None and not layer.reason else "")
        + (f"; {layer.reason}" if layer.reason else "")
        for layer in facts.layers
    ]
