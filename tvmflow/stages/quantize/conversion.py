"""Quantization of a float model: calibration, choice of layers by cost, insertion of operators."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from tvmflow.compiler import CpuModel
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Array
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes
from tvmflow.graph.evaluation import evaluate_weight
from tvmflow.runtime.labels import parse_labels
from tvmflow.runtime.samples import Samples
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages import import_model
from tvmflow.stages.base import StageContext
from tvmflow.stages.images import DATA, LABELS
from tvmflow.stages.quantize import (
    CALIBRATION,
    LayerFacts,
    QuantizeFacts,
    QuantizeSettings,
    channels,
    find_name_problem,
    insertion,
    points,
)
from tvmflow.stages.quantize.calibration import (
    Feed,
    ModelObserver,
    Signature,
    SwitchedModel,
    collect_histograms,
    collect_means,
    collect_products,
    collect_sizes,
)
from tvmflow.stages.quantize.control import (
    TOO_HARMFUL,
    Comparison,
    Cost,
    Evaluation,
    Limits,
    Run,
    choose_layers,
    estimate_gains,
    find_reasons,
)
from tvmflow.stages.quantize.data import DEFAULT_SAMPLES, DataSource, check_finite, limit_samples
from tvmflow.stages.quantize.emulation import Emulation
from tvmflow.stages.quantize.insertion import DataScale, LayerWeights, Quantization, Table
from tvmflow.stages.quantize.points import LARGEST_STATE, FloatModel, Integers, Layer
from tvmflow.stages.quantize.ranges import Method, choose_range, scale_of
from tvmflow.stages.quantize.weights import BlockQuantizedIntegers, Groups, error_of, round_groups

_log = logging.getLogger(__name__)

# Smoothing factors are found on this many batches; ranges are found on all.
_SMOOTHING_BATCHES: Final = 16
# This many batches determine the means of channels.
_MEAN_BATCHES: Final = 64
# This many of the evaluated batches decide whether bias correction helps. They also determine the reported error if
# neither a limit nor labels require all batches.
_COMPARED_BATCHES: Final = 64
# If the final evaluation of a choice exceeds the limits, layers are chosen again with tighter limits, at most this
# many times.
_TRIES: Final = 3


def convert(settings: QuantizeSettings, context: StageContext) -> QuantizeFacts:
    """Write the quantized model as `import` writes a model, so that later stages see no difference."""
    document = json.loads(context.inputs["import/signature.json"].read_text())
    signature = Signature(document, settings.target)
    # names of some models are known only after import, so they are checked here
    for spec in (*signature.inputs, *signature.outputs):
        if problem := find_name_problem(spec.name):
            raise StageError(problem)
    start = _list_candidates(settings, signature, _load(context.inputs))
    zero_points = _find_zero_points(start.model, signature)
    has_error = bool(zero_points) or any("float" in spec.dtype for spec in signature.outputs)
    source = _describe_data(settings, signature, context.inputs)
    evaluated = source._replace(role=DATA, field="verify.data").load(context.inputs)
    _check_limits(settings, evaluated, has_error)
    calibration = _load_calibration(settings, source, context.inputs)
    candidates = _smooth(start, calibration)
    possible = _quantize(candidates, calibration)
    quantization, control = _control(candidates, possible, calibration, evaluated, zero_points)
    quantized = _insert(candidates, quantization)
    facts = import_model.write_model(
        context.out,
        quantized.mod,
        quantized.params,
        signature={"inputs": signature.inputs, "outputs": signature.outputs},
        nodes=quantized.nodes,
        constants=document.get("bound", ()),
        dimensions=signature.dimensions,
        more={key: document[key] for key in import_model.OF_STATES if key in document},
    )
    imported = facts._asdict()
    del imported["tensors"]
    layers = [
        *(_describe_table(table, quantization, candidates.skipped) for table in candidates.tables),
        *(
            _describe_layer(index, layer, quantization, candidates.skipped, control)
            for index, layer in enumerate(candidates.layers)
        ),
    ]
    return QuantizeFacts(
        **imported,
        float_bytes=sum(array.nbytes for array in candidates.model.params.values()),
        layers=tuple(layers),
        samples=len(calibration),
        error=control.error if has_error else None,
        compared=control.compared,
        float_accuracy=control.float_accuracy,
        accuracy=control.accuracy,
    )


def _check_limits(settings: QuantizeSettings, evaluated: Samples | None, has_error: bool) -> None:
    limited = settings.quantize
    if limited.max_accuracy_drop is not None and (evaluated is None or evaluated.labels is None):
        raise StageError(
            f"quantize.max_accuracy_drop needs labels, and verify.data has no array {quoted(settings.label)}",
            fix="add labels, or set quantize.max_error",
        )
    if limited.max_error is not None and not has_error:
        raise StageError(
            "quantize.max_error needs an output of floats, and the model has none",
            fix="leave it out, or export the model with its scores as a further output",
        )


def _load(files: Mapping[str, Path]) -> FloatModel:
    mod = ir.load_module(files["import/model.json"])
    if not ir.is_straight_line(mod):
        raise StageError(
            "the model has conditional branches: its ranges would depend on the branches that the calibration data take",
            fix="leave `quantize` out, or export the model without conditions",
        )
    if points.multiplies_integers(mod):
        raise StageError("the model is quantized already", fix="leave `quantize` out")
    params = read_safetensors(files["import/params.safetensors"])
    nodes = json.loads(files["import/nodes.json"].read_text())
    return points.fold_model(FloatModel(mod, params, nodes))


class _Candidates(NamedTuple):
    """A float model with the layers and tensors that may be quantized.

    Attributes:
        tables: The lookup tables of the model.
        floats: The float weights by layer variable, without weights that cannot be evaluated.
        ranged: The tensors whose ranges are found by calibration.
        shared: The tensors of `ranged`, and parts of quantized concatenations, which share the concatenation's scale.
        states: The recurrent layers whose state may become int8, with the tensor of the initial state. Calibration
            checks its range. None stands for an initial state that is known to lie between -1 and 1.
        emulation: The model with parameters that emulate integers; None if each call computes ranges.
        factors: The smoothing factors by tensor. `model` is already smoothed; the model of `emulation` is not.
        observer: Runs the float model and also returns the observed tensors.
    """

    settings: QuantizeSettings
    signature: Signature
    model: FloatModel
    layers: tuple[Layer, ...]
    tables: tuple[Table, ...]
    skipped: frozenset[str]
    floats: Mapping[Any, Array]
    ranged: Sequence[Any]
    shared: Sequence[Any]
    states: Mapping[Any, Any]
    emulation: Emulation | None
    factors: Mapping[Any, Array]
    observer: ModelObserver


def _list_candidates(
    settings: QuantizeSettings, signature: Signature, model: FloatModel, *, emulates: bool = True
) -> _Candidates:
    layers, tables, skipped = _choose_layers(settings, model)
    floats = insertion.read_weights(model, layers)
    _check_weights(layers, floats)
    chosen = [layer for layer in layers if layer.name not in skipped and layer.var in floats]
    ranged = _list_ranged(settings, model, chosen)
    has_ranges = settings.quantize.activations == "int8"
    smoothable = list(channels.list_smoothable(model, layers)) if has_ranges else []
    states = _list_states(settings, model, chosen)
    tensors = dict.fromkeys([*ranged, *smoothable])
    tensors |= dict.fromkeys(
        layer.data
        for layer in chosen
        if not layer.is_recurrent and (has_ranges or _is_grouped(settings, layer))
    )
    tensors |= dict.fromkeys(start for start in states.values() if start is not None)
    shared = [*ranged, *points.list_joined(model, ranged)]
    emulation = None
    if emulates and settings.quantize.activations != "dynamic":
        emulation = Emulation(model, layers, floats, shared, smoothable)
    return _Candidates(
        settings=settings,
        signature=signature,
        model=model,
        layers=layers,
        tables=tables,
        skipped=skipped,
        floats=floats,
        ranged=ranged,
        shared=shared,
        states=states,
        emulation=emulation,
        factors={},
        observer=ModelObserver(model, list(tensors), signature, emulation),
    )


def _check_weights(layers: Sequence[Layer], floats: Mapping[Any, Array]) -> None:
    """Check that weights are finite: NaN and infinity have no integer."""
    for layer in layers:
        if layer.var in floats and not np.isfinite(floats[layer.var]).all():
            raise StageError(
                f"the weights of layer {quoted(layer.name)} have NaN or infinity",
                fix="replace the model: its training has failed, or its file is damaged",
            )


def _list_ranged(
    settings: QuantizeSettings, model: FloatModel, layers: Sequence[Layer]
) -> list[Any]:
    """Return the tensors whose ranges are found by calibration; none unless activations are int8."""
    if settings.quantize.activations != "int8":
        return []
    sources = dict.fromkeys(
        layer.source
        for layer in layers
        if layer.multiplies_bytes and not _is_grouped(settings, layer)
    )
    return [*sources, *points.list_sums(model, layers, sources)]


def _is_grouped(settings: QuantizeSettings, layer: Layer) -> bool:
    return settings.quantize.weights == "int4" and layer.operator == "matmul"


def _smooth(candidates: _Candidates, batches: Sequence[Feed]) -> _Candidates:
    """Return the candidates of the smoothed model; the same ones if smoothing does not help."""
    settings, model = candidates.settings, candidates.model
    smoothable = channels.list_smoothable(model, candidates.layers)
    if settings.quantize.activations != "int8" or not smoothable:
        return candidates
    axes = {var: channels.channel_axis(own[0]) for var, own in smoothable.items()}
    largest = collect_sizes(candidates.observer, axes, batches[:_SMOOTHING_BATCHES])
    factors = channels.find_factors(model, smoothable, candidates.floats, largest)
    if not factors:
        return candidates
    smoothed = channels.smooth(model, smoothable, factors)
    changed = _list_candidates(settings, candidates.signature, smoothed, emulates=False)
    inverses = {
        var: channels.broadcast(1 / own, len(known_sizes(var)), axes[var])
        for var, own in factors.items()
    }
    pairs = [
        *zip(candidates.ranged, changed.ranged, strict=True),
        *(
            (ours.data, theirs.data)
            for ours, theirs in zip(candidates.layers, changed.layers, strict=True)
        ),
    ]
    origins = {theirs: (ours, inverses.get(ours)) for ours, theirs in pairs}
    # states are not divided, because only layers read divided tensors
    starts = zip(candidates.states.values(), changed.states.values(), strict=True)
    origins |= {theirs: (ours, None) for ours, theirs in starts if theirs is not None}
    return changed._replace(
        emulation=candidates.emulation,
        factors=factors,
        observer=candidates.observer.follow(origins),
    )


def _choose_layers(
    settings: QuantizeSettings, model: FloatModel
) -> tuple[tuple[Layer, ...], tuple[Table, ...], frozenset[str]]:
    """Return the layers and lookup tables of a model, and the names that `skip` matches."""
    patterns = settings.quantize.skip
    layers, tables = points.list_layers(model), insertion.list_tables(model)
    names = [*(layer.name for layer in layers), *(table.name for table in tables)]
    if not layers:
        raise StageError(
            "the model has no convolution, matrix multiplication or recurrent layer with constant weights to quantize",
            fix="leave `quantize` out",
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise StageError(
                f"quantize.skip: no layer has a name like {quoted(pattern)}{did_you_mean(pattern, names)}",
                fix=f"the layers are {names_text(names[:20])}",
            )
    skipped = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    # other targets have no kernel for quantized tables, so these would be floats again, with an error and no gain
    has_kernels = _find_cpu(settings) is not None
    return layers, tables if has_kernels else (), frozenset(skipped)


def _describe_data(
    settings: QuantizeSettings, signature: Signature, files: Mapping[str, Path]
) -> DataSource:
    labels = files.get(LABELS)
    return DataSource(
        role=CALIBRATION if settings.own_data else DATA,
        field="quantize.data" if settings.own_data else "verify.data",
        inputs=signature.inputs,
        dimensions=signature.dimensions,
        images={name: entry.image for name, entry in settings.images.items()},
        label=settings.label,
        classes=parse_labels(labels.read_bytes()).names if labels else (),
    )


def _load_calibration(
    settings: QuantizeSettings, source: DataSource, files: Mapping[str, Path]
) -> Sequence[Feed]:
    """Return the calibration batches; none if the recipe has no data."""
    count = settings.quantize.samples
    data = source.load(files, count, count or DEFAULT_SAMPLES)
    if data is None:
        return ()
    batches = limit_samples(data, count)
    check_finite(batches, source.field)
    return batches


def _quantize(candidates: _Candidates, batches: Sequence[Feed]) -> Quantization:
    settings, floats, skipped = candidates.settings, candidates.floats, candidates.skipped
    is_dynamic = settings.quantize.activations == "dynamic"
    known = [
        layer for layer in candidates.layers if layer.name not in skipped and layer.var in floats
    ]
    grouped = _round_groups(candidates, known, batches)
    weights: dict[Any, LayerWeights | BlockQuantizedIntegers] = {**grouped}
    # with float activations, no products are added as int16, so weights may have 8 bits
    has_pairs = settings.quantize.activations != "none"
    integers = Integers(settings.integers, weight_bits=settings.weight_bits if has_pairs else 8)
    for layer in known:
        if layer.var not in grouped and (not is_dynamic or _multiplies_dynamically(layer)):
            weights[layer.var] = insertion.round_weights(
                floats[layer.var], layer.axis, integers.weight_bits
            )
    data = _find_scales(candidates, batches, integers)
    data |= {
        part: data[whole] for part, whole in points.list_joined(candidates.model, data).items()
    }
    tables = [table for table in candidates.tables if table.name not in skipped]
    return Quantization(
        integers=integers,
        weights=weights,
        data=data,
        dynamic=is_dynamic,
        errors={var: error_of(floats[var].T, rounded) for var, rounded in grouped.items()},
        corrections=_find_corrections(candidates, weights, data, integers, batches),
        tables=insertion.round_tables(candidates.model, tables),
        states=_list_rounded_states(candidates, batches),
    )


def _find_cpu(settings: QuantizeSettings) -> CpuModel | None:
    """Return the model of the target's CPU; None if tvmflow has no schedule rules for the target."""
    return CpuModel.from_target(settings.target)


def _list_states(
    settings: QuantizeSettings, model: FloatModel, layers: Sequence[Layer]
) -> dict[Any, Any]:
    """Return the recurrent layers whose state may be quantized to int8; see `_Candidates.states`."""
    cpu = _find_cpu(settings)
    if settings.quantize.activations == "none" or cpu is None or not cpu.multiplies_bytes:
        return {}
    flow, known, inputs = ir.DataFlow(model.main), model.known, set(model.main.params)
    states: dict[Any, Any] = {}
    for layer in layers:
        call = flow.values[layer.var]
        if not layer.is_recurrent or not points.has_bounded_state(call):
            continue
        start = points.find_initial_state(call, flow)
        if start is None:
            states[layer.var] = None
        elif flow.is_weight(start):
            values = evaluate_weight(start, flow, known)
            if values is not None and np.abs(values).max(initial=0) <= LARGEST_STATE:
                states[layer.var] = None
        elif start in inputs or ir.shape_of(start) is not None:
            states[layer.var] = start
    return states


def _list_rounded_states(candidates: _Candidates, batches: Sequence[Feed]) -> frozenset[Any]:
    """Return the variables of the recurrent layers whose state becomes int8.

    Their initial state stays within ±1 in calibration, or is already known to.
    """
    starts = {start: 0 for start in candidates.states.values() if start is not None}
    sizes = collect_sizes(candidates.observer, starts, batches)
    return frozenset(
        var
        for var, start in candidates.states.items()
        if start is None or (start in sizes and sizes[start].max(initial=0) <= LARGEST_STATE)
    )


def _find_corrections(
    candidates: _Candidates,
    weights: Mapping[Any, LayerWeights | BlockQuantizedIntegers],
    data: Mapping[Any, DataScale],
    integers: Integers,
    batches: Sequence[Feed],
) -> dict[Any, Array]:
    rounded = {var: own for var, own in weights.items() if isinstance(own, LayerWeights)}
    layers = [
        layer
        for layer in candidates.layers
        if layer.var in rounded and layer.source in data
        if ir.shape_of(layer.var) and ir.shape_of(layer.data)
    ]
    scales = {(layer.data, channels.channel_axis(layer)): data[layer.source] for layer in layers}
    means = collect_means(candidates.observer, scales, integers, batches[:_MEAN_BATCHES])
    flow = ir.DataFlow(candidates.model.main)
    return {
        layer.var: channels.find_correction(
            layer,
            flow.values[layer.var],
            candidates.floats[layer.var],
            rounded[layer.var],
            means[layer.data, channels.channel_axis(layer)],
        )
        for layer in layers
    }


def _multiplies_dynamically(layer: Layer) -> bool:
    """Return whether a layer can be quantized dynamically: each call computes the range of its input."""
    return layer.is_recurrent or (layer.operator == "matmul" and layer.multiplies_bytes)


def _round_groups(
    candidates: _Candidates, layers: Sequence[Layer], batches: Sequence[Feed]
) -> dict[Any, BlockQuantizedIntegers]:
    """Return block-quantized matmul weights with the smallest error on calibration data, by layer."""
    grouped = [layer for layer in layers if _is_grouped(candidates.settings, layer)]
    groups = Groups(size=candidates.settings.quantize.group_size)
    sources = dict.fromkeys(layer.data for layer in grouped) if len(batches) else {}
    products = collect_products(candidates.observer, list(sources), batches, groups.size)
    return {
        layer.var: round_groups(candidates.floats[layer.var].T, groups, products.get(layer.data))
        for layer in grouped
    }


def _find_scales(
    candidates: _Candidates, batches: Sequence[Feed], integers: Integers
) -> dict[Any, DataScale]:
    method = cast(Method, candidates.settings.quantize.method)
    scales = {}
    histograms = collect_histograms(candidates.observer, candidates.ranged, batches)
    for var, histogram in histograms.items():
        if histogram.not_finite:
            raise StageError(
                f"the float model computes NaN or infinity on calibration data (tensor {var.name})",
                fix="check the data: are they what the model was trained with?",
            )
        low, high = choose_range(histogram, method, integers.dtype)
        scales[var] = DataScale(*scale_of(low, high, integers.dtype))
    return scales


class Control(NamedTuple):
    """The cost of quantization (see `QuantizeFacts`), and the cost and gain of layers by index."""

    error: float | None = None
    compared: int = 0
    float_accuracy: float | None = None
    accuracy: float | None = None
    damage: Mapping[int, float] = {}
    reasons: Mapping[int, str] = {}
    gains: Mapping[int, float] = {}


def _control(
    candidates: _Candidates,
    possible: Quantization,
    calibration: Sequence[Feed],
    evaluated: Samples | None,
    zero_points: Mapping[str, float],
) -> tuple[Quantization, Control]:
    """Choose the layers by their cost on `verify.data`, or on the calibration data.

    The error of each layer in isolation is measured only if all layers together exceed the limits.
    """
    model, layers, signature = candidates.model, candidates.layers, candidates.signature
    settings = candidates.settings.quantize
    batches = cast("Sequence[dict[str, Array]]", calibration)
    data = evaluated or Samples(batches, len(batches), None, 0)
    limits = Limits(settings.max_accuracy_drop, settings.max_error)
    if not len(data.batches):
        return possible, Control()

    def choose_emulated(chosen: Collection[int]) -> Run:
        return _compute(candidates, insertion.keep_layers(model, layers, possible, chosen))

    choose = choose_emulated
    if candidates.emulation is None:
        choose = SwitchedModel(model, layers, possible, signature).choose
    output = signature.outputs[0].name
    evaluation = Evaluation(candidates.observer.run, choose, data, output, zero_points)

    is_limited = limits.error is not None or evaluation.accuracy is not None
    compared = len(data.batches) if is_limited else min(_COMPARED_BATCHES, len(data.batches))

    def evaluate(chosen: Sequence[int]) -> tuple[Quantization, Cost]:
        quantization = insertion.keep_layers(model, layers, possible, chosen)
        ways = [(quantization, Comparison(_compute(candidates, quantization)))]
        if quantization.corrections:
            plain = replace(quantization, corrections={})
            ways.append((plain, Comparison(_compute(candidates, plain))))
            # the first batches decide whether to try the corrections first
            errors = [evaluation.compare_more(own, _COMPARED_BATCHES).error for _, own in ways]
            _log.debug("error %.4f with corrected means, %.4f without", *errors)
            if errors[0] >= errors[1]:
                ways.reverse()
        costs = []
        for way, comparison in ways:
            costs.append((way, evaluation.compare_more(comparison, compared)))
            if limits.hold(costs[-1][1]):
                return costs[-1]
        return costs[0]

    names = {
        index: layer.name for index, layer in enumerate(layers) if layer.var in possible.weights
    }
    cpu, gains = _find_cpu(candidates.settings), dict[int, float]()
    if cpu is not None and settings.activations == "int8":
        flow = ir.DataFlow(model.main)
        gains = dict(enumerate(estimate_gains(layers, flow, cpu, possible.states)))
    reasons: Mapping[int, str] = find_reasons(names, gains)
    damage: Mapping[int, float] = {}
    chosen = tuple(index for index in names if index not in reasons)
    quantization, cost = evaluate(chosen)
    if possible.tables and not limits.hold(cost):
        # quantized tables save memory and no time, so they go back to float before any layer
        possible = replace(possible, tables={})
        quantization, cost = evaluate(chosen)
    wanted, tries = limits, 0
    while not limits.hold(cost):
        if tries == _TRIES:
            raise StageError(
                f"the limits cannot be held: the best choice of layers costs {cost.describe(limits)}",
                fix="allow more, provide more and other calibration data, or leave `quantize` out",
            )
        tries += 1
        choice = choose_layers(evaluation, names, wanted, gains)
        reasons, damage = choice.reasons, choice.damage
        if choice.chosen != chosen:
            chosen = choice.chosen
            quantization, cost = evaluate(chosen)
        # a layer costs more together with others: operators that read its quantized input read integers, too
        wanted = wanted.tighten(choice.cost, cost)
    before = evaluation.accuracy
    return quantization, Control(
        error=cost.error,
        compared=data.count_samples(compared) or 0,
        float_accuracy=before,
        accuracy=None if before is None or cost.drop is None else before - cost.drop / 100,
        damage=damage,
        reasons=reasons,
        gains=gains,
    )


def _find_zero_points(model: FloatModel, signature: Signature) -> dict[str, float]:
    flow, known = ir.DataFlow(model.main), model.known
    zero_points = {}
    for spec, var in zip(signature.outputs, ir.list_outputs(model.main), strict=True):
        call = ir.as_call(flow.values.get(var), "relax.quantize")
        zero = None if call is None else evaluate_weight(call.args[2], flow, known)
        if zero is not None and zero.size == 1:
            zero_points[spec.name] = float(zero.reshape(-1)[0])
    return zero_points


def _compute(candidates: _Candidates, quantization: Quantization) -> Run:
    """Return a function that computes the quantized model's outputs, by emulation if there is one."""
    emulation = candidates.emulation
    if emulation is None:
        return candidates.signature.compile(_insert(candidates, quantization)).run
    params = emulation.find_weights(
        candidates.layers, candidates.shared, quantization, candidates.factors
    )
    params |= {name: table.to_float() for name, table in quantization.tables.items()}
    return candidates.observer.emulate(params)


def _insert(candidates: _Candidates, quantization: Quantization) -> FloatModel:
    model = insertion.insert(candidates.model, candidates.layers, quantization)
    return insertion.insert_tables(model, quantization.tables)


def _describe_layer(
    index: int, layer: Layer, quantization: Quantization, skipped: frozenset[str], control: Control
) -> LayerFacts:
    own = quantization.weights.get(layer.var)
    reason = control.reasons.get(index, "")
    if own is None and not reason:
        reason = _find_reason(layer, quantization, skipped)
    damage = control.damage.get(index)
    return LayerFacts(
        name=layer.name,
        operator=layer.operator,
        weight_bits=32 if own is None else own.bits,
        data_bits=8 if quantization.has_integer_data(layer) else 32,
        reason=reason,
        gain=control.gains.get(index),
        damage=damage if damage is not None and math.isfinite(damage) else None,
        weight_error=quantization.errors.get(layer.var),
    )


def _describe_table(
    table: Table, quantization: Quantization, skipped: frozenset[str]
) -> LayerFacts:
    own = quantization.tables.get(table.weights)
    reason = "quantize.skip" if table.name in skipped else TOO_HARMFUL
    return LayerFacts(
        name=table.name,
        operator="take",
        weight_bits=32 if own is None else own.bits,
        data_bits=32,
        reason=reason if own is None else "",
    )


def _find_reason(layer: Layer, quantization: Quantization, skipped: frozenset[str]) -> str:
    if layer.name in skipped:
        return "quantize.skip"
    if quantization.dynamic and not _multiplies_dynamically(layer):
        return "no matrix multiplication with a dynamic range"
    return "its weights are computed"
