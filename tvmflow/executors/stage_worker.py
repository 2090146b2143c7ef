"""The function that a fork server's child calls: it runs one stage."""

from __future__ import annotations

import logging
from pathlib import Path

from tvmflow.core import file_locks, logs, packages, spans
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.disk_errors import disk_errors, find_disk_problem
from tvmflow.core.errors import EnvironmentProblem, VerifyFailed
from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json, StageCall
from tvmflow.stages import STAGES
from tvmflow.stages.base import StageContext, parse_settings


def run_stage(payload: dict[str, Json], emit: Emit) -> dict[str, Json]:
    """Run the stage of a StageCall (as JSON), and return its facts; its log goes to stderr."""
    logs.configure(logging.DEBUG)
    file_locks.report_waits(lambda text: emit({"event": "waiting", "message": text}))
    spans.report_spans(emit)
    call = from_json(StageCall, payload)
    _check_tools(call)
    stage = STAGES[call.stage]
    settings = parse_settings(stage.run, call.settings)
    context = StageContext(
        inputs={name: Path(path) for name, path in call.inputs.items()},
        out=Path(call.out),
        work=Path(call.work),
        ledger=Path(call.ledger),
        locks=Path(call.locks),
        emit=emit,
    )
    try:
        with disk_errors(call.out):
            facts: dict[str, Json] = to_json(stage.run(settings, context))
            return facts
    except (EnvironmentProblem, VerifyFailed):
        raise
    except Exception as error:
        # Libraries report a full disk with error types of their own.
        problem = find_disk_problem(list_written_folders(call), str(error))
        if problem is None:
            raise
        raise problem from error


def list_written_folders(call: StageCall) -> list[str]:
    """Return the folders that a stage writes to, without those for temporary files."""
    return [call.out, call.work, *([call.ledger] if call.traits.uses_ledger else [])]


def _check_tools(call: StageCall) -> None:
    """Raise EnvironmentProblem if an installed package differs from the one that the plan was made with."""
    for name, planned in call.tools.items():
        actual = packages.identity(name)
        if actual != planned:
            raise EnvironmentProblem(
                f"{name} is {actual} at {packages.find_package(name).folder}, and {call.stage} was "
                f"planned with {planned}",
                fix="run again; if it was not changed during the run, check PYTHONPATH and the current "
                "folder with `tvmflow doctor`",
            )
