"""The stages, from a model to verified files. Imports only recipe and lower layers.

To add a stage, write a module that implements `base.Stage`, and add a line here after the stages that it needs. Its
declarations put it into pipelines, plans, keys, reports and locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvmflow.core.types import Json
from tvmflow.stages import (
    build,
    choose,
    cut,
    emulation_libc,
    emulation_program,
    export,
    extract_tasks,
    import_model,
    join,
    lower,
    pick_best,
    quantize,
    tune,
    verify,
)
from tvmflow.stages.base import Stage, facts_type, parse_facts

# each stage has its own types of target, settings and facts
STAGES: Final[dict[str, Stage[Any, Any, Any]]] = {
    import_model.NAME: import_model,
    cut.NAME: cut,
    quantize.NAME: quantize,
    choose.NAME: choose,
    lower.NAME: lower,
    extract_tasks.NAME: extract_tasks,
    tune.NAME: tune,
    pick_best.NAME: pick_best,
    build.NAME: build,
    export.NAME: export,
    join.NAME: join,
    emulation_libc.NAME: emulation_libc,
    emulation_program.NAME: emulation_program,
    verify.NAME: verify,
}
"""All stages by name; each one follows the stages that it needs."""


def read_facts(stage: str, facts: Mapping[str, Json]) -> Any:
    """Return the typed facts of a stage; None if it has none, Mismatch if they do not fit the type."""
    return parse_facts(facts_type(STAGES[stage].run), facts) if stage in STAGES else None


def pipeline_stages() -> tuple[str, ...]:
    """Return the stages that a pipeline may list; other stages are added along with these."""
    return tuple(name for name, stage in STAGES.items() if not stage.TRAITS.added_with)


def required_stages(name: str) -> tuple[str, ...]:
    """Return the stages that a pipeline must list before a stage."""
    traits, named = STAGES[name].TRAITS, pipeline_stages()
    return tuple(
        need for need in traits.needs if need in named and need not in traits.optional_needs
    )
