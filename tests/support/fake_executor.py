"""An executor that writes every stage's files without TVM: a few bytes that depend on the inputs."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tvmflow.core.types import StageCall, StageResult

STAGE_FILES: Final = {
    "import": ("model.json", "params.safetensors", "signature.json", "nodes.json"),
    "lower": ("lowered.json",),
    "extract_tasks": ("tasks.json", "workloads.json"),
    "tune": ("records.json",),
    "pick_best": ("chosen.json", "roofline.svg"),
    "build": ("kernels.json", "lib0.o"),
    "export": ("module.tvmflow", "{name}.tvmflow"),
    "verify": ("verdict.json", "measurements.json"),
}


class FakeExecutor:
    """An executor that reads every input, as a stage does, and writes files whose content follows from inputs and settings."""

    slots = 1

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self.cancelled = False
        self.ran: list[str] = []
        """The log files of the stages that ran, without suffix: `recipe/stage+target`."""

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def execute(
        self, call: StageCall, log: Path, on_event: Callable[[dict[str, Any]], None]
    ) -> StageResult:
        with self._lock:
            self.ran.append(f"{log.parent.name}/{log.stem}")
        digest = hashlib.sha256(repr((call.stage, sorted(call.settings.items()))).encode())
        for role, path in sorted(call.inputs.items()):
            # half of the delay is between receiving the paths and reading them
            time.sleep(self._seconds / 2 / len(call.inputs))
            digest.update(role.encode() + Path(path).read_bytes())
        time.sleep(self._seconds / 2)
        for form in STAGE_FILES[call.stage]:
            name = form.format(name=call.settings.get("name"))
            Path(call.out, name).write_text(f"{name} {digest.hexdigest()}\n")
        return StageResult("ok", "", "", {}, self._seconds, str(log))
