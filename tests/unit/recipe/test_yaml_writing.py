"""What is written is read again as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmflow.recipe.yaml_files import read_yaml, write_yaml

_TEXTS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs", "Cc"])
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXTS | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(_TEXTS, _VALUES, min_size=1, max_size=4))
def test_written_values_are_read_unchanged(
    value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(write_yaml(value), encoding="utf-8")
    document = read_yaml(path)
    assert document.problems == ()
    assert document.value == value


@pytest.mark.parametrize(
    "text",
    ["1e3", "12e34", "yes", "0012", "0x1f", "2026-11-22", "1:30", "~", "", "\x85", "a\u2028b"],
)
def test_special_strings_stay_the_same(text: str, tmp_path: Path) -> None:
    path = tmp_path / "written.yaml"
    path.write_text(write_yaml({text: text}), encoding="utf-8")
    assert read_yaml(path).value == {text: text}


def test_short_lists_are_on_one_line_and_each_field_on_its_own() -> None:
    value = {"a": [1, 2], "b": {"c": "x", "d": {}}, "e": [{"f": 1}]}
    assert write_yaml(value) == "a: [1, 2]\nb:\n  c: x\n  d: {}\ne:\n- f: 1\n"
