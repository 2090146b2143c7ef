"""What a verdict says of a library without figures: the same bytes on each machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from tvmflow.core.types import Json
from tvmflow.stages.verify.verdict import LevelVerdict, OutputComparison, Verdict

# What the verdict on a library that passed says as it was measured.
_LASTING: Final = (
    "at",
    "draws_left_out",
    "exercises_not_observed",
    "index_inputs_not_compared",
    "random_inputs",
    "sizes_left_out",
    "unexercised",
)


def verdict_without_measurements(verdict: Verdict) -> Verdict:
    """Return what a verdict says of a library that passed, without figures of this machine and this run.

    Errors and accuracy are figures too: another CPU makes the reference compute in another order.
    """
    lasting: Verdict = {"passed": verdict["passed"], "against": verdict["against"]}
    if "gates" in verdict:
        lasting["gates"] = {
            name: {"limit": gate["limit"]} for name, gate in verdict["gates"].items()
        }
    if "reference" in verdict:
        lasting |= {
            "samples": verdict["samples"] - verdict.get("added_samples", 0),
            "reference": verdict["reference"],
            "tolerance": verdict["tolerance"],
            "outputs": _passed_outputs(verdict["outputs"]),
        }
        facts = cast(dict[str, Json], verdict)
        lasting |= cast(Verdict, {name: facts[name] for name in _LASTING if name in facts})
        if "index_inputs" in verdict:
            lasting["index_inputs"] = _passed_outputs(verdict["index_inputs"])
        if "sizes" in verdict:
            lasting["sizes"] = [
                {"sizes": entry["sizes"], "passed": entry["passed"]} for entry in verdict["sizes"]
            ]
        if "draws" in verdict:
            lasting["draws"] = [
                {"inputs": draw["inputs"], "passed": draw["passed"]} for draw in verdict["draws"]
            ]
        if "swept" in verdict:
            lasting["swept"] = verdict["swept"]
        if "levels" in verdict:
            lasting["levels"] = {
                name: {"not_verified": level["not_verified"]}
                if "not_verified" in level
                else _passed_level(level)
                for name, level in verdict["levels"].items()
            }
        if "deliveries" in verdict:
            lasting["deliveries"] = verdict["deliveries"]
        if "fallback" in verdict:
            lasting["fallback"] = {"outputs": _passed_outputs(verdict["fallback"]["outputs"])}
        if "vm" in verdict:
            lasting["vm"] = {"outputs": _passed_outputs(verdict["vm"]["outputs"])}
        parts = verdict.get("parts", {})
        if parts:
            lasting["parts"] = {
                name: {"outputs": _passed_outputs(part["outputs"])} for name, part in parts.items()
            }
    return lasting


def _passed_level(level: LevelVerdict) -> LevelVerdict:
    passed: LevelVerdict = {"outputs": _passed_outputs(level["outputs"])}
    if "index_inputs" in level:
        passed["index_inputs"] = _passed_outputs(level["index_inputs"])
    return passed


def _passed_outputs(outputs: Mapping[str, OutputComparison]) -> dict[str, OutputComparison]:
    passed: dict[str, OutputComparison] = {}
    for name, output in outputs.items():
        passed[name] = {"passed": output["passed"]}
        if "undetected" in output:
            passed[name]["undetected"] = output["undetected"]
        if "seen" in output:
            passed[name]["seen"] = output["seen"]
    return passed
