"""The Python interface: what it plans, and which bundle it loads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tvmflow
from tests.support.onnx_models import draw, model, value
from tvmflow import api
from tvmflow.engine.report import RunReport, StageReport

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from onnx import helper

    net = model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [value("x", [2, 3])],
        [value("y", [2, 3])],
        {"w": draw(2, 3)},
    )
    (tmp_path / "net.onnx").write_bytes(net.SerializeToString())
    path = tmp_path / "net.yaml"
    path.write_text("recipe: 1\nname: net\nmodel: {onnx: net.onnx}\ntargets: [host, x86-64-v2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVMFLOW_STORE", raising=False)
    return path


def test_a_recipe_has_its_fields(recipe: Path) -> None:
    """With defaults; a path or text names it."""
    loaded = tvmflow.Recipe.load(str(recipe))
    assert (loaded.name, loaded.targets) == ("net", ("host", "x86-64-v2"))
    assert loaded.fields.verify.against == "reference"
    assert repr(loaded) == f"<tvmflow.Recipe net for host, x86-64-v2, {recipe}>"


def test_a_plan_says_what_would_run(recipe: Path, tmp_path: Path) -> None:
    """As the command line does, with its options, and with the project's store."""
    plan = tvmflow.plan(tvmflow.Recipe.load(recipe), targets=["host"], until="build")
    ids = [
        "net:import",
        "net:lower/host",
        "net:extract_tasks/host",
        "net:tune/host",
        "net:pick_best/host",
    ]
    assert [stage.id for stage in plan.stages] == [*ids, "net:build/host"]
    assert (plan.stages[0].kind, plan.is_up_to_date) == ("run", False)
    assert plan.store.root == str(tmp_path / "cache")
    assert repr(plan).splitlines()[0].startswith("net:import ")
    assert tvmflow.plan(recipe, store="elsewhere").store.root == str(tmp_path / "elsewhere")


def test_mistakes_are_errors_of_tvmflow(recipe: Path) -> None:
    """With what to do."""
    calls: list[Callable[[], object]] = [
        lambda: tvmflow.plan(),
        lambda: tvmflow.plan(recipe, targets=["hots"]),
        lambda: tvmflow.plan(recipe, force=["tun"]),
        lambda: tvmflow.plan(recipe.with_name("no.yaml")),
    ]
    for call in calls:
        with pytest.raises(tvmflow.TvmflowError):
            call()
    recipe.write_text("recipe: 1\nnmae: net\n")
    with pytest.raises(tvmflow.TvmflowError, match="did you mean 'name'"):
        tvmflow.Recipe.load(recipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": "host"}, "targets='host' is a string, not a list of names"),
        ({"force": [5]}, "force=[5] is not a list of names"),
        ({"variants": (name for name in "b")}, "is not a list of names"),
        ({"store": ""}, "store='' is neither a name nor a path"),
        ({"pipeline": 5}, "pipeline=5 is neither a name nor a path"),
    ],
)
def test_arguments_of_another_type_are_mistakes(
    arguments: dict[str, Any], message: str, recipe: Path
) -> None:
    """A string is a sequence of letters, and an empty path the current folder: neither is meant."""
    with pytest.raises(tvmflow.TvmflowError) as raised:
        tvmflow.plan(recipe, **arguments)
    assert message in raised.value.message


@pytest.mark.parametrize("wrong", [None, 5, ["net.yaml"]])
def test_what_is_no_recipe_is_a_mistake(wrong: Any, recipe: Path) -> None:
    """It is not taken for the name of a file."""
    with pytest.raises(tvmflow.TvmflowError, match="neither a recipe nor the path of one"):
        tvmflow.plan(wrong)


@pytest.mark.parametrize(
    "limits",
    [
        *({"jobs": 0}, {"jobs": "2"}, {"stage_timeout_s": 0}, {"stage_timeout_s": math.nan}),
        *({"stage_memory": "4GiB"}, {"stage_memory": -1}, {"dist": ""}),
    ],
)
def test_wrong_limits_are_mistakes(limits: dict[str, Any], recipe: Path) -> None:
    """Before anything runs, and also if everything is up to date."""
    with pytest.raises(tvmflow.TvmflowError, match=f"{next(iter(limits))}="):
        tvmflow.run(recipe, **limits)


def test_releases_are_left_to_the_command_line(recipe: Path) -> None:
    """Before anything runs."""
    pipeline = recipe.with_name("release.yaml")
    pipeline.write_text("pipeline: 1\nname: all\nrecipes: [net.yaml]\nrelease: {version: 1.0.0}\n")
    with pytest.raises(tvmflow.TvmflowError, match="on the command line"):
        tvmflow.plan(pipeline)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_run_uses_the_remote_cache_that_is_named(
    is_named: bool, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the argument or the environment, with the checks of the command line, before anything runs."""
    inside = str(tmp_path / "cache" / "shared")
    if not is_named:
        monkeypatch.setenv("TVMFLOW_REMOTE", inside)
    arguments: dict[str, Any] = {"remote": inside} if is_named else {}
    with pytest.raises(tvmflow.TvmflowError, match="is inside the store"):
        tvmflow.run(recipe, **arguments)
    with pytest.raises(tvmflow.TvmflowError, match="'sometimes' is not a mode"):
        tvmflow.run(recipe, remote_mode="sometimes", **arguments)


def test_the_bundle_that_fits_is_loaded(small_bundle: Path, tmp_path: Path) -> None:
    """One of several by the names of recipe and target."""
    paths = []
    for name in ("net/host/net.tvmflow", "net/x86-64-v2/net.tvmflow"):
        path = tmp_path / "dist" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(small_bundle.read_bytes())
        paths.append(str(path))
    result = api.Result(RunReport((), (*paths, str(tmp_path / "other.json")), (), 0.0))
    assert result.is_complete and json.dumps(result.delivered)
    assert result.load("net", "host").inputs[0].name == "x"
    with pytest.raises(tvmflow.TvmflowError, match="several bundles fit"):
        result.load()
    with pytest.raises(tvmflow.TvmflowError, match="no such bundle"):
        result.load(target="cuda")


@pytest.mark.parametrize(
    ("outcome", "fix"), [("failed", "the run did not succeed"), ("ran", "add `bundle`")]
)
def test_a_run_without_a_bundle_tells_why(outcome: str, fix: str) -> None:
    """The recipe is not the cause of a stage that failed."""
    stage = StageReport("net:build/host", outcome, "", 0.0, {})
    with pytest.raises(tvmflow.TvmflowError) as caught:
        api.Result(RunReport((stage,), (), (), 0.0)).load()
    assert caught.value.fix.startswith(fix)


def test_the_package_has_no_other_names() -> None:
    """Those that it has are imported at first use."""
    assert all(getattr(tvmflow, name) is not None for name in tvmflow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'recepi'"):
        tvmflow.recepi  # noqa: B018


def test_the_package_lists_its_public_names() -> None:
    """Those that are imported at first use, too."""
    assert set(tvmflow.__all__) <= set(dir(tvmflow))
    assert "TYPE_CHECKING" not in dir(tvmflow)
