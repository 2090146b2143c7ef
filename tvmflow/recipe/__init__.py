"""Recipes: YAML format, validation and JSON Schema. Imports only exporters and lower layers."""

from __future__ import annotations

from tvmflow.recipe._model_fields import DimensionSpec, InputSpec, ModelSource
from tvmflow.recipe._recipe import Recipe, StateSpec, Variant, json_schema
from tvmflow.recipe.sections import (
    LAST_RELEASE,
    NO_RELEASE,
    Gates,
    Kernels,
    Quantize,
    Release,
    Retune,
    Tune,
    Verify,
)
from tvmflow.recipe.targets import OUTPUT_NAMES, BuildTarget, Remote, TargetSpec, Toolchain

__all__ = [
    "LAST_RELEASE",
    "NO_RELEASE",
    "OUTPUT_NAMES",
    "BuildTarget",
    "DimensionSpec",
    "Gates",
    "InputSpec",
    "Kernels",
    "ModelSource",
    "Quantize",
    "Recipe",
    "Release",
    "Remote",
    "Retune",
    "StateSpec",
    "TargetSpec",
    "Toolchain",
    "Tune",
    "Variant",
    "Verify",
    "json_schema",
]
