"""The first hour of a new user, with the wheel of this checkout in an environment of its own."""

from __future__ import annotations

import re

import pytest

from docs.first_hour import PAGE, STEPS, walk


def test_the_page_shows_every_command_of_the_script() -> None:
    """`make first-hour` writes it again after the script has changed."""
    shown = re.findall(r"^\$ (.*)$", PAGE.read_text(), re.MULTILINE)
    assert shown == [command for step in STEPS for command in step.commands]


@pytest.mark.slow
def test_a_new_user_gets_from_a_model_to_a_program() -> None:
    """Every command ends as the page says, with nothing but the wheel, a model and a compiler."""
    page = walk()
    assert "tune.trails: unknown field; did you mean 'trials'?" in page
    assert "all 7 stages are up to date" in page
    assert page.rstrip().removesuffix("```").rstrip().endswith("this is a 7")
