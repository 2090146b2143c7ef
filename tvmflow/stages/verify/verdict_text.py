"""Text for verdicts: reports, the reasons for a rejection, and warnings about weak checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Final, cast

from tvmflow.core.codec import Mismatch
from tvmflow.core.dimensions import sizes_text
from tvmflow.core.formatting import count_text, latency_text, size_text
from tvmflow.core.statistics import judge_ratio
from tvmflow.stages.base import KnownFacts, name_some
from tvmflow.stages.verify.verdict import (
    ANYTHING,
    ARITHMETIC_TEXTS,
    INPUTS,
    LATENCY,
    MEMORY,
    SIZE,
    SMALLEST_NORMAL,
    VERSUS,
    ZEROS,
    AllowedDifference,
    ComparedRuntime,
    GateResult,
    ImageComparison,
    IsaLevelVerdict,
    Latency,
    OutputComparison,
    Profile,
    ScaledSlice,
    SizeVerdict,
    Speedup,
    Verdict,
    compared_with,
    find_fixed_latency,
    largest_error,
    list_compared,
    list_measured,
    shown_latency,
    sort_sizes,
)
from tvmflow.stages.verify_settings import CheckSettings

_VM: Final = "the library for TVM's virtual machine"
_UNTUNED: Final = "untuned"
_REFERENCE: Final = "reference"
_LATENCY_COLUMNS: Final[tuple[str, ...]] = ("median", "mean", "min", "max", "std")


def describe(facts: Verdict, inputs: KnownFacts) -> list[str]:
    """Return lines about how outputs agree, the accuracy and the latencies."""
    try:
        return _describe(facts)
    except KeyError as error:
        raise Mismatch(f"{error.args[0]} missing") from error


def _describe(facts: Verdict) -> list[str]:
    if "not_run" in facts:
        return [f"NOT VERIFIED (verify.against: none): {facts['not_run']}"]
    lines = [f"WARNING: {warning}" for warning in facts.get("warnings", ())]
    lines += _describe_outputs(facts.get("outputs", {}), facts)
    lines += _describe_index_inputs(facts)
    lines += _describe_layers(facts)
    lines += _describe_sizes(facts)
    for name, part in facts.get("parts", {}).items():
        lines += [f"{name}: {line}" for line in _describe_outputs(part.get("outputs", {}), facts)]
    lines += [_describe_isa_level(name, level) for name, level in facts.get("levels", {}).items()]
    lines += [_describe_image(name, image) for name, image in facts.get("images", {}).items()]
    lines += _describe_deliveries(facts)
    if states := facts.get("states"):
        lines.append(
            f"{count_text(states['steps'], 'step')} with its states, the same bits as calls that are handed them, also "
            "after a fork, a truncation and a saved state"
        )
    if "vm" in facts:
        lines.append(f"{_VM} agrees with {compared_with(facts)}, too")
    if "random_inputs" in facts:
        lines.append(
            f"inputs are {facts['random_inputs']}: others did not reach every output, or gave no finite values"
        )
    if draws := [draw["inputs"] for draw in facts.get("draws", ()) if draw["passed"]]:
        lines.append(f"agrees with {compared_with(facts)} for {', '.join(draws)}, too")
    if "unexercised" in facts:
        lines.append(f"never exercised: {'; '.join(facts['unexercised'])}")
    if "reference_note" in facts:
        lines.append(facts["reference_note"])
    if "float_error" in facts:
        lines.append(
            f"differs from the float model ({facts['reference']}) by {facts['float_error']:.2%}"
        )
    if "ran_on" in facts:
        lines.append(f"ran on {facts['ran_on']}")
    if "fallback" in facts:
        lines.append(f"agrees with {compared_with(facts)} on {facts['fallback']['ran_on']}, too")
    if "latency_not_measured" in facts:
        lines.append(f"latency is not measured: {facts['latency_not_measured']}")
    if facts["against"] == "none":
        lines.append("NOT VERIFIED against a reference (verify.against: none)")
    if "accuracy" in facts:
        reference = facts.get("reference_accuracy")
        name = "the float model" if "float_error" in facts else "the reference"
        compared = f" ({name}: {reference:.2%})" if reference is not None else ""
        count = count_text(facts["samples"], "held-out sample")
        lines.append(f"accuracy {facts['accuracy']:.2%} on {count}{compared}")
    gates = facts.get("gates", {}).items()
    lines += [describe_gate(name, gate) for name, gate in gates if gate["state"] == "passed"]
    return lines + _describe_latency(facts)


def _describe_outputs(outputs: Mapping[str, OutputComparison], facts: Verdict) -> list[str]:
    return [
        f"{name} agrees with {compared_with(facts)} on {count_text(facts['samples'], 'sample')} "
        f"({', '.join(_describe_agreement(comparison))}; "
        f"allowed: atol {comparison['atol']:.2g}, rtol {comparison['rtol']:.2g})"
        for name, comparison in outputs.items()
    ]


def _describe_isa_level(name: str, level: IsaLevelVerdict) -> str:
    if "not_verified" in level:
        return f"NOT VERIFIED at the level {name}: {level['not_verified']}"
    error = largest_error(level)
    parts = [f"level {name} ran on {level['ran_on']}"]
    parts += [f"error {error:.2g}"] if error is not None else []
    parts += [latency_text(level["latency"]["median"])] if "latency" in level else []
    return ", ".join(parts)


def _describe_sizes(facts: Verdict) -> Iterator[str]:
    sizes = sort_sizes(facts)
    if sizes:
        width = max(len(sizes_text(entry["sizes"])) for entry in sizes)
        reference = facts.get("reference", "")
        has_fixed = any("fixed_speedup" in entry for entry in sizes)
        rows = [
            f"    {sizes_text(entry['sizes']):<{width}} {_size_error(entry):>13} "
            f"{_latency_cell(entry.get('latency_s')):>12} {_latency_cell(entry.get('reference_latency_s')):>12}"
            + f" {_latency_cell(find_fixed_latency(entry)):>13}"
            * has_fixed
            for entry in sizes
        ]
        head = (
            f"    {'':<{width}} {'largest error':>13} {'this library':>12} {'reference':>12}"
            + f" {'one size only':>13}" * has_fixed
        )
        yield "\n".join(
            [f"verified at {count_text(len(sizes), 'size')} against {reference}", head, *rows]
        )
        if has_fixed:
            yield _describe_beside_fixed(sizes)
    if "swept" in facts:
        yield f"outputs agree at {'; '.join(facts['swept']['coverage'])}"
    for sentence in facts.get("sizes_left_out", ()):
        yield f"WARNING: {sentence}"
    if "at" in facts:
        yield f"all other checks ran at {sizes_text(facts['at'])}"


def _describe_beside_fixed(sizes: Sequence[SizeVerdict]) -> str:
    """Return the latency of a dynamic-shape library relative to fixed-shape ones, over all sizes."""
    ratios = {
        sizes_text(entry["sizes"]): 1 / entry["fixed_speedup"]["median"]
        for entry in sizes
        if "fixed_speedup" in entry
    }
    slowest = max(ratios, key=lambda name: ratios[name])
    return (
        f"latency beside libraries of one size: {geometric_mean(ratios.values()):.2f} times as long "
        f"(geometric mean; most at {slowest}: {ratios[slowest]:.2f})"
    )


def _explain_exercises(facts: Verdict) -> Iterator[str]:
    yield from facts.get("draws_left_out", ())
    if "exercises_not_observed" in facts:
        yield f"{facts['exercises_not_observed']} does not say which branches of the model the inputs reach"
    if exercises := facts.get("exercises"):
        yield "branches that the inputs reach, by the mean share of elements"
        for operator in sorted({entry["operator"] for entry in exercises}):
            nodes = [entry["branches"] for entry in exercises if entry["operator"] == operator]
            names = dict.fromkeys(name for branches in nodes for name in branches)
            shares = {name: [b[name] for b in nodes if name in b] for name in names}
            text = ", ".join(
                f"{name} {fmean(each):.1%} ({min(each):.1%} to {max(each):.1%})"
                for name, each in shares.items()
            )
            yield f"  {count_text(len(nodes), operator, operator)}: {text}"


def _size_error(entry: SizeVerdict) -> str:
    """Return the largest error at some sizes, after `WRONG` if the check failed."""
    error = largest_error(entry)
    text = "" if error is None else f"{error:.2g}"
    return text if entry["passed"] else f"WRONG {text}".rstrip()


def _latency_cell(seconds: float | None) -> str:
    return "" if seconds is None else latency_text(seconds)


def _describe_index_inputs(facts: Verdict) -> Iterator[str]:
    for name, tensor in facts.get("index_inputs", {}).items():
        if not tensor["passed"]:
            continue
        where = (
            "the library has the same bits in its memory"
            if tensor["seen"]
            else "in a library of the same kernels that returns it: this one computes it within a larger kernel"
        )
        yield (
            f"{name}, the scores of an index, agrees with {compared_with(facts)} "
            f"({', '.join(_describe_agreement(tensor))}); {where}"
        )
    for name, output in facts.get("outputs", {}).items():
        if "classes" in output:
            ties = output.get("ties", 0)
            tie_text = f"; {count_text(ties, 'index')} of equal scores" if ties else ""
            yield f"{name} takes {output['reached']} of {output['classes']} possible values{tie_text}"


def _describe_deliveries(facts: Verdict) -> Iterator[str]:
    texts: dict[str, list[str]] = {}
    for output, delivery in facts.get("deliveries", {}).items():
        if "not_run" in delivery:
            yield f"{output} is not loaded as users do: {delivery['not_run']}"
        elif delivery["passed"]:
            how = "the same bits" if delivery["is_equal"] else "the same within the tolerance"
            texts.setdefault(how, []).append(output)
    for how, outputs in texts.items():
        yield f"loaded in new processes as users do, with another number of threads: {', '.join(outputs)} ({how})"


def _describe_layers(facts: Verdict) -> Iterator[str]:
    layers = facts.get("layers", {})
    if "not_compared" in layers:
        yield f"its layers are not compared by themselves: {layers['not_compared']}"
    elif layers.get("passed"):
        yield (
            f"each of {count_text(layers['tensors'], 'rounded tensor')}, computed from the tensors that {facts['reference']} gives, "
            f"agrees within {count_text(layers['max_steps'], 'step')} ({layers['differing']:.2%} of the elements differ)"
        )


def _describe_image(name: str, comparison: ImageComparison) -> str:
    if not comparison["against"]:
        return f"the preprocessing of {name} is not compared with Pillow's: Pillow is not installed"
    error, count = comparison["max_level_error"], count_text(comparison["images"], "image")
    how = f"up to {count_text(error, 'level')} of 255" if error else "bit for bit"
    return f"the preprocessing of {name} agrees with {comparison['against']} {how} on {count}"


def _describe_agreement(comparison: OutputComparison) -> Iterator[str]:
    yield (
        f"largest error: absolute {float(comparison['max_abs_error']):.2g}, "
        f"relative {float(comparison['max_rel_error']):.2g}"
    )
    if "error_of_largest" in comparison:
        yield f"{float(comparison['error_of_largest']):.2g} of the largest value"
    if "cosine_similarity" in comparison:
        yield f"cosine similarity {comparison['cosine_similarity']:.6f}"
    if "best_class_agreement" in comparison:
        yield f"same best class {comparison['best_class_agreement']:.1%}"


def _describe_latency(facts: Verdict) -> list[str]:
    names = {"library": "this library", _UNTUNED: _UNTUNED, _REFERENCE: facts.get("reference", "")}
    compared = facts.get("compared", {}).values()
    interleaved = {runtime["name"] for runtime in compared if "latency" in runtime}
    latency = facts.get("latency", {})
    speedups = {_UNTUNED: facts.get("speedup"), _REFERENCE: facts.get("reference_speedup")}
    measured = [
        (names.get(subject, subject), _scale_latency(row, latency, speedups.get(subject)))
        for subject, row in latency.items()
        if names.get(subject, subject) not in interleaved
    ]
    measured += [
        (runtime["name"], _scale_latency(runtime["latency"], latency, runtime["speedup"]))
        for runtime in compared
        if "latency" in runtime
    ]
    for name, part in facts.get("parts", {}).items():
        measured += [(f"its part {name}", part["latency"])] if "latency" in part else []
    lines = [("", _LATENCY_COLUMNS)]
    for name, row in measured:
        seconds = cast(dict[str, float], row)
        lines.append((name, tuple(latency_text(seconds[column]) for column in _LATENCY_COLUMNS)))
    rows = [f"    {name:<24} " + " ".join(f"{cell:>9}" for cell in cells) for name, cells in lines]
    table = ["latency of one call\n" + "\n".join(rows)] if measured else []
    return [
        *table,
        *(
            [_speedup_text(facts["reference_speedup"], facts["reference"])]
            if "reference_speedup" in facts
            else ()
        ),
        *(line for runtime in compared for line in _describe_compared(runtime, facts)),
        *(_describe_speedup(facts["speedup"]) if "speedup" in facts else ()),
        *(_describe_profile(facts["profile"]) if "profile" in facts else ()),
    ]


def _scale_latency(
    row: Latency, latency: Mapping[str, Latency], speedup: Speedup | None
) -> Latency:
    """Return the latency of a baseline, scaled to the library's shown latency."""
    if speedup is None or "library" not in latency or not row["median"]:
        return row
    scale = shown_latency(latency["library"]["median"], speedup) / row["median"]
    seconds = cast(dict[str, float], row)
    return cast(Latency, {name: seconds[name] * scale for name in _LATENCY_COLUMNS})


def _describe_compared(runtime: ComparedRuntime, facts: Verdict) -> Iterator[str]:
    """Yield the speedup over another runtime, or why it is unknown, and whether that runtime agrees."""
    if "not_timed" in runtime:
        yield f"{runtime['name']} is not timed: {runtime['not_timed']}"
        return
    yield _speedup_text(runtime["speedup"], runtime["name"])
    outputs = runtime.get("outputs", {}).values()
    is_reference = runtime["name"] == facts.get("reference")
    if outputs and not is_reference and all(output["passed"] for output in outputs):
        error = max(float(output["max_abs_error"]) for output in outputs)
        yield f"{runtime['name']} agrees with {facts['reference']}, too (largest error: {error:.2g})"


def _describe_speedup(speedup: Speedup) -> Iterator[str]:
    text = _speedup_text(speedup, _UNTUNED)
    if speedup["is_slower"]:
        text = f"SLOWER THAN UNTUNED: {text}; `--minutes 0` delivers the untuned library"
    yield text


def _speedup_text(speedup: Speedup, subject: str) -> str:
    median, low, high = speedup["median"], speedup["low"], speedup["high"]
    limits = f"{low:.3g} to {high:.3g}, interleaved, {count_text(speedup['pairs'], 'pair')}"
    if judge_ratio(median, low, high) == "unclear":
        return f"the machine was too noisy for the speedup over {subject} ({limits})"
    return f"speedup over {subject} {median:.3g} ({limits})"


def _describe_profile(profile: Profile) -> Iterator[str]:
    if shares := profile["without_rule"]:
        names = name_some([f"{name} {share:.1%}" for name, share in shares.items()])
        verb = "takes" if len(shares) == 1 else "take"
        yield (
            f"{count_text(len(shares), 'kernel')} that no schedule rule fits {verb} "
            f"{sum(shares.values()):.1%} of the time: {names}"
        )


def explain(facts: Verdict) -> list[str]:
    """Return lines with the tolerance, the reached branches, and the share of time of each rule."""
    lines = [*_explain_tolerance(facts["tolerance"])] if "tolerance" in facts else []
    lines += _explain_exercises(facts)
    profile = facts.get("profile")
    if not profile:
        return lines
    rules = sorted(profile["rules"].items(), key=lambda entry: -entry[1])
    if "between_kernels" in profile:
        rules.append(("between kernels", profile["between_kernels"]))
    rounds = f" ({count_text(profile['rounds'], 'round')} of calls)" if "rounds" in profile else ""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in rules)
    lines.append(f"time by schedule rule{rounds}: {shares}")
    if profile["without_rule"]:
        lines.append("kernels that no schedule rule fits")
        lines += [f"  {name} {share:.1%}" for name, share in profile["without_rule"].items()]
    return lines


def _explain_tolerance(tolerance: AllowedDifference) -> Iterator[str]:
    shares = {
        "an output's largest value": tolerance.get("of_largest"),
        "the largest value of its rows, columns or channels": tolerance.get("of_slice"),
    }
    texts = "".join(f", or {share:.2%} of {text}" for text, share in shares.items() if share)
    more = f"{texts} where that is more" if texts else ""
    yield (
        f"outputs may differ by atol {tolerance['atol']:.2g}{more}, and rtol {tolerance['rtol']:g} "
        f"(the model computes in {ARITHMETIC_TEXTS.get(tolerance['for'], tolerance['for'])})"
    )
    rms, scale = tolerance.get("rms"), tolerance.get("scale")
    limits = [f"{rms:.2%} (root mean square of errors)"] if rms else []
    limits += [f"{scale:.2%} in scale"] if scale else []
    if limits:
        yield f"an output as a whole may differ by {' and by '.join(limits)}"


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
# A wrong tail fails at many sizes: name no more than this many.
_MAX_SWEPT: Final = 3
_INPUTS_ADVICE: Final = "give inputs that the model is made for (inputs.NAME.range, verify.data)"


def list_failures(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return a sentence for each failed check of a library, its parts and variants."""
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
    vm = verdict.get("vm", {})
    for name, other in (("the package as WebAssembly", verdict.get("fallback", {})), (_VM, vm)):
        mismatches = list_mismatches(other.get("outputs", {}), reference)
        failures += [f"{name}: {mismatch}" for mismatch in mismatches]
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
    if failure := verdict.get("states", {}).get("failure"):
        failures.append(f"its states are wrong: {failure}")
    failures += [f"{_VM}: {wrong}" for wrong in _list_wrong_sizes(vm.get("sizes", ()), reference)]
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


def _list_wrong_index_inputs(verdict: Verdict | IsaLevelVerdict, reference: str) -> Iterator[str]:
    for name, tensor in verdict.get("index_inputs", {}).items():
        subject = _index_input(name)
        if tensor.get("is_missing"):
            yield (
                f"{subject} is not in the library's memory as the same kernels compute it in a library that returns it"
            )
        else:
            yield from list_mismatches({name: tensor}, reference, subject)


def _list_wrong_sizes(sizes: Iterable[SizeVerdict], reference: str) -> Iterator[str]:
    for entry in sizes:
        where = sizes_text(entry["sizes"])
        if "failure" in entry:
            yield f"fails at {where}: {entry['failure']}"
        for mismatch in list_mismatches(entry.get("outputs", {}), reference):
            yield f"wrong at {where}: {mismatch}"
        if not entry.get("is_repeatable", True):
            yield f"wrong at {where}: the library computes other bits after calls with other sizes, or with another number of threads"


def _list_wrong_deliveries(verdict: Verdict) -> Iterator[str]:
    for output, delivery in verdict.get("deliveries", {}).items():
        if delivery["passed"]:
            continue
        mismatches = list_mismatches(delivery.get("outputs", {}), "the verified library")
        reason = delivery.get("failure") or "; ".join(mismatches) or "it computes other values"
        yield f"the output '{output}', loaded in a new process as users do: {reason}"


def _list_wrong_draws(verdict: Verdict, reference: str) -> Iterator[str]:
    for entry in verdict.get("draws", ()):
        if "failure" in entry:
            yield f"fails for {entry['inputs']}: {entry['failure']}"
        for mismatch in list_mismatches(entry.get("outputs", {}), reference):
            yield f"wrong for {entry['inputs']}: {mismatch}"
        for name, scaled in entry.get("scaled", {}).items():
            yield f"wrong for {entry['inputs']}: output '{name}': {_describe_scaled(scaled)} {reference} gives"


def _list_wrong_layers(verdict: Verdict | IsaLevelVerdict, reference: str) -> Iterator[str]:
    layers = verdict.get("layers", {})
    if not layers.get("is_reproduced", True):
        yield "the library's values differ from those of the same kernels compiled once more"
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
    """Return remedies for a rejected library; tolerances are suggested only if outputs differ."""
    others = (*verdict.get("parts", {}).values(), verdict.get("vm", {}), *verdict.get("draws", ()))
    outputs = list_compared(*list_measured(verdict), *others)
    differs = any(not output["passed"] for output in outputs)
    tolerances = "set verify.rtol and verify.atol only if the difference is benign"
    figures = "all measured values are in the delivered verify.json"
    remedies = [*_list_remedies(verdict), figures, *([tolerances] if differs else [])]
    return "; ".join(remedies)


def _list_image_mismatches(images: Mapping[str, ImageComparison]) -> list[str]:
    return [
        f"the preprocessing of '{name}' differs from that by {comparison['against']} by "
        f"{comparison['max_level_error']} of 255 levels"
        for name, comparison in images.items()
        if not comparison["passed"]
    ]


def list_warnings(verdict: Verdict, checks: CheckSettings) -> list[str]:
    """Return warnings: undetectable errors, indices not compared, runtimes that differ, close gates."""
    undetected = _list_undetected(verdict) if verdict["passed"] else ()
    return [
        *(f"{sentence}: {_advice(checks)}" for sentence in undetected),
        *_list_unchecked_indices(verdict),
        *_list_differing_runtimes(verdict),
        *(
            f"{describe_gate(gate, result)}, which passes"
            for gate, result in verdict.get("gates", {}).items()
            if result["state"] == "within the noise"
        ),
    ]


def _list_unchecked_indices(verdict: Verdict) -> Iterator[str]:
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
        f"the scores of {subject} are not compared, so that a wrong library could go undetected: {reason}"
    )


def _list_differing_runtimes(verdict: Verdict) -> Iterator[str]:
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
    named = [(f"output '{name}'", output) for name, output in verdict.get("outputs", {}).items()]
    named += [(_index_input(name), t) for name, t in verdict.get("index_inputs", {}).items()]
    for subject, comparison in named:
        if "undetected" in comparison:
            yield f"{subject} {_describe_undetected(comparison)}"


def _index_input(name: str) -> str:
    return f"'{name}' (the scores of an index)"


def _describe_undetected(comparison: OutputComparison) -> str:
    """Return why comparing an output could miss a wrong library: `is so small that zeros would pass`."""
    if "reached" in comparison and comparison["undetected"] == ZEROS:
        return _ZERO_INDEX_TEXT
    text, allowed = _UNDETECTED_TEXTS[comparison["undetected"]], comparison["atol"]
    if comparison["undetected"] != ZEROS or not allowed:
        return text
    return _SUBNORMAL_TEXT if allowed <= SMALLEST_NORMAL else f"{text} (atol {allowed:.2g})"


def _is_nothing_compared(verdict: Verdict, checks: CheckSettings) -> bool:
    """Return whether zeros would pass for every output with the default tolerance."""
    outputs = list_compared(verdict)
    # index outputs do not count, because a right classifier may choose class 0 for each input
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
    """Return a sentence for each output that does not match; `subject` replaces the output's name."""
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


# ---------------------------------------------------------------- gates

_FASTER: Final = "a longer search finds faster kernels (tune.trials); `tvmflow show kernels` lists the slowest kernels"
_SMALLER: Final = "weights take less with `quantize` or kernels.precision"
_REMEDIES: Final[Mapping[str, str]] = {
    LATENCY: _FASTER,
    VERSUS: _FASTER,
    MEMORY: _SMALLER,
    SIZE: _SMALLER,
}


def amount_text(gate: str, amount: float) -> str:
    """Format a limit or a measured value in the unit of its gate."""
    if gate == LATENCY:
        return latency_text(amount)
    return size_text(amount) if gate in (MEMORY, SIZE) else f"{amount:.3g}"


def describe_gate(gate: str, result: GateResult) -> str:
    """Return the measured value of a gate, with its limit."""
    limit = f"verify.{gate} {amount_text(gate, result['limit'])}"
    if result["state"] == "not measured":
        return f"{limit} is not measured: {result['note']}"
    subject = _SUBJECTS.get(gate) or f"latency relative to {result['note']}"
    notes = [result["note"]] if gate == MEMORY else []
    if "count" in result:
        low, high = (amount_text(gate, end) for end in (result["low"], result["high"]))
        times = count_text(result["count"], "pair" if gate.startswith(VERSUS) else "repeat")
        notes.append(f"{low} to {high}, {times}")
    figure = amount_text(gate, result["value"]) + (f" ({', '.join(notes)})" if notes else "")
    verb = {"failed": "above", "passed": "within", "within the noise": "within the noise of"}[
        result["state"]
    ]
    return f"{subject} {figure} is {verb} {limit}"


_SUBJECTS: Final[Mapping[str, str]] = {
    LATENCY: "latency",
    MEMORY: "memory",
    SIZE: "the library's size",
}


def list_gates(verdict: Verdict) -> Iterator[tuple[str, str, str, str]]:
    """Yield the field, the limit, the measured value and the state of each gate, for tables."""
    for gate, result in verdict.get("gates", {}).items():
        value = amount_text(gate, result["value"]) if "value" in result else "–"
        yield f"verify.{gate}", amount_text(gate, result["limit"]), value, result["state"]


def list_exceeded(verdict: Verdict) -> list[str]:
    """Return a sentence for every gate that is exceeded or not measured."""
    return [
        describe_gate(gate, result)
        for gate, result in verdict.get("gates", {}).items()
        if result["state"] in ("failed", "not measured")
    ]


def _list_remedies(verdict: Verdict) -> Iterator[str]:
    gates = verdict.get("gates", {})
    failed = [gate.partition(".")[0] for gate in gates if gates[gate]["state"] == "failed"]
    yield from dict.fromkeys(_REMEDIES[gate] for gate in failed)
    if any(result["state"] == "not measured" for result in gates.values()):
        yield "leave a gate out where nothing measures it"
    elif failed:
        yield "or raise the limit"
