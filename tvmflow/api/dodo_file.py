"""The stages of recipes as tasks of a dodo file, for doit's command line.

```python
from tvmflow.api.dodo_file import plan_tasks

tasks = plan_tasks("recipes/digits.yaml")
DOIT_CONFIG = tasks.config
task_tvmflow = tasks.list_tasks
```

The store decides what is up to date; doit's database may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import TvmflowError
from tvmflow.core.formatting import names_text
from tvmflow.core.project import find_project, shortest_path, store_root
from tvmflow.core.types import STATEMENT_SUFFIX, Delivery, Plan, StageSpec
from tvmflow.engine import delivery
from tvmflow.engine.doit_adapter import EngineTask, dodo_error, find_missing_tasks, note_failure
from tvmflow.engine.driver import Driver, DriverSettings, prepare
from tvmflow.engine.progress import Printer
from tvmflow.engine.session import SessionOptions, select_stages
from tvmflow.engine.stage_runs import RunContext, StageRuns
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.prepare import RunRequest
from tvmflow.provenance import (
    BOM_SUFFIX,
    MEASUREMENTS_SUFFIX,
    README,
    find_sidecars,
    write_sidecars,
)
from tvmflow.store.garbage_collection import remove_result
from tvmflow.store.local import LocalStore

DELIVER: Final = "deliver"


class DodoTasks:
    """The tasks of a plan: `RECIPE:STAGE[/TARGET]`, and `RECIPE:deliver/TARGET` with its files as targets.

    Create it before doit opens its database. `begin` is called before each use of the store.
    """

    def __init__(
        self, plan: Plan, context: RunContext, dist: str, database: str, begin: Callable[[], object]
    ) -> None:
        self._plan = plan
        self._context = context
        self._dist = dist
        self._begin = begin
        self.config: Final = {"dep_file": database}
        """What a dodo file has as `DOIT_CONFIG`."""
        names = [spec.id for spec in plan.stages]
        names += dict.fromkeys(_delivery_name(entry) for entry in plan.deliveries)
        self._forgotten = find_missing_tasks(database, names, context.store.notes)
        self._state = PlanState(context.store)
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def list_tasks(self) -> Iterator[dict[str, Any]]:
        """Yield the task dict of every stage and delivery, and a task group for each recipe."""
        for recipe, doc in self._describe_recipes().items():
            # A task without a name is a group for doit.
            yield {"basename": recipe, "name": None, "doc": doc}
        for spec in self._plan.stages:
            yield self._stage_task(spec)
        targets: dict[tuple[str, str], list[Delivery]] = {}
        for entry in self._plan.deliveries:
            targets.setdefault((entry.recipe, entry.target), []).append(entry)
        yield from (self._delivery_task(*key, own) for key, own in targets.items())

    def _describe_recipes(self) -> dict[str, str]:
        """Return the text of `doit list` for each recipe: its file and targets."""
        paths = {origin.recipe: shortest_path(origin.path) for origin in self._plan.origins}
        targets: dict[str, dict[str, None]] = {}
        for spec in self._plan.stages:
            targets.setdefault(spec.recipe, {}).update({spec.target: None} if spec.target else {})
        return {
            recipe: f"all stages of {paths.get(recipe, recipe)}"
            + (f" for {names_text(list(own))}" if own else "")
            for recipe, own in targets.items()
        }

    def _stage_task(self, spec: StageSpec) -> dict[str, Any]:
        task = EngineTask(
            spec.id,
            lambda: self._with_notes(spec.id, self._run(spec)),
            _Question(lambda: self._reason_to_run(spec)),
            tuple(need.stage_id for need in spec.needs),
        )
        return {
            **task.to_doit(),
            "basename": spec.recipe,
            "name": spec.label,
            "doc": f"stage {spec.label} of {spec.recipe}",
            "clean": [_Command("remove its result from the store", lambda: self._clean(spec))],
        }

    def _with_notes(self, name: str, failure: str) -> str:
        if failure:
            note_failure(name, self._context.store.notes)
        return failure

    def _decide(self, *ids: str) -> PlanState:
        """Return the current state of stages and of all stages that they need."""
        self._begin()
        state = copy.copy(self._state)
        state.keys, state.artifacts, state.decisions = {}, {}, {}
        for spec in select_stages(self._plan, ids).stages:
            state.decide(spec)
        return state

    def _reason_to_run(self, spec: StageSpec) -> str:
        """Return why a stage must run; empty if its result is in the store."""
        try:
            decision = self._decide(spec.id).decisions[spec.id]
        except (TvmflowError, OSError) as error:
            # Running the stage will report the same problem.
            return str(error)
        if decision.kind != "hit":
            return decision.reason
        return "it was forgotten" if spec.id in self._forgotten else ""

    def _run(self, spec: StageSpec) -> str:
        """Run a stage, even if it is up to date; return the reason of a failure."""
        runs = StageRuns(self._context)
        try:
            state = self._decide(spec.id)
        except Exception as error:
            return runs.fail(spec, "", error, {})
        decision = state.decisions[spec.id]
        if decision.kind == "wait":
            return f"{spec.id} runs {decision.reason}: there is no result of it"
        record = self._context.store.record(state.keys[spec.id].digest)
        # Another run may have published the result after this run began.
        is_new = record is not None and record.made > self._started
        again = decision.kind == "hit" and not is_new
        reason = "doit runs it again" if again else decision.reason
        failure = runs.run(spec, self._plan, state, reason, again=again)
        delivery.deliver_verdicts(self._plan, runs.verdicts, self._context.store, self._dist)
        for tune in filter(lambda other: other.id in runs.retries, self._plan.stages):
            self._clean(tune)
            failure += f"; the next run of doit chooses again in {tune.id}"
        return failure

    def _clean(self, spec: StageSpec) -> None:
        store = self._context.store
        key = store.last_key(spec.recipe, spec.label)
        try:
            if key is not None:
                remove_result(store, key)
        except TvmflowError as error:
            sys.stderr.write(f"{spec.id}: {error}\n")

    def _delivery_task(
        self, recipe: str, target: str, deliveries: Sequence[Delivery]
    ) -> dict[str, Any]:
        makers = {entry.stage_id for entry in deliveries}
        makers |= {entry.verified_by for entry in deliveries if entry.verified_by}
        plan = select_stages(self._plan, makers, deliveries)
        folder = Path(self._dist, recipe, target)
        names = [name for entry in deliveries for _, name in entry.files]
        id_ = _delivery_name(deliveries[0])
        task = EngineTask(
            id_,
            lambda: self._with_notes(id_, self._deliver(plan)),
            _Question(lambda: self._reason_to_deliver(id_, plan)),
            tuple(spec.id for spec in plan.stages if spec.id in makers),
        )
        return {
            **task.to_doit(),
            "basename": recipe,
            "name": f"{DELIVER}/{target}",
            "doc": f"the files of {recipe} for {target} in {folder}",
            "targets": [str(folder / name) for name in names],
            "clean": [_Command(f"remove {folder}", lambda: self._remove_delivered(folder, names))],
        }

    def _deliver(self, plan: Plan) -> str:
        """Deliver the files of one target; return the reason of a failure."""
        store = self._context.store
        try:
            artifacts = self._decide(*(spec.id for spec in plan.stages)).artifacts
            missing = [spec.id for spec in plan.stages if spec.id not in artifacts]
            if missing:
                return f"there is no result of {', '.join(missing)}"
            paths = delivery.deliver(plan, artifacts, store, self._dist)
            paths += write_sidecars(plan, artifacts, store, self._dist)
        except TvmflowError as error:
            return str(error)
        sys.stdout.writelines(f"  {path}\n" for path in paths)
        return ""

    def _reason_to_deliver(self, name: str, plan: Plan) -> str:
        store = self._context.store
        try:
            artifacts = self._decide(*(spec.id for spec in plan.stages)).artifacts
            if any(spec.id not in artifacts for spec in plan.stages):
                return "a stage before it has no result"
            files = delivery.delivered_paths(plan, artifacts, store, self._dist)
            sidecars = find_sidecars(plan, artifacts, store, self._dist)
        except (TvmflowError, OSError) as error:
            return str(error)
        if files is None or sidecars is None:
            return "a file is missing or was changed"
        return "it was forgotten" if name in self._forgotten else ""

    def _remove_delivered(self, folder: Path, names: list[str]) -> None:
        suffixes = (STATEMENT_SUFFIX, BOM_SUFFIX, MEASUREMENTS_SUFFIX)
        sidecars = [f"{folder.parent.name}{suffix}" for suffix in suffixes]
        paths = [folder / name for name in (*names, *sidecars, README)]
        for path in paths:
            path.unlink(missing_ok=True)
        folders = {parent for path in paths for parent in path.parents if folder in parent.parents}
        for empty in (*sorted(folders, reverse=True), folder, folder.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _delivery_name(entry: Delivery) -> str:
    return f"{entry.recipe}:{DELIVER}/{entry.target}"


class _Question:
    """An up-to-date check of a task; `doit info` shows its text as the reason to run."""

    def __init__(self, reason_to_run: Callable[[], str]) -> None:
        self._reason_to_run = reason_to_run
        self._reason = ""

    def __call__(self) -> bool:
        self._reason = self._reason_to_run()
        return not self._reason

    def __repr__(self) -> str:
        return self._reason


class _Command:
    """A function with a description for doit's output."""

    def __init__(self, text: str, run: Callable[[], None]) -> None:
        self._text = text
        self._run = run

    def __call__(self) -> None:
        self._run()

    def __repr__(self) -> str:
        # doit drops the first character.
        return f" {self._text}"


def plan_tasks(*recipes: str) -> DodoTasks:
    """Return the tasks of recipes.

    Call this at the top level of the dodo file: doit opens its database before it collects tasks.

    Raises:
        InvalidDodoFile: if a recipe is invalid; doit reports it without a traceback.
    """
    # Processes of `-n` must inherit these objects by forking, because they cannot be pickled.
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    # Lease and workers are released at the end of the process.
    resources = contextlib.ExitStack()
    atexit.register(resources.close)
    try:
        project = find_project()
        store = LocalStore(store_root([], project.store))
        store.create()
        settings = DriverSettings(SessionOptions(dist=shortest_path(project.dist)))
        prepared = prepare(RunRequest(recipes), store, settings)
        printer = Printer(sys.stdout, as_json=False, many=True)
        driver = resources.enter_context(Driver(prepared, store, settings, printer))
        begin = functools.cache(lambda: resources.enter_context(store.running()))
        context, dist, database = (
            driver.open_context(),
            settings.session.dist,
            f"{store.root}/doit.db",
        )
        return DodoTasks(prepared.plan, context, dist, database, begin)
    except TvmflowError as error:
        raise dodo_error(error) from None
