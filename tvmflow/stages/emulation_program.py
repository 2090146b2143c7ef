"""`emulation_program`: link the static program that `verify` runs in an emulator.

It contains the kernels and constants of the delivered library.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.files import digest_files
from tvmflow.exporters import c_library
from tvmflow.recipe import Recipe
from tvmflow.stages import emulation_libc
from tvmflow.stages.base import StageContext, StageSettings, StageTraits, no_files, no_lines
from tvmflow.stages.export import NamedIsaLevel, NamedTarget, join_isa_levels, list_codes
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.emulation import SOURCES, build_program
from tvmflow.targets.resolve import ResolvedTarget

PROGRAM: Final = "program"

NAME: Final = "emulation_program"
# Its traits are those of `emulation_libc`, except for these fields.
TRAITS: Final[StageTraits] = replace(
    emulation_libc.TRAITS,
    version=6,
    needs={"import": ("signature.json",), "build": (), "emulation_libc": ()},
    needs_of_isa_levels=("build",),
)
deliveries = no_files
describe = explain = no_lines


class EmulationProgramSettings(StageSettings):
    """The model's name, the triple that the program is compiled for, and its checks.

    `features` holds the CPU features that kernels need; `sources` is the digest of the program's source files.
    """

    name: str
    compiled: str
    features: tuple[str, ...]
    sources: str
    levels: tuple[NamedIsaLevel, ...] = ()


def settings(recipe: Recipe, target: ResolvedTarget) -> EmulationProgramSettings:
    """Return the dependencies of the program, besides the compiled code."""
    return EmulationProgramSettings(
        name=recipe.name,
        compiled=emulation_libc.settings(recipe, target).compiled,
        features=target.features,
        sources=digest_files({*SOURCES, *c_runtime.list_sources(bool(target.levels))}),
        levels=NamedTarget.of(target).levels,
    )


class EmulationProgramFacts(NamedTuple):
    """The triple that the program is compiled for, and its size."""

    compiled: str
    bytes: int


def run(settings: EmulationProgramSettings, context: StageContext) -> EmulationProgramFacts:
    """Compile the model's C code, and link it with kernels, constants and the C library."""
    signature = json.loads(context.inputs["import/signature.json"].read_text())
    codes = list_codes(settings.levels)
    model = DescribedModel(
        name=settings.name,
        signature=signature,
        features=settings.features,
        triple=settings.compiled,
        levels=codes,
    )
    output = context.out / PROGRAM
    compiled = _list_files(context, f"build/{c_library.FORM}")
    if codes:
        files = {c.name: _list_files(context, f"build/{c.name}/{c_library.FORM}") for c in codes}
        compiled = join_isa_levels(files, context.work)
    build_program(model, compiled, _list_files(context, "emulation_libc"), output)
    return EmulationProgramFacts(settings.compiled, output.stat().st_size)


def _list_files(context: StageContext, folder: str) -> dict[str, Path]:
    return {
        role.removeprefix(f"{folder}/"): path
        for role, path in context.inputs.items()
        if role.startswith(f"{folder}/")
    }
