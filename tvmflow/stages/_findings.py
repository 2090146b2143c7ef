"""Sentences about a verdict: why a library is rejected, and what the comparison could not tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.stages._tolerances import SMALLEST_NORMAL
from tvmflow.stages._undetected import ANYTHING, INPUTS, ZEROS
from tvmflow.stages._verdict import ImageComparison, OutputComparison, Verdict
from tvmflow.stages._verify_settings import CheckSettings

_UNDETECTED_TEXTS: Final[Mapping[str, str]] = {
    ZEROS: "is so small that zeros would pass for it",
    INPUTS: "is the same for all inputs, so that a library that ignores them would pass",
    ANYTHING: "is empty for all inputs, so that nothing of it is compared",
}
_SUBNORMAL_TEXT: Final = (
    f"is 0 or below {SMALLEST_NORMAL:.2g} everywhere, the smallest normal number of float32, "
    "so that zeros would pass for it (larger weights and constants may help)"
)
_INPUTS_ADVICE: Final = "give inputs that the model is made for (inputs.NAME.range, verify.data)"


def list_failures(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return a sentence for everything that is wrong with a model and its parts."""
    reference = verdict.get("reference", "")
    failures = list_mismatches(verdict.get("outputs", {}), reference)
    for name, part in verdict.get("parts", {}).items():
        mismatches = list_mismatches(part.get("outputs", {}), reference)
        failures += [f"part '{name}': {mismatch}" for mismatch in mismatches]
    for mismatch in list_mismatches(verdict.get("vm", {}).get("outputs", {}), reference):
        failures.append(f"the library for TVM's virtual machine: {mismatch}")
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


def describe_fix(verdict: Verdict) -> str:
    """Return what to do about a rejected library: tolerances are of use only where outputs differ from the reference."""
    libraries = (verdict, *verdict.get("parts", {}).values(), verdict.get("vm", {}))
    differs = any(
        not output["passed"]
        for library in libraries
        for output in library.get("outputs", {}).values()
    )
    tolerances = "set verify.rtol and verify.atol only if the difference is benign"
    figures = "verify.json among the delivered files has all that was measured"
    return f"{figures}; {tolerances}" if differs else figures


def _list_image_mismatches(images: Mapping[str, ImageComparison]) -> list[str]:
    """Return a sentence for every input whose preprocessing is not that of Pillow."""
    return [
        f"the preprocessing of '{name}' differs from that by {comparison['against']} by {comparison['max_level_error']} "
        "of 255 levels"
        for name, comparison in images.items()
        if not comparison["passed"]
    ]


def list_warnings(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return a sentence for every output of which a wrong library could go undetected, and every runtime that differs."""
    undetected = _list_undetected(verdict) if verdict["passed"] else ()
    return [
        *(f"{sentence}: {_advice(checks)}" for sentence in undetected),
        *_list_differing_runtimes(verdict),
    ]


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


def _describe_undetected(comparison: OutputComparison) -> str:
    """Return what is not told of an output."""
    text, allowed = _UNDETECTED_TEXTS[comparison["undetected"]], comparison["atol"]
    if comparison["undetected"] != ZEROS or not allowed:
        return text
    return _SUBNORMAL_TEXT if allowed <= SMALLEST_NORMAL else f"{text} (atol {allowed:.2g})"


def _is_nothing_compared(verdict: Verdict, checks: CheckSettings) -> bool:
    """Return whether zeros would pass for every output, by tolerances that nobody asked for."""
    outputs = verdict.get("outputs", {}).values()
    undetected = [comparison.get("undetected") for comparison in outputs]
    return (
        bool(undetected) and checks.has_default_tolerance and set(undetected) <= {ZEROS, ANYTHING}
    )


def _advice(checks: CheckSettings) -> str:
    if checks.has_default_tolerance:
        return _INPUTS_ADVICE
    return f"{_INPUTS_ADVICE}, or leave verify.atol and verify.rtol to their defaults, which follow the output's size"


def list_mismatches(outputs: Mapping[str, OutputComparison], reference: str) -> list[str]:
    """Return a sentence for every output that does not match the reference's."""
    sentences = []
    for name, comparison in outputs.items():
        if comparison["passed"]:
            continue
        if "shape" in comparison:
            sentences.append(f"output '{name}' has shape {comparison['shape']}")
        elif "incomparable" in comparison:
            sentences.append(
                f"output '{name}' of {reference} has {comparison['incomparable']}, so that nothing is compared: "
                f"{_INPUTS_ADVICE}"
            )
        else:
            sentences.append(f"output '{name}': {'; '.join(_list_excesses(comparison, reference))}")
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
