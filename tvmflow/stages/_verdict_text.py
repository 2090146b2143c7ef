"""The lines that reports say of a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.core.formatting import count_text, latency_text
from tvmflow.stages import _comparison
from tvmflow.stages._base import Facts, name_some
from tvmflow.stages._verdict import Profile, Speedup

_ARITHMETIC_TEXTS: Final[Mapping[str, str]] = {
    _comparison.FLOAT32: "float32",
    _comparison.FLOAT16: "float16, entirely or in part",
    _comparison.BFLOAT16: "bfloat16",
    _comparison.QUANTIZED: "quantized integers",
}


def describe(facts: Facts, inputs: Mapping[str, Facts]) -> list[str]:
    """Return how outputs agree, the accuracy, and the latencies."""
    if "not_run" in facts:
        return [f"NOT VERIFIED (verify.against: none): {facts['not_run']}"]
    lines = _describe_outputs(facts.get("outputs", {}), facts)
    for name, part in facts.get("parts", {}).items():
        lines += [f"{name}: {line}" for line in _describe_outputs(part.get("outputs", {}), facts)]
    lines += [_describe_image(name, image) for name, image in facts.get("images", {}).items()]
    if "vm" in facts:
        lines.append(f"the library for TVM's virtual machine agrees with {facts['reference']}, too")
    if "reference_note" in facts:
        lines.append(f"{facts['reference_note']}; {facts['reference']} ran it instead")
    if "ran_on" in facts:
        lines.append(f"ran on {facts['ran_on']}")
    if "latency_not_measured" in facts:
        lines.append(f"latency is not measured: {facts['latency_not_measured']}")
    if facts["against"] == "none":
        lines.append("NOT VERIFIED against a reference (verify.against: none)")
    if "accuracy" in facts:
        reference = facts.get("reference_accuracy")
        compared = f" (the reference: {reference:.2%})" if reference is not None else ""
        count = count_text(facts["samples"], "held-out sample")
        lines.append(f"accuracy {facts['accuracy']:.2%} on {count}{compared}")
    return lines + _describe_latency(facts)


def _describe_outputs(outputs: Mapping[str, Facts], facts: Facts) -> list[str]:
    return [
        f"{name} agrees with {facts['reference']} on {count_text(facts['samples'], 'sample')} "
        f"(largest error: absolute {comparison['max_abs_error']:.2g}, relative {comparison['max_rel_error']:.2g}; "
        f"allowed: atol {comparison['atol']:.2g}, rtol {comparison['rtol']:.2g})"
        for name, comparison in outputs.items()
    ]


def _describe_image(name: str, comparison: Facts) -> str:
    if not comparison["against"]:
        return f"the preprocessing of {name} is not compared with Pillow's: Pillow is not installed"
    error, count = comparison["max_level_error"], count_text(comparison["images"], "image")
    how = f"up to {count_text(error, 'level')} of 255" if error else "bit for bit"
    return f"the preprocessing of {name} agrees with {comparison['against']} {how} on {count}"


def _describe_latency(facts: Facts) -> list[str]:
    names = {
        "library": "this library",
        "untuned": "untuned",
        "reference": facts.get("reference", ""),
    }
    measured = [(names[subject], row) for subject, row in facts.get("latency", {}).items()]
    for name, part in facts.get("parts", {}).items():
        measured += [(f"its part {name}", part["latency"])] if "latency" in part else []
    rows = [
        f"    {name:<24} {latency_text(row['median']):>9} {latency_text(row['mean']):>9} "
        f"{latency_text(row['min']):>9} {latency_text(row['max']):>9} {latency_text(row['std']):>9}"
        for name, row in measured
    ]
    head = f"    {'':<24} {'median':>9} {'mean':>9} {'min':>9} {'max':>9} {'std':>9}"
    table = ["latency of one call\n" + "\n".join([head, *rows])] if rows else []
    return table + _describe_speedup(facts.get("speedup")) + _describe_profile(facts.get("profile"))


def _describe_speedup(speedup: Speedup | None) -> list[str]:
    """Return the speedup over the untuned library; a tuned library that is slower stands out."""
    if speedup is None:
        return []
    warning = "SLOWER THAN UNTUNED: " if speedup["is_slower"] else ""
    pairs = count_text(speedup["pairs"], "pair")
    return [
        f"{warning}speedup over untuned {speedup['median']:.3g} "
        f"({speedup['low']:.3g} to {speedup['high']:.3g}, measured in turns, {pairs})"
    ]


def _describe_profile(profile: Profile | None) -> list[str]:
    """Return the kernels that no schedule rule fits, with their shares of the time."""
    shares = profile["without_rule"] if profile else {}
    if not shares:
        return []
    names = name_some([f"{name} {share:.1%}" for name, share in shares.items()])
    verb = "takes" if len(shares) == 1 else "take"
    return [
        f"{count_text(len(shares), 'kernel')} that no schedule rule fits {verb} "
        f"{sum(shares.values()):.1%} of the time: {names}"
    ]


def explain(facts: Facts) -> list[str]:
    """Return by how much outputs may differ from the reference's, and which rules the time is spent with."""
    lines = [_explain_tolerance(facts["tolerance"])] if "tolerance" in facts else []
    profile = facts.get("profile")
    if not profile:
        return lines
    rules = sorted(profile["rules"].items(), key=lambda entry: -entry[1])
    lines.append(
        f"time by schedule rule: {', '.join(f'{name} {share:.1%}' for name, share in rules)}"
    )
    if profile["without_rule"]:
        lines.append("kernels that no schedule rule fits")
        lines += [f"  {name} {share:.1%}" for name, share in profile["without_rule"].items()]
    return lines


def _explain_tolerance(tolerance: Facts) -> str:
    share = tolerance["of_largest"]
    more = f", or {share:.2%} of an output's largest value where that is more" if share else ""
    return (
        f"outputs may differ by atol {tolerance['atol']:g}{more}, and rtol {tolerance['rtol']:g} "
        f"(the model computes in {_ARITHMETIC_TEXTS[tolerance['for']]})"
    )
