"""Traces to replay: good, wrong, and of a search that crashes."""

from __future__ import annotations

from typing import Any

from tests.support.trials import trial
from tvmflow.core.types import Json
from tvmflow.tuning.trials import Trial, trial_id

BLOCK = ["GetSBlock", [], ["b0", "main"], ["b0"]]


LOOPS = ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]]


GOOD = [[BLOCK, LOOPS], []]


WRONG = [[["GetSBlock", [], ["b99", "main"], ["b0"]]], []]


# TVM divides by the factor that was decided
CRASHES = [[BLOCK, LOOPS, ["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]]], [[2, [0, 0]]]]


def of(trace: Json, **changes: Any) -> Trial:
    return trial(0, trace=trace, id=trial_id(trace), **changes)
