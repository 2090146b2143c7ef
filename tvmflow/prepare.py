"""From the words of a command line to a plan: recipes and pipelines read, targets resolved, sources named."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvmflow import tools
from tvmflow.errors import RecipeError, UsageError
from tvmflow.frontends import FRONTENDS
from tvmflow.keys import digest_of
from tvmflow.plan import PlannedRecipe, make_plan
from tvmflow.recipe import LoadedRecipe, TargetSpec, load_pipeline, load_recipe, pipeline_candidates
from tvmflow.stages import STAGES
from tvmflow.stores.local import LocalStore
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import ResolvedTarget, query_in_worker, resolve
from tvmflow.values import Json, Plan


class Asked(NamedTuple):
    """What a command line asks for."""

    recipes: tuple[str, ...]
    pipeline: str | None = None
    targets: tuple[str, ...] = ()
    until: str | None = None


class Prepared(NamedTuple):
    """A plan and every file that was read to make it."""

    plan: Plan
    reads: tuple[str, ...]


def prepare(asked: Asked, store: LocalStore) -> Prepared:
    """Plan what is asked for. All mistakes in all recipes are reported together."""
    loaded = _load_all(asked.recipes)
    _check_words(asked, loaded)
    reads: list[Path] = []
    planned = []
    problems: list[str] = []
    for entry in loaded:
        pipeline = load_pipeline(asked.pipeline) if asked.pipeline else entry.pipeline
        # a pipeline of that name may appear where it is looked for first
        named = asked.pipeline or entry.recipe.pipeline
        reads += [*entry.read, pipeline.path, *pipeline_candidates(named, entry.path.parent)]
        try:
            files = _model_files(entry)
            targets = _resolve_targets(entry, asked.targets, store)
        except RecipeError as error:
            problems += error.problems
            continue
        # which further files a model has is read from the model itself
        reads += [Path(file.path) for file in files if file.role == "model" and file.path]
        stages = _cut(pipeline.stages, asked.until)
        planned.append(PlannedRecipe(entry, stages, targets, files))
    if problems:
        raise RecipeError(problems)
    return Prepared(make_plan(planned), tuple(str(path.absolute()) for path in reads))


def _load_all(paths: Sequence[str]) -> list[LoadedRecipe]:
    loaded, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            loaded.append(load_recipe(Path(path)))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return loaded


def _check_words(asked: Asked, loaded: Sequence[LoadedRecipe]) -> None:
    """Stages and targets that were named on the command line must exist."""
    if asked.until is not None:
        _require("--until", asked.until, STAGES)
    names = {target.name for entry in loaded for target in entry.recipe.targets}
    for name in asked.targets:
        _require("--target", name, names)


def _require(option: str, name: str, valid: Sequence[str] | set[str] | Mapping[str, Any]) -> None:
    if name in valid:
        return
    near = difflib.get_close_matches(name, list(valid), 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"{option} {name}: there is no such name",
        fix=f"{hint}there are: {', '.join(sorted(valid))}",
    )


def _cut(stages: tuple[str, ...], until: str | None) -> tuple[str, ...]:
    """The stages up to `until`, or all when the pipeline does not have it."""
    return stages[: stages.index(until) + 1] if until in stages else stages


def _model_files(entry: LoadedRecipe) -> Any:
    model = entry.recipe.model

    def where(*path: str | int) -> str:
        return entry.where("model", *path)

    base = Path(entry.path).parent.absolute()
    return FRONTENDS[model.kind].files(model, base, where)


# ---------------------------------------------------------------- targets


def _resolve_targets(
    entry: LoadedRecipe, only: tuple[str, ...], store: LocalStore
) -> tuple[ResolvedTarget, ...]:
    """The recipe's targets (those in `only`, if any are named there) as machines."""
    host = read_host()
    specs = list(enumerate(entry.recipe.targets))
    wanted = [(index, spec) for index, spec in specs if not only or spec.name in only]
    facts = _facts(store, [_mapping(spec) for _, spec in wanted], host.fingerprint())
    problems = []
    resolved = []
    for (index, spec), fact in zip(wanted, facts, strict=True):
        if "error" in fact:
            where = entry.where("targets", index)
            problems.append(f"{where}: targets: {fact['error']}{_nearest(spec, fact['near'])}")
        else:
            remote = spec.remote and spec.remote.model_dump(mode="json", exclude_none=True)
            mapping = _mapping(spec)
            resolved.append(resolve(spec.name, mapping, spec.num_cores, host, fact, remote))
    if problems:
        raise RecipeError(problems)
    return tuple(resolved)


def _mapping(spec: TargetSpec) -> dict[str, Json] | None:
    """The mapping that TVM takes; None for `host`, which is looked up."""
    return spec.tvm_mapping()


def _nearest(spec: TargetSpec, names: list[str]) -> str:
    cpu = str((_mapping(spec) or {}).get("mcpu", ""))
    near = difflib.get_close_matches(cpu, names, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _facts(
    store: LocalStore,
    mappings: Sequence[Mapping[str, Json] | None],
    host: Json,
    ask: Callable[[list[Json]], list[Json]] = query_in_worker,
) -> list[Json]:
    """What LLVM says of each target; asked once for this machine and TVM build, then read from the store."""
    names = [digest_of([mapping, host, tools.identity("apache-tvm")]) for mapping in mappings]
    known = {name: store.read_note("facts", name) for name in names}
    asked = {n: m for n, m in zip(names, mappings, strict=True) if known[n] is None}
    if asked:
        answers = ask([None if m is None else dict(m) for m in asked.values()])
        for name, answer in zip(asked, answers, strict=True):
            known[name] = json.dumps(answer)
            store.write_note(str(known[name]), "facts", name)
    return [json.loads(known[name] or "null") for name in names]
