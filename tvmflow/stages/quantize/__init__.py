"""`quantize`: post-training quantization of a float model, for recipes with `quantize`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import Field

from tvmflow.core.codec import omits_empty
from tvmflow.core.formatting import count_text, quoted
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.recipe import Recipe
from tvmflow.stages import import_model
from tvmflow.stages.base import (
    KnownFacts,
    Settings,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
)
from tvmflow.stages.images import DATA, LABELS, ImageInput, image_inputs
from tvmflow.targets.resolve import ResolvedTarget

NAME: Final = "quantize"
CALIBRATION: Final = "calibration"
"""The role of the calibration data; the role of a calibration image is `calibration/<file>`."""

TRAITS: Final = StageTraits(
    version=10,
    scope="machine",
    needs={
        "import": (
            import_model.MODEL,
            import_model.PARAMS,
            import_model.SIGNATURE,
            import_model.NODES,
        )
    },
    reads=(CALIBRATION, DATA, LABELS),
    tools=("apache-tvm", "apache-tvm-ffi", "numpy"),
    timeout_s=24 * 3600.0,
    weights=(import_model.PARAMS,),
    added_with=("import",),
    is_needed=lambda recipe: recipe.quantize is not None,
    replaces="import",
)
deliveries = no_files

# ---------------------------------------------------------------- settings


class MethodSettings(Settings):
    """The recipe's quantization settings; see `recipe.Quantize`."""

    weights: str
    group_size: int
    activations: str
    method: str
    samples: int | None
    max_accuracy_drop: float | None
    max_error: float | None
    skip: tuple[str, ...]


class QuantizeSettings(StageSettings):
    """The recipe's `quantize`, and the integer types that the target multiplies."""

    quantize: MethodSettings
    integers: str
    weight_bits: int
    target: dict[str, Json]
    label: str
    own_data: bool
    images: dict[str, ImageInput] = Field(default={})


def settings(recipe: Recipe, target: ResolvedTarget) -> QuantizeSettings:
    """Return the settings of the stage; the recipe must have `quantize`."""
    assert recipe.quantize is not None
    return QuantizeSettings(
        quantize=MethodSettings.model_validate(recipe.quantize),
        integers=find_data_dtype(target) or "",
        weight_bits=_find_weight_bits(target),
        target=target.tvm,
        label=recipe.verify.label,
        own_data=recipe.quantize.data is not None,
        images=image_inputs(recipe),
    )


def find_data_dtype(target: ResolvedTarget) -> str | None:
    """Return the activation dtype that the target multiplies with int8 weights; None if it has none."""
    if target.tvm["kind"] != "llvm" or target.levels:
        return None
    arch = str(target.tvm.get("mtriple", "")).partition("-")[0]
    features = set(target.features)
    if arch == "x86_64":
        return "uint8" if _has_dot_products(features) or _PAIRS in features else None
    return "int8" if arch in ("aarch64", "arm64") else None


def _find_weight_bits(target: ResolvedTarget) -> int:
    """Return the number of bits in weights: 7 for AVX2, whose int16 sums of two products overflow with 8."""
    arch = str(target.tvm.get("mtriple", "")).partition("-")[0]
    return 7 if arch == "x86_64" and not _has_dot_products(set(target.features)) else 8


def _has_dot_products(features: set[str]) -> bool:
    return bool(features & _VNNI and features & _NARROW_VECTORS)


def no_integers_reason(target: ResolvedTarget) -> str:
    """Return why int8 is not faster on a target: a predicate for a message."""
    if target.tvm["kind"] != "llvm":
        return "is a GPU, whose kernels multiply floats"
    if target.levels:
        return "has ISA levels without int8 dot products"
    return "has no int8 dot products (x86-64: AVX2 or VNNI)"


_VNNI: Final = {"avx512_vnni", "avx_vnni"}
_PAIRS: Final = "avx2"
_NARROW_VECTORS: Final = {"avx512vl", "avx_vnni"}


# ---------------------------------------------------------------- facts


@omits_empty("reason", "damage", "gain", "weight_error")
class LayerFacts(NamedTuple):
    """A layer, and whether and how it was quantized.

    Attributes:
        weight_bits: The number of bits per weight; 32 if the weights stay float.
        data_bits: The number of bits per value of its input; 32 if the input stays float.
        reason: The reason why it stays float; empty otherwise.
        damage: The relative error of the outputs if only this layer is quantized; None if it is NaN or was not
            measured.
        gain: The estimated share of all layers' time that quantizing it saves; None if unknown.
        weight_error: The relative root mean square error of its int4 weights; None if its weights are not int4.
    """

    name: str
    operator: str
    weight_bits: int
    data_bits: int
    reason: str = ""
    damage: float | None = None
    gain: float | None = None
    weight_error: float | None = None


@omits_empty("bound", "dimensions", "error", "compared", "float_accuracy", "accuracy")
class QuantizeFacts(NamedTuple):
    """The facts of a quantized model; the fields before `float_bytes` are also facts of `import`.

    Attributes:
        float_bytes: The size of the float weights.
        samples: The number of calibration samples.
        error: The largest relative root mean square error of an output.
        compared: The number of samples that `error` was measured on; they come from `verify.data` or the
            calibration data.
        float_accuracy: The top-1 accuracy of the float model on `verify.data`; None without labels.
        accuracy: The top-1 accuracy of the quantized model; None without labels.
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


# This many of the most harmful layers are shown by `run`; `explain` and reports show all of them.
_SHOWN: Final = 3


def describe(facts: QuantizeFacts, inputs: KnownFacts) -> list[str]:
    """Return lines with the number of quantized layers, the errors, and the layers that stay float."""
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
        lines.append(f"largest error of a single layer: {shown}")
    lines += [f"float: {name_some(names)} ({reason})" for reason, names in by_reason.items()]
    return lines


def cost_text(facts: QuantizeFacts) -> str:
    """Return the cost and the gain of quantization in one line."""
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


# ---------------------------------------------------------------- the stage


def run(settings: QuantizeSettings, context: StageContext) -> QuantizeFacts:
    """Write the quantized model as `import` writes a model, so that later stages see no difference."""
    from tvmflow.stages.quantize.conversion import convert

    return convert(settings, context)


# The prefix of additional inputs and outputs of libraries for calibration.
_RESERVED: Final = "tvmflow."


def find_name_problem(name: str) -> str:
    """Return why an input or output cannot have a name; an empty string if it can."""
    if not name.startswith(_RESERVED):
        return ""
    return (
        f"quantize cannot calibrate a model with an input or output named {quoted(name)}: export the model with a "
        f"name that does not start with '{_RESERVED}'"
    )
