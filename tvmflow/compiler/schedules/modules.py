"""Replacing the kernels of a module by scheduled ones."""

from __future__ import annotations

from typing import Final, NamedTuple

import tvm

NO_RULE: Final = "none"
"""In place of a rule's name for a kernel without a schedule."""

_IS_SCHEDULED: Final = "tirx.is_scheduled"


class ScheduledModule(NamedTuple):
    """A module with scheduled kernels, and the schedule rule of each kernel that a rule was tried for."""

    mod: tvm.IRModule
    rules: dict[str, str]


def list_unscheduled(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, tvm.tirx.PrimFunc]]:
    """Return the kernels of a module that have no schedule yet."""
    return [
        (var, function)
        for var, function in mod.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc) and not function.attrs.get(_IS_SCHEDULED, False)
    ]


def with_original_attributes(
    scheduled: tvm.tirx.PrimFunc, original: tvm.tirx.PrimFunc
) -> tvm.tirx.PrimFunc:
    """Return a scheduled kernel with the attributes of the function that it replaces."""
    return tvm.tirx.PrimFunc(
        scheduled.params, scheduled.body, scheduled.ret_type, original.attrs
    ).with_attr(_IS_SCHEDULED, True)
