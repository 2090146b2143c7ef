"""`emulation_program`: the static program in which `verify` runs a library under emulation.

It depends on the architecture alone: one serves all models, and all targets of that architecture.
Planned for targets whose libraries are verified under emulation.
"""

from __future__ import annotations

from typing import Final

from tvmflow.core.types import RunTraits
from tvmflow.recipe import Recipe
from tvmflow.stages._base import Facts, StageContext, StageSettings, StageTraits, no_files, no_lines
from tvmflow.targets.resolve import ResolvedTarget

PROGRAM: Final = "program"

TRAITS: Final = StageTraits(
    # raised when a file under `targets/emulation_program` changes, too
    version=3,
    scope="machine",
    tools=("apache-tvm", "apache-tvm-ffi", "ziglang"),
    timeout_s=3600.0,
    added_with="verify",
    is_needed=lambda recipe: recipe.verify.run_on == "qemu",
    run=RunTraits(is_locked=False),
)
deliveries = no_files
describe = explain = no_lines


class EmulationProgramSettings(StageSettings):
    """The triple that the program is compiled for."""

    compiled: str


def settings(recipe: Recipe, target: ResolvedTarget) -> EmulationProgramSettings:
    """Return the triple that serves the target's architecture."""
    from tvmflow.targets.emulation import require_emulated_arch

    triple = str(target.tvm.get("mtriple", ""))
    return EmulationProgramSettings(compiled=require_emulated_arch(triple).zig_target)


def run(settings: EmulationProgramSettings, context: StageContext) -> Facts:
    """Compile TVM's runtime and tvmflow's program into one static executable."""
    from tvmflow.targets.emulation_build import build_program

    output = context.out / PROGRAM
    build_program(settings.compiled, output, context.work)
    return {"compiled": settings.compiled, "bytes": output.stat().st_size}
