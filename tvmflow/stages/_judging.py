"""What `verify` finds when it compares outputs, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tvmflow.stages._tolerances import Tolerance

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def compare(ours: Array, theirs: Array, tolerance: Tolerance) -> dict[str, Any]:
    """Largest absolute and relative error, the tolerance in numbers, and how many elements are out of it.

    An element is in tolerance when |ours − theirs| ≤ atol + rtol·|theirs| (as in numpy.isclose);
    NaN equals NaN, and an infinity equals itself.
    """
    import numpy as np

    if ours.shape != theirs.shape:
        return {"passed": False, "shape": f"{ours.shape} instead of {theirs.shape}"}
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    largest = float(np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0))
    rtol, atol = tolerance.rtol, max(tolerance.atol, tolerance.of_largest * largest)
    good = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, error)
    error = np.where(np.isnan(error), np.inf, error)
    scale = np.maximum(np.abs(b), np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        relative = np.divide(error, scale, out=np.zeros_like(error), where=error > 0)
    meaningful = error > atol
    result: dict[str, Any] = {
        "rtol": rtol,
        "atol": atol,
        "max_abs_error": _finite(error.max(initial=0.0)),
        "max_rel_error": _finite(relative.max(initial=0.0)),
        "max_rel_error_above_atol": _finite(relative[meaningful].max(initial=0.0)),
        "elements": int(good.size),
        "outside": int(good.size - np.count_nonzero(good)),
        "passed": bool(good.all()),
    }
    if not result["passed"]:
        worst = np.unravel_index(int(np.argmax(np.where(good, -1.0, error))), error.shape)
        result["worst"] = {
            "index": [int(i) for i in worst],
            "ours": _finite(a[worst]),
            "reference": _finite(b[worst]),
        }
    return result


def _finite(value: Any) -> float | str:
    """JSON has no infinity and no NaN."""
    number = float(value)
    return number if number - number == 0.0 else str(number)


def accuracy(outputs: Mapping[str, Array], first: str, labels: Array) -> float:
    """Top-1 accuracy of the output `first`: the share of samples whose largest score is the label's."""
    scores = outputs[first].reshape(len(labels), -1)
    return float((scores.argmax(axis=1) == labels.reshape(-1)).mean())


def failures(verdict: Mapping[str, Any], checks: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that is not good enough, of the model and of its parts."""
    found = disagreements(verdict)
    for name, part in verdict.get("parts", {}).items():
        found += [
            f"part '{name}': {each}"
            for each in disagreements({**part, "reference": verdict.get("reference")})
        ]
    wanted = checks["min_accuracy"]
    if wanted is not None and verdict["accuracy"] < wanted:
        found.append(f"accuracy {verdict['accuracy']:.4f} is below verify.min_accuracy {wanted:g}")
    return found


def disagreements(verdict: Mapping[str, Any]) -> list[str]:
    """A sentence for every output that is not what the reference gives."""
    failures = []
    for name, found in verdict.get("outputs", {}).items():
        if found["passed"]:
            continue
        if "shape" in found:
            failures.append(f"output '{name}' has shape {found['shape']}")
        else:
            worst = found["worst"]
            failures.append(
                f"output '{name}': {found['outside']} of {found['elements']} elements are out of tolerance "
                f"(rtol {found['rtol']:g}, atol {found['atol']:g}); the worst, at {worst['index']}, "
                f"is {worst['ours']} where {verdict['reference']} gives {worst['reference']}"
            )
    return failures
