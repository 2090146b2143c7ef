"""Planning of a command line's request: recipes, targets, files and checks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from tvmflow.core import packages
from tvmflow.core.errors import (
    EnvironmentProblem,
    RecipeError,
    TvmflowError,
    UsageError,
    merge_recipe_errors,
)
from tvmflow.core.file_kinds import NPZ, STAND_INS, ZIP, recognize
from tvmflow.core.formatting import count_text, excerpt, names_text
from tvmflow.core.logs import IDENTITY_WAIT, explain_wait
from tvmflow.core.named_files import missing_file_text
from tvmflow.core.schema import ClosedModel, first_field_error, list_set_fields
from tvmflow.core.text import did_you_mean, nearest
from tvmflow.core.types import Json, Plan, TensorSpec
from tvmflow.custom_operators.loading import list_operator_files
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import InputProblem, InputRequest, ModelInput, ModelOutput
from tvmflow.frontends.inputs import find_input_problems, find_output_problems, resolve_inputs
from tvmflow.planning.checks import check_quantized_names, enforce_lock
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.plan import find_stages, list_known_tools, make_plan
from tvmflow.planning.recipes import (
    LoadedRecipe,
    Pipeline,
    PlannedRecipe,
    Target,
    is_pipeline,
    load_pipeline,
    load_recipe,
    pipeline_candidates,
)
from tvmflow.recipe import BuildTarget, Recipe, TargetSpec
from tvmflow.recipe.lock_file import Lock, read_lock
from tvmflow.recipe.sections import TuneOverrides
from tvmflow.recipe.yaml_files import dotted
from tvmflow.runtime.image_files import check_files, is_pillow_installed
from tvmflow.runtime.images import ImageMismatch, Preprocessing
from tvmflow.runtime.labels import parse_labels
from tvmflow.runtime.npz import describe_npz
from tvmflow.runtime.samples import make_samples
from tvmflow.stages import STAGES, export, pipeline_stages, verify
from tvmflow.stages.images import ImageList, is_image_data, is_table, list_folder, read_table
from tvmflow.store.downloads import OnProgress
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles
from tvmflow.targets import toolchain
from tvmflow.targets.host import read_host
from tvmflow.targets.llvm_query import Query, load_target_facts, query_targets_in_process
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget, resolve


class RunRequest(NamedTuple):
    """The request of a command line: recipes, or a pipeline that names recipes; empty filters select all.

    `pipeline` replaces the recipes' pipelines, `until` is the last stage to run, and stages in `force` must run. With
    `updates_lock`, the lock file is not enforced: its targets and schedules are used, and the file is written again.
    `minutes` of search per target replace the recipes' budgets; 0 for no search.
    """

    recipes: tuple[str, ...]
    pipeline: str | None = None
    targets: tuple[str, ...] = ()
    until: str | None = None
    variants: tuple[str, ...] = ()
    lock: str | None = None
    updates_lock: bool = False
    minutes: float | None = None
    force: tuple[str, ...] = ()


def load_request(request: RunRequest) -> tuple[list[LoadedRecipe], Pipeline | None]:
    """Return all recipes of a request, and its pipeline if it names one in place of recipes.

    Raises:
        RecipeError: with all mistakes in all recipes and pipelines.
        UsageError: if the request names a target, variant, stage or file that does not exist.
    """
    if request.minutes is not None and request.lock and not request.updates_lock:
        raise UsageError(
            "--minutes cannot be combined with --locked: a locked run searches nothing",
            fix="leave out one of them",
        )
    pipeline = _find_pipeline(request)
    recipes = _load_recipes(map(str, pipeline.recipes) if pipeline else request.recipes)
    if pipeline:
        recipes = [
            entry._replace(pipeline=pipeline, read=(*entry.read, pipeline.path))
            for entry in recipes
        ]
    if pipeline and pipeline.targets:
        recipes = [_with_targets(entry, pipeline) for entry in recipes]
    if request.minutes is not None:
        recipes = [_with_minutes(entry, request.minutes) for entry in recipes]
    _check_names(request, recipes)
    _log.debug("loaded %s", ", ".join(str(entry.path) for entry in recipes))
    return recipes, pipeline


def _find_pipeline(request: RunRequest) -> Pipeline | None:
    """Return the pipeline that the request names in place of recipes."""
    paths = [path for path in request.recipes if is_pipeline(Path(path))]
    if not paths:
        return None
    if len(request.recipes) > 1 or request.pipeline:
        raise UsageError(
            f"{paths[0]} is a pipeline and cannot be combined with recipes or --pipeline",
            fix="run it alone, or give its name with --pipeline",
        )
    pipeline = load_pipeline(paths[0])
    if not pipeline.recipes:
        raise UsageError(
            f"{paths[0]}: this pipeline names no recipes",
            fix=f"give a recipe, and --pipeline {paths[0]}",
        )
    return pipeline


def _load_recipes(paths: Iterable[str]) -> list[LoadedRecipe]:
    loaded, errors = [], []
    # Different paths to the same file are one recipe.
    named: dict[Path, Path] = {}
    for path in map(Path, paths):
        named.setdefault(Path(os.path.realpath(path.parent), path.name), path)
    for path in named.values():
        try:
            loaded.append(load_recipe(path))
        except RecipeError as error:
            errors.append(error)
    if errors:
        raise merge_recipe_errors(errors)
    return loaded


def _with_targets(entry: LoadedRecipe, pipeline: Pipeline) -> LoadedRecipe:
    def where(*loc: str | int) -> str:
        find = pipeline.where if loc[:1] == ("targets",) and pipeline.where else entry.where
        return find(*loc)

    try:
        fields = {**list_set_fields(entry.recipe), "targets": pipeline.targets}
        recipe = Recipe.model_validate(fields)
    except ValidationError as error:
        text = first_field_error(error)[0]
        raise RecipeError(
            f"{where('targets')}: targets: with these targets, {entry.path} is not valid: {text}"
        ) from None
    return entry._replace(recipe=recipe, where=where)


def _with_minutes(entry: LoadedRecipe, minutes: float) -> LoadedRecipe:
    """Replace the search budget of a recipe, its targets and their parts."""
    budget = {"minutes": minutes} if minutes else {"trials": 0}
    fields = list_set_fields(entry.recipe)
    fields["tune"] = {**_list_other_fields(entry.recipe.tune), **budget}
    fields["targets"] = tuple(map(_without_budget, entry.recipe.targets))
    try:
        return entry._replace(recipe=Recipe.model_validate(fields))
    except ValidationError as error:
        text = first_field_error(error)[0]
        raise UsageError(
            f"--minutes {minutes:g}: with this budget, {entry.path} is not valid: {text}"
        ) from None


def _list_other_fields(tune: ClosedModel) -> dict[str, Any]:
    """Return the explicitly set fields of `tune`, or of its overrides, without the budget."""
    fields = list_set_fields(tune)
    return {name: fields[name] for name in fields if name not in ("trials", "minutes")}


def _without_budget(target: BuildTarget) -> BuildTarget:
    changes: dict[str, Any] = {}
    if target.tune is not None:
        overrides = _list_other_fields(target.tune)
        changes["tune"] = TuneOverrides.model_validate(overrides) if overrides else None
    if isinstance(target, TargetSpec) and target.parts:
        changes["parts"] = tuple(map(_without_budget, target.parts))
    return target.model_copy(update=changes)


def _check_names(request: RunRequest, recipes: Sequence[LoadedRecipe]) -> None:
    targets = {target.name for entry in recipes for target in entry.recipe.targets}
    variants = {variant for entry in recipes for variant in entry.recipe.variants}
    until = () if request.until is None else (request.until,)
    if request.until in STAGES and request.until not in pipeline_stages():
        raise UsageError(
            f"--until {request.until}: a pipeline does not list this stage, which others add",
            fix=f"name one that does: {names_text(STAGES[request.until].TRAITS.added_with)}",
        )
    for option, names, valid in (
        ("--until", until, pipeline_stages()),
        ("--target", request.targets, targets),
        ("--variant", request.variants, variants),
    ):
        for name in (name for name in names if name not in valid):
            candidates = nearest(name, valid)
            hint = f"did you mean '{candidates[0]}'? " if candidates else ""
            known = f"there are: {', '.join(sorted(valid))}" if valid else "there are none"
            raise UsageError(f"{option} {name}: there is no such name", fix=hint + known)


# ---------------------------------------------------------------- target resolution


class _Entry(NamedTuple):
    """A target that code is built for, and its position in the recipe."""

    target: BuildTarget
    loc: tuple[str | int, ...]


def resolve_targets(
    recipe: LoadedRecipe,
    only: Sequence[str],
    store: LocalStore,
    lock: Lock | None,
    query: Query = query_targets_in_process,
) -> tuple[tuple[Target, ...], tuple[Path, ...]]:
    """Resolve the targets of a recipe; also return all paths that were searched for linkers.

    In a locked run, `host` is the host from the lock file. Raises RecipeError with every target that LLVM does not know
    and every linker that is not installed.
    """
    entries = _list_entries(recipe, only)
    toolchains, reads = _identify_toolchains(recipe, entries, store)
    resolved = _resolve_entries(recipe, entries, toolchains, store, lock, query)
    specs = [spec for spec in recipe.recipe.targets if not only or spec.name in only]
    return tuple(_join_builds(spec, resolved) for spec in specs), reads


def _join_builds(spec: TargetSpec, resolved: Mapping[str, ResolvedTarget]) -> Target:
    """Combine the resolved parts or ISA levels of a target, if it has any."""
    if spec.parts:
        return _partition(spec, resolved)
    if spec.all_isa_levels:
        levels = tuple(
            resolved[name]._replace(isa_level_target=spec.name) for name in spec.build_targets()
        )
        return levels[0]._replace(name=spec.name, levels=levels, isa_level_target="")
    target, tvm = resolved[spec.name], spec.webgpu_target()
    if tvm is None:
        return target
    return target._replace(webgpu=target._replace(name=spec.webgpu_name, tvm=tvm, features=()))


def _list_entries(recipe: LoadedRecipe, only: Sequence[str]) -> dict[str, _Entry]:
    """Return the targets to build for by name: single targets, parts and ISA levels."""
    entries: dict[str, _Entry] = {}
    for index, spec in enumerate(recipe.recipe.targets):
        if only and spec.name not in only:
            continue
        for part_index, (name, target) in enumerate(spec.build_targets().items()):
            part = ("parts", part_index) if spec.parts else ()
            entries[name] = _Entry(target, ("targets", index, *part))
    return entries


def _resolve_entries(
    recipe: LoadedRecipe,
    entries: Mapping[str, _Entry],
    toolchains: Mapping[str, Json],
    store: LocalStore,
    lock: Lock | None,
    query: Query,
) -> dict[str, ResolvedTarget]:
    host = read_host()
    mappings = [
        entry.target.tvm_target() or _find_locked_host(lock, recipe, name)
        for name, entry in entries.items()
    ]
    all_facts = load_target_facts(store, mappings, host, query)
    problems, resolved = [], {}
    for (name, entry), mapping, facts in zip(entries.items(), mappings, all_facts, strict=True):
        if facts.error:
            hint = did_you_mean(str((mapping or {}).get("mcpu", "")), facts.valid_cpus)
            loc = (*entry.loc, "tvm") if entry.target.tvm else entry.loc
            problems.append(f"{recipe.where(*loc)}: {dotted(loc)}: {facts.error}{hint}")
            continue
        rpc, threads = entry.target.remote, entry.target.wanted_threads
        remote = rpc and rpc.model_dump(mode="json", exclude_none=True)
        linker = toolchains.get(name)
        resolved[name] = resolve(name, mapping, threads, host, facts, remote, linker)
        _log.debug("target %s is %s", name, resolved[name].tvm)
    if problems:
        raise RecipeError(problems)
    return resolved


def _find_locked_host(
    lock: Lock | None, recipe: LoadedRecipe, target: str
) -> Mapping[str, Json] | None:
    if lock is None:
        return None
    # All variants were built for the same host.
    variants = [recipe.recipe.for_variant(variant).name for variant in recipe.recipe.variants]
    locked = lock.target([recipe.recipe.name, *variants], target)
    return locked.tvm if locked else None


def _partition(spec: TargetSpec, resolved: Mapping[str, ResolvedTarget]) -> PartitionedTarget:
    """Return a partitioned target; each part can read the output tensors of all earlier parts."""
    parts: list[ResolvedTarget] = []
    tensors: tuple[str, ...] = ()
    for name, part in zip(spec.build_targets(), spec.parts, strict=True):
        parts.append(
            resolved[name]._replace(
                partitioned_target=spec.name, input_tensors=tensors, output_tensors=part.until
            )
        )
        tensors += part.until
    return PartitionedTarget(spec.name, tuple(parts))


def _identify_toolchains(
    recipe: LoadedRecipe, entries: Mapping[str, _Entry], store: LocalStore
) -> tuple[dict[str, Json], tuple[Path, ...]]:
    """Return the identity of each target's own linker, and all paths that were searched."""
    identities: dict[str, Json] = {}
    reads: list[Path] = []
    problems = []
    for name, entry in entries.items():
        if entry.target.toolchain is None:
            continue
        linker, flags = entry.target.toolchain.linker, entry.target.toolchain.flags
        try:
            program = toolchain.find_program(linker)
        except toolchain.ProgramNotFound:
            loc = (*entry.loc, "toolchain", "linker")
            problems.append(
                f"{recipe.where(*loc)}: {dotted(loc)}: there is no program '{linker}' on PATH; "
                f"{toolchain.INSTALL}"
            )
            continue
        reads += [Path(path) for path in program.searched]
        identities[name] = _identify_linker(linker, flags, program.path, store)
    if problems:
        raise RecipeError(problems)
    return identities, tuple(reads)


def _identify_linker(linker: str, flags: Sequence[str], path: str, store: LocalStore) -> Json:
    """Return the identity of a linker; the store caches the version of each program."""
    digest = FileDigests(store).digest(path)
    version = store.notes.read("facts", f"linker-{digest}")
    if version is None:
        version = toolchain.read_version(path)
        store.notes.keep(version, "facts", f"linker-{digest}")
    return toolchain.identify(linker, flags, digest, version)


_log = logging.getLogger(__name__)


class PreparedRun(NamedTuple):
    """A plan with its recipes, all files that were read, and the ids of stages that must run."""

    plan: Plan
    recipes: tuple[PlannedRecipe, ...]
    reads: tuple[str, ...]
    started_ns: int
    pipeline: Pipeline | None = None
    forced: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """True if the run neither makes a release nor spends a shared tuning budget."""
        return self.pipeline is None or not (self.pipeline.release or self.pipeline.retune)


def prepare_run(
    request: RunRequest,
    store: LocalStore,
    on_download: OnProgress | None = None,
    query: Query = query_targets_in_process,
) -> PreparedRun:
    """Plan the request of a command line; `query` asks LLVM about targets without facts in the store.

    Raises:
        RecipeError: with all mistakes in all recipes.
        DownloadError: if the address of a model cannot be looked up.
        UsageError: if the request names something that does not exist.
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
            recipes, recipe_reads = _plan_recipe(recipe, request, store, lock, sources, query)
        except RecipeError as error:
            errors.append(error)
            continue
        planned += recipes
        reads += recipe_reads
    if errors:
        # Mistakes in a pipeline that several recipes share are reported once.
        raise merge_recipe_errors(errors)
    plan = make_plan(planned)
    if lock and not request.updates_lock:
        plan = enforce_lock(lock, plan, PlanState(store), store)
    _log.debug("planned %d stages from %d files", len(plan.stages), len(reads))
    paths = tuple(str(path.absolute()) for path in reads)
    run = PreparedRun(plan, tuple(planned), paths, started_ns, pipeline=pipeline)
    forced = (spec.id for name in request.force for spec in find_stages(plan, name))
    return run._replace(forced=frozenset(forced))


def _plan_recipe(
    recipe: LoadedRecipe,
    request: RunRequest,
    store: LocalStore,
    lock: Lock | None,
    sources: SourceFiles,
    query: Query,
) -> tuple[list[PlannedRecipe], list[Path]]:
    """Plan a recipe or each of its variants; also return all files read."""
    pipeline = load_pipeline(request.pipeline) if request.pipeline else recipe.pipeline
    # All candidates are watched, because a pipeline of that name may appear in a folder that is searched first.
    pipeline_name = request.pipeline or recipe.recipe.pipeline
    reads = [*recipe.read, pipeline.path, *pipeline_candidates(pipeline_name, recipe.path.parent)]
    model, folder = recipe.recipe.model, recipe.path.parent.absolute()
    files = FRONTENDS[model.kind].files(model, folder, partial(recipe.where, "model"), sources)
    # A model file is watched, because it names the other files of the model.
    reads += [Path(file.path) for file in files if file.role == "model" and file.path]
    names, where = recipe.recipe.operators, partial(recipe.where, "operators")
    operators = list_operator_files(names, folder, where)
    reads += [*(Path(file.path) for file in operators.files), *operators.candidates]
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
    bare = PlannedRecipe(
        recipe, stages, (), files, next(iter(variants), ""), str(pipeline.path), operators.files
    )
    # Compute package identities now, while another process may still be loading TVM to query LLVM. Problems
    # with a package are reported by the stage that needs it.
    for name in list_known_tools(bare):
        with contextlib.suppress(EnvironmentProblem), explain_wait(IDENTITY_WAIT.format(name)):
            packages.identity(name)
    targets, target_reads = resolve_targets(recipe, request.targets, store, lock, query)
    planned = [bare._replace(targets=targets, variant=variant) for variant in variants or [""]]
    problems: list[str] = []
    signatures = [read_recipe_signature(entry, problems) for entry in planned]
    if problems:
        # Variants share most problems, which are reported once.
        raise RecipeError(list(dict.fromkeys(problems)))
    images = list_images(zip(planned, signatures, strict=True))
    planned = [entry._replace(images=images.files) for entry in planned]
    return planned, [*reads, *target_reads, *images.read]


def read_recipe_signature(planned: PlannedRecipe, problems: list[str]) -> Signature:
    """Return the signature of a library, from the model's files if they are local; add `problems`."""
    recipe = planned.recipe
    frontend = FRONTENDS[recipe.model.kind]
    if not planned.model_files[0].path:
        # `import` checks a model that is not downloaded yet.
        return Signature()
    files = {file.role: Path(file.path) for file in planned.model_files}
    requests = recipe.list_requests()
    facts = frontend.read_facts(files)
    inputs, outputs = facts.inputs, facts.outputs
    where = f"{planned.loaded.where('model')}: model"
    output_names = [output.name for output in outputs]
    problems += [f"{where}: {text}" for text in find_output_problems(output_names)]
    mismatches = list(find_input_problems(inputs, requests))
    for problem in mismatches:
        loc = planned.input_loc(problem)
        problems.append(f"{planned.loaded.where(*loc)}: {excerpt('.'.join(loc))}: {problem.text}")
    if mismatches:
        return Signature()
    names = [*(value.name for value in inputs), *output_names]
    problems += check_quantized_names(planned, names)
    problems += list_mismatches(planned, resolve_inputs(inputs, requests))
    return read_signature(inputs, outputs, requests)


# ---------------------------------------------------------------- data and labels


_VERIFIED: Final = "verify.data"
# Opening this many images takes half a second.
_MAX_OPENED: Final = 1000


class Signature(NamedTuple):
    """The inputs of a library, and its first output, the scores of the labels; each None if unknown."""

    inputs: tuple[TensorSpec, ...] | None = None
    scores: TensorSpec | None = None


def read_signature(
    inputs: Sequence[ModelInput], outputs: Sequence[ModelOutput], requests: Sequence[InputRequest]
) -> Signature:
    """Return the signature of a library from a model and a recipe without mismatches."""
    bound = {request.name for request in requests if request.value is not None}
    specs = {spec.name: spec for spec in resolve_inputs(inputs, requests)}
    # Sizes of outputs in the file are valid only for the model's own input sizes, except for another batch.
    is_unchanged = all(
        isinstance(dim, str) or dim == size
        for value in inputs
        if value.name in specs
        for dim, size in zip((value.dims or ())[1:], specs[value.name].shape[1:], strict=False)
    )
    name, dtype, dims = outputs[0] if outputs else ModelOutput("")
    classes = [size for size in (dims or ())[1:] if isinstance(size, int)]
    scores = None
    if is_unchanged and dtype and dims and len(classes) == len(dims) - 1:
        scores = TensorSpec(name, (1, *classes), dtype)
    return Signature(tuple(spec for name, spec in specs.items() if name not in bound), scores)


class ImageFiles(NamedTuple):
    """Data -> paths of its images inside the data's folder, and all files that were read."""

    files: dict[str, tuple[str, ...]]
    read: list[Path]


def list_mismatches(planned: PlannedRecipe, inputs: Iterable[TensorSpec]) -> Iterator[str]:
    """Yield problems of image preprocessing that does not match its input."""
    specs = {spec.name: spec for spec in inputs}
    for name, spec in planned.recipe.inputs.items():
        if spec.image is None:
            continue
        try:
            Preprocessing.of(spec.image.to_fields(), specs[name])
        except ImageMismatch as error:
            loc = planned.input_loc(InputProblem(name, "image", str(error)))
            path = (*loc, *filter(None, [error.field]))
            yield f"{planned.loaded.where(*path)}: {excerpt('.'.join(path))}: {error}"


def list_images(recipes: Iterable[tuple[PlannedRecipe, Signature]]) -> ImageFiles:
    """List the images that recipes and variants read; RecipeError with all problems of data and labels."""
    listed = ImageFiles({}, [])
    problems = [
        problem
        for planned, signature in recipes
        for problem in _list_problems(planned, signature, listed)
    ]
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return listed


def _list_problems(
    planned: PlannedRecipe, signature: Signature, listed: ImageFiles
) -> Iterator[str]:
    """Add the images of a recipe to `listed`, and yield problems of labels and data."""
    folder, labels = planned.loaded.path.parent, planned.recipe.labels
    names: tuple[str, ...] = ()
    if labels is not None:
        listed.read.append(folder / labels)
        try:
            parsed = parse_labels((folder / labels).read_bytes())
        except (OSError, ValueError) as error:
            yield f"{planned.loaded.where('labels')}: labels: {labels} cannot be read: {error}"
            return
        names = parsed.names
        try:
            if signature.scores is not None and export.NAME in planned.stages:
                parsed.check(signature.scores, is_activation_known=False)
        except ValueError as error:
            where = planned.loaded.where("labels")
            yield f"{where}: labels: {labels} does not fit the model: {error}"
    for target in planned.targets:
        recipe = planned.recipe_for(target)
        for field, data, position in _list_data(planned, target):
            try:
                if is_image_data(data, folder / data):
                    is_opened = data in listed.files
                    images = _list(data, folder / data, listed)
                    _check(recipe, images, names, signature, is_verified=field == _VERIFIED)
                    if not is_opened:
                        _open_images(folder / data, images)
                else:
                    _check_arrays(folder / data)
                    _check_fit(recipe, field, folder / data, signature)
            except (OSError, ValueError, TvmflowError) as error:
                reason = str(error)
                if isinstance(error, TvmflowError):
                    reason = error.message.removeprefix(f"{field} ").removeprefix(f"{field}: ")
                if isinstance(error, OSError) and error.strerror:
                    reason = f"{excerpt(str(error.filename))}: {error.strerror}"
                yield f"{position}: {field}: {data}: {reason}"


def _list_data(planned: PlannedRecipe, target: Target) -> Iterator[tuple[str, str, str]]:
    """Yield field, path, and position of the field for the data that stages of a target read."""
    recipe = planned.recipe_for(target)
    is_read = recipe.quantize is not None or verify.NAME in planned.stages
    if recipe.verify.data is not None and is_read:
        yield _VERIFIED, recipe.verify.data, planned.setting_position(target, "verify", "data")
    if recipe.quantize is not None and recipe.quantize.data is not None:
        where = planned.loaded.where(*planned.setting_loc("quantize", "data"))
        yield "quantize.data", recipe.quantize.data, where


def _list(data: str, path: Path, listed: ImageFiles) -> ImageList:
    """Add the images of `data`, a table or folder at `path`, to `listed`, and return them."""
    if is_table(data):
        images, read = read_table(path), [path]
        for file in dict.fromkeys(images.files):
            if not (path.parent / file).is_file():
                raise ValueError(missing_file_text(path.parent / file))
    else:
        images, read = list_folder(path)
    listed.files[data] = images.files
    listed.read.extend(read)
    return images


def _check_arrays(path: Path) -> None:
    """Raise ValueError if a file is certainly not an npz file."""
    kind = recognize(path)
    if kind in (NPZ, ZIP):
        return
    if kind in STAND_INS:
        raise ValueError(f"{kind.text}; {kind.fix}")
    raise ValueError(
        f"{kind.text if kind else 'is not an npz file'}; "
        "give an npz file (`numpy.savez(path, <input name>=array, label=labels)`), "
        "or a folder or a table of images"
    )


def _list_accuracy_limits(recipe: Recipe) -> list[str]:
    fields = (("verify", "min_accuracy"), ("quantize", "max_accuracy_drop"))
    values = (
        (f"{name}.{limit}", getattr(getattr(recipe, name), limit, None)) for name, limit in fields
    )
    return [field for field, value in values if value is not None]


def _check_fit(recipe: Recipe, field: str, path: Path, signature: Signature) -> None:
    """Check that arrays match the model's inputs, and have enough samples, and labels if limits need them.

    Raises StageError for mismatches, or ValueError for too few samples.
    """
    if signature.inputs is None:
        return
    label, section = recipe.verify.label, recipe.quantize
    needed_by = next(iter(_list_accuracy_limits(recipe)), "") if field == _VERIFIED else ""
    samples = make_samples(
        signature.inputs,
        describe_npz(path, field, read=(label,)),
        source=field,
        label=label,
        labels_needed_by=needed_by,
        dimensions=recipe.list_dimensions(),
    )
    calibrates = section and (field != _VERIFIED or section.data is None)
    if calibrates and section and (section.samples or 0) > samples.total:
        raise ValueError(
            f"it has {count_text(samples.total, 'sample')}, and quantize.samples asks for {section.samples}"
        )


def _open_images(path: Path, images: ImageList) -> None:
    """Check a selection of files, by their first bytes, for being images."""
    folder = path.parent if path.is_file() else path
    step = -(-len(images.files) // _MAX_OPENED)
    check_files(folder / file for file in images.files[::step])


def _check(
    recipe: Recipe,
    images: ImageList,
    labels: tuple[str, ...],
    signature: Signature,
    *,
    is_verified: bool,
) -> None:
    """Check that exactly one input takes images, and that required classes and labels exist."""
    inputs = [name for name, spec in recipe.inputs.items() if spec.image is not None]
    if len(inputs) != 1:
        count = "no input" if not inputs else f"{len(inputs)} inputs"
        raise ValueError(f"images are for one input, and {count} of the recipe has `image`")
    if others := [spec.name for spec in signature.inputs or () if spec.name not in inputs]:
        raise ValueError(
            f"is images, and the model has the further input {names_text(others)}: give an npz file with an array "
            "for each input, or bind the input with `value`"
        )
    if not is_verified:
        return
    if not images.classes and (limits := _list_accuracy_limits(recipe)):
        raise ValueError(
            f"has no folders of classes, which {limits[0]} needs: "
            "put the images of each class into a folder with its name"
        )
    images.find_indices(labels)
    if not is_pillow_installed():
        raise ValueError(
            "Pillow, which decodes images, is not installed: pip install 'tvmflow[images]'"
        )
