"""The page of a run: its record, and what the store still has of its results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, duration_text, names_text
from tvmflow.core.project import shortest_path
from tvmflow.engine.builds import Build
from tvmflow.engine.report import SUCCEEDED
from tvmflow.engine.run_records import RunRecord, SourceText, list_runs
from tvmflow.pages.collect import list_kernels, list_stages
from tvmflow.pages.content import Library, Page, RecipeText
from tvmflow.store.local import LocalStore

_SHOWN_NAMES: Final = 3


def describe_run(record: RunRecord, store: LocalStore) -> Page:
    """Return the page of a run, compared with nothing.

    Args:
        record: The record of the run.
        store: The store with the records and the results.
    """
    return Page(
        kind="Run",
        title=_title(record),
        about=tuple(_list_facts(record)),
        libraries=tuple(Library(build, _recipe_name(build)) for build in record.builds),
        notes=tuple(_list_notes(record)),
        kernels=list_kernels(record.stages, store),
        stages=list_stages(record.stages, store),
        recipes=tuple(map(_describe_source, record.sources)),
        provenance=tuple(_list_provenance(record, store)),
    )


def find_previous(record: RunRecord, store: LocalStore) -> RunRecord | None:
    """Return the last run before another one that has a latency of one of its libraries."""
    timed = {build.name for build in record.builds if build.latency_s is not None}
    for candidate in list_runs(store).runs:
        is_older = candidate.began_s < record.began_s
        if is_older and any(b.name in timed and b.latency_s is not None for b in candidate.builds):
            return candidate
    return None


def _title(record: RunRecord) -> str:
    names = list(dict.fromkeys(map(_recipe_name, record.builds))) or ["Run"]
    more = f" and {count_text(len(names) - _SHOWN_NAMES, 'more recipe')}"
    return ", ".join(names[:_SHOWN_NAMES]) + (more if len(names) > _SHOWN_NAMES else "")


def _recipe_name(build: Build) -> str:
    return build.recipe.removesuffix(f"-{build.variant}") if build.variant else build.recipe


def time_text(seconds: float) -> str:
    """Return when a run began, in coordinated universal time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _list_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "run", record.id
    yield "when", time_text(record.began_s)
    yield "took", duration_text(record.seconds)
    yield "command", " ".join(["tvmflow", *record.argv])
    machine = record.machine
    yield "machine", f"{machine.name}: {machine.cpu}, {count_text(machine.cpus, 'CPU')}"
    yield "exit code", str(record.exit_code)
    commits = {source.commit: source.clean for source in record.recipes if source.commit}
    for commit, clean in commits.items():
        yield "commit", commit[:12] + ("" if clean == "yes" else " with changes")


def _list_notes(record: RunRecord) -> Iterator[str]:
    if record.message:
        yield record.message
    names: dict[str, list[str]] = {}
    for build in record.builds:
        for text in (*build.problems, *build.warnings):
            names.setdefault(text, []).append(build.name)
    yield from (f"{names_text(own, _SHOWN_NAMES)}: {text}" for text, own in names.items())
    yield from (f"A damaged file was set aside: {path}" for path in record.damage)


def _describe_source(source: SourceText) -> RecipeText:
    path = shortest_path(source.path)
    if not source.text:
        return RecipeText(path, "", "Its text is too large for the record of a run.")
    try:
        is_same = hash_file(source.path) == source.sha256
    except OSError:
        return RecipeText(path, source.text, "The file is no longer there.")
    note = "" if is_same else "The file has changed since: this is what the run read."
    return RecipeText(path, source.text, note)


def _list_provenance(
    record: RunRecord, store: LocalStore
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield the tools, the files from outside and the delivered folders of a run."""
    tools, files = {"tvmflow": record.tvmflow}, {}
    lost = 0
    for stage in record.stages:
        result = store.record(stage.key) if stage.key else None
        if result is None:
            # what was rejected has a key and never a result
            lost += bool(stage.key) and stage.outcome in SUCCEEDED
            continue
        tools.update(result.preimage.get("tools", {}))
        inputs = result.preimage.get("inputs", {}).items()
        files.update(
            {f"{stage.recipe}: {role}": digest for role, digest in inputs if "/" not in role}
        )
    if lost:
        tools["note"] = f"{count_text(lost, 'result')} of this run no longer in the store"
    yield "Tools", tuple(sorted(tools.items()))
    yield "Files from outside, sha256", tuple(files.items())
    sources = [(Path(source.path).name, source.sha256) for source in record.sources]
    yield "Recipes and pipelines, sha256", tuple(sources)
    yield "Delivered to", tuple((b.name, b.folder) for b in record.builds if b.folder)
