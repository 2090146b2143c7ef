"""The stages, from a model to verified files. Imports recipe and what is below it.

To add a stage, write a module with the shape of `_base.Stage` and its line here, after the stages
that it needs. Its declarations put it into pipelines, plans, keys, reports and locks.
"""

from __future__ import annotations

from typing import Any, Final

from tvmflow.stages import (
    build,
    cut,
    emulation_libc,
    emulation_program,
    export,
    extract_tasks,
    import_model,
    join,
    pick_best,
    tune,
    verify,
)
from tvmflow.stages.base import Stage

# each stage has its own types of target and settings
STAGES: Final[dict[str, Stage[Any, Any]]] = {
    "import": import_model,
    "cut": cut,
    "extract_tasks": extract_tasks,
    "tune": tune,
    "pick_best": pick_best,
    "build": build,
    "export": export,
    "join": join,
    "emulation_libc": emulation_libc,
    "emulation_program": emulation_program,
    "verify": verify,
}
"""Every stage by its name, each after those that it needs."""


def pipeline_stages() -> tuple[str, ...]:
    """Return the names that a pipeline may list; the other stages are planned along with these."""
    return tuple(name for name, stage in STAGES.items() if not stage.TRAITS.added_with)


def required_stages(name: str) -> tuple[str, ...]:
    """Return the stages that a pipeline must list before a stage."""
    traits, named = STAGES[name].TRAITS, pipeline_stages()
    return tuple(
        need for need in traits.needs if need in named and need not in traits.optional_needs
    )
