"""The targets of a recipe, resolved to triples, CPUs and features, with the linkers that they name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError
from tvmflow.core.suggestions import did_you_mean
from tvmflow.core.types import Json
from tvmflow.planning.planned_recipe import Target
from tvmflow.planning.recipes import LoadedRecipe
from tvmflow.recipe import BuildTarget, TargetSpec
from tvmflow.recipe.lock_file import Lock
from tvmflow.recipe.yaml_document import dotted
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore
from tvmflow.targets import toolchain
from tvmflow.targets.facts import load_target_facts
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget, resolve
from tvmflow.targets.tvm_target import split_threads

_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A target that code is built for, and its position in the recipe."""

    target: BuildTarget
    loc: tuple[str | int, ...]


def resolve_targets(
    recipe: LoadedRecipe, only: Sequence[str], store: LocalStore, lock: Lock | None
) -> tuple[tuple[Target, ...], tuple[Path, ...]]:
    """Resolve the targets of a recipe.

    Args:
        recipe: The recipe.
        only: The names of the targets to resolve; empty for all.
        store: Remembers what LLVM and linkers reported.
        lock: The lock file of a locked run: `host` is then the host that it was written on.

    Returns:
        The targets, and the paths of all programs that were looked for to resolve them.

    Raises:
        RecipeError: with every target that LLVM does not know and every linker that is not installed.
    """
    entries = _list_entries(recipe, only)
    toolchains, reads = _identify_toolchains(recipe, entries, store)
    resolved = _resolve_entries(recipe, entries, toolchains, store, lock)
    targets = tuple(
        _partition(spec, resolved) if spec.parts else resolved[spec.name]
        for spec in recipe.recipe.targets
        if not only or spec.name in only
    )
    return targets, reads


def _list_entries(recipe: LoadedRecipe, only: Sequence[str]) -> dict[str, _Entry]:
    """Return every target that code is built for, by name: a target, or each part of one."""
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
) -> dict[str, ResolvedTarget]:
    host = read_host()
    mappings = [
        entry.target.tvm_target() or _find_locked_host(lock, recipe, name)
        for name, entry in entries.items()
    ]
    all_facts = load_target_facts(store, mappings, host)
    problems, resolved = [], {}
    for (name, entry), mapping, facts in zip(entries.items(), mappings, all_facts, strict=True):
        if facts.error:
            hint = did_you_mean(str((mapping or {}).get("mcpu", "")), facts.valid_cpus)
            loc = (*entry.loc, "tvm") if entry.target.tvm else entry.loc
            problems.append(f"{recipe.where(*loc)}: {dotted(loc)}: {facts.error}{hint}")
            continue
        rpc = entry.target.remote
        resolved[name] = resolve(
            name,
            mapping,
            entry.target.wanted_threads,
            host,
            facts,
            rpc and rpc.model_dump(mode="json", exclude_none=True),
            toolchains.get(name),
        )
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
    # A lock file of an earlier version has threads here, and this machine may have fewer cores.
    return split_threads(locked.tvm)[0] if locked else None


def _partition(spec: TargetSpec, resolved: Mapping[str, ResolvedTarget]) -> PartitionedTarget:
    """Return a target of several parts; each part reads the tensors that the parts before it give."""
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


# ---------------------------------------------------------------- toolchains


def _identify_toolchains(
    recipe: LoadedRecipe, entries: Mapping[str, _Entry], store: LocalStore
) -> tuple[dict[str, Json], tuple[Path, ...]]:
    """Return the identity of each target's own linker, and every path where it was looked for."""
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
    """Return the identity of a linker; each program is asked for its version once."""
    digest = FileDigests(store).digest(path)
    version = store.notes.read("facts", f"linker-{digest}")
    if version is None:
        version = toolchain.read_version(path)
        store.notes.keep(version, "facts", f"linker-{digest}")
    return toolchain.identify(linker, flags, digest, version)
