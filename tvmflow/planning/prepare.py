"""From the request of a command line to a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError, UsageError, merge_recipe_errors
from tvmflow.core.formatting import excerpt, names_text
from tvmflow.core.types import Plan
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._inputs import (
    find_input_problems,
    find_output_problems,
    resolve_inputs,
)
from tvmflow.operators._files import list_operator_files
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.enforce_lock import enforce_lock
from tvmflow.planning.image_data import list_images, list_mismatches
from tvmflow.planning.pipelines import Pipeline, load_pipeline, pipeline_candidates
from tvmflow.planning.plan import make_plan
from tvmflow.planning.planned_recipe import PlannedRecipe
from tvmflow.planning.recipes import LoadedRecipe
from tvmflow.planning.request import RunRequest, load_request
from tvmflow.planning.target_resolution import resolve_targets
from tvmflow.recipe.lock_file import Lock, read_lock
from tvmflow.store.download_attempt import OnProgress
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles

_log = logging.getLogger(__name__)


class PreparedRun(NamedTuple):
    """A plan with all that it was made from.

    Attributes:
        plan: The plan.
        recipes: The recipes and variants in it.
        reads: The paths of every file that planning read or looked for.
        started_ns: When planning began.
        pipeline: The pipeline that the command line named in place of recipes.
    """

    plan: Plan
    recipes: tuple[PlannedRecipe, ...]
    reads: tuple[str, ...]
    started_ns: int
    pipeline: Pipeline | None = None


def prepare_run(
    request: RunRequest, store: LocalStore, on_download: OnProgress | None = None
) -> PreparedRun:
    """Plan what a command line requests.

    Args:
        request: What it requests.
        store: The store.
        on_download: Called a few times a second while a file is downloaded for what it says of others.

    Raises:
        RecipeError: with all mistakes in all recipes.
        DownloadError: when the address of a model has to be looked up, and cannot be.
        UsageError: when the request names something that does not exist.
    """
    started_ns = time.time_ns()
    loaded, pipeline = load_request(request)
    lock = read_lock(Path(request.lock)) if request.lock else None
    reads = [lock.path] if lock else []
    planned: list[PlannedRecipe] = []
    errors: list[RecipeError] = []
    sources = SourceFiles(store, on_download)
    for recipe in loaded:
        try:
            recipes, recipe_reads = _plan_recipe(recipe, request, store, lock, sources)
        except RecipeError as error:
            errors.append(error)
            continue
        planned += recipes
        reads += recipe_reads
    if errors:
        # A pipeline that several recipes share has the same mistakes for each of them.
        raise merge_recipe_errors(errors)
    plan = make_plan(planned)
    if lock and not request.updates_lock:
        plan = enforce_lock(lock, plan, PlanState(store), store)
    _log.debug("planned %d stages from %d files", len(plan.stages), len(reads))
    paths = tuple(str(path.absolute()) for path in reads)
    return PreparedRun(plan, tuple(planned), paths, started_ns, pipeline)


def _plan_recipe(
    recipe: LoadedRecipe,
    request: RunRequest,
    store: LocalStore,
    lock: Lock | None,
    sources: SourceFiles,
) -> tuple[list[PlannedRecipe], list[Path]]:
    """Return a recipe, or its variants, with stages, targets and model files, and the files that were read."""
    pipeline = load_pipeline(request.pipeline) if request.pipeline else recipe.pipeline
    # A pipeline of that name may be created in a folder that is searched first.
    pipeline_name = request.pipeline or recipe.recipe.pipeline
    reads = [*recipe.read, pipeline.path, *pipeline_candidates(pipeline_name, recipe.path.parent)]
    model, folder = recipe.recipe.model, recipe.path.parent.absolute()
    files = FRONTENDS[model.kind].files(model, folder, partial(recipe.where, "model"), sources)
    # The model itself names the further files that it consists of.
    reads += [Path(file.path) for file in files if file.role == "model" and file.path]
    names, where = recipe.recipe.operators, partial(recipe.where, "operators")
    operators = list_operator_files(names, folder, where)
    reads += [*(Path(file.path) for file in operators.files), *operators.candidates]
    targets, target_reads = resolve_targets(recipe, request.targets, store, lock)
    variants = [
        name for name in recipe.recipe.variants if name in request.variants or not request.variants
    ]
    stages, until = pipeline.stages, request.until
    if until is not None:
        if until not in stages:
            raise UsageError(
                f"--until {until}: the pipeline '{pipeline_name}' of {recipe.path} has no such stage",
                fix=f"its stages are {names_text(stages)}",
            )
        stages = stages[: stages.index(until) + 1]
    planned = [
        PlannedRecipe(recipe, stages, targets, files, variant, str(pipeline.path), operators.files)
        for variant in variants or [""]
    ]
    problems = [problem for entry in planned for problem in _list_signature_problems(entry)]
    if problems:
        # A problem of one variant is a problem of all.
        raise RecipeError(list(dict.fromkeys(problems)))
    images = list_images(planned)
    planned = [entry._replace(images=images.files) for entry in planned]
    return planned, [*reads, *target_reads, *images.read]


def _list_signature_problems(planned: PlannedRecipe) -> Iterator[str]:
    """Give what is wrong with inputs and outputs, as far as the model's files tell without a framework."""
    recipe = planned.recipe
    if not planned.model_files[0].path:
        # the import says it of a model that has yet to be downloaded
        return
    files = {file.role: Path(file.path) for file in planned.model_files}
    requests = [spec.request(name) for name, spec in recipe.inputs.items()]
    frontend = FRONTENDS[recipe.model.kind]
    inputs = frontend.read_inputs(files)
    for text in find_output_problems(frontend.read_outputs(files)):
        yield f"{planned.loaded.where('model')}: model: {text}"
    problems = list(find_input_problems(inputs, requests))
    for problem in problems:
        loc = planned.input_loc(problem)
        yield f"{planned.loaded.where(*loc)}: {excerpt('.'.join(loc))}: {problem.text}"
    if not problems:
        yield from list_mismatches(planned, resolve_inputs(inputs, requests))
