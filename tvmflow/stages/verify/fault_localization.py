"""The cause of a wrong library: a tuning record, a schedule rule, the lowering or the import.

It runs in its own process after `verify` has rejected a library, and does not change the verdict.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import LoweredModel, ScheduledModel, build_kernels, lower, schedule_untuned
from tvmflow.core.fork_server import Emit
from tvmflow.core.formatting import count_text, last_line, names_text, size_text
from tvmflow.core.types import Array, Feed, Json, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.runtime.virtual_machine import list_tensors
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages.base import StageContext
from tvmflow.stages.build import (
    TUNED,
    BuildSettings,
    calls_text,
    find_kernel_nodes,
    schedule_kernels,
)
from tvmflow.stages.choose import read_choices
from tvmflow.stages.images import DATA
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.verify import comparison, inputs, reference_run, verdict_text
from tvmflow.stages.verify.comparison import Tolerance, compare_inner
from tvmflow.stages.verify.inner_tensors import find_index_inputs
from tvmflow.stages.verify_settings import LOCAL, MachineSettings, VerifySettings
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.trials import trial_id
from tvmflow.tuning.workloads import normalize, workload_key

# ---------------------------------------------------------------- wrong kernels
# Each call of a scheduled kernel is compared with the same kernel without a schedule.
#
# One run of the model suffices: TVM's virtual machine calls back before and after each kernel and passes its
# operands. Both kernels get the same operands, so errors in a kernel's inputs do not count against the kernel.


_CONTINUE: Final = 0
"""The instrument's return value to continue as usual (VMInstrumentReturnKind.NO_OP)."""


class WrongKernel(NamedTuple):
    """A kernel with wrong results.

    Attributes:
        call: Its first wrong call, counted from 0.
        rule: Its schedule rule, or `build.TUNED`.
        mismatch: A sentence about the problem.
        is_rule_right: Whether the kernel is right when scheduled by the rules.
    """

    name: str
    call: int
    rule: str
    mismatch: str
    is_rule_right: bool


class KernelCheck:
    """Builds the model for TVM's virtual machine, and checks every call of a scheduled kernel.

    Attributes:
        wrong: The wrong kernels by name, in the order of their calls, after `run`.
    """

    def __init__(
        self, settings: BuildSettings, files: Mapping[str, Path], tolerance: Tolerance
    ) -> None:
        self._settings, self._files, self._tolerance = settings, files, tolerance
        self._calls: dict[str, int] = {}
        self._operands: list[Any] = []
        self._built: dict[tuple[str, bool], Any] = {}
        self.wrong: dict[str, WrongKernel] = {}
        self.target = make_target(settings.target)
        self.model = LoweredModel.read(files[LOWERED_ROLE])
        self._scheduled, self._rules = schedule_kernels(self.model.mod, settings, files)

    @cached_property
    def _kernels(self) -> dict[str, tvm.tirx.PrimFunc]:
        """The kernels that get a schedule, before they are scheduled."""
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
        params = read_safetensors(self._files["import/params.safetensors"])
        weights = self.model.compute_weights(params)
        built = ScheduledModel(self._scheduled, weights, self.target).compile()
        machine = relax.VirtualMachine(built, tvm.cpu())
        machine.set_instrument(self._observe)
        results = list_tensors(machine["main"](*map(tvm.runtime.tensor, feed)))
        return [result.numpy() for result in results]

    def _observe(self, _: Any, name: str, is_before: bool, __: Any, *operands: Any) -> int:
        """Copy the operands before a kernel runs, and compare the results afterwards."""
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
            self.wrong[name] = WrongKernel(
                name=name, call=call, rule=rule, mismatch=mismatch, is_rule_right=is_rule_right
            )
        # Later kernels get the correct values, so each wrong kernel is detected.
        for operand, right in zip(operands, plain, strict=True):
            if isinstance(right, tvm.runtime.Tensor):
                operand.copyfrom(right)
        return _CONTINUE

    def _find_mismatch(self, actual: Sequence[Any], expected: Sequence[Any]) -> str:
        """Return how a kernel's operands differ from the right ones after the call; empty if they agree."""
        comparisons = {
            str(index): comparison.compare_inner(left.numpy(), right.numpy(), self._tolerance)
            for index, (left, right) in enumerate(zip(actual, expected, strict=True))
            if isinstance(right, tvm.runtime.Tensor)
        }
        return "; ".join(verdict_text.list_mismatches(comparisons, "the kernel without a schedule"))

    def _call(self, name: str, *, by_rule: bool) -> list[Any]:
        """Return the operands after calling the kernel without a schedule, or scheduled by the rules."""
        operands = [_copy(operand) for operand in self._operands]
        self._build(name, by_rule=by_rule)(*operands)
        return operands

    def _build(self, name: str, *, by_rule: bool) -> Any:
        key = (name, by_rule)
        if key not in self._built:
            # Functions without a symbol are not compiled into a library.
            function = self._kernels[name].with_attr("global_symbol", name)
            mod = tvm.IRModule({name: function})
            if by_rule:
                version = self._settings.schedules
                mod, _ = schedule_untuned(mod, self._settings.target, version)
            self._built[key] = build_kernels(mod, self.target)[name]
        return self._built[key]


def _copy(operand: Any) -> Any:
    is_tensor = isinstance(operand, tvm.runtime.Tensor)
    return tvm.runtime.tensor(operand.numpy()) if is_tensor else operand


_log = logging.getLogger(__name__)

_MAX_WEIGHT_BYTES: Final = 1 << 30
# The maximum number of intermediate tensors that one build returns: more would change how the model is fused.
_TENSORS_AT_ONCE: Final = 32
_HOST: Final = {"kind": "llvm"}
# A relative change of a few float32 roundings.
_NUDGE: Final = 1e-6
_DUMP: Final = "`tvmflow run RECIPE --dump-ir DIR`"
# The prefix of the operators that tvmflow defines.
_OWN: Final = "tvmflow."
_REPORT: Final = "report it as a bug of tvmflow, with the model"


class Fault(NamedTuple):
    """A cause of wrong outputs, and the remedy.

    Attributes:
        workload: The key of the workload whose schedule is wrong; empty for other faults.
        trial: The id of the trial that found this schedule; may be empty.
    """

    text: str
    fix: str = ""
    workload: str = ""
    trial: str = ""


def find_faults(payload: dict[str, Json], _: Emit) -> list[Json]:
    """Return faults as JSON; `payload` is from `engine.stage_runs.make_payload`."""
    files = {name: Path(path) for name, path in payload["inputs"].items()}
    work = Path(payload["work"])
    settings = VerifySettings.model_validate(payload["verify"])
    build = BuildSettings.model_validate(payload["build"]) if payload["build"] else None
    context = StageContext(
        inputs=files, out=work, work=work, ledger=work, locks=work, emit=lambda event: None
    )
    size = files["import/params.safetensors"].stat().st_size
    if size > _MAX_WEIGHT_BYTES:
        limit = size_text(_MAX_WEIGHT_BYTES)
        faults = [
            Fault(f"faults were not localized: weights of more than {limit} take too much memory")
        ]
    else:
        faults = _Search(settings, build, context, payload["nodes"], payload.get("at")).run()
    return [fault._asdict() for fault in faults]


def list_tvmflow_operators(mod: tvm.IRModule) -> list[str]:
    """Return the names, without prefix, of operators that only passes of tvmflow can lower."""
    names = ir.list_operators(mod)
    return sorted(name.removeprefix(_OWN) for name in names if name.startswith(_OWN))


def _nudge(feed: Mapping[str, Array]) -> Feed:
    """Return inputs whose floats are changed up or down by `_NUDGE` times the largest value."""
    rng = np.random.default_rng(0)

    def nudge(array: Array) -> Array:
        if array.dtype.kind != "f" or not array.size:
            return array
        step = np.abs(array).max() * _NUDGE
        nudged: Array = (array + step * rng.choice([-1.0, 1.0], array.shape)).astype(array.dtype)
        return nudged

    return {name: nudge(array) for name, array in feed.items()}


class _Search:
    """Searches for the faults of one library, which may be wrong only at some sizes.

    `build` is None for a partitioned target. `nodes` names the node of each binding of the imported module.
    """

    def __init__(
        self,
        settings: VerifySettings,
        build: BuildSettings | None,
        context: StageContext,
        nodes: Sequence[str],
        at: Mapping[str, int] | None = None,
    ) -> None:
        self._at = at
        self._settings, self._build, self._context, self._nodes = settings, build, context, nodes
        self._frontend = FRONTENDS[settings.model["kind"]]
        signature = json.loads(context.inputs["import/signature.json"].read_text())
        self._model = inputs.read_imported_model(signature, context.inputs)
        self._signature = signature
        self._tolerance, self._own_tolerance, self._index_inputs = self._read_model()
        self._feed, self._expected, self._nudged = self._run_reference()

    def run(self) -> list[Fault]:
        machine = self._settings.target
        is_here = (
            self._build is not None
            and isinstance(machine, MachineSettings)
            and self._settings.run_on == LOCAL
            and self._build.target["kind"] == "llvm"
            and not machine.unrunnable_reason
        )
        if not is_here or self._build is None:
            return [
                self._find_model_fault()
                or self._find_import_fault()
                or self._find_tolerance_fault(self._run_imported(self._load()))
                or Fault(
                    "the imported model agrees with the reference on this machine, so that the lowering or the kernels "
                    "for this target are wrong; these can be looked into only where this machine runs them",
                    "build the recipe for the target `host`: if that passes, the fault is in the target's kernels",
                )
            ]

        check = KernelCheck(self._build, self._context.inputs, self._tolerance)
        outputs = check.run(
            [
                self._feed[spec.name]
                for spec in self._model.inputs
                if spec.name not in self._model.bound
            ]
        )
        if check.wrong:
            return [self._describe_kernel(check, wrong) for wrong in check.wrong.values()]
        is_right = self._agrees(outputs)
        if is_right and self._index_inputs:
            is_right = self._agrees(self._run_lowered(self._load()))
        if is_right:
            return [
                self._find_tolerance_fault(outputs)
                or Fault(
                    "each kernel computes what it should, and so does the model on TVM's virtual machine: "
                    "the fault is in the C library or its packaging",
                    f"set `runtime: vm` in the recipe, and {_REPORT}",
                )
            ]
        return [
            self._find_model_fault() or self._find_import_fault() or self._find_lowering_fault()
        ]

    # ---------------------------------------------------------------- the reference

    def _read_model(self) -> tuple[Tolerance, Tolerance, tuple[TensorSpec, ...]]:
        """Return the tolerance for faults, the recipe's tolerance, and the inputs of argmax-like operators.

        Errors within the default tolerance are not tvmflow's fault, so the recipe's tolerance is used only where it is
        looser.
        """
        checks, files = self._settings.verify, self._context.inputs
        mod = ir.load_module(files["import/model.json"])
        self._model = self._model._replace(operands=inputs.find_operands(mod))
        arithmetic = comparison.find_arithmetic(mod, self._settings.precision)
        indices = find_index_inputs(mod, self._model, self._settings, files)
        tolerance = comparison.tolerance_for(arithmetic, rtol=None, atol=None)
        own = comparison.tolerance_for(arithmetic, rtol=checks.rtol, atol=checks.atol)
        if not checks.has_default_tolerance:
            tolerance = tolerance._replace(
                rtol=max(tolerance.rtol, checks.rtol or 0.0),
                atol=max(tolerance.atol, checks.atol or 0.0),
                rms=None,
                scale=None,
                exact_integers=False,
            )
        # no framework can return the tensors of a model that tvmflow quantized
        has_names = indices is not None and not self._settings.quantized
        return tolerance, own, indices.tensors if indices and has_names else ()

    def _find_tolerance_fault(self, outputs: Sequence[Array]) -> Fault | None:
        """Return a fault if only the recipe's tolerance, stricter than the default, is exceeded."""
        if self._agrees(outputs, self._own_tolerance):
            return None
        rtol, checks = self._tolerance.rtol, self._settings.verify
        # suggest the largest tolerance of all outputs, because the recipe's `atol` is one value for all
        atol = max(
            float(self._tolerance.absolute(a.astype("float64")).max(initial=0.0))
            for a in self._expected
        )
        limits = (("verify.rtol", checks.rtol, rtol), ("verify.atol", checks.atol, atol))
        strict = [name for name, own, default in limits if own is not None and own < default]
        if not strict:
            return None
        fields = " and ".join(strict)
        verb = "is" if len(strict) == 1 else "are"
        default = f"rtol {rtol:g}, and for these outputs up to atol {atol:.2g}"
        return Fault(
            f"the model agrees with the reference within the default tolerance ({default}), and {fields} of the recipe "
            f"{verb} stricter",
            f"raise {fields} or leave {'it' if verb == 'is' else 'them'} out",
        )

    def _find_model_fault(self) -> Fault | None:
        """Return a fault if the model amplifies roundings of its inputs beyond the tolerance."""
        names = [spec.name for spec in (*self._model.outputs, *self._index_inputs)]
        comparisons = {
            name: compare_inner(nudged, expected, self._tolerance)
            for name, nudged, expected in zip(names, self._nudged, self._expected, strict=True)
        }
        if not (mismatches := verdict_text.list_mismatches(comparisons, "before")):
            return None
        reference = self._frontend.REFERENCE.name
        return Fault(
            f"the model enlarges the smallest differences, so that its outputs cannot distinguish a right library from a wrong "
            f"one: if its inputs change by {_NUDGE:.0e} of their largest values, {reference} itself gives other outputs "
            f"({mismatches[0]})",
            "verify with realistic data (`verify.data`) and trained weights; or "
            "set verify.rtol and verify.atol to what the model can keep",
        )

    def _run_reference(self) -> tuple[Feed, list[Array], list[Array]]:
        """Return the first batch, and the reference's results for it and for slightly changed inputs.

        Each result holds the outputs, then the inputs of argmax-like operators.
        """
        model = self._model._replace(tensors=(*self._model.tensors, *self._index_inputs))
        names = [spec.name for spec in (*model.outputs, *self._index_inputs)]
        candidates = inputs.load_samples(
            self._signature, self._settings, self._context.inputs.get(DATA), self._model.operands
        )
        bound = self._model.bound
        with reference_run.open_reference(self._settings, model, self._context) as reference:

            def run(feed: Feed) -> dict[str, Array]:
                return reference.run({**feed, **bound})

            if self._at is not None:
                sized = reference_run.run_at(
                    run, dict(self._at), self._model, self._settings, self._tolerance
                )
                feed, outputs = sized.feed, sized.outputs
            else:
                results = inputs.run_reference_on(run, candidates, names, self._tolerance)
                feed, outputs = results.samples.batches[0], results.outputs[0]
            nudged = run(_nudge(feed))
        return feed, [outputs[name] for name in names], [nudged[name] for name in names]

    def _agrees(self, outputs: Sequence[Array], tolerance: Tolerance | None = None) -> bool:
        pairs = zip(outputs, self._expected, strict=False)
        return all(compare_inner(a, e, tolerance or self._tolerance)["passed"] for a, e in pairs)

    # ---------------------------------------------------------------- kernels

    def _describe_kernel(self, check: KernelCheck, wrong: WrongKernel) -> Fault:
        calls = find_kernel_nodes(check.model.kernel_nodes, self._nodes).get(wrong.name, ())
        nodes = calls_text(calls[wrong.call : wrong.call + 1] or calls)
        kernel = f"the kernel {wrong.name} ({nodes})" if nodes else f"the kernel {wrong.name}"
        finding = f"{kernel} computes wrong values"
        if wrong.rule != TUNED:
            rule = wrong.rule or "none"
            return Fault(
                f"{finding} as the schedule rule {rule} schedules it: {wrong.mismatch}", _REPORT
            )
        workload = check.workload(wrong.name)
        chosen = json.loads(self._context.inputs["pick_best/chosen.json"].read_text())
        trial = trial_id(chosen[workload])
        by_record = f"{finding} with the schedule of trial {trial[:12]} of workload {workload[:12]}"
        if not wrong.is_rule_right:
            return Fault(
                f"{by_record}, and also with the schedule of the rules: {wrong.mismatch}", _REPORT
            )
        return Fault(f"{by_record}, and right ones without: {wrong.mismatch}", "", workload, trial)

    # ---------------------------------------------------------------- import and lowering

    def _find_import_fault(self) -> Fault | None:
        """Return a fault if the imported model is wrong with TVM's own rules, or cannot be run with them."""
        if own := list_tvmflow_operators(ir.load_module(self._context.inputs["import/model.json"])):
            return Fault(
                f"the import cannot be compared separately, because TVM's own rules have no kernels for "
                f"{names_text(own)}",
                "build the recipe for the target `host`: if that is rejected, too, " + _REPORT,
            )
        if self._agrees(self._run_imported(self._load())):
            return None
        index = self._find_first_tensor(self._run_imported)
        return Fault(
            f"the import differs from {self._frontend.REFERENCE.name} already, before any pass of the lowering{index}",
            f"see the imported module with {_DUMP}, and {_REPORT}",
        )

    def _find_lowering_fault(self) -> Fault:
        index = self._find_first_tensor(self._run_lowered)
        return Fault(
            f"the imported model and each kernel's schedule are right: the fault is in a pass of the lowering{index}",
            f"see the module after each pass with {_DUMP}, and {_REPORT}",
        )

    def _load(self, tensors: Sequence[str] | None = None) -> LoadedModel:
        """Import the model again with additional outputs, by default the inputs of argmax-like operators."""
        model = self._model
        names = [spec.name for spec in self._index_inputs] if tensors is None else tensors
        return model.load(self._settings.model["kind"], names)

    def _run_imported(self, loaded: LoadedModel) -> list[Array]:
        weights = list(loaded.params.values())
        return self._run(loaded, ScheduledModel(loaded.mod, weights, make_target(_HOST)))

    def _run_lowered(self, loaded: LoadedModel) -> list[Array]:
        build, options = self._build, self._settings.lowering
        assert build is not None and options is not None
        choices = read_choices(self._context.inputs)
        lowered = lower(loaded.mod, make_target(build.target), options, choices=choices)
        scheduled = lowered.schedule_untuned(loaded.params, build.target, build.schedules)
        return self._run(loaded, scheduled)

    def _run(self, loaded: LoadedModel, model: ScheduledModel) -> list[Array]:
        """Compile a model for TVM's virtual machine, and return its outputs, then its intermediate tensors."""
        machine = relax.VirtualMachine(model.compile(), tvm.cpu())
        feed = [tvm.runtime.tensor(self._feed[spec.name]) for spec in loaded.inputs]
        return [result.numpy() for result in list_tensors(machine["main"](*feed))]

    def _find_first_tensor(self, run: Callable[[LoadedModel], list[Array]]) -> str:
        """Return the first wrong tensor with its node, or why it is unknown, as the end of a sentence."""
        nodes = self._frontend.list_tensors(self._model.files)
        if not nodes:
            return f" (tensors inside {self._frontend.NAME} models are not compared)"
        try:
            first = self._narrow(list(nodes), run)
        except Exception as error:
            _log.debug("intermediate tensors cannot be compared", exc_info=True)
            return f" (its intermediate tensors cannot be compared: {last_line(error)})"
        if not first:
            return f"; each of {count_text(len(nodes), 'intermediate tensor')} is right where it is an output"
        return f"; the first tensor that differs is '{first}' of node {nodes[first]}"

    def _narrow(self, names: list[str], run: Callable[[LoadedModel], list[Array]]) -> str:
        """Return the first wrong tensor in the order of computation; an empty string if all are right.

        Each round builds once and compares several tensors, so the number of builds grows logarithmically.
        """
        first = ""
        while names:
            step = -(-len(names) // _TENSORS_AT_ONCE)
            indices = range(step - 1, len(names), step)
            wrong = self._list_wrong([names[index] for index in indices], run)
            index = next((index for index in indices if names[index] in wrong), None)
            if index is not None:
                first, names = names[index], names[max(0, index - step + 1) : index]
            elif first:
                break
            else:
                names = names[indices[-1] + 1 :]
        return first

    def _list_wrong(
        self, names: Sequence[str], run: Callable[[LoadedModel], list[Array]]
    ) -> set[str]:
        loaded = self._load(names)
        computed = run(loaded)[len(loaded.outputs) :]
        model = self._model._replace(tensors=loaded.tensors)
        with reference_run.open_reference(self._settings, model, self._context) as reference:
            expected = reference.run({**self._feed, **model.bound})
        return {
            spec.name
            for spec, array in zip(loaded.tensors, computed, strict=True)
            if not compare_inner(array, expected[spec.name], self._tolerance)["passed"]
        }
