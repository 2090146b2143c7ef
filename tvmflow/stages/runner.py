"""`runner`: the program in which `verify` runs a library under emulation. Plans add it where a target is emulated.

It depends on the architecture alone: one serves all models, and all targets of that
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow.stages._base import StageContext

VERSION: Final = 1
"""Raised when a file under `targets/runner` changes, too."""
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi", "ziglang")
TIMEOUT_S: Final = 3600.0

RUNNER: Final = "runner"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """What it is compiled for."""
    from tvmflow.targets.emulation import machine_for

    return {"compiled": machine_for(str(target.tvm.get("mtriple", ""))).compiled}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Compile TVM's runtime and ours into one static executable."""
    from tvmflow.targets.emulation import build_runner

    output = ctx.out / RUNNER
    build_runner(settings["compiled"], output, ctx.work)
    return {"compiled": settings["compiled"], "bytes": output.stat().st_size}
