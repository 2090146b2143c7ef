"""Runs one stage in a worker process: what the nursery's child calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow.stages import EVERY_STAGE
from tvmflow.stages._base import StageContext
from tvmflow.stores.local import disk_errors
from tvmflow.values import StageCall


def run_stage(payload: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the stage of a StageCall (as a dict) and give its facts."""
    call = StageCall(**payload)
    context = StageContext(
        inputs={name: Path(path) for name, path in call.inputs.items()},
        out=Path(call.out),
        work=Path(call.work),
        ledger=Path(call.ledger),
        locks=Path(call.locks),
        emit=emit,
    )
    with disk_errors(call.out):
        return EVERY_STAGE[call.stage].run(call.settings, context)
