"""How operators become kernels: the recipe's choices, with the versions of the code behind them.

Both enter the settings, and so the key, of every stage that they shape.
"""

from __future__ import annotations

from typing import Any, Final

LOWERING: Final = 6
"""Raise it when `_lowering` or one of its passes changes what comes out."""

SCHEDULES: Final = 4
"""Raise it when `tvmflow.schedules` chooses other schedules."""

NO_SCHEDULES: Final = 0
"""In place of the version where the recipe wants kernels without a schedule until tuning finds one."""


def lowering(recipe: Any) -> dict[str, Any]:
    """What the way from the imported model to its kernels depends on, besides the target."""
    chosen = recipe.kernels.model_dump(mode="json", exclude={"schedules"})
    return {"version": LOWERING, **chosen, "plain": sorted(set(chosen["plain"]))}


def is_mixed(recipe: Any) -> bool:
    """Whether weights become float16."""
    return bool(recipe.kernels.precision == "mixed")


def schedules(recipe: Any) -> int:
    """The version of the schedules that kernels have before tuning, or `NO_SCHEDULES`."""
    return SCHEDULES if recipe.kernels.schedules == "rules" else NO_SCHEDULES
