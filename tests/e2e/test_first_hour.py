"""The first hours of new users, with the wheel of this checkout in an environment of its own."""

from __future__ import annotations

import re

import pytest

from tools.first_hour import HOURS, Hour, walk

DIGITS, MODELS = HOURS


@pytest.mark.parametrize("hour", HOURS, ids=lambda hour: hour.page)
def test_the_page_shows_every_command_of_the_script(hour: Hour) -> None:
    """`make first-hour` writes it again after the script has changed."""
    shown = re.findall(r"^\$ (.*)$", hour.path.read_text(), re.MULTILINE)
    assert shown == [command for step in hour.steps for command in step.commands]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_new_user_gets_from_a_model_to_a_program() -> None:
    """Every command ends as the page says, with nothing but the wheel, a model and a compiler."""
    page = walk(DIGITS)
    assert "tune.trails: unknown field; did you mean 'trials'?" in page
    assert "all 8 stages are up to date" in page
    assert page.rstrip().removesuffix("```").rstrip().endswith("this is a 7")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_new_user_builds_a_detector_an_index_and_a_changed_network() -> None:
    """Every command ends as the page says, and the last run has nothing to do."""
    page = walk(MODELS)
    assert "detections: float32" in page
    assert "class: int64" in page
    assert "all 8 stages are up to date" in page
