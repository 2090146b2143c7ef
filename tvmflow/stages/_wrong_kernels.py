"""Kernels that compute wrong numbers: each call of a scheduled kernel, against the same kernel without a schedule.

One run of the model suffices: TVM's virtual machine calls back before and after each kernel, which
gives the kernel's true operands. Both kernels get the same ones, so that a wrong kernel is not
blamed for what it was given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.stages import _comparison, _findings
from tvmflow.stages._tolerances import Tolerance
from tvmflow.stages.build import BuildSettings, schedule_kernels
from tvmflow.tuning.workloads import normalize, workload_key

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_CONTINUE: Final = 0
"""The answer of an instrument after which the virtual machine goes on (VMInstrumentReturnKind.NO_OP)."""


class WrongKernel(NamedTuple):
    """A kernel that does not compute what it should.

    Attributes:
        name: Its name.
        call: The first call of it that is wrong, counted from 0.
        rule: Its schedule rule, or `build.TUNED`.
        mismatch: A sentence about what is wrong.
        is_rule_right: Whether it is right as the rules schedule it.
    """

    name: str
    call: int
    rule: str
    mismatch: str
    is_rule_right: bool


class KernelCheck:
    """A build, run on TVM's virtual machine with a look at every call of a kernel.

    Args:
        settings: Those of `build`.
        inputs: The files that `build` reads.
        tolerance: How closely a kernel must agree with itself without a schedule.

    Attributes:
        wrong: The wrong kernels by name, in the order of their calls, once it has run.
    """

    def __init__(
        self, settings: BuildSettings, inputs: Mapping[str, Path], tolerance: Tolerance
    ) -> None:
        self._settings, self._inputs, self._tolerance = settings, inputs, tolerance
        self._calls: dict[str, int] = {}
        self._operands: list[Any] = []
        self._built: dict[tuple[str, bool], Any] = {}
        self.wrong: dict[str, WrongKernel] = {}
        self.target = lowering.make_target(settings.target)
        mod = lowering.load_ir(inputs["import/model.json"])
        self.model = lowering.lower(mod, self.target, settings.lowering)
        self._scheduled, self._rules = schedule_kernels(self.model.mod, settings, inputs)

    @cached_property
    def _kernels(self) -> dict[str, tvm.tirx.PrimFunc]:
        """The kernels that were scheduled, as they were before."""
        return {
            str(var.name_hint): function
            for var, function in self.model.mod.functions_items()
            if isinstance(function, tvm.tirx.PrimFunc)
            and not function.same_as(self._scheduled[var.name_hint])
        }

    def workload(self, name: str) -> str:
        """Return the key of a kernel's workload."""
        return workload_key(normalize(self._kernels[name]))

    def run(self, feed: list[Array]) -> list[Array]:
        """Run the model on one batch, in the order of its inputs, and return its outputs."""
        params = lowering.load_weights(self._inputs["import/params.safetensors"])
        weights = self.model.compute_weights(params)
        built = lowering.compile_with_weights(self._scheduled, weights, self.target)
        machine = relax.VirtualMachine(built, tvm.cpu())
        machine.set_instrument(self._observe)
        return list_arrays(machine["main"](*map(tvm.runtime.tensor, feed)))

    def _observe(self, _: Any, name: str, is_before: bool, __: Any, *operands: Any) -> int:
        """Take a copy of the operands before a kernel runs, and compare afterwards."""
        if name not in self._kernels:
            return _CONTINUE
        if is_before:
            self._operands = [_copy(operand) for operand in operands]
            return _CONTINUE
        call = self._calls[name] = self._calls.get(name, -1) + 1
        plain = self._call(name, by_rule=False)
        mismatch = "" if name in self.wrong else self._find_mismatch(operands, plain)
        if mismatch:
            is_rule_right = not self._find_mismatch(self._call(name, by_rule=True), plain)
            rule = self._rules.get(name, "")
            _log.debug("%s (%s) is wrong: %s", name, rule, mismatch)
            self.wrong[name] = WrongKernel(name, call, rule, mismatch, is_rule_right)
        # The kernels after a wrong one get the right numbers, so that all wrong ones show.
        for operand, right in zip(operands, plain, strict=True):
            if isinstance(right, tvm.runtime.Tensor):
                operand.copyfrom(right)
        return _CONTINUE

    def _find_mismatch(self, actual: Sequence[Any], expected: Sequence[Any]) -> str:
        """Return how the operands that a kernel leaves differ from the right ones; empty if they do not."""
        comparisons = {
            str(index): _comparison.compare_inner(left.numpy(), right.numpy(), self._tolerance)
            for index, (left, right) in enumerate(zip(actual, expected, strict=True))
            if isinstance(right, tvm.runtime.Tensor)
        }
        return "; ".join(_findings.list_mismatches(comparisons, "the kernel without a schedule"))

    def _call(self, name: str, *, by_rule: bool) -> list[Any]:
        """Return the operands after a call of another form of the kernel on those that it was called with."""
        operands = [_copy(operand) for operand in self._operands]
        self._build(name, by_rule=by_rule)(*operands)
        return operands

    def _build(self, name: str, *, by_rule: bool) -> Any:
        key = (name, by_rule)
        if key not in self._built:
            # A library has only those functions that have a symbol.
            function = self._kernels[name].with_attr("global_symbol", name)
            mod = tvm.IRModule({name: function})
            if by_rule:
                version = self._settings.schedules
                mod, _ = schedules.schedule_untuned(mod, self._settings.target, version)
            self._built[key] = build_kernels(mod, self.target)[name]
        return self._built[key]


def _copy(operand: Any) -> Any:
    is_tensor = isinstance(operand, tvm.runtime.Tensor)
    return tvm.runtime.tensor(operand.numpy()) if is_tensor else operand


def list_arrays(result: Any) -> list[Array]:
    """Return what a library returned: one tensor or several."""
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [tensor.numpy() for tensor in tensors]
