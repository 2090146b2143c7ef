"""Commits that give two variables of a function one name are found."""

from __future__ import annotations

from tools.check_renames import find_merged

BEFORE = """
def place_of(sizes):
    place = 0
    for position, size in enumerate(sizes):
        place += position * size
    return place
"""


def test_merged_names_are_found() -> None:
    merged = BEFORE.replace("place ", "position ").replace("return place", "return position")
    [found] = find_merged(BEFORE, merged)
    assert found.endswith("place_of: place and position became position")


def test_other_renames_and_changes_are_not_reported() -> None:
    assert not list(find_merged(BEFORE, BEFORE.replace("place", "offset")))
    assert not list(find_merged(BEFORE, BEFORE.replace("= 0", "= 1 + 2")))
    assert not list(find_merged(BEFORE, BEFORE + BEFORE))
