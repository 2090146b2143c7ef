"""Sentences about a verdict: why a library is rejected, and what the comparison could not tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tvmflow.core.dimensions import sizes_text
from tvmflow.core.formatting import count_text
from tvmflow.stages.verify.comparison import ANYTHING, INPUTS, SMALLEST_NORMAL, ZEROS
from tvmflow.stages.verify.gates import list_remedies, list_undecided
from tvmflow.stages.verify.verdict import (
    ImageComparison,
    LevelVerdict,
    OutputComparison,
    ScaledSlice,
    SizeVerdict,
    Verdict,
    compared_with,
)
from tvmflow.stages.verify_settings import CheckSettings

_UNDETECTED_TEXTS: Final[Mapping[str, str]] = {
    ZEROS: "is so small that zeros would pass for it",
    INPUTS: "is the same for all inputs, so that a library that ignores them would pass",
    ANYTHING: "is empty for all inputs, so that nothing of it is compared",
}
_SUBNORMAL_TEXT: Final = (
    f"is 0 or below {SMALLEST_NORMAL:.2g} everywhere, the smallest normal number of float32, "
    "so that zeros would pass for it (larger weights and constants may help)"
)
_ZERO_INDEX_TEXT: Final = (
    "is an index that is 0 for all inputs, so that a library that never computes it would pass"
)
# A wrong tail is wrong at many sizes.
_MAX_SWEPT: Final = 3
_INPUTS_ADVICE: Final = "give inputs that the model is made for (inputs.NAME.range, verify.data)"


def list_failures(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return a sentence for everything that is wrong with a model and its parts."""
    reference = compared_with(verdict)
    failures = list_mismatches(verdict.get("outputs", {}), reference)
    failures += _list_wrong_index_inputs(verdict, reference)
    for name, part in verdict.get("parts", {}).items():
        mismatches = list_mismatches(part.get("outputs", {}), reference)
        failures += [f"part '{name}': {mismatch}" for mismatch in mismatches]
    for name, level in verdict.get("levels", {}).items():
        mismatches = list_mismatches(level.get("outputs", {}), reference)
        mismatches += _list_wrong_index_inputs(level, reference)
        mismatches += _list_wrong_layers(level, reference)
        mismatches += _list_wrong_sizes(level.get("sizes", ()), reference)
        failures += [f"level {name}: {mismatch}" for mismatch in mismatches]
    for mismatch in list_mismatches(verdict.get("fallback", {}).get("outputs", {}), reference):
        failures.append(f"the package as WebAssembly: {mismatch}")
    for mismatch in list_mismatches(verdict.get("vm", {}).get("outputs", {}), reference):
        failures.append(f"the library for TVM's virtual machine: {mismatch}")
    failures += _list_wrong_layers(verdict, reference)
    failures += _list_wrong_draws(verdict, reference)
    failures += [
        f"the library computes other bits with {count_text(int(count), 'thread')}"
        for count, is_same in verdict.get("threads", {}).items()
        if not is_same
    ]
    failures += _list_wrong_sizes(verdict.get("sizes", ()), reference)
    if "swept" in verdict:
        swept = [*_list_wrong_sizes(verdict["swept"]["failed"], reference)]
        more = len(swept) - _MAX_SWEPT
        failures += swept[:_MAX_SWEPT]
        failures += [f"wrong at {count_text(more, 'other size')}"] if more > 0 else []
    failures += _list_wrong_deliveries(verdict)
    for wrong in _list_wrong_sizes(verdict.get("vm", {}).get("sizes", ()), reference):
        failures.append(f"the library for TVM's virtual machine: {wrong}")
    if checks.min_accuracy is not None and verdict["accuracy"] < checks.min_accuracy:
        failures.append(
            f"accuracy {verdict['accuracy']:.4f} is below verify.min_accuracy {checks.min_accuracy:g}"
        )
    failures += _list_image_mismatches(verdict.get("images", {}))
    if not failures and _is_nothing_compared(verdict, checks):
        failures.append(
            "; ".join([*_list_undetected(verdict), f"nothing is compared: {_advice(checks)}"])
        )
    return failures


def _list_wrong_index_inputs(verdict: Verdict | LevelVerdict, reference: str) -> Iterator[str]:
    """Give a sentence for every tensor that goes into an index and is wrong."""
    for name, tensor in verdict.get("index_inputs", {}).items():
        subject = _index_input(name)
        if tensor.get("is_missing"):
            yield (
                f"{subject} is not in the library's memory as the same kernels compute it in a library that returns it"
            )
        else:
            yield from list_mismatches({name: tensor}, reference, subject)


def _list_wrong_sizes(sizes: Iterable[SizeVerdict], reference: str) -> Iterator[str]:
    """Give a sentence for everything that is wrong at some sizes of the dimensions."""
    for entry in sizes:
        where = sizes_text(entry["sizes"])
        if "failure" in entry:
            yield f"fails at {where}: {entry['failure']}"
        for mismatch in list_mismatches(entry.get("outputs", {}), reference):
            yield f"wrong at {where}: {mismatch}"
        if not entry.get("is_repeatable", True):
            yield f"wrong at {where}: the library computes other bits after calls with other sizes, or with another number of threads"


def _list_wrong_deliveries(verdict: Verdict) -> Iterator[str]:
    """Give a sentence for every output that does not do in a new process what the verified library does."""
    for output, delivery in verdict.get("deliveries", {}).items():
        if delivery["passed"]:
            continue
        mismatches = list_mismatches(delivery.get("outputs", {}), "the verified library")
        reason = delivery.get("failure") or "; ".join(mismatches) or "it computes other values"
        yield f"the output '{output}', loaded in a new process as users do: {reason}"


def _list_wrong_draws(verdict: Verdict, reference: str) -> Iterator[str]:
    """Give a sentence for everything that is wrong for random inputs beside the usual ones."""
    for entry in verdict.get("draws", ()):
        if "failure" in entry:
            yield f"fails for {entry['inputs']}: {entry['failure']}"
        for mismatch in list_mismatches(entry.get("outputs", {}), reference):
            yield f"wrong for {entry['inputs']}: {mismatch}"
        for name, scaled in entry.get("scaled", {}).items():
            yield f"wrong for {entry['inputs']}: output '{name}': {_describe_scaled(scaled)} {reference} gives"


def _list_wrong_layers(verdict: Verdict | LevelVerdict, reference: str) -> Iterator[str]:
    """Give a sentence for every layer of a quantized model that is wrong."""
    layers = verdict.get("layers", {})
    if not layers.get("is_reproduced", True):
        yield "the library computes other numbers than the same kernels that are compiled once more"
    for name, wrong in layers.get("wrong", {}).items():
        yield (
            f"'{name}' is up to {count_text(wrong['steps'], 'step')} off in {count_text(wrong['elements'], 'element')} where it is computed "
            f"from the tensors that {reference} gives, more than {layers['allowed_steps']}"
        )
    for name, scaled in layers.get("scaled", {}).items():
        yield f"'{name}': {_describe_scaled(scaled)} {reference} gives for the same tensors before it"
    for name, output in layers.get("outputs", {}).items():
        subject = f"output '{name}', computed from the tensors that {reference} gives"
        yield from list_mismatches({name: output}, reference, subject)


def _describe_scaled(scaled: ScaledSlice) -> str:
    return f"all of index {scaled['index']} along axis {scaled['axis']} is {scaled['scale']:.5g} times what"


def describe_fix(verdict: Verdict) -> str:
    """Return what to do about a rejected library: tolerances are of use only where outputs differ."""
    libraries = (verdict, *verdict.get("parts", {}).values(), verdict.get("vm", {}))
    outputs = [output for library in libraries for output in library.get("outputs", {}).values()]
    levels = [*verdict.get("levels", {}).values()]
    levels += [verdict["fallback"]] if "fallback" in verdict else []
    outputs += [output for level in levels for output in level.get("outputs", {}).values()]
    outputs += verdict.get("index_inputs", {}).values()
    batches = [*verdict.get("sizes", ()), *verdict.get("draws", ())]
    outputs += [output for entry in batches for output in entry.get("outputs", {}).values()]
    differs = any(not output["passed"] for output in outputs)
    tolerances = "set verify.rtol and verify.atol only if the difference is benign"
    figures = "verify.json among the delivered files has all that was measured"
    remedies = [*list_remedies(verdict), figures, *([tolerances] if differs else [])]
    return "; ".join(remedies)


def _list_image_mismatches(images: Mapping[str, ImageComparison]) -> list[str]:
    """Return a sentence for every input whose preprocessing is not that of Pillow."""
    return [
        f"the preprocessing of '{name}' differs from that by {comparison['against']} by {comparison['max_level_error']} "
        "of 255 levels"
        for name, comparison in images.items()
        if not comparison["passed"]
    ]


def list_warnings(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return a sentence for each output whose errors could go undetected, and each runtime that differs."""
    undetected = _list_undetected(verdict) if verdict["passed"] else ()
    return [
        *(f"{sentence}: {_advice(checks)}" for sentence in undetected),
        *_list_unchecked_indices(verdict),
        *_list_differing_runtimes(verdict),
        *list_undecided(verdict),
    ]


def _list_unchecked_indices(verdict: Verdict) -> Iterator[str]:
    """Give a sentence where what goes into an index is not compared."""
    if not verdict["passed"] or "index_inputs_not_compared" not in verdict:
        return
    reason = verdict["index_inputs_not_compared"]
    named = [
        f"'{name}' ({count_text(output['reached'], 'different value')} in the samples)"
        for name, output in verdict.get("outputs", {}).items()
        if "reached" in output
    ]
    subject = f"the index {', '.join(named)}" if named else "an index"
    yield (
        f"what goes into {subject} is not compared, so that a wrong library could go undetected: {reason}"
    )


def _list_differing_runtimes(verdict: Verdict) -> Iterator[str]:
    """Give a sentence for every other runtime whose outputs are not those of the reference."""
    reference = verdict.get("reference", "")
    for runtime in verdict.get("compared", {}).values():
        mismatches = list_mismatches(runtime.get("outputs", {}), reference)
        if not mismatches:
            continue
        name, other = runtime["name"], reference
        if name == reference:
            name, other = f"{name} with its rewrites of the graph", "itself without them"
        yield (
            f"{name} differs from {other}, so that its latency is that of other results: "
            f"{'; '.join(mismatches)}"
        )


def _list_undetected(verdict: Verdict) -> Iterator[str]:
    for name, comparison in verdict.get("outputs", {}).items():
        if "undetected" in comparison:
            yield f"output '{name}' {_describe_undetected(comparison)}"
    for name, tensor in verdict.get("index_inputs", {}).items():
        if "undetected" in tensor:
            yield f"{_index_input(name)} {_describe_undetected(tensor)}"


def _index_input(name: str) -> str:
    return f"'{name}' (which goes into an index)"


def _describe_undetected(comparison: OutputComparison) -> str:
    """Return what is not told of an output."""
    if "reached" in comparison and comparison["undetected"] == ZEROS:
        return _ZERO_INDEX_TEXT
    text, allowed = _UNDETECTED_TEXTS[comparison["undetected"]], comparison["atol"]
    if comparison["undetected"] != ZEROS or not allowed:
        return text
    return _SUBNORMAL_TEXT if allowed <= SMALLEST_NORMAL else f"{text} (atol {allowed:.2g})"


def _is_nothing_compared(verdict: Verdict, checks: CheckSettings) -> bool:
    """Return whether zeros would pass for every output, by tolerances that nobody asked for."""
    outputs = [*verdict.get("outputs", {}).values(), *verdict.get("index_inputs", {}).values()]
    # a right classifier may choose the first class for each input
    undetected = [output.get("undetected") for output in outputs if "reached" not in output]
    return (
        bool(undetected) and checks.has_default_tolerance and set(undetected) <= {ZEROS, ANYTHING}
    )


def _advice(checks: CheckSettings) -> str:
    if checks.has_default_tolerance:
        return _INPUTS_ADVICE
    return f"{_INPUTS_ADVICE}, or leave verify.atol and verify.rtol to their defaults, which follow the output's size"


def list_mismatches(
    outputs: Mapping[str, OutputComparison], reference: str, subject: str = ""
) -> list[str]:
    """Return a sentence for every output that does not match the reference's.

    Args:
        outputs: The outputs by name.
        reference: The name of the reference.
        subject: How an output is named, where it is none.
    """
    sentences = []
    for name, comparison in outputs.items():
        noun = subject or f"output '{name}'"
        if comparison["passed"]:
            continue
        if "shape" in comparison:
            sentences.append(f"{noun} has shape {comparison['shape']}")
        elif "incomparable" in comparison:
            sentences.append(
                f"{noun} of {reference} has {comparison['incomparable']}, so that nothing is compared: "
                f"{_INPUTS_ADVICE}"
            )
        else:
            sentences.append(f"{noun}: {'; '.join(_list_excesses(comparison, reference))}")
    return sentences


def _list_excesses(comparison: OutputComparison, reference: str) -> Iterator[str]:
    """Give a sentence for each limit of the tolerance that an output exceeds."""
    limits = comparison.get("exceeded", {})
    if comparison["mismatched"]:
        worst = comparison["worst"]
        yield (
            f"{comparison['mismatched']} of {comparison['elements']} elements are out of tolerance "
            f"(rtol {comparison['rtol']:g}, atol {comparison['atol']:.3g}); the worst, at {worst['index']}, "
            f"is {worst['actual']} where {reference} gives {worst['expected']}"
        )
    if scaled := comparison.get("scaled_slice"):
        yield f"{_describe_scaled(scaled)} {reference} gives"
    if "rms" in limits:
        yield (
            f"the root mean square of its errors is {float(comparison['rms_error']):.2%} of that of {reference}, "
            f"more than {limits['rms']:.2%}"
        )
    if "scale" in limits:
        yield (
            f"on the whole it is {comparison['scale']:.4g} times what {reference} gives, "
            f"more than {limits['scale']:.2%} from 1"
        )
