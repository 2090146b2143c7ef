"""An executor that makes every stage's files without TVM: each says what its inputs say, in a few bytes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tvmflow.values import StageCall, StageResult

MAKES: Final = {
    "import": ("model.json", "params.safetensors", "signature.json"),
    "extract_tasks": ("tasks.json", "workloads.json"),
    "tune": ("records.json",),
    "pick_best": ("chosen.json", "roofline.svg"),
    "build": ("kernels.json", "lib0.o"),
    "export": ("module.tvmflow", "{name}.tvmflow"),
    "verify": ("verdict.json",),
}


class PretendExecutor:
    """Reads every input, as a stage would, and writes files whose content follows from theirs and the settings."""

    slots = 1

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self.cancelled = False
        self.ran: list[str] = []
        """The log that each stage which ran was given, without its ending: `recipe/stage+target`."""

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def execute(
        self, call: StageCall, log: Path, on_event: Callable[[dict[str, Any]], None]
    ) -> StageResult:
        with self._lock:
            self.ran.append(f"{log.parent.name}/{log.stem}")
        read = hashlib.sha256(repr((call.stage, sorted(call.settings.items()))).encode())
        for role, path in sorted(call.inputs.items()):
            # half of the wait comes between being given the paths and reading them
            time.sleep(self._seconds / 2 / len(call.inputs))
            read.update(role.encode() + Path(path).read_bytes())
        time.sleep(self._seconds / 2)
        for form in MAKES[call.stage]:
            name = form.format(name=call.settings.get("name"))
            Path(call.out, name).write_text(f"{name} {read.hexdigest()}\n")
        return StageResult("ok", "", "", {}, self._seconds, str(log))
