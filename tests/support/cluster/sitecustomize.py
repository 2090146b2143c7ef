"""Found by every Python process of a test's cluster: every stage is the tiny one below, and no TVM is loaded.

A stage writes what depends on its settings and inputs. `do` in its settings says what happens first:
`crash`, `say` what it was given, `hang`, or `hang-once` (until the file `flag` is there).
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
from tvmflow.errors import StageError
from tvmflow.executors import processes


def run(settings: Mapping[str, Any], ctx: Any) -> dict[str, Any]:
    """See the module."""
    do = settings.get("do")
    pids = [os.getpid(), *(each.pid for each in psutil.Process().parents())]
    ctx.emit({"event": "ready", "pids": pids})
    if do == "crash":
        ctypes.string_at(0)
    if do == "say":
        raise StageError(f"{ctx.inputs['model']} is no model", fix="give another")
    if do == "hang-once" and Path(settings["flag"]).exists():
        do = ""
    if do in ("hang", "hang-once"):
        if do == "hang-once":
            Path(settings["flag"]).touch()
        time.sleep(100)
    inputs = sorted(ctx.inputs.items())
    came = "".join(f"{name} {path.read_text()[:40]}" for name, path in inputs)
    shown = {name: value for name, value in settings.items() if name not in ("do", "flag")}
    Path(ctx.out, "deep").mkdir()
    Path(ctx.out, "main.bin").write_text(f"{shown} {came}" * 50)
    Path(ctx.out, "deep", "more.bin").write_text("")
    print("a line for the log")
    return {"value": settings.get("value")}


for stage in stages.EVERY_STAGE.values():
    stage.run = run  # type: ignore[method-assign]
processes._PRELOAD = ("tvmflow.executors.worker",)  # type: ignore[misc, assignment]
