"""What a recipe may say about devices elsewhere, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow.errors import RecipeError
from tvmflow.recipe import Remote, load_recipe
from tvmflow.targets.host import Host
from tvmflow.targets.resolve import resolve

BOARD = (
    "{name: pi, tvm: {kind: llvm, mtriple: aarch64-linux-gnu}, num_cores: 4, remote: {key: pi4}}"
)
HOST = Host("x86_64", "cpu", frozenset(), 2)
PI = {"mtriple": "aarch64-linux-gnu", "mcpu": "", "arch": "aarch64", "features": []}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    return tmp_path / "r.yaml"


def with_board(*edits: tuple[str, str]) -> str:
    return edited(("  - host\n", f"  - {edited(*edits, text=BOARD)}\n"))


def test_a_key_is_enough(path: Path) -> None:
    """The tracker then comes from the environment."""
    (made,) = load_recipe(write(path, with_board())).recipe.targets
    assert made.remote == Remote(key="pi4", tracker=None, priority=1, timeout_s=60.0)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{key: pi4}", "{}", "targets.0.remote.key: is missing; write `key: pi4`"),
        ("pi4}", "pi 4}", "targets.0.remote.key: must be one word without a colon"),
        ("pi4}", "'pi:4'}", "targets.0.remote.key: must be one word without a colon"),
        ("pi4}", "pi4, traker: 'a:1'}", "targets.0.remote.traker: there is no such field"),
        ("pi4}", "pi4, tracker: a}", "targets.0.remote.tracker: must be HOST:PORT"),
        ("pi4}", "pi4, timeout_s: 0}", "targets.0.remote.timeout_s: must be above 0"),
        (
            "kind: llvm",
            "kind: metal",
            "targets.0.remote: kernels are measured on CPUs and NVIDIA GPUs",
        ),
        (", mtriple: aarch64-linux-gnu", "", "targets.0.tvm: needs the device's mtriple"),
        ("num_cores: 4, ", "", "targets.0.remote: needs num_cores"),
        (
            "tvm: {kind: llvm, mtriple: aarch64-linux-gnu}",
            "preset: host",
            "targets.0.remote: goes with a target that says what the device is",
        ),
    ],
)
def test_mistakes(path: Path, old: str, new: str, problem: str) -> None:
    """Each with its place and what to write instead."""
    (found,) = problems_in(write(path, with_board((old, new))))
    assert problem in found


def test_a_target_of_another_kind_is_tuned_where_its_devices_are() -> None:
    """It cannot be verified here, and is measured on a class of devices of its own."""
    remote = {"key": "pi4", "priority": 1, "timeout_s": 60.0}
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    here = resolve("pi", mapping, 4, HOST, PI)
    there = resolve("pi", mapping, 4, HOST, PI, remote)
    assert there.device == {"kind": "rpc", "class": "pi4"}
    assert (there.why_not, there.why_not_tuned) == (here.why_not, "")
    assert here.why_not_tuned == here.why_not != ""


def test_a_plan_tunes_on_devices_what_it_cannot_run_here() -> None:
    """Only verifying has to be turned off for it."""
    there = target("pi", why_not="it is for aarch64")._replace(remote={"key": "pi4"})
    plan_of(planned(recipe(tune={"trials": 4}, verify={"against": "none"}), there))
    with pytest.raises(RecipeError) as refused:
        made = recipe(tune={"trials": 4}, targets=[{"name": "pi", "tvm": {"kind": "llvm"}}])
        plan_of(planned(made, there))
    assert "cannot be verified" in str(refused.value) and "tuned" not in str(refused.value)


def test_how_devices_are_reached_matters_only_to_what_measures_on_them() -> None:
    """Libraries built from the same schedules are the same."""
    one = target()._replace(remote={"key": "pi4", "tracker": "a:1"})
    two = target()._replace(remote={"key": "pi4", "tracker": "b:2"})
    made = recipe(tune={"trials": 4})
    plans = [plan_of(planned(made, each)).stages for each in (one, two)]
    differ = {a.stage for a, b in zip(*plans, strict=True) if a.settings != b.settings}
    assert differ == {"tune", "pick_best"}
