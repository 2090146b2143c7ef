"""The function that a child of the fork server calls: it runs one stage."""

from __future__ import annotations

import logging
from pathlib import Path

from tvmflow.core import logs, packages
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json, StageCall
from tvmflow.stages import STAGES
from tvmflow.stages._base import StageContext, parse_settings
from tvmflow.store.disk import disk_errors


def run_stage(payload: dict[str, Json], emit: Emit) -> dict[str, Json]:
    """Run the stage of a StageCall (as JSON), and return its facts.

    Its decisions go to stderr, which is the stage's log file here.
    """
    logs.configure(logging.DEBUG)
    call = StageCall.from_json(payload)
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
    with disk_errors(call.out):
        return dict(stage.run(settings, context))


def _check_tools(call: StageCall) -> None:
    """Raise EnvironmentProblem when this process imports another package than the key of the stage names."""
    for name, planned in call.tools.items():
        actual = packages.identity(name)
        if actual != planned:
            raise EnvironmentProblem(
                f"{name} is {actual} at {packages.find_package(name).folder}, and {call.stage} was "
                f"planned with {planned}",
                fix="run again; if it was not changed during the run, check PYTHONPATH and the current "
                "folder with `tvmflow doctor`",
            )
