"""What a command line asks for beside its recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.core.errors import UsageError
from tvmflow.planning.prepare import RunRequest, load_request
from tvmflow.recipe import Recipe

RECIPE = """recipe: 1
name: net
model: {onnx: net.onnx}
targets:
  - host
  - {name: edge, preset: cortex-a72, tune: {trials: 9, repeat: 5}}
tune: {trials: 64, patience: 32}
"""

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def load(minutes: float | None, text: str = RECIPE, lock: str | None = None) -> Recipe:
    Path("net.onnx").write_bytes(b"")
    Path("net.yaml").write_text(text)
    recipes, _ = load_request(RunRequest(("net.yaml",), minutes=minutes, lock=lock))
    return recipes[0].recipe


def test_minutes_of_a_command_line_are_the_budget_of_all_targets() -> None:
    """In place of trials and minutes; the rest of `tune` stays."""
    recipe = load(10)
    for name in ("host", "edge"):
        tune = recipe.for_target(name).tune
        assert (tune.minutes, tune.trials > 10**6, tune.patience) == (10, True, 32)
    assert recipe.for_target("edge").tune.repeat == 5
    assert load(None).tune.trials == 64


def test_no_minutes_are_no_search() -> None:
    assert load(0).for_target("edge").tune.trials == 0
    with pytest.raises(UsageError, match=r"--minutes 0: with this budget, net\.yaml is not valid"):
        load(0, RECIPE.replace("patience: 32", "min_coverage: 0.5"))


def test_a_locked_run_has_no_budget() -> None:
    with pytest.raises(UsageError, match="--minutes cannot be combined with --locked"):
        load(5, lock="net.lock.yaml")
