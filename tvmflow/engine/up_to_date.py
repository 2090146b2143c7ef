"""Commands with nothing to do: confirm that a plan is up to date, and save the output as an answer."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from tvmflow.core import packages
from tvmflow.core.errors import StoreError
from tvmflow.core.files import RACY_NS
from tvmflow.core.types import Plan
from tvmflow.engine import answers, delivery
from tvmflow.engine.report import RunReport, StageReport, compare_libraries
from tvmflow.engine.summary import render
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.environment import list_source_files
from tvmflow.planning.prepare import PreparedRun
from tvmflow.provenance import (
    find_sidecars,
    list_repository_files,
    list_sidecars_to_write,
)
from tvmflow.store.inventory import update_recipe_pins
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

_DAY_NS = 86_400 * 10**9


def confirm_run(
    argv: Sequence[str],
    prepared: PreparedRun,
    store: LocalStore,
    dist: str,
    *,
    as_json: bool,
    quiet: bool,
) -> tuple[RunReport, str] | None:
    """Return the report of a run with nothing to do, and its output, which is saved as an answer.

    None if a stage must run, or a file must be delivered or described.
    """
    started, plan, state = time.monotonic(), prepared.plan, PlanState(store)
    # The check stops at the first stage that must run.
    if any(state.decide(spec).kind != "hit" for spec in plan.stages):
        return None
    stages = tuple(
        StageReport(spec.id, facts=artifact.facts, reason="unchanged", key=artifact.key)
        for spec in plan.stages
        for artifact in (state.artifacts[spec.id],)
    )
    # After a recipe was reverted, a run must record that the recipe needs the older result again.
    last_keys = (store.last_key(spec.recipe, spec.label) for spec in plan.stages)
    if any(last != stage.key for last, stage in zip(last_keys, stages, strict=True)):
        return None
    update_recipe_pins(store, plan.origins)
    delivered = delivery.delivered_paths(plan, state.artifacts, store, dist)
    sidecars = find_sidecars(plan, state.artifacts, store, dist)
    if delivered is None or sidecars is None:
        return None
    report = RunReport(
        stages,
        (*delivered, *sidecars),
        tuple(store.damage),
        time.monotonic() - started,
        compared_libraries=compare_libraries(plan, state.artifacts),
        origins=plan.origins,
    )
    answer = report._replace(seconds=answers.PLACEHOLDER_SECONDS)
    text = render(answer, as_json=as_json, quiet=quiet)
    if not report.damage:
        save_answer(argv, text, prepared, state, report.delivered)
    return report, answers.with_duration(text, report.seconds)


def list_files_to_write(plan: Plan, state: PlanState, dist: str) -> list[str]:
    """Return the paths in `dist` that a run would write from existing results."""
    results = (plan, state.artifacts, state.store, dist)
    return [*delivery.list_files_to_copy(*results), *list_sidecars_to_write(*results)]


def list_delivered(plan: Plan, state: PlanState, dist: str) -> list[str]:
    """Return the paths of all delivered files, if a run would write none of them."""
    results = (plan, state.artifacts, state.store, dist)
    return [*(delivery.delivered_paths(*results) or ()), *(find_sidecars(*results) or ())]


def save_answer(
    argv: Sequence[str],
    text: str,
    prepared: PreparedRun,
    state: PlanState,
    delivered: Iterable[str] = (),
) -> None:
    """Save the output of a command with nothing to do, unless a file changed too recently.

    The text has `answers.PLACEHOLDER_SECONDS` as the duration. `delivered` are the files in `dist` that it depends on.
    """
    root = f"{state.store.root}/"
    actions = [state.store.action_path(artifact.key) for artifact in state.artifacts.values()]
    results = dict.fromkeys([*_list_results(prepared.plan, state), *actions])
    # A new package in one of these folders could replace a tool.
    files = [*packages.import_folders(), *_list_plan_files(prepared.plan, state)]
    key_file = filter(None, [os.environ.get("TVMFLOW_SIGNING_KEY")])
    paths = list(dict.fromkeys([*files, *prepared.reads, *key_file]))
    # One stamp for all results, because there may be tens of thousands.
    folders = [
        *_list_watched_folders(prepared.plan),
        [root, *(path.removeprefix(root) for path in results)],
        [".", *delivered],
    ]
    stamps = answers.read_stamps(paths, folders)
    system = answers.describe_system()
    # If a file's last change precedes planning, planning read its current content.
    newest_ns = max(map(answers.changed_ns, stamps))
    if not system or newest_ns > prepared.started_ns - RACY_NS:
        _log.debug("the answer is not saved: a file is too new, or the system is not identified")
        return
    with contextlib.suppress(OSError, StoreError):
        # Results in use must be marked daily, or garbage collection removes them; so an answer lasts for a day.
        expires_ns = min([os.stat(path).st_mtime_ns for path in actions], default=0) + _DAY_NS
        path = answers.answer_path(list(argv))
        content = answers.encode(path, system, expires_ns, paths, folders, stamps, text)
        state.store.write_file(path, content)


def _list_watched_folders(plan: Plan) -> list[list[str]]:
    """Return the folders of tvmflow and of a plan's tools, each followed by the names of its files."""
    [package, *inner], sources = list_source_files()
    own = [".", *(path.removeprefix(f"{package}/") for path in (*inner, *sources))]
    folders: dict[str, list[str]] = {package: own}
    for tool in dict.fromkeys(name for spec in plan.stages for name in spec.tools):
        for folder, names in packages.files_to_watch(tool).items():
            folders.setdefault(folder, []).extend(names)
    return [[folder, *names] for folder, names in folders.items()]


def _list_plan_files(plan: Plan, state: PlanState) -> Iterator[str]:
    """Yield the files that decisions about a plan depend on, other than results."""
    store = state.store
    spool = f"{store.root}/spool"
    yield from (f"{store.root}/format", spool)
    yield from (f"{spool}/{name}" for name in store.notes.list("spool"))
    for origin in plan.origins:
        yield from list_repository_files(origin)
    for spec in plan.stages:
        yield from (file.path for file in spec.files if file.path)


def _list_results(plan: Plan, state: PlanState) -> Iterator[str]:
    """Yield the result files of a plan, and the notes that its recipes need these results."""
    store = state.store
    for spec in plan.stages:
        yield store.notes.path("last", spec.recipe, spec.label)
        yield from (store.blobs.path(file.digest) for file in state.artifacts[spec.id].files)
