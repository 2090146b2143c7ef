"""The history of speed: runs of benchmarks, what became slower, and the page that draws it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("history", ROOT / "benchmarks/history.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # its NamedTuples look up their own module
    sys.modules["history"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(history: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a file of its own and a quiet machine."""
    monkeypatch.setattr(history, "FILE", tmp_path / "history.jsonl")
    monkeypatch.setattr(history.os, "getloadavg", lambda: (1.0, 1.0, 1.0))
    return history


def test_what_became_slower_is_found_beside_the_last_run_that_measured_it(
    recorded: ModuleType,
) -> None:
    recorded.record("zoo", {"resnet": 0.8, "bert": 0.9})
    recorded.record("zoo", {"bert": 0.92})
    recorded.record("zoo", {"resnet": 0.88, "bert": 0.93}, {"resnet": "ncnn"})
    (loss,) = recorded.find_losses(recorded.read_runs(recorded.FILE))
    assert (loss.case, loss.previous.ratios[loss.case], loss.run.ratios[loss.case]) == (
        "resnet",
        0.8,
        0.88,
    )
    assert "zoo: resnet 0.80 → 0.88 of the fastest peer (+10%)" in str(loss)


def test_other_machines_and_runs_beside_other_work_are_not_compared(
    recorded: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.record("arm", {"resnet": 0.8}, counted_for="neoverse-n1")
    recorded.record("arm", {"resnet": 1.2}, counted_for="cortex-a72")
    recorded.record("zoo", {"resnet": 0.8})
    monkeypatch.setattr(recorded.os, "getloadavg", lambda: (500.0, 1.0, 1.0))
    recorded.record("zoo", {"resnet": 1.2})
    recorded.record("zoo", {})
    runs = recorded.read_runs(recorded.FILE)
    assert [run.is_quiet for run in runs] == [True, True, True, False]
    assert recorded.find_losses(runs) == []


def test_a_run_over_other_cases_is_no_change(history: ModuleType) -> None:
    runs = [
        history.Run("zoo", "2026-11-26", "a", "CPU × 2", 1.0, ratios)
        for ratios in ({"a": 0.5, "b": 0.8}, {"b": 0.4}, {"b": 0.4, "c": 3.0}, {"d": 0.7})
    ]
    first = (0.5 * 0.8) ** 0.5
    assert history.chain(runs) == pytest.approx([first, first / 2, first / 2, 0.7])


def test_the_page_shows_each_case_and_no_name_as_markup(recorded: ModuleType) -> None:
    assert "No benchmark has been recorded" in recorded.render([])
    recorded.record("zoo", {"<script>": 0.8})
    recorded.record("zoo", {"<script>": 0.9})
    page = recorded.render(recorded.read_runs(recorded.FILE))
    assert "1 case became slower with the last quiet run." in page
    assert "&lt;script&gt;" in page
    assert "<script>:" not in page
    assert "+12%" in page
