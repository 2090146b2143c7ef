"""The function that a child of the fork server calls: it runs one stage."""

from __future__ import annotations

import logging
from pathlib import Path

from tvmflow.core import file_locks, logs
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
    file_locks.report_waits(lambda text: emit({"event": "waiting", "message": text}))
    call = StageCall.from_json(payload)
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
