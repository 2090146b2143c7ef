"""The stages of a run: their graph, and the time that they spent and saved."""

from __future__ import annotations

import re

import pytest

from tvmflow.engine.report import _EXITS, StageReport
from tvmflow.engine.summary import _PROBLEMS
from tvmflow.pages.content import StageEntry
from tvmflow.pages.document import STATES, describe_state, draw_graph, draw_times

IMPORT = StageEntry(StageReport("net:import"), 2.0)
TUNE = StageEntry(StageReport("net:tune/host", "ran", "never ran", 60.0), needs=("net:import",))
BUILD = StageEntry(
    StageReport("net:build/host", "failed", "no <memory>", 3.0),
    needs=("net:import", "net:tune/host"),
)


def test_every_outcome_has_a_sign_and_words() -> None:
    assert set(STATES) == {*_EXITS, *_PROBLEMS}


def test_the_graph_has_every_stage_and_only_direct_edges() -> None:
    """What a longer way stands for is not drawn; the table has reasons."""
    drawing, stages = draw_graph([IMPORT, TUNE, BUILD])
    assert drawing.count('class="edge"') == 1 and drawing.split('class="edge"')[0].count("M") == 2
    assert 'aria-label="net:build/host: failed, 3.0 s spent"' in drawing
    assert 'aria-label="net:import: up to date, 2.0 s saved"' in drawing
    assert "no &lt;memory&gt;" in stages and "All 3 stages" in stages


def test_a_graph_that_is_too_large_is_a_table() -> None:
    many = [StageEntry(StageReport(f"net{number}:import", "ran")) for number in range(30)]
    note, _ = draw_graph(many)
    assert note == '<p class="note">The graph of 30 stages is too large to be drawn.</p>'


def test_an_unknown_outcome_is_shown() -> None:
    assert describe_state("<melted>") == '<span class="state bad">? &lt;melted&gt;</span>'


def test_times_are_summed_by_stage() -> None:
    again = StageEntry(StageReport("net:tune/edge"), 30.0)
    bars = str(draw_times([IMPORT, TUNE, again]))
    assert "1 min 00 s, 30.0 s saved" in bars and "2.0 s saved" in bars
    assert 'class="spent" style="width:66.67%"' in bars
    assert draw_times([]) is None and draw_times([IMPORT._replace(saved_s=0.0)]) is None


@pytest.mark.parametrize("outcome", ["ran", "hit"])
def test_a_run_without_targets_is_drawn(outcome: str) -> None:
    drawing, _ = draw_graph([StageEntry(StageReport("net:import", outcome))])
    assert drawing.count('class="node') == 1


def test_stages_of_one_target_and_step_stand_below_each_other() -> None:
    """Parts of a model are cut side by side."""
    parts = [
        StageEntry(StageReport(f"net:cut{part}/host", "ran"), needs=("net:import",))
        for part in (1, 2)
    ]
    drawing, _ = draw_graph([IMPORT, *parts])
    places = re.findall(r"translate\((\d+ \d+)\)", drawing)
    assert places == ["2 30", "198 2", "198 58"]
