"""How closely `verify` wants outputs to agree: by what the model and the recipe compute in, or as the recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
QUANTISED: Final = "quantised"


class Tolerance(NamedTuple):
    """|ours − theirs| ≤ max(atol, of_largest · the output's largest |theirs|) + rtol · |theirs|.

    The second part of the maximum is for what is rounded coarsely on the way: the error of a sum
    follows its largest terms, so that of a result near 0 follows the results beside it.
    """

    rtol: float
    atol: float
    of_largest: float = 0.0


# float16 has 11 bits: ten roundings of the largest value. Whole numbers of 8 bits: 16 steps of 256, since a sum
# that comes out in another order may fall on the other side of a half, and the step goes on to all that follows.
# And at least one step of a probability, whose outputs are rounded to 256 steps from 0 to 1 however small they are.
# SqueezeNet, ResNet-50 and MobileNet v2 with random weights come 1, 4 and 10 steps from ONNX Runtime.
DEFAULTS: Final[Mapping[str, Tolerance]] = {
    FLOAT32: Tolerance(1e-3, 1e-4),
    FLOAT16: Tolerance(1e-2, 1e-4, 10 / 2**11),
    QUANTISED: Tolerance(1e-2, 5e-3, 16 / 2**8),
}


def tolerance_of(arithmetic: str, checks: Mapping[str, Any]) -> Tolerance:
    """What fits the arithmetic, with what the recipe says in place of it; its `atol` stands alone."""
    found = DEFAULTS[arithmetic]
    if checks["rtol"] is not None:
        found = found._replace(rtol=checks["rtol"])
    if checks["atol"] is not None:
        found = found._replace(atol=checks["atol"], of_largest=0.0)
    return found


def arithmetic_of(model: Path, mixed: bool) -> str:
    """The coarsest that an imported model (`model.json`) computes in; `mixed` is built with weights of float16."""
    from tvm import relax

    from tvmflow.stages import _lowering

    main = _lowering.load_ir(model)["main"]
    operators: set[str] = set()
    halves: list[Any] = []

    def look(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            operators.add(str(getattr(expr.op, "name", "")))
        if isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype.dtype) == FLOAT16:
            halves.append(expr)

    relax.analysis.post_order_visit(main, look)
    if operators & {"relax.quantize", "relax.dequantize"}:
        return QUANTISED
    return FLOAT16 if halves or mixed else FLOAT32
