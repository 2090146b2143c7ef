"""Pins of recipes: what they were last up to date with, of the targets that they have."""

from __future__ import annotations

from pathlib import Path

from tvmflow.core.types import RecipeOrigin
from tvmflow.store.inventory import last_keys, update_recipe_pins
from tvmflow.store.local import LocalStore


def test_a_recipe_with_fewer_targets_pins_no_results_for_the_others(tmp_path: Path) -> None:
    """Stages without a target stay, and so do targets that this run left out, and other recipes."""
    store = LocalStore(str(tmp_path / "store"))
    labels = ("import", "build/host", "build/edge", "verify/edge", "build/big/npu")
    for recipe in ("net", "other"):
        for label in labels:
            store.remember(recipe, label, "0" * 64)
    kept = ("host", "big/npu")
    update_recipe_pins(store, [RecipeOrigin("net", "net.yaml", "tune.yaml", targets=kept)])
    assert sorted(last_keys(store)["net"]) == ["build/big/npu", "build/host", "import"]
    assert sorted(last_keys(store)["other"]) == sorted(labels)
