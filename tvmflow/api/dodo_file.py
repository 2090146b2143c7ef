"""The stages of recipes as tasks of a dodo file, for doit's own command line.

```python
from tvmflow.api.dodo_file import plan_tasks

tasks = plan_tasks("recipes/digits.yaml")
DOIT_CONFIG = tasks.config
task_tvmflow = tasks.list_tasks
```

Store and delivered files are those of `tvmflow run` in the same folder. The store decides what is
up to date: doit's own database may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import sys

from tvmflow.core.errors import TvmflowError
from tvmflow.core.project import find_project, shortest_path
from tvmflow.engine.dodo import DodoTasks
from tvmflow.engine.doit_adapter import dodo_error
from tvmflow.engine.driver import Driver, DriverSettings, prepare
from tvmflow.engine.progress import Printer
from tvmflow.engine.session import SessionOptions
from tvmflow.planning.request import RunRequest
from tvmflow.store.local import LocalStore
from tvmflow.store.location import store_root


def plan_tasks(*recipes: str) -> DodoTasks:
    """Return the tasks of some recipes.

    doit opens its database before it asks for tasks, so call this in the dodo file itself.

    Raises:
        InvalidDodoFile: A recipe is wrong; doit reports it without a traceback.
    """
    # the processes of `-n` share what is made here, and cannot be sent it
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    # the end of this process releases the store's lease and the workers
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
        database = f"{store.root}/doit.db"
        return DodoTasks(
            prepared.plan, driver.open_context(), settings.session.dist, database, begin
        )
    except TvmflowError as error:
        raise dodo_error(error) from None
