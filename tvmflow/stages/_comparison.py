"""Outputs of a library compared with those of the reference: tolerances, errors, and sentences about what disagrees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.compiler.options import Precision
from tvmflow.stages._verdict import ImageComparison, OutputComparison, Verdict

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
BFLOAT16: Final = "bfloat16"
QUANTIZED: Final = "quantized"


class Tolerance(NamedTuple):
    """|actual - expected| <= max(atol, of_largest * the output's largest |expected|) + rtol * |expected|.

    The second part of the maximum is for values that are rounded coarsely on the way: the error of
    a sum follows its largest terms, so that of a result near 0 follows the results beside it.
    """

    rtol: float
    atol: float
    of_largest: float = 0.0


# float16 has 11 bits, bfloat16 8: ten roundings of the largest value. Integers of 8 bits: 16 steps of 256, since a sum
# in another order may fall on the other side of a half, and the step goes on to all that follows.
# And at least one step of a probability, whose outputs are rounded to 256 steps from 0 to 1 however small they are.
# SqueezeNet, ResNet-50 and MobileNet v2 with random weights are 1, 4 and 10 steps from ONNX Runtime.
DEFAULTS: Final[Mapping[str, Tolerance]] = {
    FLOAT32: Tolerance(1e-3, 1e-4),
    FLOAT16: Tolerance(1e-2, 1e-4, 10 / 2**11),
    BFLOAT16: Tolerance(1e-2, 1e-4, 10 / 2**8),
    QUANTIZED: Tolerance(1e-2, 5e-3, 16 / 2**8),
}


def tolerance_for(arithmetic: str, *, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance for an arithmetic, with what the recipe says in its place.

    Args:
        arithmetic: A key of `DEFAULTS`.
        rtol: The recipe's relative tolerance, if it has one.
        atol: The recipe's absolute tolerance, if it has one; it holds whatever the outputs are.
    """
    tolerance = DEFAULTS[arithmetic]
    if rtol is not None:
        tolerance = tolerance._replace(rtol=rtol)
    if atol is not None:
        tolerance = tolerance._replace(atol=atol, of_largest=0.0)
    return tolerance


def find_arithmetic(model: Path, precision: Precision) -> str:
    """Return the coarsest arithmetic of an imported model.

    Args:
        model: The model's IR, `model.json`.
        precision: The precision of its recipe.
    """
    from tvm import relax

    from tvmflow.compiler import lowering

    main = lowering.load_ir(model)["main"]
    operators: set[str] = set()
    has_float16 = precision == "mixed"

    def visit(expr: Any) -> None:
        nonlocal has_float16
        if isinstance(expr, relax.Call):
            operators.add(str(getattr(expr.op, "name", "")))
        if isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype.dtype) == FLOAT16:
            has_float16 = True

    relax.analysis.post_order_visit(main, visit)
    if operators & {"relax.quantize", "relax.dequantize"}:
        return QUANTIZED
    if precision == "bfloat16":
        return BFLOAT16
    return FLOAT16 if has_float16 else FLOAT32


# ---------------------------------------------------------------- comparisons


def compare(actual: Array, expected: Array, tolerance: Tolerance) -> OutputComparison:
    """Return the errors of an output, the tolerance in numbers, and the number of mismatched elements.

    An element matches when |actual - expected| <= atol + rtol * |expected|, as in numpy.isclose;
    NaN equals NaN, and an infinity equals itself. Without a single number in the reference's output
    nothing is compared, and that is no agreement.
    """
    import numpy as np

    if actual.shape != expected.shape:
        return {"passed": False, "shape": f"{actual.shape} instead of {expected.shape}"}
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    if b.size and not np.isfinite(b).any():
        return {"passed": False, "incomparable": "no finite number"}
    largest = float(np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0))
    rtol, atol = tolerance.rtol, max(tolerance.atol, tolerance.of_largest * largest)
    matches = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    error, relative = _errors(a, b)
    above_atol = error > atol
    comparison: OutputComparison = {
        "rtol": rtol,
        "atol": atol,
        "max_abs_error": _json_number(error.max(initial=0.0)),
        "max_rel_error": _json_number(relative.max(initial=0.0)),
        "max_rel_error_above_atol": _json_number(relative[above_atol].max(initial=0.0)),
        "elements": int(matches.size),
        "mismatched": int(matches.size - np.count_nonzero(matches)),
        "passed": bool(matches.all()),
    }
    if not comparison["passed"]:
        worst = np.unravel_index(int(np.argmax(np.where(matches, -1.0, error))), error.shape)
        comparison["worst"] = {
            "index": [int(i) for i in worst],
            "actual": _json_number(a[worst]),
            "expected": _json_number(b[worst]),
        }
    return comparison


def _errors(actual: Array, expected: Array) -> tuple[Array, Array]:
    """Return the absolute and the relative error of each element; infinite where only one is NaN."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    is_equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    error = np.where(is_equal, 0.0, error)
    error = np.where(np.isnan(error), np.inf, error)
    scale = np.maximum(np.abs(expected), np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        relative = np.divide(error, scale, out=np.zeros_like(error), where=error > 0)
    return error, relative


def _json_number(value: Any) -> float | str:
    """Return a number as JSON can have it: infinities and NaN are text."""
    number = float(value)
    return number if number - number == 0.0 else str(number)


def top1_accuracy(outputs: Mapping[str, Array], output: str, labels: Array) -> float:
    """Return the share of samples whose largest score in `output` is the label's."""
    scores = outputs[output].reshape(len(labels), -1)
    return float((scores.argmax(axis=1) == labels.reshape(-1)).mean())


def list_failures(verdict: Verdict, min_accuracy: float | None) -> list[str]:
    """Return a sentence for everything that is wrong with a model and its parts."""
    reference = verdict.get("reference", "")
    failures = list_mismatches(verdict.get("outputs", {}), reference)
    for name, part in verdict.get("parts", {}).items():
        mismatches = list_mismatches(part.get("outputs", {}), reference)
        failures += [f"part '{name}': {mismatch}" for mismatch in mismatches]
    for mismatch in list_mismatches(verdict.get("vm", {}).get("outputs", {}), reference):
        failures.append(f"the library for TVM's virtual machine: {mismatch}")
    if min_accuracy is not None and verdict["accuracy"] < min_accuracy:
        failures.append(
            f"accuracy {verdict['accuracy']:.4f} is below verify.min_accuracy {min_accuracy:g}"
        )
    return failures


def list_mismatches(outputs: Mapping[str, OutputComparison], reference: str) -> list[str]:
    """Return a sentence for every output that does not match the reference's."""
    sentences = []
    for name, comparison in outputs.items():
        if comparison["passed"]:
            continue
        if "shape" in comparison:
            sentences.append(f"output '{name}' has shape {comparison['shape']}")
            continue
        if "incomparable" in comparison:
            sentences.append(
                f"output '{name}' of {reference} has {comparison['incomparable']}, so that nothing is compared: "
                "give inputs that the model is made for (inputs.NAME.range, verify.data)"
            )
            continue
        worst = comparison["worst"]
        sentences.append(
            f"output '{name}': {comparison['mismatched']} of {comparison['elements']} elements are out of tolerance "
            f"(rtol {comparison['rtol']:g}, atol {comparison['atol']:g}); the worst, at {worst['index']}, "
            f"is {worst['actual']} where {reference} gives {worst['expected']}"
        )
    return sentences


def list_image_mismatches(images: Mapping[str, ImageComparison]) -> list[str]:
    """Return a sentence for every input whose preprocessing is not that of Pillow."""
    return [
        f"the preprocessing of '{name}' differs from that by {comparison['against']} by {comparison['max_level_error']} "
        "of 255 levels"
        for name, comparison in images.items()
        if not comparison["passed"]
    ]
