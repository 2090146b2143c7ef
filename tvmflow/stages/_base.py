"""What a stage is: a pure function from settings and input files to output files, and its declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Event = dict[str, Any]


class StageContext(NamedTuple):
    """What a stage's `run` is given beside its settings. Only `inputs` and the settings may shape the output.

    `inputs` maps `<stage>/<file>` (from the stages in NEEDS) and the role of each file from
    outside to paths that may be read. Files written into `out` become the artifact. `work`
    survives a kill, so that the stage can resume. `ledger` is the trial ledger's folder,
    `locks` the folder of device locks. `emit` sends a progress event (a small JSON object
    with the key `event`) to whoever watches the run.
    """

    inputs: Mapping[str, Path]
    out: Path
    work: Path
    ledger: Path
    locks: Path
    emit: Callable[[Event], None]


class Stage(Protocol):
    """One module in this folder."""

    @property
    def VERSION(self) -> int:
        """Raised whenever the same inputs would give another output."""

    @property
    def SCOPE(self) -> Literal["model", "target"]:
        """Once per model, or once per model and target."""

    @property
    def NEEDS(self) -> Mapping[str, tuple[str, ...]]:
        """Stage -> the files of its artifact that this one reads."""

    @property
    def READS(self) -> tuple[str, ...]:
        """Files from outside the store: `model`: its own, `reference`: the same outside the key, `data`: `verify.data`."""

    @property
    def TOOLS(self) -> tuple[str, ...]:
        """Distributions whose code can change the output."""

    @property
    def TIMEOUT_S(self) -> float:
        """Seconds after which a run is taken to hang."""

    def settings(self, recipe: Any, target: Any) -> dict[str, Any]:
        """The slice of the recipe (and of the resolved target) that the output depends on: plain JSON."""
        ...

    def run(self, settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
        """Fill `ctx.out`; return the facts that reports show. Raises StageError with a remedy."""
        ...
