"""Comparison of outputs with the reference's: tolerances, errors, and undetectable faults."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from tvmflow.core.types import Array, Precision
from tvmflow.runtime.arrays import unpack_rows
from tvmflow.runtime.samples import Samples, join_outputs
from tvmflow.stages.verify.verdict import (
    ANYTHING,
    BFLOAT16,
    FLOAT16,
    FLOAT16_SUMS,
    FLOAT32,
    INPUTS,
    INT8_STATES,
    QUANTIZED,
    SMALLEST_NORMAL,
    ZEROS,
    OutputComparison,
    ScaledSlice,
)

if TYPE_CHECKING:
    # `run-model` compares outputs without TVM
    import tvm

# In tensors with fewer elements, the largest value does not predict errors, and averages are noisy.
_MIN_SLICE: Final = 256
# The maximum that a quantization step may add to the tolerance, as a share of the output's largest value.
_LARGEST_STEP: Final = 0.25


class Tolerance(NamedTuple):
    """|actual - expected| <= atol + rtol * |expected|, with an atol that grows with the output.

    Attributes:
        atol: The absolute tolerance, independent of the output's values.
        of_largest: The absolute tolerance is at least this share of the output's largest absolute value, because
            the error of an accumulation is proportional to its largest terms.
        of_slice: The absolute tolerance is at least this share of the largest value in the element's slice along
            each axis: an output may contain values of several kinds, such as pixels beside probabilities.
        step: The absolute tolerance is at least this step, or a quarter of the largest value if that is less.
        rms: The limit on the root mean square error, relative to the root mean square of the output.
        scale: The limit on |factor - 1|, where the output as a whole is the reference's times a factor.
        exact_integers: Whether integers and booleans must be equal.
        slice_scale: The same limit as `scale` for each slice along an axis, such as a channel.
    """

    rtol: float
    atol: float
    of_largest: float = 0.0
    of_slice: float = 0.0
    step: float = 0.0
    rms: float | None = None
    scale: float | None = None
    exact_integers: bool = False
    slice_scale: float | None = None

    def for_output(self, dtype: np.dtype[Any], elements: int) -> Tolerance:
        """Return the tolerance of an output with this dtype and this many elements."""
        if dtype.kind in "iub" and self.exact_integers:
            # 8-bit integers of a quantized model are steps, which may differ; others are counts, indices and flags.
            is_step = self.step > 0 and dtype.kind in "iu" and dtype.itemsize == 1
            return Tolerance(0.0, 0.0, self.of_largest) if is_step else Tolerance(0.0, 0.0)
        return self if elements >= _MIN_SLICE else self._replace(rms=None, scale=None)

    def absolute(self, expected: Array) -> Array:
        """Return each element's absolute tolerance, in a shape that broadcasts to `expected` (float64)."""
        magnitudes = np.where(np.isfinite(expected), np.abs(expected), 0.0)
        largest = magnitudes.max(initial=0.0)
        atol = max(self.atol, self.of_largest * largest, min(self.step, _LARGEST_STEP * largest))
        if not self.of_slice:
            return np.asarray(atol)
        # an element is in one slice along each axis: the slice with the smallest maximum counts
        least = np.asarray(largest)
        for axis, length in enumerate(magnitudes.shape):
            if length > 1 and magnitudes.size // length >= _MIN_SLICE:
                others = tuple(other for other in range(magnitudes.ndim) if other != axis)
                least = np.minimum(least, magnitudes.max(axis=others, keepdims=True))
        return np.maximum(atol, self.of_slice * least)


# float16 (11 significant bits) and bfloat16 (8): ten roundings of the largest value. int8: 16 of 256 quantization
# steps, because accumulating in another order may round differently, and the error propagates through later layers.
# SqueezeNet, ResNet-50 and MobileNet v2 with random weights are 1, 4 and 10 steps from ONNX Runtime. The int8
# tolerance is at least one step of a probability: probabilities are rounded to 256 steps from 0 to 1, so small ones
# are coarse, too. Networks with random weights are within 0.00003 of an output's largest value in float32; their
# root mean square error is 0.1 % in float16, up to 1.3 % with float16 accumulators, 0.7 % in bfloat16 and 1.6 % in
# int8. They scale an output by up to 0.3 %.
DEFAULTS: Final[Mapping[str, Tolerance]] = {
    FLOAT32: Tolerance(1e-3, SMALLEST_NORMAL, 4e-6, of_slice=1e-4, rms=1e-4, slice_scale=5e-4),
    FLOAT16: Tolerance(1e-2, 10 / 2**24, 10 / 2**11, rms=10 / 2**11),
    FLOAT16_SUMS: Tolerance(1e-2, 10 / 2**24, 10 / 2**8, rms=5 / 2**8, scale=7.5e-3),
    BFLOAT16: Tolerance(1e-2, SMALLEST_NORMAL, 10 / 2**8, rms=5 / 2**8, scale=7.5e-3),
    INT8_STATES: Tolerance(1e-2, SMALLEST_NORMAL, 16 / 2**8, rms=8 / 2**8, scale=5e-3),
    QUANTIZED: Tolerance(1e-2, SMALLEST_NORMAL, 16 / 2**8, step=5e-3, rms=8 / 2**8, scale=5e-3),
}


def tolerance_for(arithmetic: str, *, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the default tolerance of an arithmetic, with the recipe's `rtol` and `atol` if given."""
    tolerance = DEFAULTS[arithmetic]
    if rtol is None and atol is None:
        return tolerance._replace(exact_integers=True)
    tolerance = tolerance._replace(rms=None, scale=None, slice_scale=None)
    if rtol is not None:
        tolerance = tolerance._replace(rtol=rtol)
    if atol is not None:
        tolerance = tolerance._replace(atol=atol, of_largest=0.0, of_slice=0.0, step=0.0)
    return tolerance


def widen(tolerance: Tolerance, arithmetic: str) -> Tolerance:
    """Return a tolerance, at least the default one, for inputs and outputs of other magnitudes."""
    default = DEFAULTS[arithmetic]._replace(exact_integers=tolerance.exact_integers)
    return default._replace(
        rtol=max(default.rtol, tolerance.rtol),
        atol=max(default.atol, tolerance.atol),
        slice_scale=None,
    )


_OF_PRECISIONS: Final = {"float16": FLOAT16_SUMS, "bfloat16": BFLOAT16}


def find_arithmetic(mod: tvm.IRModule, precision: Precision) -> str:
    """Return the least precise arithmetic of an imported model, a key of `DEFAULTS`.

    States that a library stores as float16 make it float16. The framework's states are float32. A call gets the same past
    in both, as float16 values are exact in float32. Rounding new rows has a relative error of 2^-11. Attention passes
    it on: values add at most one such error of the largest value, and keys one for each unit of the scores. The
    tolerance of float16 allows ten. Rows of int8 have steps of 1/127 of their largest value: after one token, the logits
    of a Llama of 8 layers with random weights have a root mean square error of 1.5 %.
    """
    from tvm import relax

    from tvmflow.graph import ir
    from tvmflow.graph.ir_operators import PackRows

    if ir.calls_operator(mod, "relax.quantize", "relax.dequantize") or rounds_data(mod):
        return QUANTIZED
    if precision in _OF_PRECISIONS:
        return _OF_PRECISIONS[precision]
    if ir.calls_operator(mod, PackRows.NAME):
        return INT8_STATES
    dtypes = {
        ir.dtype_of(var)
        for var in ir.list_variables(mod["main"])
        if isinstance(var.ty, relax.TensorType)
    }
    if BFLOAT16 in dtypes:
        return BFLOAT16
    return FLOAT16 if precision == "mixed" or FLOAT16 in dtypes else FLOAT32


def rounds_data(mod: tvm.IRModule) -> bool:
    """Return whether matmuls of an imported model may round their data to int8.

    `MatMulNBits` with `accuracy_level=4` allows that, and ONNX Runtime does it, too. Sums that differ in their last bit
    are then rounded to different integers, and later layers pass the error on.
    """
    from tvmflow.graph import ir
    from tvmflow.graph.ir_operators import BlockQuantizedWeights

    calls = (binding.value for binding in ir.list_bindings(mod["main"].body))
    return any(
        BlockQuantizedWeights.read(call).rounds_data
        for call in calls
        if ir.operator_name(call) == BlockQuantizedWeights.NAME
    )


_MIN_NORMAL: Final = 2.0**-1022
# Twice the rounding error of float32 accumulators, which is 0.00003 of the largest value.
_SCALED_OF_LARGEST: Final = 6e-5


def compare_batches(
    names: Iterable[str],
    actual: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    data: Samples,
    tolerance: Tolerance,
) -> dict[str, OutputComparison]:
    """Compare each output over all batches; batches with equal shapes are compared together."""
    groups: dict[Any, list[int]] = {(): [*range(len(expected))]}
    if len({tuple(array.shape for array in batch.values()) for batch in expected}) > 1:
        groups.clear()
        for index, batch in enumerate(data.batches):
            groups.setdefault(tuple(array.shape for array in batch.values()), []).append(index)
    comparisons: dict[str, list[OutputComparison]] = {name: [] for name in names}
    for indices in groups.values():
        own = data
        if len(groups) > 1:
            own = Samples([data.batches[n] for n in indices], len(indices), None, 0)
        for name, found in comparisons.items():
            pairs = [
                (as_reference(actual[n][name], expected[n][name]), expected[n][name])
                for n in indices
            ]
            # outputs with a wrong shape cannot be joined: compare such a pair separately, which fails
            differing = [pair for pair in pairs if pair[0].shape != pair[1].shape]
            left, right = (
                differing[0]
                if differing
                else (
                    join_outputs([{name: array} for array in side], own)[name]
                    for side in zip(*pairs, strict=True)
                )
            )
            found.append(compare(left, right, tolerance))
    return {name: _merge(found) for name, found in comparisons.items()}


def _merge(comparisons: Sequence[OutputComparison]) -> OutputComparison:
    """Merge the comparisons of an output at several sizes, with the worst value of each figure."""
    first, *others = comparisons
    if not others:
        return first
    for comparison in comparisons:
        if "shape" in comparison or "incomparable" in comparison:
            return comparison
    merged: dict[str, Any] = {}
    for field, choose in _MERGES.items():
        values = [value for entry in comparisons if (value := entry.get(field)) is not None]
        if values:
            merged[field] = choose(values)
    return cast(OutputComparison, merged)


def _find_largest(values: Sequence[float | str]) -> float | str:
    """Return the largest value, or NaN if there is one; infinity and NaN may be text."""
    return max(values, key=lambda value: (math.isnan(number := float(value)), number))


_MERGES: Final[Mapping[str, Callable[[list[Any]], Any]]] = {
    "passed": all,
    "elements": sum,
    "mismatched": sum,
    "rtol": _find_largest,
    "atol": _find_largest,
    "max_abs_error": _find_largest,
    "max_rel_error": _find_largest,
    "max_rel_error_above_atol": _find_largest,
    "error_of_largest": _find_largest,
    "rms_error": _find_largest,
    "cosine_similarity": min,
    "best_class_agreement": min,
    "scale": lambda scales: max(scales, key=lambda scale: abs(scale - 1)),
    "exceeded": lambda limits: {name: entry[name] for entry in limits for name in entry},
    "scaled_slice": operator.itemgetter(0),
    "worst": operator.itemgetter(0),
}


def as_reference(actual: Array, expected: Array) -> Array:
    """Return an output as the reference has it: rows of int8 states as float32."""
    is_packed = actual.dtype == np.int8 and expected.dtype == np.float32
    return unpack_rows(actual) if is_packed else actual


def compare(actual: Array, expected: Array, tolerance: Tolerance) -> OutputComparison:
    """Compare an output with the reference's.

    An element matches when |actual - expected| <= atol + rtol * |expected|; NaN equals NaN, and an infinity equals
    itself. All elements together must satisfy the limits on root mean square error and scale. If the reference's
    output has no finite value, it is incomparable and does not pass.
    """
    actual = as_reference(actual, expected)
    if actual.shape != expected.shape:
        return {"passed": False, "shape": f"{actual.shape} instead of {expected.shape}"}
    # uninitialized memory may hold a signaling NaN
    with np.errstate(invalid="ignore"):
        a, b = actual.astype(np.float64), expected.astype(np.float64)
    if b.size and not np.isfinite(b).any():
        return {"passed": False, "incomparable": "no finite number"}
    tolerance = tolerance.for_output(expected.dtype, b.size)
    is_equal = (actual == expected) | (np.isnan(a) & np.isnan(b))
    error, relative = _errors(a, b, is_equal)
    atol = tolerance.absolute(b)
    with np.errstate(invalid="ignore", over="ignore"):
        matches = is_equal | (np.isfinite(b) & (error <= atol + tolerance.rtol * np.abs(b)))
    comparison: OutputComparison = {
        "rtol": tolerance.rtol,
        "atol": float(atol.max()),
        "max_abs_error": _json_number(error.max(initial=0.0)),
        "max_rel_error": _json_number(relative.max(initial=0.0)),
        "max_rel_error_above_atol": _json_number(relative[error > atol].max(initial=0.0)),
        **_compare_as_whole(a, b, error),
        "elements": int(matches.size),
        "mismatched": int(matches.size - np.count_nonzero(matches)),
    }
    if scaled := find_scaled_slice(a, b, tolerance):
        comparison["scaled_slice"] = scaled
    exceeded = _find_exceeded(comparison, tolerance)
    comparison["passed"] = not (exceeded or comparison["mismatched"] or scaled)
    if exceeded:
        comparison["exceeded"] = exceeded
    if comparison["mismatched"]:
        worst = np.unravel_index(int(np.argmax(np.where(matches, -1.0, error))), error.shape)
        comparison["worst"] = {
            "index": [int(i) for i in worst],
            "actual": _json_number(a[worst]),
            "expected": _json_number(b[worst]),
        }
    return comparison


# In slices with fewer elements, a factor cannot be told from noise.
_MIN_SCALED: Final = 16
# A slice is scaled if one factor explains more than this share of its squared error. Noise in 16 elements does not
# reach 0.8.
_EXPLAINED: Final = 0.8


def find_scaled_slice(actual: Array, expected: Array, tolerance: Tolerance) -> ScaledSlice | None:
    """Return a slice, such as a channel, that is the reference's times a factor; None if there is none.

    The error of a wrong factor is proportional to the values, unlike rounding errors. A linear regression of each
    slice detects it even if each element is within the tolerance. Both arrays are float64.
    """
    if tolerance.slice_scale is None or not np.isfinite(expected).all():
        return None
    if not np.isfinite(actual).all():
        return None
    error = actual - expected
    for axis, length in enumerate(expected.shape):
        if length < 2 or expected.size // length < _MIN_SCALED:
            continue
        others = tuple(other for other in range(expected.ndim) if other != axis)
        squares = np.square(expected).sum(others)
        products = (error * expected).sum(others)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.nan_to_num(products / squares)
            explained = np.nan_to_num(products**2 / (squares * np.square(error).sum(others)))
        is_scaled = (np.abs(factor) > tolerance.slice_scale) & (explained > _EXPLAINED)
        # ignore rounding errors of slices whose values are all smaller than those of other slices
        is_scaled &= np.abs(error).max(others) > _SCALED_OF_LARGEST * np.abs(expected).max()
        if is_scaled.any():
            index = int(np.argmax(np.where(is_scaled, np.abs(factor), 0)))
            return {"axis": axis, "index": index, "scale": float(1 + factor[index])}
    return None


def compare_outputs(
    actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: Tolerance
) -> dict[str, OutputComparison]:
    """Return the comparison of each expected output."""
    return {name: compare(actual[name], array, tolerance) for name, array in expected.items()}


def has_same_bits(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Return whether each expected output has the same shape, dtype and bits."""
    return all(
        (actual[name].shape, actual[name].dtype) == (array.shape, array.dtype)
        and actual[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


def compare_inner(actual: Array, expected: Array, tolerance: Tolerance) -> OutputComparison:
    """Compare two intermediate tensors; unlike in outputs, equal infinities and NaN (masks) are ignored."""
    if expected.dtype.kind == "f" and actual.shape == expected.shape:
        is_same = ~np.isfinite(expected) & (
            (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        )
        actual, expected = np.where(is_same, 0, actual), np.where(is_same, 0, expected)
    return compare(actual, expected, tolerance)


def compare_inner_batches(
    actual: Sequence[Array], expected: Sequence[Array], tolerance: Tolerance
) -> OutputComparison:
    """Compare an intermediate tensor over all batches; batches with equal shapes are compared together."""
    groups: dict[Any, list[tuple[Array, Array]]] = {}
    for own, right in zip(actual, expected, strict=True):
        groups.setdefault((own.shape, right.shape), []).append((own, right))
    stacked = [[np.stack(side) for side in zip(*pairs, strict=True)] for pairs in groups.values()]
    return _merge([compare_inner(own, right, tolerance) for own, right in stacked])


def _errors(actual: Array, expected: Array, is_equal: Array) -> tuple[Array, Array]:
    """Return each element's absolute and relative error: infinity if only one of both values is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Different integers may be equal as float64: their error must not be 0.
        error = np.where(is_equal, 0.0, np.maximum(np.abs(actual - expected), _MIN_NORMAL))
    error = np.where(np.isnan(error), np.inf, error)
    scale = np.maximum(np.abs(expected), np.finfo(np.float64).tiny)
    with np.errstate(over="ignore", invalid="ignore"):
        relative = np.divide(error, scale, out=np.zeros_like(error), where=error > 0)
    return error, np.where(np.isnan(relative), np.inf, relative)


def _compare_as_whole(actual: Array, expected: Array, error: Array) -> OutputComparison:
    """Return an output's overall errors, without cosine similarity and scale if one side is all zero."""
    is_number = np.isfinite(actual) & np.isfinite(expected)
    a, b = actual[is_number], expected[is_number]
    largest = np.abs(b).max(initial=0.0)
    figures: OutputComparison = {
        "error_of_largest": _json_number(_divide(error.max(initial=0.0), largest))
    }
    agreement = _best_class_agreement(actual, expected)
    if agreement is not None:
        figures["best_class_agreement"] = agreement
    # scale the values, because their squares might overflow or underflow
    unit = max(largest, np.abs(a).max(initial=0.0))
    if not unit:
        return {**figures, "rms_error": 0.0}
    a, b = a / unit, b / unit
    aa, ab, bb = float(a @ a), float(a @ b), float(b @ b)
    figures["rms_error"] = _json_number(_divide(float(np.sum((a - b) ** 2)), bb) ** 0.5)
    if aa and bb:
        figures["cosine_similarity"] = min(1.0, ab / (aa * bb) ** 0.5)
        figures["scale"] = ab / bb
    return figures


def _divide(error: float, size: float) -> float:
    """Return `error / size`; 0 if the error is 0, infinity if only the size is 0."""
    if not error:
        return 0.0
    return float(error) / float(size) if size else float("inf")


def _best_class_agreement(actual: Array, expected: Array) -> float | None:
    """Return the share of rows with the same argmax; None if rows are not scores of classes."""
    rows = expected.reshape(len(expected), -1) if expected.ndim > 1 and expected.size else None
    if rows is None or rows.shape[1] < 2 or rows.shape[1] not in expected.shape[1:]:
        return None
    best = actual.reshape(rows.shape).argmax(axis=1) == rows.argmax(axis=1)
    return float(best.mean())


def _find_exceeded(comparison: OutputComparison, tolerance: Tolerance) -> dict[str, float]:
    exceeded: dict[str, float] = {}
    if float(comparison["max_abs_error"]) <= tolerance.atol:
        return exceeded
    if tolerance.rms is not None and float(comparison["rms_error"]) > tolerance.rms:
        exceeded["rms"] = tolerance.rms
    # The scale is missing if one side is all zero.
    if tolerance.scale is not None and abs(comparison.get("scale", 1.0) - 1) > tolerance.scale:
        exceeded["scale"] = tolerance.scale
    return exceeded


def _json_number(value: Any) -> float | str:
    """Return a float as a JSON value: infinity and NaN become text."""
    number = float(value)
    return number if number - number == 0.0 else str(number)


def relative_error(
    actual: Sequence[Mapping[str, Array]], expected: Sequence[Mapping[str, Array]]
) -> float:
    """Return the largest relative root mean square error of the float outputs."""
    errors = [0.0]
    for name in actual[0]:
        wide = np.stack([np.asarray(batch[name], np.float64) for batch in expected])
        if actual[0][name].dtype.kind != "f" or not np.any(wide):
            continue
        difference = np.stack([batch[name] for batch in actual]) - wide
        errors.append(float(np.sqrt(np.mean(np.square(difference)) / np.mean(np.square(wide)))))
    return max(errors)


def find_undetected(
    outputs: Sequence[Mapping[str, Array]], names: Iterable[str], tolerance: Tolerance
) -> dict[str, str]:
    """Return the outputs that a wrong library could pass with: ZEROS, INPUTS or ANYTHING, by name."""
    named = ((name, _find([batch[name] for batch in outputs], tolerance)) for name in names)
    return {name: what for name, what in named if what}


def _find(batches: Sequence[Array], tolerance: Tolerance) -> str:
    if not any(batch.size for batch in batches):
        return ANYTHING
    if all(compare(np.zeros_like(batch), batch, tolerance)["passed"] for batch in batches):
        return ZEROS
    first, *others = batches
    is_constant = others and all(compare(first, other, tolerance)["passed"] for other in others)
    return INPUTS if is_constant else ""
