"""Imported by every Python process of a test's cluster: replaces all stages by a tiny one, and TVM is not loaded.

A stage writes what depends on its settings and inputs. `do` in its settings says what happens first:
`crash`, `say` the path of its model, `hang`, or `hang-once` (until the file `flag` is there).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tvmflow import stages
from tvmflow.core.errors import StageError
from tvmflow.executors import local
from tvmflow.stages.base import StageContext


def run(settings: Mapping[str, Any], context: StageContext) -> dict[str, Any]:
    """See the module."""
    do = settings.get("do")
    pids = [os.getpid(), *(process.pid for process in psutil.Process().parents())]
    context.emit({"event": "ready", "pids": pids})
    if do == "crash":
        ctypes.string_at(0)
    if do == "say":
        raise StageError(f"{context.inputs['model']} is not a model", fix="give another")
    if do == "hang-once" and Path(settings["flag"]).exists():
        do = ""
    if do in ("hang", "hang-once"):
        if do == "hang-once":
            Path(settings["flag"]).touch()
        time.sleep(100)
    inputs = sorted(context.inputs.items())
    came = "".join(f"{name} {path.read_text()[:40]}" for name, path in inputs)
    shown = {name: value for name, value in settings.items() if name not in ("do", "flag")}
    Path(context.out, "deep").mkdir()
    Path(context.out, "main.bin").write_text(f"{shown} {came}" * 50)
    Path(context.out, "deep", "more.bin").write_text("")
    print("a line for the log")
    return {"value": settings.get("value")}


for stage in stages.STAGES.values():
    stage.run = run  # type: ignore[method-assign]
local.PRELOADED = ("tvmflow.executors.stage_worker",)  # type: ignore[misc, assignment]
