"""The verdict of `verify`: `measurements.json` and the facts; `verdict.json` leaves figures out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypedDict, cast

from tvmflow.core.types import Json


class _Seconds(TypedDict):
    mean: float
    median: float
    min: float
    max: float
    std: float


class Latency(_Seconds, total=False):
    """Seconds of one call: over the repeats of a measurement, and how many these were."""

    repeats: int


class Speedup(TypedDict):
    """The speed of the library relative to something else (the same model untuned), interleaved.

    `low` and `high` are the limits of the `median` of `pairs` turns; `is_slower` says that the library
    is slower beyond the noise.
    """

    median: float
    low: float
    high: float
    pairs: int
    is_slower: bool


def shown_latency(library_s: float, speedup: Speedup) -> float:
    """Return the seconds of a peer, scaled to the library's shown latency.

    The interleaved ratio holds whatever else the machine did; medians of different measurements need not
    have that ratio, so the shown latency is the library's times the speedup.
    """
    return library_s * speedup["median"]


class _Shares(TypedDict):
    kernels: dict[str, float]
    rules: dict[str, float]
    without_rule: dict[str, float]


class Profile(_Shares, total=False):
    """The shares of kernels in the time of a call of the library, which is its latency.

    `kernels` has the share of each kernel, the largest first; `rules` that of each schedule rule,
    `without_rule` that of each kernel that no rule fits; `between_kernels` is the rest of the call:
    in a result of an earlier version, kernels have shares of all kernels, with nothing between them.
    Shares are those of the median seconds of `rounds`, each of some calls.
    """

    between_kernels: float
    rounds: int


_Limits = TypedDict("_Limits", {"for": str, "rtol": float, "atol": float})


class AllowedDifference(_Limits, total=False):
    """The tolerance of a verdict (see `comparison.Tolerance`), and the arithmetic that it is `for`."""

    of_largest: float
    of_slice: float
    step: float
    rms: float | None
    scale: float | None
    exact_integers: bool


class ScaledSlice(TypedDict):
    """A slice of a tensor along an axis whose values are those of the reference times `scale`."""

    axis: int
    index: int
    scale: float


class OutputComparison(TypedDict, total=False):
    """An output compared with the reference's: errors, and the absolute tolerance.

    `shape` is the problem of a shape, `incomparable` that of the reference's output; nothing
    else is there then. Numbers that JSON lacks are text.

    Attributes:
        shape: The shape that it has, and the one that it should have.
        incomparable: The problem of the reference's output.
        rtol: The relative tolerance of an element.
        atol: The absolute tolerance of an element; the largest, where elements differ in it.
        max_abs_error: The largest absolute error of an element.
        max_rel_error: The largest relative error.
        max_rel_error_above_atol: The largest relative error of the elements whose error exceeds atol.
        error_of_largest: The largest absolute error, relative to the output's largest absolute value.
        rms_error: The root mean square of all errors, relative to that of the output.
        cosine_similarity: That of both outputs as vectors; absent where one is zero.
        scale: The factor that brings the reference's output closest to the library's (least squares).
        best_class_agreement: The share of samples with the same largest element; only for lists of scores.
        exceeded: The limits for all elements together that are exceeded: `rms`, `scale`.
        scaled_slice: A slice along an axis, such as a channel, that is scaled.
        worst: The index of the element with the largest error that is out of tolerance, and both values.
        undetected: Possible undetected faults of a library: return `zeros`, ignore its `inputs`, or `anything`.
        classes: For an index: how many elements it is one of.
        reached: For an index: how many different ones the samples reach.
        ties: The number of indices that differ where the library's scores are equal within their errors.
        seen: For a tensor that goes into an index, as a library of the same kernels computes it that
            returns it: the delivered library has the same bits in its memory.
        is_missing: It has not, though it computes the tensor with the same kernels.
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
    """Return the largest of some values of outputs; None when not all are finite, which are text in JSON."""
    numbers = list(map(float, values))
    return max(numbers) if numbers and all(map(math.isfinite, numbers)) else None


class LayersComparison(TypedDict, total=False):
    """The rounded tensors of a quantized model, each computed from those of the reference before it.

    Attributes:
        tensors: How many there are.
        max_steps: The largest error of an element in quantization steps.
        differing: The share of elements with an error.
        allowed_steps: The allowed error of an element in quantization steps.
        wrong: Tensors above the allowed error, by name: the error in steps, and the number of elements.
        scaled: Tensors with a scaled channel, by name.
        outputs: The outputs, computed from the last of these tensors.
        is_reproduced: The library computes the same bits as the same kernels compiled again.
        not_compared: Why they are not compared; nothing else is there then.
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
    """The verdict on one call of a library.

    Attributes:
        passed: All outputs agree with the reference's.
        failure: Why the library cannot be called; no outputs are there then.
    """

    passed: bool
    outputs: dict[str, OutputComparison]
    failure: str


class SizeVerdict(CallVerdict, total=False):
    """The verdict on a library at some sizes of its dimensions, on random inputs.

    Attributes:
        is_repeatable: It computes the same bits after calls with other sizes; absent where it does.
        latency_s: Seconds of a call; absent where the library cannot be timed.
        reference_latency_s: Those of the reference.
        fixed_speedup: The speed relative to an untuned fixed-shape library, if there was one.
    """

    sizes: dict[str, int]
    is_repeatable: bool
    latency_s: float
    reference_latency_s: float
    fixed_speedup: Speedup


class DrawVerdict(CallVerdict, total=False):
    """The verdict on a library for a batch of random inputs beside the usual ones.

    Attributes:
        scaled: The outputs with a scaled channel, over many batches together.
    """

    inputs: str
    scaled: dict[str, ScaledSlice]


class Exercise(TypedDict):
    """The branches of a node that computes piecewise, as the reference takes them.

    Attributes:
        branches: The share of elements that take each branch, over all inputs; 0 if none does.
    """

    node: str
    operator: str
    branches: dict[str, float]


class SweepVerdict(TypedDict):
    """The verdict on a library at many sizes, where only outputs are compared.

    Attributes:
        coverage: Which of the sizes of each dimension these are.
        failed: The verdict at each size where it is wrong.
    """

    coverage: list[str]
    failed: list[SizeVerdict]


class _Named(TypedDict):
    name: str


class ComparedRuntime(_Named, total=False):
    """Another runtime beside the library: compared with the reference, and measured interleaved.

    Attributes:
        outputs: Its outputs compared with the reference's, as timed calls compute them; absent without a reference.
        library: The latency of the library in the same interleaved measurement.
        speedup: The speed of the library relative to it.
        not_timed: The reason why it was not timed; nothing but the name is there then.
    """

    outputs: dict[str, OutputComparison]
    latency: Latency
    library: Latency
    speedup: Speedup
    not_timed: str


# The gates of a recipe, by their fields of `verify`.
LATENCY: Final = "max_latency"
MEMORY: Final = "max_memory"
SIZE: Final = "max_size"
VERSUS: Final = "max_vs"


GateState = Literal["passed", "failed", "within the noise", "not measured"]


class GateResult(TypedDict, total=False):
    """A limit of the recipe, and the measured value: seconds, bytes, or a ratio.

    Attributes:
        limit: The limit.
        value: The measured value: a median, where that varies.
        low: The lower limit of its confidence interval.
        high: The upper limit.
        count: How often it was measured; absent where it does not vary.
        state: `passed`, `failed`, `within the noise` of the limit, which passes, or `not measured`, which fails.
        note: The parts of memory, the compared runtime, or the reason why it is not measured.
    """

    limit: float
    value: float
    low: float
    high: float
    count: int
    state: GateState
    note: str


class ImageComparison(TypedDict):
    """The preprocessing of images, compared with that `against` Pillow; empty if not installed."""

    passed: bool
    against: str
    images: int
    max_level_error: int


class PartVerdict(TypedDict, total=False):
    """The verdict on a part of a model by itself, or on a library beside the delivered one."""

    outputs: dict[str, OutputComparison]
    latency: Latency
    sizes: list[SizeVerdict]


class _Passed(TypedDict):
    passed: bool


class DeliveryVerdict(_Passed, total=False):
    """An output that was loaded in a new process, as users load it, with one of the verified samples.

    Attributes:
        is_equal: It computes the same bits; absent where it is not run.
        outputs: The comparison of each output with the verified library's, where bits differ.
        failure: Why it cannot be loaded or called.
        not_run: Why no process of this machine loads it.
    """

    is_equal: bool
    outputs: dict[str, OutputComparison]
    failure: str
    not_run: str


class _Steps(_Passed):
    steps: int
    length: int


class StatesVerdict(_Steps, total=False):
    """The verdict on a sequence of steps of a model with states, beside calls that are handed the states.

    Attributes:
        steps: How many steps were compared.
        length: The length of the growing states after these.
        failure: The problem.
    """

    failure: str


class IsaLevelVerdict(TypedDict, total=False):
    """The verdict on the code for one level of CPUs.

    `sizes` has the wrong ones, and `not_verified` says why there is no verdict.
    """

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
    """Everything that was verified of a library, and why it is rejected.

    `reference` names the framework of the comparison, and `reference_note` says why that is not the framework itself,
    where it refuses the model. `ran_on` names the machine where that is not this process, `samples` counts samples
    (or random batches); the last `added_samples` reach more elements of an index. `latency` has the library, the same
    model `untuned`, and the `reference`; `speedup` is there where the library is tuned, `reference_speedup` where the
    reference was timed, and `profile` where the library ran in this process. `tolerance` is for the arithmetic that
    it names. `images` has the preprocessing of each input that takes images. `vm` is the verdict on the library for
    TVM's virtual machine that outputs are made of beside this one. `not_run` and `latency_not_measured` are reasons.
    `gates` has the limits of latency, memory and size. `index_inputs` has the tensors that go into an index, and
    `index_inputs_not_compared` says why there are none; `layers` is there where the outputs of a quantized model do
    not say enough. `compared` has the other runtimes that were timed beside the library, by their names in a recipe.
    `random_inputs` describes random inputs that are not the usual ones, and `warnings` says of which outputs a wrong
    library could go undetected, and which other runtimes do not agree with the reference. A library with dimensions
    is verified `at` some sizes, where its latency is also measured; `sizes` has the verdict at others, and
    `sizes_left_out` says which are too large; `swept` has that at many more sizes. `levels` has the verdict on each
    level of CPUs that the library has code for, `fallback` that on the code for browsers without WebGPU run.
    `deliveries` has the verdict on each output that was loaded as users do. `threads` says whether the bits are the
    same with other numbers of threads. `draws` has the verdict on random inputs beside the usual ones,
    `draws_left_out` why some are useless; `exercises` has the branches of operators that all inputs reach,
    `unexercised` a phrase for each that none does, and `exercises_not_observed` the reference that do not know. A
    library of a recipe with `quantize` is compared with the quantized model, computed in float32; `float_error` is
    the root mean square of the difference from the `reference`, which computes the float model, relative to that.
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
    """Return the comparisons of all outputs of some verdicts, and of inputs of indices."""
    return [
        comparison
        for verdict in verdicts
        for field in ("outputs", "index_inputs")
        for comparison in verdict.get(field, {}).values()
    ]


def list_measured(verdict: Verdict) -> list[Mapping[str, Any]]:
    """Return a verdict, and its verdicts on sizes, ISA levels and a fallback."""
    others = (*verdict.get("sizes", ()), *verdict.get("levels", {}).values())
    return [verdict, *others, verdict.get("fallback", {})]


def largest_error(*verdicts: Mapping[str, Any]) -> float | None:
    """Return the largest absolute error in some verdicts; None if an output has no finite one."""
    return largest(output.get("max_abs_error", math.nan) for output in list_compared(*verdicts))


def sort_sizes(verdict: Verdict) -> list[SizeVerdict]:
    """Return the verdicts at all sizes, the smallest sizes first."""
    return sorted(verdict.get("sizes", ()), key=lambda entry: [*entry["sizes"].values()])


def find_fixed_latency(entry: SizeVerdict) -> float | None:
    """Return the formatted latency of a fixed-shape library; None if there was none."""
    speedup = entry.get("fixed_speedup")
    return shown_latency(entry["latency_s"], speedup) if speedup else None


QUANTIZED_MODEL: Final = "the quantized model"


def compared_with(verdict: Verdict) -> str:
    """Return the name of a library's reference."""
    return QUANTIZED_MODEL if "float_error" in verdict else verdict.get("reference", "")


# The fields that verdict.json keeps of a library that passed: True an unchanged value, "*" each value of a mapping or
# list.
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
    """Return the verdict on a library that passed, without figures of this machine and this run.

    Errors and accuracy are figures too: another CPU makes the reference compute in another order.
    """
    lasting = _select(verdict, _WITH_REFERENCE if "reference" in verdict else _ALWAYS)
    if "samples" in lasting:
        lasting["samples"] -= verdict.get("added_samples", 0)
    return cast(Verdict, lasting)


def _select(value: Any, kept: Any) -> Any:
    """Return the fields of a value that a table keeps."""
    if kept is True:
        return value
    if isinstance(value, list):
        return [_select(entry, kept["*"]) for entry in value]
    return {
        name: _select(inner, kept.get(name) or kept["*"])
        for name, inner in value.items()
        if name in kept or "*" in kept
    }
