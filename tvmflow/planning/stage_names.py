"""Names of stages on the command line: `STAGE`, `STAGE/TARGET`, each also as `RECIPE:…`."""

from __future__ import annotations

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Plan, StageSpec


def find_stages(plan: Plan, name: str) -> tuple[StageSpec, ...]:
    """Return the stages of a plan that a name on the command line means, in the plan's order.

    Raises:
        UsageError: when there is none.
    """
    specs = tuple(spec for spec in plan.stages if name in _list_names(spec))
    if specs:
        return specs
    several = len({spec.recipe for spec in plan.stages}) > 1
    names = dict.fromkeys(name for spec in plan.stages for name in _list_names(spec))
    known = [spec.id if several else spec.label for spec in plan.stages]
    raise UsageError(
        f"there is no stage {quoted(name)}{did_you_mean(name, names)}",
        fix=f"the stages are: {names_text(known)}",
    )


def _list_names(spec: StageSpec) -> tuple[str, ...]:
    return (spec.stage, spec.label, f"{spec.recipe}:{spec.stage}", spec.id)
