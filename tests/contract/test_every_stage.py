"""The contract of every stage in the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, get_args

import pytest

from tests.support.engine import joined_target, recipe, target
from tvmflow.core import packages
from tvmflow.stages import STAGES, pipeline_stages
from tvmflow.stages.base import Scope, parse_settings

HEAVY = ("tvm", "numpy", "onnx", "onnxruntime", "mxnet", "torch", "doit", "safetensors", "xgboost")
each_stage = pytest.mark.parametrize("name", STAGES)
# their files contain names, or are found by them
NAMED = ("emulation_program", "export", "join", "verify")
# stages that run once for a partitioned target
WHOLE = ("import", "join", "verify")
each_subject = pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("import", None),
        *((name, target()) for name in STAGES if name not in ("import", "join")),
        *((name, joined_target()) for name in WHOLE),
    ],
)


@each_stage
def test_it_needs_only_what_comes_before_it(name: str) -> None:
    """The registry is in an order in which the stages can run."""
    earlier = list(STAGES)[: list(STAGES).index(name)]
    assert set(STAGES[name].TRAITS.needs) <= set(earlier)


@each_stage
def test_its_declarations_are_valid(name: str) -> None:
    """Version, scope, reads and time limit are sensible, its packages are installed, the names of stages exist."""
    traits = STAGES[name].TRAITS
    assert isinstance(traits.version, int) and traits.version >= 1
    assert traits.scope in get_args(Scope)
    assert set(traits.reads) <= {
        "model",
        "reference",
        "data",
        "calibration",
        "labels",
        "labels-check",
        "operators",
    }
    assert traits.timeout_s > 60
    assert all(packages.identity(package) for package in traits.tools)
    assert {*traits.optional_needs, *traits.needs_of_parts} <= set(traits.needs)
    assert {*traits.added_with, traits.replaces} <= {"", *pipeline_stages()}
    assert (STAGES[name].run.__doc__ or "").strip()


@each_subject
def test_its_settings_are_plain_and_the_same_every_time(name: str, subject: Any) -> None:
    """They are a part of the key: JSON, and nothing in them changes between two calls."""
    made = recipe(tune={"trials": 5}, targets=["host"], quantize={})
    stage = STAGES[name]
    one = stage.settings(made, subject).to_json()
    assert json.loads(json.dumps(one, sort_keys=True)) == one
    assert stage.settings(recipe(tune={"trials": 5}, quantize={}), subject).to_json() == one
    assert parse_settings(stage.run, one) == stage.settings(made, subject)


@each_subject
def test_its_settings_know_nothing_of_places_and_names(name: str, subject: Any) -> None:
    """Paths and names are not in the key, except in that of stages whose files contain the names."""
    one = recipe("one", model={"onnx": "a/one.onnx"}, quantize={})
    two = recipe("two", model={"onnx": "b/two.onnx"}, quantize={})
    same = STAGES[name].settings(one, subject) == STAGES[name].settings(two, subject)
    assert same == (name not in NAMED)
    if name not in NAMED and subject is not None:
        renamed = subject._replace(name="another")
        assert STAGES[name].settings(one, subject) == STAGES[name].settings(one, renamed)


@pytest.mark.parametrize(
    ("name", "fields", "matters"),
    [
        ("import", {"tune": {"trials": 9}}, False),
        ("import", {"inputs": {"data": {"shape": [1, 2]}}}, True),
        ("extract_tasks", {"tune": {"trials": 9}}, False),
        ("extract_tasks", {"verify": {"rtol": 0.5}}, False),
        ("tune", {"tune": {"trials": 9}}, True),
        ("tune", {"outputs": ["shared-library"]}, False),
        ("pick_best", {"tune": {"trials": 5, "seed": 9}}, False),
        ("build", {"tune": {"trials": 9}}, False),
        ("build", {"verify": {"rtol": 0.5}}, False),
        ("export", {"outputs": ["shared-library"]}, True),
        ("export", {"verify": {"rtol": 0.5}}, False),
        ("verify", {"verify": {"rtol": 0.5}}, True),
        ("verify", {"tune": {"trials": 9}}, False),
    ],
)
def test_a_field_reaches_only_the_stages_that_it_matters_to(
    name: str, fields: dict[str, Any], matters: bool
) -> None:
    """The slice of the recipe that a stage sees decides what a change makes run again."""
    subject = None if name == "import" else target()
    before = STAGES[name].settings(recipe(tune={"trials": 5}), subject)
    after = STAGES[name].settings(recipe(**{"tune": {"trials": 5}, **fields}), subject)
    assert (before != after) == matters


def test_without_a_search_its_options_do_not_matter() -> None:
    """With trials 0, tune and pick_best are the same whatever else is said about tuning."""
    for name in ("tune", "pick_best"):
        plain = STAGES[name].settings(recipe(), target())
        assert plain == STAGES[name].settings(recipe(tune={"seed": 9}), target(threads=64))


def test_declarations_import_no_framework() -> None:
    """Planning loads all stages, frontends and exporters, and must not pay for what they use."""
    code = (
        "import sys, tvmflow.stages, tvmflow.frontends, tvmflow.exporters, tvmflow.planning.plan; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
