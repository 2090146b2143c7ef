"""Recipes, targets and plans for tests of the engine, without a model and without a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvmflow.core.types import Artifact, InputFile, Json, Plan, StageKey, StoredFile
from tvmflow.planning.plan import make_plan
from tvmflow.planning.recipes import LoadedRecipe, Pipeline, PlannedRecipe, Target
from tvmflow.recipe import Recipe
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

STAGES = ("import", "extract_tasks", "tune", "pick_best", "build", "export", "verify")
COMPILE = ("import", "build", "export", "verify")


def recipe(name: str = "net", **fields: Any) -> Recipe:
    """Return a recipe of an ONNX file `net.onnx`."""
    return Recipe.model_validate(
        {"recipe": 1, "name": name, "model": {"onnx": "net.onnx"}, **fields}
    )


def target(name: str = "host", *, threads: int = 2, why_not: str = "") -> ResolvedTarget:
    mapping: dict[str, Json] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": name}
    return ResolvedTarget(name, mapping, threads, (), {"kind": "cpu", "class": "any"}, why_not)


def joined_target(
    name: str = "split", *, why_not: str = "", until: tuple[str, ...] = ("middle",)
) -> PartitionedTarget:
    """Return a target of two parts: `first` gives the tensors `until` to `second`, which may not run here."""
    first = target(f"{name}.first")._replace(partitioned_target=name, output_tensors=until)
    second = target(f"{name}.second", why_not=why_not)._replace(
        partitioned_target=name, input_tensors=until
    )
    return PartitionedTarget(name, (first, second))


def planned(
    made: Recipe,
    *targets: Target,
    stages: tuple[str, ...] = STAGES,
    folder: str = "/recipes",
) -> PlannedRecipe:
    path = Path(folder, f"{made.name}.yaml")

    def where(*loc: str | int) -> str:
        return f"{path}:{'.'.join(map(str, loc))}"

    loaded = LoadedRecipe(made, path, where, (path,), Pipeline("tune", stages, path))
    model = InputFile("model", f"{folder}/net.onnx", where("model", "onnx"))
    return PlannedRecipe(loaded, stages, targets or (target(),), (model,))


def plan_of(*recipes: PlannedRecipe) -> Plan:
    return make_plan(recipes)


def artifact(key: StageKey, **files: str) -> Artifact:
    """Return a result whose files have these digests."""
    stored = tuple(StoredFile(name, digest, 1) for name, digest in files.items())
    return Artifact(key.digest, stored, {})
