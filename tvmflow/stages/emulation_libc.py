"""`emulation_libc`: compile the C library for emulation programs of an architecture."""

from __future__ import annotations

from typing import Final, NamedTuple

from tvmflow.core.types import RunTraits
from tvmflow.recipe import Recipe
from tvmflow.stages.base import StageContext, StageSettings, StageTraits, no_files, no_lines
from tvmflow.stages.verify_settings import QEMU
from tvmflow.targets.resolve import ResolvedTarget

NAME: Final = "emulation_libc"
TRAITS: Final = StageTraits(
    version=1,
    scope="machine",
    tools=("ziglang",),
    timeout_s=3600.0,
    added_with=("verify",),
    is_needed=lambda recipe: recipe.verify.run_on == QEMU,
    run=RunTraits(is_locked=False),
)
deliveries = no_files
describe = explain = no_lines


class EmulationLibcSettings(StageSettings):
    """The triple that the C library is compiled for."""

    compiled: str


def settings(recipe: Recipe, target: ResolvedTarget) -> EmulationLibcSettings:
    """Return the triple to compile for, from the target's architecture."""
    from tvmflow.targets.emulation import require_emulated_arch

    triple = str(target.tvm.get("mtriple", ""))
    return EmulationLibcSettings(compiled=require_emulated_arch(triple).zig_target)


class EmulationLibcFacts(NamedTuple):
    """The size of the C library."""

    bytes: int


def run(settings: EmulationLibcSettings, context: StageContext) -> EmulationLibcFacts:
    """Compile the C library."""
    from tvmflow.targets.emulation import build_libc

    build_libc(settings.compiled, context.out, context.work)
    return EmulationLibcFacts(sum(path.stat().st_size for path in context.out.iterdir()))
