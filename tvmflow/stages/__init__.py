"""Every stage, by the name that pipelines and the command line use, in the order in which they depend on each other."""

from __future__ import annotations

from typing import Final

from tvmflow.stages import (
    build,
    cut,
    export,
    extract_tasks,
    import_model,
    join,
    pick_best,
    runner,
    tune,
    verify,
)
from tvmflow.stages._base import Stage

STAGES: Final[dict[str, Stage]] = {
    "import": import_model,
    "extract_tasks": extract_tasks,
    "tune": tune,
    "pick_best": pick_best,
    "build": build,
    "export": export,
    "verify": verify,
}

EVERY_STAGE: Final[dict[str, Stage]] = {**STAGES, "cut": cut, "join": join, "runner": runner}
"""Also those that no pipeline names: a plan has them where another stage needs what they make."""
