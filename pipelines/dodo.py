"""The same stages for people who live in doit: `doit -f pipelines/dodo.py list --all`, `… run`, `… run digits:build/host`.

Recipes are those in $TVMFLOW_RECIPES (separated by spaces), or else recipes/digits.yaml; the
store is $TVMFLOW_STORE or ./cache. What is up to date is decided by the store as always:
doit's own database may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvmflow import delivery, fastpath, runner
from tvmflow.executors.processes import ProcessExecutor
from tvmflow.prepare import Asked, prepare
from tvmflow.progress import Printer
from tvmflow.provenance import beside
from tvmflow.stores.local import LocalStore

ROOT = Path(__file__).resolve().parent.parent

STORE = LocalStore(fastpath.store_of([]))
# doit opens its database before it asks for tasks
STORE.create()

DOIT_CONFIG = {"dep_file": f"{STORE.root}/doit.db"}


def task_tvmflow() -> Iterator[dict[str, Any]]:
    """All stages of all recipes, and the delivery of each."""
    named = os.environ.get("TVMFLOW_RECIPES", "").split()
    asked = Asked(tuple(named or [str(ROOT / "recipes" / "digits.yaml")]))
    plan = prepare(asked, STORE).plan
    # doit ends the process when it is done, and with it what this holds
    held = contextlib.ExitStack()
    atexit.register(held.close)
    held.enter_context(STORE.running())
    executor = ProcessExecutor()
    held.callback(executor.close)
    printer = Printer(sys.stdout, as_json=False, many=True)
    session = runner.Session(plan, STORE, executor, printer.event, runner.RunOptions())

    def deliver() -> None:
        artifacts = session.survey.artifacts
        delivered = delivery.deliver(plan, artifacts, STORE, "dist")
        for path in [*delivered, *beside.attach(plan, artifacts, STORE, "dist")]:
            sys.stdout.write(f"  {path}\n")

    yield from runner.doit_tasks(session, plan, deliver)
