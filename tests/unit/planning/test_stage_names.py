"""Names of stages on the command line."""

from __future__ import annotations

import pytest

from tests.support.engine import plan_of, planned, recipe, target
from tvmflow.core.errors import UsageError
from tvmflow.planning.plan import find_stages

ONE = plan_of(planned(recipe(), target("host"), target("edge")))
TWO = plan_of(planned(recipe()), planned(recipe("other")))


def test_a_stage_is_meant_by_each_of_its_names() -> None:
    """A name without a target means that stage for all of them, one without a recipe that of all recipes."""
    assert [spec.id for spec in find_stages(ONE, "build")] == ["net:build/host", "net:build/edge"]
    assert [spec.id for spec in find_stages(ONE, "build/edge")] == ["net:build/edge"]
    assert [spec.id for spec in find_stages(ONE, "net:import")] == ["net:import"]
    assert [spec.id for spec in find_stages(TWO, "tune")] == ["net:tune/host", "other:tune/host"]
    assert [spec.id for spec in find_stages(TWO, "other:tune")] == ["other:tune/host"]
    assert [spec.id for spec in find_stages(TWO, "other:tune/host")] == ["other:tune/host"]


def test_an_unknown_name_gets_the_nearest_one() -> None:
    """And the list of all stages, with recipes where there are several."""
    with pytest.raises(UsageError, match="no stage 'biuld'; did you mean 'build'") as one:
        find_stages(ONE, "biuld")
    assert one.value.fix.startswith(
        "the stages are: import, lower/host, lower/edge, extract_tasks/host,"
    )
    with pytest.raises(UsageError, match="did you mean 'other:verify/host'") as two:
        find_stages(TWO, "other:verfy/host")
    assert two.value.fix.startswith(
        "the stages are: net:import, net:lower/host, net:extract_tasks/host,"
    )
