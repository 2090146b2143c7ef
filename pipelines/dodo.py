"""The stages as doit tasks: `doit -f pipelines/dodo.py list --all`, `… run`, `… run digits:build/host`.

Recipes are those in $TVMFLOW_RECIPES (separated by spaces), or else recipes/digits.yaml; the
store is $TVMFLOW_STORE or ./cache. The store decides what is up to date: doit's own database
may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvmflow.engine.progress import Printer
from tvmflow.engine.session import Session, SessionOptions, make_dodo_tasks
from tvmflow.engine.stage_execution import RunContext
from tvmflow.executors.local import ProcessExecutor
from tvmflow.planning.prepare import prepare_run
from tvmflow.planning.request import RunRequest
from tvmflow.store.local import LocalStore
from tvmflow.store.location import store_root

ROOT = Path(__file__).resolve().parent.parent

STORE = LocalStore(store_root([]))
# doit opens its database before it asks for tasks.
STORE.create()

DOIT_CONFIG = {"dep_file": f"{STORE.root}/doit.db"}


def task_tvmflow() -> Iterator[dict[str, Any]]:
    """Yield a task for each stage of each recipe, and one for each recipe's delivery."""
    recipes = os.environ.get("TVMFLOW_RECIPES", "").split()
    request = RunRequest(tuple(recipes or [str(ROOT / "recipes" / "digits.yaml")]))
    plan = prepare_run(request, STORE).plan
    # doit ends the process when it is done, and with it the store's lease and the workers.
    resources = contextlib.ExitStack()
    atexit.register(resources.close)
    resources.enter_context(STORE.running())
    executor = ProcessExecutor()
    resources.callback(executor.close)
    printer = Printer(sys.stdout, as_json=False, many=True)
    session = Session(plan, RunContext(STORE, executor, printer.event), SessionOptions())

    def deliver() -> None:
        for path in session.deliver():
            sys.stdout.write(f"  {path}\n")

    yield from make_dodo_tasks(session, plan, deliver)
