"""What every frontend in the registry promises."""

from __future__ import annotations

import inspect

import pytest

from tvmflow import tools
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Frontend
from tvmflow.recipe import ModelSource

each_frontend = pytest.mark.parametrize("name", FRONTENDS)


@each_frontend
def test_it_offers_what_the_contract_asks_for(name: str) -> None:
    """The same functions with the same parameters, each with a sentence about it."""
    frontend = FRONTENDS[name]
    assert name == frontend.KIND
    for function in ("settings", "files", "load", "reference"):
        wanted = list(inspect.signature(getattr(Frontend, function)).parameters)[1:]
        offered = getattr(frontend, function)
        assert list(inspect.signature(offered).parameters) == wanted
        assert (offered.__doc__ or "").strip()


@each_frontend
def test_its_packages_are_installed(name: str) -> None:
    """What enters the key of `import` must be there to have an identity."""
    assert all(tools.identity(package) != "absent" for package in FRONTENDS[name].TOOLS)
    assert FRONTENDS[name].REFERENCE_TOOLS


def test_a_recipe_can_name_each() -> None:
    """`model:` has a field for every frontend."""
    assert set(FRONTENDS) <= set(ModelSource.model_fields)
