"""Tolerances: how closely outputs must agree, by the model's arithmetic and the size of each output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.compiler.options import Precision

if TYPE_CHECKING:
    import numpy as np
    import tvm

    Array = np.ndarray[Any, Any]

FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
FLOAT16_SUMS: Final = "float16 sums"
BFLOAT16: Final = "bfloat16"
QUANTIZED: Final = "quantized"

# Fewer elements have no largest one that says how large their neighbours' errors are, and no average
# that noise leaves alone.
_MIN_SLICE: Final = 256
SMALLEST_NORMAL: Final = 2.0**-126
"""That of float32: CPUs may take what is below it as 0."""
# A step of a probability may be that much of the largest one.
_LARGEST_STEP: Final = 0.25


class Tolerance(NamedTuple):
    """|actual - expected| <= atol + rtol * |expected|, with an atol that grows with the output.

    Attributes:
        rtol: The relative tolerance of an element.
        atol: The absolute tolerance, however small the output is.
        of_largest: At least this share of the output's largest absolute value: the error of a sum
            follows its largest terms, so that of a result near 0 follows the results beside it.
        of_slice: At least this share of the largest value of the element's slice along each axis: an
            output may have numbers of several kinds, such as pixels beside probabilities.
        step: At least this much, up to a quarter of the largest value.
        rms: The root mean square of all errors, relative to that of the output; None: any.
        scale: How far the output as a whole may be scaled; None: any.
        exact_integers: Integers and booleans must be equal.
        slice_scale: How far each slice of the output along an axis (a channel) may be scaled; None: any.
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
        """Return the tolerance of an output with this dtype and so many elements."""
        if dtype.kind in "iub" and self.exact_integers:
            # An integer of a quantized model is one of 256 steps; others are counts, indices and flags.
            is_step = self.step > 0 and dtype.kind in "iu" and dtype.itemsize == 1
            return Tolerance(0.0, 0.0, self.of_largest) if is_step else Tolerance(0.0, 0.0)
        return self if elements >= _MIN_SLICE else self._replace(rms=None, scale=None)

    def absolute(self, expected: Array) -> Array:
        """Return the absolute tolerance of each element, in a shape that broadcasts.

        Args:
            expected: The reference's output, in float64.
        """
        import numpy as np

        magnitudes = np.where(np.isfinite(expected), np.abs(expected), 0.0)
        largest = magnitudes.max(initial=0.0)
        atol = max(self.atol, self.of_largest * largest, min(self.step, _LARGEST_STEP * largest))
        if not self.of_slice:
            return np.asarray(atol)
        return np.maximum(atol, self.of_slice * _largest_of_slices(magnitudes, largest))


def _largest_of_slices(magnitudes: Array, largest: float) -> Array:
    """Return, for each element, the least of the largest values of its slices along each axis."""
    import numpy as np

    least = np.asarray(largest)
    for axis, length in enumerate(magnitudes.shape):
        if length > 1 and magnitudes.size // length >= _MIN_SLICE:
            others = tuple(other for other in range(magnitudes.ndim) if other != axis)
            least = np.minimum(least, magnitudes.max(axis=others, keepdims=True))
    return least


# float16 has 11 bits, bfloat16 8: ten roundings of the largest value. Integers of 8 bits: 16 steps of 256, since a sum
# in another order may fall on the other side of a half, and the step goes on to all that follows.
# And at least one step of a probability, whose outputs are rounded to 256 steps from 0 to 1 however small they are.
# SqueezeNet, ResNet-50 and MobileNet v2 with random weights are 1, 4 and 10 steps from ONNX Runtime.
# Networks with random weights are within 0.00003 of the largest value of an output in float32; their errors have a root
# mean square of 0.1 % in float16, up to 1.3 % where float16 is added up, 0.7 % in bfloat16 and 1.6 % in integers, and scale an output by up to 0.3 %.
DEFAULTS: Final[Mapping[str, Tolerance]] = {
    FLOAT32: Tolerance(1e-3, SMALLEST_NORMAL, 4e-6, of_slice=1e-4, rms=1e-4, slice_scale=5e-4),
    FLOAT16: Tolerance(1e-2, 10 / 2**24, 10 / 2**11, rms=10 / 2**11),
    FLOAT16_SUMS: Tolerance(1e-2, 10 / 2**24, 10 / 2**8, rms=5 / 2**8, scale=7.5e-3),
    BFLOAT16: Tolerance(1e-2, SMALLEST_NORMAL, 10 / 2**8, rms=5 / 2**8, scale=7.5e-3),
    QUANTIZED: Tolerance(1e-2, SMALLEST_NORMAL, 16 / 2**8, step=5e-3, rms=8 / 2**8, scale=5e-3),
}


def tolerance_for(arithmetic: str, *, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance for an arithmetic, with what the recipe says in its place.

    Args:
        arithmetic: A key of `DEFAULTS`.
        rtol: The recipe's relative tolerance, if it has one.
        atol: The recipe's absolute tolerance, if it has one; it holds whatever the outputs are.
    """
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
    """Return a tolerance for outputs of any magnitude, independent of a recipe's absolute tolerance."""
    default = DEFAULTS[arithmetic]._replace(exact_integers=tolerance.exact_integers)
    return default._replace(
        rtol=max(default.rtol, tolerance.rtol),
        atol=max(default.atol, tolerance.atol),
        slice_scale=None,
    )


_OF_PRECISIONS: Final = {"float16": FLOAT16_SUMS, "bfloat16": BFLOAT16}


def find_arithmetic(mod: tvm.IRModule, precision: Precision) -> str:
    """Return the coarsest arithmetic of an imported model.

    Args:
        mod: The model's IR.
        precision: The precision of its recipe.
    """
    from tvm import relax

    from tvmflow.compiler.ir import operator_name

    operators: set[str] = set()
    has_float16 = precision == "mixed"

    def visit(expr: Any) -> None:
        nonlocal has_float16
        if isinstance(expr, relax.Call):
            operators.add(operator_name(expr))
        if isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype.dtype) == FLOAT16:
            has_float16 = True

    relax.analysis.post_order_visit(mod["main"], visit)
    if operators & {"relax.quantize", "relax.dequantize"}:
        return QUANTIZED
    if precision in _OF_PRECISIONS:
        return _OF_PRECISIONS[precision]
    return FLOAT16 if has_float16 else FLOAT32
