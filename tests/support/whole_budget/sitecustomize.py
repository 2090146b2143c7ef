"""Imported by every Python process of a run: a search leaves out no kernel, however little it may gain."""

from __future__ import annotations

import os
from types import ModuleType

from tests.support.importing import after_import


def _spend_whole_budget(module: ModuleType) -> None:
    module.Budget._is_worthwhile = lambda *_: True


def _allow_unsafe_schedules(module: ModuleType) -> None:
    module.INSTRUCTIONS["UnsafeSetDType"] = lambda inputs, values: ""


after_import("tvmflow.tuning.budget", _spend_whole_budget)
if "TESTS_ALLOW_UNSAFE_SCHEDULES" in os.environ:
    # an instruction that gives wrong kernels, in place of one that has a bug
    after_import("tvmflow.tuning.traces", _allow_unsafe_schedules)
