"""The stages as doit tasks, for doit's own command line: `doit list --all -f pipelines/dodo.py`, `… run`.

Recipes are those in $TVMFLOW_RECIPES (separated by spaces), or else recipes/digits.yaml.
"""

from __future__ import annotations

import os
from pathlib import Path

import doit

from tvmflow.api.dodo_file import plan_tasks

FOLDER = Path(__file__).resolve().parent

# Without --dir, doit goes to the folder of this file, and paths are to be those of the caller.
if Path.cwd() == FOLDER:
    os.chdir(doit.get_initial_workdir() or FOLDER)

RECIPES = os.environ.get("TVMFLOW_RECIPES", "").split()
TASKS = plan_tasks(*(RECIPES or [str(FOLDER.parent / "recipes" / "digits.yaml")]))
DOIT_CONFIG = TASKS.config
task_tvmflow = TASKS.list_tasks
