"""Found by every Python process of a sabotaged run: makes one stage crash, hang, fill the disk or come out otherwise each time."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support.importing import after_import

STAGE, HOW, TARGET = (os.environ.get("SABOTAGE") or "::").split(":")


def _misbehave() -> NoReturn:
    if HOW == "segfault":
        ctypes.string_at(0)
    if HOW == "full-disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    time.sleep(1000)
    raise AssertionError(f"unknown sabotage {HOW!r}")


def _scribble(path: Path) -> None:
    """Put another byte into an object's code each time, well behind its beginning."""
    from elftools.elf.elffile import ELFFile

    with path.open("r+b") as stream:
        text = ELFFile(stream).get_section_by_name(".text")
        place = text["sh_offset"] + text["sh_size"] - 5
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([(old + 1 + os.getpid() % 200) % 256]))


def _mcpu(settings: Mapping[str, Any]) -> str:
    return str(settings.get("target", {}).get("mcpu", ""))


def _sabotage(module: ModuleType) -> None:
    """Wrap `run` of the chosen stage's module."""
    run = module.run

    def sabotaged(settings: Mapping[str, Any], ctx: Any) -> Any:
        if HOW == "scribble":
            facts = run(settings, ctx)
            _scribble(ctx.out / "lib0.o")
            return facts
        if TARGET in ("", _mcpu(settings)):
            _misbehave()
        return run(settings, ctx)

    module.run = sabotaged  # type: ignore[attr-defined]


if STAGE:
    after_import(f"tvmflow.stages.{STAGE}", _sabotage)
