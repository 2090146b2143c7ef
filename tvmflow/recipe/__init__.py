"""The public language: what a recipe and a pipeline may say."""

from __future__ import annotations

from tvmflow.recipe._closed import Closed, Version
from tvmflow.recipe._loading import LoadedRecipe, load_recipe
from tvmflow.recipe._model import InputSpec, ModelSource, MxnetSource
from tvmflow.recipe._pipelines import (
    STAGE_NAMES,
    Pipeline,
    PipelineFile,
    is_pipeline,
    load_pipeline,
    pipeline_candidates,
)
from tvmflow.recipe._recipe import Recipe, Variant, json_schema
from tvmflow.recipe._release import LAST, NONE, Gates, Release, Retune
from tvmflow.recipe._targets import (
    OF_THE_WHOLE,
    OUTPUT_NAMES,
    Machine,
    Remote,
    TargetSpec,
    Toolchain,
)
from tvmflow.recipe._work import Kernels, Tune, Verify

__all__ = [
    "LAST",
    "NONE",
    "OF_THE_WHOLE",
    "OUTPUT_NAMES",
    "STAGE_NAMES",
    "Closed",
    "Gates",
    "InputSpec",
    "Kernels",
    "LoadedRecipe",
    "Machine",
    "ModelSource",
    "MxnetSource",
    "Pipeline",
    "PipelineFile",
    "Recipe",
    "Release",
    "Remote",
    "Retune",
    "TargetSpec",
    "Toolchain",
    "Tune",
    "Variant",
    "Verify",
    "Version",
    "is_pipeline",
    "json_schema",
    "load_pipeline",
    "load_recipe",
    "pipeline_candidates",
]
