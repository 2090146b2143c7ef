"""docs/targets.md: its examples work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.recipes import ROOT, lay_out, write
from tvmflow.planning.recipes import load_recipe
from tvmflow.targets.presets import PRESETS

PAGE = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[0])
def test_the_recipes_on_the_page_are_correct(tmp_path: Path, block: str) -> None:
    """Every block, completed to a recipe, loads, and its targets have mappings."""
    lay_out(tmp_path)
    start = "" if block.startswith("name:") else "name: net\n"
    inner = "targets:\n" if block.startswith("  - ") else ""
    text = f"recipe: 1\n{start}model: {{onnx: m.onnx}}\n{inner}{block}"
    recipe = load_recipe(write(tmp_path / "r.yaml", text)).recipe
    for target in recipe.targets:
        assert (target.tvm_target() is None) == (target.preset == "host")
        recipe.for_target(target.name)
    for variant in recipe.variants:
        assert recipe.for_variant(variant).inputs


def test_presets_that_the_page_names_are_there() -> None:
    """In the table as it is printed, with their own descriptions."""
    shown = re.search(r"^\$ tvmflow targets\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    rows = [line for line in shown[1].splitlines()[1:] if line != "…"]
    for row in rows:
        assert row.endswith(f" {PRESETS[row.split()[0]].description}")
