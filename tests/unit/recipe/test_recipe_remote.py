"""What a recipe may say about devices elsewhere, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import plan_of, planned, recipe, target
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow.core.errors import RecipeError
from tvmflow.planning.recipes import load_recipe
from tvmflow.recipe import Remote
from tvmflow.targets.host import Host
from tvmflow.targets.llvm_query import TargetFacts
from tvmflow.targets.resolve import resolve

BOARD = "{name: pi, tvm: {kind: llvm, mtriple: aarch64-linux-gnu}, threads: 4, remote: {key: pi4}}"
HOST = Host("x86_64", "cpu", frozenset(), 2)
PI = TargetFacts("aarch64-linux-gnu", "", "aarch64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    return tmp_path / "r.yaml"


def with_board(*edits: tuple[str, str]) -> str:
    return edited(("  - host\n", f"  - {edited(*edits, text=BOARD)}\n"))


def test_only_the_key_is_required(path: Path) -> None:
    """The tracker then comes from the environment."""
    (made,) = load_recipe(write(path, with_board())).recipe.targets
    assert made.remote == Remote(key="pi4", tracker=None, priority=1, timeout_s=60.0)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{key: pi4}", "{}", "targets.0.remote.key: is missing; write `key: pi4`"),
        ("pi4}", "pi 4}", "targets.0.remote.key: must not contain spaces or colons"),
        ("pi4}", "'pi:4'}", "targets.0.remote.key: must not contain spaces or colons"),
        ("pi4}", "pi4, traker: 'a:1'}", "targets.0.remote.traker: unknown field"),
        ("pi4}", "pi4, tracker: a}", "targets.0.remote.tracker: must be HOST:PORT"),
        ("pi4}", "pi4, timeout_s: 0}", "targets.0.remote.timeout_s: must be greater than 0"),
        (
            "kind: llvm",
            "kind: metal",
            "targets.0.remote: kernels can only be measured on CPUs and NVIDIA GPUs",
        ),
        (", mtriple: aarch64-linux-gnu", "", "targets.0.tvm: needs the device's mtriple"),
        ("threads: 4, ", "", "targets.0.remote: needs threads"),
        (
            "tvm: {kind: llvm, mtriple: aarch64-linux-gnu}",
            "preset: host",
            "targets.0.remote: is not allowed with host; describe the device with preset or tvm",
        ),
    ],
)
def test_wrong_remotes(path: Path, old: str, new: str, problem: str) -> None:
    """Each message has a position and says what is needed."""
    (problem_text,) = problems_in(write(path, with_board((old, new))))
    assert problem in problem_text


def test_a_target_that_cannot_run_locally_is_tuned_on_its_devices() -> None:
    """It cannot be verified on this machine, and its trials have a device class of their own."""
    remote = {"key": "pi4", "priority": 1, "timeout_s": 60.0}
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    local = resolve("pi", mapping, 4, HOST, PI)
    remote_target = resolve("pi", mapping, 4, HOST, PI, remote)
    assert remote_target.device == {"kind": "rpc", "class": "pi4"}
    assert (remote_target.unrunnable_reason, remote_target.unmeasurable_reason) == (
        local.unrunnable_reason,
        "",
    )
    assert local.unmeasurable_reason == local.unrunnable_reason != ""


def test_a_plan_tunes_on_remote_devices() -> None:
    """Only verification must be disabled for it."""
    remote_target = target("pi", why_not="it is for aarch64")._replace(remote={"key": "pi4"})
    plan_of(planned(recipe(tune={"trials": 4}, verify={"against": "none"}), remote_target))
    with pytest.raises(RecipeError) as refused:
        made = recipe(tune={"trials": 4}, targets=[{"name": "pi", "tvm": {"kind": "llvm"}}])
        plan_of(planned(made, remote_target))
    assert "cannot be verified" in str(refused.value) and "tuned" not in str(refused.value)


def test_the_tracker_only_matters_to_stages_that_measure() -> None:
    """Libraries built from the same schedules are the same."""
    one = target()._replace(remote={"key": "pi4", "tracker": "a:1"})
    two = target()._replace(remote={"key": "pi4", "tracker": "b:2"})
    made = recipe(tune={"trials": 4})
    plans = [plan_of(planned(made, item)).stages for item in (one, two)]
    differ = {a.stage for a, b in zip(*plans, strict=True) if a.settings != b.settings}
    assert differ == {"tune", "pick_best"}
