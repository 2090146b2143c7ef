"""The Python interface: recipes are loaded, planned and run, and their libraries loaded.

It is for programs and notebooks.

```python
import tvmflow

recipe = tvmflow.Recipe.load("recipes/digits.yaml")
plan = tvmflow.plan(recipe, targets=["host"])
result = tvmflow.run(plan, on_event=print)
module = result.load()
scores = module.run(image)
```

Stages, keys, results and records are those of the command line, so that one continues what the other began.
"""

from __future__ import annotations

from tvmflow.api.plans import Plan, PlannedStage, Recipe, Result, plan, run

__all__ = ["Plan", "PlannedStage", "Recipe", "Result", "plan", "run"]
