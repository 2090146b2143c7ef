"""The stages as doit tasks, for doit's own command line: `doit -f pipelines/dodo.py list --all`, `… run`.

Recipes are those in $TVMFLOW_RECIPES (separated by spaces), or else recipes/digits.yaml. Store
and delivered files are those of `tvmflow run` in the same folder. The store decides what is up to date: doit's own database may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doit

from tvmflow.core.errors import TvmflowError
from tvmflow.core.project import find_project, shortest_path
from tvmflow.engine.dodo import DodoTasks
from tvmflow.engine.doit_adapter import dodo_error
from tvmflow.engine.progress import Printer
from tvmflow.engine.stage_execution import RunContext
from tvmflow.executors.local import ProcessExecutor
from tvmflow.planning.prepare import prepare_run
from tvmflow.planning.request import RunRequest
from tvmflow.store.local import LocalStore
from tvmflow.store.location import store_root

FOLDER = Path(__file__).resolve().parent

# Without --dir, doit goes to the folder of this file, and paths are to be those of the caller.
if Path.cwd() == FOLDER:
    os.chdir(doit.get_initial_workdir() or FOLDER)
# The processes of `-n` share what is made here, and cannot be sent it.
if "fork" in multiprocessing.get_all_start_methods():
    multiprocessing.set_start_method("fork", force=True)

PROJECT = find_project()
STORE = LocalStore(store_root([], PROJECT.store))
# The end of this process releases the store's lease and the workers.
RESOURCES = contextlib.ExitStack()
atexit.register(RESOURCES.close)


@functools.cache
def begin() -> None:
    """Hold the store's lease until this process ends."""
    RESOURCES.enter_context(STORE.running())


def make_tasks() -> DodoTasks:
    """Plan the recipes. doit opens its database before it asks for tasks, so this comes first."""
    recipes = os.environ.get("TVMFLOW_RECIPES", "").split()
    request = RunRequest(tuple(recipes or [str(FOLDER.parent / "recipes" / "digits.yaml")]))
    STORE.create()
    plan = prepare_run(request, STORE).plan
    executor = ProcessExecutor()
    RESOURCES.callback(executor.close)
    printer = Printer(sys.stdout, as_json=False, many=True)
    context = RunContext(STORE, executor, printer.event)
    return DodoTasks(plan, context, shortest_path(PROJECT.dist), f"{STORE.root}/doit.db", begin)


try:
    TASKS = make_tasks()
except TvmflowError as error:
    raise dodo_error(error) from None

DOIT_CONFIG = {"dep_file": f"{STORE.root}/doit.db"}


def task_tvmflow() -> Iterator[dict[str, Any]]:
    """Yield a task for each stage of each recipe, and one for each target's files."""
    yield from TASKS.list_tasks()
