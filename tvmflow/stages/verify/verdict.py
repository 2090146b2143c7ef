"""The types of a verdict (facts, `measurements.json`); `verdict.json` omits measured values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypedDict, cast

from tvmflow.core.types import Json

# The arithmetic of a model, which determines its tolerance.
FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
FLOAT16_SUMS: Final = "float16 sums"
BFLOAT16: Final = "bfloat16"
INT8_STATES: Final = "int8 states"
QUANTIZED: Final = "quantized"
ARITHMETIC_TEXTS: Final[Mapping[str, str]] = {
    FLOAT32: "float32",
    FLOAT16: "float16, entirely or in part",
    FLOAT16_SUMS: "float16, with sums in float16",
    BFLOAT16: "bfloat16",
    INT8_STATES: "float32, with states of int8",
    QUANTIZED: "quantized integers",
}
SMALLEST_NORMAL: Final = 2.0**-126
"""The smallest normal float32 value: CPUs may flush smaller values to 0."""

ZEROS: Final = "zeros"
"""An output of only zeros would pass the check."""
INPUTS: Final = "inputs"
"""The output of one batch would pass for every batch, so a library that ignores its inputs would pass."""
ANYTHING: Final = "anything"
"""The output is empty in every batch, so any library would pass."""


class _Seconds(TypedDict):
    mean: float
    median: float
    min: float
    max: float
    std: float


class Latency(_Seconds, total=False):
    """Statistics of the seconds per call, over the `repeats` of a measurement."""

    repeats: int


class Speedup(TypedDict):
    """The speedup of the library over a baseline, such as the untuned model, measured interleaved.

    `median` is of `pairs` pairs, and `low` and `high` are its confidence interval. `is_slower` means that the
    library is slower beyond the noise.
    """

    median: float
    low: float
    high: float
    pairs: int
    is_slower: bool


def shown_latency(library_s: float, speedup: Speedup) -> float:
    """Return the seconds to show for the baseline: the library's seconds times the measured ratio.

    The interleaved ratio does not depend on other load on the machine, unlike medians of separate measurements.
    """
    return library_s * speedup["median"]


class _Shares(TypedDict):
    kernels: dict[str, float]
    rules: dict[str, float]
    without_rule: dict[str, float]


class Profile(_Shares, total=False):
    """The shares of kernels in the library's latency, from the median seconds of several rounds.

    `kernels` holds the share of each kernel, the largest first, `rules` the share of each schedule rule, and
    `without_rule` the share of each kernel without a schedule rule. `between_kernels` is the remaining share of the
    call.
    """

    between_kernels: float
    rounds: int


_Limits = TypedDict("_Limits", {"for": str, "rtol": float, "atol": float})


class AllowedDifference(_Limits, total=False):
    """The tolerance of a verdict (see `comparison.Tolerance`), and the arithmetic it is `for`."""

    of_largest: float
    of_slice: float
    step: float
    rms: float | None
    scale: float | None
    exact_integers: bool


class ScaledSlice(TypedDict):
    """A slice of a tensor along an axis whose values are the reference's times `scale`."""

    axis: int
    index: int
    scale: float


class OutputComparison(TypedDict, total=False):
    """The comparison of an output with the reference's; infinity and NaN are text, which JSON lacks.

    Attributes:
        shape: The actual and the expected shape if they differ; no other field is present then.
        incomparable: Why the reference's output cannot be compared with; no other field is present then.
        atol: The absolute tolerance; the largest one if elements have different ones.
        max_rel_error_above_atol: The largest relative error of the elements whose error exceeds atol.
        error_of_largest: The largest absolute error, relative to the output's largest absolute value.
        rms_error: The root mean square error, relative to the root mean square of the output.
        cosine_similarity: The cosine similarity of both outputs as vectors; absent if one is zero.
        scale: The least-squares factor from the reference's output to the library's.
        best_class_agreement: The share of samples with the same argmax; only for scores of classes.
        exceeded: The exceeded limits on all elements together, by name: `rms`, `scale`.
        worst: The index and both values of the mismatched element with the largest error.
        undetected: A wrong library that would pass: it returns `zeros`, ignores its `inputs`, or returns `anything`.
        classes: The number of values that an index can have.
        reached: The number of different indices that the samples give.
        ties: The number of indices that differ only because their scores are equal within errors.
        seen: Whether the delivered library has this argmax input in its memory, bit for bit.
        is_missing: Whether the delivered library lacks it, although it computes the tensor with the same kernels.
    """

    passed: bool
    shape: str
    incomparable: str
    rtol: float
    atol: float
    max_abs_error: float | str
    max_rel_error: float | str
    max_rel_error_above_atol: float | str
    error_of_largest: float | str
    rms_error: float | str
    cosine_similarity: float
    scale: float
    best_class_agreement: float
    elements: int
    mismatched: int
    exceeded: dict[str, float]
    scaled_slice: ScaledSlice
    worst: dict[str, Json]
    undetected: str
    classes: int
    reached: int
    ties: int
    seen: bool
    is_missing: bool


def largest(values: Iterable[float | str]) -> float | None:
    """Return the largest value; None if there is none, or if one is infinite or NaN (possibly as text)."""
    floats = list(map(float, values))
    return max(floats) if floats and all(map(math.isfinite, floats)) else None


class LayersComparison(TypedDict, total=False):
    """The rounded tensors of a quantized model, each computed from the reference's tensors before it.

    Attributes:
        tensors: The number of tensors.
        max_steps: The largest error of an element in quantization steps.
        differing: The share of elements with an error.
        allowed_steps: The allowed error of an element in quantization steps.
        wrong: Tensors above the allowed error, by name: the error in steps, and the number of elements.
        scaled: Tensors with a scaled channel, by name.
        outputs: The float outputs, computed from the reference's last rounded tensors.
        is_reproduced: Whether compiling the same kernels again gives the same bits as the library.
        not_compared: Why layers are not compared. If present, `passed` is the only other field.
    """

    passed: bool
    tensors: int
    max_steps: int
    differing: float
    allowed_steps: int
    wrong: dict[str, dict[str, int]]
    scaled: dict[str, ScaledSlice]
    outputs: dict[str, OutputComparison]
    is_reproduced: bool
    not_compared: str


class CallVerdict(TypedDict, total=False):
    """The verdict on one call of a library; `failure` replaces `outputs` if the call fails."""

    passed: bool
    outputs: dict[str, OutputComparison]
    failure: str


class SizeVerdict(CallVerdict, total=False):
    """The verdict on a library at some sizes of its dimensions, on random inputs.

    Attributes:
        is_repeatable: False if results change after calls with other sizes or with other threads; absent otherwise.
        latency_s: Seconds per call; absent if the library cannot be timed.
        fixed_speedup: The speedup over an untuned fixed-shape library, if it was measured.
    """

    sizes: dict[str, int]
    is_repeatable: bool
    latency_s: float
    reference_latency_s: float
    fixed_speedup: Speedup


class DrawVerdict(CallVerdict, total=False):
    """The verdict on additional random inputs, and the outputs with a scaled channel."""

    inputs: str
    scaled: dict[str, ScaledSlice]


class Exercise(TypedDict):
    """The share of elements in each branch of a piecewise operator, in the reference."""

    node: str
    operator: str
    branches: dict[str, float]


class SweepVerdict(TypedDict):
    """The verdict on a library at many sizes, at which only outputs are compared.

    Attributes:
        coverage: The covered sizes of each dimension.
        failed: The verdict at each size where it is wrong.
    """

    coverage: list[str]
    failed: list[SizeVerdict]


class _Named(TypedDict):
    name: str


class ComparedRuntime(_Named, total=False):
    """Another runtime, compared with the reference and measured interleaved with the library.

    Attributes:
        outputs: Its outputs in timed calls, compared with the reference's; absent without a reference.
        library: The latency of the library in the same interleaved measurement.
        speedup: The speedup of the library over this runtime.
        not_timed: Why it was not timed. If present, `name` is the only other field.
    """

    outputs: dict[str, OutputComparison]
    latency: Latency
    library: Latency
    speedup: Speedup
    not_timed: str


# The gates of a recipe: fields of `verify`.
LATENCY: Final = "max_latency"
MEMORY: Final = "max_memory"
SIZE: Final = "max_size"
VERSUS: Final = "max_vs"


GateState = Literal["passed", "failed", "within the noise", "not measured"]


class GateResult(TypedDict, total=False):
    """A limit of the recipe and the measured value, in seconds, bytes, or as a ratio.

    Attributes:
        value: The measured value; the median if it varies.
        low: The lower limit of its confidence interval.
        high: The upper limit.
        count: The number of measurements; absent if the value does not vary.
        state: `passed`, `failed`, `within the noise` of the limit (passes), or `not measured` (fails).
        note: What the memory consists of, the compared runtime, or why it is not measured.
    """

    limit: float
    value: float
    low: float
    high: float
    count: int
    state: GateState
    note: str


class ImageComparison(TypedDict):
    """Image preprocessing compared with Pillow's; `against` is empty if Pillow is not installed."""

    passed: bool
    against: str
    images: int
    max_level_error: int


class PartVerdict(TypedDict, total=False):
    """The verdict on a part of a model, or on a second library such as the one for TVM's VM."""

    outputs: dict[str, OutputComparison]
    latency: Latency
    sizes: list[SizeVerdict]


class _Passed(TypedDict):
    passed: bool


class DeliveryVerdict(_Passed, total=False):
    """The verdict on an output loaded in a new process, as users do, and run on a verified sample.

    Attributes:
        is_equal: Whether it computes the same bits as the verified library; absent if it is not run.
        outputs: The comparison of each output with the verified library's if bits differ.
        failure: The reason why it cannot be loaded or called.
        not_run: The reason why no process on this machine can load it.
    """

    is_equal: bool
    outputs: dict[str, OutputComparison]
    failure: str
    not_run: str


class _Steps(_Passed):
    steps: int
    length: int


class StatesVerdict(_Steps, total=False):
    """The verdict on `steps` session steps, compared with calls that take the states as inputs.

    `length` is the length of growing states after these steps; `failure` is the problem, if any.
    """

    failure: str


class IsaLevelVerdict(TypedDict, total=False):
    """The verdict on the code for one ISA level; `sizes` holds only sizes with wrong results."""

    ran_on: str
    outputs: dict[str, OutputComparison]
    index_inputs: dict[str, OutputComparison]
    layers: LayersComparison
    latency: Latency
    sizes: list[SizeVerdict]
    not_verified: str


class _Judged(TypedDict):
    passed: bool
    against: str


class Verdict(_Judged, total=False):
    """The results of all checks of a library, and whether it passes.

    Attributes:
        samples: The number of samples or random batches.
        added_samples: The number of samples added at the end to reach more values of an index.
        random_inputs: The distribution of random inputs; absent for the usual one.
        reference_note: The reason why the reference is not the framework itself.
        index_inputs: The comparisons of argmax inputs.
        layers: The comparison of layers; present if a quantized model's outputs differ too much to detect a wrong
            layer.
        vm: The verdict on the library for TVM's virtual machine, if some outputs are made from it.
        fallback: The verdict on the code for browsers without WebGPU.
        float_error: The root mean square difference from the float model's outputs, relative to their root mean square.
        ran_on: The machine or emulator that ran the library; absent for this process.
        latency: The latencies of the `library`, of the `untuned` model, and of the `reference`.
        compared: Other runtimes, by their names in a recipe.
        at: The tuning sizes, at which everything is verified; `sizes` and `swept` hold further sizes.
        sizes_left_out: A sentence for each combination of sizes that is too large to verify.
        threads: For each other thread count, whether the bits are the same.
        draws_left_out: A sentence for each useless draw.
        exercises_not_observed: The name of the reference, if it cannot observe branches.
        unexercised: A phrase for each branch that no input reaches.
    """

    samples: int
    added_samples: int
    random_inputs: str
    reference: str
    reference_note: str
    tolerance: AllowedDifference
    outputs: dict[str, OutputComparison]
    index_inputs: dict[str, OutputComparison]
    index_inputs_not_compared: str
    layers: LayersComparison
    images: dict[str, ImageComparison]
    parts: dict[str, PartVerdict]
    vm: PartVerdict
    fallback: IsaLevelVerdict
    accuracy: float
    reference_accuracy: float
    float_error: float
    ran_on: str
    latency: dict[str, Latency]
    speedup: Speedup
    reference_speedup: Speedup
    compared: dict[str, ComparedRuntime]
    profile: Profile
    latency_not_measured: str
    not_run: str
    at: dict[str, int]
    sizes: list[SizeVerdict]
    sizes_left_out: list[str]
    swept: SweepVerdict
    levels: dict[str, IsaLevelVerdict]
    deliveries: dict[str, DeliveryVerdict]
    states: StatesVerdict
    draws: list[DrawVerdict]
    draws_left_out: list[str]
    threads: dict[str, bool]
    exercises: list[Exercise]
    exercises_not_observed: str
    unexercised: list[str]
    gates: dict[str, GateResult]
    failures: list[str]
    warnings: list[str]


def list_compared(*verdicts: Mapping[str, Any]) -> list[OutputComparison]:
    """Return the comparisons of all outputs and argmax inputs in some verdicts."""
    return [
        comparison
        for verdict in verdicts
        for field in ("outputs", "index_inputs")
        for comparison in verdict.get(field, {}).values()
    ]


def list_measured(verdict: Verdict) -> list[Mapping[str, Any]]:
    """Return a verdict and the verdicts in it on sizes, ISA levels and a fallback."""
    others = (*verdict.get("sizes", ()), *verdict.get("levels", {}).values())
    return [verdict, *others, verdict.get("fallback", {})]


def largest_error(*verdicts: Mapping[str, Any]) -> float | None:
    """Return the largest absolute error in some verdicts; None if an output has no finite error."""
    return largest(output.get("max_abs_error", math.nan) for output in list_compared(*verdicts))


def sort_sizes(verdict: Verdict) -> list[SizeVerdict]:
    """Return the verdicts on all sizes, sorted by size."""
    return sorted(verdict.get("sizes", ()), key=lambda entry: [*entry["sizes"].values()])


def find_fixed_latency(entry: SizeVerdict) -> float | None:
    """Return the seconds per call of the fixed-shape library; None if it was not measured."""
    speedup = entry.get("fixed_speedup")
    return shown_latency(entry["latency_s"], speedup) if speedup else None


QUANTIZED_MODEL: Final = "the quantized model"


def compared_with(verdict: Verdict) -> str:
    """Return the name of the reference that outputs were compared with; may be empty."""
    return QUANTIZED_MODEL if "float_error" in verdict else verdict.get("reference", "")


# The fields that verdict.json keeps if a library passed. True keeps a value unchanged; "*" stands for each value of
# a mapping or list.
_OUTPUTS: Final = {"*": {"passed": True, "undetected": True, "seen": True}}
_LEVEL: Final = {"outputs": _OUTPUTS, "index_inputs": _OUTPUTS, "not_verified": True}
_ALWAYS: Final = {"passed": True, "against": True, "gates": {"*": {"limit": True}}}
_WITH_REFERENCE: Final = {
    **_ALWAYS,
    "samples": True,
    "reference": True,
    "tolerance": True,
    "at": True,
    "draws_left_out": True,
    "exercises_not_observed": True,
    "index_inputs_not_compared": True,
    "random_inputs": True,
    "sizes_left_out": True,
    "unexercised": True,
    "swept": True,
    "deliveries": True,
    "states": True,
    "outputs": _OUTPUTS,
    "index_inputs": _OUTPUTS,
    "sizes": {"*": {"sizes": True, "passed": True}},
    "draws": {"*": {"inputs": True, "passed": True}},
    "levels": {"*": _LEVEL},
    "fallback": {"outputs": _OUTPUTS},
    "vm": {"outputs": _OUTPUTS},
    "parts": {"*": {"outputs": _OUTPUTS}},
}


def verdict_without_measurements(verdict: Verdict) -> Verdict:
    """Return a passed verdict without the values that depend on the machine or the run.

    Errors and accuracy are such values, because the reference accumulates in another order on another CPU.
    """
    lasting = _select(verdict, _WITH_REFERENCE if "reference" in verdict else _ALWAYS)
    if "samples" in lasting:
        lasting["samples"] -= verdict.get("added_samples", 0)
    return cast(Verdict, lasting)


def _select(value: Any, kept: Any) -> Any:
    if kept is True:
        return value
    if isinstance(value, list):
        return [_select(entry, kept["*"]) for entry in value]
    return {
        name: _select(inner, kept.get(name) or kept["*"])
        for name, inner in value.items()
        if name in kept or "*" in kept
    }
