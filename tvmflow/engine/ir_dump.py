"""The dump of IR for `tvmflow run --dump-ir`: stages that lower a model lower it once more, into a folder.

Results and keys are not affected. Stages that are up to date are lowered too, so the dump does
not depend on the state of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import errors
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, StageError
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.types import Plan, StageSpec
from tvmflow.planning.decisions import PlanState, evaluate_plan, input_digests
from tvmflow.stages import STAGES
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

_PRELOAD: Final = ("numpy", "tvm")


class StageDump(NamedTuple):
    """The dump of one stage.

    Attributes:
        stage_id: The stage.
        folder: The folder with the files; None if the model could not be lowered.
        problem: Why the model could not be lowered to the end; empty if it could.
        exit_code: The exit code that this is worth.
    """

    stage_id: str
    folder: Path | None
    problem: str = ""
    exit_code: int = EXIT_OK


def dump_ir(plan: Plan, store: LocalStore, folder: Path) -> Iterator[StageDump]:
    """Lower the models of a plan once more, and write the IR after each pass.

    Args:
        plan: A plan that was run.
        store: The store with its results.
        folder: Where each stage gets a folder `<recipe>/<stage>+<target>`.

    Yields:
        The dump of each stage that lowers a model.

    Raises:
        StageError: No stage of the plan lowers a model.
    """
    specs = [spec for spec in plan.stages if STAGES[spec.stage].TRAITS.dump_ir]
    if not specs:
        names = " and ".join(name for name, stage in STAGES.items() if stage.TRAITS.dump_ir)
        raise StageError(
            "--dump-ir: no stage of this run lowers a model",
            fix=f"run {names}, for example without --until",
        )
    state = evaluate_plan(plan, store)
    with ForkServer.start(_PRELOAD) as fork_server:
        for spec in specs:
            target = folder / spec.recipe / spec.label.replace("/", "+")
            yield _dump_stage(spec, state, fork_server, target)


def _dump_stage(
    spec: StageSpec, state: PlanState, fork_server: ForkServer, folder: Path
) -> StageDump:
    missing = [need.maker for need in spec.needs if need.stage_id not in state.artifacts]
    if missing:
        return StageDump(spec.id, None, f"{missing[0]} has no result", EXIT_FAILED)
    # of a locked run, the lock file has the chosen schedules
    inputs = {file.role: file.path for file in spec.files} | {
        role: state.store.blobs.verified_path(digest)
        for role, digest in input_digests(spec, state.artifacts).items()
    }
    outcome = fork_server.call(
        STAGES[spec.stage].TRAITS.dump_ir,
        {"settings": spec.settings, "inputs": inputs, "folder": str(folder)},
        timeout_s=spec.timeout_s,
    )
    _log.debug("%s: dumping its IR ended with %s", spec.id, outcome.kind)
    if outcome.kind == "ok":
        return StageDump(spec.id, folder)
    error = getattr(errors, outcome.error, StageError)
    problem = f"{outcome.message}\n  fix: {outcome.fix}" if outcome.fix else outcome.message
    return StageDump(spec.id, folder, problem, error.exit_code)
